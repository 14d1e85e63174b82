"""Where an operation runs in these tests: its kernel on a GPU or in Triton's interpreter, else its plain-torch twin.

    pytest tests/kernels                          the twins
    TRITON_INTERPRET=1 pytest tests/kernels       the kernels, interpreted on CPU tensors: fp32 and fp16
    on a GPU: pytest tests/kernels                the kernels, compiled

The interpreter stores bfloat16 wrongly, so bfloat16 is left out there.
"""

from __future__ import annotations

import pytest
import torch

from localllm.kernels.launch import INTERPRETED


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu")


DTYPES = [torch.float32, torch.float16] + ([] if INTERPRETED else [torch.bfloat16])


def poisoned(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """In place of torch.empty: an element that a kernel forgets to write shows as NaN."""
    return torch.full(shape, float("nan"), dtype=dtype, device=device)
