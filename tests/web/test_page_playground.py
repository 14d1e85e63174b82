"""The playground over a real socket: what it sends is what the API takes, and what it shows is what came of it."""

import html
import json
import math
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from localllm.config.settings import EngineConfig, Settings
from localllm.errors import InvalidParameter
from localllm.serving.build import build_engine
from localllm.web.access.keys import add_key, keys_path
from localllm.web.pages.playground import forms, handlers, views
from localllm.web.pages.playground.forms import snippets
from tests.models.pooling.checkpoints import save_bert
from tests.text.templates import CHATML
from tests.web.live_server import LiveServer, PacedRunner, fake_model, settings

SCRIPTED = {"hx-request": "true"}
CHAT = {"tab": "chat", "role": ["system", "user"], "content": ["Be kind.", "Hello <b>you</b>"], "max_tokens": "5"}
PACED = PacedRunner()


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    model = fake_model(tmp_path_factory.mktemp("tiny"), PACED, chat_template=CHATML)
    with LiveServer(model, settings(ui=True)) as live:
        yield live


@pytest.fixture
def server(live: LiveServer) -> Iterator[LiveServer]:
    yield live
    PACED.step_s, PACED.failing = 0.0, False
    live.wait_idle()


@pytest.fixture
def runner() -> PacedRunner:
    """To slow the server down or make it fail, for one test."""
    return PACED


def send(server: LiveServer, scripted: bool = True, **fields: Any) -> Any:
    return server.http.post("/playground", data=fields, headers=SCRIPTED if scripted else {})


def body_of(**fields: Any) -> dict[str, Any]:
    form = {name: [value] if isinstance(value, str) else value for name, value in fields.items()}
    return forms.body(forms.editor(fields["tab"], form, {}, "tiny"))


def run_python(code: str) -> None:
    names: dict[str, Any] = {}
    exec(compile(code, "snippet", "exec"), names)
    names["client"].close()


# What is sent -------------------------------------------------------------------------------------------------------


