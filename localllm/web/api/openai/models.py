"""Models as OpenAI's clients and Codex read them: names, context, abilities, state, and models being downloaded.

Does not know: HTTP (model_list.py has the handlers).
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import UNSET
from msgspec.structs import replace

from localllm.models.formats.gguf.file_names import quant_of
from localllm.models.library.hub.downloads import DownloadStatus
from localllm.web.api.model_facts import ModelFacts
from localllm.web.api.openai import shapes

CODEX_INSTRUCTIONS = (
    "You are a coding agent in a terminal. Read files before you change them, use the tools to run commands and to "
    "edit files, keep changes small, and say at the end what you changed."
)
"""Codex sends these instructions with each request; those of its own models are for tools that they were trained on."""
WORDS = {"ready": "loaded"}
"""The states whose name differs for clients of other servers."""


def model_objects(facts: Sequence[ModelFacts], downloads: Sequence[DownloadStatus]) -> list[shapes.OpenAIModel]:
    """Return the objects of all models, with loaded adapters after their models, and of running downloads."""
    objects = []
    for model in facts:
        objects.append(model_object(model))
        if model.entry is not None and model.entry.name == model.name:
            objects += adapter_objects(model)
    listed = {each.id for each in objects}
    for each in downloads:
        if not each.is_over and each.plan.name not in listed:
            status = shapes.ModelState("downloading", progress=each.progress.fraction)
            objects.append(replace(_object(each.plan.name), status=status))
    return objects


def object_named(name: str, model: ModelFacts) -> shapes.OpenAIModel:
    """Return the object of a model or of its adapter with this name."""
    adapters = [each for each in adapter_objects(model) if each.id == name]
    return (
        adapters[0] if adapters and model.entry is not None and name not in model.entry.names else model_object(model)
    )


def model_object(model: ModelFacts) -> shapes.OpenAIModel:
    entry, card = model.entry, model.entry.card if model.entry is not None else None
    found = _object(model.name)
    if entry is not None:
        found.root, found.status.value = entry.name, WORDS.get(entry.state, entry.state)
        phase = next(reversed(entry.phases.values()), None)
        if entry.state == "loading" and phase is not None:
            found.status.phase, found.status.progress = phase.name, phase.fraction
    if model.servers:
        found.owned_by, found.status.value = ", ".join(model.servers), "loaded"
        found.context_length = UNSET if model.context is None else model.context
    if model.spec is not None:
        found.capabilities = model.capabilities()
        if (image := model.image) is not None:
            found.image = shapes.ImageFacts(image.min_tokens, image.max_tokens, image.px_per_token or None)
        found.context_length = UNSET if model.context is None else model.context
    if card is not None:
        found.created, found.max_model_len = int(card.created_s), card.plan.max_model_len
        named = quant_of(card.path.name) if card.path.suffix == ".gguf" else ""
        found.meta = {
            "quant": named or (card.spec.quantization or {}).get("quant_method"),
            "size": card.plan.weights_bytes,
            "n_vocab": card.spec.vocab_size,
            "n_embd": card.spec.hidden_size,
            "n_ctx_train": card.spec.max_position,
            "dtype": str(card.plan.dtype),
        }
    return found


def adapter_objects(model: ModelFacts) -> list[shapes.OpenAIModel]:
    """Return an object for each adapter. To clients an adapter is a model of its own; `parent` is its base model."""
    entry, base = model.entry, model_object(model)
    return [
        replace(
            base,
            id=each.name,
            created=int(each.created_s),
            root=str(each.path),
            parent=model.name,
            meta={"rank": each.rank},
        )
        for each in (entry.adapters.loaded if entry is not None and entry.adapters is not None else ())
    ]


def codex_object(model: ModelFacts) -> shapes.CodexModel:
    """Return a model as Codex reads it: with its context and its tools."""
    return shapes.CodexModel(
        slug=model.name,
        display_name=model.name,
        description="A model on this server.",
        supported_reasoning_levels=[],
        shell_type="shell_command",
        visibility="list",
        supported_in_api=True,
        priority=0,
        base_instructions=CODEX_INSTRUCTIONS,
        supports_reasoning_summaries=False,
        support_verbosity=False,
        truncation_policy={"mode": "tokens", "limit": 10_000},
        supports_parallel_tool_calls=model.abilities.tools,
        context_window=model.context,
        experimental_supported_tools=[],
        input_modalities=["text", "image"] if model.abilities.vision else ["text"],
    )


def _object(name: str) -> shapes.OpenAIModel:
    """Return the fields that every model has."""
    return shapes.OpenAIModel(
        id=name,
        object="model",
        created=0,
        owned_by="localllm",
        root=name,
        parent=None,
        status=shapes.ModelState("unloaded"),
    )
