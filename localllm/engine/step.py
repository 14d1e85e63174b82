"""The contract between scheduler and runner: what one step does, and its result.

Both are plain data without tensors. A fake runner can therefore answer a plan, a tensor-parallel rank can receive it
over a pipe, and thousands of scheduler tests run on a laptop.

A *slot* is a row of the runner's persistent state, 0 to max_num_seqs - 1. The scheduler assigns slots; a request keeps
its slot from the step that (re)admits it until it finishes or is preempted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from localllm.engine.media import Encode, MediaSpan
from localllm.engine.params import SamplingParams


class PromptEmbeds(Protocol):
    """Embeddings in place of a prompt's tokens (models/prompt_embeds.py).
    The token ids are then 0 and have no meaning."""

    @property
    def num_tokens(self) -> int: ...

    @property
    def digest(self) -> str:
        """Digest of the embeddings."""


@dataclass(frozen=True, slots=True)
class NewSlot:
    """A request that enters a slot, new or after a preemption, with all the runner needs to know about it."""

    slot: int
    request_id: str
    token_ids: Sequence[int]  # prompt, then the outputs so far (after a preemption); [N]
    prompt_len: int
    params: SamplingParams
    block_ids: tuple[tuple[int, ...], ...]
    """Per KV group the blocks found in the prefix cache, equally many; the rest arrive in `Row.new_block_ids`. Of a
    windowed group those before the window are the null block."""
    num_computed_tokens: int  # tokens covered by `block_ids`
    eos_token_ids: tuple[int, ...] = ()  # masked until min_tokens tokens are generated
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    adapter: int = -1  # LoRA slot in the model; -1: none
    prompt_embeds: PromptEmbeds | None = None  # replaces the first prompt_len tokens
    max_drafts: int = 0  # most drafts that the runner may propose for it at a time
    prediction_token_ids: Sequence[int] = ()  # a text that the output may repeat, as a source of drafts
    dry_breakers: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...] = ()  # text/dry_breakers.py
    media: tuple[MediaSpan, ...] = ()  # pictures of the prompt, in order
    source: bytes = b""  # digest of what an encoder-decoder's tokens attend to; empty: another model


class StateUse(NamedTuple):
    """The slots of recurrent states that a row reads and writes (engine/memory/state_pool.py).

    No two rows of a step write the same slot, and no row reads a slot that another row of the step writes.
    """

    read: int  # state before the row's first token; -1: zeros
    write: int  # slot of the state after the row's last token: the request's own
    save: int = 0  # a second slot for the same state; 0: none


class Row(NamedTuple):
    """One request's share of one step.
    A tuple, because each step makes one per request and a dataclass costs five times as much.

    A row that samples with n = 1 + num_drafts begins at the last token that the runner knows, whatever C says: while
    drafts of the request are in flight, C counts all of them as accepted. The runner runs as many of the drafts as
    there are.
    """

    slot: int
    request_id: str
    num_computed_tokens: int  # C: tokens whose KV exists before this step
    num_scheduled_tokens: int  # n >= 1: positions C .. C+n-1 run now
    new_block_ids: tuple[tuple[int, ...], ...]
    """Per KV group the blocks appended to the slot's block table before the forward, equally many; empty: none."""
    samples: bool  # False: a prefill chunk that stops short of the last known token
    draft_token_ids: tuple[int, ...] = ()  # drafts made by the host; (): those that the runner has proposed
    state: StateUse | None = None  # None: a model without recurrent states
    num_drafts: int = 0  # number of drafts, which are the last of the n positions
    num_reread: int = 0  # cached positions before C to run again, since a drafter needs their features; KV is kept

    @property
    def is_decode(self) -> bool:
        """Return whether the row generates: its last known token, and drafts. A prompt's last token may be one, too."""
        return self.samples and self.num_scheduled_tokens == 1 + self.num_drafts


class GaveWay(Exception):
    """Raised by `Runner.forward` in place of a result: the step's rows are not computed, its slot changes are made."""


Bytes = npt.NDArray[np.uint8]


@dataclass(slots=True, eq=False)
class HostBlocks:
    """Contents of blocks on the host, each as bytes whose meaning only the runner knows: [N][bytes of a block].

    The runner sets `result` for blocks that leave the cache. It may be called on any thread once the move is launched,
    and waits for a copy from a device. It sets `seconds`, the time that the copy took, which is known when the step's
    result is; 0: not measured.
    """

    result: Callable[[], Sequence[Bytes]]
    seconds: Callable[[], float] = lambda: 0.0


