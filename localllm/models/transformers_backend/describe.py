"""Describe a decoder of `transformers` in the words of localllm's own: fields of ModelSpec, and names of its tensors.

Parts are told by their shapes and names, and by the order in which a layer calls them with which inputs. What a shape
cannot tell is left open as a `Guess` (whether neighbouring dimensions rotate together, how experts are scored):
recognition.py tries these on a small twin of the model. Every parameter of a layer must have a place, or the layer is
unknown.
Does not know: whether a description is right (recognition.py), weights, files.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from localllm.models.families.text_part import unlisted
from localllm.models.spec.family import Family, Storage, grouped_qkv_rows
from localllm.models.spec.fields import NormSpec, activation_of
from localllm.models.spec.mixture import MixtureSpec
from localllm.models.spec.rope import RopeSpec, read_ropes
from localllm.models.transformers_backend.config_class import text_part
from localllm.models.transformers_backend.layouts import code_names
from localllm.models.transformers_backend.spec import layers_of, sizes_of

_NAMES: Mapping[str, tuple[str, ...]] = {
    "q_proj": ("q_proj", "query"),
    "k_proj": ("k_proj", "key"),
    "v_proj": ("v_proj", "value"),
    "o_proj": ("o_proj", "out_proj", "dense"),
    "qkv_proj": ("qkv_proj", "query_key_value", "Wqkv"),
    "q_norm": ("q_norm", "q_layernorm", "query_layernorm"),
    "k_norm": ("k_norm", "k_layernorm", "key_layernorm"),
    "gate_proj": ("gate_proj",),
    "up_proj": ("up_proj", "fc1", "c_fc", "dense_h_to_4h"),
    "down_proj": ("down_proj", "fc2", "dense_4h_to_h", "output_linear"),
    "gate_up_proj": ("gate_up_proj", "input_linear"),
    "shared_expert": ("shared_expert", "shared_experts", "shared_mlp"),
    "shared_expert_gate": ("shared_expert_gate",),
    "gate": ("gate", "router"),
}
"""Names of parts in classes of transformers, by the builder's names."""
_ACTIVATIONS = ("hidden_activation", "hidden_act", "activation_function")
_ORDERS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "NANM": ("pre_norm", ("input_layernorm", "post_attention_layernorm")),
    "NNAM": ("parallel", ("input_layernorm", "post_attention_layernorm")),
    "NAM": ("parallel_one_norm", ("input_layernorm",)),
    "ANMN": ("post_norm", ("post_attention_layernorm", "post_feedforward_layernorm")),
    "NANNMN": (
        "sandwich",
        (
            "input_layernorm",
            "post_attention_layernorm",
            "pre_feedforward_layernorm",
            "post_feedforward_layernorm",
        ),
    ),
}
"""Topologies by the order in which a layer calls its norms (N), attention (A) and feed-forward part (M)."""


class Unknown(Exception):
    """A class has a part that localllm's decoder does not have. Its text says which, as a clause."""


class Guess(NamedTuple):
    """One guess at what neither names nor shapes tell."""

    interleaved: bool = False
    grouped_rows: bool = False  # of a fused q, k, v matrix: by key head
    norms_rotated: bool = False
    rotated: str = "all"  # layers: all, windowed, listed
    scoring: str = "softmax"
    renormalize: bool = True


@dataclass(frozen=True, slots=True)
class Flow:
    """The order of a layer's parts, and the factors between them, as a run of a small model shows them."""

    attention: str
    feed: tuple[str, ...]  # children of a layer that make its feed-forward part, the first called one first
    topology: str
    norms: Mapping[str, str]  # names of a layer's norms, by the builder's
    residual_scale: str  # the source of a factor, as `_sources` names it
    final_norm: str = ""  # name within the decoder
    embedding_scale: str = "1"
    scales_given: bool = False  # embeddings that a request supplies, too
    logits_scale: str | None = "1"  # None: logits are not a multiple of what the head makes
    norm: NormSpec = field(default_factory=NormSpec)


