"""Findings of `localllm doctor` about kernels: what comparisons with PyTorch have found on this GPU, and new ones.

Every `doctor` reads what was recorded. `doctor --gpu` also compares what needs no model, as a start does before it
reads weights. A kernel that fell back is worth a report.
Does not know: how kernels are compared.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec

from localllm.cli.findings import Finding
from localllm.config.settings import EngineConfig
from localllm.machine.hardware import may_have_gpu

REPORT = "localllm doctor --gpu --report > report.txt, and attach it to an issue"
NO_GPU = "there is no GPU that runs kernels; models on a CPU use none of them"


def check_recorded() -> Iterator[Finding]:
    """Report the kernels that fell back on this GPU at an earlier start."""
    if not _has_gpu():
        return
    import torch

    from localllm.runner.self_check import known_choice, read_record

    device = torch.device("cuda", torch.cuda.current_device())
    record = read_record(device)
    for fall_back in known_choice(EngineConfig(), device).fall_backs:
        yield Finding("fall-back", "note", str(fall_back).partition(" Please report")[0], REPORT)
    if record.passed:
        text = f"{len(record.passed)} comparisons with PyTorch passed on this GPU, in {record.seconds:.1f} s"
        yield Finding("kernels checked", "ok", text)


def check_kernels() -> Iterator[Finding]:
    """Compare with PyTorch what needs no model, again if it was compared before."""
    if not _has_gpu():
        yield Finding("kernels", "note", NO_GPU)
        return
    import torch

    from localllm.kernels.first_launch import require_launch
    from localllm.runner.opening import launch_options_of
    from localllm.runner.self_check import check_device

    device = torch.device("cuda", torch.cuda.current_device())
    config = replace(EngineConfig(), check_kernels="always")
    require_launch(device)
    choice = check_device(config, device, launch_options_of(config, device))
    fallen = {each.kernel: each for each in choice.fall_backs}
    for kernel, variant in choice.chosen.items():
        if kernel in fallen:
            yield Finding(kernel, "problem", str(fallen[kernel]).partition(" Please report")[0], REPORT)
        else:
            yield Finding(kernel, "ok", f"{variant.name}: as PyTorch")
    yield Finding("comparison", "ok", choice.summary or "nothing to compare")


def _has_gpu() -> bool:
    if not may_have_gpu() or find_spec("torch") is None or find_spec("triton") is None:
        return False
    import torch

    return torch.cuda.is_available()
