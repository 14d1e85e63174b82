"""The output head of a causal language model of `transformers`, without its layers.

Does not know: attention, caches.
"""

from __future__ import annotations

import copy
from typing import Any

from torch import Tensor, nn

from localllm.errors import UnsupportedModel
from localllm.models.spec.model_spec import ModelSpec


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
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["base"], name)

    def forward(self, *positional: Any, inputs_embeds: Tensor, **named: Any) -> _Given:
        return _Given(inputs_embeds)
