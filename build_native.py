"""Compile localllm/kernels/cpu/native/ for each instruction set of this machine's architecture.

    python build_native.py

puts the libraries beside their sources, where localllm/kernels/cpu/native/library.py finds them.
"""

from __future__ import annotations

import hashlib
import platform
import subprocess
from pathlib import Path

FOLDER = Path(__file__).resolve().parent / "localllm" / "kernels" / "cpu" / "native"
FLAGS = ["-O3", "-fPIC", "-shared", "-fno-math-errno", "-ffp-contract=fast", "-Wall", "-Wextra", "-Wno-psabi"]
SETS = {
    "x86_64": {"avx2": ["-march=x86-64-v3"], "avx512vnni": ["-march=x86-64-v4", "-mavx512vnni"]},
    "aarch64": {"dotprod": ["-march=armv8.2-a+dotprod+fp16"]},
}


def source_hash() -> str:
    """Return the hash of the sources, as localllm/kernels/cpu/native/library.py computes it."""
    content = hashlib.sha256()
    for path in sorted(FOLDER.glob("*.[ch]")):
        content.update(path.name.encode() + b"\0" + path.read_bytes())
    return content.hexdigest()[:16]


def compile_libraries(compiler: list[str]) -> None:
    sources = sorted(str(path) for path in FOLDER.glob("*.c"))
    known = f'-DLOCALLLM_SOURCE_HASH="{source_hash()}"'
    for name, options in SETS.get(platform.machine(), {}).items():
        target = FOLDER / f"localllm_{name}.so"
        subprocess.run(
            [*compiler, *FLAGS, known, *options, *sources, "-o", str(target), "-lpthread", "-lm"], check=True
        )


if __name__ == "__main__":
    compile_libraries(["cc"])
