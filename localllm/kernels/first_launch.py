"""Launch a kernel before any weights are read, and say what is missing if that fails.

Triton itself, its C module, the assembler and the driver take part in every launch. Versions do not tell whether they
work together, so the smallest kernel is compiled and launched.
Does not know: models, the kernels of models.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from importlib.util import find_spec

import torch

from localllm.errors import ConfigError
from localllm.kernels.launch import tl, triton
from localllm.kernels.triton_build import ZIG, NoCompiler, python_header
from localllm.machine.install_kind import how_to_install

SIZE = 256


def require_launch(device: torch.device) -> None:
    """Launch y = x + 1 on the GPU. Raises `ConfigError` with a remedy if that fails or is wrong."""
    if find_spec("triton") is None:
        raise ConfigError(
            "The GPU's kernels cannot be launched.", "Triton is not installed.",
            f"{how_to_install('localllm[gpu]')}, or --device cpu",
        )  # fmt: skip
    error = first_error(lambda: _add_one_is_right(device))
    if error is not None:
        what, remedy = explain(error)
        raise ConfigError("The GPU's kernels cannot be launched.", what, f"{remedy}, or --device cpu") from error


def first_error(launch: Callable[[], bool]) -> BaseException | None:
    """Return the error of a launch; None if its result is right."""
    try:
        return None if launch() else ArithmeticError("a kernel that adds 1 gave wrong numbers")
    except Exception as error:  # Triton, its compilers and the driver raise errors of many kinds
        return error


def explain(error: BaseException) -> tuple[str, str]:
    """Return what failed, in one sentence, and a command that mends it."""
    said = error.stderr if isinstance(error, subprocess.CalledProcessError) else None
    text = f"{error}\n{said.decode() if isinstance(said, bytes) else said or ''}".strip()
    header = python_header()
    line = next((line for line in text.splitlines() if "error" in line.lower()), text.partition("\n")[0])
    if isinstance(error, NoCompiler) or "C compiler" in text:
        return "Triton compiles a C file, and there is no C compiler here.", how_to_install(ZIG)
    if isinstance(error, subprocess.CalledProcessError | RuntimeError) and not header.exists():
        package = f"{header.parent.name}-dev"
        return f"Triton compiles a C file, and {header} is missing.", f"sudo apt-get install -y {package}"
    if isinstance(error, subprocess.CalledProcessError):
        return f"Triton's C compiler failed: {line}", "sudo apt-get install -y gcc libc6-dev"
    if "ptxas" in text or "no kernel image" in text or "PTX" in text or "device kernel image is invalid" in text:
        return f"The driver or Triton's assembler does not suit this GPU: {line}", "Update the NVIDIA driver"
    if "libcuda" in text:
        return f"The driver's library was not found: {line}", "In a container: start it with --gpus all"
    return f"{type(error).__name__}: {line}", "localllm doctor shows the driver, PyTorch and Triton"


def _add_one_is_right(device: torch.device) -> bool:
    x = torch.arange(SIZE, device=device, dtype=torch.float32)
    y = torch.full_like(x, float("nan"))
    with torch.cuda.device(device) if device.type == "cuda" else torch.inference_mode():
        _add_one_kernel[(1,)](x, y, SIZE=SIZE)
    return torch.equal(y.cpu(), torch.arange(1, SIZE + 1, dtype=torch.float32))


@triton.jit
def _add_one_kernel(x_ptr, y_ptr, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(y_ptr + at, tl.load(x_ptr + at) + 1)
