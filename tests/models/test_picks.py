"""The list of models to begin with: sound, and chosen by what fits."""

from __future__ import annotations

import pytest

from localllm.config.settings import EngineConfig
from localllm.machine.hardware import Gpu, Hardware
from localllm.models.library.names import parse_name
from localllm.models.library.picks import USEFUL_CONTEXT, picks_for, read_picks

GIB = 1024**3


def machine(ram_gib: float, cores: int = 8, gpu_gib: float = 0) -> Hardware:
    gpus = (Gpu(0, "GPU", int(gpu_gib * GIB), int(gpu_gib * GIB * 0.97), (8, 9)),) if gpu_gib else ()
    return Hardware(gpus, "CPU", cores, int(ram_gib * GIB), int(ram_gib * GIB * 0.85))


def test_every_line_of_the_list_is_sound() -> None:
    picks = read_picks()
    assert [pick.parameters for pick in picks] == sorted((pick.parameters for pick in picks), reverse=True)
    for pick in picks:
        assert parse_name(pick.name).is_repository
        assert pick.spec.num_layers > 0
        assert pick.bytes_per_token <= pick.bytes <= pick.cpu_bytes
        assert 0.5 < pick.bytes / pick.parameters < 2.1


@pytest.mark.parametrize(
    ("hardware", "first"),
    [
        (machine(64, gpu_gib=32), "Qwen3.6 35B A3B"),
        (machine(32, gpu_gib=24), "GLM-4.7 Flash"),
        (machine(32, gpu_gib=16), "gpt-oss 20B"),
        (machine(16), "Granite 4 H Tiny"),
        (machine(4, cores=2), "LFM2.5 1.2B"),
    ],
)
def test_the_largest_that_fits_and_is_quick_enough_comes_first(hardware: Hardware, first: str) -> None:
    found = picks_for(hardware, EngineConfig())
    assert found[0][0].title == first
    assert len(found) == 3
    for _, plan in found:
        assert plan.max_model_len >= USEFUL_CONTEXT
        assert plan.total_bytes <= plan.free_bytes


def test_a_machine_without_room_gets_none() -> None:
    assert picks_for(machine(1, cores=1), EngineConfig()) == []
