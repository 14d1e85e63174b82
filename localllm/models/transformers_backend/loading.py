"""Load a folder as a verified `TransformersModel`, count its bytes, and verify native decoders the same way.

A model that is only similar to its config answers fluently and wrongly. So logits of two chunks and a decode step over
a small paged cache are compared with one pass of eager `transformers` on a short prompt. A small model whose choice of
keys depends on rounding is compared in fp32 too.
Does not know: how the rest of localllm finds and fits models.
"""

from __future__ import annotations

import logging
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from localllm.errors import ModelError, UnsupportedModel
from localllm.kernels.cpu.pack import CpuPacker
from localllm.kernels.layer_cache import HybridCache, LayerCache, LayerKV, LayerState
from localllm.kernels.linear import should_pack
from localllm.kernels.paged_attention import kv_cache_shape
from localllm.models.formats.at_load import AtLoad
from localllm.models.formats.registry import linear_format
from localllm.models.inputs import CausalModel, ForwardInputs, GroupInputs, StateInputs
from localllm.models.spec.model_spec import ModelSpec, index_size, kv_groups, kv_shape
from localllm.models.transformers_backend.config_class import first_line
from localllm.models.transformers_backend.layouts import Quantization, QuantizedReader, quantized_bytes
from localllm.models.transformers_backend.model import TransformersModel
from localllm.models.transformers_backend.module import (
    classes_of,
    load_module,
    module_on_meta,
    open_for_class,
    quantized_on_meta,
    stored_tables,
    table_stems,
)

T = TypeVar("T")
PROMPT_TOKENS, BLOCK_SIZE = 32, 16
STEPS = (19, 12, 1)  # a first chunk that ends inside a block, a second chunk, a decode step
TOLERANCE = {torch.float32: 2e-3, torch.float16: 3e-2, torch.bfloat16: 8e-2}
"""Largest difference relative to the largest logit: several layers of rounding to 24, 11 and 8 bits."""
MOST_BYTES_IN_FP32 = 1 << 30
"""Of a model that is loaded once more to be compared in fp32. A larger one chooses more keys than the prompt has."""


def short_prompt(spec: ModelSpec) -> list[int]:
    """Return random token ids; their meaning does not matter."""
    count = min(PROMPT_TOKENS, spec.max_position)
    return random.Random(0).choices(range(spec.vocab_size), k=count)


@torch.inference_mode()
def eager_logits(module: Any, token_ids: list[int], device: torch.device, first: int = 0) -> Tensor:
    """Return logits [T, vocab] fp32 of a transformers module as loaded. first: position of the first token, if it is
    not 0."""
    ids = torch.tensor([token_ids], device=device)
    positions = {"position_ids": first + torch.arange(len(token_ids), device=device)[None]} if first else {}
    logits: Tensor = module(input_ids=ids, use_cache=False, return_dict=True, **positions).logits[0]
    return logits.float()


@torch.inference_mode()
def paged_logits(
    model: CausalModel, spec: ModelSpec, token_ids: list[int], device: torch.device, dtype: torch.dtype, first: int = 0
) -> Tensor:
    """Return logits [T, vocab] fp32 of the same tokens, run in chunks over shuffled blocks. first: what is added to
    their positions."""
    num_blocks = len(token_ids) // BLOCK_SIZE + 2
    caches = [_cache(spec, layer, num_blocks, device, dtype) for layer in range(spec.num_layers)]
    blocks = list(range(num_blocks - 1, 0, -1))
    steps = [replace(each, positions=each.positions + first) for each in _steps(spec, token_ids, blocks, device)]
    parts = [model.compute_logits(model.forward(inputs, caches)) for inputs in steps]
    return torch.cat([logits for logits in parts if logits is not None])


