"""The composer: the text field with its button and files, what does not fit into the context, the drawer with the
chat's behaviour, the load of a model.

Does not know: HTTP handlers, how a reply is generated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from localllm.engine.params import Kind
from localllm.serving.served import ModelCard
from localllm.units import format_count, format_seconds
from localllm.web.api.hints import THINKING_SWITCHES
from localllm.web.pages.chat.composer.model_picker import ModelChoices
from localllm.web.pages.chat.composer.settings import BEHAVIOUR, FIRST, SETTINGS, effective, label, note, num_set
from localllm.web.pages.chat.files.attachments import Attachment
from localllm.web.pages.chat.replies.active import ActiveReplies
from localllm.web.pages.chat.replies.claims import served_for
from localllm.web.pages.chat.replies.messages import SUMMARY_OF
from localllm.web.pages.chat.replies.prompt import ChatFull
from localllm.web.pages.chat.state import ChatState
from localllm.web.pages.chat.store import Chat, Chats, StoredMessage
from localllm.web.pages.chat.store.records import ChatsUnavailable
from localllm.web.pages.chat.tools.views import ToolServers, WebSwitch, tool_servers
from localllm.web.pages.frame.views import ErrorNotice, View, view


@view("chat/_context_meter.html")
class ContextMeter(View):
    """The share of the model's context that the chat uses, which may be more than all of it; empty without a size."""

    used_tokens: int = 0
    size_tokens: int = 0


@view("chat/_refusal.html")
class Refusal(View):
    """A message that does not fit into the context, and the ways on. The buttons send the form that they stand in."""

    what: str
    why: str
    url: str  # where the form is posted; with the oldest messages left out it is posted there again
    chat_url: str = ""  # of the chat that can be summed up; empty: it has no messages
    leaves_out: bool = False  # older messages can be left out
    file_tokens: int = 0  # tokens of the longest attached file that fit; 0: none
    field_id: str = "composer-message"  # of the text


@view("chat/_fit_update.html")
class FitUpdate(View):
    """The answer to a count: the composer with a refusal in place of Send, or as it is if the message fits."""

    action: View
    refusal: Refusal | None = None
    meter: ContextMeter | None = None
    clears_error: bool = False  # the answer to a message that was sent: an older error goes


@view("chat/_behaviour_chip.html")
class BehaviourChip(View):
    """The system prompt of a chat, over its first message; it leads to the drawer."""

    system: str = ""
    url: str = ""  # of the page with the drawer open


@view("chat/_summary_origin.html")
class SummaryOrigin(View):
    """The line over a summary: the chat that it sums up."""

    title: str
    url: str


@view("chat/_load_progress.html")
class LoadProgress(View):
    """The progress of a model that was picked, in place of Send."""

    model: str
    fraction: float | None = None  # 0 to 1; None: unknown
    detail: str = ""


@view("chat/_model_picked.html")
class ModelPicked(View):
    """The answer to a pick, and the end of a load: the parts of the composer that depend on the model."""

    action: View
    sampling: View | None = None
    thinking: View | None = None
    models: View | None = None
    error: ErrorNotice | None = None


@view("chat/_thinking_choice.html")
class ThinkingChoice(View):
    """The choice of whether the model thinks before it answers; not shown for a model that cannot switch."""

    is_shown: bool = False
    value: str = ""  # on, off, or empty for the model's own way


@view("chat/_setting_refused.html")
class SettingRefused(View):
    """The error of a wrong value in the drawer, with the drawer open at its field."""

    error: ErrorNotice
    sampling: View


@view("chat/_attachment.html")
class AttachmentChip(View):
    """A file attached to the next message (removable by its id), or a file of a sent message."""

    name: str
    num_bytes: int
    num_tokens: int | None = None
    id: str = ""
    text: str = ""  # extracted text of a file in a sent message
    is_estimate: bool = False  # `num_tokens` is not counted exactly
    is_missing: bool = False  # its chat was imported, and an export does not contain it
    searched: bool = False  # too long to be read whole: the passages that match the question are read
    thumb: str = ""  # data: URL of a small version of a picture
    size: str = ""  # of the picture in pixels
    shown: str = ""  # size to which the picture is scaled; empty: its own
    url: str = ""  # of a stored picture
    seconds: float | None = None  # that a picture is expected to take before the answer begins; None: not known
    detail: str = ""  # how finely a picture is read; empty: it cannot be chosen
    note: str = ""  # what is not read of the file
    speech: tuple[str, ...] = ()  # other models that can transcribe the sound whose text it is
    is_sound: bool = False  # `size` is its length, and the page can play it once it is stored


@view("chat/_attachments.html")
class Attachments(View):
    """The files attached to the next message, and the token count of those that are read whole."""

    chips: tuple[AttachmentChip, ...] = ()
    num_tokens: int | None = None  # None: no file is read whole
    context_tokens: int = 0
    error: ErrorNotice | None = None


