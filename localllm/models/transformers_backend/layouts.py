"""The matrices of a transformers module in our layouts: unquantised ones, and those that a checkpoint stores quantised.

Names of the checkpoint become names of the module by the conversions that transformers registers for its classes. A
plain Linear, and the experts of a layer whose code is handed tokens and the experts chosen for them, keep the
checkpoint's matrices as they are stored. So does a Linear that is made of several stored matrices, whose rows follow
one another. Any other quantised matrix is dequantised: an embedding, a matrix that the class's own code reads, one that
transformers reorders, or one in a block type of GGUF that the device does not multiply by.
Experts may be stored one by one, or as one tensor of three dimensions. Stored tensors that have the same name in the
class are the rows of one parameter, in the checkpoint's order.
Does not know: how a module is loaded, attention, caches, steps.
"""

from __future__ import annotations

import copy
import inspect
import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from localllm.errors import CorruptModel, UnsupportedModel
from localllm.kernels.cpu.pack import CpuPacker
from localllm.kernels.linear import StackedWeight
from localllm.kernels.moe.experts import experts_by_code
from localllm.kernels.moe.weights import ExpertWeights, needs_stacked_experts
from localllm.kernels.quantized_weight import MetaWeight, QuantizedWeight
from localllm.models.formats import matrices
from localllm.models.formats.at_load import AtLoad
from localllm.models.formats.checkpoint import Checkpoint, ExpertCheckpoint, RenamedCheckpoint
from localllm.models.formats.fp4 import PACKED
from localllm.models.formats.linear_format import LinearFormat, StoredPart, TableFormat
from localllm.models.layers.linear import Linear, Weight, device_layout_bytes
from localllm.models.layers.moe import join_experts
from localllm.models.weights.layout import wrong_shape

CPU = torch.device("cpu")


class _DeviceLinear(nn.Module):
    """A plain Linear in the layout that the device reads fastest."""

    def __init__(self, linear: nn.Linear, quantize: AtLoad | None = None) -> None:
        super().__init__()
        weight: Weight = linear.weight.detach()
        if quantize is not None:
            is_meta, weight = linear.weight.is_meta, quantize(linear.weight.detach())
            if is_meta:
                weight = MetaWeight((weight.shape[0], weight.shape[1]), device_layout_bytes(weight, CPU, "fast"))
        self.linear = Linear(weight, None if linear.bias is None else linear.bias.detach())
        self.in_features, self.out_features = linear.in_features, linear.out_features

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], -1)


def code_names(module: nn.Module) -> set[str]:
    """Return the names that the code of a module's forward function uses."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return set() if code is None else {*code.co_names, *code.co_varnames}


def use_device_layouts(module: nn.Module, unchanged: Sequence[nn.Module] = (), quantize: AtLoad | None = None) -> None:
    """Replace every plain Linear by one in the layout that the device reads fastest.

    unchanged: modules that keep theirs. So do modules whose own code reads a weight by name. quantize: how the matrices
    of a module on the CPU are quantised before; None: they are not. On `meta`, their sizes on the CPU are kept.
    """
    kept = {id(part) for each in unchanged for part in each.modules()}
    for parent in list(module.modules()):
        if id(parent) in kept or "weight" in code_names(parent):
            continue
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                setattr(parent, name, _DeviceLinear(child, quantize))


# ---- quantised matrices ----------------------------------------------------------------------------------------------

NameOf = Callable[[str], str | None]
"""From the stored name of a tensor to the name that the module's class knows; None: it is of another part."""
_EXPERTS = ("gate_up_proj", "up_proj", "down_proj")
_SCALE = "_scale_inv"


class Slice(NamedTuple):
    """An expert's matrix in a stored one of three dimensions [E, N, K]."""

    stem: str
    expert: int


Sources = Sequence[str | Slice]
"""Where the rows of a matrix are stored. A string is a stem: the name of a stored matrix without its suffix."""


