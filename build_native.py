"""Compile localllm/kernels/cpu/native/ for each instruction set of this machine's architecture.

    python build_native.py

puts the libraries beside their sources, where localllm/kernels/cpu/native/library.py finds them.
"""

from __future__ import annotations

import platform
import subprocess
from pathlib import Path

FOLDER = Path(__file__).resolve().parent / "localllm" / "kernels" / "cpu" / "native"
FLAGS = ["-O3", "-fPIC", "-shared", "-fno-math-errno", "-ffp-contract=fast", "-Wall", "-Wextra"]
SETS = {
    "x86_64": {"avx2": ["-march=x86-64-v3"], "avx512vnni": ["-march=x86-64-v4", "-mavx512vnni"]},
    "aarch64": {"dotprod": ["-march=armv8.2-a+dotprod+fp16"]},
}


def compile_libraries(compiler: list[str]) -> None:
    sources = sorted(str(path) for path in FOLDER.glob("*.c"))
    for name, options in SETS.get(platform.machine(), {}).items():
        target = FOLDER / f"localllm_{name}.so"
        subprocess.run([*compiler, *FLAGS, *options, *sources, "-o", str(target), "-lpthread", "-lm"], check=True)


if __name__ == "__main__":
    compile_libraries(["cc"])
