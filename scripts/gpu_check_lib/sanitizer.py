"""Run every kernel of a step under NVIDIA's compute-sanitizer: no access beyond a tensor, no race in shared memory.

The checked program is this file: a tiny model, with prompt chunks beside decodes. It runs without graphs and without
torch's memory cache, so each tensor has its own allocation and an access beyond it is detected.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from scripts.gpu_check_lib.stages import Context, Found, Skip, Verdict

ROOT = Path(__file__).resolve().parent.parent.parent
FOUND_CODE = 99


def check_memory(context: Context, tool: str) -> Iterator[Found]:
    probe = _under(tool, "-c", f"import torch; torch.ones(8, device='{context.device}').sum().item()")
    if probe.returncode not in (0, FOUND_CODE):
        raise Skip(f"compute-sanitizer does not work here: {_last(probe)}")
    for check, weights in (("memcheck", "16-bit"), ("racecheck", "16-bit"), ("memcheck", "int4")):
        done = _under(tool, "-m", "scripts.gpu_check_lib.sanitizer", weights, context.device, check=check)
        verdict: Verdict = "ok" if done.returncode == 0 else "failed"
        yield f"{check}, {weights}", verdict, "no error" if verdict == "ok" else _errors(done)


def _under(tool: str, *arguments: str, check: str = "memcheck") -> subprocess.CompletedProcess[str]:
    command = [tool, "--tool", check, "--error-exitcode", str(FOUND_CODE), "--print-limit", "5", sys.executable]
    packages = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "PYTHONPATH": packages}
    return subprocess.run([*command, *arguments], capture_output=True, text=True, env=environment, check=False)


def _errors(done: subprocess.CompletedProcess[str]) -> str:
    lines = [line.strip("= ") for line in done.stdout.splitlines() if line.startswith("=========")]
    return " | ".join([line for line in lines if line][1:4]) or _last(done)


def _last(done: subprocess.CompletedProcess[str]) -> str:
    lines = (done.stderr + done.stdout).strip().splitlines()
    return lines[-1][:200] if lines else f"code {done.returncode}"


def main(weights: str, device: str = "cuda") -> None:
    import torch

    from localllm.tuning.workload import uniform_lengths
    from scripts.gpu_check_lib.engine import Options, RandomEngine
    from scripts.gpu_check_lib.figures import DEFAULT_SAMPLING
    from scripts.random_weights import shape_spec

    spec = shape_spec("tiny")
    options = Options(
        torch.device(device),
        torch.float16 if device == "cuda" else torch.float32,
        max_num_seqs=3,
        max_model_len=128,
        num_kv_tokens=256,
        weights=weights,  # type: ignore[arg-type]
        max_num_batched_tokens=24,
        block_size=16,
        graphs="none",
    )
    engine = RandomEngine(spec, options)
    engine.run(uniform_lengths(4, 5, 40, vocab_size=spec.vocab_size))
    engine.decode(3, 40, 2, sampling=DEFAULT_SAMPLING)  # includes filters and penalties
    engine.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