class Quantization:
    """A checkpoint, and the way in which its matrices are quantised: as they are stored, or right after reading."""

    def __init__(
        self, checkpoint: Checkpoint, format: LinearFormat | None, at_load: AtLoad | None = None,
        device: torch.device = CPU,
    ) -> None:  # fmt: skip
        scaled = [name.removesuffix(_SCALE) for name in checkpoint.tensors if name.endswith(_SCALE)]
        self._bare = {name for name in scaled if name in checkpoint.tensors and not name.endswith(".weight")}
        named = {f"{name}{end}": f"{name}.weight{end}" for name in self._bare for end in ("", _SCALE)}
        self.checkpoint = RenamedCheckpoint(checkpoint, named) if named else checkpoint
        self.format, self.at_load, self._device = format, at_load, device

    def kind(self, source: str | Slice) -> Hashable | None:
        """Return how a matrix is stored; None: unquantised."""
        stem = source.stem if isinstance(source, Slice) else source
        return None if self.format is None else self.format.kind(self.checkpoint, stem)

    def stays(self, stem: str) -> bool:
        """Return whether the device multiplies by a quantised matrix as it is stored."""
        format = self.format
        return not isinstance(format, TableFormat) or format.is_table(self.checkpoint, stem, self._device)

    def weight_name(self, stem: str) -> str:
        """Return the name of a matrix in the class. transformers names stacked experts without .weight."""
        return stem if stem in self._bare or stem in self.checkpoint.tensors else f"{stem}.weight"

    def tensors(self, source: str | Slice) -> Sequence[str]:
        """Return the names of a stored matrix's tensors, without its bias."""
        stem = source.stem if isinstance(source, Slice) else source
        if self.format is None or self.kind(stem) is None:
            return [self.weight_name(stem)]
        return self.format.tensors(self.checkpoint, stem)

    def stems(self) -> list[str]:
        """Return the stems that may stay quantised, or be quantised at load, in the order of their numbers."""
        from transformers.core_model_loading import dot_natural_key

        there = self.checkpoint.tensors
        stems = {name.rpartition(".")[0] for name in there}
        found = {stem for stem in stems if self.kind(stem) is not None}
        if self.at_load is not None:
            found |= {stem for stem in stems if f"{stem}.weight" in there}
            found |= {name for name, info in there.items() if len(info.shape) == 3 and not name.endswith(".weight")}
        return sorted(found, key=dot_natural_key)

    def is_stacked(self, stem: str) -> bool:
        """Return whether a stored matrix has three dimensions."""
        return any(len(self.checkpoint.tensors[name].shape) == 3 for name in self.tensors(stem))


@dataclass(slots=True)
class Places:
    """The places that a module has for what a checkpoint stores."""

    linears: dict[str, Sources] = field(default_factory=dict)  # by the name of a Linear
    experts: dict[str, dict[str, Sequence[Sources]]] = field(default_factory=dict)
    """By the name of a module of experts and its parameter, for each expert."""
    dequantized: dict[str, str] = field(default_factory=dict)
    """By the stem of a further quantised matrix: the name to load it by."""
    plain: dict[str, str] = field(default_factory=dict)
    """By the stored name of any other tensor: the name to load it by."""
    unknown: list[str] = field(default_factory=list)
    """Quantised matrices that the module has no place for."""

    def sources(self) -> Iterator[str | Slice]:
        """Yield every matrix that is not among the plain tensors."""
        yield from (*self.dequantized, *self.unknown)
        for each in self.linears.values():
            yield from each
        for of_parameter in self.experts.values():
            for of_experts in of_parameter.values():
                for each in of_experts:
                    yield from each


