"""The links between GPUs, and where a GPU sits: PCI address, NUMA node, NVLink, PCIe topology, memory bandwidth.

All of it comes from NVML, which may refuse each question: a value that is not known stays empty.
Does not know: which link is good enough for what (models/fit/devices.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

Answer = TypeVar("Answer")

P2P_READ = 0  # NVML_P2P_CAPS_INDEX_READ, which some versions of the package define as a tuple
MOST_NVLINKS = 18  # of one GPU (Hopper, Blackwell)
TOPOLOGY = {10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}
"""NVML's common ancestor of two devices, by the names of `nvidia-smi topo -m`: one PCIe switch, several switches, the
processor's PCIe root, the NUMA node, the connection between processors. 0 is the same board."""
MATRIX_UNITS = {
    (7, 5): (64, 256), (8, 0): (64, 1024), (8, 6): (128, 256), (8, 9): (128, 256), (9, 0): (128, 2048),
    (10, 0): (128, 4096), (12, 0): (128, 256),
}  # fmt: skip
"""Compute capability -> cores of a multiprocessor, and its dense 16-bit multiply-adds per clock with sums in float32
(NVIDIA's architecture papers; where boards differ, GeForce's)."""
LANE_BYTES = {1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.563e9}
"""Generation of PCIe -> bytes/s of a lane in one direction, as coded (PCI-SIG)."""
LINKS_IN_WORDS = {
    "NV": "NV4 is four NVLinks",
    "PIX": "PIX goes through one PCIe switch",
    "PXB": "PXB through several PCIe switches",
    "PHB": "PHB through the processor's PCIe root",
    "NODE": "NODE through several roots of a NUMA node",
    "SYS": "SYS through the connection between processors",
    "?": "the driver does not describe links marked ?",
}


@dataclass(frozen=True, slots=True)
class Link:
    """The connection from one GPU to another."""

    peer: int  # torch's index of the other GPU
    kind: str  # NV4 (four NVLinks), PIX, PXB, PHB, NODE, SYS; ? if unknown
    has_peer_access: bool | None = None  # one GPU can read the other's memory directly; None: unknown

    @property
    def is_nvlink(self) -> bool:
        return self.kind.startswith("NV")


@dataclass(frozen=True, slots=True)
class Place:
    """The place of one GPU in the machine, as NVML and the system describe it."""

    pci: str | None = None  # address as in sysfs: 0000:01:00.0
    numa_node: int | None = None
    bandwidth: float | None = None  # of its memory, bytes/s, from clock and bus width
    multiplies: float | None = None  # 16-bit multiply-adds/s of its matrix units, from clock and cores
    link: float | None = None  # of its PCIe connection in one direction, bytes/s, from generation and lanes


def read_place(nvml: Any, handle: Any, devices: Path = Path("/sys/bus/pci/devices")) -> Place:
    """Return where the GPU sits and how fast its memory is."""
    address = _ask(nvml, lambda: _pci_address(nvml.nvmlDeviceGetPciInfo(handle).busId))
    numa_node = None if address is None else _numa_node(devices / address)
    return Place(address, numa_node, _bandwidth(nvml, handle), _multiplies(nvml, handle), _pcie(nvml, handle))


def read_links(nvml: Any, handles: Sequence[Any]) -> list[tuple[Link, ...]]:
    """Return the links of each GPU to each other one. handles: NVML's, by torch's index; None where NVML has none."""
    return [
        tuple(_link(nvml, handles, index, peer) for peer in range(len(handles)) if peer != index)
        for index in range(len(handles))
    ]


def _link(nvml: Any, handles: Sequence[Any], index: int, peer: int) -> Link:
    here, there = handles[index], handles[peer]
    if nvml is None or here is None or there is None:
        return Link(peer, "?")
    level = _ask(nvml, lambda: int(nvml.nvmlDeviceGetTopologyCommonAncestor(here, there)))
    status = _ask(nvml, lambda: int(nvml.nvmlDeviceGetP2PStatus(here, there, P2P_READ)))
    nvlinks = _count_nvlinks(nvml, here, there)
    kind = f"NV{nvlinks}" if nvlinks else TOPOLOGY.get(level or -1, "PIX" if level == 0 else "?")
    return Link(peer, kind, None if status is None else status == nvml.NVML_P2P_STATUS_OK)


