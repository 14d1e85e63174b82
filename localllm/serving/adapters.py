"""The LoRA adapters of a served model: each has a name and a slot in the model.

An adapter is loaded while requests run, into a slot that no request uses. It is unloaded once its last request has
ended.
Does not know: which models there are (manager.py), HTTP.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from localllm.config.lora_modules import LoraModule
from localllm.engine.adapter import Adapter
from localllm.errors import EngineError, ModelNotFound, RequestError
from localllm.serving.phases import DRAIN_S

if TYPE_CHECKING:
    from localllm.runner.executor import AdapterSlots

log = logging.getLogger(__name__)


class AdapterRefused(RequestError):
    """An adapter cannot be loaded: its name is taken, or no slot is free."""

    code = "adapter_refused"


class AdapterBusy(EngineError):
    """The requests of an adapter did not end in time, so it stays loaded."""

    code, type = "adapter_busy", "overloaded_error"


@dataclass(frozen=True, slots=True)
class LoadedAdapter:
    """An adapter that requests may name."""

    adapter: Adapter
    path: Path
    asked_path: str  # the path as the client gave it
    rank: int
    base: str  # the base model named in the adapter's config
    created_s: float

    @property
    def name(self) -> str:
        return self.adapter.name


class Adapters:
    """The loaded adapters. `load` and `unload` block and may be called from any thread; one load runs at a time."""

    def __init__(self, slots: AdapterSlots, base_names: Sequence[str]) -> None:
        """base_names: the names of the model itself, which no adapter may have."""
        self._slots, self._base_names = slots, frozenset(base_names)
        self._loaded: dict[str, LoadedAdapter] = {}
        self._turn = threading.Lock()

    @property
    def loaded(self) -> tuple[LoadedAdapter, ...]:
        return tuple(self._loaded.values())

    def find(self, name: str | None) -> LoadedAdapter | None:
        return self._loaded.get(name) if name else None

    def load_all(self, modules: Sequence[LoraModule]) -> None:
        for module in modules:
            self.load(module.name, module.path)

    def load(self, name: str, path: str) -> LoadedAdapter:
        """Load an adapter from a folder or from a repository in the Hugging Face cache. Raises `AdapterRefused`,
        `ModelNotFound`, `UnsupportedModel`, `CorruptModel`."""
        from localllm.models.library.catalog import adapter_folder
        from localllm.models.weights.lora import open_lora

        with self._turn:
            self._require_free(name)
            slot = self._free_slot()
            stored = open_lora(adapter_folder(path))
            self._slots.put(slot, stored)
            adapter = Adapter(name, slot, stored.fingerprint)
            found = LoadedAdapter(adapter, stored.path, path, stored.rank, stored.base, time.time())
            self._loaded[name] = found
        log.info("adapter loaded name=%s slot=%d rank=%d path=%s", name, slot, stored.rank, stored.path)
        return found

    def unload(self, name: str, wait_s: float = DRAIN_S) -> None:
        """Unload an adapter once its requests have ended. Raises `ModelNotFound`, or `AdapterBusy` when the requests do
        not end in time or the adapter is already being unloaded."""
        found, ended = self._close(name)
        wait((ended,), wait_s)
        self._drop(found, wait_s)

    async def unload_async(self, name: str, wait_s: float = DRAIN_S) -> None:
        """Do the same as `unload` without a waiting thread."""
        found, ended = self._close(name)
        try:
            await asyncio.wait((asyncio.wrap_future(ended),), timeout=wait_s)
        except asyncio.CancelledError:
            with suppress(AdapterBusy):
                self._drop(found, wait_s)
            raise
        self._drop(found, wait_s)

    def _close(self, name: str) -> tuple[LoadedAdapter, Future[None]]:
        found = self._loaded.get(name)
        if found is None:
            raise ModelNotFound(f"The adapter {name!r} is not loaded.", self._words(), param="lora_name")
        ended = found.adapter.close()
        if ended is None:
            raise AdapterBusy(f"The adapter {name!r} is being unloaded.", "An earlier request unloads it.")
        return found, ended

    def _drop(self, found: LoadedAdapter, wait_s: float) -> None:
        if found.adapter.reopen():
            raise AdapterBusy(
                f"The adapter {found.name!r} is in use.",
                f"{found.adapter.num_requests} of its requests were still running after {wait_s:.0f} s.",
                "Try again later.",
            )
        del self._loaded[found.name]
        log.info("adapter unloaded name=%s slot=%d", found.name, found.adapter.slot)

    def _require_free(self, name: str) -> None:
        if name in self._loaded:
            raise AdapterRefused(f"The adapter {name!r} is loaded already.", hint="Unload it first.", param="lora_name")
        if name in self._base_names:
            raise AdapterRefused(
                f"{name!r} is the name of the model itself.", "Choose another name.", param="lora_name"
            )

    def _free_slot(self) -> int:
        taken = {each.adapter.slot for each in self.loaded}
        free = next((slot for slot in range(self._slots.max_loras) if slot not in taken), None)
        if free is None:
            raise AdapterRefused(
                f"All {len(taken)} adapter slots are in use.",
                self._words(),
                f"Unload one, or start with --max-loras {len(taken) + 1}.",
                param="lora_name",
            )
        return free

    def _words(self) -> str:
        return f"Loaded: {', '.join(self._loaded) or 'none'}."
