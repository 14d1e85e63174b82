"""Request a chat's model, and start a reply with it. The model may have to be loaded first; the reply waits for it.

Does not know: HTTP, templates, how conversations are stored.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from localllm.engine.client import GenerationRequest
from localllm.engine.request import RequestOptions
from localllm.errors import LocalLLMError, RequestError
from localllm.web.pages.chat.active_replies import ActiveReply
from localllm.web.pages.chat.live_reply import Reply
from localllm.web.pages.chat.prompts import Prompt, prompt_of
from localllm.web.pages.chat.state import ChatState
from localllm.web.pages.chat.tool_offer import OfferedTools, offered_tools

if TYPE_CHECKING:
    from localllm.serving.entry import Lease, ModelEntry
    from localllm.serving.served import ServedModel
    from localllm.text.answers.reader import AnswerReader

MODEL_WAIT_S = 1.0
"""If the model takes longer to load, the reply waits for it and not the handler."""


def entry_for(state: ChatState, settings: Mapping[str, str]) -> ModelEntry | None:
    """Return the model that the next message goes to, if the manager knows it."""
    manager, name = state.pages.manager, settings.get("model")
    return manager.register.find(name) if name else manager.default


def served_for(state: ChatState, settings: Mapping[str, str]) -> ServedModel | None:
    """Return the model that the next message goes to, if it is ready."""
    entry = entry_for(state, settings)
    return entry.served if entry is not None and entry.state == "ready" else None


@dataclass(slots=True)
class Claim:
    """A requested model, which may still be loading."""

    name: str
    lease: asyncio.Task[Lease]
    cache_salt: str | None = None
    offer: asyncio.Task[OfferedTools] | None = None  # the tools of servers, some of which may be starting
    prompt: Prompt | None = None  # of the next reply, if the model was ready to count its tokens

    @property
    def served(self) -> ServedModel | None:
        """The model, if it is ready."""
        return self.lease.result().model if self.lease.done() else None

    @property
    def waits_for_tools(self) -> bool:
        return self.offer is not None and not self.offer.done()

    async def tools_for(self, served: ServedModel, settings: Mapping[str, str]) -> OfferedTools:
        """Return the tools of servers that the model is offered."""
        return (await self.offer).for_model(served, settings) if self.offer is not None else OfferedTools()


async def _claim(state: ChatState, owner: str, settings: Mapping[str, str]) -> Claim:
    """Request the model. Raises immediately if there is no such model, or if its load fails at once."""
    name = settings.get("model") or None
    lease = asyncio.create_task(state.pages.manager.acquire(name))
    offer = asyncio.create_task(offered_tools(state, owner, settings)) if state.mcp.servers else None
    try:
        await asyncio.wait({lease, offer} if offer else {lease}, timeout=MODEL_WAIT_S)
    except asyncio.CancelledError:
        _release_claim(Claim("", lease, offer=offer))
        raise
    if lease.done():
        found = lease.result()
        try:
            found.model.require("generate")
        except RequestError:
            found.release()
            raise
        return Claim(found.model.name, lease, state.pages.cache_salt(owner), offer)
    default = state.pages.manager.default
    return Claim(name or (default.name if default else ""), lease, state.pages.cache_salt(owner), offer)


def claim_later(
    state: ChatState, owner: str, name: str, ended: asyncio.Event, announce: Callable[[str], None]
) -> Claim:
    """Request the model once another reply has ended, and announce the load then."""

    async def acquire() -> Lease:
        await ended.wait()
        announce(f"Loading {name} …")
        return await state.pages.manager.acquire(name)

    return Claim(name, asyncio.create_task(acquire()), state.pages.cache_salt(owner))


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
    claim.lease.cancel()
    claim.lease.add_done_callback(_release)


def _release(lease: asyncio.Task[Lease]) -> None:
    if not lease.cancelled() and lease.exception() is None:
        lease.result().release()


def reply_of(claim: Claim, message_id: str) -> Reply:
    ready = claim.served
    return Reply(f"chat-{message_id}", claim.name, ready.plan.max_model_len if ready else 0)


def start(
    writing: ActiveReply,
    claim: Claim,
    messages: list[dict[str, Any]],
    settings: Mapping[str, str],
    *,
    goes_on: bool = False,
) -> None:
    """Start the reply in a task: the model may have to be loaded first, and the user sees the chat meanwhile."""

    async def request(served: ServedModel) -> None:
        reply = writing.reply
        if claim.waits_for_tools:
            reply.announce("Starting the servers of the tools …")
        offered = await claim.tools_for(served, settings)
        reply.offered, reply.tool_notes = offered.by_name, offered.notes
        told = offered.in_settings(settings)
        prompt = claim.prompt or await prompt_of(served, messages, told, goes_on=goes_on)
        await send(writing.reply, claim, served, prompt)

    start_with(writing, claim, request)


def start_with(writing: ActiveReply, claim: Claim, request: Callable[[ServedModel], Awaitable[None]]) -> None:
    """Start a reply in a task that waits for the model and then calls `request`, which starts the reply."""
    reply = writing.reply
    if not claim.lease.done():
        reply.announce(f"Loading {claim.name} …")

    async def begin() -> None:
        try:
            lease = await claim.lease
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


async def send(reply: Reply, claim: Claim, served: ServedModel, prompt: Prompt) -> None:
    """Send the prompt to the engine; the reply is written from now on."""
    asked, new_reader = request_of(reply.request_id, claim, served, prompt)
    if asked.params.structured_outputs is not None:
        await served.generator.prepare(asked.params)
    reply.start(served.generator, asked, new_reader and new_reader())


def request_of(
    request_id: str, claim: Claim, served: ServedModel, prompt: Prompt
) -> tuple[GenerationRequest, Callable[[], AnswerReader] | None]:
    """Return the request to the engine, and what makes the reader of its answer (`Conversation.reading`)."""
    params, new_reader = prompt.conversation.reading(served, prompt.params, prompt.token_ids)
    options = RequestOptions(cache_salt=claim.cache_salt, source="chat")
    return GenerationRequest(request_id, prompt.token_ids, params, options=options), new_reader
