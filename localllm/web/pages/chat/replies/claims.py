"""Request a chat's model and start a reply with it, with the tools of servers that the chat offers to the model.

The model may have to be loaded first; the reply waits for it. A model of another server is asked there, as a client of
the API would ask for it. The tools come from the servers that the chat has
chosen, if its user may use them.
Does not know: HTTP, templates, how conversations are stored, how a call is run (tools/runs.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import msgspec

from localllm.config.mcp_servers import McpServer
from localllm.engine.request import RequestOptions
from localllm.errors import LocalLLMError, RequestError
from localllm.fleet.upstream import UpstreamRefused
from localllm.fleet.upstreams import Prompt
from localllm.mcp.values import ServerTool, function_names
from localllm.serving.answers.conversation import calls_tools
from localllm.serving.answers.tool_calls import ConsentPolicy, may_use
from localllm.serving.served import ServedModel
from localllm.units import format_count
from localllm.web.api.remote import RemoteGeneration
from localllm.web.pages.chat.composer.settings import MAX_TOOLS_CHARS, is_chosen, read_tools
from localllm.web.pages.chat.replies.active import ActiveReply
from localllm.web.pages.chat.replies.prompt import ReplyPrompt, body_for_another_server, prompt_of
from localllm.web.pages.chat.replies.reply import Reply
from localllm.web.pages.chat.state import ChatState
from localllm.web.pages.chat.store import Chats

if TYPE_CHECKING:
    from localllm.fleet.upstreams import Upstreams
    from localllm.serving.entry import ModelEntry
    from localllm.serving.lease import Lease

CHARS_PER_TOKEN = 4
MAX_OFFERED = 256
"""Most tools of servers that a reply is offered."""


@dataclass(frozen=True, slots=True)
class OfferedTools:
    """The tools by the name that the model uses, and what was left out and why."""

    by_name: Mapping[str, ServerTool] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def for_model(self, served: ServedModel | None, settings: Mapping[str, str]) -> OfferedTools:
        """Return the tools that this model can call, and whose descriptions take at most half of its context. None: a
        model of another server, which may be offered tools."""
        typed = read_tools(settings.get("tools", ""))
        if served is not None and not calls_tools(served):
            return OfferedTools()
        taken = {tool["function"]["name"] for tool in typed}
        context_chars = MAX_TOOLS_CHARS if served is None else served.plan.max_model_len // 2 * CHARS_PER_TOKEN
        most = min(MAX_TOOLS_CHARS, context_chars) - len(msgspec.json.encode(typed))
        found, left_out = dict[str, ServerTool](), dict[str, int]()
        for name, tool in function_names(self.by_name.values(), taken).items():
            most -= len(msgspec.json.encode(function_of(name, tool))) + 1
            if most < 0 or len(found) == MAX_OFFERED:
                left_out[tool.server] = left_out.get(tool.server, 0) + 1
            else:
                found[name] = tool
        notes = [
            f"{format_count(count)} tools of {server} are left out: with them the descriptions are too long."
            for server, count in left_out.items()
        ]
        return OfferedTools(found, (*self.notes, *notes))

    def in_settings(self, settings: Mapping[str, str]) -> Mapping[str, str]:
        """Return the settings with these tools beside the typed ones."""
        if not self.by_name:
            return settings
        functions = [function_of(name, tool) for name, tool in self.by_name.items()]
        typed = read_tools(settings.get("tools", ""))
        return {**settings, "tools": msgspec.json.encode([*typed, *functions]).decode()}


NOTHING = OfferedTools()


def function_of(name: str, tool: ServerTool) -> dict[str, object]:
    return {"name": name, "description": tool.description, "parameters": tool.schema}


def usable_servers(state: ChatState, owner: str) -> list[McpServer]:
    """Return the servers that are enabled, and that this owner may use."""
    return [server for server in state.mcp.servers if server.enabled and may_use(owner, server)]


async def offered_tools(state: ChatState, owner: str, settings: Mapping[str, str]) -> OfferedTools:
    """Return the tools of the chosen servers, which are started if they do not run. A server that fails is left out,
    with a note; so are tools that the owner never allows.
    """
    servers = [server for server in usable_servers(state, owner) if is_chosen(server, settings)]
    if not servers:
        return NOTHING
    listings = await asyncio.gather(*(state.mcp.tools(server.name) for server in servers), return_exceptions=True)
    consents = ConsentPolicy(await state.store.call(Chats.consents, owner))
    tools, notes = list[ServerTool](), list[str]()
    for server, listing in zip(servers, listings, strict=True):
        if isinstance(listing, LocalLLMError):
            notes.append(f"The tools of {server.name} are left out. {listing} {listing.hint}".rstrip())
        elif isinstance(listing, BaseException):
            raise listing
        else:
            tools += [each for each in listing.tools if consents.choice(each.server, each.name, each.digest) != "never"]
    by_name = {f"{tool.server} {tool.name}": tool for tool in tools}
    return replace(NOTHING, by_name=by_name, notes=tuple(notes))


MODEL_WAIT_S = 1.0
"""If the model takes longer to load, the reply waits for it and not the handler."""


def entry_for(state: ChatState, settings: Mapping[str, str]) -> ModelEntry | None:
    """Return the model that the next message goes to, if the manager knows it."""
    return state.pages.manager.register.find(settings.get("model"))


def served_for(state: ChatState, settings: Mapping[str, str]) -> ServedModel | None:
    """Return the model that the next message goes to, if it is ready."""
    entry = entry_for(state, settings)
    return entry.served if entry is not None and entry.state == "ready" else None


@dataclass(slots=True)
class Claim:
    """A requested model, which may still be loading."""

    name: str
    lease: asyncio.Task[Lease[ServedModel]] | None  # None: another server has the model
    cache_salt: str | None = None
    owner: str = ""
    offer: asyncio.Task[OfferedTools] | None = None  # the tools of servers, some of which may be starting
    prompt: ReplyPrompt | None = None  # of the next reply, if the model was ready to count its tokens
    upstreams: Upstreams | None = None  # the other servers, if one of them has the model

    @property
    def served(self) -> ServedModel | None:
        """The model, if it is ready."""
        return self.lease.result().model if self.lease is not None and self.lease.done() else None

    @property
    def context_tokens(self) -> int:
        """The context of the model; 0: not known."""
        if self.upstreams is not None:
            return self.upstreams.context_of(self.name)
        return self.served.plan.max_model_len if self.served is not None else 0

    @property
    def options(self) -> RequestOptions:
        return RequestOptions(cache_salt=self.cache_salt, owner=self.owner, source="chat")

    @property
    def waits_for_tools(self) -> bool:
        return self.offer is not None and not self.offer.done()

    async def tools_for(self, served: ServedModel | None, settings: Mapping[str, str]) -> OfferedTools:
        """Return the tools of servers that the model is offered. None: a model of another server."""
        if self.upstreams is not None and not self.upstreams.calls_tools(self.name):
            return NOTHING
        return (await self.offer).for_model(served, settings) if self.offer is not None else OfferedTools()


async def _claim(state: ChatState, owner: str, settings: Mapping[str, str]) -> Claim:
    """Request the model. Raises immediately if there is no such model, or if its load fails at once."""
    name = settings.get("model") or None
    await state.pages.upstreams.looked()
    elsewhere = state.pages.elsewhere(name or "")
    lease = None if elsewhere else asyncio.create_task(state.pages.manager.acquire(name))
    offer = asyncio.create_task(offered_tools(state, owner, settings)) if state.mcp.servers else None
    try:
        if waited := {task for task in (lease, offer) if task is not None}:
            await asyncio.wait(waited, timeout=MODEL_WAIT_S)
    except asyncio.CancelledError:
        _release_claim(Claim("", lease, offer=offer))
        raise
    if lease is None:
        salt = state.pages.cache_salt(owner)
        return Claim(elsewhere, None, salt, owner, offer, upstreams=state.pages.upstreams)
    if lease.done():
        found = lease.result()
        try:
            found.model.require("generate")
        except RequestError:
            found.release()
            raise
        return Claim(found.model.name, lease, state.pages.cache_salt(owner), owner, offer)
    default = state.pages.manager.register.default
    return Claim(name or (default.name if default else ""), lease, state.pages.cache_salt(owner), owner, offer)


def claim_later(
    state: ChatState, owner: str, name: str, ended: asyncio.Event, announce: Callable[[str], None]
) -> Claim:
    """Request the model once another reply has ended, and announce the load then."""

    async def acquire() -> Lease[ServedModel]:
        await ended.wait()
        announce(f"Loading {name} …")
        return await state.pages.manager.acquire(name)

    return Claim(name, asyncio.create_task(acquire()), state.pages.cache_salt(owner), owner)


@asynccontextmanager
async def claimed(state: ChatState, owner: str, settings: Mapping[str, str]) -> AsyncIterator[Claim]:
    """Request the model for the block, which passes the claim on or fails: then the claim is released."""
    claim = await _claim(state, owner, settings)
    try:
        yield claim
    except BaseException:
        _release_claim(claim)
        raise


def _release_claim(claim: Claim) -> None:
    """Release the claim after a failure."""
    if claim.offer is not None:
        claim.offer.cancel()
    if claim.lease is not None:
        claim.lease.cancel()
        claim.lease.add_done_callback(_release)


def _release(lease: asyncio.Task[Lease[ServedModel]]) -> None:
    if not lease.cancelled() and lease.exception() is None:
        lease.result().release()


def reply_of(claim: Claim, message_id: str) -> Reply:
    return Reply(f"chat-{message_id}", claim.name, claim.context_tokens)


def start(
    writing: ActiveReply,
    claim: Claim,
    messages: list[dict[str, Any]],
    settings: Mapping[str, str],
    *,
    goes_on: bool = False,
) -> None:
    """Start the reply in a task: the model may have to be loaded first, and the user sees the chat meanwhile."""
    reply = writing.reply
    typed = {tool["function"]["name"]: None for tool in read_tools(settings.get("tools", ""))}

    async def settings_with_tools(served: ServedModel | None) -> Mapping[str, str]:
        if claim.waits_for_tools:
            reply.announce("Starting the servers of the tools …")
        offered = await claim.tools_for(served, settings)
        reply.offered, reply.tool_notes = {**typed, **offered.by_name}, offered.notes
        return offered.in_settings(settings)

    async def ask_another_server(upstreams: Upstreams) -> None:
        try:
            body = body_for_another_server(messages, await settings_with_tools(None), goes_on=goes_on)
            plain = body_for_another_server(messages, settings, goes_on=goes_on)
            lease = upstreams.choose(claim.name, Prompt.of(claim.name, body["messages"]))
        except LocalLLMError as error:
            reply.fail(error)
            return

        def without_tools(refused: UpstreamRefused) -> dict[str, Any]:
            reply.offered = typed
            reply.tool_notes += (f"The tools of servers are left out. {refused}",)
            return plain

        assert lease is not None, "no engine of this server has the model"
        reply.remote = lease.model
        generation = RemoteGeneration(
            lease.model, "/chat/completions", body, without_tools if reply.offered != typed else None
        )
        reply.start(generation)
        reply.when_done(lease.release)

    async def request(served: ServedModel) -> None:
        told = await settings_with_tools(served)
        prompt = claim.prompt or await prompt_of(served, messages, told, goes_on=goes_on)
        reply.start(prompt.generation(served, reply.request_id, claim.options))

    if claim.upstreams is not None:
        reply.prepare(ask_another_server(claim.upstreams))
    else:
        start_with(writing, claim, request)


def start_with(writing: ActiveReply, claim: Claim, request: Callable[[ServedModel], Awaitable[None]]) -> None:
    """Start a reply in a task that waits for the model and then calls `request`, which starts the reply."""
    reply, waiting = writing.reply, claim.lease
    assert waiting is not None, "a model of another server has no lease here"
    if not waiting.done():
        reply.announce(f"Loading {claim.name} …")

    async def begin() -> None:
        try:
            lease = await waiting
        except asyncio.CancelledError:
            _release_claim(claim)
            raise
        except LocalLLMError as error:
            reply.fail(error)
            return
        try:
            served = lease.model
            served.require("generate")
            reply.model, reply.context_tokens = served.name, served.plan.max_model_len
            await request(served)
        except BaseException as error:
            lease.release()
            if not isinstance(error, LocalLLMError):
                raise
            reply.fail(error)
        else:
            reply.when_done(lease.release)

    reply.prepare(begin())
