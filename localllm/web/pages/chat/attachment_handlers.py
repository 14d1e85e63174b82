"""Files of the composer: attach, remove, and count the tokens that they need in the next message.

Does not know: how a file is read (attachments.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from litestar import Request, post
from litestar.datastructures import UploadFile
from litestar.response import Response

from localllm.errors import RequestError
from localllm.web.access.caller import owner_of
from localllm.web.pages.chat import presenters
from localllm.web.pages.chat.attachments import MAX_PDF_BYTES, Attachment, read_file
from localllm.web.pages.chat.composer_presenters import attachments_view
from localllm.web.pages.chat.state import ChatState, chat_state
from localllm.web.pages.chat.template_messages import with_files
from localllm.web.pages.frame.errors import notice
from localllm.web.pages.frame.security import same_origin
from localllm.web.pages.frame.state import html

MAX_UPLOAD_BYTES = MAX_PDF_BYTES + 2_000_000


@post("/chats/attach", guards=[same_origin], status_code=200, request_max_body_size=MAX_UPLOAD_BYTES)
async def attach(request: Request[Any, Any, Any]) -> Response[Any]:
    """Return the files of the next message, with the new ones and without the removed one. An error for an unreadable
    file is shown beside the readable ones.
    """
    state, owner, form = chat_state(request), owner_of(request), await request.form()
    removed, model = request.query_params.get("detach", ""), form.get("model", "")
    error, files = None, list[Attachment]()
    try:
        files = state.attachments.get(owner, [each for each in form.getall("attachment", []) if each != removed])
        for upload in _uploads(form):
            state.attachments.require_count(len(files) + 1)
            files.append(await _store_file(state, owner, upload, model))
    except RequestError as problem:
        error = notice(problem)
    card = presenters.card_of(state, {"model": model} if model else {})
    return html(attachments_view(files, card.plan.max_model_len if card is not None else 0, error))


async def attached_files(request: Request[Any, Any, Any]) -> list[Attachment]:
    """Return the files of the message that is being sent. Raises `RequestError`."""
    state, owner, form = chat_state(request), owner_of(request), await request.form()
    files = state.attachments.get(owner, form.getall("attachment", []))
    for upload in _uploads(form):
        state.attachments.require_count(len(files) + 1)
        files.append(await _store_file(state, owner, upload, form.get("model", "")))
    return files


def _uploads(form: Any) -> list[UploadFile]:
    """Return the chosen files; an empty field is sent as a file without a name."""
    return [each for each in form.getall("file", []) if isinstance(each, UploadFile) and each.filename]


async def _store_file(state: ChatState, owner: str, upload: UploadFile, model: str) -> Attachment:
    name, text = await read_file(upload.filename, await upload.read())
    return state.attachments.put(
        owner, name, text, await _num_tokens(state, name, text, {"model": model} if model else {})
    )


async def _num_tokens(state: ChatState, name: str, text: str, settings: Mapping[str, str]) -> int | None:
    """Return the token count; None if the model that the message goes to is not loaded."""
    card, served = presenters.card_of(state, settings), state.pages.served
    if card is None or served is None or served.name != card.name:
        return None
    return len(
        await asyncio.to_thread(served.tokenizer.encode, with_files("", [(name, text)]), add_special_tokens=False)
    )


HANDLERS = (attach,)
