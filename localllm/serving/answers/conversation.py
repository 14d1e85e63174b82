"""The one reader of a chat: from messages and tools to the prompt, to the parameters and to the reader of the answer.

API dialects, the chat page and the offline API all use this module, so they agree on what is reasoning and what is a
call. A call is parsed only if the request offers the tool: all other text that looks like a call is content, as in
OpenAI's API; only the chat page asks for the others too, to say what they are. Tools are kept in OpenAI's format, which
chat templates expect. The chat template checks and renders messages (text/messages.py); rendering and tokenising run in
a thread, because the time that an unknown template or tokenizer takes cannot be predicted from the length of the text.
Filling in the middle of a text is here too, for models that were trained for it.
Does not know: any dialect's words but that format, HTTP.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import anyio.to_thread

from localllm.engine.params import SamplingParams
from localllm.engine.request import NO_OPTIONS, RequestOptions
from localllm.errors import ContextTooLong, InvalidParameter, UnsupportedParameter
from localllm.serving.answers.generation import Generation, generation_of
from localllm.serving.answers.off_loop import on_thread
from localllm.serving.answers.pictures import PromptIds, Seen, require_room
from localllm.serving.answers.sounds import Listened
from localllm.serving.served import ServedModel
from localllm.text.answers.reader import AnswerFormat, AnswerReader
from localllm.text.answers.reasoning import PromptEnd
from localllm.text.fill_in import ExtraFile, FillIn, find_fill_in
from localllm.text.messages import images_of, text_of
from localllm.text.structured import StructuredOutputsParams
from localllm.units import format_count

PROMPT_TAIL = 16  # tokens
TOOL_CHOICE = "tool_choice"
CONTINUE = {"continue_final_message": True, "add_generation_prompt": False}
"""Arguments of the chat template with which the model continues the last message."""


@dataclass(frozen=True, slots=True)
class Tools:
    """The tools of a request. Each is {"type": "function", "function": {"name", "description", "parameters"}}."""

    offered: Sequence[Mapping[str, Any]] = ()  # the tools in the prompt
    allowed: Sequence[Mapping[str, Any]] = ()  # those of them that may be called
    must: bool = False  # at least one must be called
    parallel: bool = True  # several calls are allowed
    any_name: bool = False  # a call of a tool that is not offered is a call too, and not content


NO_TOOLS = Tools()


@dataclass(frozen=True, slots=True)
class Conversation:
    """A conversation to answer."""

    messages: Sequence[Mapping[str, Any]]  # in the format of text/messages.py
    template: Mapping[str, Any] = field(default_factory=dict)  # further arguments of ChatTemplate.render
    tools: Tools = NO_TOOLS
    add_special_tokens: bool = False  # templates write the special tokens themselves
    inline_reasoning: bool = False  # leave reasoning in the content

    def prompt(self, model: ServedModel) -> str:
        """Return the prompt as text. Raises like `ChatTemplate.render`."""
        offered = {"tools": self.tools.offered} if self.tools.offered else {}
        return model.chat_template.render(self.messages, **{**self.template, **offered})

    def encode(self, prompt: str, model: ServedModel) -> list[int]:
        return model.tokenizer.encode(prompt, add_special_tokens=self.add_special_tokens)

    def reading(
        self, model: ServedModel, params: SamplingParams, prompt_token_ids: Sequence[int]
    ) -> tuple[SamplingParams, Callable[[], AnswerReader] | None]:
        """Return the parameters for this conversation, and a function that makes a reader for each choice; None: all of
        an answer is content.

        The parameters get a grammar if a call is required, or if calls are optional beside structured output; if they
        are optional beside free text, it applies from the marker of a call on.
        Raises `InvalidParameter`, `UnsupportedParameter`.
        """
        known = model.answers
        calls = bool(self.tools.allowed) or self.tools.any_name
        found = known and known.as_asked(calls=calls, inline_reasoning=self.inline_reasoning)
        asked = _structure(params.structured_outputs, model, found, self.tools)
        if found is None:
            return _with_structure(params, asked), None
        end = self._end_of(prompt_token_ids, model)
        if asked is not None and not (self.tools.allowed and found.tools is not None and found.tools.reads_reasoning):
            asked = found.behind_reasoning(asked, end)
        if asked is None and self.tools.allowed:
            asked = found.enforced_calls(self.tools.allowed, end, model.tokenizer, parallel=self.tools.parallel)
        params = _with_structure(params, asked)
        if found.needs_special_tokens(model.tokenizer):
            params = replace(params, skip_special_tokens=False)  # markers are special tokens, which the readers remove
        tools, parallel = self.tools.allowed, self.tools.parallel or self.tools.must  # a grammar limits required calls
        any_name = self.tools.any_name
        return params, lambda: AnswerReader(found, tools=tools, any_name=any_name, prompt=end, parallel=parallel)

    def _end_of(self, prompt: Sequence[int], model: ServedModel) -> PromptEnd:
        """Return the end of the prompt as text, long enough to see whether it ends inside reasoning."""
        continued = text_of(self.messages[-1]) if self.template.get("continue_final_message") else ""
        most = PROMPT_TAIL + len(continued.encode(errors="replace"))  # each token has at least one byte
        return PromptEnd(model.tokenizer.decode(prompt[-most:], skip_special_tokens=False), continued)


def calls_tools(model: ServedModel) -> bool:
    """Return whether the model accepts tools and its calls can be parsed."""
    return model.answers is not None and model.answers.tools is not None and model.chat_template.reads("tools")


def reasons(model: ServedModel) -> bool:
    """Return whether the model may reason before it answers, in a way that can be separated from the answer."""
    return model.answers is not None and model.answers.reasoning is not None


def _with_structure(params: SamplingParams, asked: StructuredOutputsParams | None) -> SamplingParams:
    return params if asked is params.structured_outputs else replace(params, structured_outputs=asked)


def _structure(
    asked: StructuredOutputsParams | None, model: ServedModel, found: AnswerFormat | None, tools: Tools
) -> StructuredOutputsParams | None:
    """Return the structure of the answer: what was asked, a grammar of required calls, or one of both."""
    if tools.must:
        if asked is not None:
            raise InvalidParameter(
                f"A forced tool call and {asked.param} cannot be combined.",
                "The answer would have to be both.",
                "Leave out one of the two.",
                param=TOOL_CHOICE,
            )
        return StructuredOutputsParams(grammar=_grammar_of_calls(model, found, tools), param=TOOL_CHOICE)
    if asked is None or not tools.allowed:
        return asked
    return StructuredOutputsParams(grammar=_grammar_of_calls(model, found, tools, asked), param=asked.param)


def _grammar_of_calls(
    model: ServedModel, found: AnswerFormat | None, tools: Tools, answer: StructuredOutputsParams | None = None
) -> str:
    """Return the grammar of the calls. `answer`: the structure of a text that may come instead of calls."""
    grammar = None
    if found is not None and found.tools is not None:
        grammar = found.tools.call_grammar(
            tools.allowed, "required", parallel=tools.parallel, tokenizer=model.tokenizer, answer=answer,
            frame=found.frame,
        )  # fmt: skip
    if grammar is None and answer is not None:
        raise UnsupportedParameter(
            f"Tools and {answer.param} cannot be combined with this model.",
            "A grammar could not tell its calls from such text by their beginning, or could not enforce their schemas.",
            "Use tool_choice none or required, or a JSON schema; docs/concepts/tool-calls.md says which models can.",
            param=answer.param,
        )
    if grammar is None:
        raise UnsupportedParameter(
            "A call of these tools cannot be forced with this model.",
            "A grammar cannot enforce the schemas in the model's argument format.",
            "Use tool_choice auto, or simpler schemas; docs/concepts/tool-calls.md says which.",
            param=TOOL_CHOICE,
        )
    return grammar


CHARS_OF_A_PART = 10
"""Characters that a message, or one part of it, counts in addition to its text."""

MOST_CHARS = 1_000_000
MOST_CHARS_PER_TOKEN = 16
"""A text may have `MOST_CHARS` characters, or this many per token of the context if that is more: prose has about four
per token. A tokenizer takes some 130 bytes of memory per character, and a second for a few million of them.
"""


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A chat request in localllm's own terms."""

    conversation: Conversation
    params: SamplingParams
    options: RequestOptions = NO_OPTIONS

    async def token_ids(self, model: ServedModel) -> PromptIds:
        """Return the prompt as token ids."""
        prompt, keep = await chat_token_ids(model, self.conversation), self.params.truncate_prompt_tokens
        if not prompt.has_media:
            return PromptIds(truncate(prompt, keep))
        if keep is not None:
            what, why = "pictures" if prompt.pictures else "sound", "Their tokens cannot be cut."
            raise InvalidParameter(f"truncate_prompt_tokens cannot be combined with {what}.", why, param="messages")
        return prompt

    async def prompt(self, model: ServedModel) -> str:
        """Return the prompt as text."""
        return await anyio.to_thread.run_sync(self.conversation.prompt, model)

    def within_context(self, num_prompt_tokens: int, model: ServedModel) -> ChatRequest:
        return replace(self, params=within_context(self.params, num_prompt_tokens, model))

    def generation(self, model: ServedModel, token_ids: PromptIds) -> Generation:
        """Return the generation of the answer. Raises `ContextTooLong` if pictures leave no room for it."""
        require_room(token_ids, model.plan.max_model_len)
        params, new_reader = self.conversation.reading(model, self.params, token_ids)
        return generation_of(model, params, [token_ids], self.options, new_reader=new_reader)


