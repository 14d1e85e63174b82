"""Plans written by hand over a real tiny model: output depends on a request's tokens and on nothing else."""

import math
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from localllm.engine.params import SamplingParams
from localllm.engine.step import RowResult, StepPlan, TokenMasks
from localllm.errors import DeviceLost, StepFailed
from localllm.kernels.launch import DEFAULTS, LaunchOptions, launch_options
from localllm.kernels.layer_cache import LayerKV
from localllm.models.inputs import ForwardInputs, GroupInputs
from localllm.models.spec.model_spec import ModelSpec, kv_numbers_per_token
from localllm.runner import graphs
from localllm.runner import runner as runner_module
from localllm.runner.device_errors import check_device
from localllm.runner.graphs import capture_shapes
from localllm.runner.kv_cache import KVCache
from localllm.runner.readback import NOT_A_NUMBER, NOTHING_LEFT
from localllm.runner.runner import TorchRunner
from tests.kv import of_each
from tests.runner.desk import GREEDY, WAYS, Desk, Sequence_, run_again

BLOCK, NUM_BLOCKS, MAX_LEN = 8, 200, 128
CPU = torch.device("cpu")
PROMPT = [(i * 37 + 11) % 500 for i in range(45)]
OTHER = [(i * 101 + 5) % 500 for i in range(23)]
SAMPLED = SamplingParams(seed=5, temperature=1.2, top_p=0.95, repetition_penalty=1.2, presence_penalty=0.5)


