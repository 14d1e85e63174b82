"""Files of the composer: attach, remove, count the tokens that they need, and say which of them will be searched.

Does not know: how a file is read (attachments.py) or searched (long_files.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import PurePath
from typing import Any

from litestar import Request, get, post
from litestar.datastructures import UploadFile
from litestar.response import Response

from localllm.config.settings import MAX_UPLOAD_BYTES
from localllm.errors import MediaTooLarge, RequestError
from localllm.serving.answers.off_loop import off_loop
from localllm.serving.register import SPEECH_HINT
from localllm.units import format_seconds
from localllm.web.access.caller import owner_of
from localllm.web.api.documents import IMAGE_SUFFIXES, FileText, UnreadableFile, plain_name, read_file
from localllm.web.api.openai.audio import transcript_of_page
from localllm.web.pages.chat.composer import views as w
from localllm.web.pages.chat.composer.views import attachments_view
from localllm.web.pages.chat.files.attachments import Attachment, divided
from localllm.web.pages.chat.files.long_files import free_tokens
from localllm.web.pages.chat.files.passages import estimated_tokens
from localllm.web.pages.chat.files.pictures import (
    DETAILS,
    TYPES,
    cost_of,
    is_picture,
    pages_of,
    picture_of,
    sound_of,
)
from localllm.web.pages.chat.replies.claims import served_for
from localllm.web.pages.chat.replies.messages import with_files
from localllm.web.pages.chat.state import ChatState, chat_state
from localllm.web.pages.chat.store import Chats
from localllm.web.pages.chat.store.records import ChatNotFound
from localllm.web.pages.chat.store.tables import GONE_HINT
from localllm.web.pages.frame.errors import notice
from localllm.web.pages.frame.state import html

MAX_COUNTED_CHARS = 200_000
"""The tokens of a longer file are estimated from its beginning: to count them takes a hundred times its memory."""


@post("/chats/attach", status_code=200, request_max_body_size=MAX_UPLOAD_BYTES)
async def attach(request: Request[Any, Any, Any]) -> Response[Any]:
    """Return the files of the next message, with the new ones, without the removed one, and with a sound read again by
    the speech model that was chosen for it. An error for an unreadable
    file is shown beside the readable ones.
    """
    state, owner, form = chat_state(request), owner_of(request), await request.form()
    removed, error, files = request.query_params.get("detach", ""), None, list[Attachment]()
    try:
        files = await _on_tray(state, owner, form, removed)
        await _add_uploads(request, form, files)
        await _transcribe_again(request, form, files, request.query_params.get("again", ""))
    except RequestError as problem:
        error = notice(problem)
    files = divided(files, await free_tokens(state, owner, form))
    card = w.card_of(state, _model(form))
    return html(attachments_view(files, card.plan.max_model_len if card is not None else 0, error))


async def waiting_files(state: ChatState, owner: str, form: Any) -> list[Attachment]:
    """Return the uploaded files that a form names, as they would be sent now. Raises `RequestError`."""
    files = state.attachments.get(owner, form.getall("attachment", []))
    return divided(files, await free_tokens(state, owner, form)) if files else []


async def attached_files(request: Request[Any, Any, Any]) -> list[Attachment]:
    """Return the files of the message that is being sent. Raises `RequestError`."""
    state, owner, form = chat_state(request), owner_of(request), await request.form()
    files = await _on_tray(state, owner, form)
    await _add_uploads(request, form, files)
    return divided(files, await free_tokens(state, owner, form)) if files else []


async def _on_tray(state: ChatState, owner: str, form: Any, removed: str = "") -> list[Attachment]:
    """Return the uploaded files that a form names, but one; pictures are read as finely as it says. Raises
    `RequestError`."""
    files = state.attachments.get(owner, [each for each in form.getall("attachment", []) if each != removed])
    for place, file in enumerate(files):
        detail = form.get(f"detail-{file.id}", file.detail)
        if detail != file.detail and detail in DETAILS:
            pictures = [{**each, "detail": detail} for each in file.pictures]
            changed = await _with_cost(state, file.name, pictures, _model(form))
            files[place] = state.attachments.put(owner, replace(changed, id=file.id))
    return files


async def _add_uploads(request: Request[Any, Any, Any], form: Any, files: list[Attachment]) -> None:
    """Read the chosen files and add them to `files`."""
    from localllm.media.sound import kind_of  # imports NumPy

    state, owner = chat_state(request), owner_of(request)
    for upload in uploads(form):
        state.attachments.require_count(len(files) + 1)
        body, served = await upload.read(), served_for(state, _model(form))
        sees = served is None or served.sight is not None
        if is_picture(body):
            found = [await _picture(state, plain_name(upload.filename), body, _model(form))]
        elif kind_of(body[:16]) and PurePath(upload.filename).suffix.lower() not in IMAGE_SUFFIXES:  # HEIC is like M4A
            hears = served is not None and served.hearing is not None
            heard = await _heard(state, plain_name(upload.filename), body, _model(form)) if hears else None
            found = [heard or await _sound(request, upload, _model(form))]
        else:
            file = await read_file(upload.filename, body, scans=sees)
            found = await _read(state, file, body, _model(form), sees=sees)
        files += [state.attachments.put(owner, each) for each in found]


async def _read(
    state: ChatState, file: FileText, body: bytes, settings: Mapping[str, str], *, sees: bool
) -> list[Attachment]:
    """Return a file as text, as pictures of its pages without text, or as both. Raises `RequestError`."""
    found, note = list[Attachment](), ""
    if file.textless:
        try:
            pages = await asyncio.to_thread(pages_of, file.name, body, file.textless) if sees else []
            found = [await _with_cost(state, file.name, pages, settings)] if pages else []
        except RequestError:
            if not file.text:
                raise
        count = len(file.textless)
        note = "" if found else f"{count} {'page' if count == 1 else 'pages'} without text not read"
    if file.text or not file.paged:
        num_tokens, is_estimate = await _num_tokens(state, file, settings)
        found.insert(0, Attachment(file, len(file.text.encode()), num_tokens, is_estimate, note=note))
    return found


async def _heard(state: ChatState, name: str, body: bytes, settings: Mapping[str, str]) -> Attachment | None:
    """Read a sound for a model that hears; None: it is longer than the model reads at once. Raises `RequestError`."""
    try:
        return await _with_cost(state, name, [await asyncio.to_thread(sound_of, name, body)], settings)
    except MediaTooLarge:
        return None


async def _transcribe_again(
    request: Request[Any, Any, Any], form: Any, files: list[Attachment], attachment_id: str
) -> None:
    """Replace the file with that id in `files` by what the speech model that the form names hears in it."""
    state, model = chat_state(request), form.get(f"speech-{attachment_id}", "")
    register = state.pages.manager.register
    for place, file in enumerate(files):
        if file.id != attachment_id or not file.sound or not model:
            continue
        if model not in await register.transcribers():
            what = f"{model[:80]!r} cannot transcribe {file.name} now."
            raise UnreadableFile(what, "It is not loaded or installed any more.", "Choose another speech model.")
        if register.find(model) is None:
            await register.add_speech_model(model)
        upload = UploadFile("application/octet-stream", file.name, file.sound)
        found = await _sound(request, upload, _model(form), model)
        files[place] = state.attachments.put(owner_of(request), replace(found, id=file.id))


async def _sound(
    request: Request[Any, Any, Any], upload: UploadFile, settings: Mapping[str, str], asked: str | None = None
) -> Attachment:
    """Return what is said in a sound file, with times. asked: the model; None: the speech model. Raises
    `UnreadableFile` if nothing transcribes or is said.
    """
    state, name = chat_state(request), plain_name(upload.filename)
    if state.pages.manager.register.speech is None:
        what = f"{name} is sound, and no model here transcribes speech."
        raise UnreadableFile(what, "Sound is read as its text.", SPEECH_HINT)
    model, found = await transcript_of_page(request, upload, name, asked)
    if not found.segments:
        raise UnreadableFile(f"{name} has no text.", f"{'; '.join(found.warnings)}.", "Attach another file.")
    file = FileText(name, found.timed_text)
    num_tokens, is_estimate = await _num_tokens(state, file, settings)
    note = "; ".join((f"{format_seconds(found.seconds)} of speech by {model}", *found.warnings))
    others = [each for each in await state.pages.manager.register.transcribers() if each != model]
    await upload.seek(0)
    sound = await upload.read() if others else b""
    return Attachment(
        file, len(file.text.encode()), num_tokens, is_estimate, note=note, sound=sound, speech=tuple(others)
    )


@post("/chats/dictate", status_code=200, request_max_body_size=MAX_UPLOAD_BYTES)
async def dictate(request: Request[Any, Any, Any]) -> Response[str]:
    """Return what is said in a recording of the composer's microphone."""
    sound = (await request.form()).get("sound")
    if not isinstance(sound, UploadFile):
        raise UnreadableFile("No sound was sent.", "The field 'sound' is missing.", "Use the button of the chat page.")
    _, found = await transcript_of_page(request, sound, "The recording")
    return Response(found.text, media_type="text/plain", headers={"Cache-Control": "no-store"})


