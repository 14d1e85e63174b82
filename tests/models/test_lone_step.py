"""Whole models through the list of native operations, beside the same models through torch.

Without a native library on the testing machine, the operations' definitions (operations.py) run the lists.
"""

import copy
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from localllm.kernels.cpu import half, pack
from localllm.kernels.cpu.half import CpuHalfWeight
from localllm.kernels.cpu.int8 import CpuInt8Weight
from localllm.kernels.cpu.native.library import native
from localllm.kernels.cpu.native.structures import MAX_ROWS, Kind
from localllm.kernels.cpu.q4 import CpuQ4Weight
from localllm.models.decoder import native_program
from localllm.models.decoder.decoder import DecoderModel, Taps
from localllm.models.decoder.layer import DecoderLayer, PreNormLayer
from localllm.models.decoder.native_program import NotSupportedNatively, open_native_program
from localllm.models.layers.linear import Linear
from localllm.models.layers.lora import LoraLimits
from localllm.models.library.catalog import resolve_model
from localllm.models.loader import load_model
from localllm.models.read_spec import read_spec
from localllm.models.spec.model_spec import FINAL_HIDDEN, FINAL_STREAM
from localllm.models.weights.lora import open_lora, put_lora
from scripts.random_weights import WeightFormat, random_model, shape_spec
from tests.adapters import LORA_TARGETS, make_tiny_adapter
from tests.gguf_files import write_gguf
from tests.marks import needs_library
from tests.models.harness import CPU, LoneHarness, token
from tests.models.harness import Sequence as Request
from tests.models.operations import DefinedLibrary
from tests.models.vision_models import make_model
from tests.tiny import FAMILIES, RECOGNISED, make_tiny_model

PathOf = Callable[[str], Path]
LATENT = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "mistral4")
REFUSED = {
    **dict.fromkeys(("axk2", "deepseek_v32", "glm_moe_dsa"), "an indexer"),
}
LIMITS = {"gemma4": 1e-4, **dict.fromkeys((*LATENT, "youtu"), 1e-5 if native() else 1.5e-5)}
"""How far logits may be apart, where that is not 2e-5. Those of DeepSeek-V2 are 1.00005e-5 apart without the library.
Gemma 4 does not scale its scores: fp32 rounds the largest ones more coarsely."""
LONG, STEPS = 22, 12  # the tokens of a prompt, and steps after it: windows of 20 and 24 tokens hide keys


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> None:
    """The lists' operations as they are defined, where this machine has no native library."""
    if native() is None:
        monkeypatch.setattr(native_program, "native", DefinedLibrary)


def load(path: Path, **options: Any) -> DecoderModel:
    model = load_model(path, read_spec(path), CPU, torch.float32, **options)
    assert isinstance(model, DecoderModel)
    return model


def largest_error(
    model: DecoderModel, reference: DecoderModel, *, steps: int = STEPS, kv_dtype: torch.dtype = torch.float32,
    adapter: int = -1,
) -> float:  # fmt: skip
    """The largest difference of a logit between native steps of `model` and torch's steps of `reference`, over the
    standard deviation of the logits. The prompt's keys and values are the reference's in both caches."""
    ours, theirs = LoneHarness(model, kv_dtype=kv_dtype, seed=1), LoneHarness(reference, kv_dtype=kv_dtype)
    prompt = [token(place) for place in range(LONG)]
    ours.model = reference
    (mine, _), (other, _) = (each.prefill(prompt, adapter=adapter) for each in (ours, theirs))
    worst = 0.0
    for place in range(LONG, LONG + steps):
        mine.token_ids.append(token(place))
        other.token_ids.append(token(place))
        wanted = theirs.step([(other, 1)])[0]
        worst = max(worst, float((ours.natively([mine]) - wanted).abs().max() / wanted.std()))
    return worst


@pytest.mark.parametrize("family", [*FAMILIES, *RECOGNISED])
@pytest.mark.usefixtures("library")
def test_every_family_has_a_list_with_torchs_logits_or_a_reason(family: str, tiny_model_path: PathOf) -> None:
    model = load(tiny_model_path(family))
    if family in REFUSED:
        with pytest.raises(NotSupportedNatively, match=REFUSED[family]):
            LoneHarness(model)
    else:
        assert largest_error(model, model) < LIMITS.get(family, 2e-5)