def find_places(module: Any, quantization: Quantization, name_of: NameOf) -> Places:
    """Return where each tensor of the checkpoint belongs in a model of transformers. module: may be on `meta`."""
    names, places = _Names(module), Places()
    stored, format = quantization.checkpoint, quantization.format
    found: dict[str, dict[str | None, list[str]]] = {}  # by parameter and pattern of its converter: stems
    plain_names = {stem: name_of(quantization.weight_name(stem)) for stem in quantization.stems()}
    order = {name: place for place, name in enumerate(stored.tensors)}
    counts_of = Counter(map(name_of, stored.tensors))
    # Which stored matrices make each parameter, without the layers that draft.
    for stem, plain in plain_names.items():
        if plain is None:
            continue
        parameter, pattern = names.find(plain)
        if parameter in names.known:
            found.setdefault(parameter, {}).setdefault(pattern, []).append(stem)
        elif quantization.kind(stem) is not None and not names.is_ignored(parameter):
            places.unknown.append(stem)
    # Whether the parameter's module can hold them as they are stored.
    for parameter, of_pattern in found.items():
        owner, _, kind = parameter.rpartition(".")
        joins, each = names.joined(of_pattern)
        quantized = [stem for stems in each for stem in stems if quantization.kind(stem) is not None]
        if not joins and len(each[0]) > 1:
            each = [[stem] for stem in sorted(each[0], key=lambda stem: order[quantization.tensors(stem)[0]])]
        part, counts = module.get_submodule(owner), {len(stems) for stems in each}
        is_in_part = not joins and counts_of[plain_names[each[0][0]]] > len(each)  # other rows are not quantised
        if is_in_part or not all(map(quantization.stays, quantized)):
            places.dequantized |= {stem: str(plain_names[stem]) for stem in quantized}
            continue
        if _runs_experts(part, kind):
            count = len(names.known[parameter])
            if joins == ["MergeModulelist 0"] and counts == {count}:
                places.experts.setdefault(owner, {})[kind] = list(zip(*each, strict=True))
                continue
            if joins in ([], ["Concatenate 1"]) and counts == {1} and all(quantization.is_stacked(s) for [s] in each):
                slices = [[Slice(stem, expert) for [stem] in each] for expert in range(count)]
                places.experts.setdefault(owner, {})[kind] = slices
                continue
        if joins in ([], ["Concatenate 0"]) and counts == {1} and names.takes_matrix(parameter, bool(quantized)):
            places.linears[owner] = [stem for [stem] in each]
            continue
        places.dequantized |= {stem: str(plain_names[stem]) for stem in quantized}
    for owner in [owner for owner, of_parameter in places.experts.items() if len(of_parameter) < 2]:
        (of_experts,) = places.experts.pop(owner).values()  # the other matrices of these experts are not quantised
        left = {s.stem if isinstance(s, Slice) else s for each_expert in of_experts for s in each_expert}
        places.dequantized |= {s: str(plain_names[s]) for s in left if quantization.kind(s) is not None}
    # All that is left goes to the class: norms, biases, embeddings. Biases of zeros that it does not add are dropped.
    placed = {name for source in dict.fromkeys(places.sources()) for name in quantization.tensors(source)}
    for name in stored.tensors:
        plain = name_of(name)
        if plain is None or name in placed or (format is not None and format.ignores(name)):
            continue
        if not names.is_ignored(names.find(plain)[0]) and not _is_zero_bias(name, module, places, stored):
            places.plain[name] = plain
    return places


