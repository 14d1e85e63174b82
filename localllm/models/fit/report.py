"""Predicted and measured memory of a loaded model.

Does not know: how it was measured (serving/build.py, runner/opening.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from localllm.models.fit.memory_plan import MemoryPlan


@dataclass(frozen=True, slots=True)
class MemoryPart:
    """One use of memory."""

    name: str  # weights, KV cache, activations
    predicted_bytes: int
    measured_bytes: int | None  # None: not measured

    @property
    def error(self) -> float | None:
        """Relative error of the prediction."""
        return self.predicted_bytes / self.measured_bytes - 1 if self.measured_bytes else None


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """Predicted and measured memory of one loaded model."""

    parts: tuple[MemoryPart, ...]

    @classmethod
    def of(cls, predicted: MemoryPlan, kept: MemoryPlan, loaded_bytes: int | None) -> Self:
        """Build the report. predicted: the plan before the load; kept: the plan in use; loaded_bytes: growth of the
        process.

        On a GPU all values come from the allocator. On a CPU only the weights are measured, by the growth of the
        process during the load: the KV cache is not touched before it is used, and no step has run yet.
        """
        seen = kept.is_measured
        states = [MemoryPart("recurrent states", predicted.state_bytes, kept.state_bytes if seen else None)]
        states = states if predicted.num_places else []
        return cls(
            (
                MemoryPart("weights", predicted.weights_bytes, kept.weights_bytes if seen else loaded_bytes),
                MemoryPart("KV cache", predicted.kv_bytes, kept.kv_bytes if seen else None),
                *states,
                MemoryPart("activations", predicted.activation_bytes, kept.activation_bytes if seen else None),
            )
        )
