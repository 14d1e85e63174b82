"""Models through the code of transformers, over our paged cache: the same goldens as for decoders of our own."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from localllm.errors import CorruptModel, UnsupportedModel
from localllm.kernels import indexer
from localllm.kernels.layer_cache import LayerState
from localllm.models.inputs import StateInputs
from localllm.models.loader import load_model, resident_bytes
from localllm.models.read_spec import read_spec
from localllm.models.spec.recurrent import RecurrentSpec
from localllm.models.transformers_backend import attention, loading, mixers
from localllm.models.transformers_backend import spec as spec_module
from localllm.models.transformers_backend.mixers import RowStates
from localllm.models.weights.parameters import held_bytes
from tests.models.class_models import make_class_model
from tests.models.harness import CPU, ModelHarness, assert_close, prompt, reference_greedy, reference_logits
from tests.tiny import load_reference

FAMILIES = ("llama", "gemma2", "gemma3", "qwen3", "smollm3")
"""Windows, caps, norms on q and k, layers without positions: through the attention function alone."""


def through_transformers(path: Path, **asked: Any) -> ModelHarness:
    spec = read_spec(path, model_impl="transformers")
    return ModelHarness(load_model(path, spec, CPU, torch.float32, **asked))


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_greedy_tokens(family: str, tiny_model_path: Any) -> None:
    path = tiny_model_path(family)
    reference, harness = load_reference(path), through_transformers(path)
    tokens = prompt(50)
    assert_close(harness.prefill(tokens)[1], reference_logits(reference, tokens))
    assert_close(harness.prefill(tokens, chunk=7)[1], reference_logits(reference, tokens))
    prompts = [prompt(9, 1), prompt(40, 2), prompt(23, 3)]
    assert harness.greedy(prompts, 12, chunk=8) == [reference_greedy(reference, each, 12) for each in prompts]


@pytest.mark.parametrize("family", FAMILIES)
def test_bytes_are_predicted(family: str, tiny_model_path: Any) -> None:
    path = tiny_model_path(family)
    spec = read_spec(path, model_impl="transformers")
    model = load_model(path, spec, CPU, torch.float32)
    assert held_bytes(model) == resident_bytes(path, spec, CPU, torch.float32)


def test_the_check_finds_a_wrong_computation(tiny_llama_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention that forgets its scale, as one would with a model whose code changed."""
    right = attention.paged_attention
    monkeypatch.setattr(attention, "paged_attention", lambda *a, **k: right(*a, **{**k, "scale": 0.5}))
    with pytest.raises(UnsupportedModel, match=r"computes other logits here than in transformers.*logits differ by"):
        through_transformers(tiny_llama_path)
    through_transformers(tiny_llama_path, verify=False)


@pytest.mark.parametrize("model_type", ["deepseek_v4", "hy_v4", "minimax_m3_vl", "glm5_next"])
def test_keys_that_rounding_chooses_otherwise_are_no_wrong_computation(model_type: str, tmp_path: Path) -> None:
    make_class_model(tmp_path, model_type)
    load_model(tmp_path, read_spec(tmp_path), CPU, torch.bfloat16)


