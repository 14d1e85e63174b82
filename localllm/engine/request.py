"""One completion in the engine: five counters, a block table, and timestamps.

    N  len(token_ids)              tokens known here: prompt and accepted outputs
    S  num_drafts                  drafts to verify in the step that is being planned
    P  num_output_placeholders     outputs launched on the device and not read yet
    C  num_computed_tokens         positions whose KV is, or is about to be, written (advanced when scheduled)
    F  num_in_flight_tokens        positions of launched steps that are not settled yet

A launched draft counts as accepted in P and C until its step is settled: both are upper bounds while drafts are in
flight, and P - C + N is exact.
The work of a request is N + S + P - C tokens. Prefill, a prefill chunk, decode, draft verification and resuming after a
preemption are values of this one difference; no other field distinguishes them.
Only the scheduler writes these fields. Does not know: the contents of blocks, text, torch.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from localllm.engine.adapter import Adapter
from localllm.engine.media import EncoderPrompt, MediaSpan
from localllm.engine.memory.block_names import InputSpan
from localllm.engine.outputs import NO_COUNTS, DraftCounts
from localllm.engine.params import SamplingParams
from localllm.engine.prompt_history import CacheMiss, Prefix
from localllm.engine.stats import RequestTimeline
from localllm.engine.step import PromptEmbeds, StateUse, TokenLogprobs
from localllm.text.dry_breakers import Breakers
from localllm.text.grammar import OutputGrammar


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """The options of a request beside its prompt and its sampling parameters."""

    priority: int = 0  # smaller runs first under --scheduling-policy priority
    cache_salt: str | None = None  # requests with different salts never share KV blocks
    owner: str = ""  # whose it is: an explanation of a cache miss quotes only requests of the same owner
    adapter: Adapter | None = None
    length_penalty: float | None = None  # of a beam search of width params.n (beam_search.py); None: no beam search
    timings_per_token: bool = False  # report timings with every event, not only with the last one
    progress: bool = False  # report that of the prompt, for the first choice only: others find most of it in the cache
    source: str = ""  # where the request comes from, for display: chat, playground, API
    key_name: str = ""  # name of the key that it was sent with; empty: none, or a chat
    max_drafts: int | None = None  # most tokens guessed ahead at a time (speculation); 0: none, None: as configured
    prediction_token_ids: tuple[int, ...] = ()  # a text that the output may repeat: a source of drafts
    decoder_prompt_token_ids: tuple[int, ...] = ()
    """Tokens with which an encoder-decoder's answer begins behind the start token; (): what the checkpoint says."""
    part_of: str = ""  # id of the beam search that the request is a step of; empty: a request of its own
    replica: int | None = None  # number of the only replica that may answer (--data-parallel-size)
    keeps_no_copy: bool = False  # what it computes is not written to a disk (store: false)
    is_background: bool = False  # a line of a batch: every other request runs first, under each policy
    hands_over: bool = False  # another engine continues it with its KV blocks, which leave when its tokens are made


NO_OPTIONS = RequestOptions()

BACKGROUND_PRIORITY = 2**63
"""Priority of background requests. It is above every priority that a client can send, which is a signed integer of 64
bits: a smaller one runs first."""

MOST_EVENTS = 24

NEVER = 2**31
"""Larger than any request's number of blocks.
As `num_registered_blocks` it keeps further blocks from being registered."""


@dataclass(slots=True)
class HeldState:
    """The recurrent state of a running request (memory/state_checkpoints.py).
    A position counts the tokens before a state."""

    slot: int  # of its state; 0: released
    read: int  # slot that its next row reads; -1: that row begins from zeros
    saved: int  # newest position of the request at which there is, or was, a checkpoint
    save_at: list[int]  # positions of the prompt at which rows will end and save the state, ascending
    steady: StateUse  # of a row that continues and saves nothing:
    next_use: int = 0  # of one that ends before this position
    moving: bytes = b""  # name of the checkpoint that moves along with the output; empty: none


FIRST_RATE = 0.7
"""Probability that a draft is right if its predecessors are, before anything of the request was verified."""
PRIOR_WEIGHT = 1.0
"""Drafts for which `FIRST_RATE` counts."""
REJECTION_DECAY = 0.95
"""Weight that a rejection leaves to what was verified before it."""
HALF_LIFE = 64.0
"""Output tokens after which the verified drafts count half, so that a request without luck is tried again."""


@dataclass(slots=True)
class Acceptance:
    """The verified drafts of one request."""

    counts: DraftCounts = NO_COUNTS
    _accepted: float = 0.0  # weights of the recent ones
    _rejected: float = 0.0

    @property
    def rate(self) -> float:
        """Probability that the next draft is right if those before it are."""
        total = self._accepted + self._rejected + PRIOR_WEIGHT
        return (self._accepted + FIRST_RATE * PRIOR_WEIGHT) / total

    def settle(self, checked: int, accepted: int, *, are_predicted: bool = False) -> None:
        """Record a row that verified `checked` drafts, 0 or more, of which the first `accepted` were right."""
        if checked:
            predicted = (accepted, checked - accepted) if are_predicted else (0, 0)
            self.counts = self.counts.plus(DraftCounts(checked, accepted, *predicted))
        kept = 0.5 ** ((1 + accepted) / HALF_LIFE)
        is_rejected = accepted < checked
        if is_rejected:
            kept *= REJECTION_DECAY
        self._accepted = self._accepted * kept + accepted
        self._rejected = self._rejected * kept + is_rejected

    def expected(self, drafts: int) -> float:
        """Return the expected number of right drafts among `drafts`."""
        rate, power, total = self.rate, 1.0, 0.0
        for _ in range(drafts):
            power *= rate
            total += power
        return total


