"""A causal language model of `transformers` as the runner's `CausalModel`, over localllm's caches; or its head alone.

Attention is replaced (attention.py), recurrent modules run row by row (mixers.py). All else runs the module's own code,
except that matrices use the `Linear` layout.
Does not know: requests, schedules.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from localllm.errors import UnsupportedModel
from localllm.kernels.layer_cache import LayerCache
from localllm.kernels.rotary_store_kv import has_no_skipped_slot
from localllm.models.inputs import ForwardInputs
from localllm.models.spec.model_spec import ModelSpec, group_of_layers
from localllm.models.transformers_backend.attention import Step, replace_attention
from localllm.models.transformers_backend.layouts import use_device_layouts
from localllm.models.transformers_backend.mixers import find_mixers, run_by_rows
from localllm.models.transformers_backend.module import keep_decoder
from localllm.models.transformers_backend.spec import first_position


def head_only(module: Any, spec: ModelSpec) -> Any:
    """Return the model without its layers: its call maps `inputs_embeds`, hidden states, to an output with logits."""
    if module.base_model is module:
        raise UnsupportedModel(f"transformers' {spec.architecture} does not separate its output head from its layers.")
    head = copy.copy(module)
    head._modules = dict(module._modules)
    head._modules[module.base_model_prefix] = _StandIn(module.base_model)
    return head


class _Given:
    """The output of the stand-in. Attributes that a head may read and no layer computed here are None."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)

    def __getitem__(self, index: Any) -> Any:
        return (self.last_hidden_state,)[index]


class _StandIn(nn.Module):
    """Stands in for the base model: returns its input. Other attributes are the base model's, as heads read some."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        object.__setattr__(self, "base", base)

    def __getattr__(self, name: str) -> Any:
        if name == "decoder" and hasattr(self.__dict__["base"], name):
            return self  # called in place of the base model by decoders of encoder-decoders (BART)
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["base"], name)

    def forward(self, *positional: Any, inputs_embeds: Tensor, **named: Any) -> _Given:
        return _Given(inputs_embeds)


class TransformersModel:
    """A `CausalModel` for the runner. Its steps are not captured in CUDA graphs, as the module may launch anything."""

    capturable = False

    def __init__(
        self, module: Any, spec: ModelSpec, device: torch.device, dtype: torch.dtype, max_model_len: int
    ) -> None:
        """Take over the module: replace its attention, its recurrent modules and its matrices.

        Raises `UnsupportedModel` if a part of it cannot be replaced.
        """
        self.spec, self.device, self.dtype, self.max_model_len = spec, device, dtype, max_model_len
        self._first_position = first_position(module.config)
        self._step = Step(spec, group_of_layers(spec))
        is_whole = spec.text_type not in ("", module.config.model_type)
        self._layers = keep_decoder(module) if is_whole else module.base_model
        mixers = find_mixers(module, spec.architecture)
        replace_attention(module, self._step)
        self._give_positions(module)
        for mixer in mixers:
            run_by_rows(mixer, self._step)
        use_device_layouts(module, unchanged=[mixer.module for mixer in mixers])
        self.module, self._head = module, head_only(module, spec)

    def table_bytes(self, max_model_len: int) -> int:
        """Return 0: the module computes its rotary angles in each step."""
        return 0

    def serve_context(self, max_model_len: int) -> None:
        self.max_model_len = max_model_len

    def _give_positions(self, module: Any) -> None:
        """Let tables of positions that count from the length of a cache (BART) read the step's positions."""
        for part in module.modules():
            if list(inspect.signature(part.forward).parameters)[1:] == ["past_key_values_length", "position_ids"]:
                forward = part.forward

                def at_positions(tokens: Any, *_: Any, own: Any = forward, **__: Any) -> Any:
                    inputs = self._step.inputs
                    assert inputs is not None, "positions are read inside a step"
                    return own(tokens, position_ids=inputs.positions + self._first_position)

                object.__setattr__(part, "forward", at_positions)

    @torch.inference_mode()
    def forward(self, inputs: ForwardInputs, cache: Sequence[LayerCache | None]) -> Tensor:
        """Return hidden states [T, hidden] before the head; writes the step's K and V, and its states."""
        step, positions = self._step, inputs.positions + self._first_position
        step.inputs, step.caches, step.plans = inputs, cache, {}
        step.all_slots_valid = has_no_skipped_slot(inputs.groups[0].slot_mapping)
        try:
            out = self._layers(**self._tokens(inputs), position_ids=positions[None], use_cache=False, return_dict=True)
        finally:
            step.inputs, step.caches, step.plans = None, (), {}
        hidden: Tensor = out.last_hidden_state[0]
        return hidden

    def _tokens(self, inputs: ForwardInputs) -> dict[str, Tensor]:
        if inputs.embeds is None:
            return {"input_ids": inputs.token_ids[None]}
        rows: Tensor = self.module.get_input_embeddings()(inputs.token_ids)
        return {"inputs_embeds": rows.index_copy(0, inputs.embeds.places, inputs.embeds.values)[None]}

    @torch.inference_mode()
    def compute_logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """Map hidden [L, hidden] to logits [L, vocab] fp32, in `out` if given, with everything the model does after its
        layers."""
        logits: Tensor = self._head(inputs_embeds=hidden[None], use_cache=False, return_dict=True).logits[0]
        return logits.float() if out is None else out.copy_(logits)