@pytest.mark.usefixtures("library")
def test_gates_of_heads_and_activations_with_limits(tmp_path: Path) -> None:
    make_model(tmp_path, "Step3p7Config")
    model = load(tmp_path)
    assert largest_error(model, model) < 2e-5


@pytest.mark.parametrize(
    "family",
    [
        "llama",
        "gemma3",
        "gpt_neox",
        "gpt_oss",
        "glm4_moe",
        "lfm2",
        "lfm3",
        "qwen3_5",
        "olmo_hybrid",
        "laguna",
        "granite_hybrid",
        "gemma4",
        "gemma4_moe",
        "deepseek_v2",
        "mistral4",
        "mimo_v2",
        "nemotron_h",
        "falcon_h1",
        "llama4",
        "gemma3n",
    ],
)
def test_the_definitions_of_the_operations_give_torchs_logits(
    family: str, tiny_model_path: PathOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native_program, "native", DefinedLibrary)
    model = load(tiny_model_path(family))
    assert largest_error(model, model, steps=4) < LIMITS.get(family, 2e-5)


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("nemotron_h", {"moe_latent_size": 24}),
        ("nemotron_h", {"moe_intermediate_size": 40, "n_group": 1, "topk_group": 1}),
        ("falcon_h1", {"intermediate_size": 72}),
    ],
)
@pytest.mark.parametrize("is_defined", [False, True], ids=["library", "definitions"])
@pytest.mark.usefixtures("library")
def test_fields(
    family: str, fields: dict[str, Any], is_defined: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_defined:
        monkeypatch.setattr(native_program, "native", DefinedLibrary)
    model = load(make_tiny_model(tmp_path, family, **fields))
    assert largest_error(model, model, steps=4 if is_defined else STEPS) < 2e-5


@pytest.mark.parametrize("family", ["llama", "gemma3", "olmo2", "gpt_neox", "gemma4", "granite", "qwen3_moe"])
@pytest.mark.usefixtures("library")
def test_features_of_layers_are_torchs(family: str, tiny_model_path: PathOf) -> None:
    """What a drafter reads: the stream before layers, and the last one before and after its norm, in any order."""
    model = load(tiny_model_path(family))
    taps = (1, FINAL_HIDDEN, 0, FINAL_STREAM, model.spec.num_layers - 1)
    ours, theirs, untapped = (LoneHarness(model, seed=seed) for seed in range(3))
    ours.lone.tap(taps)
    rows = [harness.prefill([token(place) for place in range(LONG)])[0] for harness in (ours, theirs, untapped)]
    for place in range(LONG, LONG + 3):
        for row in rows:
            row.token_ids.append(token(place))
        wanted = torch.empty(1, len(taps) * model.spec.hidden_size)
        model.forward(theirs._inputs([(rows[1], 1)], all_logits=False), theirs.kv_cache, taps=Taps(taps, wanted))
        rows[1].computed += 1
        assert torch.equal(ours.natively([rows[0]]), untapped.natively([rows[2]]))
        torch.testing.assert_close(ours.lone.features(), wanted, rtol=1e-4, atol=1e-4 * float(wanted.std()))


@needs_library
@pytest.mark.parametrize(
    "family",
    ["llama", "gemma2", "cohere", "olmo2", "bloom", "qwen3_moe", "deepseek_v3", "mimo_v2", "llama4", "gemma3n"],
)
def test_rows_together_have_the_bits_of_each_alone(family: str, tiny_model_path: PathOf) -> None:
    model = load(tiny_model_path(family))
    alone, together = [], LoneHarness(model)
    lengths = [1, 3, 9, 30, 17, 8, 2, 25] * (MAX_ROWS // 8)
    requests = [_grown(together, length, seed) for seed, length in enumerate(lengths)]
    for seed, length in enumerate(lengths):
        harness = LoneHarness(model, seed=seed)
        request = _grown(harness, length, seed)
        alone.append([_next(harness, [request], [seed])[0] for _ in range(3)])
    for step, count in enumerate([MAX_ROWS, 5, 2]):
        chosen = list(range(MAX_ROWS))[:count]
        logits = _next(together, [requests[row] for row in chosen], chosen)
        for row in chosen:
            assert torch.equal(logits[row], alone[row][step]), (row, count)


ALONG = ["llama", "mistral", "gemma2", "gemma3", "gemma4", "olmo2", "bloom", "qwen3_moe", "gpt_oss", "qwen3", "mimo_v2",
         "gemma3n", *LATENT]  # fmt: skip


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize(
    ("family", "kv_dtype"),
    [*((family, torch.float32) for family in ALONG), pytest.param("qwen3", torch.int8, marks=needs_library)],
)
def test_tokens_of_a_request_in_one_step_have_the_bits_of_steps_of_one(
    family: str, kv_dtype: torch.dtype, tiny_model_path: PathOf
) -> None:
    """Drafts beside a row of another request, across the border of two pieces of 512 positions."""
    model, before = load(tiny_model_path(family)), 509
    single, together = LoneHarness(model, kv_dtype=kv_dtype), LoneHarness(model, kv_dtype=kv_dtype)
    (mine, other), (ours, theirs) = ((_grown(h, before, 0), _grown(h, 9, 1)) for h in (single, together))
    for request in (mine, ours):
        request.token_ids += [token(place) for place in range(before, before + 12)]
    for request in (other, theirs):
        request.token_ids += [token(place, 1) for place in range(9, 12)]
    wanted = torch.cat([single.natively([mine]) for _ in range(12)])
    beside = torch.cat([single.natively([other]) for _ in range(2)])
    got = together.natively_along([(ours, 7), (theirs, 1)])
    assert torch.equal(got[:7], wanted[:7])
    assert torch.equal(got[7:], beside[:1])
    got = together.natively_along([(theirs, 1), (ours, 5)])
    assert torch.equal(got[1:], wanted[7:])
    assert torch.equal(got[:1], beside[1:])


def _grown(harness: LoneHarness, length: int, seed: int) -> Request:
    return harness.prefill([token(place, seed) for place in range(length)])[0]


def _next(harness: LoneHarness, requests: list[Request], seeds: Sequence[int]) -> Tensor:
    for request, seed in zip(requests, seeds, strict=True):
        request.token_ids.append(token(len(request.token_ids), seed))
    return harness.natively(requests)


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("family", ["llama", "mistral", "deepseek_v2", "mistral4", "mimo_v2"])
def test_a_request_may_change_between_native_steps_and_torch(family: str, tiny_model_path: PathOf) -> None:
    """Native alone, then beside a prompt through torch, native again: as if torch had computed all."""
    model = load(tiny_model_path(family))
    mixed, torchs = LoneHarness(model, seed=3), LoneHarness(model)
    (mine, _), (other, _) = (harness.prefill([5, 6, 7]) for harness in (mixed, torchs))
    for place in range(3, 40):
        for request in (mine, other):
            request.token_ids.append(token(place))
        wanted = torchs.step([(other, 1)])[0]
        if place % 5 == 4:
            beside = Request([token(i, place) for i in range(6)])
            got = mixed.step([(mine, 1), (beside, 6)])[0]
        else:
            got = mixed.natively([mine])
        assert float((got - wanted).abs().max() / wanted.std()) < 2e-5, place


@pytest.mark.usefixtures("library")
@needs_library
@pytest.mark.parametrize(("kv_dtype", "limit"), [(torch.bfloat16, 0.02), (torch.float16, 0.01), (torch.int8, 0.02)])
@pytest.mark.parametrize("family", ["qwen3", "deepseek_v3"])
def test_narrow_caches(kv_dtype: torch.dtype, limit: float, family: str, tiny_model_path: PathOf) -> None:
    """A value near the middle of two neighbours may be rounded either way, which then shows in the logits."""
    model = load(tiny_model_path(family))
    assert largest_error(model, model, kv_dtype=kv_dtype) < limit


@pytest.mark.usefixtures("library")
def test_other_caches_are_refused(tiny_llama_path: Path) -> None:
    with pytest.raises(NotSupportedNatively, match="float8"):
        LoneHarness(load(tiny_llama_path), kv_dtype=torch.float8_e4m3fn)
    with pytest.raises(NotSupportedNatively, match="object"):
        open_native_program(object(), [])


ADAPTED = ["mimo_v2", "llama", "phi3", "gpt2", "gpt_neox", "cohere", "qwen2_moe", "granite_moe_shared", "gemma4",
           "gemma4_moe", "gemma3n", "deepseek_v3"]  # fmt: skip


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("family", ADAPTED)
def test_rows_with_and_without_adapters_have_torchs_logits(
    family: str, tiny_model_path: PathOf, tmp_path: Path
) -> None:
    """Two adapters of unlike ranks and none in one step; a row has the bits of the same row alone."""
    path = tiny_model_path(family)
    model = load(path, lora=LoraLimits(2, 8))
    assert model.lora is not None
    for slot, rank in enumerate((3, 8)):
        adapter = make_tiny_adapter(
            tmp_path / str(slot), path, seed=slot, rank=rank, targets=LORA_TARGETS.get(family, ())
        )
        put_lora(open_lora(adapter), model.lora, slot)
    ours, theirs, single = (LoneHarness(model, seed=seed) for seed in range(3))
    rows = [
        [harness.prefill([token(place, 7) for place in range(LONG)], adapter=adapter)[0] for adapter in (1, -1, 0)]
        for harness in (ours, theirs, single)
    ]
    for place in range(LONG, LONG + 4):
        for row in (row for own in rows for row in own):
            row.token_ids.append(token(place, 7))
        wanted = torch.cat(theirs.step([(row, 1) for row in rows[1]]))
        got = ours.natively(rows[0])
        assert float((got - wanted).abs().max() / wanted.std()) < 1e-4, "rounding of large changes"
        assert float((got[0] - got[1]).abs().max() / wanted.std()) > 0.01, "an adapter changes something"
        if native() is not None:
            assert torch.equal(got, torch.cat([single.natively([row]) for row in rows[2]]))


def test_without_a_library_the_reason_is_the_librarys(tiny_llama_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_program, "native", lambda: None)
    monkeypatch.setattr(native_program, "why_none", lambda: "set to none")
    with pytest.raises(NotSupportedNatively, match="set to none"):
        LoneHarness(load(tiny_llama_path))


@needs_library
def test_16_bit_weights_lose_nothing() -> None:
    """The bundled model is stored in bf16: its own bytes beside the same weights widened to fp32."""
    path = resolve_model("demo").path
    half, wide = load(path, half_weights=True, cpu_weights="exact"), load(path)
    kinds = [type(_parts(model)[1].gate_up.weight) for model in (half, wide)]
    assert kinds[0] is not kinds[1]
    assert largest_error(half, _with_plain_weights(half), steps=40) < 1e-5
    assert largest_error(wide, wide, steps=40) < 1e-5
    rounding = load(path, half_weights=True)  # activations, where the processor multiplies pairs of bf16
    assert largest_error(rounding, _with_plain_weights(rounding), steps=40) < 0.05


@needs_library
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("stored", ["float32", "float16", "bfloat16", "GGUF F32", "GGUF F16", "GGUF BF16", "experts"])
def test_16_bit_weights_are_multiplied_natively_however_they_come(
    stored: str, dtype: torch.dtype, tiny_model_path: PathOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """--dtype over checkpoints of another type and over GGUF files, with and without an adapter: the logits are those
    of the same numbers in fp32, if activations are not rounded."""
    monkeypatch.setattr(half, "HALF_MIN_ELEMENTS", 0)
    source, wide, file = tiny_model_path("llama" if stored != "experts" else "qwen2_moe"), tmp_path / "wide", tmp_path
    types = {"32": torch.float32, "xperts": torch.float32, "F16": torch.float16, "float16": torch.float16}
    narrow = next((kind for name, kind in types.items() if stored.endswith(name)), torch.bfloat16)
    if stored.endswith("BF16"):
        narrow = torch.bfloat16
    held = narrow if dtype == torch.float32 else dtype
    tensors = load_file(source / "model.safetensors")
    for folder, values in (
        (tmp_path / "model", {name: each.to(narrow) for name, each in tensors.items()}),
        (wide, {name: each.to(narrow).to(held).float() for name, each in tensors.items()}),
    ):
        shutil.copytree(source, folder)
        save_file(values, folder / "model.safetensors", {"format": "pt"})
        file = folder if folder != wide else file
    if stored.startswith("GGUF"):
        file = tmp_path / "model.gguf"
        write_gguf(tmp_path / "model", file, stored.removeprefix("GGUF "))
    adapter = make_tiny_adapter(tmp_path / "adapter", source, seed=3) / "adapter_model.safetensors"
    save_file({name: each.to(held).float() for name, each in load_file(adapter).items()}, adapter)
    given: dict[str, Any] = {"half_weights": True, "lora": LoraLimits(1, 8), "cpu_weights": "exact"}
    model = load_model(file, read_spec(file), CPU, dtype, **given)
    reference = load(wide, lora=LoraLimits(1, 8))
    assert isinstance(model, DecoderModel)
    for each in (model, reference):
        assert each.lora is not None
        put_lora(open_lora(tmp_path / "adapter"), each.lora, 0)
    attention, head = _parts(model)[0], model.lm_head
    assert head is not None
    kinds = {type(each.weight) for each in (attention.qkv, attention.out, head)}
    assert kinds == {Tensor if held == torch.float32 else CpuHalfWeight}
    assert largest_error(model, reference) < 1e-4
    assert largest_error(model, reference, adapter=0) < 1e-4


@needs_library
@torch.inference_mode()
def test_rounded_activations_are_nearer_to_fp32_than_torchs_bfloat16(
    tiny_model_path: PathOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Norms, attention, sums and the stream keep their digits, which a bfloat16 model in torch rounds as well. Prompts
    and native steps."""
    monkeypatch.setattr(half, "HALF_MIN_ELEMENTS", 0)
    monkeypatch.setattr(native(), "multiplies_pairs", True)  # in one way or another, every library does
    for module in (half, native_program):
        monkeypatch.setattr(module, "has_amx", lambda: False)
    source, path = tiny_model_path("llama"), tmp_path / "model"
    shutil.copytree(source, path)
    tensors = load_file(source / "model.safetensors")
    save_file({name: each.bfloat16() for name, each in tensors.items()}, path / "model.safetensors", {"format": "pt"})
    tokens = [token(place) for place in range(LONG)]
    theirs, wanted = (
        AutoModelForCausalLM.from_pretrained(path, dtype=dtype)(torch.tensor([tokens])).logits[0, -1].float()
        for dtype in (torch.bfloat16, torch.float32)
    )
    model = load(path, half_weights=True)
    assert _parts(model)[0].qkv.weight.matrix().kind == Kind.BF16_ROUNDED
    prompt = LoneHarness(model).prefill(tokens)[1][-1]
    one_by_one = LoneHarness(model)
    request = one_by_one.prefill(tokens[:1], 1)[0]
    for each in tokens[1:]:
        request.token_ids.append(each)
        step = one_by_one.natively([request])[0]
    allowed = float((theirs - wanted).norm())
    for ours in (prompt, step):
        assert 0.01 * allowed < float((ours - wanted).norm()) < allowed


@needs_library
@pytest.mark.parametrize("weights", ["int8", "int4", "fp8"])
def test_low_bit_weights_are_their_dequantized_values(weights: WeightFormat, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pack, "PACK_MIN_ELEMENTS", 0)
    model = random_model(shape_spec("tiny"), CPU, torch.float32, max_model_len=128, weights=weights)
    if not isinstance(_parts(model)[0].qkv.weight, CpuInt8Weight | CpuQ4Weight):
        pytest.skip("this processor keeps such weights as stored")
    assert largest_error(model, _with_plain_weights(model), steps=40) < 1e-3


def _with_plain_weights(model: DecoderModel) -> DecoderModel:
    """The same model with each matrix in fp32."""
    plain, changed = copy.copy(model), list[DecoderLayer]()
    for layer in model.layers:
        assert isinstance(layer, PreNormLayer)
        attention: Any = copy.copy(layer.attention)
        mlp: Any = copy.copy(layer.mlp)
        attention.qkv, attention.out = _plain(attention.qkv), _plain(attention.out)
        mlp.gate_up, mlp.down = _plain(mlp.gate_up), _plain(mlp.down)
        changed.append(replace(layer, attention=attention, mlp=mlp))
    plain.layers, plain.lm_head = changed, _plain(model.lm_head)
    return plain


def _parts(model: DecoderModel) -> tuple[Any, Any]:
    """Attention and feed-forward of the first layer."""
    layer: Any = model.layers[0]
    return layer.attention, layer.mlp


def _plain(linear: Any) -> Linear:
    weight = linear.weight
    return linear if isinstance(weight, Tensor) else Linear(weight.dequantize(torch.float32), linear.bias)