def _cache(spec: ModelSpec, layer: int, num_blocks: int, device: torch.device, dtype: torch.dtype) -> LayerCache | None:
    """Return what a layer keeps: zeroed K and V, states of two places, both, or None."""
    shape = kv_cache_shape(num_blocks, BLOCK_SIZE, *kv_shape(spec, layer))
    part, recurrent = spec.layer_kind(layer), spec.recurrent
    kv = state = None
    if part in ("attention", "both"):
        keys = torch.zeros(shape, dtype=dtype, device=device)
        index = torch.zeros(1, *shape[1:3], index_size(spec, layer), dtype=dtype, device=device)
        kv = LayerKV(keys, keys if spec.latent is not None else torch.zeros_like(keys), index_keys=index)
    if part in ("recurrent", "both"):
        assert recurrent is not None, "recurrent layers have sizes"
        matrix = recurrent.matrix_shape
        state = LayerState(
            torch.zeros(2, *recurrent.conv_shape, dtype=dtype, device=device),
            None if matrix is None else torch.zeros(2, *matrix, device=device),
        )
    return HybridCache(kv, state) if kv is not None and state is not None else kv or state


def guarded(run: Callable[[], T], architecture: str, what: str) -> T:
    """Return what `run` returns. Raises `UnsupportedModel` for whatever the class of transformers raises in it."""
    try:
        return run()
    except (ModelError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise UnsupportedModel(
            f"{architecture} is not supported.",
            f"Its code in transformers fails {what}: {type(error).__name__}: {first_line(error)}",
        ) from error


def relative_errors(ours: Tensor, theirs: Tensor) -> Tensor:
    """Return the largest difference at each position [T], relative to the largest logit of all."""
    return (ours - theirs).abs().amax(1) / theirs.abs().max().clamp_(min=1e-30)


def require_equal(
    ours: Tensor, theirs: Tensor, dtype: torch.dtype, architecture: str,
    hint: str = "--no-verify skips this check; answers would be wrong.",
) -> float:  # fmt: skip
    """Return the difference relative to the largest logit. Raises `UnsupportedModel` if it exceeds rounding."""
    error = float(relative_errors(ours, theirs).max())
    if not error <= TOLERANCE[dtype]:  # also refuses NaN
        raise UnsupportedModel(
            f"{architecture} computes other logits here than in transformers.",
            f"On {len(ours)} tokens logits differ by {error:.1e} of the largest; rounding in "
            f"{str(dtype).removeprefix('torch.')} explains {TOLERANCE[dtype]:.0e}.",
            hint,
        )
    return error


def _steps(spec: ModelSpec, token_ids: list[int], blocks: list[int], device: torch.device) -> Iterator[ForwardInputs]:
    start = 0
    for wanted in STEPS:
        stop = min(start + wanted, len(token_ids))
        if stop > start:
            state = None if spec.recurrent is None else _one_place(-1 if start == 0 else 1, device)
            inputs = _inputs(token_ids, start, stop, blocks, device)
            yield replace(inputs, groups=inputs.groups * len(kv_groups(spec)), state=state)
        start = stop


def _one_place(read: int, device: torch.device) -> StateInputs:
    """Return the places of one row: `read` before the step, 1 after it."""

    def on_device(place: int) -> Tensor:
        return torch.tensor([place], dtype=torch.int32, device=device)

    return StateInputs(on_device(read), on_device(1), on_device(0), (read,), (1,), (0,))


def _inputs(token_ids: list[int], start: int, stop: int, blocks: list[int], device: torch.device) -> ForwardInputs:
    positions = list(range(start, stop))
    slots = [blocks[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for p in positions]

    def on_device(values: object, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    return ForwardInputs(
        token_ids=on_device(token_ids[start:stop]),
        positions=on_device(positions),
        groups=(GroupInputs(on_device([blocks], torch.int32), on_device(slots)),),
        context_lens=on_device([stop], torch.int32),
        cu_seqlens_q=on_device([0, stop - start], torch.int32),
        logits_indices=on_device(list(range(stop - start))),
        num_decodes=int(stop - start == 1),
        query_lens=(stop - start,),
        context_lens_host=(stop,),
    )


log = logging.getLogger(__name__)


@torch.inference_mode()
def load_through_transformers(
    path: Path, spec: ModelSpec, device: torch.device, dtype: torch.dtype, max_model_len: int, *, verify: bool,
    quantize: AtLoad | None = None, cpu_weights: str = "fast",
) -> TransformersModel:  # fmt: skip
    """Load the model and compare it with eager attention. Raises `UnsupportedModel` with the difference."""
    module = load_module(
        path, spec, device, dtype, trust_remote_code=spec.implementation == "remote",
        format=linear_format(spec.quantization), at_load=quantize, packer=CpuPacker(cpu_weights),
    )  # fmt: skip
    token_ids = short_prompt(spec)
    name, expected = spec.architecture, None
    if verify:
        expected = guarded(lambda: eager_logits(module, token_ids, device), name, "by itself")
    model = guarded(
        lambda: TransformersModel(module, spec, device, dtype, max_model_len), name, "with its attention replaced"
    )
    if expected is not None:
        ours = guarded(lambda: paged_logits(model, spec, token_ids, device, dtype), name, "over paged attention")
        if _may_choose_otherwise(ours, expected, dtype, spec):
            options: dict[str, Any] = {"quantize": quantize, "cpu_weights": cpu_weights}
            if bytes_through_transformers(path, spec, device, torch.float32, **options) <= MOST_BYTES_IN_FP32:
                load_through_transformers(path, spec, device, torch.float32, max_model_len, verify=True, **options)
                return model
        error = require_equal(ours, expected, dtype, name)
        log.info("verified architecture=%s logits_error=%.1e", spec.architecture, error)
    return model


def _may_choose_otherwise(ours: Tensor, theirs: Tensor, dtype: torch.dtype, spec: ModelSpec) -> bool:
    """Return whether rounding to 16 bits may explain logits that differ too much at up to half of the positions: a
    model that chooses keys by their scores may have chosen others there. In fp32 it chooses the same."""
    errors = relative_errors(ours, theirs)
    chooses = dtype != torch.float32 and any(spec.layer_index_sizes) and bool(errors.isfinite().all())
    return chooses and float(errors.median()) <= TOLERANCE[dtype] < float(errors.max())


@torch.inference_mode()
def verify_decoder(path: Path, model: CausalModel, spec: ModelSpec, device: torch.device, dtype: torch.dtype) -> None:
    """Compare a native decoder with a copy of the model that transformers loads temporarily on the CPU."""
    token_ids = short_prompt(spec)
    module = load_module(path, spec, torch.device("cpu"), torch.float32, trust_remote_code=False)
    expected = eager_logits(module, token_ids, torch.device("cpu"))
    ours = paged_logits(model, spec, token_ids, device, dtype).cpu()
    error = require_equal(ours, expected, dtype, spec.architecture)
    log.info("verified architecture=%s logits_error=%.1e", spec.architecture, error)


def bytes_through_transformers(
    path: Path, spec: ModelSpec, device: torch.device, dtype: torch.dtype, *, quantize: AtLoad | None = None,
    cpu_weights: str = "fast",
) -> int:  # fmt: skip
    """Return the bytes of weights and buffers that `load_through_transformers` will hold, from shapes alone."""
    is_remote, format = spec.implementation == "remote", linear_format(spec.quantization)
    if format is None and quantize is None:
        module: Any = module_on_meta(path, spec.architecture, trust_remote_code=is_remote)
    else:
        with open_for_class(path) as checkpoint:
            matrices, packer = Quantization(checkpoint, format, quantize, device), CpuPacker(cpu_weights)
            reader = QuantizedReader(matrices, device, dtype, packer, sizes_only=True)
            module = quantized_on_meta(path, spec, reader, trust_remote_code=is_remote)
    plan = module._get_dtype_plan(dtype) if hasattr(module, "_get_dtype_plan") else ()  # what stays in fp32
    in_fp32 = [re.compile(each.replace("*", ".*")) for each in plan]
    total: int = 0
    kind, tables = classes_of(path, spec, trust_remote_code=is_remote)[0], dict[str, list[str]]()
    if table_stems(kind):
        with open_for_class(path) as checkpoint:
            tables = stored_tables(kind, checkpoint)
    for name, parameter in module.named_parameters():
        if name.removesuffix(".weight") in tables:
            continue
        is_wide = any(each.search(name) for each in in_fp32)
        total += parameter.numel() * (torch.float32 if is_wide else dtype).itemsize
    total += quantized_bytes(module)
    total += sum(buffer.numel() * buffer.dtype.itemsize for buffer in module.buffers())
    head = spec.vocab_size * spec.hidden_size
    if spec.tie_word_embeddings and should_pack(head, device, dtype):
        total += head * dtype.itemsize  # the packed head is a second copy of the embedding
    return total
