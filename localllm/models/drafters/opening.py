"""Find out what kind of drafter a checkpoint is, and load it.

`plan_drafter` reads headers alone, so that the memory plan counts the drafter before anything is loaded.
`open_drafter` loads what was planned. Each kind of drafter adds one line to both.
Does not know: where the checkpoint was downloaded from, flags.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from localllm.errors import DrafterMismatch
from localllm.models.decoder.decoder import DecoderModel
from localllm.models.drafters.draft_model import DraftModel, plan_draft_model
from localllm.models.drafters.drafter import Drafter, DrafterPlan
from localllm.models.drafters.eagle import load_eagle, plan_eagle
from localllm.models.drafters.eagle_config import as_eagle
from localllm.models.drafters.mtp import open_mtp, plan_mtp
from localllm.models.loader import load_model
from localllm.models.read_spec import read_spec
from localllm.models.spec.model_spec import ModelSpec


def plan_drafter(path: Path, method: str, target: ModelSpec, target_path: Path) -> DrafterPlan:
    """Return the plan of the drafter in `path` for a target.

    method: as asked; "": by the checkpoint. Raises `DrafterMismatch`, `UnsupportedModel`, `CorruptModel`.
    """
    if target.implementation != "localllm":
        raise DrafterMismatch(
            f"{target.architecture} runs without drafters.",
            "It runs through transformers' code, where no drafts are verified.",
            "Leave out --draft.",
        )
    if method == "mtp":
        return plan_mtp(target_path, target)
    if (eagle := as_eagle(path, method)) is not None:
        return plan_eagle(path, eagle, target)
    if method in ("", "draft_model"):
        return plan_draft_model(path, read_spec(path))
    raise DrafterMismatch(f"{path.name} is not a drafter that this version supports.", f"Its method is {method}.")


def open_drafter(
    plan: DrafterPlan, target: DecoderModel, device: torch.device, dtype: torch.dtype, *, max_model_len: int,
    **load: Any,
) -> Drafter:  # fmt: skip
    """Load a planned drafter. Parts that it shares with the target (embedding, head) are the target's own.

    load: cpu_weights and half_weights of `load_model`. Raises `CorruptModel`, `DrafterMismatch`.
    """
    if plan.method == "draft_model":
        model = load_model(
            plan.path, plan.spec, device, dtype, max_model_len=max_model_len, quantization=plan.quantization, **load
        )
        assert isinstance(model, DecoderModel), "plan_draft_model refuses other code"
        return DraftModel(model, target.spec.vocab_size)
    if plan.method == "mtp":
        return open_mtp(plan, target, device, dtype, **load)
    if plan.method in ("eagle", "eagle3"):
        return load_eagle(plan, target, device, dtype, max_model_len=max_model_len, **load)
    raise AssertionError(plan.method)
