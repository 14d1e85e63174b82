"""A request for a response, read and checked, with its prompt: the items of earlier rounds, its own, and its output so
far if tools run here. Beside the messages: sampling, tools, the format of the answer.

`truncation: "auto"` leaves out the oldest items of a conversation that is longer than the context. Whole rounds are
dropped first, a user's message with everything that answers it, so that the rest begins as conversations do. Then,
within the newest round, calls are dropped together with their results. Instructions, system and developer messages, the
user's newest message and the newest step after it are never dropped.
Does not know: how the answer is generated and written, how a prompt is counted.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from localllm.engine.params import SamplingParams, given_params
from localllm.engine.request import RequestOptions
from localllm.errors import InvalidParameter
from localllm.serving.answers.conversation import TOOL_CHOICE, ChatRequest, Conversation, Tools, sampling_params
from localllm.serving.answers.pictures import PromptIds
from localllm.serving.served import ServedModel
from localllm.text.structured import StructuredOutputsParams
from localllm.web.access.caller import owner_of
from localllm.web.api.exchange import ApiRequest, served_model
from localllm.web.api.hints import effort_switch, thinking_budget
from localllm.web.api.pictures import readable
from localllm.web.api.reading import read, read_object
from localllm.web.api.responses.client_tools import CALLS, LEFT_OUT, OUTPUTS, ClientTools, client_tools, plain_choice
from localllm.web.api.responses.items import Item, Message, messages_of, read_items
from localllm.web.api.responses.mcp_items import approved_calls, is_approvable
from localllm.web.api.responses.mcp_tools import McpOffer, ToolNotAllowed, mcp_offer
from localllm.web.api.responses.schema import (
    REASONING_RULES,
    RULES,
    TEXT_RULES,
    ResponseReasoning,
    ResponsesBody,
    TextConfig,
)
from localllm.web.api.responses.stored import decoded, store_of
from localllm.web.api.tools import chosen
from localllm.web.errors import InvalidType, MissingParameter

Count = Callable[[Sequence[Item]], Awaitable[int]]

SPARE = 8
"""If items are dropped, at least 1/SPARE of the context becomes free for the answer."""


def wanted_tokens(max_output_tokens: int | None, context: int) -> int:
    """Return the tokens to reserve for the answer: max_output_tokens, but at most half of the context; without it, one
    token.
    """
    return min(max_output_tokens or 1, context // 2)


async def truncated(items: Sequence[Item], count: Count, context: int, max_output_tokens: int | None) -> list[Item]:
    """Return the items that remain. `count` returns the prompt tokens of some items.

    If no choice makes the prompt fit, the fewest possible items remain.
    """
    steps = droppable(items)
    room = context - max(wanted_tokens(max_output_tokens, context), context // SPARE)
    low, high = 1, max(1, len(steps))  # search the fewest steps that are enough; fewer items never make a longer prompt
    while low < high:
        middle = (low + high) // 2
        fits = await count(_without(items, steps[:middle])) <= room
        low, high = (low, middle) if fits else (middle + 1, high)
    return _without(items, steps[:low])


def droppable(items: Sequence[Item]) -> list[list[int]]:
    """Return groups of item indices that are dropped together, in the order in which they are dropped."""
    units = _units(items)
    newest = max((i for i, unit in enumerate(units) if _is_question(items[unit[0]])), default=-1)
    rounds: list[list[int]] = []
    for unit in units[: max(newest, 0)]:
        if not rounds or _is_question(items[unit[0]]):
            rounds.append([])
        rounds[-1] += unit
    # The unit of the last item is the newest step: a result may come long after its call.
    last = max(range(len(units)), key=lambda i: units[i][-1], default=-1)
    return rounds + [unit for i, unit in enumerate(units) if i > newest and i != last]


def _units(items: Sequence[Item]) -> list[list[int]]:
    """Return units of item indices: a message of the user, or the model's output of one turn with the results of its
    calls and the answers to its requests for approval. Items that are never dropped are in no unit.
    """
    units: list[list[int]] = []
    unit_of_call: dict[str, list[int]] = {}
    may_go_on = False  # whether the next item of an answer belongs to the same turn
    for i, item in enumerate(items):
        answered = str(item.get("call_id" if item["type"] in OUTPUTS else "approval_request_id"))
        if answered in unit_of_call:
            unit_of_call[answered].append(i)
            may_go_on = False
        elif item["type"] == "message" and item["role"] != "assistant":
            may_go_on = False
            if _is_question(item):
                units.append([i])
        else:
            if not may_go_on:
                units.append([])
            units[-1].append(i)
            may_go_on = item["type"] != "mcp_call"  # which has its result
            if item["type"] in (*CALLS, "mcp_approval_request"):
                unit_of_call[item["call_id" if item["type"] in CALLS else "id"]] = units[-1]
    return units


def _is_question(item: Item) -> bool:
    return bool(item["type"] == "message" and item["role"] == "user")


def _without(items: Sequence[Item], steps: Sequence[Sequence[int]]) -> list[Item]:
    dropped = {index for step in steps for index in step}
    return [item for i, item in enumerate(items) if i not in dropped]


FORMAT = "text.format"


def params_of(body: ResponsesBody, model: ServedModel) -> tuple[SamplingParams, list[str]]:
    """Return the parameters, and warnings. Without a limit the answer may fill the rest of the context. Raises the
    error that names the wrong field.
    """
    if body.max_output_tokens is not None and body.max_output_tokens < 1:
        why = f"Got {body.max_output_tokens}."
        raise InvalidParameter("max_output_tokens must be at least 1.", why, param="max_output_tokens")
    asked = {"max_tokens": model.sampling_defaults.get("max_tokens"), **given_params(body, "responses")}
    text, warnings = read_object(body.text or {}, TextConfig, TEXT_RULES, "text.")
    budget = {"thinking_token_budget": body.thinking_token_budget}
    asked["thinking_token_budget"], more = thinking_budget(budget, model)
    if (structured := _structured({"type": "text"} if text.format is None else text.format)) is not None:
        asked["structured_outputs"] = structured
    return sampling_params(model, asked), [*warnings, *more]


def _structured(format: Mapping[str, Any]) -> StructuredOutputsParams | None:
    """Return the structured output. `strict` changes nothing: a schema is either enforced completely or refused."""
    match format.get("type"):
        case "text":
            return None
        case "json_object":
            return StructuredOutputsParams(json_object=True, param=FORMAT)
        case "json_schema":
            if not isinstance(schema := format.get("schema"), dict):
                raise InvalidType(
                    f"Invalid type for '{FORMAT}.schema'.", "Expected an object.", param=f"{FORMAT}.schema"
                )
            return StructuredOutputsParams(json=schema, param=FORMAT)
        case kind:
            known = "Known: text, json_object, json_schema."
            raise InvalidParameter(f"Unknown {FORMAT}.type {kind!r}.", known, param=f"{FORMAT}.type")


def template_of(body: ResponsesBody, model: ServedModel) -> tuple[dict[str, Any], list[str]]:
    """Return the chat template's arguments, and warnings."""
    asked, warnings = read_object(body.reasoning or {}, ResponseReasoning, REASONING_RULES, "reasoning.")
    if asked.effort is None:
        return {}, warnings
    switches, more = effort_switch(model, asked.effort, "reasoning.effort")
    return switches, [*warnings, *more]


