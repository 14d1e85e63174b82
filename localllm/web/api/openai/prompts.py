"""Translate messages or a prompt into token ids.

The chat template checks and renders messages (text/messages.py). This module handles the request's switches for the
template, and the four forms of a completion prompt.
Does not know: sampling, the engine, HTTP.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from localllm.engine.step import PromptEmbeds
from localllm.errors import InvalidParameter, UnsupportedParameter
from localllm.serving.answers.conversation import encode_all, fill_in_of, infill_token_ids, truncate
from localllm.serving.answers.off_loop import off_loop
from localllm.serving.served import ServedModel
from localllm.web.api.hints import THINKING_SWITCHES, effort_switch, thinking_switch
from localllm.web.api.openai.schema import ChatBody, CompletionBody
from localllm.web.errors import InvalidType, MissingParameter

MAX_PROMPTS = 2048
"""Prompts per request; the same limit as for texts to embed."""

OWN_SWITCHES = frozenset({"messages", "tools", "add_generation_prompt", "continue_final_message"})
"""Arguments of `render` that are request fields and therefore may not occur in chat_template_kwargs."""


@dataclass(frozen=True, slots=True)
class RawPrompt:
    """One prompt. `text` is repeated if the request asks for an echo."""

    token_ids: Sequence[int]
    text: str
    embeds: PromptEmbeds | None = None  # replace the tokens, whose ids are then zeros

    @property
    def shown_token_ids(self) -> list[int] | None:
        return list(self.token_ids) if self.embeds is None else None


async def completion_prompts(body: CompletionBody, model: ServedModel, n: int) -> list[RawPrompt]:
    """Return the prompts of a request; a list of numbers is one prompt of token ids. Embeddings come first, as in vLLM.

    `n`: outputs per prompt. Raises `InvalidParameter`, before any text is tokenised, if there would be too many
    outputs.
    """
    if body.prompt is None and body.prompt_embeds is None:
        raise MissingParameter("Missing required parameter: 'prompt'.", "Or send prompt_embeds.", param="prompt")
    if body.suffix:
        return await _infilled_prompts(body, model, n)
    keep = body.truncate_prompt_tokens
    sources = _sources(body.prompt) if body.prompt is not None else []
    model.require_queue_room(n * len(sources))
    prompts = await _embedded_prompts(body, model)
    texts = [source for source in sources if isinstance(source, str)]
    encoded = iter(await encode_all(texts, body.add_special_tokens is not False, model))
    for source in sources:
        whole, echo = (next(encoded), source) if isinstance(source, str) else (source, "")
        token_ids = truncate(whole, keep)
        if body.echo and (not echo or len(token_ids) < len(whole)):
            echo = model.tokenizer.decode(token_ids, skip_special_tokens=False)
        prompts.append(RawPrompt(token_ids, echo))
    return prompts


async def _infilled_prompts(body: CompletionBody, model: ServedModel, n: int) -> list[RawPrompt]:
    """Return prompts whose answers fill the gap between each text and the suffix."""
    for name in ("echo", "prompt_embeds", "truncate_prompt_tokens"):
        if getattr(body, name):
            raise UnsupportedParameter(
                f"{name!r} cannot be combined with suffix.", "The prompt is made of two texts.", param=name
            )
    sources = _sources(body.prompt)
    model.require_queue_room(n * len(sources))
    fill_in = fill_in_of(model)
    if not all(isinstance(source, str) for source in sources):
        raise InvalidType("A prompt with a suffix must be text.", "Got token ids.", param="prompt")
    return [RawPrompt(await infill_token_ids(model, fill_in, str(source), body.suffix or ""), "") for source in sources]


async def _embedded_prompts(body: CompletionBody, model: ServedModel) -> list[RawPrompt]:
    if body.prompt_embeds is None:
        return []
    given = [body.prompt_embeds] if isinstance(body.prompt_embeds, str) else body.prompt_embeds
    model.generator.limits.require_prompt_embeds()
    if not 1 <= len(given) <= MAX_PROMPTS:
        why = f"A request may have 1 to {MAX_PROMPTS}."
        raise InvalidParameter(f"prompt_embeds holds {len(given)} prompts.", why, param="prompt_embeds")
    if body.echo:
        raise UnsupportedParameter(
            "'echo' cannot be combined with prompt_embeds.", "Embeddings have no text.", param="echo"
        )
    reader = model.prompt_embeds_reader
    read = await off_loop(sum(map(len, given)), lambda: [reader.of_base64(each) for each in given])
    return [RawPrompt((0,) * embeds.num_tokens, "", embeds) for embeds in read]


def template_switches(body: ChatBody, model: ServedModel) -> tuple[dict[str, Any], list[str]]:
    """Return the chat template's arguments, and warnings."""
    switches, warnings = _asked_of_template(body.chat_template_kwargs or {}, model)
    if hidden := OWN_SWITCHES & switches.keys():
        raise InvalidParameter(
            f"chat_template_kwargs may not hold {min(hidden)!r}.",
            "Send it as a separate field.",
            param="chat_template_kwargs",
        )
    asked = {"reasoning_effort": body.reasoning_effort, "reasoning.effort": body.reasoning and body.reasoning.effort}
    if (named := next(((effort, name) for name, effort in asked.items() if effort), None)) is not None:
        effort, more = effort_switch(model, *named)
        switches |= effort
        warnings += more
    if body.documents:
        if not model.chat_template.reads("documents"):
            raise UnsupportedParameter(
                "'documents' is not supported by this model.",
                "Its chat template would omit them.",
                param="documents",
            )
        switches["documents"] = body.documents
    switches["continue_final_message"] = bool(body.continue_final_message)
    switches["add_generation_prompt"] = (
        not body.continue_final_message if body.add_generation_prompt is None else body.add_generation_prompt
    )
    return switches, warnings


def _asked_of_template(given: Mapping[str, Any], model: ServedModel) -> tuple[dict[str, Any], list[str]]:
    """Return chat_template_kwargs without thinking switches that the template does not have, because clients send them
    to every model. If the template has the same switch under another name, that one is set.
    """
    switches, warnings = dict(given), list[str]()
    for name in THINKING_SWITCHES:
        if isinstance(on := switches.get(name), bool) and not model.chat_template.reads(name):
            del switches[name]
            others, more = thinking_switch(model, on, f"chat_template_kwargs.{name}")
            switches = others | switches
            warnings += more
    return switches, warnings


def chat_echo(body: ChatBody) -> str:
    """Return the text of the last message if the answer continues it and the request asks for an echo."""
    if not body.echo or not body.messages or body.messages[-1].get("role") != "assistant":
        return ""
    content = body.messages[-1].get("content")
    return content if isinstance(content, str) else ""


def _sources(prompt: Any) -> list[str | list[int]]:
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt, list) and prompt:
        if all(_is_token_id(item) for item in prompt):
            return [prompt]
        if all(isinstance(item, str) or (isinstance(item, list) and all(map(_is_token_id, item))) for item in prompt):
            if len(prompt) > MAX_PROMPTS:
                why = f"A request may have at most {MAX_PROMPTS}."
                raise InvalidParameter(f"{len(prompt)} prompts are too many.", why, param="prompt")
            return list(prompt)
    raise InvalidType(
        "Invalid type for 'prompt'.",
        "Expected a string, a list of strings, a list of token ids, or a list of such lists.",
        param="prompt",
    )


def _is_token_id(item: Any) -> bool:
    return isinstance(item, int) and not isinstance(item, bool)
