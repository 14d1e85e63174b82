"""A causal language model of `transformers` with localllm's attention.

`transformers` allows to replace a model's attention by a function of (module, q, k, v, ...). This one writes k and v
into the layer's paged cache and attends over it, as the native decoder does; the step's inputs are attached to the
attention modules. All else runs the module's own code, except that matrices use the `Linear` layout.
Unsupported: attention outside that interface, custom masks, values of another width than keys.
Does not know: requests, schedules.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from localllm.errors import CorruptModel, UnsupportedModel
from localllm.kernels.layer_kv import LayerKV
from localllm.kernels.layer_state import LayerCache
from localllm.kernels.paged_attention import AttentionPlan, paged_attention
from localllm.kernels.rotary_store_kv import rotary_store_kv
from localllm.kernels.store_kv import has_no_skipped_slot
from localllm.models.architectures.transformers_backend.spec import load_config
from localllm.models.inputs import ForwardInputs
from localllm.models.layers.attention import plan_step
from localllm.models.layers.linear import Linear
from localllm.models.spec.model_spec import ModelSpec

NAME = "localllm_paged"  # name of the attention function in transformers' table


@dataclass(slots=True)
class Step:
    """The attention inputs of one step, attached to the attention modules for the attention function."""

    inputs: ForwardInputs | None = None
    kv_cache: Sequence[LayerKV] = ()
    all_slots_valid: bool = False
    plans: dict[int | None, AttentionPlan] = field(default_factory=dict)


class TransformersModel:
    """A `CausalModel` for the runner. Its steps are not captured in CUDA graphs, as the module may launch anything."""

    capturable = False

    def __init__(
        self, module: Any, spec: ModelSpec, device: torch.device, dtype: torch.dtype, max_model_len: int
    ) -> None:
        """Take over the module: replace its attention and its matrices.

        Raises `UnsupportedModel` if the attention cannot be replaced.
        """
        self.spec, self.device, self.dtype, self.max_model_len = spec, device, dtype, max_model_len
        self._step = Step()
        _replace_attention(module, self._step, spec)
        use_device_layouts(module)
        self.module, self._head = module, _head_only(module, spec)

    def table_bytes(self, max_model_len: int) -> int:
        """Return 0: the module computes its rotary angles in each step."""
        return 0

    def serve_context(self, max_model_len: int) -> None:
        self.max_model_len = max_model_len

    @torch.inference_mode()
    def forward(self, inputs: ForwardInputs, cache: Sequence[LayerCache | None]) -> Tensor:
        """Return hidden states [T, hidden] before the head; writes the step's K and V."""
        step = self._step
        step.inputs, step.plans = inputs, {}
        step.kv_cache = [kept for kept in cache if isinstance(kept, LayerKV)]
        step.all_slots_valid = has_no_skipped_slot(inputs.groups[0].slot_mapping)
        try:
            out = self.module.base_model(
                **self._tokens(inputs), position_ids=inputs.positions[None], use_cache=False, return_dict=True
            )
        finally:
            step.inputs, step.kv_cache, step.plans = None, (), {}
        hidden: Tensor = out.last_hidden_state[0]
        return hidden

    def _tokens(self, inputs: ForwardInputs) -> dict[str, Tensor]:
        if inputs.embeds is None:
            return {"input_ids": inputs.token_ids[None]}
        rows: Tensor = self.module.get_input_embeddings()(inputs.token_ids)
        return {"inputs_embeds": rows.index_copy(0, *inputs.embeds)[None]}

    @torch.inference_mode()
    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Map hidden [L, hidden] to logits [L, vocab] fp32, with everything the model does after its layers."""
        logits: Tensor = self._head(inputs_embeds=hidden[None], use_cache=False, return_dict=True).logits[0]
        return logits.float()


def load_module(
    path: Path, spec: ModelSpec, device: torch.device, dtype: torch.dtype, *, trust_remote_code: bool
) -> Any:
    """Load the causal language model of folder `path` with eager attention onto the device."""
    from transformers import AutoModelForCausalLM

    config = load_config(path, trust_remote_code=trust_remote_code)
    # Falcon with ALiBi: eager attention of transformers 5.23 adds the slopes twice, once in the mask.
    attention = "sdpa" if config.model_type == "falcon" and config.alibi else "eager"
    module = read_module(
        AutoModelForCausalLM, path, config, dtype, attention=attention, trust_remote_code=trust_remote_code
    )
    return module.to(device)


def read_module(
    auto: Any,
    path: Path,
    config: Any,
    dtype: torch.dtype,
    *,
    attention: str,
    trust_remote_code: bool,
    unused: tuple[str, ...] = (),
) -> Any:
    """Load a transformers module from folder `path` onto the CPU.

    Raises `CorruptModel` if the module and the checkpoint do not have the same tensors. unused: prefixes of names that
    may differ.
    """
    try:
        with _quiet():
            module, report = auto.from_pretrained(
                path,
                config=config,
                dtype=dtype,
                attn_implementation=attention,
                local_files_only=True,
                trust_remote_code=trust_remote_code,
                output_loading_info=True,
            )
    except (OSError, ValueError, RuntimeError, KeyError, TypeError, AttributeError, ImportError) as error:
        text = str(error).strip().splitlines()
        raise CorruptModel(
            f"transformers cannot load {path}.", text[0] if text else f"{type(error).__name__}."
        ) from error
    for kind in ("missing_keys", "mismatched_keys", "unexpected_keys"):
        names = sorted(name for name in map(str, report.get(kind) or ()) if not name.startswith(unused))
        if names:
            raise CorruptModel(
                f"The checkpoint in {path} does not match {type(module).__name__}.",
                f"{kind.replace('_', ' ')}: {', '.join(names[:5])}{', ...' if len(names) > 5 else ''}.",
            )
    return module.eval().requires_grad_(False)


@contextmanager
def _quiet() -> Iterator[None]:
    """Turn off transformers' progress bars and tables; relevant problems are raised as errors."""
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)


