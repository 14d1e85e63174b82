"""Experts in RAM beside a device: the whole runner on a simulated device answers as the model on one device does.

The simulated device is the CPU with the buffers and steps of a GPU, and with copies to RAM that take effect only when
the host waits for them.
"""

import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from localllm.config.settings import EngineConfig
from localllm.kernels.cpu.matrix import matrix_of
from localllm.kernels.cpu.native.library import native
from localllm.kernels.cpu.native.structures import FEW_ROWS
from localllm.kernels.cpu.native_product import native_linear
from localllm.kernels.cpu.pack import CpuPacker
from localllm.kernels.cpu.q4 import CpuQ4Weight
from localllm.kernels.int8_linear import quantize_int8
from localllm.machine.hardware import Hardware
from localllm.models.fit import MemoryPlan, plan_memory
from localllm.models.fit.far import FarPlan
from localllm.models.layers import far as far_module
from localllm.models.layers.far import Crossing, FarExperts, FarStream, streamable
from localllm.models.layers.lora import LoraLimits
from localllm.models.layers.moe import Experts
from localllm.models.loader import expert_bytes, load_model, resident_bytes
from localllm.models.read_spec import read_spec
from localllm.models.spec.model_spec import ModelSpec
from localllm.models.weights.parameters import far_bytes, held_bytes, parts_of_kind, replace_tensors
from localllm.runner import opening
from localllm.runner.opening import open_runner
from localllm.runner.runner import TorchRunner
from tests.golden_engine import CPU, Engine
from tests.kernels.harness import gguf_linear
from tests.marks import needs_library
from tests.runner.late_link import LateLink, chosen, experts_of
from tests.tiny import make_tiny_model

FAMILIES = ("qwen3_moe", "gpt_oss", "deepseek_v3", "glm4_moe", "qwen2_moe", "llama4", "gemma4_moe", "nemotron_h")
MACHINE = Hardware((), "CPU", 2, 2**35, 2**34)
PROMPTS = [[5 + 3 * i % 180 for i in range(length)] for length in (5, 40, 17)]


def opened(path: Path, far_layers: list[int], stream_from: int = 0, **options: int) -> Engine:
    """stream_from: steps of this many tokens compute the experts on the simulated device; 0: none does."""
    engine = Engine(path, staged=True, far_layers=far_layers, **options)
    if far_layers:
        engine.model.crossing.link = LateLink()
    if stream_from:
        stream_of(engine).from_tokens = stream_from
    return engine


def stream_of(engine: Engine) -> FarStream:
    crossing = engine.model.crossing
    crossing.stream = FarStream(streamable(parts_of_kind(engine.model, FarExperts)), crossing)
    return crossing.stream


@needs_library
@pytest.mark.parametrize("family", FAMILIES)
def test_answers_are_those_of_the_whole_model(
    family: str, model_of: Callable[[str], tuple[Path, ModelSpec, list[int]]]
) -> None:
    path, _, layers = model_of(family)
    whole = opened(path, [])
    ways = {"temperature": 0.0, "logprobs": 3}, {"temperature": 1.0, "seed": 5}
    wanted = [(whole.generate(PROMPTS, 12, **way), whole.logprobs) for way in ways]
    for far_layers in (layers, layers[-1:]):
        engine = opened(path, far_layers, depth=2)
        for way, (tokens, logprobs) in zip(ways, wanted, strict=True):
            assert engine.generate(PROMPTS, 12, **way) == tokens, (far_layers, way)
            for index, wanted_at in logprobs.items():
                for at, expected in zip(engine.logprobs[index], wanted_at, strict=True):
                    assert list(at.logprobs) == pytest.approx(list(expected.logprobs), abs=2e-5)
        assert engine.model.crossing.seconds > 0


@needs_library
@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma2", "cohere", "granite", "arcee"])
def test_a_dense_model_answers_alike_with_feed_forward_parts_in_ram(family: str, tmp_path: Path) -> None:
    path = make_tiny_model(tmp_path, family)
    wanted = Engine(path, staged=True).generate(PROMPTS, 8)
    for layers in ([0, 1], [1]):
        for stream_from in (0, 20):
            engine = opened(path, layers, stream_from, depth=2)
            assert engine.generate(PROMPTS, 8) == wanted, (layers, stream_from)
            crossing = engine.model.crossing
            assert crossing.seconds > 0
            assert stream_from == 0 or crossing.stream.bytes == far_bytes(engine.model) > 0