class Move(NamedTuple):
    """Copy blocks of one KV group between the cache and the host."""

    group: int
    blocks: tuple[int, ...]
    is_load: bool  # into the cache
    host: HostBlocks


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The runner's task for one step: apply `freed_slots`, then `moves` in order, then `new_slots`, then run `rows` as
    one batch. A step may have moves and no rows.

    The runner knows the token id at each position: it was in `NewSlot.token_ids`, or the runner sampled it itself.
    Only the last stage of a pipeline samples, so for the others these ids and all drafts come with the plan.
    """

    step_id: int
    rows: tuple[Row, ...]
    new_slots: tuple[NewSlot, ...] = ()
    freed_slots: tuple[int, ...] = ()
    known_token_ids: tuple[tuple[int, tuple[int, ...]], ...] = ()
    """(slot, ids) of rows whose last token was sampled: what the request's last step has accepted, up to that token.
    Empty for one stage."""
    propose: int = 0  # most drafts that the runner proposes behind each row that samples, for the next step
    is_unmasked: bool = False  # no row follows a grammar: `sample` gets no masks, so tokens may be drawn in `forward`
    dropped: tuple[bytes, ...] = ()  # encoded pictures to forget, before others are encoded
    encodes: tuple[Encode, ...] = ()  # pictures to encode before the forward pass
    gives_way: Callable[[], bool] | None = None
    """Asked between two layers, where a runner can: whether to raise `GaveWay`. None: the step cannot be taken back."""
    moves: tuple[Move, ...] = ()  # on a device in the order of its work: behind earlier steps, before this one's rows

    @property
    def num_tokens(self) -> int:
        return sum(row.num_scheduled_tokens + row.num_reread for row in self.rows)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one position: first the token at this position, then the likeliest tokens in order.

    Raw log-softmax of the model's logits, before any processor (vLLM's default mode).
    """

    token_ids: Sequence[int]  # [1 + k]; arrays where k is large
    logprobs: Sequence[float]  # [1 + k], natural log
    rank: int  # rank of the first token in the whole vocabulary; 1 is the likeliest


Fault = Literal["step", "model", "request"]
"""Cause of an unusable row. "step": the runner failed in this step. "model": the model produced NaN, so the row's KV
cannot be trusted. "request": the request's own constraints leave no token to choose."""


class RowResult(NamedTuple):
    """Result of one row, in the plan's order."""

    token_ids: tuple[int, ...] = ()  # accepted tokens: none for a prefill chunk, 1 to 1 + num_checked otherwise
    logprobs: tuple[TokenLogprobs, ...] = ()  # one per accepted token, if requested
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()  # for prompt positions C+1 .. C+n that are prompt tokens
    error: str | None = None  # why this row has no usable result; other rows are unaffected
    fault: Fault = "step"  # cause of the error
    num_checked: int = 0  # drafts that were there to be verified, at most Row.num_drafts
    num_proposed: int = 0  # drafts that are ready for the next step
    proposed: tuple[int, ...] = ()  # their ids, if the host has them: a grammar needs them
    are_predicted: bool = False  # they are from the request's prediction


@dataclass(frozen=True, slots=True)
class StepTimings:
    """Times of one step on the device in seconds, as seen by the host."""

    forward_s: float = 0.0
    sample_s: float = 0.0


