"""A GGUF file's metadata with type checks, and what the description of an architecture consists of.

Does not know: architectures (config.py and mixtures.py list them), tensors' names, block types.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn, Protocol

from localllm.errors import CorruptModel, UnsupportedModel
from localllm.models.formats.checkpoint import TensorInfo
from localllm.models.formats.gguf.header import Header, Value

Config = dict[str, Any]


class GGUFTensors(Protocol):
    """The tensors of a GGUF file, as far as a config depends on them."""

    @property
    def tensors(self) -> Mapping[str, TensorInfo]: ...

    def rope_factors(self, name: str) -> list[float] | None:
        """Return the values of a list that is stored as a tensor; None: missing."""
        ...


class Metadata:
    """Metadata by key without the architecture's prefix, with type checks."""

    def __init__(self, header: Header) -> None:
        self.file, self.values = header.file, header.metadata
        self.architecture = str(header.metadata["general.architecture"])
        self.varying: tuple[str, ...] = ()  # keys whose values may differ between layers

    def get(self, key: str) -> Value | None:
        return self.values.get(f"{self.architecture}.{key}")

    def count(self, key: str) -> int:
        value = self.optional_count(key)
        if value is None or value < 1:
            self.fail(key, "It is missing." if value is None else f"It is {value}.")
        return value

    def optional_count(self, key: str) -> int | None:
        """Return a whole number; for a list with one value per layer, the value that all layers share, or the first
        one of a key in `varying`."""
        value = self.get(key)
        if isinstance(value, list) and value and all(type(each) is int for each in value):
            if len(set(value)) > 1 and key not in self.varying:
                raise UnsupportedModel(
                    f"{self.file.name} has layers that differ in {self.architecture}.{key}: {sorted(set(value))}.",
                    "Supported: the same value in every layer.",
                )
            value = value[0]
        if value is not None and type(value) is not int:
            self.fail(key, f"It is {value!r}, not a whole number.")
        return value

    def counts(self, key: str, layers: int) -> list[int]:
        """Return a whole number above 0 for each layer, stored as a list or once for all."""
        value = self.get(key)
        each = value if isinstance(value, list) else [value] * layers
        counts = [count for count in each if isinstance(count, int) and not isinstance(count, bool) and count > 0]
        if not len(counts) == len(each) == layers:
            self.fail(key, f"It is {value!r}, not a whole number above 0 for each of {layers} layers.")
        return counts

    def number(self, key: str) -> float | None:
        value = self.get(key)
        if value is not None and type(value) not in (int, float):
            self.fail(key, f"It is {value!r}, not a number.")
        return value  # type: ignore[return-value]

    def token_id(self, name: str) -> int | None:
        value = self.values.get(f"tokenizer.ggml.{name}_token_id")
        return value if type(value) is int else None

    def fail(self, key: str, why: str) -> NoReturn:
        raise CorruptModel(f"{self.file.name} has an invalid metadata value: {self.architecture}.{key}.", why)


def nothing(metadata: Metadata, checkpoint: GGUFTensors, config: Config) -> Config:
    return {}


More = Callable[[Metadata, GGUFTensors, Config], Config]


@dataclass(frozen=True, slots=True)
class Architecture:
    name: str  # class name in config.json
    fields: Mapping[str, str] = field(default_factory=dict)  # config's name -> metadata's key without the architecture
    more: More = nothing
    always: Mapping[str, Any] = field(default_factory=dict)
    varying: tuple[str, ...] = ()  # keys whose values may differ between layers; `more` reads all of them


def has(checkpoint: GGUFTensors, name: str, layer: int = 0) -> bool:
    return f"blk.{layer}.{name}" in checkpoint.tensors


def layer_types(metadata: Metadata) -> list[str]:
    pattern = metadata.get("attention.sliding_window_pattern")
    if not isinstance(pattern, list):
        metadata.fail("attention.sliding_window_pattern", f"It is {pattern!r}, not one value for each layer.")
    return ["sliding_attention" if slides else "full_attention" for slides in pattern]
