"""Experts in RAM beside a device: the whole runner on a simulated device answers as the model on one device does.

The simulated device is the CPU with the buffers and steps of a GPU, and with copies to RAM that take effect only when
the host waits for them.
"""

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from localllm.kernels.cpu.native.library import native
from localllm.kernels.cpu.native.structures import MAX_ROWS
from localllm.models.layers.far import Crossing, FarExperts
from localllm.models.layers.moe import Experts
from localllm.models.loader import expert_bytes, load_model, resident_bytes
from localllm.models.spec.model_spec import ModelSpec
from localllm.models.weights.parameters import held_bytes, parts_of_kind, replace_tensors
from tests.golden_engine import CPU, Engine
from tests.runner.late_link import LateLink

FAMILIES = ("qwen3_moe", "gpt_oss", "deepseek_v3", "glm4_moe", "qwen2_moe", "llama4", "gemma4_moe", "nemotron_h")
PROMPTS = [[5 + 3 * i % 180 for i in range(length)] for length in (5, 40, 17)]


def opened(path: Path, far_layers: list[int], **options: int) -> Engine:
    engine = Engine(path, staged=True, far_layers=far_layers, **options)
    if far_layers:
        engine.model.crossing.link = LateLink()
    return engine


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


def test_bytes_are_counted_where_they_are(model_of: Callable[[str], tuple[Path, ModelSpec, list[int]]]) -> None:
    path, spec, layers = model_of("gpt_oss")
    sizes = expert_bytes(path, spec, CPU, torch.float32)
    assert sorted(sizes) == layers
    whole = resident_bytes(path, spec, CPU, torch.float32)
    model = load_model(path, spec, CPU, torch.float32, far_layers=layers[1:])
    far = list(parts_of_kind(model, FarExperts))
    assert held_bytes(model) == whole - sum(sizes[layer][0] for layer in layers[1:])
    assert [held_bytes(each.experts) for each in far] == [sizes[layer][1] for layer in layers[1:]]
    assert not model.unused_tensors

    moved: list[Tensor] = []
    replace_tensors(model, lambda tensor: moved.append(tensor) or tensor)  # as sleep does, which leaves RAM alone
    inside = {tensor.data_ptr() for tensor in (far[0].experts.gate_up_bias, far[0].experts.down_bias)}
    assert moved
    assert not inside & {tensor.data_ptr() for tensor in moved}


def experts_of(count: int = 6, hidden: int = 32, width: int = 24) -> Experts:
    torch.manual_seed(0)
    return Experts(torch.randn(count, 2 * width, hidden) * 0.3, torch.randn(count, hidden, width) * 0.3, "silu")


def chosen(rows: int, count: int = 6, top_k: int = 3) -> tuple[Tensor, Tensor, Tensor]:
    ids = torch.stack([torch.randperm(count)[:top_k] for _ in range(rows)]).int()
    return torch.randn(rows, 32), ids, torch.rand(rows, top_k)


@pytest.mark.skipif(native() is None, reason="no native library")
def test_a_row_has_the_same_bits_beside_any_neighbours(
    model_of: Callable[[str], tuple[Path, ModelSpec, list[int]]],
) -> None:
    far = FarExperts(experts_of(), Crossing(LateLink()), model_of("qwen3_moe")[1])
    x, ids, weights = chosen(MAX_ROWS)
    together = far(x, ids, weights).clone()
    for row in range(MAX_ROWS):
        one = slice(row, row + 1)
        assert torch.equal(far(x[one], ids[one], weights[one]), together[one])
    exact = experts_of()(x, ids, weights)
    assert (together - exact).abs().max() < 2e-6 * exact.abs().max()


@pytest.mark.skipif(native() is None, reason="no native library")
@pytest.mark.parametrize("ids", [[[1, 2, 3]] * 8, [[1, 1, 2]] * 8, [[4, 4, 4]] * 8, [[0, 1, 2], [3, 4, 5]] * 4])
def test_rows_that_share_experts_are_multiplied_as_each_alone(
    ids: list[list[int]], model_of: Callable[[str], tuple[Path, ModelSpec, list[int]]]
) -> None:
    """An expert's weights are read once for up to MAX_ROWS of its choices, here for up to 24."""
    far = FarExperts(experts_of(), Crossing(LateLink()), model_of("qwen3_moe")[1])
    x, _, weights = chosen(MAX_ROWS)
    asked = torch.tensor(ids, dtype=torch.int32)
    together = far(x, asked, weights).clone()
    exact = experts_of()(x, asked, weights)
    assert (together - exact).abs().max() < 2e-6 * exact.abs().max()
    for row in range(MAX_ROWS):
        one = slice(row, row + 1)
        assert torch.equal(far(x[one], asked[one], weights[one]), together[one])


def test_padding_reads_nothing(model_of: Callable[[str], tuple[Path, ModelSpec, list[int]]]) -> None:
    """Rows whose ids are -1 are zeros, also beside experts that are NaN."""
    experts = experts_of()
    experts.gate_up[-1] = torch.nan
    experts.down[-1] = torch.nan
    far = FarExperts(experts, Crossing(LateLink()), model_of("qwen3_moe")[1])
    for rows in (4, 3 * MAX_ROWS):
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
