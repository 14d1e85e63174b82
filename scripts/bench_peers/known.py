"""The known engines: how each is started with equal settings, and where the settings differ.

Every engine gets the same number of concurrent requests, tokens per request and threads, and the same type for weights
and KV cache.
Does not know: loads, what is measured.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from shutil import which

from localllm.errors import ConfigError
from scripts.bench_peers.engines import EngineSpec

REPOSITORY = Path(__file__).resolve().parents[2]
FLAGS = {"llama.cpp": "--llama-server", "vllm": "--vllm", "transformers": "--transformers"}
"""Other engines -> the flag with the path to the program."""
GGML_TYPES = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}
SERVE_NEEDS = ("transformers", "torch", "accelerate", "fastapi", "uvicorn", "openai", "pydantic")
HERE = ("--host", "127.0.0.1", "--port", "{port}")
CACHE_GIB = 2  # vLLM's KV cache on a CPU, where it does not size it itself


@dataclass(frozen=True, slots=True)
class Room:
    """Limits that are equal for all engines."""

    context: int  # tokens of one request, prompt and answer
    streams: int  # requests at a time
    threads: int
    dtype: str = "float32"
    device: str = "auto"


def spec_of(name: str, programs: Mapping[str, str], room: Room) -> EngineSpec:
    """Return how to start an engine. programs: paths of the others. Raises `ConfigError` if one is missing."""
    if name == "localllm":
        return _localllm(room)
    program = which(os.path.expanduser(programs[name]))
    if program is None:
        raise ConfigError(f"There is no {name} at {programs[name]}.", hint=f"{FLAGS[name]} PATH")
    return {"llama.cpp": _llama_cpp, "vllm": _vllm, "transformers": _transformers}[name](program, room)


def _localllm(room: Room) -> EngineSpec:
    command = (
        *(sys.executable, "-m", "localllm", "serve", "{model}", *HERE, "--device", room.device, "--dtype", room.dtype),
        *("--max-model-len", str(room.context), "--max-num-seqs", str(room.streams), "--profile", "none"),
    )
    return EngineSpec("localllm", command, {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": str(room.threads)})


def _llama_cpp(program: str, room: Room) -> EngineSpec:
    kind = GGML_TYPES[room.dtype]
    command = (
        *(program, "-m", "{model}", *HERE, "-np", str(room.streams), "-c", str(room.streams * room.context)),
        *("-t", str(room.threads), "-ctk", kind, "-ctv", kind, *(("-dev", "none") if room.device == "cpu" else ())),
    )
    differs = (
        "reads a GGUF file",
        *(("computes in float32 on a CPU, whatever weights are",) if room.dtype != "float32" else ()),
    )
    return EngineSpec("llama.cpp", command, reads_gguf=True, differs=differs)


def _vllm(program: str, room: Room) -> EngineSpec:
    """Start vLLM as its documentation recommends for a CPU, without telemetry; a GPU ignores these settings."""
    command = (
        *(program, "serve", "{model}", *HERE, "--dtype", room.dtype),
        *("--max-model-len", str(room.context), "--max-num-seqs", str(room.streams)),
    )
    cores = sorted(os.sched_getaffinity(0))[: room.threads]
    env = {
        "VLLM_CPU_KVCACHE_SPACE": str(CACHE_GIB),
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    return EngineSpec(
        "vllm", command, env, differs=(f"on a CPU a KV cache of {CACHE_GIB} GiB", "threads bound to cores")
    )


def _transformers(python: str, room: Room) -> EngineSpec:
    look = f"from importlib.util import find_spec; print(*(n for n in {SERVE_NEEDS} if find_spec(n) is None))"
    said = subprocess.run([python, "-c", look], capture_output=True, text=True, check=False)
    if said.returncode or said.stdout.strip():
        why = f"{python} has no {', '.join(said.stdout.split())}." if said.returncode == 0 else said.stderr.strip()
        raise ConfigError(
            "`transformers serve` cannot be started.",
            why,
            f"{python} -m pip install 'transformers[serving]' accelerate",
        )
    command = (
        *(python, "-m", "transformers.cli.transformers", "serve", "{model}", *HERE),
        *("--device", room.device, "--dtype", room.dtype),
    )
    env = {"OMP_NUM_THREADS": str(room.threads), "HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
    differs = (
        "reads its prompts as text",
        "answers one request after another, except with --args 'transformers=--continuous-batching'",
        "has no limit on context or requests",
    )
    return EngineSpec("transformers", command, env, reads_text=True, differs=differs)
