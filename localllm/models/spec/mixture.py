"""A mixture of experts as described by config.json: number, size, layers, routing.

Does not know: weights, layers, families (architectures/ maps each family's fields).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from localllm.errors import CorruptModel, UnsupportedModel


@dataclass(frozen=True, slots=True)
class MixtureSpec:
    """The feed-forward part of a family with experts; kernels/moe/route.py explains the routing fields."""

    num_experts: int
    top_k: int
    intermediate_size: int  # intermediate size of one expert
    layers: tuple[bool, ...] = ()  # which layers are mixtures, the others being dense; empty: all
    scoring: str = "softmax"  # sigmoid, sparsemixer
    tolerance: float = 0.0  # with sparsemixer: logits that are lower than the best by at most this share are near it
    renormalize: bool = True
    least_sum: float = 1e-20  # divisor of chosen weights whose sum is smaller
    num_groups: int = 1
    top_groups: int = 1
    scale: float = 1.0
    router_in_fp32: bool = False  # logits from an fp32 product, whatever the model's type
    router_bias: bool = False
    correction_bias: bool = False  # added to the scores only when choosing experts (DeepSeek-V3)
    expert_bias: bool = False
    shared_size: int = 0  # intermediate size of the shared expert; 0: there is none
    shared_gate: bool = False
    activation: str | None = None  # None: the model's hidden_act
    layer_limits: tuple[float, ...] = ()
    """Per layer the limit of the experts' activation, as of `ModelSpec.layer_limits`; empty: none in any."""
    scales_inputs: bool = False  # the weight of the only chosen expert multiplies its input (Llama 4)
    latent_size: int = 0  # width that experts read and write, between two more matrices; 0: the model's (Nemotron 3)
    output_scale: float = 1.0  # on the sum of the routed and the shared experts (Cohere averages the two)
    beside_mlp: bool = False
    """The layer has a dense feed-forward part too; router and experts norm the stream for themselves (Gemma 4)."""
    expert_scale: bool = False  # a stored factor for each expert multiplies its weight (Gemma 4)

    def is_in(self, layer: int) -> bool:
        """Return whether this layer is a mixture."""
        return not self.layers or self.layers[layer]


_NUMBERS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Names of the number of experts; transformers 5 renames some families' fields."""


def mixture(config: Mapping[str, Any], *, size: str = "moe_intermediate_size", **fields: Any) -> MixtureSpec:
    """Parse the mixture of a config. `size` is the field with the size of an expert; `fields` fill the rest of the
    spec.

    Raises `CorruptModel` for impossible numbers.
    """
    number = next((name for name in _NUMBERS if config.get(name) is not None), _NUMBERS[0])
    spec = MixtureSpec(_count(config, number), _count(config, "num_experts_per_tok"), _count(config, size), **fields)
    if spec.num_experts % spec.num_groups or not 1 <= spec.top_groups <= spec.num_groups:
        raise CorruptModel(
            f"config.json divides {spec.num_experts} experts into {spec.num_groups} groups and takes the best "
            f"{spec.top_groups}.",
            "Groups must have equal sizes, and no more can be selected than exist.",
        )
    eligible = spec.num_experts // spec.num_groups * spec.top_groups
    if spec.top_k > eligible:
        raise CorruptModel(
            f"config.json sends each token to {spec.top_k} experts and has {eligible} to choose from.",
            f"num_experts_per_tok is {spec.top_k}, {number} is {spec.num_experts}.",
        )
    if spec.layers and len(spec.layers) != config["num_hidden_layers"]:
        raise CorruptModel(f"config.json lists {len(spec.layers)} layers with or without experts.")
    return spec


def sigmoid_mixture(config: Mapping[str, Any], *, size: str = "moe_intermediate_size", **fields: Any) -> MixtureSpec:
    """Parse a mixture that routes as DeepSeek-V3's: sigmoid scores, corrected for the choice only, computed in fp32."""
    return mixture(config, size=size, scoring="sigmoid", correction_bias=True, router_in_fp32=True, **fields)


def grouping(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return n_group and topk_group; 1 where they are missing or null."""
    return {"num_groups": config.get("n_group") or 1, "top_groups": config.get("topk_group") or 1}


def sparse_layers(config: Mapping[str, Any]) -> tuple[bool, ...]:
    """Return Qwen's choice of layers: every decoder_sparse_step-th is a mixture, except those in mlp_only_layers."""
    step, dense = config.get("decoder_sparse_step") or 1, set(config.get("mlp_only_layers") or ())
    return tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(_count(config, "num_hidden_layers")))


def layers_after(config: Mapping[str, Any], first: int) -> tuple[bool, ...]:
    """Return DeepSeek's choice of layers: the `first` ones are dense."""
    return tuple(layer >= first for layer in range(_count(config, "num_hidden_layers")))


def typed_layers(config: Mapping[str, Any]) -> tuple[bool, ...]:
    """Return which layers `mlp_layer_types` names sparse; empty if config.json does not have that list.

    Raises `UnsupportedModel` for other kinds of layers.
    """
    kinds = config.get("mlp_layer_types") or ()
    unknown = sorted({str(kind) for kind in kinds} - {"dense", "sparse"})
    if unknown:
        raise UnsupportedModel(
            f"Feed-forward layers of type {', '.join(unknown)} are not supported.", "Supported: dense, sparse."
        )
    return tuple(kind == "sparse" for kind in kinds)


def by_method(config: Mapping[str, Any], known: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the entry of `known` for the config's topk_method. Raises `UnsupportedModel`."""
    method = str(config.get("topk_method"))
    if method not in known:
        raise UnsupportedModel(
            f"Experts chosen by {method!r} are not supported.", f"Supported: {', '.join(sorted(known))}."
        )
    return known[method]


def _count(config: Mapping[str, Any], name: str) -> int:
    value = config.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise CorruptModel(f"config.json has {name} = {value!r}.", "It must be a whole number above 0.")
    return value


STAGING_PLACES = 2
"""Buffers of a device for experts on their way: one is filled while the other is read."""
STAGED_BYTES = 256 * 2**20
"""The experts that are copied to a device together take at most this, or are one."""


def staged_bytes(record: int, count: int) -> int:
    """Return the bytes of the experts of a layer that are copied to a device together. record: bytes of an expert;
    count: experts of the layer."""
    return record * min(count, max(1, STAGED_BYTES // record))
