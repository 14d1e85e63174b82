"""From files to a model on a device, one tensor at a time.

Each weight is read from the memory map, fused with its siblings, converted and laid out for the device, and only
then is the next one touched: at the peak RAM holds the finished model and one matrix more.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from localllm.errors import CorruptModel
from localllm.kernels.linear import packs
from localllm.models.architectures.decoder import DecoderLayer, DecoderModel, LayerKind
from localllm.models.architectures.family import Family
from localllm.models.formats.safetensors import DTYPES, Checkpoint, TensorInfo
from localllm.models.layers.attention import Attention
from localllm.models.layers.embedding import Embedding
from localllm.models.layers.linear import Linear
from localllm.models.layers.mlp import GatedMLP
from localllm.models.layers.norm import RMSNorm
from localllm.models.layers.rotary import rope_table
from localllm.models.spec import ModelSpec, family_of

Progress = Callable[[int, int], None]
EMBEDDING, LM_HEAD = "model.embed_tokens.weight", "lm_head.weight"


def load_model(
    path: Path,
    spec: ModelSpec,
    device: torch.device,
    dtype: torch.dtype,
    progress: Progress | None = None,
    *,
    max_model_len: int | None = None,
) -> DecoderModel:
    """The model in folder `path`. progress(bytes read, bytes in all) is called after each weight.

    max_model_len: the context that will be served, None for all the checkpoint offers; it sizes the rotary tables
    and chooses between LongRoPE's short and long factors. Raises `CorruptModel`, `UnsupportedModel`.
    """
    with torch.inference_mode(), Checkpoint(Path(path)) as checkpoint:
        weights = Weights(checkpoint, spec, device, dtype, progress)
        model = DecoderBuilder(spec, family_of(spec), weights, device, dtype).build(max_model_len or spec.max_position)
        weights.check_all_used()
    _give_back_freed_memory()
    return model


def resident_bytes(path: Path, spec: ModelSpec, device: torch.device, dtype: torch.dtype) -> int:
    """Bytes of weights that `load_model` will hold, exact, from the headers alone."""
    with Checkpoint(Path(path)) as checkpoint:
        names = [name for name in checkpoint.tensors if not _is_ignored(name, spec)]
        total = sum(_held(name, checkpoint.tensors[name], spec, dtype) for name in names if name != EMBEDDING)
        embedding = checkpoint.tensors.get(EMBEDDING)
    if embedding is None:
        raise _missing(EMBEDDING, checkpoint.path)
    elements = _elements(embedding)
    if spec.tie_word_embeddings and not packs(elements, device, dtype):
        return total + elements * dtype.itemsize
    head = elements * dtype.itemsize if spec.tie_word_embeddings else 0
    return total + head + elements * min(DTYPES.get(embedding.dtype, 4), dtype.itemsize)


class Weights:
    """The checkpoint's tensors as the builder asks for them: shaped, converted, counted."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        spec: ModelSpec,
        device: torch.device,
        dtype: torch.dtype,
        progress: Progress | None,
    ) -> None:
        self._checkpoint, self._spec, self._device, self._dtype = checkpoint, spec, device, dtype
        self._progress = progress
        self._used: set[str] = set()
        self._done_bytes = 0
        self._total_bytes = sum(
            info.num_bytes for name, info in checkpoint.tensors.items() if not _is_ignored(name, spec)
        )

    def take(self, names: Iterable[str], shape: tuple[int, ...], *, keep_narrow: bool = False) -> Tensor:
        """The named tensors one above the other, together of `shape`, on the device in the model's type.

        keep_narrow: stay in the stored type where that is the smaller one. Nothing of the file stays mapped.
        """
        names = list(names)
        parts = [self._read(name) for name in names]
        got = (sum(part.shape[0] for part in parts), *parts[0].shape[1:])
        if got != shape:
            raise CorruptModel(
                f"{' + '.join(names)} has shape {list(got)}.",
                f"config.json asks for {list(shape)}.",
            )
        narrow = keep_narrow and parts[0].dtype.itemsize < self._dtype.itemsize
        dtype = parts[0].dtype if narrow else self._dtype
        if len(parts) == 1:
            tensor = parts[0].to(self._device, dtype, copy=True)
        else:
            tensor = torch.cat([part.to(self._device, dtype) for part in parts])
        self._count(names)
        return tensor

    def has(self, name: str) -> bool:
        return name in self._checkpoint.tensors

    def check_all_used(self) -> None:
        """A tensor that nobody asked for would change the answers if it were dropped in silence."""
        left = [n for n in self._checkpoint.tensors if n not in self._used and not _is_ignored(n, self._spec)]
        if left:
            raise CorruptModel(
                f"The checkpoint holds {len(left)} tensors that {self._spec.architecture} does not use.",
                f"Unexpected: {_some(sorted(left))}.",
            )

    def _read(self, name: str) -> Tensor:
        if not self.has(name):
            raise _missing(name, self._checkpoint.path)
        return self._checkpoint.tensor(name)

    def _count(self, names: list[str]) -> None:
        self._used.update(names)
        self._done_bytes += sum(self._checkpoint.tensors[name].num_bytes for name in names)
        if self._progress is not None:
            self._progress(self._done_bytes, self._total_bytes)


