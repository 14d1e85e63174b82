"""Prediction layers against the same layer computed over the whole text, in float32: hidden states and logits within
1e-5, whatever steps the text is cut into."""

import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from localllm.config.settings import EngineConfig
from localllm.errors import CorruptModel, DrafterMismatch, LocalLLMError
from localllm.kernels.layer_cache import LayerKV
from localllm.kernels.paged_attention import kv_cache_shape
from localllm.models.decoder.decoder import DecoderModel
from localllm.models.drafters.mtp import mtp_bytes, open_mtp, plan_mtp
from localllm.models.fit.activation_bytes import kv_bytes_per_token
from localllm.models.fit.checkpoint import estimate_checkpoint
from localllm.models.inputs import ForwardInputs, GroupInputs
from localllm.models.loader import load_model, resident_bytes
from localllm.models.read_spec import read_spec
from localllm.models.spec.model_spec import FINAL_HIDDEN, FINAL_STREAM, index_size, kv_shape
from localllm.models.weights.parameters import held_bytes
from localllm.serving.drafters import with_drafter
from tests.models.formats.quantised import Store, Stored, rewrite, save_quantised
from tests.models.formats.stores import BLOCKS, DYNAMIC, per_block, per_output
from tests.models.harness import NO_GPU, prompt
from tests.mtp_models import KINDS, MTPOracle, as_gguf, make_mtp_model

CPU, BLOCK_SIZE, NUM_BLOCKS = torch.device("cpu"), 8, 40
TOKENS = prompt(41)
oracle = cache(MTPOracle)


