"""`localllm run-batch`: in this process, and through a server that has the model."""

import io
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from localllm.cli import main
from tests.web.child_server import ChildServer

LINES = [
    {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions",
     "body": {"model": "demo", "max_tokens": 3, "messages": [{"role": "user", "content": "hi"}]}},
    "not json",
    {"custom_id": "b", "method": "POST", "url": "/v1/completions",
     "body": {"model": "demo", "max_tokens": 2, "prompt": "hi"}},
    {"custom_id": "c", "method": "POST", "url": "/v1/chat/completions", "body": {"model": "none", "messages": []}},
]  # fmt: skip


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    path = tmp_path / "in.jsonl"
    path.write_text("\n".join(each if isinstance(each, str) else json.dumps(each) for each in LINES))
    return path


def check(written: str) -> None:
    answers: list[dict[str, Any]] = [json.loads(line) for line in written.splitlines()]
    assert [each["custom_id"] for each in answers] == ["a", None, "b", "c"], "in the order of the requests"
    assert answers[0]["response"]["body"]["usage"]["completion_tokens"] == 3
    assert answers[1]["error"]["code"] == "invalid_value"
    assert answers[2]["response"]["body"]["object"] == "text_completion"
    assert answers[3]["response"]["status_code"] == 404


def test_in_this_process(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.jsonl"
    assert main(["run-batch", "-i", str(source), "-o", str(out), "--model", "demo", "--max-model-len", "256"]) == 0
    check(out.read_text())
    assert "4 of 4 requests, 2 with an error" in capsys.readouterr().err


def test_through_a_server_from_standard_input(
    source: Path, tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    with ChildServer(tmp_path, with_bystander=False) as server:
        monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(source.read_bytes())))
        assert main(["run-batch", "-i", "-", "-o", "-", "--model", "demo"]) == 0
        assert server.get("/v1/files").json()["data"] == [], "nothing is left behind"
    told = capfdbinary.readouterr()
    assert server.url.encode() in told.err
    check(told.out.decode())


def test_wrong_files_are_refused(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run-batch", "-i", "/no/such", "-o", "-", "--model", "demo"]) == 2
    assert "/no/such is not a file" in capsys.readouterr().err
