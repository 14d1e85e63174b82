"""Runners of shards against the runner of the whole model: tokens, log-probabilities, errors, graphs."""

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from localllm.engine.outputs import EngineOutput
from localllm.engine.params import SamplingParams
from localllm.engine.request import Request
from localllm.engine.step import PendingStep, RowResult, Runner, RunnerStats, StepPlan, TokenLogprobs, TokenMasks
from localllm.models.decoder.decoder import DecoderModel
from localllm.models.drafters.draft_model import DraftModel
from localllm.models.drafters.opening import drafter_bytes, open_drafter, plan_drafter
from localllm.models.layers.group import Alone
from localllm.models.read_spec import read_spec
from localllm.models.spec.model_spec import ModelSpec
from localllm.models.weights.parameters import held_bytes
from localllm.ranks.share import StageModel
from localllm.runner import drafter_steps
from localllm.runner.device_drafts import LookupOnDevice
from localllm.runner.graphs import AgreedCapture
from localllm.runner.host_drafts import HostDrafts
from localllm.runner.host_steps import HostSteps
from localllm.runner.kv_cache import KVCache
from localllm.runner.readback import NOT_A_NUMBER, NOTHING_LEFT
from localllm.runner.runner import TorchRunner
from localllm.runner.sampler import IdExchange
from tests.eagle_files import write_eagle
from tests.kv import of_each
from tests.models.sharded import ShardedModel, even_shards, load_whole
from tests.runner.desk import GREEDY, WAYS, Desk, run_again
from tests.runner.harness import (
    assert_same as assert_same_texts,
)
from tests.runner.harness import draft_requests, make_requests, opened, serve, tokens_of
from tests.runner.harness import without_lookup as without_lookup
from tests.runner.shards import ShardRunner
from tests.threads import Threads
from tests.tiny import make_tiny_model

BLOCK, NUM_BLOCKS, MAX_LEN = 8, 120, 96
CPU = torch.device("cpu")
PROMPT = [(i * 37 + 11) % 500 for i in range(45)]
OTHER = [(i * 101 + 5) % 500 for i in range(23)]
SAMPLED = SamplingParams(seed=5, temperature=1.2, top_p=0.95, repetition_penalty=1.2, presence_penalty=0.5)
SCORED = SamplingParams(temperature=0.0, logprobs=3, prompt_logprobs=2)
BIASED = SamplingParams(seed=3, temperature=0.8, logit_bias={7: 3.0}, min_tokens=4, stop_token_ids=[9], logprobs=1)
SIZES: dict[str, Any] = {"max_num_seqs": 6, "max_num_batched_tokens": 128, "max_model_len": MAX_LEN}


@pytest.fixture(scope="module")
def sharded(tiny_llama_path: Path) -> dict[int, ShardedModel]:
    """Two shards, and four, which are more than there are KV heads."""
    shards = {size: even_shards(tiny_llama_path, size) for size in (2, 4)}
    return {size: ShardedModel(tiny_llama_path, own) for size, own in shards.items() if own is not None}


def shard_desk(model: ShardedModel, **way: Any) -> Desk:
    runner = ShardRunner(model.stages[0], model.threads[0], num_blocks=NUM_BLOCKS, block_size=BLOCK, **SIZES, **way)
    while runner.use_idle_time():
        pass
    return Desk(runner)


def whole_desk(model: DecoderModel, spec: ModelSpec) -> Desk:
    cache = KVCache(spec, of_each(spec, NUM_BLOCKS), BLOCK, CPU, "float32")
    return Desk(TorchRunner(model, spec, cache, block_size=BLOCK, device=CPU, **SIZES))


