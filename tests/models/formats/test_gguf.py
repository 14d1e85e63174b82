"""GGUF files: for every block type and a family of each kind the logits of what the file stands for, in fp32."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from gguf.constants import GGMLQuantizationType
from safetensors.torch import load_file, save_file
from torch import Tensor

from localllm.errors import CorruptModel, LocalLLMError, UnsupportedModel
from localllm.kernels.cpu import pack, stored_blocks
from localllm.kernels.cpu.stored_blocks import CpuStoredWeight, GGUFBlocks, reads_blocks
from localllm.kernels.gguf_blocks import BLOCK_TYPES
from localllm.kernels.gguf_linear import GGUFWeight
from localllm.kernels.linear import StackedWeight
from localllm.models.formats.gguf.checkpoint import config_of, metadata_of, open_gguf
from localllm.models.formats.gguf.file_names import parts_of
from localllm.models.formats.gguf.matrices import DEQUANTISED
from localllm.models.formats.registry import linear_format, quantization_notes
from localllm.models.loader import load_model, resident_bytes
from localllm.models.read_spec import read_spec
from localllm.models.weights.parameters import held_bytes
from localllm.text.gguf_tokenizer import tokenizer_of_gguf
from tests.gguf_files import GGUF_SIZES, blocks_of, write_gguf
from tests.models.formats.fuzz import damaged, survives
from tests.models.harness import CPU, Harness, assert_close, prompt, reference_logits
from tests.models.vision_models import make_model
from tests.tiny import VOCAB_SIZE, load_reference, make_tiny_model

SHAPE: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 256, "initializer_range": 0.1}
"""Every matrix has 256 inputs: one block of the largest types."""
PLAIN = ("F32", "F16", "BF16")
"""Each stores something in a way of its own; what a file cannot say is set to what is assumed then."""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A tiny checkpoint, made once for each of its shapes."""
    made: dict[str, Path] = {}

    def make(family: str = "llama", **overrides: Any) -> Path:
        key = f"{family} {overrides}"
        if key not in made:
            made[key] = make_tiny_model(tmp_path_factory.mktemp("source") / family, family, **overrides)
        return made[key]

    return make


def assert_agrees(file: Path, source: Path, meant: dict[str, Tensor], tmp_path: Path) -> Harness:
    """Logits are those of the model that is meant, and the bytes those that were predicted.

    Matrices stay as stored: what a CPU's own layouts round further has its tests beside kernels/cpu.
    """
    folder = tmp_path / "meant"
    shutil.copytree(source, folder)
    state = load_file(folder / "model.safetensors")
    save_file({n: meant.get(n, t).contiguous().clone() for n, t in state.items()}, folder / "model.safetensors")
    tokens = prompt(29)
    harness = Harness(file, cpu_weights="exact")
    _, ours = harness.prefill(tokens)
    theirs = reference_logits(load_reference(folder), tokens)
    error = float((ours - theirs).abs().max() / theirs.abs().max())
    assert error < 1e-4, f"relative error {error:.2e}"
    predicted = resident_bytes(file, harness.spec, CPU, torch.float32, cpu_weights="exact")
    assert held_bytes(harness.model) == predicted
    return harness


@pytest.mark.parametrize("block_type", [*PLAIN, *BLOCK_TYPES, *DEQUANTISED])
def test_every_block_type(block_type: str, source: Callable[..., Path], tmp_path: Path) -> None:
    folder, file = source(**SHAPE, num_hidden_layers=1), tmp_path / "model.gguf"
    meant = write_gguf(folder, file, block_type)
    harness = assert_agrees(file, folder, meant, tmp_path)
    is_quantised = reads_blocks(block_type) or block_type in BLOCK_TYPES
    assert isinstance(harness.model.layers[0].mlp.down.weight, GGUFWeight | GGUFBlocks) == is_quantised
    assert isinstance(harness.model.embedding.weight, GGUFWeight | GGUFBlocks) == is_quantised


