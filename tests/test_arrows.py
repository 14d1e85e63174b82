"""The house stays a house: an import only ever points down, and the policy rooms stay free of torch."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

FLOORS = [
    {"__init__", "errors", "units", "config", "files", "logs", "machine"},
    {"kernels"},
    {"models", "text"},
    {"engine"},
    {"runner"},
    {"serving", "llm"},
    {"tuning"},
    {"web"},
    {"up", "cli", "__main__"},
]  # fmt: skip
FLOOR = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
PACKAGE = Path(__file__).parent.parent / "localllm"
# Names handed out on first touch; nothing is imported before.
LAZY = {("__init__", "engine"), ("__init__", "llm"), ("__init__", "text")}


def package_imports() -> Iterator[tuple[str, str, str]]:
    """(file, its room, imported module) for every import in the package, those inside functions included."""
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{path}: relative import"
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            else:
                continue
            for name in names:
                yield str(path.relative_to(PACKAGE.parent)), parts[0], name


IMPORTS = list(package_imports())


def test_arrows_point_down():
    for path, room, imported in IMPORTS:
        top, *rest = imported.split(".")
        if top != "localllm":
            continue
        target = rest[0] if rest and rest[0] in FLOOR else "__init__"
        if (room, target) not in LAZY:
            assert FLOOR[target] <= FLOOR[room], f"{path} reaches up to {imported}"


def test_every_room_has_a_floor():
    assert {room for _, room, _ in IMPORTS} <= FLOOR.keys()


@pytest.mark.parametrize("room", ["engine", "text", "config", "files", "logs", "errors", "units"])
def test_policy_rooms_are_free_of_torch(room):
    heavy = {"torch", "triton", "transformers"} - ({"transformers"} if room == "text" else set())
    found = [(path, name) for path, own, name in IMPORTS if own == room and name.split(".")[0] in heavy]
    assert not found


def test_a_dialect_reads_no_other_dialect():
    dialect = re.compile(r"web[/.]api[/.](openai|responses|anthropic|ollama)\b")
    for path, _, imported in IMPORTS:
        own, other = dialect.search(path), dialect.search(imported)
        assert not (own and other) or own[1] == other[1], f"{path} reads {imported}"


def test_there_is_no_cycle_between_modules():
    """Any file can be read alone: at import time no module needs itself."""
    files = {
        ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__"): path
        for path in PACKAGE.rglob("*.py")
    }
    graph: dict[str, set[str]] = {module: set() for module in files}
    for module, path in files.items():
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("localllm"):
                for alias in node.names:  # a module of that name, or a name in the module
                    imported = f"{node.module}.{alias.name}"
                    graph[module].add(imported if imported in files else node.module)
    done: set[str] = set()

    def visit(module: str, trail: tuple[str, ...]) -> None:
        assert module not in trail, " -> ".join((*trail, module))
        if module in done:
            return
        for imported in graph[module] & graph.keys() - {module}:
            visit(imported, (*trail, module))
        done.add(module)

    for module in graph:
        visit(module, ())
