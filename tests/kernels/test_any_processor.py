"""What is asked of kernels bit by bit holds in the interpreter on every make of processor.

numpy's OpenBLAS picks its matrix product by the processor; OPENBLAS_CORETYPE makes it take that of another one. The
tests whose names speak of independence run once for each that this machine can execute, each in a process of its own.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from localllm.kernels.launch import HAS_TRITON, INTERPRETED

CORES = {  # instructions that OpenBLAS uses there, as Linux names them
    "Nehalem": {"sse4_2"},
    "Haswell": {"avx2", "fma"},
    "Zen": {"avx2", "fma"},
    "SkylakeX": {"avx512f", "avx512bw", "avx512vl"},
    "Cooperlake": {"avx512f", "avx512bw", "avx512vl", "avx512_bf16"},
    "Sapphirerapids": {"avx512f", "avx512bw", "avx512vl", "avx512_bf16", "amx_bf16"},
}
FOLDER = Path(__file__).parent
WORD = "depend"  # of the names of the tests that compare bits


def flags() -> set[str]:
    """Instructions of this processor; empty where the system is not Linux on x86."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return set()
    return set(next((line for line in lines if line.startswith("flags")), "").split())


@pytest.mark.slow
@pytest.mark.skipif(not HAS_TRITON or INTERPRETED, reason="starts interpreters itself; once is enough")
@pytest.mark.skipif(torch.cuda.is_available(), reason="where there is a GPU, these tests ask the GPU")
@pytest.mark.parametrize("core", CORES)
def test_bits_hold_with_the_products_of(core: str) -> None:
    if missing := CORES[core] - flags():
        pytest.skip(f"this processor lacks {', '.join(sorted(missing))}")
    files = sorted(str(path) for path in FOLDER.glob("test_*.py") if f"_{WORD}" in path.read_text())
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", WORD, *files]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OPENBLAS_CORETYPE": core, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=FOLDER.parent.parent, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:]
    assert " passed" in done.stdout
