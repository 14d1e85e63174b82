"""Which model is served.

`ModelManager` keeps the model that the server serves; several models later are several entries behind `find`.
Does not know: how a model is loaded (build.py), HTTP, terminals.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import threading
from concurrent.futures import ThreadPoolExecutor

from localllm.build import OnPhase, Phase, ServedModel, build_engine
from localllm.config import Settings
from localllm.errors import EngineError, EngineStopped, LocalLLMError, ModelNotFound

log = logging.getLogger(__name__)


class ModelLoading(EngineError):
    """The server is up and its model is not there yet."""

    code, type = "model_loading", "unavailable_error"


class ModelManager:
    """The model of this server. `current` is None while it loads, after a failed load (`error`) and after `close`."""

    def __init__(self) -> None:
        self.current: ServedModel | None = None
        self.error: LocalLLMError | None = None  # why the last load failed
        self.asked = ""  # the name that was asked to load
        self.phases: dict[str, Phase] = {}  # by name, in order: the latest news of each

    async def start(self, settings: Settings, on_phase: OnPhase = lambda phase: None) -> ServedModel:
        """Load and serve. `on_phase` is called on this event loop. Raises what `build_engine` raises."""
        self.current, self.error, self.phases = None, None, {}
        self.asked = settings.server.served_model_name or settings.engine.model
        event_loop, given_up = asyncio.get_running_loop(), threading.Event()

        def note(phase: Phase) -> None:
            self.phases[phase.name] = phase
            on_phase(phase)

        def report(phase: Phase) -> None:
            """On the loading thread, which cannot be cancelled otherwise."""
            if given_up.is_set():
                raise EngineStopped("The load was given up.")
            event_loop.call_soon_threadsafe(note, phase)

        # A thread of its own that ends with the load: libgomp keeps a team of workers for every thread that has ever
        # computed, and with an idle second team it counts more threads than cores and lets the engine's sleep.
        loader = ThreadPoolExecutor(1, "localllm-loader")
        try:
            model = await event_loop.run_in_executor(loader, build_engine, settings, report)
            await model.client.start()
        except LocalLLMError as error:
            self.error = error
            raise
        except asyncio.CancelledError:
            given_up.set()
            raise
        finally:
            loader.shutdown(wait=False)
        self.current = model
        gc.collect()
        gc.freeze()  # what is there now stays: a full collection would walk over it again and again, mid-step
        return model

    def find(self, name: str | None) -> ServedModel:
        """The model of that name; None or empty asks for the one that is served. Raises `ModelNotFound` listing it."""
        model = self.current
        if model is None:
            if self.error is not None:
                raise self.error.with_traceback(None)  # raised again and again: its traceback would grow for ever
            raise ModelLoading(f"{self.asked or 'The model'} is loading.", "Try again in a moment.")
        if name and not model.answers_to(name):
            raise ModelNotFound(
                f"The model {name!r} is not served here.",
                f"Served: {model.name}.",
                "GET /v1/models lists it.",
                param="model",
            )
        return model

    async def close(self) -> None:
        """End running requests with an error and give the memory back. Idempotent."""
        model, self.current = self.current, None
        if model is not None:
            gc.unfreeze()
            await model.client.stop()
            await asyncio.to_thread(model.close)
