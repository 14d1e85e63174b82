"""Shards of a model against the whole model, in fp32: logits, bytes, KV, adapters, experts, stored formats."""

import shutil
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from localllm.config.settings import EngineConfig
from localllm.errors import ConfigError, CorruptModel, UnsupportedOption
from localllm.models.fit.devices import (
    Division,
    require_possible,
    require_replicable,
    why_no_ranks,
    why_no_replicas,
    why_no_stages,
)
from localllm.models.layers.attention import Attention
from localllm.models.layers.embedding import EmbeddingTable, SplitEmbeddingTable
from localllm.models.layers.group import Alone, GatheredInput, PaddedInput
from localllm.models.layers.lora import LoraLimits
from localllm.models.layers.mlp import CPU_ROWS
from localllm.models.layers.moe import renumbered
from localllm.models.loader import load_model, resident_bytes
from localllm.models.read_spec import read_spec
from localllm.models.spec.model_spec import SourceSpec
from localllm.models.spec.shard import Shard, even_heads, shards_of, stage_starts
from localllm.models.weights.lora import open_lora, put_lora
from localllm.models.weights.parameters import held_bytes
from tests.adapters import make_tiny_adapter
from tests.gguf_files import write_gguf
from tests.models.formats.quantised import save_quantised
from tests.models.formats.stores import AWQ, BLOCKS, GPTQ, awq, gptq, per_block
from tests.models.harness import CPU, THOROUGH, ModelHarness, Sequence, assert_close, prompt
from tests.models.sharded import STEPS, ShardedModel, even_shards, load_whole, run
from tests.models.stored_experts import WAYS as STORED_EXPERTS
from tests.models.stored_experts import fuse, gpt_oss, quantise_experts, rewrite, wide_moe
from tests.models.vision_models import make_model
from tests.threads import Threads
from tests.tiny import FAMILIES, RECOGNISED, make_tiny_model

__all__ = ["gpt_oss", "wide_moe"]  # fixtures
PathOf = Callable[[str], Path]
TOKENS = prompt(sum(STEPS))
MIXTURES = ("mixtral", "qwen2_moe", "olmoe", "glm4_moe", "gpt_oss", "deepseek_v2")


@cache
def whole_logits(path: Path, **options: Any) -> Tensor:
    logits = run([load_whole(path, **options)], TOKENS)
    assert logits is not None
    return logits


def shards_or_skip(path: Path, size: int, **counts: Any) -> list[Shard]:
    shards = even_shards(path, size, **counts)
    if shards is None:
        pytest.skip(f"the heads cannot be divided by {size}")
    return shards


def lopsided(total: int, size: int, unit: int = 1) -> list[int]:
    """Divide `total` so that every part but the last has one unit more than half of its even share."""
    part = total // size // 2 // unit * unit + unit
    return [part] * (size - 1) + [total - part * (size - 1)]


def uneven(path: Path, size: int) -> dict[str, Any]:
    """Return counts in which no matrix that may be cut anywhere is cut evenly."""
    spec = read_spec(path)
    counts: dict[str, Any] = {
        "features": lopsided(spec.intermediate_size, size),
        "vocab": lopsided(spec.vocab_size, size),
    }
    if spec.mixture is not None:
        counts["expert_features"] = lopsided(spec.mixture.intermediate_size, size)
        counts["shared_features"] = lopsided(spec.mixture.shared_size, size) if spec.mixture.shared_size else None
    return counts


# ---- equal logits ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", [*FAMILIES, *RECOGNISED])
def test_two_shards_of_every_family(family: str, tiny_model_path: PathOf) -> None:
    """Unlike sizes of feed-forward, vocabulary and experts; bytes as predicted, and all tensors used."""
    path = tiny_model_path(family)
    spec, shards = read_spec(path), shards_or_skip(path, 2, **uneven(path, 2))
    model = ShardedModel(path, shards)
    assert_close(model.logits(TOKENS), whole_logits(path))
    for shard, own in zip(shards, model.stages[0], strict=True):
        assert held_bytes(own) == resident_bytes(path, spec, CPU, torch.float32, shard=shard)


