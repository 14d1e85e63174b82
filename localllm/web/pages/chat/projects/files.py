"""The parts that the model reads before the messages of a chat: system prompt, memory, files of the project.

The files are in the form of attached files. Leaving out the oldest messages leaves all of it in.
Does not know: HTTP, how a file is read (attachments.py), where projects are stored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from localllm.units import format_bytes
from localllm.web.api.documents import FileTooLarge
from localllm.web.pages.chat.files.attachments import MAX_FILES, MAX_WHOLE_BYTES
from localllm.web.pages.chat.replies.messages import with_files
from localllm.web.pages.chat.state import ChatState
from localllm.web.pages.chat.store import Chat, Chats, Project
from localllm.web.pages.chat.store.records import ProjectFile


async def named_project(state: ChatState, owner: str, form: Mapping[str, str]) -> Project | None:
    """Return the project that a form or a query names; None if it names none. Raises `ProjectNotFound`."""
    project_id = form.get("project", "")
    return await state.store.call(Chats.project, owner, project_id) if project_id else None


async def with_common_parts(
    state: ChatState, owner: str, chat: Chat | None, form: Mapping[str, str], settings: Mapping[str, str]
) -> dict[str, str]:
    """Return the settings as the model reads them: the memory and the files of the chat's project follow the system
    prompt. `chat` None: a new chat, whose form names the project. Raises `ProjectNotFound`.
    """
    project_id, files = chat.project_id if chat is not None else form.get("project"), list[tuple[str, str]]()
    if project_id:
        project = await state.store.call(Chats.project, owner, project_id)
        files = [(file.name, file.text) for file in await state.store.call(Chats.project_files, project.id)]
    memory = (await state.store.call(Chats.memory, owner)).as_read
    parts = [settings.get("system", ""), memory, with_files("", files)]
    return {**settings, "system": "\n\n".join(filter(None, parts))} if memory or files else dict(settings)


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
