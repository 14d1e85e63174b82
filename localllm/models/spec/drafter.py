"""A drafter by its checkpoint's headers: what the memory plan and the loader need to know.

A drafter is a set of layers with weights that guesses the next tokens of a model (models/drafters).
Does not know: how a checkpoint becomes a plan (models/drafters/opening.py), how drafts are verified.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from localllm.models.spec.model_spec import ModelSpec

DraftMethod = Literal["draft_model", "eagle", "eagle3", "mtp"]

FINAL_HIDDEN = -1
"""The tap of the hidden state after the target's final norm."""


@dataclass(frozen=True, slots=True)
class DrafterPlan:
    """A drafter, and how it reads the model that it drafts for."""

    method: DraftMethod
    path: Path  # folder or GGUF file of the drafter; with MTP layers the target's own
    spec: ModelSpec  # of the drafter's own layers: sizes of their K and V, rotary embedding
    stored_bytes: int  # of its tensors as stored in `spec.dtype`, without those that it shares with the target
    taps: tuple[int, ...] = ()  # layers whose input it reads (see Drafter.taps)
    first_key: int = 0  # first slot with keys: 1 if it computes pairs of a feature and a token
    num_drafts: int = 4  # most drafts at a time