class ModuleNames(NamedTuple):
    """The places of a decoder's parts in its module."""

    decoder: nn.Module
    path: str  # of the decoder, within the whole module
    layers: str  # name of the list of layers in it
    embedding: str
    head: str


def find_names(module: Any) -> ModuleNames:
    """Return the places of the decoder's parts. Raises `Unknown`."""
    decoder = module.get_decoder() if hasattr(module, "get_decoder") else module.base_model
    count = text_part(module.config).num_hidden_layers
    lists = [name for name, part in decoder.named_children() if isinstance(part, nn.ModuleList) and len(part) == count]
    paths = {id(part): name for name, part in module.named_modules()}
    embedding, head = module.get_input_embeddings(), module.get_output_embeddings()
    if len(lists) != 1 or not isinstance(embedding, nn.Embedding) or not isinstance(head, nn.Linear):
        raise Unknown("its embedding, its layers and its head are not where they usually are")
    return ModuleNames(decoder, paths[id(decoder)], lists[0], paths[id(embedding)], paths[id(head)])


# ---- what a run shows ------------------------------------------------------------------------------------------------


class _PartCall(NamedTuple):
    name: str
    given: Tensor
    made: Tensor


@torch.inference_mode()
def watch(module: Any, token_ids: Tensor) -> Flow:
    """Return the order of parts from a run of a small model. Raises `Unknown`: layers differ, or the order has no
    topology."""
    names = find_names(module)
    layers: Sequence[nn.Module] = getattr(names.decoder, names.layers)
    calls: list[list[_PartCall]] = [[] for _ in layers]
    whole: list[_PartCall] = []
    hooks = [
        part.register_forward_hook(_noted(into, name), with_kwargs=True)
        for into, owner in [*zip(calls, layers, strict=True), (whole, names.decoder)]
        for name, part in owner.named_children()
        if not isinstance(part, nn.ModuleList)
    ]
    hooks += [
        part.register_forward_hook(_noted(whole, f"layer {index}"), with_kwargs=True)
        for index, part in enumerate(layers)
    ]
    ends = [module.get_input_embeddings(), module.get_output_embeddings()]
    hooks += [
        part.register_forward_hook(_noted(whole, name), with_kwargs=True)
        for name, part in zip(("embedding", "head"), ends, strict=True)
    ]
    try:
        logits = module(input_ids=token_ids, use_cache=False, return_dict=True).logits
    finally:
        for hook in hooks:
            hook.remove()
    given = module(inputs_embeds=ends[0](token_ids), use_cache=False, return_dict=True).logits
    flows = [
        _flow_of(module, layer, own, next(each for each in whole if each.name == f"layer {index}"))
        for index, (layer, own) in enumerate(zip(layers, calls, strict=True))
    ]
    if any(flow != flows[0] for flow in flows):
        raise Unknown("its layers call their parts in different orders")
    norm_calls = [each.name for each in whole if _is_norm(getattr(names.decoder, each.name, None))]
    if len(norm_calls) != 1:
        raise Unknown("it has other norms around its layers than one behind them")
    at = {each.name: each for each in whole}
    head = _ratio(logits, at["head"].made)
    return replace(
        flows[0],
        final_norm=norm_calls[0],
        embedding_scale=_source(module, _ratio(at["layer 0"].given, at["embedding"].made), "the embedding"),
        scales_given=torch.allclose(given, logits, rtol=1e-3),
        logits_scale=None if head is None else _source(module, head, "the logits"),
        norm=_norm_of([getattr(names.decoder, norm_calls[0])], layers, flows[0].norms.values()),
    )


def _norm_of(around: Sequence[nn.Module], layers: Sequence[nn.Module], within: Iterable[str]) -> NormSpec:
    """Return what all norms of the stream compute. Raises `Unknown` if they differ."""
    parts = [*around, *(getattr(layer, name) for layer in layers for name in within)]
    found = {norm_spec(part) for part in parts}
    if len(found) != 1:
        raise Unknown("its norms differ")
    return found.pop()


