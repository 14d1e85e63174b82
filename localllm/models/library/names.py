"""The parts of a model's name: `org/name`, `org/name:Q4_K_M`, `org/name@revision`, `ollama:llama3.2:1b`.

Does not know: which models exist.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

PROGRAMS = ("ollama", "lmstudio", "llamacpp", "jan")
"""Other local programs whose files localllm reads; their models are called `ollama:NAME`, `lmstudio:NAME`, ..."""

_PART = r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9_])?"
_REPO_ID = re.compile(rf"(?:{_PART}/)?{_PART}")


@dataclass(frozen=True, slots=True)
class ModelName:
    """A parsed name. `base` is a repository, the bare last part of one, or a model of another program."""

    base: str
    quant: str | None = None  # after a colon: which file of a GGUF repository
    revision: str | None = None  # after an @
    program: str | None = None  # one of PROGRAMS

    def __str__(self) -> str:
        program = f"{self.program}:" if self.program else ""
        quant = f":{self.quant}" if self.quant else ""
        return f"{program}{self.base}{quant}" + (f"@{self.revision}" if self.revision else "")

    @property
    def is_repository(self) -> bool:
        """Return whether the hub could have it: one owner, one name."""
        return self.program is None and self.base.count("/") == 1 and _is_repo_id(self.base)


def parse_name(text: str) -> ModelName:
    """Parse any text. An invalid name is returned as `base`, which matches no model."""
    text = text.strip()
    program, colon, rest = text.partition(":")
    if colon and program in PROGRAMS:
        return ModelName(rest, program=program)
    head, at, revision = text.partition("@")
    base, _, quant = head.partition(":")
    return ModelName(base, quant or None, revision or None if at else None)


def looks_like_path(text: str) -> bool:
    return text.startswith((".", "/", "~")) or (text.endswith(("/", ".gguf")) and ":" not in text)


def _is_repo_id(text: str) -> bool:
    """Check a name as the hub does: letters, digits, ._- without --, .. and a final .git; at most 96 characters."""
    return bool(_REPO_ID.fullmatch(text)) and len(text) <= 96 and not re.search(r"--|\.\.|\.git$", text)
