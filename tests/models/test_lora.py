"""Adapters against the same adapter merged by hand into the base and run by transformers, eager, fp32."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from localllm.errors import CorruptModel, LocalLLMError, ModelNotFound, UnsupportedModel, UnsupportedOption
from localllm.models.decoder.decoder import DecoderModel
from localllm.models.layers.lora import LoraLimits, LoraLinear
from localllm.models.layers.mlp import CPU_ROWS
from localllm.models.loader import load_model, resident_bytes
from localllm.models.read_spec import read_spec
from localllm.models.weights.lora import open_lora, put_lora
from localllm.models.weights.parameters import held_bytes
from tests.adapters import LORA_TARGETS, make_tiny_adapter, merged, write_config
from tests.gguf_files import write_gguf
from tests.models.formats.quantised import SHAPE, save_quantised
from tests.models.formats.stores import AWQ, awq
from tests.models.harness import CPU, ModelHarness, Sequence, assert_close, prompt, reference_logits
from tests.tiny import load_reference, make_tiny_model

PathOf = Callable[[str], Path]
ROOM = LoraLimits(max_loras=2, max_rank=8)


def load(
    path: Path, quantization: str | None = None, room: LoraLimits = ROOM, cpu_weights: str = "fast"
) -> DecoderModel:
    model = load_model(
        path, read_spec(path), CPU, torch.float32, lora=room, quantization=quantization, cpu_weights=cpu_weights
    )
    assert isinstance(model, DecoderModel)
    return model


def put(model: DecoderModel, adapter: Path, slot: int) -> None:
    assert model.lora is not None
    put_lora(open_lora(adapter), model.lora, slot)


def logits(model: DecoderModel, tokens: list[int], adapter: int = -1, chunk: int | None = None) -> Tensor:
    return ModelHarness(model).prefill(tokens, chunk, adapter=adapter)[1]


FAMILIES = (
    "llama",  # one matrix a layer name
    "phi3",  # fused, both ways
    "gpt2",  # transposed, and under names without their prefix
    "gpt_neox",  # fused, head by head
    "cohere",  # rows of q and k in another order here than stored
    "deepseek_v3",  # latent attention, a shared expert
    "qwen2_moe",  # a gate on the shared expert
    "granite_moe_shared",  # the shared expert's gate and up fused
    "hunyuan_moe",  # under names of its own
    "gemma3n",  # low-rank matrices beside attention
    "gemma4",  # layers without keys, per-layer embeddings
    "gemma4_moe",  # one matrix for keys and values
)


@pytest.mark.parametrize("family", FAMILIES)
def test_adapter_is_what_merging_it_would_be(family: str, tiny_model_path: PathOf, tmp_path: Path) -> None:
    path, tokens = tiny_model_path(family), prompt(40)
    targets = LORA_TARGETS.get(family, ())
    one = make_tiny_adapter(tmp_path / "one", path, seed=1, targets=targets)
    other = make_tiny_adapter(tmp_path / "other", path, seed=2, rank=8, targets=targets)
    model = load(path)
    plain = logits(model, tokens)
    put(model, one, 0)
    put(model, other, 1)
    for slot, adapter in enumerate((one, other)):
        wanted = reference_logits(merged(path, adapter), tokens)
        assert (wanted - plain).abs().max() / wanted.abs().max() > 0.01, "the adapter changes something"
        assert_close(logits(model, tokens, slot), wanted)
    assert torch.equal(logits(model, tokens), plain)


def test_several_adapters_in_one_step(tiny_llama_path: Path, tmp_path: Path) -> None:
    """Rows with none, with one and with the other: each gets what it gets alone, in chunks of any size."""
    model = load(tiny_llama_path)
    for slot in (0, 1):
        put(model, make_tiny_adapter(tmp_path / f"a{slot}", tiny_llama_path, seed=slot, rank=4 + slot), slot)
    harness = ModelHarness(model)
    rows = [(Sequence(prompt(n, seed=n), adapter=adapter), n) for n, adapter in ((30, 1), (1, 0), (21, -1), (9, 0))]
    together = harness.step(rows, all_logits=True)
    for (sequence, _), got in zip(rows, together, strict=True):
        assert_close(got, logits(model, sequence.token_ids, sequence.adapter))
        assert_close(got, logits(model, sequence.token_ids, sequence.adapter, chunk=4))


def test_a_long_step(tiny_llama_path: Path, tmp_path: Path) -> None:
    """A CPU's feed-forward part takes so many rows a few hundred at a time."""
    path, tokens = tiny_llama_path, prompt(CPU_ROWS + 50)
    adapter = make_tiny_adapter(tmp_path / "a", path, targets=("up_proj", "down_proj"))
    model = load(path)
    put(model, adapter, 1)
    harness = ModelHarness(model)
    short, long = Sequence(prompt(40)), Sequence(tokens, adapter=1)
    plain, got = harness.step([(short, 40), (long, len(tokens))], all_logits=True)
    assert_close(got, reference_logits(merged(path, adapter), tokens))
    assert_close(plain, reference_logits(load_reference(path), short.token_ids))


