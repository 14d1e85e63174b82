"""The models that the manager knows or could load, found by the name in a request.

Does not know: how models are loaded and unloaded (manager.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from localllm.config.settings import EngineConfig, Settings, Task
from localllm.errors import ConfigError, CorruptModel, ModelNotFound, UnsupportedModel
from localllm.serving.entry import ModelEntry, ModelLoading, ModelNotLoaded, ModelUnusable
from localllm.serving.served import DOES, expected_name, short_name
from localllm.serving.transitions import Loader

KEEP_ALIVE_S = 300.0  # for models loaded on demand, unless set otherwise
SPEECH_KEEP_ALIVE_S = 600.0  # for the speech model
SPEECH_HINT = "localllm pull nvidia/parakeet-tdt-0.6b-v3, then start with --speech-model nvidia/parakeet-tdt-0.6b-v3."

BESIDE = {"max_model_len": 2048, "max_num_seqs": 4}
"""Settings of a speech model that reads sound in prompts: room for windows of 30 s, and no more."""
LONGEST_NAME = 300
"""Most characters of a requested model name. A repository's name has at most 193; operators' paths are exempt."""


class Register:
    """All known models. Without `settings`, only models that were added by hand."""

    def __init__(self, loader: Loader) -> None:
        self.entries: list[ModelEntry] = []
        self.settings: Settings | None = None
        self._loader = loader

    @property
    def default(self) -> ModelEntry | None:
        """The model for a request without a name: the last used ready model, else the last used of all models. One that
        transcribes is taken only if there is no other.
        """
        return _used_last([entry for entry in self.entries if not entry.transcribes]) or _used_last(self.entries)

    @property
    def speech(self) -> ModelEntry | None:
        """The model that transcribes what is said on the pages: that of --speech-model, else a loaded one that does
        nothing else, else a loaded chat model that hears; None: there is none.
        """
        if self.settings is not None and self.settings.server.speech_model == "none":
            return None
        own = next((entry for entry in self.entries if entry.is_beside), None)
        ready = [entry for entry in self.entries if entry.hears and entry.state == "ready"]
        return own or _used_last([entry for entry in ready if entry.transcribes]) or _used_last(ready)

    async def add_speech_model(self, name: str) -> None:
        """Register the model of --speech-model, which the first sound loads. It takes the device of the model that is
        named at start and no other setting of it. Raises `ModelNotFound`, `ConfigError` if it does not transcribe.
        """
        from localllm.models.encoders.recipe import task_of
        from localllm.models.read_spec import read_spec

        assert self.settings is not None
        settings, table = self.settings, self.settings.table(name)
        own = {"model": name, "device": settings.engine.device, "offline": True, **(table.engine if table else {})}
        found = await asyncio.to_thread(self._loader.resolve, own["model"], True)
        task = task_of(found.path)
        hears = task == "generate" and (await asyncio.to_thread(read_spec, found.path)).hearing is not None
        if task != "transcribe" and not hears:
            what, why = f"--speech-model {name} does not transcribe speech.", f"It {DOES[task][0]}."
            raise ConfigError(
                what, why, "Parakeet, Whisper and Moonshine transcribe: docs/guides/speech.md.", param="speech_model"
            )
        own = {**BESIDE, **own} if hears else own
        server = replace(settings.server, served_model_name=table.names if table else ())
        entry = self.add(
            replace(settings, engine=EngineConfig(**own), server=server), name, keep_alive_s=SPEECH_KEEP_ALIVE_S
        )
        entry.names |= {name, found.name}
        entry.path, entry.is_beside = found.path, True

    async def transcribers(self) -> list[str]:
        """Return the names of the models that can transcribe a sound of the pages without evicting another model: those
        that are loaded, the speech model, and installed ones, which `add_speech_model` registers.
        """
        from localllm.models.encoders.recipe import task_of

        known = [entry for entry in self.entries if entry.is_beside or (entry.hears and entry.state == "ready")]
        if self.speech is None or self.settings is None or not self.settings.server.on_demand:
            return [entry.name for entry in known]
        paths = {entry.path for entry in self.entries}

        def unknown() -> list[str]:
            stored = [each for each in self._loader.list() if each.alias_of is None and each.path not in paths]
            return [each.name for each in stored if task_of(each.path) == "transcribe"]

        return [entry.name for entry in known] + await asyncio.to_thread(unknown)

    async def installed(self) -> dict[str, ModelEntry | None]:
        """Return the names that requests could use besides the names in `entries`.
        An alias maps to the model that it names.
        """
        settings = self.settings
        if settings is None:
            return {}
        names: dict[str, ModelEntry | None] = {
            table.name: None for table in settings.models.values() if self.find(table.name) is None
        }
        if settings.server.on_demand:
            entry_at = {entry.path: entry for entry in self.entries}
            own_names = {entry.name for entry in self.entries}
            for each in await asyncio.to_thread(self._loader.list):
                if each.alias_of is not None:
                    if each.name not in own_names:
                        names[each.name] = entry_at.get(each.path)
                elif each.path not in entry_at and self.find(each.name) is None:
                    names.setdefault(each.name, None)
        return names

    async def look_up(self, name: str) -> ModelEntry | str:
        """Return the model that a request of that name would get, or the name if it must be loaded first."""
        entry = self.find(name)
        if entry is not None:
            return entry
        settings = self.settings
        if settings is not None and settings.table(name) is not None:
            return name
        installed = await self.installed()
        if name in installed:
            return installed[name] or name
        raise self.not_found(name)

    async def is_taken(self, name: str) -> bool:
        """Return whether a request of that name would get a model."""
        try:
            await self.look_up(name)
        except ModelNotFound:
            return False
        return True

    async def find_or_add(self, name: str | None, task: Task = "generate", *, anywhere: bool = False) -> ModelEntry:
        """Return the model of that name, and register it if it is new.

        anywhere: the name may also be a path, for operators only; the answer to a request must not show what other
        files exist. Raises `ModelNotFound`, `ModelLoading`, `ModelUnusable`.
        """
        name = (name or "").strip() or name  # as the catalogue does: the model is stored under the stripped name
        if name and len(name) > LONGEST_NAME and not anywhere:
            raise ModelNotFound(
                f"The model {name[:40]!r}… is not served here.",
                f"A name has at most {LONGEST_NAME} characters; this one has {len(name)}.",
                "GET /v1/models lists the served and loadable models.",
                param="model",
            )
        entry = self.find(name) if name else self._default_for(task)
        if entry is not None:
            return entry
        if not name:
            raise ModelLoading("No model is loaded.", "Name an installed model in the request.")
        settings = self.settings
        if settings is None:
            raise self.not_found(name)
        table = settings.table(name)
        if table is not None:
            return self.add(settings.of_model(name), name)
        if not anywhere and not settings.server.on_demand:
            raise self.not_found(name)
        try:
            found = await asyncio.to_thread(self._loader.resolve, name, anywhere)
        except ModelNotFound as error:
            raise (error if anywhere else self.not_found(name)) from None
        except (UnsupportedModel, CorruptModel):
            if anywhere:
                raise
            what, why = f"The model {name!r} cannot be served.", "Its files are incomplete, damaged or not supported."
            raise ModelUnusable(what, why, f"localllm show {name}, on the server's machine.", param="model") from None
        same = self.find(name) or next((entry for entry in self.entries if entry.path == found.path), None)
        if same is not None:  # requested under another of its names, or registered by another request meanwhile
            same.names |= {name}
            return same
        short = short_name(found.name)
        names = (found.name,) if self.find(short) is not None else ()
        entry = self.add(settings.of_model(name, names), short if not names else found.name)
        entry.names |= {name, found.name}
        entry.path = found.path
        return entry

    def remove_name(self, name: str) -> None:
        """Remove an alias that was deleted. The model's own name stays."""
        for entry in self.entries:
            if entry.name != name:
                entry.names -= {name}

    def _default_for(self, task: Task) -> ModelEntry | None:
        """Return the last used model that does `task`; if none is known to, the default, which raises its own error."""
        if task == "transcribe" and (speech := self.speech) is not None:
            return speech
        able = [entry for entry in self.entries if entry.card is not None and entry.card.spec.task == task]
        if task == "transcribe" and not able and self.default is not None and self.default.card is not None:
            raise ModelNotFound("No model here transcribes speech.", self._served_names(), SPEECH_HINT, param="model")
        return _used_last(able) or self.default

    def find(self, name: str | None) -> ModelEntry | None:
        """Return the model of that name, or the model that has an adapter of that name; without a name, the default."""
        if not name:
            return self.default
        return self._by_name(name) or next((entry for entry in self.entries if entry.has_adapter(name)), None)

    def _by_name(self, name: str) -> ModelEntry | None:
        return next((entry for entry in self.entries if name in entry.names), None)

    def require(self, name: str) -> ModelEntry:
        """Return the model of that name. An adapter's name does not count here."""
        entry = self._by_name(name)
        if entry is None:
            raise ModelNotLoaded(f"{name!r} is not loaded.", self._served_names(), "localllm ps", param="model")
        return entry

    def add(self, settings: Settings, asked: str, *, keep_alive_s: float = KEEP_ALIVE_S) -> ModelEntry:
        """Register a model that can be loaded from now on."""
        table = settings.table(asked)
        said = [table.keep_alive if table else None, settings.server.keep_alive, keep_alive_s]
        expected = expected_name(asked)
        names = settings.server.served_model_name or ((expected, asked) if self.find(expected) is None else (asked,))
        entry = ModelEntry(names[0], settings, frozenset(names))
        entry.pinned = table.pin if table else False
        entry.keep_alive_s = next(seconds for seconds in said if seconds is not None)
        self.entries.append(entry)
        return entry

    def not_found(self, name: str) -> ModelNotFound:
        hint = "GET /v1/models lists the served and loadable models."
        return ModelNotFound(f"The model {name!r} is not served here.", self._served_names(), hint, param="model")

    def _served_names(self) -> str:
        names = [entry.name for entry in self.entries if entry.state not in ("unloaded", "failed")]
        return f"Served: {', '.join(names) or 'none'}."


def _used_last(models: Sequence[ModelEntry]) -> ModelEntry | None:
    rank = {"ready": 2, "failed": 0}
    return max(models, key=lambda entry: (rank.get(entry.state, 1), entry.last_used_s), default=None)
