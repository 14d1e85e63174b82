"""`localllm chat` and `complete` against a real server, at a terminal that is one: a pty."""

import io
import json
import re
import sys
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from localllm.cli import main
from localllm.cli.server import ServerClient
from localllm.errors import ConfigError
from localllm.text.structured import StructuredOutputsParams
from localllm.web.api.openai import params
from tests.web.live_server import LiveServer, PacedRunner, wait_until
from tests.web.terminal import Terminal

Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def own_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)


@pytest.fixture
def say(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Makes every model of this process answer with a text."""

    def say(text: str) -> None:
        asked = StructuredOutputsParams(choice=[text])
        monkeypatch.setattr(params, "structured_outputs", lambda *args, **kwargs: asked)

    return say


@pytest.fixture
def piped(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    return lambda text: monkeypatch.setattr(sys, "stdin", io.StringIO(text))


def test_a_chat_at_a_terminal(
    hermes: LiveServer, say: Callable[[str], None], terminal: Callable[..., Terminal], tmp_path: Path
) -> None:
    say("<think>\nhm\n</think>\n\nYes\x1b[31m.")
    chat = terminal("chat", "--url", hermes.url, "--verbose", "--max-tokens", "64")
    chat.wait_for("Chat with tiny.*>>> ")
    chat.type("first\\\nsecond\n")
    seen = chat.wait_for("tok/s.*>>> ")
    assert "\x1b[2m" in seen.split("Yes")[0]
    assert "\x1b[31m" not in seen  # a model does not colour the terminal
    assert re.search(r"prompt \d+ · output \d+ · first token .* tok/s · \w+", seen)
    chat.type('"""\n/exit is not a command here\n"""\n')
    chat.wait_for("stop|length")
    chat.wait_for(">>> ")
    chat.type(f"/save {tmp_path}/talk.json\n/save {tmp_path}/talk.json\n/regen\n")
    chat.wait_for("Saved")
    chat.wait_for("stop|length")
    saved = json.loads((tmp_path / "talk.json").read_text())["messages"]
    assert [message["content"] for message in saved] == [
        "first\nsecond", "Yes\x1b[31m.", "/exit is not a command here", "Yes\x1b[31m."
    ]  # fmt: skip
    chat.wait_for(">>> ")
    chat.type("\x04")
    assert chat.program.wait(10) == 0


def test_ctrl_c_stops_the_answer_at_the_server_and_the_chat_goes_on(
    server: LiveServer, runner: PacedRunner, terminal: Callable[..., Terminal]
) -> None:
    runner.step_s = 0.02
    chat = terminal("chat", "--url", f"{server.url}/v1")
    chat.wait_for(">>> ")
    chat.interrupt()  # at the prompt it only drops the line
    chat.wait_for("Ctrl-D leaves.*>>> ")
    chat.type("one\n")
    wait_until(lambda: server.stats().num_running == 1)
    wait_until(lambda: server.stats().requests[0].num_output_tokens > 3)
    chat.interrupt()
    chat.wait_for("stopped.*>>> ")
    server.wait_idle()
    chat.type("/model\n")
    chat.wait_for(r"\* tiny")
    chat.type("/model nobody\n")
    chat.wait_for("The server lists no model 'nobody'. It has tiny")
    chat.type("/exit\n")
    assert chat.program.wait(10) == 0


def test_one_prompt_from_a_pipe_and_only_the_answer_goes_out(
    hermes: LiveServer, say: Callable[[str], None], piped: Callable[[str], None], capsys: Capture
) -> None:
    say("<think>\nhm\n</think>\n\nYes.")
    piped("is it?")
    assert main(["chat", "--url", hermes.url, "--max-tokens", "64", "answer me"]) == 0
    out, err = capsys.readouterr()
    assert (out, err.strip()) == ("Yes.\n", "hm")
    piped("")
    assert main(["chat", "--url", hermes.url]) == 2
    assert "The prompt is empty." in capsys.readouterr().err


def test_complete_goes_on_with_the_text_as_it_is(
    server: LiveServer, piped: Callable[[str], None], capsys: Capture
) -> None:
    piped("once upon")
    assert main(["complete", "--url", server.url, "--temperature", "0", "--max-tokens", "20", "--verbose"]) == 0
    out, err = capsys.readouterr()
    body = {"model": "tiny", "prompt": "once upon", "temperature": 0, "max_tokens": 20}
    assert out == server.post("/v1/completions", body).json()["choices"][0]["text"] + "\n"
    assert "output 20" in err
    assert "length" in err


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["--model", "nobody"], 1, "'nobody'"),
        (["--temperature", "-1"], 1, "temperature must be between"),
        (["--url", "ftp://there"], 2, "'ftp://there' is not the URL of a server."),
        (["--url", "http://127.0.0.1:9"], 1, "No localllm answers at http://127.0.0.1:9."),
    ],
)
def test_refusals_are_the_servers_words(
    server: LiveServer, piped: Callable[[str], None], capsys: Capture, words: list[str], code: int, said: str
) -> None:
    piped("hi")
    assert main(["chat", "--url", server.url, *words]) == code
    out, err = capsys.readouterr()
    assert said in err
    assert not out.strip()


class Stranger(BaseHTTPRequestHandler):
    """A server of another make, which ends its answers as the model's name says."""

    asked: list[tuple[str, str | None]] = []  # noqa: RUF012

    def do_GET(self) -> None:
        self._note()
        self._answer(200, b'{"data": [{"id": "m"}]}')

    def do_POST(self) -> None:
        self._note()
        model = json.loads(self.rfile.read(int(self.headers["content-length"])))["model"]
        piece = b'data: {"choices": [{"delta": {"reasoning": "r", "content": "c"}}]}\n\n'
        ends = {
            "m": piece + b'data: {"choices": [{"delta": {}, "finish_reason": "stop"}]}\n\ndata: [DONE]\n\n',
            "cut": piece,
            "error": piece + b'data: {"error": {"message": "It burns."}}\n\n',
            "garbage": b"data: {\n\n",
        }
        self._answer(401, b'{"error": "Who are you?"}') if model == "locked" else self._answer(200, ends[model])

    def _note(self) -> None:
        self.asked.append((self.path, self.headers["authorization"]))

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def stranger() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Stranger) as server:
        Stranger.asked.clear()
        Thread(target=server.serve_forever, args=(0.01,)).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("m", ""),
        ("cut", "The answer is incomplete."),
        ("error", "It burns."),
        ("garbage", "The server's answer cannot be parsed."),
        ("locked", "Who are you?\nTry: --api-key KEY"),
    ],
)
def test_servers_of_other_makes_are_understood_to_their_end(
    stranger: str, piped: Callable[[str], None], capsys: Capture, model: str, said: str
) -> None:
    piped("hi")
    code = main(["chat", "--url", f"{stranger}/v1beta/openai", "--model", model, "--api-key", "k"])
    assert code == int(bool(said))
    assert said in capsys.readouterr().err
    assert Stranger.asked == [("/v1beta/openai/chat/completions", "Bearer k")]