def norm_spec(part: nn.Module) -> NormSpec:
    """Return what a norm computes, by trying it. Raises `Unknown`."""
    eps = next((getattr(part, name) for name in ("variance_epsilon", "eps") if hasattr(part, name)), None)
    weight, bias = getattr(part, "weight", None), getattr(part, "bias", None)
    if not isinstance(eps, float) or not isinstance(weight, Tensor):
        raise Unknown(f"{type(part).__name__} has no weight or no epsilon")
    width = weight.numel()
    x = torch.linspace(-0.02, 0.05, 4 * width, dtype=torch.float32).view(4, width).sin() * 0.01
    made = part(x.view(4, *weight.shape))
    for kind, plus_one in product(("rms", "layer"), (False, True)):
        y = x - x.mean(-1, keepdim=True) if kind == "layer" else x
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps) * (weight.flatten() + plus_one)
        y = y if bias is None else y + bias
        if torch.allclose(y.view_as(made), made, rtol=1e-4, atol=1e-5):
            return NormSpec(eps, "rms" if kind == "rms" else "layer", bias=bias is not None, plus_one=plus_one)
    raise Unknown(f"{type(part).__name__} is neither RMSNorm nor LayerNorm")


_FACTORS = ("embedding_multiplier", "residual_multiplier", "logits_scaling", "logit_scale", "mup_scale")


def _sources(module: Any) -> dict[str, float]:
    """Return the numbers of a model by which its code may multiply, by name."""
    text = text_part(module.config)
    found = {"1": 1.0, "sqrt(hidden_size)": text.hidden_size**0.5}
    for name in _FACTORS:
        value = getattr(text, name, None)
        if isinstance(value, int | float) and not isinstance(value, bool) and value:
            found |= {name: float(value), f"1/{name}": 1 / value}
    return found


def _source(module: Any, factor: float | None, what: str) -> str:
    if factor is None:
        raise Unknown(f"{what} is changed by more than a factor")
    near = [name for name, value in _sources(module).items() if abs(value - factor) <= 1e-5 * abs(factor)]
    if not near:
        raise Unknown(f"{what} is multiplied by {factor:.6g}, which its config does not have")
    return near[0]


def _noted(into: list[_PartCall], name: str) -> Any:
    def note(_: nn.Module, given: tuple[Any, ...], named: Mapping[str, Any], made: Any) -> None:
        tensors = [each for each in (*given, *named.values()) if isinstance(each, Tensor)]
        first = named.get("hidden_states", tensors[0] if tensors else None)
        made = made[0] if isinstance(made, tuple) else getattr(made, "last_hidden_state", made)
        if isinstance(first, Tensor) and isinstance(made, Tensor):
            into.append(_PartCall(name, first.clone(), made.clone()))

    return note


def _flow_of(module: Any, layer: nn.Module, calls: Sequence[_PartCall], own: _PartCall) -> Flow:
    parts = dict(layer.named_children())
    attention = [name for name, part in parts.items() if "ALL_ATTENTION_FUNCTIONS" in code_names(part)]
    if len(attention) != 1:
        raise Unknown("a layer has not just one attention")
    order, norms, feed, at = "", list[str](), list[str](), dict[str, _PartCall]()
    for call in calls:
        kind = "N" if _is_norm(parts[call.name]) else "A" if call.name == attention[0] else "M"
        if kind == "M" and not any(True for _ in parts[call.name].parameters()):
            continue  # an activation, dropout
        if kind == "N":
            norms.append(call.name)
        if kind == "M":
            feed.append(call.name)
            if len(feed) > 1:
                continue
        order += kind
        at.setdefault(kind, call)
    by_name = {call.name: call for call in calls}
    if order == "NANM" and torch.equal(by_name[norms[1]].given, own.given):
        order = "NNAM"
    if order not in _ORDERS or len(set(norms)) != len(norms):
        raise Unknown(f"a layer calls norms, attention and feed-forward part in the order {order}")
    topology, roles = _ORDERS[order]
    source = "1"
    if topology in ("pre_norm", "sandwich"):
        is_sandwich = topology == "sandwich"
        added = by_name[norms[1]].made if is_sandwich else at["A"].made
        after = by_name[norms[2 if is_sandwich else 1]].given
        source = _source(module, _ratio(after - own.given, added), "what attention returns")
    return Flow(attention[0], tuple(feed), topology, dict(zip(roles, norms, strict=True)), source)


