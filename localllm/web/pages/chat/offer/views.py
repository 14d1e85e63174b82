"""The offered model on the chat page: its card, in words and figures.

Does not know: handlers, how a model is downloaded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

from litestar import Request

from localllm.models.library.hub import client
from localllm.models.library.hub.pull import progress_line
from localllm.models.library.pick_list import Pick
from localllm.serving.model_offer import Offer, OfferStatus, State
from localllm.units import format_bytes, format_count, format_parameters
from localllm.web.access.caller import may
from localllm.web.pages.chat.state import chat_state
from localllm.web.pages.frame.errors import notice
from localllm.web.pages.frame.status import load_phases
from localllm.web.pages.frame.views import ErrorNotice, LoadPhase, View, view

MOVING: tuple[State, ...] = ("starting", "downloading", "loading")
"""States that end by themselves."""


@dataclass(frozen=True, slots=True)
class OfferButton:
    """A button of the card: the verb that it posts, and its label."""

    verb: str  # start, stop or discard
    title: str
    is_main: bool = False


@view("chat/_offer.html")
class OfferCard(View):
    """The card of the offered model: what it is, how far its download and its load are, and what can be done now."""

    name: str
    title: str
    state: State
    says: str = ""  # what the model is good for
    facts: tuple[str, ...] = ()  # size of the download, context, speed, licence
    line: str = ""  # 0.6 GiB of 1.7 GiB · 11 MiB/s · 1 min 40 s left
    fraction: float | None = None  # 0 to 1, while it downloads; None: unknown
    phases: tuple[LoadPhase, ...] = ()  # of its load
    error: ErrorNotice | None = None
    buttons: tuple[OfferButton, ...] = ()
    refusal: str = ""  # why there is no button, and who can act
    takes_path: bool = False  # offers to load a file or a folder instead

    @property
    def is_moving(self) -> bool:
        """Return whether the card changes by itself; a browser without scripts is then told to reload."""
        return self.state in MOVING


@view("chat/_offer_room.html")
class OfferRoom(View):
    """The room of a card that is not known yet; the live connection fills it, or takes it away."""

    is_empty: bool = False  # there is nothing to offer


@view("chat/_announcement.html")
class Announcement(View):
    """The line that a screen reader says when it changes."""

    text: str = ""


ONLY_ADMINS = (
    "Your key can use models but not download them. An admin can: on this page with a key of the scope admin, or with "
    "`localllm pull {name}` on the server's machine."
)

OFFLINE = (
    "This server runs offline ({why}), so it downloads nothing. Start it without offline mode, or load a model that is "
    "on this machine."
)


async def shown_offer(request: Request[Any, Any, Any], *, is_new: bool) -> OfferCard | OfferRoom | None:
    """Return the card for a page, or its room while the card is not known; None: there is nothing to offer. A chat that
    has begun shows the card only while a start is under way or has failed.
    """
    offers = chat_state(request).offers
    if is_new and offers.is_pending:
        return OfferRoom()
    offer = await (offers.find() if is_new else offers.started())
    status = await offers.status(offer.pick.name) if offer is not None else None
    if offer is None or status is None or not (is_new or status.state in (*MOVING, "failed")):
        return None
    return card_for(request, offer, status)


def live_url_of(card: OfferCard | OfferRoom | None, chat_id: str, model: str = "") -> str:
    """Return the URL of the live events of a page with this card, chat and model."""
    offer = {"offer": card.name if isinstance(card, OfferCard) else ""} if card is not None else {}
    about = {"chat": chat_id, "model": model}
    return f"/live/chat?{urlencode(offer | {name: value for name, value in about.items() if value})}"


def card_for(request: Request[Any, Any, Any], offer: Offer, status: OfferStatus) -> OfferCard:
    """Return the card as the caller of a request may see it."""
    offline = "--offline is set" if request.app.state.settings.engine.offline else ""
    if client.is_offline():
        offline = offline or "HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE is set"
    return offer_card(offer, status, may_change=may(request, "admin"), offline=offline)


def offer_card(offer: Offer, status: OfferStatus, *, may_change: bool, offline: str = "") -> OfferCard:
    """Return the card. may_change: the key may download; offline: why the hub may not be asked, or an empty string."""
    state, needs_hub = status.state, status.state in ("absent", "stopped", "failed")
    refusal, buttons = "", _buttons(offer.pick, status)
    if not may_change:
        refusal, buttons = ONLY_ADMINS.format(name=offer.pick.name), ()
    elif offline and needs_hub:
        refusal, buttons = OFFLINE.format(why=offline), tuple(each for each in buttons if each.verb == "discard")
    return OfferCard(
        name=offer.pick.name,
        title=offer.pick.title or offer.pick.name,
        state=state,
        says=offer.pick.says,
        facts=_facts(offer),
        line=_LINES[state](offer.pick, status),
        fraction=status.progress.fraction if status.progress is not None else None,
        phases=load_phases(status.entry) if state == "loading" and status.entry is not None else (),
        error=notice(status.error) if status.error is not None else None,
        buttons=buttons,
        refusal=refusal if state not in MOVING and state != "ready" else "",
        takes_path=may_change and (state == "failed" or (bool(offline) and needs_hub)),
    )


def announcement(offer: Offer, state: State) -> str:
    """Return what a screen reader says when the state changes."""
    return _ANNOUNCED[state].format(title=offer.pick.title or offer.pick.name)


def _facts(offer: Offer) -> tuple[str, ...]:
    pick, facts = offer.pick, [f"{format_bytes(offer.pick.bytes)} to download"]
    if offer.context_tokens is not None:
        facts.append(f"up to {format_count(offer.context_tokens)} tokens of context")
    else:
        facts.append("does not fit into the memory that is free now")
    facts += [offer.speed, f"{format_parameters(pick.parameters)} parameters", pick.license]
    return tuple(fact for fact in facts if fact)


def _buttons(pick: Pick, status: OfferStatus) -> tuple[OfferButton, ...]:
    left = format_bytes(max(0, pick.bytes - status.held_bytes))
    discard = (OfferButton("discard", f"Delete the {format_bytes(status.held_bytes)}"),) if status.held_bytes else ()
    by_state: dict[State, tuple[OfferButton, ...]] = {
        "absent": (OfferButton("start", f"Download and use ({format_bytes(pick.bytes)})", True),),
        "stopped": (OfferButton("start", f"Resume ({left} left)", True), *discard),
        "failed": (OfferButton("start", "Try again", True), *discard),
        "installed": (OfferButton("start", "Load and use", True),),
    }
    if status.state in MOVING:
        return (OfferButton("stop", "Cancel"),)
    return by_state.get(status.state, ())


def _held(pick: Pick, status: OfferStatus) -> str:
    return f"{format_bytes(status.held_bytes)} are on this machine." if status.held_bytes else ""


_LINES: dict[State, Callable[[Pick, OfferStatus], str]] = {
    "absent": lambda pick, status: "",
    "starting": lambda pick, status: f"Asking {client.endpoint().partition('://')[2]} for the list of files…",
    "downloading": lambda pick, status: progress_line(status.progress) if status.progress is not None else "",
    "stopped": lambda pick, status: f"The download was interrupted. {_held(pick, status)}",
    "installed": lambda pick, status: "This model is on this machine, and not loaded.",
    "loading": lambda pick, status: "Loading. Messages go to it once it is ready.",
    "ready": lambda pick, status: "",
    "failed": _held,
}

_ANNOUNCED: dict[State, str] = {
    "absent": "{title} is not on this machine.",
    "starting": "The download of {title} starts.",
    "downloading": "{title} is being downloaded.",
    "stopped": "The download of {title} is interrupted.",
    "installed": "{title} is on this machine and not loaded.",
    "loading": "{title} is being loaded.",
    "ready": "{title} is ready. The next message goes to it.",
    "failed": "{title} could not be made ready.",
}
