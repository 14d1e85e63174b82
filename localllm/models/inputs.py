"""The inputs of one forward pass, and the interface of a model that a runner drives.

The model defines the inputs and the runner fills them; layers read nothing else.

T: tokens in this step. B: requests in this step. Rows are ordered: first the `num_decodes` requests with exactly
`decode_queries` query tokens, then the others (prefill, chunks), so that each attention path gets one slice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor

from localllm.kernels.layer_cache import DraftedInputs, LayerCache, LayerKV
from localllm.kernels.paged_attention import WorkLists


class GivenEmbeds(NamedTuple):
    """Embeddings that replace the table's for E of the step's tokens."""

    places: Tensor  # [E] int64, indices into the T tokens
    values: Tensor  # [E, hidden] in the model's type
    deep: Tensor | None = None  # [E, n * hidden] added to the stream behind the first n layers (Qwen3-VL)

    def deep_rows(self, hidden_size: int) -> tuple[Tensor, ...]:
        """Return what is added behind each of the first layers, [E, hidden] each."""
        return () if self.deep is None else self.deep.split(hidden_size, dim=1)


class GroupInputs(NamedTuple):
    """Blocks that the layers of one KV group (spec/model_spec.py) read and write in this step."""

    block_table: Tensor  # [B, max_blocks] int32; the null block 0 beyond the context and before the window
    slot_mapping: Tensor  # [T] int64      where K and V go: block_id * block_size + offset; -1: nowhere


class StateInputs(NamedTuple):
    """The places of recurrent states that each row reads and writes (engine/step.py, StateUse).
    A padding row reads -1 and writes 0."""

    read: Tensor  # [B] int32    -1: begin from zeros
    write: Tensor  # [B] int32    0: nowhere
    save: Tensor  # [B] int32    0: nowhere
    read_host: tuple[int, ...]  # [B] the same on the host, for a CPU,
    write_host: tuple[int, ...]  # not for kernels on a device: a replayed graph keeps the recorded values
    save_host: tuple[int, ...]
    drafted: DraftedInputs | None = None  # of a step with drafts, which writes no state


class SourceInputs(NamedTuple):
    """The sources that a step's tokens attend to: what an encoder has made of each request's prompt."""

    layers: Sequence[LayerKV]  # per layer the keys and values of all sources
    block_table: Tensor  # [T, max_blocks] int32: the blocks of each token's source
    lens: Tensor  # [T] int32: tokens of each token's source
    lens_host: tuple[int, ...]  # [T]
    watch: Callable[[int, Tensor], None] | None = None  # called with each layer's queries [T, heads, head_dim]

    def part(self, first: int, last: int) -> SourceInputs:
        """Return the sources of the tokens first .. last - 1."""
        rows = slice(first, last)
        return SourceInputs(self.layers, self.block_table[rows], self.lens[rows], self.lens_host[rows])


@dataclass(frozen=True, slots=True)
class ForwardInputs:
    token_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64      position of each token within its request
    groups: tuple[GroupInputs, ...]  # one per KV group of the model (spec/model_spec.py), in the same order
    context_lens: Tensor  # [B] int32      tokens that have KV once this step is done
    cu_seqlens_q: Tensor  # [B + 1] int32  prefix sums of query tokens per request
    logits_indices: Tensor  # [L] int64      rows of the flat batch that need logits
    num_decodes: int  # the first num_decodes requests have `decode_queries` query tokens each
    query_lens: tuple[int, ...]  # [B] the same lengths on the host: the plain-torch twins loop over them,
    context_lens_host: tuple[int, ...]  # [B] not for kernels: a replayed graph keeps the recorded values
    adapters: Tensor | None = None  # [T] int32    each token's adapter, -1: none; None: no adapter in this step
    adapters_host: tuple[int, ...] = ()  # [B] each request's adapter, on the host; empty if `adapters` is None
    embeds: GivenEmbeds | None = None
    rotary: Tensor | None = None  # [3, T] int64: time, row, column to rotate by; [T] if equal; None: `positions`
    key_limits: Tensor | None = None  # [T] int32: first key that a query does not see; None: the one behind its own
    decode_queries: int = 1  # more than 1: requests that verify drafts; a query from its context's end on is padding
    state: StateInputs | None = None  # None: a model without recurrent states
    work: WorkLists | None = None  # of the decode rows' attention, where prepare_step has filled some
    first_key: int = 0  # first slot that attention reads: 1 for a drafter that keeps nothing of token 0
    source: SourceInputs | None = None  # None: not an encoder-decoder
    before_layer: Callable[[], None] | None = None  # called before each layer; ends the pass by what it raises


class CausalModel(Protocol):
    """A model as the runner drives it: hidden states [T, hidden], then logits [L, V] of the rows to sample, in `out`
    [L, V] fp32 if given.

    cache: what each layer keeps, None for a layer that keeps nothing. Of tensor-parallel shards, all but the first
    return None instead of logits.
    """

    def forward(self, inputs: ForwardInputs, cache: Sequence[LayerCache | None]) -> Tensor: ...
    def compute_logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor | None: ...
