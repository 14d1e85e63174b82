"""The runner over native steps: which batches they take, what requests get, and what they keep in memory."""

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from localllm.engine.params import SamplingParams
from localllm.kernels.cpu.native.library import native
from localllm.kernels.cpu.native.structures import FEW_ROWS, MAX_ROWS, Kind
from localllm.llm import LLM
from localllm.machine.hardware import read_hardware
from localllm.models.decoder import native_program
from localllm.models.decoder.native_program import CODED_ROWS, NativeProgram
from localllm.models.loader import load_model
from localllm.models.read_spec import read_spec
from localllm.models.spec.model_spec import ModelSpec
from localllm.runner.host_steps import HostSteps
from localllm.runner.kv_cache import KVCache
from localllm.runner.runner import TorchRunner
from localllm.serving.build import build_engine
from localllm.serving.reopen import close_engine, open_engine
from tests.kv import of_each
from tests.marks import needs_library
from tests.models.operations import DefinedLibrary
from tests.runner.desk import GREEDY, Desk
from tests.runner.harness import make_requests, serve
from tests.serving import answer, settings_for

CPU = torch.device("cpu")


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> None:
    """The operations as they are defined, where this machine has no native library."""
    if native() is None:
        monkeypatch.setattr(native_program, "native", DefinedLibrary)


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch, library: None) -> list[int]:
    """The rows of every native step from now on."""
    rows: list[int] = []
    forward = NativeProgram.forward

    def spy(self: NativeProgram, inputs: Any, **options: Any) -> Any:
        rows.append(len(inputs.token_ids))
        return forward(self, inputs, **options)

    monkeypatch.setattr(NativeProgram, "forward", spy)
    return rows


def _no_library() -> None:
    """Take the place of `native` where there is no library."""


def open_runner(model: Any, spec: ModelSpec, *, max_num_seqs: int = 12) -> TorchRunner:
    cache = KVCache(spec, of_each(spec, 100), 8, CPU, "float32")
    return TorchRunner(
        model, spec, cache, max_num_seqs=max_num_seqs, max_num_batched_tokens=256, max_model_len=128, block_size=8,
        device=CPU,
    )  # fmt: skip


def test_batches_of_one_token_for_each_of_some_requests_run_natively(
    model: Any, spec: ModelSpec, counts: list[int]
) -> None:
    desk = Desk(open_runner(model, spec, max_num_seqs=MAX_ROWS + 2))
    requests = [desk.enter(f"r{slot}", slot, [slot + 3, 9, 4]) for slot in range(MAX_ROWS + 1)]
    desk.step(*((request, 3) for request in requests))
    assert counts == []
    desk.step(*((request, 1) for request in requests))
    assert counts == []  # a row too many
    desk.step(*((request, 1) for request in requests[:MAX_ROWS]))
    late = desk.enter("late", MAX_ROWS + 1, [7, 8, 9])
    desk.step((requests[0], 1), (late, 3))
    assert counts == [MAX_ROWS]  # not beside a prompt
    desk.step((requests[0], 1), (late, 1))
    assert counts == [MAX_ROWS, 2]


def test_how_many_rows_a_step_may_have(monkeypatch: pytest.MonkeyPatch) -> None:
    wide, coded = {Kind.F32, Kind.BF16, Kind.BF16_ROUNDED}, {Kind.F32, Kind.Q8}
    for amx, most in ((False, [MAX_ROWS, MAX_ROWS, CODED_ROWS]), (True, [MAX_ROWS, FEW_ROWS, FEW_ROWS])):
        monkeypatch.setattr(native_program, "has_amx", lambda amx=amx: amx)
        assert [native_program.most_rows(set(kinds)) for kinds in ({Kind.F32}, wide, coded)] == most


