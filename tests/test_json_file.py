"""Whatever is wrong with a file of JSON is told as a checkpoint's fault, with the file's name."""

from pathlib import Path

import pytest

from localllm.errors import CorruptModel
from localllm.files.json_file import read_json, read_json_object, read_text

HOSTILE = {
    "nested without end": (b"[" * 200_000, "nested"),
    "no JSON": (b"{", "Expecting"),
    "empty": (b"", "Expecting"),
    "half a character": (b'{"a": "\xff"}', "decode"),
    "too long": (b'{"a": "' + b"x" * 3_000_000 + b'"}', "more than 1,048,576 bytes"),
    "a number without end": (b"1" * 100_000, "digits"),
    "a list": (b"[1]", "holds a list"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_is_wrong_is_told_with_the_name(name: str, tmp_path: Path) -> None:
    content, why = HOSTILE[name]
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(CorruptModel, match=r"config\.json") as error:
        read_json_object(tmp_path / "config.json", 2**20)
    assert why in str(error.value)


def test_what_cannot_be_opened_is_told_with_the_name(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "absent.json"):
        with pytest.raises(CorruptModel, match=str(path)):
            read_json(path)
    (tmp_path / "bad.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(CorruptModel, match="bad"):
        read_text(tmp_path / "bad.txt")
