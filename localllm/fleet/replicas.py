"""Replicas of one model behind one engine client: `--data-parallel-size`.

Each replica has a scheduler, a prefix cache and an engine thread in this process, and runs its steps in rank processes
of its own (one, or as many as `-tp` and `-pp` ask for). `ReplicaLoops` stands where a single `EngineLoop` would: a
request goes to the replica with the least expected cost (routing.py), by the replicas' own state: the longest prefix in
their caches, the prompts that wait, the requests that run, free blocks. A replica whose processes are lost is built
again while the others continue; a request without a token goes to another replica, others hear the error at once.
Some replicas may compute long prompts alone, which others continue (handover.py).
Does not know: HTTP, how a replica is built, text.
"""

from __future__ import annotations

import logging
import threading
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, fields, replace
from functools import reduce
from typing import TypeVar, cast

from localllm.config.settings import SETTINGS, EngineConfig, Settings
from localllm.engine.client import EngineClient
from localllm.engine.loop import EngineLoop
from localllm.engine.outputs import HANDED_OVER, EngineOutput
from localllm.engine.prompt_history import CacheMiss
from localllm.engine.pulse import Pulse
from localllm.engine.request import Request
from localllm.engine.scheduler import Scheduler
from localllm.engine.stats import EngineStats, Histogram, RequestTimeline, SpeculationStats
from localllm.engine.step import RankStats, RunnerStats
from localllm.errors import (
    ConfigError,
    DeviceLost,
    DoesNotFit,
    EngineCrashed,
    EngineError,
    EngineStopped,
    InvalidParameter,
    LocalLLMError,
    RanksLost,
    RequestError,
    UnsupportedOption,
)
from localllm.fleet.handover import (
    HandOver,
    Leases,
    PrefillApart,
    capacity_of,
    for_another_engine,
    may_hand_over,
)
from localllm.fleet.routing import MEMORY, USUAL_STEP_S, USUAL_TOKENS_PER_S, Policy, Reason, ReplicaLoad, Router
from localllm.machine.hardware import read_hardware
from localllm.serving.build import build_engine
from localllm.serving.phases import OnPhase
from localllm.serving.served import NO_LIMITS, LoadLimits, ServedModel

log = logging.getLogger(__name__)
T = TypeVar("T")

RETRY_S = (1.0, 5.0, 20.0, 60.0)
"""Waits before a replica is built again after a failure; the last one repeats."""

Build = Callable[[int], ServedModel]


@dataclass(slots=True)
class OpenRequest:
    """A request that a replica was given and has not ended."""

    request: Request
    uncached_tokens: int
    before_tokens: int  # that waited there when it came
    given_s: float
    names: tuple[bytes, ...]  # of its prompt's blocks
    hand_over: HandOver | None = None  # its prompt and its answer are computed by two replicas
    speaks: bool = False  # it has had a token from this replica
    cancelled: str = ""  # finish reason of a request that was cancelled


@dataclass(slots=True)
class Replica:
    """One replica: the model with its engine, and the requests that it was given."""

    number: int
    model: ServedModel
    is_up: bool = True
    open: dict[str, OpenRequest] = field(default_factory=dict)
    names: Counter[bytes] = field(default_factory=Counter)  # of blocks of its requests without a token
    routed: Counter[Reason] = field(default_factory=Counter)
    late: set[str] = field(default_factory=set)  # requests whose hand-over did not end in time
    restarts: int = 0
    computes_prompts: bool = False  # of requests that other replicas continue

    @property
    def loop(self) -> EngineLoop:
        return self.model.engine[0]

    @property
    def queued_tokens(self) -> int:
        return sum(each.uncached_tokens for each in self.open.values() if not each.speaks)

    def hit_tokens(self, names: Sequence[bytes]) -> int:
        """Return how much of a prompt its cache has, or will have once the prompts that wait there are computed."""
        ledger = self.loop.scheduler.ledger
        cached, waiting = ledger.lookup(names).num_blocks, self.names  # reads a dict, safe beside the engine's thread
        if waiting:  # whoever waits with a prefix waits with all shorter ones as well
            cached = bisect_left(names, True, cached, key=lambda name: waiting.get(name, 0) <= 0)
        return cached * ledger.block_size


