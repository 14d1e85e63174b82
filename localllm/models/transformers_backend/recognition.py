"""Recognise a class of `transformers` that computes what localllm's own decoder computes.

A description (describe.py) is a guess. It is judged by a *twin*: the class with the checkpoint's own config, a few
layers, small sizes and random weights. Our decoder, built from the twin's description and saved tensors, must return
the twin's logits in fp32: beyond two windows, at the first positions and at the last ones that the model has, with
weights small and large (a limit or a cap is invisible to small numbers). The class may read no field of the config that
is not known here, since a field may matter at a length that no twin has. Whatever fails leaves the model with
transformers' code, with a reason.
Does not know: the checkpoint's weights (loading.py compares with them when they are loaded).
"""

from __future__ import annotations

import copy
import json
import logging
import math
import re
import tempfile
from collections.abc import Hashable, Mapping
from dataclasses import fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import nn

from localllm.errors import ModelError
from localllm.models.decoder.builder import DecoderBuilder
from localllm.models.decoder.decoder import DecoderModel
from localllm.models.formats.checkpoint import Checkpoint
from localllm.models.formats.registry import linear_format, open_checkpoint
from localllm.models.spec.family import Storage
from localllm.models.spec.model_spec import ModelSpec
from localllm.models.transformers_backend.config_class import (
    causal_classes,
    first_line,
    load_causal_config,
    load_config,
    text_part,
)
from localllm.models.transformers_backend.describe import (
    Flow,
    Guess,
    Unknown,
    fields_of,
    find_names,
    guesses,
    storage_of,
    storage_of_part,
    watch,
)
from localllm.models.transformers_backend.loading import eager_logits, paged_logits, require_equal, short_prompt
from localllm.models.transformers_backend.module import keep_decoder, read_module, read_quietly
from localllm.models.weights.layout import StoredLayout
from localllm.models.weights.meta import MetaWeights
from localllm.models.weights.weights import Weights

log = logging.getLogger(__name__)
CPU = torch.device("cpu")
MOST_LAYERS = 16  # of a twin
MOST_BYTES = 4 * 2**30  # of the first layers in fp32, which are compared when a model is loaded
MOST_POSITION = 2**17  # at which a twin is tried
TOLERANCE = {1.0: 1e-4, 4.0: 2e-3}
"""Largest difference relative to the largest logit, by the scale of a twin's weights: rounding of a few layers in fp32,
of which large scores make more."""
WINDOW, VOCAB_SIZE, EXPERTS = 12, 256, 8
_HINT = "--model-impl transformers runs it through transformers' code."
_WIDTHS = {
    "intermediate_size": 96, "ffn_dim": 96, "moe_intermediate_size": 40, "shared_expert_intermediate_size": 56,
    "shared_intermediate_size": 56,
}  # fmt: skip
_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
_PER_TOKEN = ("num_experts_per_tok",)


class Recognised(NamedTuple):
    """A class whose description has passed."""

    fields: Mapping[str, Any]  # of ModelSpec
    storage: Storage


def recognise(path: Path, architecture: str) -> Recognised | str:
    """Return what the class is in localllm's words, or why it is not recognised, as a clause. Of a model that reads
    more than text, its text part: by that part's own class, or by the whole model's."""
    try:
        text, whole = (
            load_causal_config(path, architecture, trust_remote_code=False),
            load_config(path, trust_remote_code=False),
        )
    except ModelError as error:
        return f"its config cannot be read: {error.what}"
    config = text if causal_classes(text) else whole
    plain = json.dumps(config.to_dict(), sort_keys=True, default=str)
    found = _judged(cast(Hashable, type(config)), plain, architecture)
    if isinstance(found, str) or config is whole or text.model_type == whole.model_type:
        return found
    return found._replace(storage=storage_of_part(architecture, found.storage))


@lru_cache(maxsize=16)
def _judged(kind: Hashable, config: str, architecture: str) -> Recognised | str:
    try:
        with torch.random.fork_rng(devices=[]):
            return _recognise(kind, json.loads(config), architecture)
    except Unknown as reason:
        return str(reason)
    except ModelError as error:
        return f"{error.what} {error.why}".strip()
    except Exception as error:  # a class may raise anything, and so may a small model of it
        log.debug("not recognised architecture=%s", architecture, exc_info=True)
        return f"a small model of it fails: {type(error).__name__}: {first_line(error)}"


