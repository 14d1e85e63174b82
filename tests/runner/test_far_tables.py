"""Lookup tables in RAM beside a device: the same answers whether the device reads the rows itself or the host does.

The simulated device is that of test_far_experts.py: copies to RAM take effect only when the host waits for them.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from localllm.config.settings import EngineConfig
from localllm.errors import DoesNotFit
from localllm.kernels.gguf_linear import repack_gguf
from localllm.machine.hardware import Hardware
from localllm.models.fit import plan_memory
from localllm.models.fit.checkpoint import count_resident
from localllm.models.fit.far import FarPlan, TableBytes
from localllm.models.layers.embedding import RamTable
from localllm.models.layers.far import Crossing
from localllm.models.loader import count_model, load_model
from localllm.models.read_spec import read_spec
from localllm.models.weights.parameters import far_bytes, held_bytes, parts_of_kind, replace_tensors
from localllm.runner import opening
from localllm.runner.opening import open_tables
from tests.gguf_files import blocks_of
from tests.golden_engine import CPU, Engine
from tests.marks import needs_library
from tests.runner.late_link import LateLink
from tests.tiny import make_tiny_model

TABLES = {"llama": ["embedding"], "gemma3n": ["per-layer embeddings"], "gemma4": ["per-layer embeddings"]}
PROMPTS = [[5 + 3 * i % 180 for i in range(length)] for length in (5, 40, 17)]


def tables_of(engine: Engine) -> list[RamTable]:
    return list(parts_of_kind(engine.model, RamTable))


@pytest.mark.parametrize("family", TABLES)
def test_answers_are_those_of_the_model_on_one_device(family: str, tmp_path: Path) -> None:
    path = make_tiny_model(tmp_path, family)
    whole = Engine(path, staged=True)
    ways = {"temperature": 0.0, "logprobs": 3}, {"temperature": 1.0, "seed": 5}
    wanted = [(whole.generate(PROMPTS, 8, **way), whole.logprobs) for way in ways]
    for is_mapped in (False, True):
        engine = Engine(path, staged=True, far_tables=TABLES[family], depth=2)
        engine.model.crossing.link = LateLink()
        (table,) = tables_of(engine)
        if is_mapped:
            assert table.map(lambda held: held) == ""
        assert table.is_mapped == is_mapped
        for way, (tokens, logprobs) in zip(ways, wanted, strict=True):
            assert engine.generate(PROMPTS, 8, **way) == tokens, (is_mapped, way)
            assert {index: [at.logprobs for at in each] for index, each in engine.logprobs.items()} == {
                index: [at.logprobs for at in each] for index, each in logprobs.items()
            }
        assert bool(engine.model.crossing.link.buffers) != is_mapped


@needs_library
def test_tables_and_experts_are_in_ram_together(
    model_of: Callable[[str], tuple[Path, object, list[int]]],
) -> None:
    path, _, layers = model_of("qwen3_moe")
    wanted = Engine(path, staged=True).generate(PROMPTS, 8)
    engine = Engine(path, staged=True, far_layers=layers[-1:], far_tables=["embedding"], depth=2)
    engine.model.crossing.link = LateLink()
    assert engine.generate(PROMPTS, 8) == wanted
    table = tables_of(engine)[0].held.nbytes
    assert far_bytes(engine.model) == table + engine.model.crossing.arena.used_bytes


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", TABLES)
def test_bytes_are_where_the_plan_counts_them(family: str, dtype: str, tmp_path: Path) -> None:
    path = make_tiny_model(tmp_path, family, dtype=dtype)
    spec, kind = read_spec(path), getattr(torch, dtype)
    counted = count_model(path, spec, CPU, kind)
    assert list(counted.tables) == TABLES[family]
    tables = count_resident(path, spec).tables
    assert tables is not None
    assert [*tables("cpu", dtype, None)] == [TableBytes(*each) for each in counted.tables.items()]
    model = load_model(path, spec, CPU, kind, far_tables=TABLES[family], max_model_len=64)
    assert not model.unused_tensors
    assert far_bytes(model) == sum(counted.tables.values())
    assert held_bytes(model) == counted.at(64) - far_bytes(model)
    assert held_bytes(load_model(path, spec, CPU, kind, max_model_len=64)) == counted.at(64)

    moved: list[Tensor] = []
    replace_tensors(model, lambda tensor: moved.append(tensor) or tensor)  # as sleep does, which leaves RAM alone
    (table,) = parts_of_kind(model, RamTable)
    assert isinstance(table.held, Tensor)
    assert table.held.data_ptr() not in {tensor.data_ptr() for tensor in moved}


def test_a_load_ends_if_other_programs_took_the_ram(tmp_path: Path) -> None:
    path = make_tiny_model(tmp_path, "llama")
    spec = read_spec(path)
    size = spec.vocab_size * spec.hidden_size * 4
    with pytest.raises(DoesNotFit, match="since the model was planned"):
        load_model(path, spec, CPU, torch.float32, far_tables=["embedding"], free_ram=lambda: size - 1)
    assert load_model(path, spec, CPU, torch.float32, far_tables=["embedding"], free_ram=lambda: size)


def test_a_tied_embedding_is_not_a_table(tmp_path: Path) -> None:
    """A CPU that packs the head has a copy for lookups, whose bytes a token does not read."""
    path = make_tiny_model(tmp_path, "qwen2", hidden_size=512)
    spec = read_spec(path)
    for device, tables in (("cuda", {}), ("cpu", {"embedding": spec.vocab_size * 512 * 4})):
        assert count_model(path, spec, torch.device(device), torch.float32).tables == tables


def table_of(held: Tensor, link: LateLink) -> RamTable:
    return RamTable(held, Crossing(link))


def test_a_recorded_step_looks_rows_up_again_at_each_replay() -> None:
    """Recording cuts the step at the host's work, which reads the tokens of the replay."""
    held, link = torch.arange(40.0).view(10, 4), LateLink()
    table, works = table_of(held, link), list[Callable[[], None]]()
    tokens = torch.tensor([3, 1])
    table._crossing.split = works.append
    table.dequantize_rows(tokens, torch.float32)
    ids, found = table._buffers_for(2, torch.float32)
    for other in ([3, 1], [0, 9]):
        link.copy(ids, torch.tensor(other))
        works[0]()
        assert torch.equal(found, held[other])
    table._crossing.split = None
    table.dequantize_rows(torch.zeros(500, dtype=torch.int64), torch.float32)  # a larger step gets buffers of its own
    link.copy(ids, torch.tensor([7, 2]))
    works[0]()
    assert torch.equal(found, held[[7, 2]])