@pytest.mark.parametrize(
    "config",
    [
        {"use_rslora": True},
        {"alpha": 3.5},
        {"rank_pattern": {"q_proj": 6}, "alpha_pattern": {"q_proj": 5, "down_proj": 1}},
        {"dtype": "bfloat16", "fan_in_fan_out": True},
    ],
    ids=["rslora", "alpha", "patterns", "bf16"],
)
def test_scales(config: dict[str, Any], tiny_llama_path: Path, tmp_path: Path) -> None:
    adapter = make_tiny_adapter(tmp_path / "a", tiny_llama_path, **config)
    model, tokens = load(tiny_llama_path), prompt(20)
    put(model, adapter, 0)
    assert_close(logits(model, tokens, 0), reference_logits(merged(tiny_llama_path, adapter), tokens))


def test_a_slot_used_again_shows_nothing_of_its_former_holder(tiny_llama_path: Path, tmp_path: Path) -> None:
    path, tokens = tiny_llama_path, prompt(20)
    first = make_tiny_adapter(tmp_path / "first", path, seed=1, rank=8)
    second = make_tiny_adapter(tmp_path / "second", path, seed=2, rank=2, targets=("v_proj", "gate_proj"))
    model, fresh = load(path), load(path)
    put(model, first, 0)
    put(model, second, 0)
    put(fresh, second, 0)
    assert torch.equal(logits(model, tokens, 0), logits(fresh, tokens, 0))


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_over_a_quantised_base(quantization: str, tiny_llama_path: Path, tmp_path: Path) -> None:
    """What the adapter adds to the logits is about what it adds to those of the plain base."""
    adapter, tokens = make_tiny_adapter(tmp_path / "a", tiny_llama_path), prompt(30)
    changes = []
    for model in (load(tiny_llama_path), load(tiny_llama_path, quantization)):
        put(model, adapter, 0)
        changes.append(logits(model, tokens, 0) - logits(model, tokens))
    error = (changes[1] - changes[0]).abs().mean() / changes[0].abs().mean()
    assert error < {"int8": 0.1, "int4": 0.5}[quantization]


def test_over_a_quantised_checkpoint(tmp_path: Path) -> None:
    """AWQ's matrices as they are stored, plus what the adapter adds."""
    source, tokens = make_tiny_model(tmp_path / "source", **SHAPE), prompt(20)
    saved = save_quantised(source, tmp_path / "awq", AWQ, awq(32))
    adapter = make_tiny_adapter(tmp_path / "a", source)
    model, wanted = load(saved.path, cpu_weights="exact"), merged(source, adapter)
    put(model, adapter, 1)
    plain = load_reference(source).state_dict()
    state = {name: meant + wanted.state_dict()[name] - plain[name] for name, meant in saved.meant.items()}
    wanted.load_state_dict(state, strict=False)
    assert_close(logits(model, tokens, 1), reference_logits(wanted, tokens))


@pytest.mark.parametrize("family", ["llama", "phi3", "cohere", "deepseek_v3"])
def test_room_is_predicted(family: str, tiny_model_path: PathOf) -> None:
    path = tiny_model_path(family)
    spec = read_spec(path)
    predicted = resident_bytes(path, spec, CPU, torch.float32, lora=ROOM)
    assert held_bytes(load(path)) == predicted > resident_bytes(path, spec, CPU, torch.float32)


def test_through_transformers_it_is_refused(tiny_llama_path: Path) -> None:
    spec = read_spec(tiny_llama_path, model_impl="transformers")
    with pytest.raises(UnsupportedOption, match="Adapters are not supported"):
        load_model(tiny_llama_path, spec, CPU, torch.float32, lora=ROOM)


