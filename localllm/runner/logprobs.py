"""Log-probabilities of the model itself, on their way to the host: of raw logits, before anything a request asked for.

Does not know: which rows of a plan asked.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from localllm.engine.step import TokenLogprobs
from localllm.kernels.sampling import logprobs
from localllm.runner.upload import to_host


@dataclass(frozen=True, slots=True)
class LogprobTensors:
    """R positions, the k likeliest tokens of each behind the token itself."""

    token_ids: Tensor  # [R, 1 + k] int64
    logprobs: Tensor  # [R, 1 + k] float32
    ranks: Tensor  # [R] int64

    def to_host(self) -> LogprobTensors:
        """Start the copy to the host; it has arrived when the device's stream has come this far."""
        return LogprobTensors(to_host(self.token_ids), to_host(self.logprobs), to_host(self.ranks))


def token_logprobs(logits: Tensor, token_ids: Tensor, k: int) -> LogprobTensors:
    """logits [R, V] float32 raw; token_ids [R] int64 the tokens that stand there; k may be 0."""
    return LogprobTensors(*logprobs.token_logprobs(logits, token_ids, k))


def as_results(tensors: LogprobTensors, counts: list[int]) -> list[TokenLogprobs]:
    """One `TokenLogprobs` per position; row i shows its own token and the first counts[i] others."""
    ids, values, ranks = tensors.token_ids.tolist(), tensors.logprobs.tolist(), tensors.ranks.tolist()
    return [TokenLogprobs(tuple(ids[i][: 1 + k]), tuple(values[i][: 1 + k]), ranks[i]) for i, k in enumerate(counts)]
