"""`fit`: show whether a model fits into this machine's memory, and which flags would fit better. Nothing is loaded.

Prints text, or JSON with --json. Does not know: how the numbers are computed (models/fit).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

from localllm.config.flags import add_engine_flags, add_model, settings_from
from localllm.errors import DoesNotFit
from localllm.terminal import print_table
from localllm.units import format_bytes

if TYPE_CHECKING:
    from localllm.models.fit import Estimate, RankPlan
    from localllm.models.library.about import InspectedCheckpoint
    from localllm.models.spec.model_spec import ModelSpec


def fit_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser, required=True)
    add_engine_flags(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")


def fit(options: argparse.Namespace) -> int:
    """Print the estimates. Return exit code 4 if the model does not fit on the device that `up` would use."""
    from localllm.machine.hardware import read_hardware
    from localllm.models.fit.checkpoint import estimate_measured
    from localllm.models.fit.estimate import fit_facts
    from localllm.models.library.about import inspect_checkpoint
    from localllm.serving.drafters import with_drafter

    config = settings_from(options).engine
    with inspect_checkpoint(config.model, config.revision) as found:
        spec, estimates = estimate_measured(found.path, config, read_hardware(), with_drafter)
    if options.json:
        print(json.dumps(fit_facts(found.name, spec, found.download_bytes, estimates), indent=2))
    else:
        _tell(found, spec, estimates)
    return 0 if estimates[0].plan is not None else DoesNotFit.exit_code


# ---- for people ------------------------------------------------------------------------------------------------------


def _tell(found: InspectedCheckpoint, spec: ModelSpec, estimates: Sequence[Estimate]) -> None:
    from localllm.models.fit.estimate import fit_rows
    from localllm.models.library.about import longest_input

    print(f"{found.name} · {spec.architecture} · {longest_input(spec)}")
    if found.download_bytes is not None:
        print(
            f"Not on this machine: {format_bytes(found.download_bytes)} to download. Facts are read from its headers "
            f"({format_bytes(found.fetched_bytes)})."
        )
    print()
    rows = [["", *(f"{each.device}  {each.name}" if each.device != "cpu" else "CPU" for each in estimates)]]
    rows += [[name, *cells] for name, cells in fit_rows(estimates)]
    print_table(rows)
    if estimates[0].needs.ranks:
        _tell_ranks(estimates[0].needs.ranks)
    for each in estimates:
        _tell_device(each, several=len(estimates) > 1)


def _tell_ranks(ranks: Sequence[RankPlan]) -> None:
    from localllm.models.fit.estimate import rank_columns, rank_rows

    print()
    print_table([["", *rank_columns(ranks)], *([name, *cells] for name, cells in rank_rows(ranks))])


def _tell_device(each: Estimate, *, several: bool) -> None:
    from localllm.models.fit import option_rows

    lead = f"{each.device}: " if several else ""
    if each.error is not None:
        print(f"\n{lead}{each.error.what} {each.error.why}")
        if each.error.hint:
            print(f"Try: {each.error.hint}")
    for note in each.plan.notes if each.plan else ():
        print(f"\n{lead}{note}")
    if each.speech is not None:
        print(f"\n{lead}{each.speech.why}")
    if each.placements:
        print(f"\n{lead}Experts in RAM:")
        print_table(option_rows(each.placements))
    if each.options:
        print(f"\n{lead}Flags that give more:")
        print_table(option_rows(each.options))
