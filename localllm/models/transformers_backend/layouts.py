"""The matrices of a transformers module in our layouts.

Does not know: how a module is loaded, attention, caches, steps.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence

from torch import Tensor, nn

from localllm.models.layers.linear import Linear


class _DeviceLinear(nn.Module):
    """A plain Linear in the layout that the device reads fastest."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = Linear(linear.weight.detach(), None if linear.bias is None else linear.bias.detach())
        self.in_features, self.out_features = linear.in_features, linear.out_features

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], -1)


def code_names(module: nn.Module) -> set[str]:
    """Return the names that the code of a module's forward function uses."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return set() if code is None else {*code.co_names, *code.co_varnames}


def use_device_layouts(module: nn.Module, unchanged: Sequence[nn.Module] = ()) -> None:
    """Replace every plain Linear by one in the layout that the device reads fastest.

    unchanged: modules that keep theirs. So do modules whose own code reads a weight by name.
    """
    kept = {id(part) for each in unchanged for part in each.modules()}
    for parent in list(module.modules()):
        if id(parent) in kept or "weight" in code_names(parent):
            continue
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                setattr(parent, name, _DeviceLinear(child))
