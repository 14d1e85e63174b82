"""Load a model from files to a device, one tensor at a time.

Each weight is read from the memory map, fused with its siblings, converted and packed for the device before the next
one is read. Peak RAM is the finished model plus one matrix.
Does not know: how tensors are named and stored (weights/, formats/), how they make a model
(decoder/builder.py).
"""

from __future__ import annotations

import ctypes
import logging
import re
import sys
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from localllm.errors import CorruptModel, DoesNotFit, UnsupportedOption
from localllm.files.folders import experts_folder
from localllm.files.record_file import RecordFile
from localllm.machine.hardware import available_ram
from localllm.models.decoder.builder import DecoderBuilder
from localllm.models.decoder.decoder import DecoderModel
from localllm.models.decoder.mixture import build_mixture, expert_pairs, held_experts, held_mlp, record_bytes
from localllm.models.families import text_part
from localllm.models.formats.at_load import at_load
from localllm.models.formats.checkpoint import Checkpoint, layer_forms
from localllm.models.formats.linear_format import LinearFormat
from localllm.models.formats.matrices import MatrixFormat
from localllm.models.formats.registry import Headers, linear_format, open_checkpoint
from localllm.models.layers.arena import Arena
from localllm.models.layers.disk import ExpertCache, write_experts
from localllm.models.layers.embedding import EmbeddingTable
from localllm.models.layers.far import Crossing, RamLink
from localllm.models.layers.group import Alone, Group
from localllm.models.layers.linear import Weight
from localllm.models.layers.lora import LoraBank, LoraLimits
from localllm.models.read_spec import family_of
from localllm.models.spec.family import Storage
from localllm.models.spec.model_spec import ModelSpec
from localllm.models.spec.shard import Shard, whole_shard
from localllm.models.weights.layout import StoredLayout
from localllm.models.weights.meta import MetaWeights
from localllm.models.weights.parameters import held_bytes
from localllm.models.weights.source import (
    EMBEDDING,
    LM_HEAD,
    LOOKED_UP,
    PER_LAYER_EMBEDDING,
    AlikeLayers,
    FarWeights,
    Progress,
    ShardWeights,
)
from localllm.models.weights.weights import Weights
from localllm.units import format_bytes

if TYPE_CHECKING:
    from localllm.models.transformers_backend.model import TransformersModel

log = logging.getLogger(__name__)


