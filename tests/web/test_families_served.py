"""Tiny models of the families of 2026 answer over HTTP, from a folder and from a GGUF file, as transformers does."""

from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from tests.gguf_classes import KINDS, SIZES, write_class
from tests.gguf_files import GGUF_SIZES, write_gguf
from tests.gguf_hybrids import HYBRIDS, write_hybrid
from tests.models.class_models import make_class_model
from tests.models.classes import class_logits
from tests.models.harness import prompt, reference, reference_greedy, reference_logits
from tests.models.quantised_classes import CLASSES, OURS, quantised_class
from tests.models.vision_models import VISION_MODELS as VISION
from tests.models.vision_models import make_model
from tests.tiny import make_tiny_model, save_tiny_tokenizer
from tests.web.child_server import ChildServer

PathOf = Callable[[str], Path]

RECURRENT = (
    "lfm2", "lfm2_moe", "lfm3", "qwen3_5", "qwen3_5_moe", "qwen3_next", "olmo_hybrid", "granite_hybrid", "nemotron_h",
    "falcon_h1", "bamba",
)  # fmt: skip
OTHERS = (
    "gemma3n", "gemma4", "gemma4_moe", "glm4_moe_lite", "ernie4_5_moe", "dots1", "minimax_m2", "solar_open",
    "hunyuan_moe", "hunyuan_dense", "hy_v3", "cohere2_moe", "mistral4", "llama4", "deepseek_v32", "glm_moe_dsa",
    "afmoe", "exaone_moe", "granite_moe_shared", "laguna", "mellum", "mimo_v2", "phimoe",
)  # fmt: skip
BY_CLASS = ("deepseek_v4", "glm5_next", "hy_v4", "inkling_text", "mistral_large4", "minimax_m3_vl", "qwen4_exp")
WITHOUT_GGUF = ("axk2", "flex_olmo")  # their tensors have no names in GGUF files
TOKENS, STEPS = prompt(40), 8


def answered(model: Path, folder: Path, *more: str) -> list[int]:
    """Return the greedy ids of a server of its own."""
    flags = ("--device", "cpu", "--dtype", "float32", "--max-model-len", "64", "--kv-cache-memory-bytes", "8MiB", *more)
    with ChildServer(folder, *flags, model=str(model), with_bystander=False) as server:
        body = {
            "model": model.name.removesuffix(".gguf"), "prompt": TOKENS, "max_tokens": STEPS, "temperature": 0,
            "ignore_eos": True, "return_token_ids": True,
        }  # fmt: skip
        response = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60, trust_env=False)
        assert response.status_code == 200, response.text
        ids: list[int] = response.json()["choices"][0]["token_ids"]
    assert server.exit_code == 0, server.log()[-2000:]
    return ids


@pytest.mark.slow
@pytest.mark.parametrize("family", [*RECURRENT, *OTHERS, *WITHOUT_GGUF])
def test_a_family_answers_from_its_folder(family: str, tiny_model_path: PathOf, tmp_path: Path) -> None:
    path = tiny_model_path(family)
    assert answered(path, tmp_path) == reference_greedy(reference(path), TOKENS, STEPS)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", BY_CLASS)
def test_a_class_of_transformers_answers(model_type: str, tmp_path: Path) -> None:
    path = tmp_path / "model"
    make_class_model(path, model_type)
    save_tiny_tokenizer(path)
    ids = answered(path, tmp_path)
    (logits,) = class_logits(path, [[*TOKENS, *ids]])
    assert ids == logits[len(TOKENS) - 1 : -1].argmax(-1).tolist()


@pytest.mark.slow
@pytest.mark.parametrize("model_type", CLASSES | OURS)
def test_a_class_answers_from_its_quantised_checkpoint(model_type: str, tmp_path: Path) -> None:
    packed, dense = quantised_class(model_type, tmp_path)
    save_tiny_tokenizer(packed)
    ids = answered(packed, tmp_path, "--cpu-weights", "exact")
    (logits,) = class_logits(dense, [[*TOKENS, *ids]])
    assert ids == logits[len(TOKENS) - 1 : -1].argmax(-1).tolist()


@pytest.mark.slow
@pytest.mark.parametrize("model_type", KINDS)
def test_a_class_answers_from_gguf(model_type: str, tmp_path: Path) -> None:
    path = tmp_path / "model"
    make_class_model(path, model_type, **SIZES[model_type])
    save_tiny_tokenizer(path)
    file, dense, _ = write_class(path, tmp_path, "Q8_0", tokenizer=True)
    ids = answered(file, tmp_path, "--cpu-weights", "exact")
    (logits,) = class_logits(dense, [[*TOKENS, *ids]])
    assert ids == logits[len(TOKENS) - 1 : -1].argmax(-1).tolist()


@pytest.mark.slow
@pytest.mark.parametrize("config_name", VISION)
def test_the_text_part_of_a_model_that_sees_answers(config_name: str, tmp_path: Path) -> None:
    path, ids = tmp_path / "model", list(TOKENS)
    model = make_model(path, config_name)
    save_tiny_tokenizer(path)
    for _ in range(STEPS):
        ids.append(int(reference_logits(model, ids)[-1].argmax()))
    assert answered(path, tmp_path / "server") == ids[len(TOKENS) :]


@pytest.mark.slow
@pytest.mark.parametrize("name", HYBRIDS)
def test_a_hybrid_answers_from_gguf(name: str, tmp_path: Path) -> None:
    family, sizes = HYBRIDS[name]
    path = make_tiny_model(tmp_path / family, family, **sizes)
    file = write_hybrid(path, tmp_path / "model.gguf")
    assert answered(file, tmp_path / "server") == reference_greedy(reference(path), TOKENS, STEPS)


@pytest.mark.slow
@pytest.mark.parametrize("family", OTHERS)
def test_a_family_answers_from_gguf(family: str, tmp_path: Path) -> None:
    path = make_tiny_model(tmp_path / family, family, **GGUF_SIZES[family])
    write_gguf(path, tmp_path / "model.gguf", "F32")
    assert answered(tmp_path / "model.gguf", tmp_path / "server") == reference_greedy(reference(path), TOKENS, STEPS)