@pytest.mark.parametrize(
    "model_type",
    ["hy_v4", "glm5_next", *(
        pytest.param(kind, marks=pytest.mark.slow) for kind in ("minimax_m3_vl_text", "inkling_text", "qwen4_exp_text")
    )],
)  # fmt: skip
def test_how_much_is_computed_at_a_time_changes_no_logits(
    model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Queries of an indexer and of attention, and tokens of a linear attention, of a row that has all its tokens in one
    step, or in three."""
    make_class_model(tmp_path, model_type)
    tokens, wanted = prompt(150), None
    model = load_model(tmp_path, read_spec(tmp_path), CPU, torch.float32)
    for numbers, at_once in ((2**24, 1000), (2**22, 64), (4000, 16)):
        monkeypatch.setattr(indexer, "CPU_BUFFER_NUMBERS", numbers)
        monkeypatch.setattr(mixers, "_KDA_TOKENS", at_once)
        for chunk in (150, 70):
            logits = ModelHarness(model).prefill(tokens, chunk)[1]
            wanted = logits if wanted is None else wanted
            assert_close(logits, wanted)


@pytest.mark.parametrize("wrong", [torch.float32, torch.bfloat16])
def test_the_check_finds_a_wrong_computation_of_chosen_keys(
    wrong: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is wrong in the types in which it is compared: in fp32 by little, in 16 bits at most positions."""
    make_class_model(tmp_path, "hy_v4")
    right = loading.paged_logits

    def paged_logits(*arguments: Any) -> torch.Tensor:
        logits, dtype = right(*arguments), arguments[-1]
        return logits * (1.01 if wrong == torch.float32 else 1.5) if dtype == wrong else logits

    monkeypatch.setattr(loading, "paged_logits", paged_logits)
    with pytest.raises(UnsupportedModel, match=f"rounding in {str(wrong).removeprefix('torch.')} explains"):
        load_model(tmp_path, read_spec(tmp_path), CPU, torch.bfloat16)


def test_a_decoder_of_ours_is_checked_when_asked(tiny_llama_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = read_spec(tiny_llama_path)
    assert spec.implementation == "localllm"
    load_model(tiny_llama_path, spec, CPU, torch.float32, verify=True)
    monkeypatch.setitem(loading.TOLERANCE, torch.float32, 1e-12)
    with pytest.raises(UnsupportedModel, match="logits differ"):
        load_model(tiny_llama_path, spec, CPU, torch.float32, verify=True)


def changed(path: Path, tmp_path: Path, **changes: Any) -> Path:
    config = json.loads((path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **changes}))
    (tmp_path / "model.safetensors").symlink_to(path / "model.safetensors")
    return tmp_path


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["BertModel"], "model_type": "bert"}, "of type 'bert' it has BertLMHeadModel"),
        ({"architectures": ["LongT5ForConditionalGeneration"], "model_type": "longt5"}, "is not supported"),
        ({"architectures": ["FooForCausalLM"], "model_type": "foo"}, "does not know the model"),
        (
            {
                "architectures": ["FooForCausalLM"],
                "model_type": "foo",
                "auto_map": {"AutoConfig": "configuration_foo.FooConfig", "AutoModelForCausalLM": "foo.Foo"},
            },
            "needs its own Python code, which is not run by default",
        ),
        ({"architectures": ["MambaForCausalLM"], "model_type": "mamba"}, "None of its layers has attention"),
        (
            {
                "architectures": ["ApertusForCausalLM"],
                "model_type": "apertus",
                "layer_types": ["full_attention", "chunked_attention"],
            },
            "ApertusForCausalLM is not supported.*layers of type chunked_attention",
        ),
        (
            {"architectures": ["FooForCausalLM"], "quantization_config": {"quant_method": "awq"}},
            "FooForCausalLM is not supported",
        ),
        (
            {
                "architectures": ["ApertusForCausalLM"],
                "model_type": "apertus",
                "quantization_config": {"quant_method": "torchao"},
            },
            r"quantised \(torchao\).*Supported: awq",
        ),
    ],
)
def test_what_cannot_run_is_refused(tiny_llama_path: Path, tmp_path: Path, changes: Any, message: str) -> None:
    path = changed(tiny_llama_path, tmp_path, **changes)
    with pytest.raises((UnsupportedModel, CorruptModel), match=message):
        load_model(path, read_spec(path), CPU, torch.float32)


def test_missing_tensors_are_named(tiny_llama_path: Path, tmp_path: Path) -> None:
    path = changed(tiny_llama_path, tmp_path, num_hidden_layers=3)
    with pytest.raises(CorruptModel, match=r"missing keys: model\.layers\.2"):
        through_transformers(path)


def test_only_localllms_own_decoder_when_asked(tiny_llama_path: Path, tmp_path: Path) -> None:
    path = changed(tiny_llama_path, tmp_path, architectures=["FooForCausalLM"])
    with pytest.raises(UnsupportedModel, match="FooForCausalLM is not supported"):
        read_spec(path, model_impl="localllm")


def test_attention_of_another_kind_is_refused(tmp_path: Path) -> None:
    """MPT adds a bias to the scores itself: its code does not go through the interface."""
    import transformers

    config = transformers.MptConfig(d_model=64, n_heads=4, n_layers=2, vocab_size=512, max_seq_len=256)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match="MptForCausalLM is not supported: its attention cannot be replaced"):
        through_transformers(tmp_path)