@view("chat/_composer_action.html")
class ComposerAction(View):
    """The button of the composer: Send, Stop while a reply is being written, or why neither is possible now."""

    stop_url: str | None = None
    over_tokens: int = 0  # tokens that the message is too long by
    load: LoadProgress | None = None  # of the model that was picked
    load_url: str = ""  # URL of the load's live events


@dataclass(frozen=True, slots=True)
class SettingField:
    """One setting: the value that was typed, and the default that applies if the field is empty."""

    name: str
    label: str
    kind: Kind
    value: str
    default: str
    source: str  # where the default comes from
    note: str
    low: float | None = None
    high: float | None = None
    is_first: bool = False  # shown at once, not behind `More sampling`
    is_wrong: bool = False  # the value was refused


@view("chat/_sampling_drawer.html")
class Sampling(View):
    """The drawer with the model's behaviour in this chat: system prompt, sampling and presets."""

    system: str = ""
    fields: tuple[SettingField, ...] = ()
    presets: tuple[str, ...] = ()
    preset: str = ""  # name of the preset that was chosen last
    is_open: bool = False
    error: ErrorNotice | None = None
    tools: str = ""  # a JSON list, as it was typed
    schema: str = ""  # a JSON object, as it was typed
    num_set: int = 0  # number of fields that are filled in
    wrong: str = ""  # name of the field whose value was refused; the drawer is open then
    tool_servers: ToolServers | None = None  # None: the user has none


@view("chat/_composer.html")
class Composer(View):
    """The form where the next message is typed."""

    conversation_id: str
    sampling: Sampling
    action: ComposerAction
    text: str = ""
    error: ErrorNotice | None = None
    attachments: Attachments = field(default_factory=Attachments)
    models: ModelChoices = field(default_factory=ModelChoices)
    thinking: ThinkingChoice = field(default_factory=ThinkingChoice)
    web: WebSwitch = field(default_factory=WebSwitch)
    refusal: Refusal | None = None
    context_tokens: int = 0  # of the model; 0: not known
    project_id: str = ""  # of a new chat
    begins: str = ""  # the id that a new chat will have, so that two quick messages begin one chat
    speech: str = ""  # the model that transcribes; empty: there is none

    @property
    def stop_url(self) -> str:
        return f"/c/{self.conversation_id or self.begins}/stop"


CHIP_CHARS = 120

LEAST_FILE_TOKENS = 16
"""A shorter beginning of a file is not worth sending."""

MARGIN_TOKENS = 8
"""A file's beginning may be tokenised differently where it was cut."""


def refusal(
    full: ChatFull, url: str, chat: Chat | None, files: Sequence[Attachment] = (), *, field_id: str = "composer-message"
) -> Refusal:
    """Return what is said in place of sending, and the ways on. `url`: where the form is posted."""
    if full.can_leave_out and chat is not None:
        what, why = full.what, full.why
    else:
        what = f"Too long by {format_count(full.over_tokens)} tokens."
        needs, size = format_count(full.used_tokens), format_count(full.context_tokens)
        why = f"With room for a reply this message needs {needs} tokens; the model's context has {size}."
    return Refusal(
        what=what,
        why=why,
        url=url,
        chat_url=f"/c/{chat.id}" if full.can_leave_out and chat is not None else "",
        leaves_out=full.can_leave_out and chat is not None,
        file_tokens=first_tokens(full, files),
        field_id=field_id,
    )


def first_tokens(full: ChatFull, files: Sequence[Attachment]) -> int:
    """Return how many tokens of the longest file fit; 0: too few."""
    longest = max((file.num_tokens for file in files if not file.searched), default=0)
    left = longest - full.over_tokens - MARGIN_TOKENS
    return left if left >= LEAST_FILE_TOKENS else 0


def fit_update(
    full: ChatFull | None, chat: Chat | None, files: Sequence[Attachment], action: ComposerAction, *, sent: bool = False
) -> FitUpdate:
    """Return the composer's state after a count. `action`: its button while the message fits."""
    if full is None:
        return FitUpdate(action, clears_error=sent)
    shown = refusal(full, "/chat", chat, files)
    meter = ContextMeter(full.used_tokens, full.context_tokens)
    if action.stop_url is None and action.load is None:
        action = ComposerAction(over_tokens=full.over_tokens)
    return FitUpdate(action, shown, meter, sent)


def thinking_choice(state: ChatState, settings: Mapping[str, str]) -> ThinkingChoice:
    """Return the choice beside Send; it is shown for a ready model whose template can switch thinking."""
    served = served_for(state, settings)
    switches = served is not None and any(served.chat_template.reads(name) for name in THINKING_SWITCHES)
    return ThinkingChoice(switches, settings.get("thinking", ""))


