"""The drafter with weights that the settings name: find it, plan it, and check that it reads the model's vocabulary.

Does not know: how a drafter is loaded (models/drafters) and run (runner/drafter_steps.py).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from localllm.config.settings import EngineConfig
from localllm.config.speculative import SpeculationChoice
from localllm.errors import DrafterMismatch, UnsupportedOption

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from localllm.models.fit import MemoryPlan
    from localllm.models.spec.model_spec import DrafterPlan, ModelSpec
    from localllm.text.tokenizer import Tokenizer


def with_drafter(config: EngineConfig, path: Path, spec: ModelSpec) -> ModelSpec:
    """Return the spec of the model in `path` with its drafter, if the settings name one. It is on this machine.

    Raises `ModelNotFound`, `DrafterMismatch`, and what reading a checkpoint raises.
    """
    choice = config.speculation
    if not choice.has_drafter:
        return spec
    from localllm.models.drafters.opening import plan_drafter
    from localllm.models.spec.model_spec import kv_groups, main_group

    windows = tuple(group.window for group in kv_groups(spec))
    if not windows or windows[main_group(windows)] is not None:
        raise DrafterMismatch(
            f"{spec.architecture} runs without drafters.", "A drafter needs the blocks of all tokens.",
            "Leave out --draft.",
        )  # fmt: skip
    where = _place(choice) if choice.drafter else path
    plan = plan_drafter(where, choice.kind, spec, path)
    quantization = choice.quantization or (config.quantization if plan.method == "mtp" else None)  # one checkpoint
    plan = replace(plan, num_drafts=choice.most or plan.num_drafts, quantization=quantization)
    length = min(plan.spec.max_position, choice.max_model_len or plan.spec.max_position)
    _refuse_early_taps(plan, max(config.pipeline_parallel_size or 1, len(config.pipeline_layer_partition)))
    return replace(spec, drafter=replace(plan, spec=replace(plan.spec, max_position=length)))


def _place(choice: SpeculationChoice) -> Path:
    """Return the folder or file of the named drafter. A drafter, unlike a model, may have its weights in
    pytorch_model.bin alone."""
    from localllm.models.formats.torch_file import is_torch_folder
    from localllm.models.library.catalog import adapter_folder, resolve_model

    if choice.revision is None and is_torch_folder(folder := adapter_folder(choice.drafter)):
        return folder
    return resolve_model(choice.drafter, choice.revision).path


def require_place(spec: ModelSpec, plan: MemoryPlan) -> None:
    """Raise `UnsupportedOption` if the plan divides the model in a way that its drafter does not support."""
    if spec.drafter is not None and plan.ranks:
        _refuse_early_taps(spec.drafter, 1 + plan.ranks[-1].stage)


def _refuse_early_taps(plan: DrafterPlan, stages: int) -> None:
    """Raise `UnsupportedOption` for a drafter in the last of several pipeline stages that reads the stream between
    layers, most of which are in other stages."""
    early = [str(layer) for layer in plan.taps if layer >= 0]
    if stages > 1 and early:
        raise UnsupportedOption(
            f"{plan.path.name} is not supported for a model in {stages} pipeline stages.",
            f"It reads the model before layers {', '.join(early)}, and runs in the last stage.",
            "--tensor-parallel-size instead of --pipeline-parallel-size, or leave out --draft.",
            param="draft",
        )


def check_vocabulary(spec: ModelSpec, tokenizer: Tokenizer, read_tokenizer: Callable[[Path], Tokenizer]) -> None:
    """Raise `DrafterMismatch` if a draft model has another text than its target for a token that both have.

    Layers that are trained for one model, as EAGLE's and MTP's, have its vocabulary.
    """
    plan = spec.drafter
    if plan is None or plan.method != "draft_model":
        return
    own = read_tokenizer(plan.path)
    for token_id in range(min(spec.vocab_size, plan.spec.vocab_size)):
        ours, drafters = tokenizer.token_bytes(token_id), own.token_bytes(token_id)
        if ours != drafters:
            raise DrafterMismatch(
                f"{plan.path.name} has another vocabulary than the model that it should draft for.",
                f"Token {token_id} is {drafters!r} there, and {ours!r} in the model.",
                "Use a model of the same family: its tokens must be the same.",
            )


def describe_choice(choice: SpeculationChoice, spec: ModelSpec) -> str:
    """Return the drafter in words, for the start's lines."""
    plan = spec.drafter
    assert plan is not None
    name = choice.drafter or "the model's own prediction layers"
    return f"{name} · {plan.method} · {plan.num_drafts} drafts at a time"