class State(StrEnum):
    WAITING = "waiting"
    LOADING = "loading"  # waiting for blocks to be read from a tier; holds blocks and no slot (memory/tiers.py)
    RUNNING = "running"
    PREEMPTED = "preempted"  # waiting again, without blocks
    FINISHED = "finished"


class Request:
    """One completion; the module's header explains the counters.
    `max_output_tokens` is already limited to the context length."""

    __slots__ = (
        "acceptance", "are_predicted", "arrived_s", "bad_words_token_ids", "block_hashes", "block_tables",
        "cache_extras", "cache_miss", "draft_token_ids", "dry_breakers", "eos_token_ids", "events", "finish_reason",
        "finished_s", "first_token_s", "grammar", "has_loaded",
        "hash_root", "held_state", "is_redrawn", "last_proposed", "last_token_s", "max_drafts",
        "max_output_tokens", "media", "most_unseen", "next_drop", "num_accepted",
        "num_cached_tokens", "num_computed_tokens", "num_drafts", "num_dropped_blocks", "num_in_flight_tokens",
        "num_loaded_tokens", "num_lost_tokens", "num_output_placeholders", "num_preemptions", "num_proposed",
        "num_registered_blocks", "num_swaps",
        "options", "params", "priority", "prompt_embeds", "prompt_len", "prompt_logprobs", "proposed",
        "reports_progress", "request_id", "scheduled_s", "sequence", "slot", "source", "spans", "state",
        "stop_token_ids", "token_ids",
    )  # fmt: skip

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        options: RequestOptions = NO_OPTIONS,
        *,
        max_output_tokens: int,
        eos_token_ids: tuple[int, ...] = (),
        bad_words_token_ids: tuple[tuple[int, ...], ...] = (),
        dry_breakers: Breakers = (),
        grammar: OutputGrammar | None = None,
        reports_progress: bool = False,
        prompt_embeds: PromptEmbeds | None = None,
        media: tuple[MediaSpan, ...] = (),
        source: EncoderPrompt | None = None,
        arrived_s: float = 0.0,
    ) -> None:
        self.request_id, self.params, self.options = request_id, params, options
        self.token_ids = array("i", prompt_token_ids)
        self.prompt_len, self.max_output_tokens = len(self.token_ids), max_output_tokens
        self.eos_token_ids = eos_token_ids
        self.stop_token_ids = frozenset(params.stop_token_ids) | (
            frozenset() if params.ignore_eos else frozenset(eos_token_ids)
        )
        self.bad_words_token_ids = bad_words_token_ids
        self.dry_breakers = dry_breakers
        self.priority = options.priority  # the scheduler ignores it under the policy fcfs
        self.grammar, self.reports_progress, self.prompt_embeds = grammar, reports_progress, prompt_embeds
        self.media, self.source = media, source  # source: the prompt of an encoder-decoder
        salt = [("salt", options.cache_salt)] if options.cache_salt else []
        own = [] if source is None else [("source", source.digest.hex())]
        self.cache_extras = (*salt, *own, *([options.adapter.cache_extra] if options.adapter is not None else []))
        self.spans = _input_spans(self.prompt_len, prompt_embeds, media)
        self.sequence = 0  # order of arrival, set by the scheduler

        self.most_unseen: int | None = None  # placeholders with which it may still be scheduled; None: any number
        self.draft_token_ids: tuple[int, ...] = ()  # made by the host; (): the runner's own are verified
        self.num_drafts = 0
        self.max_drafts = 0  # most drafts at a time, set by the scheduler
        self.num_accepted = self.num_proposed = 0  # tokens of its last settled step, and drafts ready after it
        self.last_proposed = 0  # output tokens that it had when drafts were last ready for it
        self.proposed: tuple[int, ...] = ()  # their ids, if the host has them
        self.are_predicted = False  # they are from the prediction
        self.acceptance = Acceptance()
        self.num_output_placeholders = 0
        self.num_computed_tokens = self.num_in_flight_tokens = 0
        self.num_cached_tokens = 0  # prompt tokens found in the prefix cache at the first admission
        self.cache_miss: CacheMiss | None = None  # why there were no more of them

        self.state = State.WAITING
        self.slot = -1
        self.block_tables: list[list[int]] = []  # one per KV group, equally long; empty unless it runs (memory/)
        self.num_dropped_blocks: list[int] = []  # of each table the leading entries without a block
        self.held_state: HeldState | None = None  # None: not running, or a model without recurrent states
        self.is_redrawn = False  # its rows in flight are void, since its grammar refused a token before them
        self.next_drop = 0  # position from which on a windowed group's next block is not read any more
        self.block_hashes: list[bytes] = []
        self.hash_root, self.num_registered_blocks = b"", 0
        self.num_preemptions = self.num_loaded_tokens = 0  # the latter: tokens whose KV came from a tier
        self.num_swaps = 0  # preemptions after which its blocks were kept in RAM
        self.has_loaded = False  # since it was last admitted, it has been looked up in the tiers
        self.num_lost_tokens = 0  # tokens whose KV existed at a preemption
        self.prompt_logprobs: list[TokenLogprobs] = []

        self.arrived_s = arrived_s
        self.scheduled_s: float | None = None
        self.first_token_s: float | None = None
        self.last_token_s: float | None = None
        self.finished_s: float | None = None
        self.events: list[tuple[str, float]] = []  # the first preemptions, swaps and loads, in order
        self.finish_reason: str | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.prompt_len

    @property
    def num_blocks(self) -> int:
        """Length of its block tables."""
        return len(self.block_tables[0]) if self.block_tables else 0

    @property
    def num_held_blocks(self) -> tuple[int, ...]:
        """Blocks of each KV group."""
        return tuple([len(t) - n for t, n in zip(self.block_tables, self.num_dropped_blocks, strict=True)])

    @property
    def num_wanted_tokens(self) -> int:
        """N + S + P - C."""
        return len(self.token_ids) + self.num_drafts + self.num_output_placeholders - self.num_computed_tokens

    @property
    def waits_for_tokens(self) -> bool:
        """Return whether a launched step must be settled before the request may be scheduled again."""
        return self.most_unseen is not None and self.num_output_placeholders > self.most_unseen

    @property
    def is_finished(self) -> bool:
        return self.state is State.FINISHED

    @property
    def is_private(self) -> bool:
        """Return whether its KV must not be written to a disk."""
        return self.options.cache_salt is not None or self.options.keeps_no_copy

    def note(self, event: str, at_s: float) -> None:
        """Add an event to the timeline, which keeps the first ones. at_s: as `now_s` of recorder.py says."""
        if len(self.events) < MOST_EVENTS:
            self.events.append((event, at_s))

    def drop_drafts(self) -> None:
        """Forget all drafts: the host's, and the ones that the runner had ready."""
        self.draft_token_ids = self.proposed = ()
        self.num_drafts, self.num_proposed, self.are_predicted = 0, 0, False

    def start_over(self) -> None:
        """Return to waiting with nothing computed, in flight or held; tokens already sent are kept."""
        if self.state is State.RUNNING:
            self.state = State.PREEMPTED
        self.slot, self.held_state, self.has_loaded = -1, None, False
        self.drop_drafts()
        self.block_tables, self.num_dropped_blocks = [], []
        self.num_lost_tokens = max(self.num_lost_tokens, self.num_computed_tokens)
        self.num_computed_tokens = self.num_in_flight_tokens = self.num_output_placeholders = 0
        self.num_registered_blocks = 0

    def prefix(self, num_tokens: int, block_size: int) -> Prefix:
        """Return a copy of the first tokens, with the names of their blocks as far as they are known."""
        ids, names = self.token_ids[:num_tokens].tobytes(), self.block_hashes[: num_tokens // block_size]
        return Prefix(self.request_id, self.options.owner, self.hash_root, ids, names)

    def timeline(self) -> RequestTimeline:
        miss = self.cache_miss
        return RequestTimeline(
            request_id=self.request_id,
            state=self.state.value,
            num_prompt_tokens=self.prompt_len,
            num_cached_tokens=self.num_cached_tokens,
            num_output_tokens=self.num_output_tokens,
            num_blocks=self.num_blocks,
            num_preemptions=self.num_preemptions,
            arrived_s=self.arrived_s,
            scheduled_s=self.scheduled_s,
            first_token_s=self.first_token_s,
            finished_s=self.finished_s,
            finish_reason=self.finish_reason,
            held_blocks=self.num_held_blocks,
            source=self.options.source,
            key_name=self.options.key_name,
            num_drafted_tokens=self.acceptance.counts.checked,
            num_accepted_tokens=self.acceptance.counts.accepted,
            miss_reason="" if miss is None else miss.reason,
            miss_position=0 if miss is None else miss.position,
            num_missed_tokens=0 if miss is None else miss.num_tokens,
            num_loaded_tokens=self.num_loaded_tokens,
            num_swaps=self.num_swaps,
            events=tuple(self.events),
        )

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id} {self.state} N={self.num_tokens} S={self.num_drafts} "
            f"P={self.num_output_placeholders} C={self.num_computed_tokens} F={self.num_in_flight_tokens} "
            f"blocks={self.num_blocks})"
        )


def _input_spans(prompt_len: int, embeds: PromptEmbeds | None, media: Sequence[MediaSpan]) -> tuple[InputSpan, ...]:
    """Return the places of a prompt whose input is not a token's, for the names of its blocks."""
    if embeds is not None:
        return (InputSpan(0, prompt_len, embeds.digest),)
    return tuple(InputSpan(span.start, span.end - span.start, span.digest.hex()) for span in media)
