"""The offline API: vLLM's calls and shapes, over the real engine and a tiny random model."""

import json
import runpy
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from localllm.engine.admission import GenerationRequest
from localllm.engine.params import SamplingParams
from localllm.errors import (
    ConfigError,
    ContextTooLong,
    EngineError,
    EngineStopped,
    HubOffline,
    InvalidParameter,
    ModelNotFound,
    UnsupportedOption,
)
from localllm.llm import LLM
from localllm.text.answers.detect import answer_format
from localllm.text.chat_template import ChatTemplate
from localllm.text.reasoning_budget import ReasoningBudgets
from localllm.text.structured import StructuredOutputsParams
from tests.text.templates import CHATML
from tests.tiny import make_tiny_model

EXAMPLES = Path(__file__).parent.parent / "docs" / "examples"
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPTS = ["Hello, my name is", "The capital of France is", "A block holds", "def add(a, b):", "안녕 🙂"]


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("llm") / "tiny", max_position_embeddings=4096)


@pytest.fixture(scope="module")
def llm(model_path: Path) -> Iterator[LLM]:
    with LLM(model=str(model_path), max_model_len=512, max_num_seqs=4) as llm:
        yield llm


# ---- the listings ----------------------------------------------------------------------------------------------------


def test_vllm_quickstart_runs_unchanged_but_for_the_import(model_path: Path) -> None:
    llm = LLM(model=str(model_path), tensor_parallel_size=1, gpu_memory_utilization=0.9, max_model_len=4096)
    params = SamplingParams(temperature=0.7, top_p=0.95, max_tokens=16, stop=["</s>", "[/INST]"])
    outputs = llm.generate(["Hello, my name is", "The capital of France is"], params)
    assert [out.prompt for out in outputs] == ["Hello, my name is", "The capital of France is"]
    for out in outputs:
        assert isinstance(out.outputs[0].text, str)
        assert 1 <= len(out.outputs[0].token_ids) <= 16
        assert out.outputs[0].finish_reason in ("stop", "length")
        assert out.finished
    llm.close()


