"""A fake model for tests: its answers depend on what its KV cache really holds.

Each position's token is written into its slot of a dictionary. Before a token is sampled, the whole context is read
back through the block table, and the answer is a hash of it. One misplaced slot changes the output, so "greedy output
does not depend on chunking, neighbours, cache, preemption, depth or drafts" is cheap to test. Each slot also stores the
prefix it was written under: reading another prefix's value raises `CorruptKV` at once. With `num_places` the model
also has a recurrent state, a hash chain over the tokens in numbered places: a row that begins from any other state than
that of its own prefix raises `CorruptState`. A picture's digest is part of the prefix at each of its places, and a row
that reads a picture that is not encoded, or ends inside one that attends both ways, raises `UnseenPicture`.
Does not know: torch. The scheduler's tests and scripts/bench_engine run on it.
"""

from __future__ import annotations

import zlib
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from localllm.engine.media import MediaSpan
from localllm.engine.params import SamplingParams
from localllm.engine.step import (
    DraftSupport,
    GaveWay,
    Move,
    NewSlot,
    PendingStep,
    Row,
    RowResult,
    RunnerStats,
    StepPlan,
    StepResult,
    TokenLogprobs,
    TokenMasks,
)
from localllm.text.grammar import OutputGrammar

Bits = npt.NDArray[np.int32]
NO_DRAFTS = DraftSupport(why_none="the model is made of memory")


class CorruptKV(AssertionError):
    """The KV cache holds something other than the request's own prefix."""


class CorruptState(AssertionError):
    """A row read another state than that of its own prefix, or two rows of a step use one place."""


class UnseenPicture(AssertionError):
    """A row reads a picture that is not encoded, or a part of one that has to be read whole."""


@dataclass(slots=True)
class _Slot:
    request_id: str
    params: SamplingParams
    prompt_len: int
    token_ids: array[int]
    block_tables: list[list[int]]  # one per KV group
    num_computed_tokens: int
    adapter: int = -1
    embeds: str = ""  # digest of the prompt embeddings
    max_drafts: int = 0
    drafts: tuple[int, ...] = ()  # proposed behind token_ids
    media: tuple[MediaSpan, ...] = ()
    source: bytes = b""
    num_checked: int = 0  # drafts that the row being computed verifies; they are in token_ids until it is answered
    prefix_crcs: array[int] = field(default_factory=lambda: array("L"))  # of token_ids[:i+1], after the embeddings

    def content(self, position: int) -> bytes:
        """Return what a position adds to the prefix: its token, and the digest of its picture."""
        digests = [span.digest for span in self.media if span.start <= position < span.end]
        return b"".join([self.token_ids[position].to_bytes(4, "little", signed=True), *digests])


@dataclass(frozen=True, slots=True)
class _Ready:
    step: StepResult

    def result(self) -> StepResult:
        return self.step


