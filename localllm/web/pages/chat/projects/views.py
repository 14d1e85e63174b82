"""Views of projects: their list, and the page of one.

Does not know: routes, where projects are stored.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from localllm.web.pages.chat.composer import views as w
from localllm.web.pages.chat.prompts.views import SettingsForm, settings_form
from localllm.web.pages.chat.replies.messages import with_files
from localllm.web.pages.chat.sidebar.views import ChatRow, row
from localllm.web.pages.chat.state import ChatState
from localllm.web.pages.chat.store import Chats, FoundChat, Project
from localllm.web.pages.chat.store.records import ProjectFile
from localllm.web.pages.chat.thread.messages import PREVIEW_CHARS
from localllm.web.pages.frame.views import ErrorNotice, View, view


@dataclass(frozen=True, slots=True)
class ProjectRow:
    """One project in the list."""

    name: str
    url: str
    num_chats: int


@view("chat/_project_list.html")
class ProjectList(View):
    """The page of all projects, with the form for a new one."""

    rows: tuple[ProjectRow, ...] = ()
    name: str = ""  # as typed
    error: ErrorNotice | None = None


@dataclass(frozen=True, slots=True)
class PinnedFile:
    """A file of a project."""

    id: str
    name: str
    num_bytes: int
    text: str = ""  # its beginning


@view("chat/_project_folder.html")
class FolderPart(View):
    """The folder that the chats of a project search, or the form to choose one."""

    url: str  # of the project
    path: str = ""  # empty: no folder is searched
    num_files: int = 0
    num_read: int = 0
    is_reading: bool = False
    unread: tuple[str, ...] = ()  # names of files that are not text: the first of them
    num_unread: int = 0
    num_left_out: int = 0  # files beyond the limits
    is_whole: bool = True  # no: not all files below the folder were looked at
    problem: str = ""  # why it cannot be read
    may_change: bool = True  # the caller may read folders of this machine


@view("chat/_project_page.html")
class ProjectPage(View):
    """The page of one project: its chats, its files, its settings, its deletion."""

    url: str
    name: str
    new_url: str  # starts a chat
    num_chats: int = 0
    chats: tuple[ChatRow, ...] = ()
    files: tuple[PinnedFile, ...] = ()
    num_tokens: int | None = None  # of all files; None: not counted
    context_tokens: int = 0
    typed_name: str = ""
    settings: SettingsForm = field(default_factory=SettingsForm)
    folder: FolderPart | None = None
    error: ErrorNotice | None = None


LISTED = 50
SHOWN_UNREAD = 20
LOOK_S = 0.25
"""How long the page waits for the look at its folder."""
MOST_COUNTED_CHARS = 200_000
"""Files with more characters are not tokenised for the sake of this page."""


async def project_page(
    state: ChatState, owner: str, project: Project, typed: Mapping[str, str] | None = None,
    error: ErrorNotice | None = None, *, may_change: bool = False,
) -> ProjectPage:  # fmt: skip
    """Return the page of a project. `typed`: a form that was refused, to be shown again. `may_change`: whether the
    caller may choose a folder of this machine.
    """
    chats = await state.store.call(Chats.chats_of_project, owner, project.id, LISTED)
    files = await state.store.call(Chats.project_files, project.id)
    settings = project.settings if typed is None else {name: text for name, text in typed.items() if name != "name"}
    card = w.card_of(state, project.settings)
    return ProjectPage(
        url=f"/projects/{project.id}",
        name=project.name,
        new_url=f"/?project={project.id}",
        num_chats=project.num_chats,
        chats=tuple(replace(row(FoundChat(each)), note="", shows_time=True) for each in chats),
        files=tuple(PinnedFile(f.id, f.name, len(f.text.encode()), f.text[:PREVIEW_CHARS]) for f in files),
        num_tokens=await _num_tokens(state, project, files),
        context_tokens=card.plan.max_model_len if card is not None else 0,
        typed_name=project.name if typed is None else typed.get("name", ""),
        settings=await settings_form(state, settings, is_open=error is not None),
        folder=await folder_part(state, project.id, may_change=may_change),
        error=error,
    )


async def folder_part(state: ChatState, project_id: str, *, may_change: bool) -> FolderPart | None:
    """Look through the folder of a project, and return what is known of it. None: there is none, and the caller may not
    choose one.
    """
    url, folder = f"/projects/{project_id}", await state.store.call(Chats.folder, project_id)
    if folder is None:
        return FolderPart(url) if may_change else None
    looked, home = await state.folders.look(folder, wait_s=LOOK_S), f"{Path.home()}{os.sep}"
    path = f"~/{folder.path.removeprefix(home)}" if folder.path.startswith(home) else folder.path
    return FolderPart(
        url, path, looked.num_files, looked.num_read, looked.is_reading, tuple(looked.unread[:SHOWN_UNREAD]),
        len(looked.unread), looked.num_left_out, looked.is_whole, looked.problem, may_change,
    )  # fmt: skip


async def _num_tokens(state: ChatState, project: Project, files: Sequence[ProjectFile]) -> int | None:
    """Return the tokens of the files; None if the project's model is not loaded, or the files are long."""
    card, served = w.card_of(state, project.settings), state.pages.served
    text = with_files("", [(file.name, file.text) for file in files])
    if card is None or served is None or served.name != card.name or not 0 < len(text) <= MOST_COUNTED_CHARS:
        return None
    return len(await asyncio.to_thread(served.tokenizer.encode, text, add_special_tokens=False))