def _ratio(made: Tensor, given: Tensor) -> float | None:
    """Return the factor by which one tensor is a multiple of another; None: it is none."""
    if made.shape != given.shape:
        return None
    made, given = made.double().flatten(), given.double().flatten()
    factor = float(made @ given / (given @ given))
    return factor if float((made - factor * given).abs().max()) <= 1e-4 * float(made.abs().max()) else None


def _is_norm(part: object) -> bool:
    return isinstance(part, nn.Module) and "norm" in type(part).__name__.lower()


# ---- a description ---------------------------------------------------------------------------------------------------


def guesses(module: Any, flow: Flow) -> Iterator[Guess]:
    """Yield what may be meant, the likeliest first."""
    text, parts = text_part(module.config), _parts(module, flow)
    attention = next(iter(parts.values())).attention
    fused, normed = "qkv_proj" in attention, "q_norm" in attention
    routed = any(each.experts for each in parts.values())
    stated = getattr(text, "norm_topk_prob", None)
    kinds = set(getattr(text, "layer_types", None) or ())
    listed = any(getattr(text, name, None) for name in _LISTS_OF_ROTATION)
    yield from (
        Guess(*each)
        for each in product(
            (False, True),
            (False, True) if fused else (False,),
            (False, True) if normed else (False,),
            (*(("listed",) if listed else ()), "all", *(("windowed",) if len(kinds) > 1 else ())),
            ("softmax", "sigmoid") if routed else ("softmax",),
            ((True, False) if stated is None else (bool(stated),)) if routed else (True,),
        )
    )


_LISTS_OF_ROTATION = ("layer_rope_theta", "no_rope_layers")


@dataclass(slots=True)
class _LayerParts:
    """A layer's parts with parameters by the builder's names, each with its path within the layer."""

    attention: dict[str, tuple[str, Any]]
    feed: dict[str, tuple[str, Any]]
    sinks: str = ""
    experts: str = ""
    expert_size: int = 0


def _parts(module: Any, flow: Flow) -> dict[int, _LayerParts]:
    names = find_names(module)
    return {index: _parts_of(layer, flow) for index, layer in enumerate(getattr(names.decoder, names.layers))}


def _parts_of(layer: nn.Module, flow: Flow) -> _LayerParts:
    """Return the parts of a layer. Raises `Unknown` for a parameter without a place."""
    found = _LayerParts({}, {})
    placed = {f"{name}.{rest}" for name in flow.norms.values() for rest, _ in getattr(layer, name).named_parameters()}
    for path, part in getattr(layer, flow.attention).named_modules():
        role = _role(path)
        if role in ("q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj", "q_norm", "k_norm"):
            found.attention[role] = (f"{flow.attention}.{path}", part)
            placed |= {f"{flow.attention}.{path}.{name}" for name, _ in part.named_parameters()}
    if hasattr(getattr(layer, flow.attention), "sinks"):
        found.sinks = f"{flow.attention}.sinks"
        placed.add(found.sinks)
    for child in flow.feed:
        for path, part in getattr(layer, child).named_modules(prefix=child):
            if not (role := _role(path)) or not isinstance(part, nn.Module):
                continue
            inner = "shared_expert." if any(_role(up) == "shared_expert" for up in path.split(".")[:-1]) else ""
            if role in ("gate_proj", "up_proj", "down_proj", "gate_up_proj") and isinstance(part, nn.Linear):
                found.feed[inner + role] = (path, part)
            elif role in ("gate", "shared_expert_gate") and getattr(part, "weight", None) is not None:
                found.feed[role] = (path, part)
            else:
                continue
            placed |= {f"{path}.{name}" for name, _ in part.named_parameters()}
        for path, part in getattr(layer, child).named_modules(prefix=child):
            if {name for name, _ in part.named_parameters(recurse=False)} == {"gate_up_proj", "down_proj"}:
                found.experts, found.expert_size = path, part.down_proj.shape[-1]
                placed |= {f"{path}.gate_up_proj", f"{path}.down_proj"}
    if left := sorted({name for name, _ in layer.named_parameters()} - placed):
        raise Unknown(f"a layer has {', '.join(left[:3])}")
    return found


