"""The memory of all requests: their KV blocks, their slots of recurrent states, and the prefix cache over both.

    find -> enter       what the cache has of a waiting request's prompt; the request holds it from `enter` on
    grow                blocks for the positions of its next row
    name_blocks         share the blocks that are full of accepted tokens
    drop_unread         give back what no later query of a windowed group reads
    release             give back everything
    swap_out            keep the memory of a request outside of the cache until it runs again (swaps.py)
    loads               let a waiting request load blocks that are kept outside of the cache (tiers.py)

A model without recurrent states has no slots, and the methods that concern them do nothing.
Does not know: why a request runs, how many tokens a row should get, torch, text, threads.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from localllm.engine.memory.block_names import BlockHasher
from localllm.engine.memory.ledger import BlockIds, Counts, Hit, Ledger
from localllm.engine.memory.state_checkpoints import StateCheckpoints
from localllm.engine.memory.state_pool import StatePool
from localllm.engine.memory.tiers import KVTiers
from localllm.engine.prefill import num_sharable_tokens
from localllm.engine.request import NEVER, Request, State
from localllm.engine.scheduler_config import SchedulerConfig
from localllm.engine.step import Move, StateUse, StepPlan


class CacheManager:
    """Finds, gives, shares and takes back the memory of requests."""

    def __init__(
        self, config: SchedulerConfig, ledger: Ledger, hasher: BlockHasher, state_pool: StatePool | None = None,
        tiers: KVTiers | None = None,
    ) -> None:  # fmt: skip
        """state_pool: the slots of recurrent states; None: the model has none. tiers: blocks outside of the cache, for
        a model without recurrent states."""
        assert tiers is None or state_pool is None, "recurrent states do not move"
        self.tiers = tiers if config.enable_prefix_caching else None
        self.ledger, self.hasher, self._config, self._block_size = ledger, hasher, config, config.block_size
        self.states = None if state_pool is None else StateCheckpoints(state_pool, config, ledger, self._names_to)
        self.hit_multiple = max(1, config.fixed_chunk // config.block_size)  # hits are multiples of it, in blocks
        self._watermark = tuple(max(1, int(config.watermark * count)) for count in ledger.capacity)

    # ---- a request comes and goes ------------------------------------------------------------------------------------

    @property
    def num_changes(self) -> int:
        """The number of changes of the prefix cache so far: what `find` returns is valid until the next change."""
        return self.ledger.num_changes + (0 if self.states is None else self.states.pool.num_changes)

    def uses_cache(self, request: Request) -> bool:
        """Return whether a request may begin from the cache: prompt logprobs need all of its prompt computed."""
        return self._config.enable_prefix_caching and request.params.prompt_logprobs is None

    def find(self, request: Request) -> Hit:
        """Return what a waiting request may begin from. At least one token is computed, since logits are not cached."""
        names = self._names_of(request)
        hit = self.ledger.lookup(names, self.hit_multiple)
        if self.states is not None:
            return self.states.find(names, hit)
        own, size = None if self.tiers is None else self.tiers.swaps.find(request), self._block_size
        return hit if own is None or own.num_tokens(size) <= hit.num_tokens(size) else own

    def loads(self, request: Request, hit: Hit, *, begins: bool) -> bool:
        """Let a waiting request load the blocks behind its hit, where a tier has them. False: it has none to load.
        begins: False to begin in a later step, since another request found in this one might need its blocks."""
        if self.tiers is None or request.has_loaded:
            return False
        return self.tiers.loads(request, self._names_of(request), hit, self.hit_multiple, begins=begins)

    @property
    def is_loading(self) -> bool:
        """Return whether waiting requests hold blocks that are being loaded."""
        return self.tiers is not None and self.tiers.is_loading

    @property
    def has_moves(self) -> bool:
        """Return whether the next step copies blocks, even if it has no rows."""
        return self.tiers is not None and self.tiers.has_moves

    def is_being_computed(self, request: Request, hit: Hit, running: Iterable[Request]) -> bool:
        """Return whether a running request will fill the first block that this request misses in the prefix cache, or
        save a recurrent state that it could begin from."""
        index = hit.num_blocks
        if hit.num_tail_tokens:
            return False
        if self.states is not None:
            return self.states.will_find_more(request, index * self._block_size, running)
        return index < len(request.block_hashes) and any(
            other.num_registered_blocks <= index < len(other.block_hashes)
            and other.block_hashes[index] == request.block_hashes[index]
            for other in running
        )

    def has_slot(self, num_entering: int) -> bool:
        """Return whether a state slot is free if `num_entering` other requests enter in the same step."""
        return self.states is None or self.states.can_enter(num_entering)

    def enter(self, request: Request, hit: Hit) -> bool:
        """Give a request without memory a state slot and the blocks of a hit. False, without a change: no slot is
        left."""
        if self.states is not None and not self.states.enter(request, hit):
            return False
        self.ledger.enter(request, hit)
        request.num_registered_blocks = hit.num_blocks
        if self.tiers is not None:
            self.tiers.entered(request, hit.num_tokens(self._block_size))
        return True

    def swap_out(self, request: Request) -> None:
        """Keep the blocks of a running request that is preempted next, where a tier has room and it pays."""
        if self.tiers is not None:
            self.tiers.swap_out(request)

    def release(self, request: Request) -> None:
        """Take back the blocks and the state slot of a request that ends or is preempted. The named blocks can be
        found until they are reused."""
        if self.states is not None:
            self.states.release(request)
        if self.tiers is not None:
            self.tiers.released(request)
        self.ledger.release(request)

    # ---- room for admission ------------------------------------------------------------------------------------------

    def free_beside(self, running: Sequence[tuple[Request, int]], margin: int = 0) -> Counts:
        """Return the free blocks that are left when running requests have grown to these lengths in tokens, less a
        margin for one step, and `margin` blocks of each group; all free blocks if none runs."""
        ledger = self.ledger
        if not running:
            return ledger.num_free
        promised = [blocks + margin for blocks in self._watermark]
        for request, num_tokens in running:
            needs = zip(ledger.needs(num_tokens), request.num_held_blocks, strict=True)
            for group, (need, held) in enumerate(needs):
                promised[group] += max(0, need - held)
        kept = zip(ledger.num_free, promised, ledger.step_reserve, strict=True)
        return tuple([free - blocks - reserve for free, blocks, reserve in kept])

    # ---- a step is planned -------------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Name the states that earlier steps saved, as far as their tokens are known by now, and the blocks that were
        loaded."""
        if self.states is not None:
            self.states.begin_step()
        if self.tiers is not None:
            self.tiers.begin_step()

    def grow(self, request: Request, end: int) -> BlockIds | None:
        """Append blocks until the tables of a running request reach position `end`. Return them, () if there was room
        already, or None without a new block if a group has too few."""
        missing = end - len(request.block_tables[0]) * self._block_size
        if missing <= 0:
            return ()
        self.drop_unread(request)
        blocks = self.ledger.allocate(request, -(-missing // self._block_size))
        while blocks is None and self.tiers is not None and self.tiers.cancel_last():  # loads come after what runs
            blocks = self.ledger.allocate(request, -(-missing // self._block_size))
        return blocks

    def end_of_row(self, request: Request, end: int) -> int:
        """Return where a row of several tokens that could end at position `end` should end."""
        return end if self.states is None else self.states.end_of_row(request, end)

    def state_of_row(self, request: Request, end: int, *, is_known: bool) -> StateUse | None:
        """Return the slots of a row that ends at position `end`; None without recurrent states. is_known: False if
        `end` is a bound, since drafts in flight may be rejected: no state is saved there."""
        held = request.held_state
        if held is None or self.states is None:
            return None
        return self.states.use(request, end) if is_known and end >= held.next_use else held.steady

    def drop_unread(self, request: Request) -> None:
        """Give back the blocks that no step to come reads. Launched steps may still read them: they run before the step
        that writes to these blocks again. Placeholders may turn out to be wrong guesses, which are computed again."""
        position = request.num_computed_tokens - request.num_output_placeholders
        if self.ledger.has_windows and position >= request.next_drop and request.state is State.RUNNING:
            self.ledger.drop_before(request, position)

    def name_blocks(self, request: Request, end: int) -> None:
        """Name the blocks before position `end` that are full of accepted tokens: never drafts, never placeholders.

        In each layer, a step writes the K and V of all its rows before any row attends. A block can therefore be shared
        already in the step that fills it.
        """
        full = min(end, self._num_sharable(request)) // self._block_size
        if full <= request.num_registered_blocks or not self._config.enable_prefix_caching:
            return
        self._hash_blocks(request)
        for index in range(request.num_registered_blocks, full):
            self.ledger.register(request, index, request.block_hashes[index])
        if self.tiers is not None:
            self.tiers.named(request, request.num_registered_blocks, full)
        request.num_registered_blocks = full

    def forget_names(self, request: Request, end: int) -> None:
        """Drop the names of a running request's blocks from the first one on that is not full at position `end`."""
        if request.num_registered_blocks == NEVER:
            return
        full = min(end // self._block_size, request.num_registered_blocks)
        for index in range(full, request.num_registered_blocks):
            self.ledger.unregister(request, index)
        request.num_registered_blocks = full

    def commit(self, step_id: int) -> tuple[Move, ...]:
        """Count the step's rows as launched, and return the copies that come before them."""
        if self.states is not None:
            self.states.commit()
        return () if self.tiers is None else self.tiers.take_moves(step_id)

    def settle(self, plan: StepPlan, seconds: float) -> None:
        """Let tiers keep what the steps up to this one have copied out."""
        if self.tiers is not None:
            self.tiers.settle(plan, seconds)

    # ---- failures ----------------------------------------------------------------------------------------------------

    def forget_all(self, running: Iterable[Request]) -> None:
        """Drop all names after a row produced NaN. Its KV blocks and states, and any computed from them, may contain
        NaN for an unknown time, so no existing one, and none that a running request fills later, is shared."""
        self.ledger.forget_all()
        if self.states is not None:
            self.states.forget_all()
        if self.tiers is not None:
            self.tiers.forget_all()
        for request in running:
            request.num_registered_blocks = NEVER

    def clear(self) -> None:
        """Free all blocks and slots and drop all names. Requests are not changed."""
        self.ledger.clear()
        if self.states is not None:
            self.states.clear()
        if self.tiers is not None:
            self.tiers.clear()

    # ---- names -------------------------------------------------------------------------------------------------------

    def _names_to(self, request: Request, end: int) -> Sequence[bytes]:
        """Return the names of the blocks before position `end`, and register those that the request still holds."""
        if request.state is State.RUNNING:
            self.name_blocks(request, end)
        self._hash_blocks(request)
        return request.block_hashes[: end // self._block_size]

    def _names_of(self, request: Request) -> Sequence[bytes]:
        """Return the names of the blocks that a waiting request may begin from, () if it may not use the cache."""
        if not self.uses_cache(request):
            return ()
        self._hash_blocks(request)
        return request.block_hashes[: (request.num_tokens - 1) // self._block_size]

    def _hash_blocks(self, request: Request) -> None:
        """Compute the missing names of the request's full blocks that may be shared."""
        ids = request.token_ids
        if self._config.fixed_chunk:
            ids = ids[: self._num_sharable(request)]
        self.hasher.extend(request.block_hashes, request.hash_root, ids, request.spans)

    def _num_sharable(self, request: Request) -> int:
        chunk = self._config.fixed_chunk
        return num_sharable_tokens(request.prompt_len, chunk) if chunk else request.num_tokens
