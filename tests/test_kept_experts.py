"""The files of experts on disk: listed, and deleted only if no process reads them and localllm wrote them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from localllm.cli import main
from localllm.files.folders import experts_folder
from localllm.files.record_file import BLOCK, RecordFile, delete_unused, kept_records, write_records
from localllm.web.pages.settings.storage import _experts

pytestmark = pytest.mark.skipif(not hasattr(os, "preadv"), reason="no preadv")


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def write(name: str) -> Path:
    path = experts_folder() / name
    write_records(path, "digest", {"tensors": []}, [5000, 100], [[bytes(5000)], [bytes(100)]])
    return path


def foreign(name: str, content: bytes) -> Path:
    path = experts_folder() / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def test_only_own_files_that_nobody_reads_are_deleted() -> None:
    assert kept_records(experts_folder()) == []
    used, unused = write("used.experts"), write("unused.experts")
    others = [
        foreign("notes.txt", b"mine"), foreign("model.experts", b"not a file of records"),
        foreign(".0123456789abcdef", b"something else"), foreign(".zeros", bytes(BLOCK)),
    ]  # fmt: skip
    unfinished = foreign(".00112233445566ff", bytes(2 * BLOCK))
    link = experts_folder() / "link.experts"
    link.symlink_to(unused)
    reader = RecordFile(used, "digest")
    os.utime(unused, (0, 0))
    os.utime(unfinished, (1, 1))
    found = kept_records(experts_folder())
    assert [(each.path, each.is_used, each.is_whole) for each in found] == [
        (used, True, True), (unfinished, False, False), (unused, False, True),
    ]  # fmt: skip
    assert {each.path for each in delete_unused(experts_folder())} == {unused, unfinished}
    assert used.exists()
    assert link.is_symlink()
    assert all(other.exists() for other in others)
    into = memoryview(bytearray(2 * BLOCK))
    if not reader.is_direct:
        reader.start(0, into)[0].result()
    reader.close()
    assert [each.path for each in delete_unused(experts_folder())] == [used]


def test_a_file_that_is_written_is_in_use_until_its_writer_ends() -> None:
    seen = []

    def records() -> object:
        seen.extend(kept_records(experts_folder()))
        assert delete_unused(experts_folder()) == []
        yield [bytes(100)]

    write_records(experts_folder() / "a.experts", "digest", {}, [100], records())  # type: ignore[arg-type]
    assert [(each.is_used, each.is_whole) for each in seen] == [(True, False)]
    assert [(each.is_used, each.is_whole) for each in kept_records(experts_folder())] == [(False, True)]


def test_another_process_keeps_its_file() -> None:
    path = write("other.experts")
    code = "import sys; from localllm.files.record_file import RecordFile; from pathlib import Path\n"
    code += "kept = RecordFile(Path(sys.argv[1]), 'digest'); print('open', flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", code, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "open\n"
        assert delete_unused(experts_folder()) == []
        child.communicate("")
    assert [each.path for each in delete_unused(experts_folder())] == [path]


def test_the_verb_lists_and_clears(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["experts"]) == 0
    assert "No experts are kept in" in capsys.readouterr().out
    used, unused = write("used.experts"), write("unused.experts")
    reader = RecordFile(used, "digest")
    assert main(["experts", "list", "--json"]) == 0
    facts = {each["file"]: each for each in json.loads(capsys.readouterr().out)}
    assert (facts["used.experts"]["in_use"], facts["unused.experts"]["in_use"]) == (True, False)
    assert facts["unused.experts"]["bytes"] == unused.stat().st_size
    assert main(["experts", "clear", "used.experts"]) != 0
    assert "is in use" in capsys.readouterr().err
    assert main(["experts", "clear", "none.experts"]) != 0
    assert main(["experts", "list", "used.experts"]) != 0
    capsys.readouterr()
    assert main(["experts", "clear"]) == 0
    assert capsys.readouterr().out.endswith("KiB. 1 in use is kept.\n")
    (row,) = _experts(experts_folder())
    assert (row.delete, row.delete_url, row.size_bytes) == ("unload the model", "", used.stat().st_size)
    reader.close()
    (row,) = _experts(experts_folder())
    assert (row.delete, row.delete_url) == ("Delete unused", "/settings/experts/delete")
    assert main(["experts", "clear", "used.experts"]) == 0
    assert _experts(experts_folder()) == []
