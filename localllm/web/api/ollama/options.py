"""Translate Ollama's options and switches for the sampler and the chat template.

Does not know: HTTP, how an answer is written.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from localllm.engine.params import SAMPLING_PARAMS, SamplingParams, given_params
from localllm.errors import InvalidParameter, UnsupportedParameter
from localllm.serving.chat import Tools, calls_tools
from localllm.serving.served import ServedModel
from localllm.text.structured import StructuredOutputsParams
from localllm.web.api.conversation import sampling_params
from localllm.web.api.hints import effort_switch, thinking_switch
from localllm.web.api.ollama.fields import OPTION_RULES
from localllm.web.api.ollama.schema import AskBody, Options
from localllm.web.api.reading import read_object
from localllm.web.api.tools import checked, read_tool

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