def test_a_device_that_reads_other_values_does_not_read_the_table() -> None:
    held = torch.randn(100, 8, dtype=torch.bfloat16)
    table = table_of(held, LateLink())
    for wrong in (lambda part: part + 1, lambda part: part.roll(1, 0), lambda part: part * torch.nan):
        assert "other values" in table.map(wrong)
    assert "does not let" in table.map(lambda part: None)
    assert not table.is_mapped
    with_nan = table_of(torch.full((3, 8), torch.nan), LateLink())
    assert with_nan.map(lambda part: part) == ""


def test_a_quantised_table_is_read_by_its_parts() -> None:
    held = repack_gguf(torch.from_numpy(blocks_of(torch.randn(70, 64), "Q4_1")[0]), "Q4_1", 64)
    link, rows = LateLink(), torch.tensor([69, 0, 3, 3])
    table = RamTable(held, Crossing(link))
    wanted = held.dequantize(torch.float32)[rows]
    assert torch.equal(table.dequantize_rows(rows, torch.float32), wanted)
    seen: list[Tensor] = []
    assert table.map(lambda part: seen.append(part) or part.clone()) == ""
    assert len(seen) > 1
    assert torch.equal(table.dequantize_rows(rows, torch.float32), wanted)
    assert table.held is held


MACHINE = Hardware((), "CPU", 2, 2**35, 2**34)


def test_a_runner_maps_tables_or_says_why_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_tiny_model(tmp_path, "llama")
    spec = read_spec(path)
    made = plan_memory(EngineConfig(device="cpu", max_num_seqs=4, max_model_len=64), spec, 10_000_000, MACHINE)
    plan = replace(made, far=FarPlan((), 0, 100, 100, 0, 0, tables=(TableBytes("embedding", 100),)))

    def opened(hardware: Hardware = MACHINE) -> tuple[RamTable, tuple[str, ...]]:
        model = load_model(path, spec, CPU, torch.float32, far_tables=["embedding"], max_model_len=64)
        kept = open_tables(model, plan, CPU, hardware)
        (table,) = parts_of_kind(model, RamTable)
        assert open_tables(model, kept, CPU, hardware).notes[: len(kept.notes)] == kept.notes
        return table, kept.notes[len(plan.notes) :]

    table, notes = opened()
    assert table.is_mapped
    assert notes == ()
    small = replace(MACHINE, ram_total_bytes=table.held.nbytes)
    table, notes = opened(small)
    assert not table.is_mapped
    assert "The CPU looks up the rows of a table in RAM" in notes[0]
    assert "80% of RAM is page-locked at most" in notes[0]
    monkeypatch.setattr(opening, "view_in_ram", lambda device, held: None)
    table, notes = opened()
    assert not table.is_mapped
    assert "the system does not let it" in notes[0]
