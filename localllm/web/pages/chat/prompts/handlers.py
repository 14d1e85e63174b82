"""The library of prompts: make, change, delete with undo, import, export; and use one in a chat.

Does not know: how prompts are stored, placeholders (saved_prompts.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import anyio.to_thread
from litestar import Request, get, post
from litestar.datastructures import UploadFile
from litestar.response import Redirect, Response

from localllm.config.settings import MAX_UPLOAD_BYTES
from localllm.errors import RequestError
from localllm.web.access.caller import owner_of
from localllm.web.api.exchange import require_few_values
from localllm.web.errors import MissingParameter
from localllm.web.pages.chat.composer.settings import NAMES, typed
from localllm.web.pages.chat.prompts import saved, views
from localllm.web.pages.chat.prompts.views import PromptLibrary, PromptQuestions
from localllm.web.pages.chat.state import chat_state
from localllm.web.pages.chat.store import Chats, SavedPrompt
from localllm.web.pages.chat.thread import views as v
from localllm.web.pages.chat.thread.handlers import MAX_BODY_BYTES, undo_of
from localllm.web.pages.frame.errors import notice
from localllm.web.pages.frame.forms import fields_of, is_scripted
from localllm.web.pages.frame.state import html
from localllm.web.pages.frame.views import ErrorNotice

NEW = SavedPrompt("", "", "", {})
ONE = "/prompts/{prompt_id:str}"


@get("/prompts")
async def library(request: Request[Any, Any, Any]) -> Response[str]:
    """Show all prompts."""
    return html(await _library_page(request))


@get("/prompts/new")
async def new_prompt(request: Request[Any, Any, Any]) -> Response[str]:
    """Show the empty form of a prompt."""
    return await _form(request, "/prompts", NEW, is_new=True)


@get(ONE)
async def prompt_form(request: Request[Any, Any, Any]) -> Response[str]:
    """Show the form of a prompt."""
    prompt = await _requested(request)
    return await _form(request, f"/prompts/{prompt.id}", prompt, is_new=False)


@post("/prompts", status_code=200, request_max_body_size=MAX_BODY_BYTES)
async def add_prompt(request: Request[Any, Any, Any]) -> Response[Any]:
    """Add a prompt. A wrong one is shown again with what is wrong."""
    form = await fields_of(request)
    try:
        new = _read(form, NEW)
        await chat_state(request).store.call(Chats.add_prompt, owner_of(request), new.name, new.text, new.settings)
    except RequestError as error:
        return await _form(request, "/prompts", _as_typed(form), is_new=True, error=error)
    return Redirect("/prompts", status_code=303)


@post(ONE, status_code=200, request_max_body_size=MAX_BODY_BYTES)
async def change_prompt(request: Request[Any, Any, Any]) -> Response[Any]:
    """Change a prompt. A wrong one is shown again with what is wrong."""
    prompt, form = await _requested(request), await fields_of(request)
    try:
        new = _read(form, prompt)
        change = (prompt.id, new.name, new.text, new.settings)
        await chat_state(request).store.call(Chats.change_prompt, owner_of(request), *change)
    except RequestError as error:
        return await _form(request, f"/prompts/{prompt.id}", _as_typed(form), is_new=False, error=error)
    return Redirect("/prompts", status_code=303)


@post(f"{ONE}/delete", status_code=303)
async def delete_prompt(request: Request[Any, Any, Any]) -> Redirect:
    """Delete a prompt, with undo for a while."""
    state = chat_state(request)
    deletion = await state.store.call(Chats.delete_prompt, owner_of(request), request.path_params["prompt_id"])
    state.replies.purge_later()
    return Redirect(f"/prompts?deleted={deletion}", status_code=303)


@get("/prompts/export")
async def export_prompts(request: Request[Any, Any, Any]) -> Response[bytes]:
    """Export all prompts as JSON."""
    body = saved.as_file(await chat_state(request).store.call(Chats.prompts, owner_of(request)))
    disposition = 'attachment; filename="prompts.json"'
    return Response(body, media_type="application/json", headers={"Content-Disposition": disposition})


@post("/prompts/import", status_code=303, request_max_body_size=MAX_UPLOAD_BYTES)
async def import_prompts(request: Request[Any, Any, Any]) -> Response[Any]:
    """Add the prompts of an exported file."""
    try:
        file = (await request.form()).get("file")
        if not isinstance(file, UploadFile):
            raise MissingParameter("No file was chosen.", hint="Choose a JSON file.", param="file")
        raw = await file.read()
        require_few_values(raw)
        found = await anyio.to_thread.run_sync(saved.read, raw)
        await chat_state(request).store.call(Chats.add_prompts, owner_of(request), found)
    except RequestError as error:
        return html(await _library_page(request, notice(error)), error.status)
    return Redirect("/prompts", status_code=303)


@get("/prompts/choose")
async def choose_prompt(request: Request[Any, Any, Any]) -> Response[str]:
    """Show the prompts that match what was typed in the composer."""
    found = await chat_state(request).store.call(Chats.prompts, owner_of(request))
    return html(views.choices(found, request.query_params.get("message", "")[:200]))


@get(f"{ONE}/use")
async def ask_for_values(request: Request[Any, Any, Any]) -> Response[Any]:
    """Ask for the values of a prompt's placeholders; show a prompt without any in a new chat."""
    prompt = await _requested(request)
    asked = saved.placeholders(prompt.text)
    query = request.query_params
    if not asked:
        return await _used(request, prompt, prompt.text, query)
    questions = PromptQuestions(
        f"/prompts/{prompt.id}/use", prompt.name, prompt.text, asked, query.get("conversation", "")[:100]
    )
    return html(questions if is_scripted(request) else await v.panel_page(request, prompt.name, questions))


