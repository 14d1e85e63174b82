"""`localllm launch`: stand-in programs record what they get, and nothing is left behind."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from localllm import cli
from localllm.cli.borrowed_files import ABSENT, merged, parsed, undone
from localllm.cli.programs import PLACEHOLDERS, PROGRAMS
from localllm.machine.running_servers import running_servers
from localllm.models.library.catalog import resolve_model

KEY = "secret-key"
MODELS = [
    {"id": "embedder", "capabilities": ["embedding"]},
    {"id": "org/first", "context_length": 32768, "capabilities": ["completion", "tools", "vision"]},
    {"id": "second"},
]
STAND_IN = """#!{python}
import json, os, pathlib, sys, time
named = [word.split('"')[1] for word in sys.argv if word.startswith("model_catalog_json=")]
files = {{str(p): p.read_text() for p in map(pathlib.Path, {files!r} + named) if p.exists()}}
out = pathlib.Path({out!r})
out.with_suffix(".new").write_text(json.dumps(dict(argv=sys.argv[1:], environ=dict(os.environ), files=files)))
out.with_suffix(".new").replace(out)
{more}
"""


class Models(BaseHTTPRequestHandler):
    """A server that lists models, and needs a key if its `key` is set. Loading one gives it a context of 8,192 tokens,
    unless the key may not: then `refusal` is the code of the error."""

    def do_GET(self) -> None:
        made = self.server
        key = getattr(made, "key", None)
        known = key is None or self.headers.get("authorization") == f"Bearer {key}"
        listed: dict[str, Any] = {"data": getattr(made, "models", MODELS)}
        if "client_version" in self.path and getattr(made, "has_catalog", True):
            listed["models"] = [{"slug": "org/first"}]
        self.tell(200 if known else 401, listed if known else {"error": {"message": "No key."}})

    def do_POST(self) -> None:
        made = self.server
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if refusal := getattr(made, "refusal", None):
            self.tell(403, {"error": {"message": "Not with this key.", "code": refusal}})
            return
        name = asked["model"].rpartition("/")[2]
        made.models = [{"id": name, "context_length": 8192, "status": {"value": "loaded"}}]  # type: ignore[attr-defined]
        self.tell(200, {"name": name})

    def tell(self, status: int, body: dict[str, Any]) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[ThreadingHTTPServer]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Models) as made:
        threading.Thread(target=made.serve_forever, daemon=True).start()
        yield made
        made.shutdown()


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    home = tmp_path / "home"
    home.mkdir()
    (tmp_path / "bin").mkdir()
    for name in ("XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_CACHE_HOME", "XDG_RUNTIME_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    return home


def stand_in(tmp_path: Path, name: str, more: str = "") -> Path:
    """Write a program that records its arguments, variables and files. Return the file of the record."""
    program, out = PROGRAMS[name], tmp_path / "seen.json"
    files = [str(file.path) for file in program.files]
    path = tmp_path / "bin" / program.binary
    path.write_text(STAND_IN.format(python=sys.executable, files=files, out=str(out), more=more))
    path.chmod(0o755)
    return out


def url_of(server: ThreadingHTTPServer) -> str:
    return f"http://127.0.0.1:{server.server_address[1]}"


def launch(server: ThreadingHTTPServer, name: str, *words: str) -> int:
    return cli.main(["launch", name, "--url", url_of(server), *words])


def tree(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() if path.is_file() else b"" for path in folder.rglob("*")}


def words_of(seen: dict[str, Any]) -> str:
    own = {name: value for name, value in seen["environ"].items() if name not in os.environ}
    return json.dumps([seen["argv"], own, seen["files"]])


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_gets_the_server_and_the_model_and_leaves_nothing(
    name: str, tmp_path: Path, home: Path, server: ThreadingHTTPServer
) -> None:
    out, before = stand_in(tmp_path, name, "sys.exit(3)"), tree(home)
    assert launch(server, name, "--", "-p", "--model", "--", "x y") == 3
    seen = json.loads(out.read_text())
    assert seen["argv"][-5:] == ["-p", "--model", "--", "x y"][-5:] or seen["argv"][-4:] == [
        "-p",
        "--model",
        "--",
        "x y",
    ]
    told = words_of(seen)
    assert url_of(server) in told
    assert "org/first" in told
    for placeholder in PLACEHOLDERS:
        assert f"{{{placeholder}}}" not in told
    if name in ("claude", "codex", "opencode", "zed"):
        assert "32768" in told
    if name in ("opencode", "copilot", "vscode"):
        assert "8192" in told, "room for an answer: a quarter of the context"
    if name in ("copilot", "vscode"):
        assert "24576" in told, "the rest of the context is for the prompt"
    assert {path: data for path, data in tree(home).items() if not path.endswith("share/localllm")} == {
        **before,
        **{path: b"" for path in tree(home) if path.endswith((".local", ".local/share"))},
    }


def test_what_needs_an_unknown_context_is_left_out(tmp_path: Path, server: ThreadingHTTPServer) -> None:
    for name in ("claude", "codex", "opencode", "copilot"):
        out = stand_in(tmp_path, name)
        assert launch(server, name, "--model", "second") == 0
        told = words_of(json.loads(out.read_text()))
        assert "second" in told
        assert "None" not in told
        assert "null" not in told
        assert "COMPACT_WINDOW" not in told
        assert "model_context_window" not in told
        assert "MAX_PROMPT_TOKENS" not in told


@pytest.mark.parametrize("name", ["zed", "vscode"])
def test_a_file_that_needs_the_context_is_not_written_without_it(
    name: str, tmp_path: Path, server: ThreadingHTTPServer, capsys: pytest.CaptureFixture[str]
) -> None:
    out = stand_in(tmp_path, name)
    assert launch(server, name, "--model", "second") == 2
    assert "localllm load second" in capsys.readouterr().err
    assert not out.exists()


def test_a_model_is_loaded_first_so_that_the_context_is_the_served_one(
    tmp_path: Path, server: ThreadingHTTPServer
) -> None:
    out = stand_in(tmp_path, "claude")
    server.models = [{"id": "third", "context_length": 131072, "status": {"value": "unloaded"}}]  # type: ignore[attr-defined]
    assert launch(server, "claude") == 0
    assert json.loads(out.read_text())["environ"]["CLAUDE_CODE_AUTO_COMPACT_WINDOW"] == "8192"


def test_a_folder_is_loaded_and_used_under_its_name(tmp_path: Path, server: ThreadingHTTPServer) -> None:
    out = stand_in(tmp_path, "claude")
    assert launch(server, "claude", "--model", str(tmp_path / "made-here")) == 0
    assert json.loads(out.read_text())["environ"]["ANTHROPIC_MODEL"] == "made-here"


@pytest.mark.parametrize(("refusal", "code"), [("missing_scope", 0), ("model_does_not_fit", 1)])
def test_only_a_key_that_may_not_load_goes_on_without_loading(
    refusal: str, code: int, tmp_path: Path, server: ThreadingHTTPServer
) -> None:
    out = stand_in(tmp_path, "claude")
    server.models = [{"id": "third", "context_length": 131072, "status": {"value": "unloaded"}}]  # type: ignore[attr-defined]
    server.refusal = refusal  # type: ignore[attr-defined]
    assert launch(server, "claude") == code
    assert out.exists() == (code == 0)


@pytest.mark.parametrize("has_catalog", [True, False])
def test_codex_reads_the_servers_catalog_from_a_file_that_is_deleted(
    has_catalog: bool, tmp_path: Path, server: ThreadingHTTPServer
) -> None:
    out = stand_in(tmp_path, "codex")
    server.has_catalog = has_catalog  # type: ignore[attr-defined]
    assert launch(server, "codex") == 0
    files = json.loads(out.read_text())["files"]
    assert [json.loads(text)["models"] for text in files.values()] == [[{"slug": "org/first"}]] * has_catalog
    assert not any(Path(path).parent.exists() for path in files)


@pytest.mark.parametrize(
    ("model", "told"),
    [({"context_length": 2048}, "the context of small is 2,048"), ({"capabilities": ["completion"]}, "only talk")],
)
def test_a_model_that_is_too_small_for_the_program_is_named(
    model: dict[str, Any], told: str, tmp_path: Path, server: ThreadingHTTPServer, capsys: pytest.CaptureFixture[str]
) -> None:
    stand_in(tmp_path, "claude")
    assert launch(server, "claude") == 0
    assert told not in capsys.readouterr().err
    server.models = [{"id": "small", "context_length": 65536, **model}]  # type: ignore[attr-defined]
    assert launch(server, "claude") == 0
    assert told in capsys.readouterr().err


def test_a_file_with_comments_comes_back_to_the_byte(tmp_path: Path, home: Path, server: ThreadingHTTPServer) -> None:
    file = PROGRAMS["zed"].files[0].path
    file.parent.mkdir(parents=True)
    text = '// mine\r\n{\n  "theme": "// not a comment",\n  "agent": {"x": [1, 2,],}, /* end */\n}\n'
    file.write_bytes(text.encode())
    file.chmod(0o640)
    out = stand_in(tmp_path, "zed")
    assert launch(server, "zed") == 0
    seen = json.loads(next(iter(json.loads(out.read_text())["files"].values())))
    assert seen["theme"] == "// not a comment"
    assert seen["agent"]["x"] == [1, 2]
    assert seen["agent"]["default_model"] == {"provider": "localllm-launch", "model": "org/first"}
    assert file.read_bytes() == text.encode()
    assert file.stat().st_mode & 0o777 == 0o640


def test_what_the_program_writes_into_its_file_is_kept(tmp_path: Path, home: Path, server: ThreadingHTTPServer) -> None:
    file = PROGRAMS["zed"].files[0].path
    file.parent.mkdir(parents=True)
    file.write_text('{"theme": "dark", "agent": {"default_model": {"provider": "own"}}}')
    more = f"p = pathlib.Path({str(file)!r}); d = json.loads(p.read_text()); d['theme'] = 'light'; "
    stand_in(tmp_path, "zed", more + "p.write_text(json.dumps(d))")
    assert launch(server, "zed") == 0
    assert json.loads(file.read_text()) == {"theme": "light", "agent": {"default_model": {"provider": "own"}}}


def test_a_file_is_restored_by_the_next_launch_after_a_kill(
    tmp_path: Path, home: Path, server: ThreadingHTTPServer, capsys: pytest.CaptureFixture[str]
) -> None:
    file = PROGRAMS["cline"].files[0].path
    file.parent.mkdir(parents=True)
    file.write_text('{"mine": 1}\n')
    out = stand_in(tmp_path, "cline", "time.sleep(1)")
    command = [sys.executable, "-m", "localllm", "launch", "cline", "--url", url_of(server)]
    process = subprocess.Popen(command, env=dict(os.environ))
    until = time.monotonic() + 60
    while not out.exists() and time.monotonic() < until:
        time.sleep(0.02)
    assert launch(server, "cline") == 2, "a second launch must not change the file of the first"
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert "org/first" in file.read_text()
    stand_in(tmp_path, "qwen")
    assert launch(server, "qwen") == 0
    assert file.read_text() == '{"mine": 1}\n'
    assert f"Restored {file}" in capsys.readouterr().err


def test_sigterm_ends_the_program_and_restores(tmp_path: Path, home: Path, server: ThreadingHTTPServer) -> None:
    out, file = stand_in(tmp_path, "cline", "time.sleep(60)"), PROGRAMS["cline"].files[0].path
    command = [sys.executable, "-m", "localllm", "launch", "cline", "--url", url_of(server)]
    process = subprocess.Popen(command, env=dict(os.environ))
    until = time.monotonic() + 60
    while not out.exists() and time.monotonic() < until:
        time.sleep(0.02)
    process.terminate()
    assert process.wait(30) == 128 + signal.SIGTERM
    assert not file.exists()
    assert not (home / ".cline").exists()


def test_a_missing_program_is_named_with_the_command_that_installs_it(
    server: ThreadingHTTPServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert launch(server, "codex") == 2
    assert "Codex is not installed." in (told := capsys.readouterr().err)
    assert "npm install -g @openai/codex" in told


def test_an_unknown_model_is_refused(
    tmp_path: Path, server: ThreadingHTTPServer, capsys: pytest.CaptureFixture[str]
) -> None:
    out = stand_in(tmp_path, "claude")
    assert launch(server, "claude", "--model", "third") == 2
    assert "org/first, second" in capsys.readouterr().err
    assert not out.exists()


@pytest.mark.parametrize("name", PROGRAMS)
def test_print_starts_and_writes_nothing_and_hides_the_key(
    name: str, home: Path, server: ThreadingHTTPServer, capsys: pytest.CaptureFixture[str]
) -> None:
    server.key = KEY  # type: ignore[attr-defined]
    assert launch(server, name, "--print", "--api-key", KEY, "--", "hello") == 0
    told = capsys.readouterr().out
    assert url_of(server) in told
    assert KEY not in told
    assert not tree(home)
    run = subprocess.run(["/bin/sh", "-n"], input=told, text=True, capture_output=True, check=False)
    assert run.returncode == 0, run.stderr


def test_a_key_is_passed_on_only_where_it_is_needed(tmp_path: Path, server: ThreadingHTTPServer) -> None:
    out = stand_in(tmp_path, "claude")
    os.environ["LOCALLLM_API_KEY"] = KEY
    try:
        assert launch(server, "claude") == 0
        assert json.loads(out.read_text())["environ"]["ANTHROPIC_AUTH_TOKEN"] == "localllm"
        server.key = KEY  # type: ignore[attr-defined]
        assert launch(server, "claude") == 0
        assert json.loads(out.read_text())["environ"]["ANTHROPIC_AUTH_TOKEN"] == KEY
    finally:
        del os.environ["LOCALLLM_API_KEY"]


def test_without_a_server_one_is_started_and_stopped(tmp_path: Path) -> None:
    ask = "import urllib.request; u = os.environ['OPENAI_BASE_URL'] + '/models'; "
    out = stand_in(tmp_path, "qwen", ask + "sys.exit('demo' not in urllib.request.urlopen(u).read().decode())")
    assert cli.main(["launch", "qwen", "--model", str(resolve_model("demo").path), "--", "-p", "hi"]) == 0
    assert json.loads(out.read_text())["argv"] == ["--auth-type", "openai", "-p", "hi"]
    assert json.loads(out.read_text())["environ"]["OPENAI_MODEL"] == "demo"
    assert not running_servers()


LEAVES = st.none() | st.text(max_size=3) | st.integers(2, 9)
JSON = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3, unique_by=repr) | st.dictionaries(st.sampled_from("abc"), inner, max_size=3)
    ),
    max_leaves=8,
)
OBJECTS = st.dictionaries(st.sampled_from("abc"), JSON, max_size=3)


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(OBJECTS, OBJECTS)
def test_undoing_a_merge_gives_what_was_there(before: dict[str, Any], content: dict[str, Any]) -> None:
    assert undone(parsed(merged(json.dumps(before), content)), before, content) == before


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(OBJECTS, OBJECTS, st.text(max_size=3))
def test_undoing_keeps_what_was_written_since(before: dict[str, Any], content: dict[str, Any], text: str) -> None:
    now = {**parsed(merged(json.dumps(before), content)), "new": text}
    assert undone(now, before, content) == {**before, "new": text}


def test_undoing_without_a_file_before_leaves_nothing() -> None:
    content = {"a": {"b": [1]}}
    assert undone(parsed(merged(None, content)), ABSENT, content) is ABSENT