@pytest.mark.parametrize("block_type", ["F32", "Q8_0"])
@pytest.mark.parametrize("family", GGUF_SIZES)
def test_every_kind_of_family(family: str, block_type: str, source: Callable[..., Path], tmp_path: Path) -> None:
    sizes = {"hidden_size": 96, "intermediate_size": 96} if family == "smollm" else {}
    folder, file = source(family, **sizes, **GGUF_SIZES[family]), tmp_path / "model.gguf"
    assert_agrees(file, folder, write_gguf(folder, file, block_type), tmp_path)


def test_rows_of_q_and_k_are_moved_in_files_of_a_glm_that_sees(source: Callable[..., Path], tmp_path: Path) -> None:
    """Their converter puts dimensions that rotate together half the rotated ones apart, as ggml's M-RoPE wants them."""
    folder, head_dim, rotated = source("glm4"), 16, 8
    head = [*range(0, rotated, 2), *range(1, rotated, 2), *range(rotated, head_dim)]

    def moved(rows: Tensor) -> Tensor:
        return rows.unflatten(0, (-1, head_dim))[:, head].flatten(0, 1).contiguous()

    state = load_file(folder / "model.safetensors")
    kinds = {f"{name}.{kind}" for name in ("q_proj", "k_proj") for kind in ("weight", "bias")}
    stored = {name: moved(t) if name.rpartition("self_attn.")[2] in kinds else t for name, t in state.items()}
    sees = shutil.copytree(folder, tmp_path / "sees")
    save_file(stored, sees / "model.safetensors")
    write_gguf(sees, tmp_path / "m.gguf", metadata={"glm4.rope.dimension_sections": [1, 1, 2, 0]})
    assert_agrees(tmp_path / "m.gguf", folder, {}, tmp_path)