class FakeRunner:
    """Implements `engine.step.Runner`. A small `vocab_size` makes drafts and stop tokens hit often.

    `check=False` skips the read-back, to time the scheduler and not this file. `fail_when(plan)` makes forward raise.
    propose: makes drafts of the known tokens, at most so many; they stay here, as on a device.
    """

    def __init__(
        self,
        num_blocks: int | tuple[int, ...],
        block_size: int,
        *,
        windows: Sequence[int | None] = (None,),
        vocab_size: int = 32,
        check: bool = True,
        fail_when: Callable[[StepPlan], bool] | None = None,
        num_places: int = 0,
        propose: Callable[[Sequence[int], int], Sequence[int]] | None = None,
        drafts: DraftSupport = NO_DRAFTS,
    ) -> None:
        self._propose, self.drafts, self.profiler = propose, drafts, None
        self.num_blocks = num_blocks if isinstance(num_blocks, tuple) else (num_blocks,) * len(windows)
        self.block_size, self.num_stages, self.windows = block_size, 1, tuple(windows)
        self.vocab_size = vocab_size
        self._check, self._fail_when = check, fail_when
        self._slots: dict[int, _Slot] = {}
        self._memory: dict[tuple[int, int], tuple[int, int]] = {}
        """(group, cache slot) -> (token id, crc of the prefix up to it)"""
        self.num_places = num_places  # of recurrent states; 0: the model has none
        self._states: dict[int, int] = {}  # place -> crc of the tokens before the state; missing: poison
        self.encoded: dict[bytes, int] = {}  # rows of the encoded pictures
        self.num_encoded = 0
        self.freed: list[str] = []  # request ids, in the order their slots were freed
        self.block_bytes = (16 * block_size,) * len(windows)

    def forward(self, plan: StepPlan) -> None:
        if self._fail_when is not None and self._fail_when(plan):
            raise RuntimeError(f"asked to fail in step {plan.step_id}")
        for slot in plan.freed_slots:
            self.freed.append(self._slots.pop(slot).request_id)
        for move in plan.moves:
            self._move(move)
        for new in plan.new_slots:
            self._open(new)
        for slot_id, ids in plan.known_token_ids:
            assert array("i", ids) == self._slots[slot_id].token_ids[-len(ids) :], "ids that were not sampled"
        for digest in plan.dropped:
            self.encoded.pop(digest)
        for encode in plan.encodes:
            assert encode.digest not in self.encoded, "a picture is encoded twice"
            self.encoded[encode.digest] = encode.rows
            self.num_encoded += 1
        for row in plan.rows:
            self._see(self._slots[row.slot], row)
            self._write(self._slots[row.slot], row)
        if plan.gives_way is not None and plan.gives_way():
            self._spoil(plan.rows)
            raise GaveWay
        self._advance_states(plan.rows)

    def _spoil(self, rows: Sequence[Row]) -> None:
        """Leave in the cache what a step leaves there that ended in the middle."""
        for slot, row in ((self._slots[row.slot], row) for row in rows):
            assert (row.num_drafts, row.state) == (0, None), "a step that cannot be taken back gave way"
            for position in range(*_span(slot, row)):
                for group in range(len(self.windows)):
                    self._memory[group, self._cache_slot(slot, group, position)] = -1, -1

    def sample(self, plan: StepPlan, masks: TokenMasks | None = None) -> _Ready:
        allowed: dict[int, dict[int, Bits]] = {}
        if masks is not None:
            for i, place, bits in zip(masks.rows, masks.places or (0,) * len(masks.rows), masks.bits, strict=True):
                allowed.setdefault(i, {})[place] = bits
        rows = tuple([self._answer(self._slots[row.slot], row, allowed.get(i)) for i, row in enumerate(plan.rows)])
        if plan.propose and self._propose is not None:
            rows = tuple([
                self._proposed(self._slots[row.slot], result, plan.propose) if row.samples else result
                for row, result in zip(plan.rows, rows, strict=True)
            ])  # fmt: skip
        return _Ready(StepResult(plan.step_id, rows))

    def _proposed(self, slot: _Slot, result: RowResult, most: int) -> RowResult:
        """Propose drafts behind the known tokens, and return the result with their number."""
        assert self._propose is not None
        slot.drafts = tuple(self._propose(slot.token_ids, min(most, slot.max_drafts)))
        assert len(slot.drafts) <= min(most, slot.max_drafts)
        return result._replace(num_proposed=len(slot.drafts), proposed=slot.drafts)

    def use_idle_time(self) -> bool:
        return False

    def stats(self) -> RunnerStats:
        return RunnerStats()

    def reset(self) -> None:
        self._slots.clear()
        self._memory.clear()
        self._states.clear()
        self.encoded.clear()

    def close(self) -> None:
        self.reset()

    def _move(self, move: Move) -> None:
        """Copy blocks as pairs of token id and crc of the prefix, int64; (-1, -1): nothing was written."""
        places = [
            [(move.group, block * self.block_size + offset) for offset in range(self.block_size)]
            for block in move.blocks
        ]
        assert move.blocks, "a move of nothing"
        assert 0 not in move.blocks, "the null block moves"
        if move.is_load:
            for row, slots in zip(move.host.result(), places, strict=True):
                pairs = row.view(np.int64).reshape(-1, 2).tolist()
                self._memory.update({slot: (token, crc) for slot, (token, crc) in zip(slots, pairs, strict=True)})
            return
        rows = [np.array([self._memory.get(slot, (-1, -1)) for slot in slots], np.int64) for slots in places]
        copies = [row.reshape(-1).view(np.uint8) for row in rows]
        move.host.result = lambda: copies

    def _open(self, new: NewSlot) -> None:
        assert new.slot not in self._slots, f"slot {new.slot} is taken by {self._slots[new.slot].request_id}"
        slot = _Slot(
            new.request_id,
            new.params,
            new.prompt_len,
            array("i", new.token_ids),
            [list(blocks) for blocks in new.block_ids],
            new.num_computed_tokens,
            new.adapter,
            new.prompt_embeds.digest if new.prompt_embeds is not None else "",
            new.max_drafts,
            media=new.media,
            source=new.source,
        )
        self._slots[new.slot] = slot
        if self._check:
            self._extend_crcs(slot)

    def _see(self, slot: _Slot, row: Row) -> None:
        """Check that a row's pictures are encoded, and that the row ends in none that attends both ways."""
        start, end = row.num_computed_tokens, row.num_computed_tokens + row.num_scheduled_tokens
        if slot.source and slot.source not in self.encoded:
            raise UnseenPicture(f"{slot.request_id} reads a source that is not encoded")
        for span in slot.media:
            if span.start < end and start < span.end:
                if span.digest not in self.encoded:
                    raise UnseenPicture(f"{slot.request_id} reads a picture at {start} that is not encoded")
                if span.both_ways and end < span.end:
                    raise UnseenPicture(f"{slot.request_id} ends at {end}, inside a picture up to {span.end}")

    def _write(self, slot: _Slot, row: Row) -> None:
        assert slot.request_id == row.request_id
        for table, blocks in zip(slot.block_tables, row.new_block_ids or ((),) * len(self.windows), strict=True):
            assert 0 not in blocks, "the null block was handed out"
            table += blocks
        start, end = _span(slot, row)
        slot.num_computed_tokens = start
        assert end <= len(slot.token_ids), "a token that nobody knows was scheduled"
        if not self._check:
            return
        assert not row.samples or end == len(slot.token_ids), "sampling from the middle of what is known"
        drafts = row.draft_token_ids or slot.drafts[: row.num_drafts]
        assert len(drafts) <= row.num_drafts
        slot.num_checked, slot.drafts = len(drafts), ()
        slot.token_ids.extend(drafts)
        self._extend_crcs(slot)
        for position in range(start, end + len(drafts)):
            for group in range(len(self.windows)):
                value = slot.token_ids[position], slot.prefix_crcs[position]
                self._memory[group, self._cache_slot(slot, group, position)] = value

    def _advance_states(self, rows: Sequence[Row]) -> None:
        """Read the states of all rows, then write them: a row must not need what another row of the step writes."""
        if not self.num_places:
            assert all(row.state is None for row in rows), "a state for a model without states"
            return
        written: dict[int, int] = {}
        for row in rows:
            assert row.state is not None, f"{row.request_id} runs without a state"
            assert not row.num_drafts, "a state cannot take back a wrong guess"
            for place in {row.state.write, row.state.save} - {0}:
                if place in written or not 0 < place < self.num_places:
                    raise CorruptState(f"{row.request_id} writes place {place}")
                written[place] = self._state_after(row)
            assert row.state.write not in (0, row.state.save), row.state
        for row in rows:
            assert row.state is not None
            if row.state.read != row.state.write and row.state.read in written:
                raise CorruptState(f"{row.request_id} reads place {row.state.read}, which another row writes")
        self._states.update(written)

    def _state_after(self, row: Row) -> int:
        """Return the state after a row's tokens, computed from the one that the row reads."""
        assert row.state is not None
        slot, read = self._slots[row.slot], row.state.read
        first = zlib.crc32(slot.embeds.encode(), 1 + slot.adapter)
        state = first if read == -1 else self._states.get(read, -1)
        if not self._check:
            return state
        expected = slot.prefix_crcs[row.num_computed_tokens - 1] if row.num_computed_tokens else first
        if state != expected:
            raise CorruptState(f"{row.request_id}: place {read} is not its state after {row.num_computed_tokens}")
        for position in range(row.num_computed_tokens, row.num_computed_tokens + row.num_scheduled_tokens):
            state = zlib.crc32(slot.content(position), state)
        return state

    def _answer(self, slot: _Slot, row: Row, bits: dict[int, Bits] | None) -> RowResult:
        prompt_logprobs = self._prompt_logprobs(slot, row)
        if not row.samples:
            return RowResult(prompt_logprobs=prompt_logprobs)
        known = len(slot.token_ids) - slot.num_checked
        end = len(slot.token_ids)
        if not self._check:
            slot.token_ids.append(end % self.vocab_size)
            return RowResult((end % self.vocab_size,))
        accepted: list[int] = []
        for position in range(known - 1, end):
            mask = None if bits is None else bits.get(len(accepted))
            if mask is not None and accepted and not mask.any():
                break  # no usable draw: the next step draws it first
            accepted.append(next_token(self._read_back(slot, position), self.vocab_size, mask))
            if position + 1 < end and slot.token_ids[position + 1] != accepted[-1]:
                break  # the guess at position + 1 was wrong
        del slot.token_ids[known:]
        slot.token_ids.extend(accepted)
        del slot.prefix_crcs[known:]
        self._extend_crcs(slot)
        logprobs = tuple(self._score(token) for token in accepted) if slot.params.logprobs is not None else ()
        checked, slot.num_checked = slot.num_checked, 0
        return RowResult(tuple(accepted), logprobs, prompt_logprobs, num_checked=checked)

    def _prompt_logprobs(self, slot: _Slot, row: Row) -> tuple[TokenLogprobs, ...]:
        if slot.params.prompt_logprobs is None:
            return ()
        end = min(row.num_computed_tokens + row.num_scheduled_tokens, slot.prompt_len - 1)
        return tuple(
            self._score(
                slot.token_ids[position + 1] + 1000 * next_token(self._read_back(slot, position), self.vocab_size)
            )
            for position in range(row.num_computed_tokens, end)
        )

    def _read_back(self, slot: _Slot, position: int) -> Sequence[int]:
        """Return the tokens up to `position`, after reading through each group's block table what its attention would
        see there."""
        for group, window in enumerate(self.windows):
            for earlier in range(first_seen(window, position), position + 1):
                token_id, crc = self._memory.get((group, self._cache_slot(slot, group, earlier)), (-1, -1))
                if token_id != slot.token_ids[earlier] or crc != slot.prefix_crcs[earlier]:
                    raise CorruptKV(
                        f"{slot.request_id}: group {group} holds token {token_id} of another prefix at {earlier}"
                    )
        return slot.token_ids[: position + 1]

    def _cache_slot(self, slot: _Slot, group: int, position: int) -> int:
        block = slot.block_tables[group][position // self.block_size]
        if block == 0:
            raise CorruptKV(f"{slot.request_id}: position {position} of group {group} has been given back")
        return block * self.block_size + position % self.block_size

    def _score(self, token: int) -> TokenLogprobs:
        return TokenLogprobs((token,), (-1.0 / (1 + token),), 1 + token)

    def _extend_crcs(self, slot: _Slot) -> None:
        crc = slot.prefix_crcs[-1] if slot.prefix_crcs else zlib.crc32(slot.embeds.encode(), 1 + slot.adapter)
        for position in range(len(slot.prefix_crcs), len(slot.token_ids)):
            crc = zlib.crc32(slot.content(position), crc)
            slot.prefix_crcs.append(crc)


def _span(slot: _Slot, row: Row) -> tuple[int, int]:
    """Return the first position of a row, and the end of its known tokens. A row that decodes begins at the last one:
    what the plan says is too much by the drafts that were wrong in steps it had not settled."""
    start = row.num_computed_tokens
    end = start + row.num_scheduled_tokens - row.num_drafts
    if row.samples and row.num_scheduled_tokens == 1 + row.num_drafts:
        assert start >= len(slot.token_ids) - 1, "a position is left out"
        start = len(slot.token_ids) - 1
        end = start + 1
    return start, end


class FakePipeline:
    """A fake model in stages: a step's work is done when its result is read, which is as late as a pipeline may be.

    The first stage does not sample. It is checked when a step is launched: every token must have come with a plan, and
    no row may belong to a request whose sampled tokens have not been read. The ids that came with plans are compared
    with the sampled ones when the step's work is done.
    """

    def __init__(self, last: FakeRunner, num_stages: int) -> None:
        self.num_blocks, self.block_size, self.vocab_size = last.num_blocks, last.block_size, last.vocab_size
        self.num_stages, self.drafts = num_stages, last.drafts
        self.block_bytes = ()
        self.profiler = None
        self._last = last
        self._given: dict[int, list[int]] = {}  # token ids by slot, as the first stage knows them
        self._unread: dict[int, frozenset[str]] = {}  # requests that sample in each step whose result was not read
        self._queue: deque[tuple[StepPlan, TokenMasks | None]] = deque()
        self._done: dict[int, PendingStep] = {}

    def forward(self, plan: StepPlan) -> None:
        for slot in plan.freed_slots:
            del self._given[slot]
        for new in plan.new_slots:
            self._given[new.slot] = list(new.token_ids)
        known, unread = dict(plan.known_token_ids), frozenset().union(*self._unread.values())
        assert known.keys() <= {row.slot for row in plan.rows}, "ids without a row"
        for row in plan.rows:
            assert row.request_id not in unread, f"{row.request_id} is in two steps at a time"
            self._feed(self._given[row.slot], row, known.get(row.slot, ()))

    def _feed(self, given: list[int], row: Row, known: tuple[int, ...]) -> None:
        if known and len(given) <= row.num_computed_tokens:
            assert len(given) + len(known) == row.num_computed_tokens + 1, "ids of other tokens than the missing ones"
            given += known
        assert len(row.draft_token_ids) == row.num_drafts, "drafts that the first stage does not know"
        end = row.num_computed_tokens + row.num_scheduled_tokens - row.num_drafts
        assert end <= len(given), f"the first stage does not know token {end - 1} of {row.request_id}"

    def sample(self, plan: StepPlan, masks: TokenMasks | None = None) -> _Later:
        self._unread[plan.step_id] = frozenset(row.request_id for row in plan.rows if row.samples)
        self._queue.append((plan, masks))
        return _Later(self, plan.step_id)

    def read(self, step_id: int) -> StepResult:
        """Do the work of all steps up to this one."""
        while step_id not in self._done:
            plan, masks = self._queue.popleft()
            self._last.forward(plan)
            self._done[plan.step_id] = self._last.sample(plan, masks)
        del self._unread[step_id]
        return self._done.pop(step_id).result()

    def use_idle_time(self) -> bool:
        return False

    def stats(self) -> RunnerStats:
        return RunnerStats()

    def reset(self) -> None:
        self._last.reset()
        for state in (self._given, self._unread, self._queue, self._done):
            state.clear()

    def close(self) -> None:
        self.reset()


@dataclass(frozen=True, slots=True)
class _Later:
    pipeline: FakePipeline
    step_id: int

    def result(self) -> StepResult:
        return self.pipeline.read(self.step_id)


def first_seen(window: int | None, position: int) -> int:
    """Return the first position that a layer with this window sees from `position`: found by asking for each one."""
    if window is None:
        return 0
    alike = [
        earlier
        for earlier in range(position + 1)
        if (position - earlier < window if window > 0 else earlier // -window == position // -window)
    ]
    return alike[0]


def next_token(context: Sequence[int], vocab_size: int, bits: Bits | None = None) -> int:
    """Return a hash of the context, reduced to the allowed tokens."""
    number = zlib.crc32(array("i", context).tobytes())
    if bits is None:
        return number % vocab_size
    allowed = np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little")[:vocab_size])
    return int(allowed[number % len(allowed)])


def expected_output(
    prompt: Sequence[int], count: int, vocab_size: int = 32, grammar: OutputGrammar | None = None
) -> list[int]:
    """Return the fake model's output after `prompt`, computed without an engine."""
    known, bits = list(prompt), None if grammar is None else np.zeros(-(-vocab_size // 32), np.int32)
    for _ in range(count):
        if grammar is not None and bits is not None:
            grammar.fill(bits)
        known.append(next_token(known, vocab_size, bits))
        if grammar is not None:
            grammar.accept(known[-1])
            if grammar.is_over:
                break
    return known[len(prompt) :]
