"""The encoder of an encoder-decoder: transformers' own module, which makes the decoder's source of a prompt or sound.

The whole model is built without memory, its decoder is deleted, and the weights of the rest are read. The decoder is
localllm's own (families/encoder_decoder.py). What its cross-attention reads of a source is kept in a `SourcePool`.
Does not know: requests, which of them read a source.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from localllm.config.settings import EngineConfig
from localllm.kernels.layer_cache import LayerKV
from localllm.models.decoder.decoder import DecoderModel
from localllm.models.formats.at_load import AtLoad, of_sound
from localllm.models.inputs import SourceInputs
from localllm.models.spec.model_spec import ModelSpec
from localllm.models.transformers_backend.config_class import load_config
from localllm.models.transformers_backend.layouts import use_device_layouts
from localllm.models.transformers_backend.module import read_module
from localllm.models.weights.parameters import held_bytes


class HeldAs(NamedTuple):
    """The form of the weights of a model that transcribes: arguments of `load_model`."""

    half_weights: bool = False
    quantization: str | None = None
    cpu_weights: str = "fast"

    @staticmethod
    def asked(config: EngineConfig) -> HeldAs:
        """Return the form that the settings ask for."""
        return HeldAs(config.keeps_half_weights, config.quantization, config.cpu_weights)

    def of_sound(self, device: torch.device) -> AtLoad | None:
        """Return how the encoder's matrices are quantised; None: they are not. Raises `UnsupportedOption`."""
        return of_sound(self.quantization, device, self.cpu_weights)


class SourceEncoder:
    """A loaded encoder."""

    def __init__(self, module: Any, device: torch.device) -> None:
        self.module, self.device = module, device

    @property
    def bytes_held(self) -> int:
        return held_bytes(self.module)

    @torch.inference_mode()
    def encode(self, token_ids: Sequence[int] | Tensor) -> Tensor:
        """Return the states [S, hidden] of one prompt. Alone, so that they never depend on other prompts."""
        ids = torch.as_tensor(token_ids, device=self.device)[None]
        states: Tensor = self.module.get_encoder()(input_ids=ids, return_dict=True).last_hidden_state[0]
        return states


def load_encoder(path: Path, device: torch.device, dtype: torch.dtype, quantize: AtLoad | None = None) -> SourceEncoder:
    """Load the encoder of the model in folder `path`. quantize: see `use_device_layouts`. Raises `CorruptModel`,
    `UnsupportedModel`."""
    config = load_config(path, trust_remote_code=False)
    attention = "eager" if hasattr(config, "relative_attention_num_buckets") else "sdpa"
    # Sinusoids, which are seldom stored.
    computed = ("encoder.embed_positions.",) if config.model_type in ("marian", "pegasus") else ()
    module = read_module(
        _without_decoder(config), path, config, dtype, attention=attention, trust_remote_code=False, unused=computed
    )
    use_device_layouts(module, quantize=quantize)
    return SourceEncoder(module.to(device), device)


def with_encoder_bytes(path: Path, spec: ModelSpec) -> ModelSpec:
    """Return the spec of an encoder-decoder with the bytes of its encoder, without reading a weight."""
    if spec.source is None or spec.source.encoder_bytes:
        return spec
    return replace(spec, source=spec.source._replace(encoder_bytes=encoder_bytes(path, torch.float32)))


def encoder_bytes(path: Path, dtype: torch.dtype, quantize: AtLoad | None = None) -> int:
    """Return the bytes that `load_encoder` will hold, without reading a weight."""
    config = load_config(path, trust_remote_code=False)
    with torch.device("meta"):
        module = _without_decoder(config)(config).to(dtype)
        if quantize is not None:
            use_device_layouts(module, quantize=quantize)
    return held_bytes(module)


def _without_decoder(config: Any) -> type[Any]:
    """Return transformers' class of the model without a head and without its decoder."""
    from transformers import MODEL_MAPPING

    base: type[Any] = MODEL_MAPPING[type(config)]

    class WithoutDecoder(base):  # type: ignore[misc]
        _keys_to_ignore_on_load_unexpected = (r"(^|\.)decoder\.", "^lm_head", "^proj_out", "^final_logits_bias")

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            decoder: Any = self._modules.pop("decoder")
            if hasattr(decoder, "pos_emb"):  # Moonshine Streaming's, of the encoder's states
                self.decoder = torch.nn.Module()
                self.decoder.pos_emb, self.decoder.proj = decoder.pos_emb, decoder.proj
            if not hasattr(self, "shared"):  # it reads sound
                return
            self.encoder.embed_tokens.weight = self.shared.weight
            self._tied_weights_keys = {"encoder.embed_tokens.weight": "shared.weight"}
            self.all_tied_weights_keys = dict(self._tied_weights_keys)

    WithoutDecoder.__name__, WithoutDecoder.__module__ = base.__name__, base.__module__  # else no tensor is renamed
    return WithoutDecoder


class SourcePool:
    """The keys and values that the decoder's cross-attention reads of each source, in blocks. Which sources are kept
    is not decided here (engine/media.py)."""

    row_s = 0.0  # seconds that a token of a source takes: not measured

    def __init__(self, encoder: SourceEncoder, model: DecoderModel, layers: Sequence[LayerKV]) -> None:
        """layers: the keys and values of each layer. Block 0 is not used: tables are filled up with it."""
        self._encoder, self._model, self.layers = encoder, model, layers
        self._num_blocks, self._block_size = layers[0].k.shape[1:3]
        self._blocks: dict[bytes, tuple[list[int], int]] = {}  # by digest, and the tokens of the source
        self._free = list(range(1, self._num_blocks))

    def apply(self, plan: Any) -> None:
        """Drop the sources that a step's plan drops, then encode those that it encodes."""
        size = self._block_size
        for digest in plan.dropped:
            self._free += self._blocks.pop(digest)[0]
        for digest, _, inputs in plan.encodes:
            token_ids = inputs.pixels()["token_ids"]
            count = len(token_ids)
            blocks, self._free = self._free[: -(-count // size)], self._free[-(-count // size) :]
            self._blocks[digest] = blocks, count
            at = torch.arange(count)
            slots = torch.tensor(blocks)[at // size] * size + at % size
            states = self._encoder.encode(token_ids).to(self._model.dtype)
            self._model.store_source(states, self.layers, slots.to(self._encoder.device))

    def clear(self) -> None:
        """Forget all sources."""
        self._blocks.clear()
        self._free = list(range(1, self._num_blocks))

    def inputs(self, digests: Sequence[bytes]) -> SourceInputs:
        """Return what a step's tokens attend to. digests: of each token's source."""
        tables = [self._blocks[digest] for digest in digests]
        width = max(len(blocks) for blocks, _ in tables)
        rows = torch.tensor([blocks + [0] * (width - len(blocks)) for blocks, _ in tables], dtype=torch.int32)
        lens = tuple(count for _, count in tables)
        device = self._encoder.device
        return SourceInputs(self.layers, rows.to(device), torch.tensor(lens, dtype=torch.int32).to(device), lens)
