"""Projects: create, change, delete with undo, and their files.

Does not know: how projects are stored, what the model reads of them (projects.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from litestar import Request, get, post
from litestar.response import Redirect, Response

from localllm.config.settings import MAX_UPLOAD_BYTES
from localllm.errors import InvalidParameter, RequestError
from localllm.units import format_bytes
from localllm.web.access.caller import may, owner_of, require_owner
from localllm.web.api.documents import FileTooLarge, read_file
from localllm.web.errors import MissingParameter
from localllm.web.pages.chat.composer.settings import typed
from localllm.web.pages.chat.files.attachments import MAX_FILES, MAX_WHOLE_BYTES
from localllm.web.pages.chat.files.handlers import uploads
from localllm.web.pages.chat.projects.folder import checked_folder
from localllm.web.pages.chat.projects.views import FolderPart, ProjectList, ProjectRow, folder_part, project_page
from localllm.web.pages.chat.prompts.saved import checked_name
from localllm.web.pages.chat.state import chat_state
from localllm.web.pages.chat.store import Chats, Project
from localllm.web.pages.chat.store.records import ProjectFile
from localllm.web.pages.chat.thread import views as v
from localllm.web.pages.chat.thread.handlers import MAX_BODY_BYTES, undo_of
from localllm.web.pages.frame.errors import notice
from localllm.web.pages.frame.forms import fields_of
from localllm.web.pages.frame.state import html

ONE = "/projects/{project_id:str}"


@get("/projects")
async def projects(request: Request[Any, Any, Any]) -> Response[str]:
    """Show all projects."""
    return await _list_page(request)


@post("/projects", status_code=200)
async def add_project(request: Request[Any, Any, Any]) -> Response[Any]:
    """Create a project, and show it."""
    name = (await fields_of(request)).get("name", "")
    try:
        checked = checked_name(name, "project")
        project = await chat_state(request).store.call(Chats.add_project, owner_of(request), checked)
    except RequestError as error:
        return await _list_page(request, name, error)
    return Redirect(f"/projects/{project.id}", status_code=303)


@get(ONE)
async def show_project(request: Request[Any, Any, Any]) -> Response[str]:
    """Show a project: its chats, its files, its settings."""
    return await _page(request, await _requested(request))


@post(ONE, status_code=200, request_max_body_size=MAX_BODY_BYTES)
async def change_project(request: Request[Any, Any, Any]) -> Response[Any]:
    """Change a project's name and settings. A wrong form is shown again with what is wrong."""
    project, form = await _requested(request), await fields_of(request)
    try:
        change = (project.id, checked_name(form.get("name", ""), "project"), typed(form, project.settings))
        await chat_state(request).store.call(Chats.change_project, owner_of(request), *change)
    except RequestError as error:
        return await _page(request, project, form, error)
    return Redirect(f"/projects/{project.id}", status_code=303)


@post(f"{ONE}/files", status_code=200, request_max_body_size=MAX_UPLOAD_BYTES)
async def add_files(request: Request[Any, Any, Any]) -> Response[Any]:
    """Add files to a project. Those before an unreadable one are kept."""
    state, owner, project = chat_state(request), owner_of(request), await _requested(request)
    try:
        chosen = uploads(await request.form())
        if not chosen:
            raise MissingParameter("No file was chosen.", hint="Choose text, code or a PDF.", param="file")
        for upload in chosen:
            file = await read_file(upload.filename, await upload.read())
            name, text = file.name, file.whole
            require_room(await state.store.call(Chats.project_files, project.id), name, text)
            await state.store.call(Chats.add_file, owner, project.id, name, text)
    except RequestError as error:
        return await _page(request, project, error=error)
    return Redirect(f"/projects/{project.id}#files-title", status_code=303)


@post(f"{ONE}/files/remove", status_code=303)
async def remove_file(request: Request[Any, Any, Any]) -> Redirect:
    """Remove a file from a project."""
    project, file_id = await _requested(request), (await fields_of(request)).get("file", "")
    await chat_state(request).store.call(Chats.remove_file, owner_of(request), project.id, file_id)
    return Redirect(f"/projects/{project.id}#files-title", status_code=303)


