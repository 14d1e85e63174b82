"""The settings of a chat beside its messages: system prompt and sampling, as typed; empty means the default.

Does not know: HTTP, templates, where settings are stored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from localllm.engine.params import SAMPLING_PARAMS, ParamInfo, SamplingParams
from localllm.errors import InvalidParameter
from localllm.serving.served import ModelCard
from localllm.units import format_count
from localllm.web.pages.chat.tools import read_tools
from localllm.web.pages.frame.errors import MessageTooLong

MAX_MESSAGE_CHARS = 256 * 1024
"""A message or system prompt longer than this is refused before anything is tokenised."""

MAX_MODEL_CHARS = 300
OPENAI, SERVER, MODEL = "OpenAI's default", "this server's default", "the model's generation_config"


NOTES = {"strings": r"One per line; write a line break as \n."}
SETTINGS: Mapping[str, ParamInfo] = {name: info for name, info in SAMPLING_PARAMS.items() if info.label}
"""The fields of the settings drawer that set a sampling parameter."""
NAMES = ("system", "model", "tools", *SETTINGS)
EXAMPLES = {"real": "a number such as 0.7", "whole": "a whole number such as 256"}


def typed(form: Mapping[str, str], before: Mapping[str, str]) -> dict[str, str]:
    """Return the settings of a form; fields that it lacks keep their value. Raises `RequestError`."""
    found = {name: form.get(name, before.get(name, "")).strip().replace("\r\n", "\n") for name in NAMES}
    if len(found["system"]) > MAX_MESSAGE_CHARS:
        length, most = format_count(len(found["system"])), format_count(MAX_MESSAGE_CHARS)
        why = f"It has {length} characters; at most {most} are allowed here."
        raise MessageTooLong("The system prompt is too long.", why, "Send a part of it, or use the API.")
    if len(found["model"]) > MAX_MODEL_CHARS:
        raise InvalidParameter("The model's name is too long.", f"At most {MAX_MODEL_CHARS} characters.", param="model")
    sampling_params({}, found)
    read_tools(found["tools"])
    return {name: value for name, value in found.items() if value}


def sampling_params(defaults: Mapping[str, Any], settings: Mapping[str, str]) -> SamplingParams:
    """Return the model's defaults overridden by the user's values. Raises `InvalidParameter`."""
    values: dict[str, Any] = {"max_tokens": None, **defaults}
    for name, info in SETTINGS.items():
        if text := settings.get(name, "").strip():
            values[name] = _read(name, info, text)
    return SamplingParams(**values)


def _read(name: str, info: ParamInfo, text: str) -> int | float | list[str]:
    if info.kind == "strings":
        return [line.replace("\\n", "\n").replace("\\t", "\t") for line in text.split("\n") if line]
    try:
        return int(text) if info.kind == "whole" else float(text)
    except ValueError:
        raise InvalidParameter(
            f"{info.label} must be {EXAMPLES[info.kind]}.", f"Got {text[:40]!r}.", param=name
        ) from None


def note(info: ParamInfo) -> str:
    """Return the text under a field."""
    return f"{info.text} {NOTES.get(info.kind, '')}".strip()


def effective(name: str, card: ModelCard | None) -> tuple[str, str]:
    """Return the value that applies if the field is empty, and its source. `card` None: the model is not loaded yet."""
    if card is None:
        return "", "the model's own, once it is loaded"
    said = card.sampling_defaults.get(name)
    if said not in (None, ()):
        return (f"{said:g}" if isinstance(said, int | float) else str(said)), MODEL
    info = SETTINGS[name]
    source = OPENAI if info.is_openai else SERVER
    if name == "max_tokens":
        return f"what is left of {format_count(card.plan.max_model_len)}", source
    return info.unset or f"{info.default:g}", source
