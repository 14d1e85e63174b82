"""`fit`: whether a model fits into this machine, how well, and what else could be asked. Nothing is loaded or fetched.

Text for people, or JSON with --json. Does not know: how the numbers come about (models/fit).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from localllm.cli.flags import settings_from
from localllm.cli.tell import print_table
from localllm.errors import DoesNotFit
from localllm.units import format_bytes, format_count

if TYPE_CHECKING:
    from localllm.models.fit import Estimate, FitOption
    from localllm.models.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class _Checkpoint:
    """What is looked at."""

    name: str
    path: Path
    download_bytes: int | None = None  # None: it is here
    looked_at_bytes: int = 0  # fetched to know


def fit(options: argparse.Namespace) -> int:
    """Exit code 4 where the device that `up` would take cannot hold it."""
    from localllm.hardware import read_hardware
    from localllm.models.fit.checkpoint import estimate_checkpoint

    config = settings_from(options).engine
    with _checkpoint(config.model, config.revision) as found:
        spec, estimates = estimate_checkpoint(found.path, config, read_hardware())
    if options.json:
        print(json.dumps(_facts(found, spec, estimates), indent=2))
    else:
        _tell(found, spec, estimates)
    return 0 if estimates[0].plan is not None else DoesNotFit.exit_code


@contextmanager
def _checkpoint(name: str, revision: str | None) -> Iterator[_Checkpoint]:
    from localllm.models.catalog import is_for_the_hub, resolve_model

    if is_for_the_hub(name, revision):
        from localllm.models.hub.peek import peek

        with peek(name, revision) as remote:
            yield _Checkpoint(remote.name, remote.path, remote.plan.needed_bytes, remote.fetched_bytes)
    else:
        model = resolve_model(name, revision)
        yield _Checkpoint(model.name, model.path)


# ---- for people ------------------------------------------------------------------------------------------------------


def _tell(found: _Checkpoint, spec: ModelSpec, estimates: Sequence[Estimate]) -> None:
    print(f"{found.name} · {spec.architecture} · context of {format_count(spec.max_position)} tokens")
    if found.download_bytes is not None:
        print(
            f"Not on this machine: {format_bytes(found.download_bytes)} to download. Read from its headers "
            f"({format_bytes(found.looked_at_bytes)})."
        )
    print()
    rows = [["", *(f"{each.device}  {each.name}" if each.device != "cpu" else "CPU" for each in estimates)]]
    rows += [[name, *cells] for name, cells in _rows(estimates)]
    print_table(rows)
    for each in estimates:
        _tell_device(each, several=len(estimates) > 1)


def _rows(estimates: Sequence[Estimate]) -> Iterator[tuple[str, list[str]]]:
    def row(what: str) -> list[str]:
        return [format_bytes(getattr(each.needs, what)) for each in estimates]

    yield "weights", row("weights_bytes")
    yield "  held as", [each.needs.quantization or each.needs.dtype for each in estimates]
    has_cache = any(each.kv_token_bytes for each in estimates)
    if has_cache:
        yield "KV cache, per token", [format_bytes(each.kv_token_bytes) for each in estimates]
        yield "  per 1,000 tokens", [format_bytes(1000 * each.kv_token_bytes) for each in estimates]
        yield "  in all", [_kv_in_all(each) for each in estimates]
    yield "activations", [format_bytes(e.needs.activation_bytes - e.needs.sampler_bytes) for e in estimates]
    yield "  more for sampling", row("sampler_bytes")
    if any(each.needs.graph_bytes for each in estimates):
        yield "CUDA graphs", row("graph_bytes")
    yield "reserve", row("reserve_bytes")
    yield "free now", row("free_bytes")
    yield "remains", [_remains(each) for each in estimates]
    yield "verdict", [each.verdict for each in estimates]
    yield "context", [_count(each.plan.max_model_len) if each.plan else "" for each in estimates]
    for length in estimates[0].concurrency if has_cache else ():
        yield f"  requests of {format_count(length)}", [_count(each.concurrency[length]) for each in estimates]
    if has_cache:
        yield "KV blocks", [_blocks(each) for each in estimates]


def _kv_in_all(each: Estimate) -> str:
    return f"{format_bytes(each.needs.kv_bytes)} as {each.needs.kv_dtype}"


def _remains(each: Estimate) -> str:
    needs = each.needs
    left = needs.free_bytes - needs.reserve_bytes - needs.total_bytes
    return format_bytes(left) if left >= 0 else f"{format_bytes(-left)} are missing"


def _count(number: int) -> str:
    return format_count(number) if number else ""


def _blocks(each: Estimate) -> str:
    return f"{format_count(each.plan.num_blocks - 1)} of {each.plan.block_size} tokens" if each.plan else ""


def _tell_device(each: Estimate, *, several: bool) -> None:
    from localllm.models.fit import option_rows

    lead = f"{each.device}: " if several else ""
    if each.error is not None:
        print(f"\n{lead}{each.error.what} {each.error.why}")
        if each.error.hint:
            print(f"Try: {each.error.hint}")
    for note in each.plan.notes if each.plan else ():
        print(f"\n{lead}{note}")
    if each.options:
        print(f"\n{lead}What gives more:")
        print_table(option_rows(each.options))


# ---- for programs ----------------------------------------------------------------------------------------------------


def _facts(found: _Checkpoint, spec: ModelSpec, estimates: Sequence[Estimate]) -> dict[str, Any]:
    return {
        "model": found.name,
        "architecture": spec.architecture,
        "max_position": spec.max_position,
        "download_bytes": found.download_bytes or 0,
        "devices": [_device_facts(each) for each in estimates],
    }


def _device_facts(each: Estimate) -> dict[str, Any]:
    return {
        "device": each.device,
        "name": each.name,
        "is_chosen": each.is_chosen,
        "verdict": each.verdict,
        "error": str(each.error) if each.error else None,
        "max_model_len": each.plan.max_model_len if each.plan else None,
        "kv_bytes_per_token": each.kv_token_bytes,
        "concurrency": {str(length): number for length, number in each.concurrency.items()},
        "plan" if each.plan else "needs": asdict(each.needs),
        "options": [_option_facts(option) for option in each.options],
    }


def _option_facts(option: FitOption) -> dict[str, Any]:
    return {
        "flags": option.flags,
        "changes": dict(option.changes),
        "max_model_len": option.context,
        "concurrency": round(option.concurrency, 2),
        "cost": option.cost,
    }
