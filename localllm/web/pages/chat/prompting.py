"""Turn messages and tools into the prompt, and into the reader of the reply, as the API does.

Does not know: HTTP, where chats are stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from localllm.engine.params import SamplingParams
from localllm.errors import UnsupportedOption
from localllm.serving.served import ServedModel
from localllm.text.answers.reader import AnswerReader
from localllm.web.api.tools import calls_tools, end_of


def prompt_of(
    served: ServedModel, messages: Sequence[dict[str, Any]], tools: list[dict[str, Any]], goes_on: bool
) -> list[int]:
    """Return the token ids of the prompt. Raises `UnsupportedOption`."""
    if not served.chat_template:
        raise UnsupportedOption(
            f"{served.name} has no chat template.",
            "It continues text and was not trained for conversations.",
            "Use POST /v1/completions, or serve an instruct or chat model.",
        )
    if tools:
        _require_tools(served)
    switches: dict[str, Any] = {"tools": tools} if tools else {}
    if goes_on:
        switches |= {"add_generation_prompt": False, "continue_final_message": True}
    else:
        switches["add_generation_prompt"] = True
    prompt = served.chat_template.render(messages, **switches)
    return served.tokenizer.encode(prompt, add_special_tokens=False)


def _require_tools(served: ServedModel) -> None:
    """Raise if the model does not accept tools, or the format of its calls is unknown."""
    if not calls_tools(served):
        raise UnsupportedOption(
            f"{served.name} cannot call tools.",
            "Its chat template does not support tools, or its tool call format is unknown.",
            "Empty the list of tools in the settings, or choose another model.",
        )


def reading(
    served: ServedModel, params: SamplingParams, tools: list[dict[str, Any]], prompt_token_ids: list[int]
) -> tuple[SamplingParams, AnswerReader | None]:
    """Return the parameters and the reader of the reply, as for the API. Calls are parsed even without tools, because a
    model may write one anyway, unless its calls look like any other JSON.
    """
    if served.answers is None:
        return params, None
    format = served.answers.tools
    found = served.answers.as_asked(calls=bool(tools) or (format is not None and not format.bare))
    if found is None:
        return params, None
    reader = AnswerReader(found, tools=tools or None, prompt=end_of(prompt_token_ids, served))
    if found.needs_special_tokens(served.tokenizer):
        params = replace(params, skip_special_tokens=False)
    return params, reader