def chip(chat: Chat | None, settings: Mapping[str, str]) -> BehaviourChip:
    """Return the system prompt in one line."""
    system = " ".join(settings.get("system", "").split())
    short = system if len(system) <= CHIP_CHARS else f"{system[:CHIP_CHARS].rstrip()}…"
    return BehaviourChip(short, f"{f'/c/{chat.id}' if chat is not None else '/'}?behaviour=1#system")


def summary_origin(message: StoredMessage) -> SummaryOrigin | None:
    """Return the line over a summary; None for any other message."""
    origin = message.details.get(SUMMARY_OF)
    return SummaryOrigin(origin["title"], f"/c/{origin['chat']}") if origin else None


def picture_chip(picture: Mapping[str, Any], url: str = "") -> AttachmentChip:
    """Return a picture or a sound of a message. url: of one that is stored."""
    if "seconds" in picture:
        size = format_seconds(picture["seconds"])
        return AttachmentChip(picture["name"], picture["num_bytes"], size=size, url=url, is_sound=True)
    size = f"{picture['width']} x {picture['height']}"
    return AttachmentChip(picture["name"], picture["num_bytes"], thumb=picture["thumb"], size=size, url=url)


def attachments_view(files: Sequence[Attachment], context_tokens: int, error: ErrorNotice | None = None) -> Attachments:
    """Return the files of the next message, with the sum of the tokens of those that are read whole."""
    chips = tuple(map(_waiting_chip, files))
    whole = [file for file in files if not file.searched]
    total = sum(file.num_tokens for file in whole) if whole else None
    return Attachments(chips, total, context_tokens, error)


def _waiting_chip(file: Attachment) -> AttachmentChip:
    """Return a file of the next message."""
    if not file.pictures:
        return AttachmentChip(
            file.name, file.num_bytes, file.num_tokens, file.id, is_estimate=file.is_estimate, searched=file.searched,
            note=file.note, speech=file.speech,
        )  # fmt: skip
    chip, cost, count = picture_chip(file.pictures[0]), file.cost, len(file.pictures)
    size = (
        chip.size if chip.name == file.name else "1 page as a picture" if count == 1 else f"{count} pages as pictures"
    )
    chip = replace(chip, name=file.name, num_bytes=file.num_bytes, id=file.id, size=size)
    if cost is None:
        return chip
    detail = file.detail if cost.has_detail else ""
    return replace(chip, num_tokens=cost.num_tokens, shown=cost.shown, seconds=cost.seconds, detail=detail)


def sampling(
    card: ModelCard | None,
    settings: Mapping[str, str],
    presets: Sequence[str] = (),
    *,
    preset: str = "",
    is_open: bool = False,
    error: ErrorNotice | None = None,
    wrong: str = "",
) -> Sampling:
    """Return the drawer, with the defaults that apply to empty fields. `wrong`: a field whose value was refused."""
    return Sampling(
        system=settings.get("system", ""),
        fields=tuple(
            _field(name, card, settings, wrong) for name in sorted(SETTINGS, key=lambda each: each not in FIRST)
        ),
        presets=tuple(presets),
        preset=preset,
        is_open=is_open or wrong in BEHAVIOUR,
        error=error,
        tools=settings.get("tools", ""),
        schema=settings.get("schema", ""),
        num_set=num_set(settings),
        wrong=wrong,
    )


def _field(name: str, card: ModelCard | None, settings: Mapping[str, str], wrong: str) -> SettingField:
    info, (default, source) = SETTINGS[name], effective(name, card)
    return SettingField(
        name, label(name), info.kind, settings.get(name, ""), default, source, note(name), info.low, info.high,
        name in FIRST, name == wrong,
    )  # fmt: skip


def composer_action(replies: ActiveReplies, chat_id: str) -> ComposerAction:
    """Return the composer's button: it stops every reply of the chat that is being written, else it sends."""
    return ComposerAction(f"/c/{chat_id}/stop" if replies.unfinished(chat_id) else None)


async def drawer(
    state: ChatState, owner: str, card: ModelCard | None, settings: Mapping[str, str], *, is_open: bool = False
) -> Sampling:
    """Return the drawer, with the defaults of the model."""
    try:
        presets = await state.store.call(Chats.presets, owner)
    except ChatsUnavailable:
        presets = {}
    found = sampling(card, settings, tuple(presets), is_open=is_open)
    return replace(found, tool_servers=tool_servers(state, owner, settings))


def card_of(state: ChatState, settings: Mapping[str, str]) -> ModelCard | None:
    """Return facts about the model that the next message goes to."""
    name = settings.get("model")
    entry = state.pages.manager.register.find(name) if name else None
    return entry.card if entry is not None else state.pages.card if not name else None