@dataclass(frozen=True, slots=True)
class StepResult:
    step_id: int
    rows: tuple[RowResult, ...]  # same order and length as StepPlan.rows
    timings: StepTimings = StepTimings()


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Device memory that a rank holds, in bytes by part."""

    weights_bytes: int = 0
    kv_bytes: int = 0
    activation_bytes: int = 0  # the peak of a step
    other_bytes: int = 0  # graphs, buffers of collectives

    @property
    def held_bytes(self) -> int:
        return self.weights_bytes + self.kv_bytes + self.activation_bytes + self.other_bytes


@dataclass(frozen=True, slots=True)
class RankStats:
    """State of one rank: the process that runs a shard of the model on a device."""

    rank: int  # 0 to world size - 1, stage by stage
    stage: int  # pipeline stage
    shard: int  # tensor-parallel shard within the stage
    device: str  # cuda:0, cpu
    device_name: str = ""  # as the driver names the device
    pid: int = 0  # 0: not started
    is_up: bool = True  # False: the process ended or is considered lost
    memory: RankMemory = RankMemory()
    device_bytes: int = 0  # memory of the whole device; 0: unknown
    step_s: float = 0.0  # mean duration of the recent steps, waits for other ranks included
    busy_ratio: float | None = None  # share of the recent time in steps that the rank computed; on a GPU None
    lag_steps: int = 0  # launched steps behind the rank that has launched the most
    restarts: int = 0  # processes of this rank that were started after the first one
    last_words: str = ""  # why the last lost process of this rank was lost; empty: none was lost


class KernelFallBack(NamedTuple):
    """A kernel that is not served by its best variant on this GPU."""

    kernel: str
    variant: str  # that is served
    text: str  # why, and what it costs


class RunnerStats(NamedTuple):
    """Counts of how steps were launched, and the ranks.
    The two `late_*` counts stay 0 once the server has reported that it is ready."""

    replayed_steps: int = 0  # steps replayed as one CUDA graph
    launched_steps: int = 0  # steps launched kernel by kernel
    captured_graphs: int = 0
    wanted_graphs: int = 0  # step shapes worth a graph; fewer are captured if memory is short
    failed_graphs: int = 0  # of these that could not be recorded, and are launched kernel by kernel
    graph_failure: str = ""  # why the first of them failed
    graph_bytes: int = 0  # device memory used by graphs
    late_compiles: int = 0  # kernels compiled while a request waited
    late_allocations: int = 0  # driver allocations while a request waited
    ranks: tuple[RankStats, ...] = ()  # in the order of their numbers; empty: the model runs in the server's process
    fall_backs: tuple[KernelFallBack, ...] = ()
    kernel_check: str = ""  # what was compared at this start; empty: nothing
    decode_steps: str = ""  # on a CPU: how they are computed, and why not by the native library; empty: on a GPU
    picture_row_s: float = (
        0.0  # seconds to encode a row of a picture: first by the speed of a matrix product; 0: unknown
    )
    far_bytes: int = 0  # of experts and lookup tables in RAM beside a GPU
    far_s: float = 0.0  # seconds that the CPU has computed them, all steps together
    far_read_bytes: int = 0  # of them, that it has read for that
    streamed_bytes: int = 0  # of experts in RAM that were copied to the device
    disk_read_bytes: int = 0  # of experts that are on disk
    disk_reads: int = 0  # experts that were read
    disk_hits: int = 0  # experts that were found in RAM instead
    prompt_token_s: float = 0.0  # seconds to compute a prompt token, in the last steps with prompts; 0: none was run

    def bubble_ratios(self) -> dict[int, float]:
        """Return for each pipeline stage the share of the recent time in which none of its ranks computed.

        Stages without a known share are left out, and so is a pipeline of one stage.
        """
        busy: dict[int, list[float]] = {}
        for rank in self.ranks:
            if rank.busy_ratio is not None:
                busy.setdefault(rank.stage, []).append(rank.busy_ratio)
        has_pipeline = len({rank.stage for rank in self.ranks}) > 1
        return {stage: 1 - max(shares) for stage, shares in busy.items()} if has_pipeline else {}


class TokenMasks(NamedTuple):
    """Allowed tokens of M draws that follow a grammar. A row draws 1 + num_drafts tokens, each with its own mask."""

    rows: tuple[int, ...]  # [M] indexes into StepPlan.rows
    bits: npt.NDArray[np.int32]  # [M, ceil(V / 32)]: bit id % 32 of word id // 32 is 1 if the token is allowed
    places: tuple[int, ...] = ()  # [M] which of the row's draws; (): the first one of each


class DraftSupport(NamedTuple):
    """The drafts that a runner can verify and propose."""

    most: int = 0  # drafts of one row; 0: it verifies none
    step_tokens: int = 0  # tokens of a step that has drafts, at most
    proposes: bool = False
    why_none: str = ""  # why `most` is 0, as a part of a sentence
    lookahead: int = 0  # positions behind the known tokens that a drafter with weights writes to, if they have blocks
    num_reread: int = 0  # `Row.num_reread` of rows that begin behind a prefix hit
    widths: tuple[int, ...] = ()  # drafts of each row to which a step is padded, ascending; (): it is not padded

    def padded_tokens(self, num_rows: int, drafts: int) -> int:
        """Return the tokens of a step whose rows have `drafts` drafts each, padding included."""
        return num_rows * (1 + next((width for width in self.widths if width >= drafts), drafts))


class PendingStep(Protocol):
    """A launched step. On a GPU the host waits in `result()` for the copy of the sampled ids."""

    def result(self) -> StepResult: ...


class Profiler(Protocol):
    """Records traces of a runner's steps. Every call is made on the thread that runs the steps."""

    def start(self) -> None:
        """Begin to record. Raises a `RequestError` if a trace is being recorded."""

    def stop(self) -> Callable[[str], Path]:
        """End the trace. Return a function that writes it for a model's name, on any thread, and returns the file.
        Raises a `RequestError` if no trace is being recorded."""

    def drop(self) -> None:
        """End a trace without writing it, if one is being recorded."""


class Runner(Protocol):
    """Executes steps. `forward` and `sample` are two calls, so that masks can be made while the forward runs."""

    num_blocks: tuple[int, ...]  # blocks of each KV group, the null block 0 included
    block_size: int
    vocab_size: int
    num_stages: int  # pipeline stages; each works on a step of its own
    drafts: DraftSupport
    block_bytes: tuple[int, ...]  # of one block of each KV group, as `StepPlan.moves` copies it; (): it copies none

    @property
    def profiler(self) -> Profiler | None:
        """The recorder of traces; None: --torch-profiler-dir is not set, or the steps run in other processes."""

    def forward(self, plan: StepPlan) -> None:
        """Apply the plan's slot changes and launch its forward pass. Raises `GaveWay` if the plan says so."""

    def sample(self, plan: StepPlan, masks: TokenMasks | None = None) -> PendingStep:
        """Launch sampling for the rows with `samples`. The runner also keeps the sampled ids for the next step."""

    def use_idle_time(self) -> bool:
        """Do one short piece of optional work while there is no request. Return False when none is left."""

    def stats(self) -> RunnerStats:
        """Return the counts and the state of the ranks.

        A runner with ranks answers any thread at any time, also after `close`, and never waits for a rank.
        """

    def reset(self) -> None:
        """Forget every slot (after a failed step)."""

    def close(self) -> None:
        """Free the memory."""
