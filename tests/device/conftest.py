"""Which device and which types."""

import pytest
import torch

from localllm.kernels.launch import INTERPRETED

ON_GPU = torch.cuda.is_available() and not INTERPRETED
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
SIXTEEN_BITS = [torch.float16]
if not ON_GPU or torch.cuda.get_device_capability() >= (8, 0):
    SIXTEEN_BITS.append(torch.bfloat16)
BLOCK_SIZES = [16, 64]  # of a CPU's cache, and of a GPU's: its blocks are fetched whole where it can
collect_ignore_glob = ["test_*.py"] if INTERPRETED else []  # whole models would take the interpreter minutes each
needs_gpu = pytest.mark.skipif(not ON_GPU, reason="no GPU")
slow_on_cpu = [] if ON_GPU else [pytest.mark.slow]  # other tests hold the same there
