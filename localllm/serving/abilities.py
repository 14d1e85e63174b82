"""The abilities of a model, read from its files without loading it: tools, reasoning, pictures.

Does not know: HTTP, which models are loaded.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from localllm.errors import LocalLLMError
from localllm.serving.answers.conversation import calls_tools, reasons
from localllm.serving.served import ServedModel
from localllm.text.answers.detect import answer_format
from localllm.text.chat_template import ChatTemplate
from localllm.text.tokenizer_files import read_chat_templates, read_special_tokens

TEMPLATE_FILES = ("tokenizer_config.json", "chat_template.jinja", "chat_template.json")


@dataclass(frozen=True, slots=True)
class Abilities:
    tools: bool = False
    reasoning: bool = False
    vision: bool = False
    template: str = ""  # source of its chat template


def abilities_of(path: Path) -> Abilities:
    """Return the abilities of a checkpoint. Reads its chat template, so call it on a thread."""
    files = [path, *(path / name for name in TEMPLATE_FILES)] if path.is_dir() else [path]
    return _read(path, tuple(each.stat().st_mtime_ns for each in files if each.exists()))


@lru_cache(maxsize=512)
def _read(path: Path, changed_ns: tuple[int, ...]) -> Abilities:
    try:
        template = _template_of(path)
        answers = answer_format(template)
        tools = answers.tools is not None and template.reads("tools")
    except (LocalLLMError, OSError):
        return Abilities()
    return Abilities(tools, answers.reasoning is not None, template=template.source())


def _template_of(path: Path) -> ChatTemplate:
    if path.is_dir():
        return ChatTemplate(read_chat_templates(path), read_special_tokens(path))
    from localllm.models.formats.gguf.checkpoint import read_parts
    from localllm.text.gguf_tokenizer import chat_templates

    return ChatTemplate(chat_templates(read_parts(path)[0].metadata))


def served_abilities(model: ServedModel) -> Abilities:
    """Return the abilities of a loaded model."""
    template = model.chat_template.source() if model.chat_template else ""
    return Abilities(calls_tools(model), reasons(model), model.sight is not None, template)
