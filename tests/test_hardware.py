"""Hardware is read tolerantly: limits of a container count, a missing driver does not hurt."""

from __future__ import annotations

import types
from pathlib import Path

import pytest

from localllm.machine import hardware
from localllm.machine.hardware import Gpu, process_bytes, read_hardware


def test_this_machine_has_cores_and_memory() -> None:
    machine = read_hardware()
    assert machine.cpu_cores >= 1
    assert machine.cpu_name
    assert 0 < machine.ram_available_bytes <= machine.ram_total_bytes


def test_container_limit_caps_memory(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("600000\n")
    (tmp_path / "memory.stat").write_text("anon 1\ninactive_file 100000\n")
    assert hardware._read_ram(tmp_path) == (1_000_000, 500_000)


def test_container_limit_of_version_1_caps_memory(tmp_path: Path) -> None:
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory" / "memory.limit_in_bytes").write_text("2000000")
    (tmp_path / "memory" / "memory.usage_in_bytes").write_text("500000")
    (tmp_path / "memory" / "memory.stat").write_text("total_inactive_file 0")
    assert hardware._read_ram(tmp_path) == (2_000_000, 1_500_000)


@pytest.mark.parametrize("text", ["max\n", "9223372036854771712\n", ""])
def test_no_limit_leaves_the_machine(tmp_path: Path, text: str) -> None:
    (tmp_path / "memory.max").write_text(text)
    (tmp_path / "memory.current").write_text("1\n")
    assert hardware._read_ram(tmp_path)[0] > 100_000_000


def test_cpu_quota_caps_cores(tmp_path: Path) -> None:
    (tmp_path / "cpu.max").write_text("50000 100000\n")
    assert hardware.count_cores(tmp_path) == 1


def test_cpu_name_is_read_and_has_a_fallback(tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text("processor\t: 0\nmodel name\t: Example 9000\n")
    assert hardware._read_cpu_name(tmp_path / "cpuinfo") == "Example 9000"
    assert hardware._read_cpu_name(tmp_path / "missing")


def _fake_torch() -> types.SimpleNamespace:
    properties = types.SimpleNamespace(name="Card", total_memory=24 << 30, major=8, minor=9, uuid="abc")
    cuda = types.SimpleNamespace(get_device_properties=lambda i: properties, mem_get_info=lambda i: (5, 10))
    return types.SimpleNamespace(cuda=cuda)


def _fake_nvml(free: int | None) -> types.SimpleNamespace:
    class NVMLError(Exception):
        pass

    def handle(name: str) -> str:
        assert name == "GPU-abc"
        if free is None:
            raise NVMLError
        return name

    return types.SimpleNamespace(
        NVMLError=NVMLError,
        nvmlDeviceGetHandleByUUID=handle,
        nvmlDeviceGetMemoryInfo=lambda h: types.SimpleNamespace(free=free),
    )


@pytest.mark.parametrize(("nvml", "free"), [(_fake_nvml(7), 7), (_fake_nvml(None), 5), (None, 5)])
def test_free_gpu_memory_comes_from_nvml_else_torch(nvml: object, free: int) -> None:
    gpu = hardware._read_gpu(_fake_torch(), nvml, 0, "570.1")
    assert gpu == Gpu(0, "Card", 24 << 30, free, (8, 9), "570.1", "GPU-abc")
    assert gpu.supports_bfloat16
    assert gpu.used_bytes == (24 << 30) - free


def test_a_gpu_that_shares_the_systems_memory_has_what_the_system_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that were read, as the weights of the last start, lie in memory that CUDA does not count as free."""
    torch = _fake_torch()
    torch.cuda.get_device_properties(0).is_integrated = True
    monkeypatch.setattr(hardware, "_read_ram", lambda: (128 << 30, 20 << 30))
    assert hardware._read_gpu(torch, _fake_nvml(7), 0, None).free_bytes == 20 << 30
    monkeypatch.setattr(hardware, "_read_ram", lambda: (128 << 30, 90 << 30))
    assert hardware._read_gpu(torch, None, 0, None).free_bytes == 24 << 30


def test_own_memory_leaves_files_out(tmp_path: Path) -> None:
    status = tmp_path / "status"
    status.write_text("VmRSS:\t    9000 kB\nRssAnon:\t    7000 kB\nRssFile:\t    2000 kB\n")
    assert process_bytes(status) == 7000 * 1024
    assert process_bytes(tmp_path / "absent") > 2**20
