"""`localllm run` without a model, at a real terminal, beside a real hub: it asks, downloads after a yes, and runs."""

import json
import os
import pty
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from localllm.cli import main
from tests.hub.local_hub import LocalHub

ROOT = Path(__file__).parent.parent.parent
SIZES = (
    "architectures", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "vocab_size", "head_dim",
)  # fmt: skip


@pytest.fixture(autouse=True)
def _own_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in ("CONFIG", "DATA", "CACHE"):
        monkeypatch.setenv(f"XDG_{kind}_HOME", str(tmp_path / kind.lower()))
    for name in ("LOCALLLM_MODEL", "LOCALLLM_CONFIG"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def suggested(hub: LocalHub, tiny_llama_path: Path, tmp_path: Path) -> LocalHub:
    """The hub with a tiny model, the only one on the list of suggestions."""
    hub.add_repo("my/tiny", tiny_llama_path)
    config = json.loads((tiny_llama_path / "config.json").read_text())
    sizes = {name: config[name] for name in SIZES if name in config} | {"max_position_embeddings": 8192}
    fields = ", ".join(f"{name} = {json.dumps(value)}" for name, value in sizes.items())
    folder = tmp_path / "config" / "localllm"
    folder.mkdir(parents=True)
    size = (tiny_llama_path / "model.safetensors").stat().st_size
    (folder / "config.toml").write_text(
        'max_model_len = 256\n[[picks.pick]]\nname = "my/tiny"\ntitle = "Tiny"\n'
        f"bytes = {size}\nparameters = {size // 2}\nconfig = {{ {fields} }}\n"
    )
    return hub


class Terminal:
    """A command in a terminal of its own."""

    def __init__(self, *words: str) -> None:
        self._ours, theirs = pty.openpty()
        command = [sys.executable, "-m", "localllm", *words]
        environ = os.environ | {"OMP_NUM_THREADS": "1", "TERM": "xterm", "PYTHONPATH": str(ROOT)}
        self.process = subprocess.Popen(command, cwd=ROOT, env=environ, stdin=theirs, stdout=theirs, stderr=theirs)
        os.close(theirs)
        self.text = ""

    def wait_for(self, words: str, limit_s: float = 120.0) -> None:
        end_s = time.monotonic() + limit_s
        while words not in self.text:
            assert time.monotonic() < end_s, self.text
            if select.select([self._ours], [], [], 1.0)[0]:
                piece = self._read()
                assert piece, f"it ended without {words!r}: {self.text}"
                self.text += piece

    def type(self, words: str) -> None:
        os.write(self._ours, words.encode())

    def end(self) -> int:
        """Read to the end; the exit code."""
        while piece := self._read():
            self.text += piece
        return self.process.wait(60)

    def _read(self) -> str:
        with suppress(OSError):  # the other side was closed
            return os.read(self._ours, 65536).decode(errors="replace")
        return ""

    def close(self) -> None:
        self.process.kill()
        self.process.wait(10)
        os.close(self._ours)


@contextmanager
def terminal(*words: str) -> Iterator[Terminal]:
    opened = Terminal(*words)
    try:
        yield opened
    finally:
        opened.close()


def test_a_yes_downloads_the_model_and_starts_a_chat(suggested: LocalHub) -> None:
    with terminal("run", "--temperature", "0", "--max-tokens", "4") as shown:
        shown.wait_for("[y/n]")
        assert "This one fits: Tiny, my/tiny" in shown.text
        assert "to download" in shown.text
        assert suggested.sent == []  # no request before the answer
        shown.type("perhaps\n")
        shown.wait_for("[y/n] perhaps\r\nDownload and run it? [y/n]")
        assert suggested.sent == []
        shown.type("y\n")
        shown.wait_for(">>> ")
        assert "my/tiny is complete" in shown.text
        shown.type("hello\n")
        shown.wait_for(">>> ", 60.0)
        shown.type("/exit\n")
        assert shown.end() == 0
    assert any("model.safetensors" in str(each) for each in suggested.sent)
    with terminal("run", "--max-tokens", "4") as again:  # now it is here, and the hub is not asked
        asked = len(suggested.sent)
        again.wait_for("Run it? [y/n]")
        assert "is on this machine" in again.text
        again.type("n\n")
        assert again.end() == 0
        assert len(suggested.sent) == asked


def test_a_no_and_the_end_of_input_download_nothing(suggested: LocalHub) -> None:
    for typed in ("n\n", "\x04"):
        with terminal("run") as shown:
            shown.wait_for("[y/n]")
            shown.type(typed)
            assert shown.end() == 0
            assert "Later: localllm run my/tiny" in shown.text
    assert suggested.sent == []


def test_without_a_terminal_the_command_is_printed(suggested: LocalHub, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run"]) != 0
    assert "Try: localllm run my/tiny" in capsys.readouterr().err
    assert suggested.sent == []


def test_offline_a_file_is_named(
    suggested: LocalHub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert main(["run"]) != 0
    said = capsys.readouterr().err
    assert "downloads are disabled" in said
    assert "localllm run /path/to/file.gguf" in said
    assert suggested.sent == []


def test_a_network_that_fails_after_the_yes_names_a_file(suggested: LocalHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with terminal("run") as shown:
        shown.wait_for("[y/n]")
        shown.type("y\n")
        assert shown.end() != 0
        assert "localllm run /path/to/file.gguf" in shown.text


def test_a_model_of_the_config_file_is_run_without_a_question(
    suggested: LocalHub, tiny_llama_path: Path, tmp_path: Path
) -> None:
    file = tmp_path / "config" / "localllm" / "config.toml"
    file.write_text(f'model = "{tiny_llama_path}"\n' + file.read_text())
    with terminal("run", "--max-tokens", "4") as shown:
        shown.wait_for(">>> ")
        shown.type("/exit\n")
        assert shown.end() == 0
        assert "[y/n]" not in shown.text
    assert suggested.sent == []


def test_a_machine_without_room_is_told_so(
    suggested: LocalHub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config" / "localllm" / "config.toml").write_text("[picks]\npick = []\n")
    assert main(["run"]) != 0
    said = capsys.readouterr().err
    assert "no suggested one fits" in said
    assert "localllm run demo" in said
