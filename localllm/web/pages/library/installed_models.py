"""Installed models with their state in the manager: one row per model, with its actions.

The disk is read when the page is viewed, at most every few seconds; the facts of a checkpoint's header are cached until
its file changes.
Does not know: HTTP, the hub.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import quote, urlencode

from localllm.models.formats.gguf.file_names import quant_of
from localllm.models.library.about import SOURCES, ago, quantization_name, spec_or_reason
from localllm.models.library.catalog import DEMO_NAME, ResolvedModel, list_models
from localllm.models.library.hub.cache import free_bytes
from localllm.serving.entry import ModelEntry, ModelStatus
from localllm.serving.eviction import can_sleep
from localllm.serving.manager import ModelManager
from localllm.units import format_bytes, format_count
from localllm.web.pages.frame.errors import notice
from localllm.web.pages.frame.status import load_fraction, load_phases
from localllm.web.pages.frame.views import ErrorNotice, LoadPhase, View, view

ModelState = Literal["loading", "ready", "tuning", "sleeping", "unloading", "unloaded", "failed"]


@dataclass(frozen=True, slots=True)
class ActionButton:
    """A button: the value it posts, and its label."""

    name: str
    title: str
    is_main: bool = False


@dataclass(frozen=True, slots=True)
class ModelRow:
    """One model on this machine."""

    name: str
    url: str  # the model's own page
    state: ModelState
    facts: tuple[str, ...]  # size, format, context, source, last use
    verbs: tuple[ActionButton, ...]
    label: str  # the state in words: loaded, unloading, 12 requests to finish
    pinned: bool = False
    delete_url: str = ""  # empty: the model is not in the cache, or is in use
    phases: tuple[LoadPhase, ...] = ()  # of the current load
    fraction: float | None = None  # of the current load, over all its phases; None: not loading, or unknown
    error: ErrorNotice | None = None  # why the last load failed


@view("library/_installed.html")
class InstalledList(View):
    """Every model on this machine, with its state."""

    rows: tuple[ModelRow, ...]
    size_bytes: int
    free_bytes: int  # on the disk that holds the cache


LOOK_EVERY_S = 3.0
LOAD, UNLOAD = ActionButton("load", "Load", is_main=True), ActionButton("unload", "Unload")

WAKE, SLEEP, STOP = (
    ActionButton("wake", "Wake", is_main=True),
    ActionButton("sleep", "Sleep"),
    ActionButton("unload", "Stop loading"),
)

PIN, UNPIN = ActionButton("pin", "Pin"), ActionButton("unpin", "Unpin")
KEEP = ActionButton("keep", "Keep it", is_main=True)
LABELS = {"ready": "loaded", "unloaded": "not loaded"}


@dataclass(frozen=True, slots=True)
class InstalledCheckpoint:
    """A checkpoint on the disk."""

    model: ResolvedModel
    size_bytes: int
    used_s: float
    facts: tuple[str, ...]


class InstalledModels:
    """The rows of the page."""

    def __init__(self, manager: ModelManager) -> None:
        self._manager = manager
        self._checkpoints: list[InstalledCheckpoint] = []
        self._free_bytes = 0
        self._looked_s = float("-inf")
        self._facts: dict[tuple[Path, float], tuple[str, ...]] = {}
        self._turn = asyncio.Lock()

    async def read(self, *, anew: bool = False) -> InstalledList:
        """Return the installed models and their current state."""
        async with self._turn:
            if anew or time.monotonic() - self._looked_s > LOOK_EVERY_S:
                self._checkpoints, self._free_bytes = await asyncio.to_thread(self._read)
                self._looked_s = time.monotonic()
        rows = self.rows()
        return InstalledList(
            tuple(rows), sum(checkpoint.size_bytes for checkpoint in self._checkpoints), self._free_bytes
        )

    @property
    def is_bare(self) -> bool:
        """True if no model is installed but the demo."""
        return all(checkpoint.model.name == DEMO_NAME for checkpoint in self._checkpoints) and all(
            entry.name == DEMO_NAME or entry.card is None for entry in self._manager.entries
        )

    def rows(self) -> list[ModelRow]:
        """Return all rows; the models that the manager knows come first, in its order."""
        statuses = {status.name: status for status in self._manager.statuses()}
        entry = sorted(self._manager.entries, key=lambda each: list(statuses).index(each.name))
        shown = {each.path: each for each in entry if each.path is not None}
        rows = [self._entry_row(each, statuses[each.name]) for each in entry if self._is_there(each)]
        return rows + [
            self._checkpoint_row(checkpoint) for checkpoint in self._checkpoints if checkpoint.model.path not in shown
        ]

    def row(self, name: str) -> ModelRow | None:
        """Return the row of a model, named as in the catalogue or in the manager."""
        entry = self._manager.register.find(name)
        names = {name, entry.name} if entry is not None else {name}
        return next((row for row in self.rows() if row.name in names), None)

    def path_of(self, name: str) -> Path | None:
        """Return the path of a model, if the manager knows it."""
        entry = self._manager.register.find(name)
        return entry.path if entry is not None else None

    def has(self, repo_id: str) -> bool:
        """Return whether any model of a repository is installed."""
        return any(checkpoint.model.name.partition(":")[0] == repo_id for checkpoint in self._checkpoints)

    @staticmethod
    def _is_there(entry: ModelEntry) -> bool:
        return entry.state not in ("unloaded", "failed") or entry.path is None or entry.path.exists()

    def _entry_row(self, entry: ModelEntry, status: ModelStatus) -> ModelRow:
        checkpoint = next((checkpoint for checkpoint in self._checkpoints if checkpoint.model.path == entry.path), None)
        facts = (
            checkpoint.facts if checkpoint is not None else (f"path {entry.path}",) if entry.path is not None else ()
        )
        if status.size_bytes:
            facts = (*facts, f"uses {format_bytes(status.size_bytes)} on {status.device}")
        rests = entry.state in ("unloaded", "failed")
        return ModelRow(
            name=entry.name,
            url=page_url(entry.name),
            state=entry.state,
            facts=(
                *facts,
                _used(status) or (f"last read {ago(checkpoint.used_s)}" if checkpoint is not None else "not used yet"),
            ),
            verbs=_verbs(entry),
            label=_label(entry),
            pinned=entry.pinned,
            delete_url=_delete_url(checkpoint.model) if checkpoint is not None and rests else "",
            phases=load_phases(entry) if entry.state == "loading" else (),
            fraction=load_fraction(entry) if entry.state == "loading" else None,
            error=notice(entry.error) if entry.state == "failed" and entry.error is not None else None,
        )

    @staticmethod
    def _checkpoint_row(checkpoint: InstalledCheckpoint) -> ModelRow:
        name, facts = checkpoint.model.name, (*checkpoint.facts, f"last read {ago(checkpoint.used_s)}")
        url, label = page_url(name), LABELS["unloaded"]
        return ModelRow(name, url, "unloaded", facts, (LOAD,), label, delete_url=_delete_url(checkpoint.model))

    def _read(self) -> tuple[list[InstalledCheckpoint], int]:
        """Walk the disk. Blocking."""
        models = list_models()
        second: dict[Path, list[str]] = {}
        for model in models:
            if model.alias_of is not None:
                second.setdefault(model.path, []).append(model.name)
        checkpoints = [
            self._checkpoint(model, second.get(model.path, [])) for model in models if model.alias_of is None
        ]
        return [checkpoint for checkpoint in checkpoints if checkpoint is not None], free_bytes()

    def _checkpoint(self, model: ResolvedModel, second_names: Sequence[str]) -> InstalledCheckpoint | None:
        """Return a checkpoint's entry; None if it is being deleted."""
        try:
            stats = [file.stat() for file in model.files]
        except OSError:
            return None
        size, key = sum(stat.st_size for stat in stats), (model.path, max((s.st_mtime for s in stats), default=0.0))
        if key not in self._facts:
            self._facts[key] = header_facts(model)
        also = (f"also called {', '.join(second_names)}",) if second_names else ()
        facts = (format_bytes(size), *self._facts[key], SOURCES[model.source], *also)
        return InstalledCheckpoint(model, size, max((stat.st_atime for stat in stats), default=0.0), facts)


