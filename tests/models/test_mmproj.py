"""Models that see in GGUF: the tower in a projector file makes the rows of its safetensors origin."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from localllm import LLM, SamplingParams
from localllm.config.settings import EngineConfig
from localllm.errors import CorruptModel, ModelNotFound, UnsupportedModel
from localllm.machine.hardware import Hardware
from localllm.models.fit import plan_memory
from localllm.models.formats.gguf.file_names import projectors_for
from localllm.models.read_spec import read_spec
from localllm.models.spec.model_spec import ModelSpec
from localllm.models.vision.mmproj import find_projector
from localllm.models.vision.processor import Processed
from localllm.models.vision.tower import load_tower, tower_bytes
from tests.golden_engine import Engine
from tests.mmproj_files import TYPES, write_projector, write_text_part
from tests.models.seeing import PAD, make_seeing, opened, picture, prompt_of, reference_with_pictures, spans


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {"": tmp_path_factory.mktemp("mmproj")}


def pair(pairs: dict[str, Path], name: str) -> Path:
    """Return the folder of a model: `safetensors`, `model.gguf` and `mmproj-model-f32.gguf`."""
    if name not in pairs:
        folder = pairs[""] / name
        make_seeing(folder / "safetensors", name)
        write_text_part(folder / "safetensors", folder / "model.gguf")
        write_projector(folder / "safetensors", folder / "mmproj-model-f32.gguf")
        pairs[name] = folder
    return pairs[name]


def rows_of(path: Path, spec: ModelSpec) -> tuple[Processed, Tensor]:
    assert spec.vision is not None
    processed = opened(path, spec).process_image(picture(50, 70))
    return processed, load_tower(path, spec.vision, torch.device("cpu"), torch.float32).encode(processed.pixels())


@pytest.mark.parametrize("name", TYPES)
def test_rows_are_those_of_the_safetensors_model(name: str, pairs: dict[str, Path], tmp_path: Path) -> None:
    folder = pair(pairs, name)
    origin, spec = folder / "safetensors", read_spec(folder / "model.gguf")
    wanted = read_spec(origin)
    assert spec.vision is not None
    assert wanted.vision is not None
    assert (spec.rope.sections, spec.rope.axes if spec.rope.sections else ()) == (
        wanted.rope.sections, wanted.rope.axes if wanted.rope.sections else (),
    )  # fmt: skip
    expected, rows = rows_of(origin, wanted)
    found, got = rows_of(folder / "model.gguf", spec)
    assert (found.prompt, found.grid, found.rows) == (expected.prompt, expected.grid, len(got))
    torch.testing.assert_close(got, rows, rtol=1e-5, atol=1e-5)
    tower = load_tower(folder / "model.gguf", spec.vision, torch.device("cpu"), torch.float32)
    assert tower_bytes(folder / "model.gguf", spec.vision, torch.float32) == tower.bytes_held


def test_sixteen_bits_are_near(pairs: dict[str, Path], tmp_path: Path) -> None:
    folder = pair(pairs, "qwen3_vl")
    shutil.copy(folder / "model.gguf", tmp_path / "model.gguf")
    write_projector(folder / "safetensors", tmp_path / "mmproj-F16.gguf", half=True)
    _, rows = rows_of(folder / "safetensors", read_spec(folder / "safetensors"))
    _, got = rows_of(tmp_path / "model.gguf", read_spec(tmp_path / "model.gguf"))
    assert 0 < (got - rows).abs().max() < 2e-3 * rows.abs().max()


def test_a_pair_answers_as_the_whole_model(tmp_path: Path) -> None:
    model = make_seeing(tmp_path / "safetensors", "qwen2_5_vl")
    write_text_part(tmp_path / "safetensors", tmp_path / "model.gguf")
    write_projector(tmp_path / "safetensors", tmp_path / "mmproj-model-f32.gguf")
    spec = read_spec(tmp_path / "model.gguf")
    processed = [opened(tmp_path / "model.gguf", spec).process_image(picture(50, 70))]
    ids, tokens = prompt_of(processed, 1), list[int]()
    assert spec.vision is not None
    assert spec.vision.placeholder_id == PAD
    for _ in range(3):
        tokens.append(int(reference_with_pictures(model, [*ids, *tokens], processed)[-1].argmax()))
    engine = Engine(tmp_path / "model.gguf", encoder_rows=processed[0].rows)
    generated: Any = engine.generate
    assert generated([ids], 3, media=[spans(ids, processed)])[0] == tokens


def test_a_pair_is_served_with_and_without_a_token_for_pictures(tmp_path: Path) -> None:
    """Gemma 3's files end before the token whose rows pictures replace."""
    make_seeing(tmp_path / "safetensors", "qwen2_5_vl")
    image, answers = picture(70, 33), []
    for name in ("with", "without"):
        (tmp_path / name).mkdir()
        tokens = tokens_of(tmp_path / "safetensors")
        renamed = [f"[{token}]" if token == "<|image_pad|>" else token for token in tokens]
        more = {"tokenizer.ggml.tokens": tokens if name == "with" else renamed}
        write_text_part(tmp_path / "safetensors", tmp_path / name / "model.gguf", more)
        write_projector(tmp_path / "safetensors", tmp_path / name / "mmproj-F32.gguf")
        with LLM(str(tmp_path / name / "model.gguf"), max_model_len=512, kv_cache_memory_bytes=8 << 20) as llm:
            part = {"type": "image", "image": image}
            message = {"role": "user", "content": [part, {"type": "text", "text": "What is it?"}]}
            [answer] = llm.chat([message], SamplingParams(max_tokens=4, temperature=0, ignore_eos=True), use_tqdm=False)
            answers.append(answer.outputs[0].token_ids)
    assert answers[0] == answers[1]
    assert len(answers[0]) == 4


