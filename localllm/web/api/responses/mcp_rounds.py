"""Answer a request whose tools run here: a reply, its calls, the reply to their results, until the model calls nothing.

Calls of one reply run at the same time. The response ends early where a call needs the client: for approval, or because
it is a call of one of the client's own functions. After MAX_ROUNDS rounds, or `max_tool_calls` calls, the model answers
without the tools of servers.
Does not know: which tools are offered and why (mcp_tools.py), HTTP beyond the stream.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import msgspec

from localllm.engine.outputs import ExplainedMiss, Timings, Usage, most_missed
from localllm.mcp.servers import McpServers
from localllm.mcp.values import ToolOutcome, bounded, limit_for
from localllm.serving.answers.conversation import Tools
from localllm.serving.answers.generation import Generation, Progress
from localllm.serving.answers.tool_calls import MAX_CUTS, MAX_ROUNDS
from localllm.web.access.caller import mcp_of, owner_of
from localllm.web.api.answer import note_id
from localllm.web.api.exchange import ApiRequest
from localllm.web.api.responses import shapes
from localllm.web.api.responses.answer import ResponseEvents, ResponseHead
from localllm.web.api.responses.asked import Asked
from localllm.web.api.responses.client_tools import CALLS
from localllm.web.api.responses.items import Item
from localllm.web.api.responses.mcp_items import approval_id, arguments_of
from localllm.web.api.responses.mcp_output import McpOutput
from localllm.web.errors import as_local_error

log = logging.getLogger(__name__)

INTERNAL_ERROR = -32603
"""The code of JSON-RPC for a call that failed for a reason that is not the tool's."""
LIMIT_REACHED = "The call was not run: this response may run {} calls."


@dataclass(slots=True)
class Totals:
    """The tokens and the times of all rounds."""

    rounds: list[Progress] = field(default_factory=list)

    @property
    def reasoning_tokens(self) -> int:
        return sum(each.reasoning_tokens for each in self.rounds)

    def usage(self) -> Usage:
        """Return the sums. A prompt counts in each round in which it is read."""
        usages = [each.usage() for each in self.rounds]
        return Usage(
            sum(each.prompt_tokens for each in usages),
            sum(each.completion_tokens for each in usages),
            sum(each.cached_tokens for each in usages),
            image_tokens=sum(each.image_tokens for each in usages),
            audio_tokens=sum(each.audio_tokens for each in usages),
        )

    @property
    def timings(self) -> Timings:
        """The sums of the rounds, without the calls between them, and the time to the first token of all."""
        every = [each.timings for each in self.rounds]
        return Timings(
            sum(each.queue_s for each in every),
            sum(each.prefill_s for each in every),
            sum(each.decode_s for each in every),
            every[0].ttft_s if every else 0.0,
        )

    @property
    def cache_miss(self) -> ExplainedMiss | None:
        return most_missed(*[each.cache_miss for each in self.rounds])

    @property
    def tokens_per_s(self) -> float | None:
        """The rate of the tokens after the first one of each round."""
        decode_s, num_tokens = self.timings.decode_s, sum(max(0, each.timed_tokens - 1) for each in self.rounds)
        return num_tokens / decode_s if num_tokens and decode_s > 0 else None