# ---- files that are refused ------------------------------------------------------------------------------------------

FIELDS: list[tuple[dict[str, Any], str]] = [
    ({"peft_type": "LOKR"}, "LOKR"),
    ({"peft_type": "IA3"}, "IA3"),
    ({"use_dora": True}, "DoRA"),
    ({"bias": "all"}, "biases of the base"),
    ({"lora_bias": True}, "biases of their own"),
    ({"modules_to_save": ["lm_head"]}, "trained together"),
    ({"trainable_token_indices": [3]}, "embeddings of single tokens"),
    ({"layer_replication": [[0, 1]]}, "more than once"),
    ({"target_parameters": ["experts.gate_up_proj"]}, "experts"),
    ({"init_lora_weights": "pissa_niter_4"}, "changes the matrices of the base"),
]


@pytest.mark.parametrize(("fields", "said"), FIELDS)
def test_what_cannot_be_run_is_refused_by_name(
    fields: dict[str, Any], said: str, tiny_llama_path: Path, tmp_path: Path
) -> None:
    adapter = make_tiny_adapter(tmp_path / "a", tiny_llama_path, targets=("q_proj",))
    write_config(adapter, **{"r": 4, "lora_alpha": 8, **fields})
    with pytest.raises(UnsupportedModel) as caught:
        open_lora(adapter)
    assert said in caught.value.why


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"r": 8, "lora_alpha": 8}, "the rank 8.*have rank 4"),
        ({"r": 4, "lora_alpha": "much"}, "lora_alpha = 'much'"),
        ({"r": None, "lora_alpha": 8}, "the rank None"),
        ({"r": 4, "lora_alpha": 8, "rank_pattern": {"q_proj": 5}}, "the rank 5"),
        ({"r": 4, "lora_alpha": 8, "rank_pattern": 7}, "rank_pattern = 7"),
    ],
)
def test_a_config_that_disagrees_with_its_tensors(
    fields: dict[str, Any], said: str, tiny_llama_path: Path, tmp_path: Path
) -> None:
    adapter = make_tiny_adapter(tmp_path / "a", tiny_llama_path, targets=("q_proj",))
    write_config(adapter, **fields)
    with pytest.raises(CorruptModel) as caught:
        open_lora(adapter)
    assert re.search(said, str(caught.value))


