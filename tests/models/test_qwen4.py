"""Qwen4-Exp through its class: n-grams and pools of keys at every edge of a chunk, and in the engine."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from localllm.config.settings import EngineConfig
from localllm.engine.params import SamplingParams
from localllm.engine.request import Request
from localllm.errors import CorruptModel, UnsupportedOption
from localllm.machine.hardware import Hardware
from localllm.models.fit import kv_cache_bytes, plan_memory
from localllm.models.loader import load_model, resident_bytes
from localllm.models.read_spec import read_spec
from localllm.models.spec.model_spec import state_bytes
from localllm.models.transformers_backend.module import StoredTable
from localllm.models.weights.parameters import held_bytes
from localllm.runner.kv_cache import KVCache, StateCache
from tests.models.class_models import make_class_model
from tests.models.classes import class_logits
from tests.models.harness import CPU, GIB, ModelHarness, Sequence, assert_close, prompt
from tests.models.peak_bytes import PeakBytes
from tests.runner.harness import serve, tokens_of

EOS, BUDGET, POOL = 2, 16, 4
NGRAM = 3


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("qwen4_exp")
    make_class_model(folder, "qwen4_exp_text")
    return folder


@pytest.fixture(scope="module")
def model(path: Path) -> Any:
    return load_model(path, read_spec(path), CPU, torch.float32)


@pytest.mark.parametrize("chunk", [1, 2, 3, 9, 10, 40])
def test_an_ngram_ends_at_a_token_that_ends_a_text(chunk: int, path: Path, model: Any) -> None:
    """Such a token is at the first place, at the last, twice in a row, and on both sides of the edges of chunks. The
    convolution over n-grams reads 9 tokens back."""
    tokens = prompt(40)
    for place in (0, 8, 9, 10, 19, 23, 24, 39):
        tokens[place] = EOS
    _, logits = ModelHarness(model).prefill(tokens, chunk)
    assert_close(logits, class_logits(path, [tokens])[0])


@pytest.mark.parametrize("length", range(BUDGET - 1, BUDGET + 2 * POOL + 1))
def test_at_the_first_pool_that_is_left_out(length: int, path: Path, model: Any) -> None:
    """Four pools are chosen, and the keys after the last complete pool are always seen."""
    tokens = prompt(length, seed=length)
    (wanted,) = class_logits(path, [tokens])
    for chunk in (1, length - 1, length):
        assert_close(ModelHarness(model).prefill(tokens, chunk)[1], wanted)


def test_many_requests_decode_at_once(path: Path, model: Any) -> None:
    """Requests of all lengths modulo the pool, each with its own n-grams, in one batch of single tokens."""
    harness, texts = ModelHarness(model), [prompt(length + 5, seed=length) for length in (1, 2, 17, 30, 31, 32, 45)]
    rows = [Sequence(text) for text in texts]
    harness.step([(row, len(row.token_ids) - 5) for row in rows])
    for _ in range(4):
        harness.step([(row, 1) for row in rows])
    last = torch.cat(harness.step([(row, 1) for row in rows]))
    assert_close(last, torch.stack([logits[-1] for logits in class_logits(path, texts)]))


def requests(prefix: str = "") -> list[Request]:
    shared = prompt(60, seed=5)
    prompts = [[*shared[:cut], *prompt(length, seed=length)] for cut, length in ((60, 9), (33, 21), (0, 30), (60, 14))]
    params = SamplingParams(temperature=0.0, max_tokens=12)
    return [Request(f"{prefix}{i}", tokens, params, max_output_tokens=12) for i, tokens in enumerate(prompts)]


def test_what_is_kept_depends_on_the_request_alone(model: Any) -> None:
    """Neighbours, chunks, prefix hits and preemptions, with memory that is NaN at the start."""
    alone = {
        request.request_id: tokens_of(serve(model, model.spec, [request], num_places=2)[0][request.request_id])
        for request in requests()
    }
    told, scheduler = serve(
        model, model.spec, requests(), num_blocks=17, num_places=9, depth=2, step=20, then=requests("again ")
    )
    assert scheduler.recorder.num_failed_steps == 0
    assert scheduler.recorder.num_preemptions > 0
    assert scheduler.recorder.prefix_cache_hits > 0
    for name, outputs in told.items():
        assert tokens_of(outputs) == alone[name.removeprefix("again ")], name


def test_what_is_kept_takes_the_planned_bytes(path: Path) -> None:
    """Of each token the indexer's key beside K and V; of each request the inputs of both convolutions and the matrix of
    the delta rule, and with the matrix the last token ids, which fp32 holds exactly."""
    spec, text = read_spec(path), 4 * 64  # width of the residual streams
    channels, matrix = 2 * 2 * 12 + 4 * 20, 4 * 12 * 20
    assert spec.layer_index_sizes == (0, 32, 0, 32)
    assert spec.recurrent is not None
    assert spec.recurrent.held == (channels * 4 + text * 3 * NGRAM, matrix + NGRAM - 1)
    cache = KVCache(spec, (5,), 8, CPU, "bfloat16")
    assert cache.allocated_bytes == kv_cache_bytes(spec, (5,), 8, "bfloat16")
    layers = StateCache(spec, 3, CPU, torch.bfloat16).layers.values()
    assert sum(part.nbytes for layer in layers for part in layer.tensors()) == 3 * state_bytes(spec, "bfloat16")


@pytest.mark.parametrize("model_type", ["qwen4_exp_text", "qwen4_exp"])
@pytest.mark.parametrize("quantization", [None, "int8"])
def test_tables_of_ngrams_stay_in_the_files(model_type: str, quantization: str | None, tmp_path: Path) -> None:
    """Rows come from each part of a table; no table is among the bytes that are held, as planned."""
    make_class_model(tmp_path, model_type)
    spec = read_spec(tmp_path)
    model = load_model(tmp_path, spec, CPU, torch.float32, quantization=quantization)
    assert held_bytes(model) == resident_bytes(tmp_path, spec, CPU, torch.float32, quantization=quantization)
    tables = [part for part in model.module.modules() if isinstance(part, StoredTable)]
    assert len(tables) == 2
    assert not any(name.endswith("ngram_embedding.weight") for name in model.module.state_dict())
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        names = [name for name in file.keys() if "ngram_embedding.shard_" in name]  # noqa: SIM118
        assert len(names) == 4
        stored = torch.cat([file.get_tensor(name) for name in sorted(names)])
    assert torch.equal(torch.cat(list(map(rows, tables))), stored)


def test_a_table_of_another_size_is_refused(tmp_path: Path) -> None:
    make_class_model(tmp_path, "qwen4_exp_text")
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    name = next(name for name in tensors if name.endswith("ngram_embedding.shard_1.weight"))
    save_file({**tensors, name: tensors[name][:-3].clone()}, file, {"format": "pt"})
    with pytest.raises(CorruptModel, match=r"ngram_embedding.weight has shape .*asks for"):
        load_model(tmp_path, read_spec(tmp_path), CPU, torch.float32)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_step_holds_no_more_than_planned(dtype: str, tmp_path: Path) -> None:
    """The residual streams and what their mixing makes are most of a prompt's step."""
    sizes = {"hidden_size": 512, "ple_embed_dim": 512, "indexer_budget": 256, "hc_lowrank": 64, "num_experts": 8}
    make_class_model(tmp_path, "qwen4_exp_text", max_position_embeddings=1024, **sizes)
    spec, machine = read_spec(tmp_path), Hardware((), "CPU", 8, 32 * GIB, 24 * GIB)
    model = load_model(tmp_path, spec, CPU, getattr(torch, dtype), verify=False)
    config = EngineConfig(max_num_batched_tokens=512, max_model_len=1024, max_num_seqs=1, dtype=dtype)
    planned = plan_memory(config, spec, GIB, machine).activation_bytes
    harness, sequence = ModelHarness(model, num_blocks=140), Sequence(prompt(1024))
    with torch.inference_mode():
        harness.step([(sequence, 512)])
        with PeakBytes() as meter:
            harness.step([(sequence, 512)])
    assert planned / 2 < meter.peak <= planned


def rows(table: StoredTable) -> torch.Tensor:
    """All rows, in a shape of two dimensions as the class asks for."""
    count = int(table._ends[-1])
    return table(torch.arange(count).view(-1, 1)).flatten(0, 1)


@pytest.mark.parametrize("model_type", ["qwen4_exp_text", "deepseek_v4"])
def test_given_embeddings_are_refused_where_the_class_reads_token_ids(model_type: str, tmp_path: Path) -> None:
    make_class_model(tmp_path, model_type)
    spec, machine = read_spec(tmp_path), Hardware((), "CPU", 8, 32 * GIB, 24 * GIB)
    plan_memory(EngineConfig(), spec, GIB, machine)
    with pytest.raises(UnsupportedOption, match="enable-prompt-embeds"):
        plan_memory(EngineConfig(enable_prompt_embeds=True), spec, GIB, machine)
