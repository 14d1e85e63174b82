"""The facts of every model that a request can name, for the lists of all dialects. Nothing is loaded.

Does not know: any dialect's words.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from localllm.config.settings import Settings
from localllm.errors import LocalLLMError
from localllm.fleet.upstream import FORWARDED
from localllm.models.formats.gguf.file_names import quant_of
from localllm.serving.answers.conversation import calls_tools, reasons
from localllm.serving.entry import ModelEntry
from localllm.serving.manager import ModelManager
from localllm.serving.served import ServedModel
from localllm.text.answers.detect import answer_format
from localllm.text.chat_template import ChatTemplate
from localllm.text.tokenizer_files import read_chat_templates, read_special_tokens
from localllm.web.api.exchange import ApiRequest, upstreams_of

if TYPE_CHECKING:
    from localllm.models.spec.model_spec import ModelSpec
    from localllm.models.spec.vision import ImageLimits


TEMPLATE_FILES = ("tokenizer_config.json", "chat_template.jinja", "chat_template.json")


@dataclass(frozen=True, slots=True)
class Abilities:
    """The abilities of a model, read from its files without loading it."""

    tools: bool = False
    reasoning: bool = False
    vision: bool = False
    template: str = ""  # source of its chat template
    hearing: bool = False


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """A model. Values are missing if its files cannot be read."""

    name: str
    entry: ModelEntry | None  # None: it was never loaded
    path: Path | None = None
    spec: ModelSpec | None = None
    context: int | None = None  # served if it is loaded, else as trained
    abilities: Abilities = Abilities()
    image: ImageLimits | None = None  # of its pictures: served if it is loaded, else the checkpoint's
    servers: tuple[str, ...] = ()  # other servers that have it; (): it is a model of this one

    @property
    def is_loaded(self) -> bool:
        return bool(self.servers) or (self.entry is not None and self.entry.state == "ready")

    @property
    def generates(self) -> bool:
        return self.spec is None or self.spec.task == "generate"

    @property
    def family(self) -> str:
        return self.spec.architecture.removesuffix("ForCausalLM").lower() if self.spec is not None else ""

    @property
    def quant(self) -> str:
        """The quantisation as in the file's name, or in the checkpoint's config, or the type of its weights."""
        named = quant_of(self.path.name) if self.path is not None and self.path.suffix == ".gguf" else ""
        if named or self.spec is None:
            return named
        return str((self.spec.quantization or {}).get("quant_method", self.spec.dtype)).upper()

    def capabilities(self, tools: str = "tools", reasoning: str = "reasoning") -> list[str]:
        """Return the abilities as words, with a dialect's words for some."""
        if self.spec is not None and self.spec.task != "generate":
            return [{"embed": "embedding", "score": "rerank", "transcribe": "transcription"}[self.spec.task]]
        can = self.abilities
        words = {tools: can.tools, reasoning: can.reasoning, "vision": can.vision, "audio": can.hearing}
        return ["completion", *[word for word, has in words.items() if has]]


async def all_facts(manager: ModelManager) -> list[ModelFacts]:
    """Return the facts of loaded models, of those that were loaded, and of those that a request could load."""
    ready_first = sorted(manager.entries, key=lambda entry: entry.state != "ready")
    installed = await manager.register.installed()
    named: list[tuple[str, ModelEntry | str]] = [(entry.name, entry) for entry in ready_first]
    named += [(name, entry or name) for name, entry in installed.items()]
    settings = manager.register.settings
    return await asyncio.to_thread(lambda: [_facts(name, found, settings) for name, found in named])


def other_facts(request: ApiRequest) -> list[ModelFacts]:
    """Return the facts of models of other servers that answer; none for another server, which lists its own."""
    upstreams = upstreams_of(request)
    found = {} if FORWARDED in request.headers else upstreams.models()
    return [
        ModelFacts(each.name, None, context=each.context, servers=tuple(server.name for server in servers))
        for each, servers in found.values()
    ]


async def facts_of(manager: ModelManager, name: str) -> ModelFacts:
    """Return the facts of one model, under its own name. Raises `ModelNotFound`."""
    found = await manager.register.look_up(name)
    name = found.name if isinstance(found, ModelEntry) else name
    return await asyncio.to_thread(_facts, name, found, manager.register.settings)


def _facts(name: str, found: ModelEntry | str, settings: Settings | None) -> ModelFacts:
    entry = found if isinstance(found, ModelEntry) else None
    try:
        if entry is not None and entry.card is not None:
            path, spec, context = entry.card.path, entry.card.spec, entry.card.plan.max_model_len
        else:
            path, spec = _read(*_resolved(_checkpoint(found, settings)))
            context = spec.max_position
        served = entry.served if entry is not None else None
        if served is not None:
            abilities, sight = served_abilities(served), served.sight
            image = None if sight is None else sight.processor.limits
        else:
            image = None if spec.vision is None else spec.vision.limits
            abilities = replace(abilities_of(path), vision=image is not None, hearing=spec.hearing is not None)
    except (LocalLLMError, OSError):
        return ModelFacts(name, entry, entry.path if entry is not None else None)
    return ModelFacts(
        name, entry, path, spec, context, abilities if spec.task == "generate" else Abilities(), image=image
    )


def _checkpoint(found: ModelEntry | str, settings: Settings | None) -> str:
    """Return the checkpoint's name; a table in the config file may map the model's name to another one."""
    if isinstance(found, str):
        return settings.of_model(found).engine.model if settings is not None else found
    return found.settings.engine.model if found.settings is not None else found.name


def _resolved(name: str) -> tuple[Path, int]:
    from localllm.models.library.catalog import resolve_model

    path = resolve_model(name).path
    return path, (path / "config.json" if path.is_dir() else path).stat().st_mtime_ns


@lru_cache(maxsize=512)
def _read(path: Path, changed_ns: int) -> tuple[Path, ModelSpec]:
    from localllm.models.read_spec import read_spec

    return path, read_spec(path)


def abilities_of(path: Path) -> Abilities:
    """Return the abilities of a checkpoint. Reads its chat template, so call it on a thread."""
    files = [path, *(path / name for name in TEMPLATE_FILES)] if path.is_dir() else [path]
    return _read_abilities(path, tuple(each.stat().st_mtime_ns for each in files if each.exists()))


@lru_cache(maxsize=512)
def _read_abilities(path: Path, changed_ns: tuple[int, ...]) -> Abilities:
    try:
        template = _chat_template_of(path)
        answers = answer_format(template)
        tools = answers.tools is not None and template.reads("tools")
    except (LocalLLMError, OSError):
        return Abilities()
    return Abilities(tools, answers.reasoning is not None, template=template.source())


def _chat_template_of(path: Path) -> ChatTemplate:
    if path.is_dir():
        return ChatTemplate(read_chat_templates(path), read_special_tokens(path))
    from localllm.models.formats.gguf.checkpoint import read_parts
    from localllm.text.gguf_tokenizer import chat_templates

    return ChatTemplate(chat_templates(read_parts(path)[0].metadata))


def served_abilities(model: ServedModel) -> Abilities:
    """Return the abilities of a loaded model."""
    template = model.chat_template.source() if model.chat_template else ""
    return Abilities(calls_tools(model), reasons(model), model.sight is not None, template, model.hearing is not None)
