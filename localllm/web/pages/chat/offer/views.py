"""Views of the offered model on the chat page.

Does not know: how a state is reached (serving/model_offer.py), keys.
"""

from __future__ import annotations

from dataclasses import dataclass

from localllm.serving.model_offer import State
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