def tools_of(body: ResponsesBody, model: ServedModel, own: ClientTools, offer: McpOffer) -> Tools:
    """Return the client's own tools and the tools of MCP servers. Raises `RequestError` if a tool or the choice is
    invalid.
    """
    choice = _choice(plain_choice(body.tool_choice, own), offer)
    return chosen([*own.functions, *offer.functions()], choice, body.parallel_tool_calls, model)


def _choice(choice: Any, offer: McpOffer) -> Any:
    """Return the choice with the names that the model uses for the tools of servers."""
    if not isinstance(choice, dict):
        return choice
    if choice.get("type") == "mcp":
        return {"type": "allowed_tools", "mode": "required", "tools": _named(choice, offer)}
    tools = choice.get("tools")
    if choice.get("type") == "allowed_tools" and isinstance(tools, list):
        is_mcp = [isinstance(tool, dict) and tool.get("type") == "mcp" for tool in tools]
        return choice | {
            "tools": [
                n for tool, mcp in zip(tools, is_mcp, strict=True) for n in (_named(tool, offer) if mcp else [tool])
            ]
        }
    return choice


def _named(choice: dict[str, Any], offer: McpOffer) -> list[dict[str, str]]:
    names = offer.names_of(choice.get("server_label"), choice.get("name"))
    if not names:
        what = "tool_choice names a tool that is not offered."
        why = f"Offered: {', '.join(offer.by_name) or 'none'}."
        raise InvalidParameter(what, why, param=TOOL_CHOICE)
    return [{"type": "function", "name": name} for name in names]


@dataclass(frozen=True, slots=True)
class Asked:
    body: ResponsesBody
    model: ServedModel
    before: Sequence[bytes]  # items of earlier rounds
    items: Sequence[Item]  # items of this round
    own: ClientTools
    offer: McpOffer
    approved: Sequence[Item]  # requests for approval that were approved, and whose calls run first
    chat: ChatRequest
    token_ids: PromptIds  # the prompt; empty for a request that only loads the model
    num_truncated: int  # number of the oldest items that are not in the prompt
    warnings: Sequence[str]

    @property
    def everything(self) -> list[Item]:
        return [*decoded(self.before), *self.items]

    async def with_output(self, output: Sequence[Item], chat: ChatRequest) -> Asked:
        """Return the request for the next reply, after this output."""
        return await _prompted(replace(self, chat=chat), [*self.everything, *output])