def tokens_of(source: Path) -> list[str]:
    raw = json.loads((source / "tokenizer.json").read_text())
    size = json.loads((source / "config.json").read_text())["text_config"]["vocab_size"]
    known = {index: token for token, index in raw["model"]["vocab"].items()}
    known |= {token["id"]: token["content"] for token in raw["added_tokens"]}
    return [known.get(index, f"[PAD{index}]") for index in range(size)]


def test_which_projector_goes_with_a_model() -> None:
    names = ["mmproj-F32.gguf", "mmproj-BF16.gguf", "mmproj-F16.gguf", "gemma-Q4_K_M.gguf"]
    assert projectors_for("gemma-Q4_K_M.gguf", names) == ["mmproj-F16.gguf", "mmproj-BF16.gguf", "mmproj-F32.gguf"]
    flat = ["org_a-GGUF_mmproj-model-f16.gguf", "org_b-GGUF_mmproj-model-f16.gguf"]
    assert projectors_for("org_b-GGUF_b-Q4_0.gguf", flat)[0] == flat[1]
    assert projectors_for("b.gguf", ["mmproj-a-f16.gguf", "mmproj-b-f16.gguf"])[0] == "mmproj-b-f16.gguf"


def test_a_projector_of_another_model_is_left_out_and_refused_if_it_was_asked_for(
    pairs: dict[str, Path], tmp_path: Path
) -> None:
    folder = pair(pairs, "qwen3_vl")
    model, other = Path(shutil.copy(folder / "model.gguf", tmp_path / "m.gguf")), tmp_path / "mmproj-x.gguf"
    write_projector(folder / "safetensors", other, projection_dim=99)
    size = read_spec(folder / "model.gguf").hidden_size
    assert find_projector(model, size) == other  # its matrices fit: old files state another size
    assert find_projector(model, 77) is None
    assert find_projector(model, size, "none") is None
    assert read_spec(model, mmproj="none").vision is None
    with pytest.raises(UnsupportedModel, match="belongs to another model than m"):
        find_projector(model, 77, str(other))
    with pytest.raises(ModelNotFound, match="does not exist"):
        find_projector(model, size, str(tmp_path / "nothing.gguf"))
    with pytest.raises(UnsupportedModel, match="is not a projector for pictures"):
        read_spec(model, mmproj=str(model))


def test_a_projector_of_a_type_that_is_not_read_leaves_the_text_part(pairs: dict[str, Path], tmp_path: Path) -> None:
    folder = pair(pairs, "qwen3_vl")
    model = Path(shutil.copy(folder / "model.gguf", tmp_path / "m.gguf"))
    data = (folder / "mmproj-model-f32.gguf").read_bytes()
    (tmp_path / "mmproj-new.gguf").write_bytes(data.replace(b"qwen3vl_merger", b"qwen9vl_merger"))
    spec, machine = read_spec(model), Hardware((), "a CPU", 2, 2**34, 2**33)
    assert spec.vision is None
    [note] = [
        each for each in plan_memory(EngineConfig(device="cpu"), spec, 2**20, machine).notes if "Text only" in each
    ]
    assert note.startswith("Text only: mmproj-new.gguf has a projector of type 'qwen9vl_merger'")
    with pytest.raises(UnsupportedModel, match="type 'qwen9vl_merger', which is not supported"):
        read_spec(model, mmproj=str(tmp_path / "mmproj-new.gguf"))


def test_a_missing_tensor_is_named(pairs: dict[str, Path], tmp_path: Path) -> None:
    folder = pair(pairs, "qwen3_vl")
    model = Path(shutil.copy(folder / "model.gguf", tmp_path / "m.gguf"))
    data = (folder / "mmproj-model-f32.gguf").read_bytes()
    (tmp_path / "mmproj-f32.gguf").write_bytes(data.replace(b"v.blk.0.ffn_down.bias", b"v.blk.0.ffn_dawn.bias"))
    spec = read_spec(model)
    assert spec.vision is not None
    with pytest.raises(CorruptModel, match=r"has no tensor v.blk.0.ffn_down.bias of \[32\]"):
        load_tower(model, spec.vision, torch.device("cpu"), torch.float32)


def test_the_projector_of_ollamas_manifest(pairs: dict[str, Path], tmp_path: Path) -> None:
    folder, blobs = pair(pairs, "qwen3_vl"), tmp_path / "blobs"
    manifest = tmp_path / "manifests/registry.ollama.ai/library/tiny/latest"
    blobs.mkdir()
    manifest.parent.mkdir(parents=True)
    names = {kind: f"sha256-{digit * 64}" for kind, digit in (("model", "1"), ("projector", "2"))}
    shutil.copy(folder / "model.gguf", blobs / names["model"])
    shutil.copy(folder / "mmproj-model-f32.gguf", blobs / names["projector"])
    layers = ",".join(
        f'{{"mediaType": "application/vnd.ollama.image.{kind}", "digest": "{name.replace("-", ":")}"}}'
        for kind, name in names.items()
    )
    manifest.write_text(f'{{"layers": [{layers}]}}')
    vision = read_spec(blobs / names["model"]).vision
    assert vision is not None
    assert vision.projector == str(blobs / names["projector"])
    manifest.write_text('{"layers": []}')
    assert read_spec(blobs / names["model"]).vision is None, "a changed manifest is read again"