def _role(path: str) -> str:
    last = path.rpartition(".")[2]
    return next((role for role, names in _NAMES.items() if last in names), "")


def fields_of(module: Any, flow: Flow, guess: Guess, architecture: str) -> dict[str, Any]:
    """Return the fields of ModelSpec of a model, which may be on `meta`. flow: of a small model of the same class and
    config. Raises `Unknown`, and `UnsupportedModel` as `layers_of` does."""
    config, text, parts = module.config, text_part(module.config), _parts(module, flow)
    names, sources = find_names(module), _sources(module)
    sizes = sizes_of(config)
    windows = layers_of(text, architecture)
    layer: nn.Module = getattr(names.decoder, names.layers)[0]
    raw = {**text.to_dict(), "max_position_embeddings": sizes["max_position"]}
    rope, local = read_ropes(raw, sizes["head_dim"])
    scale = getattr(getattr(layer, flow.attention), "scaling", None)
    head = module.get_output_embeddings()
    fields = {
        **sizes,
        **windows,
        "topology": flow.topology,
        "norm": flow.norm,
        "hidden_act": activation_of(next(getattr(text, name) for name in _ACTIVATIONS if hasattr(text, name))),
        "rope": rope,
        "local_rope": local,
        "rope_interleaved": guess.interleaved,
        "qk_norm_last": guess.norms_rotated,
        "scales_given_embeds": flow.scales_given and flow.embedding_scale != "1",
        "attention_scale": None if scale is None else float(scale),
        "attention_softcap": getattr(text, "attn_logit_softcapping", None),
        "lm_head_bias": head.bias is not None,
        **_biases(parts),
        **_feed_forward(parts, text, guess),
        **_qk_norm(parts, flow.norm, sizes["head_dim"]),
    }
    if any(each.sinks for each in parts.values()):
        fields["attention_sinks"] = True
        fields["layer_has_sinks"] = tuple(bool(each.sinks) for each in parts.values())
    for own, name in (("embedding_scale", flow.embedding_scale), ("residual_multiplier", flow.residual_scale)):
        fields[own] = None if name == "1" else sources[name]
    if flow.logits_scale is None:
        fields["final_softcap"] = getattr(text, "final_logit_softcapping", None)
    elif flow.logits_scale != "1":
        fields["logits_multiplier"] = sources[flow.logits_scale]
    return {**fields, **_rotation(text, guess, fields)}