@post(f"{ONE}/use", status_code=200, request_max_body_size=MAX_BODY_BYTES)
async def use_prompt(request: Request[Any, Any, Any]) -> Response[Any]:
    """Put a prompt's text into the composer, and its settings into the drawer."""
    prompt, form = await _requested(request), await fields_of(request)
    asked = saved.placeholders(prompt.text)
    values = {name: form.get(f"value-{number}", "").strip() for number, name in enumerate(asked)}
    missing = next((name for name, value in values.items() if not value), None)
    if missing is not None:
        raise MissingParameter(f"{missing} has no value.", hint="Type one, or close this form.", param=missing)
    return await _used(request, prompt, saved.filled(prompt.text, values), form)


async def _used(
    request: Request[Any, Any, Any], prompt: SavedPrompt, text: str, form: Mapping[str, str]
) -> Response[Any]:
    state, owner = chat_state(request), owner_of(request)
    if is_scripted(request):
        return html(await views.used(state, owner, prompt, text, form.get("model", "")))
    chat_id = form.get("conversation")
    chat = await state.store.call(Chats.get, owner, chat_id) if chat_id else None
    settings = views.with_model(prompt.settings, "") if prompt.settings else None
    view = await v.chat_page(request, chat, settings=settings)
    if view.composer is None:
        return html(view)
    return html(replace(view, composer=replace(view.composer, text=text)))


async def _requested(request: Request[Any, Any, Any]) -> SavedPrompt:
    """Return the prompt in the URL. Raises `PromptNotFound`, also for another owner's prompt."""
    return await chat_state(request).store.call(Chats.prompt, owner_of(request), request.path_params["prompt_id"])


async def _library_page(request: Request[Any, Any, Any], error: ErrorNotice | None = None) -> Any:
    found = await chat_state(request).store.call(Chats.prompts, owner_of(request))
    view = PromptLibrary(tuple(views.prompt_row(each) for each in found), error)
    return await v.panel_page(request, "Prompts", view, undo_of(request, "The prompt is deleted."))


async def _form(
    request: Request[Any, Any, Any], url: str, prompt: SavedPrompt, *, is_new: bool, error: RequestError | None = None
) -> Response[str]:
    state = chat_state(request)
    view = await views.prompt_form(state, url, prompt, is_new=is_new, error=notice(error) if error else None)
    return html(await v.panel_page(request, "Prompts", view), error.status if error else 200)


def _read(form: Mapping[str, str], before: SavedPrompt) -> SavedPrompt:
    return saved.checked(form.get("name", ""), form.get("text", ""), typed(form, before.settings))


def _as_typed(form: Mapping[str, str]) -> SavedPrompt:
    settings = {name: form[name] for name in NAMES if form.get(name)}
    return SavedPrompt("", form.get("name", ""), form.get("text", ""), settings)


HANDLERS = (
    library,
    new_prompt,
    prompt_form,
    add_prompt,
    change_prompt,
    delete_prompt,
    export_prompts,
    import_prompts,
    choose_prompt,
    ask_for_values,
    use_prompt,
)
