"""Experts and latents as checkpoints hold them: one tensor an expert or one for all, in few bits, for either device."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from localllm.config.settings import EngineConfig
from localllm.errors import CorruptModel, UnsupportedModel, UnsupportedOption
from localllm.kernels.gguf_linear import GGUFWeight
from localllm.kernels.launch import LaunchOptions, launching_with
from localllm.kernels.moe import weights as expert_weights
from localllm.kernels.moe.weights import PlanarExperts, ScaledExperts
from localllm.models.fit import kv_bytes_per_token, plan_memory
from localllm.models.formats import fp4
from localllm.models.layers import latent_attention
from localllm.models.loader import load_model, resident_bytes
from localllm.models.read_spec import read_spec, spec_of_config
from localllm.models.spec.latent import heads_at_once
from localllm.models.spec.model_spec import ModelSpec
from localllm.models.weights import weights as weights_module
from localllm.models.weights.parameters import held_bytes
from localllm.runner.kv_cache import KVCache
from tests.kv import of_each
from tests.models.harness import CPU, Harness, ModelHarness, gpu_machine, prompt, reference_logits
from tests.models.stored_experts import WAYS, PathOf, copy, fuse, quantise_experts, rewrite
from tests.models.stored_experts import gpt_oss as gpt_oss
from tests.models.stored_experts import wide_moe as wide_moe
from tests.tiny import load_reference, tiny_config

CUDA = torch.device("cuda")  # only asked what would be held there


def logits(path: Path) -> Tensor:
    return Harness(path).prefill(prompt(21))[1]


def assert_as_transformers(model: ModelHarness, dense: Path) -> None:
    _, ours = model.prefill(prompt(21))
    theirs = reference_logits(load_reference(dense), prompt(21))
    assert float((ours - theirs).abs().max() / theirs.abs().max()) < 1e-4


def load_as_for_kernels(path: Path, monkeypatch: pytest.MonkeyPatch, quantization: str | None = None) -> Any:
    """The model on the CPU, its experts as a GPU's kernels want them."""
    for module in (expert_weights, weights_module):
        monkeypatch.setattr(module, "needs_stacked_experts", lambda device: True)
    monkeypatch.setattr(fp4, "reads_blocks", lambda block_type: False)
    return load_model(path, read_spec(path), CPU, torch.float32, quantization=quantization)


# ---- how they are stored


def test_one_tensor_for_all_experts(tiny_model_path: PathOf, tmp_path: Path) -> None:
    path = copy(tiny_model_path("qwen3_moe"), tmp_path / "model")
    rewrite(path, lambda t: fuse(t, "mlp", ("gate_proj", "up_proj", "down_proj"), "mlp"))
    assert torch.equal(logits(path), logits(tiny_model_path("qwen3_moe")))


def test_mixtral_in_the_names_of_newer_tools(tiny_model_path: PathOf, tmp_path: Path) -> None:
    path = copy(tiny_model_path("mixtral"), tmp_path / "model")

    def change(tensors: dict[str, Tensor]) -> None:
        fuse(tensors, "block_sparse_moe", ("w1", "w3", "w2"), "mlp")
        for name in [name for name in tensors if "block_sparse_moe.gate" in name]:
            tensors[name.replace("block_sparse_moe", "mlp")] = tensors.pop(name)

    assert torch.equal(logits(rewrite(path, change)), logits(tiny_model_path("mixtral")))


def test_mixtral_is_stored_in_the_names_of_its_first_files(tiny_model_path: PathOf) -> None:
    assert "model.layers.1.block_sparse_moe.experts.3.w2.weight" in load_file(
        tiny_model_path("mixtral") / "model.safetensors"
    )


def test_layers_that_predict_further_tokens_are_left_alone(tiny_model_path: PathOf, tmp_path: Path) -> None:
    path = copy(tiny_model_path("glm4_moe"), tmp_path / "model")
    rewrite(path, lambda t: t.update({"model.layers.2.eh_proj.weight": torch.zeros(64, 128)}))
    assert torch.equal(logits(path), logits(tiny_model_path("glm4_moe")))


def test_experts_stay_what_they_are_beside_a_model_in_16_bits(tiny_model_path: PathOf) -> None:
    """The correction bias decides between experts: it is used as it is stored."""
    path = tiny_model_path("deepseek_v3")
    model = load_model(path, read_spec(path), CPU, torch.bfloat16)
    stored = load_file(path / "model.safetensors")["model.layers.0.mlp.gate.e_score_correction_bias"]
    layer: Any = model.layers[0]  # type: ignore[union-attr]
    assert torch.equal(layer.mlp.correction_bias, stored.float())
    assert layer.mlp.router.weight.dtype == torch.float32


# ---- in few bits


