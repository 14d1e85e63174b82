"""The interface of a drafter with weights, as the runner drives it.

    DraftStep      the inputs of one pass of its layers
    DrafterPlan    what the checkpoint's headers say: sizes, taps, bytes (spec/model_spec.py)
    Drafter        the loaded drafter

A drafter keeps K and V in the same blocks as its target: the same block ids, block size and block table, in planes of
its own. What it keeps of token i is in the slot of token i, so a block that the prefix cache finds has the drafter's
keys and values too.

A drafter that reads features computes *pairs*: token i together with the target's hidden state of token i - 1. The
pair is stored in the slot of token i and rotated by position i - 1, as the published drafters were trained. Token 0
has no pair, so `first_key` is 1: attention begins at slot 1. A draft model reads tokens alone: its `first_key` is 0.

After a step of the target, `extend` computes the pairs of all tokens that the step made known (a prompt's chunk, or the
accepted tokens), and returns the hidden state of each row's newest token; its logits give the first draft. Each
further draft is one `step`: one token a row, with the hidden state that the call before it returned.
Does not know: how drafts are drawn and verified, requests, blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from localllm.kernels.layer_cache import LayerKV
from localllm.models.inputs import ForwardInputs
from localllm.models.spec.model_spec import FINAL_HIDDEN, FINAL_STREAM, DrafterPlan, DraftMethod, ModelSpec

__all__ = ["FINAL_HIDDEN", "FINAL_STREAM", "DraftMethod", "DraftStep", "Drafter", "DrafterPlan"]

DraftStep = ForwardInputs
"""One pass of a drafter's layers: the tensors that a model's layers read. T tokens of R rows of any lengths.

token_ids       [T] int64 the tokens of the pairs
positions       [T] int64 rotary positions: index of the token in its request minus `first_key`
groups          one entry for each KV group of the drafter's spec, all with the target's blocks
context_lens    [R] int32 index of the row's newest token + 1
logits_indices  [R] int64 each row's newest token among the T
first_key       the drafter's
The other fields are as in a step of a model: a step of one token a row has num_decodes == R.
"""


class Drafter(Protocol):
    """A loaded drafter. Calls are on the runner's thread in inference mode."""

    spec: ModelSpec  # `cache` has an entry for each of its layers
    taps: tuple[int, ...]
    """Features of the target that it reads, concatenated: the stream before these layers (residual + delta),
    `FINAL_HIDDEN` and `FINAL_STREAM`. (): none."""
    first_key: int

    def serve_context(self, max_model_len: int) -> None:
        """Resize the rotary tables for another context. Not while an engine is open."""
        ...

    def extend(self, step: DraftStep, cache: Sequence[LayerKV | None], features: Tensor | None) -> Tensor:
        """Compute the pairs of the step's tokens and store their keys and values. Return [R, hidden] of each row's
        newest token, to be given to `logits` and to the next `step`.

        features: [T, len(taps) * target hidden], of the token before each of the T; None: without taps.
        """
        ...

    def step(self, step: DraftStep, cache: Sequence[LayerKV | None], hidden: Tensor) -> Tensor:
        """Compute one guessed token of each row. hidden: [R, hidden], what the last call returned for these rows.
        Return the same of the new tokens."""
        ...

    def logits(self, hidden: Tensor) -> Tensor | None:
        """Return logits [R, V] fp32 over the target's vocabulary; -inf for tokens that the drafter does not have. Of a
        drafter divided over shards the first shard returns them, the others None."""
        ...