@pytest.mark.parametrize("name", ["offline.py", "offline_chat.py"])
def test_example_runs(
    name: str, model_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With and without the __main__ guard."""
    monkeypatch.setenv("LOCALLLM_MODEL", str(model_path))
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    assert capsys.readouterr().out.strip()


# ---- generate --------------------------------------------------------------------------------------------------------


def test_answers_come_in_order_and_do_not_depend_on_the_neighbours(llm: LLM) -> None:
    together = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    alone = [llm.generate(prompt, GREEDY, use_tqdm=False)[0] for prompt in PROMPTS]
    assert [out.prompt for out in together] == PROMPTS
    assert [out.outputs[0].token_ids for out in together] == [out.outputs[0].token_ids for out in alone]


def test_a_prompt_may_be_text_ids_or_a_dictionary(llm: LLM) -> None:
    ids = llm.get_tokenizer().encode(PROMPTS[0])
    forms = [PROMPTS[0], ids, {"prompt": PROMPTS[0]}, {"prompt_token_ids": ids}]
    outputs = llm.generate(forms, GREEDY, use_tqdm=False)
    assert len({tuple(out.outputs[0].token_ids) for out in outputs}) == 1
    assert [out.prompt for out in outputs] == [PROMPTS[0], None, PROMPTS[0], None]
    assert all(out.prompt_token_ids == ids for out in outputs)
    (single,) = llm.generate(ids, GREEDY, use_tqdm=False)
    assert single.prompt_token_ids == ids
    assert llm.generate([], GREEDY) == []


def test_each_prompt_may_have_its_own_params(llm: LLM) -> None:
    params = [replace(GREEDY, max_tokens=count) for count in (1, 2, 3, 4, 5)]
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    assert [len(out.outputs[0].token_ids) for out in outputs] == [1, 2, 3, 4, 5]
    with pytest.raises(InvalidParameter, match="sampling_params has 1 entries for 5 prompts"):
        llm.generate(PROMPTS, [GREEDY])


def test_without_params_the_checkpoints_defaults_hold(llm: LLM) -> None:
    assert llm.get_default_sampling_params().temperature == 0.7
    assert llm.get_default_sampling_params().top_p == 0.9
    assert llm.generate("Hello", use_tqdm=False)[0].finished


def test_same_seed_same_tokens(llm: LLM) -> None:
    params = SamplingParams(temperature=1.0, seed=5, max_tokens=8, ignore_eos=True)
    first, second = (llm.generate(PROMPTS[0], params, use_tqdm=False)[0].outputs[0].token_ids for _ in range(2))
    assert first == second


def test_n_answers_differ_by_their_seed(llm: LLM) -> None:
    params = SamplingParams(temperature=1.0, seed=5, n=3, max_tokens=8, ignore_eos=True)
    (out,) = llm.generate(PROMPTS[0], params, use_tqdm=False)
    assert [answer.index for answer in out.outputs] == [0, 1, 2]
    assert len({tuple(answer.token_ids) for answer in out.outputs}) == 3


def test_logprobs_come_as_vllm_gives_them(llm: LLM) -> None:
    params = replace(GREEDY, logprobs=3, prompt_logprobs=1)
    (out,) = llm.generate(PROMPTS[0], params, use_tqdm=False)
    answer = out.outputs[0]
    assert answer.logprobs is not None
    assert len(answer.logprobs) == len(answer.token_ids)
    for token_id, candidates in zip(answer.token_ids, answer.logprobs, strict=True):
        assert candidates[token_id].rank == 1  # greedy
        assert len(candidates) == 3
    chosen = [
        candidates[token_id].logprob for token_id, candidates in zip(answer.token_ids, answer.logprobs, strict=True)
    ]
    assert answer.cumulative_logprob == pytest.approx(sum(chosen))
    assert out.prompt_logprobs is not None
    assert out.prompt_logprobs[0] is None
    assert len(out.prompt_logprobs) == len(out.prompt_token_ids)
    for token_id, candidates in zip(out.prompt_token_ids[1:], out.prompt_logprobs[1:], strict=True):
        assert candidates is not None
        assert token_id in candidates
    assert llm.generate(PROMPTS[0], GREEDY, use_tqdm=False)[0].outputs[0].logprobs is None


def test_a_whole_vocabulary_is_given_where_the_keyword_allows_it(llm: LLM, model_path: Path) -> None:
    asked = replace(GREEDY, logprobs=-1, prompt_logprobs=-1, max_tokens=2)
    with LLM(str(model_path), max_model_len=512, max_logprobs=-1) as generous:
        (out,) = generous.generate(PROMPTS[0], asked, use_tqdm=False)
    positions = [*(out.outputs[0].logprobs or []), *(out.prompt_logprobs or [])[1:]]
    assert len(positions) == 2 + len(out.prompt_token_ids) - 1
    for candidates in positions:
        assert candidates is not None
        assert sorted(each.rank for each in candidates.values()) == list(range(1, llm.vocab_size + 1))
    with pytest.raises(InvalidParameter, match="At most 20"):
        llm.generate(PROMPTS[0], asked, use_tqdm=False)


def test_stop_string_ends_the_answer_and_stays_out_of_it(llm: LLM) -> None:
    text = llm.generate(PROMPTS[0], GREEDY, use_tqdm=False)[0].outputs[0].text
    stop = text[3:5]
    (out,) = llm.generate(PROMPTS[0], replace(GREEDY, stop=stop), use_tqdm=False)
    assert out.outputs[0].text == text[: text.index(stop)]
    assert (out.outputs[0].finish_reason, out.outputs[0].stop_reason) == ("stop", stop)
    assert llm._engine.loop.stats().used_blocks == 0


def test_structured_output_whatever_the_neighbours(llm: LLM) -> None:
    """As vLLM spells it: one prompt under a grammar, one under a schema, one free."""
    schema = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}},
        "required": ["ok"],
        "additionalProperties": False,
    }
    asked = [
        replace(GREEDY, structured_outputs=StructuredOutputsParams(choice=["Positive", "Negative"])),
        replace(GREEDY, max_tokens=60, structured_outputs=StructuredOutputsParams(json=schema), n=2, seed=1),
        GREEDY,
    ]
    choice, record, free = llm.generate(PROMPTS[:3], asked)
    assert choice.outputs[0].text in ("Positive", "Negative")
    assert choice.outputs[0].finish_reason == "stop"
    assert all(json.loads(answer.text).keys() >= {"ok"} for answer in record.outputs)
    assert free.outputs[0].text == llm.generate(PROMPTS[2], GREEDY)[0].outputs[0].text
    with pytest.raises(InvalidParameter, match="uniqueItems"):
        llm.generate("x", replace(GREEDY, structured_outputs=StructuredOutputsParams(json={"uniqueItems": True})))


def test_a_repeated_prompt_is_found_in_the_cache(llm: LLM) -> None:
    prompt = {"prompt_token_ids": [3 + i % 200 for i in range(100)]}
    first, second = (llm.generate(prompt, GREEDY, use_tqdm=False)[0] for _ in range(2))
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 96)
    assert first.outputs[0].token_ids == second.outputs[0].token_ids


def test_more_prompts_than_a_server_would_queue(llm: LLM) -> None:
    outputs = llm.generate([[5, 6, 7]] * 1100, SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)
    assert len(outputs) == 1100
    assert all(out.finished for out in outputs)


def test_one_bad_prompt_is_refused_before_any_runs(llm: LLM) -> None:
    before = llm._engine.loop.stats().num_steps
    with pytest.raises(ContextTooLong, match="512"):
        llm.generate([PROMPTS[0], [7] * 600], GREEDY, use_tqdm=False)
    with pytest.raises(InvalidParameter, match="empty"):
        llm.generate([[3], []], GREEDY, use_tqdm=False)
    with pytest.raises(InvalidParameter, match="prompt"):
        llm.generate({"text": "hello"}, GREEDY, use_tqdm=False)
    assert llm._engine.loop.stats().num_steps == before
    assert llm.generate(PROMPTS[0], GREEDY, use_tqdm=False)[0].finished


@pytest.mark.parametrize("where", ["forward", "sample"])
@pytest.mark.parametrize("step", [1, 4])
def test_ctrl_c_leaves_at_once_and_the_next_call_works(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, where: str, step: int
) -> None:
    loop, _ = llm._engine.engine
    expected = llm.generate(PROMPTS, GREEDY)
    left, call = step, getattr(loop.runner, where)

    def interrupt(*given: object) -> object:
        nonlocal left
        left -= 1
        if not left:
            raise KeyboardInterrupt
        return call(*given)

    monkeypatch.setattr(loop.runner, where, interrupt)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["Hello"] * 8, SamplingParams(max_tokens=200, ignore_eos=True))
    assert left == 0  # at once
    assert not loop.scheduler.has_work
    assert loop.stats().used_blocks == 0
    again = llm.generate(PROMPTS, GREEDY)
    assert [out.outputs[0].token_ids for out in again] == [out.outputs[0].token_ids for out in expected]


def test_threads_take_turns(llm: LLM) -> None:
    expected = [llm.generate(prompt, GREEDY, use_tqdm=False)[0].outputs[0].text for prompt in PROMPTS]
    with ThreadPoolExecutor(4) as pool:
        outputs = list(pool.map(lambda prompt: llm.generate(prompt, GREEDY, use_tqdm=False)[0], PROMPTS))
    assert [out.outputs[0].text for out in outputs] == expected


def test_progress_is_shown_unless_told_otherwise(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert capsys.readouterr().err == ""
    llm.generate(PROMPTS, GREEDY)
    err = capsys.readouterr().err
    assert "Processed prompts" in err
    assert "tok/s out" in err
    assert "5/5" in err


# ---- chat and stream -------------------------------------------------------------------------------------------------


def test_chat_goes_through_the_template(llm: LLM) -> None:
    messages = [{"role": "user", "content": "hi"}]
    (out,) = llm.chat(messages, GREEDY, use_tqdm=False)
    assert out.prompt == llm.apply_chat_template(messages)
    assert "<|im_start|>" in out.prompt
    several = llm.chat([messages, [{"role": "user", "content": "bye"}]], GREEDY, use_tqdm=False)
    assert len(several) == 2
    assert several[0].outputs[0].token_ids == out.outputs[0].token_ids


@pytest.fixture
def thinker(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> LLM:
    """The same with a template that prints calls as Hermes does and reasoning between <think> and </think>."""
    template = ChatTemplate(CHATML)
    answers = answer_format(template)
    _, admission = llm._engine.engine
    budgets = ReasoningBudgets(llm.get_tokenizer(), answers)
    monkeypatch.setattr(admission, "_budgets", budgets)
    monkeypatch.setattr(llm, "_engine", replace(llm._engine, chat_template=template, answers=answers))
    return llm


def test_chat_tells_reasoning_and_calls_from_content(thinker: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    user = [{"role": "user", "content": "How warm is it?"}]
    tool = {"type": "function", "function": {"name": "clock", "parameters": {"type": "object", "properties": {}}}}
    said = '<think>\nWarm?\n</think>\n\nLet me look.\n<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
    params = SamplingParams(temperature=0, max_tokens=200, n=2)

    def saying(name: str, ids: Sequence[int], params: SamplingParams, *others: Any) -> GenerationRequest:
        asked = StructuredOutputsParams(choice=[said])
        return GenerationRequest(name, ids, replace(params, structured_outputs=asked), *others)

    monkeypatch.setattr("localllm.llm.GenerationRequest", saying)
    for answer in thinker.chat(user, params, use_tqdm=False, tools=[tool])[0].outputs:
        assert (answer.reasoning, answer.text.strip()) == ("Warm?", "Let me look.")
        assert [(call.name, call.arguments_object()) for call in answer.tool_calls] == [("clock", {})]
    [plain, _] = thinker.chat(user, params, use_tqdm=False)[0].outputs
    assert (plain.reasoning, plain.tool_calls) == ("Warm?", [])
    assert "<tool_call>" in plain.text
    [raw, _] = thinker.generate("Hi", params, use_tqdm=False)[0].outputs
    assert (raw.text, raw.reasoning) == (said, None)
    with pytest.raises(InvalidParameter, match=r"tools\[0\]"):
        thinker.chat(user, params, tools=[{"name": "clock"}])


def test_reasoning_of_a_chat_ends_at_its_budget(thinker: LLM) -> None:
    opened = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "<think>"}]
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, thinking_token_budget=6)
    switches = {"continue_final_message": True, "add_generation_prompt": False, "use_tqdm": False}
    [answer] = thinker.chat(opened, params, **switches)[0].outputs
    tokenizer = thinker.get_tokenizer()
    end = tokenizer.encode("</think>", add_special_tokens=False)
    assert answer.token_ids[6 : 6 + len(end)] == end
    assert answer.reasoning == (tokenizer.decode(answer.token_ids[:6]).strip() or None)
    [unbound] = thinker.chat(opened, replace(params, thinking_token_budget=-1), **switches)[0].outputs
    assert unbound.token_ids[:6] == answer.token_ids[:6]
    for wrong in (-2, 1.5, "6", True):
        with pytest.raises(InvalidParameter, match="thinking_token_budget"):
            SamplingParams(thinking_token_budget=wrong)  # type: ignore[arg-type]


def test_stream_gives_what_generate_gives(llm: LLM) -> None:
    events = list(llm.stream(PROMPTS[4], GREEDY))
    (out,) = llm.generate(PROMPTS[4], GREEDY, use_tqdm=False)
    assert "".join(event.text for event in events) == out.outputs[0].text
    assert events[-1].finish_reason == "length"
    assert events[-1].usage is not None
    assert events[-1].usage.completion_tokens == 12


def test_a_stream_that_is_left_frees_its_blocks(llm: LLM) -> None:
    stream = llm.stream(PROMPTS[0], replace(GREEDY, max_tokens=300))
    next(stream)
    assert llm._engine.loop.stats().used_blocks > 0 or llm._engine.loop.scheduler.has_work
    with pytest.raises(EngineError, match="still streaming"):
        llm.generate(PROMPTS[0], GREEDY, use_tqdm=False)
    stream.close()
    assert not llm._engine.loop.scheduler.has_work
    assert llm._engine.loop.stats().used_blocks == 0
    assert llm.generate(PROMPTS[0], GREEDY, use_tqdm=False)[0].finished


# ---- keywords --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"max_modl_len": 8}, ConfigError, "LLM has no argument 'max_modl_len'. Did you mean max_model_len?"),
        ({"kv_cache_dtype": "fp4"}, ConfigError, "kv-cache-dtype fp4 is out of range"),
        ({"n_gpu_layers": 4}, UnsupportedOption, "n_gpu_layers is not supported."),
        ({"enable_chunked_prefill": False}, UnsupportedOption, "enable_chunked_prefill=False is not supported."),
        ({"max_num_seqs": 0}, ConfigError, "max-num-seqs 0 is out of range"),
        ({"dtype": "float8"}, ConfigError, "dtype"),
        ({"tensor_parallel_size": 3}, (ConfigError, UnsupportedOption), "tensor"),
        ({"max_model_len": 65536}, ConfigError, "65,?536"),
    ],
)
def test_keyword_that_cannot_be_honoured_is_named(
    options: dict[str, object], error: type[Exception], said: str, model_path: Path
) -> None:
    with pytest.raises(error, match=said):
        LLM(str(model_path), **options)


def test_unknown_model_is_named() -> None:
    with pytest.raises(HubOffline, match="nowhere/to-be-found is not on this machine"):
        LLM("nowhere/to-be-found")
    with pytest.raises(ModelNotFound, match="nowhere"):
        LLM("./nowhere")


def test_keywords_in_vllms_other_spellings(model_path: Path) -> None:
    with LLM(str(model_path), dtype=torch.float32, max_model_len="auto", enable_chunked_prefill=True) as llm:
        assert llm._engine.plan.max_model_len == 4096
        assert llm._engine.plan.dtype == "float32"


def test_closed_means_closed(model_path: Path) -> None:
    llm = LLM(str(model_path))
    llm.close()
    llm.close()
    with pytest.raises(EngineStopped):
        llm.generate("hello")