def test_gpt_oss_keeps_its_four_bits(gpt_oss: tuple[Path, Path]) -> None:
    packed, dense = gpt_oss
    harness = Harness(packed)
    assert_as_transformers(harness, dense)
    assert held_bytes(harness.model) == resident_bytes(packed, harness.spec, CPU, torch.float32)
    experts: Any = harness.model.layers[0].mlp.experts  # type: ignore[attr-defined]
    assert len(experts.down) == 4
    assert not any(isinstance(matrix, Tensor) for matrix in experts.down)


def test_gpt_oss_for_kernels(gpt_oss: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    packed, dense = gpt_oss
    model = load_as_for_kernels(packed, monkeypatch)
    experts = model.layers[0].mlp.experts
    assert isinstance(experts.gate_up, PlanarExperts)
    assert isinstance(experts.gate_up.weight, GGUFWeight)
    assert experts.gate_up.shape == (4, 192, 64)
    assert experts.gate_up.nbytes == 4 * 192 * (128 // 2 + 128 // 32 * 2)  # rows of 64 are filled up to 128
    assert_as_transformers(ModelHarness(model), dense)
    assert held_bytes(model) == resident_bytes(packed, model.spec, CUDA, torch.float32)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.__delitem__("model.layers.0.mlp.experts.down_proj_scales"), r"lacks .*down_proj_scales"),
        (
            lambda t: t.update(
                {"model.layers.0.mlp.experts.down_proj_scales": torch.zeros(4, 64, 2, dtype=torch.uint8)}
            ),
            r"down_proj_scales has shape \[4, 64, 2\].*\[4, 64, 3\]",
        ),
        (
            lambda t: t.update(
                {"model.layers.1.mlp.experts.down_proj_blocks": torch.zeros(4, 64, 48, dtype=torch.uint8)}
            ),
            r"down_proj_blocks has shape \[4, 64, 48\]",
        ),
    ],
    ids=["no scales", "too few scales", "flat blocks"],
)
def test_damaged_mxfp4(gpt_oss: tuple[Path, Path], change: Any, message: str, tmp_path: Path) -> None:
    path = rewrite(copy(gpt_oss[0], tmp_path / "model"), change)
    with pytest.raises(CorruptModel, match=message):
        load_model(path, read_spec(path), CPU, torch.float32)


