"""One model that the manager knows: its state, who uses it, and what can be said about it.

    unloaded -> loading -> ready -> unloading -> unloaded          sleeping -> loading -> ready
                   |         |----> unloading -> sleeping
                   '-> failed '----> unloading -> tuning -> ready

A request holds a `Lease` on its model from the moment it has found it until its last byte is sent: a model that is
held is neither put to sleep nor unloaded.
Does not know: when a model is loaded or has to go (manager.py), HTTP.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Literal

from localllm.adapters import Adapters
from localllm.config import Settings
from localllm.errors import EngineError, LocalLLMError, RequestError
from localllm.served import ModelCard, OnPhase, Phase, ServedModel
from localllm.sleep import SleepingModel

State = Literal["loading", "ready", "tuning", "sleeping", "unloading", "unloaded", "failed"]


class ModelLoading(EngineError):
    """The server is up and its model is not there yet."""

    code, type = "model_loading", "unavailable_error"


class LoadCancelled(EngineError):
    """Somebody ended the load that this request was waiting for."""

    code, type = "load_cancelled", "unavailable_error"


class ModelsBusy(EngineError):
    """The models that are loaded do not give way: they are pinned, or their requests did not end in time."""

    code, type = "models_busy", "overloaded_error"


class ModelTuning(EngineError):
    """Settings are being tried on the model's weights: it answers nobody until that is over."""

    code, type = "model_tuning", "unavailable_error"
    retry_after_s = 20


class ModelNotLoaded(RequestError):
    """What was asked can only be done to a model that is loaded."""

    status, code = 409, "model_not_loaded"


class ModelUnusable(RequestError):
    """The model that a request names is on this machine, and its files cannot be served."""

    status, code = 422, "model_unusable"


class Lease:
    """A claim on a model. Use it as a context manager, or call `release` (idempotent) at the end."""

    def __init__(self, model: ServedModel, on_release: Callable[[], None]) -> None:
        self.model = model
        self._on_release: Callable[[], None] | None = on_release

    def release(self) -> None:
        on_release, self._on_release = self._on_release, None
        if on_release is not None:
            on_release()

    def __enter__(self) -> ServedModel:
        return self.model

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.release()


@dataclass(slots=True, eq=False)
class Kept:
    """A model in whatever state. Changed by the manager alone, on the event loop."""

    name: str  # what is shown: the name in the request until it is loaded, then the model's own
    settings: Settings | None  # to load it with; None: it came loaded and cannot be loaded again
    names: frozenset[str]
    path: Path | None = None  # None: not known before it has been found
    pinned: bool = False
    keep_alive_s: float = math.inf  # without a request
    state: State = "unloaded"
    served: ServedModel | None = None
    asleep: SleepingModel | None = None
    card: ModelCard | None = None  # of the last load
    phases: dict[str, Phase] = field(default_factory=dict)  # by name, in order: the latest news of each
    on_phase: OnPhase = lambda phase: None
    error: LocalLLMError | None = None  # why the last load failed
    failed_s: float = -math.inf
    ready_s: float = -math.inf  # since when it is served
    last_used_s: float = -math.inf
    num_leases: int = 0
    idle: asyncio.Event = field(default_factory=asyncio.Event)
    waiters: list[asyncio.Future[Lease]] = field(default_factory=list)
    task: asyncio.Task[None] | None = None  # brings it up
    watch: asyncio.Task[None] | None = None  # hears of an engine that ends by itself

    @property
    def is_up(self) -> bool:
        """Ready, and its engine runs. One that came loaded is believed."""
        if self.state != "ready" or self.served is None:
            return False
        return self.settings is None or self.served.loop.is_running

    @property
    def is_coming(self) -> bool:
        return self.task is not None and not self.task.done()

    @property
    def adapters(self) -> Adapters | None:
        """Those of a model that is there or sleeps."""
        model = self.served if self.asleep is None else self.asleep.served
        return model.adapters if model is not None else None

    def has_adapter(self, name: str) -> bool:
        """Also before it is loaded, of those that it is loaded with."""
        if self.adapters is not None:
            return self.adapters.find(name) is not None
        return self.settings is not None and any(name == each.name for each in self.settings.engine.lora_modules)

    def note(self, phase: Phase) -> None:
        self.phases[phase.name] = phase
        self.on_phase(phase)

    def lease(self, model: ServedModel, on_release: Callable[[Kept], None]) -> Lease:
        self.num_leases += 1
        self.idle.clear()
        return Lease(model, lambda: self._release(on_release))

    def _release(self, on_release: Callable[[Kept], None]) -> None:
        self.num_leases -= 1
        if not self.num_leases:
            self.idle.set()
        on_release(self)

    def refuse_waiters(self, error: LocalLLMError) -> None:
        waiters, self.waiters = self.waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_exception(error)

    def expires_in_s(self, now_s: float) -> float | None:
        """Seconds until keep-alive ends; None: it stays, or it is not there."""
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
    """One line of `localllm ps`."""

    name: str
    state: State
    pinned: bool
    size_bytes: int  # planned, of what it holds now: weights alone while it sleeps
    device: str  # host: the weights of a sleeping model
    max_model_len: int | None
    kv_usage: float | None  # 0 to 1; None: there is no KV cache
    num_requests: int  # running and waiting, those for the load included
    expires_in_s: float | None  # None: it stays
    idle_s: float | None  # since it was last asked for; None: it never was
    phase: Phase | None  # of the load
    error: str | None
