"""A finding of `localllm doctor`, and findings as lines, as a report, or with names of user and machine removed.

Does not know: what is checked.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from localllm.version import __version__

Verdict = Literal["ok", "note", "problem"]
SIGNS = {"ok": "✓", "note": "·", "problem": "✗"}


@dataclass(frozen=True, slots=True)
class Finding:
    subject: str
    verdict: Verdict
    text: str
    remedy: str = ""


def finding_lines(findings: Sequence[Finding], next_command: str = "localllm up") -> Iterator[str]:
    width = max(len(finding.subject) for finding in findings)
    for finding in findings:
        yield f"{SIGNS[finding.verdict]} {finding.subject.ljust(width)}  {finding.text}"
        if finding.remedy:
            yield f"  {' ' * width}  Try: {finding.remedy}"
    problems = sum(finding.verdict == "problem" for finding in findings)
    yield "" if problems or not next_command else f"\nNo problems found. Next: {next_command}"
    if problems:
        yield f"{problems} problem{'s' if problems > 1 else ''} found."


def report(findings: Sequence[Finding]) -> str:
    """Format the findings as Markdown for an issue."""
    rows = "\n".join(finding_lines(findings))
    return f"### localllm {__version__}\n```\n{rows}\n```"


def redacted(text: str) -> str:
    """Replace the home folder and the host name in a text."""
    home, host = str(Path.home()), socket.gethostname()
    text = text.replace(home, "~") if len(home) > 1 else text
    return text.replace(host, "HOST") if host and host != "localhost" else text
