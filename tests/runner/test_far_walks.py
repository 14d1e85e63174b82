"""Walks of a whole engine whose experts are in RAM or on disk, on the simulated device of test_far_experts.py: prompts
and decodes in any mix, with two steps in flight, aborts, computations of the host that fail, copies to the device that
come late or fail, reads that fail, sleep.

Every answer is that of the whole model, to its end or as far as it came. Mutants that this finds: copies that are not
waited for, buffers that the next layer or the next experts overwrite before the last ones were read, a failing
computation that leaves a step's rows in use, a slot that is given away while it is in use, ids of -1 that are read as
expert 0, biases that are added twice.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from torch import Tensor

from localllm.engine.loop import EngineLoop
from localllm.engine.params import SamplingParams
from localllm.engine.request import Request
from localllm.models.layers import far as far_module
from localllm.models.layers.far import Crossing, FarExperts, FarStream, streamable
from localllm.models.loader import DiskExperts
from localllm.models.read_spec import read_spec
from localllm.models.weights.parameters import parts_of_kind, replace_tensors
from tests.draws import draws
from tests.golden_engine import Engine
from tests.marks import needs_library
from tests.runner.late_link import LateLink
from tests.tiny import fill_biases, make_tiny_model

pytestmark = needs_library
COUNT = 7
PROMPTS = [[5 + (3 * i + 11 * n) % 180 for i in range(length)] for n, length in enumerate((4, 9, 30, 17, 61))]


class Opened:
    """An engine that a walk uses, idle before and after it."""

    def __init__(
        self, path: Path, layers: list[int], disk: DiskExperts | None = None, stream_from: int = 0, at_once: int = 1
    ) -> None:
        """stream_from: tokens of a step from which its experts are copied to the device, `at_once` at a time; 0: the
        CPU computes all."""
        self.engine = Engine(path, staged=True, depth=2, far_layers=layers, disk=disk, max_num_batched_tokens=48)
        model: Any = self.engine.model
        self.is_failing = self.had_bad_reads = False
        self.link = _FailingLink(self)
        self.crossing = model.crossing = _Failing(self, model.crossing)
        self.engine.runner._crossing = self.crossing
        self.engine.loop._recover = EngineLoop._recover.__get__(self.engine.loop)  # type: ignore[method-assign]
        parts = list(parts_of_kind(model, FarExperts))
        for part in parts:
            part._crossing = self.crossing
        if stream_from:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(far_module, "staged_bytes", lambda record, count: record * min(count, at_once))
                self.crossing.stream = FarStream(streamable(parts), self.crossing)
            self.crossing.stream.from_tokens = stream_from


class _Failing(Crossing):
    """A crossing whose computation fails while its owner says so."""

    def __init__(self, owner: Opened, crossing: Crossing) -> None:
        super().__init__(owner.link, crossing.cache, crossing.arena)
        self.reserve(48)
        self.owner = owner

    def __call__(self, compute: Callable[..., Tensor], x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        def watched(*given: Tensor) -> Tensor:
            if self.owner.is_failing:
                raise RuntimeError("a computation of the host")
            return compute(*given)

        return super().__call__(watched, x, ids, weights)


class _FailingLink(LateLink):
    """A way to RAM whose copies ahead fail while its owner says so."""

    def __init__(self, owner: Opened) -> None:
        super().__init__()
        self.owner = owner

    def await_copy(self, place: int) -> None:
        if self.owner.is_failing:
            raise RuntimeError("a copy to the device")
        super().await_copy(place)


def make_walk(opened: list[Opened], wanted: list[list[int]]) -> type[RuleBasedStateMachine]:
    numbers = iter(range(10**9))

    class FarWalk(RuleBasedStateMachine):
        @initialize(index=st.integers(0, len(opened) - 1))
        def choose(self, index: int) -> None:
            self.opened = opened[index]
            self.engine = self.opened.engine
            self.loop, self.prompts = self.engine.loop, dict[str, int]()
            self.tokens, self.endings = dict[str, list[int]](), dict[str, Any]()
            self.failed = False
            self.loop.deliver = self.deliver

        def deliver(self, outputs: Any) -> None:
            for output in outputs:
                self.tokens[output.request_id] += output.token_ids
                if output.finish_reason:
                    self.endings[output.request_id] = output

        @rule(prompts=st.lists(st.integers(0, len(PROMPTS) - 1), min_size=1, max_size=3))
        def submit(self, prompts: list[int]) -> None:
            for prompt in prompts:
                name = str(next(numbers))
                self.prompts[name], self.tokens[name] = prompt, []
                asked = SamplingParams(temperature=0.0, max_tokens=COUNT, ignore_eos=True)
                self.loop.submit(Request(name, PROMPTS[prompt], asked, max_output_tokens=COUNT))

        @rule(count=st.integers(1, 4))
        def step(self, count: int) -> None:
            for _ in range(count):
                if self.engine.scheduler.has_work or self.loop._inbox:
                    self.loop.step()

        @rule(which=st.integers(0, 7))
        def abort(self, which: int) -> None:
            left = [name for name in self.prompts if name not in self.endings]
            if left:
                self.loop.cancel(left[which % len(left)])
                self.endings.setdefault(left[which % len(left)], None)

        @rule(reads=st.booleans())
        def fail(self, reads: bool) -> None:
            """One step in which the host cannot compute, or cannot read what is not in RAM."""
            self.failed = True
            whole = os.preadv
            try:
                if reads:
                    self.opened.had_bad_reads = True  # what was read ahead may be used in a later walk
                    os.preadv = lambda *_: 0  # type: ignore[assignment]
                else:
                    self.opened.is_failing = True
                self.step(1)
            finally:
                os.preadv, self.opened.is_failing = whole, False

        @rule()
        def sleep(self) -> None:
            """Move what is on the device elsewhere and back once the engine is idle: experts stay where they are."""
            self.finish()
            moved: list[Tensor] = []
            with torch.inference_mode():
                replace_tensors(self.engine.model, lambda tensor: moved.append(tensor) or tensor.clone())
                for tensor in moved:
                    if tensor.is_floating_point() and not tensor.is_mkldnn:
                        tensor.fill_(torch.nan)

        @invariant()
        def answers_begin_as_the_whole_models(self) -> None:
            for name, prompt in getattr(self, "prompts", {}).items():
                tokens, ending = self.tokens[name], self.endings.get(name)
                assert tokens == wanted[prompt][: len(tokens)], (name, prompt)
                if ending is not None and ending.error is None and ending.finish_reason == "length":
                    assert len(tokens) == COUNT
                assert ending is None or ending.error is None or self.failed or self.opened.had_bad_reads

        def finish(self) -> None:
            while self.engine.scheduler.has_work or self.loop._inbox or self.loop._pending:
                self.loop.step()

        def teardown(self) -> None:
            if hasattr(self, "loop"):
                self.finish()
                self.answers_begin_as_the_whole_models()
                assert set(self.endings) == set(self.prompts)
                if not self.failed:
                    assert self.opened.link.copies == []
                assert not self.opened.link.reading

    return FarWalk


FAMILIES = ("llama", "deepseek_v3", "qwen3_moe", "glm4_moe", "qwen2_moe", "llama4", "gemma4_moe", "nemotron_h")


@pytest.mark.parametrize("family", ["gpt_oss", *(pytest.param(family, marks=pytest.mark.slow) for family in FAMILIES)])
def test_answers_are_those_of_the_whole_model_after_any_walk(family: str, tmp_path: Path) -> None:
    path = make_tiny_model(tmp_path / "model", family)
    fill_biases(path)
    spec = read_spec(path)
    layers = [layer for layer in range(spec.num_layers) if spec.mixture is None or spec.mixture.is_in(layer)]
    wanted = Engine(path).generate(PROMPTS, COUNT, ignore_eos=True)  # type: ignore[no-untyped-call]
    opened = [
        Opened(path, layers), Opened(path, layers[-1:]), Opened(path, layers, stream_from=12),
        Opened(path, layers, stream_from=1, at_once=3), Opened(path, layers[-1:], stream_from=20, at_once=1000),
    ]  # fmt: skip
    if spec.mixture is not None:
        folder = tmp_path / "disk"
        whole = Opened(path, layers, DiskExperts(2**40, lambda: 2**40, folder)).crossing.cache
        assert whole is not None
        small = DiskExperts(whole.slot_bytes * (spec.mixture.top_k + 1), lambda: 2**40, folder)
        opened.append(Opened(path, layers, small))
    walk = make_walk(opened, wanted)
    run_state_machine_as_test(walk, settings=draws(40, stateful_step_count=20))