class _Names:
    """Names of a checkpoint's tensors as names of a module's parameters, as transformers converts them."""

    def __init__(self, module: Any) -> None:
        try:
            from transformers.conversion_mapping import get_model_conversion_mapping
            from transformers.core_model_loading import WeightConverter, WeightRenaming
        except ImportError as error:
            raise UnsupportedModel(
                f"Quantised matrices of {type(module).__name__} are not supported with this version of transformers.",
                f"It cannot convert names of checkpoints: {error}.",
                "pip install 'transformers>=5.23,<5.24'",
            ) from error
        mapping, self._module = get_model_conversion_mapping(module), module
        self.known: dict[str, Tensor] = module.state_dict()
        self.tied = frozenset(getattr(module, "all_tied_weights_keys", None) or ())
        self._renamings = [each for each in mapping if isinstance(each, WeightRenaming)]
        self._converters = [each for each in mapping if isinstance(each, WeightConverter)]
        self._prefix = module.base_model_prefix
        self._ignored = {
            pattern
            for part in module.modules()
            for pattern in getattr(part, "_keys_to_ignore_on_load_unexpected", None) or ()
        }

    def find(self, name: str) -> tuple[str, str | None]:
        """Return the parameter, and the pattern of the converter that makes it of this tensor; None: there is none."""
        from transformers.core_model_loading import rename_source_key

        found, pattern = rename_source_key(name, self._renamings, self._converters, self._prefix, self.known)
        if found not in self.known and name in self.known:
            found, pattern = rename_source_key(name, [], [], self._prefix, self.known)
        return found, pattern

    def joined(self, of_pattern: Mapping[str | None, list[str]]) -> tuple[list[str], list[list[str]]]:
        """Return the operations that make a parameter, each with its dimension, and the stems for each of the patterns
        of its converter, in the order in which they are joined."""
        pattern = next(iter(of_pattern))
        converter = next((each for each in self._converters if pattern in each.source_patterns), None)
        if converter is None:
            return [], [of_pattern[pattern]]
        operations = [f"{type(each).__name__} {getattr(each, 'dim', '')}" for each in converter.operations]
        if len(converter.source_patterns) > 1 and operations == ["MergeModulelist 0", "Concatenate 1"]:
            operations.pop()
        return operations, [of_pattern.get(pattern, []) for pattern in converter.source_patterns]

    def takes_matrix(self, parameter: str, is_stored_quantized: bool) -> bool:
        """Return whether a parameter is the weight of a plain Linear that nothing else reads. An unquantised matrix
        has to belong to a layer, and must not weigh the heads of an indexer: only then is it quantised at load."""
        owner, _, kind = parameter.rpartition(".")
        if kind != "weight" or parameter in self.tied or type(self._module.get_submodule(owner)) is not nn.Linear:
            return False
        if "weight" in code_names(self._module.get_submodule(owner.rpartition(".")[0])):
            return False
        of_layer = re.search(r"\.\d+\..*_proj$", owner) is not None and not owner.endswith("weights_proj")
        return is_stored_quantized or of_layer

    def is_ignored(self, parameter: str) -> bool:
        """Return whether the class leaves out a stored tensor of this name, such as one of a layer that drafts."""
        return parameter not in self.known and any(re.search(pattern, parameter) for pattern in self._ignored)


def _runs_experts(part: Any, parameter: str) -> bool:
    """Return whether a part's code is that of experts [E, N, K] that are handed tokens, their experts, and weights."""
    arguments = list(inspect.signature(part.forward).parameters)[:3]
    return (
        parameter in _EXPERTS
        and arguments == ["hidden_states", "top_k_index", "top_k_weights"]
        and hasattr(part, "_apply_gate" if hasattr(part, "gate_up_proj") else "act_fn")
        and not getattr(part, "is_transposed", False)
        and not getattr(part, "has_post_expert_norm", False)
    )


def _is_zero_bias(name: str, module: Any, places: Places, checkpoint: Checkpoint) -> bool:
    """Return whether a tensor is one of the zeros that AutoGPTQ wrote as the bias of every quantised matrix.
    Raises `CorruptModel` for another bias that the class does not add."""
    stem = name.removesuffix(".bias")
    owner = next((owner for owner, stems in places.linears.items() if stem in stems), None) if stem != name else None
    if owner is None or module.get_submodule(owner).bias is not None:
        return False
    if matrices.stored(checkpoint, name).any():
        raise CorruptModel(
            f"{name} is not zero.",
            f"{type(module).__name__} has no bias there, and ignoring the tensor would change the answers.",
            "Use another quantisation of the same model.",
        )
    return True


class QuantizedLinear(nn.Module):
    """A Linear whose matrix is quantised. Its bias stays a parameter."""

    def __init__(self, weight: QuantizedWeight, linear: nn.Linear, packer: CpuPacker) -> None:
        super().__init__()
        self.linear = Linear(weight, packer=packer)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = linear.bias
        self._is_hf_initialized = True  # nothing is drawn for it

    def forward(self, x: Tensor) -> Tensor:
        if x.is_meta:  # a call that finds what a module keeps
            return x.new_empty(*x.shape[:-1], self.out_features)
        weight = self.linear.weight
        assert not isinstance(weight, Tensor), "it was quantised"
        return weight.linear(x.reshape(-1, x.shape[-1]), self.bias).view(*x.shape[:-1], -1)

    def __deepcopy__(self, memo: dict[int, Any]) -> QuantizedLinear:
        """Return a module that shares the matrix, which is never changed."""
        twin = copy.copy(self)
        twin._parameters = copy.deepcopy(self._parameters, memo)
        return twin


