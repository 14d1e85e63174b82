"""A model over ranks is served like any other: same answers, sleep, adapters, trials. Ranks die at any time."""

import asyncio
import itertools
import json
import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from localllm.config.lora_modules import LoraModule
from localllm.config.settings import Settings
from localllm.engine.client import GenerationRequest
from localllm.engine.params import SamplingParams
from localllm.engine.request import RequestOptions
from localllm.engine.speculation import Speculation
from localllm.errors import RanksLost
from localllm.llm import LLM, LoRARequest
from localllm.ranks.executor import RankExecutor
from localllm.serving import loading
from localllm.serving.manager import ModelManager
from localllm.serving.reopen import BareModel, open_engine
from tests.adapters import make_tiny_adapter
from tests.eagle_files import write_eagle
from tests.mtp_models import make_mtp_model
from tests.serving import settings_for
from tests.tiny import make_tiny_model

PROMPTS = ["The quick brown fox", "Paris is", "def add(a, b):"]
GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True, logprobs=1)
IDS = itertools.count()
PLACES: dict[str, dict[str, Any]] = {
    "tp 2": {"tensor_parallel_size": 2},
    "tp 3": {"tensor_parallel_size": 3},
    "tp 2 x pp 2": {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
}
SMALL: dict[str, Any] = {"device": "cpu", "max_model_len": 128, "kv_cache_memory_bytes": 4 << 20}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four KV heads: three ranks hold 2, 1 and 1 of them."""
    sizes = {"num_attention_heads": 8, "num_key_value_heads": 4, "hidden_size": 64, "head_dim": 8}
    return make_tiny_model(tmp_path_factory.mktemp("ranks") / "tiny", "llama", **sizes)


@pytest.fixture(scope="module")
def adapter(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_adapter(tmp_path_factory.mktemp("adapters") / "a", checkpoint, seed=1)


def texts(
    llm: LLM, params: SamplingParams = GREEDY, adapter: LoRARequest | None = None
) -> list[tuple[list[int], float]]:
    outputs = llm.generate(PROMPTS, params, use_tqdm=False, lora_request=adapter)
    return [(list(each.outputs[0].token_ids), each.outputs[0].cumulative_logprob or 0.0) for each in outputs]


@pytest.mark.parametrize("place", ["tp 2", *(pytest.param(each, marks=pytest.mark.slow) for each in list(PLACES)[1:])])
def test_answers_are_those_of_one_process(place: str, checkpoint: Path) -> None:
    with LLM(str(checkpoint), **SMALL) as alone:
        wanted = texts(alone)
    with LLM(str(checkpoint), **SMALL, **PLACES[place]) as ranked:
        answers = texts(ranked)
        executor = ranked._engine.executor
        assert isinstance(executor, RankExecutor)
        pids = [process.pid for process in executor.processes]
    assert [ids for ids, _ in answers] == [ids for ids, _ in wanted]
    assert [score for _, score in answers] == pytest.approx([score for _, score in wanted], abs=1e-3)
    assert not any(psutil.pid_exists(pid) for pid in pids)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "place"),
    [
        ("eagle3", "tp 2"),
        ("draft_model", "tp 3"),
        ("mtp of mimo", "tp 2 x pp 2"),
        ("mtp of mimo_v2", "tp 2"),
        ("mtp of step3p5", "tp 2 x pp 2"),
    ],
)
def test_a_drafter_over_ranks_changes_no_answer(
    method: str, place: str, checkpoint: Path, adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedy and sampled with a seed, also for a prompt whose prefix is cached, and for an adapter, which the drafter
    does not read. The model drafts for itself over three ranks, and is right where no adapter is used."""
    monkeypatch.setattr(Speculation, "width", lambda self, decoding, ready, limit: limit // len(ready) - 1)
    path, drafter = checkpoint, str(checkpoint)
    method, _, family = method.partition(" of ")
    if method == "mtp":
        path = make_mtp_model(tmp_path / "mtp", family)
    if method == "eagle3":
        drafter = str(write_eagle(tmp_path / "eagle", json.loads((path / "config.json").read_text()), taps=[0, 1]))
    asked: dict[str, Any] = {"speculative": "mtp"} if method == "mtp" else {"draft": drafter}
    taught = None if method == "mtp" else LoRARequest("taught", 1, str(adapter))  # made for the other checkpoint
    given = {**SMALL, "enable_lora": taught is not None}
    sampled = replace(GREEDY, temperature=0.9, seed=7, top_p=0.9, logprobs=None, max_tokens=30)
    with LLM(str(path), **given, speculative="off") as alone:
        wanted = [texts(alone), texts(alone, sampled), texts(alone, sampled), texts(alone, sampled, taught)]
    with LLM(str(path), **given, **PLACES[place], **asked) as ranked:
        answers = [texts(ranked), texts(ranked, sampled), texts(ranked, sampled)]
        stats = ranked._engine.client.stats().speculation
        answers.append(texts(ranked, sampled, taught))
    assert [[ids for ids, _ in each] for each in answers] == [[ids for ids, _ in each] for each in wanted]
    assert stats.num_draft_tokens > 100
    assert taught is None or wanted[3] != wanted[2]
    if method == "draft_model":
        assert stats.num_accepted_tokens > 0.8 * stats.num_draft_tokens  # lookup may be wrong


# ---- kept by a manager -----------------------------------------------------------------------------------------------


async def tokens(manager: ModelManager, name: str = "tiny", count: int = 12) -> list[int]:
    with await manager.acquire(name) as lent:
        model = lent.as_asked(name)
        options = RequestOptions(adapter=model.adapter)
        params = SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)
        request = GenerationRequest(f"{name}-{next(IDS)}", [5, 6, 7], params, options)
        events = [event async for event in model.generator.generate(request)]
        if (error := events[-1].error) is not None:
            raise error
        return [token for event in events for token in event.token_ids]


def ranks_of(manager: ModelManager) -> list[int]:
    executor = manager.ready[0].executor
    assert isinstance(executor, RankExecutor)
    return [process.pid for process in executor.processes]


@pytest.mark.slow
async def test_a_manager_keeps_a_model_over_ranks(
    checkpoint: Path, adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One story, since each start of ranks takes seconds: adapters, sleep, tuning, and deaths at any time."""
    monkeypatch.setattr(loading, "STABLE_S", 0.0)
    manager = ModelManager()
    one = settings_for(checkpoint, device="cpu", lora_modules=(LoraModule("taught", str(adapter)),))
    await manager.start(replace(one, engine=replace(one.engine, max_model_len=512)))
    wanted, taught = await tokens(manager), await tokens(manager, "taught")
    assert wanted != taught
    await manager.close()

    manager = ModelManager()
    await manager.start(replace(one, engine=replace(one.engine, max_model_len=512, tensor_parallel_size=2)))
    assert await tokens(manager) == wanted
    assert await tokens(manager, "taught") == taught

    pids = ranks_of(manager)
    await manager.sleep("tiny")
    assert await tokens(manager) == wanted
    assert ranks_of(manager) == pids

    def work(bare: BareModel, settings: Settings) -> int:
        served = open_engine(bare, replace(settings.engine, max_num_seqs=2))
        served.close_engine()
        return served.plan.max_num_seqs

    assert await manager.lending.lend("tiny", work, lambda: None) == 2
    assert await tokens(manager) == wanted

    lost = manager.ready[0].executor
    open_request = asyncio.create_task(tokens(manager, count=500))
    while not manager.ready[0].client.stats().num_running:
        await asyncio.sleep(0.01)
    died_s = time.monotonic()
    os.kill(pids[1], signal.SIGKILL)
    with pytest.raises(RanksLost, match=r"Rank 1 .*SIGKILL"):
        await open_request
    assert time.monotonic() - died_s < 5  # scripts/bench_ranks measures how long it takes
    while manager.ready and manager.ready[0].executor is lost:  # until the manager hears of it
        await asyncio.sleep(0.01)
    assert await tokens(manager) == wanted
    assert await tokens(manager, "taught") == taught
    ranks = manager.ready[0].client.stats().runner.ranks
    assert [(each.is_up, each.restarts) for each in ranks] == [(True, 1), (True, 1)]
    assert "SIGKILL" in ranks[1].last_words

    await manager.sleep("tiny")
    os.kill(ranks[0].pid or 0, signal.SIGKILL)
    assert await tokens(manager) == wanted

    pids = ranks_of(manager)
    await manager.unload("tiny")
    assert not any(psutil.pid_exists(pid) for pid in pids)
    await manager.close()
