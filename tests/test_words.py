"""The words of the package and its documentation: plain sentences, and names of files that exist."""

import subprocess

import pytest

from scripts.layout import PACKAGE, ROOT
from scripts.words import begins_with_half_a_sentence, docstrings, explanations, says_is_no, texts, unknown_files

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
    suspects = [(path, text) for path, text in texts() if unknown_files(path, text)]
    assert not {str(path): found for path, text in suspects if (found := unknown_files(path, explanations(path, text)))}


@pytest.mark.parametrize("text", ["See nowhere.py.", "in engine/nowhere.py,", "`nowhere.py`"])
def test_a_mention_of_a_file_that_does_not_exist_is_found(text: str) -> None:
    assert unknown_files(PACKAGE / "units.py", text)
    assert unknown_files(ROOT / "README.md", text)