Parts = dict[str, QuantizedWeight | tuple[ExpertWeights, ExpertWeights]]
"""By the name of a module: the matrix of a Linear, or the two matrices of all experts."""


@dataclass(frozen=True, slots=True)
class QuantizedReader:
    """Reads the quantised matrices of a checkpoint for a device, or their sizes."""

    quantization: Quantization
    device: torch.device
    dtype: torch.dtype  # of activations
    packer: CpuPacker
    sizes_only: bool = False

    def parts(self, module: Any, places: Places) -> Parts:
        """Return the matrices that stay quantised, by the names of their modules. Raises `CorruptModel`,
        `UnsupportedModel`."""
        parts: Parts = {}
        for name, sources in places.linears.items():
            linear = module.get_submodule(name)
            parts[name] = self._matrix(sources, (linear.out_features, linear.in_features))
        for name, of_parameter in places.experts.items():
            experts, (first, down) = module.get_submodule(name), sorted(of_parameter, key=_EXPERTS.index)
            parts[name] = (
                self._experts(name, of_parameter[first], getattr(experts, first).shape),
                self._experts(name, of_parameter[down], getattr(experts, down).shape),
            )
        return parts

    def _experts(self, name: str, sources: Sequence[Sources], shape: Sequence[int]) -> ExpertWeights:
        each = (self._matrix(of_expert, (shape[1], shape[2])) for of_expert in sources)
        try:
            return join_experts(each, shape[0], at_once=needs_stacked_experts(self.device), packer=self.packer)
        except ValueError as error:
            raise UnsupportedModel(
                f"The experts of {name} have a stored form that cannot run on {self.device}.",
                f"{error}.",
                "--device cpu, or another quantisation of the same model.",
            ) from error

    def _matrix(self, sources: Sources, shape: tuple[int, int]) -> QuantizedWeight:
        """Return stored matrices stacked by rows."""
        weights = [self._read(kind, list(run), shape) for kind, run in groupby(sources, self.quantization.kind)]
        whole = weights[0] if len(weights) == 1 else StackedWeight(weights)
        if tuple(whole.shape) != shape:
            raise wrong_shape([str(source) for source in sources], whole.shape, shape)
        if not self.sizes_only:
            return whole
        return MetaWeight(shape, device_layout_bytes(whole, self.device, self.packer.mode))

    def _read(self, kind: Hashable | None, sources: Sources, shape: tuple[int, int]) -> QuantizedWeight:
        """Return matrices of one kind stacked by rows; None: unquantised ones, which are quantised."""
        format, at_load = self.quantization.format, self.quantization.at_load
        checkpoint, stems = self._checkpoint_of(sources)
        if kind is not None and format is not None:
            read, parts = format.read_meta if self.sizes_only else format.read, [StoredPart(stem) for stem in stems]
            weight = read(checkpoint, parts, self.device, self.dtype)
            assert not isinstance(weight, Tensor), "its format stores it"
            return weight
        assert at_load is not None, "only then has an unquantised matrix a place of its own"
        names = [self.quantization.weight_name(stem) for stem in stems]
        shapes = [matrices.info(checkpoint, name).shape for name in names]
        if any(len(found) != 2 or found[1] != shape[1] for found in shapes):
            raise wrong_shape(names, shapes[0], shape)
        if self.sizes_only:
            return at_load(torch.empty((sum(rows for rows, _ in shapes), shape[1]), dtype=self.dtype, device="meta"))
        return at_load(torch.cat([checkpoint.tensor(name) for name in names]).to(self.device, self.dtype, copy=True))

    def _checkpoint_of(self, sources: Sources) -> tuple[Checkpoint, list[str]]:
        """Return the tensors of matrices, of which slices are of one expert, and their stems."""
        checkpoint, stems = self.quantization.checkpoint, [s.stem if isinstance(s, Slice) else s for s in sources]
        if not isinstance(sources[0], Slice):
            return checkpoint, stems
        names = [name for stem in stems for name in self.quantization.tensors(stem)]
        return ExpertCheckpoint(checkpoint, names, sources[0].expert), stems

    def others(self, places: Places) -> dict[str, Tensor]:
        """Return copies of all other tensors by the names to load them by: unquantised ones as stored, the other
        quantised ones dequantised. Raises `UnsupportedModel`."""
        checkpoint, format = self.quantization.checkpoint, self.quantization.format
        parts: dict[str, dict[str, Tensor]] = {}  # by name and stored name
        for stored, name in places.plain.items():
            kind = checkpoint.tensors[stored].dtype
            if kind.startswith("F8") or kind in PACKED:
                raise UnsupportedModel(
                    f"{stored} is stored as {kind}, which is not supported for a model that its class computes.",
                    f"Supported: {'unquantised tensors' if format is None else f'matrices as {format.name}'}.",
                    "Use another quantisation, or the unquantised repository, of the same model.",
                )
            parts.setdefault(name, {})[stored] = checkpoint.tensor(stored).clone()
        for stem, name in places.dequantized.items():
            assert format is not None, "some format stores it"
            tensors = self.quantization.tensors(stem)
            if self.quantization.is_stacked(stem):
                count = checkpoint.tensors[tensors[0]].shape[0]
                each = [ExpertCheckpoint(checkpoint, tensors, expert) for expert in range(count)]
                whole = torch.stack([format.dequantize(one, stem).to(self.dtype) for one in each])
            else:
                whole = format.dequantize(checkpoint, stem).to(self.dtype)
            parts.setdefault(name, {})[tensors[0]] = whole
        return {name: self._joined(of_name) for name, of_name in parts.items()}

    def _joined(self, parts: Mapping[str, Tensor]) -> Tensor:
        """Return the rows of a parameter, which is stored in parts."""
        if len(parts) == 1:
            return next(iter(parts.values()))
        return torch.cat([parts[name] for name in self.quantization.checkpoint.tensors if name in parts], dim=-2)