@get(f"{ONE}/folder")
async def show_folder(request: Request[Any, Any, Any]) -> Response[str]:
    """Show how far the folder of a project is read."""
    project, may_change = await _requested(request), may(request, "admin")
    part = await folder_part(chat_state(request), project.id, may_change=may_change)
    return html(part or FolderPart(f"/projects/{project.id}", may_change=False))


@post(f"{ONE}/folder", status_code=200)
async def choose_folder(request: Request[Any, Any, Any]) -> Response[Any]:
    """Have the chats of a project search a folder of this machine, or none."""
    state, project, typed_path = chat_state(request), await _requested(request), await fields_of(request)
    require_owner(request)  # it lets the caller read files of this machine
    try:
        path = checked_folder(typed_path["folder"]) if typed_path.get("folder") else ""
    except RequestError as error:
        return await _page(request, project, error=error)
    if (before := await state.store.call(Chats.folder, project.id)) is not None:
        await state.folders.stop(before)
    await state.store.call(Chats.set_folder, owner_of(request), project.id, path)
    return Redirect(f"/projects/{project.id}#folder-title", status_code=303)


@post(f"{ONE}/delete", status_code=303)
async def delete_project(request: Request[Any, Any, Any]) -> Redirect:
    """Delete a project with its chats or without, with undo for a while. Replies in deleted chats stop."""
    state, project = chat_state(request), await _requested(request)
    answer = (await fields_of(request)).get("chats", "")
    if answer not in ("keep", "delete"):
        raise InvalidParameter(
            "Nothing was deleted.", hint="Say whether its chats stay: keep or delete.", param="chats"
        )
    deletion, gone = await state.store.call(
        Chats.delete_project, owner_of(request), project.id, with_chats=answer == "delete"
    )
    for chat_id in gone:
        state.replies.cancel(chat_id=chat_id)
    state.replies.purge_later()
    return Redirect(f"/projects?deleted={deletion}", status_code=303)


async def _requested(request: Request[Any, Any, Any]) -> Project:
    """Return the project in the URL. Raises `ProjectNotFound`, also for another owner's project."""
    return await chat_state(request).store.call(Chats.project, owner_of(request), request.path_params["project_id"])


async def _list_page(
    request: Request[Any, Any, Any], name: str = "", error: RequestError | None = None
) -> Response[str]:
    found = await chat_state(request).store.call(Chats.projects, owner_of(request))
    rows = tuple(ProjectRow(each.name, f"/projects/{each.id}", each.num_chats) for each in found)
    view = ProjectList(rows, name[:200], notice(error) if error else None)
    page = await v.panel_page(request, "Projects", view, undo_of(request, "The project is deleted."))
    return html(page, error.status if error else 200)


async def _page(
    request: Request[Any, Any, Any], project: Project, form: Mapping[str, str] | None = None,
    error: RequestError | None = None,
) -> Response[str]:  # fmt: skip
    state, owner, said = chat_state(request), owner_of(request), notice(error) if error else None
    view = await project_page(state, owner, project, form, said, may_change=may(request, "admin"))
    return html(await v.panel_page(request, project.name, view), error.status if error else 200)


def require_room(files: Sequence[ProjectFile], name: str, text: str) -> None:
    """Raise `FileTooLarge` if a project cannot take another file."""
    others = [file for file in files if file.name != name]
    if len(others) >= MAX_FILES:
        why = f"A project may have at most {MAX_FILES} files."
        raise FileTooLarge(f"{name} is one file too many.", why, "Remove a file first.")
    size = sum(len(file.text.encode()) for file in others) + len(text.encode())
    if size > MAX_WHOLE_BYTES:
        why = f"With it they have {format_bytes(size)} of text; at most {format_bytes(MAX_WHOLE_BYTES)} are allowed."
        raise FileTooLarge(f"{name} is too large beside the files of the project.", why, "Remove a file first.")


HANDLERS = (
    projects,
    add_project,
    show_project,
    change_project,
    add_files,
    remove_file,
    show_folder,
    choose_folder,
    delete_project,
)
