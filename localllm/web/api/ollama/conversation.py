"""Translate Ollama's messages for the chat template, and its options and switches for the sampler.

In Ollama's API a call has no id, and a result names at most its tool; templates may need an id in both. So each call
gets an id from its position in the conversation, and each result the id of the oldest call that it can answer.
Does not know: HTTP, how an answer is written.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from localllm.engine.params import SAMPLING_PARAMS, SamplingParams, given_params
from localllm.errors import InvalidParameter, UnsupportedParameter
from localllm.serving.answers.conversation import Tools, calls_tools, sampling_params
from localllm.serving.served import ServedModel
from localllm.text.structured import StructuredOutputsParams
from localllm.web.api.hints import effort_switch, thinking_switch
from localllm.web.api.ollama.schema import OPTION_RULES, AskBody, OllamaInputMessage, Options
from localllm.web.api.pictures import picture_part
from localllm.web.api.reading import read_object
from localllm.web.api.tools import checked, read_tool

MOST_UNANSWERED = 64
"""Unanswered calls among which a result looks for its own: more than are made at once, and few enough for any number of
results.
"""


def plain_messages(messages: Sequence[OllamaInputMessage]) -> list[dict[str, Any]]:
    """Return the messages in the format of text/messages.py."""
    unanswered: list[tuple[str, Any]] = []  # (id, name) of each unanswered call
    plain = []
    for i, message in enumerate(messages):
        plain.append(_plain_message(message, i))
        if message.tool_calls:
            calls = [{**call, "id": call.get("id") or f"{i:05d}{j:04d}"} for j, call in enumerate(message.tool_calls)]
            plain[-1]["tool_calls"] = calls
            unanswered += [(call["id"], _name(call)) for call in calls]
        if message.role == "tool":
            _answer(plain[-1], unanswered)
    return plain


def is_to_be_continued(messages: Sequence[OllamaInputMessage]) -> bool:
    """Return whether the answer continues the last message: it is the assistant's and does not call a tool."""
    return bool(messages) and messages[-1].role == "assistant" and not messages[-1].tool_calls


def _plain_message(message: OllamaInputMessage, index: int) -> dict[str, Any]:
    plain: dict[str, Any] = {"role": message.role, "content": message.content or ""}
    if message.images:
        plain["content"] = with_pictures(plain["content"], message.images, f"messages[{index}].images")
    if message.thinking:
        plain["reasoning_content"] = message.thinking
    if message.tool_name:
        plain["name"] = message.tool_name
    if message.tool_call_id:
        plain["tool_call_id"] = message.tool_call_id
    return plain


def with_pictures(text: str, images: Sequence[str], where: str) -> list[dict[str, Any]]:
    """Return the parts of a message with pictures, which Ollama's clients send as base64 without a type. They are
    before the text, as there."""
    urls = [image if image[:5] == "data:" else f"data:image/unknown;base64,{image}" for image in images]
    return [*(picture_part(url, f"{where}[{i}]") for i, url in enumerate(urls)), {"type": "text", "text": text}]


def _answer(result: dict[str, Any], unanswered: list[tuple[str, Any]]) -> None:
    for place, (id, name) in enumerate(unanswered[:MOST_UNANSWERED]):
        if result.get("name", name) == name and result.get("tool_call_id", id) == id:
            result |= {"tool_call_id": id, "name": name}
            del unanswered[place]
            return


def _name(call: dict[str, Any]) -> Any:
    """Return the name of a call. Invalid calls are refused later, by the renderer."""
    function = call.get("function")
    return function.get("name") if isinstance(function, dict) else None


DIALECT = "ollama"  # a key of ParamInfo.spellings
RANDOM_SEED = -1
REPEAT_LAST_N = 64  # Ollama's default
TO_THE_END = (-1, -2)  # values of num_predict


def read_options(given: Mapping[str, Any] | None) -> tuple[Options, list[str]]:
    return read_object(given or {}, Options, OPTION_RULES, "options.")