def load_model(
    path: Path,
    spec: ModelSpec,
    device: torch.device,
    dtype: torch.dtype,
    progress: Progress | None = None,
    *,
    max_model_len: int | None = None,
    quantization: str | None = None,
    verify: bool | None = None,
    lora: LoraLimits | None = None,
    cpu_weights: str = "fast",
    half_weights: bool = False,
    shard: Shard | None = None,
    group: Group | None = None,
    far_layers: Sequence[int] = (),
    far_tables: Sequence[str] = (),
    disk: DiskExperts | None = None,
    free_ram: Callable[[], int] = available_ram,
) -> DecoderModel | TransformersModel:
    """Load the model in folder or GGUF file `path`. progress(bytes read, bytes in all) is called after each weight.

    max_model_len: the served context, default all that the checkpoint supports; it sizes the rotary tables and chooses
    between LongRoPE's short and long factors. quantization: quantise plain matrices to int4, int8 or fp8; None: leave
    them. verify: compare with transformers on a short prompt; None: only if transformers' code computes the
    model, and the first layers of a recognised class.
    lora: adapter sizes; None: none. cpu_weights: the layout of quantised matrices on a CPU (kernels/cpu/pack.py).
    half_weights: whether matrices stored in 16 bits stay so on a CPU that computes in float32.
    shard: the part of the model to load; None: all of it. group: the shards of its layers; None: there is one. The
    caller gives `unused_tensors` of all shards to `check_all_used`; of a whole model this is done here.
    far_layers: the layers whose routed experts stay in RAM and are computed there. disk: if they are read from disk.
    far_tables: the tables that stay in RAM, as `count_model` names them. free_ram: returns what may be taken of it.
    Raises `CorruptModel`, `UnsupportedModel`, `UnsupportedOption`.
    """
    _refuse_shard(spec, shard, verify=verify)
    kept: dict[str, Any] = {
        "quantize": at_load(quantization, spec.quantization), "cpu_weights": cpu_weights, "half_weights": half_weights
    }  # fmt: skip
    bank = _lora_bank(spec, lora, shard)
    if spec.implementation != "localllm":
        from localllm.models.transformers_backend.loading import load_through_transformers

        context, is_verified = max_model_len or spec.max_position, verify is not False
        return load_through_transformers(
            path, spec, device, dtype, context, verify=is_verified, quantize=kept["quantize"], cpu_weights=cpu_weights
        )
    with torch.inference_mode(), open_checkpoint(Path(path)) as checkpoint:
        spec = _with_stored_head(spec, checkpoint)
        weights = _weights(Weights, checkpoint, spec, device, dtype, progress, lora=bank, **kept)
        if shard is not None:
            with torch.device("meta"):  # from the headers: what the shard reads, whole or in part
                counted = _weights(MetaWeights, checkpoint, spec, device, dtype, **kept)
                DecoderBuilder(spec, counted, device, dtype, shard).build(1)
            weights.read.total_bytes = counted.read.done_bytes
        cache = None if disk is None else disk.open(weights.in_ram(), spec, far_layers, f"{cpu_weights} {quantization}")
        arena = None
        if far_layers and disk is None:
            with torch.device("meta"):
                counted = _weights(MetaWeights, checkpoint, spec, device, dtype, **kept)
                arena = Arena(_arena_bytes(spec, counted.in_ram(), checkpoint, far_layers), free_ram)
        far = _far(weights, device, far_layers, cache, arena, far_tables, free_ram)
        model = DecoderBuilder(spec, weights, device, dtype, shard, group, far).build(
            max_model_len or spec.max_position
        )
        model.lora, model.unused_tensors = bank, weights.unused()
    if shard is None:
        check_all_used(spec, [model.unused_tensors])
    _verify(path, model, spec, device, dtype, verify)
    trim_heap()
    return model


def _verify(
    path: Path, model: DecoderModel, spec: ModelSpec, device: torch.device, dtype: torch.dtype, verify: bool | None
) -> None:
    """Compare the model with transformers: all of it if asked, the first layers of a recognised class unless refused.
    Raises `UnsupportedModel`."""
    if verify:
        from localllm.models.transformers_backend.loading import verify_decoder

        verify_decoder(path, model, spec, device, dtype)
    elif spec.recognised is not None and verify is None:
        from localllm.models.transformers_backend.recognition import compare_first_layers

        compare_first_layers(path, spec)


class HeldBytes(NamedTuple):
    """The exact bytes of `load_model`'s result, adapter buffers included."""

    fixed: int  # without rotary tables
    per_position: int  # of rotary tables
    experts: dict[int, int]  # of them: each layer's routed experts; empty for a dense model
    tables: dict[str, int]  # of them: tables of which a token reads one row, by name; of a whole model

    def at(self, max_model_len: int) -> int:
        return self.fixed + self.per_position * max_model_len


def resident_bytes(
    path: Path, spec: ModelSpec, device: torch.device, dtype: torch.dtype, *, max_model_len: int | None = None,
    **how: Any,
) -> int:  # fmt: skip
    """Return the exact bytes of `load_model`'s result from the headers, rotary tables included. how: as of
    `count_model`."""
    return count_model(path, spec, device, dtype, **how).at(max_model_len or spec.max_position)


