"""Imports point one way, no two modules import each other, and scheduling stays free of torch."""

import re

import pytest

from scripts.layout import ORDER, PACKAGE, cycles, imported_names, imports, modules, place_of


def test_every_module_has_a_place_in_the_order() -> None:
    assert {name for name in modules() if place_of(name) is None} == {"localllm.models", "localllm.web"}
    assert len(ORDER) == len(set(ORDER))
    assert not [name for name in ORDER if not ((PACKAGE / name).is_dir() or (PACKAGE / f"{name}.py").is_file())]


@pytest.mark.parametrize("name", ORDER)
def test_imports_point_down(name: str) -> None:
    above = ORDER[ORDER.index(name) + 1 :]
    up = [each for each in imports() if place_of(each.importer) == name and place_of(each.imported) in (None, *above)]
    assert not up


def test_no_modules_import_each_other() -> None:
    """Imports inside functions and for type checkers count."""
    assert not list(cycles())


@pytest.mark.parametrize("place", ["engine", "text", "config", "files", "logs", "errors", "units"])
def test_policy_is_free_of_torch(place: str) -> None:
    heavy = {"torch", "triton", "transformers"} - ({"transformers"} if place == "text" else set())
    found = [
        (module, name)
        for module, path in modules().items()
        for name, _ in imported_names(path)
        if place_of(module) == place and name.split(".")[0] in heavy
    ]
    assert not found


def test_a_dialect_imports_no_other_dialect() -> None:
    dialect = re.compile(r"localllm\.web\.api\.(openai|responses|anthropic|ollama)\b")
    for each in imports():
        own, other = dialect.match(each.importer), dialect.match(each.imported)
        assert not (own and other) or own[1] == other[1], each
