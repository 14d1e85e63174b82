"""The settings of a chat beside its messages, as typed: system prompt, sampling, thinking, tools. Empty is the default.

Tools are typed functions, whose results the user types, and chosen servers, whose calls tools/runs.py runs.
Does not know: HTTP, templates, where settings are stored, which servers there are.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from localllm.config.mcp_servers import McpServer
from localllm.engine.params import SAMPLING_PARAMS, ParamInfo, SamplingParams
from localllm.errors import InvalidParameter
from localllm.serving.served import ModelCard
from localllm.text.structured import StructuredOutputsParams
from localllm.units import format_count
from localllm.web.api.tools import checked, read_tool
from localllm.web.pages.chat.replies.messages import awaited_calls, calls_of
from localllm.web.pages.chat.store import StoredMessage
from localllm.web.pages.frame.errors import MessageTooLong

NO_SERVERS = "-"
"""The value of the setting `mcp` if a chat has chosen no server."""
_CHOICE = re.compile(r"-|[a-z0-9_-]{1,32}( [a-z0-9_-]{1,32}){0,99}")
MAX_TOOLS_CHARS = 64 * 1024
MAX_RESULT_CHARS = 256 * 1024
EXAMPLE = """[{"name": "get_weather", "description": "Weather now",
  "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}]"""


def read_tools(text: str) -> list[dict[str, Any]]:
    """Return the functions, in OpenAI's format or without its outer object. Raises the error that names the wrong
    field.
    """
    if not text.strip():
        return []
    if len(text) > MAX_TOOLS_CHARS:
        why = f"It has {len(text):,} characters; at most {MAX_TOOLS_CHARS:,} are allowed here."
        raise MessageTooLong("The list of tools is too long.", why, "Use the API.")
    try:
        found = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise _unreadable(f"It is not JSON: {error}.") from error
    if not isinstance(found, list):
        raise _unreadable(f"It is {'an object, not a list' if isinstance(found, dict) else 'not a list'}.")
    tools = []
    for number, tool in enumerate(found):
        if not isinstance(tool, dict):
            raise _unreadable(f"tools[{number}] is not an object.")
        tools.append(read_tool(tool if "function" in tool else {"function": tool}, f"tools[{number}]"))
    return list(checked(tools, "tools"))  # type: ignore[arg-type]


def _unreadable(why: str) -> InvalidParameter:
    return InvalidParameter("Tools must be a JSON list of functions.", why, f"For example: {EXAMPLE}", param="tools")


def chosen_servers(form: Mapping[str, str], before: Mapping[str, str]) -> str:
    """Return the setting: names separated by spaces, NO_SERVERS, or empty if the chat has not chosen.

    The form has a check box for each server, and a field that tells that they were shown.
    """
    if "mcp_shown" in form:
        names = sorted(name.removeprefix("mcp-") for name in form if name.startswith("mcp-"))
        chosen = " ".join(names) or NO_SERVERS
    else:
        chosen = form.get("mcp", before.get("mcp", "")).strip()
    return chosen if _CHOICE.fullmatch(chosen) else ""


def is_chosen(server: McpServer, settings: Mapping[str, str]) -> bool:
    chosen = settings.get("mcp", "")
    return server.name in chosen.split() if chosen else server.in_new_chats


def results_of(message: StoredMessage, form: Mapping[str, str]) -> list[dict[str, str]]:
    """Return the result of each call that gets one: what its server returned, else what was typed. Raises
    `InvalidParameter`.
    """
    calls, awaited = calls_of(message.details), awaited_calls(message.details)
    if not awaited:
        raise InvalidParameter("This reply calls no tool.", hint="Write a message instead.")
    results = []
    for number in awaited:
        call, stored = calls[number], message.details["calls"][number]
        if stored.get("state") == "done":
            results.append({"id": call.id, "name": call.name, "text": stored["result"]})
            continue
        text = form.get(f"result-{number}", "").strip().replace("\r\n", "\n")
        if not text:
            raise InvalidParameter(f"The result of {call.name} is empty.", hint="Type the result of the call.")
        if len(text) > MAX_RESULT_CHARS:
            why = f"It has {len(text):,} characters; at most {MAX_RESULT_CHARS:,} are allowed here."
            raise MessageTooLong(f"The result of {call.name} is too long.", why, "Send a part of it.")
        results.append({"id": call.id, "name": call.name, "text": text})
    return results


MAX_MESSAGE_CHARS = 256 * 1024
"""A message or system prompt longer than this is refused before anything is tokenised."""

MAX_MODEL_CHARS = 300
OPENAI, SERVER, MODEL = "OpenAI's default", "this server's default", "the model's generation_config"
MAX_SCHEMA_CHARS = 64 * 1024

SETTINGS: Mapping[str, ParamInfo] = {name: info for name, info in SAMPLING_PARAMS.items() if info.label}
"""The fields of the drawer that set a sampling parameter."""

FIRST = ("temperature", "max_tokens")
"""Fields that the drawer shows at once; the others are behind `More sampling`."""

LABELS = {"max_tokens": "Longest reply, tokens", "stop": "Stop at"}
NOTES = {
    "temperature": "0: always the most likely token",
    "max_tokens": "",
    "top_p": "Only the likeliest tokens, up to this total probability",
    "top_k": "Only this many of the likeliest tokens",
    "min_p": "Only tokens above this share of the likeliest one's probability",
    "repetition_penalty": "Above 1: repeats less",
    "presence_penalty": "Above 0: fewer words that occurred",
    "frequency_penalty": "Above 0: fewer words that occurred often",
    "seed": "The same seed gives the same reply",
    "thinking_token_budget": "0: no thinking",
    "stop": r"One text per line; write a line break as \n",
}
"""The text under a field, where it is shorter than the parameter's own description."""

NAMES = ("system", "model", "tools", "thinking", "schema", "mcp", *SETTINGS)
BEHAVIOUR = tuple(name for name in NAMES if name not in ("model", "thinking", "mcp"))
"""The fields of the drawer."""

EXAMPLES = {"real": "a number such as 0.7", "whole": "a whole number such as 256"}


def typed(form: Mapping[str, str], before: Mapping[str, str]) -> dict[str, str]:
    """Return the settings of a form; fields that it lacks keep their value. Raises `RequestError`."""
    found = {name: form.get(name, before.get(name, "")).strip().replace("\r\n", "\n") for name in NAMES}
    if len(found["system"]) > MAX_MESSAGE_CHARS:
        length, most = format_count(len(found["system"])), format_count(MAX_MESSAGE_CHARS)
        why, hint = (
            f"It has {length} characters; at most {most} are allowed here.",
            "Send a part of it, or use the API.",
        )
        raise MessageTooLong("The system prompt is too long.", why, hint, param="system")
    if len(found["model"]) > MAX_MODEL_CHARS:
        raise InvalidParameter("The model's name is too long.", f"At most {MAX_MODEL_CHARS} characters.", param="model")
    if found["thinking"] not in ("", "on", "off"):
        got = f"Got {found['thinking'][:40]!r}."
        raise InvalidParameter("Thinking must be on, off or empty.", got, param="thinking")
    sampling_params({}, found)
    read_tools(found["tools"])
    found["mcp"] = chosen_servers(form, before)
    return {name: value for name, value in found.items() if value}


def num_set(settings: Mapping[str, str]) -> int:
    """Return how many fields of the drawer are filled in."""
    return sum(bool(settings.get(name, "").strip()) for name in BEHAVIOUR)


def sampling_params(defaults: Mapping[str, Any], settings: Mapping[str, str]) -> SamplingParams:
    """Return the model's defaults overridden by the user's values. Raises `InvalidParameter`."""
    values: dict[str, Any] = {"max_tokens": None, **defaults, **typed_params(settings)}
    if (schema := typed_schema(settings)) is not None:
        values["structured_outputs"] = StructuredOutputsParams(json=schema, param="schema")
    return SamplingParams(**values)


def typed_params(settings: Mapping[str, str]) -> dict[str, Any]:
    """Return the values of the sampling parameters that the user has set. Raises `InvalidParameter`."""
    asked = {name: settings.get(name, "").strip() for name in SETTINGS}
    return {name: _read(name, SETTINGS[name], text) for name, text in asked.items() if text}


def typed_schema(settings: Mapping[str, str]) -> dict[str, Any] | None:
    """Return the JSON schema of the reply; None: the user has set none. Raises `InvalidParameter`."""
    text = settings.get("schema", "").strip()
    return _read_schema(text) if text else None


def _read_schema(text: str) -> dict[str, Any]:
    if len(text) > MAX_SCHEMA_CHARS:
        why = f"It has {format_count(len(text))} characters; at most {format_count(MAX_SCHEMA_CHARS)} are allowed here."
        raise MessageTooLong("The JSON schema is too long.", why, "Use the API.", param="schema")
    try:
        found = msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError) as error:
        why, hint = f"It is not a JSON object: {error}.", 'For example: {"type": "object", "properties": {"title": …}}'
        raise InvalidParameter("The schema of the reply must be a JSON object.", why, hint, param="schema") from error
    return found


def _read(name: str, info: ParamInfo, text: str) -> int | float | list[str]:
    if info.kind == "strings":
        return [line.replace("\\n", "\n").replace("\\t", "\t") for line in text.split("\n") if line]
    try:
        return int(text) if info.kind == "whole" else float(text)
    except ValueError:
        raise InvalidParameter(
            f"{label(name).partition(',')[0]} must be {EXAMPLES[info.kind]}.", f"Got {text[:40]!r}.", param=name
        ) from None


def label(name: str) -> str:
    """Return the label of a sampling parameter's field."""
    return LABELS.get(name, SETTINGS[name].label)


def note(name: str) -> str:
    """Return the text under a field."""
    return NOTES.get(name, SETTINGS[name].text)


def effective(name: str, card: ModelCard | None) -> tuple[str, str]:
    """Return the value that applies if the field is empty, and its source. `card` None: the model is not loaded yet, or
    another server has it."""
    if card is None:
        return "", "the model's own"
    said = card.sampling_defaults.get(name)
    if said not in (None, ()):
        return (f"{said:g}" if isinstance(said, int | float) else str(said)), MODEL
    info = SETTINGS[name]
    source = OPENAI if info.is_openai else SERVER
    if name == "max_tokens":
        return f"what is left of {format_count(card.plan.max_model_len)}", source
    return info.unset or f"{info.default:g}", source
