"""Parse and format bytes, counts, rates and durations.

Inside the program, names of numbers carry the unit (`weights_bytes`, `ttft_s`); only this module knows GiB and ms.
"""

from __future__ import annotations

import math
import re

_BINARY = {"": 1, "b": 1, "k": 1024, "m": 1024**2, "g": 1024**3, "t": 1024**4}


def parse_bytes(text: str | int | float) -> int:
    """Parse '1.5GiB', '800 MiB', '2g' or a plain number of bytes. Raises ValueError."""
    if isinstance(text, int | float):
        return int(text)
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([kmgt]?)i?b?\s*", text.lower())
    if not match:
        raise ValueError(f"not a size: {text!r}")
    return int(float(match[1]) * _BINARY[match[2]])


def parse_count(text: str | int) -> int:
    """Parse '4096', '8k' (8000) or '8K' (8192), like vLLM's --max-model-len. Raises ValueError."""
    if isinstance(text, bool) or not isinstance(text, str):
        if isinstance(text, bool) or int(text) != text:
            raise ValueError(f"not a whole number: {text!r}")
        return int(text)
    match = re.fullmatch(r"\s*(-?[0-9]*\.?[0-9]+)\s*([kKmM]?)\s*", text)
    if not match:
        raise ValueError(f"not a count: {text!r}")
    count = float(match[1]) * {"": 1, "k": 1000, "K": 1024, "m": 10**6, "M": 2**20}[match[2]]
    if count != int(count):
        raise ValueError(f"not a whole number: {text!r}")
    return int(count)


def parse_keep_alive(value: str | int | float) -> float:
    """Parse '5m', '90s', '1h30m' or a number of seconds; a negative value means for ever (inf). Raises ValueError."""
    if isinstance(value, bool):
        raise ValueError(f"not a time: {value!r}")
    if isinstance(value, str):
        text = value.strip().lower()
        parts = re.findall(r"([0-9]*\.?[0-9]+)(h|ms|m|s)", text.removeprefix("-"))
        if "".join(number + unit for number, unit in parts) == text.removeprefix("-") and parts:
            seconds = sum(float(number) * {"h": 3600, "m": 60, "s": 1, "ms": 1e-3}[unit] for number, unit in parts)
            return math.inf if text.startswith("-") else seconds
        value = float(text)
    if math.isnan(value):
        raise ValueError("not a time: nan")
    return float(value) if value >= 0 else math.inf


def format_parameters(count: int | None) -> str:
    """Format a number of parameters: 620111872 -> '620 M'; None -> ''."""
    if not count:
        return ""
    return f"{count / 1e9:.1f} B" if count >= 1e9 else f"{count / 1e6:.0f} M"


def format_bytes(count: float) -> str:
    """Format bytes: 1536 -> '1.5 KiB', with three significant figures at most."""
    size, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if abs(size) < 1024:
            break
        size, unit = size / 1024, larger
    return f"{size:.0f} {unit}" if unit == "B" or abs(size) >= 100 else f"{size:.1f} {unit}"


def format_seconds(seconds: float) -> str:
    """Format a duration: 0.0412 -> '41 ms', 12.34 -> '12.3 s', 754 -> '12 min 34 s'."""
    if seconds < 1:
        return f"{seconds * 1e3:.0f} ms" if seconds >= 0.01 else f"{seconds * 1e3:.1f} ms"
    if seconds < 120:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 120:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"


def format_rate(per_second: float, unit: str = "tok/s") -> str:
    """Format a rate: 61.83 -> '61.8 tok/s'."""
    return f"{per_second:,.0f} {unit}" if per_second >= 100 else f"{per_second:.1f} {unit}"


def format_count(count: float) -> str:
    """Format a count: 40960 -> '40,960'."""
    return f"{count:,.0f}"
