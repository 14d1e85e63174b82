"""Hints of a request: one table for all dialects.

A hint asks for something that a model or this server may be unable to do, and that clients send to every model: effort,
verbosity, a service tier. It is accepted in every dialect; where nothing follows it, the answer has a warning header.
Everything else is a demand, which a dialect's `schema.py` honours or refuses by name.
Does not know: HTTP, messages.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal

from localllm.errors import InvalidParameter
from localllm.serving.answers.conversation import reasons
from localllm.serving.served import ServedModel
from localllm.web.api.fields import Hint, OneOf, one_of

Dialect = Literal["openai", "responses", "anthropic", "ollama", "llamacpp"]

NO_SWITCH = "the model's chat template has no such switch"
_KEEP = "the server's --keep-alive decides"
_DRAFTS = "drafts are verified where they are expected to save time"
_FULL = "reasoning is returned in full, as the item's content"
_NO_CUT = "input longer than the context is refused, never truncated"
_AT_LOAD = "set when the model is loaded"


def _row(why: str, neutral: OneOf = OneOf(()), **fields: str) -> tuple[Hint, Mapping[str, tuple[str, ...]]]:  # noqa: B008
    return Hint(why, neutral), {dialect: tuple(names.split()) for dialect, names in fields.items()}


HINTS = (
    _row("the model decides how much it writes", one_of("medium"), openai="verbosity", responses="text.verbosity"),
    _row(
        "there is one service tier", one_of("auto", "default", "standard_only"),
        openai="service_tier", responses="service_tier", anthropic="service_tier",
    ),
    _row("the model answers as fast as it can", one_of("standard"), anthropic="speed"),
    _row("models have no such control", one_of("standard"), responses="personality reasoning.mode"),
    _row("the model sees no budget: send max_tokens", anthropic="output_config.task_budget"),
    _row("conversations are not edited", one_of([]), responses="context_management", anthropic="context_management"),
    _row(_FULL, responses="reasoning.summary reasoning.generate_summary"),
    _row("the chat template decides which earlier reasoning the model sees", responses="reasoning.context"),
    _row("reasoning is shown as the model writes it", anthropic="thinking.display"),
    _row("with tool_choice any or tool, arguments follow their schema", anthropic="tools.strict"),
    _row(
        "all tools are in the prompt from the start", one_of(False),
        anthropic="tools.defer_loading", responses="mcp.defer_loading",
    ),
    _row("the server describes its tools", responses="mcp.server_description"),
    _row("chat templates do not support it", anthropic="tools.input_examples"),
    _row(_KEEP, openai="keep_alive ttl"),
    _row(_DRAFTS, openai="speculative.n_min speculative.p_min", llamacpp="speculative.n_min speculative.p_min"),
    _row("llguidance compiles every grammar", openai="guided_decoding_backend"),
    _row(_NO_CUT, ollama="truncate shift options.num_keep", llamacpp="n_keep"),
    _row(
        _AT_LOAD,
        ollama="options.num_gpu options.main_gpu options.num_thread options.num_batch options.numa options.use_mmap"
        " options.use_mlock options.low_vram options.f16_kv options.vocab_only options.logits_all"
        " options.embedding_only",
    ),
)  # fmt: skip
"""Hints that nothing here follows: why, the values that ask for nothing, and the fields of each dialect."""

MODEL_HINTS: Mapping[str, Mapping[Dialect, tuple[str, ...]]] = MappingProxyType({
    "effort": {
        "openai": ("reasoning_effort", "reasoning.effort"), "responses": ("reasoning.effort",),
        "anthropic": ("output_config.effort",), "ollama": ("think",),
    },
    "thinking": {
        "openai": ("chat_template_kwargs.enable_thinking", "chat_template_kwargs.thinking"),
        "anthropic": ("thinking",), "ollama": ("think",),
    },
    "budget": {
        "openai": ("thinking_token_budget", "reasoning_budget", "reasoning_budget_tokens", "thinking_budget_tokens"),
        "responses": ("thinking_token_budget",), "anthropic": ("thinking.budget_tokens",),
    },
})  # fmt: skip
"""Hints that some models follow, and the fields of each dialect. The functions below decide for a model."""


def hints_of(dialect: Dialect, inside: str = "") -> dict[str, Hint]:
    """Return the hints of one object in a dialect, by field. `inside`: the object's path, such as `options.`."""
    found = {}
    for hint, fields in HINTS:
        for path in fields.get(dialect, ()):
            name = path.removeprefix(inside)
            if path.startswith(inside) and (inside or not path.startswith(_INNER)):
                found[name] = hint
    return found


_INNER = ("options.", "tools.", "mcp.", "text.", "reasoning.", "thinking.", "output_config.")
"""Objects whose fields have rules of their own."""

# Hints that some models follow ---------------------------------------------------------------------------------------

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
THINKING_SWITCHES = ("enable_thinking", "thinking")  # of Qwen 3 and relatives; of DeepSeek V3.1 and Granite 3
NO_BOUND = -1


def no_effect(param: str, why: str) -> str:
    """Return the warning for a hint that nothing follows."""
    return f"field {param!r} has no effect: {why}"


def thinking_switch(model: ServedModel, on: bool, param: str) -> tuple[dict[str, Any], list[str]]:
    """Return the chat template's arguments that turn thinking on or off, and a warning if they have no effect.

    A model without such a switch may still reason: it always does.
    """
    switches = {name: on for name in THINKING_SWITCHES if model.chat_template.reads(name)}
    if switches or on == reasons(model):
        return switches, []
    return {}, [no_effect(param, "the model does not reason" if on else NO_SWITCH)]


def effort_switch(model: ServedModel, effort: str, param: str) -> tuple[dict[str, Any], list[str]]:
    """Return the chat template's arguments for the reasoning effort, and a warning if they have no effect.

    Without a switch for the effort, `none` turns thinking off. Raises `InvalidParameter` for an unknown effort.
    """
    if effort not in EFFORTS:
        raise InvalidParameter(f"Unknown {param} {effort!r}.", f"Known: {', '.join(EFFORTS)}.", param=param)
    if model.chat_template.reads("reasoning_effort"):
        return {"reasoning_effort": effort}, []
    if effort == "none":
        return thinking_switch(model, on=False, param=param)
    return {}, [no_effect(param, NO_SWITCH)]


def thinking_budget(asked: Mapping[str, int | None], model: ServedModel) -> tuple[int | None, list[str]]:
    """Return the reasoning budget in tokens (None: no limit), and a warning if it has no effect.

    `asked`: the fields that may set the budget, by name. Raises `InvalidParameter` naming the wrong field.
    """
    given = {name: value for name, value in asked.items() if value is not None}
    for name, value in given.items():
        if value < NO_BOUND:
            why = f"Got {value}. 0: no reasoning; {NO_BOUND}: no limit."
            raise InvalidParameter(f"{name} must be at least {NO_BOUND}.", why, param=name)
    if len(set(given.values())) > 1:
        (first, one), (second, other), *_ = given.items()
        raise InvalidParameter(
            f"{first} and {second} contradict each other.", f"{one} and {other}; send one.", param=second
        )
    name, tokens = next(iter(given.items()), ("", NO_BOUND))
    if tokens > 0 and not reasons(model):
        return None, [no_effect(name, "the model does not reason")]
    return tokens if tokens != NO_BOUND else None, []