def sampling_params(model: ServedModel, asked: Mapping[str, Any]) -> SamplingParams:
    """Return the parameters: the client's value, else the model's generation_config, else the default of
    `SamplingParams`.
    """
    values: dict[str, Any] = {**model.sampling_defaults, **asked}
    if isinstance(values.get("top_k"), int):
        values["top_k"] = min(values["top_k"], model.spec.vocab_size)  # a larger value means all
    return SamplingParams(**values)


def within_context(params: SamplingParams, num_prompt_tokens: int, model: ServedModel) -> SamplingParams:
    """Drop a max_tokens beyond the end of the context, for dialects in which it is an upper limit and not a
    requirement.
    """
    room = model.plan.max_model_len - num_prompt_tokens
    return replace(params, max_tokens=None) if params.max_tokens is not None and params.max_tokens > room else params


async def chat_token_ids(model: ServedModel, conversation: Conversation) -> PromptIds:
    """Return the prompt of a conversation as token ids, with its pictures and sounds, of which only the sizes are read
    here.

    Raises `ContextTooLong`, and what `Senses.look` raises.
    """
    size = sum(CHARS_OF_A_PART + _size(message.get("content")) for message in conversation.messages)
    require_readable(size, model)  # also checked before rendering
    seen, senses = list[Seen | Listened](), model.senses
    if any(senses) and any(images_of(message) for message in conversation.messages):
        with_tools = bool(conversation.tools.offered)
        seen = await senses.look(model.chat_template.pictures(conversation.messages, with_tools=with_tools))

    def render() -> PromptIds:
        text = conversation.prompt(model)
        require_readable(len(text), model)
        return senses.prompt(text, seen, lambda text: conversation.encode(text, model), model.shown_name)

    return await on_thread(size, render)


