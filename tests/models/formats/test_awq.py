"""AWQ: the gemm layout of AutoAWQ, with and without zero points, and files that contradict themselves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from localllm.errors import CorruptModel, LocalLLMError, UnsupportedModel
from localllm.kernels.int4_linear import Int4Weight
from localllm.models.read_spec import read_spec
from tests.models.formats.quantised import (
    SHAPE,
    Saved,
    agrees,
    assert_refused,
    quantised_matrices,
    rewrite,
    save_quantised,
    set_quantization,
)
from tests.models.formats.stores import AWQ, awq
from tests.tiny import make_tiny_model


@pytest.fixture
def saved(source: Path, tmp_path: Path) -> Saved:
    return save_quantised(source, tmp_path / "model", AWQ, awq(32))


@pytest.mark.parametrize("group", [32, 64, 128, -1])
def test_groups(group: int, source: Path, tmp_path: Path) -> None:
    saved = save_quantised(source, tmp_path / "model", {**AWQ, "group_size": group}, awq(group))
    matrices = quantised_matrices(agrees(saved))
    assert len(matrices) == 4
    assert all(isinstance(matrix, Int4Weight) for matrix in matrices)


def test_without_zero_points(source: Path, tmp_path: Path) -> None:
    config = {**AWQ, "zero_point": False}
    agrees(save_quantised(source, tmp_path / "model", config, awq(32, zeros=False)))


@pytest.mark.parametrize("said", [{"zero_point": True}, {}])
def test_missing_zero_points_are_refused_unless_the_config_says_so(
    said: dict[str, Any], source: Path, tmp_path: Path
) -> None:
    plain = {name: value for name, value in AWQ.items() if name != "zero_point"}
    saved = save_quantised(source, tmp_path / "model", {**plain, **said}, awq(32, zeros=False))
    assert_refused(saved, CorruptModel, r"lacks .*\.qzeros")


def test_the_older_layout_with_its_settings_in_a_file_beside_the_config(source: Path, tmp_path: Path) -> None:
    saved = save_quantised(source, tmp_path / "model", AWQ, awq(32))
    config = json.loads((saved.path / "config.json").read_text())
    del config["quantization_config"]
    (saved.path / "config.json").write_text(json.dumps(config))
    beside = {"zero_point": True, "q_group_size": 32, "w_bit": 4, "version": "GEMM"}
    (saved.path / "quant_config.json").write_text(json.dumps(beside))
    assert len(quantised_matrices(agrees(saved))) == 4


def test_modules_that_are_not_converted(source: Path, tmp_path: Path) -> None:
    """v stays plain, so q and k are one matrix and v another; the head is quantised."""
    config = {**AWQ, "modules_to_not_convert": ["v_proj"]}
    agrees(save_quantised(source, tmp_path / "model", config, awq(32, skip="v_proj")))


def test_fused_matrices_of_a_family(tmp_path: Path) -> None:
    """Phi-3 stores q, k and v as one and gate and up as one."""
    source = make_tiny_model(tmp_path / "source", "phi3", **SHAPE, rope_parameters=None, sliding_window=None)
    agrees(save_quantised(source, tmp_path / "model", AWQ, awq(32)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version": "gemv"}, "gemv layout.*Supported: the gemm layout"),
        ({"version": "exllama"}, "exllama layout"),
        ({"backend": "llm-awq"}, "llm-awq layout"),
        ({"bits": 3}, "3 bits"),
        ({"group_size": "128"}, "group_size = '128'"),
    ],
)
def test_variants_that_are_refused(changes: dict[str, Any], message: str, saved: Saved) -> None:
    set_quantization(saved.path, {**AWQ, **changes})
    with pytest.raises(LocalLLMError, match=message):
        read_spec(saved.path)


Q = "model.layers.0.self_attn.q_proj"
DAMAGE = {
    "scales": (lambda t: t.pop(f"{Q}.scales"), rf"lacks {Q}\.scales"),
    "groups": (lambda t: t.update({f"{Q}.scales": t[f"{Q}.scales"][:3].clone()}), r"shape \[3, 128\].*\[4, 128\]"),
    "zeros": (lambda t: t.update({f"{Q}.qzeros": t[f"{Q}.qzeros"].half()}), "qzeros is stored as F16"),
    "zero shape": (lambda t: t.update({f"{Q}.qzeros": t[f"{Q}.qzeros"][:, :4].clone()}), r"\[4, 4\].*\[4, 16\]"),
    "words": (lambda t: t.update({f"{Q}.qweight": t[f"{Q}.qweight"][:64].clone()}), r"scales has shape \[4, 128\]"),
    "rank": (lambda t: t.update({f"{Q}.qweight": t[f"{Q}.qweight"].flatten()}), "2 dimensions"),
    "nan": (lambda t: t[f"{Q}.scales"].fill_(torch.nan), "NaN or infinite"),
    "both": (lambda t: t.update({f"{Q}.weight": torch.zeros(128, 128)}), rf"1 tensors.*{Q}\.weight"),
    "outputs": (
        lambda t: t.update({n: t[n][..., : t[n].shape[-1] // 2].clone() for n in list(t) if n.startswith(f"{Q}.q")}
                           | {f"{Q}.scales": t[f"{Q}.scales"][:, :64].clone()}),
        r"shape \[192, 128\].*\[256, 128\]",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGE)
def test_damaged_files_are_refused_by_name(name: str, saved: Saved) -> None:
    change, message = DAMAGE[name]
    rewrite(saved.path, change)
    assert_refused(saved, CorruptModel, message)


def test_a_config_that_names_awq_over_plain_weights(source: Path, tmp_path: Path) -> None:
    saved = save_quantised(source, tmp_path / "model", AWQ, lambda stem, weight: None)
    assert_refused(saved, CorruptModel, r"AWQ.*none of its matrices")


def test_groups_that_cannot_be_held(source: Path, tmp_path: Path) -> None:
    config = {**AWQ, "group_size": 8}
    saved = save_quantised(source, tmp_path / "model", config, awq(8))
    assert_refused(saved, UnsupportedModel, "groups of 8")


def test_truncated_file(saved: Saved) -> None:
    file = saved.path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    assert_refused(saved, CorruptModel, "cut short")


def test_weights_do_not_look_into_the_file(saved: Saved) -> None:
    """A checkpoint that is rewritten in place must not change a model that is being served."""
    harness = agrees(saved)
    _, before = harness.prefill([5, 6, 7])
    size = sum(tensor.nbytes for tensor in load_file(saved.path / "model.safetensors").values())
    with (saved.path / "model.safetensors").open("r+b") as stream:
        stream.seek(-size, 2)
        stream.write(b"\x42" * size)
    _, after = harness.prefill([5, 6, 7])
    assert torch.equal(before, after)
