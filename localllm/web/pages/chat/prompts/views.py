"""Views of the library of prompts: its page, the form of a prompt, and the list that the composer shows.

Does not know: routes, where prompts are stored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from localllm.web.pages.chat.composer import views as w
from localllm.web.pages.chat.composer.model_picker import ModelChoices
from localllm.web.pages.chat.composer.settings import SETTINGS
from localllm.web.pages.chat.composer.views import Sampling, SettingField
from localllm.web.pages.chat.prompts.saved import placeholders
from localllm.web.pages.chat.sidebar.views import SelectOption
from localllm.web.pages.chat.state import ChatState
from localllm.web.pages.chat.store import Chats, SavedPrompt
from localllm.web.pages.chat.tools import views as t
from localllm.web.pages.frame.views import ErrorNotice, View, view


@view("chat/_settings_form.html")
class SettingsForm(View):
    """The system prompt, the model and the sampling of a prompt or a project."""

    system: str = ""
    fields: tuple[SettingField, ...] = ()
    models: tuple[SelectOption, ...] = ()
    is_open: bool = False


@dataclass(frozen=True, slots=True)
class PromptRow:
    """One prompt in a list."""

    name: str
    url: str
    beginning: str = ""  # of its text
    notes: tuple[str, ...] = ()  # what it sets, such as "system prompt"
    asks: bool = False  # it has placeholders


EXAMPLES = (
    ("Explain", "Explain {{subject}} to someone who has never heard of it, with one example."),
    ("Review", "Review this code. Name bugs first, then what is hard to read, each with its line:"),
    ("Translate", "Translate into {{language}}, and keep names and numbers as they are:"),
)
"""Name and text of prompts to begin with."""


@view("chat/_prompt_library.html")
class PromptLibrary(View):
    """The page of all prompts: change, delete, import, export."""

    rows: tuple[PromptRow, ...] = ()
    error: ErrorNotice | None = None
    examples: tuple[tuple[str, str], ...] = EXAMPLES


@view("chat/_prompt_form.html")
class PromptForm(View):
    """The form of a new or an existing prompt."""

    url: str
    name: str = ""
    text: str = ""
    settings: SettingsForm = field(default_factory=SettingsForm)
    is_new: bool = False
    error: ErrorNotice | None = None


@view("chat/_prompt_questions.html")
class PromptQuestions(View):
    """The form that asks for the values of a prompt's placeholders."""

    url: str
    name: str
    text: str
    questions: tuple[str, ...]
    conversation_id: str = ""  # of the chat that gets the prompt; empty: a new one


@view("chat/_prompt_list.html")
class PromptList(View):
    """The prompts that begin with what was typed after `/` in the composer."""

    rows: tuple[PromptRow, ...] = ()
    is_empty: bool = False  # the library has no prompt at all


@view("chat/_prompt_used.html")
class PromptUsed(View):
    """The answer to the choice of a prompt: the text for the composer, and its settings in the drawer."""

    name: str
    text: str
    sampling: Sampling | None = None
    models: ModelChoices | None = None


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
    drawer = w.sampling(w.card_of(state, settings), settings)
    models = await state.picker.choices(settings)
    chosen = settings.get("model", "")
    names = [SelectOption("", "The one that is chosen in the chat", not chosen)]
    names += [SelectOption(each.name, each.name, each.name == chosen) for each in models.choices]
    return SettingsForm(drawer.system, drawer.fields, tuple(names), is_open or bool(settings))


async def prompt_form(
    state: ChatState, url: str, prompt: SavedPrompt, *, is_new: bool, error: ErrorNotice | None = None
) -> PromptForm:
    form = await settings_form(state, prompt.settings, is_open=error is not None)
    return PromptForm(url, prompt.name, prompt.text, form, is_new, error)


async def used(state: ChatState, owner: str, prompt: SavedPrompt, text: str, model: str) -> PromptUsed:
    """Return the answer to the choice of a prompt. A prompt without settings leaves the chat's settings."""
    if not prompt.settings:
        return PromptUsed(prompt.name, text)
    settings = with_model(prompt.settings, model)
    names = tuple(await state.store.call(Chats.presets, owner))
    sampling = w.sampling(w.card_of(state, settings), settings, names, preset=prompt.name)
    sampling = replace(sampling, tool_servers=t.tool_servers(state, owner, settings))
    models = await state.picker.choices(settings) if "model" in prompt.settings else None
    return PromptUsed(prompt.name, text, sampling, models)


def with_model(settings: Mapping[str, str], model: str) -> dict[str, str]:
    """Return the settings with the chat's model, unless they name one."""
    return {**({"model": model} if model else {}), **settings}
