"""The texts of the repository, and what their sentences are held to: tests/test_words.py, scripts/count_layout."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from scripts.layout import PACKAGE, ROOT, modules, nodes_of

QUOTING = (Path(__file__), ROOT / "tests/test_words.py")  # these quote what is refused
SUFFIXES = (".py", ".md", ".html", ".css", ".js")
DATED = ("CHANGELOG.md", "docs/lab.md", "docs/decisions")  # these keep the words and the files of their day
WORDS = """
    about also among and as at because beside besides between but by for from how if in instead into like nor not of on
    or otherwise since so than that to until unless upon what whatever when where whether which while who whom whose why
    with within without"""
HALF_SENTENCES = frozenset(WORDS.split())
"""Words that begin half a sentence, whose other half would be the signature."""
IS_NO = re.compile(r"(?<!\bthere )\b(?:is|are) no (?!longer\b|more\b)", re.IGNORECASE)
MENTION = re.compile(r"(?<![\w/.*-])((?:[\w-]+/)*[a-z_]\w*\.py)\b")


def texts() -> Iterator[tuple[Path, str]]:
    """Yield every text that a reader meets: code, tests, templates, style sheets, pages; not the dated ones."""
    code = [path for folder in ("scripts", "tests") for path in (ROOT / folder).rglob("*.py") if path not in QUOTING]
    for path in sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *PACKAGE.rglob("*.*"), *code]):
        if path.suffix in SUFFIXES and not path.relative_to(ROOT).as_posix().startswith(DATED):
            yield path, path.read_text(encoding="utf-8")


def says_is_no(text: str) -> list[str]:
    """Return the places with "X is no Y". "There is no Y" is plain English, and a rule may quote the phrase."""
    joined = " ".join(text.replace('"X is no Y"', "").split())
    return [joined[max(0, found.start() - 40) : found.end() + 20] for found in IS_NO.finditer(joined)]


def begins_with_half_a_sentence(docstring: str) -> bool:
    first, second = (word.strip(".,:;").lower() for word in [*docstring.split(), "", ""][:2])
    return first in HALF_SENTENCES or (first, second) == ("the", "same")


def docstrings() -> Iterator[tuple[str, str]]:
    """Yield the name and the docstring of every module, class and function that has one."""
    for module, path in modules().items():
        for node in nodes_of(path):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                text = ast.get_docstring(node)
                if text:
                    yield f"{module}.{getattr(node, 'name', '')}", text


def explanations(path: Path, text: str) -> str:
    """Return what explains: comments and docstrings of code, all of a page except the targets of its links."""
    if path.suffix != ".py":
        return re.sub(r"\]\([^)]*\)", "]", text)
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    comments = [token.string for token in tokens if token.type == tokenize.COMMENT]
    strings = [node.value.value for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Expr) and _is_text(node)]
    return "\n".join(comments + strings)


def unknown_files(path: Path, text: str) -> list[str]:
    """Return the mentioned Python files that do not exist.

    They are looked up in the text's folder, in those above it, in the package and in models/; the end of a path is
    enough within the same folder at the top of the package, and for pages within the repository.
    """
    folders = [*path.parents, PACKAGE, PACKAGE / "models"]
    missing = [name for name in MENTION.findall(text) if not any((folder / name).is_file() for folder in folders)]
    is_inside = path.is_relative_to(PACKAGE)
    inside = PACKAGE / path.relative_to(PACKAGE).parts[0] if is_inside and path.suffix != ".md" else ROOT
    return [name for name in missing if not any(f"{each}".endswith(f"/{name}") for each in python_files(inside))]


@cache
def python_files(folder: Path) -> list[Path]:
    """Return the Python files of the repository's own folders that are below `folder`."""
    own = [ROOT / name for name in ("localllm", "scripts", "tests", "docs")]
    return [path for top in own for path in top.rglob("*.py") if path.is_relative_to(folder)]


def _is_text(node: ast.Expr) -> bool:
    return isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