def capped_context(options: Options, model: ServedModel) -> list[str]:
    """Return a warning if the request asks for more context than is served. A prompt that does not fit is refused."""
    served = model.plan.max_model_len
    if options.num_ctx is None or options.num_ctx <= served:
        return []
    return [f"field 'options.num_ctx' is {options.num_ctx}: the context is {served} tokens, by --max-model-len"]


def params_of(options: Options, model: ServedModel) -> SamplingParams:
    """Return the parameters. Without a limit the answer may fill the rest of the context; penalties look at the last 64
    tokens.
    """
    asked = {**given_params(options, DIALECT), "max_tokens": _limit(options.num_predict, model)}
    if asked.get("seed") == RANDOM_SEED:
        del asked["seed"]
    try:
        params = sampling_params(model, asked)
    except InvalidParameter as error:
        ours = error.param or ""  # of SamplingParams
        theirs = SAMPLING_PARAMS[ours].spellings.get(DIALECT, ours)
        what = error.what.replace(ours, theirs)
        raise InvalidParameter(f"options.{what}", error.why, param=f"options.{theirs}") from None
    if params.penalises and options.repeat_last_n is None:
        params = replace(params, repeat_last_n=REPEAT_LAST_N)
    if params.penalises and options.penalize_newline is False:
        raise UnsupportedParameter(
            "'options.penalize_newline' is not supported with this value.", "Penalties apply to all tokens.",
            param="options.penalize_newline",
        )  # fmt: skip
    return params


def with_logprobs(params: SamplingParams, body: AskBody, model: ServedModel) -> SamplingParams:
    """Return the parameters with the logprobs that a body asks for."""
    if body.top_logprobs and not body.logprobs:
        raise InvalidParameter("top_logprobs needs logprobs: true.", param="top_logprobs")
    if not body.logprobs:
        return params
    return replace(params, logprobs=model.generator.limits.num_logprobs(body.top_logprobs or 0, "top_logprobs"))


def _limit(num_predict: int | None, model: ServedModel) -> int | None:
    if num_predict is None:
        default: int | None = model.sampling_defaults.get("max_tokens")
        return default
    if num_predict in TO_THE_END:
        return None
    if num_predict < 1:
        raise InvalidParameter(
            "options.num_predict must be at least 1, or -1 for no limit.", f"Got {num_predict}.",
            param="options.num_predict",
        )  # fmt: skip
    return num_predict


def structured_outputs(format: str | Mapping[str, Any] | None) -> StructuredOutputsParams | None:
    """Return the structured output of `format`: "json" or a schema."""
    if format is None or format == "":
        return None
    if format == "json":
        return StructuredOutputsParams(json_object=True, param="format")
    if isinstance(format, str):
        raise InvalidParameter(
            f'invalid format: {format!r}; expected "json" or a valid JSON Schema object', param="format"
        )
    return StructuredOutputsParams(json=format, param="format")


def think_switches(think: bool | str | None, model: ServedModel) -> tuple[dict[str, Any], list[str]]:
    """Return the chat template's arguments, and warnings. Ollama refuses thinking where the model cannot think."""
    if think is None:
        return {}, []
    switches, warnings = thinking_switch(model, bool(think), "think")
    if isinstance(think, str) and not warnings:
        effort, more = effort_switch(model, think, "think")
        return switches | effort, [*warnings, *more]
    return switches, warnings


def tools_of(given: Sequence[Mapping[str, Any]] | None, model: ServedModel) -> Tools:
    """Return the tools. Raises `RequestError` if a tool is invalid or the model cannot call tools."""
    offered = checked([read_tool(tool, f"tools[{i}]") for i, tool in enumerate(given or ())], "tools")
    if offered and not calls_tools(model):
        raise UnsupportedParameter(
            f'"{model.shown_name}" does not support tools.',
            "Its chat template does not support tools, or its tool call format is not supported.",
            param="tools",
        )
    return Tools(offered, offered)
