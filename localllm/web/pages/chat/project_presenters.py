"""Turn a project into its page.

Does not know: routes, where projects are stored.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace

from localllm.web.pages.chat import presenters
from localllm.web.pages.chat.part_presenters import PREVIEW_CHARS
from localllm.web.pages.chat.project_views import PinnedFile, ProjectPage
from localllm.web.pages.chat.prompt_presenters import settings_form
from localllm.web.pages.chat.sidebar_presenters import row
from localllm.web.pages.chat.state import ChatState
from localllm.web.pages.chat.store import Chats, FoundChat, Project
from localllm.web.pages.chat.store.records import ProjectFile
from localllm.web.pages.chat.template_messages import with_files
from localllm.web.pages.frame.views import ErrorNotice

LISTED = 50
MOST_COUNTED_CHARS = 200_000
"""Files with more characters are not tokenised for the sake of this page."""


async def project_page(
    state: ChatState, owner: str, project: Project, typed: Mapping[str, str] | None = None,
    error: ErrorNotice | None = None,
) -> ProjectPage:  # fmt: skip
    """Return the page of a project. `typed`: a form that was refused, to be shown again."""
    chats = await state.store.call(Chats.chats_of_project, owner, project.id, LISTED)
    files = await state.store.call(Chats.project_files, project.id)
    settings = project.settings if typed is None else {name: text for name, text in typed.items() if name != "name"}
    card = presenters.card_of(state, project.settings)
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
        error=error,
    )


async def _num_tokens(state: ChatState, project: Project, files: Sequence[ProjectFile]) -> int | None:
    """Return the tokens of the files; None if the project's model is not loaded, or the files are long."""
    card, served = presenters.card_of(state, project.settings), state.pages.served
    text = with_files("", [(file.name, file.text) for file in files])
    if card is None or served is None or served.name != card.name or not 0 < len(text) <= MOST_COUNTED_CHARS:
        return None
    return len(await asyncio.to_thread(served.tokenizer.encode, text, add_special_tokens=False))
