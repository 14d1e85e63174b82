"""What a chat has of its project: the settings with which it starts, and the files that the model reads every time.

The files come before the first message of the user, in the form of attached files: every chat template has a user.
Does not know: HTTP, how a file is read (attachments.py), where projects are stored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from localllm.units import format_bytes
from localllm.web.pages.chat.attachments import MAX_FILE_BYTES, MAX_FILES, FileTooLarge
from localllm.web.pages.chat.state import ChatState
from localllm.web.pages.chat.store import Chat, Chats, Project
from localllm.web.pages.chat.store.records import ProjectFile
from localllm.web.pages.chat.template_messages import with_files


async def named_project(state: ChatState, owner: str, form: Mapping[str, str]) -> Project | None:
    """Return the project that a form or a query names; None if it names none. Raises `ProjectNotFound`."""
    project_id = form.get("project", "")
    return await state.store.call(Chats.project, owner, project_id) if project_id else None


async def files_of_chat(state: ChatState, chat: Chat) -> list[tuple[str, str]]:
    """Return the (name, text) pairs of the files of a chat's project."""
    if chat.project_id is None:
        return []
    return [(file.name, file.text) for file in await state.store.call(Chats.project_files, chat.project_id)]


def with_project_files(messages: list[dict[str, Any]], files: Sequence[tuple[str, str]]) -> list[dict[str, Any]]:
    """Return messages in which the first one of the user begins with the files."""
    found = list(messages)
    first = next((at for at, message in enumerate(found) if message["role"] == "user"), None)
    if files and first is not None:
        found[first] = {**found[first], "content": with_files(found[first]["content"], files)}
    return found


def require_room(files: Sequence[ProjectFile], name: str, text: str) -> None:
    """Raise `FileTooLarge` if a project cannot take another file."""
    others = [file for file in files if file.name != name]
    if len(others) >= MAX_FILES:
        why = f"A project may have at most {MAX_FILES} files."
        raise FileTooLarge(f"{name} is one file too many.", why, "Remove a file first.")
    size = sum(len(file.text.encode()) for file in others) + len(text.encode())
    if size > MAX_FILE_BYTES:
        why = f"With it they have {format_bytes(size)} of text; at most {format_bytes(MAX_FILE_BYTES)} are allowed."
        raise FileTooLarge(f"{name} is too large beside the files of the project.", why, "Remove a file first.")
