"""Walks of a whole engine whose experts are in RAM or on disk, on the simulated device of test_far_experts.py: prompts
and decodes in any mix, with two steps in flight, aborts, computations of the host that fail, reads that fail, sleep.

Every answer is that of the whole model, to its end or as far as it came. Mutants that this finds: copies that are not
waited for, buffers that the next layer overwrites before the last one was read, a failing computation that leaves a
step's rows in use, a slot that is given away while it is in use.
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
from localllm.kernels.cpu.native.library import native
from localllm.models.layers.far import FarExperts
from localllm.models.loader import DiskExperts
from localllm.models.read_spec import read_spec
from localllm.models.weights.parameters import parts_of_kind, replace_tensors
from tests.draws import draws
from tests.golden_engine import Engine
from tests.runner.late_link import LateLink
from tests.tiny import make_tiny_model

pytestmark = pytest.mark.skipif(native() is None, reason="no native library")
COUNT = 7
PROMPTS = [[5 + (3 * i + 11 * n) % 180 for i in range(length)] for n, length in enumerate((4, 9, 30, 17, 61))]


class Opened:
    """An engine that a walk uses, idle before and after it."""

    def __init__(self, path: Path, layers: list[int], disk: DiskExperts | None) -> None:
        self.engine = Engine(path, staged=True, depth=2, far_layers=layers, disk=disk, max_num_batched_tokens=48)
        self.crossing: Any = self.engine.model.crossing  # type: ignore[union-attr]
        self.crossing.link = LateLink()
        self.engine.loop._recover = EngineLoop._recover.__get__(self.engine.loop)  # type: ignore[method-assign]
        self.is_failing = False
        for part in parts_of_kind(self.engine.model, FarExperts):
            part._crossing = _Failing(self, part)  # type: ignore[assignment]


class _Failing:
    """A crossing whose computation fails while its owner says so."""

    def __init__(self, owner: Opened, part: FarExperts) -> None:
        self._owner, self._part = owner, part

    def __call__(self, compute: Callable[..., Tensor], *rows: Tensor) -> Tensor:
        def watched(*given: Tensor) -> Tensor:
            if self._owner.is_failing:
                raise RuntimeError("a computation of the host")
            return compute(*given)

        out: Tensor = self._owner.crossing(watched, *rows)
        return out


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
                assert ending is None or ending.error is None or self.failed

        def finish(self) -> None:
            while self.engine.scheduler.has_work or self.loop._inbox or self.loop._pending:
                self.loop.step()

        def teardown(self) -> None:
            if hasattr(self, "loop"):
                self.finish()
                self.answers_begin_as_the_whole_models()
                assert set(self.endings) == set(self.prompts)
                if not self.failed:
                    assert self.opened.crossing.link.copies == []

    return FarWalk


@pytest.mark.parametrize("family", ["gpt_oss", "deepseek_v3"])
def test_answers_are_those_of_the_whole_model_after_any_walk(family: str, tmp_path: Path) -> None:
    path = make_tiny_model(tmp_path / "model", family)
    spec = read_spec(path)
    assert spec.mixture is not None
    layers = [layer for layer in range(spec.num_layers) if spec.mixture.is_in(layer)]
    wanted = Engine(path).generate(PROMPTS, COUNT, ignore_eos=True)  # type: ignore[no-untyped-call]
    folder = tmp_path / "disk"
    whole = Opened(path, layers, DiskExperts(2**40, lambda: 2**40, folder)).crossing.cache
    small = DiskExperts(whole.slot_bytes * (spec.mixture.top_k + 1), lambda: 2**40, folder)
    opened = [Opened(path, layers, None), Opened(path, layers[-1:], None), Opened(path, layers, small)]
    walk = make_walk(opened, wanted)
    run_state_machine_as_test(walk, settings=draws(16, stateful_step_count=20))
