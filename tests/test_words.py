"""The words of the package and its documentation: plain sentences, and names of files that exist."""

from __future__ import annotations

import ast
import io
import re
import subprocess
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from scripts.layout import PACKAGE, ROOT, modules, tree_of

THIS = Path(__file__)  # quotes what it refuses
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
    code = [path for folder in ("scripts", "tests") for path in (ROOT / folder).rglob("*.py") if path != THIS]
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
        for node in ast.walk(tree_of(path)):
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


TITLES_SINCE = "795cf562"  # the first commit whose successors' titles are held to the rules


def titles() -> list[str]:
    """Return the titles of the commits since `TITLES_SINCE`; none where git or that commit is missing."""
    command = ["git", "-C", f"{ROOT}", "log", "--format=%s", f"{TITLES_SINCE}.."]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    except (FileNotFoundError, subprocess.CalledProcessError):
        return []


def is_bad_title(title: str) -> bool:
    return title.startswith("Merge branch") or title.endswith(".")


def _is_text(node: ast.Expr) -> bool:
    return isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def test_no_text_says_is_no() -> None:
    assert not {str(path): found for path, text in texts() if (found := says_is_no(text))}


@pytest.mark.parametrize("text", ["A LoRA is no model.", "These are\n    no scales.", "This IS NO request id."])
def test_is_no_is_found(text: str) -> None:
    assert says_is_no(text)


@pytest.mark.parametrize("text", ["There is\n no GPU.", "It is no longer used.", "An adapter is not a model."])
def test_is_no_is_not_found_in_plain_words(text: str) -> None:
    assert not says_is_no(text)


def test_titles_of_commits_are_plain() -> None:
    assert not [title for title in titles() if is_bad_title(title)]


@pytest.mark.parametrize("title", ["Merge branch 'x' into y", "Refuse min_tokens above max_tokens."])
def test_a_bad_title_is_found(title: str) -> None:
    assert is_bad_title(title)
    assert not is_bad_title("Refuse min_tokens above max_tokens at admission")


def test_docstrings_begin_with_a_verb_or_a_noun() -> None:
    found = [(name, text.partition("\n")[0]) for name, text in docstrings() if begins_with_half_a_sentence(text)]
    assert not found


@pytest.mark.parametrize("text", ["Of a result that has a pick.", "With what a profile says.", "The same, sorted."])
def test_half_a_sentence_is_found(text: str) -> None:
    assert begins_with_half_a_sentence(text)


def test_mentioned_files_exist() -> None:
    assert not {str(path): found for path, text in texts() if (found := unknown_files(path, explanations(path, text)))}


@pytest.mark.parametrize("text", ["See nowhere.py.", "in engine/nowhere.py,", "`nowhere.py`"])
def test_a_mention_of_a_file_that_does_not_exist_is_found(text: str) -> None:
    assert unknown_files(PACKAGE / "units.py", text)
    assert unknown_files(ROOT / "README.md", text)
