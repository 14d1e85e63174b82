"""Actions of the composer beside sending: count, cut a file, sum up or bring back messages, pick a model, reset.

Does not know: how tokens are counted (prompts.py), how a summary is written (summaries.py), how a model is loaded.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any
from urllib.parse import urlencode

from litestar import Request, get, post
from litestar.response import Redirect, Response, Stream

from localllm.config.settings import MAX_UPLOAD_BYTES
from localllm.errors import LocalLLMError
from localllm.web.access.caller import owner_of
from localllm.web.api.documents import FileText
from localllm.web.pages.chat.composer import views as w
from localllm.web.pages.chat.composer.settings import NAMES, typed
from localllm.web.pages.chat.composer.views import ComposerAction, ContextMeter, LoadProgress, ModelPicked
from localllm.web.pages.chat.files.attachments import Attachment
from localllm.web.pages.chat.files.handlers import attached_files, waiting_files
from localllm.web.pages.chat.replies import summaries, turns
from localllm.web.pages.chat.replies.claims import claimed, entry_for, served_for
from localllm.web.pages.chat.replies.prompt import ChatFull
from localllm.web.pages.chat.state import ChatState, chat_state
from localllm.web.pages.chat.store import Chat, Chats
from localllm.web.pages.chat.thread import views as v
from localllm.web.pages.chat.thread.handlers import (
    MAX_BODY_BYTES,
    model_cookie,
    page_with_error,
    requested_chat,
    until_written,
)
from localllm.web.pages.frame.errors import notice
from localllm.web.pages.frame.forms import fields_of, is_scripted
from localllm.web.pages.frame.live import changed, live_stream, sse
from localllm.web.pages.frame.render import render
from localllm.web.pages.frame.state import html
from localllm.web.pages.frame.views import LiveUpdate

LOOK_S = 0.25
"""How often the progress of a load is looked at."""

CUTS = 5
"""Most attempts to cut a file so that its message fits."""


@post("/chats/count", status_code=200, request_max_body_size=MAX_BODY_BYTES)
async def count_message(request: Request[Any, Any, Any]) -> Response[Any]:
    """Say whether the message would fit, while it is typed. Other errors wait until it is sent."""
    state, owner, form = chat_state(request), owner_of(request), await fields_of(request)
    chat, files, full = None, list[Attachment](), None
    try:
        if form.get("conversation"):
            chat = await state.store.call(Chats.get, owner, form["conversation"])
        files = await waiting_files(state, owner, await request.form())
        await turns.require_fit(state, owner, form, files)
    except ChatFull as error:
        full = error
    except LocalLLMError:
        pass
    action = _load_action(state, form.get("model", ""), chat) or _action(state, chat)
    return html(w.fit_update(full, chat, files, action))


@post("/chats/attach/first", status_code=200, request_max_body_size=MAX_UPLOAD_BYTES)
async def attach_beginning(request: Request[Any, Any, Any]) -> Response[Any]:
    """Replace the longest attached file by as much of its beginning as fits."""
    state, owner, form = chat_state(request), owner_of(request), await fields_of(request)
    files = await attached_files(request)
    settings = {"model": form["model"]} if form.get("model") else {}
    for _ in range(CUTS):
        try:
            await turns.require_fit(state, owner, form, files)
        except ChatFull as full:
            cut = await _beginning(state, owner, settings, files, full)
            if cut is None:
                break
            files = cut
        else:
            break
    card = w.card_of(state, settings)
    if is_scripted(request):
        return html(w.attachments_view(files, card.plan.max_model_len if card is not None else 0))
    return html(await page_with_error(request, form, None, files))


async def _beginning(
    state: ChatState, owner: str, settings: dict[str, str], files: list[Attachment], full: ChatFull
) -> list[Attachment] | None:
    """Return the files with the longest one cut; None: nothing useful of it fits, or no model can count."""
    served, num_tokens = served_for(state, settings), w.first_tokens(full, files)
    if served is None or not num_tokens:
        return None
    longest = max((file for file in files if not file.searched), key=lambda file: file.num_tokens)
    if longest.pictures:
        return None
    text = longest.file.whole
    around = longest.num_tokens - len(await asyncio.to_thread(served.tokenizer.encode, text, add_special_tokens=False))

    def cut() -> str:
        ids = served.tokenizer.encode(text, add_special_tokens=False)
        return served.tokenizer.decode(ids[: max(1, num_tokens - max(0, around))]).rstrip("\ufffd")

    beginning = FileText(longest.name, await asyncio.to_thread(cut))
    shorter = state.attachments.put(owner, Attachment(beginning, len(beginning.text.encode()), num_tokens))
    state.attachments.drop([longest])
    return [shorter if file is longest else file for file in files]


@post("/c/{conversation_id:str}/bring-back", status_code=200)
async def bring_back(request: Request[Any, Any, Any]) -> Response[Any]:
    """Let the model read again what was left out."""
    state, owner, chat = chat_state(request), owner_of(request), await requested_chat(request)
    with state.replies.lock(chat.id):
        await state.store.call(Chats.bring_back, owner, chat.id)
    if not is_scripted(request):
        return Redirect(f"/c/{chat.id}", status_code=303)
    view = await v.update(request, chat, "The model reads all messages again")
    try:
        await turns.require_fit(state, owner, {"conversation": chat.id}, ())
    except ChatFull as full:  # the last reply was counted without them
        view = replace(view, head=replace(view.head, meter=ContextMeter(full.used_tokens, full.context_tokens)))
    return html(view)


@post(
    "/c/{conversation_id:str}/summary",
    status_code=200,
    request_max_body_size=MAX_UPLOAD_BYTES,
)
async def go_on_with_summary(request: Request[Any, Any, Any]) -> Response[Any]:
    """Start a new chat with a summary of this one. What was typed waits in its composer."""
    state, owner, chat = chat_state(request), owner_of(request), await requested_chat(request)
    form, files = await fields_of(request), await attached_files(request)
    settings = typed(form, chat.settings)
    text = form.get("message", "").replace("\r\n", "\n")
    draft = {"draft": text, "draft_files": [file.id for file in files]}
    async with claimed(state, owner, settings) as claim:
        new, writing = await summaries.begin_with_summary(state, owner, chat, settings, claim, draft)
    if is_scripted(request):
        return Response(None, status_code=200, headers={"HX-Redirect": f"/c/{new.id}"})
    await until_written(request, writing)
    return Redirect(f"/c/{new.id}", status_code=303)


@post("/chats/behaviour/reset", status_code=200, request_max_body_size=MAX_UPLOAD_BYTES)
async def reset_behaviour(request: Request[Any, Any, Any]) -> Response[Any]:
    """Empty the drawer. The chat keeps its settings until the next message."""
    state, owner, form = chat_state(request), owner_of(request), await fields_of(request)
    card = w.card_of(state, {"model": form["model"]} if form.get("model") else {})
    drawer = await w.drawer(state, owner, card, {}, is_open=True)
    if is_scripted(request):
        return html(drawer)
    page = await page_with_error(request, form, None, await attached_files(request))
    composer = replace(page.composer, sampling=drawer) if page.composer is not None else None
    return html(replace(page, composer=composer))


# The model ----------------------------------------------------------------------------------------------------------


@post("/chats/model", status_code=200, request_max_body_size=MAX_UPLOAD_BYTES)
async def pick_model(request: Request[Any, Any, Any]) -> Response[Any]:
    """Choose the model of the next message, and load it if needed. The chat keeps the choice."""
    state, owner, form = chat_state(request), owner_of(request), await fields_of(request)
    name, chat = form.get("model", ""), None
    if form.get("conversation"):
        chat = await state.store.call(Chats.get, owner, form["conversation"])
        settings = typed({"model": name}, chat.settings)
        await turns.configure(state, owner, chat, settings)
    task = state.picker.load(name)
    state.picker.note(chat.id if chat is not None else form.get("begins", ""), name)
    await asyncio.wait({task}, timeout=LOOK_S)
    if task.done():
        return html(await _picked(state, owner, chat, dict(form), _error_of(task)), cookies=model_cookie(form))
    action = _load_action(state, name, chat) or _action(state, chat)
    return html(ModelPicked(action), cookies=model_cookie(form))


def _load_action(state: ChatState, name: str, chat: Chat | None) -> ComposerAction | None:
    """Return the progress of a load that a pick of this model started; None: no such load runs."""
    task = state.picker.running(name)
    if task is None or task.done():
        return None
    query = urlencode({"model": name, "chat": chat.id if chat is not None else ""})
    return ComposerAction(load=_progress(state, name), load_url=f"/live/chat/model?{query}")


def _action(state: ChatState, chat: Chat | None) -> ComposerAction:
    return w.composer_action(state.replies, chat.id) if chat is not None else ComposerAction()


@get("/live/chat/model")
async def follow_load(request: Request[Any, Any, Any]) -> Stream:
    """Stream the progress of a load, and at its end the composer's parts that depend on the model."""
    return live_stream(request, _load_events(request))


