"""Turn prompts into views: the library, the form, the list of the composer.

Does not know: routes, where prompts are stored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from localllm.web.pages.chat import message_presenters, presenters, tool_presenters
from localllm.web.pages.chat.prompt_views import PromptForm, PromptList, PromptRow, PromptUsed, SettingsForm
from localllm.web.pages.chat.saved_prompts import placeholders
from localllm.web.pages.chat.settings import SETTINGS
from localllm.web.pages.chat.sidebar_views import Choice
from localllm.web.pages.chat.state import ChatState
from localllm.web.pages.chat.store import Chats, SavedPrompt
from localllm.web.pages.frame.views import ErrorNotice

BEGINNING_CHARS = 90
MOST_CHOICES = 8


def prompt_row(prompt: SavedPrompt) -> PromptRow:
    text = " ".join(prompt.text.split())
    beginning = text if len(text) <= BEGINNING_CHARS else f"{text[: BEGINNING_CHARS - 1].rstrip()}…"
    asks = bool(placeholders(prompt.text))
    return PromptRow(prompt.name, f"/prompts/{prompt.id}", beginning, notes_of(prompt.settings), asks)


def notes_of(settings: Mapping[str, str]) -> tuple[str, ...]:
    """Return what the settings set, in words."""
    names = {"system": "the system prompt", "model": f"the model {settings.get('model')}", "tools": "tools"}
    names |= {"schema": "a JSON schema", "thinking": "thinking"}
    found = [names.get(name) or SETTINGS[name].label.lower() for name in settings if name in names or name in SETTINGS]
    return tuple(found)


def choices(prompts: Sequence[SavedPrompt], typed: str) -> PromptList:
    """Return the prompts whose name contains every typed word; those that begin with the first word come first."""
    words = typed.lower().removeprefix("/").split()
    found = [each for each in prompts if all(word in each.name.lower() for word in words)]
    if words:
        found.sort(key=lambda each: not each.name.lower().startswith(words[0]))
    return PromptList(tuple(prompt_row(each) for each in found[:MOST_CHOICES]), is_empty=not prompts)


async def settings_form(state: ChatState, settings: Mapping[str, str], *, is_open: bool = False) -> SettingsForm:
    """Return the fields of these settings, with the defaults of their model."""
    drawer = message_presenters.sampling(presenters.card_of(state, settings), settings)
    models = await state.picker.choices(settings)
    chosen = settings.get("model", "")
    names = [Choice("", "The one that is chosen in the chat", not chosen)]
    names += [Choice(each.name, each.name, each.name == chosen) for each in models.choices]
    return SettingsForm(drawer.system, drawer.fields, tuple(names), is_open or bool(settings))


async def prompt_form(
    state: ChatState, url: str, prompt: SavedPrompt, *, is_new: bool, error: ErrorNotice | None = None
) -> PromptForm:
    form = await settings_form(state, prompt.settings, is_open=error is not None)
    return PromptForm(url, prompt.name, prompt.text, form, is_new, error)


async def used(state: ChatState, owner: str, prompt: SavedPrompt, text: str, model: str) -> PromptUsed:
    """Return the answer to the choice of a prompt. One without settings leaves those of the chat."""
    if not prompt.settings:
        return PromptUsed(prompt.name, text)
    settings = with_model(prompt.settings, model)
    names = tuple(await state.store.call(Chats.presets, owner))
    sampling = message_presenters.sampling(presenters.card_of(state, settings), settings, names, preset=prompt.name)
    sampling = replace(sampling, tool_servers=tool_presenters.tool_servers(state, owner, settings))
    models = await state.picker.choices(settings) if "model" in prompt.settings else None
    return PromptUsed(prompt.name, text, sampling, models)


def with_model(settings: Mapping[str, str], model: str) -> dict[str, str]:
    """Return the settings with the chat's model, unless they name one."""
    return {**({"model": model} if model else {}), **settings}