@needs_library
def test_adapters_change_attention_alone_where_feed_forward_parts_are_in_ram(tmp_path: Path) -> None:
    path = make_tiny_model(tmp_path)
    model = load_model(path, read_spec(path), CPU, torch.float32, far_layers=[1], lora=LoraLimits(1, 8))
    assert model.lora is not None
    shapes = {
        name: model.lora.shape_of(f"model.layers.{name}_proj")
        for name in ("0.mlp.down", "0.self_attn.q", "1.mlp.down", "1.mlp.gate", "1.self_attn.q")
    }
    assert [name for name, shape in shapes.items() if shape is None] == ["1.mlp.down", "1.mlp.gate"]


@needs_library
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("at_once", [1, 3])
def test_prompts_whose_experts_are_copied_to_the_device_are_answered_as_by_the_whole_model(
    family: str, at_once: int, model_of: Callable[[str], tuple[Path, ModelSpec, list[int]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """With a threshold of which one prompt is below, one at it and one above; some experts at a time."""
    path, _, layers = model_of(family)
    monkeypatch.setattr(far_module, "staged_bytes", lambda record, count: record * min(count, at_once))
    whole = opened(path, [])
    wanted = whole.generate(PROMPTS, 6, temperature=0.0, logprobs=3)
    logprobs = whole.logprobs
    for far_layers in (layers, layers[-1:]):
        engine = opened(path, far_layers, max(map(len, PROMPTS)), depth=2)
        stream, link = engine.model.crossing.stream, engine.model.crossing.link
        assert stream.step_bytes == far_bytes(engine.model)
        assert [engine.generate([prompt], 6, temperature=0.0, logprobs=3)[0] for prompt in PROMPTS[:1]] == wanted[:1]
        assert stream.bytes == 0
        assert engine.generate(PROMPTS, 6, temperature=0.0, logprobs=3) == wanted
        assert stream.bytes == stream.step_bytes == far_bytes(engine.model)
        assert link.num_ahead == len(stream._groups)
        for index, wanted_at in logprobs.items():
            for at, expected in zip(engine.logprobs[index], wanted_at, strict=True):
                assert list(at.logprobs) == pytest.approx(list(expected.logprobs), abs=2e-5)


@needs_library
@pytest.mark.parametrize("family", ["gpt_oss", "qwen3_moe"])
def test_a_step_of_one_token_less_than_the_threshold_is_the_cpus_and_answers_alike(
    family: str, model_of: Callable[[str], tuple[Path, ModelSpec, list[int]]]
) -> None:
    """At one token below the threshold, at it, and one above."""
    path, _, layers = model_of(family)
    whole = opened(path, [])
    prompt = PROMPTS[2]
    (wanted,), logprobs = whole.generate([prompt], 6, temperature=0.0, logprobs=3), whole.logprobs[0]
    for more, is_streamed in ((1, False), (0, True), (-1, True)):
        engine = opened(path, layers, len(prompt) + more, depth=2)
        crossing = engine.model.crossing
        assert engine.generate([prompt], 6, temperature=0.0, logprobs=3) == [wanted]
        assert crossing.stream.bytes == (crossing.stream.step_bytes if is_streamed else 0)
        assert crossing.stream.takes(len(prompt)) == is_streamed
        for at, expected in zip(engine.logprobs[0], logprobs, strict=True):
            assert list(at.logprobs) == pytest.approx(list(expected.logprobs), abs=2e-5)


@needs_library
@pytest.mark.parametrize("rows", [1, 3, FEW_ROWS])
def test_a_rows_sum_is_in_the_order_of_its_choices(
    rows: int, model_of: Callable[[str], tuple[Path, ModelSpec, list[int]]]
) -> None:
    """Large parts that cancel out leave a small one whole only in that order. Powers of two round nothing."""
    experts = experts_of()
    experts.gate_up[:], experts.down[:] = experts.gate_up[0].clone(), experts.down[0].clone()
    far = FarExperts(experts, Crossing(LateLink()), model_of("qwen3_moe")[1])
    x = torch.randn(1, 32).expand(rows, -1).contiguous()
    small = far(x, torch.tensor([[3, 5, 0]] * rows, dtype=torch.int32), torch.tensor([[0.0, 0.0, 1.0]] * rows))
    for order in ([5, 3, 0], [0, 1, 2], [4, 2, 3]):
        ids, weights = (
            torch.tensor([order] * rows, dtype=torch.int32),
            torch.tensor([[2.0**30, -(2.0**30), 1.0]] * rows),
        )
        assert torch.equal(far(x, ids, weights), small), order


@needs_library
def test_rows_of_padding_count_neither_as_rows_nor_as_reads(
    model_of: Callable[[str], tuple[Path, ModelSpec, list[int]]],
) -> None:
    """A padded step with a few real rows is computed at once, and reads what those rows chose."""
    crossing = Crossing(LateLink())
    far = FarExperts(experts_of(), crossing, model_of("qwen3_moe")[1])
    few = far._few_rows(3)
    assert few is not None
    for real in (0, 1, FEW_ROWS, FEW_ROWS + 1):
        x, ids, weights = chosen(4 * FEW_ROWS)
        ids[:] = -1
        ids[1 : 1 + 3 * real : 3] = torch.tensor([4, 2, 1], dtype=torch.int32)
        assert int((ids[:, 0] >= 0).sum()) == real
        assert few.write(x, ids, weights, torch.empty(len(x), 32)) == (real <= FEW_ROWS)
        crossing.read_bytes = 0
        far(x, ids, weights)
        one = 3 * 32 * 24 * 4
        assert crossing.read_bytes == (3 * one if real else 0)


def test_bytes_are_counted_where_they_are(model_of: Callable[[str], tuple[Path, ModelSpec, list[int]]]) -> None:
    path, spec, layers = model_of("gpt_oss")
    sizes = expert_bytes(path, spec, CPU, torch.float32)
    assert sorted(sizes) == layers
    whole = resident_bytes(path, spec, CPU, torch.float32)
    model = load_model(path, spec, CPU, torch.float32, far_layers=layers[1:])
    far = list(parts_of_kind(model, FarExperts))
    assert held_bytes(model) == whole - sum(sizes[layer][0] for layer in layers[1:])
    assert far_bytes(model) == sum(sizes[layer][1] for layer in layers[1:]) == model.crossing.arena.num_bytes
    assert [each.records.bytes.nbytes for each in far] == [sizes[layer][1] for layer in layers[1:]]
    assert not model.unused_tensors

    moved: list[Tensor] = []
    replace_tensors(model, lambda tensor: moved.append(tensor) or tensor)  # as sleep does, which leaves RAM alone
    inside = {tensor.data_ptr() for tensor in (far[0].experts.gate_up_bias, far[0].experts.down_bias)}
    assert moved
    assert not inside & {tensor.data_ptr() for tensor in moved}


@needs_library
def test_a_row_has_the_same_bits_beside_any_neighbours(
    model_of: Callable[[str], tuple[Path, ModelSpec, list[int]]],
) -> None:
    far = FarExperts(experts_of(), Crossing(LateLink()), model_of("qwen3_moe")[1])
    x, ids, weights = chosen(FEW_ROWS)
    together = far(x, ids, weights).clone()
    for row in range(FEW_ROWS):
        one = slice(row, row + 1)
        assert torch.equal(far(x[one], ids[one], weights[one]), together[one])
    exact = experts_of()(x, ids, weights)
    assert (together - exact).abs().max() < 2e-6 * exact.abs().max()


@needs_library
@pytest.mark.parametrize("ids", [[[1, 2, 3]] * 8, [[1, 1, 2]] * 8, [[4, 4, 4]] * 8, [[0, 1, 2], [3, 4, 5]] * 4])
def test_rows_that_share_experts_are_multiplied_as_each_alone(
    ids: list[list[int]], model_of: Callable[[str], tuple[Path, ModelSpec, list[int]]]
) -> None:
    """An expert's weights are read once for up to FEW_ROWS of its choices, here for up to 24."""
    far = FarExperts(experts_of(), Crossing(LateLink()), model_of("qwen3_moe")[1])
    x, _, weights = chosen(FEW_ROWS)
    asked = torch.tensor(ids, dtype=torch.int32)
    together = far(x, asked, weights).clone()
    exact = experts_of()(x, asked, weights)
    assert (together - exact).abs().max() < 2e-6 * exact.abs().max()
    for row in range(FEW_ROWS):
        one = slice(row, row + 1)
        assert torch.equal(far(x[one], asked[one], weights[one]), together[one])


def coded(form: str, outputs: int, inputs: int, seed: int) -> Any:
    """A matrix whose activations are encoded as bytes. ordered: with its columns in an order of their own."""
    torch.manual_seed(seed)
    if form == "int8":
        return CpuPacker().pack(quantize_int8(torch.randn(outputs, inputs) * 0.1))
    weight = CpuPacker().pack(gguf_linear("Q4_0" if form == "ordered" else form, outputs, inputs))
    if isinstance(weight, CpuQ4Weight):
        order = torch.randperm(inputs).int() if form == "ordered" else None
        return replace(weight, blocks=weight.blocks[torch.randperm(len(weight.blocks))].clone(), input_order=order)
    return weight


MIXED = ("Q4_0", "int8", "Q4_K", "ordered", "MXFP4", "IQ4_NL")
SHARED_IDS = (
    [[1, 2, 3]] * 8,
    [[4, 4, 5]] * 8,
    [[0, 1, 2], [3, 4, 5]] * 4,
    [[0, 1, 2], [1, 2, 4], [5, 2, 0], [2, 3, 1]],
)


@needs_library
@pytest.mark.parametrize("form", ["int8", "Q4_0", "Q4_K", "MXFP4", "IQ4_NL", "ordered", "mixed"])
def test_quantised_experts_that_rows_share_are_multiplied_as_each_alone(
    form: str, model_of: Callable[[str], tuple[Path, ModelSpec, list[int]]]
) -> None:
    """Bit by bit, and as the weights' own products say. Layouts of experts may differ, and their columns' order."""
    forms = MIXED if form == "mixed" else (form,) * 6
    gate_up = [coded(each, 512, 256, seed) for seed, each in enumerate(forms)]
    down = [coded(each, 256, 256, 9 + seed) for seed, each in enumerate(forms)]
    matrices: Any = [[matrix_of(each) for each in weights] for weights in (gate_up, down)]
    far = FarExperts(Experts(gate_up, down, "silu"), Crossing(LateLink()), model_of("qwen3_moe")[1])
    for chosen_ids in SHARED_IDS:
        ids = torch.tensor(chosen_ids, dtype=torch.int32)
        x, weights = torch.randn(len(ids), 256), torch.rand(ids.shape)
        together = torch.full((len(ids), 256), torch.nan)
        assert far._few_rows(3).write(x, ids, weights, together)  # type: ignore[union-attr]
        for row, (own, factors) in enumerate(zip(chosen_ids, weights, strict=True)):
            one, alone = slice(row, row + 1), torch.empty(1, 256)
            assert far._few_rows(3).write(x[one], ids[one], weights[one], alone)  # type: ignore[union-attr]
            assert torch.equal(alone[0], together[row])
            wanted = torch.zeros(1, 256)
            for expert, factor in zip(own, factors, strict=True):
                gate, up = native_linear(matrices[0][expert].matrix, x[one], is_fine=True).chunk(2, dim=1)
                hidden = torch.nn.functional.silu(gate) * up
                wanted += factor * native_linear(matrices[1][expert].matrix, hidden, is_fine=True)
            assert (alone - wanted).abs().max() < 1e-4 * wanted.abs().max(), (row, own)


def test_padding_reads_nothing(model_of: Callable[[str], tuple[Path, ModelSpec, list[int]]]) -> None:
    """Rows whose ids are -1 are zeros, also beside experts that are NaN."""
    experts = experts_of()
    experts.gate_up[-1] = torch.nan
    experts.down[-1] = torch.nan
    far = FarExperts(experts, Crossing(LateLink()), model_of("qwen3_moe")[1])
    for rows in (4, 3 * FEW_ROWS):
        x, ids, weights = chosen(rows, count=5)
        ids[1], x[1] = -1, torch.nan
        out = far(x, ids, weights)
        assert not out[1].any()
        assert out.isfinite().all()


def test_the_host_waits_for_the_rows_and_an_error_ends_that_step_alone(
    model_of: Callable[[str], tuple[Path, ModelSpec, list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    far = FarExperts(experts_of(), Crossing(LateLink()), model_of("qwen3_moe")[1])
    given = chosen(3)
    wanted = far(*given).clone()
    with monkeypatch.context() as patched:
        patched.setattr(LateLink, "wait", lambda self: None)
        with pytest.raises(IndexError, match="of 6"):
            far(*given)
    far._crossing.link.copies.clear()
    assert torch.equal(far(*given), wanted)


FOREIGN_THREAD = """
import ctypes, sys, torch
from tests.runner.late_link import chosen, experts_of
from localllm.models.layers.far import FewRows
from localllm.kernels.cpu.native.library import native
from localllm.models.read_spec import read_spec
from pathlib import Path

few = FewRows(experts_of(), 3, read_spec(Path(sys.argv[1])), native())
x, ids, weights = chosen(8)
ids[3] = -1
wanted, got = torch.empty(8, 32), torch.full((8, 32), torch.nan)
assert few.write(x, ids, weights, wanted)
few._job.y = got.data_ptr()
held = ctypes.PyDLL(None)  # calls that keep Python's lock
held.mallinfo2.restype = type("Info", (ctypes.Structure,), {"_fields_": [(str(i), ctypes.c_size_t) for i in range(10)]})
address = ctypes.cast(native().run_far, ctypes.c_void_p)
thread, before = ctypes.c_void_p(), []
for _ in range(3):
    start = getattr(held.mallinfo2(), "7")
    assert held.pthread_create(ctypes.byref(thread), None, address, ctypes.c_void_p(few._address)) == 0
    assert held.pthread_join(thread, None) == 0
    before.append(getattr(held.mallinfo2(), "7") - start)
assert few._job.outcome == 0
assert torch.equal(got, wanted) and not got[3].any()
assert before[-1] == 0, before
print("done")
"""


@pytest.mark.skipif(native() is None or not sys.platform.startswith("linux"), reason="needs Linux and the library")
def test_the_job_runs_in_a_foreign_thread_while_python_is_locked_and_allocates_nothing(
    model_of: Callable[[str], tuple[Path, ModelSpec, list[int]]],
) -> None:
    """As a function that CUDA calls: the thread that holds Python's lock waits for it."""
    path = model_of("qwen3_moe")[0]
    done = subprocess.run(
        [sys.executable, "-c", FOREIGN_THREAD, str(path)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout == "done\n", done.stderr


@needs_library
def test_a_row_that_is_padding_in_part_is_an_error(
    model_of: Callable[[str], tuple[Path, ModelSpec, list[int]]],
) -> None:
    far = FarExperts(experts_of(), Crossing(LateLink()), model_of("qwen3_moe")[1])
    x, ids, weights = chosen(2)
    for place in (0, 2):
        broken = ids.clone()
        broken[1, place] = -1
        with pytest.raises(IndexError):
            far(x, broken, weights)
        far._crossing.link.copies.clear()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@needs_library
def test_rows_of_16_bits_are_widened_exactly(
    dtype: torch.dtype, model_of: Callable[[str], tuple[Path, ModelSpec, list[int]]]
) -> None:
    far = FarExperts(experts_of(), Crossing(LateLink()), model_of("qwen3_moe")[1])
    x, ids, weights = chosen(5)
    assert torch.equal(far(x.to(dtype), ids, weights), far(x.to(dtype).float(), ids, weights).to(dtype))


def test_another_thread_may_compute_while_python_is_busy(
    model_of: Callable[[str], tuple[Path, ModelSpec, list[int]]],
) -> None:
    """The engine's thread is not the one that loaded the model."""
    far = FarExperts(experts_of(), Crossing(LateLink()), model_of("qwen3_moe")[1])
    given, got = chosen(2), list[Tensor]()
    thread = threading.Thread(target=lambda: got.append(far(*given)))
    thread.start()
    thread.join(10)
    assert torch.equal(got[0], far(*given))


def far_plan(spec: ModelSpec, layers: list[int], **more: Any) -> MemoryPlan:
    """A plan of a CPU that is the simulated device: with these experts in RAM and buffers for them."""
    made = plan_memory(EngineConfig(device="cpu", max_num_seqs=4, max_model_len=256), spec, 10_000_000, MACHINE)
    return replace(made, far=FarPlan(tuple(layers), len(layers), 0, 0, 0, 0, staging_bytes=1, unpacked_bytes=1, **more))


@needs_library
def test_a_runner_is_opened_with_a_threshold_that_was_measured_once(
    model_of: Callable[[str], tuple[Path, ModelSpec, list[int]]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opening, "cache_folder", lambda: tmp_path)
    path, spec, layers = model_of("qwen3_moe")
    said: list[str] = []

    def open_it(asked: str = "auto") -> tuple[TorchRunner, MemoryPlan]:
        model = load_model(path, spec, CPU, torch.float32, far_layers=layers, max_model_len=256)
        config = EngineConfig(device="cpu", stream_prompts=asked)
        return open_runner(model, spec, config, far_plan(spec, layers), MACHINE, said.append)

    monkeypatch.setattr(FarStream, "timed", lambda self: ({8: 0.01, 64: 0.08, 256: 0.32}, 0.125))
    runner, kept = open_it()
    assert kept.far is not None
    assert kept.far.stream_from == 100
    assert any("Prompts from 100 tokens on are computed by the GPU" in note for note in kept.notes), kept.notes
    stream = runner._crossing.stream  # type: ignore[union-attr]
    assert stream is not None
    assert (stream.from_tokens, stream.copies, runner.stats().streamed_bytes) == (100, True, stream.bytes)
    assert "measuring the copy of experts to the GPU" in said

    monkeypatch.setattr(FarStream, "timed", lambda self: pytest.fail("it is known"))
    assert open_it()[1].far == kept.far
    assert open_it("33")[1].far.stream_from == 33  # type: ignore[union-attr]
    kept = open_it("99999")[1]
    assert kept.far is not None
    assert kept.far.stream_from == 0
    assert any("--stream-prompts 99999 is more than the" in note for note in kept.notes)

    (tmp_path / opening.STREAM_FILE).write_text("[]")
    monkeypatch.setattr(FarStream, "timed", lambda self: ({8: 0.01, 64: 0.01, 256: 0.01}, 0.125))
    runner, kept = open_it()
    assert (kept.far.stream_from, kept.far.staging_bytes) == (0, 0)  # type: ignore[union-attr]
    assert runner._crossing.stream is None  # type: ignore[union-attr]
    assert any("The CPU computes prompts with the experts in RAM, too: copying" in note for note in kept.notes)


@needs_library
def test_wrong_products_of_the_device_leave_prompts_to_the_cpu_by_name(
    model_of: Callable[[str], tuple[Path, ModelSpec, list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, spec, layers = model_of("gpt_oss")
    model = load_model(path, spec, CPU, torch.float32, far_layers=layers, max_model_len=256)
    whole = far_module.from_lanes
    monkeypatch.setattr(far_module, "from_lanes", lambda *given: whole(*given) * 1.2)
    config = EngineConfig(device="cpu", stream_prompts="16")
    runner, kept = open_runner(model, spec, config, far_plan(spec, layers), MACHINE, lambda text: None)
    assert kept.far is not None
    assert (kept.far.stream_from, kept.far.staging_bytes) == (0, 0)
    assert any("experts in RAM, too: the results differ by" in note for note in kept.notes), kept.notes
    assert runner._crossing.stream is None  # type: ignore[union-attr]


@needs_library
def test_the_copy_and_the_processor_are_timed(model_of: Callable[[str], tuple[Path, ModelSpec, list[int]]]) -> None:
    path, _, layers = model_of("gpt_oss")
    stream = stream_of(opened(path, layers))
    assert stream.check() == ""
    cpu_s, copy_s = stream.timed()
    assert sorted(cpu_s)[:2] == [8, 64]
    assert all(seconds > 0 for seconds in (*cpu_s.values(), copy_s))