def _rotation(text: Any, guess: Guess, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return which layers rotate, and by which base. Raises `Unknown` for more bases than two kinds of layers have."""
    windowed = fields.get("layer_is_windowed") or (False,) * fields["num_layers"]
    if guess.rotated == "all":
        return {}
    if guess.rotated == "windowed":
        return {"layer_has_rope": tuple(windowed)}
    bases = getattr(text, "layer_rope_theta", None)
    if bases is None:
        return {"layer_has_rope": tuple(map(bool, text.no_rope_layers))}
    by_kind = {
        kind: {base for base, own in zip(bases, windowed, strict=True) if own is kind and base}
        for kind in (False, True)
    }
    if any(len(each) > 1 for each in by_kind.values()):
        raise Unknown("its layers rotate by more than two bases")
    rope: RopeSpec = fields["rope"]
    full, local = (next(iter(by_kind[kind]), rope.theta) for kind in (False, True))
    return {
        "rope": replace(rope, theta=float(full)),
        "local_rope": replace(rope, theta=float(local)) if local != full else None,
        "layer_has_rope": tuple(bool(base) for base in bases) if not all(bases) else (),
    }


def _has_bias(found: Iterable[tuple[str, Any]]) -> bool:
    has = {getattr(part, "bias", None) is not None for _, part in found}
    if len(has) > 1:
        raise Unknown("some of its matrices of a kind have a bias")
    return has == {True}


def _biases(parts: Mapping[int, _LayerParts]) -> dict[str, Any]:
    inner = ("q_proj", "k_proj", "v_proj", "qkv_proj")
    return {
        "attention_bias": _has_bias(each.attention[n] for each in parts.values() for n in inner if n in each.attention),
        "attention_out_bias": _has_bias(each.attention["o_proj"] for each in parts.values()),
        "mlp_bias": _has_bias(part for each in parts.values() for n, part in each.feed.items() if n.endswith("_proj")),
    }


def _qk_norm(parts: Mapping[int, _LayerParts], norm: NormSpec, head_dim: int) -> dict[str, Any]:
    found = [each.attention.get(name) for each in parts.values() for name in ("q_norm", "k_norm")]
    if not any(found):
        return {"qk_norm": None, "qk_norm_last": False}
    shapes = {None if each is None else tuple(each[1].weight.shape) for each in found}
    if None in shapes or any(each is not None and hasattr(each[1], "bias") for each in found):
        raise Unknown("only some of its queries and keys are normed, or with a bias")
    if len({shape for shape in shapes if shape is not None and len(shape) == 1}) != len(shapes):
        raise Unknown("its queries and keys are normed in another way")
    return {"qk_norm": "head" if shapes == {(head_dim,)} else "whole"}


def _feed_forward(parts: Mapping[int, _LayerParts], text: Any, guess: Guess) -> dict[str, Any]:
    dense = {index: each for index, each in parts.items() if not each.experts}
    widths = {each.feed["down_proj"][1].in_features for each in dense.values() if "down_proj" in each.feed}
    if any("down_proj" not in each.feed for each in dense.values()) or len(widths) > 1:
        raise Unknown("its feed-forward parts are of another kind, or of several widths")
    gated = {
        bool(each.experts) or any(name.endswith(("gate_proj", "gate_up_proj")) for name in each.feed)
        for each in parts.values()
    }
    if len(gated) > 1:
        raise Unknown("only some of its feed-forward parts have a gate")
    fields: dict[str, Any] = {"mlp_gated": gated.pop(), "mixture": None}
    if widths:
        fields["intermediate_size"] = widths.pop()
    mixed = [each for each in parts.values() if each.experts]
    if mixed:
        own = tuple(bool(each.experts) for each in parts.values())
        fields["mixture"] = replace(_mixture(mixed[0], text, guess), layers=() if all(own) else own)
    return fields


def _mixture(layer: _LayerParts, text: Any, guess: Guess) -> MixtureSpec:
    gate, shared = layer.feed["gate"][1], layer.feed.get("shared_expert.down_proj")
    corrected = getattr(gate, "e_score_correction_bias", None) is not None
    return MixtureSpec(
        gate.weight.shape[0],
        text.num_experts_per_tok,
        layer.expert_size,
        scoring=guess.scoring,
        renormalize=guess.renormalize,
        num_groups=getattr(text, "n_group", None) or 1,
        top_groups=getattr(text, "topk_group", None) or 1,
        scale=float(getattr(text, "routed_scaling_factor", None) or 1.0),
        router_in_fp32=True,
        router_bias=getattr(gate, "bias", None) is not None,
        correction_bias=corrected,
        shared_size=0 if shared is None else shared[1].in_features,
        shared_gate="shared_expert_gate" in layer.feed,
    )


def storage_of(module: Any, flow: Flow, guess: Guess, spelled: Mapping[str, str], architecture: str) -> Storage:
    """Return how checkpoints of the class name its tensors. spelled: names in a saved small model by the module's
    names, where they differ. Raises `Unknown`."""
    names, rules = find_names(module), dict[str, str]()
    is_part = text_part(module.config) is not module.config

    def add(canonical: str, path: str) -> None:
        if rules.setdefault(canonical, path) != path:
            raise Unknown(f"its layers name {canonical} in different ways")

    def stored(name: str) -> str:
        """Return the stem in the checkpoint of a module's stem or tensor."""
        for end in ("", ".weight"):
            if name + end in spelled:
                return spelled[name + end].removesuffix(".weight")
        return name

    prefix = f"{names.path}.{names.layers}." if names.path else f"{names.layers}."
    fused = set[str]()
    for index, layer in _parts(module, flow).items():
        found = {f"self_attn.{role}": path for role, (path, _) in layer.attention.items()}
        found |= {f"mlp.{role}": path for role, (path, _) in layer.feed.items()}
        found |= dict(flow.norms)
        if layer.sinks:
            found["self_attn.sinks"] = layer.sinks
        if layer.experts:
            found |= {f"mlp.experts.{end}": f"{layer.experts}.{end}" for end in ("gate_up_proj", "down_proj")}
            found["mlp.experts"] = layer.experts
        for canonical, path in found.items():
            add(canonical, re.sub(rf"\.{index}\.", ".{}.", stored(f"{prefix}{index}.{path}"), count=1))
        fused |= {role.rpartition(".")[2] for role in (*layer.attention, *layer.feed)}
    if is_part:  # named as a model of text alone, of whose names a text part has several spellings
        rules = {own: re.sub(rf"^{re.escape(names.path)}\.", "model.", path) for own, path in rules.items()}
    renames = [
        (rf"^model\.layers\.(\d+)\.{re.escape(canonical)}(?=\.|$)", path.format(r"\g<1>"))
        for canonical, path in sorted(rules.items(), key=lambda rule: -len(rule[0]))
        if path != f"model.layers.{{}}.{canonical}"
    ]
    path = "model" if is_part else names.path
    ends = {"model.norm": f"{path}.{flow.final_norm}".lstrip(".")}
    if not is_part:
        ends |= {"model.embed_tokens": names.embedding, "lm_head": names.head}
    renames += [(rf"^{re.escape(own)}(?=\.)", stored(path)) for own, path in ends.items() if own != path]
    if "gate_up_proj" in fused and "gate_proj" in fused:
        raise Unknown("some of its gates are stored with the matrices beside them")
    storage = Storage(
        renames=_in_order(renames),
        fused_qkv="qkv_proj" if "qkv_proj" in fused else None,
        fused_gate_up="gate_up_proj" if "gate_up_proj" in fused else None,
        qkv_rows=grouped_qkv_rows if guess.grouped_rows else None,
    )
    return storage_of_part(architecture, storage) if is_part else storage


def storage_of_part(architecture: str, of: Storage) -> Storage:
    """Return how checkpoints name the tensors of a text part that is named like a model of text alone."""
    return unlisted(architecture, Family(architecture, (), storage=of)).storage


def _in_order(rules: Sequence[tuple[str, str]]) -> tuple[tuple[str, str], ...]:
    """Return renames in an order in which none applies to what an earlier one has made. Raises `Unknown` for none."""
    left, found = list(rules), list[tuple[str, str]]()
    while left:
        made = [path.replace(r"\g<1>", "0") for _, path in left]
        free = [
            rule
            for rule, name in zip(left, made, strict=True)
            if not any(re.match(pattern, name) for pattern, _ in left if pattern != rule[0])
        ]
        if not free:
            raise Unknown("the names of its tensors are exchanged")
        found += free
        left = [rule for rule in left if rule not in free]
    return tuple(found)
