"""One model that the manager knows: its state, its leases, and its row in `localllm ps`.

    unloaded -> loading -> ready -> unloading -> unloaded          sleeping -> loading -> ready
                   |         |----> unloading -> sleeping
                   '-> failed '----> unloading -> tuning -> ready

A request holds a `Lease` on its model from the moment the model is found until the last byte of the answer is sent.
While a lease is held, the model is neither put to sleep nor unloaded.
Does not know: when a model is loaded or unloaded (manager.py), HTTP.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from localllm.config.settings import Settings
from localllm.engine.step import RankStats
from localllm.errors import EngineError, LocalLLMError, RequestError
from localllm.serving.adapters import Adapters
from localllm.serving.lease import Lease
from localllm.serving.phases import OnPhase, Phase
from localllm.serving.reopen import SleepingModel
from localllm.serving.served import ModelCard, ServedModel

State = Literal["loading", "ready", "tuning", "sleeping", "unloading", "unloaded", "failed"]


class ModelLoading(EngineError):
    """The server is running, but the model is still loading."""

    code, type = "model_loading", "unavailable_error"


class LoadCancelled(EngineError):
    """The load that this request was waiting for was cancelled."""

    code, type = "load_cancelled", "unavailable_error"


class ModelsBusy(EngineError):
    """No loaded model can be evicted: each is pinned, or its requests did not end in time."""

    code, type = "models_busy", "overloaded_error"


class ModelTuning(EngineError):
    """The model is being tuned and takes no requests until the run ends."""

    code, type = "model_tuning", "unavailable_error"
    retry_after_s = 20


class UnloadCancelled(RequestError):
    """The model was to be unloaded or put to sleep, and is kept instead."""

    status, code = 409, "unload_cancelled"


class ModelNotLoaded(RequestError):
    """The operation needs a loaded model."""

    status, code = 409, "model_not_loaded"


class ModelUnusable(RequestError):
    """The model that a request names is installed, but its files cannot be served."""

    status, code = 422, "model_unusable"


@dataclass(slots=True, eq=False)
class ModelEntry:
    """A model in any state. Only the manager changes it, on the event loop."""

    name: str  # the shown name: until the model is loaded the name in the request, then the model's own
    settings: Settings | None  # used to load it; None: the model was loaded elsewhere and cannot be loaded again
    names: frozenset[str]
    path: Path | None = None  # None: not resolved yet
    pinned: bool = False
    is_beside: bool = False  # it is loaded beside the others: none is evicted for it, and it is never the default
    keep_alive_s: float = math.inf  # idle time until it is unloaded
    state: State = "unloaded"
    served: ServedModel | None = None
    asleep: SleepingModel | None = None
    lost_ranks: tuple[RankStats, ...] = ()  # last states of ranks that were lost, by rank
    card: ModelCard | None = None  # from the last load
    phases: dict[str, Phase] = field(default_factory=dict)  # latest report of each loading phase, by name and in order
    on_phase: OnPhase = lambda phase: None
    error: LocalLLMError | None = None  # why the last load failed
    failed_s: float = -math.inf
    ready_s: float = -math.inf  # start of the current ready period
    last_used_s: float = -math.inf
    num_leases: int = 0
    idle: asyncio.Event = field(default_factory=asyncio.Event)  # set without leases, and by `keep` to end a drain
    is_draining: bool = False  # it waits for its requests to end, and can still be kept
    waiters: list[asyncio.Future[Lease[ServedModel]]] = field(default_factory=list)
    task: asyncio.Task[None] | None = None  # loads or wakes it
    watch: asyncio.Task[None] | None = None  # waits for an engine that ends by itself

    @property
    def is_running(self) -> bool:
        """Return whether the model is ready and its engine runs. A model loaded elsewhere counts as running."""
        if self.state != "ready" or self.served is None:
            return False
        return self.settings is None or self.served.loop.is_running

    @property
    def transcribes(self) -> bool:
        return self.is_beside or (self.card is not None and self.card.spec.task == "transcribe")

    @property
    def hears(self) -> bool:
        """Return whether the model transcribes, or is loaded and reads sound in prompts."""
        return self.transcribes or (self.served is not None and self.served.hearing is not None)

    @property
    def has_replicas(self) -> bool:
        """Return whether the model is loaded as several replicas."""
        return self.settings is not None and self.settings.engine.data_parallel_size > 1

    @property
    def is_loading(self) -> bool:
        """Return whether a task runs that loads or wakes the model, or waits for its turn to do so."""
        return self.task is not None and not self.task.done()

    @property
    def adapters(self) -> Adapters | None:
        """The LoRA adapters of a loaded or sleeping model; None for any other state."""
        model = self.served if self.asleep is None else self.asleep.served
        return model.adapters if model is not None else None

    def has_adapter(self, name: str) -> bool:
        """Return whether the model has this adapter. Before the first load, the configured `lora_modules` count."""
        if self.adapters is not None:
            return self.adapters.find(name) is not None
        return self.settings is not None and any(name == each.name for each in self.settings.engine.lora_modules)

    @property
    def progress(self) -> str:
        """The current phase of the load, as a sentence."""
        phase = next(reversed(self.phases.values()), None)
        if phase is None:
            return "It is waiting for another load to finish."
        return f"The present phase is {phase.name}{': ' if phase.detail else ''}{phase.detail}."

    def record_phase(self, phase: Phase) -> None:
        """Store the latest report of a loading phase and pass it on."""
        self.phases[phase.name] = phase
        self.on_phase(phase)

    def lease(self, model: ServedModel, on_release: Callable[[ModelEntry], None]) -> Lease[ServedModel]:
        self.num_leases += 1
        self.idle.clear()
        return Lease(model, lambda: self._release(on_release))

    def _release(self, on_release: Callable[[ModelEntry], None]) -> None:
        self.num_leases -= 1
        if not self.num_leases:
            self.idle.set()
        on_release(self)

    def keep(self) -> None:
        """End a drain: the model stays loaded and takes requests again."""
        self.is_draining = False
        self.idle.set()

    def refuse_waiters(self, error: LocalLLMError) -> None:
        waiters, self.waiters = self.waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_exception(error)

    def expires_in_s(self, now_s: float) -> float | None:
        """Return the seconds until keep-alive ends; None: the model stays, or it is not loaded."""
        if self.state != "ready" or self.pinned or math.isinf(self.keep_alive_s):
            return None
        return self.keep_alive_s if self.num_leases else max(0.0, self.last_used_s + self.keep_alive_s - now_s)

    def status(self, now_s: float) -> ModelStatus:
        plan = self.card.plan if self.card is not None else None
        stats = self.served.client.stats() if self.state == "ready" and self.served is not None else None
        bytes_held = 0
        if plan is not None and self.state in ("ready", "tuning", "sleeping", "unloading"):
            bytes_held = plan.total_bytes if self.served is not None else plan.weights_bytes
        return ModelStatus(
            name=self.name,
            state=self.state,
            pinned=self.pinned,
            size_bytes=bytes_held,
            device=("host" if self.state == "sleeping" else plan.device) if plan is not None else "",
            max_model_len=plan.max_model_len if plan is not None else None,
            kv_usage=stats.kv_usage if stats is not None else None,
            num_requests=stats.num_running + stats.num_waiting if stats is not None else len(self.waiters),
            expires_in_s=self.expires_in_s(now_s),
            idle_s=None if math.isinf(self.last_used_s) else now_s - self.last_used_s,
            phase=next(reversed(self.phases.values()), None) if self.state == "loading" else None,
            error=str(self.error) if self.error is not None else None,
        )


@dataclass(frozen=True, slots=True)
class ModelStatus:
    """One row of `localllm ps`."""

    name: str
    state: State
    pinned: bool
    size_bytes: int  # planned bytes of what it holds now; only the weights while it sleeps
    device: str  # "host" for the weights of a sleeping model
    max_model_len: int | None
    kv_usage: float | None  # 0 to 1; None: there is no KV cache
    num_requests: int  # running and waiting; while it loads, the requests waiting for the load
    expires_in_s: float | None  # None: it stays
    idle_s: float | None  # since its last request; None: it has had no request
    phase: Phase | None  # current phase of the load
    error: str | None
