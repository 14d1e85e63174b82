"""Drives a loaded model and its paged cache directly, without scheduler and runner: the goldens' hand crank."""

import random
from collections import abc
from dataclasses import dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from localllm.kernels.layer_cache import HybridCache, LayerCache, LayerKV, LayerState
from localllm.kernels.paged_attention import kv_cache_shape
from localllm.machine.hardware import Gpu, Hardware
from localllm.models.decoder.decoder import DecoderModel
from localllm.models.decoder.native_program import DecodeRows, open_native_program
from localllm.models.drafters.eagle import EagleDrafter
from localllm.models.fit import activation_bytes
from localllm.models.inputs import ForwardInputs, GroupInputs, StateInputs
from localllm.models.loader import load_model
from localllm.models.read_spec import read_spec
from localllm.models.spec.model_spec import ModelSpec, index_size, keeps_kv, kv_groups, kv_shape
from localllm.models.spec.rope import RopeSpec
from tests.tiny import VOCAB_SIZE, load_reference

BLOCK_SIZE = 8
PLACES = 16
CPU = torch.device("cpu")


@dataclass
class Sequence:
    token_ids: list[int]
    computed: int = 0
    blocks: list[int] = field(default_factory=list)
    adapter: int = -1
    place: int = 0  # of its recurrent states; 0: it has none yet
    writes: int = 0  # another place that its next step writes; 0: `place`