async def _load_events(request: Request[Any, Any, Any]) -> AsyncIterator[bytes]:
    state, owner, query = chat_state(request), owner_of(request), request.query_params
    name, chat = query.get("model", ""), None
    if query.get("chat"):
        chat = await state.store.call(Chats.get, owner, query["chat"])
    task, sent = state.picker.running(name), dict[str, str]()
    while task is not None and not task.done():
        if news := changed({"load-progress": render(_progress(state, name))}, sent):
            yield sse(render(LiveUpdate(news)))
        await asyncio.wait({task}, timeout=LOOK_S)
    error = _error_of(task) if task is not None else None
    yield sse(render(await _picked(state, owner, chat, {"model": name}, error)))


def _progress(state: ChatState, name: str) -> LoadProgress:
    entry = entry_for(state, {"model": name})
    phase = next(reversed(entry.phases.values()), None) if entry is not None else None
    shown = entry.name if entry is not None else name
    return LoadProgress(shown, phase.fraction, f"{phase.name} {phase.detail}".strip()) if phase else LoadProgress(shown)


def _error_of(task: asyncio.Task[None]) -> LocalLLMError | None:
    """Return the error of a finished load. Raises what is not one of our errors."""
    error = task.exception() if not task.cancelled() else None
    if error is None or isinstance(error, LocalLLMError):
        return error
    raise error


async def _picked(
    state: ChatState, owner: str, chat: Chat | None, form: dict[str, str], error: LocalLLMError | None
) -> ModelPicked:
    settings = {**(chat.settings if chat is not None else {}), **{name: form[name] for name in NAMES if name in form}}
    return ModelPicked(
        _action(state, chat),
        sampling=await w.drawer(state, owner, w.card_of(state, settings), settings),
        thinking=w.thinking_choice(state, settings),
        models=await state.picker.choices(settings),
        error=notice(error) if error is not None else None,
    )


HANDLERS = (
    count_message,
    attach_beginning,
    bring_back,
    go_on_with_summary,
    reset_behaviour,
    pick_model,
    follow_load,
)