class McpRounds:
    """The answer to one request."""

    def __init__(
        self, request: ApiRequest, asked: Asked, head: ResponseHead, keep: Callable[[shapes.Response], None]
    ) -> None:
        """`keep` is called with the response when it has ended."""
        self.response: shapes.Response | None = None
        self._request, self._asked, self._keep = request, asked, keep
        self._servers: McpServers = mcp_of(request.app)
        self._output = McpOutput(asked.offer.by_name, partial(approval_id, owner_of(request)), head.calls)
        self._events = ResponseEvents(head, self._ended, self._output)
        self._totals = Totals()
        self._generation: Generation | None = None
        self._num_calls = 0

    async def open(self) -> None:
        """Submit the first reply, unless calls run before it. Raises the refusal if there is one."""
        if not self._asked.approved:
            await self._begin_reply()

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """Yield the events. An error becomes the last one."""
        try:
            async for written in self._chunks():
                yield written
        except Exception as error:
            yield self._output.abandon(self._output.unfinished())
            yield self._events.error(as_local_error(error, self._request.scope))

    async def whole(self) -> shapes.Response:
        """Return the response when it has ended."""
        try:
            async for _ in self._chunks():
                pass
        finally:
            await self.close()
        assert self.response is not None
        return self.response

    async def close(self) -> None:
        if self._generation is not None:
            generation, self._generation = self._generation, None
            await generation.aclose()

    def _ended(self, response: shapes.Response) -> None:
        self.response = response
        self._keep(response)

    async def _chunks(self) -> AsyncIterator[bytes]:
        yield self._events.start() + self._lists()
        if self._asked.approved:
            yield b"".join([self._output.approved(each) for each in self._asked.approved])
            yield await self._run(self._output.next_round(), last=False)
        for number in range(1, MAX_ROUNDS + 2):
            if self._is_cut():
                break
            first = len(self._output.items)
            async for written in self._reply():
                yield written
            calls = self._output.next_round()
            if self._is_cut():
                yield self._output.abandon(calls)
                break
            if not calls:
                break
            yield await self._run(calls, last=number == MAX_ROUNDS)
            if self._output.asks or any(each["type"] in CALLS for each in self._output.items[first:]):
                break
        yield self._events.end(self._totals)

    def _is_cut(self) -> bool:
        """Return whether the response ends before the model has."""
        return self._events.cut

    def _lists(self) -> bytes:
        """Return the events of the lists of tools that the conversation does not have yet."""
        known = [each for each in self._asked.everything if each["type"] == "mcp_list_tools"]
        return b"".join([
            self._output.list_tools(label, tools)
            for label, tools in self._asked.offer.listed().items()
            if not any(each["server_label"] == label and each["tools"] == tools for each in known)
        ])  # fmt: skip

    # Replies ---------------------------------------------------------------------------------------------------------

    async def _begin_reply(self) -> Generation:
        asked = self._asked
        chat = asked.chat.within_context(len(asked.token_ids), asked.model)
        generation = chat.generation(asked.model, asked.token_ids)
        note_id(self._request, generation)
        await generation.open()
        self._generation = generation
        self._totals.rounds.append(generation.progress)
        return generation

    async def _reply(self) -> AsyncIterator[bytes]:
        generation = self._generation or await self._begin_reply()
        async for batch in generation.batches():
            written = []
            for event in batch:
                generation.progress.count(event)
                written.append(self._events.event(event, generation.progress))
            yield b"".join(written)
        yield self._output.close(cut=self._events.cut)
        await self.close()

    # Calls -----------------------------------------------------------------------------------------------------------

    async def _run(self, calls: Sequence[Item], *, last: bool) -> bytes:
        """Run the calls, and prepare the next reply. Return the events of their results. `last`: the next reply may not
        call tools of servers.
        """
        most = self._asked.body.max_tool_calls
        jobs = []
        for call in calls:
            self._num_calls += 1
            over = most is not None and self._num_calls > most
            jobs.append(_failed(LIMIT_REACHED.format(most)) if over else self._call(call))
        results = await asyncio.gather(*jobs)
        await self._prepare(calls, results, last=last or (most is not None and self._num_calls >= most))
        return b"".join([self._output.finish(call) for call in calls])

    async def _call(self, call: Item) -> ToolOutcome:
        """Run one call. A failure is a result as well: the model and the client read what happened."""
        label, name, arguments = call["server_label"], call["name"], arguments_of(call["arguments"])
        if arguments is None:
            return await _failed("The arguments are not a JSON object.")
        offered = self._asked.offer.find(label, name)
        assert offered is not None
        return await self._servers.outcome(label, name, offered.tool.digest, arguments)

    async def _prepare(self, calls: Sequence[Item], results: Sequence[ToolOutcome], *, last: bool) -> None:
        """Set the prompt of the next reply. Results that do not fit into the context are cut to half their length, a
        few times; if they still do not fit, the response ends as incomplete.
        """
        model, chat = self._asked.model, self._asked.chat
        params, room = chat.params, model.plan.max_model_len
        most = self._asked.body.max_output_tokens
        if most is not None:
            left = most - self._totals.usage().completion_tokens
            params = replace(params, max_tokens=max(left, 1))
            self._events.cut = left < 1
        tools = _without_servers(chat.conversation.tools, self._asked) if last else chat.conversation.tools
        chat = replace(chat, conversation=replace(chat.conversation, tools=replace(tools, must=False)), params=params)
        limit = limit_for(room)
        for _ in range(MAX_CUTS + 1):
            for call, result in zip(calls, results, strict=True):
                call |= _fields(result, limit)
            output = msgspec.json.decode(msgspec.json.encode(self._output.items))
            for call in output:
                if call.get("status") == "in_progress":
                    call["status"] = "completed"
            asked = await self._asked.with_output(output, chat)
            if len(asked.token_ids) < room:
                self._asked = asked
                return
            limit = min(limit, max(len(result.text) for result in results)) // 2
        self._events.cut = True


def _fields(outcome: ToolOutcome, limit: int) -> Item:
    """Return the fields of a call's item, with at most `limit` characters of text."""
    text = bounded(outcome.text, limit)
    if not outcome.fails:
        return {"output": text, "error": None}
    if outcome.fails == "tool":
        content: list[Any] = [{"type": "text", "text": text}]
        return {"output": None, "error": {"type": "mcp_tool_execution_error", "content": content}}
    return {"output": None, "error": {"type": "mcp_protocol_error", "code": INTERNAL_ERROR, "message": text}}


async def _failed(why: str) -> ToolOutcome:
    return ToolOutcome(why, "call")


def _without_servers(tools: Tools, asked: Asked) -> Tools:
    names = asked.offer.by_name.keys()
    offered, allowed = (
        [tool for tool in each if tool["function"]["name"] not in names] for each in (tools.offered, tools.allowed)
    )
    return replace(tools, offered=offered, allowed=allowed)
