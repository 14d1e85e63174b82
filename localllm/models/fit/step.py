"""What one step holds beside weights and KV cache, as arithmetic over the shapes that the model's code allocates.

A step goes through parts that follow one another and give back what they took: attention, the feed-forward part,
logits and sampling. What counts is the largest, each in its worst case: a chunk of a prompt at the very end of the
longest context, every slot occupied, a full KV cache, and sampling that asks for everything.

    state      token ids and block tables of all slots; there between steps, too
    layers     residual stream, a layer's buffers, attention masks, what a CPU gathers from the cache
    sampling   logits of every row that samples, and a copy where logprobs want them as they were
    kept       by a CPU's allocator: buffers of one part do not fit into the holes that another leaves

On a GPU this is what is believed until the loaded model is measured (runner/opening.py). On a CPU it stays: measuring
would mean seconds of computing at each start. scripts/check_fit holds it against a process.
Does not know: budgets, what is done when it does not fit (plan.py).
"""

from __future__ import annotations

from dataclasses import dataclass

from localllm.models.spec import ModelSpec

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
MIB = 1024**2
LOGITS_ROWS = 64  # prompt logprobs run the head over this many positions at a time
SPLITS = 32  # parts that attention may cut a long context into, on a GPU
CPU_QUERIES = 128  # kernels/paged_attention/twin.py: queries at a time
CPU_MLP_ROWS = 256  # models/layers/mlp.py: rows at a time
EXPERT_ROWS = 128  # kernels/moe: the most rows of a block that is filled up for one expert
SLICES = 12 * MIB  # temporaries of sampling, which a CPU does a few rows at a time
DEQUANTIZED_BYTES = 128 * MIB  # kernels/planar: the part of a quantised matrix that a long prompt holds in 16 bits
WORKSPACE_BYTES = 32 * MIB  # cuBLAS takes it from the same allocator
PROCESS_BYTES = 10 * MIB  # what the first steps leave in a process: oneDNN's primitives, thread stacks
MAPPED_BYTES = 32 * MIB  # glibc gives buffers of this size back at once; smaller ones it keeps