class ReplicaRunners:
    """The runners of all replicas, as far as the server asks the runner of one engine."""

    def __init__(self, loops: ReplicaLoops) -> None:
        self._loops = loops
        self.profiler = None
        self.num_stages = 1

    def stats(self) -> RunnerStats:
        return merged_runners([each.loop.runner.stats() for each in self._loops.replicas])

    def use_idle_time(self) -> bool:
        return False

    def close(self) -> None:
        """Close the runners, and end all processes. Idempotent."""
        for each in self._loops.replicas:
            with suppress(LocalLLMError):
                each.model.close()


class ReplicaLoops:
    """The engine loops of all replicas in place of one `EngineLoop`."""

    def __init__(
        self, models: Sequence[ServedModel], build: Build, policy: Policy = "prefix", apart: PrefillApart | None = None
    ) -> None:
        """build: builds the replica of that number again; blocks, on a thread of its own. apart: None: each replica
        computes its own prompts."""
        self.replicas = [
            Replica(number, model, computes_prompts=apart is not None and apart.computes_prompts(number))
            for number, model in enumerate(models)
        ]
        self.apart = apart
        self.deliver: Callable[[list[EngineOutput]], None] = lambda outputs: None
        self.on_ended: Callable[[], None] = lambda: None
        self.why_ended: EngineError | None = None
        self.runner = ReplicaRunners(self)
        self._build = build
        self._router = Router(len(models), policy)
        self._lock = threading.RLock()
        self._stopping = threading.Event()
        self._prefill_tokens_per_s = USUAL_TOKENS_PER_S
        self._where: dict[str, Replica] = {}  # by engine request id
        self._lost: dict[int, tuple[RankStats, ...]] = {}  # last states of lost ranks, until the replica is back

    @property
    def scheduler(self) -> Scheduler:
        """The scheduler of the first replica, for what is the same in all of them."""
        return self.replicas[0].loop.scheduler

    # Requests, from any thread ----------------------------------------------------------------------------------

    def submit(self, *requests: Request) -> None:
        """Give all requests to one replica, or none. Raises as `EngineLoop.submit`, and `InvalidParameter` for a pinned
        replica that does not exist."""
        with self._lock:
            self._refuse_when_ended()
            error: LocalLLMError | None = None
            order = self._in_order(requests[0])
            if self._submit_apart(requests, order):
                return
            for replica, reason in order:
                try:
                    self._give(replica, requests, reason)
                    return
                except EngineError as refused:  # its processes were lost in this moment
                    error = refused
            raise error or none_runs()

    def _submit_apart(self, requests: Sequence[Request], order: Sequence[tuple[Replica, Reason]]) -> bool:
        """Give a long prompt to a prefill replica. Return False for a request that one replica answers. order: of the
        replicas that would answer it whole."""
        apart, request = self.apart, requests[0]
        if apart is None or not order or order[0][0].computes_prompts or not may_hand_over(requests):
            return False
        names = self._names(request)
        if not names or request.prompt_len - order[0][0].hit_tokens(names) < apart.least_tokens:
            return False
        full = request.prompt_len // self.scheduler.ledger.block_size
        for replica, reason in self._in_order(request, prompts=True):
            hand_over = HandOver(request, apart.leases.open(request.block_hashes[:full]))
            try:
                self._give(replica, [for_another_engine(request, hands_over=True)], reason, hand_over)
                return True
            except EngineError:
                apart.leases.end(hand_over.lease)
        return False

    def _refuse_when_ended(self) -> None:
        if self.why_ended is not None:
            raise EngineStopped("The engine has ended.", str(self.why_ended), "Retry in a moment.")
        if self._stopping.is_set():
            raise EngineStopped("The engine is shutting down.", hint="Retry when the server is running again.")

    def _in_order(
        self, request: Request, without: Replica | None = None, *, prompts: bool = False
    ) -> list[tuple[Replica, Reason]]:
        """Return the replicas to try, best first. prompts: those that compute prompts for others. If no other replica
        is left, they answer whole requests as well."""
        pinned = request.options.replica
        if pinned is not None and not 0 <= pinned < len(self.replicas):
            raise InvalidParameter(
                f"There is no replica {pinned}.",
                f"The model has {len(self.replicas)}, numbered from 0.",
                param="x-data-parallel-rank",
            )
        able = [each for each in self.replicas if each.is_up and each is not without]
        if pinned is not None:
            return [(each, "pinned") for each in able if each.number == pinned]
        chosen = [each for each in able if each.computes_prompts == prompts]
        able = chosen if chosen or prompts else able
        names = self._names(request)
        loads = [(each.number, self._load(each, request, names)) for each in able]
        order = self._router.order(loads, request.prompt_len, request.max_output_tokens / 2)
        return [(self.replicas[number], reason) for number, reason in order]

    def _load(self, replica: Replica, request: Request, names: Sequence[bytes]) -> ReplicaLoad:
        config, ledger = replica.loop.scheduler.config, replica.loop.scheduler.ledger
        hit = replica.hit_tokens(names)
        wanted = (request.prompt_len - hit) // config.block_size + 1
        free = min(ledger.num_free)
        return ReplicaLoad(
            hit_tokens=min(hit, request.prompt_len),
            queued_tokens=replica.queued_tokens,
            prefill_tokens_per_s=self._prefill_tokens_per_s,
            running=len(replica.open),
            max_running=config.max_num_seqs,
            step_s=USUAL_STEP_S,
            full_step_s=2 * USUAL_STEP_S,
            blocks_wait_s=0.0 if wanted <= free else (wanted - free) * config.block_size / self._prefill_tokens_per_s,
        )

    def _names(self, request: Request) -> tuple[bytes, ...]:
        """Return the names of the prompt's blocks that may come from a cache. Admission finds them in the request."""
        cache = self.scheduler.cache
        if not cache.uses_cache(request):
            return ()
        root = b"" if request.block_hashes else cache.hasher.root(request.cache_extras)
        cache.hasher.extend(request.block_hashes, root, request.token_ids, request.spans)
        return tuple(request.block_hashes[: (request.prompt_len - 1) // cache.hasher.block_size])

    def _give(
        self, replica: Replica, requests: Sequence[Request], reason: Reason, hand_over: HandOver | None = None
    ) -> None:
        before = replica.queued_tokens
        names = self._names(requests[0])
        hit = replica.hit_tokens(names)
        replica.loop.submit(*requests)
        self._router.chosen(replica.number)
        replica.routed[reason] += len(requests)
        for request in requests:
            uncached = 0 if request.num_output_tokens else max(0, request.prompt_len - hit)
            replica.open[request.request_id] = OpenRequest(
                request, uncached, before, time.monotonic(), names, hand_over
            )
            replica.names.update(names)
            self._where[request.request_id] = replica
            before, hit = before + uncached, max(hit, request.prompt_len)  # choices of one prompt share it

    def cancel(self, request_id: str, reason: str = "abort") -> None:
        with self._lock:
            replica = self._where.get(request_id)
            if replica is not None and (held := replica.open.get(request_id)) is not None:
                held.cancelled = reason
        if replica is not None:
            replica.loop.cancel(request_id, reason)

    def report(self, search: RequestTimeline) -> None:
        self.replicas[0].loop.report(search)

    def call(self, work: Callable[[], T]) -> Future[T]:
        return self.replicas[0].loop.call(work)

    def cache_miss(self, request_id: str, owner: str) -> CacheMiss | None:
        found = (each.loop.cache_miss(request_id, owner) for each in self.replicas)
        return next((each for each in found if each is not None), None)

    # Outputs, on the engines' threads ---------------------------------------------------------------------------

    def _deliver(self, replica: Replica, outputs: list[EngineOutput]) -> None:
        with self._lock:  # also while they are delivered: what another replica says next comes behind them
            kept = [told for output in outputs if (told := self._received(replica, output)) is not None]
            if kept:
                self.deliver(kept)

    def _received(self, replica: Replica, output: EngineOutput) -> EngineOutput | None:
        """Note an output. Return what the client gets of it; None if another replica answers instead."""
        if output.request_id in replica.late:
            replica.late -= {output.request_id} if output.finish_reason else set()
            return None
        held = replica.open.get(output.request_id)
        if held is None:
            return output
        if output.token_ids and not held.speaks:
            held.speaks = True
            replica.names.subtract(held.names)
            self._note_rate(held)
        if output.token_ids and held.hand_over is not None:
            self._note_tokens(held.hand_over, output)
        if output.finish_reason is None:
            return output
        self._forget(replica, held)
        reason = _why_elsewhere(held, output)
        if reason and not held.cancelled and self._give_again(replica, held, reason):
            return None
        self._end_hand_over(held, "cancelled")
        if reason and held.cancelled:
            return output._replace(finish_reason=held.cancelled, error=None)
        if output.finish_reason == HANDED_OVER:
            return output._replace(finish_reason="error", error=none_runs())
        return output

    def _note_tokens(self, hand_over: HandOver, output: EngineOutput) -> None:
        """Begin the lease of a prompt that is computed, and end the lease of one that is continued."""
        assert self.apart is not None
        if hand_over.is_continued:
            self.apart.leases.end(hand_over.lease)
        else:
            hand_over.said += output.token_ids
            self.apart.leases.renew(hand_over.lease, lambda: self._on_due(hand_over))

    def _on_due(self, hand_over: HandOver) -> None:
        """Runs on a thread of its own, when a lease has come to its deadline: renew it while its request waits for the
        second replica, else let that one compute the prompt."""
        assert self.apart is not None
        name = hand_over.asked.request_id
        with self._lock:
            replica = self._where.get(name)
            held = None if replica is None else replica.open.get(name)
            if replica is None or held is None or held.hand_over is not hand_over or self._stopping.is_set():
                return
            if hand_over.is_continued:
                self.apart.leases.renew(hand_over.lease, lambda: self._on_due(hand_over))
                return
            log.warning("hand-over late id=%s from=%d", name, replica.number)
            self._end_hand_over(held, "expired")
            self._forget(replica, held)
            replica.late.add(name)
            replica.loop.cancel(name)
            if not self._give_again(replica, held, "retry"):
                self.deliver([EngineOutput(name, finish_reason="error", error=none_runs())])

    def _end_hand_over(self, held: OpenRequest, how: str) -> None:
        if self.apart is not None and held.hand_over is not None:
            self.apart.leases.end(held.hand_over.lease)
            if not held.hand_over.is_continued:
                self.apart.ended[how] += 1
            held.hand_over.is_continued = True

    def _note_rate(self, held: OpenRequest) -> None:
        if held.hand_over is not None and held.hand_over.is_continued:  # its prompt was computed elsewhere
            return
        tokens, passed_s = held.before_tokens + held.uncached_tokens, time.monotonic() - held.given_s
        if tokens > 100:
            rate = tokens / max(passed_s, 1e-3)
            self._prefill_tokens_per_s += MEMORY * (rate - self._prefill_tokens_per_s)

    def _forget(self, replica: Replica, held: OpenRequest) -> None:
        name = held.request.request_id
        del replica.open[name]
        self._where.pop(name, None)
        if not held.speaks:
            replica.names.subtract(held.names)
        if not any(not each.speaks for each in replica.open.values()):
            replica.names.clear()

    def _give_again(self, lost: Replica, held: OpenRequest, reason: Reason) -> bool:
        """Give a request to another replica, with the tokens that its client has had. Return whether one took it."""
        hand_over = held.hand_over
        asked, said = (held.request, ()) if hand_over is None else (hand_over.asked, hand_over.said)
        for replica, _ in self._in_order(asked, without=lost if reason == "retry" else None):
            try:
                self._give(replica, [for_another_engine(asked, said, held.request)], reason, hand_over)
            except LocalLLMError:
                continue
            if hand_over is not None and self.apart is not None and not hand_over.is_continued:
                hand_over.is_continued = True
                self.apart.ended["continued" if reason == "handover" else "failed"] += 1
            log.info("request routed again id=%s from=%d to=%d", asked.request_id, lost.number, replica.number)
            return True
        return False

    # Life -------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        for replica in self.replicas:
            self._start(replica)

    def _start(self, replica: Replica) -> None:
        loop = replica.loop
        loop.deliver = lambda outputs: self._deliver(replica, outputs)
        loop.on_ended = lambda: self._on_ended(replica)
        loop.start()

    def stop(self) -> None:
        """End every request with an error, and all threads. Idempotent."""
        self._stopping.set()
        for replica in self.replicas:
            replica.loop.stop()

    def lose(self, error: DeviceLost) -> None:
        for replica in self.replicas:
            replica.loop.lose(error)

    @property
    def is_running(self) -> bool:
        return (
            self.why_ended is None
            and not self._stopping.is_set()
            and any(each.loop.is_running for each in self.replicas)
        )

    def pulse(self) -> Pulse:
        """Return the pulse of the replica that has made the least progress with work to do, else of the first."""
        pulses = [each.loop.pulse() for each in self.replicas if each.is_up] or [self.replicas[0].loop.pulse()]
        return min(pulses, key=lambda pulse: (not pulse.has_work, pulse.progress))

    def _on_ended(self, replica: Replica) -> None:
        """Runs on the thread of an engine that ended by itself, last of all."""
        error = replica.loop.why_ended
        assert error is not None
        with self._lock:
            replica.is_up = False
            self._lost[replica.number] = replica.loop.runner.stats().ranks
            is_last = not any(each.is_up for each in self.replicas) and not self._stopping.is_set()
            if is_last:
                self.why_ended = error
                self._stopping.set()
        log.warning("replica lost number=%d error=%s", replica.number, error)
        if is_last:
            self.on_ended()
        elif not self._stopping.is_set():
            threading.Thread(target=self._replace, args=(replica,), name="localllm-replica", daemon=True).start()

    def _replace(self, replica: Replica) -> None:
        """Build a replica again, and try until it runs."""
        replica.model.close()
        attempt = 0
        while not self._stopping.is_set():
            try:
                model = self._build(replica.number)
                break
            except Exception as error:
                wait_s = RETRY_S[min(attempt, len(RETRY_S) - 1)]
                log.warning("replica not started number=%d again_in=%.0fs error=%s", replica.number, wait_s, error)
                attempt += 1
                self._stopping.wait(wait_s)
        else:
            return
        with self._lock:
            if self._stopping.is_set():
                model.close()
                return
            assert model.executor is not None
            model.executor.continue_from(self._lost.pop(replica.number, ()))
            replica.model, replica.is_up = model, True
            replica.restarts += 1
            for noted in (replica.open, replica.names, replica.late):
                noted.clear()
            self._start(replica)
        log.info("replica back number=%d", replica.number)

    # Statistics -------------------------------------------------------------------------------------------------

    def stats(self) -> EngineStats:
        """Return the sums and the joined lists of all replicas."""
        return merged([each.loop.stats() for each in self.replicas])


def _why_elsewhere(held: OpenRequest, output: EngineOutput) -> Reason | None:
    """Return why another replica answers the rest of a request that has ended at one; None: its end is the client's."""
    if output.finish_reason == HANDED_OVER:
        return "handover"
    is_prompt = held.hand_over is not None and not held.hand_over.is_continued
    if is_prompt and output.error is not None and not isinstance(output.error, RequestError | EngineStopped):
        return "retry"  # the other replica computes the prompt
    is_lost = isinstance(output.error, RanksLost | EngineCrashed)
    return "retry" if is_lost and not held.speaks else None


def none_runs() -> RanksLost:
    return RanksLost(
        "No replica of the model runs at the moment.", "They are being started again.", "Try again in a moment."
    )


def replicas_of(model: ServedModel) -> Sequence[Replica]:
    """Return the replicas of a model; none for a model with one engine."""
    loops: object = model.loop
    return loops.replicas if isinstance(loops, ReplicaLoops) else ()


def prefill_apart_of(model: ServedModel) -> PrefillApart | None:
    """Return the hand-overs of a model; None: each replica computes its own prompts."""
    loops: object = model.loop
    return loops.apart if isinstance(loops, ReplicaLoops) else None


def stats_of_each(model: ServedModel) -> list[EngineStats]:
    """Return the snapshot of each replica, in the order of their numbers, or of the one engine."""
    replicas = replicas_of(model)
    each = [replace(replica.loop.stats(), engine=str(replica.number)) for replica in replicas]
    return each or [model.client.stats()]


SAME = frozenset({"block_size", "max_model_len", "async_depth", "engine", "tiers"})
"""Fields of `EngineStats` that are taken from the first replica."""


BLOCKS = ("total_blocks", "used_blocks", "cached_blocks")


def merged(several: Sequence[EngineStats]) -> EngineStats:
    """Return the snapshot of a fleet: counts and rates are added, lists joined."""
    first = several[0]
    finished = sum((Counter(each.finished) for each in several), Counter[str]())
    del finished[HANDED_OVER]  # such a request counts where it ended
    changed: dict[str, object] = {
        "taken_s": max(each.taken_s for each in several),
        "uptime_s": max(each.uptime_s for each in several),
        "steps": tuple(step for each in several for step in each.steps),
        "requests": tuple(line for each in several for line in each.requests),
        "recent": tuple(
            sorted((line for each in several for line in each.recent), key=lambda line: -(line.finished_s or 0.0))
        ),
        "finished": dict(finished),
        "runner": merged_runners([each.runner for each in several]),
        "speculation": reduce(SpeculationStats.plus, [each.speculation for each in several]),
        "kv_groups": tuple(
            replace(groups[0], **{name: sum(getattr(group, name) for group in groups) for name in BLOCKS})
            for groups in zip(*(each.kv_groups for each in several), strict=True)
        ),
    }
    for name in (each.name for each in fields(EngineStats)):
        if name in changed or name in SAME:
            continue
        values = [getattr(each, name) for each in several]
        if isinstance(values[0], Histogram):
            counts = tuple(map(sum, zip(*(each.counts for each in values), strict=True)))
            changed[name] = Histogram(values[0].bounds, counts, sum(each.total for each in values))
        else:
            changed[name] = sum(values)
    return replace(first, **changed)  # type: ignore[arg-type]


def merged_runners(several: Sequence[RunnerStats]) -> RunnerStats:
    """Return the counts of all runners, with the ranks of all replicas numbered one after the other."""
    ranks: list[RankStats] = []
    for each in several:
        ranks += [replace(rank, rank=len(ranks) + at) for at, rank in enumerate(each.ranks)]
    first = several[0]
    sums = {
        name: sum(getattr(each, name) for each in several)
        for name, value in first._asdict().items()
        if isinstance(value, int)
    }
    return first._replace(ranks=tuple(ranks), **sums)


# Building ------------------------------------------------------------------------------------------------------------


def build_replicas(
    settings: Settings, on_phase: OnPhase = lambda phase: None, limits: LoadLimits = NO_LIMITS
) -> ServedModel:
    """Build the model that `settings` name, with all its replicas. Raises what `build_engine` raises."""
    config = settings.engine
    if config.prefill_replicas:
        _refuse_apart(config)
    if config.data_parallel_size == 1:
        return build_engine(settings, on_phase, limits)
    _refuse_beside_replicas(config)
    apart = None
    if config.prefill_replicas:
        apart = PrefillApart(config.prefill_replicas, Leases(capacity_of(read_hardware())))

    def build(number: int, on_phase: OnPhase = lambda phase: None, limits: LoadLimits = NO_LIMITS) -> ServedModel:
        stores = [] if apart is None else [apart.store_of(number)]
        limits = replace(limits, kv_is_compared=number > 0)  # all replicas have the same weights and settings
        return build_engine(settings_of(settings, number), on_phase, limits, stores)

    with ExitStack() as undo:
        models = []
        for number in range(config.data_parallel_size):
            try:
                model = build(number, on_phase, limits)
            except DoesNotFit as error:
                if number:
                    error.why = f"{number} of {config.data_parallel_size} replicas were loaded before. {error.why}"
                    error.hint = f"--data-parallel-size {number}"
                raise
            undo.callback(model.close)
            models.append(model)
        undo.pop_all()
    first = models[0]
    loops = ReplicaLoops(models, build, cast("Policy", config.routing_policy), apart)
    loop, admission = cast("EngineLoop", loops), first.engine[1]
    client = EngineClient(loop, admission, first.tokenizer)
    log.info("replicas ready name=%s count=%d policy=%s", first.name, len(models), config.routing_policy)
    return replace(first, loop=loop, client=client, executor=None, memory=None)


def settings_of(settings: Settings, number: int) -> Settings:
    """Return the settings of one replica: its part of the named GPUs."""
    config = settings.engine
    devices = config.device_ids
    if len(devices) % config.data_parallel_size:
        raise ConfigError(
            f"--device-ids names {len(devices)} GPUs for {config.data_parallel_size} replicas.",
            "Each replica needs the same number of them.",
            param="device_ids",
        )
    each_has = len(devices) // config.data_parallel_size
    own = devices[number * each_has : (number + 1) * each_has]
    return replace(settings, engine=replace(config, device_ids=own))


def _refuse_apart(config: EngineConfig) -> None:
    """Raise for settings with which no blocks can be handed over."""
    if config.prefill_replicas >= config.data_parallel_size:
        raise ConfigError(
            f"--prefill-replicas {config.prefill_replicas} leaves no replica that answers.",
            f"There are {config.data_parallel_size} replicas (--data-parallel-size).",
            f"--data-parallel-size {config.prefill_replicas + 1}",
            param="prefill_replicas",
        )
    num_ranks = (config.tensor_parallel_size or 1) * (config.pipeline_parallel_size or 1)
    refused = {
        "-tp and -pp": (num_ranks > 1, "Only the KV blocks of replicas of one rank can be handed over."),
        "--no-enable-prefix-caching": (not config.enable_prefix_caching, "Blocks are handed over by their names."),
        "--kv-disk-gib": (config.kv_disk_gib > 0, "Blocks of replicas are not kept outside of the cache."),
    }
    for flag, (is_set, why) in refused.items():
        if is_set:
            what = f"--prefill-replicas cannot be combined with {flag}."
            raise UnsupportedOption(what, why, "Leave out one of them.", param="prefill_replicas")


def _refuse_beside_replicas(config: EngineConfig) -> None:
    """Raise `UnsupportedOption` for settings that do not work over several replicas yet."""
    refused = {
        "enable_lora": (config.takes_adapters, "Adapters are loaded into one engine."),
        "deterministic": (config.deterministic, "Ranks have not been tested with it."),
        "nodes": (config.nodes > 1, "Replicas have not been tested over several machines."),
        "torch_profiler_dir": (config.torch_profiler_dir is not None, "Other processes run the steps."),
        "enable_prompt_embeds": (config.enable_prompt_embeds, "Embeddings have not been tested with it."),
    }
    for name, (is_set, why) in refused.items():
        if is_set:
            flag = SETTINGS[name].flag
            what = f"{flag} cannot be combined with --data-parallel-size."
            raise UnsupportedOption(what, why, f"Leave {flag} out, or --data-parallel-size 1.", param=name)
