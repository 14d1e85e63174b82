"""Replicas of one model behind one engine client: `--data-parallel-size`.

Each replica has a scheduler, a prefix cache and an engine thread in this process, and runs its steps in rank processes
of its own (one, or as many as `-tp` and `-pp` ask for). `ReplicaLoops` stands where a single `EngineLoop` would: a
request goes to the replica with the least expected cost (routing.py), by the replicas' own state: the longest prefix in
their caches, the prompts that wait, the requests that run, free blocks. A replica whose processes are lost is built
again while the others continue; a request without a token goes to another replica, others hear the error at once.
Does not know: HTTP, how a replica is built, text.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, fields, replace
from typing import TypeVar, cast

from localllm.config.settings import SETTINGS, EngineConfig, Settings
from localllm.engine.client import EngineClient
from localllm.engine.loop import EngineLoop
from localllm.engine.outputs import EngineOutput
from localllm.engine.prompt_history import CacheMiss
from localllm.engine.pulse import Pulse
from localllm.engine.request import Request
from localllm.engine.scheduler import Scheduler
from localllm.engine.stats import EngineStats, Histogram, RequestTimeline
from localllm.engine.step import RankStats, RunnerStats
from localllm.errors import (
    ConfigError,
    DeviceLost,
    EngineCrashed,
    EngineError,
    EngineStopped,
    InvalidParameter,
    LocalLLMError,
    RanksLost,
    UnsupportedOption,
)
from localllm.fleet.routing import MEMORY, USUAL_STEP_S, USUAL_TOKENS_PER_S, Policy, Reason, ReplicaLoad, Router
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
    speaks: bool = False  # it has had a token


@dataclass(slots=True)
class Replica:
    """One replica: the model with its engine, and the requests that it was given."""

    number: int
    model: ServedModel
    is_up: bool = True
    open: dict[str, OpenRequest] = field(default_factory=dict)
    names: Counter[bytes] = field(default_factory=Counter)  # of blocks of its requests without a token
    routed: Counter[Reason] = field(default_factory=Counter)
    restarts: int = 0

    @property
    def loop(self) -> EngineLoop:
        return self.model.engine[0]

    @property
    def queued_tokens(self) -> int:
        return sum(each.uncached_tokens for each in self.open.values() if not each.speaks)

    def hit_tokens(self, names: Sequence[bytes]) -> int:
        """Return how much of a prompt its cache has, or will have once the prompts that wait there are computed."""
        ledger = self.loop.scheduler.ledger
        cached = ledger.lookup(names).num_blocks  # reads a dict, which is safe beside the engine's thread
        coming = next((at for at in range(len(names), cached, -1) if self.names[names[at - 1]] > 0), 0)
        return max(cached, coming) * ledger.block_size


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

    def __init__(self, models: Sequence[ServedModel], build: Build, policy: Policy = "prefix") -> None:
        """build: builds the replica of that number again; blocks, on a thread of its own."""
        self.replicas = [Replica(number, model) for number, model in enumerate(models)]
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
            for replica, reason in self._in_order(requests[0]):
                try:
                    self._give(replica, requests, reason)
                    return
                except EngineError as refused:  # its processes were lost in this moment
                    error = refused
            raise error or RanksLost(
                "No replica of the model runs at the moment.", "They are being started again.", "Try again in a moment."
            )

    def _refuse_when_ended(self) -> None:
        if self.why_ended is not None:
            raise EngineStopped("The engine has ended.", str(self.why_ended), "Retry in a moment.")
        if self._stopping.is_set():
            raise EngineStopped("The engine is shutting down.", hint="Retry when the server is running again.")

    def _in_order(self, request: Request, without: Replica | None = None) -> list[tuple[Replica, Reason]]:
        """Return the replicas to try, best first."""
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
        loads = [(each.number, self._load(each, request)) for each in able]
        order = self._router.order(loads, request.prompt_len, request.max_output_tokens / 2)
        return [(self.replicas[number], reason) for number, reason in order]

    def _load(self, replica: Replica, request: Request) -> ReplicaLoad:
        config, ledger = replica.loop.scheduler.config, replica.loop.scheduler.ledger
        hit = replica.hit_tokens(self._names(request))
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
        root = cache.hasher.root(request.cache_extras)
        cache.hasher.extend(request.block_hashes, root, request.token_ids, request.spans)
        return tuple(request.block_hashes[: (request.prompt_len - 1) // cache.hasher.block_size])

    def _give(self, replica: Replica, requests: Sequence[Request], reason: Reason) -> None:
        before = replica.queued_tokens
        names = self._names(requests[0])
        hit = replica.hit_tokens(names)
        replica.loop.submit(*requests)
        self._router.chosen(replica.number)
        replica.routed[reason] += len(requests)
        for request in requests:
            uncached = max(0, request.prompt_len - hit)
            replica.open[request.request_id] = OpenRequest(request, uncached, before, time.monotonic(), names)
            replica.names.update(names)
            self._where[request.request_id] = replica
            before, hit = before + uncached, max(hit, request.prompt_len)  # choices of one prompt share it

    def cancel(self, request_id: str, reason: str = "abort") -> None:
        with self._lock:
            replica = self._where.get(request_id)
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
        with self._lock:
            kept = [each for each in outputs if not self._is_retried(replica, each)]
        if kept:
            self.deliver(kept)

    def _is_retried(self, replica: Replica, output: EngineOutput) -> bool:
        """Note an output. Return whether it is kept from the client, since another replica answers instead."""
        held = replica.open.get(output.request_id)
        if held is None:
            return False
        if output.token_ids and not held.speaks:
            held.speaks = True
            replica.names.subtract(held.names)
            self._note_rate(held)
        if output.finish_reason is None:
            return False
        self._forget(replica, held)
        is_lost = isinstance(output.error, RanksLost | EngineCrashed)
        return is_lost and not held.speaks and self._retry(replica, held.request)

    def _note_rate(self, held: OpenRequest) -> None:
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

    def _retry(self, lost: Replica, request: Request) -> bool:
        """Give a request without a token to another replica. Return whether one took it."""
        for replica, _ in self._in_order(request, without=lost):
            try:
                self._give(replica, [for_another_engine(request)], "retry")
            except LocalLLMError:
                continue
            log.info("request routed again id=%s from=%d to=%d", request.request_id, lost.number, replica.number)
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
            replica.open.clear()
            replica.names.clear()
            self._start(replica)
        log.info("replica back number=%d", replica.number)

    # Statistics -------------------------------------------------------------------------------------------------

    def stats(self) -> EngineStats:
        """Return the sums and the joined lists of all replicas."""
        return merged([each.loop.stats() for each in self.replicas])


def replicas_of(model: ServedModel) -> Sequence[Replica]:
    """Return the replicas of a model; none for a model with one engine."""
    loops: object = model.loop
    return loops.replicas if isinstance(loops, ReplicaLoops) else ()


def stats_of_each(model: ServedModel) -> list[EngineStats]:
    """Return the snapshot of each replica, in the order of their numbers, or of the one engine."""
    replicas = replicas_of(model)
    each = [replace(replica.loop.stats(), engine=str(replica.number)) for replica in replicas]
    return each or [model.client.stats()]


def for_another_engine(request: Request) -> Request:
    """Return a request that has had no token as a new one. Its grammar is where it began."""
    return Request(
        request.request_id,
        request.token_ids[: request.prompt_len],
        request.params,
        request.options,
        max_output_tokens=request.max_output_tokens,
        eos_token_ids=request.eos_token_ids,
        bad_words_token_ids=request.bad_words_token_ids,
        dry_breakers=request.dry_breakers,
        grammar=request.grammar,
        reports_progress=request.reports_progress,
        prompt_embeds=request.prompt_embeds,
        media=request.media,
        arrived_s=request.arrived_s,
    )


SAME = frozenset({"block_size", "max_model_len", "async_depth", "speculation", "engine", "tiers"})
"""Fields of `EngineStats` that are taken from the first replica."""


BLOCKS = ("total_blocks", "used_blocks", "cached_blocks")


def merged(several: Sequence[EngineStats]) -> EngineStats:
    """Return the snapshot of a fleet: counts and rates are added, lists joined."""
    first = several[0]
    changed: dict[str, object] = {
        "taken_s": max(each.taken_s for each in several),
        "uptime_s": max(each.uptime_s for each in several),
        "steps": tuple(step for each in several for step in each.steps),
        "requests": tuple(line for each in several for line in each.requests),
        "recent": tuple(
            sorted((line for each in several for line in each.recent), key=lambda line: -(line.finished_s or 0.0))
        ),
        "finished": dict(sum((Counter(each.finished) for each in several), Counter[str]())),
        "runner": merged_runners([each.runner for each in several]),
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
    if config.data_parallel_size == 1:
        return build_engine(settings, on_phase, limits)
    _refuse_beside_replicas(config)
    with ExitStack() as undo:
        models = []
        for number in range(config.data_parallel_size):
            model = build_engine(settings_of(settings, number), on_phase, limits)
            undo.callback(model.close)
            models.append(model)
        undo.pop_all()
    first = models[0]
    loops = ReplicaLoops(
        models, lambda number: build_engine(settings_of(settings, number)), cast("Policy", config.routing_policy)
    )
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
