"""The one reader of a chat: from messages and tools to the prompt, to the parameters and to the reader of the answer.

API dialects, the chat page and the offline API all use this module, so they agree on what is reasoning and what is a
call. A call is parsed only if the request offers the tool: all other text that looks like a call is content, as in
OpenAI's API. Tools are kept in OpenAI's format, which chat templates expect.
Does not know: any dialect's words but that format, HTTP, threads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from localllm.engine.params import SamplingParams
from localllm.errors import InvalidParameter, UnsupportedParameter
from localllm.serving.served import ServedModel
from localllm.text.answers.reader import AnswerFormat, AnswerReader
from localllm.text.answers.reasoning import PromptEnd
from localllm.text.messages import text_of
from localllm.text.structured import StructuredOutputsParams

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
        found = known and known.as_asked(calls=bool(self.tools.allowed), inline_reasoning=self.inline_reasoning)
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
        return params, lambda: AnswerReader(found, tools=tools, prompt=end, parallel=parallel)

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
