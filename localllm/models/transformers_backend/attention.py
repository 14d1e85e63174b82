"""The attention of a transformers module, replaced by localllm's over the paged cache.

`transformers` allows to replace a model's attention by a function of (module, q, k, v, ...). This one writes k and v
into the layer's paged cache and attends over it, as the native decoder does. Values narrower than keys are padded with
zeros. The step's inputs are attached to the attention modules, where the function finds them.
Unsupported: attention outside that interface, custom masks, biases on scores, windows inside a mask.
Does not know: requests, schedules, recurrent states.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from localllm.errors import UnsupportedModel
from localllm.kernels.layer_cache import LayerCache, LayerKV, kv_of
from localllm.kernels.paged_attention import AttentionPlan, paged_attention
from localllm.kernels.rotary_store_kv import rotary_store_kv
from localllm.models.inputs import ForwardInputs
from localllm.models.layers.attention import plan_step
from localllm.models.spec.model_spec import ModelSpec, layer_window
from localllm.models.transformers_backend.module import code_names

NAME = "localllm_paged"  # name of the attention function in transformers' table
_INTERFACE = "ALL_ATTENTION_FUNCTIONS"  # the table, which every module that uses the interface reads by this name


@dataclass(slots=True)
class Step:
    """The inputs of one step, attached to the modules that read them."""

    spec: ModelSpec
    groups: tuple[int, ...]  # per layer the KV group that it reads and writes; -1: none
    inputs: ForwardInputs | None = None
    caches: Sequence[LayerCache | None] = ()  # per layer
    all_slots_valid: bool = False
    plans: dict[tuple[int, int, int | None], AttentionPlan] = field(default_factory=dict)
    """By KV group, query heads, and window."""


def replace_attention(module: Any, step: Step) -> None:
    """Let every attention module call `_attend` with this step. Raises `UnsupportedModel`."""
    from transformers import PreTrainedConfig
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    name = step.spec.architecture
    attention = [part for part in module.modules() if _INTERFACE in code_names(part)]
    if not attention:
        raise UnsupportedModel(
            f"{name} is not supported: its attention cannot be replaced.",
            "Its code in transformers does not use the attention interface.",
        )
    if any("create_chunked_causal_mask" in code_names(part) for part in module.modules()):
        raise UnsupportedModel(
            f"{name} is not supported.", "It attends in chunks of positions; full attention and windows are supported."
        )
    ALL_ATTENTION_FUNCTIONS.register(NAME, _attend)
    for part in module.modules():
        if isinstance(config := getattr(part, "config", None), PreTrainedConfig):
            config._attn_implementation = NAME
    for part in attention:
        object.__setattr__(part, "localllm_step", step)
        if "layer_idx" in inspect.signature(part.forward).parameters:
            _note_layer(part)


def _note_layer(part: Any) -> None:
    """Let a module that serves several layers, and is told which in each call, keep that number (Zamba)."""
    forward, signature = part.forward, inspect.signature(part.forward)

    def noted(*positional: Any, **named: Any) -> Any:
        part.layer_idx = signature.bind(*positional, **named).arguments["layer_idx"]
        return forward(*positional, **named)

    object.__setattr__(part, "forward", noted)


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
    """Attend: q and k [1, heads, T, head_dim], v [1, kv_heads, T, value_dim] -> [1, T, num_heads, value_dim]."""
    step: Step = module.localllm_step
    inputs, layer = step.inputs, module.layer_idx
    if inputs is None:  # between steps only the output head is called
        raise UnsupportedModel(
            f"{step.spec.architecture} is not supported.",
            "Supported: heads that read what the layers returned. Its head in transformers runs the layers itself, "
            "as the decoder of an encoder-decoder model does.",
        )
    _refuse_unsupported(module, q, k, v, attention_mask, s_aux, others)
    kv = _kv_of(step, layer, k)
    _check_window(module, step.spec, layer, sliding_window)
    num_heads, tokens, head_dim = q.shape[1:]
    group = step.groups[layer]
    own, key = inputs.groups[group], (group, num_heads, sliding_window)
    if key not in step.plans:
        step.plans[key] = plan_step(inputs, own, kv.k, num_heads, sliding_window)
    values = F.pad(v, (0, head_dim - v.shape[-1]))
    rows = torch.cat([part[0].transpose(0, 1).reshape(tokens, -1) for part in (q, k, values)], dim=1)
    queries = rotary_store_kv(rows, kv, own.slot_mapping, None, all_valid=step.all_slots_valid)
    out = paged_attention(
        queries,
        kv.k,
        kv.v,
        step.plans[key],
        scale=head_dim**-0.5 if scaling is None else scaling,
        softcap=softcap,
        sinks=None if s_aux is None else s_aux.float(),
        k_scale=kv.k_scale,
        v_scale=kv.v_scale,
    )
    return out.view(1, tokens, num_heads, head_dim)[..., : v.shape[-1]], None


def _kv_of(step: Step, layer: int, k: Tensor) -> LayerKV:
    """Return the layer's cache. Raises `UnsupportedModel` if keys [1, kv_heads, T, head_dim] do not fit into it."""
    kv = kv_of(step.caches[layer])
    if kv is None:
        raise UnsupportedModel(
            f"{step.spec.architecture} is not supported.",
            f"Layer {layer} attends, which its config does not say.",
        )
    if kv.k.shape[0] != k.shape[1] or kv.head_dim != k.shape[-1]:
        raise UnsupportedModel(
            f"{step.spec.architecture} is not supported: layer {layer} has {k.shape[1]} key heads of {k.shape[-1]}.",
            f"Its config says {kv.k.shape[0]} of {kv.head_dim} in this layer.",
        )
    return kv


def _check_window(module: Any, spec: ModelSpec, layer: int, handed: int | None) -> None:
    """Refuse a windowed layer whose code does not hand the window to attention: the window would be ignored."""
    window = layer_window(spec, layer)
    if window is not None and handed != window:
        raise UnsupportedModel(
            f"{spec.architecture} is not supported.",
            f"Layer {layer} has a window of {window} tokens, and {type(module).__name__} of transformers hands "
            f"{handed} to attention.",
        )


def _refuse_unsupported(
    module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, sinks: Tensor | None, others: dict[str, Any]
) -> None:
    if mask is not None:
        what = "a custom attention mask"
    elif q.shape[-1] != k.shape[-1] or k.shape[-1] < v.shape[-1]:
        what = f"queries, keys and values of width {q.shape[-1]}, {k.shape[-1]} and {v.shape[-1]}"
    elif q.shape[1] % k.shape[1] or k.shape[1] != v.shape[1]:
        what = f"{q.shape[1]} heads of queries, {k.shape[1]} of keys and {v.shape[1]} of values"
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
