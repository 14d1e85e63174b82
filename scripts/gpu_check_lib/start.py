"""The time from the command to the first token, twice: with nothing cached, then with the files and kernels cached.

The first start reads weights that are not in the page cache, and compiles every kernel into an empty folder.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from localllm.tuning.load_client import Endpoint, LoadClient
from localllm.tuning.workload import fixed_lengths
from localllm.units import format_bytes
from scripts.gpu_check_lib.figures import verdict
from scripts.gpu_check_lib.roofline import ASKED_OF, START_S
from scripts.gpu_check_lib.serving import one_by_one, require_server, server, write_folder
from scripts.gpu_check_lib.stages import Context, Found

NOISE_NUMBERS = 1 << 24  # random numbers that all matrices repeat: drawing billions takes a minute
SPARE_BYTES = 8 << 30  # of the disk that stay free
START_LIMIT_S = 120.0


def measure_start(context: Context) -> Iterator[Found]:
    require_server()
    for shape in START_S:
        yield from start_of(shape, context)


def start_of(shape: str, context: Context) -> Iterator[Found]:
    folder = context.out / f"{shape}-on-disk"
    write_folder(folder, shape)
    config = json.loads((folder / "config.json").read_text())
    needed, free = _bytes(config), shutil.disk_usage(folder).free
    if needed + SPARE_BYTES > free:
        yield shape, "skipped", f"The weights take {format_bytes(needed)} of disk; {format_bytes(free)} are free."
        return
    write_weights(folder, config)
    forget(folder)
    command = [sys.executable, "-m", "localllm", "serve", str(folder), "--device", context.device,
               "--max-model-len", str(min(8192, config["max_position_embeddings"]))]  # fmt: skip
    kernels = {"TRITON_CACHE_DIR": str(context.out / f"{shape}-kernels")}
    seconds = {}
    for turn, asked_s in zip(("nothing", "everything"), reversed(START_S.get(shape, (None, None))), strict=True):
        started_s = time.perf_counter()
        with server(command, context, f"start-{shape}-{turn}-cached", START_LIMIT_S, kernels) as url:
            ready_s = time.perf_counter() - started_s
            client = LoadClient(Endpoint.from_url(url), folder.name, ignore_eos=True)
            [first] = asyncio.run(one_by_one(client, fixed_lengths(1, 16, 1).requests))
            seconds[turn] = time.perf_counter() - started_s
        if first.error:
            yield f"{shape}, {turn} cached", "failed", first.error
            return
        text = f"command to first token {seconds[turn]:.1f} s, ready after {ready_s:.1f} s"
        if asked_s is not None:
            text += f" (target{'' if ASKED_OF in context.gpu else f' for an {ASKED_OF}'}: at most {asked_s:.0f} s)"
        judged = verdict(asked_s is None or seconds[turn] <= asked_s, context.gpu)
        yield f"{shape}, {turn} cached", judged, text, {"seconds": seconds[turn], "ready_s": ready_s}
    shutil.rmtree(folder)


# ---- a checkpoint ----------------------------------------------------------------------------------------------------


def tensors(config: Mapping[str, Any]) -> Iterator[dict[str, tuple[int, ...]]]:
    """Yield the tensors of each file of a Llama or Qwen2 checkpoint, by name with shapes."""
    hidden, ffn, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    width = config.get("head_dim", hidden // config["num_attention_heads"])
    q, kv = config["num_attention_heads"] * width, config["num_key_value_heads"] * width
    ends: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden), "model.norm.weight": (hidden,)}
    yield ends if config["tie_word_embeddings"] else {**ends, "lm_head.weight": (vocab, hidden)}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        shapes: dict[str, tuple[int, ...]] = {
            "self_attn.q_proj.weight": (q, hidden), "self_attn.k_proj.weight": (kv, hidden),
            "self_attn.v_proj.weight": (kv, hidden), "self_attn.o_proj.weight": (hidden, q),
            "mlp.gate_proj.weight": (ffn, hidden), "mlp.up_proj.weight": (ffn, hidden),
            "mlp.down_proj.weight": (hidden, ffn),
            "input_layernorm.weight": (hidden,), "post_attention_layernorm.weight": (hidden,),
        }  # fmt: skip
        if config["architectures"] == ["Qwen2ForCausalLM"]:
            shapes |= {f"self_attn.{name}_proj.bias": (size,) for name, size in zip("qkv", (q, kv, kv), strict=True)}
        yield {prefix + name: shape for name, shape in shapes.items()}


def _bytes(config: Mapping[str, Any]) -> int:
    return sum(2 * torch.Size(shape).numel() for file in tensors(config) for shape in file.values())


def write_weights(folder: Path, config: Mapping[str, Any]) -> None:
    """Write random weights in bf16, a file for each layer, with the index of all files."""
    from safetensors.torch import save_file

    (folder / "model.safetensors").unlink(missing_ok=True)
    noise = torch.randn(NOISE_NUMBERS, generator=torch.Generator().manual_seed(0)).bfloat16()
    index = {}
    for number, shapes in enumerate(tensors(config)):
        name = f"model-{number:05}.safetensors"
        save_file({key: _filled(noise, shape) for key, shape in shapes.items()}, folder / name)
        index |= dict.fromkeys(shapes, name)
    content = {"metadata": {"total_size": _bytes(config)}, "weight_map": index}
    (folder / "model.safetensors.index.json").write_text(json.dumps(content), encoding="utf-8")


def _filled(noise: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return a matrix that keeps its input's variance, or a norm's weight or a bias near 1."""
    if len(shape) == 1:
        return torch.ones(shape, dtype=torch.bfloat16)
    count = torch.Size(shape).numel()
    return noise.repeat(-(-count // len(noise)))[:count].view(shape) * shape[1] ** -0.5


def forget(folder: Path) -> None:
    """Drop a folder's files from the page cache."""
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