def test_the_runner_says_how_decode_steps_are_computed(
    model: Any, spec: ModelSpec, library: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert open_runner(model, spec).stats().decode_steps == "decode steps of up to 32 requests run natively"
    monkeypatch.setattr(native_program, "native", _no_library)
    monkeypatch.setattr(native_program, "why_none", lambda: "A compiler was missing.")
    told = open_runner(model, spec).stats().decode_steps
    assert told == "decode steps run through torch: A compiler was missing."


def test_prompts_whose_logits_are_wanted_do_not(model: Any, spec: ModelSpec, counts: list[int]) -> None:
    desk = Desk(open_runner(model, spec))
    scored = desk.enter("scored", 0, [3, 4], SamplingParams(temperature=0.0, prompt_logprobs=1))
    desk.step((scored, 1))
    assert counts == []
    desk.step((scored, 1))
    assert counts == [1]


def test_a_prompt_read_one_token_at_a_time_gives_the_same_answer(
    model: Any, spec: ModelSpec, counts: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only a prompt's last token is part of a native step."""
    desk, prompt = Desk(open_runner(model, spec)), [5, 9, 33, 2, 71]
    slow, fast = desk.enter("slow", 0, prompt), desk.enter("fast", 1, [8, 1])
    desk.step((slow, 1))
    desk.step((slow, 1), (fast, 1))
    desk.step((slow, 1), (fast, 1))
    desk.step((slow, 1))
    got = desk.generate(slow, 5)
    assert counts == [1] * 5
    monkeypatch.setattr(native_program, "native", lambda: None)
    torchs = Desk(open_runner(model, spec))
    assert got == torchs.generate(torchs.enter("slow", 0, prompt), 5)
    assert fast.output[:1] == torchs.generate(torchs.enter("fast", 1, [8, 1]), 1)


@needs_library
def test_requests_get_what_they_get_through_torch(
    model: Any, spec: ModelSpec, counts: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through the scheduler, with preemptions and prefixes in common; native steps between torch's."""
    mixed, scheduler = serve(model, spec, make_requests(), num_blocks=18, step=20)
    assert scheduler.recorder.num_preemptions > 0
    assert len(counts) > 20
    monkeypatch.setattr(native_program, "native", lambda: None)
    through_torch, _ = serve(model, spec, make_requests())
    for name, outputs in mixed.items():
        assert [t for o in outputs for t in o.token_ids] == [t for o in through_torch[name] for t in o.token_ids], name


@needs_library
def test_values_narrower_than_keys_give_what_they_give_through_torch(
    counts: list[int], tiny_model_path: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny_model_path("mimo_v2")
    spec = read_spec(path)
    model = load_model(path, spec, CPU, torch.float32)
    assert spec.value_dim is not None
    assert spec.value_dim < spec.head_dim
    natively, _ = serve(model, spec, make_requests(), step=20)
    assert len(counts) > 20
    monkeypatch.setattr(native_program, "native", lambda: None)
    through_torch, _ = serve(model, spec, make_requests())
    for name, outputs in natively.items():
        assert [t for o in outputs for t in o.token_ids] == [t for o in through_torch[name] for t in o.token_ids], name


@needs_library
def test_the_bundled_model_answers_as_through_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=40)
    asked = [[{"role": "user", "content": text}] for text in ("What is the capital of France?", "What is localllm?")]
    answers = []
    for found in (native, _no_library):
        monkeypatch.setattr(native_program, "native", found)
        with LLM("demo", max_model_len=256, kv_cache_memory_bytes=8 << 20) as llm:
            answers.append([output.outputs[0].text for output in llm.chat(asked, params, use_tqdm=False)])
    assert answers[0] == answers[1]
    assert "Paris" in answers[0][0]


# ---- memory ----------------------------------------------------------------------------------------------------------


def test_a_closed_runner_lets_go_of_its_list_and_cache(model: Any, spec: ModelSpec, library: None) -> None:
    runner = open_runner(model, spec)
    steps = runner._steps
    assert isinstance(steps, HostSteps)
    assert steps._lone is not None
    held: list[weakref.ReferenceType[Any]] = [weakref.ref(steps._lone), weakref.ref(steps._layers[0].k)]
    desk = Desk(runner)
    desk.generate(desk.enter("a", 0, [3, 4, 5], GREEDY), 3)
    runner.close()
    del steps, desk, runner
    gc.collect()
    assert [ref() for ref in held] == [None, None]


def test_a_list_keeps_what_it_points_to(model: Any, spec: ModelSpec, library: None, tiny_llama_path: Path) -> None:
    """The cache, the tables of a served context and the weights are its own, whoever else lets go of them."""
    bare = close_engine(build_engine(settings_for(tiny_llama_path, max_model_len=24)))
    again = open_engine(bare, settings_for(tiny_llama_path, max_model_len=120).engine)
    first = answer(again, 30)
    assert bare.plan(settings_for(tiny_llama_path).engine, read_hardware()).max_model_len != 120
    executor: Any = again.executor
    executor.model.serve_context(60)  # another table; the open runner's list has the old one
    gc.collect()
    held = [torch.full((120 * 16,), torch.nan) for _ in range(50)]  # written over memory that was freed
    assert answer(again, 30) == first
    del held
    again.close()
