"""Ollama's chats and prompts that another server answers: the body in OpenAI's dialect, the answer as lines.

Does not know: which server answers.
"""

from __future__ import annotations

from typing import Any, Literal

from litestar.response.base import ASGIResponse

from localllm.errors import UnsupportedParameter
from localllm.serving.answers.conversation import Tools
from localllm.web.api.answer import streamed, whole
from localllm.web.api.exchange import ApiRequest
from localllm.web.api.ollama.conversation import RANDOM_SEED, TO_THE_END, read_options
from localllm.web.api.ollama.lines import LINES, OllamaHead, OllamaLines, RequestClock
from localllm.web.api.ollama.models import plain_name
from localllm.web.api.ollama.schema import AskBody, OllamaChatBody, OllamaGenerateBody, Options
from localllm.web.api.remote import RemoteGeneration, openai_messages, openai_tools, remote_model
from localllm.web.api.tools import checked, read_tool

SAME = ("temperature", "top_p", "top_k", "min_p", "stop", "presence_penalty", "frequency_penalty", "seed")
"""Options whose name is the same in OpenAI's dialect or in that of most servers that speak it."""


async def remote_answer(
    request: ApiRequest,
    body: AskBody,
    kind: Literal["chat", "generate"],
    asked: str | list[dict[str, Any]],  # a raw prompt, or messages
    warnings: list[str],
    clock: RequestClock,
) -> ASGIResponse | None:
    """Answer a body by another server; None: this process should."""
    parts = asked if isinstance(asked, list) else [asked]
    remote = await remote_model(request, plain_name(body.model), parts)
    if remote is None:
        return None
    if body.logprobs:
        what = f"'logprobs' is not passed on to {remote.answered_by} in this dialect."
        raise UnsupportedParameter(what, hint="POST /v1/chat/completions passes them on.", param="logprobs")
    options, _ = read_options(body.options)
    warnings = [*warnings]
    if body.keep_alive is not None:
        warnings.append("field 'keep_alive' has no effect: the model is on another server")
    fields = _fields(body, options)
    if isinstance(asked, str):
        suffix = {"suffix": body.suffix} if isinstance(body, OllamaGenerateBody) and body.suffix else {}
        generation = RemoteGeneration(remote, "/completions", {"prompt": asked, **suffix, **fields})
    else:
        given = body.tools if isinstance(body, OllamaChatBody) else None
        offered = checked([read_tool(tool, f"tools[{i}]") for i, tool in enumerate(given or ())], "tools")
        fields |= openai_tools(Tools(offered, offered)) | {"messages": openai_messages(asked)}
        generation = RemoteGeneration(remote, "/chat/completions", fields)
    clock.has_model()
    head = OllamaHead(remote.name, kind, clock)
    if body.stream is not False:
        return await streamed(request, generation, OllamaLines(head), warnings, LINES)
    return await whole(request, generation, lambda choices: head.whole(choices, generation.progress), warnings)


def _fields(body: AskBody, options: Options) -> dict[str, Any]:
    """Return options and switches in OpenAI's dialect."""
    fields = {name: value for name in SAME if (value := getattr(options, name)) is not None}
    if fields.get("seed") == RANDOM_SEED:
        del fields["seed"]
    if options.num_predict is not None and options.num_predict not in TO_THE_END:
        fields["max_tokens"] = options.num_predict
    if options.repeat_penalty is not None:
        fields["repetition_penalty"] = options.repeat_penalty
    if body.format == "json":
        fields["response_format"] = {"type": "json_object"}
    elif isinstance(body.format, dict):
        schema = {"name": "answer", "schema": body.format}
        fields["response_format"] = {"type": "json_schema", "json_schema": schema}
    elif body.format:
        what = f'invalid format: {body.format!r}; expected "json" or a valid JSON Schema object'
        raise UnsupportedParameter(what, param="format")
    if body.think is not None:
        fields["chat_template_kwargs"] = {"enable_thinking": bool(body.think)}
    if isinstance(body.think, str):
        fields["reasoning_effort"] = body.think
    return fields
