"""Adapters of a model that serves: which request runs under which, whose prefixes are whose, coming and going."""

import asyncio
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from localllm.config.lora_modules import LoraModule
from localllm.config.resolve import resolve
from localllm.config.settings import EngineConfig, ServerConfig, Settings
from localllm.engine.adapter import Adapter
from localllm.engine.params import SamplingParams
from localllm.engine.request import Request, RequestOptions
from localllm.errors import ConfigError, InvalidParameter, ModelNotFound, UnsupportedOption
from localllm.kernels import launch
from localllm.llm import LLM, LoRARequest
from localllm.models.decoder.decoder import DecoderModel
from localllm.models.layers.lora import LoraLimits
from localllm.models.loader import load_model
from localllm.models.read_spec import read_spec
from localllm.models.weights.lora import open_lora, put_lora
from localllm.runner.executor import BankSlots
from localllm.serving.adapters import AdapterBusy, AdapterRefused, Adapters
from localllm.serving.build import build_engine
from localllm.serving.entry import ModelNotLoaded
from localllm.serving.manager import ModelManager
from tests.adapters import make_tiny_adapter, merged
from tests.engine.harness import make_engine, make_request
from tests.models.harness import prompt, reference_greedy
from tests.runner.harness import CPU, serve
from tests.tiny import load_reference, make_tiny_model

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def folders(tiny_llama_path: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Three adapters of tiny llama: the third has other numbers only."""
    root = tmp_path_factory.mktemp("adapters")
    return {name: make_tiny_adapter(root / name, tiny_llama_path, seed=seed) for seed, name in enumerate("abc")}


# ---- through scheduler and runner ------------------------------------------------------------------------------------


def requests(adapters: list[Adapter | None], count: int, tokens: tuple[int, int] = (10, 20)) -> list[Request]:
    """Prompts that begin alike, under different adapters and none."""
    dice = random.Random(5)
    shared = [dice.randrange(3, 500) for _ in range(33)]
    asked = []
    for i in range(count):
        ids = shared[: dice.choice([17, 33])] + [dice.randrange(3, 500) for _ in range(dice.randint(1, 9))]
        adapter = adapters[i % len(adapters)]
        params = SamplingParams(temperature=0.0, max_tokens=dice.randint(*tokens))
        options = RequestOptions(adapter=adapter)
        asked.append(Request(f"r{i}", ids, params, options, max_output_tokens=params.max_tokens or 1))
    return asked


def loaded_model(path: Path, folders: dict[str, Path]) -> tuple[Any, list[Adapter | None]]:
    model = load_model(path, read_spec(path), CPU, torch.float32, lora=LoraLimits(2, 4))
    adapters: list[Adapter | None] = [None]
    for slot, name in enumerate("ab"):
        put_lora(open_lora(folders[name]), model.lora, slot)  # type: ignore[union-attr, arg-type]
        adapters.append(Adapter(name, slot, name))
    return model, adapters


def said(told: dict[str, Any]) -> dict[str, list[int]]:
    return {name: [token for output in outputs for token in output.token_ids] for name, outputs in told.items()}


@pytest.fixture(scope="module")
def wanted(tiny_llama_path: Path, folders: dict[str, Path]) -> list[list[int]]:
    """What transformers says to each, with its adapter merged in."""
    bases = [load_reference(tiny_llama_path), *(merged(tiny_llama_path, folders[name]) for name in "ab")]
    asked = requests([None], 9)
    return [reference_greedy(bases[i % 3], list(r.token_ids), r.max_output_tokens) for i, r in enumerate(asked)]


@pytest.mark.skipif(launch.INTERPRETED, reason="hundreds of steps; the test below takes a few")
@pytest.mark.parametrize(
    ("depth", "num_blocks", "way"), [(1, 100, "host"), (2, 15, "host"), (2, 15, "staged"), (2, 15, "replayed")]
)
def test_output_depends_on_the_request_and_its_adapter_alone(
    depth: int, num_blocks: int, way: str, wanted: list[list[int]], tiny_llama_path: Path, folders: dict[str, Path]
) -> None:
    """Few blocks force preemptions, steps of 24 tokens force chunks; prefixes are found under the same adapter only."""
    model, adapters = loaded_model(tiny_llama_path, folders)
    told, scheduler = serve(
        model, read_spec(tiny_llama_path), requests(adapters, 9), num_blocks=num_blocks, depth=depth, step=24, way=way
    )
    assert scheduler.recorder.num_failed_steps == 0
    assert (scheduler.recorder.num_preemptions > 0) == (num_blocks == 15)
    for i, request in enumerate(requests(adapters, 9)):
        assert said(told)[request.request_id] == wanted[i], request.request_id
    assert [adapter.num_requests for adapter in adapters if adapter] == [0, 0]


@pytest.mark.skipif(not launch.INTERPRETED, reason="needs TRITON_INTERPRET=1")
def test_kernels_answer_as_their_twins(
    tiny_llama_path: Path, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, adapters = loaded_model(tiny_llama_path, folders)
    spec = read_spec(tiny_llama_path)
    through_kernels, _ = serve(model, spec, requests(adapters, 3, (1, 2)), depth=2, step=64, way="staged")
    monkeypatch.setattr(launch, "INTERPRETED", False)
    through_twins, _ = serve(model, spec, requests(adapters, 3, (1, 2)))
    assert said(through_kernels) == said(through_twins)


@pytest.mark.skipif(launch.INTERPRETED, reason="hundreds of steps")
@pytest.mark.parametrize("kv_dtype", ["k8v4", "int4"])
def test_a_cache_of_four_bits_holds_what_the_merged_weights_would_write(kv_dtype: str, tmp_path: Path) -> None:
    path = make_tiny_model(tmp_path / "heads of 32", "llama", head_dim=32)
    spec = read_spec(path)
    folders = {name: make_tiny_adapter(tmp_path / name, path, seed=seed) for seed, name in enumerate("ab")}
    model, adapters = loaded_model(path, folders)
    told, _ = serve(model, spec, requests(adapters, 6), step=24, kv_dtype=kv_dtype)
    for place, name in enumerate((None, "a", "b")):
        whole = path
        if name is not None:
            merged(path, folders[name]).save_pretrained(whole := tmp_path / f"{name} merged")
        asked = requests([None], 6)[place::3]
        alone, _ = serve(load_model(whole, spec, CPU, torch.float32), spec, asked, step=24, kv_dtype=kv_dtype)
        assert {each: said(told)[each] for each in alone} == said(alone)


# ---- the model made of memory ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(6))
def test_no_request_reads_what_another_adapter_wrote(seed: int) -> None:
    """Requests of few prompts and adapters come, are cancelled, are preempted: it raises where prefixes meet."""
    dice = random.Random(seed)
    engine = make_engine(num_blocks=20, depth=dice.choice([1, 2]), max_num_batched_tokens=16)
    adapters = [None, Adapter("a", 0, "x"), Adapter("b", 1, "x"), Adapter("c", 2, "y")]
    prompts = [[dice.randrange(30) for _ in range(length)] for length in (5, 13, 18)]
    for i in range(40):
        request = make_request(f"r{i}", dice.choice(prompts), max_tokens=dice.randint(1, 6))
        adapter = dice.choice(adapters)
        engine.loop.submit(_under(request, adapter))
        for _ in range(dice.randint(0, 4)):
            engine.loop.step()
        if dice.random() < 0.2:
            engine.loop.cancel(f"r{dice.randint(0, i)}")
    engine.run()
    assert [adapter.num_requests for adapter in adapters if adapter] == [0, 0, 0]
    assert all(len(endings) == 1 for endings in engine.endings.values())
    assert len(engine.endings) == 40


def _under(request: Request, adapter: Adapter | None, salt: str | None = None) -> Request:
    return Request(
        request.request_id, request.token_ids, request.params, RequestOptions(cache_salt=salt, adapter=adapter),
        max_output_tokens=request.max_output_tokens,
    )  # fmt: skip


def test_prefixes_are_shared_under_one_adapter_alone() -> None:
    engine = make_engine(block_size=4)
    a, b = Adapter("a", 0, "same contents"), Adapter("b", 1, "same contents")
    again, changed = Adapter("a", 0, "same contents"), Adapter("a", 0, "other contents")
    cached = {}
    cases = [("plain", None), ("a", a), ("b", b), ("a once more", a), ("a loaded again", again), ("a changed", changed)]
    for name, adapter in [*cases, ("plain once more", None)]:
        request = _under(make_request(name, list(range(12)), max_tokens=1), adapter)
        engine.loop.submit(request)
        engine.run()
        cached[name] = request.num_cached_tokens
    assert cached == {
        "plain": 0, "a": 0, "b": 0, "a once more": 8, "a loaded again": 8, "a changed": 0, "plain once more": 8,
    }  # fmt: skip


def test_a_salt_and_an_adapter_of_one_name_never_meet() -> None:
    adapter = Adapter("b", 0, "a")
    name, value = adapter.cache_extra
    under, salted, both = (
        _under(make_request("r", [1, 2, 3]), *which) for which in ((adapter, None), (None, value), (adapter, value))
    )
    hasher = make_engine().scheduler.cache.hasher
    assert len({hasher.root(request.cache_extras) for request in (under, salted, both)}) == 3
    assert name == "lora"


def test_a_refused_request_counts_no_longer() -> None:
    engine = make_engine(max_num_queued_reqs=1, max_num_seqs=1)
    adapter = Adapter("a", 0, "x")
    for i in range(4):
        engine.loop.submit(_under(make_request(f"r{i}", [1, 2, 3]), adapter))
    assert adapter.num_requests == 4
    engine.loop.step()
    assert adapter.num_requests < 4  # the queue was full
    engine.run()
    assert adapter.num_requests == 0
    ended = adapter.close()
    assert ended is not None
    assert ended.done()
    with pytest.raises(ModelNotFound):
        engine.loop.submit(make_request("plain", [1]), _under(make_request("late", [1]), adapter))
    assert not engine.scheduler.has_work


# ---- one by one ------------------------------------------------------------------------------------------------------


@pytest.fixture
def adapters(tiny_llama_path: Path) -> Adapters:
    model = load_model(tiny_llama_path, read_spec(tiny_llama_path), CPU, torch.float32, lora=LoraLimits(2, 4))
    assert isinstance(model, DecoderModel)
    assert model.lora is not None
    return Adapters(BankSlots(model.lora), ("tiny", "org/tiny"))


def test_names_and_room(adapters: Adapters, folders: dict[str, Path]) -> None:
    assert adapters.load("a", str(folders["a"])).adapter.slot == 0
    assert adapters.load("b", str(folders["b"])).adapter.slot == 1
    for taken in ("a", "tiny", "org/tiny"):
        with pytest.raises(AdapterRefused, match=taken):
            adapters.load(taken, str(folders["c"]))
    with pytest.raises(AdapterRefused) as caught:
        adapters.load("c", str(folders["c"]))
    assert "--max-loras 3" in caught.value.hint
    adapters.unload("a")
    with pytest.raises(ModelNotFound):
        adapters.unload("a")
    assert adapters.load("c", str(folders["c"])).adapter.slot == 0
    assert [each.name for each in adapters.loaded] == ["b", "c"]
    assert adapters.find("a") is None


def test_what_could_not_be_loaded_takes_no_slot(adapters: Adapters, folders: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound):
        adapters.load("a", str(tmp_path / "nowhere"))
    assert adapters.load("a", str(folders["a"])).adapter.slot == 0


def test_an_adapter_in_the_cache_of_the_hub(
    adapters: Adapters, folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = tmp_path / "models--org--adapter" / "snapshots" / "0123"
    snapshot.parent.mkdir(parents=True)
    folders["a"].joinpath("adapter_config.json").stat()
    snapshot.symlink_to(folders["a"])
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    assert adapters.load("a", "org/adapter").rank == 4


def test_unloading_waits_for_the_last_request(adapters: Adapters, folders: dict[str, Path]) -> None:
    adapter = adapters.load("a", str(folders["a"])).adapter
    adapter.begin()
    with pytest.raises(AdapterBusy, match="in use"):
        adapters.unload("a", wait_s=0.01)
    adapter.begin()  # it is open again
    ended: list[float] = []
    waiting = threading.Thread(target=lambda: (adapters.unload("a"), ended.append(time.monotonic())))
    waiting.start()
    while adapter._ended is None:
        time.sleep(0.001)
    with pytest.raises(AdapterBusy, match="is being unloaded"):
        adapters.unload("a")
    with pytest.raises(ModelNotFound, match="has been unloaded"):
        adapter.begin()
    adapter.end()
    time.sleep(0.01)
    assert not ended
    adapter.end()
    waiting.join(5)
    assert ended
    assert adapters.find("a") is None


async def test_unloading_holds_no_thread_and_no_lock_while_it_waits(
    adapters: Adapters, folders: dict[str, Path]
) -> None:
    adapter = adapters.load("a", str(folders["a"])).adapter
    adapter.begin()
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
    unloading = asyncio.create_task(adapters.unload_async("a"))
    await asyncio.sleep(0)
    assert adapter._ended is not None
    loaded = await asyncio.wait_for(asyncio.to_thread(adapters.load, "b", str(folders["b"])), 30)
    assert loaded.adapter.slot == 1
    with pytest.raises(AdapterBusy, match="is being unloaded"):
        await adapters.unload_async("a")
    assert not unloading.done()
    adapter.end()
    await asyncio.wait_for(unloading, 30)
    assert [each.name for each in adapters.loaded] == ["b"]


async def test_an_unload_that_is_late_or_cancelled_leaves_the_adapter_open(
    adapters: Adapters, folders: dict[str, Path]
) -> None:
    adapter = adapters.load("a", str(folders["a"])).adapter
    adapter.begin()
    with pytest.raises(AdapterBusy, match="in use"):
        await adapters.unload_async("a", wait_s=0.01)
    unloading = asyncio.create_task(adapters.unload_async("a"))
    await asyncio.sleep(0.01)
    unloading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await unloading
    adapter.begin()
    adapter.end()
    adapter.end()
    adapters.unload("a")


# ---- LLM -------------------------------------------------------------------------------------------------------------


def test_offline(tiny_llama_path: Path, folders: dict[str, Path]) -> None:
    ids = prompt(30)
    plain, one, other = (
        reference_greedy(model, ids, 6)
        for model in (load_reference(tiny_llama_path), *(merged(tiny_llama_path, folders[name]) for name in "ab"))
    )
    assert len({tuple(each) for each in (plain, one, other)}) == 3
    a, b = (LoRARequest(name, i + 1, str(folders[name])) for i, name in enumerate("ab"))
    with LLM(str(tiny_llama_path), enable_lora=True, max_lora_rank=4, max_loras=2, max_model_len=128) as llm:
        outputs = llm.generate([ids] * 3, GREEDY, use_tqdm=False, lora_request=[None, a, b])
        assert [output.outputs[0].token_ids for output in outputs] == [plain, one, other]
        again = llm.generate(ids, GREEDY, use_tqdm=False, lora_request=a)[0]
        assert (again.outputs[0].token_ids, again.num_cached_tokens) == (one, 16)
        with pytest.raises(AdapterRefused, match="slots are in use"):
            llm.generate(ids, GREEDY, lora_request=LoRARequest("c", 3, str(folders["c"])))
        with pytest.raises(InvalidParameter, match="is loaded from"):
            llm.generate(ids, GREEDY, lora_request=LoRARequest("a", 1, str(folders["c"])))
        with pytest.raises(InvalidParameter, match="lora_request has 1 entries for 2"):
            llm.generate([ids, ids], GREEDY, lora_request=[a])
    with (
        LLM(str(tiny_llama_path), max_model_len=128) as llm,
        pytest.raises(UnsupportedOption, match="does not support adapters"),
    ):
        llm.generate(ids, GREEDY, lora_request=a)


# ---- settings --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "given",
    [
        "a=/x/y=z",
        ["a=/x/y=z"],
        '{"name": "a", "path": "/x/y=z"}',
        {"a": "/x/y=z"},
        [{"name": "a", "path": "/x/y=z"}],
    ],
)
def test_modules_are_understood(given: Any) -> None:
    config = resolve({"lora_modules": given}, {}).engine
    assert config.lora_modules == (LoraModule("a", "/x/y=z"),)
    assert config.takes_adapters


@pytest.mark.parametrize("given", ["a", "=x", "a=", "{", '{"name": "a"}', '{"name": "a", "path": "b", "rank": 3}', 3])
def test_modules_that_are_not_understood(given: Any) -> None:
    with pytest.raises(ConfigError, match="--lora-modules"):
        resolve({"lora_modules": [given]}, {})


def test_more_modules_than_room_names_the_flag() -> None:
    with pytest.raises(ConfigError) as caught:
        EngineConfig(lora_modules=tuple(LoraModule(str(i), "x") for i in range(5)))
    assert caught.value.hint == "--max-loras 5"


# ---- the manager -----------------------------------------------------------------------------------------------------


def settings_for(path: Path, **engine: Any) -> Settings:
    engine = {"max_model_len": 128, "kv_cache_memory_bytes": 1 << 20, "max_lora_rank": 4, "max_loras": 2, **engine}
    return Settings(EngineConfig(model=str(path), **engine), ServerConfig(served_model_name=("base",)))


async def tokens(manager: ModelManager, name: str, count: Callable[[], int]) -> list[int]:
    from localllm.engine.admission import GenerationRequest

    with await manager.acquire(name) as model:
        seen = model.as_asked(name)
        request = GenerationRequest(f"r{count()}", prompt(30), GREEDY, RequestOptions(adapter=seen.adapter))
        return [token async for event in seen.generator.generate(request) for token in event.token_ids]


async def test_adapters_sleep_and_wake_with_their_model(tiny_llama_path: Path, folders: dict[str, Path]) -> None:
    ids = iter(range(100))
    wanted = {name: reference_greedy(merged(tiny_llama_path, folders[name]), prompt(30), 6) for name in "ab"}
    manager = ModelManager()
    modules = (LoraModule("a", str(folders["a"])),)
    model = await manager.start(settings_for(tiny_llama_path, lora_modules=modules))
    assert [each.name for each in model.require_adapters().loaded] == ["a"]
    await manager.load_adapter("b", str(folders["b"]))
    for taken in ("a", "base"):
        with pytest.raises(AdapterRefused, match="is taken"):
            await manager.load_adapter(taken, str(folders["c"]))
    for name in "ab":
        assert await tokens(manager, name, ids.__next__) == wanted[name]
    for change in (manager.unload, manager.sleep, manager.wake):  # done to a model, never by way of an adapter
        with pytest.raises(ModelNotLoaded, match="'a' is not loaded"):
            await change("a")
    await manager.sleep("base")
    for name in "ab":  # the first of them wakes it
        assert await tokens(manager, name, ids.__next__) == wanted[name]
    await manager.sleep("base")
    await manager.unload_adapter("b")
    with pytest.raises(ModelNotFound):
        await manager.acquire("b")
    await manager.unload("base")  # what was loaded by hand is gone; what it is loaded with comes back
    with pytest.raises(ModelNotFound):
        await manager.unload_adapter("a")
    assert await tokens(manager, "a", ids.__next__) == wanted["a"]
    await manager.close()


def test_an_adapter_that_cannot_be_loaded_fails_the_load(tiny_llama_path: Path, tmp_path: Path) -> None:
    modules = (LoraModule("a", str(tmp_path / "nowhere")),)
    with pytest.raises(ModelNotFound, match="nowhere"):
        build_engine(settings_for(tiny_llama_path, lora_modules=modules))


async def test_a_model_without_room_says_how_to_get_it(tiny_llama_path: Path, folders: dict[str, Path]) -> None:
    manager = ModelManager()
    await manager.start(settings_for(tiny_llama_path))
    with pytest.raises(UnsupportedOption) as caught:
        await manager.load_adapter("a", str(folders["a"]))
    assert caught.value.hint == "localllm up base --enable-lora"
    await manager.close()
