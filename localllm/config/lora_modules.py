"""The value of the setting lora_modules: adapters, each with a name and a path.

Does not know: what an adapter holds, whether its path exists.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from localllm.errors import ConfigError


class LoraModule(NamedTuple):
    """A LoRA adapter: the name that requests use, and its path."""

    name: str
    path: str


def read_lora_modules(raw: Any) -> tuple[LoraModule, ...]:
    """Parse adapters: `name=path` or a JSON object with both, one or a list; in a file also a table of names and
    paths."""
    if isinstance(raw, Mapping) and not {"name", "path"} <= raw.keys():
        return tuple(_lora_module({"name": name, "path": path}) for name, path in raw.items())
    return tuple(_lora_module(each) for each in ([raw] if isinstance(raw, str | Mapping) else raw))


def _lora_module(raw: Any) -> LoraModule:
    if isinstance(raw, LoraModule):
        return raw
    given = raw
    if isinstance(raw, str) and raw.lstrip().startswith("{"):
        import json

        try:
            given = json.loads(raw)
        except ValueError as error:
            raise ConfigError(f"--lora-modules {raw} is not valid JSON.", f"{error}.", param="lora_modules") from error
    elif isinstance(raw, str):
        given = dict(zip(("name", "path"), (part.strip() for part in raw.split("=", 1)), strict=False))
    given = given if isinstance(given, Mapping) else {}
    name, path = given.get("name"), given.get("path")
    if given.keys() != {"name", "path"} or not all(isinstance(each, str) and each for each in (name, path)):
        why = "An adapter has exactly a name and a path."
        raise ConfigError(f"--lora-modules {raw!r} is not valid.", why, "NAME=PATH", param="lora_modules")
    return LoraModule(str(name), str(path))