class Spy:
    """The real model, with a place to go wrong."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.poison: Callable[[Tensor], None] | None = None
        self.error: Exception | None = None

    def forward(self, inputs: ForwardInputs, kv_cache: list[LayerKV]) -> Tensor:
        if self.error is not None:
            raise self.error
        return self.model.forward(inputs, kv_cache)  # type: ignore[no-any-return]

    def compute_logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        logits: Tensor = self.model.compute_logits(hidden, out)
        if self.poison is not None:
            self.poison(logits)
        return logits


@pytest.fixture
def spy(model: Any) -> Spy:
    return Spy(model)


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> dict[str, Any]:
    """How steps reach the device."""
    return {**WAYS[request.param], "has_drafts": False}  # test_device_drafts.py has them


@pytest.fixture
def make_desk(spy: Spy, spec: ModelSpec, way: dict[str, Any]) -> Callable[..., Desk]:
    def make(**given: Any) -> Desk:
        cache = KVCache(spec, of_each(spec, NUM_BLOCKS), BLOCK, CPU, "float32")
        runner = TorchRunner(spy, spec, cache, max_num_seqs=6, max_num_batched_tokens=256, max_model_len=MAX_LEN,
                             block_size=BLOCK, device=CPU, **way, **given)  # fmt: skip
        while runner.use_idle_time():
            pass
        return Desk(runner)

    return make


@pytest.fixture
def desk(make_desk: Callable[..., Desk]) -> Iterator[Desk]:
    desk = make_desk()
    yield desk
    desk.runner.close()


def reference(make_desk: Callable[..., Desk], prompt: list[int], params: SamplingParams, count: int) -> list[int]:
    """Alone, whole, in a fresh runner."""
    desk = make_desk()
    return desk.generate(desk.enter("alone", 0, prompt, params), count)


# ---- the same output, whatever the way -------------------------------------------------------------------------------


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("chunk", [1, 7, 8, 44])
def test_chunked_prefill_equals_whole(make_desk: Callable[..., Desk], params: SamplingParams, chunk: int) -> None:
    desk = make_desk()
    got = desk.generate(desk.enter("r", 3, PROMPT, params), 12, chunk)
    assert got == reference(make_desk, PROMPT, params, 12)


@pytest.mark.parametrize("depth", [1, 2])
def test_neighbours_do_not_matter_and_rows_come_back_in_order(make_desk: Callable[..., Desk], depth: int) -> None:
    """At depth two a step is launched before the one before it is read."""
    desk = make_desk()
    a, b = desk.enter("a", 4, PROMPT), desk.enter("b", 1, OTHER, SAMPLED)
    c = desk.enter("c", 2, [9])
    flight = [desk.launch((a, 20), (c, 1), (b, 23))]
    for work in ([(b, 1), (a, 25), (c, 1)], *[[(c, 1), (a, 1), (b, 1)]] * 7):
        flight.append(desk.launch(*work))
        if len(flight) == depth:
            desk.settle(flight.pop(0))
    while flight:
        desk.settle(flight.pop(0))
    assert a.output == reference(make_desk, PROMPT, GREEDY, 8)
    assert b.output == reference(make_desk, OTHER, SAMPLED, 9)
    assert c.output == reference(make_desk, [9], GREEDY, 9)
    assert [len(row.token_ids) for row in a.results] == [0] + [1] * 8


def test_slot_and_blocks_are_reused_without_a_trace(make_desk: Callable[..., Desk]) -> None:
    desk = make_desk()
    first = desk.enter("first", 0, PROMPT, SAMPLED)
    desk.generate(first, 20)
    desk.leave(first, release=True)
    second = desk.enter("second", 0, OTHER)
    assert desk.generate(second, 10, chunk=9) == reference(make_desk, OTHER, GREEDY, 10)


def test_a_runner_of_one_request_is_warmed_up_within_its_buffers(
    spy: Spy, spec: ModelSpec, make_desk: Callable[..., Desk]
) -> None:
    cache = KVCache(spec, of_each(spec, NUM_BLOCKS), BLOCK, CPU, "float32")
    runner = TorchRunner(spy, spec, cache, max_num_seqs=1, max_num_batched_tokens=256, max_model_len=MAX_LEN,
                         block_size=BLOCK, device=CPU, staged=True)  # fmt: skip
    runner.warm_up()
    desk = Desk(runner)
    only = desk.enter("only", 0, OTHER)
    assert desk.generate(only, 10, chunk=9) == reference(make_desk, OTHER, GREEDY, 10)


def test_recording_graphs_between_requests_touches_nobody(
    spy: Spy, spec: ModelSpec, make_desk: Callable[..., Desk]
) -> None:
    """A shape runs once before it is recorded, over buffers that still name slots and blocks of the last step."""
    cache = KVCache(spec, of_each(spec, NUM_BLOCKS), BLOCK, CPU, "float32")
    runner = TorchRunner(spy, spec, cache, max_num_seqs=6, max_num_batched_tokens=256, max_model_len=MAX_LEN,
                         block_size=BLOCK, device=CPU, capture=run_again)  # fmt: skip
    runner.warm_up()
    desk = Desk(runner)
    a, b = desk.enter("a", 0, PROMPT), desk.enter("b", 3, OTHER, SAMPLED)
    desk.step((a, 45), (b, 23))
    before = [tensor.clone() for layer in cache.layers for tensor in layer.tensors()]
    while runner.use_idle_time():
        pass
    after = [tensor for layer in cache.layers for tensor in layer.tensors()]
    assert all(torch.equal(x[:, 1:], y[:, 1:]) for x, y in zip(before, after, strict=True))  # block 0 is nobody's
    for _ in range(8):
        desk.step((b, 1), (a, 1))
    assert a.output == reference(make_desk, PROMPT, GREEDY, 9)
    assert b.output == reference(make_desk, OTHER, SAMPLED, 9)
    assert runner.stats().replayed_steps >= 8
    assert runner.stats().captured_graphs == len(capture_shapes(6, 256, runner.drafts.step_tokens))


def test_recording_graphs_between_two_steps_touches_nobody(
    spy: Spy, spec: ModelSpec, make_desk: Callable[..., Desk], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that never rests records what its steps lack, with steps in flight."""
    monkeypatch.setattr(graphs, "STEPS_PER_CAPTURE", 2)
    cache = KVCache(spec, of_each(spec, NUM_BLOCKS), BLOCK, CPU, "float32")
    runner = TorchRunner(spy, spec, cache, max_num_seqs=6, max_num_batched_tokens=256, max_model_len=MAX_LEN,
                         block_size=BLOCK, device=CPU, capture=run_again)  # fmt: skip
    desk = Desk(runner)
    a, b = desk.enter("a", 0, PROMPT), desk.enter("b", 3, OTHER, SAMPLED)
    desk.step((a, 45), (b, 23))
    waiting = [desk.launch((b, 1), (a, 1))]
    for _ in range(15):
        waiting.append(desk.launch((b, 1), (a, 1)))
        desk.settle(waiting.pop(0))
    desk.settle(waiting.pop())
    assert a.output == reference(make_desk, PROMPT, GREEDY, 17)
    assert b.output == reference(make_desk, OTHER, SAMPLED, 17)
    assert runner.stats().replayed_steps > 0
    assert (
        runner.stats().captured_graphs
        < runner.stats().wanted_graphs
        == len(capture_shapes(6, 256, runner.drafts.step_tokens))
    )


