"""Other servers that answer requests behind this one's address: `--upstream`, and `[upstreams.NAME]` tables.

Does not know: how a server is asked (localllm/fleet/).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from localllm.errors import ConfigError

NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._:\[\]-]{0,62}[A-Za-z0-9\]])?")
KEYS = ("url", "api_key", "weight", "models")


@dataclass(frozen=True, slots=True)
class UpstreamConfig:
    """One other server: where it is, and what it is used for."""

    name: str  # in metrics, logs and errors
    url: str  # up to and with its version path, such as http://host:8000/v1
    api_key: str = field(default="", repr=False)  # empty: that of --upstream-api-key, else none
    weight: float = 1.0  # its speed beside others: a request to a server of weight 2 is expected to cost half as much
    models: tuple[str, ...] = ()  # used for these only; (): all that it lists


def split_upstream(text: str) -> tuple[str, str]:
    """Return the name and the URL of one value of --upstream: `URL`, or `NAME=URL`. Raises `ValueError`."""
    head, mark, tail = text.strip().partition("=")
    name, url = (head.strip(), tail.strip()) if mark and "://" not in head else ("", text.strip())
    parts = urlsplit(url if "://" in url else f"http://{url}")
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.username or parts.query or parts.fragment:
        raise ValueError(text)
    name = name or f"{parts.hostname}:{parts.port or (443 if parts.scheme == 'https' else 80)}"
    if not NAME.fullmatch(name):
        raise ValueError(text)
    # Some servers have another version path (/v1beta/openai); without one, /v1 is added.
    path = parts.path.rstrip("/")
    path = path if re.search(r"/v\d\w*(/|$)", path) else f"{path}/v1"
    return name, f"{parts.scheme}://{parts.netloc}{path}"


def read_upstream_flag(raw: Any) -> tuple[str, ...]:
    """Return the values of --upstream. Raises `ConfigError`."""
    texts = raw.split(",") if isinstance(raw, str) else [part for text in raw for part in str(text).split(",")]
    values = tuple(text.strip() for text in texts if text.strip())
    for each in values:
        try:
            split_upstream(each)
        except ValueError:
            why = "It must be an address such as http://192.168.1.5:8000, or NAME=ADDRESS."
            raise ConfigError(f"--upstream {each!r} is not valid.", why, param="upstream") from None
    return values


def read_upstreams(table: Any, asked: Sequence[str], path: Path | str) -> dict[str, UpstreamConfig]:
    """Return the servers of the config file's `[upstreams]` table and of --upstream, by name. Raises `ConfigError`."""
    if table is not None and (
        not isinstance(table, Mapping) or not all(isinstance(each, Mapping) for each in table.values())
    ):
        raise ConfigError(f"{path}: upstreams must be a table of tables.", "Write [upstreams.NAME] for each server.")
    tables = (table or {}).items()
    found = {name: _read_table(str(name), given, f"[upstreams.{name}] of {path}") for name, given in tables}
    for text in asked:
        name, url = split_upstream(text)
        if name in found:
            what, why = f"Two upstreams are named {name}.", f"They are {found[name].url} and {url}."
            raise ConfigError(what, why, "--upstream NAME=URL", param="upstream")
        found[name] = UpstreamConfig(name, url)
    return found


def _read_table(name: str, given: Mapping[str, Any], where: str) -> UpstreamConfig:
    values = {str(key).replace("-", "_"): value for key, value in given.items()}
    if unknown := sorted(values.keys() - set(KEYS)):
        raise ConfigError(f"Unknown setting {unknown[0]!r} in {where}.", f"Known: {', '.join(KEYS)}.", param=unknown[0])
    url, weight, models, key = (values.get(each) for each in ("url", "weight", "models", "api_key"))
    try:
        _, url = split_upstream(f"{name}={url}")
    except ValueError:
        why = "It must be an address such as http://192.168.1.5:8000, and a name of letters, digits, '.', '-' and ':'."
        raise ConfigError(f"url = {url!r} in {where} is not valid.", why, param="url") from None
    weight = 1.0 if weight is None else weight
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight < math.inf:
        raise ConfigError(f"weight = {weight!r} in {where} is not valid.", "It must be above 0.", param="weight")
    models = [] if models is None else models
    if not isinstance(models, list) or not all(isinstance(each, str) and each for each in models):
        raise ConfigError(f"models in {where} is not valid.", "It must be a list of names.", param="models")
    if key is not None and not (isinstance(key, str) and key.isprintable() and key.isascii()):
        raise ConfigError(f"api_key in {where} is not valid.", "It must be a text on one line.", param="api_key")
    return UpstreamConfig(name, url, key or "", float(weight), tuple(models))
