"""Checkpoints of recurrent states: which are kept, and which slots each row of a step reads and writes.

A prompt begins behind its known start only if the KV of that start is there *and* the state after exactly as many
tokens. K and V of every token are kept anyway; a state is kept where a row of a step ends. Rows therefore end

    at the last block boundary of each prompt    the next turn of a chat agrees with this one up to there
    at the end of the known KV of a prompt       the second request with a common start saves it, the third begins there
    at block boundaries where a step ends a chunk of a long prompt anyway; saved once per full step, into free slots
    every `state_interval` tokens of an output   moved along: one per request, until it ends

A state is there only when its step has run. A checkpoint is therefore found from the next step on, and once all its
tokens are known.
Does not know: torch, how many tokens a row should get (scheduler.py), what slots are (state_pool.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Literal, NamedTuple

from localllm.engine.memory.ledger import NO_STATE, Hit, Ledger
from localllm.engine.memory.state_pool import NULL_SLOT, StatePool
from localllm.engine.prefill import num_sharable_tokens
from localllm.engine.request import NEVER, HeldState, Request
from localllm.engine.scheduler_config import SchedulerConfig
from localllm.engine.step import StateUse

Kind = Literal["kept", "chunk", "moving"]


class _Save(NamedTuple):
    """A state that a launched row writes to a slot of its own, not named yet."""

    request: Request
    held: HeldState
    position: int  # tokens that the state comes after
    slot: int
    kind: Kind


class StateCheckpoints:
    """The states of running requests and the checkpoints.

    names_to: returns the names of a request's blocks before a position, all of whose tokens are known, and registers
    those that the request still holds.
    """

    def __init__(
        self,
        pool: StatePool,
        config: SchedulerConfig,
        ledger: Ledger,
        names_to: Callable[[Request, int], Sequence[bytes]],
    ) -> None:
        self.pool, self._config, self._ledger, self._names_to = pool, config, ledger, names_to
        self._full = [pool for pool, window in zip(ledger.pools, ledger.windows, strict=True) if window is None]
        for full in self._full:
            full.on_dropped.append(pool.drop_block)
        self._unit = config.fixed_chunk or config.block_size  # checkpoints are at multiples of it
        self._interval = max(self._unit, config.state_interval)
        self._planned: dict[str, _Save] = {}  # of the step under construction, by request
        self._pending: list[_Save] = []
        self._read: list[int] = []  # checkpoints that rows of the last step read

    # ---- a request comes and goes ------------------------------------------------------------------------------------

    def find(self, names: Sequence[bytes], hit: Hit) -> Hit:
        """Return the part of a hit that ends at the deepest checkpoint. names: of the blocks that were looked up.

        A shorter prefix needs other blocks of a windowed group, and not all of them may still be there.
        """
        num_kv_blocks = hit.num_blocks
        while hit.num_blocks:
            found = self.pool.lookup(names, hit.num_blocks)
            depth = 0 if found is None else found.num_blocks
            if depth != hit.num_blocks:
                hit = self._ledger.lookup(names[:depth], self._unit // self._config.block_size)
            if found is not None and depth == hit.num_blocks:
                return Hit(depth, hit.blocks, found.slot, num_kv_blocks)
        return hit._replace(num_kv_blocks=num_kv_blocks)

    def can_enter(self, num_entering: int) -> bool:
        """Return whether a slot is free if `num_entering` other requests enter in the same step."""
        return self.pool.num_available > num_entering

    def enter(self, request: Request, hit: Hit) -> bool:
        """Give a waiting request a slot and the state that it begins from. False, without a change: none is left."""
        slot = self._slot_beside(hit.state)
        if slot is None:
            return False
        if hit.state not in (NO_STATE, slot):
            self._read.append(hit.state)
        start = hit.num_blocks * self._config.block_size
        request.held_state = HeldState(slot, hit.state, start, self._positions(request, hit), StateUse(slot, slot))
        return True

    def _slot_beside(self, read: int) -> int | None:
        """Return a slot to write, which keeps the checkpoint at `read`, or is that checkpoint's if no other is left
        and no other request reads it."""
        if read == NO_STATE:
            return self.pool.allocate()
        self.pool.acquire(read)
        slot = self.pool.allocate()
        if slot is None:
            self.pool.release(read)
            return read if self.pool.adopt(read) else None
        return slot

    def _positions(self, request: Request, hit: Hit) -> list[int]:
        """Return the positions of a prompt at which its state will be kept."""
        if not self._config.enable_prefix_caching:
            return []
        size, unit = self._config.block_size, self._unit
        positions = {min(request.num_tokens - 1, self._num_sharable(request)) // unit * unit}
        if (hit.num_kv_blocks - hit.num_blocks) * size >= self._interval:
            positions.add(hit.num_kv_blocks * size // unit * unit)
        return sorted(position for position in positions if position > hit.num_blocks * size)

    def _num_sharable(self, request: Request) -> int:
        chunk = self._config.fixed_chunk
        return num_sharable_tokens(request.prompt_len, chunk) if chunk else request.num_tokens

    def release(self, request: Request) -> None:
        """Take back the slot of a request that ends or is preempted, and what its row of this step would save."""
        held = request.held_state
        if held is None:
            return
        self.pool.release(held.slot)
        if held.moving:
            self.pool.keep(held.moving)
        planned = self._planned.pop(request.request_id, None)
        if planned is not None:
            self.pool.release(planned.slot)
        held.slot, request.held_state = NULL_SLOT, None

    def will_find_more(self, request: Request, num_cached_tokens: int, running: Iterable[Request]) -> bool:
        """Return whether a waiting request would find a deeper checkpoint if it waited: one that a running request is
        about to save or has just saved."""
        size, names = self._config.block_size, request.block_hashes
        last = (request.num_tokens - 1) // size

        def is_common(other: Request, position: int) -> bool:
            index = position // size - 1
            theirs = other.block_hashes
            return position > num_cached_tokens and index < min(last, len(names), len(theirs)) and (
                theirs[index] == names[index]
            )  # fmt: skip

        saves = (*self._pending, *self._planned.values())
        if any(is_common(save.request, save.position) for save in saves):
            return True
        return any(
            is_common(other, position) for other in running if other.held_state for position in other.held_state.save_at
        )

    # ---- a step is planned -------------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Name the states that earlier steps saved, as far as their tokens are known by now."""
        for slot in self._read:
            self.pool.release(slot)
        self._read.clear()
        pending, self._pending = self._pending, []
        for save in pending:
            if save.request.num_tokens < save.position and not save.request.is_finished:
                self._pending.append(save)
            else:
                self._name(save)

    def _name(self, save: _Save) -> None:
        request, held, position, slot, kind = save
        names = self._names_to(request, position) if request.num_tokens >= position else ()
        runs = held.slot != NULL_SLOT
        spare = kind == "chunk" or (kind == "moving" and runs)
        named = bool(names) and self.pool.register(slot, names, has_kv=self._has_kv, spare=spare)
        self.pool.release(slot)
        if named and kind == "moving":
            if held.moving:
                self.pool.forget_spare(held.moving)
            held.moving = names[-1]

    def _has_kv(self, name: bytes) -> bool:
        """Return whether the block of that name can be found; windowed groups drop theirs as a request grows."""
        return all(pool.find(name) is not None for pool in self._full)

    def end_of_row(self, request: Request, end: int) -> int:
        """Return where a row that could end at position `end` should end: at a position to save, else a chunk at a
        block boundary, unless no boundary is within reach."""
        held, start = request.held_state, request.num_computed_tokens
        assert held is not None, f"{request.request_id} runs without a state"
        if held.save_at and start < held.save_at[0] < end:
            return held.save_at[0]
        if end > request.num_tokens + request.num_output_placeholders and self._config.enable_prefix_caching:
            boundary = start - start % self._interval + self._interval
            return min(end, max(start + 1, boundary - 1))  # a state behind guesses cannot be saved: none reaches there
        if end >= request.num_tokens + request.num_output_placeholders:
            return end
        boundary = end - end % self._config.block_size
        return boundary if boundary > start else end

    def use(self, request: Request, end: int) -> StateUse:
        """Return the slots of a row that ends at position `end`; the row may still leave the step with `release`."""
        held = request.held_state
        assert held is not None, f"{request.request_id} runs without a state"
        save, kind = NULL_SLOT, self._kind(request, held, end)
        if kind is not None:
            save = self.pool.allocate(may_evict=kind != "chunk") or NULL_SLOT
        if kind is not None and save:
            self._planned[request.request_id] = _Save(request, held, end, save, kind)
            held.saved = end
        if held.save_at and held.save_at[0] == end:
            del held.save_at[0]
        held.next_use = end - end % self._unit + self._unit
        read, held.read = held.read, held.slot
        return StateUse(read, held.slot, save)

    def _kind(self, request: Request, held: HeldState, end: int) -> Kind | None:
        """Return why the state at a row's end is saved; None: it is not."""
        if not self._config.enable_prefix_caching or request.num_registered_blocks == NEVER:
            return None
        if end in held.save_at:
            return "kept"
        if end % self._unit or (self._config.fixed_chunk and end > self._num_sharable(request)):
            return None
        if end < request.num_tokens + request.num_output_placeholders:
            return "chunk" if end - held.saved >= self._config.max_num_batched_tokens else None
        if end % self._interval:
            return None
        return "kept" if self._interval == self._unit else "moving"

    def commit(self) -> None:
        """Count the step's rows as launched."""
        self._pending += self._planned.values()
        self._planned.clear()

    # ---- failures ----------------------------------------------------------------------------------------------------

    def forget_all(self) -> None:
        """Drop all checkpoints, also those not named yet."""
        for save in self._pending:
            self.pool.release(save.slot)
        self._pending.clear()
        self.pool.forget_all()

    def clear(self) -> None:
        """Free all slots."""
        self._planned.clear()
        self._pending.clear()
        self._read.clear()
        self.pool.clear()