def test_cached_prefix_equals_computed(make_desk: Callable[..., Desk]) -> None:
    desk = make_desk()
    owner = desk.enter("owner", 0, PROMPT)
    desk.generate(owner, 1)
    guest = desk.enter("guest", 1, PROMPT, SAMPLED, cached=owner.blocks[:5])
    assert desk.generate(guest, 10) == reference(make_desk, PROMPT, SAMPLED, 10)


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_resume_after_preemption_goes_on_as_if_nothing_was(make_desk: Callable[..., Desk],
                                                           params: SamplingParams) -> None:  # fmt: skip
    desk = make_desk()
    before = desk.enter("r", 2, OTHER, params)
    desk.generate(before, 9)
    desk.leave(before, release=True)
    after = desk.enter("r", 5, before.tokens, params, prompt_len=len(OTHER))
    desk.generate(after, 6, chunk=10)
    assert after.output == reference(make_desk, OTHER, params, 15)


def test_fills_the_context_to_its_last_token(make_desk: Callable[..., Desk]) -> None:
    desk = make_desk()
    full = desk.enter("full", 0, (PROMPT * 3)[: MAX_LEN - 1])
    assert len(desk.generate(full, 1)) == 1
    assert len(full.tokens) == MAX_LEN


# ---- log-probabilities -----------------------------------------------------------------------------------------------


