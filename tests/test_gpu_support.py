"""Each reason why a GPU cannot be used is told with its numbers and its remedy."""

import pytest
import torch

from localllm.machine import gpu_support, hardware
from localllm.machine.gpu_support import (
    NvidiaFacts,
    TorchFacts,
    gpu_problems,
    judge_gpus,
)
from localllm.machine.hardware import read_hardware

H200, P100, TURING = ("NVIDIA H200", (9, 0)), ("Tesla P100", (6, 0)), ("Tesla T4", (7, 5))
RTX_5090, ADA = ("NVIDIA GeForce RTX 5090", (12, 0)), ("NVIDIA GeForce RTX 4090", (8, 9))
CU128 = TorchFacts("2.11.0+cu128", "12.8", ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120"))
CU124 = TorchFacts("2.6.0+cu124", "12.4", ("sm_75", "sm_80", "sm_86", "sm_90"))
ROCM = TorchFacts("2.13.0+rocm7.1", None, (), "7.1.0")
CU130 = TorchFacts("2.11.0+cu130", "13.0", ("sm_75", "sm_80", "sm_90a", "sm_90", "compute_120"))


def facts(
    *gpus: tuple[str, tuple[int, int]], driver: str | None = "580.65.06", cuda: tuple[int, int] = (13, 0)
) -> NvidiaFacts:
    return NvidiaFacts(driver, cuda, gpus)


@pytest.mark.parametrize("gpu", [H200, TURING, ADA, RTX_5090], ids=str)
@pytest.mark.parametrize("built_for", [CU128, CU130], ids=str)
def test_nothing_stands_in_the_way_from_turing_on(gpu: tuple[str, tuple[int, int]], built_for: TorchFacts) -> None:
    assert judge_gpus(facts(gpu), built_for) == []


def test_a_driver_of_the_same_major_version_will_do() -> None:
    assert judge_gpus(facts(H200, driver="535.1", cuda=(12, 2)), CU128) == []


@pytest.mark.parametrize(
    ("nvidia", "built_for", "words"),
    [
        (NvidiaFacts(None, None, ()), CU128, ["no NVIDIA GPU"]),
        (facts(), CU128, ["580.65.06", "sees no GPU", "--gpus all"]),
        (facts(H200), TorchFacts("2.13.0+cpu", None, ()), ["2.13.0+cpu", "not a CUDA build", "pip install", "torch"]),
        (facts(H200, driver="535.1", cuda=(12, 2)), CU130, ["535.1", "CUDA up to 12.2", "13.0", "580.65.06"]),
        (facts(H200, driver="470.82", cuda=(11, 4)), CU128, ["11.4", "12.8", "525.60.13", "Update the driver"]),
        (NvidiaFacts(None, None, ()), ROCM, ["2.13.0+rocm7.1", "AMD", "ROCm 7.1", "on the CPU"]),
        (facts(H200), ROCM, ["There is an NVIDIA GPU", "2.13.0+rocm7.1", "not a CUDA build"]),
        (facts(P100), CU128, ["Tesla P100", "6.0", "7.5", "Turing", "--device cpu"]),
        (facts(RTX_5090), CU124, ["RTX 5090", "12.0", "2.6.0+cu124", "sm_90", "--force-reinstall torch"]),
    ],
)
def test_a_reason_is_told_with_numbers_and_a_remedy(
    nvidia: NvidiaFacts, built_for: TorchFacts, words: list[str]
) -> None:
    [problem] = judge_gpus(nvidia, built_for)
    assert not [word for word in words if word not in f"{problem.what} {problem.remedy}"]


def test_an_old_gpu_beside_a_good_one_is_named() -> None:
    [problem] = judge_gpus(facts(H200, P100), CU128)
    assert "P100" in problem.what


def test_this_machine_can_be_asked() -> None:
    assert all(problem.what and problem.remedy for problem in gpu_problems())


def test_an_amd_gpu_is_named_and_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's ROCm build shows AMD GPUs as CUDA devices; kernels and limits here are NVIDIA's."""
    monkeypatch.setattr(torch.version, "hip", "7.1.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(gpu_support, "open_nvml", lambda: None)
    monkeypatch.setattr(hardware, "open_nvml", lambda: None)
    assert read_hardware().gpus == ()
    [problem] = gpu_problems()
    assert "AMD" in problem.what
    assert "7.1.0" in problem.what
