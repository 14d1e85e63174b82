"""The offered model on the chat page: its card, the actions on it, and its progress in every open tab.

The actions need the scope admin, since they download and load. The progress needs infer.
Does not know: which model is offered, and how it gets ready (serving/model_offer.py).
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import suppress
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from litestar import Request, get, post
from litestar.response import Redirect, Response, Stream

from localllm.errors import InvalidParameter
from localllm.serving.entry import ModelEntry
from localllm.serving.model_offer import Offer
from localllm.web.access.caller import may, owner_of
from localllm.web.pages.chat.composer import views as w
from localllm.web.pages.chat.offer.views import Announcement, OfferRoom, announcement, card_for
from localllm.web.pages.chat.state import chat_state
from localllm.web.pages.chat.store import Chats
from localllm.web.pages.chat.store.records import ChatNotFound, ChatsUnavailable
from localllm.web.pages.chat.thread import views as v
from localllm.web.pages.chat.thread.handlers import model_cookie
from localllm.web.pages.frame.forms import fields_of, is_scripted
from localllm.web.pages.frame.handlers import shows_loading
from localllm.web.pages.frame.live import changed, live_stream, sse
from localllm.web.pages.frame.navigation import own_path
from localllm.web.pages.frame.render import render
from localllm.web.pages.frame.sampler import Tick
from localllm.web.pages.frame.state import html
from localllm.web.pages.frame.views import LiveUpdate

MAX_FORM_BYTES = 64 * 1024
VERBS = ("start", "stop", "discard")


@post("/chat/model", status_code=200, request_max_body_size=MAX_FORM_BYTES)
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
    """Stream what changes in a chat page: the status pill, the card of the offered model, what depends on that model
    once it is ready, the event `chat-changed` with the id of the last message, also if another tab has sent it, and
    `chats-writing` with the ids of the chats in which a reply is being written.
    `offer`: the model on the card; empty: the card is still to be found.
    """
    if name := request.query_params.get("offer"):
        await chat_state(request).offers.describe(name)
    return live_stream(request, _events(request, name))


async def _events(request: Request[Any, Any, Any], name: str | None) -> AsyncIterator[bytes]:
    """Yield the changes of a page. name: of the model on its card; None: it has no card."""
    state, waits = chat_state(request), shows_loading(request)
    sent, card, chat = dict[str, str](), _OfferParts(request, name), _ChatWatch(request)
    owner, writing = owner_of(request), ""
    async for tick in state.pages.sampler.follow():
        if waits and state.pages.served is not None:
            yield sse("", "ready")
            return
        parts = state.pages.live_parts(tick, waits=waits) | await chat.model_parts(tick) | await card.parts(tick)
        if news := changed(parts, sent):
            yield sse(render(LiveUpdate(news)))
        if leaf := await chat.new_leaf():
            yield sse(leaf, "chat-changed")
        if (now := " ".join(state.replies.writing_chats(owner))) != writing:
            writing = now
            yield sse(writing, "chats-writing")


class _ChatWatch:
    """One page's view of its chat: the model that answers, and the last message, from whichever tab it came."""

    def __init__(self, request: Request[Any, Any, Any]) -> None:
        self._state, self._owner = chat_state(request), owner_of(request)
        self._chat_id = request.query_params.get("chat", "")
        self._model = request.query_params.get("model", "")
        self._num_changes, self._leaf = -1, ""
        self._states: object = None
        self._choices = ""

    async def model_parts(self, tick: Tick) -> dict[str, str]:
        """Return the pill and the picker: they name the model that the chat's next message goes to."""
        state = self._state
        model = state.picker.picked(self._chat_id) or self._model
        states = (model, *((entry.name, entry.state) for entry in state.pages.manager.entries))
        states += tuple((each.name, each.is_up) for each in state.pages.upstreams.all)
        if states != self._states:
            self._states, self._choices = states, render(await state.picker.choices({"model": model}))
        pill = tick.cached(f"pill of {model}", lambda: render(state.pages.chat_pill(model)))
        return {"status-pill": pill} | ({"model-choices": self._choices} if self._chat_id else {})

    async def new_leaf(self) -> str:
        """Return the id of the chat's last message if it is another one than before, else an empty string. The store is
        asked only after a change of any chat.
        """
        store, before = self._state.store, self._leaf
        is_quiet = store.num_changes == self._num_changes or self._state.replies.is_changing(self._chat_id)
        if not self._chat_id or is_quiet:
            return ""
        self._num_changes = store.num_changes
        with suppress(ChatNotFound, ChatsUnavailable):
            chat = await store.call(Chats.get, self._owner, self._chat_id)
            self._leaf, self._model = chat.leaf or "", chat.settings.get("model", "")
        return self._leaf if self._leaf != before else ""


class _OfferParts:
    """The parts of one page that show its offered model."""

    def __init__(self, request: Request[Any, Any, Any], name: str | None) -> None:
        self._request, self._name = request, name
        self._offer: Offer | None = None
        self._last: str = ""

    async def parts(self, tick: Tick) -> dict[str, str]:
        """Return the card as it is now; in the moment when its model gets ready also what depends on the model. Pages
        that show the same card draw it once a tick."""
        offers = chat_state(self._request).offers
        if self._name is None:
            return {}
        if self._offer is None:
            self._offer = await (offers.describe(self._name) if self._name else offers.find())
        if (offer := self._offer) is None:
            return {"offer": render(OfferRoom(is_empty=True))}
        name = offer.pick.name
        status = await tick.drawn(f"status of {name}", partial(offers.status, name))
        view = f"offer {name} {may(self._request, 'admin')}"
        parts = {"offer": tick.cached(view, lambda: render(card_for(self._request, offer, status)))}
        if status.state != self._last:
            if self._last:
                parts["chat-status"] = render(Announcement(announcement(offer, status.state)))
            if status.state == "ready" and status.entry is not None:
                parts |= await _switched(self._request, status.entry)
            self._last = status.state
        return parts


async def _switched(request: Request[Any, Any, Any], entry: ModelEntry) -> dict[str, str]:
    """Return the parts of a page that depend on the model of the next message. Typed text in them stays."""
    state, settings = chat_state(request), {"model": entry.name}
    state.picker.note(request.query_params.get("chat", ""), entry.name)
    parts = {
        "model-choices": render(await state.picker.choices(settings)),
        "sampling": render(await w.drawer(state, owner_of(request), entry.card, {})),
    }
    if entry.card is not None:
        empty = v.empty_chat(entry.card)
        parts |= {"empty-chat": render(empty), "examples": render(empty.examples)}
    return parts


HANDLERS = (change_offer, live_chat)
