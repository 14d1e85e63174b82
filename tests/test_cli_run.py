"""`localllm run` and `localllm bench` with a tiny model: what goes where, and what a chat remembers."""

import builtins
import io
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from localllm.cli import main
from localllm.cli.run import InProcess
from localllm.cli.talk import Talk, chat
from localllm.engine.params import SamplingParams
from localllm.llm import LLM
from tests.tiny import make_tiny_model

GREEDY = ["--temperature", "0", "--max-tokens", "8"]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def at_a_terminal(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "stdin", Terminal())
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))


@pytest.fixture(scope="module")
def llm(tiny_llama_path: Path) -> Iterator[LLM]:
    with LLM(str(tiny_llama_path), max_model_len=256) as llm:
        yield llm


@pytest.fixture
def talk(llm: LLM) -> Talk:
    return Talk(InProcess(llm, SamplingParams(temperature=0, max_tokens=4), model="tiny", raw=False))


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """`typed("hi", "/bye")`: what the user types, line by line; then Ctrl-D."""

    def type_lines(*lines: str) -> None:
        left = iter(lines)

        def read(prompt: str = "") -> str:
            try:
                return next(left)
            except StopIteration:
                raise EOFError from None

        monkeypatch.setattr(builtins, "input", read)

    return type_lines


# ---- one prompt ------------------------------------------------------------------------------------------------------


def test_answer_goes_out_and_everything_else_to_the_side(
    tiny_llama_path: Path, llm: LLM, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", str(tiny_llama_path), *GREEDY, "--verbose", "hello"]) == 0
    out, err = capsys.readouterr()
    params = SamplingParams(temperature=0, max_tokens=8)
    (expected,) = llm.chat([{"role": "user", "content": "hello"}], params, use_tqdm=False)
    assert out == expected.outputs[0].text + "\n"
    assert "output 8" in err


def test_prompt_may_be_piped_and_a_question_put_before_it(
    tiny_llama_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = []
    for words, piped in ((["what is it?"], "some text\n"), ([], "what is it?\n\nsome text")):
        monkeypatch.setattr(sys, "stdin", io.StringIO(piped))
        assert main(["run", str(tiny_llama_path), *words, *GREEDY]) == 0
        answers.append(capsys.readouterr().out)
    assert answers[0] == answers[1]


def test_raw_continues_the_text_as_it_is(tiny_llama_path: Path, llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", str(tiny_llama_path), "The capital", "--raw", *GREEDY]) == 0
    (expected,) = llm.generate("The capital", SamplingParams(temperature=0, max_tokens=8), use_tqdm=False)
    assert capsys.readouterr().out == expected.outputs[0].text + "\n"


def test_bad_sampling_value_is_refused_by_name(tiny_llama_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", str(tiny_llama_path), "hi", "--temperature", "-1"]) == 1
    assert capsys.readouterr().err.startswith("temperature must be between 0 and 100.")


# ---- a chat ----------------------------------------------------------------------------------------------------------


def test_chat_remembers_until_told_to_forget(talk: Talk, typed: Callable[..., None]) -> None:
    typed("one", "", "two")
    assert chat(talk) == 0
    assert [message["role"] for message in talk.messages] == ["user", "assistant"] * 2
    typed("/clear", "/bye", "never read")
    assert chat(talk) == 0
    assert talk.messages == []
    typed("/system Be brief.", "three", "/system Be long.", "/clear")
    assert chat(talk) == 0
    assert talk.messages == [{"role": "system", "content": "Be long."}]


def test_a_refused_message_does_not_end_the_chat_nor_stay_in_it(
    talk: Talk, typed: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    typed("word " * 400, "short", "/what")
    assert chat(talk) == 0
    out, err = capsys.readouterr()
    assert "This model's context holds 256 tokens" in err
    assert "Unknown command /what" in err
    assert [message["content"] for message in talk.messages][:1] == ["short"]
    assert out.count("\n") >= 1


def test_ctrl_c_ends_the_answer_and_the_chat_goes_on(
    talk: Talk,
    llm: LLM,
    typed: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    calls = []
    stream = llm.stream

    def interrupted(*args: object) -> Iterator[object]:
        calls.append(args)
        events = stream(*args)  # type: ignore[arg-type]
        if len(calls) > 1:
            return events

        def first_only() -> Iterator[object]:
            try:
                yield next(events)
                raise KeyboardInterrupt
            finally:
                events.close()

        return first_only()

    monkeypatch.setattr(llm, "stream", interrupted)
    typed("one", "two")
    assert chat(talk) == 0
    assert "(stopped)" in capsys.readouterr().err
    assert [message["role"] for message in talk.messages] == ["user", "assistant"] * 2


# ---- bench -----------------------------------------------------------------------------------------------------------


def test_bench_measures_in_process_and_saves_its_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = make_tiny_model(tmp_path / "wide", vocab_size=1024)  # prompts are drawn from the first thousand ids
    words = ["--num-requests", "4", "--input-len", "16", "--output-len", "4", "--save", str(tmp_path / "report.json")]
    assert main(["bench", "throughput", str(model), *words, "--max-num-seqs", "2", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report == json.loads((tmp_path / "report.json").read_text())
    assert report["num_requests"] == 4
