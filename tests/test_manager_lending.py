"""A model that is lent: its weights are somebody else's for a while, and then everything is as it was."""

import asyncio
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from localllm.config.settings import EngineConfig, Settings
from localllm.engine.client import GenerationRequest
from localllm.engine.params import SamplingParams
from localllm.errors import DeviceLost, LocalLLMError, StepFailed
from localllm.serving import lending
from localllm.serving import manager as manager_module
from localllm.serving.entry import ModelsBusy, ModelTuning
from localllm.serving.manager import ModelManager
from localllm.serving.phases import OnPhase
from localllm.serving.reopen import BareModel
from localllm.serving.served import LoadLimits, ServedModel
from localllm.web.errors import retry_headers
from tests.serving import settings_for, spy_on_closing

pytestmark = pytest.mark.slow

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


async def tokens(manager: ModelManager, name: str | None = None) -> list[int]:
    with await manager.acquire(name) as model:
        events = [event async for event in model.client.generate(GenerationRequest("one", [5, 6, 7], GREEDY))]
    return [token for event in events for token in event.token_ids]


class Borrower:
    """Has the weights until it is told to stop."""

    def __init__(self, outcome: BaseException | str = "done") -> None:
        self.has_them, self.stop, self.outcome = threading.Event(), threading.Event(), outcome

    def work(self, bare: BareModel, settings: Settings) -> str:
        self.has_them.set()
        assert self.stop.wait(10)
        if isinstance(self.outcome, BaseException):
            raise self.outcome
        return self.outcome

    async def lent(self, manager: ModelManager) -> asyncio.Task[str]:
        name = manager.entries[0].name
        loan = asyncio.create_task(manager.lending.lend(name, self.work, self.stop.set))
        while not self.has_them.is_set():
            assert not loan.done(), loan.result()
            await asyncio.sleep(0.005)
        return loan


def scenario(path: Path, play: Callable[[ModelManager], Any]) -> None:
    async def run() -> None:
        manager = ModelManager()
        await manager.start(settings_for(path))
        try:
            await play(manager)
        finally:
            await manager.close()

    asyncio.run(run())


