"""Models through the code of transformers, over our paged cache: the same goldens as for decoders of our own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from localllm.errors import CorruptModel, UnsupportedModel
from localllm.models.architectures.read_spec import read_spec
from localllm.models.architectures.transformers_backend import attention, verify
from localllm.models.loader import load_model, resident_bytes
from localllm.models.weights.parameters import held_bytes
from tests.models.harness import CPU, ModelHarness
from tests.models.test_goldens import assert_close, prompt, reference_greedy, reference_logits
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


def test_a_decoder_of_ours_is_checked_when_asked(tiny_llama_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = read_spec(tiny_llama_path)
    assert spec.implementation == "localllm"
    load_model(tiny_llama_path, spec, CPU, torch.float32, verify=True)
    monkeypatch.setitem(verify.TOLERANCE, torch.float32, 1e-12)
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
        ({"architectures": ["T5ForConditionalGeneration"], "model_type": "t5"}, "is not supported"),
        ({"architectures": ["FooForCausalLM"], "model_type": "foo"}, "does not know the model"),
        (
            {
                "architectures": ["FooForCausalLM"],
                "model_type": "foo",
                "auto_map": {"AutoConfig": "configuration_foo.FooConfig", "AutoModelForCausalLM": "foo.Foo"},
            },
            "needs its own Python code, which is not run by default",
        ),
        ({"architectures": ["MambaForCausalLM"], "model_type": "mamba"}, "no num_attention_heads"),
        (
            {
                "architectures": ["Qwen3ForCausalLM"],
                "model_type": "qwen3",
                "layer_types": ["full_attention", "chunked_attention"],
            },
            "Qwen3ForCausalLM is not supported.*layers of type chunked_attention",
        ),
        (
            {"architectures": ["FooForCausalLM"], "quantization_config": {"quant_method": "awq"}},
            "is quantised, and localllm has no decoder for it",
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