def sliding(path: Path, tmp_path: Path, window: object) -> Path:
    """A Qwen3 with a window in its second layer."""
    kinds = ["full_attention", "sliding_attention"]
    return changed(path, tmp_path, sliding_window=window, use_sliding_window=True, layer_types=kinds)


@pytest.mark.parametrize("window", [0, -4])
def test_a_window_without_tokens_is_refused(window: int, tiny_model_path: Any, tmp_path: Path) -> None:
    path = sliding(tiny_model_path("qwen3"), tmp_path, window)
    with pytest.raises(CorruptModel, match=f"sliding_window = {window}, and layers that use it"):
        read_spec(path, model_impl="transformers")


def test_a_window_longer_than_the_context_is_full_attention(tiny_model_path: Any, tmp_path: Path) -> None:
    full = tiny_model_path("qwen3")
    harness = through_transformers(sliding(full, tmp_path, 1 << 20))
    tokens = prompt(50)
    assert_close(harness.prefill(tokens, chunk=16)[1], reference_logits(load_reference(full), tokens))


def test_a_window_that_attention_is_not_given_is_refused(tiny_llama_path: Path) -> None:
    """Llama's code hands no window over: one in its config would be ignored."""
    spec = read_spec(tiny_llama_path, model_impl="transformers")
    windowed = replace(spec, sliding_window=8, layer_is_windowed=(False, True))
    with pytest.raises(UnsupportedModel, match=r"Layer 1 has a window of 8 tokens, and LlamaAttention .* hands None"):
        load_model(tiny_llama_path, windowed, CPU, torch.float32)


