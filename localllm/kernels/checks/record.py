"""Results of checks on this GPU, in a file, and a journal of the case that runs.

    <user cache>/localllm/kernels/<gpu>/checked.json         cases that passed, and variants that failed
    <user cache>/localllm/kernels/<gpu>/checking-<pid>.json  the case that runs in a process

The file belongs to one driver, torch, Triton and source text of the kernels: with others it is ignored and replaced. A
journal whose process has ended says that its case stopped the GPU, so that the next start takes the next variant. A
file that cannot be written costs a check at every start, nothing else.
Does not know: how cases are run.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, Self

import psutil
import torch

from localllm.files.folders import cache_folder, write_whole
from localllm.kernels.launch import HAS_TRITON, triton
from localllm.kernels.tuned import file_name_of
from localllm.machine.gpu_support import read_nvidia

log = logging.getLogger(__name__)

STOPPED = "its check stopped the GPU"
"""Why a variant failed whose case ended the process."""


class RecordKey(NamedTuple):
    """Versions that the results depend on, besides the GPU."""

    driver: str
    torch: str
    triton: str
    source: str

    @staticmethod
    def here() -> RecordKey:
        return RecordKey(
            read_nvidia().driver or "", torch.__version__, triton.__version__ if HAS_TRITON else "none", source_hash()
        )


@dataclass(frozen=True, slots=True)
class VariantFailure:
    """A variant of a kernel that is not used, and why."""

    kernel: str
    variant: str
    case: str
    why: str


@dataclass(slots=True)
class CheckRecord:
    """The results on one GPU. folder: None: nothing is read or written."""

    folder: Path | None
    key: RecordKey
    passed: dict[str, float] = field(default_factory=dict)  # "kernel | variant | case" -> error
    failures: list[VariantFailure] = field(default_factory=list)
    seconds: float = 0.0  # that all checks took
    has_changed: bool = False
    _has_warned: bool = False

    @classmethod
    def read(cls, folder: Path | None, key: RecordKey) -> Self:
        """Read the results of earlier starts, and the journals of processes that have ended."""
        record = cls(folder, key)
        stored = _read_json(folder / "checked.json") if folder else None
        if isinstance(stored, dict) and stored.get("key") == key._asdict():
            try:
                record.passed = {str(name): float(error) for name, error in stored["passed"].items()}
                record.failures = [VariantFailure(**each) for each in stored["failures"]]
                record.seconds = float(stored["seconds"])
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                log.warning("checked.json is not valid error=%r", error)
                record.passed, record.failures = {}, []
        for journal in folder.glob("checking-*.json") if folder else ():
            record._settle(journal)
        return record

    def _settle(self, journal: Path) -> None:
        """Count what a process checked when it ended as failed, unless the process still runs."""
        pid = journal.stem.removeprefix("checking-")
        if pid != str(os.getpid()) and pid.isdecimal() and psutil.pid_exists(int(pid)):
            return
        stored = _read_json(journal)
        if isinstance(stored, dict) and stored.get("key") == self.key._asdict():
            kernel, variant, case = (str(stored.get(name)) for name in ("kernel", "variant", "case"))
            self.fail(VariantFailure(kernel, variant, case, STOPPED))
            self.write()
        with suppress(OSError):
            journal.unlink()

    def passed_with(self, kernel: str, variant: str, case: str) -> bool:
        return f"{kernel} | {variant} | {case}" in self.passed

    def failed_with(self, kernel: str, variant: str, case: str | None = None) -> VariantFailure | None:
        """Return the failure of a variant at a case; case None: at any."""
        same = (each for each in self.failures if (each.kernel, each.variant) == (kernel, variant))
        return next((each for each in same if case in (None, each.case)), None)

    def pass_(self, kernel: str, variant: str, case: str, error: float) -> None:
        self.passed[f"{kernel} | {variant} | {case}"] = error
        self.has_changed = True

    def fail(self, failure: VariantFailure) -> None:
        self.failures = [each for each in self.failures if each != failure] + [failure]
        self.has_changed = True

    def begin(self, kernel: str, variant: str, case: str) -> None:
        """Write the journal, so that the next start knows what stopped the GPU if this process ends now."""
        told = {"key": self.key._asdict(), "kernel": kernel, "variant": variant, "case": case, "begun": time.time()}
        self._write(f"checking-{os.getpid()}.json", told)

    def end(self) -> None:
        if self.folder is not None:
            with suppress(OSError):
                (self.folder / f"checking-{os.getpid()}.json").unlink()

    def write(self) -> None:
        told = {"key": self.key._asdict(), "passed": self.passed, "seconds": self.seconds,
                "failures": [asdict(each) for each in self.failures]}  # fmt: skip
        self._write("checked.json", told)
        self.has_changed = False

    def _write(self, name: str, told: dict[str, Any]) -> None:
        if self.folder is None:
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_whole(self.folder / name, json.dumps(told, indent=1) + "\n")
        except OSError as error:
            if not self._has_warned:
                log.warning("results of kernel checks cannot be written path=%s error=%s", self.folder / name, error)
            self._has_warned = True


def folder_of(device: torch.device) -> Path:
    """Return the folder of a GPU's results."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "interpreter"
    return cache_folder() / "kernels" / file_name_of(name)


@cache
def source_hash() -> str:
    """Return twelve hex digits that identify the source text of all kernels."""
    digest = hashlib.blake2b(digest_size=6)
    for path in sorted(Path(__file__).parent.parent.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