def header_facts(model: ResolvedModel) -> tuple[str, ...]:
    """Return format, quantisation and context from the headers."""
    spec, problem = spec_or_reason(model.path)
    if spec is None:
        return (model.format, f"cannot be loaded: {problem.what if problem else ''}")
    stored = quant_of(model.path.name) if model.format == "gguf" else quantization_name(spec)
    return (model.format, stored or spec.dtype, f"context {format_count(spec.max_position)}")


def page_url(name: str) -> str:
    return f"/library/model/{quote(name)}"


def _delete_url(model: ResolvedModel) -> str:
    return f"/library/delete?{urlencode({'model': model.name})}" if model.source == "cache" else ""


def _verbs(entry: ModelEntry) -> tuple[ActionButton, ...]:
    pin = UNPIN if entry.pinned else PIN
    if entry.state == "ready":
        return (UNLOAD, *((SLEEP,) if can_sleep(entry) else ()), pin)
    leaving = (KEEP,) if entry.is_draining else ()
    by_state = {"loading": (STOP,), "sleeping": (WAKE, UNLOAD, pin), "unloading": leaving, "tuning": ()}
    return by_state.get(entry.state, (LOAD,))


def _label(entry: ModelEntry) -> str:
    """Return the state in words; while it waits for its requests to end, with their number."""
    if entry.is_draining and entry.num_leases:
        return f"{entry.state}, {entry.num_leases} {'request' if entry.num_leases == 1 else 'requests'} to finish"
    return LABELS.get(entry.state, entry.state)


def _used(status: ModelStatus) -> str:
    """Return the last use, in minutes, because the line is sent again whenever it changes."""
    if status.num_requests:
        return f"{status.num_requests} {'request' if status.num_requests == 1 else 'requests'} now"
    if status.state != "ready" or status.idle_s is None:
        return ""
    used = "used in the last minute" if status.idle_s < 60 else f"last used {_minutes(status.idle_s)} ago"
    leaves = status.expires_in_s
    return used if leaves is None else f"{used} · unloads in {_minutes(leaves + 59)} without a request"


def _minutes(seconds: float) -> str:
    minutes = int(seconds // 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h"