def test_shards_of_layers_with_other_heads_and_limits(tmp_path: Path) -> None:
    make_model(tmp_path, "Step3p7Config")
    beside = [shards_or_skip(tmp_path, 2, **uneven(tmp_path, 2))]
    behind = [shards_or_skip(tmp_path, 1, layers=own) for own in (range(2), range(2, 4))]
    for stages in (beside, behind):
        assert_close(ShardedModel(tmp_path, *stages).logits(TOKENS), whole_logits(tmp_path))


@pytest.mark.parametrize("family", [*FAMILIES, *RECOGNISED])
def test_two_stages_of_every_family(family: str, tiny_model_path: PathOf) -> None:
    """Or the reason why there are none, by which -pp is refused."""
    path = tiny_model_path(family)
    spec = read_spec(path)
    if why := why_no_stages(spec):
        with pytest.raises(UnsupportedOption, match=why):
            require_possible(spec, Division(1, 2), 2)
        return
    require_possible(spec, Division(1, 2), 2)
    cut = min(stage_starts(spec), key=lambda layer: abs(layer - spec.num_layers // 2))
    model = ShardedModel(
        path, *(even_shards(path, 1, layers=own) or [] for own in (range(cut), range(cut, spec.num_layers)))
    )
    assert_close(model.logits(TOKENS), whole_logits(path))


def test_each_reason_for_one_device_refuses_its_flag(tiny_model_path: PathOf) -> None:
    spec = read_spec(tiny_model_path("llama"))
    for other in (replace(spec, implementation="transformers"), replace(spec, source=SourceSpec(9, (1,)))):
        for division in (Division(2, 1), Division(1, 2)):
            why = why_no_ranks(other) or (why_no_stages(other) if division.pipeline > 1 else "")
            assert why or (other.source is not None and division.pipeline == 1)
            with pytest.raises(UnsupportedOption, match=why) if why else nullcontext():
                require_possible(other, division, 2)
        with pytest.raises(UnsupportedOption, match=why_no_replicas(other)) as refused:
            require_replicable(other, EngineConfig(data_parallel_size=2))
        assert refused.value.param == "data_parallel_size"
    require_replicable(read_spec(tiny_model_path("lfm2")), EngineConfig(data_parallel_size=2))
    apart = EngineConfig(data_parallel_size=2, prefill_replicas=1)
    with pytest.raises(UnsupportedOption, match="recurrent states, which are not moved"):
        require_replicable(read_spec(tiny_model_path("lfm2")), apart)


OFTEN = [*((family, 4) for family in THOROUGH), ("yi", 3), ("gptj", 3), ("bloom", 3), ("deepseek_v3", 3)]


@pytest.mark.parametrize(
    ("family", "size"),
    [
        pytest.param(family, size, marks=[] if (family, size) in OFTEN else pytest.mark.slow)
        for family in FAMILIES
        for size in (3, 4)
    ],
)
def test_more_shards(family: str, size: int, tiny_model_path: PathOf) -> None:
    """Most families have fewer KV heads than four, which are then repeated."""
    path = tiny_model_path(family)
    assert_close(ShardedModel(path, shards_or_skip(path, size)).logits(TOKENS), whole_logits(path))


@pytest.mark.parametrize("family", ["gemma4", "gemma3n"])
def test_stages_of_layers_that_read_others_keys(family: str, tmp_path: Path) -> None:
    """Three stages, alone and of two shards. The last layers read what an earlier one of their stage keeps; per-layer
    embeddings, and several residual streams, go from stage to stage."""
    kinds = ["sliding_attention", "full_attention"] * 4
    sparse = {"activation_sparsity_pattern": [0.9, 0.0] * 4} if family == "gemma3n" else {}
    path = make_tiny_model(
        tmp_path, family, num_hidden_layers=8, layer_types=kinds, num_kv_shared_layers=3, use_double_wide_mlp=False,
        **sparse,
    )  # fmt: skip
    spec = read_spec(path)
    assert tuple(stage_starts(spec)) == (1, 2, 3)
    for size in (1, 2):
        each = [shards_or_skip(path, size, layers=own) for own in (range(1), range(1, 3), range(3, 8))]
        model = ShardedModel(path, *each)
        assert_close(model.logits(TOKENS), whole_logits(path))
        for shards, held in zip(each, model.stages, strict=True):
            predicted = [resident_bytes(path, spec, CPU, torch.float32, shard=shard) for shard in shards]
            assert [held_bytes(own) for own in held] == predicted


def test_a_stage_that_would_read_keys_of_an_earlier_one_is_refused(tiny_model_path: PathOf) -> None:
    spec = read_spec(tiny_model_path("gemma4"))  # of six layers, the last three read the keys of layers 1 and 2
    assert tuple(stage_starts(spec)) == (1,)
    require_possible(spec, Division(1, 2, layers=(1, 5)), 3)
    for division in (Division(1, 3), Division(1, 2, layers=(3, 3))):
        with pytest.raises(ConfigError, match="a stage can begin at layer 1"):
            require_possible(spec, division, 3)
    spec = read_spec(tiny_model_path("glm_moe_dsa"))  # the second of three layers attends to keys that the first chose
    assert tuple(stage_starts(spec)) == (2,)
    assert spec.latent is not None
    assert spec.index is not None
    last = replace(spec, latent=replace(spec.latent, index=replace(spec.index, layers=(True, False, False))))
    with pytest.raises(UnsupportedOption, match="attend to keys that a layer of an earlier stage has chosen"):
        require_possible(last, Division(1, 2), 2)


@pytest.mark.parametrize("stages", [(1, 1), (2, 2), (2, 1, 1)], ids=str)
@pytest.mark.parametrize("family", ["smollm3", "gpt2", "bloom", "gemma3", "qwen2_moe", "cohere2"])
def test_stages(family: str, stages: tuple[int, ...], tiny_model_path: PathOf) -> None:
    """Stages of some layers each, alone and of two shards: the first embeds, the last has the head, tied or not."""
    path = tiny_model_path(family)
    spec = read_spec(path)
    if spec.num_layers < sum(stages):
        stages = (1,) * spec.num_layers
    ends = [sum(stages[:count]) for count in range(len(stages))] + [spec.num_layers]
    for size in (1, 2):
        each = [shards_or_skip(path, size, layers=range(a, b)) for a, b in pairwise(ends)]
        model = ShardedModel(path, *each)
        assert_close(model.logits(TOKENS), whole_logits(path))
        assert [stage[0].embedding is None for stage in model.stages] == [False] + [True] * (len(stages) - 1)
        assert [stage[0].lm_head is None for stage in model.stages] == [True] * (len(stages) - 1) + [False]
        for shards, held in zip(each, model.stages, strict=True):
            predicted = [resident_bytes(path, spec, CPU, torch.float32, shard=shard) for shard in shards]
            assert [held_bytes(own) for own in held] == predicted


def compositions(total: int, size: int, least: int = 0) -> st.SearchStrategy[list[int]]:
    cuts = st.lists(st.integers(0, total - least * size), min_size=size - 1, max_size=size - 1).map(sorted)
    return cuts.map(lambda at: [b - a + least for a, b in pairwise([0, *at, total - least * size])])


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Models with many heads, and sizes that no power of two divides."""
    odd = {"num_hidden_layers": 2, "num_attention_heads": 8, "vocab_size": 515}
    folder = tmp_path_factory.mktemp("wide")
    models = {
        "llama": make_tiny_model(folder / "llama", **odd, num_key_value_heads=4, intermediate_size=87),
        "qwen2_moe": make_tiny_model(folder / "moe", "qwen2_moe", **odd, num_key_value_heads=2),
        "gpt_oss": make_tiny_model(folder / "oss", "gpt_oss", **odd, num_key_value_heads=4),
    }
    rewrite(models["gpt_oss"], shake_biases_of_experts)
    return models


def shake_biases_of_experts(tensors: dict[str, Tensor]) -> None:
    """Give the experts biases: those of a random model are zeros."""
    names = [name for name in tensors if name.endswith("proj_bias")]
    assert names
    generator = torch.Generator().manual_seed(0)
    tensors |= {name: torch.randn(tensors[name].shape, generator=generator) for name in names}


@settings(
    max_examples=8, deadline=None, derandomize=True, phases=[Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)  # fmt: skip
@given(data=st.data())
@pytest.mark.parametrize("name", ["llama", "qwen2_moe", "gpt_oss"])
def test_any_split(name: str, data: st.DataObject, wide: dict[str, Path]) -> None:
    """Shares of one feature, one expert and no row of the vocabulary included."""
    path, spec = wide[name], read_spec(wide[name])
    size = data.draw(st.integers(2, 4))
    if size <= spec.num_kv_heads:
        heads = data.draw(compositions(spec.num_kv_heads, size, 1))
    else:
        even = even_heads(spec, size)
        assume(even is not None)
        assert even is not None
        heads = even
    counts: dict[str, Any] = {
        "features": data.draw(compositions(spec.intermediate_size, size, 1)),
        "vocab": data.draw(compositions(spec.vocab_size, size)),
    }
    if spec.mixture is not None:
        kind, total = data.draw(
            st.sampled_from(
                [("experts", spec.mixture.num_experts), ("expert_features", spec.mixture.intermediate_size)]
            )
        )
        counts[kind] = data.draw(compositions(total, size, 1))
        shared = spec.mixture.shared_size
        counts["shared_features"] = data.draw(compositions(shared, size, min(1, shared)))
    shards = shards_of(spec, heads, **counts)
    model = ShardedModel(path, shards)
    assert_close(model.logits(TOKENS), whole_logits(path))
    for shard, own in zip(shards, model.stages[0], strict=True):
        assert held_bytes(own) == resident_bytes(path, spec, CPU, torch.float32, shard=shard)


@pytest.mark.parametrize("family", ["granite", "gpt2"])
def test_embeddings_that_a_request_gives(family: str, tiny_model_path: PathOf) -> None:
    """Every shard puts them in the place of the summed rows: before Granite's scale, before GPT-2's positions."""
    path = tiny_model_path(family)
    whole, embeds = load_whole(path), torch.randn(20, 64)
    wanted = run([whole], TOKENS, embeds=embeds)
    assert wanted is not None
    assert (wanted - whole_logits(path)).abs().max() > 0.01
    assert_close(ShardedModel(path, shards_or_skip(path, 2)).logits(TOKENS, embeds=embeds), wanted)


# ---- what is exchanged -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("family", "per_layer"), [("llama", 2), ("gptj", 1), ("olmo2", 3), ("qwen3_moe", 2)])
def test_exchanges_of_a_step(family: str, per_layer: int, tiny_model_path: PathOf) -> None:
    """One sum for the embedding, then per layer attention and feed-forward, together where they run in parallel."""
    path = tiny_model_path(family)
    model = ShardedModel(path, shards_or_skip(path, 2))
    model.logits(TOKENS, [len(TOKENS)])
    logits = 1
    assert model.threads[0].num_calls == 1 + per_layer * read_spec(path).num_layers + logits


def test_a_whole_model_has_no_trace_of_a_group(tiny_model_path: PathOf) -> None:
    model = load_whole(tiny_model_path("llama"))
    layer = model.layers[0]
    assert type(layer.attention) is Attention  # type: ignore[attr-defined]
    assert type(model.embedding) is EmbeddingTable
    assert model.compute_logits(torch.zeros(1, 64)) is not None


def test_repeated_kv_heads_are_equal_bit_for_bit(tiny_model_path: PathOf) -> None:
    """Two KV heads on four shards: shards 0 and 1 hold the first, 2 and 3 the second."""
    path = tiny_model_path("qwen3")
    shards = shards_or_skip(path, 4)
    assert [shard.kv_heads for shard in shards] == [range(1), range(1), range(1, 2), range(1, 2)]
    model = ShardedModel(path, shards)
    harnesses = [ModelHarness(own) for own in model.stages[0]]
    whole = ModelHarness(load_whole(path))

    def prefill(harness: ModelHarness) -> list[Tensor]:
        sequence = Sequence(TOKENS)
        harness.model.forward(harness._inputs([(sequence, len(TOKENS))], True), harness.kv_cache)
        return [part[:, sequence.blocks[:3]] for layer in harness.kv_cache for part in (layer.k, layer.v)]

    kept = model.threads[0].run([lambda h=h: prefill(h) for h in harnesses])
    for one, other in ((0, 1), (2, 3)):
        assert all(torch.equal(a, b) for a, b in zip(kept[one], kept[other], strict=True))
    heads = [torch.cat(parts) for parts in zip(kept[0], kept[2], strict=True)]
    for got, wanted in zip(heads, prefill(whole), strict=True):
        assert_close(got, wanted)


class Recorder(Alone):
    """A group that keeps what was to be summed."""

    def __init__(self) -> None:
        self.seen: list[Tensor] = []

    def sum_(self, x: Tensor) -> Tensor:
        self.seen.append(x.clone())
        return x


def test_a_vocabulary_share_without_a_token_of_the_step_adds_zeros() -> None:
    rows, group = torch.randn(8, 4) + 10, Recorder()
    table = SplitEmbeddingTable(rows, torch.float32, range(16, 24), group)
    positions = torch.zeros(3, dtype=torch.int64)
    table(torch.tensor([3, 15, 24]), positions)
    table(torch.tensor([16, 3, 23]), positions)
    assert torch.equal(group.seen[0], torch.zeros(3, 4))
    assert torch.equal(group.seen[1], torch.stack([rows[0], torch.zeros(4), rows[7]]))


@given(sizes=st.lists(st.integers(0, 5), min_size=1, max_size=4), seed=st.integers(0, 99))
def test_each_token_runs_each_of_its_experts_on_one_shard(sizes: list[int], seed: int) -> None:
    assume(sum(sizes) > 0)
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(-1, sum(sizes), (7, 3), generator=generator, dtype=torch.int32)
    found = torch.full_like(ids, -1)
    runs = torch.zeros_like(ids)
    first = 0
    for size in sizes:
        own = renumbered(ids, range(first, first + size))
        assert own.dtype == ids.dtype
        assert bool((own < size).all())
        runs += own >= 0
        found = torch.where(own >= 0, own + first, found)
        first += size
    assert torch.equal(found, ids)
    assert torch.equal(runs, (ids >= 0).int())


@pytest.mark.parametrize("family", MIXTURES)
def test_whole_experts(family: str, tiny_model_path: PathOf, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three shards with unlike numbers of experts; biases of an expert are added once."""
    path = tiny_model_path(family)
    count = read_spec(path).mixture.num_experts  # type: ignore[union-attr]
    size = 3 if even_shards(path, 3) else 2
    own = lopsided(count, size)
    model = ShardedModel(path, shards_or_skip(path, size, experts=own))
    assert_close(model.logits(TOKENS), whole_logits(path))


# ---- stored formats --------------------------------------------------------------------------------------------------

WIDE: dict[str, Any] = {
    "num_hidden_layers": 1, "hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "num_attention_heads": 4,
    "num_key_value_heads": 4, "dtype": "float16",
}  # fmt: skip
FORMATS: dict[str, tuple[dict[str, Any], Any, type]] = {
    "awq": (AWQ, awq(32), PaddedInput),
    "gptq": (GPTQ, gptq(4, 32), PaddedInput),
    "gptq-desc_act": ({**GPTQ, "desc_act": True}, gptq(4, 32, order="part"), GatheredInput),
    "fp8-blocks": (BLOCKS, per_block(), PaddedInput),
}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("source") / "llama", **WIDE)


@pytest.mark.parametrize("name", FORMATS)
def test_safetensors_formats(name: str, source: Path, tmp_path: Path) -> None:
    """Cuts inside a group, a word and a scale's block, of rows and of columns."""
    config, store, kind = FORMATS[name]
    path = save_quantised(source, tmp_path / "model", config, store).path
    check_format(path, kind)


def test_gguf_superblocks(source: Path, tmp_path: Path) -> None:
    """256 columns share a superblock of Q4_K, so that a head's 64 are a quarter. Also: no row of the vocabulary."""
    path = tmp_path / "model.gguf"
    write_gguf(source, path, "Q4_K")
    check_format(path, PaddedInput)
    spec = read_spec(path)
    bare = shards_of(spec, [1, 3], features=[511, 1], vocab=[0, 512])
    model = ShardedModel(path, bare, cpu_weights="exact")
    assert_close(model.logits(TOKENS), whole_logits(path, cpu_weights="exact"))
    for shard, own in zip(bare, model.stages[0], strict=True):
        assert held_bytes(own) == resident_bytes(path, spec, CPU, torch.float32, shard=shard, cpu_weights="exact")


def check_format(path: Path, kind: type) -> None:
    spec = read_spec(path)
    shards = shards_of(spec, [1, 3], features=[201, 311])
    model = ShardedModel(path, shards, cpu_weights="exact")
    layer: Any = model.stages[0][0].layers[0]
    assert type(layer.mlp.part.down) is kind
    assert_close(model.logits(TOKENS), whole_logits(path, cpu_weights="exact"))
    for layout in ("exact", "fast"):
        for shard in shards:
            own = load_whole(path, shard=shard, cpu_weights=layout)
            assert held_bytes(own) == resident_bytes(path, spec, CPU, torch.float32, shard=shard, cpu_weights=layout)


@pytest.mark.parametrize("family", ["gpt2", "qwen2_moe", "deepseek_v3"])
def test_matrices_that_can_only_be_cut_by_rows(
    family: str, tiny_model_path: PathOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inputs of unlike sizes are gathered, biases are cut with their rows, adapters too."""
    path = tiny_model_path(family)
    wanted = whole_logits(path)
    monkeypatch.setattr("localllm.models.weights.weights.Weights.widened", lambda *_: None)
    model = ShardedModel(path, shards_or_skip(path, 2, **uneven(path, 2)), lora=LoraLimits(1, 4))
    last: Any = model.stages[0][0].layers[-1]
    assert type(last.attention.part.out) is GatheredInput
    assert_close(model.logits(TOKENS), wanted)


@pytest.mark.parametrize("cut", ["columns", "rows"])
def test_a_step_longer_than_a_cpu_takes_at_once(
    cut: str, tiny_model_path: PathOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The feed-forward part runs some rows at a time, so that inputs are gathered more than once."""
    path, tokens = tiny_model_path("llama"), prompt(CPU_ROWS + 30)
    wanted = run([load_whole(path)], tokens, [len(tokens)])
    if cut == "rows":
        monkeypatch.setattr("localllm.models.weights.weights.Weights.widened", lambda *_: None)
    model = ShardedModel(path, shards_or_skip(path, 2, **uneven(path, 2)))
    assert wanted is not None
    assert_close(model.logits(tokens, [len(tokens)]), wanted)
    per_layer = 2 + (3 if cut == "rows" else 0)  # attention's inputs, and those of two parts of the feed-forward
    assert model.threads[0].num_calls == 2 + 2 * per_layer


@pytest.mark.parametrize("quantization", ["int4", "int8", "fp8"])
def test_quantised_at_load(quantization: str, source: Path) -> None:
    """Each shard quantises its own part: values differ from the whole model's where scales are shared."""
    spec = read_spec(source)
    shards = shards_of(spec, [2, 2], features=[192, 320])
    options = {"quantization": quantization, "cpu_weights": "exact"}
    model = ShardedModel(source, shards, **options)
    error = (model.logits(TOKENS) - whole_logits(source, **options)).abs().max() / whole_logits(source).abs().max()
    assert error < (1e-4 if quantization == "int4" else 0.05)
    for shard, own in zip(shards, model.stages[0], strict=True):
        assert held_bytes(own) == resident_bytes(source, spec, CPU, torch.float32, shard=shard, **options)


EXPERTS: dict[str, Any] = {"experts": [2, 1, 3], "expert_features": [33, 50, 45]}


@pytest.mark.parametrize("cut", EXPERTS)
@pytest.mark.parametrize("name", [*STORED_EXPERTS, "one tensor for all", "mxfp4", "gguf"])
def test_formats_of_experts(name: str, cut: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """Whole experts, and slices of all of them: of a matrix each, and of one tensor for all."""
    counts = {cut: EXPERTS[cut]}
    if name == "mxfp4":
        path, _ = request.getfixturevalue("gpt_oss")
        counts = {"experts": [2, 1, 1]} if cut == "experts" else {"expert_features": [33, 50, 13]}
    elif name == "gguf":
        path, sizes = tmp_path / "model.gguf", {"hidden_size": 128, "moe_intermediate_size": 128}
        write_gguf(make_tiny_model(tmp_path / "source", "qwen3_moe", **sizes, mlp_only_layers=[]), path, "Q4_0")
    elif name == "one tensor for all":
        path = tmp_path / "model"
        shutil.copytree(request.getfixturevalue("wide_moe"), path)
        rewrite(path, lambda tensors: fuse(tensors, "mlp", ("gate_proj", "up_proj", "down_proj"), "mlp"))
    else:
        config, store, _ = STORED_EXPERTS[name]
        path, _ = quantise_experts(request.getfixturevalue("wide_moe"), tmp_path, config, store)
    spec = read_spec(path)
    shards = shards_of(spec, [2, 1, 1], **counts)  # query heads: three shards of two KV heads
    model = ShardedModel(path, shards, cpu_weights="exact")
    assert_close(model.logits(TOKENS), whole_logits(path, cpu_weights="exact"))
    for shard, own in zip(shards, model.stages[0], strict=True):
        assert held_bytes(own) == resident_bytes(path, spec, CPU, torch.float32, shard=shard, cpu_weights="exact")


# ---- adapters --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "phi3", "gpt2", "cohere", "qwen2_moe", "deepseek_v3"])
def test_adapters(family: str, tiny_model_path: PathOf, tmp_path: Path) -> None:
    """An adapter of every matrix, over two shards and over stages of two shards."""
    path = tiny_model_path(family)
    spec = read_spec(path)
    targets = () if family != "deepseek_v3" else ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj",
                                                  "shared_experts.gate_proj", "shared_experts.down_proj")  # fmt: skip
    adapter = open_lora(make_tiny_adapter(tmp_path / "a", path, targets=targets))
    limits = LoraLimits(max_loras=2, max_rank=4)
    whole = load_whole(path, lora=limits)
    assert whole.lora is not None
    put_lora(adapter, whole.lora, 1)
    wanted = run([whole], TOKENS, adapter=1)
    assert wanted is not None
    assert (wanted - whole_logits(path)).abs().max() > 0.01, "the adapter changes something"
    for layers in ([range(spec.num_layers)], [range(1), range(1, spec.num_layers)]):
        stages = [shards_or_skip(path, 2, layers=own) for own in layers]
        model = ShardedModel(path, *stages, lora=limits)
        for stage, shards in zip(model.stages, stages, strict=True):
            for own, shard in zip(stage, shards, strict=True):
                assert own.lora is not None
                put_lora(adapter, own.lora, 1)
                assert held_bytes(own) == resident_bytes(path, spec, CPU, torch.float32, shard=shard, lora=limits)
        assert_close(model.logits(TOKENS, adapter=1), wanted)
        assert_close(model.logits(TOKENS), whole_logits(path))


# ---- refusals --------------------------------------------------------------------------------------------------------


def test_a_tensor_that_no_shard_uses(tiny_model_path: PathOf, tmp_path: Path) -> None:
    path = tmp_path / "model"
    shutil.copytree(tiny_model_path("llama"), path)
    tensors = load_file(path / "model.safetensors")
    save_file({**tensors, "model.layers.1.extra.weight": torch.zeros(3)}, path / "model.safetensors")
    stages = [shards_or_skip(path, 2, layers=range(layer, layer + 1)) for layer in (0, 1)]
    with pytest.raises(CorruptModel, match=r"holds 1 tensors that Llama.*extra"):
        ShardedModel(path, *stages)


def test_a_matrix_of_another_size_is_named_before_it_is_cut(tiny_model_path: PathOf, tmp_path: Path) -> None:
    path = tmp_path / "model"
    shutil.copytree(tiny_model_path("llama"), path)
    tensors = load_file(path / "model.safetensors")
    name = "model.layers.1.mlp.down_proj.weight"
    save_file({**tensors, name: tensors[name][:, :-1].contiguous()}, path / "model.safetensors")
    with pytest.raises(CorruptModel, match=r"layers.1.mlp.down_proj has shape \[64, 95\]"):
        ShardedModel(path, shards_or_skip(path, 2))


def test_experts_that_can_only_be_given_whole(tiny_model_path: PathOf, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tiny_model_path("mixtral")
    shards = shards_or_skip(path, 2)
    monkeypatch.setattr("localllm.models.weights.weights.Weights.widened_experts", lambda *_: None)
    with pytest.raises(UnsupportedOption, match="no expert can be split") as caught:
        load_whole(path, shard=shards[0])
    assert "--enable-expert-parallel" in str(caught.value.hint)


def test_models_that_run_on_one_device(tiny_model_path: PathOf) -> None:
    path = tiny_model_path("llama")
    shards = shards_or_skip(path, 2)
    for spec in (replace(read_spec(path), implementation="transformers"), replace(read_spec(path), task="embed")):
        for call in (load_model, resident_bytes):
            with pytest.raises(UnsupportedOption, match="--tensor-parallel-size"):
                call(path, spec, CPU, torch.float32, shard=shards[0])
    with pytest.raises(UnsupportedOption, match="--verify"):
        load_whole(path, shard=shards[0], verify=True)


@pytest.mark.parametrize("counts", [{"kv_heads": [0, 2]}, {"kv_heads": [1, 1], "features": [96, 0]}], ids=str)
def test_a_shard_needs_a_part_of_each_kind(counts: dict[str, list[int]], tiny_model_path: PathOf) -> None:
    """Without features it would not gather with the others, and would refuse adapters of the feed-forward part."""
    spec = replace(read_spec(tiny_model_path("llama")), num_kv_heads=2, intermediate_size=96)
    with pytest.raises(ValueError, match="each shard needs a part"):
        shards_of(spec, **counts)


def test_a_failed_shard_ends_the_others() -> None:
    threads = Threads(2)
    first, second = threads.members()

    def fail() -> None:
        raise RuntimeError("one has failed")

    with pytest.raises(RuntimeError, match="one has failed"):
        threads.run([lambda: first.sum_(torch.zeros(1)), fail])  # type: ignore[list-item]
    assert second.index == 1