async def _picture(state: ChatState, name: str, body: bytes, settings: Mapping[str, str]) -> Attachment:
    """Read a picture. Raises `UnreadableFile` if the model that the message goes to is loaded and does not see."""
    served = served_for(state, settings)
    if served is not None and served.sight is None:
        seeing = ", ".join(model.name for model in state.pages.manager.ready if model.sight is not None)
        raise UnreadableFile(
            f"{name} is a picture, and {served.name} does not see pictures.",
            "It reads text alone.",
            f"Models here that do: {seeing}." if seeing else "Choose a model that sees, or describe the picture.",
        )
    return await _with_cost(state, name, [await asyncio.to_thread(picture_of, name, body)], settings)


async def _with_cost(
    state: ChatState, name: str, pictures: Sequence[dict[str, Any]], settings: Mapping[str, str]
) -> Attachment:
    served = served_for(state, settings)
    cost = None if served is None else await cost_of(served, pictures)
    return Attachment.of_pictures(name, pictures, cost)


@get("/chats/pictures/{digest:str}")
async def stored_picture(request: Request[Any, Any, Any]) -> Response[bytes]:
    """Return a picture or a sound of a message, as it was sent."""
    found = await chat_state(request).store.call(Chats.picture, owner_of(request), request.path_params["digest"])
    if found is None:
        raise ChatNotFound("This picture is not on the server.", "Its message was deleted.", GONE_HINT)
    headers = {"Content-Disposition": "inline", "Cache-Control": "private, max-age=86400, immutable"}
    return Response(found[1], media_type=TYPES[found[0]], headers=headers)


def uploads(form: Any) -> list[UploadFile]:
    """Return the chosen files; an empty field is sent as a file without a name."""
    return [each for each in form.getall("file", []) if isinstance(each, UploadFile) and each.filename]


def _model(form: Any) -> Mapping[str, str]:
    return {"model": form["model"]} if form.get("model") else {}


async def _num_tokens(state: ChatState, file: FileText, settings: Mapping[str, str]) -> tuple[int, bool]:
    """Return the token count, and whether it is an estimate: of a long file, or if the model that the message goes to
    is not loaded.
    """
    entry = state.pages.manager.register.find(settings.get("model"))
    if entry is None or entry.state != "ready" or entry.served is None:
        return estimated_tokens(file.text), True
    served = entry.served
    text = with_files("", [(file.name, file.text[:MAX_COUNTED_CHARS])])
    counted = await off_loop(len(text), lambda: len(served.tokenizer.encode(text, add_special_tokens=False)))
    if len(file.text) <= MAX_COUNTED_CHARS:
        return counted, False
    return counted * len(file.text) // MAX_COUNTED_CHARS, True


HANDLERS = (attach, dictate, stored_picture)