def place_parts(module: Any, parts: Parts, packer: CpuPacker) -> None:
    """Replace each Linear by its quantised matrix, and the products of experts by those with quantised ones. Tensors of
    the module may be on `meta`; those that are replaced are dropped."""
    for name, part in parts.items():
        if isinstance(part, tuple):
            _use_experts(module.get_submodule(name), *part)
        else:
            module.set_submodule(name, QuantizedLinear(part, module.get_submodule(name), packer))


def _use_experts(part: Any, first: ExpertWeights, down: ExpertWeights) -> None:
    act = part._apply_gate if hasattr(part, "gate_up_proj") else part.act_fn
    name = "gate_up_proj" if hasattr(part, "gate_up_proj") else "up_proj"
    for each in _EXPERTS:
        part._parameters.pop(each, None)
    part.localllm_experts = (first, down)
    part._is_hf_initialized = True  # nothing is drawn for them

    def forward(hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor, *_: Any, **__: Any) -> Tensor:
        own_first, own_down = part.localllm_experts
        return experts_by_code(
            hidden_states, top_k_index, top_k_weights, own_first, own_down, act,
            first_bias=getattr(part, f"{name}_bias", None), down_bias=getattr(part, "down_proj_bias", None),
        )  # fmt: skip

    object.__setattr__(part, "forward", forward)


def quantized_bytes(module: nn.Module) -> int:
    """Return the bytes of the quantised matrices of a module that was made of sizes only."""
    total = 0
    for part in module.modules():
        held = [part.linear.weight] if isinstance(part, QuantizedLinear) else []
        held += [weight for weights in getattr(part, "localllm_experts", ()) for weight in weights]
        total += sum(weight.nbytes for weight in held)
    return total