def module_on_meta(path: Path, *, trust_remote_code: bool) -> Any:
    """Build the same model on `meta`: tensors have shapes only."""
    from transformers import AutoModelForCausalLM

    config = load_config(path, trust_remote_code=trust_remote_code)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)


def _replace_attention(module: Any, step: Step, spec: ModelSpec) -> None:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    attention = [part for part in module.modules() if hasattr(part, "layer_idx") and _projects(part)]
    if not module.is_backend_compatible() or not attention:
        raise UnsupportedModel(
            f"{spec.architecture} is not supported: its attention cannot be replaced.",
            "Its code in transformers does not use the attention interface.",
        )
    ALL_ATTENTION_FUNCTIONS.register(NAME, _attend)
    module.set_attn_implementation(NAME)
    for part in attention:
        object.__setattr__(part, "localllm_step", step)


def _attend(
    module: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attend: q [1, num_heads, T, head_dim], k and v [1, num_kv_heads, T, head_dim] -> [1, T, num_heads, head_dim]."""
    step: Step = module.localllm_step
    _refuse_unsupported(module, q, v, attention_mask, s_aux, others)
    inputs, kv = step.inputs, step.kv_cache[module.layer_idx]
    assert inputs is not None, "attention runs inside a step"
    num_heads, tokens, head_dim = q.shape[1:]
    if kv.k.shape[0] != k.shape[1] or kv.k.shape[-1] != head_dim:
        raise UnsupportedModel(
            f"Layer {module.layer_idx} has {k.shape[1]} key heads of {head_dim}.",
            f"config.json says {kv.k.shape[0]} of {kv.k.shape[-1]} in every layer.",
        )
    if sliding_window not in step.plans:
        step.plans[sliding_window] = plan_step(inputs, inputs.groups[0], kv.k, num_heads, sliding_window)
    rows = torch.cat([part[0].transpose(0, 1).reshape(tokens, -1) for part in (q, k, v)], dim=1)
    queries = rotary_store_kv(rows, kv, inputs.groups[0].slot_mapping, None, all_valid=step.all_slots_valid)
    out = paged_attention(
        queries,
        kv.k,
        kv.v,
        step.plans[sliding_window],
        scale=head_dim**-0.5 if scaling is None else scaling,
        softcap=softcap,
        sinks=None if s_aux is None else s_aux.float(),
        k_scale=kv.k_scale,
        v_scale=kv.v_scale,
    )
    return out.view(1, tokens, num_heads, head_dim), None


def _refuse_unsupported(
    module: Any, q: Tensor, v: Tensor, mask: Tensor | None, sinks: Tensor | None, others: dict[str, Any]
) -> None:
    if mask is not None:
        what = "a custom attention mask"
    elif q.shape[-1] != v.shape[-1]:
        what = f"values of width {v.shape[-1]} and keys of width {q.shape[-1]}"
    elif others.get("position_bias") is not None:
        what = "an attention bias"
    elif not (others.get("is_causal") or getattr(module, "is_causal", True)):
        what = "bidirectional attention"
    elif sinks is None and getattr(module, "sinks", None) is not None:
        what = "attention sinks that it does not pass on"
    else:
        return
    raise UnsupportedModel(
        f"{type(module).__name__} of transformers uses {what}.", "Paged attention does not support it."
    )


def _projects(module: nn.Module) -> bool:
    """Return whether a module has its own matrices, as attention has: a decoder layer may also have a layer index."""
    return any(isinstance(child, nn.Linear) or type(child).__name__ == "Conv1D" for child in module.children())


class _DeviceLinear(nn.Module):
    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = Linear(linear.weight.detach(), None if linear.bias is None else linear.bias.detach())
        self.in_features, self.out_features = linear.in_features, linear.out_features

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], -1)


def use_device_layouts(module: nn.Module) -> None:
    """Replace every plain Linear by one in the layout that the device reads fastest.

    A module that reads such a weight by name elsewhere would break; known ones (routers) do not use exactly
    `nn.Linear`.
    """
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                setattr(parent, name, _DeviceLinear(child))


class _Identity(nn.Module):
    """A stand-in for the base model that returns its input."""

    def forward(self, *positional: Any, inputs_embeds: Tensor, **named: Any) -> Any:
        from transformers.modeling_outputs import BaseModelOutputWithPast

        return BaseModelOutputWithPast(last_hidden_state=inputs_embeds)


def _head_only(module: Any, spec: ModelSpec) -> Any:
    """Return the model without its layers: what it does with hidden states, caps and scales included."""
    if module.base_model is module:
        raise UnsupportedModel(f"transformers' {spec.architecture} does not separate its output head from its layers.")
    head = copy.copy(module)
    head._modules = dict(module._modules)
    head._modules[module.base_model_prefix] = _Identity()
    return head
