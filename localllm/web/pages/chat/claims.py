"""Request a chat's model, and start a reply with it. The model may have to be loaded first; the reply waits for it.

Does not know: HTTP, templates, how conversations are stored.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from localllm.engine.client import GenerationRequest
from localllm.engine.request import RequestOptions
from localllm.errors import LocalLLMError, RequestError, UnsupportedOption
from localllm.serving.chat import CONTINUE, Conversation, Tools, calls_tools
from localllm.web.pages.chat.active_replies import ActiveReply
from localllm.web.pages.chat.live_reply import Reply
from localllm.web.pages.chat.settings import sampling_params
from localllm.web.pages.chat.state import ChatState
from localllm.web.pages.chat.tools import read_tools

if TYPE_CHECKING:
    from localllm.serving.entry import Lease

MODEL_WAIT_S = 1.0
"""If the model takes longer to load, the reply waits for it and not the handler."""


@dataclass(slots=True)
class Claim:
    """A requested model, which may still be loading."""

    name: str
    lease: asyncio.Task[Lease]
    cache_salt: str | None = None


async def _claim(state: ChatState, owner: str, settings: Mapping[str, str]) -> Claim:
    """Request the model. Raises immediately if there is no such model, or if its load fails at once."""
    name = settings.get("model") or None
    lease = asyncio.create_task(state.pages.manager.acquire(name))
    try:
        await asyncio.wait({lease}, timeout=MODEL_WAIT_S)
    except asyncio.CancelledError:
        _release_claim(Claim("", lease))
        raise
    if lease.done():
        found = lease.result()
        try:
            found.model.require("generate")
        except RequestError:
            found.release()
            raise
        return Claim(found.model.name, lease, state.pages.cache_salt(owner))
    default = state.pages.manager.default
    return Claim(name or (default.name if default else ""), lease, state.pages.cache_salt(owner))


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
    claim.lease.cancel()
    claim.lease.add_done_callback(_release)


def _release(lease: asyncio.Task[Lease]) -> None:
    if not lease.cancelled() and lease.exception() is None:
        lease.result().release()


def reply_of(claim: Claim, message_id: str) -> Reply:
    ready = claim.lease.result().model if claim.lease.done() else None
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
            params, tools = sampling_params(served.sampling_defaults, settings), read_tools(settings.get("tools", ""))
            if tools and not calls_tools(served):
                raise _without_tools(served.name)
            template = CONTINUE if goes_on else {"add_generation_prompt": True}
            conversation = Conversation(messages, template, Tools(tools, tools))
            prompt_token_ids = await asyncio.to_thread(lambda: conversation.encode(conversation.prompt(served), served))
            params, new_reader = conversation.reading(served, params, prompt_token_ids)
            asked = GenerationRequest(
                reply.request_id,
                prompt_token_ids,
                params,
                options=RequestOptions(cache_salt=claim.cache_salt, source="chat"),
            )
            reply.start(served.generator, asked, new_reader and new_reader())
        except BaseException as error:
            lease.release()
            if not isinstance(error, LocalLLMError):
                raise
            reply.fail(error)
        else:
            reply.when_done(lease.release)

    reply.prepare(begin())


def _without_tools(name: str) -> UnsupportedOption:
    return UnsupportedOption(
        f"{name} cannot call tools.",
        "Its chat template does not support tools, or its tool call format is unknown.",
        "Empty the list of tools in the settings, or choose another model.",
    )
