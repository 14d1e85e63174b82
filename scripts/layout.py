"""The layout of the package: its folders and modules in the order of their imports, and its import graph.

`ORDER` is the only list: tests/test_arrows.py holds every import to it, and scripts/make_docs writes the maps of
README.md and CONTRIBUTING.md from it, with the first sentence of each docstring.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "localllm"

ORDER = (
    "errors", "units", "terminal", "version", "files", "config", "machine", "logs", "media",
    "kernels",
    "models/inputs", "models/prompt_embeds", "models/spec", "models/families", "models/formats", "models/layers",
    "models/weights", "models/decoder", "models/transformers_backend", "models/vision", "models/read_spec",
    "models/loader", "models/encoders", "models/drafters",
    "models/fit", "models/library",
    "text",
    "engine",
    "runner",
    "ranks",
    "mcp",
    "serving", "fleet", "llm",
    "tuning",
    "web/shape", "web/errors", "web/watchdog", "web/activity", "web/access", "web/api", "web/metrics", "web/tracing",
    "web/pages/frame",
    "web/pages/chat", "web/pages/dashboard", "web/pages/library", "web/pages/logs", "web/pages/playground",
    "web/pages/settings", "web/pages/tune", "web/pages",
    "web/app",
    "setup", "up", "cli", "__init__", "__main__",
)  # fmt: skip
"""Folders and modules of the package, lowest first. Each imports only itself and what is before it, also inside
functions and for type checkers. `models/` and `web/` themselves have no place: nothing imports their `__init__.py`.
What is not listed has the place of its folder, as a new page has that of `web/pages`."""


@dataclass(frozen=True, slots=True)
class Import:
    """One imported module or name of the package."""

    importer: str  # module, e.g. localllm.engine.loop
    imported: str
    line: int


@cache
def modules() -> dict[str, Path]:
    """Return every module of the package, by its dotted name."""
    return {_dotted(path): path for path in sorted(PACKAGE.rglob("*.py"))}


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def nodes_of(path: Path) -> tuple[ast.AST, ...]:
    """Return all nodes of a module: counts ask for them again and again."""
    return tuple(ast.walk(tree_of(path)))


@cache
def imports() -> tuple[Import, ...]:
    """Return every import of the package by the package: at the top, inside functions, and for type checkers."""
    found = ((name, imported, line) for name, path in modules().items() for imported, line in imported_names(path))
    return tuple(
        Import(name, imported if imported in modules() else imported.rpartition(".")[0], line)
        for name, imported, line in found
        if imported.split(".")[0] == PACKAGE.name
    )


@cache
def imported_names(path: Path) -> tuple[tuple[str, int], ...]:
    """Return each imported name, dotted, with its line; those of other packages too."""
    found: list[tuple[str, int]] = []
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            found += ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            found += ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)
    return tuple(found)


@cache
def place_of(module: str) -> str | None:
    """Return the entry of `ORDER` that the module belongs to; None if it has none."""
    parts = module.split(".")[1:] or ["__init__"]
    names = ("/".join(parts[:length]) for length in range(len(parts), 0, -1))
    return next((name for name in names if name in ORDER), None)


def cycles() -> list[set[str]]:
    """Return the groups of modules that import each other, directly or through others (Tarjan's algorithm)."""
    graph: dict[str, list[str]] = {name: [] for name in modules()}
    for each in imports():
        if each.importer != each.imported:
            graph[each.importer].append(each.imported)
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[set[str]] = []

    def visit(module: str) -> None:
        index[module] = low[module] = len(index)
        stack.append(module)
        for imported in graph[module]:
            if imported not in index:
                visit(imported)
            if imported in stack:
                low[module] = min(low[module], low[imported])
        if low[module] == index[module]:
            position = stack.index(module)
            if len(stack) - position > 1:
                found.append(set(stack[position:]))
            del stack[position:]

    for module in graph:
        if module not in index:
            visit(module)
    return found


def sentence_of(name: str) -> str:
    """Return the first sentence of the docstring of a folder or a module, without the line breaks."""
    folder = PACKAGE / name
    text = ast.get_docstring(tree_of(folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py"))) or ""
    paragraph = " ".join(text.partition("\n\n")[0].split())
    return re.split(r"(?<=[.:])\s(?=[A-Z])", paragraph)[0]


def short_map() -> str:
    """Return README.md's table: the folders and modules at the top of the package, highest first."""
    names = dict.fromkeys(name.partition("/")[0] for name in reversed(ORDER))
    return _table(("in `localllm/`", "what it is"), [(_shown(name), sentence_of(name)) for name in names])


def full_map() -> str:
    """Return CONTRIBUTING.md's table: `ORDER` from its end, with its numbers."""
    rows = [(str(number), _shown(name), sentence_of(name)) for number, name in enumerate(ORDER, 1)]
    return _table(("", "in `localllm/`", "what it is"), rows[::-1])


def with_map(text: str, table: str) -> str:
    """Return a page with the table between its two markers."""
    start, end = "<!-- The map, written by scripts/make_docs. -->", "<!-- The end of the map. -->"
    before, _, rest = text.partition(start)
    assert rest, "the page has no marker for the map"
    return f"{before}{start}\n\n{table}\n\n{end}{rest.partition(end)[2]}"


def pages() -> dict[str, str]:
    """Return the text of README.md and CONTRIBUTING.md, with their maps as they should be."""
    tables = {"README.md": short_map(), "CONTRIBUTING.md": full_map()}
    return {name: with_map((ROOT / name).read_text(encoding="utf-8"), table) for name, table in tables.items()}


def _dotted(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def _shown(name: str) -> str:
    return f"`{name}/`" if (PACKAGE / name).is_dir() else f"`{name}.py`"


def _table(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [header, tuple("---" for _ in header), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
