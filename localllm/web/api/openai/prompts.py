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
from localllm.serving.served import ServedModel
from localllm.web.api.conversation import NO_SWITCH, THINKING_SWITCHES, encode_all, truncate
from localllm.web.api.infilling import fill_in_of, infill_token_ids
from localllm.web.api.off_loop import off_loop
from localllm.web.api.openai.schema import ChatBody, CompletionBody
from localllm.web.errors import InvalidType, MissingParameter

MAX_PROMPTS = 2048
"""Prompts per request; the same limit as for texts to embed."""

REASONING_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
OWN_SWITCHES = frozenset({"messages", "tools", "add_generation_prompt", "continue_final_message"})
"""Arguments of `render` that are request fields and therefore may not occur in chat_template_kwargs."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt. `text` is repeated if the request asks for an echo."""

    token_ids: Sequence[int]
    text: str
    embeds: PromptEmbeds | None = None  # replace the tokens, whose ids are then zeros

    @property
    def shown_token_ids(self) -> list[int] | None:
        return list(self.token_ids) if self.embeds is None else None


async def completion_prompts(body: CompletionBody, model: ServedModel, n: int) -> list[Prompt]:
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
        prompts.append(Prompt(token_ids, echo))
    return prompts


async def _infilled_prompts(body: CompletionBody, model: ServedModel, n: int) -> list[Prompt]:
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
    return [Prompt(await infill_token_ids(model, fill_in, str(source), body.suffix or ""), "") for source in sources]


async def _embedded_prompts(body: CompletionBody, model: ServedModel) -> list[Prompt]:
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
    return [Prompt((0,) * embeds.num_tokens, "", embeds) for embeds in read]


def template_switches(body: ChatBody, model: ServedModel) -> tuple[dict[str, Any], list[str]]:
    """Return the chat template's arguments, and warnings."""
    switches, warnings = _asked_of_template(body.chat_template_kwargs or {}, model)
    if hidden := OWN_SWITCHES & switches.keys():
        raise InvalidParameter(
            f"chat_template_kwargs may not hold {min(hidden)!r}.",
            "Send it as a separate field.",
            param="chat_template_kwargs",
        )
    if (effort := _reasoning_effort(body, model)) is not None:
        switches["reasoning_effort"] = effort
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
    """Return chat_template_kwargs without thinking switches that are false and that the template does not have, because
    clients send them to every model. If the template has the same switch under another name, that one is set to false.
    """
    reads, switches, warnings = model.chat_template.reads, dict(given), []
    for name in THINKING_SWITCHES:
        if switches.get(name) is False and not reads(name):
            del switches[name]
            others = [other for other in THINKING_SWITCHES if reads(other)]
            for other in others:
                switches.setdefault(other, False)
            if not others:
                warnings.append(f"field 'chat_template_kwargs.{name}' has no effect: {NO_SWITCH}")
    return switches, warnings


def _reasoning_effort(body: ChatBody, model: ServedModel) -> str | None:
    """Return the reasoning effort for the template. `none` is accepted if the template has no such switch: the model
    does no extra reasoning then.
    """
    effort = body.reasoning_effort or (body.reasoning.effort if body.reasoning else None)
    if effort is None:
        return None
    if effort not in REASONING_EFFORTS:
        raise InvalidParameter(
            f"Unknown reasoning_effort {effort!r}.", f"Known: {', '.join(REASONING_EFFORTS)}.", param="reasoning_effort"
        )
    if model.chat_template.reads("reasoning_effort"):
        return effort
    if effort == "none":
        return None
    raise UnsupportedParameter(
        "'reasoning_effort' is not supported by this model.",
        "Its chat template has no such switch.",
        param="reasoning_effort",
    )


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
