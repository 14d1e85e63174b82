"""Hardware is read tolerantly: limits of a container count, a missing driver does not hurt."""

import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from localllm.cli import doctor
from localllm.machine import hardware
from localllm.machine.hardware import Gpu, Hardware, process_bytes, read_hardware
from localllm.machine.links import Link, Place, read_links, read_place


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


# ---- links -----------------------------------------------------------------------------------------------------------


class NVMLError(Exception):
    pass


def _linked_nvml(ends: Mapping[str, Sequence[str]], level: int = 50, status: int = 0) -> Any:
    """Return an NVML with GPUs "0", "1", ...: where each one's NVLinks end (a GPU, or "switch")."""

    def end(handle: str, link: int) -> str:
        if link >= len(ends[handle]):
            raise NVMLError
        return ends[handle][link]

    def bus(gpu: str) -> types.SimpleNamespace:
        return types.SimpleNamespace(busId=f"0000000A:0{gpu}:00.0".encode())

    return types.SimpleNamespace(
        NVMLError=NVMLError, NVML_FEATURE_ENABLED=1, NVML_NVLINK_DEVICE_TYPE_SWITCH=2, NVML_P2P_STATUS_OK=0,
        NVML_CLOCK_MEM=2, NVML_CLOCK_SM=1,
        nvmlDeviceGetPciInfo=bus,
        nvmlDeviceGetTopologyCommonAncestor=lambda one, other: level,
        nvmlDeviceGetP2PStatus=lambda one, other, index: status,
        nvmlDeviceGetNvLinkState=lambda handle, link: int(bool(end(handle, link))),
        nvmlDeviceGetNvLinkRemoteDeviceType=lambda handle, link: 2 if end(handle, link) == "switch" else 0,
        nvmlDeviceGetNvLinkRemotePciInfo=lambda handle, link: bus(end(handle, link)),
        nvmlDeviceGetMaxClockInfo=lambda handle, kind: 9751 if kind == 2 else 1695,
        nvmlDeviceGetNumGpuCores=lambda handle: 10_496,
        nvmlDeviceGetCudaComputeCapability=lambda handle: [8, 6],
        nvmlDeviceGetMemoryBusWidth=lambda handle: 384,
        nvmlDeviceGetMaxPcieLinkGeneration=lambda handle: 4,
        nvmlDeviceGetMaxPcieLinkWidth=lambda handle: 16,
    )  # fmt: skip


def test_links_are_counted_from_gpu_to_gpu_and_through_switches() -> None:
    bridged = read_links(_linked_nvml({"0": "1111", "1": "0000", "2": ["", ""]}), ["0", "1", "2"])
    assert bridged[0] == (Link(1, "NV4", True), Link(2, "SYS", True))
    assert bridged[2] == (Link(0, "SYS", True), Link(1, "SYS", True))
    switched = read_links(_linked_nvml({"0": ["switch"] * 18, "1": ["switch"] * 12}), ["0", "1"])
    assert switched == [(Link(1, "NV12", True),), (Link(0, "NV12", True),)]


@pytest.mark.parametrize(
    ("level", "kind"), [(10, "PIX"), (20, "PXB"), (30, "PHB"), (40, "NODE"), (50, "SYS"), (7, "?")]
)
def test_links_without_nvlink_are_named_by_their_path(level: int, kind: str) -> None:
    nvml = _linked_nvml({"0": "", "1": ""}, level, status=5)
    assert read_links(nvml, ["0", "1"])[0] == (Link(1, kind, has_peer_access=False),)


def test_what_nvml_refuses_stays_unknown(tmp_path: Path) -> None:
    class Refuses:
        NVMLError = NVMLError

        def __getattr__(self, name: str) -> Any:
            if name.startswith("NVML_"):
                return 1
            raise NVMLError

    assert read_links(Refuses(), ["0", "1"]) == [(Link(1, "?"),), (Link(0, "?"),)]
    assert read_links(None, [None, None]) == [(Link(1, "?"),), (Link(0, "?"),)]
    assert read_links(None, [None]) == [()]
    assert read_place(Refuses(), "0", tmp_path) == Place()


def test_place_and_bandwidth(tmp_path: Path) -> None:
    folder = tmp_path / "000a:01:00.0"
    folder.mkdir()
    (folder / "numa_node").write_text("1\n")
    found = read_place(_linked_nvml({}), "1", tmp_path)
    assert found == Place("000a:01:00.0", 1, 9751e6 * 2 * 48, 1695e6 * 82 * 256, 16 * 1.969e9)
    assert 2 * (found.multiplies or 0) == pytest.approx(71e12, rel=0.01)  # FLOP/s in NVIDIA's paper on an RTX 3090
    (folder / "numa_node").write_text("-1\n")
    assert read_place(_linked_nvml({}), "1", tmp_path).numa_node is None


def test_doctor_shows_how_gpus_are_connected(monkeypatch: pytest.MonkeyPatch) -> None:
    place = Place("0000:01:00.0", 0, 936e9)
    gpus = tuple(
        Gpu(i, "Card", 24 << 30, 22 << 30, (8, 6), "570", f"GPU-{i}", place, (Link(1 - i, "NV4", True),))
        for i in (0, 1)
    )
    found = Hardware(gpus, "CPU", 8, 32 << 30, 24 << 30, shm_free_bytes=64 << 20)
    monkeypatch.setattr(hardware, "read_hardware", lambda: found)
    findings = {finding.subject: finding for finding in doctor.check_hardware()}
    assert "PCI 0000:01:00.0, NUMA node 0, 936 GB/s, GPU-1" in findings["gpu 1"].text
    assert findings["links of 0"].text == "gpu 1 NV4 (peer access)"
    assert findings["/dev/shm"].verdict == "note"
    assert "--shm-size=1g" in findings["/dev/shm"].remedy
