"""The report of `localllm doctor`, run in a process of its own, so that its checks of GPUs and torch cannot disturb the
server.

Does not know: the checks, pages.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from typing import Literal

import msgspec

from localllm.errors import LocalLLMError
from localllm.web.pages.frame.views import ErrorNotice, View, view


@dataclass(frozen=True, slots=True)
class FindingRow:
    """One result of a check by `localllm doctor`."""

    verdict: Literal["ok", "note", "problem"]
    subject: str
    text: str
    remedy: str = ""


@view("settings/_doctor.html")
class DoctorReport(View):
    """The results of `localllm doctor`; empty if it has not run yet."""

    findings: tuple[FindingRow, ...] = ()
    error: ErrorNotice | None = None


COMMAND = (sys.executable, "-m", "localllm", "doctor", "--json")
LIMIT_S = 60.0


class NoReport(LocalLLMError):
    """The doctor did not finish."""


def run_doctor() -> DoctorReport:
    """Run the doctor, which takes seconds. Raises `NoReport`."""
    hint = "localllm doctor, in a terminal"
    try:
        ended = subprocess.run(COMMAND, capture_output=True, timeout=LIMIT_S, check=False)
        if not ended.stdout.strip():
            said = ended.stderr.decode(errors="replace").strip().splitlines()
            raise NoReport("The check failed.", said[-1] if said else f"Its exit code is {ended.returncode}.", hint)
        return DoctorReport(tuple(msgspec.json.decode(ended.stdout, type=list[FindingRow])))
    except subprocess.TimeoutExpired as error:
        raise NoReport("The check timed out.", f"Its limit is {LIMIT_S:.0f} s.", hint) from error
    except (OSError, msgspec.DecodeError) as error:
        raise NoReport("The check failed.", f"{error}.", hint) from error