def test_a_lent_model_refuses_and_answers_afterwards_as_before(
    tiny_llama_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed = spy_on_closing(monkeypatch)

    async def play(manager: ModelManager) -> None:
        said, name, borrower = await tokens(manager), manager.entries[0].name, Borrower()
        loan = await borrower.lent(manager)
        assert [status.state for status in manager.statuses()] == ["tuning"]
        for refused in (
            manager.acquire(None), manager.unload(name), manager.sleep(name), manager.load(name),
            manager.lending.reopen(name, {}), manager.lending.lend(name, borrower.work, borrower.stop.set),
        ):  # fmt: skip
            with pytest.raises(ModelTuning) as told:
                await refused
        assert retry_headers(told.value) == {"retry-after": "20"}
        with pytest.raises(ModelTuning):
            manager.loads.require_working()
        borrower.stop.set()
        assert await loan == "done"
        manager.loads.require_working()
        assert await tokens(manager) == said

    scenario(tiny_llama_path, play)
    assert len(closed) == 2


@pytest.mark.parametrize("error", [StepFailed("It failed."), MemoryError("no pages")])
def test_what_goes_wrong_goes_to_the_borrower_and_the_model_serves_on(
    tiny_llama_path: Path, error: BaseException
) -> None:
    async def play(manager: ModelManager) -> None:
        borrower = Borrower(error)
        loan = await borrower.lent(manager)
        borrower.stop.set()
        with pytest.raises(type(error)):
            await loan
        assert len(await tokens(manager)) == 8

    scenario(tiny_llama_path, play)


def test_a_borrower_that_is_cancelled_is_told_to_stop(tiny_llama_path: Path) -> None:
    async def play(manager: ModelManager) -> None:
        borrower = Borrower()
        loan = await borrower.lent(manager)
        loan.cancel()
        with pytest.raises(asyncio.CancelledError):
            await loan
        assert borrower.stop.is_set()
        assert len(await tokens(manager)) == 8

    scenario(tiny_llama_path, play)


def test_the_end_of_the_server_ends_the_loan(tiny_llama_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closed = spy_on_closing(monkeypatch)

    async def play(manager: ModelManager) -> None:
        borrower = Borrower()
        loan = await borrower.lent(manager)
        await manager.close()
        assert loan.cancelled()
        assert manager.entries == []

    scenario(tiny_llama_path, play)
    assert len(closed) == 1  # nothing was opened again


def test_a_lost_device_is_told_to_whoever_ends_the_process(tiny_llama_path: Path) -> None:
    async def play(manager: ModelManager) -> None:
        borrower = Borrower(DeviceLost("The GPU is gone."))
        loan = await borrower.lent(manager)
        borrower.stop.set()
        with pytest.raises(DeviceLost):
            await loan
        assert isinstance(await asyncio.wait_for(manager.transitions.device_lost(), 1), DeviceLost)

    scenario(tiny_llama_path, play)


def test_running_requests_end_first_or_nothing_is_lent(tiny_llama_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def play(manager: ModelManager) -> None:
        borrower, lease = Borrower(), await manager.acquire(None)
        name = manager.entries[0].name
        monkeypatch.setattr(lending, "DRAIN_S", 0.05)
        with pytest.raises(ModelsBusy, match="1 requests of"):
            await manager.lending.lend(name, borrower.work, borrower.stop.set)
        assert len(await tokens(manager)) == 8
        monkeypatch.setattr(lending, "DRAIN_S", 10)
        waiting = asyncio.create_task(borrower.lent(manager))
        await asyncio.sleep(0.05)
        assert not borrower.has_them.is_set()
        lease.release()
        loan = await waiting
        borrower.stop.set()
        await loan

    scenario(tiny_llama_path, play)


def test_a_model_is_opened_anew_while_its_requests_wait(tiny_llama_path: Path) -> None:
    async def play(manager: ModelManager) -> None:
        said, name = await tokens(manager), manager.entries[0].name
        changing = asyncio.create_task(manager.lending.reopen(name, {"max_num_seqs": 3}))
        await asyncio.sleep(0)
        assert await tokens(manager) == said
        assert (await changing).state == "ready"
        assert manager.current is not None
        assert manager.current.plan.max_num_seqs == 3
        await manager.sleep(name)
        await manager.wake(name)
        assert manager.current.plan.max_num_seqs == 3  # type: ignore[unreachable]

    scenario(tiny_llama_path, play)


def test_settings_that_do_not_fit_leave_the_model_as_it_was(tiny_llama_path: Path) -> None:
    async def play(manager: ModelManager) -> None:
        before = manager.current.plan if manager.current else None
        with pytest.raises(LocalLLMError):
            await manager.lending.reopen(manager.entries[0].name, {"kv_cache_memory_bytes": 1 << 50})
        assert manager.current is not None
        assert before is not None
        assert manager.current.plan.max_num_seqs == before.max_num_seqs
        assert len(await tokens(manager)) == 8

    scenario(tiny_llama_path, play)


def test_a_model_that_cannot_be_opened_again_is_loaded_from_its_files(
    tiny_llama_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(bare: BareModel, config: EngineConfig, on_phase: OnPhase, limits: LoadLimits) -> ServedModel:
        raise MemoryError("somebody else has it")

    async def play(manager: ModelManager) -> None:
        manager.transitions.loader = replace(manager.transitions.loader, open_engine=refuse)
        monkeypatch.setattr(manager_module, "RETRY_S", 0.0)
        borrower = Borrower()
        loan = await borrower.lent(manager)
        borrower.stop.set()
        assert await loan == "done"
        assert manager.statuses()[0].state == "failed"
        assert len(await tokens(manager)) == 8

    scenario(tiny_llama_path, play)
