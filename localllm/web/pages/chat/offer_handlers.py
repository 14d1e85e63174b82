"""The offered model on the chat page: its card, the actions on it, and its progress in every open tab.

The actions need the scope admin, since they download and load. The progress needs infer.
Does not know: which model is offered, and how it gets ready (serving/model_offer.py).
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from litestar import Request, get, post
from litestar.response import Redirect, Response, Stream

from localllm.errors import InvalidParameter
from localllm.serving.entry import ModelEntry
from localllm.web.access.caller import may, owner_of
from localllm.web.pages.chat import presenters
from localllm.web.pages.chat.handlers import model_cookie
from localllm.web.pages.chat.offer_presenters import announcement, card_for
from localllm.web.pages.chat.offer_views import Announcement
from localllm.web.pages.chat.state import chat_state
from localllm.web.pages.frame.forms import fields_of, is_scripted
from localllm.web.pages.frame.handlers import shows_loading
from localllm.web.pages.frame.live import changed, live_stream, sse
from localllm.web.pages.frame.navigation import own_path
from localllm.web.pages.frame.render import render
from localllm.web.pages.frame.security import same_origin
from localllm.web.pages.frame.state import html
from localllm.web.pages.frame.views import LiveUpdate

MAX_FORM_BYTES = 64 * 1024
VERBS = ("start", "stop", "discard")


@post("/chat/model", guards=[same_origin], status_code=200, request_max_body_size=MAX_FORM_BYTES)
async def change_offer(request: Request[Any, Any, Any]) -> Response[Any]:
    """Start, stop or discard the download of the offered model."""
    offers, form = chat_state(request).offers, await fields_of(request)
    name, verb = form.get("model", ""), form.get("verb", "")
    offer = await offers.describe(name)
    if verb not in VERBS:
        raise InvalidParameter(f"verb is {verb[:20]!r}.", f"It must be one of {', '.join(VERBS)}.", param="verb")
    if verb == "start":
        offers.start(name)
    elif verb == "stop":
        await offers.stop(name)
    else:
        await offers.discard(name)
    cookies = model_cookie({"model": name}) if verb == "start" else []
    if is_scripted(request):
        return html(card_for(request, offer, await offers.status(name)), cookies=cookies)
    return Redirect(own_path(urlsplit(request.headers.get("referer", "")).path), status_code=303, cookies=cookies)


@get("/live/chat")
async def live_chat(request: Request[Any, Any, Any]) -> Stream:
    """Stream the status pill, the card of the offered model, and what changes in the page once that model is ready."""
    name = request.query_params.get("offer", "")
    await chat_state(request).offers.describe(name)
    return live_stream(request, _events(request, name))


async def _events(request: Request[Any, Any, Any], name: str) -> AsyncIterator[bytes]:
    state, waits = chat_state(request), shows_loading(request)
    offer, last = await state.offers.describe(name), ""
    sent: dict[str, str] = {}
    view = f"offer {name} {may(request, 'admin')}"
    async for tick in state.pages.sampler.follow():
        if waits and state.pages.served is not None:
            yield sse("", "ready")
            return
        status = await tick.drawn(f"status of {name}", partial(state.offers.status, name))
        card = tick.cached(view, lambda status=status: render(card_for(request, offer, status)))  # type: ignore[misc]
        parts = state.pages.live_parts(tick, waits=waits) | {"offer": card}
        if status.state != last:
            if last:
                parts["chat-status"] = render(Announcement(announcement(offer, status.state)))
            if status.state == "ready" and status.entry is not None:
                parts |= await _switched(request, status.entry)
            last = status.state
        if news := changed(parts, sent):
            yield sse(render(LiveUpdate(news)))


async def _switched(request: Request[Any, Any, Any], entry: ModelEntry) -> dict[str, str]:
    """Return the parts of a page that depend on the model of the next message. Typed text in them stays."""
    state, settings = chat_state(request), {"model": entry.name}
    parts = {
        "model-choices": render(await state.picker.choices(settings)),
        "sampling": render(await presenters.drawer(state, owner_of(request), entry.card, {})),
    }
    if entry.card is not None:
        empty = presenters.empty_chat(entry.card)
        parts |= {"empty-chat": render(empty), "examples": render(empty.examples)}
    return parts


HANDLERS = (change_offer, live_chat)