async def encode(text: str, special: bool, model: ServedModel) -> list[int]:
    """Return the token ids of a text; `special`: with the tokenizer's special tokens (often BOS)."""
    return (await encode_all([text], special, model))[0]


async def encode_all(texts: Sequence[str], special: bool, model: ServedModel) -> list[list[int]]:
    """Return the token ids of several texts in one thread call: many short texts take as long as a long one."""
    for text in texts:
        require_readable(len(text), model)
    return await on_thread(
        sum(map(len, texts)), lambda: [model.tokenizer.encode(text, add_special_tokens=special) for text in texts]
    )


def most_chars(model: ServedModel) -> int:
    """Return the most characters of a text that is tokenised at all, even if only to count its tokens."""
    return max(MOST_CHARS, MOST_CHARS_PER_TOKEN * model.plan.max_model_len)


def require_readable(num_chars: int, model: ServedModel) -> None:
    """Raise `ContextTooLong` for a text that is too long to tokenise."""
    most = most_chars(model)
    if num_chars > most:
        raise ContextTooLong(
            f"The text has {format_count(num_chars)} characters.",
            f"At most {format_count(most)} are tokenised at once, and the context of {model.name} has "
            f"{format_count(model.plan.max_model_len)} tokens.",
            "Send a shorter text, or send it in parts.",
        )


def truncate(token_ids: Sequence[int], keep: int | None) -> Sequence[int]:
    return token_ids[-keep:] if keep is not None and keep > 0 else token_ids


