"""What was predicted beside what was seen, once a model is loaded.

Does not know: how it was measured (build.py, runner/opening.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from localllm.models.fit.plan import MemoryPlan


@dataclass(frozen=True, slots=True)
class MemoryPart:
    """One use of memory."""

    name: str  # weights, KV cache, activations
    predicted_bytes: int
    measured_bytes: int | None  # None: not measured

    @property
    def error(self) -> float | None:
        """Of the prediction, as a share of what was measured."""
        return self.predicted_bytes / self.measured_bytes - 1 if self.measured_bytes else None


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """Of one loaded model."""

    parts: tuple[MemoryPart, ...]

    @classmethod
    def of(cls, predicted: MemoryPlan, kept: MemoryPlan, loaded_bytes: int | None) -> Self:
        """predicted: the plan before the load; kept: the one that holds. loaded_bytes: by which the process grew.

        On a GPU all is read from the allocator. On a CPU the weights are what the process grew by as it read them; the
        KV cache is not touched before it is used, and no step has run yet.
        """
        seen = kept.is_measured
        return cls(
            (
                MemoryPart("weights", predicted.weights_bytes, kept.weights_bytes if seen else loaded_bytes),
                MemoryPart("KV cache", predicted.kv_bytes, kept.kv_bytes if seen else None),
                MemoryPart("activations", predicted.activation_bytes, kept.activation_bytes if seen else None),
            )
        )
