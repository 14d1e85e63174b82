"""Words for drafters: layers with weights that guess the next tokens of a model (models/drafters).

Does not know: tensors, checkpoints.
"""

from __future__ import annotations

from typing import Literal

DraftMethod = Literal["draft_model", "eagle", "eagle3", "mtp"]

FINAL_HIDDEN = -1
"""The tap of the hidden state after the target's final norm."""