def test_code_that_fails_over_paged_attention_is_named(tiny_llama_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise TypeError("'NoneType' object is not subscriptable")

    monkeypatch.setattr(attention, "paged_attention", fail)
    with pytest.raises(
        UnsupportedModel, match=r"LlamaForCausalLM is not supported.*fails over paged attention: TypeErr"
    ):
        through_transformers(tiny_llama_path)


def test_running_out_of_memory_is_not_the_models_fault(tiny_llama_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(attention, "paged_attention", fail)
    with pytest.raises(torch.OutOfMemoryError):
        through_transformers(tiny_llama_path)


def test_a_config_class_that_raises_is_named(tiny_llama_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(config: object) -> None:
        raise RuntimeError("'head_dim' is a per-layer attribute")

    monkeypatch.setattr(spec_module, "text_part", fail)
    with pytest.raises(UnsupportedModel, match="config cannot be read through transformers: RuntimeError: 'head_dim'"):
        read_spec(tiny_llama_path, model_impl="transformers")


def test_the_head_of_a_text_part_is_tied_if_none_is_stored(tmp_path: Path) -> None:
    """transformers 5 writes the text part's default, False, beside the whole's True."""
    tied = make_vision_model(tmp_path / "tied", tie_word_embeddings=True)
    assert json.loads((tied / "config.json").read_text())["text_config"]["tie_word_embeddings"] is False
    own = make_vision_model(tmp_path / "own", tie_word_embeddings=False)
    contradicted = changed(own, tmp_path, tie_word_embeddings=True)
    for path in (tied, own, contradicted):
        reference = transformers_logits(own if path is contradicted else path)
        spec = read_spec(path)
        assert held_bytes(load_model(path, spec, CPU, torch.float32)) == resident_bytes(path, spec, CPU, torch.float32)
        harness = ModelHarness(load_model(path, spec, CPU, torch.float32))
        assert_close(harness.prefill(prompt(9))[1], reference)


def make_vision_model(path: Path, **outer: Any) -> Path:
    import transformers

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    text = {**sizes, "num_key_value_heads": 1, "head_dim": 16, "vocab_size": 512, "initializer_range": 0.2}
    vision = {**sizes, "image_size": 28, "patch_size": 14, "head_dim": 16}
    config = transformers.Mistral3Config(
        text_config={"model_type": "mistral", **text}, vision_config={"model_type": "pixtral", **vision}, **outer
    )
    torch.manual_seed(0)
    transformers.Mistral3ForConditionalGeneration(config).save_pretrained(path)
    return path


def transformers_logits(path: Path) -> torch.Tensor:
    import transformers

    model = transformers.Mistral3ForConditionalGeneration.from_pretrained(path, attn_implementation="eager").eval()
    with torch.inference_mode():
        logits: torch.Tensor = model(input_ids=torch.tensor([prompt(9)])).logits[0]
    return logits


def test_states_of_a_recurrent_module_begin_padded_and_keep_the_last_inputs() -> None:
    states = RowStates({})
    inputs = torch.arange(10.0).view(1, 1, 10)
    assert states.get_conv_state(3) is None
    assert not states.has_previous_state(3)
    assert states.update_conv_state(inputs[..., :2], 3, conv_kernel_size=4).flatten().tolist() == [0, 0, 0, 1]
    later = RowStates(states.states)
    assert later.has_previous_state(3)
    assert later.update_conv_state(inputs[..., 2:5], 3).flatten().tolist() == [0, 0, 0, 1, 2, 3, 4]
    assert later.states["conv", 0].flatten().tolist() == [1, 2, 3, 4]


def test_a_recurrent_row_reads_writes_and_saves_its_places(tmp_path: Path) -> None:
    """A row continues from another request's place, and a third place gets the same state."""
    make_class_model(tmp_path, "lfm2")
    spec = read_spec(tmp_path, model_impl="transformers")
    assert spec.recurrent == RecurrentSpec("module", held=(3 * 64, 0))
    harness = ModelHarness(load_model(tmp_path, spec, CPU, torch.float32))
    first, _ = harness.prefill(prompt(12))
    cache = harness.kv_cache[spec.recurrent_layers[0]]
    assert isinstance(cache, LayerState)
    state = cache.tensors()[0]
    taken, saved = state.clone(), harness.free_places.pop()
    second = replace(first, place=harness.free_places.pop(), token_ids=prompt(13))
    inputs = harness._inputs([(second, 1)], all_logits=True)
    moved = replace(inputs, state=places(read=first.place, write=second.place, save=saved))
    harness.model.forward(moved, harness.kv_cache)
    assert torch.equal(state[first.place], taken[first.place])
    assert torch.equal(state[second.place], state[saved])
    assert torch.equal(state[second.place].view(64, 3)[:, :-1], taken[first.place].view(64, 3)[:, 1:])
    assert state[0].isnan().all()


def places(*, read: int, write: int, save: int) -> StateInputs:
    def tensor(place: int) -> torch.Tensor:
        return torch.tensor([place], dtype=torch.int32)

    return StateInputs(tensor(read), tensor(write), tensor(save), (read,), (write,), (save,))


def test_missing_tensors_of_a_hybrid_are_named(tmp_path: Path) -> None:
    make_class_model(tmp_path, "jamba")
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    gone = next(name for name in tensors if name.endswith("A_log"))
    save_file({name: tensor for name, tensor in tensors.items() if name != gone}, file, {"format": "pt"})
    with pytest.raises(CorruptModel, match=f"missing keys: {re.escape(gone)}"):
        load_model(tmp_path, read_spec(tmp_path), CPU, torch.float32)


def test_a_recurrent_state_does_not_depend_on_how_its_tokens_were_computed(tmp_path: Path) -> None:
    """Zamba2 with time steps below `time_step_min`, as heads with a long memory have: decoded against prefilled."""
    config = AutoConfig.for_model(
        "zamba2", vocab_size=512, hidden_size=64, intermediate_size=96, num_attention_heads=4, num_key_value_heads=4,
        max_position_embeddings=512, chunk_size=8, num_hidden_layers=4, n_mamba_heads=8, mamba_headdim=16,
        layers_block_type=["mamba", "mamba", "mamba", "hybrid"], mamba_ngroups=2, mamba_d_state=32,
        attention_head_dim=32, time_step_min=0.001,
    )  # fmt: skip
    torch.manual_seed(0)
    module = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if parameter.dim() > 1 and "conv1d" not in name:
                parameter.normal_(0, 1.3 / parameter.shape[-1] ** 0.5)
            elif name.endswith("dt_bias"):
                parameter.fill_(-8.0)
            elif name.endswith(".D"):
                parameter.zero_()  # what a layer returns is its memory
    module.save_pretrained(tmp_path)
    harness, tokens = through_transformers(tmp_path), prompt(120)
    whole = harness.prefill(tokens)[1]
    sequence, _ = harness.prefill(tokens[:20])
    for token in tokens[20:]:
        sequence.token_ids.append(token)
        (last,) = harness.step([(sequence, 1)])
    assert (last.log_softmax(-1) - whole[-1].log_softmax(-1)).abs().max() < 1e-5
