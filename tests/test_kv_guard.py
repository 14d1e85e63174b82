"""A KV cache of 4 bits is compared with the model's own before a model is served with it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from localllm.config.settings import EngineConfig
from localllm.engine.params import SamplingParams
from localllm.errors import UnsupportedOption
from localllm.kernels.kv_format import KV_FORMATS
from localllm.llm import LLM
from localllm.machine.hardware import read_hardware
from localllm.models.library.catalog import demo_path
from localllm.serving.build import build_engine, plan_again
from localllm.serving.guard import Agreement, guard_config, require_agreement
from localllm.serving.profiles import fingerprint
from localllm.serving.served import LoadLimits
from tests.serving import answer, settings_for
from tests.tiny import make_tiny_model

HEAD_DIM = 32
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module")
def outliers_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in whose value heads one number is a thousand times as large as the others, and never read: a scale for
    all of them rounds the others away."""
    path = tmp_path_factory.mktemp("outliers")
    make_tiny_model(path, "llama", head_dim=HEAD_DIM)
    weights = load_file(path / "model.safetensors")
    for name, weight in weights.items():
        if name.endswith("v_proj.weight"):
            weight.unflatten(0, (-1, HEAD_DIM))[:, 5] *= 1e4
        if name.endswith("o_proj.weight"):
            weight.unflatten(1, (-1, HEAD_DIM))[:, :, 5] = 0
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return path


@pytest.mark.parametrize("kv", ["k8v4", "int4"])
def test_a_model_that_loses_its_values_in_four_bits_is_refused_with_the_numbers(outliers_path: Path, kv: str) -> None:
    with pytest.raises(UnsupportedOption) as caught:
        build_engine(settings_for(outliers_path, kv_cache_dtype=kv))
    assert caught.value.param == "kv_cache_dtype"
    assert " of 256 tokens" in str(caught.value)
    assert caught.value.hint == "--kv-cache-dtype int8"


def test_a_cache_that_another_replica_has_compared_is_not_compared_again(outliers_path: Path) -> None:
    build_engine(settings_for(outliers_path, kv_cache_dtype="int4"), limits=LoadLimits(kv_is_compared=True)).close()


def test_its_own_cache_is_not_compared(outliers_path: Path) -> None:
    build_engine(settings_for(outliers_path)).close()


def test_the_engines_of_the_comparison_keep_nothing_outside_of_the_cache(outliers_path: Path) -> None:
    model = build_engine(settings_for(outliers_path, swap_space=0.5))
    try:
        assert model.plan.kv_ram_bytes
        small = guard_config(EngineConfig(swap_space=0.5), model.plan, "int4")
        assert not plan_again(model.executor, model.spec, model.plan, small, read_hardware()).kv_ram_bytes
    finally:
        model.close()


@pytest.mark.parametrize("kv", ["k8v4", "int4"])
def test_the_demo_is_served_with_four_bits(kv: str, tmp_path: Path) -> None:
    """And its blocks are found on disk after a restart."""
    settings: dict[str, Any] = {"kv_cache_dtype": kv, "kv_disk_gib": 0.1, "kv_offload_dir": str(tmp_path)}
    told = []
    for computed in (200, 8):
        model = build_engine(settings_for(demo_path(), **settings))
        assert model.plan.kv_dtype == kv
        told.append(answer(model, 200))
        model.close()
        assert model.loop.scheduler.recorder.prompt_tokens == computed
    assert told[0] == told[1]
    names = {fingerprint(model.path, replace(model.plan, kv_dtype=each), settings_for(demo_path()).engine, model.spec)
             for each in KV_FORMATS}  # fmt: skip
    assert len(names) == len(KV_FORMATS), "a format never reads the blocks of another one"


def test_what_the_guard_makes_of_an_agreement() -> None:
    assert require_agreement(Agreement(249, 256), "int4") == ""
    assert "240 of 256 tokens" in require_agreement(Agreement(240, 256), "int4")
    with pytest.raises(UnsupportedOption, match=r"230 of 256 tokens.*at least 90%"):
        require_agreement(Agreement(230, 256), "k8v4")


@pytest.mark.slow
@pytest.mark.parametrize("kv", ["k8v4", "int4"])
def test_four_bits_beside_a_drafter_ranks_and_stages_answer_as_without(kv: str) -> None:
    """Each of these models is compared with its own cache first, as every one with 4 bits."""
    told = []
    beside: tuple[dict[str, Any], ...] = ({"draft": "demo"}, {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2})
    for given in ({"speculative": "off"}, *beside):
        with LLM("demo", device="cpu", max_model_len=512, max_num_seqs=8, kv_cache_dtype=kv, **given) as llm:
            said = llm.generate(["Name three colours of the rainbow.", "Paris is"], GREEDY, use_tqdm=False)
            told.append([each.outputs[0].token_ids for each in said])
    assert told == [told[0]] * 4