def test_a_form_becomes_the_body_and_empty_fields_send_nothing() -> None:
    assert body_of(**CHAT) == {
        "model": "tiny",
        "messages": [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hello <b>you</b>"}],
        "max_tokens": 5,
    }
    form = {"temperature": "0.5", "seed": "7", "stop": "x\r\ny\n", "schema": "{}", "alternatives": "3"}
    full = body_of(tab="completions", text="a", **form)
    assert full["temperature"] == 0.5
    assert full["stop"] == ["x", "y"]
    assert full["response_format"] == {"type": "json_schema", "json_schema": {"name": "answer", "schema": {}}}
    assert full["logprobs"] == 3
    assert body_of(tab="chat", role=["user"], content=["a"], alternatives="2")["top_logprobs"] == 2
    assert body_of(tab="embeddings", text="a\n\nb\n")["input"] == ["a", "b"]


@pytest.mark.parametrize(
    "fields",
    [
        {"content": ["", " "]},
        {"role": ["user"]},
        {"role": ["user", "root"]},
        {"role": ["user"] * 101, "content": ["a"] * 101},
        {"temperature": "warm"},
        {"max_tokens": "1.5"},
        {"alternatives": "many"},
        {"schema": "{"},
        {"schema": "[]"},
        {"schema": "[" * 100_000},
        {"tools": "{}"},
    ],
)
def test_what_cannot_be_sent_is_refused(fields: dict[str, Any], server: LiveServer) -> None:
    with pytest.raises(InvalidParameter):
        body_of(**{**CHAT, **fields})
    assert send(server, **{**CHAT, **fields}).status_code == 400


@pytest.mark.parametrize(
    ("fields", "status", "says"),
    [
        ({"temperature": "-1"}, 400, "temperature must be between"),
        ({"alternatives": "99"}, 400, "top_logprobs"),
        ({"schema": '{"type": "nonsense"}'}, 400, "nonsense"),
        ({"content": ["x " * 600, "y"]}, 400, "512"),
        ({"tab": "nonsense"}, 400, "Unknown tab"),
        ({"tab": "embeddings"}, 400, "Unknown tab"),
        ({"content": ["x" * 3_000_000, "y"]}, 413, "too large"),
    ],
)
def test_what_the_api_refuses_is_shown_in_place_and_as_a_page(
    server: LiveServer, fields: dict[str, Any], status: int, says: str
) -> None:
    for scripted in (True, False):
        answer = send(server, scripted, **{**CHAT, **fields})
        assert answer.status_code == status
        assert says in answer.text


# What is shown ------------------------------------------------------------------------------------------------------


def test_a_chat_shows_the_rendered_prompt_the_answer_and_how_likely_it_was(server: LiveServer) -> None:
    page = send(server, **CHAT, alternatives="2").text
    tokens = re.findall(r'<span class="token">(.*?)<small>(\d+)</small></span>(\n?)', page, re.DOTALL)
    body = {"messages": body_of(**CHAT)["messages"]}
    ids = server.post("/tokenize", body).json()["tokens"]
    assert [int(number) for _, number, _ in tokens] == ids
    said = html.unescape("".join(text + end for text, _, end in tokens)).replace("↵", "").replace("␣", " ")
    assert said == server.post("/apply-template", body).json()["prompt"]
    assert f"Rendered prompt: {len(ids)} tokens" in page
    assert len(re.findall(r'<span class="heat heat--heat-\d"', page)) == 5
    assert page.count('scope="row"><code>') == 5
    assert "Usage and timing" in page
    assert "&#34;chat.completion&#34;" in page
    assert "<b>you</b>" not in page


def test_reasoning_and_calls_have_their_places(server: LiveServer, say: Any) -> None:
    tool = '[{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]'
    say('<think>Hm.</think>\n<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>')
    page = send(server, **{**CHAT, "max_tokens": "200"}, tools=tool).text
    assert "Hm.</p>" in page
    assert "<b>weather</b>" in page
    assert "&#34;Oslo&#34;" in page
    assert ">tool_calls</span>" in page


def watched(server: LiveServer, **fields: Any) -> list[str]:
    """What a browser swaps in one after the other."""
    with server.http.stream("POST", "/playground", data={**fields, "stream": "yes"}, headers=SCRIPTED) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert "content-security-policy" in answer.headers
        events = "".join(answer.iter_text()).split("\n\n")
    return ["\n".join(line.removeprefix("data: ") for line in event.split("\n")) for event in events if event]


@pytest.mark.parametrize("tab", ["chat", "completions"])
def test_a_stream_ends_as_the_answer_that_came_whole(server: LiveServer, tab: str) -> None:
    fields = {**CHAT, "tab": tab, "text": "Hello you", "alternatives": "2", "temperature": "0", "max_tokens": "9"}
    *_, last = watched(server, **fields)
    whole = send(server, **fields).text
    for kind in (
        r'<span class="heat heat--heat-\d" title=".*?">.*?</span>',
        r"<small>\d+</small>",
        'class="answer".*?</p>',
    ):
        assert (found := re.findall(kind, whole, re.DOTALL))
        assert re.findall(kind, last, re.DOTALL) == found
    assert "Generation speed" in last
    assert "data: [DONE]" in last
    assert "curl -sN" in last


def test_a_stream_shows_reasoning_and_calls_as_they_are_written(
    server: LiveServer, say: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handlers, "EVERY_S", 0.0)
    tool = '[{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]'
    say('<think>Hm. <b>Oh</b></think>\n<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>')
    *grown, last = watched(server, **{**CHAT, "max_tokens": "200"}, tools=tool)
    assert len(grown) > 10
    assert all(">writing</span>" in each for each in grown)
    assert not any("The answer is empty" in each or "<b>Oh" in each for each in grown)
    lengths = [len(each) for each in grown]
    assert lengths == sorted(lengths)
    for each in (grown[-1], last):
        assert "Hm. &lt;b&gt;Oh&lt;/b&gt;</p>" in each
        assert "<b>weather</b>" in each
        assert "&#34;Oslo&#34;" in each
    assert ">tool_calls</span>" in last


def test_a_stream_that_is_refused_has_a_status_and_one_that_fails_says_so(server: LiveServer, runner: Any) -> None:
    refused = send(server, **CHAT, stream="yes", temperature="-1")
    assert (refused.status_code, "temperature must be between" in refused.text) == (400, True)
    assert "curl -sN" in refused.text
    assert send(server, tab="tokenize", text="Hello", stream="yes").status_code == 200
    runner.step_s = 0.01
    fields = {**CHAT, "max_tokens": "400", "stream": "yes"}
    with server.http.stream("POST", "/playground", data=fields, headers=SCRIPTED) as answer:
        for text in answer.iter_text():
            runner.failing, last = True, text
    assert ">error</span>" in last
    assert "The step that carried this request failed." in last
    assert "writing" not in last


def test_a_reader_who_leaves_ends_the_stream(server: LiveServer, runner: Any) -> None:
    runner.step_s = 0.02
    fields = {**CHAT, "max_tokens": "400", "stream": "yes"}
    with server.http.stream("POST", "/playground", data=fields, headers=SCRIPTED) as answer:
        next(answer.iter_text())
    server.wait_idle()
    assert runner.step_s * 400 > 5, "it would have taken longer than a test waits"


def test_completions_and_tokenisation_show_their_tokens(server: LiveServer) -> None:
    page = send(server, tab="completions", text="Hello you", max_tokens="4", alternatives="1").text
    assert len(re.findall(r'<span class="heat heat--heat-\d"', page)) == 4
    assert "Rendered prompt" in page
    ids = server.post("/tokenize", {"prompt": "Hello you"}).json()["tokens"]
    assert f"Rendered prompt: {len(ids)} tokens" in page
    page = send(server, tab="tokenize", text="Hello you", special="yes").text
    assert re.findall(r"<small>(\d+)</small>", page) == [str(each) for each in ids]


def test_run_comes_before_what_is_folded_and_each_tab_has_words_of_its_own(server: LiveServer) -> None:
    page = server.get("/playground").text
    assert page.index("data-run") < page.index('data-fold="sampling"')
    assert '<details class="playground__more" data-fold="sampling">' in page
    assert "The answer appears here, with the rendered prompt" in page
    filled = send(server, scripted=False, **CHAT | {"do": "add"}).text
    assert '<details class="playground__more" data-fold="sampling" open>' in filled
    assert "Sampling · 1 set" in filled
    tokens = server.get("/playground?tab=tokenize").text
    assert "The tokens appear here, each with its id." in tokens
    assert "Add special tokens (BOS, EOS)" in tokens
    assert "The answer appears here" not in tokens


def test_without_scripts_messages_come_and_go_and_what_was_typed_stays(server: LiveServer) -> None:
    page = send(server, False, **CHAT, do="add").text
    assert re.findall(r"<option selected>(\w+)", page) == ["system", "user", "assistant"]
    assert "Hello &lt;b&gt;you&lt;/b&gt;</textarea>" in page
    assert 'value="5"' in page
    page = send(server, False, **CHAT, do="remove-0").text
    assert re.findall(r"<option selected>(\w+)", page) == ["user"]
    page = send(server, False, **CHAT).text
    assert "<!doctype html>" in page
    assert "Usage and timing" in page
    assert "Rendered prompt" in (only := send(server, False, **CHAT, do="prompt").text)
    assert "Usage and timing" not in only


@pytest.mark.parametrize(
    ("logprob", "kind", "likely"),
    [
        (0.0, "heat-0", "100 %"),
        (math.log(0.8), "heat-1", "80.0 %"),
        (math.log(0.5), "heat-2", "50.0 %"),
        (-2.0, "heat-3", "13.5 %"),
        (-9999.0, "heat-4", "under 0.1 %"),
        (None, "heat-0", "100 %"),
    ],
)
def test_tokens_fall_into_five_classes(logprob: float | None, kind: str, likely: str) -> None:
    token = views.heat_token("\n", logprob, [("a", -3.0), ("b", -1.0)])
    assert (token.kind, token.likely, token.text) == (kind, likely, "↵\n")
    assert [text for text, _ in token.alternatives] == ["b", "a"]


def test_vectors_are_compared() -> None:
    data = [{"embedding": [1.0, 0.0]}, {"embedding": [0.0, 2.0]}, {"embedding": [3.0, 0.0]}]
    facts = views.result("embeddings", {"data": data, "usage": {"prompt_tokens": 3}}, "").facts
    assert [fact.value for fact in facts] == ["3", "2", "3 tokens", "0.0000", "1.0000"]


def test_a_model_that_embeds_has_its_own_tab(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = build_engine(Settings(EngineConfig(model=str(save_bert(tmp_path)), device="cpu")))
    with LiveServer(model, settings(ui=True)) as server:
        tabs = re.findall(r'class="tabs__tab" href="/playground\?tab=(\w+)"', server.get("/playground").text)
        assert tabs == ["tokenize", "embeddings"]
        page = send(server, tab="embeddings", text="The quick\nbrown fox").text
        assert "Similarity of texts 1 and 2" in page
        assert "&#34;embedding&#34;" in page
        assert "Rendered prompt" in send(server, tab="tokenize", text="quick", special="yes").text
        assert send(server, tab="embeddings", text=" ").status_code == 400
        python = snippets("embeddings", {"model": model.name, "input": ["a"]}, server.url, locked=False)[1]
        run_python(python.code)
        assert capsys.readouterr().out.startswith("[")


# Elsewhere ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tab", ["chat", "completions", "tokenize"])
def test_snippets_do_what_they_say(server: LiveServer, tab: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = {"text": 'It\'s "$HOME" `x`\n\\'} if tab != "chat" else {"role": ["user"], "content": ['It\'s "$HOME" \\']}
    body = body_of(tab=tab, **text, **({} if tab == "tokenize" else {"max_tokens": "3", "top_k": "5", "seed": "1"}))
    curl, python, javascript = snippets(tab, body, server.url, locked=False)
    run_python(python.code)
    assert capsys.readouterr().out
    assert json.loads(javascript.code.split("JSON.stringify(")[1].split("),\n});")[0]) == body
    if shutil.which("curl"):
        out = subprocess.run(["bash", "-c", curl.code], capture_output=True, check=True, timeout=20).stdout
        assert "error" not in json.loads(out)


@pytest.mark.parametrize("tab", ["chat", "completions"])
def test_snippets_of_a_stream_write_as_it_comes(
    server: LiveServer, tab: str, capsys: pytest.CaptureFixture[str]
) -> None:
    body = body_of(tab=tab, text="a", role=["user"], content=["a"], max_tokens="5", stream="yes", temperature="0")
    whole = {name: value for name, value in body.items() if name != "stream"}
    curl, python, javascript = snippets(tab, body, server.url, locked=False)
    run_python(python.code)
    streamed = capsys.readouterr().out
    run_python(snippets(tab, whole, server.url, locked=False)[1].code)
    assert streamed == capsys.readouterr().out != ""
    assert "TextDecoderStream" in javascript.code
    if shutil.which("curl"):
        out = subprocess.run(["bash", "-c", curl.code], capture_output=True, check=True, timeout=20).stdout
        assert out.endswith(b"data: [DONE]\n\n")


def test_where_a_key_is_asked_snippets_leave_a_place_for_it() -> None:
    for snippet in snippets("chat", {"model": "m"}, "http://h", locked=True):
        assert "YOUR-KEY" in snippet.code
    for snippet in snippets("chat", {"model": "m"}, "http://h", locked=False):
        assert "YOUR-KEY" not in snippet.code


def test_a_key_for_infer_is_enough_and_other_sites_are_refused(
    server: LiveServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert server.http.post("/playground", data=CHAT, headers={"sec-fetch-site": "cross-site"}).status_code == 403
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    key = {"x-api-key": add_key(keys_path(), "phone", "infer")}
    with LiveServer(None, settings(ui=True)) as loading:
        assert loading.get("/playground").status_code == 401
        page = loading.get("/playground", headers=key)
        assert page.status_code == 200
        assert "tiny" in page.text
        assert loading.http.post("/playground", data=CHAT, headers=key).status_code == 200