def count_model(
    path: Path,
    spec: ModelSpec,
    device: torch.device,
    dtype: torch.dtype,
    *,
    quantization: str | None = None,
    lora: LoraLimits | None = None,
    cpu_weights: str = "fast",
    half_weights: bool = False,
    shard: Shard | None = None,
    headers: Headers | None = None,
) -> HeldBytes:
    """Count the bytes of `load_model`'s result from the headers, by building the model without data. Of layers whose
    experts are stored alike, the experts are built once: there may be 36,000 of their matrices. headers: of the same
    checkpoint, if they have been read before."""
    _refuse_shard(spec, shard)
    kept: dict[str, Any] = {
        "quantize": at_load(quantization, spec.quantization), "cpu_weights": cpu_weights, "half_weights": half_weights
    }  # fmt: skip
    bank = _lora_bank(spec, lora, shard)
    if spec.implementation != "localllm":
        from localllm.models.transformers_backend.loading import bytes_through_transformers

        through = bytes_through_transformers(
            path, spec, device, dtype, quantize=kept["quantize"], cpu_weights=cpu_weights
        )
        return HeldBytes(through, 0, {}, {})
    headers = headers or Headers(path)
    with torch.inference_mode(), headers.open() as checkpoint, torch.device("meta"):
        spec = _with_stored_head(spec, checkpoint)
        weights = _weights(MetaWeights, checkpoint, spec, device, dtype, lora=bank, **kept)
        alike = None if spec.mixture is None else AlikeLayers(headers.layer_forms)
        model = DecoderBuilder(spec, weights, device, dtype, shard, alike=alike).build(1)
        experts, shared = dict[int, int](), 0
        if alike is not None:
            sizes = {form: held_bytes(each) for form, each in alike.found.items()}
            experts = {layer: sizes[alike.forms.get(layer, layer)] for layer in alike.layers}
            shared = sum(experts.values()) - sum(sizes.values())
        per_position = model.table_bytes(1)
        tables = {} if shard is not None else _looked_up(model)
        return HeldBytes(held_bytes(model) + shared - per_position, per_position, experts, tables)


def _looked_up(model: DecoderModel) -> dict[str, int]:
    """Return the bytes of the tables of which a token reads one row. A tied head of a CPU may have its own copy."""
    inputs = None if model.layer_inputs is None else model.layer_inputs.table
    tables: dict[str, EmbeddingTable | None] = {EMBEDDING: model.embedding, PER_LAYER_EMBEDDING: inputs}
    head = None if model.lm_head is None else model.lm_head.weight
    return {
        LOOKED_UP[name]: table.weight.nbytes
        for name, table in tables.items()
        if table is not None and table.weight is not head
    }


def expert_bytes(
    path: Path,
    spec: ModelSpec,
    device: torch.device,
    dtype: torch.dtype,
    *,
    quantization: str | None = None,
    cpu_weights: str = "fast",
    half_weights: bool = False,
    known: Mapping[int, int] | None = None,
    headers: Headers | None = None,
) -> dict[int, tuple[int, int]]:
    """Return the exact bytes of each layer's routed experts, or of a dense model's feed-forward parts, from the
    headers: on `device`, and in RAM beside it. known, headers: those on `device`, and the headers, if they were
    counted and read before."""
    kept: dict[str, Any] = {
        "quantize": at_load(quantization, spec.quantization), "cpu_weights": cpu_weights, "half_weights": half_weights
    }  # fmt: skip
    mixture = spec.mixture
    layers = [layer for layer in range(spec.num_layers) if mixture is None or mixture.is_in(layer)]
    found, of_form = dict[int, tuple[int, int]](), dict[Hashable, tuple[int, int]]()
    headers = headers or Headers(path)
    with torch.inference_mode(), headers.open() as checkpoint, torch.device("meta"):
        weights, forms = _weights(MetaWeights, checkpoint, spec, device, dtype, **kept), headers.layer_forms
        far = _far(weights, device, layers)
        assert far is not None
        near, in_ram = (ShardWeights(weights, whole_shard(spec), Alone(), each) for each in (None, far))
        for layer in layers:
            form = forms.get(layer, layer)
            if form not in of_form:  # thousands of experts take a second, and most layers are alike
                record, gpu = record_bytes(spec, far.source, layer), (known or {}).get(layer)
                gpu = _held_in_layer(spec, near, layer) if gpu is None else gpu
                count = 1 if mixture is None else mixture.num_experts
                of_form[form] = gpu, _held_in_layer(spec, in_ram, layer) if record is None else record * count
            found[layer] = of_form[form]
    return found