def mixed_rows(desk: Desk) -> tuple[list[list[int]], list[list[RowResult]]]:
    """Run requests of all kinds at two steps in flight, one of them in chunks beside the others' single tokens."""
    a, b = desk.enter("a", 4, PROMPT, SAMPLED), desk.enter("b", 1, OTHER, SCORED)
    c, d = desk.enter("c", 2, [9, 10], BIASED), desk.enter("d", 0, OTHER[:9], GREEDY)
    flight = [desk.launch((a, 20), (c, 2), (b, 11), (d, 9))]
    for work in ([(b, 12), (a, 25), (c, 1), (d, 1)], *[[(c, 1), (a, 1), (b, 1), (d, 1)]] * 7):
        flight.append(desk.launch(*work))
        if len(flight) == 2:
            desk.settle(flight.pop(0))
    while flight:
        desk.settle(flight.pop(0))
    rows = (a, b, c, d)
    return [row.output for row in rows], [row.results for row in rows]


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("way", WAYS)
def test_tokens_and_logprobs_are_those_of_the_whole_model(
    way: str, size: int, sharded: dict[int, ShardedModel], model: DecoderModel, spec: ModelSpec
) -> None:
    outputs, results = mixed_rows(shard_desk(sharded[size], **WAYS[way]))
    wanted, wanted_results = mixed_rows(whole_desk(model, spec))
    assert outputs == wanted
    for row, whole in zip(results, wanted_results, strict=True):
        for mine, theirs in zip(row, whole, strict=True):
            assert_same(mine.logprobs, theirs.logprobs)
            assert_same(mine.prompt_logprobs, theirs.prompt_logprobs)
    assert sum(len(result.prompt_logprobs) for result in results[1]) == len(OTHER) - 1


def assert_same(ours: tuple[TokenLogprobs, ...], theirs: tuple[TokenLogprobs, ...]) -> None:
    assert [list(entry.token_ids) for entry in ours] == [list(entry.token_ids) for entry in theirs]
    for mine, wanted in zip(ours, theirs, strict=True):
        assert mine.rank == wanted.rank
        assert list(mine.logprobs) == pytest.approx(list(wanted.logprobs), abs=1e-4)


