"""Views of the library of prompts: its page, the form of a prompt, and the list that the composer shows."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from localllm.web.pages.chat.sidebar_views import SelectOption
from localllm.web.pages.chat.views import ModelChoices, Sampling, SettingField
from localllm.web.pages.frame.views import ErrorNotice, View


@dataclass(frozen=True, slots=True)
class SettingsForm(View):
    """The system prompt, the model and the sampling of a prompt or a project."""

    template: ClassVar[str] = "chat/_settings_form.html"
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


@dataclass(frozen=True, slots=True)
class PromptLibrary(View):
    """The page of all prompts: change, delete, import, export."""

    template: ClassVar[str] = "chat/_prompt_library.html"
    rows: tuple[PromptRow, ...] = ()
    error: ErrorNotice | None = None


@dataclass(frozen=True, slots=True)
class PromptForm(View):
    """The form of a new or an existing prompt."""

    template: ClassVar[str] = "chat/_prompt_form.html"
    url: str
    name: str = ""
    text: str = ""
    settings: SettingsForm = field(default_factory=SettingsForm)
    is_new: bool = False
    error: ErrorNotice | None = None


@dataclass(frozen=True, slots=True)
class PromptQuestions(View):
    """The form that asks for the values of a prompt's placeholders."""

    template: ClassVar[str] = "chat/_prompt_questions.html"
    url: str
    name: str
    text: str
    questions: tuple[str, ...]
    conversation_id: str = ""  # of the chat that gets the prompt; empty: a new one


@dataclass(frozen=True, slots=True)
class PromptList(View):
    """The prompts that begin with what was typed after `/` in the composer."""

    template: ClassVar[str] = "chat/_prompt_list.html"
    rows: tuple[PromptRow, ...] = ()
    is_empty: bool = False  # the library has no prompt at all


@dataclass(frozen=True, slots=True)
class PromptUsed(View):
    """The answer to the choice of a prompt: the text for the composer, and its settings in the drawer."""

    template: ClassVar[str] = "chat/_prompt_used.html"
    name: str
    text: str
    sampling: Sampling | None = None
    models: ModelChoices | None = None