def _held_in_layer(spec: ModelSpec, share: ShardWeights, layer: int) -> int:
    """Return the bytes of a layer's routed experts, or of a dense model's feed-forward part."""
    if spec.mixture is not None:
        return held_experts(build_mixture(spec, spec.mixture, share, layer))
    return held_mlp(spec, share.source if share.far is None else share.far.source, layer)


def _arena_bytes(spec: ModelSpec, weights: Weights, checkpoint: Checkpoint, layers: Sequence[int]) -> int:
    """Return the bytes of the experts of these layers that an arena holds. weights: sizes alone."""
    forms, of_form, total = layer_forms(checkpoint.tensors), dict[Hashable, int](), 0
    count = 1 if spec.mixture is None else spec.mixture.num_experts
    for layer in layers:
        form = forms.get(layer, layer)
        if form not in of_form:
            of_form[form] = (record_bytes(spec, weights, layer) or 0) * count
        total += of_form[form]
    return total


def _far(
    weights: Weights, device: torch.device, layers: Sequence[int], cache: ExpertCache | None = None,
    arena: Arena | None = None, tables: Sequence[str] = (), free_ram: Callable[[], int] = available_ram,
) -> FarWeights | None:  # fmt: skip
    """Raises `DoesNotFit` if other programs have taken the RAM for tables since the plan was made."""
    if not layers and not tables:
        return None
    named = frozenset(name for name, shown in LOOKED_UP.items() if shown in tables)
    needed = sum(weights.layout.checkpoint.tensors[weights.layout.name(name)].num_bytes for name in named)
    if needed and (free := free_ram()) < needed:
        raise DoesNotFit(
            "Other programs have taken RAM since the model was planned.",
            f"Its lookup tables take {format_bytes(needed)}, and {format_bytes(max(0, free))} are free.",
            "Close other programs and start again, or --cpu-embeddings off.", param="cpu_embeddings",
        )  # fmt: skip
    source = weights.tables_in_ram() if named else None
    return FarWeights(weights.in_ram(), frozenset(layers), Crossing(RamLink(device), cache, arena), named, source)


@dataclass(frozen=True, slots=True)
class DiskExperts:
    """The experts that are read from disk: how much of RAM keeps the latest, and what may still be taken of it."""

    cache_bytes: int
    free_bytes: Callable[[], int]  # of RAM, besides what stays free
    folder: Path | None = None  # of the file of experts; None: in the cache folder

    def open(self, weights: Weights, spec: ModelSpec, layers: Sequence[int], form: str) -> ExpertCache:
        """Open the file of these layers' experts, which is written first if there is none for this checkpoint. weights:
        the source of parts in RAM, of which nothing has been read. form: the settings that their layout depends on.
        Raises `DoesNotFit`, `UnsupportedOption`, `DiskFull`, `NotWritable`."""
        mixture, checkpoint = spec.mixture, weights.layout.checkpoint
        assert mixture is not None
        digest = _digest(checkpoint, layers, form)
        folder = experts_folder() if self.folder is None else self.folder
        path = folder / f"{checkpoint.path.stem[:60]}-{digest}.experts"
        try:
            file = RecordFile(path, digest)
        except (FileNotFoundError, CorruptModel) as error:
            if isinstance(error, CorruptModel):
                log.warning("the file of experts is written again: %s", error)
            write_experts(
                path, digest, layers, mixture.num_experts,
                lambda layer: _dropped_behind(weights, expert_pairs(spec, mixture, weights, layer)),
                lambda: weights.read.names,
            )  # fmt: skip
            file = RecordFile(path, digest)
        weights.read.add(file.facts["tensors"])
        return ExpertCache(file, self.cache_bytes, mixture.top_k, self.free_bytes)


