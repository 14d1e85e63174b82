"""The contract between policy and mechanism: what one step shall do, and what came of it.

Both are plain data without a tensor in them, so a fake runner can answer them, a tensor-parallel rank can
receive them over a pipe, and the scheduler can be tested by the thousand on a laptop.

A *slot* is a row of the runner's persistent state, 0 to max_num_seqs - 1. The scheduler hands slots out; a
request keeps its slot from the step that (re)admits it until it finishes or is preempted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from localllm.engine.params import SamplingParams


class PromptEmbeds(Protocol):
    """Embeddings in place of a prompt's tokens (models/prompt_embeds.py), whose ids are then 0 and mean nothing."""

    @property
    def num_tokens(self) -> int: ...

    @property
    def digest(self) -> str:
        """A name of what they hold."""


@dataclass(frozen=True, slots=True)
class NewSlot:
    """A request enters a slot: fresh, or back from preemption. Everything the runner must know of it."""

    slot: int
    request_id: str
    token_ids: Sequence[int]  # prompt, then the outputs so far (after a preemption); [N]
    prompt_len: int
    params: SamplingParams
    block_ids: tuple[int, ...]  # blocks found in the prefix cache; the rest arrive in `Row.new_block_ids`
    num_computed_tokens: int  # tokens covered by `block_ids`
    eos_token_ids: tuple[int, ...] = ()  # masked while fewer than min_tokens are out
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    adapter: int = -1  # slot of the model that holds its LoRA adapter; -1: none
    prompt_embeds: PromptEmbeds | None = None  # in place of the first prompt_len tokens


class Row(NamedTuple):
    """One request's share of one step. A tuple, because a step makes one per request and a dataclass costs five."""

    slot: int
    request_id: str
    num_computed_tokens: int  # C: tokens whose KV exists before this step
    num_scheduled_tokens: int  # n >= 1: positions C .. C+n-1 run now
    new_block_ids: tuple[int, ...]  # appended to the slot's block table before the forward
    samples: bool  # False: a prefill chunk that stops short of the last known token
    draft_token_ids: tuple[int, ...] = ()  # the last len(draft) of the n positions hold these guesses


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What the runner shall do: apply `freed_slots`, then `new_slots`, then run `rows` as one batch.

    The id at a position is known to the runner: it was in `NewSlot.token_ids`, or the runner sampled it itself.
    """

    step_id: int
    rows: tuple[Row, ...]
    new_slots: tuple[NewSlot, ...] = ()
    freed_slots: tuple[int, ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(row.num_scheduled_tokens for row in self.rows)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one position: the token that stands there first, then the likeliest ones in order.

    Raw log-softmax of the model's logits, before any processor (as vLLM's default mode).
    """

    token_ids: Sequence[int]  # [1 + k]; arrays where k is large
    logprobs: Sequence[float]  # [1 + k], natural log
    rank: int  # of the token itself among the whole vocabulary; 1 is the likeliest


Fault = Literal["step", "model", "request"]
"""Whose fault an unusable row is: the runner's in this step; the model's, which gave NaN, so that the row's KV is not
to be trusted; or the request's, whose own constraints leave no token to choose."""


class RowResult(NamedTuple):
    """What one row of the plan gave, in the plan's order."""

    token_ids: tuple[int, ...] = ()  # accepted tokens: none for a chunk, one, or more with drafts
    logprobs: tuple[TokenLogprobs, ...] = ()  # one per accepted token where asked
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()  # for prompt positions C+1 .. C+n that are prompt tokens
    error: str | None = None  # why this row gave nothing usable; its neighbours are unharmed
    fault: Fault = "step"  # whose the error is


@dataclass(frozen=True, slots=True)
class StepTimings:
    """Seconds; what the device did, as seen by the host."""

    forward_s: float = 0.0
    sample_s: float = 0.0


@dataclass(frozen=True, slots=True)
class StepResult:
    step_id: int
    rows: tuple[RowResult, ...]  # same order and length as StepPlan.rows
    timings: StepTimings = StepTimings()


class RunnerStats(NamedTuple):
    """How steps reach the device. The two `late_*` counts stay 0 once the server has said that it is ready."""

    replayed_steps: int = 0  # as one CUDA graph
    launched_steps: int = 0  # kernel by kernel
    captured_graphs: int = 0
    wanted_graphs: int = 0  # step shapes that are worth a graph; fewer are captured where memory is short
    graph_bytes: int = 0  # of the device, that capturing took
    late_compiles: int = 0  # kernels compiled while somebody waited
    late_allocations: int = 0  # times the driver was asked for memory while somebody waited


class TokenMasks(NamedTuple):
    """Which tokens may come in the rows that follow a grammar."""

    rows: tuple[int, ...]  # of StepPlan.rows
    bits: npt.NDArray[np.int32]  # [rows, ceil(V / 32)]: bit id % 32 of word id // 32 is 1 where the token may come


class PendingStep(Protocol):
    """A launched step. On a GPU the host waits in `result()` for the copy of the sampled ids."""

    def result(self) -> StepResult: ...


class Runner(Protocol):
    """Mechanism. `forward` and `sample` are two calls, so that masks can be made while the forward runs."""

    num_blocks: int  # blocks in the KV cache, the null block 0 included
    block_size: int
    vocab_size: int

    def needs_host_tokens(self, params: SamplingParams) -> bool:
        """True where these parameters cannot be sampled before the host has seen the previous token."""

    def forward(self, plan: StepPlan) -> None:
        """Apply the plan's slot changes and launch its forward pass."""

    def sample(self, plan: StepPlan, masks: TokenMasks | None = None) -> PendingStep:
        """Launch sampling for the rows with `samples`; sampled ids also stay with the runner for the next step."""

    def use_idle_time(self) -> bool:
        """Called while no request is there: do one short piece of work for later. False when none is left."""

    def stats(self) -> RunnerStats: ...

    def reset(self) -> None:
        """Forget every slot (after a failed step)."""

    def close(self) -> None:
        """Give back the memory."""
