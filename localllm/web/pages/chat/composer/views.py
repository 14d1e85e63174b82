"""Views around the composer: what does not fit into the context and the ways on, the chat's behaviour, a load."""

from __future__ import annotations

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