class TensorSource(Protocol):
    """Where a builder's tensors come from: `Weights` reads them, random_weights.py makes them up."""

    def take(self, names: Iterable[str], shape: tuple[int, ...], *, keep_narrow: bool = False) -> Tensor: ...


class DecoderBuilder:
    """Puts the decoder together, part by part, with Llama's tensor names."""

    def __init__(
        self, spec: ModelSpec, family: Family, weights: TensorSource, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.spec, self.family, self.weights, self.device, self.dtype = spec, family, weights, device, dtype

    def build(self, max_model_len: int) -> DecoderModel:
        spec = self.spec
        embedding, lm_head = self._embedding_and_head()
        layers = [self._layer(index) for index in range(spec.num_layers)]
        local = None if spec.local_rope is None else rope_table(spec.local_rope, max_model_len).to(self.device)
        tables = (rope_table(spec.rope, max_model_len).to(self.device), local)
        norm = self._norm("model.norm.weight")
        return DecoderModel(spec, embedding, layers, norm, lm_head, tables, self.device, self.dtype)

    def _embedding_and_head(self) -> tuple[Embedding, Linear]:
        """Embedding rows stay in the stored type where it is narrower: widening a row on its way out is exact.

        A tied head that is packed for the CPU cannot also be read by rows. It then gets its own copy: the packed
        head is 2 to 4 times faster than F.linear on the plain rows, which is up to half of a decode step of a small
        model, and the rows beside it cost 14 % more memory for a bf16 Qwen2.5-0.5B. (Reading rows from the memory
        map would be free, but a checkpoint rewritten in place would then change or kill a running server.)
        """
        spec = self.spec
        shape = (spec.vocab_size, spec.hidden_size)
        if not spec.tie_word_embeddings:
            embedding = self.weights.take([EMBEDDING], shape, keep_narrow=True)
            return self._embedding(embedding), Linear(self.weights.take([LM_HEAD], shape))
        separate = packs(spec.vocab_size * spec.hidden_size, self.device, self.dtype)
        rows = self.weights.take([EMBEDDING], shape, keep_narrow=separate)
        return self._embedding(rows), Linear(rows.to(self.dtype))

    def _embedding(self, rows: Tensor) -> Embedding:
        return Embedding(rows, self.dtype, self.spec.embedding_scale)

    def _layer(self, index: int) -> DecoderLayer:
        spec, prefix = self.spec, f"model.layers.{index}."
        windowed = bool(spec.layer_is_windowed) and spec.layer_is_windowed[index]
        has_rope = not spec.layer_has_rope or spec.layer_has_rope[index]
        pre_mlp = "pre_feedforward_layernorm" if spec.post_norms else "post_attention_layernorm"
        return DecoderLayer(
            kind=LayerKind(windowed, has_rope),
            input_norm=self._norm(f"{prefix}input_layernorm.weight"),
            attention=self._attention(f"{prefix}self_attn."),
            attention_post_norm=self._post_norm(f"{prefix}post_attention_layernorm.weight"),
            mlp_norm=self._norm(f"{prefix}{pre_mlp}.weight"),
            mlp=self._mlp(f"{prefix}mlp."),
            mlp_post_norm=self._post_norm(f"{prefix}post_feedforward_layernorm.weight"),
        )

    def _norm(self, name: str) -> RMSNorm:
        weight = self.weights.take([name], (self.spec.hidden_size,))
        return RMSNorm(weight, self.spec.rms_norm_eps, plus_one=self.spec.norm_plus_one)

    def _post_norm(self, name: str) -> RMSNorm | None:
        return self._norm(name) if self.spec.post_norms else None

    def _attention(self, prefix: str) -> Attention:
        spec = self.spec
        q_size, kv_size = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        names = ["qkv_proj"] if self.family.fused_qkv else ["q_proj", "k_proj", "v_proj"]
        qkv = self._linear(prefix, names, q_size + 2 * kv_size, spec.hidden_size, bias=spec.attention_bias)
        out = self._linear(prefix, ["o_proj"], spec.hidden_size, q_size, bias=spec.attention_out_bias)
        scale = spec.head_dim**-0.5 if spec.attention_scale is None else spec.attention_scale
        return Attention(
            qkv,
            out,
            self._qk_norm(prefix),
            scale,
            spec.attention_softcap,
        )

    def _qk_norm(self, prefix: str) -> RMSNorm | None:
        """q and k are normed in one call: their weights, repeated for each head, one above the other."""
        spec = self.spec
        if not spec.qk_norm:
            return None
        q, k = (self.weights.take([f"{prefix}{name}_norm.weight"], (spec.head_dim,)) for name in "qk")
        weight = torch.cat((q.expand(spec.num_heads, -1), k.expand(spec.num_kv_heads, -1)))
        return RMSNorm(weight, spec.rms_norm_eps, plus_one=spec.norm_plus_one)

    def _mlp(self, prefix: str) -> GatedMLP:
        spec = self.spec
        names = ["gate_up_proj"] if self.family.fused_gate_up else ["gate_proj", "up_proj"]
        gate_up = self._linear(prefix, names, 2 * spec.intermediate_size, spec.hidden_size, bias=spec.mlp_bias)
        down = self._linear(prefix, ["down_proj"], spec.hidden_size, spec.intermediate_size, bias=spec.mlp_bias)
        return GatedMLP(gate_up, down, spec.hidden_act)

    def _linear(self, prefix: str, names: list[str], rows: int, columns: int, *, bias: bool) -> Linear:
        weight = self.weights.take([f"{prefix}{name}.weight" for name in names], (rows, columns))
        biases = self.weights.take([f"{prefix}{name}.bias" for name in names], (rows,)) if bias else None
        return Linear(weight, biases)


def _give_back_freed_memory() -> None:
    """glibc keeps the space of freed temporaries, 234 MiB after a 2.3 GiB model; the KV cache has a better use."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)


def _is_ignored(name: str, spec: ModelSpec) -> bool:
    """Tensors that may be there and carry nothing: tables that are recomputed, a second copy of a tied head."""
    return name.endswith("rotary_emb.inv_freq") or (spec.tie_word_embeddings and name == LM_HEAD)


def _elements(info: TensorInfo) -> int:
    return int(torch.Size(info.shape).numel())


def _held(name: str, info: TensorInfo, spec: ModelSpec, dtype: torch.dtype) -> int:
    """Bytes in the loaded model: norm weights are fp32 whatever the model's type, those of q and k once per head."""
    if not name.endswith("norm.weight"):
        return _elements(info) * dtype.itemsize
    copies = {"q_norm": spec.num_heads, "k_norm": spec.num_kv_heads}.get(name.split(".")[-2], 1)
    return _elements(info) * 4 * copies


def _missing(name: str, path: Path) -> CorruptModel:
    return CorruptModel(f"The checkpoint in {path} lacks {name}.", hint="Fetch the model again.")


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
