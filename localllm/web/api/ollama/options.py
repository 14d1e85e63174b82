"""From Ollama's options and messages to the sampler's and the chat template's.

Does not know: HTTP, how an answer is written.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from localllm.engine.params import SamplingParams
from localllm.errors import InvalidParameter
from localllm.served import ServedModel
from localllm.web.api.conversation import sampling_params
from localllm.web.api.ollama.fields import OPTION_RULES
from localllm.web.api.ollama.schema import Message, Options
from localllm.web.api.reading import read_object
from localllm.web.errors import UnsupportedParameter

SAME_NAME = ("stop", "temperature", "top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty")
TO_THE_END = (-1, -2)  # values of num_predict


def read_options(given: Mapping[str, Any] | None) -> tuple[Options, list[str]]:
    return read_object(given or {}, Options, OPTION_RULES, "options.")


def require_context(options: Options, model: ServedModel) -> None:
    """Raises where more context is asked for than is served."""
    served = model.plan.max_model_len
    if options.num_ctx is not None and options.num_ctx > served:
        raise InvalidParameter(
            f"options.num_ctx is {options.num_ctx}, and {model.name} is served with a context of {served} tokens.",
            hint=f"Leave it out, or start the server with --max-model-len {options.num_ctx}.",
            param="options.num_ctx",
        )


def params_of(options: Options, model: ServedModel) -> SamplingParams:
    """Without a limit an answer may fill the rest of the context."""
    asked: dict[str, Any] = {name: value for name in SAME_NAME if (value := getattr(options, name)) is not None}
    asked["max_tokens"] = _limit(options.num_predict, model)
    if options.repeat_penalty is not None:
        asked["repetition_penalty"] = options.repeat_penalty
    if options.seed is not None and options.seed != -1:  # -1: any
        asked["seed"] = options.seed
    try:
        return sampling_params(model, asked)
    except InvalidParameter as error:
        what = error.what.replace("repetition_penalty", "repeat_penalty")
        raise InvalidParameter(f"options.{what}", error.why, param=f"options.{error.param}") from None


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


def plain_message(message: Message, index: int) -> dict[str, Any]:
    """As text/messages.py reads them."""
    if message.images:
        name = f"messages[{index}].images"
        raise UnsupportedParameter(f"{name!r} is not supported.", "Only text is read here.", param=name)
    plain: dict[str, Any] = {"role": message.role, "content": message.content or ""}
    if message.thinking:
        plain["reasoning_content"] = message.thinking
    if message.tool_calls:
        plain["tool_calls"] = message.tool_calls
    if message.tool_name:
        plain["name"] = message.tool_name
    return plain


def is_to_be_continued(messages: Sequence[Message]) -> bool:
    """The answer goes on from a last message of the assistant's, unless that calls a tool."""
    return bool(messages) and messages[-1].role == "assistant" and not messages[-1].tool_calls