def _count_nvlinks(nvml: Any, here: Any, there: Any) -> int:
    """Count the NVLinks between two GPUs: direct ones, or the links that both have to an NVSwitch."""
    address = _ask(nvml, lambda: _pci_address(nvml.nvmlDeviceGetPciInfo(there).busId))
    ends = _nvlink_ends(nvml, here)
    return ends[address or ""] or min(ends["switch"], _nvlink_ends(nvml, there)["switch"])


def _nvlink_ends(nvml: Any, handle: Any) -> Counter[str]:
    """Count a GPU's active NVLinks by the address where they end, or "switch"."""
    ends = (_ask(nvml, partial(_nvlink_end, nvml, handle, link)) for link in range(MOST_NVLINKS))
    return Counter(end for end in ends if end is not None)


def _nvlink_end(nvml: Any, handle: Any, link: int) -> str | None:
    """Return where one NVLink ends; None: it is not in use."""
    if nvml.nvmlDeviceGetNvLinkState(handle, link) != nvml.NVML_FEATURE_ENABLED:
        return None
    if nvml.nvmlDeviceGetNvLinkRemoteDeviceType(handle, link) == nvml.NVML_NVLINK_DEVICE_TYPE_SWITCH:
        return "switch"
    return _pci_address(nvml.nvmlDeviceGetNvLinkRemotePciInfo(handle, link).busId)


def _bandwidth(nvml: Any, handle: Any) -> float | None:
    """Return bytes/s: clock in MHz, two transfers per clock, bus width in bits."""
    clock = _ask(nvml, lambda: int(nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_MEM)))
    width = _ask(nvml, lambda: int(nvml.nvmlDeviceGetMemoryBusWidth(handle)))
    return clock * 1e6 * 2 * width / 8 if clock and width else None


def _multiplies(nvml: Any, handle: Any) -> float | None:
    """Return 16-bit multiply-adds/s with sums in float32; None for a GPU that `MATRIX_UNITS` does not list."""
    clock = _ask(nvml, lambda: int(nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_SM)))
    cores = _ask(nvml, lambda: int(nvml.nvmlDeviceGetNumGpuCores(handle)))
    capability = _ask(nvml, lambda: tuple(nvml.nvmlDeviceGetCudaComputeCapability(handle)))
    units = MATRIX_UNITS.get(capability or (0, 0))
    return clock * 1e6 * cores / units[0] * units[1] if clock and cores and units else None


def _pcie(nvml: Any, handle: Any) -> float | None:
    """Return bytes/s of all lanes, of the fastest generation that GPU and board have in common."""
    generation = _ask(nvml, lambda: int(nvml.nvmlDeviceGetMaxPcieLinkGeneration(handle)))
    lanes = _ask(nvml, lambda: int(nvml.nvmlDeviceGetMaxPcieLinkWidth(handle)))
    return LANE_BYTES[generation] * lanes if lanes and generation in LANE_BYTES else None


def _pci_address(bus_id: str | bytes) -> str:
    """Return NVML's 00000000:01:00.0 as sysfs names it: 0000:01:00.0."""
    text = (bus_id.decode() if isinstance(bus_id, bytes) else bus_id).lower()
    domain, _, rest = text.partition(":")
    return f"{domain[-4:]}:{rest}"


def _numa_node(folder: Path) -> int | None:
    """Return the NUMA node of a PCI device; the system says -1 where it knows none."""
    try:
        node = int((folder / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def _ask(nvml: Any, question: Callable[[], Answer]) -> Answer | None:
    """Return the answer; None: this driver, this GPU or this version of NVML does not know."""
    if nvml is None:
        return None
    try:
        return question()
    except (nvml.NVMLError, AttributeError):
        return None