def _size(content: Any) -> int:
    """Return roughly how many characters must be rendered and tokenised."""
    if isinstance(content, list):
        return sum(CHARS_OF_A_PART + _size(part.get("text")) for part in content if isinstance(part, dict))
    return len(content) if isinstance(content, str) else 0


_LANGUAGE = re.compile(r"__[a-z]{2,3}__|[a-z]{2,3}_[A-Z]\w{1,4}")
"""Names of tokens for languages: M2M-100's, mBART's and NLLB's."""


def language_id(model: ServedModel, language: str, param: str) -> int:
    """Return the token of a language, by its name in the vocabulary or its code alone. Raises `UnsupportedParameter`
    for a model without such tokens, `InvalidParameter` for a language without one."""
    names = {model.tokenizer.token_bytes(token_id).decode(): token_id for token_id in model.tokenizer.special_ids}
    known = {name: token_id for name, token_id in names.items() if _LANGUAGE.fullmatch(name)}
    if not known or model.spec.source is None:
        what, why = f"{param} is not supported by {model.shown_name}.", "Its vocabulary has no tokens for languages."
        raise UnsupportedParameter(what, why, f"Leave {param} out.", param=param)
    found = [name for name in known if language == name or language == name.strip("_").partition("_")[0]]
    if len(found) != 1:
        what = f"{model.shown_name} does not know the language {language[:40]!r}."
        raise InvalidParameter(what, f"It knows {', '.join(sorted(found or known))}.", param=param)
    return known[found[0]]


def answer_start(
    model: ServedModel, decoder_prompt: str | Sequence[int] | None, tgt_lang: str | None
) -> tuple[int, ...]:
    """Return the tokens that an encoder-decoder's answer begins with, behind the start token; (): the checkpoint's."""
    ids = () if tgt_lang is None else (language_id(model, tgt_lang, "tgt_lang"),)
    if isinstance(decoder_prompt, str):
        require_readable(len(decoder_prompt), model)
        decoder_prompt = model.tokenizer.encode(decoder_prompt, add_special_tokens=False)
    return (*ids, *(decoder_prompt or ()))


def in_language(model: ServedModel, token_ids: Sequence[int], src_lang: str | None) -> Sequence[int]:
    """Return a prompt marked as a text of this language: its token replaces the tokenizer's own, or comes first."""
    if src_lang is None:
        return token_ids
    own, name_of = language_id(model, src_lang, "src_lang"), model.tokenizer.token_bytes
    others = model.tokenizer.special_ids
    marks = [at for at, each in enumerate(token_ids) if each in others and _LANGUAGE.fullmatch(name_of(each).decode())]
    if not marks:
        return (own, *token_ids)
    return (*token_ids[: marks[0]], own, *token_ids[marks[0] + 1 :])


def fill_in_of(model: ServedModel, param: str = "suffix") -> FillIn:
    """Return the model's tokens for filling in the middle. Raises `UnsupportedParameter`."""
    found = find_fill_in(model.tokenizer)
    if found is None:
        raise UnsupportedParameter(
            f"{model.shown_name} cannot fill in the middle of a text.",
            "Its vocabulary has no tokens for that, such as <|fim_prefix|>, <|fim_suffix|> and <|fim_middle|>.",
            "Use a model that was trained for it, such as Qwen2.5-Coder, StarCoder2, Codestral or CodeGemma.",
            param=param,
        )
    return found


def ended(params: SamplingParams, fill_in: FillIn) -> SamplingParams:
    """Return the parameters with the tokens that end an answer: padding, or the beginning of another file."""
    return replace(params, stop_token_ids=tuple(dict.fromkeys((*params.stop_token_ids, *fill_in.end_ids))))


async def infill_token_ids(
    model: ServedModel,
    fill_in: FillIn,
    before: str,
    behind: str,
    extra: Sequence[ExtraFile] = (),
    room: int | None = None,
) -> list[int]:
    """Return the prompt. room: most tokens of it; None: any number. Raises `ContextTooLong`."""
    size = len(before) + len(behind) + sum(len(file.name) + len(file.text) for file in extra)
    require_readable(size, model)
    return await on_thread(size, lambda: fill_in.prompt(before, behind, extra, room))