def _recognise(kind: Any, config: dict[str, Any], architecture: str) -> Recognised:
    full = _built(kind.from_dict(copy.deepcopy(config)), on=torch.device("meta"))
    small, read = kind.from_dict(_shrunk(full, config)), set[str]()
    _note_fields(text_part(small), read)
    twin = _built(small, on=CPU)
    _draw(twin, 1.0)
    flow = watch(twin, torch.arange(VOCAB_SIZE)[None, ::5])
    if unknown := sorted(read.difference(_KNOWN_FIELDS)):
        raise Unknown(f"its code reads {', '.join(unknown)} from its config")
    for guess in guesses(twin, flow):
        with tempfile.TemporaryDirectory() as folder:
            trial = _Trial(twin, architecture, Path(folder), guess, flow)
            if trial.agrees(1.0, 0) and all(trial.agrees(scale, trial.last) for scale in TOLERANCE):
                return Recognised(fields_of(full, flow, guess, architecture), trial.storage)
    raise Unknown("it computes other logits than any decoder that its parts describe")


def missing_names(path: Path, spec: ModelSpec) -> str:
    """Return which tensor of a checkpoint does not fit the description, as a clause; empty: all do, or there are none
    yet."""
    if not any(path.glob("*.safetensors")):
        return ""
    try:
        with torch.inference_mode(), open_checkpoint(path) as checkpoint, torch.device("meta"):
            weights = MetaWeights(_layout(checkpoint, spec), CPU, torch.float32)
            DecoderBuilder(spec, weights, CPU, torch.float32).build(1)
            left = sorted(weights.unused())
    except ModelError as error:
        return f"its checkpoint has other tensors than the class: {error.what}"
    return f"its checkpoint has more tensors than the class, such as {left[0]}" if left else ""


def _layout(checkpoint: Checkpoint, spec: ModelSpec) -> StoredLayout:
    assert spec.recognised is not None
    return StoredLayout(checkpoint, spec, spec.recognised, linear_format(spec.quantization))


@torch.inference_mode()
def compare_first_layers(path: Path, spec: ModelSpec) -> None:
    """Compare the first layers of a recognised model with its class's, with the checkpoint's weights in fp32.

    Raises `UnsupportedModel` with the difference. A model whose first layers need more than `MOST_BYTES` in fp32,
    that is stored quantised, or that reads more than text, has only been compared as a twin.
    """
    if spec.text_type:
        return
    config = load_causal_config(path, spec.architecture, trust_remote_code=False)
    with open_checkpoint(path) as checkpoint:
        raw = config.to_dict()
        listed = {name: each for name, each in raw.items() if isinstance(each, list) and len(each) == spec.num_layers}
        count = _first_layers(_built(config, on=torch.device("meta")), listed)
        assert spec.recognised is not None
        first = spec.recognised.stored_name("model.layers.0.input").partition(".0.")[0]
        of_layer = re.compile(rf"{re.escape(first)}\.(\d+)\.")
        kept = {
            name: info for name, info in checkpoint.tensors.items()
            if (found := of_layer.match(name)) is None or int(found[1]) < count
        }  # fmt: skip
        if spec.quantization is not None or sum(math.prod(each.shape) * 4 for each in kept.values()) > MOST_BYTES:
            return
        own = _with_layers(spec, count)
        weights = Weights(_layout(checkpoint, own), CPU, torch.float32)
        ours = DecoderBuilder(own, weights, CPU, torch.float32).build(64)
        state = {name: checkpoint.tensor(name).clone() for name in kept}
    raw |= {name: each[:count] for name, each in listed.items()}
    raw[dict(config.attribute_map).get("num_hidden_layers", "num_hidden_layers")] = count
    module = read_module(
        _class_of(config), path, type(config).from_dict(raw), torch.float32, state=state, attention="eager",
        trust_remote_code=False,
    )  # fmt: skip
    prompt = short_prompt(own)
    theirs, decoded = eager_logits(module, prompt, CPU), paged_logits(ours, own, prompt, CPU, torch.float32)
    error = require_equal(decoded, theirs, torch.float32, spec.architecture, _HINT)
    log.info("verified architecture=%s first_layers=%d logits_error=%.1e", spec.architecture, count, error)


def _with_layers(spec: ModelSpec, count: int) -> ModelSpec:
    """Return the spec of the first layers alone."""
    own = {each.name: getattr(spec, each.name) for each in fields(spec) if each.name.startswith("layer_")}
    mixture = spec.mixture and replace(spec.mixture, layers=spec.mixture.layers[:count])
    return replace(spec, num_layers=count, mixture=mixture, **{name: value[:count] for name, value in own.items()})