def retold(adapter: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> Path:
    """The adapter with other tensors."""
    file = adapter / "adapter_model.safetensors"
    save_file(change(load_file(file)), file)
    return adapter


def renamed(old: str, new: str) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    return lambda tensors: {name.replace(old, new): tensor for name, tensor in tensors.items()}


Q = "base_model.model.model.layers.0.self_attn.q_proj"
TENSORS: list[tuple[Callable[[dict[str, Tensor]], dict[str, Tensor]], type[LocalLLMError], str]] = [
    (lambda t: {**t, f"{Q}.lora_magnitude_vector": torch.ones(4)}, UnsupportedModel, "DoRA"),
    (renamed("self_attn.q_proj.lora_", "embed_tokens.lora_embedding_"), UnsupportedModel, "adapter of embeddings"),
    (lambda t: {**t, "base_model.model.lm_head.weight": torch.ones(4)}, UnsupportedModel, "not part of LoRA"),
    (lambda t: {n: v for n, v in t.items() if n != f"{Q}.lora_B.weight"}, CorruptModel, "no model.*lora_B"),
    (lambda t: {n: v[None] for n, v in t.items()}, CorruptModel, "not a low-rank pair"),
    (lambda t: {n: v.to(torch.int8) for n, v in t.items()}, UnsupportedModel, "stored as I8"),
    (lambda t: {}, CorruptModel, "holds no tensors"),
    (renamed("self_attn.q_proj", "mlp.experts.3.up_proj"), UnsupportedModel, "experts"),
    (renamed("model.layers.0.self_attn.q_proj", "lm_head"), UnsupportedModel, "embeddings and the output head"),
    (renamed("q_proj", "kv_b_proj"), UnsupportedModel, "latent attention"),
    (renamed("layers.0", "layers.9"), UnsupportedModel, "no layer of this name.*trained on"),
    (
        lambda t: {n: v[:, :32].clone() if "lora_A" in n else v for n, v in t.items()},
        UnsupportedModel,
        r"\[64, 32\].*\[64, 64\]",
    ),
]


@pytest.mark.parametrize(("change", "error", "said"), TENSORS)
def test_tensors_that_do_not_fit_are_refused_and_change_nothing(
    change: Callable[[dict[str, Tensor]], dict[str, Tensor]], error: type[LocalLLMError], said: str,
    small: DecoderModel, tiny_llama_path: Path, tmp_path: Path,
) -> None:  # fmt: skip
    adapter = retold(make_tiny_adapter(tmp_path / "a", tiny_llama_path, targets=("0.self_attn.q_proj",)), change)
    with pytest.raises(error) as caught:
        put(small, adapter, 0)
    assert re.search(said, str(caught.value)), caught.value
    assert not any(layer.a.any() or layer.b.any() for layer in small.lora.layers)  # type: ignore[union-attr]


@pytest.fixture(scope="module")
def small(tiny_llama_path: Path) -> DecoderModel:
    return load(tiny_llama_path)


def test_a_rank_without_room_names_the_flag(small: DecoderModel, tiny_llama_path: Path, tmp_path: Path) -> None:
    adapter = make_tiny_adapter(tmp_path / "a", tiny_llama_path, rank=9, targets=("q_proj",))
    with pytest.raises(UnsupportedModel) as caught:
        put(small, adapter, 0)
    assert caught.value.hint == "Start with --max-lora-rank 9."


def test_folders_that_hold_no_adapter(tiny_llama_path: Path, tmp_path: Path) -> None:
    adapter = make_tiny_adapter(tmp_path / "a", tiny_llama_path, targets=("q_proj",))
    with pytest.raises(ModelNotFound, match="does not hold an adapter"):
        open_lora(tiny_llama_path)
    pickled = shutil.copytree(adapter, tmp_path / "pickled")
    (pickled / "adapter_model.safetensors").rename(pickled / "adapter_model.bin")
    with pytest.raises(UnsupportedModel, match="pickle"):
        open_lora(pickled)
    (pickled / "adapter_model.bin").unlink()
    with pytest.raises(ModelNotFound):
        open_lora(pickled)
    whole = (adapter / "adapter_model.safetensors").read_bytes()
    (adapter / "adapter_model.safetensors").write_bytes(whole[:-10])
    with pytest.raises(CorruptModel, match="cut short"):
        open_lora(adapter)
    (adapter / "adapter_config.json").write_text("[" * 10)
    with pytest.raises(CorruptModel, match=r"adapter_config.json"):
        open_lora(adapter)
    (adapter / "adapter_config.json").write_text(json.dumps([1]))
    with pytest.raises(CorruptModel, match="not an object"):
        open_lora(adapter)


def test_the_head_takes_none_and_every_other_matrix_does(small: DecoderModel) -> None:
    assert not isinstance(small.lm_head, LoraLinear)
    assert small.lora is not None
    assert len(small.lora.layers) == 4 * small.spec.num_layers
    assert small.lora.shape_of("model.layers.1.self_attn.k_proj") == (32, 64)


# ---- GGUF ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_over_a_gguf_file(family: str, tiny_model_path: PathOf, tmp_path: Path) -> None:
    """An adapter is trained on the family's own checkpoint, whose names and rows are others than the file's."""
    path, tokens = tiny_model_path(family), prompt(30)
    write_gguf(path, tmp_path / "tiny.gguf")
    adapter = make_tiny_adapter(tmp_path / "a", path)
    model = load(tmp_path / "tiny.gguf")
    put(model, adapter, 0)
    assert_close(logits(model, tokens, 0), reference_logits(merged(path, adapter), tokens))


def test_what_a_gguf_file_stores_otherwise_than_its_family_is_refused(tiny_model_path: PathOf, tmp_path: Path) -> None:
    path = tiny_model_path("phi3")
    write_gguf(path, tmp_path / "tiny.gguf")
    with pytest.raises(UnsupportedModel, match="qkv_proj"):
        put(load(tmp_path / "tiny.gguf"), make_tiny_adapter(tmp_path / "a", path, targets=("qkv_proj",)), 0)


def test_other_spellings_of_a_layer(tiny_model_path: PathOf) -> None:
    """As checkpoints may spell it that were saved without the head."""
    bank = load(tiny_model_path("gpt2")).lora
    assert bank is not None
    assert bank.shape_of("transformer.h.0.attn.c_attn") == bank.shape_of("h.0.attn.c_attn") == (192, 64)
    assert bank.shape_of("model.layers.0.self_attn.q_proj") is None