async def read_asked(request: ApiRequest, raw: bytes) -> Asked:
    """Return the request. Raises the error that names the wrong field."""
    body, warnings = await read(raw, ResponsesBody, RULES)
    before, items = conversation_of(request, body)
    is_probe = not before and not items and body.input == "" and body.max_output_tokens == 1
    if not before and not items and not is_probe:
        raise MissingParameter("Missing required parameter: 'input'.", "There is nothing to answer.", param="input")
    if body.max_tool_calls is not None and body.max_tool_calls < 1:
        what = "max_tool_calls must be at least 1."
        raise InvalidParameter(what, f"Got {body.max_tool_calls}.", param="max_tool_calls")
    everything = [*decoded(before), *items]
    approved = approved_calls(everything)
    list(messages_of(everything))  # checked before servers of tools are started
    tools = body.tools or []
    own = client_tools(tools)
    offer = await mcp_offer(request, tools, {each["function"]["name"] for each in own.functions})
    for call in approved:
        _require_approvable(call, offer, owner_of(request))
    model = await served_model(request, body.model)
    params, more = params_of(body, model)
    template, still_more = template_of(body, model)
    conversation = Conversation([], template, tools_of(body, model, own, offer))
    chat = ChatRequest(conversation, params, RequestOptions(keeps_no_copy=body.store is False))
    left_out = sorted({item["type"] for item in everything if item["type"] in LEFT_OUT})
    unread = [f"items without a text for the model are not in the prompt: {', '.join(left_out)}"] if left_out else []
    warnings = [*warnings, *own.warnings, *offer.warnings, *more, *still_more, *unread]
    asked = Asked(body, model, before, items, own, offer, approved, chat, PromptIds(()), 0, warnings)
    return asked if is_probe else await _prompted(asked, everything)


def conversation_of(request: ApiRequest, body: ResponsesBody) -> tuple[Sequence[bytes], Sequence[Item]]:
    """Return the stored items of earlier rounds, and the items of this one."""
    store, owner = store_of(request), owner_of(request)
    before = store.context(owner, body.previous_response_id)
    return before, read_items(body.input or [], partial(store.item, owner))


def _require_approvable(call: Item, offer: McpOffer, owner: str) -> None:
    label, name = call["server_label"], call["name"]
    offered = offer.find(label, name)
    if offered is None:
        what = f"The approved call of {name[:64]!r} cannot run."
        why = f"This request does not offer the tool {name[:64]!r} of {label[:64]!r}."
        raise InvalidParameter(what, why, "Send the same entry in tools as before.", param="tools")
    if not is_approvable(call["id"], owner, offered.tool, call["arguments"]):
        raise ToolNotAllowed(
            f"The approved call of {name} cannot run.",
            "This server has not asked for it since its start, or the tool has changed since.",
            "Ask the model again.",
            param="input",
        )


async def _prompted(asked: Asked, items: Sequence[Item]) -> Asked:
    """Return the request with the prompt of these items."""
    body, model = asked.body, asked.model
    names = {(each.tool.server, each.tool.name): name for name, each in asked.offer.by_name.items()}
    instructions: list[Message] = [{"role": "system", "content": body.instructions}] if body.instructions else []

    newest = max((i for i, item in enumerate(asked.items) if item.get("role") == "user"), default=0)
    warnings = list(asked.warnings)

    def asking(items: Sequence[Item]) -> ChatRequest:
        found, unread = readable([*instructions, *messages_of(items, names)], model, f"input[{newest}].content")
        warnings[:] = dict.fromkeys([*asked.warnings, *unread])
        return replace(asked.chat, conversation=replace(asked.chat.conversation, messages=found))

    async def count(items: Sequence[Item]) -> int:
        return len(await asking(items).token_ids(model))

    chat = asking(items)
    token_ids, context = await chat.token_ids(model), model.plan.max_model_len
    warnings += token_ids.warnings
    found = replace(asked, chat=chat, token_ids=token_ids, warnings=[*warnings])
    if body.truncation != "auto" or len(token_ids) <= context - wanted_tokens(body.max_output_tokens, context):
        return found
    kept = await truncated(items, count, context, body.max_output_tokens)
    chat, num_truncated = asking(kept), len(items) - len(kept)
    warning = f"truncation: items that are not in the prompt, the oldest: {num_truncated} of {len(items)}"
    token_ids = await chat.token_ids(model)
    told = [*warnings, *token_ids.warnings, *([warning] if num_truncated else [])]
    return replace(found, chat=chat, token_ids=token_ids, num_truncated=num_truncated, warnings=told)
