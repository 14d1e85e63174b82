"""Memory of one step besides weights and KV cache: arithmetic over the shapes that the model's code allocates.

A step runs through parts that free their memory before the next one: attention, the feed-forward part, logits and
sampling. The largest part counts, each in its worst case: a prompt chunk at the very end of the longest context, every
slot occupied, a full KV cache, and sampling with every option.

    state      token ids and block tables of all slots, also held between steps
    layers     residual stream, a layer's buffers, attention masks, K and V that a CPU gathers from the cache
    sampling   logits of every row that samples, and a copy if logprobs need the unchanged ones
    kept       on a CPU, buffers that the allocator keeps because the next part's do not fit into their holes

On a GPU this estimate is replaced once the loaded model is measured (runner/opening.py). On a CPU it stays: measuring
would take seconds of computing at each start. scripts/check_fit compares it with a real process.
Does not know: budgets, decisions (plan.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from localllm.kernels.cpu.native.choice import chosen_set
from localllm.kernels.kv_format import format_of
from localllm.models.spec.model_spec import KVGroup, ModelSpec, kv_groups, kv_shape

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
MIB = 1024**2
LOGITS_ROWS = 64  # prompt logprobs run the head over this many positions at a time
SPLITS = 32  # most parts that attention splits a long context into on a GPU
CPU_QUERIES = 128  # kernels/paged_attention/twin.py: queries at a time
CPU_MLP_ROWS = 256  # models/layers/mlp.py: rows at a time
INDEX_NUMBERS = 2**24  # kernels/indexer.py: numbers of a buffer
EXPERT_ROWS = 128  # kernels/moe: most rows in a block that is padded for one expert
READ_NATIVELY = ("float32", "bfloat16", "float16", "int8", "k8v4", "int4")  # caches that reads_cache accepts
SLICES = 12 * MIB  # temporaries of sampling, which a CPU handles a few rows at a time
DEQUANTIZED_BYTES = 128 * MIB  # kernels/planar: bytes that a long prompt dequantises at once
CLASS_TENSORS = 7
"""Tensors of all residual streams, in fp32, that a class of transformers holds at once: they are normed and mixed by
operations of their own. Measured with DeepSeek V4, Hy4, GLM-5.3-Flash and Qwen4-Exp (scripts/check_fit)."""
WORKSPACE_BYTES = 32 * MIB  # cuBLAS takes it from the same allocator
PROCESS_BYTES = 10 * MIB  # memory that the first steps leave in a process: oneDNN's primitives, thread stacks
MAPPED_BYTES = 32 * MIB  # glibc returns buffers of this size to the system at once, and keeps smaller ones


class StepBytes(NamedTuple):
    """The most that a step holds with one context: a line over the blocks of the KV cache, above a fixed part."""

    fixed: int
    gathering: int
    per_block: int
    most_blocks: int

    def with_cache(self, num_blocks: int) -> int:
        return max(self.fixed, self.gathering + min(num_blocks, self.most_blocks) * self.per_block)


@dataclass(frozen=True)
class StepMemory:
    """The inputs of the estimate: model, types and limits of a step."""

    spec: ModelSpec
    dtype: str  # of activations
    kv_dtype: str
    on_gpu: bool
    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    is_quantized: bool = False  # at least some of the weights are quantised
    prompt_embeds: bool = False  # a whole chunk may come as embeddings, which are held until its step is done
    given_rows: int = 0  # rows for each token of a chunk that pictures bring: one, and those of further layers
    samples: bool = True  # False: another rank does
    copied_bytes: int = 0  # states of rows with drafts, which a CPU copies; such a step has no prompts
    own_logits: int = 0  # logits of one row that a rank of several computes, before the sampling rank gathers them

    # -- the result

    def bytes_at(self, context: int, num_blocks: int) -> int:
        """Return the most that a step holds with this context and a full KV cache of `num_blocks` blocks."""
        return self.at(context).with_cache(num_blocks)

    def at(self, context: int) -> StepBytes:
        """Return the most that a step holds with this context, for caches of any size."""
        gathering, per_block = self.gathering_bytes(context), self.gathered_per_block()
        return StepBytes(self.fixed_bytes(context), gathering, per_block, self.most_gathered_blocks())

    def sampler_bytes(self, context: int, num_blocks: int) -> int:
        """Return the bytes that sampling needs beyond the peak of the layers."""
        blocks = min(num_blocks, self.most_gathered_blocks())
        layers = max(
            self.state_bytes(context) + self._layers(context),
            self.gathering_bytes(context) + blocks * self.gathered_per_block(),
        )
        return self.bytes_at(context, num_blocks) - layers

    def fixed_bytes(self, context: int) -> int:
        """Return the bytes that do not depend on the size of the KV cache."""
        return self.state_bytes(context) + max(self._layers(context), self.sampling_bytes())

    def _layers(self, context: int) -> int:
        beside = self.spec.mixture is not None and self.spec.mixture.beside_mlp  # the dense part's answer waits
        parts = (
            max(self._dense_mlp(), self._mixture() + (self._stream(2) if beside else 0)),
            self._projections(),
            self._recurrent(),
            self._attention() + sum(self._prompt_buffers(context)),
        )
        altup = self.spec.altup  # whose further streams are held twice: as they are, and as a layer changes them
        streams = 0 if altup is None else self._stream(2 * altup.num_streams)
        if (several := self.spec.class_streams) > 1:
            streams += CLASS_TENSORS * several * self.max_num_batched_tokens * self.spec.hidden_size * 4
        held = self._masks(context) + self._codes() + self._prompt_embeds_bytes() + streams
        return max(max(parts) + self._layer_inputs(1), self._layer_inputs(4)) + held

    def gathering_bytes(self, context: int) -> int:
        """Return the bytes of decode attention, without what it gathers from the cache."""
        held = self.copied_bytes + self._masks(context) + self._prompt_embeds_bytes()
        return self.state_bytes(context) + self._attention() + held

    def gathered_per_block(self) -> int:
        """Return the bytes that decoding gathers per KV block: without the native library, which reads the cache where
        it is, a CPU copies one layer's K and V, with fp32 scores."""
        if self.on_gpu or self._reads_cache:
            return 0
        spec, size = self.spec, self._activation
        per_token = self._gathered_token + 2 * 4 * spec.num_heads + 4 * self._kv_heads  # scores, softmax, mask
        if size == 2 and not self._kv_is_byte:
            per_token += 4 * self._kv_width + 2 * spec.num_heads  # keys in fp32, weights in 16 bits
        return per_token * self.block_size

    def most_gathered_blocks(self) -> int:
        """Return the most blocks that decoding gathers: if all layers have a window, a request reads no more."""
        if not self._all_windowed:
            return 2**62
        return self.max_num_seqs * (-(-(self.spec.sliding_window or 0) // self.block_size) + 1)

    def state_bytes(self, context: int) -> int:
        """Return the bytes that are also held between steps, for the slots and in the process."""
        tables = self._num_groups * -(-context // self.block_size)
        slots = self.max_num_seqs * (context + tables) * 4
        return slots + (0 if self.on_gpu else PROCESS_BYTES + self.allocator_bytes(context))

    def allocator_bytes(self, context: int) -> int:
        """Return the bytes that a CPU's allocator keeps: smaller buffers of the feed-forward part, of prompts, 16-bit
        logits.

        Which buffers fit into which holes is measured, not derived: scripts/check_fit.
        """
        rows = min(CPU_MLP_ROWS, self.max_num_batched_tokens) * self._widest_mlp() * self._activation
        buffers = [self._stream(1)] * (5 if self.max_num_batched_tokens > CPU_MLP_ROWS else 4) + [2 * rows, rows]
        buffers += self._prompt_buffers(context)
        if self._activation == 2:
            buffers.append(min(self.max_num_seqs, self.max_num_batched_tokens) * self.spec.vocab_size * 2)
        return sum(size for size in buffers if size < MAPPED_BYTES)

    def sampling_bytes(self) -> int:
        """Return the bytes of sampling: fp32 logits of the sampled rows, plus a copy or prompt rows for logprobs."""
        own = (min(self.max_num_seqs, self.max_num_batched_tokens) + LOGITS_ROWS) * self.own_logits * self._activation
        own += self.copied_bytes
        return own + self._draw_bytes() if self.samples else own + self._stream(1)

    def _draw_bytes(self) -> int:
        row = self.spec.vocab_size * 4
        if self.on_gpu:  # and what the top-p kernels keep
            rows = min(max(self.max_num_seqs, LOGITS_ROWS), self.max_num_batched_tokens + LOGITS_ROWS)
            return rows * (4 * row + self.spec.vocab_size * self._activation) + WORKSPACE_BYTES
        rows = min(self.max_num_seqs, self.max_num_batched_tokens)
        narrow = self.spec.vocab_size * 2 if self._activation == 2 else 0  # the head's own output
        beside_prompt = (rows + LOGITS_ROWS) * row + LOGITS_ROWS * narrow
        return self._stream(1) + max(rows * (row + narrow), 2 * rows * row + SLICES, beside_prompt)

    # -- parts of the layers

    @property
    def _activation(self) -> int:
        return DTYPE_BYTES[self.dtype]

    @cached_property
    def _reads_cache(self) -> bool:
        """Return whether decoding reads K and V where they are: see kernels/cpu/attention.py."""
        return bool(chosen_set()[0]) and self.kv_dtype in READ_NATIVELY and self.spec.latent is None

    @cached_property
    def _num_groups(self) -> int:
        return len(kv_groups(self.spec))

    @cached_property
    def _all_windowed(self) -> bool:
        return bool(self.spec.layer_is_windowed) and all(self.spec.layer_is_windowed)

    @cached_property
    def _shapes(self) -> set[tuple[int, int]]:
        """KV heads and their size, of each kind of layer."""
        return {kv_shape(self.spec, layer) for layer in range(self.spec.num_layers)}

    @cached_property
    def _kv_heads(self) -> int:
        return max(heads for heads, _ in self._shapes)

    @cached_property
    def _kv_width(self) -> int:
        """Numbers of one token's keys in the widest layer."""
        return max(heads * head_dim for heads, head_dim in self._shapes)

    @cached_property
    def _q_width(self) -> int:
        return self.spec.num_heads * max(head_dim for _, head_dim in self._shapes)

    @property
    def _kv_is_byte(self) -> bool:
        return self.kv_dtype not in DTYPE_BYTES

    def _stream(self, count: float, width: int | None = None) -> int:
        """Return the bytes of `count` tensors [T, width] in the model's type."""
        return int(count * self.max_num_batched_tokens * (width or self.spec.hidden_size) * self._activation)

    def _layer_inputs(self, count: int) -> int:
        """Return the bytes of `count` tensors of per-layer embeddings: one is held, and made of a few."""
        sizes = self.spec.per_layer_input
        return 0 if sizes is None else self._stream(count, (sizes.num_layers or self.spec.num_layers) * sizes.size)

    def _dense_mlp(self) -> int:
        """Return the bytes of a dense feed-forward part: four streams, gate, up and their product. A class makes them
        for all tokens at once, unless mixing its streams takes more (`CLASS_TENSORS`)."""
        is_of_class = self.spec.implementation != "localllm" and self.spec.class_streams == 1
        widest = (self.spec.class_mlp_tensors if is_of_class else 3) * self._widest_mlp()
        if self.on_gpu or is_of_class:
            return self._stream(4) + self._stream(1, widest) + self._dequantized()
        rows = min(CPU_MLP_ROWS, self.max_num_batched_tokens)
        answers = self._stream(1) if rows < self.max_num_batched_tokens else 0
        return self._stream(4) + max(answers + rows * widest * self._activation, 2 * answers) + self._dequantized()

    def _widest_mlp(self) -> int:
        spec, mixture = self.spec, self.spec.mixture
        if mixture is None or mixture.beside_mlp or not all(mixture.is_in(each) for each in range(spec.num_layers)):
            return max((spec.intermediate_size, *spec.layer_widths))
        return mixture.shared_size

    def _mixture(self) -> int:
        """Return the bytes of a mixture of experts.

        A GPU holds the products of all chosen experts at once, in blocks padded per expert, then their outputs. A CPU
        runs one expert after another, at worst with all tokens, and sums in fp32.
        """
        mixture, hidden = self.spec.mixture, self.spec.hidden_size
        if mixture is None:
            return 0
        width, tokens = mixture.intermediate_size, self.max_num_batched_tokens
        if not self.on_gpu:
            return self._stream(4) + self._stream(1, 3 * width + 3 * hidden) + 2 * tokens * hidden * 4
        rows = tokens * mixture.top_k
        products = (rows + mixture.num_experts * EXPERT_ROWS) * width
        return self._stream(5) + (products + rows * hidden) * self._activation

    def _recurrent(self) -> int:
        """Return the bytes of a recurrent part: its projections, the convolution's output and its parts, the output
        before and after its gate."""
        recurrent = self.spec.recurrent
        if recurrent is None:
            return 0
        return self._stream(1, 3 * recurrent.conv_channels + 3 * recurrent.inner_size)

    def _projections(self) -> int:
        """Return the bytes of q, k and v from their matrix and of the rotated q and k; a CPU rotates in fp32."""
        spec = self.spec
        kv, qk = self._kv_width, self._q_width + self._kv_width
        qkv = self._stream(1, qk + kv)
        if spec.latent is not None:  # queries, before and after their projection into the latent space
            qkv += self._stream(1, spec.num_heads * (spec.latent.nope_size + spec.latent.rope_size) + qk)
        turned = self._stream(2, qk) if self.on_gpu or self._activation == 4 else self._stream(5, qk)
        normed = self._stream(2 if self._activation == 4 else 4, qk) if spec.qk_norm and not self.on_gpu else 0
        return self._stream(3) + qkv + turned + normed

    def _attention(self) -> int:
        """Return the bytes of stream, q, k and output; with an 8-bit cache a CPU has q and the output in fp32."""
        spec = self.spec
        q, qk = self._q_width, self._q_width + self._kv_width
        wide = 0
        if not self.on_gpu and self._kv_is_byte and self._activation == 2:
            wide = self._stream(4, q)
        if self.on_gpu:
            wide = self.max_num_seqs * SPLITS * (q + 2 * spec.num_heads) * 4  # partial sums
            wide += 0 if spec.index is None else self._chosen_keys(spec.index.topk)
        return self._stream(3) + self._stream(1, qk) + self._stream(1, q) + wide

    def _chosen_keys(self, topk: int) -> int:
        """Return the bytes of the keys that an indexer chooses on a GPU: scores of all keys, then positions."""
        return INDEX_NUMBERS * 4 + self.max_num_batched_tokens * topk * 4

    def _masks(self, context: int) -> int:
        """Return the bytes of the masks, which a CPU builds for a whole chunk once for all layers, in fp32."""
        if self.on_gpu:
            return 0
        spec, tokens = self.spec, min(self.max_num_batched_tokens, context)
        windowed = any(spec.layer_is_windowed)
        total = 0
        if not self._all_windowed:
            total += tokens * max(CPU_QUERIES, context - tokens // 2 + CPU_QUERIES // 2) * 4
        if windowed:
            total += tokens * min((spec.sliding_window or 0) + CPU_QUERIES, context) * 4
        return total

    def _prompt_buffers(self, context: int) -> list[int]:
        """Return a CPU's buffers for one request's K and V, and for its scores if the model modifies them."""
        if self.on_gpu:
            return []
        spec = self.spec
        if self._all_windowed:
            context = min(context, (spec.sliding_window or 0) + self.max_num_batched_tokens)
        buffers = [context * self._gathered_token // 2] * 2
        index = spec.index
        if index is not None and context > index.topk:  # scores of all keys, then chosen keys and their scores
            tokens, width = self.max_num_batched_tokens, self._kv_width
            scores = min(INDEX_NUMBERS, tokens * index.num_heads * context)
            keys = min(INDEX_NUMBERS, tokens * index.topk * width)
            buffers += [context * index.head_dim * 4, scores * 4, keys * 4, keys * spec.num_heads // width * 8]
        if spec.attention_softcap is not None or spec.attention_sinks:
            queries = min(CPU_QUERIES, self.max_num_batched_tokens)
            scores = spec.num_heads * queries * context
            buffers += [scores * 4, scores * 4, scores * 4 // self._kv_heads]  # the last: a mask for each group
            if self._activation == 2:
                buffers += [scores * 2, context * self._kv_width * 4]
        return buffers

    @property
    def _gathered_token(self) -> int:
        """Bytes of one token's K and V in one layer as attention gathers them. K and V count separately even where one
        cache holds both; 8-bit values become fp32.
        """
        numbers = 2 * self._kv_width
        return numbers * (4 if self._kv_is_byte else DTYPE_BYTES[self.kv_dtype])

    def _codes(self) -> int:
        """Return the bytes of activations that a CPU converts to 8 bits to multiply them with quantised weights."""
        if self.on_gpu or not self.is_quantized:
            return 0
        return self.max_num_batched_tokens * self.spec.hidden_size * (4 + 4 + 1)

    def _prompt_embeds_bytes(self) -> int:
        return self._stream(max(self.given_rows, int(self.prompt_embeds)))

    def _dequantized(self) -> int:
        return DEQUANTIZED_BYTES if self.is_quantized and self.on_gpu else 0


def kv_bytes_per_token(spec: ModelSpec, kv_dtype: str) -> int:
    """Return the bytes of one token position over all layers."""
    return sum(group_token_bytes(group, kv_dtype) for group in kv_groups(spec))


def group_token_bytes(group: KVGroup, kv_dtype: str) -> int:
    """Return the bytes of one token position over a group's layers, scales included."""
    stored = format_of(kv_dtype, group.window)
    head = stored.token_bytes(group.head_dim, values_are_keys=group.values_are_keys)
    index = group.index_size * DTYPE_BYTES[stored.index_type]
    return len(group.layers) * (group.num_kv_heads * head + index)


def block_bytes(spec: ModelSpec, block_size: int, kv_dtype: str) -> tuple[int, ...]:
    """Return the bytes of a block of each group."""
    return tuple(block_size * group_token_bytes(group, kv_dtype) for group in kv_groups(spec))


def kv_cache_bytes(spec: ModelSpec, num_blocks: Sequence[int], block_size: int, kv_dtype: str) -> int:
    """Return the bytes of a KV cache with `num_blocks` blocks in each group."""
    sizes = block_bytes(spec, block_size, kv_dtype)
    return sum(count * size for count, size in zip(num_blocks, sizes, strict=True))