class _Trial:
    """A twin beside our decoder."""

    def __init__(self, twin: Any, architecture: str, folder: Path, guess: Guess, flow: Flow) -> None:
        self.twin, self.folder = twin, folder
        self.spec = ModelSpec(architecture=architecture, dtype="float32", **fields_of(twin, flow, guess, architecture))
        self.last = min(self.spec.max_position, MOST_POSITION) - 32
        self._save()
        self.storage = storage_of(twin, flow, guess, self._spelled(), architecture)

    def agrees(self, scale: float, first: int) -> bool:
        """Return whether logits agree with weights of a scale, and positions from `first` on."""
        _draw(self.twin, scale)
        self._save()
        prompt = short_prompt(self.spec)
        theirs = eager_logits(self.twin, prompt, CPU, first)
        ours = paged_logits(self._decoder(first + 32), self.spec, prompt, CPU, torch.float32, first)
        error = float((ours - theirs).abs().max() / theirs.abs().max().clamp_(min=1e-30))
        log.debug("twin scale=%s first=%d error=%.1e", scale, first, error)
        return error <= TOLERANCE[scale]

    def _decoder(self, max_model_len: int) -> DecoderModel:
        with torch.inference_mode(), open_checkpoint(self.folder) as checkpoint:
            weights = Weights(StoredLayout(checkpoint, self.spec, self.storage, None), CPU, torch.float32)
            model = DecoderBuilder(self.spec, weights, CPU, torch.float32).build(max_model_len)
            if left := sorted(weights.unused()):
                raise Unknown(f"{left[0]} has no place in a decoder")
        return model

    def _save(self) -> None:
        with read_quietly():
            self.twin.save_pretrained(self.folder)

    def _spelled(self) -> dict[str, str]:
        """Return the names of tensors in saved files by the module's names, where these differ."""
        own = {**dict(self.twin.named_parameters()), **dict(self.twin.named_buffers())}
        with open_checkpoint(self.folder) as checkpoint:
            others = {name: checkpoint.tensor(name) for name in checkpoint.tensors if name not in own}
        return {
            name: other for name, tensor in own.items() for other, stored in others.items()
            if stored.shape == tensor.shape and torch.equal(stored, tensor)
        }  # fmt: skip


def _built(config: Any, *, on: torch.device) -> Any:
    """Return the class's model: on `meta` without data, else as it is initialised. Of a model that reads more than text
    only what answers, whose memory has any numbers."""
    config.dtype = torch.float32
    for part in (config, text_part(config)):
        if hasattr(part, "quantization_config"):
            del part.quantization_config
    is_whole = text_part(config) is not config
    with read_quietly(), torch.device("meta") if is_whole else on:
        module = _class_of(config)._from_config(config, attn_implementation="eager").float().eval()
    if is_whole:
        keep_decoder(module)
    return _with_memory(module, on) if is_whole and on.type != "meta" else module


def _with_memory(module: Any, device: torch.device) -> Any:
    """Return a module that was built without data with memory for it, and what is computed when it is built."""
    module.to_empty(device=device)
    module.tie_weights()
    for part in module.modules():
        if part._non_persistent_buffers_set:
            if not hasattr(part, "config"):
                raise Unknown(f"{type(part).__name__} is built from more than a config")
            fresh = type(part)(part.config)
            for name in part._non_persistent_buffers_set:
                setattr(part, name, getattr(fresh, name))
    return module


def _class_of(config: Any) -> Any:
    """Return the class that computes a model of text, or that answers about pictures."""
    from transformers import AutoModelForImageTextToText

    kinds = type(config).__mro__
    if found := [kind for each in kinds for kind in causal_classes(each)]:
        return found[0]
    whole = next(AutoModelForImageTextToText._model_mapping.get(each, None) or () for each in kinds)
    return whole[0] if isinstance(whole, tuple) else whole


def _draw(module: nn.Module, scale: float) -> None:
    """Give a twin random weights, the same for each scale but for their size. Nothing is zero or one by chance of its
    initialisation: each bias, norm and sink shows."""
    draws = torch.Generator().manual_seed(0)
    saved = module.state_dict()
    with torch.no_grad():
        for name in sorted(saved):
            tensor = saved[name]
            if not tensor.is_floating_point():
                continue
            values = torch.randn(tensor.shape, generator=draws)
            size = scale / tensor.shape[-1] ** 0.5 if tensor.ndim > 1 else 0.3 * scale
            tensor.copy_(
                values * size + (1.0 if tensor.ndim == 1 and "norm" in name and name.endswith("weight") else 0.0)
            )