def _dropped_behind(weights: Weights, pairs: Iterator[tuple[Weight, Weight]]) -> Iterator[tuple[Weight, Weight]]:
    """Yield a layer's experts, and drop their files' pages after the last one."""
    yield from pairs
    weights.drop_pages()


SAMPLES, SAMPLE_BYTES = 16, 1 << 16


def _digest(checkpoint: Checkpoint, layers: Sequence[int], form: str) -> str:
    """Return a hash of what a file of experts depends on: the tensors, samples of the checkpoint's files, the layers,
    and the form in which their weights are held."""
    found = blake2b(f"{[*layers]} {form}".encode(), digest_size=16)
    for name, info in sorted(checkpoint.tensors.items()):
        found.update(f"{name} {info.dtype} {info.shape}\n".encode())
    for path in sorted({info.file for info in checkpoint.tensors.values()}):
        with path.open("rb") as file:
            size = file.seek(0, 2)
            found.update(f"{path.name} {size}\n".encode())
            for place in range(SAMPLES):
                file.seek(max(0, size - SAMPLE_BYTES) * place // (SAMPLES - 1))
                found.update(file.read(SAMPLE_BYTES))
    return found.hexdigest()


AROUND = "around."
"""How names of parts around a further layer begin, whose own names begin as in layer 0."""


@contextmanager
def open_further_layer(
    path: Path,
    spec: ModelSpec,
    stored_prefix: str,
    device: torch.device,
    dtype: torch.dtype,
    *,
    around: str,
    renames: tuple[tuple[str, str], ...] = (),
    quantization: str | None = None,
    cpu_weights: str = "fast",
    half_weights: bool = False,
    sizes_only: bool = False,
    shard: Shard | None = None,
    group: Group | None = None,
) -> Iterator[tuple[Checkpoint, Weights, DecoderBuilder]]:
    """Open a checkpoint to build a layer that `load_model` leaves out. Layer 0 of the builder is this layer; names that
    begin with AROUND belong to parts around it.

    spec: of a model of this one layer. stored_prefix, around: how the stored names of the two begin. renames: of the
    layer's names, as in `Storage`. sizes_only: read
    headers alone. Other arguments as of `load_model`.
    """
    with torch.inference_mode(), open_checkpoint(Path(path)) as checkpoint:
        storage = storage_of_further_layer(checkpoint, spec, stored_prefix, around, renames)
        weights = (MetaWeights if sizes_only else Weights)(
            StoredLayout(checkpoint, spec, storage, _format(checkpoint, spec)), device, dtype,
            quantize=at_load(quantization, spec.quantization), cpu_weights=cpu_weights, half_weights=half_weights,
        )  # fmt: skip
        with torch.device("meta") if sizes_only else nullcontext():
            yield checkpoint, weights, DecoderBuilder(spec, weights, device, dtype, shard, group)


def storage_of_further_layer(
    checkpoint: Checkpoint, spec: ModelSpec, stored_prefix: str, around: str, renames: tuple[tuple[str, str], ...] = ()
) -> Storage:
    """Return the names of `open_further_layer` in the checkpoint."""
    storage = _storage(checkpoint, spec)
    first = storage.stored_name("model.layers.0.")
    return replace(
        storage,
        renames=(
            *storage.renames,
            *renames,
            (rf"^{re.escape(first)}", stored_prefix),
            (rf"^{re.escape(AROUND)}", around),
        ),
        more_layers=False,
        ignored=tuple(pattern for pattern in storage.ignored if not re.match(pattern, f"{stored_prefix}norm.weight")),
    )


def check_all_used(spec: ModelSpec, unused: Sequence[frozenset[str]]) -> None:
    """Raise `CorruptModel` if a tensor was not used by any shard: ignoring it would change the answers.

    unused: `DecoderModel.unused_tensors` of every shard of every stage.
    """
    left = sorted(frozenset.intersection(*unused))
    if left:
        names = ", ".join(left[:5]) + (f" and {len(left) - 5} more" if len(left) > 5 else "")
        raise CorruptModel(
            f"The checkpoint holds {len(left)} tensors that {spec.architecture} does not use.", f"Unexpected: {names}."
        )


def _refuse_shard(spec: ModelSpec, shard: Shard | None, *, verify: bool | None = None) -> None:
    if shard is None:
        return
    if verify:
        raise UnsupportedOption(
            "--verify is not supported for a model on several devices.",
            "It compares a whole model with transformers.",
            "Leave --verify out, or compare the model once on --device cpu.",
            param="verify",
        )
    if spec.implementation == "localllm" and spec.task == "generate":
        return
    why = "It runs through transformers' code" if spec.implementation != "localllm" else "It makes embeddings or scores"
    raise UnsupportedOption(
        f"--tensor-parallel-size and --pipeline-parallel-size are not supported for {spec.architecture}.",
        f"{why}, which runs on one device.",
        "Leave both out.",
        param="tensor_parallel_size",
    )


def _weights(
    kind: type[Weights], checkpoint: Checkpoint, spec: ModelSpec, device: torch.device, dtype: torch.dtype,
    progress: Progress | None = None, **options: Any,
) -> Weights:  # fmt: skip
    """Return the source of the builder's tensors from this checkpoint: real ones, or sizes only."""
    storage = _storage(checkpoint, spec)
    layout = StoredLayout(checkpoint, spec, storage, _format(checkpoint, spec))
    return kind(layout, device, dtype, progress, lora_storage=_lora_storage(spec, storage), **options)


def _lora_bank(spec: ModelSpec, limits: LoraLimits | None, shard: Shard | None) -> LoraBank | None:
    if limits is None:
        return None
    if spec.implementation != "localllm":
        raise UnsupportedOption(
            f"Adapters are not supported for {spec.architecture}.",
            "It runs through transformers' code; adapters need localllm's own layers.",
            "Leave out --enable-lora and --lora-modules.",
            param="enable_lora",
        )
    elsewhere = frozenset(range(spec.num_layers)) - frozenset(range(spec.num_layers) if shard is None else shard.layers)
    return LoraBank(limits, elsewhere)


def _lora_storage(spec: ModelSpec, storage: Storage) -> Storage | None:
    """Return the storage that adapters' names refer to, the family's own; None if this checkpoint has it."""
    own = family_of(spec).storage
    return None if own is storage else own


def _format(checkpoint: Checkpoint, spec: ModelSpec) -> LinearFormat | None:
    format = linear_format(spec.quantization)
    if isinstance(format, MatrixFormat):
        format.check_present(checkpoint)
    return format


def _storage(checkpoint: Checkpoint, spec: ModelSpec) -> Storage:
    """Return how tensors are named and ordered: GGUF has its own way, other formats follow the family."""
    own = getattr(checkpoint, "storage", None)
    return family_of(spec).storage if own is None else own


def _with_stored_head(spec: ModelSpec, checkpoint: Checkpoint) -> ModelSpec:
    """Return the spec of a vision-language model's text part, or of an encoder-decoder, with a head of its own if the
    checkpoint stores one: its config may say otherwise."""
    storage = _storage(checkpoint, spec)
    if not spec.tie_word_embeddings or not (text_part.is_text_part(storage) or spec.source):
        return spec
    stored = any(name in checkpoint.tensors for name in storage.spellings(storage.stored_name(LM_HEAD)))
    return replace(spec, tie_word_embeddings=False) if stored else spec


def trim_heap() -> None:
    """Return freed memory to the system: glibc keeps it, 234 MiB after a 2.3 GiB model, and the KV cache can use it."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)
