"""Find out why a present GPU cannot be used, and what would help.

The driver is asked through NVML, because torch says only "not available" when the driver does not suit it.
Does not know: what the GPU is used for.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from typing import NamedTuple

from localllm.machine.hardware import MIN_COMPUTE_CAPABILITY, as_text, open_nvml
from localllm.machine.install_kind import how_to_install

DRIVER_FOR_CUDA = {11: "450.80.02", 12: "525.60.13", 13: "580.65.06"}
"""The oldest Linux driver that runs programs built with any CUDA of this major version (NVIDIA's release notes)."""


class GpuProblem(NamedTuple):
    """A reason why a GPU cannot be used, and what would help."""

    what: str
    remedy: str


class NvidiaFacts(NamedTuple):
    """Facts from the NVIDIA driver, whether or not torch can use it."""

    driver: str | None  # '580.65.06'; None: there is no driver to ask
    cuda: tuple[int, int] | None  # the newest CUDA version that the driver runs
    gpus: tuple[tuple[str, tuple[int, int]], ...]  # name, compute capability


class TorchFacts(NamedTuple):
    """The CUDA version and GPU architectures that this build of torch was made for."""

    version: str
    cuda: str | None  # '12.8'; None: a CPU build, or one for AMD
    archs: tuple[str, ...]  # 'sm_80', 'compute_120', ...
    rocm: str | None = None  # '7.1'; None: not a build for AMD


def gpu_problems() -> list[GpuProblem]:
    """Return the reasons why this machine's GPU cannot be used; empty if it can."""
    import torch

    built_for = TorchFacts(torch.__version__, torch.version.cuda, tuple(torch.cuda.get_arch_list()), torch.version.hip)
    nvidia = read_nvidia()
    found = judge_gpus(nvidia, built_for)
    if nvidia.gpus and find_spec("triton") is None:
        what = "Triton is not installed, and kernels on a GPU need it."
        found.append(GpuProblem(what, how_to_install("localllm[gpu]")))
    if not found and not torch.cuda.is_available():
        found.append(GpuProblem("torch cannot use the GPU.", "nvidia-smi shows whether the driver works at all."))
    return found


def judge_gpus(nvidia: NvidiaFacts, built_for: TorchFacts) -> list[GpuProblem]:
    """Return the problems that follow from these facts: no GPU, torch's build, the driver's age, each GPU's age."""
    if built_for.rocm and not nvidia.gpus:
        what = (
            f"torch {built_for.version} is built for AMD GPUs (ROCm {built_for.rocm}), which localllm does not use yet."
        )
        return [
            GpuProblem(
                f"{what} Models run on the CPU.", "Nothing to do, or install a CPU build of torch: it is smaller."
            )
        ]
    if not nvidia.gpus:
        if nvidia.driver is None:
            return [GpuProblem("There is no NVIDIA GPU, or no driver for it.", "nvidia-smi should list the GPU.")]
        return [GpuProblem(f"The driver ({nvidia.driver}) sees no GPU.", "In a container: start it with --gpus all.")]
    if built_for.cuda is None:
        what = f"There is an NVIDIA GPU, but torch {built_for.version} is not a CUDA build."
        return [GpuProblem(what, how_to_install("torch"))]
    return [*_driver_problems(nvidia, built_for), *_capability_problems(nvidia, built_for)]


def judge_driver(nvidia: NvidiaFacts) -> list[GpuProblem]:
    """Return what to do where torch is not installed yet: the builds that this driver runs, or that it is too old."""
    if not nvidia.gpus or nvidia.cuda is None:
        return judge_gpus(nvidia, TorchFacts("", None, ()))[:1]
    name = nvidia.gpus[0][0]
    runs = ".".join(map(str, nvidia.cuda))
    what = f"torch is not installed. {name} has driver {nvidia.driver}, which runs builds for CUDA up to {runs}"
    oldest = min(DRIVER_FOR_CUDA)
    if nvidia.cuda[0] <= oldest:
        needs = DRIVER_FOR_CUDA[oldest + 1]
        return [GpuProblem(f"{what}; torch needs driver {needs} or newer.", "Update the driver, then install torch.")]
    newer = max(DRIVER_FOR_CUDA)
    warning = "" if nvidia.cuda[0] >= newer else f", and not those for CUDA {newer}"
    return [GpuProblem(f"{what}{warning}.", how_to_install("torch"))]


def _driver_problems(nvidia: NvidiaFacts, built_for: TorchFacts) -> Iterator[GpuProblem]:
    """Yield a problem if the driver is too old. A driver runs builds of its own CUDA major version and older ones."""
    major = int((built_for.cuda or "0").split(".")[0])
    if nvidia.cuda is not None and nvidia.cuda[0] < major:
        runs, needs = ".".join(map(str, nvidia.cuda)), DRIVER_FOR_CUDA.get(major)
        yield GpuProblem(
            f"The NVIDIA driver {nvidia.driver} runs CUDA up to {runs}; torch {built_for.version} was built with CUDA "
            f"{built_for.cuda}" + (f", which needs driver {needs} or newer." if needs else "."),
            f"Update the driver, or install a torch that was built with CUDA {nvidia.cuda[0]}.",
        )


def _capability_problems(nvidia: NvidiaFacts, built_for: TorchFacts) -> Iterator[GpuProblem]:
    for name, capability in nvidia.gpus:
        number = f"{capability[0]}.{capability[1]}"
        if capability < MIN_COMPUTE_CAPABILITY:
            yield GpuProblem(
                f"{name} has compute capability {number}; the kernels need 7.5 or newer "
                "(Turing: GTX 16, RTX 20, T4, and all later GPUs).",
                "--device cpu runs models without it.",
            )
        elif built_for.archs and not any(_runs_on(arch, capability) for arch in built_for.archs):
            yield GpuProblem(
                f"{name} has compute capability {number}; torch {built_for.version} was built for "
                f"{', '.join(built_for.archs)}.",
                f"Install a newer torch: {how_to_install('torch')}",
            )


def _runs_on(arch: str, capability: tuple[int, int]) -> bool:
    """Tell whether code for `arch` runs on a GPU: 'sm_86' within its major version, 'compute_90' on any newer GPU."""
    kind, _, digits = arch.rstrip("af").partition("_")
    if not digits.isdigit():
        return False
    built = (int(digits[:-1]), int(digits[-1]))
    specific = arch[-1] in "af"
    if kind == "sm":
        return built == capability if specific else built[0] == capability[0] and built[1] <= capability[1]
    return kind == "compute" and not specific and built <= capability


def read_nvidia() -> NvidiaFacts:
    """Ask the driver through NVML."""
    nvml = open_nvml()
    if nvml is None:
        return NvidiaFacts(None, None, _gpus_by_torch())
    try:
        version = int(nvml.nvmlSystemGetCudaDriverVersion_v2())
        handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
        gpus = tuple(
            (as_text(nvml.nvmlDeviceGetName(handle)), tuple(nvml.nvmlDeviceGetCudaComputeCapability(handle)))
            for handle in handles
        )
        driver = as_text(nvml.nvmlSystemGetDriverVersion())
        return NvidiaFacts(driver, (version // 1000, version % 1000 // 10), gpus)
    except nvml.NVMLError:
        return NvidiaFacts(None, None, _gpus_by_torch())
    finally:
        nvml.nvmlShutdown()


def _gpus_by_torch() -> tuple[tuple[str, tuple[int, int]], ...]:
    """Return the GPUs that torch sees, for systems without NVML (old WSL, some containers)."""
    try:
        import torch
    except ImportError:
        return ()
    if torch.version.hip or not torch.cuda.is_available():
        return ()
    count = torch.cuda.device_count()
    return tuple((torch.cuda.get_device_name(i), torch.cuda.get_device_capability(i)) for i in range(count))
