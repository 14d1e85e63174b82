"""The models that a chat can be sent to, with their state and size, and the load of the one that was picked.

Does not know: HTTP, templates.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from localllm.models.library.catalog import list_models
from localllm.units import format_bytes
from localllm.web.pages.frame.views import View, view

if TYPE_CHECKING:
    from localllm.serving.entry import ModelEntry
    from localllm.web.pages.frame.state import PagesState


@dataclass(frozen=True, slots=True)
class ModelChoice:
    """A model that the message can be sent to."""

    name: str
    chosen: bool
    note: str = ""  # state and size: "not loaded · 610 MiB"; of a model of another server: "on workstation"


@view("chat/_model_choices.html")
class ModelChoices(View):
    """The list from which the model of the next message is chosen."""

    choices: tuple[ModelChoice, ...] = ()


LOOK_EVERY_S = 10.0
"""The sizes of installed models are read from the disk at most this often."""

MOST_KEPT = 50
"""Most loads whose outcome is kept; beyond that the finished ones are forgotten."""

MOST_PICKED, MOST_PICK_CHARS = 1000, 400
"""Most chats whose last pick is remembered for open pages, and the characters of one."""


class ModelPicker:
    """The list of models, and the loads that picks have started."""

    def __init__(self, pages: PagesState) -> None:
        self._pages, self._manager = pages, pages.manager
        self._size_bytes: Mapping[str, int] = {}
        self._looked_s = float("-inf")
        self._loads: dict[str, asyncio.Task[None]] = {}
        self._picked: dict[str, str] = {}  # the model that was picked last in a chat, also one that has not begun

    async def choices(self, settings: Mapping[str, str]) -> ModelChoices:
        """Return every model that can answer; the chat's own model first, even if it is gone."""
        manager = self._manager
        sizes = await self._sizes()
        default = manager.register.default
        chosen = settings.get("model") or self._pages.elsewhere() or (default.name if default else "")
        notes = {
            entry.name: _note(_STATES.get(entry.state, entry.state), _size(entry, sizes))
            for entry in manager.entries
            if not entry.is_beside and (entry.card is None or entry.card.spec.task == "generate")
        }
        for name in await manager.register.installed():
            notes.setdefault(name, _note("not loaded", sizes.get(name, 0)))
        for name, (_, servers) in self._pages.upstreams.models().items():
            if self._pages.elsewhere(name):
                notes[name] = f"on {', '.join(each.name for each in servers)}"
        if chosen not in notes:
            known = manager.register.find(chosen)
            gone = "not reached" if self._pages.elsewhere(chosen) else "not installed"
            notes = {chosen: gone} | notes if known is None else notes
            chosen = known.name if known is not None else chosen
        return ModelChoices(tuple(ModelChoice(name, name == chosen, note) for name, note in notes.items()))

    async def size_of(self, entry: ModelEntry) -> int:
        """Return the bytes of a model's files; 0: unknown."""
        sizes = await self._sizes()
        return _size(entry, sizes) or sizes.get(entry.name, 0)

    def note(self, chat_id: str, name: str) -> None:
        """Remember the model that a page has chosen for a chat's next message."""
        if not chat_id or len(chat_id) + len(name) > MOST_PICK_CHARS:
            return
        self._picked.pop(chat_id, None)
        self._picked[chat_id] = name
        while len(self._picked) > MOST_PICKED:
            del self._picked[next(iter(self._picked))]

    def picked(self, chat_id: str) -> str:
        """Return the model that was picked last for a chat; empty: none was."""
        return self._picked.get(chat_id, "")

    def is_ready(self, name: str) -> bool:
        """Return whether the model can answer at once: it is loaded, or another server has it."""
        if self._pages.elsewhere(name):
            return True
        entry = self._manager.register.find(name)
        return entry is not None and entry.state == "ready"

    def load(self, name: str) -> asyncio.Task[None]:
        """Load a model as a request for it would, and return the task, which raises the error of a failed load.
        Nothing is loaded for a model of another server."""
        task = self._loads.get(name)
        if task is None or task.done():
            if len(self._loads) >= MOST_KEPT:
                self._loads = {name: task for name, task in self._loads.items() if not task.done()}
            task = self._loads[name] = asyncio.create_task(self._load(name), name=f"load {name}")
            task.add_done_callback(lambda done: done.cancelled() or done.exception())  # the error is on the page
        return task

    def running(self, name: str) -> asyncio.Task[None] | None:
        """Return the load that a pick of this model started, also after its end."""
        return self._loads.get(name)

    async def close(self) -> None:
        for task in self._loads.values():
            task.cancel()
        await asyncio.gather(*self._loads.values(), return_exceptions=True)

    async def _load(self, name: str) -> None:
        if self._pages.elsewhere(name):
            return
        lease = await self._manager.acquire(name)
        with lease as model:
            model.require("generate")

    async def _sizes(self) -> Mapping[str, int]:
        if time.monotonic() - self._looked_s > LOOK_EVERY_S:
            self._looked_s = time.monotonic()
            self._size_bytes = await asyncio.to_thread(_read_sizes)
        return self._size_bytes


_STATES = {"ready": "", "unloaded": "not loaded", "failed": "failed"}


def _note(state: str, size_bytes: int) -> str:
    return " · ".join(part for part in (state, format_bytes(size_bytes) if size_bytes else "") if part)


def _size(entry: ModelEntry, sizes: Mapping[str, int]) -> int:
    if entry.path is not None and str(entry.path) in sizes:
        return sizes[str(entry.path)]
    return entry.card.plan.weights_bytes if entry.card is not None else 0


def _read_sizes() -> dict[str, int]:
    """Return the bytes of each installed model's files, by its name and by its path. Blocking."""
    found: dict[str, int] = {}
    for model in list_models():
        path = str(model.path)
        if path not in found:
            with suppress(OSError):  # it is being deleted
                found[path] = model.size_bytes
        found[model.name] = found.get(path, 0)
    return found