def _shrunk(full: Any, config: dict[str, Any]) -> dict[str, Any]:
    """Return the config of a twin: the first layers that have one of each kind, and fewer heads of the same size."""
    text = text_part(full.config)
    if text is not full.config:
        name = next(name for name, part in vars(full.config).items() if part is text)
        return {**config, name: _shrunk_text(full, config[name])}
    return _shrunk_text(full, config)


def _shrunk_text(full: Any, config: dict[str, Any]) -> dict[str, Any]:
    text = text_part(full.config)
    small, real = copy.deepcopy(config), dict(text.attribute_map)

    def put(name: str, value: Any) -> None:
        name = real.get(name, name)
        if small.get(name) is not None:
            small[name] = value

    depth = text.num_hidden_layers
    listed = {name: value for name, value in config.items() if isinstance(value, list) and len(value) == depth}
    count = _first_layers(full, listed)
    put("num_hidden_layers", count)
    small |= {name: value[:count] for name, value in listed.items()}
    heads, kv = text.num_attention_heads, getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    few_kv = 4 if kv == heads else min(kv, 2)
    few = few_kv * min(heads // kv, 3)
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
    put("num_attention_heads", few)
    put("num_key_value_heads", few_kv)
    put("hidden_size", few * (head_dim if heads * head_dim == text.hidden_size else head_dim + 16))
    for name, width in _WIDTHS.items():
        put(name, width)
    put("sliding_window", WINDOW)
    put("vocab_size", VOCAB_SIZE)
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        if isinstance(small.get(name), int):
            small[name] = min(small[name], VOCAB_SIZE - 1)
    for name in _COUNTS:
        put(name, EXPERTS)
    for name in _PER_TOKEN:
        put(name, min(small.get(name) or 1, 3))
    if "shared_intermediate_size" in small and not config["shared_intermediate_size"]:
        small["shared_intermediate_size"] = 0
    return small


def _first_layers(full: Any, listed: Mapping[str, list[Any]]) -> int:
    """Return how many of the first layers have one of each kind. Raises `Unknown` for more than a twin may have."""
    names = find_names(full)
    kinds: dict[Any, int] = {}
    for index, layer in enumerate(getattr(names.decoder, names.layers)):
        shapes = tuple((name, tuple(each.shape)) for name, each in layer.named_parameters())
        kinds.setdefault((shapes, *(repr(value[index]) for value in listed.values())), index)
    count = max(2, 1 + max(kinds.values()))
    if count > MOST_LAYERS:
        raise Unknown(f"its kinds of layers are only complete after {count}")
    return count


def _note_fields(config: Any, read: set[str]) -> None:
    """Let the config note which fields are read, of those beyond the fields of all configs."""
    from transformers import PreTrainedConfig

    kind: Any = type(config)
    own = set(kind().to_dict()) - set(PreTrainedConfig().to_dict())

    def noted(self: Any, name: str) -> Any:
        if name in own:
            read.add(name)
        return kind.__getattribute__(self, name)

    config.__class__ = type(kind.__name__, (kind,), {"__getattribute__": noted})


_KNOWN_FIELDS = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "hidden_act", "hidden_activation", "activation_function",
    "max_position_embeddings", "rms_norm_eps", "layer_norm_eps", "norm_eps", "rope_parameters",
    "partial_rotary_factor", "layer_types", "sliding_window", "attention_bias", "mlp_bias", "use_bias",
    "attn_logit_softcapping", "final_logit_softcapping", "embedding_multiplier", "residual_multiplier",
    "attention_multiplier", "logits_scaling", "logit_scale", "layer_rope_theta", "no_rope_layers",
    "tie_word_embeddings", "use_qk_norm", "num_experts", "num_local_experts", "n_routed_experts",
    "num_experts_per_tok", "norm_topk_prob", "n_group", "topk_group", "routed_scaling_factor",
    "moe_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size", "n_shared_experts",
    "first_k_dense_replace", "decoder_sparse_step", "mlp_only_layers", "mlp_layer_types", "use_post_norm",
    "attention_dropout", "hidden_dropout", "resid_pdrop", "embd_pdrop", "dropout", "activation_dropout",
    "layerdrop", "initializer_range", "use_cache", "pad_token_id", "bos_token_id", "eos_token_id",
    "output_router_logits", "router_aux_loss_coef", "pretraining_tp", "qk_layernorm", "use_sliding_window",
    "max_window_layers", "qkv_bias", "attention_out_bias", "query_pre_attn_scalar", "residual_dropout",
    "embedding_dropout", "router_jitter_noise",
)  # fmt: skip
"""Fields that a description takes into account, or that matter to training alone."""