class ModelHarness:
    """One model, one cache full of NaN but for the null block, block ids and places handed out in random order."""

    def __init__(
        self,
        model: DecoderModel,
        *,
        num_blocks: int = 128,
        seed: int = 0,
        kv_dtype: torch.dtype = torch.float32,
        block_size: int = BLOCK_SIZE,
    ) -> None:
        self.model, self.spec, self.block_size = model, model.spec, block_size

        def unwritten(layer: int) -> Tensor:
            shape = kv_cache_shape(num_blocks, block_size, *kv_shape(self.spec, layer))
            return torch.full(shape, torch.nan, dtype=kv_dtype, device=model.device)

        def cache_of(layer: int) -> LayerKV:
            k = unwritten(layer)
            size = index_size(self.spec, layer)
            index = torch.full((1, num_blocks, block_size, size), torch.nan, device=model.device) if size else None
            return LayerKV(k, k if self.spec.latent is not None else unwritten(layer), index_keys=index)

        layers = range(self.spec.num_layers)
        kept = {layer: cache_of(layer) for layer in layers if keeps_kv(self.spec, layer)}

        def cached(layer: int) -> LayerCache | None:
            kv = kept.get(self.spec.kv_source[layer] if self.spec.kv_source else layer)
            if layer not in self.spec.recurrent_layers:
                return kv
            state = unwritten_state(self.spec, model.dtype, model.device)
            return state if kv is None else HybridCache(kv, state)

        self.kv_cache = [cached(layer) for layer in layers]
        self.free, self.free_places = list(range(1, num_blocks)), list(range(1, PLACES))
        random.Random(seed).shuffle(self.free)
        random.Random(seed).shuffle(self.free_places)

    def step(self, rows: list[tuple[Sequence, int]], *, all_logits: bool = False) -> list[Tensor]:
        """Run n new tokens of each sequence as one batch; logits of each one's last token, or of all its n."""
        rows_in_order = sorted(rows, key=lambda row: row[1] != 1)
        inputs = self._inputs(rows_in_order, all_logits)
        hidden = self.model.forward(inputs, self.kv_cache)
        logits = self.model.compute_logits(hidden[inputs.logits_indices])
        counts = [n if all_logits else 1 for _, n in rows_in_order]
        by_row = {id(sequence): part for (sequence, _), part in zip(rows_in_order, logits.split(counts), strict=True)}
        for sequence, n in rows:
            sequence.computed += n
        return [by_row[id(sequence)] for sequence, _ in rows]

    def prefill(self, token_ids: list[int], chunk: int | None = None, adapter: int = -1) -> tuple[Sequence, Tensor]:
        """One new sequence, alone, in chunks; logits at every position."""
        sequence, parts = Sequence(list(token_ids), adapter=adapter), []
        while sequence.computed < len(token_ids):
            n = min(chunk or len(token_ids), len(token_ids) - sequence.computed)
            parts += self.step([(sequence, n)], all_logits=True)
        return sequence, torch.cat(parts)

    def greedy(self, prompts: list[list[int]], count: int, chunk: int | None = None) -> list[list[int]]:
        """`count` tokens for each prompt: a sequence decodes while its neighbours still prefill."""
        sequences = [Sequence(list(prompt)) for prompt in prompts]
        ends = [len(prompt) + count for prompt in prompts]
        while True:
            rows = []
            for sequence, end in zip(sequences, ends, strict=True):
                wanted = len(sequence.token_ids) - sequence.computed
                if wanted and len(sequence.token_ids) < end:
                    rows.append((sequence, min(wanted, chunk or wanted)))
            if not rows:
                return [s.token_ids[-count:] for s in sequences]
            for (sequence, _), logits in zip(rows, self.step(rows), strict=True):
                if sequence.computed == len(sequence.token_ids):
                    sequence.token_ids.append(int(logits[0].argmax()))

    def _inputs(self, rows: list[tuple[Sequence, int]], all_logits: bool) -> ForwardInputs:
        state = self._state_inputs([sequence for sequence, _ in rows]) if self.spec.recurrent is not None else None
        for sequence, n in rows:
            while len(sequence.blocks) * self.block_size < sequence.computed + n:
                sequence.blocks.append(self.free.pop())
        lens = tuple(n for _, n in rows)
        contexts = tuple(s.computed + n for s, n in rows)
        positions = [p for s, n in rows for p in range(s.computed, s.computed + n)]
        slots = [
            s.blocks[p // self.block_size] * self.block_size + p % self.block_size
            for s, n in rows
            for p in range(s.computed, s.computed + n)
        ]
        width = max(len(s.blocks) for s, _ in rows) + 1
        table = torch.tensor([s.blocks + [0] * (width - len(s.blocks)) for s, _ in rows], dtype=torch.int32)
        cumulative = torch.tensor([0, *lens]).cumsum(0).int()
        adapters = tuple(s.adapter for s, _ in rows)
        ids = torch.tensor([s.adapter for s, n in rows for _ in range(n)], dtype=torch.int32)
        inputs = ForwardInputs(
            token_ids=torch.tensor([t for s, n in rows for t in s.token_ids[s.computed : s.computed + n]]),
            positions=torch.tensor(positions),
            groups=(GroupInputs(table, torch.tensor(slots)),) * len(kv_groups(self.spec)),
            context_lens=torch.tensor(contexts, dtype=torch.int32),
            cu_seqlens_q=cumulative,
            logits_indices=torch.arange(sum(lens)) if all_logits else cumulative[1:].long() - 1,
            num_decodes=sum(n == 1 for n in lens),
            query_lens=lens,
            context_lens_host=contexts,
            adapters=None if all(s.adapter < 0 for s, _ in rows) else ids,
            adapters_host=adapters,
            state=state,
        )
        tensors = {field.name: getattr(inputs, field.name) for field in fields(inputs)}
        moved = {n: t.to(self.model.device) for n, t in tensors.items() if isinstance(t, Tensor)}
        groups = tuple(GroupInputs(*(t.to(self.model.device) for t in group)) for group in inputs.groups)
        return replace(inputs, **moved, groups=groups)

    def _state_inputs(self, sequences: list[Sequence]) -> StateInputs:
        """A sequence reads and writes its place; it begins from nothing, in a place that holds NaN or old states."""
        read = tuple(sequence.place if sequence.computed else -1 for sequence in sequences)
        for sequence in sequences:
            sequence.place = sequence.writes or sequence.place or self.free_places.pop()
        write, save = tuple(sequence.place for sequence in sequences), (0,) * len(sequences)
        each = (read, write, save)
        return StateInputs(*(torch.tensor(p, dtype=torch.int32, device=self.model.device) for p in each), *each)


def unwritten_state(spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> LayerState:
    """One layer's states, full of NaN."""
    assert spec.recurrent is not None
    shape = spec.recurrent.matrix_shape
    conv = torch.full((PLACES, *spec.recurrent.conv_shape), torch.nan, dtype=dtype, device=device)
    return LayerState(conv, None if shape is None else torch.full((PLACES, *shape), torch.nan, device=device))


class LoneHarness(ModelHarness):
    """A cache of a model that both its native step and its forward pass use."""

    def __init__(self, model: DecoderModel, *, kv_dtype: torch.dtype = torch.float32, seed: int = 0) -> None:
        super().__init__(model, kv_dtype=torch.float32 if kv_dtype == torch.int8 else kv_dtype, seed=seed)
        if kv_dtype == torch.int8:
            shape = kv_cache_shape(128, BLOCK_SIZE, self.spec.num_kv_heads, self.spec.head_dim)
            self.kv_cache = [_int8_cache(shape, self.spec.latent is not None) for _ in range(self.spec.num_layers)]
        self.lone = open_native_program(model, self.kv_cache)

    def natively(self, requests: abc.Sequence[Sequence]) -> Tensor:
        """Run the next token of each request in one native step; logits [R, vocab]."""
        return self.natively_along([(request, 1) for request in requests])

    @torch.inference_mode()
    def natively_along(self, work: abc.Sequence[tuple[Sequence, int]]) -> Tensor:
        """Run the next tokens of each request, so many, in one native step; logits [tokens, vocab]."""
        inputs = self._inputs(list(work), all_logits=False)
        table = inputs.groups[0].block_table.numpy()
        rows_of_tables = np.repeat(np.arange(len(work)), [count for _, count in work])
        addresses = table.ctypes.data + rows_of_tables * table.strides[0]
        token_ids, positions, slots = (
            t.numpy() for t in (inputs.token_ids, inputs.positions, inputs.groups[0].slot_mapping)
        )
        each = len(inputs.groups), 1
        states = None
        if inputs.state is not None:
            states = torch.stack(inputs.state[:3]).numpy()
        adapters = None if inputs.adapters is None else inputs.adapters.numpy().astype(np.int64)
        rows = DecodeRows(token_ids, positions, np.tile(slots, each), np.tile(addresses, each), states, adapters)
        logits = self.lone.forward(rows).clone()
        for request, count in work:
            request.computed += count
        return logits


def _int8_cache(shape: tuple[int, int, int, int], values_are_keys: bool) -> LayerKV:
    (k, k_scale), (v, v_scale) = (
        (torch.zeros(shape, dtype=torch.int8), torch.full(shape[:3], torch.nan)) for _ in range(2)
    )
    return LayerKV(k, k, k_scale, k_scale) if values_are_keys else LayerKV(k, v, k_scale, v_scale)


def token(place: int, seed: int = 0) -> int:
    return (17 * place + 29 * seed + 3) % VOCAB_SIZE


class Harness(ModelHarness):
    """A checkpoint on disk."""

    def __init__(
        self,
        path: Path,
        *,
        num_blocks: int = 128,
        seed: int = 0,
        max_model_len: int | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device = CPU,
        cpu_weights: str = "fast",
        block_size: int = BLOCK_SIZE,
    ) -> None:
        model = load_model(path, read_spec(path), device, dtype, max_model_len=max_model_len, cpu_weights=cpu_weights)
        kv_dtype = torch.float32 if device.type == "cpu" else dtype
        super().__init__(model, num_blocks=num_blocks, seed=seed, kv_dtype=kv_dtype, block_size=block_size)


BLOCK, WIDTH, HEADS, KV_HEADS, HEAD_DIM = 8, 64, 4, 2, 16
TAPS = [1, 2, 3]


class Crank:
    """Drives a drafter over a cache that holds NaN where nothing was written, in blocks of random order."""

    def __init__(self, drafter: EagleDrafter, seed: int = 0) -> None:
        self.drafter = drafter
        shape = kv_cache_shape(32, BLOCK, KV_HEADS, HEAD_DIM)
        self.kv = LayerKV(torch.full(shape, torch.nan), torch.full(shape, torch.nan))
        self.blocks = (1 + torch.randperm(31, generator=torch.Generator().manual_seed(seed))).tolist()
        self.tables: list[list[int]] = []

    def row(self, tokens: int) -> int:
        """Return a new row with blocks for so many tokens."""
        count = -(-tokens // BLOCK)
        self.tables.append(self.blocks[:count])
        self.blocks = self.blocks[count:]
        return len(self.tables) - 1

    def slots(self, row: int, first: int, count: int) -> list[int]:
        return [self.tables[row][p // BLOCK] * BLOCK + p % BLOCK for p in range(first, first + count)]

    def inputs(self, rows: abc.Sequence[tuple[int, int, Tensor]]) -> ForwardInputs:
        """rows: (row, index of its first token, token ids); rows of one token come first."""
        counts = [len(tokens) for _, _, tokens in rows]
        width = max(len(table) for table in self.tables)
        table = torch.zeros(len(rows), width, dtype=torch.int32)
        for place, (row, _, _) in enumerate(rows):
            table[place, : len(self.tables[row])] = torch.tensor(self.tables[row], dtype=torch.int32)
        ends = [first + len(tokens) for _, first, tokens in rows]
        slots = [slot for row, first, tokens in rows for slot in self.slots(row, first, len(tokens))]
        positions = torch.cat([torch.arange(first, first + len(tokens)) for _, first, tokens in rows]) - 1
        return ForwardInputs(
            token_ids=torch.cat([tokens for _, _, tokens in rows]),
            positions=positions,
            groups=(GroupInputs(table, torch.tensor(slots)),),
            context_lens=torch.tensor(ends, dtype=torch.int32),
            cu_seqlens_q=torch.tensor([0, *counts]).cumsum(0).int(),
            logits_indices=torch.tensor(counts).cumsum(0) - 1,
            num_decodes=sum(count == 1 for count in counts),
            query_lens=tuple(counts),
            context_lens_host=tuple(ends),
            first_key=1,
        )

    def extend(self, rows: abc.Sequence[tuple[int, int, Tensor]], features: Tensor) -> Tensor:
        with torch.inference_mode():
            return self.drafter.extend(self.inputs(rows), [self.kv], features)

    def step(self, rows: abc.Sequence[tuple[int, int, Tensor]], hidden: Tensor) -> Tensor:
        with torch.inference_mode():
            return self.drafter.step(self.inputs(rows), [self.kv], hidden)

    def stored(self, row: int, first: int, count: int) -> tuple[Tensor, Tensor]:
        """Return k and v [n, kv_heads, d] of some tokens of a row."""
        slots = torch.tensor(self.slots(row, first, count))
        return tuple(each.flatten(1, 2)[:, slots].transpose(0, 1) for each in (self.kv.k, self.kv.v))  # type: ignore[return-value]


GIB = 1024**3
QWEN_05B = ModelSpec(
    architecture="Qwen2ForCausalLM", num_layers=24, hidden_size=896, intermediate_size=4864, num_heads=14,
    num_kv_heads=2, head_dim=64, vocab_size=151_936, max_position=32_768, hidden_act="silu",
    tie_word_embeddings=True, dtype="bfloat16", rope=RopeSpec(),
)  # fmt: skip
LLAMA_8B = ModelSpec(
    architecture="LlamaForCausalLM", num_layers=32, hidden_size=4096, intermediate_size=14_336, num_heads=32,
    num_kv_heads=8, head_dim=128, vocab_size=128_256, max_position=131_072, hidden_act="silu",
    tie_word_embeddings=False, dtype="bfloat16", rope=RopeSpec(),
)  # fmt: skip
WEIGHTS = {QWEN_05B.architecture: 988_097_536, LLAMA_8B.architecture: 16_060_522_496}
NO_GPU = Hardware((), "CPU", 8, 32 * GIB, 24 * GIB)


def without_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have plans count the memory of a machine without a native library, which gathers K and V to decode."""
    monkeypatch.setattr(activation_bytes, "chosen_set", lambda: ("", "there is none"))


def gpu_machine(free_gib: float, total_gib: float = 24, capability: tuple[int, int] = (8, 9)) -> Hardware:
    card = Gpu(0, "Card", int(total_gib * GIB), int(free_gib * GIB), capability, "570")
    return replace(NO_GPU, gpus=(card,))


THOROUGH = (
    "llama", "smollm3", "mistral", "gemma2", "gemma3", "gemma4", "gemma4_moe", "phi3", "cohere2", "olmo2",
    "gpt_neox", "bloom", "gpt2", "glm_moe_dsa",
)  # fmt: skip
"""Between them: every way to string a layer, every notion of position, windows, caps, and norms of q and k."""


reference = cache(load_reference)


def prompt(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(3, VOCAB_SIZE), k=length)


def reference_logits(model: Any, token_ids: list[int]) -> Tensor:
    with torch.no_grad():
        return model(torch.tensor([token_ids])).logits[0].float()


def reference_greedy(model: Any, token_ids: list[int], count: int) -> list[int]:
    out = model.generate(
        torch.tensor([token_ids]),
        attention_mask=torch.ones(1, len(token_ids), dtype=torch.long),
        max_new_tokens=count,
        min_new_tokens=count,
        do_sample=False,
        temperature=None,
        top_p=None,
        pad_token_id=0,
        eos_token_id=None,
    )
    return out[0, len(token_ids) :].tolist()


def assert_close(ours: Tensor, theirs: Tensor) -> None:
    assert ours.shape == theirs.shape
    error = (ours - theirs).abs().max() / theirs.abs().max()
    assert error < 1e-4, f"relative error {error:.2e}"