def test_the_key_of_this_machine_is_told_to_nobody_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    from localllm.cli import parse

    monkeypatch.setenv("LOCALLLM_API_KEY", "mine")
    for url, known in (("http://localhost:1", "mine"), ("http://127.0.0.1.evil.example", None), ("elsewhere:1", None)):
        assert ServerClient.of_anyone(parse(["chat", "--url", url]))._api_key == known
    monkeypatch.setenv("OPENAI_API_KEY", "theirs")
    assert ServerClient.of_anyone(parse(["chat", "--url", "https://elsewhere/v1"]))._api_key == "theirs"


def test_a_chat_overwrites_no_file_of_others(tmp_path: Path) -> None:
    from localllm.cli.chat import ChatSpeaker
    from localllm.cli.talk import Talk

    talk = Talk(ChatSpeaker(ServerClient("http://127.0.0.1:9"), "m", {}), system="Be brief.")
    (tmp_path / "notes.md").write_text("mine")
    with pytest.raises(ConfigError, match="already exists"):
        talk.save(tmp_path / "notes.md")
    talk.save(tmp_path / "talk.md")
    talk.save(tmp_path / "talk.md")
    assert (tmp_path / "talk.md").read_text() == "## system\n\nBe brief.\n"
    with pytest.raises(ConfigError, match="Cannot write"):
        talk.save(tmp_path / "no" / "talk.md")