def all_logits(model: Any, spec: ModelSpec, tokens: list[int]) -> Tensor:
    """Of every position, by one forward over the whole text."""
    cache = KVCache(spec, of_each(spec, 40), BLOCK, CPU, "float32")
    n = len(tokens)
    blocks = -(-n // BLOCK)
    inputs = ForwardInputs(
        token_ids=torch.tensor(tokens),
        positions=torch.arange(n),
        groups=(GroupInputs(torch.arange(1, blocks + 1, dtype=torch.int32)[None], torch.arange(n) + BLOCK),),
        context_lens=torch.tensor([n], dtype=torch.int32),
        cu_seqlens_q=torch.tensor([0, n], dtype=torch.int32),
        logits_indices=torch.arange(n),
        num_decodes=int(n == 1),
        query_lens=(n,),
        context_lens_host=(n,),
    )
    logits: Tensor = model.compute_logits(model.forward(inputs, cache.layers))
    return logits


def check_logprobs(entries: list[Any], logits: Tensor, tokens: list[int], k: int) -> None:
    """I27: what is told equals log-softmax recomputed; neighbours by rounding may stand either way in a long row."""
    expected = logits.log_softmax(-1)
    for entry, row, token in zip(entries, expected, tokens, strict=True):
        top = row.topk(k) if k else None
        if k <= 20:
            assert entry.token_ids == (token, *(top.indices.tolist() if top else ()))
        assert entry.token_ids[0] == token
        assert len(set(entry.token_ids[1:])) == k
        assert list(entry.logprobs) == pytest.approx(row[list(entry.token_ids)].tolist(), abs=1e-4)
        values = [row[token].item(), *(top.values.tolist() if top else ())]
        assert list(entry.logprobs) == pytest.approx(values, abs=1e-4)
        assert entry.rank == 1 + int((row > row[token]).sum())


def test_logprobs_are_of_the_raw_model_whatever_was_asked(model: Any, spec: ModelSpec, desk: Desk) -> None:
    twisted = SamplingParams(seed=1, temperature=3.0, logit_bias={7: 5.0}, repetition_penalty=1.5, logprobs=4)
    a, b = desk.enter("a", 0, PROMPT, twisted), desk.enter("b", 3, OTHER)
    c = desk.enter("c", 1, OTHER, SamplingParams(temperature=0.0, logprobs=0))
    desk.step((b, 23), (a, 45), (c, 23))
    for _ in range(5):
        desk.step((a, 1), (b, 1), (c, 1))
    for sequence, k in ((a, 4), (c, 0)):
        logits = all_logits(model, spec, sequence.tokens)[sequence.prompt_len - 1 : -1]
        entries = [entry for row in sequence.results for entry in row.logprobs]
        check_logprobs(entries, logits, sequence.output, k)
    assert not any(row.logprobs for row in b.results)


def test_logprobs_are_raw_when_every_row_asks_and_is_edited(model: Any, spec: ModelSpec, desk: Desk) -> None:
    a = desk.enter("a", 0, PROMPT, SamplingParams(temperature=0.0, logit_bias={7: 50.0}, logprobs=2))
    desk.generate(a, 4)
    assert a.output == [7] * 4
    logits = all_logits(model, spec, a.tokens)[a.prompt_len - 1 : -1]
    check_logprobs([entry for row in a.results for entry in row.logprobs], logits, a.output, 2)


@pytest.mark.parametrize("chunk", [1, 6, 8, 44, 45])
def test_prompt_logprobs_do_not_depend_on_chunks(model: Any, spec: ModelSpec, desk: Desk, chunk: int,
                                                 monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    monkeypatch.setattr("localllm.runner.runner.LOGITS_ROWS", 10)
    asked = SamplingParams(temperature=0.0, prompt_logprobs=3, logprobs=2)
    neighbour, a = desk.enter("n", 0, OTHER), desk.enter("a", 1, PROMPT, asked)
    desk.step((neighbour, 23), (a, chunk))
    desk.generate(a, 3 - len(a.output), chunk)
    entries = [entry for row in a.results for entry in row.prompt_logprobs]
    logits = all_logits(model, spec, a.tokens)
    check_logprobs(entries, logits[: len(PROMPT) - 1], PROMPT[1:], 3)
    check_logprobs([e for row in a.results for e in row.logprobs], logits[len(PROMPT) - 1 : -1], a.output, 2)


def test_a_whole_vocabulary_is_told_to_who_asks_and_changes_nothing_for_neighbours(
    model: Any, spec: ModelSpec, desk: Desk, make_desk: Callable[..., Desk]
) -> None:
    whole = SamplingParams(temperature=0.0, logprobs=spec.vocab_size, prompt_logprobs=spec.vocab_size)
    few = SamplingParams(seed=3, temperature=1.0, logprobs=2)
    a, b, c = desk.enter("a", 1, PROMPT, whole), desk.enter("b", 0, OTHER, few), desk.enter("c", 2, OTHER, SAMPLED)
    desk.step((b, 23), (a, 30), (c, 23))
    desk.step((b, 1), (a, 15), (c, 1))
    desk.step((c, 1), (a, 1), (b, 1))
    for sequence, k in ((a, spec.vocab_size), (b, 2)):
        logits = all_logits(model, spec, sequence.tokens)[sequence.prompt_len - 1 : -1]
        check_logprobs([entry for row in sequence.results for entry in row.logprobs], logits, sequence.output, k)
    prompt = [entry for row in a.results for entry in row.prompt_logprobs]
    check_logprobs(prompt, all_logits(model, spec, a.tokens)[: len(PROMPT) - 1], PROMPT[1:], spec.vocab_size)
    assert not any(row.logprobs for row in c.results)
    assert b.output == reference(make_desk, OTHER, few, 3)
    assert c.output == reference(make_desk, OTHER, SAMPLED, 3)


# ---- when something is wrong -----------------------------------------------------------------------------------------


def test_nan_ends_its_own_row_only(spy: Spy, desk: Desk, make_desk: Callable[..., Desk]) -> None:
    a, b = desk.enter("a", 0, PROMPT), desk.enter("b", 1, OTHER, SAMPLED)
    desk.step((a, 45), (b, 23))
    spy.poison = lambda logits: logits[0].fill_(math.nan)  # the first row: a
    result = desk.step((a, 1), (b, 1))
    spy.poison = None
    assert result.rows[0] == RowResult(error=NOT_A_NUMBER, fault="model")
    desk.leave(a)
    desk.step((b, 1))
    assert b.output == reference(make_desk, OTHER, SAMPLED, 3)


def test_constraints_that_leave_nothing_are_told_to_their_request(desk: Desk) -> None:
    a = desk.enter("a", 0, PROMPT, SamplingParams(temperature=0.0, allowed_token_ids=[5]), bad_words=((5,),))
    b = desk.enter("b", 1, OTHER)
    rows = desk.step((a, 45), (b, 23)).rows
    assert [(row.error, row.fault) for row in rows] == [(NOTHING_LEFT, "request"), (None, "step")]


def only(vocab_size: int, *allowed: list[int]) -> npt.NDArray[np.int32]:
    bits = np.zeros((len(allowed), -(-vocab_size // 32)), np.int32)
    for row, ids in zip(bits.view(np.uint32), allowed, strict=True):
        for token_id in ids:
            row[token_id // 32] |= 1 << token_id % 32
    return bits


@pytest.mark.parametrize("params", [GREEDY, SAMPLED, SamplingParams(seed=1, logit_bias=dict.fromkeys(range(400), 1.0))])
def test_a_mask_chooses_among_what_may_come_and_touches_no_neighbour(
    spec: ModelSpec, desk: Desk, make_desk: Callable[..., Desk], params: SamplingParams
) -> None:
    """A prompt in chunks, one that ends, and decodes, of which two follow a grammar; rows stand in any order."""
    alone = make_desk()
    free = alone.generate(alone.enter("free", 0, PROMPT, params), 3)
    chunked, plain = desk.enter("chunked", 3, OTHER, params), desk.enter("plain", 0, PROMPT, params)
    first, last = desk.enter("first", 1, PROMPT, params), desk.enter("last", 2, OTHER, params)
    desk.step((plain, len(PROMPT)), (first, len(PROMPT)), (last, len(OTHER)))
    top = spec.vocab_size - 1
    masks = TokenMasks((1, 3), only(spec.vocab_size, [7, 31, 32], [top]))
    result = desk.step((chunked, 9), (first, 1), (plain, 1), (last, 1), masks=masks)
    assert result.rows[1].token_ids[0] in (7, 31, 32)
    assert result.rows[3].token_ids == (top,)
    desk.step((plain, 1))
    assert plain.output == free
    nothing = desk.step((first, 1), (last, 1), masks=TokenMasks((0,), only(spec.vocab_size, [])))
    assert nothing.rows[0].error == NOTHING_LEFT
    assert nothing.rows[1].error is None


def test_logprobs_stay_raw_under_a_mask(spec: ModelSpec, desk: Desk, make_desk: Callable[..., Desk]) -> None:
    asked, alone = SamplingParams(temperature=0.0, logprobs=2), make_desk()
    [free] = alone.step((alone.enter("a", 0, PROMPT, asked), len(PROMPT))).rows
    other = (free.token_ids[0] + 1) % spec.vocab_size
    masks = TokenMasks((0,), only(spec.vocab_size, [other]))
    [row] = desk.step((desk.enter("a", 0, PROMPT, asked), len(PROMPT)), masks=masks).rows
    assert row.token_ids == (other,)
    assert row.logprobs[0].token_ids[1:] == free.logprobs[0].token_ids[1:]
    assert row.logprobs[0].logprobs[1:] == pytest.approx(free.logprobs[0].logprobs[1:])
    assert row.logprobs[0].logprobs[0] < free.logprobs[0].logprobs[0]


@pytest.mark.parametrize(
    ("error", "words"),
    [(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate"), "ran out of memory"),
     (MemoryError(), "ran out of memory"), (RuntimeError("device-side assert"), "device-side assert")],
)  # fmt: skip
def test_foreign_exceptions_arrive_as_ours_and_reset_clears(
    spy: Spy, desk: Desk, make_desk: Callable[..., Desk], error: Exception, words: str
) -> None:
    spy.error = error
    with pytest.raises(StepFailed, match=words) as caught:
        desk.step((desk.enter("a", 0, PROMPT), 45))
    assert "45 tokens of 1 requests" in caught.value.why
    assert caught.value.__cause__ is error
    spy.error = None
    desk.runner.reset()
    again = desk.enter("b", 0, OTHER)
    assert desk.generate(again, 5) == reference(make_desk, OTHER, GREEDY, 5)


@pytest.mark.parametrize("sampled", [GREEDY, SAMPLED])
def test_parameters_that_cannot_be_set_up_end_their_own_request(
    desk: Desk, make_desk: Callable[..., Desk], monkeypatch: pytest.MonkeyPatch, sampled: SamplingParams
) -> None:
    """Its prompt is computed all the same: others may share those blocks. Its slot serves the next one as ever."""
    huge = SamplingParams(seed=1, logit_bias={3: 100.0}, min_tokens=2**63, max_tokens=None)
    a, b = desk.enter("a", 0, PROMPT, huge), desk.enter("b", 1, OTHER, sampled)
    [bad, good] = desk.step((a, 45), (b, 23)).rows
    assert "OverflowError" in (bad.error or "")
    assert (bad.fault, good.error) == ("step", None)
    [bad, good] = desk.step((a, 1), (b, 1)).rows  # launched before the first was read
    assert bad.error is not None
    desk.leave(a)
    c = desk.enter("c", 0, PROMPT[:40] + OTHER, prompt_len=63, cached=a.blocks[:5])
    assert desk.generate(c, 4) == reference(make_desk, PROMPT[:40] + OTHER, GREEDY, 4)
    desk.step((b, 1))
    assert b.output == reference(make_desk, OTHER, sampled, 3)


def lost(*args: Any, **named: Any) -> None:
    raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered", 700)


def test_a_lost_device_is_recognised_wherever_it_is_found(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA tells of a kernel's error with a later call: a wait, an event, the clean-up."""
    launched = desk.launch((desk.enter("a", 0, PROMPT), 45))
    with monkeypatch.context() as patch:
        patch.setattr(runner_module.StepTimer, "wait", lost)
        with pytest.raises(DeviceLost, match="45 tokens of 1 requests"):
            desk.settle(launched)
    for broken in ("__init__", "stop"):
        with monkeypatch.context() as patch:
            patch.setattr(runner_module.StepTimer, broken, lost)
            with pytest.raises(DeviceLost):
                desk.runner.forward(StepPlan(2, ()))
    desk.runner.forward(StepPlan(3, ()))
    with monkeypatch.context() as patch:
        patch.setattr(runner_module.StepTimer, "__init__", lost)
        with pytest.raises(DeviceLost):
            desk.runner.sample(StepPlan(3, ()))
    with monkeypatch.context() as patch:
        patch.setattr(desk.runner, "_make_current", lost)
        with pytest.raises(DeviceLost):
            desk.runner.forward(StepPlan(4, ()))
        with pytest.raises(DeviceLost):
            desk.runner.use_idle_time()
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "synchronize", lost)
        with pytest.raises(DeviceLost, match="illegal memory access"):
            check_device(torch.device("cuda"))
        patch.setattr(runner_module, "check_device", lost)
        with pytest.raises(torch.AcceleratorError):
            desk.runner.reset()
    assert not desk.runner._slots.held()


def test_determinism_is_of_each_runner(make_desk: Callable[..., Desk], spy: Spy) -> None:
    """Also while two are served by threads of their own, and on a thread that serves both in turn."""
    seen: list[bool] = []
    forward = spy.model.forward
    strict = make_desk(launch_options=LaunchOptions(deterministic=True))
    free = make_desk()

    class Watched:
        def forward(self, *given: Any) -> Tensor:
            seen.append(launch_options().deterministic)
            return forward(*given)  # type: ignore[no-any-return]

        def __getattr__(self, name: str) -> Any:
            return getattr(model_of_spy, name)

    model_of_spy, spy.model = spy.model, Watched()

    def generate(desk: Desk) -> None:
        desk.generate(desk.enter("a", 0, OTHER), 2)

    for desk in (strict, free, strict):
        thread = threading.Thread(target=generate, args=(desk,))
        thread.start()
        thread.join()
        desk.leave(Sequence_("a", 0, [], 0, GREEDY, 0))
    for desk in (free, strict):
        generate(desk)
        desk.leave(Sequence_("a", 0, [], 0, GREEDY, 0))
    assert seen == [True, True, False, False, True, True, False, False, True, True]
    assert launch_options() == DEFAULTS


def test_our_own_mistakes_keep_their_traceback(desk: Desk) -> None:
    with pytest.raises(AssertionError, match="sample"):
        desk.runner.sample(StepPlan(1, ()))
    a = desk.enter("a", 0, PROMPT * 2)
    with pytest.raises(AssertionError, match="256"):
        desk.step((a, 90), (desk.enter("b", 1, PROMPT * 2), 90), (desk.enter("c", 2, PROMPT * 2), 90))


def test_a_plan_without_rows_only_frees(desk: Desk, make_desk: Callable[..., Desk]) -> None:
    a = desk.enter("a", 0, PROMPT)
    desk.generate(a, 2)
    desk.leave(a)
    assert desk.step().rows == ()
    b = desk.enter("b", 0, OTHER)
    assert desk.generate(b, 3) == reference(make_desk, OTHER, GREEDY, 3)


def test_cache_holds_exactly_the_planned_bytes(spec: ModelSpec) -> None:
    """I28, in bytes that exist."""
    for kv_dtype, size in (("float32", 4), ("bfloat16", 2)):
        cache = KVCache(spec, of_each(spec, NUM_BLOCKS), BLOCK, CPU, kv_dtype)
        assert cache.allocated_bytes == NUM_BLOCKS * BLOCK * kv_numbers_per_token(spec) * size
        assert not any(tensor.any() for layer in cache.layers for tensor in layer.tensors())


def test_timings_are_told(desk: Desk) -> None:
    timings = desk.step((desk.enter("a", 0, PROMPT), 45)).timings
    assert timings.forward_s > 0
    assert timings.sample_s > 0