@pytest.mark.parametrize("way", WAYS)
def test_quantised_experts(way: str, wide_moe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, store, kind = WAYS[way]
    packed, dense = quantise_experts(wide_moe, tmp_path, config, store)
    harness = Harness(packed)
    assert_as_transformers(harness, dense)
    assert held_bytes(harness.model) == resident_bytes(packed, harness.spec, CPU, torch.float32)
    model = load_as_for_kernels(packed, monkeypatch)
    assert isinstance(model.layers[1].mlp.experts.gate_up, kind)
    assert_as_transformers(ModelHarness(model), dense)
    input_scales = 6 * 2 * 4 if way == "fp8 static" else 0  # which no kernel for experts reads: counted and not kept
    assert held_bytes(model) == resident_bytes(packed, model.spec, CUDA, torch.float32) - input_scales


@pytest.mark.parametrize("quantization", ["int4", "int8", "fp8"])
def test_experts_quantised_at_load(
    quantization: str, wide_moe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one tensor an expert and of one for all the same is made."""
    fused = copy(wide_moe, tmp_path / "fused")
    rewrite(fused, lambda t: fuse(t, "mlp", ("gate_proj", "up_proj", "down_proj"), "mlp"))
    answers = []
    for path in (wide_moe, fused):
        model = load_as_for_kernels(path, monkeypatch, quantization)
        assert isinstance(model.layers[1].mlp.experts.down, PlanarExperts | ScaledExperts)
        predicted = resident_bytes(path, model.spec, CUDA, torch.float32, quantization=quantization)
        assert held_bytes(model) == predicted
        answers.append(ModelHarness(model).prefill(prompt(21))[1])
    assert torch.equal(*answers)
    with torch.inference_mode():
        plain = logits(wide_moe)
    assert torch.nn.functional.cosine_similarity(answers[0].flatten(), plain.flatten(), dim=0) > 0.9


# ---- configs and files that contradict themselves


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("qwen3_moe", {"num_experts_per_tok": 7}, "sends each token to 7 experts and has 6"),
        ("qwen3_moe", {"num_local_experts": 0}, "num_local_experts = 0"),
        ("deepseek_v3", {"n_group": 3}, "divides 8 experts into 3 groups"),
        ("deepseek_v3", {"num_experts_per_tok": 5}, "5 experts and has 4"),
        ("deepseek_v2", {"qk_rope_head_dim": 15}, "qk_rope_head_dim = 15"),
        ("deepseek_v2", {"kv_lora_rank": None}, "kv_lora_rank = None"),
    ],
)
def test_configs_that_contradict_themselves(family: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CorruptModel, match=message):
        spec_of_config({**config_of(family), **changes})


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("deepseek_v2", {"topk_method": "noaux_tc"}, "chosen by 'noaux_tc'"),
        ("deepseek_v2", {"attention_bias": True}, "attention_bias"),
        ("gpt_oss", {"swiglu_limit": 5.0}, "swiglu_limit 5.0"),
        ("olmoe", {"clip_qkv": 8.0}, "clip_qkv"),
    ],
)
def test_configs_that_are_not_run(family: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        spec_of_config({**config_of(family), **changes})


def config_of(family: str) -> dict[str, Any]:
    config = tiny_config(family)
    written: dict[str, Any] = config.to_dict()
    names = {"qwen3_moe": "Qwen3Moe", "gpt_oss": "GptOss", "olmoe": "Olmoe"}
    name = names.get(family) or family.replace("deepseek_v", "DeepseekV")
    return {**written, "architectures": [f"{name}ForCausalLM"]}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.__delitem__("model.layers.1.mlp.experts.5.up_proj.weight"), r"lacks .*experts\.5\.up_proj"),
        (
            lambda t: t.update({"model.layers.1.mlp.experts.6.up_proj.weight": torch.zeros(40, 64)}),
            r"1 tensors.*experts\.6",
        ),
        (
            lambda t: t.update({"model.layers.1.mlp.experts.5.down_proj.weight": torch.zeros(64, 24)}),
            r"experts\.5\.down_proj.*\[64, 24\]",
        ),
        (lambda t: t.__delitem__("model.layers.1.mlp.gate.weight"), r"lacks .*mlp\.gate\.weight"),
    ],
    ids=["one missing", "one too many", "one too narrow", "no router"],
)
def test_files_that_contradict_the_config(change: Any, message: str, tiny_model_path: PathOf, tmp_path: Path) -> None:
    path = rewrite(copy(tiny_model_path("qwen3_moe"), tmp_path / "model"), change)
    with pytest.raises(CorruptModel, match=message):
        load_model(path, read_spec(path), CPU, torch.float32)


def test_one_tensor_for_more_experts_than_there_are(tiny_model_path: PathOf, tmp_path: Path) -> None:
    path = copy(tiny_model_path("gpt_oss"), tmp_path / "model", num_local_experts=3)
    rewrite(path, lambda t: t.update({n: t[n][:3] for n in t if "mlp.router" in n}))
    with pytest.raises(CorruptModel, match=r"gate_up_proj has shape \[4, .*asks for \[3, "):
        load_model(path, read_spec(path), CPU, torch.float32)


# ---- latents


@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16", "float8_e4m3fn", "int8"])
def test_a_cache_of_latents_takes_what_is_planned(kv_dtype: str, tiny_model_path: PathOf) -> None:
    spec = read_spec(tiny_model_path("deepseek_v2"))
    cache = KVCache(spec, of_each(spec, 3), 16, CPU, kv_dtype)
    assert cache.allocated_bytes == 3 * 16 * kv_bytes_per_token(spec, kv_dtype)
    if kv_dtype == "float32":
        assert kv_bytes_per_token(spec, kv_dtype) == 2 * (32 + 16) * 4  # layers, latent and what turns


def test_latents_in_eight_bits_stay_close(tiny_model_path: PathOf) -> None:
    harness = Harness(tiny_model_path("deepseek_v2"))
    plain = harness.prefill(prompt(40))[1]
    spec: ModelSpec = harness.spec
    harness.kv_cache = KVCache(spec, of_each(spec, 128), 8, CPU, "int8").layers
    rounded = harness.prefill(prompt(40))[1]
    error = (rounded - plain).norm() / plain.norm()
    assert 0 < error < 0.2


@pytest.mark.parametrize(("heads", "wanted"), [(16, 16), (20, 10), (128, 16), (3, 3), (17, 1)])
def test_heads_that_a_kernel_takes_together(heads: int, wanted: int) -> None:
    assert heads_at_once(heads) == wanted


def test_each_head_alone_is_the_batched_product(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weights = torch.randn(5, 3, 8), torch.randn(3, 12, 8)
    batched = latent_attention._each_head(x, weights)
    monkeypatch.setattr(latent_attention, "runs_triton", lambda x, kernel: True)
    with launching_with(LaunchOptions(deterministic=True)):
        torch.testing.assert_close(latent_attention._each_head(x, weights), batched)


@pytest.mark.parametrize(
    ("capability", "dtype", "words"),
    [((7, 5), "auto", "need compute capability 8.0; this GPU has 7.5"), ((9, 0), "float32", "float32 on a GPU")],
)
def test_latents_need_matrix_units(
    capability: tuple[int, int], dtype: str, words: str, tiny_model_path: PathOf
) -> None:
    spec = read_spec(tiny_model_path("deepseek_v2"))
    with pytest.raises(UnsupportedOption, match=words):
        plan_memory(EngineConfig(dtype=dtype), spec, 1 << 20, gpu_machine(20, capability=capability))
    assert plan_memory(EngineConfig(dtype="bfloat16"), spec, 1 << 20, gpu_machine(20)).dtype == "bfloat16"
