"""The settings of a chat beside its messages: system prompt and sampling, as typed; empty means the default.

One table has the label, the parser and the default of each setting.
Does not know: HTTP, templates, where settings are stored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from localllm.engine.params import SamplingParams
from localllm.errors import InvalidParameter
from localllm.serving.served import ModelCard
from localllm.units import format_count
from localllm.web.pages.chat.tools import read_tools
from localllm.web.pages.frame.errors import MessageTooLong

MAX_MESSAGE_CHARS = 256 * 1024
"""A message or system prompt longer than this is refused before anything is tokenised."""

MAX_MODEL_CHARS = 300
OPENAI, SERVER, MODEL = "OpenAI's default", "this server's default", "the model's generation_config"


@dataclass(frozen=True, slots=True)
class Setting:
    """One field of the settings drawer."""

    name: str  # name of the field of SamplingParams
    label: str
    kind: Literal["real", "whole", "lines"]
    default: str  # used if neither the user nor the model sets a value
    source: str  # where that default comes from
    note: str = ""


SETTINGS = (
    Setting("temperature", "Temperature", "real", "1", OPENAI, "0 always picks the most likely token."),
    Setting("max_tokens", "Max tokens", "whole", "", SERVER, "Most tokens in one reply."),
    Setting(
        "top_p", "Top p", "real", "1", OPENAI, "Sample only from the likeliest tokens, up to this total probability."
    ),
    Setting("top_k", "Top k", "whole", "off", SERVER, "Sample only from this many of the likeliest tokens."),
    Setting("min_p", "Min p", "real", "0", SERVER, "Exclude tokens below this share of the top token's probability."),
    Setting(
        "repetition_penalty",
        "Repetition penalty",
        "real",
        "1",
        SERVER,
        "Above 1, tokens that already occurred become less likely.",
    ),
    Setting(
        "presence_penalty", "Presence penalty", "real", "0", OPENAI, "-2 to 2, applied once to each token in the reply."
    ),
    Setting(
        "frequency_penalty",
        "Frequency penalty",
        "real",
        "0",
        OPENAI,
        "-2 to 2, applied for each time a token occurred.",
    ),
    Setting("seed", "Seed", "whole", "a new one each time", SERVER, "The same seed gives the same reply."),
    Setting(
        "thinking_token_budget",
        "Thinking budget",
        "whole",
        "no limit",
        SERVER,
        "Most reasoning tokens; 0 turns reasoning off.",
    ),
    Setting(
        "stop",
        "Stop at",
        "lines",
        "nothing",
        OPENAI,
        r"Strings that end the reply, one per line; write a line break as \n.",
    ),
)
NAMES = ("system", "model", "tools", *(setting.name for setting in SETTINGS))
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
    for setting in SETTINGS:
        text = settings.get(setting.name, "").strip()
        if text:
            values[setting.name] = _read(setting, text)
    return SamplingParams(**values)


def _read(setting: Setting, text: str) -> int | float | list[str]:
    if setting.kind == "lines":
        return [line.replace("\\n", "\n").replace("\\t", "\t") for line in text.split("\n") if line]
    try:
        return int(text) if setting.kind == "whole" else float(text)
    except ValueError:
        raise InvalidParameter(
            f"{setting.label} must be {EXAMPLES[setting.kind]}.", f"Got {text[:40]!r}.", param=setting.name
        ) from None


def effective(setting: Setting, card: ModelCard | None) -> tuple[str, str]:
    """Return the value that applies if the field is empty, and its source. `card` None: the model is not loaded yet."""
    if card is None:
        return "", "the model's own, once it is loaded"
    said = card.sampling_defaults.get(setting.name)
    if said not in (None, ()):
        return (f"{said:g}" if isinstance(said, int | float) else str(said)), MODEL
    if setting.name == "max_tokens":
        return f"what is left of {format_count(card.plan.max_model_len)}", setting.source
    return setting.default, setting.source
