"""A request for a response, read and checked, with its prompt: the items of earlier rounds, its own, and its output so
far if tools run here.

Does not know: how the answer is generated and written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from localllm.errors import InvalidParameter
from localllm.serving.chat import Conversation
from localllm.serving.served import ServedModel
from localllm.web.access.caller import owner_of
from localllm.web.api.conversation import ChatRequest
from localllm.web.api.exchange import ApiRequest, served_model
from localllm.web.api.pictures import readable
from localllm.web.api.reading import read
from localllm.web.api.responses.client_tools import LEFT_OUT, ClientTools, client_tools
from localllm.web.api.responses.fields import RULES
from localllm.web.api.responses.items import Item, Message, messages_of, read_items
from localllm.web.api.responses.mcp_items import approved_calls, is_approvable
from localllm.web.api.responses.mcp_tools import McpOffer, ToolNotAllowed, mcp_offer
from localllm.web.api.responses.params import params_of, template_of, tools_of
from localllm.web.api.responses.schema import ResponsesBody
from localllm.web.api.responses.store import decoded
from localllm.web.api.responses.stored import store_of
from localllm.web.api.responses.truncation import truncated, wanted_tokens
from localllm.web.errors import MissingParameter


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
    token_ids: Sequence[int]  # the prompt; empty for a request that only loads the model
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
    store, owner = store_of(request), owner_of(request)
    before = store.context(owner, body.previous_response_id)
    items = read_items(body.input or [], partial(store.item, owner))
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
        _require_approvable(call, offer, owner)
    model = await served_model(request, body.model)
    params, more = params_of(body, model)
    template, still_more = template_of(body, model)
    chat = ChatRequest(Conversation([], template, tools_of(body, model, own, offer)), params)
    left_out = sorted({item["type"] for item in everything if item["type"] in LEFT_OUT})
    unread = [f"items without a text for the model are not in the prompt: {', '.join(left_out)}"] if left_out else []
    warnings = [*warnings, *own.warnings, *offer.warnings, *more, *still_more, *unread]
    asked = Asked(body, model, before, items, own, offer, approved, chat, (), 0, warnings)
    return asked if is_probe else await _prompted(asked, everything)


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
    found = replace(asked, chat=chat, token_ids=token_ids, warnings=[*warnings])
    if body.truncation != "auto" or len(token_ids) <= context - wanted_tokens(body.max_output_tokens, context):
        return found
    kept = await truncated(items, count, context, body.max_output_tokens)
    chat, num_truncated = asking(kept), len(items) - len(kept)
    warning = f"truncation: items that are not in the prompt, the oldest: {num_truncated} of {len(items)}"
    token_ids = await chat.token_ids(model)
    told = [*warnings, *([warning] if num_truncated else [])]
    return replace(found, chat=chat, token_ids=token_ids, num_truncated=num_truncated, warnings=told)