@pytest.mark.parametrize("block_type", ["F32", "Q8_0"])
def test_muse_glimmer(block_type: str, tmp_path: Path) -> None:
    """Its converter adds one to the norms of layers, and writes the scale of queries as a norm of q."""
    changes = {"hidden_size": 96, "intermediate_size": 96, "qk_scale_factor": 2.5, "post_norm_eps": 1e-8}
    model = make_model(tmp_path / "meant", "MuseGlimmerConfig", **changes)
    text, file = model.config.text_config, tmp_path / "model.gguf"
    table = gguf.get_tensor_name_map(gguf.MODEL_ARCH.AFMOE, text.num_hidden_layers)
    added, plain = ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm"), torch.ones(text.head_dim)
    writer = gguf.GGUFWriter(file, "muse-glimmer")
    _write_muse_keys(writer, text)
    with torch.no_grad():
        for name, value in [*model.model.language_model.named_parameters(), ("lm_head.weight", model.lm_head.weight)]:
            stored = table.get_name(f"model.{name}".replace("model.lm_head", "lm_head"), (".weight",))
            kind = "F32" if value.ndim == 1 else block_type
            data, means = blocks_of(value + 1 if any(f".{part}." in stored for part in added) else value, kind)
            writer.add_tensor(stored, data, raw_dtype=GGMLQuantizationType[kind])
            value.copy_(means if value.ndim > 1 else value)
        for layer in range(text.num_hidden_layers):
            writer.add_tensor(f"blk.{layer}.attn_q_norm.weight", (plain * text.qk_scale_factor).numpy())
            writer.add_tensor(f"blk.{layer}.attn_k_norm.weight", plain.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    _, ours = Harness(file, cpu_weights="exact").prefill(prompt(47), chunk=16)
    assert_close(ours, reference_logits(model, prompt(47)))


@pytest.mark.parametrize("factors", [False, True])
@pytest.mark.parametrize("block_type", ["F32", "Q8_0"])
def test_step(block_type: str, factors: bool, tmp_path: Path) -> None:
    """Its converter adds one to all norms, and writes as many factors of frequencies as windowed layers have."""
    changes: dict[str, Any] = {"hidden_size": 96, "head_dim": 32, "moe_intermediate_size": 64, "share_expert_dim": 64}
    if factors:
        scaling = {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        scaling["original_max_position_embeddings"] = 64
        full = {"rope_type": "llama3", "rope_theta": 100.0, "partial_rotary_factor": 0.5, **scaling}
        changes["rope_parameters"] = {"full_attention": full, "sliding_attention": {"rope_theta": 1e4}}
        changes["rope_parameters"]["sliding_attention"]["rope_type"] = "default"
    model = make_model(tmp_path / "meant", "Step3p7Config", **changes)
    text, file = model.config.text_config, tmp_path / "model.gguf"
    table = gguf.get_tensor_name_map(gguf.MODEL_ARCH.STEP35, text.num_hidden_layers)
    writer = gguf.GGUFWriter(file, "step35")
    _write_step_keys(writer, text)
    state = load_file(tmp_path / "meant" / "model.safetensors")
    rename = {".moe.router_bias": ".moe.router_bias.bias", ".moe.gate.weight": ".moe.gate.weight"}
    for name, value in state.items():
        if name.startswith(("vision_model.", "vit_large_projector.")):
            continue
        stored = table.get_name(name.replace(*next((r for r in rename.items() if r[0] in name), ("", ""))),
                                (".weight", ".bias"))  # fmt: skip
        assert stored is not None, name
        own = "F32" if value.ndim == 1 or "ffn_gate_inp" in stored or value.shape[-1] % 32 else block_type
        data, means = blocks_of(value + 1 if name.endswith("norm.weight") else value, own)
        writer.add_tensor(stored, data, raw_dtype=GGMLQuantizationType[own])
        if value.ndim > 1:
            state[name] = means.to(value.dtype)
    if factors:
        inverse = model.model.language_model.rotary_emb.full_attention_inv_freq
        plain = 100.0 ** (-torch.arange(0, 16, 2) / 16)
        writer.add_tensor("rope_freqs.weight", torch.cat((plain / inverse, torch.ones(8))).float().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    save_file(state, tmp_path / "meant" / "model.safetensors", {"format": "pt"})
    meant = type(model).from_pretrained(tmp_path / "meant", attn_implementation="eager", dtype=torch.float32).eval()
    _, ours = Harness(file, cpu_weights="exact").prefill(prompt(47), chunk=16)
    assert_close(ours, reference_logits(meant, prompt(47)))


def _write_step_keys(writer: gguf.GGUFWriter, text: Any) -> None:
    slides = [kind == "sliding_attention" for kind in text.layer_types]
    full = text.num_attention_heads if not text.is_heterogeneous else text.per_layer_config[0].num_attention_heads
    writer.add_block_count(text.num_hidden_layers)
    writer.add_context_length(text.max_position_embeddings)
    writer.add_embedding_length(text.hidden_size)
    writer.add_feed_forward_length(text.intermediate_size)
    writer.add_head_count([text.num_sliding_attention_heads if windowed else full for windowed in slides])
    writer.add_head_count_kv([text.num_key_value_heads] * len(slides))
    writer.add_key_length(text.head_dim)
    writer.add_value_length(text.head_dim)
    writer.add_vocab_size(text.vocab_size)
    writer.add_layer_norm_rms_eps(text.rms_norm_eps)
    writer.add_rope_freq_base(text.rope_parameters["full_attention"]["rope_theta"])
    writer.add_rope_freq_base_swa(text.rope_parameters["sliding_attention"]["rope_theta"])
    writer.add_sliding_window(text.sliding_window)
    writer.add_sliding_window_pattern(slides)
    writer.add_expert_count(text.n_routed_experts)
    writer.add_expert_used_count(text.num_experts_per_tok)
    writer.add_expert_feed_forward_length(text.moe_intermediate_size)
    writer.add_expert_shared_feed_forward_length(text.share_expert_dim)
    writer.add_expert_weights_scale(text.moe_router_scaling_factor)
    writer.add_leading_dense_block_count(1)
    writer.add_array("step35.swiglu_clamp_exp", [float(limit or 0.0) for limit in text.swiglu_limits])
    writer.add_array("step35.swiglu_clamp_shexp", [float(limit or 0.0) for limit in text.swiglu_limits_shared])


@pytest.mark.parametrize(
    ("architecture", "metadata", "words"),
    [
        ("jamba", {}, ("JambaForCausalLM", "its name without -GGUF")),
        ("minicpm3", {"general.base_model.0.repo_url": "https://huggingface.co/o/Flash"}, ("Use o/Flash", "16 bits")),
        ("kimi-linear", {"general.source.huggingface.repository": "o/five.3"}, ("KimiLinear", "Use o/five.3")),
        ("kimi-linear", {"general.source.repo_url": "https://elsewhere/o/m"}, ("KimiLinear", "without -GGUF")),
        ("unheard-of", {}, ("which is not supported", "without -GGUF")),
    ],
)
def test_a_family_without_a_decoder_is_refused_with_the_repository_to_use(
    architecture: str, metadata: dict[str, str], words: tuple[str, ...], tmp_path: Path
) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", architecture)
    for key, value in metadata.items():
        writer.add_string(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UnsupportedModel) as refused:
        read_spec(tmp_path / "m.gguf")
    told = " ".join((refused.value.what, refused.value.why, refused.value.hint))
    assert all(word in told for word in words), told


def _write_muse_keys(writer: gguf.GGUFWriter, text: Any) -> None:
    writer.add_block_count(text.num_hidden_layers)
    writer.add_context_length(text.max_position_embeddings)
    writer.add_embedding_length(text.hidden_size)
    writer.add_feed_forward_length(text.intermediate_size)
    writer.add_head_count(text.num_attention_heads)
    writer.add_head_count_kv(text.num_key_value_heads)
    writer.add_key_length(text.head_dim)
    writer.add_value_length(text.head_dim)
    writer.add_vocab_size(text.vocab_size)
    writer.add_layer_norm_rms_eps(text.rms_norm_eps)
    writer.add_rope_freq_base(text.rope_parameters["rope_theta"])
    writer.add_sliding_window(text.sliding_window)
    writer.add_sliding_window_pattern(4)
    writer.add_logit_scale(text.output_multiplier)
    writer.add_final_logit_softcapping(text.final_logit_softcapping)


@pytest.mark.parametrize("block_type", ["Q8_0", "Q4_K", "Q6_K", "IQ2_S"])
def test_bytes_are_predicted_for_the_layouts_of_this_cpu(
    block_type: str, source: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "model.gguf"
    sizes = {**SHAPE, "num_hidden_layers": 1, "tie_word_embeddings": True, "max_position_embeddings": 16}
    write_gguf(source(**sizes), file, block_type)
    spec = read_spec(file)
    for dtype in (torch.float32, torch.bfloat16):
        for mode in ("fast", "small"):
            held = held_bytes(load_model(file, spec, CPU, dtype, cpu_weights=mode))
            assert held == resident_bytes(file, spec, CPU, dtype, cpu_weights=mode)
    if block_type in ("Q6_K", "IQ2_S") and reads_blocks(block_type):
        with open_gguf(file) as checkpoint:
            assert held <= 1.05 * sum(info.num_bytes for info in checkpoint.tensors.values())
    if block_type == "Q6_K" and reads_blocks(block_type):  # in `small` also where bytes are multiplied fast
        monkeypatch.setattr(pack, "has_int8", lambda: True)
        model = load_model(file, spec, CPU, torch.float32, cpu_weights="small")
        assert held_bytes(model) == resident_bytes(file, spec, CPU, torch.float32, cpu_weights="small")


@pytest.mark.skipif(not reads_blocks("IQ2_S"), reason="there is no native library here")
def test_types_with_wrong_products_are_read_another_way(
    source: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    right = stored_blocks.native_linear
    monkeypatch.setattr(stored_blocks, "native_linear", lambda *args, **how: 1.01 * right(*args, **how))
    monkeypatch.setattr(stored_blocks, "is_right", stored_blocks.is_right.__wrapped__)  # forgets what was found
    file = tmp_path / "model.gguf"
    others = {r"attn_v\.": "TQ2_0", "ffn": "Q5_K", "token_embd": "Q4_K"}
    write_gguf(source(**SHAPE, num_hidden_layers=1), file, "IQ2_S", others=others)
    spec = read_spec(file)
    model = load_model(file, spec, CPU, torch.float32)
    assert isinstance(model.layers[0].attention.qkv.weight, Tensor)  # one matrix of two types
    assert not isinstance(model.layers[0].mlp.down.weight, CpuStoredWeight)
    assert isinstance(model.embedding.weight, GGUFBlocks)  # packed and read, not multiplied as stored
    assert held_bytes(model) == resident_bytes(file, spec, CPU, torch.float32)
    assert {block_type for block_type in others.values() if f"blocks of {block_type}:" in caplog.text} == {
        "TQ2_0",
        "Q5_K",
    }
    [note] = quantization_notes(spec.quantization, "cpu")
    assert "IQ2_S, TQ2_0" in note or "TQ2_0, IQ2_S" in note


def test_parts_of_a_layer_in_different_types(source: Callable[..., Path], tmp_path: Path) -> None:
    """As in Q4_K_M files: v in 6 bits beside q and k in 4, the embedding in 6."""
    folder, file = source(**SHAPE, num_hidden_layers=1), tmp_path / "model.gguf"
    meant = write_gguf(folder, file, "Q4_K", others={r"attn_v\.": "Q6_K", "token_embd": "Q6_K", "output": "F16"})
    harness = assert_agrees(file, folder, meant, tmp_path)
    qkv = harness.model.layers[0].attention.qkv.weight
    assert isinstance(qkv, StackedWeight)
    assert [part.block_type for part in qkv.parts] == ["Q4_K", "Q6_K"]


def test_a_tied_head_is_the_embedding(source: Callable[..., Path], tmp_path: Path) -> None:
    folder, file = source(**SHAPE, num_hidden_layers=1, tie_word_embeddings=True), tmp_path / "model.gguf"
    harness = assert_agrees(file, folder, write_gguf(folder, file, "Q6_K"), tmp_path)
    assert harness.model.lm_head.weight is harness.model.embedding.weight


KEPT = {"Q8_0": 0.01, "Q6_K": 0.01, "Q4_K": 1e-3, "IQ2_S": 0.0}
"""What the rows of a table that is packed for its head may differ from the file's, relative to their norm."""


@pytest.mark.skipif(not reads_blocks("Q8_0"), reason="there is no native library here")
@pytest.mark.parametrize("block_type", KEPT)
def test_a_tied_table_is_held_once_on_a_cpu(block_type: str, source: Callable[..., Path], tmp_path: Path) -> None:
    folder, file = source(**SHAPE, num_hidden_layers=1, tie_word_embeddings=True), tmp_path / "model.gguf"
    write_gguf(folder, file, block_type)
    spec, tokens = read_spec(file), torch.tensor([0, 5, 63, 64, 5, VOCAB_SIZE - 1])
    model, exact = (load_model(file, spec, CPU, torch.float32, cpu_weights=mode) for mode in ("fast", "exact"))
    assert model.embedding.weight is model.lm_head.weight
    got, wanted = (each.embedding(tokens, torch.arange(len(tokens))) for each in (model, exact))
    assert float((got - wanted).norm() / wanted.norm()) <= KEPT[block_type]
    assert got.data_ptr() != model.embedding(tokens, torch.arange(len(tokens))).data_ptr()


class TestSplitFiles:
    @pytest.fixture
    def parts(self, source: Callable[..., Path], tmp_path: Path) -> list[Path]:
        write_gguf(source(), tmp_path / "model.gguf", parts=3)
        return [tmp_path / name for name in parts_of("model-00001-of-00003.gguf")]

    def test_any_part_names_the_model(self, parts: list[Path]) -> None:
        tokens = prompt(9)
        first, last = (Harness(part).prefill(tokens)[1] for part in (parts[0], parts[-1]))
        assert torch.equal(first, last)

    def test_a_missing_part_is_named(self, parts: list[Path]) -> None:
        parts[1].unlink()
        with pytest.raises(CorruptModel, match=r"1 of the 3 parts.*model-00002-of-00003\.gguf"):
            read_spec(parts[0])

    def test_a_renamed_part(self, parts: list[Path]) -> None:
        alone = parts[0].rename(parts[0].with_name("model.gguf"))
        with pytest.raises(CorruptModel, match="one of 3 parts by its metadata, and one of 1"):
            read_spec(alone)

    def test_parts_in_the_wrong_order(self, parts: list[Path]) -> None:
        parts[1].rename(parts[0].with_name("x"))
        shutil.copy(parts[2], parts[1])
        with pytest.raises(CorruptModel, match="part 2 \\(counted from 0\\) by its metadata, and 1 by its name"):
            read_spec(parts[0])


class TestConfig:
    def test_of_a_llama(self, source: Callable[..., Path], tmp_path: Path) -> None:
        write_gguf(source(), tmp_path / "m.gguf", "Q8_0", metadata={"general.file_type": 7})
        config = config_of(tmp_path / "m.gguf")
        quantization = config.pop("quantization_config")
        assert quantization["label"] == "Q8_0"
        assert quantization["types"] == {"Q8_0": 16}
        assert config["eos_token_id"] == [2, 0]  # <|im_end|>, which the file names, and <|endoftext|>
        assert config["max_position_embeddings"] == 2048
        assert config["dtype"] == "bfloat16"
        assert read_spec(tmp_path / "m.gguf").quantization == quantization

    def test_of_a_gemma4(self, source: Callable[..., Path], tmp_path: Path) -> None:
        """Sizes that differ between layers, and ends of an answer of which one is stored as a visible token."""
        tokens = ["<eos>", "<turn|>", "<|tool_response>", "</s>", *(f"t{i}" for i in range(508))]
        metadata = {
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.token_type": [3, 3, 4, 4, *[1] * 508],
            "tokenizer.ggml.eos_token_id": 0,
        }
        path = source("gemma4", **GGUF_SIZES["gemma4"])
        write_gguf(path, tmp_path / "m.gguf", metadata=metadata)
        config = config_of(tmp_path / "m.gguf")
        assert config["eos_token_id"] == [0, 1, 2]
        spec, wanted = read_spec(tmp_path / "m.gguf"), read_spec(path)
        for name in ("layer_kv_shapes", "kv_source", "layer_widths", "per_layer_input", "rope"):
            assert getattr(spec, name) == getattr(wanted, name), name
        assert spec.local_rope is not None
        assert (spec.local_rope.theta, spec.local_rope.rotary_dim) == (10_000.0, 16)

    def test_frequencies_that_are_scaled_one_by_one_are_refused(
        self, source: Callable[..., Path], tmp_path: Path
    ) -> None:
        odd = {"rope_freqs.weight": torch.tensor([1.0, 2.0, *[1e30] * 14])}
        write_gguf(source("gemma4", **GGUF_SIZES["gemma4"]), tmp_path / "m.gguf", tensors=odd)
        with pytest.raises(UnsupportedModel, match="single frequencies"):
            read_spec(tmp_path / "m.gguf")

    @pytest.mark.parametrize(("block_type", "dtype"), [("F32", "float32"), ("F16", "float16"), ("BF16", "bfloat16")])
    def test_plain_matrices_are_no_quantisation(
        self, block_type: str, dtype: str, source: Callable[..., Path], tmp_path: Path
    ) -> None:
        write_gguf(source(), tmp_path / "m.gguf", block_type)
        spec = read_spec(tmp_path / "m.gguf")
        assert spec.quantization is None
        assert spec.dtype == dtype

    @pytest.mark.parametrize(
        "rope",
        [
            {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0},
            {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 512},
        ],
        ids=lambda rope: rope["rope_type"],
    )
    def test_scaled_rotary_embedding(self, rope: dict[str, Any], source: Callable[..., Path], tmp_path: Path) -> None:
        folder, file = source("qwen2", rope_parameters=rope), tmp_path / "m.gguf"
        assert_agrees(file, folder, write_gguf(folder, file), tmp_path)

    def test_factors_of_each_dimension(self, source: Callable[..., Path], tmp_path: Path) -> None:
        """Llama 3's scaling comes as a tensor. Twice the factors everywhere is linear scaling by two."""
        rope = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 2.0}
        linear, plain = source("llama", rope_parameters=rope), tmp_path / "m.gguf"
        write_gguf(source(), plain, tensors={"rope_freqs.weight": torch.full((8,), 2.0)})
        _, ours = Harness(plain).prefill(prompt(20))
        _, wanted = Harness(linear).prefill(prompt(20))
        assert (ours - wanted).abs().max() < 1e-5

    def test_factors_that_are_none(self, source: Callable[..., Path], tmp_path: Path) -> None:
        write_gguf(source(), tmp_path / "m.gguf", tensors={"rope_freqs.weight": torch.full((8,), -1.0)})
        with pytest.raises(CorruptModel, match=r"rope_freqs\.weight.*not positive"):
            read_spec(tmp_path / "m.gguf")

    def test_a_hole_where_factors_should_be_can_be_fitted_and_not_loaded(
        self, source: Callable[..., Path], tmp_path: Path
    ) -> None:
        """A look at a file on the hub fetches its header only."""
        write_gguf(source(), file := tmp_path / "m.gguf", tensors={"rope_freqs.weight": torch.zeros(8)})
        spec = read_spec(file)
        assert resident_bytes(file, spec, CPU, torch.float32) > 0
        with pytest.raises(CorruptModel, match=r"does not use.*rope_freqs\.weight"):
            load_model(file, spec, CPU, torch.float32)

    def test_what_runs_is_said(self, source: Callable[..., Path], tmp_path: Path) -> None:
        write_gguf(source(**SHAPE, num_hidden_layers=1), tmp_path / "m.gguf", "Q4_K", others={"ffn_down": "IQ2_S"})
        format = linear_format(read_spec(tmp_path / "m.gguf").quantization)
        assert format is not None
        assert format.name == "GGUF Q4_K (8 Q4_K, 1 IQ2_S)"
        assert "repacked to 4 bits" in format.runs_as
        assert any("1 matrices in IQ2_S" in note for note in format.notes_on("cuda"))
        assert bool(format.notes_on("cpu")) != reads_blocks("IQ2_S")


class TestBadFiles:
    @pytest.fixture
    def file(self, source: Callable[..., Path], tmp_path: Path) -> Callable[..., Path]:
        def write(**changes: Any) -> Path:
            write_gguf(source(), tmp_path / "m.gguf", **changes)
            return tmp_path / "m.gguf"

        return write

    @pytest.mark.parametrize(
        ("changes", "error", "message"),
        [
            ({"general.architecture": "mamba"}, UnsupportedModel, "GGUF file of 'mamba'"),
            ({"llama.block_count": "two"}, CorruptModel, r"llama\.block_count.*'two', not a whole number"),
            ({"llama.attention.head_count_kv": [2, 1]}, UnsupportedModel, r"layers that differ.*\[1, 2\]"),
            ({"llama.attention.head_count": 0}, CorruptModel, r"head_count.*It is 0"),
            ({"llama.rope.scaling.type": "odd"}, UnsupportedModel, "'odd'"),
            ({"llama.embedding_length": 128}, CorruptModel, r"token_embd.*\[512, 64\].*\[512, 128\]"),
        ],
    )
    def test_metadata_that_does_not_fit(
        self, changes: dict[str, Any], error: type[LocalLLMError], message: str, file: Callable[..., Path]
    ) -> None:
        path = file(metadata=changes)
        with pytest.raises(error, match=message):
            load_model(path, read_spec(path), CPU, torch.float32)

    def test_a_type_that_no_kernel_and_no_reference_reads(self, file: Callable[..., Path]) -> None:
        path = file(tensors={"blk.0.attn_q.weight": torch.zeros(64, 64, dtype=torch.int8)})
        with pytest.raises(UnsupportedModel, match=r"blk\.0\.attn_q\.weight.*I8"):
            load_model(path, read_spec(path), CPU, torch.float32)

    def test_a_tensor_that_nobody_knows(self, file: Callable[..., Path]) -> None:
        path = file(tensors={"blk.0.surprise.weight": torch.zeros(3)})
        with pytest.raises(CorruptModel, match=r"1 tensors.*blk\.0\.surprise\.weight"):
            load_model(path, read_spec(path), CPU, torch.float32)


def test_metadata_as_plain_values(source: Callable[..., Path], tmp_path: Path) -> None:
    write_gguf(source(), tmp_path / "m.gguf")
    values = metadata_of(tmp_path / "m.gguf")
    assert len(values["tokenizer.ggml.tokens"]) == 512
    assert values["llama.block_count"] == 2


def test_the_model_does_not_keep_the_file(source: Callable[..., Path], tmp_path: Path) -> None:
    """Rewriting a file in place must not change a model that is being served."""
    write_gguf(source(), file := tmp_path / "m.gguf", "F16")
    harness = Harness(file)
    _, before = harness.prefill([5, 6, 7, 8])
    with file.open("r+b") as stream:
        stream.seek(-100_000, 2)
        stream.write(b"\x42" * 100_000)
    _, after = harness.prefill([5, 6, 7, 8])
    assert torch.equal(before, after)


def test_less_alignment_than_a_type_has(source: Callable[..., Path], tmp_path: Path) -> None:
    write_gguf(source(), tmp_path / "m.gguf", metadata={"general.alignment": 1})
    with open_gguf(tmp_path / "m.gguf") as checkpoint:
        assert all(checkpoint.tensor(name).isfinite().all() for name in checkpoint.tensors)


def test_damaged_files_are_refused_or_described(source: Callable[..., Path], tmp_path: Path) -> None:
    """Whatever metadata says: a spec and a tokenizer, or one of our errors."""
    write_gguf(source(), file := tmp_path / "m.gguf", "Q8_0")
    original = file.read_bytes()
    tokens, last = original.index(b"tokenizer.ggml.tokens"), original.rindex(b"blk.1.") + 100
    read = 0
    for start, stop in ((24, tokens), (tokens, last)):
        for data in damaged([original[start:stop]], 80, seed=start):
            file.write_bytes(original[:start] + data + original[stop:])
            read += survives(lambda path: (read_spec(path), tokenizer_of_gguf(metadata_of(path))), file) is not None
    assert 5 < read < 155


@pytest.mark.skipif("LLAMA_CPP_BIN" not in os.environ, reason="LLAMA_CPP_BIN names no folder with llama.cpp's binaries")
def test_llama_cpp_agrees() -> None:
    script = Path(__file__).parents[3] / "scripts" / "check_gguf_peer"
    types = ["F32", "Q8_0", "Q4_K_M"]
    command = [sys.executable, script, "--binaries", os.environ["LLAMA_CPP_BIN"], "--types", *types]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(f"| {name} |" in done.stdout for name in types)