@pytest.mark.parametrize("way", WAYS)
def test_masks_reach_the_shard_that_draws(way: str, sharded: dict[int, ShardedModel]) -> None:
    desk = shard_desk(sharded[2], **WAYS[way])
    rows = desk.enter("a", 1, PROMPT), desk.enter("b", 0, OTHER, SAMPLED)
    bits = np.zeros((1, 16), np.int32)
    bits[0, 300 // 32] = 1 << (300 % 32)
    desk.step((rows[0], 45), (rows[1], 23), masks=TokenMasks((1,), bits))
    assert rows[1].output == [300]
    desk.step((rows[0], 1), (rows[1], 1))
    assert len(rows[0].output) == 2


def test_only_the_first_shard_keeps_what_sampling_needs(sharded: dict[int, ShardedModel]) -> None:
    first, second = shard_desk(sharded[2], capture=WAYS["replayed"]["capture"]).runner.runners  # type: ignore[attr-defined]
    assert first._sampling.tables is not None
    assert first._steps._logits.numel() > 0
    assert second._sampling.tables is None
    assert second._steps._logits is None
    assert first.stats().captured_graphs == second.stats().captured_graphs > 0


def test_warm_up_makes_the_same_calls_on_all_shards(sharded: dict[int, ShardedModel]) -> None:
    desk = shard_desk(sharded[2], **WAYS["replayed"])
    desk.runner.warm_up()  # type: ignore[attr-defined]


def test_rows_in_error_do_not_part_the_shards(
    sharded: dict[int, ShardedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """NaN in one row, and a mask that leaves nothing in another: the third is not affected, and all go on."""
    model = sharded[2]
    compute = model.stages[0][0].compute_logits

    def poisoned(hidden: Tensor, out: Tensor | None = None) -> Tensor | None:
        logits = compute(hidden, out)
        assert logits is not None
        logits[0] = torch.nan
        return logits

    desk = shard_desk(model)
    rows = [desk.enter(name, slot, OTHER[slot:]) for slot, name in enumerate("abc")]
    with monkeypatch.context() as patch:
        patch.setattr(model.stages[0][0], "compute_logits", poisoned)
        result = desk.step(
            *((row, len(row.tokens)) for row in rows), masks=TokenMasks((1,), np.zeros((1, 16), np.int32))
        )
    assert [row.error for row in result.rows] == [NOT_A_NUMBER, NOTHING_LEFT, None]
    desk.leave(rows[0])
    desk.leave(rows[1])
    assert desk.generate(rows[2], 3) == desk_alone(sharded[2], OTHER[2:], 4)[1:]


def desk_alone(model: ShardedModel, prompt: list[int], count: int) -> list[int]:
    desk = shard_desk(model)
    return desk.generate(desk.enter("alone", 0, prompt), count)


def test_a_stage_that_does_not_sample(tiny_llama_path: Path) -> None:
    """Its rows come back without tokens, and its next step runs with the id that comes with the plan."""
    shards = even_shards(tiny_llama_path, 1, layers=range(1))
    assert shards is not None
    model = ShardedModel(tiny_llama_path, shards, [*(even_shards(tiny_llama_path, 1, layers=range(1, 2)) or ())])
    (first,) = model.stages[0]
    cache = KVCache(first.spec, of_each(first.spec, NUM_BLOCKS), BLOCK, CPU, "float32")
    for way in WAYS.values():
        runner = TorchRunner(first, first.spec, cache, block_size=BLOCK, device=CPU, samples=False, **SIZES, **way)
        runner.warm_up()
        desk = Desk(runner)
        row = desk.enter("a", 0, OTHER, SCORED)
        desk.step((row, len(OTHER)))
        plan = replace(desk.plan((row, 1)), known_token_ids=((0, (7,)),))
        runner.forward(plan)
        assert [*row.results, *runner.sample(plan).result().rows] == [RowResult(), RowResult()]


def test_one_shard_has_no_exchange(model: DecoderModel, spec: ModelSpec) -> None:
    runner = whole_desk(model, spec).runner
    assert isinstance(runner, TorchRunner)
    assert isinstance(runner._steps, HostSteps)
    assert runner._exchange is None


def test_a_rank_records_when_it_is_told_to(model: DecoderModel, spec: ModelSpec) -> None:
    """A stage of one shard does not judge by its own clock whether the engine is idle: others record with it."""
    recorded = 0

    def count(step: Callable[[], None]) -> Callable[[], None]:
        nonlocal recorded
        recorded += 1
        return run_again(step)

    cache = KVCache(spec, of_each(spec, NUM_BLOCKS), BLOCK, CPU, "float32")
    desk = Desk(TorchRunner(model, spec, cache, block_size=BLOCK, device=CPU, capture=count, group=Alone(), **SIZES))
    desk.generate(desk.enter("a", 0, OTHER), 2)
    before = recorded
    assert desk.runner.use_idle_time()
    assert recorded == before + 1


class QueuePipe:
    """Streams between the stages of one process, which take turns."""

    def __init__(self) -> None:
        self.sent: list[Tensor] = []

    def send(self, stream: Tensor) -> None:
        self.sent.append(stream.clone())

    def receive(self, stream: Tensor) -> Tensor:
        return stream.copy_(self.sent.pop(0))


@pytest.mark.parametrize("way", WAYS)
def test_two_stages_of_two_shards(way: str, tiny_llama_path: Path, model: DecoderModel, spec: ModelSpec) -> None:
    """Chunks of two prompts, and the scores and first tokens that the last stage makes of them."""
    shards = [even_shards(tiny_llama_path, 2, layers=range(layer, layer + 1)) for layer in (0, 1)]
    stages = ShardedModel(tiny_llama_path, *(own for own in shards if own is not None))
    pipes = [QueuePipe() for _ in range(2)]
    first, last = (Desk(stage_runner(stages, stage, pipes, samples=stage == 1, **WAYS[way])) for stage in (0, 1))
    rows = []
    for desk in (first, last, whole_desk(model, spec)):
        a, b = desk.enter("a", 4, PROMPT, SAMPLED), desk.enter("b", 1, OTHER, SCORED)
        for work in ([(a, 20), (b, 11)], [(b, 12), (a, 24)], [(a, 1)]):
            desk.step(*work)
        rows.append([a, b])
    (silent, _), (mine, scored), (wanted, wanted_scored) = rows
    assert silent.output == []
    assert mine.output == wanted.output != []
    assert scored.output == wanted_scored.output != []
    for ours, theirs in zip(scored.results, wanted_scored.results, strict=True):
        assert_same(ours.prompt_logprobs, theirs.prompt_logprobs)
    assert not any(pipe.sent for pipe in pipes)


def stage_runner(stages: ShardedModel, stage: int, pipes: list[QueuePipe], **options: Any) -> ShardRunner:
    models = [StageModel(own, pipe) for own, pipe in zip(stages.stages[stage], pipes, strict=True)]
    specs = [own.spec for own in stages.stages[stage]]
    return ShardRunner(models, stages.threads[stage], specs=specs, num_blocks=NUM_BLOCKS, block_size=BLOCK, **SIZES,
                       **options)  # fmt: skip


class Room:
    """A capture that runs out of memory after `count` steps."""

    def __init__(self, count: int) -> None:
        self.count = count

    def has_memory(self) -> bool:
        return self.count > 0

    def __call__(self, step: Callable[[], None]) -> Callable[[], None]:
        self.count -= 1
        return run_again(step)


class Faulty(Room):
    """A capture that runs its steps, and fails to record any after `count`."""

    def has_memory(self) -> bool:
        return True

    def __call__(self, step: Callable[[], None]) -> Callable[[], None]:
        replay = super().__call__(step)
        if self.count < 0:
            raise RuntimeError("this step cannot be recorded")
        return replay


@pytest.mark.parametrize("kind", [Room, Faulty])
def test_shards_stop_recording_at_the_same_shape(kind: type[Room], sharded: dict[int, ShardedModel]) -> None:
    """The second shard can record five parts only; steps go on with the shapes that both have."""
    model = sharded[2]
    members = model.threads[0].members()
    captures = [AgreedCapture(kind(count), member, CPU) for count, member in zip((99, 5), members, strict=True)]
    runner = ShardRunner(model.stages[0], model.threads[0], num_blocks=NUM_BLOCKS, block_size=BLOCK, **SIZES,
                         each=[{"capture": capture} for capture in captures])  # fmt: skip
    runner.warm_up()
    while runner.use_idle_time():
        pass
    counts = [each.stats().captured_graphs for each in runner.runners]
    assert counts == [2, 2]
    desk = Desk(runner)
    assert len(desk.generate(desk.enter("a", 0, OTHER), 4)) == 4


@pytest.mark.parametrize("way", ["host", "replayed"])
def test_the_scheduler_over_shards(
    way: str, sharded: dict[int, ShardedModel], model: DecoderModel, spec: ModelSpec
) -> None:
    """Chunks, preemptions, shared prefixes and two steps in flight change nothing, as for the whole model."""
    shards = sharded[2]

    def make(**given: Any) -> ShardRunner:
        return ShardRunner(shards.stages[0], shards.threads[0], **given)

    tight = {"num_blocks": 18, "depth": 2, "step": 20}
    got, scheduler = serve(None, spec, make_requests(), way=way, make_runner=make, **tight)
    wanted, _ = serve(model, spec, make_requests())
    assert scheduler.recorder.num_failed_steps == 0
    assert scheduler.recorder.num_preemptions > 0
    for name, outputs in wanted.items():
        assert [t for o in got[name] for t in o.token_ids] == [t for o in outputs for t in o.token_ids]
        assert got[name][-1].finish_reason == outputs[-1].finish_reason


# ---- recurrent states ------------------------------------------------------------------------------------------------

EACH_STATE = ("lfm2", "qwen3_next", "granite_hybrid", "nemotron_h", "falcon_h1")
"""Between them: every recurrence, groups on one and on several shards, single-part layers, layers with KV and state."""


class Hybrid:
    """A tiny hybrid, whole and divided, and what each request gets alone from the whole model."""

    def __init__(self, path: Path) -> None:
        self.path, self.spec = path, read_spec(path)
        whole = load_whole(path)
        self.alone = {
            r.request_id: serve(whole, self.spec, [r], num_places=2)[0][r.request_id] for r in make_requests()
        }

    def runner(self, num_stages: int) -> Callable[..., Runner]:
        layers = self.spec.num_layers
        if num_stages == 1:
            model = ShardedModel(self.path, even_shards(self.path, 2) or [])
            return partial(ShardRunner, model.stages[0], model.threads[0])
        stages = [even_shards(self.path, 2, layers=own) or [] for own in (range(1), range(1, layers))]
        return partial(StageRunner, ShardedModel(self.path, *stages))


@pytest.fixture(scope="module")
def hybrids(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Hybrid]:
    return cache(lambda family: Hybrid(make_tiny_model(tmp_path_factory.mktemp(family) / "model", family)))


@pytest.mark.parametrize(
    ("family", "way", "num_stages", "num_blocks"),
    [
        *((family, "host", 1, 200) for family in EACH_STATE), ("falcon_h1", "replayed", 1, 18),
        ("qwen3_next", "host", 2, 200), ("falcon_h1", "replayed", 2, 18), ("lfm2", "staged", 2, 200),
    ],
)  # fmt: skip
def test_recurrent_states_over_shards_and_stages(
    family: str, way: str, num_stages: int, num_blocks: int, hybrids: Callable[[str], Hybrid]
) -> None:
    """Chunks, prefix hits that begin at a checkpoint, preemptions where there are few blocks, and two steps in flight
    change no token. Memory begins as NaN."""
    hybrid, is_tight = hybrids(family), num_blocks == 18
    told, scheduler = serve(
        None, hybrid.spec, make_requests(), way=way, make_runner=hybrid.runner(num_stages), num_blocks=num_blocks,
        depth=2, step=24, num_places=7 if is_tight else 30,
    )  # fmt: skip
    assert scheduler.recorder.num_failed_steps == 0
    assert (scheduler.recorder.num_preemptions > 0) == is_tight
    assert scheduler.recorder.prefix_cache_hits > 0 or is_tight
    assert_same_texts(told, hybrid.alone)


@pytest.mark.parametrize("way", ["host", "replayed"])
@pytest.mark.parametrize("family", ["lfm2", "falcon_h1"])
def test_drafts_over_shards_leave_the_states_of_the_accepted_tokens(
    family: str, way: str, hybrids: Callable[[str], Hybrid], monkeypatch: pytest.MonkeyPatch
) -> None:
    hybrid = hybrids(family)
    texts = [[*r.token_ids, *tokens_of(hybrid.alone[r.request_id])] for r in make_requests()]
    guess(texts, monkeypatch)
    told, scheduler = serve(
        None, hybrid.spec, make_requests(), way=way, make_runner=hybrid.runner(1), depth=2, num_places=30,
        speculates=True,
    )  # fmt: skip
    assert scheduler.recorder.num_failed_steps == 0
    assert scheduler.speculation is not None
    stats = scheduler.speculation.stats()
    assert 10 < stats.num_accepted_tokens < stats.num_draft_tokens
    assert_same_texts(told, hybrid.alone)


@pytest.mark.parametrize("way", ["host", "staged"])
def test_stages_with_states_verify_no_drafts(way: str, hybrids: Callable[[str], Hybrid]) -> None:
    """An earlier stage would keep the state of a wrong guess."""
    runner = hybrids("lfm2").runner(2)(num_blocks=20, block_size=BLOCK, num_places=9, **SIZES, **WAYS[way])
    assert not runner.drafts.most
    assert "earlier stage" in runner.drafts.why_none


# ---- drafts ----------------------------------------------------------------------------------------------------------


def test_a_draw_that_is_not_usable_arrives_as_such() -> None:
    first, second = (IdExchange(member, CPU) for member in Threads(2).members())
    best = torch.tensor([1.0, torch.nan, -torch.inf, 2.0])
    threads = first._group._threads  # type: ignore[attr-defined]
    _, (ids, usable) = threads.run([lambda: first.send(torch.tensor([0, 0, 7, 9]), best), lambda: second.receive(4)])
    assert ids.tolist() == [0, 0, 7, 9]
    assert usable.isfinite().tolist() == [True, False, False, True]


class StageRunner:
    """The runners of two stages of two shards as one. A step's stages run one after the other."""

    def __init__(self, stages: ShardedModel, *, last: Sequence[Mapping[str, Any]] = (), **options: Any) -> None:
        """last: further options of each runner of the last stage."""
        width = len(stages.stages[0])
        pipes = [QueuePipe() for _ in range(width)]
        self.stages = [
            ShardRunner(
                [StageModel(own, pipe) for own, pipe in zip(stages.stages[stage], pipes, strict=True)],
                stages.threads[stage], specs=[own.spec for own in stages.stages[stage]], samples=stage == 1,
                each=last if stage == 1 else (), **options,
            )
            for stage in (0, 1)
        ]  # fmt: skip
        sampling = self.stages[1]
        self.num_blocks, self.block_size, self.vocab_size = (
            sampling.num_blocks,
            sampling.block_size,
            sampling.vocab_size,
        )
        self.num_stages, self.profiler, self.drafts = 2, None, sampling.drafts
        self.block_bytes: tuple[int, ...] = ()

    def forward(self, plan: StepPlan) -> None:
        for stage in self.stages:
            stage.forward(plan)

    def sample(self, plan: StepPlan, masks: TokenMasks | None = None) -> PendingStep:
        self.stages[0].sample(plan).result()
        return self.stages[1].sample(plan, masks)

    def use_idle_time(self) -> bool:
        answers = [stage.use_idle_time() for stage in self.stages]
        assert len(set(answers)) == 1, answers
        return answers[0]

    def stats(self) -> RunnerStats:
        return self.stages[1].stats()

    def reset(self) -> None:
        for stage in self.stages:
            stage.reset()

    def close(self) -> None:
        for stage in self.stages:
            stage.close()


def few_drafts() -> list[Request]:
    """Requests with at most four drafts at a time, for which there are blocks beside other requests. One of them has
    more bad words than the tables on a device hold."""
    requests = draft_requests()
    for request in requests[:-2]:
        request.bad_words_token_ids = request.bad_words_token_ids[:40]
        request.options = replace(request.options, max_drafts=4)
    return requests


@pytest.fixture(scope="module")
def undrafted(model: DecoderModel, spec: ModelSpec) -> dict[str, list[EngineOutput]]:
    """What each request gets alone and without drafts from the whole model."""
    return {r.request_id: serve(model, spec, [r])[0][r.request_id] for r in few_drafts()}


@pytest.mark.parametrize(("way", "num_stages"), [("host", 1), ("replayed", 1), ("host", 2), ("staged", 2)])
def test_drafts_of_shards_and_stages_change_no_token(
    way: str, num_stages: int, sharded: dict[int, ShardedModel], tiny_llama_path: Path, spec: ModelSpec,
    undrafted: dict[str, list[EngineOutput]], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """All ranks verify the same drafts, right and wrong ones, and agree on what is accepted: with penalties, lists that
    do not fit the tables of a device, preemptions, and two steps in flight."""
    texts = [[*r.token_ids, *tokens_of(undrafted[r.request_id])] for r in few_drafts()]
    guess(texts, monkeypatch)
    if num_stages == 1:
        model = sharded[2]
        make: Callable[..., Runner] = partial(ShardRunner, model.stages[0], model.threads[0])
    else:
        shards = [even_shards(tiny_llama_path, 2, layers=range(layer, layer + 1)) for layer in (0, 1)]
        make = partial(StageRunner, ShardedModel(tiny_llama_path, *(own for own in shards if own is not None)))
    drafted, scheduler = serve(
        None, spec, few_drafts(), way=way, make_runner=make, depth=2, num_blocks=20, speculates=True
    )
    assert scheduler.recorder.num_failed_steps == 0
    assert scheduler.recorder.num_preemptions > 0
    assert scheduler.speculation is not None
    stats = scheduler.speculation.stats()
    assert 10 < stats.num_accepted_tokens < stats.num_draft_tokens
    assert_same_texts(drafted, undrafted)


def guess(texts: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Have every rank find the same drafts, in place of those of the lookup."""
    monkeypatch.setattr(HostDrafts, "_find", lambda self, slot, most: np.array(
        guesses(texts, self._inputs.known_tokens(slot, self._slots.num_known(slot)).tolist(), most), np.int32
    ))  # fmt: skip
    monkeypatch.setattr(LookupOnDevice, "launch", lambda self, slots: guess_on_device(self, texts, slots))


def guesses(texts: list[list[int]], known: list[int], most: int) -> list[int]:
    """Return drafts behind a text, some of them wrong: the same on all ranks."""
    dice = random.Random(sum(known))
    text = next((text for text in texts if text[: len(known)] == known), known)
    drafts = text[len(known) : len(known) + dice.randint(0, most)]
    return [(token + 1) % 500 if dice.random() < 0.2 else token for token in drafts]


def guess_on_device(lookup: LookupOnDevice, texts: list[list[int]], slots: Tensor) -> Tensor:
    ids, known, valid = lookup._tokens
    out = torch.zeros(len(slots), 1 + 16, dtype=torch.int32)
    for row, slot in enumerate(slots.tolist()):
        count = int(known[slot]) if slot >= 0 else 0
        drafts = guesses(texts, ids[slot, :count].tolist(), int(lookup.most[slot])) if count else []
        if slot >= 0:
            valid[slot] = out[row, 0] = len(drafts)
            ids[slot, count : count + len(drafts)] = out[row, 1 : 1 + len(drafts)] = torch.tensor(drafts)
    return out


# ---- drafters with weights -------------------------------------------------------------------------------------------


class DividedDrafter:
    """A drafter over the shards of a tiny model, or of the last of two stages, and the model."""

    def __init__(self, path: Path, drafter: Path, method: str, size: int, *, num_stages: int = 1) -> None:
        spec = read_spec(path)
        self.spec = replace(spec, drafter=plan_drafter(drafter, method, spec, path))
        assert self.spec.drafter is not None
        layers = [range(2)] if num_stages == 1 else [range(1), range(1, 2)]
        shards = [even_shards(path, size, layers=own) or [] for own in layers]
        self.shards, self.model = shards[-1], ShardedModel(path, *shards, spec=self.spec)
        self.drafters = [
            open_drafter(
                self.spec.drafter, own, CPU, torch.float32, max_model_len=MAX_LEN, num_layers=2, target_shard=shard
            )
            for own, shard in zip(self.model.stages[-1], self.shards, strict=True)
        ]

    def runner(self, **given: Any) -> Runner:
        each = [{"drafter": opened(drafter)(given["num_blocks"])} for drafter in self.drafters]
        if len(self.model.stages) == 2:
            return StageRunner(self.model, last=each, **given)
        return ShardRunner(self.model.stages[0], self.model.threads[0], each=each, **given)


@pytest.fixture(scope="module")
def eagles(tiny_llama_path: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    config, root = json.loads((tiny_llama_path / "config.json").read_text()), tmp_path_factory.mktemp("eagles")
    taps = {"eagle": None, "eagle3": [0, 1]}
    return {name: write_eagle(root / name, config, name, taps=own) for name, own in taps.items()}


@pytest.mark.usefixtures("without_lookup")
@pytest.mark.parametrize(
    ("method", "way", "size", "num_stages"),
    [("draft_model", "host", 2, 1), ("eagle3", "host", 2, 1), ("eagle", "host", 2, 2), ("eagle", "replayed", 2, 1),
     ("eagle3", "staged", 2, 1), ("draft_model", "replayed", 1, 2)],
)  # fmt: skip
def test_a_drafter_over_shards_and_stages_changes_no_token(
    method: str, way: str, size: int, num_stages: int, tiny_llama_path: Path, eagles: dict[str, Path],
    undrafted: dict[str, list[EngineOutput]],
) -> None:  # fmt: skip
    """Greedy and sampled, with prefix hits, preemptions and two steps in flight. A draft model that is the model itself
    is always right."""
    drafter = eagles.get(method, tiny_llama_path)
    divided = DividedDrafter(tiny_llama_path, drafter, method, size, num_stages=num_stages)
    requests = few_drafts()[:5]
    told, scheduler = serve(
        None, divided.spec, requests, way=way, make_runner=divided.runner, depth=2, num_blocks=18, speculates=True
    )
    assert_same_texts(told, {request.request_id: undrafted[request.request_id] for request in requests})
    assert scheduler.recorder.num_failed_steps == 0
    assert scheduler.recorder.num_preemptions > 0
    assert scheduler.speculation is not None
    stats = scheduler.speculation.stats()
    assert stats.num_draft_tokens > 40
    assert (stats.num_accepted_tokens == stats.num_draft_tokens) == (method == "draft_model")
    assert any(stage.spec.num_kv_heads < divided.spec.num_kv_heads for stage in divided.drafters) == (size > 1)


@pytest.mark.usefixtures("without_lookup")
@pytest.mark.parametrize("seeds", [range(1), pytest.param(range(1, 9), marks=pytest.mark.slow)], ids=["1", "8"])
@pytest.mark.parametrize(
    ("method", "way", "size", "num_stages"),
    [("draft_model", "host", 2, 1), ("eagle", "host", 2, 2), ("draft_model", "replayed", 2, 1),
     ("eagle", "staged", 2, 1), ("eagle3", "replayed", 2, 1), ("draft_model", "replayed", 1, 2)],
)  # fmt: skip
def test_aborts_beside_a_drafter_over_shards_change_no_token(
    method: str, way: str, size: int, num_stages: int, seeds: range, tiny_llama_path: Path, eagles: dict[str, Path],
    undrafted: dict[str, list[EngineOutput]], caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """Requests come one by one, and some are aborted while drafts of theirs are verified. Their slots and blocks go to
    the next ones, in which a draft model that is the model itself is always right."""
    divided = DividedDrafter(tiny_llama_path, eagles.get(method, tiny_llama_path), method, size, num_stages=num_stages)
    num_drafted = 0
    for seed in seeds:
        requests = [request for _ in range(3) for request in few_drafts()[:5]]
        for place, request in enumerate(requests):
            request.request_id += f" {place}"
        told, scheduler = serve(
            None, divided.spec, requests, way=way, make_runner=divided.runner, depth=2, num_blocks=18, speculates=True,
            walk=random.Random(seed),
        )  # fmt: skip
        aborted = [name for name, outputs in told.items() if outputs[-1].finish_reason == "abort"]
        assert 3 < len(aborted) < len(told)
        for name, outputs in told.items():
            wanted, tokens = tokens_of(undrafted[name.split()[0]]), tokens_of(outputs)
            assert tokens == (wanted[: len(tokens)] if name in aborted else wanted), (seed, name)
        assert scheduler.recorder.num_failed_steps == 0
        assert "the drafter failed" not in caplog.text  # keys and values that were not computed are NaN
        assert scheduler.speculation is not None
        stats = scheduler.speculation.stats()
        num_drafted += stats.num_draft_tokens
        assert (stats.num_accepted_tokens == stats.num_draft_tokens) == (method == "draft_model")
        assert all(pool.num_free == pool.capacity for pool in scheduler.ledger.pools)
    assert num_drafted > 40 * len(seeds)  # a walk whose steps hold many prompts has fewer


@pytest.mark.parametrize("method", ["draft_model", "eagle", "eagle3"])
def test_the_plan_counts_what_a_rank_holds_of_a_drafter(
    method: str, tiny_llama_path: Path, eagles: dict[str, Path]
) -> None:
    divided = DividedDrafter(tiny_llama_path, eagles.get(method, tiny_llama_path), method, 2)
    for own, drafter, shard in zip(divided.model.stages[0], divided.drafters, divided.shards, strict=True):
        held = held_bytes([own, drafter]) - held_bytes(own)
        counted = drafter_bytes(divided.spec, CPU, torch.float32, max_model_len=MAX_LEN, target_shard=shard)
        assert counted == held


@pytest.mark.usefixtures("without_lookup")
@pytest.mark.parametrize("broken", ["NaN", "draw"])
def test_shards_give_up_a_drafter_together(
    broken: str, tiny_llama_path: Path, undrafted: dict[str, list[EngineOutput]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first shard alone knows that its logits are not numbers, or that a draft could not be drawn."""
    divided = DividedDrafter(tiny_llama_path, tiny_llama_path, "draft_model", 2)
    if broken == "NaN":
        first = divided.drafters[0]
        monkeypatch.setattr(first, "logits", lambda hidden: DraftModel.logits(first, hidden).fill_(torch.nan))
    else:
        monkeypatch.setattr(drafter_steps, "sample", lambda *_: [][0])
    told, scheduler = serve(None, divided.spec, few_drafts(), make_runner=divided.runner, depth=2, speculates=True)
    assert_same_texts(told, undrafted)
    assert scheduler.recorder.num_failed_steps == 0
    assert scheduler.speculation is not None
    assert scheduler.speculation.stats().num_draft_tokens == 0


def test_an_error_in_a_drafters_divided_layers_is_an_error_of_the_step(
    tiny_llama_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other shards wait for this one, so the rank has to end, as with an error in a layer of the model."""
    divided = DividedDrafter(tiny_llama_path, tiny_llama_path, "draft_model", 2)
    desk = Desk(divided.runner(num_blocks=NUM_BLOCKS, block_size=BLOCK, **SIZES))

    def fail(*_: Any) -> None:
        raise ValueError("broken")

    monkeypatch.setattr(divided.drafters[1], "extend", fail)
    with pytest.raises(ValueError, match="broken"):
        desk.generate(desk.enter("a", 0, OTHER), 2)