@pytest.fixture(scope="module", params=KINDS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def path(name: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_mtp_model(tmp_path_factory.mktemp(name), name)


class Paged:
    """A drafter with a cache full of NaN, and one request whose blocks are in no order."""

    def __init__(self, path: Path, **load: Any) -> None:
        target = load_model(path, read_spec(path), CPU, torch.float32, **load)
        assert isinstance(target, DecoderModel)
        self.plan = replace(plan_mtp(path, target.spec), quantization=load.pop("quantization", None))
        self.drafter = open_mtp(self.plan, target, CPU, torch.float32, **load)
        shape = kv_cache_shape(NUM_BLOCKS, BLOCK_SIZE, *kv_shape(self.drafter.spec, 0))
        k = torch.full(shape, torch.nan)
        index = torch.full((*shape[:3], index_size(self.drafter.spec, 0)), torch.nan)
        self.cache = [LayerKV(k, k if target.spec.latent is not None else k.clone(), index_keys=index)]
        self.blocks = torch.randperm(NUM_BLOCKS, generator=torch.Generator().manual_seed(1)).int()

    def inputs(self, token_ids: list[int], first: int) -> ForwardInputs:
        """The pairs of tokens first, first + 1, ..."""
        places, count = torch.arange(first, first + len(token_ids)), len(token_ids)
        slots = self.blocks[places // BLOCK_SIZE].long() * BLOCK_SIZE + places % BLOCK_SIZE
        return ForwardInputs(
            token_ids=torch.tensor(token_ids), positions=places - 1, groups=(GroupInputs(self.blocks[None], slots),),
            context_lens=torch.tensor([first + count], dtype=torch.int32),
            cu_seqlens_q=torch.tensor([0, count], dtype=torch.int32), logits_indices=torch.tensor([count - 1]),
            num_decodes=int(count == 1), query_lens=(count,), context_lens_host=(first + count,), first_key=1,
        )  # fmt: skip

    @torch.inference_mode()
    def extend(self, features: Tensor, chunk: int) -> list[Tensor]:
        """Return the hidden state of the newest token after each chunk. features: of the tokens but the last."""
        found = []
        for first in range(1, len(TOKENS), chunk):
            part = slice(first, min(first + chunk, len(TOKENS)))
            step = self.inputs(TOKENS[part], first)
            found.append(self.drafter.extend(step, self.cache, features[part.start - 1 : part.stop - 1]))
        return found


def assert_near(ours: Tensor, theirs: Tensor, within: float = 1e-5) -> None:
    assert ours.shape == theirs.shape
    assert float((ours - theirs).abs().max() / theirs.abs().max()) < within


@pytest.mark.parametrize("chunk", [len(TOKENS), 3, 1])
def test_pairs_and_drafts_are_the_layers(name: str, path: Path, chunk: int) -> None:
    whole, paged = oracle(path, name), Paged(path)
    features = whole.target_hidden(TOKENS)
    wanted = whole.hidden(TOKENS, features[:-1])
    found = paged.extend(features[:-1].clone(), chunk)
    ends = [min(first + chunk, len(TOKENS)) - 2 for first in range(1, len(TOKENS), chunk)]
    assert_near(torch.cat(found), wanted[ends])
    with torch.inference_mode():
        assert_near(paged.drafter.logits(found[-1]), whole.logits(wanted[-1:]))
    drafts, before, newest = [7, 30, 400], features[:-1], found[-1]
    for count, token in enumerate(drafts, start=1):
        before = torch.cat((before, wanted[-1:]))
        wanted = whole.hidden([*TOKENS, *drafts[:count]], before)
        with torch.inference_mode():
            newest = paged.drafter.step(paged.inputs([token], len(TOKENS) + count - 1), paged.cache, newest)
            assert_near(newest, wanted[-1:])
            assert_near(paged.drafter.logits(newest), whole.logits(wanted[-1:]))


@pytest.mark.parametrize("load", [{}, {"quantization": "int8"}, {"cpu_weights": "exact"}], ids=str)
def test_its_bytes_are_predicted(name: str, path: Path, load: dict[str, Any]) -> None:
    paged, layout = Paged(path, **load), {key: value for key, value in load.items() if key == "cpu_weights"}
    plan, loaded = paged.plan, held_bytes(paged.drafter.parts)
    assert mtp_bytes(plan, read_spec(path).num_layers, CPU, torch.float32, **layout) == loaded
    if plan.quantization is None:
        assert plan.stored_bytes == pytest.approx(loaded, rel=0.1)
    else:
        assert plan.stored_bytes > 1.5 * loaded
    assert (plan.taps, plan.first_key) == ((FINAL_HIDDEN if KINDS[name].reads_normed else FINAL_STREAM,), 1)


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_the_plan_counts_the_layer_if_asked(path: Path, quantization: str | None) -> None:
    plans = {}
    for speculative in ("auto", "mtp"):
        config = EngineConfig(
            model=str(path), device="cpu", dtype="float32", quantization=quantization, speculative=speculative
        )
        spec, (found, *_) = estimate_checkpoint(path, config, NO_GPU, with_drafter)
        assert found.plan is not None
        plans[speculative] = found.plan
    assert spec.drafter is not None
    own, both = plans["auto"], plans["mtp"]
    assert both.weights_bytes - own.weights_bytes == mtp_bytes(spec.drafter, 2, CPU, torch.float32)
    per_token = kv_bytes_per_token(spec.drafter.spec, "float32")
    assert both.kv_bytes - own.kv_bytes == own.num_blocks[0] * own.block_size * per_token
    assert any("run with --speculative mtp" in note for note in own.notes)
    assert [note for note in both.notes if "mtp" in note] == [note for note in both.notes if "Drafter (mtp)" in note]


def test_a_model_of_its_own_layers_does_not_load_the_layer(path: Path) -> None:
    model = load_model(path, read_spec(path), CPU, torch.float32)
    assert held_bytes(model) == resident_bytes(path, read_spec(path), CPU, torch.float32)
    assert len(model.layers) == 2


def but_for_experts(stem: str, weight: Tensor) -> Stored | None:
    return None if "experts" in stem else per_output(stem, weight)


@pytest.mark.parametrize(
    ("name", "config", "store"), [("mimo", BLOCKS, per_block()), ("deepseek_v3", DYNAMIC, but_for_experts)]
)
def test_a_layer_of_a_quantised_checkpoint(name: str, config: dict[str, Any], store: Store, tmp_path: Path) -> None:
    source = make_mtp_model(tmp_path / "source", name)
    saved = save_quantised(source, tmp_path / "fp8", config, store)
    meant = {key: tensor for key, tensor in saved.meant.items() if key.startswith(KINDS[name].stored_prefix)}
    paged, whole = Paged(saved.path, cpu_weights="exact"), MTPOracle(source, name, meant)
    features = torch.randn(len(TOKENS) - 1, 64)
    assert_near(paged.extend(features.clone(), len(TOKENS))[0], whole.hidden(TOKENS, features)[-1:], 1e-4)


class TestCopies:
    """DeepSeek and GLM store the embedding and the head once more beside the layer."""

    @pytest.fixture
    def path(self, tmp_path: Path) -> Path:
        return make_mtp_model(tmp_path, "glm4_moe")

    def test_equal_copies_are_the_targets(self, path: Path) -> None:
        parts = Paged(path).drafter.parts
        assert (parts.embedding, parts.head) == (None, None)

    @pytest.mark.parametrize("part", ["embed_tokens", "shared_head.head"])
    def test_other_values_are_loaded(self, path: Path, part: str) -> None:
        before = plan_mtp(path, read_spec(path)).stored_bytes
        rewrite(path, lambda tensors: tensors[f"model.layers.2.{part}.weight"].mul_(2))
        paged, whole = Paged(path), MTPOracle(path, "glm4_moe")
        assert plan_mtp(path, read_spec(path)).stored_bytes == before + 4 * 512 * 64
        scale = 2.0 if part == "shared_head.head" else 1.0
        whole.embedding_scale = 3.0 - scale
        features = whole.target_hidden(TOKENS)[:-1]
        wanted = whole.hidden(TOKENS, features)[-1:]
        (found,) = paged.extend(features, len(TOKENS))
        with torch.inference_mode():
            assert_near(found, wanted)
            assert_near(paged.drafter.logits(found), scale * whole.logits(wanted))


class TestGGUF:
    """llama.cpp's converter writes the layer behind the model's own, or into a file of its own."""

    def check(self, file: Path, source: Path, name: str) -> None:
        paged, whole = Paged(file), MTPOracle(source, name)
        features = whole.target_hidden(TOKENS)[:-1]
        wanted = whole.hidden(TOKENS, features)[-1:]
        (found,) = paged.extend(features.clone(), len(TOKENS))
        with torch.inference_mode():
            assert_near(found, wanted)
            assert_near(paged.drafter.logits(found), whole.logits(wanted))

    @pytest.mark.parametrize("name", ["qwen3_5", "glm4_moe"])
    def test_the_layer_in_the_models_file(self, name: str, tmp_path: Path) -> None:
        source = make_mtp_model(tmp_path / "source", name)
        file = as_gguf(source, name, tmp_path / "model.gguf")
        self.check(file, source, name)
        parts = Paged(file).drafter.parts
        assert (parts.embedding, parts.head) == (None, None), "the copies are the target's"

    def test_the_layer_in_a_file_beside_it(self, tmp_path: Path) -> None:
        source = make_mtp_model(tmp_path / "source", "qwen3_5")
        file = as_gguf(source, "qwen3_5", tmp_path / "Some-Model-F32.gguf", has_layer=False)
        as_gguf(source, "qwen3_5", tmp_path / "mtp-Some-Model-Q8_0.gguf", "Q8_0")
        as_gguf(source, "qwen3_5", tmp_path / "mtp-Some-Model-F32.gguf")
        self.check(file, source, "qwen3_5")

    @pytest.mark.parametrize("place", ["MTP/mtp-some.gguf", "../mtp-some-Q4_0.gguf", "../MTP/mtp-Some-F16.gguf"])
    def test_the_layer_where_a_repository_puts_it(self, place: str, tmp_path: Path) -> None:
        source, folder = make_mtp_model(tmp_path / "source", "qwen3_5"), tmp_path / "snapshot" / "Q8_0"
        beside = (folder / place).resolve()
        folder.mkdir(parents=True)
        beside.parent.mkdir(exist_ok=True)
        file = as_gguf(source, "qwen3_5", folder / "some-Q8_0.gguf", has_layer=False)
        as_gguf(source, "qwen3_5", beside)
        self.check(file, source, "qwen3_5")

    def test_its_quantised_bytes_are_predicted(self, tmp_path: Path) -> None:
        source = make_mtp_model(tmp_path / "source", "qwen3_5")
        file = as_gguf(source, "qwen3_5", tmp_path / "model.gguf", "Q8_0")
        paged = Paged(file)
        assert mtp_bytes(paged.plan, 2, CPU, torch.float32) == held_bytes(paged.drafter.parts)


class TestRefused:
    def refuse(self, path: Path, message: str, kind: type[LocalLLMError] = DrafterMismatch) -> None:
        with pytest.raises(kind) as caught:
            Paged(path)
        assert re.search(message, f"{caught.value} {caught.value.hint}", re.DOTALL), caught.value

    def test_a_family_without_such_layers(self, tiny_model_path: Callable[[str], Path]) -> None:
        self.refuse(tiny_model_path("llama"), "not supported for LlamaForCausalLM.*DeepSeek-V3.*--draft MODEL")

    def test_a_checkpoint_that_leaves_it_out(self, tiny_model_path: Callable[[str], Path]) -> None:
        self.refuse(tiny_model_path("deepseek_v3"), "no layer for multi-token prediction.*model.layers.2.")

    def test_a_gguf_file_that_leaves_it_out(self, tmp_path: Path) -> None:
        source = make_mtp_model(tmp_path / "source", "qwen3_5")
        folder = tmp_path / "models--org--name" / "snapshots" / "main"
        folder.mkdir(parents=True)
        file = as_gguf(source, "qwen3_5", folder / "model.gguf", has_layer=False)
        as_gguf(source, "qwen3_5", folder / "mtp-other.gguf")
        words = r"model\.gguf has no layer.*blk\.2\., .*mtp-NAME\.gguf.*localllm pull org/name --include '\*mtp-\*'"
        self.refuse(file, words)

    @pytest.mark.parametrize("name", ["deepseek_v3", "mimo"])
    def test_tensors_that_the_layer_does_not_use(self, name: str, tmp_path: Path) -> None:
        path, prefix = make_mtp_model(tmp_path, name), KINDS[name].stored_prefix
        rewrite(path, lambda tensors: tensors.update({f"{prefix}self_attn.q_norm.weight": torch.ones(16)}))
        self.refuse(path, "1 tensors that.*q_norm", CorruptModel)

    def test_a_projection_of_another_shape(self, tmp_path: Path) -> None:
        path = make_mtp_model(tmp_path, "mimo")
        rewrite(path, lambda tensors: tensors.update({"model.mtp_layers.0.input_proj.weight": torch.ones(64, 64)}))
        self.refuse(path, r"input_proj\.weight has shape \[64, 64\]", CorruptModel)