@dataclass(frozen=True, slots=True)
class StepMemory:
    """What is asked of a step. A: bytes of a number in an activation."""

    spec: ModelSpec
    dtype: str  # of activations
    kv_dtype: str
    on_gpu: bool
    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    is_quantized: bool = False  # at least some of the weights
    prompt_embeds: bool = False  # a whole chunk may bring embeddings, which stay until its step is done

    # -- the answer

    def bytes_at(self, context: int, num_blocks: int) -> int:
        """The most that a step holds with this longest context and a KV cache of so many blocks, all of them full."""
        return max(self.fixed_bytes(context), self._gathering(context, num_blocks))

    def _gathering(self, context: int, num_blocks: int) -> int:
        blocks = min(num_blocks, self.most_gathered_blocks())
        return self.gathering_bytes(context) + blocks * self.gathered_per_block()

    def sampler_bytes(self, context: int, num_blocks: int) -> int:
        """What of it sampling needs more than the layers."""
        layers = max(self.state_bytes(context) + self._layers(context), self._gathering(context, num_blocks))
        return self.bytes_at(context, num_blocks) - layers

    def fixed_bytes(self, context: int) -> int:
        """Of the parts that do not depend on the size of the cache."""
        return self.state_bytes(context) + max(self._layers(context), self.sampling_bytes())

    def _layers(self, context: int) -> int:
        parts = (self._mlp(), self._projections(), self._attention() + self._gathered_prompt(context))
        return max(parts) + self._masks(context) + self._codes() + self._given()

    def gathering_bytes(self, context: int) -> int:
        """Of decode attention, what is gathered from the cache not counted."""
        return self.state_bytes(context) + self._attention() + self._masks(context) + self._given()

    def gathered_per_block(self) -> int:
        """On a CPU one layer's K and V of all decoding requests are copied side by side, and scored in fp32."""
        if self.on_gpu:
            return 0
        spec, size = self.spec, self._activation
        per_token = self._gathered_token + 2 * 4 * spec.num_heads + 4 * spec.num_kv_heads  # scores, softmax, mask
        if size == 2 and not self._kv_is_byte:
            per_token += 4 * spec.num_kv_heads * spec.head_dim + 2 * spec.num_heads  # keys in fp32, weights in 16 bits
        return per_token * self.block_size

    def most_gathered_blocks(self) -> int:
        """However large the cache: where every layer has a window, a request reads no more than that."""
        if not self._all_windowed:
            return 2**62
        return self.max_num_seqs * (-(-(self.spec.sliding_window or 0) // self.block_size) + 1)

    def state_bytes(self, context: int) -> int:
        """What is there between steps, too: of the slots, and of the process."""
        slots = self.max_num_seqs * (context + -(-context // self.block_size)) * 4
        return slots + (0 if self.on_gpu else PROCESS_BYTES + self.kept_bytes(context))

    def kept_bytes(self, context: int) -> int:
        """The smaller buffers of the feed-forward part and of a prompt's attention, and logits in 16 bits.

        Which holes fit what is not derived but measured: scripts/check_fit.
        """
        rows = min(CPU_MLP_ROWS, self.max_num_batched_tokens) * self._widest_mlp() * self._activation
        buffers = [self._stream(1)] * (5 if self.max_num_batched_tokens > CPU_MLP_ROWS else 4) + [2 * rows, rows]
        buffers += self._prompt_buffers(context)
        if self._activation == 2:
            buffers.append(min(self.max_num_seqs, self.max_num_batched_tokens) * self.spec.vocab_size * 2)
        return sum(size for size in buffers if size < MAPPED_BYTES)

    def sampling_bytes(self) -> int:
        """Logits of all that sample, in fp32, and a copy for logprobs; or those of prompt positions beside them."""
        row = self.spec.vocab_size * 4
        if self.on_gpu:  # and what the kernels of the nucleus keep
            rows = min(max(self.max_num_seqs, LOGITS_ROWS), self.max_num_batched_tokens + LOGITS_ROWS)
            return rows * (4 * row + self.spec.vocab_size * self._activation) + WORKSPACE_BYTES
        rows = min(self.max_num_seqs, self.max_num_batched_tokens)
        narrow = self.spec.vocab_size * 2 if self._activation == 2 else 0  # as the head gives them
        beside_prompt = (rows + LOGITS_ROWS) * row + LOGITS_ROWS * narrow
        return self._stream(1) + max(rows * (row + narrow), 2 * rows * row + SLICES, beside_prompt)

    # -- parts of the layers

    @property
    def _activation(self) -> int:
        return DTYPE_BYTES[self.dtype]

    @property
    def _all_windowed(self) -> bool:
        return bool(self.spec.layer_is_windowed) and all(self.spec.layer_is_windowed)

    @property
    def _kv_is_byte(self) -> bool:
        return self.kv_dtype not in DTYPE_BYTES

    def _stream(self, count: float, width: int | None = None) -> int:
        """So many tensors [T, width] in the model's type."""
        return int(count * self.max_num_batched_tokens * (width or self.spec.hidden_size) * self._activation)

    def _mlp(self) -> int:
        return max(self._dense_mlp(), self._mixture())

    def _dense_mlp(self) -> int:
        """Residual, the layer's input, its answer so far and what came before it; gate, up and their product."""
        widest = 3 * self._widest_mlp()
        if self.on_gpu:
            return self._stream(4) + self._stream(1, widest) + self._dequantized()
        rows = min(CPU_MLP_ROWS, self.max_num_batched_tokens)
        answers = self._stream(1) if rows < self.max_num_batched_tokens else 0
        return self._stream(4) + max(answers + rows * widest * self._activation, 2 * answers) + self._dequantized()

    def _widest_mlp(self) -> int:
        spec, mixture = self.spec, self.spec.mixture
        if mixture is None or not all(mixture.is_in(layer) for layer in range(spec.num_layers)):
            return spec.intermediate_size
        return mixture.shared_size

    def _mixture(self) -> int:
        """A GPU holds all chosen experts' products at once, in blocks filled up for each expert, then their answers. A
        CPU takes one expert after another, at worst with all tokens, and adds up in fp32."""
        mixture, hidden = self.spec.mixture, self.spec.hidden_size
        if mixture is None:
            return 0
        width, tokens = mixture.intermediate_size, self.max_num_batched_tokens
        if not self.on_gpu:
            return self._stream(4) + self._stream(1, 3 * width + 3 * hidden) + 2 * tokens * hidden * 4
        rows = tokens * mixture.top_k
        products = (rows + mixture.num_experts * EXPERT_ROWS) * width
        return self._stream(5) + (products + rows * hidden) * self._activation

    def _projections(self) -> int:
        """q, k and v as they come from their matrix, and q and k turned; on a CPU that goes through fp32."""
        spec = self.spec
        kv, qk = spec.num_kv_heads * spec.head_dim, (spec.num_heads + spec.num_kv_heads) * spec.head_dim
        qkv = self._stream(1, qk + kv)
        if spec.latent is not None:  # queries, before and after they are brought into the space of latents
            qkv += self._stream(1, spec.num_heads * (spec.latent.nope_size + spec.latent.rope_size) + qk)
        turned = self._stream(2, qk) if self.on_gpu or self._activation == 4 else self._stream(5, qk)
        normed = self._stream(2 if self._activation == 4 else 4, qk) if spec.qk_norm and not self.on_gpu else 0
        return self._stream(3) + qkv + turned + normed

    def _attention(self) -> int:
        """The stream, q and k, and the answer; with an 8-bit cache q and the answer in fp32 on a CPU."""
        spec = self.spec
        q, qk = spec.num_heads * spec.head_dim, (spec.num_heads + spec.num_kv_heads) * spec.head_dim
        wide = 0
        if not self.on_gpu and self._kv_is_byte and self._activation == 2:
            wide = self._stream(4, q)
        if self.on_gpu:
            wide = self.max_num_seqs * spec.num_heads * SPLITS * (spec.head_dim + 2) * 4  # partial sums
        return self._stream(3) + self._stream(1, qk) + self._stream(1, q) + wide

    def _masks(self, context: int) -> int:
        """On a CPU the masks of a whole chunk are made once for all layers, in fp32."""
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

    def _gathered_prompt(self, context: int) -> int:
        return sum(self._prompt_buffers(context))

    def _prompt_buffers(self, context: int) -> list[int]:
        """A CPU copies one request's K and V side by side; where the model adds to scores, they are written out."""
        if self.on_gpu:
            return []
        spec = self.spec
        if self._all_windowed:
            context = min(context, (spec.sliding_window or 0) + self.max_num_batched_tokens)
        buffers = [context * self._gathered_token // 2] * 2
        if spec.attention_softcap is not None or spec.attention_sinks:
            queries = min(CPU_QUERIES, self.max_num_batched_tokens)
            scores = spec.num_heads * queries * context
            buffers += [scores * 4, scores * 4, scores * 4 // spec.num_kv_heads]  # the last: a mask for each group
            if self._activation == 2:
                buffers += [scores * 2, context * spec.num_kv_heads * spec.head_dim * 4]
        return buffers

    @property
    def _gathered_token(self) -> int:
        """Bytes of K and V of one token in one layer, as attention gathers them, both also where one cache is both; 8
        bits become fp32."""
        numbers = 2 * self.spec.num_kv_heads * self.spec.head_dim
        return numbers * (4 if self._kv_is_byte else DTYPE_BYTES[self.kv_dtype])

    def _codes(self) -> int:
        """Rows of activations on their way to bytes, which a CPU multiplies with quantised weights."""
        if self.on_gpu or not self.is_quantized:
            return 0
        return self.max_num_batched_tokens * self.spec.hidden_size * (4 + 4 + 1)

    def _given(self) -> int:
        return self._stream(1) if self.prompt_embeds else 0

    def _dequantized(self) -> int:
        return DEQUANTIZED_BYTES if self.is_quantized and self.on_gpu else 0


def kv_bytes_per_token(spec: ModelSpec, kv_dtype: str) -> int:
    """Bytes of one token position over all layers; an int8 cache has an fp32 scale for each head of K and of V."""
    if kv_dtype in DTYPE_BYTES:
        return spec.kv_bytes_per_token(DTYPE_BYTES[kv_dtype])
    numbers = spec.kv_bytes_per_token(1)
    return numbers + (numbers // spec.head_dim * 4 if kv_dtype == "int8" else 0)
