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
from localllm.models.drafters.eagle import eagle_bytes, load_eagle, plan_eagle
from localllm.models.drafters.eagle_config import as_eagle
from localllm.models.drafters.mtp import mtp_bytes, open_mtp, plan_mtp
from localllm.models.loader import check_all_used, load_model, resident_bytes
from localllm.models.read_spec import read_spec
from localllm.models.spec.model_spec import ModelSpec
from localllm.models.spec.shard import Shard, drafter_shard


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
    num_layers: int | None = None, target_shard: Shard | None = None, **load: Any,
) -> Drafter:  # fmt: skip
    """Load a planned drafter. Parts that it shares with the target (embedding, head) are the target's own.

    num_layers: of the whole target; None: `target` has them all. target_shard: the rank's share of the target, of
    which the rank loads the same share of the drafter (`drafter_shard`); None: all of both. load: cpu_weights and
    half_weights of `load_model`. Raises `CorruptModel`, `DrafterMismatch`.
    """
    own = _share(plan, target_shard)
    if own is not None:
        load |= {"shard": own, "group": target.group}
    if plan.method == "draft_model":
        model = load_model(
            plan.path, plan.spec, device, dtype, max_model_len=max_model_len, quantization=plan.quantization, **load
        )
        assert isinstance(model, DecoderModel), "plan_draft_model refuses other code"
        if own is not None and own.index == 0:  # the others may use a part of the tensors
            check_all_used(plan.spec, [model.unused_tensors])
        return DraftModel(model, target.spec.vocab_size)
    if plan.method == "mtp":
        return open_mtp(plan, target, device, dtype, num_layers=num_layers, **load)
    if plan.method in ("eagle", "eagle3"):
        return load_eagle(plan, target, device, dtype, max_model_len=max_model_len, **load)
    raise AssertionError(plan.method)


def drafter_bytes(
    target: ModelSpec, device: torch.device, dtype: torch.dtype, *, max_model_len: int,
    target_shard: Shard | None = None, **load: Any,
) -> int:  # fmt: skip
    """Return the bytes of the loaded drafter of a target, from the headers: with rotary tables of its own, without
    parts of the target. target_shard and load: as of `open_drafter`."""
    plan = target.drafter
    assert plan is not None, "a target with a drafter"
    if (own := _share(plan, target_shard)) is not None:
        load |= {"shard": own}
    if plan.method == "mtp":
        return mtp_bytes(plan, target.num_layers, device, dtype, **load)
    length = min(max_model_len, plan.spec.max_position)
    if plan.method != "draft_model":
        return eagle_bytes(plan, target, device, dtype, max_model_len=length, **load)
    return resident_bytes(
        plan.path, plan.spec, device, dtype, max_model_len=length, quantization=plan.quantization, **load
    )


def _share(plan: DrafterPlan, target: Shard | None) -> Shard | None:
    """Return the rank's share of the drafter; None: all of it."""
    own = None if target is None else drafter_shard(plan.spec, target)
    return own if own is not None and target is not None and own.size == target.size else None
