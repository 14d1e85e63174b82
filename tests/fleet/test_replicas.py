"""Replicas of one model in one server: who answers, what is shared, and what others notice when one is lost."""

import asyncio
import json
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest

from localllm.config.settings import EngineConfig, ServerConfig, Settings
from localllm.engine.client import EngineClient
from localllm.engine.loop import EngineLoop
from localllm.engine.step import StepPlan
from localllm.errors import ConfigError, DoesNotFit, RanksLost, UnsupportedOption
from localllm.fleet.replicas import ReplicaLoops, build_replicas, settings_of
from localllm.serving.served import LoadLimits, ServedModel
from tests.serving import Server
from tests.web.live_server import BLOCK_SIZE, LiveServer, PacedRunner, fake_model, wait_until


class Mortal(PacedRunner):
    """The model made of memory, whose processes can be lost."""

    def __init__(self) -> None:
        super().__init__()
        self.lost = False

    def forward(self, plan: StepPlan) -> None:
        self.gate.wait(10)
        if self.lost:
            raise RanksLost("Rank 0 was killed by signal 9.")
        super().forward(plan)


class FakeExecutor:
    """What a replica's owner of the weights is asked."""

    def continue_from(self, lost: Any) -> None: ...

    def close(self) -> None: ...


class Fleet:
    """A model of several replicas made of memory, and the runner of each."""

    def __init__(self, folder: Path, count: int) -> None:
        self.folder, self.runners, self.built = folder, dict[int, Mortal](), Counter[int]()
        self.may_build = threading.Event()
        self.may_build.set()
        models = [self.build(number) for number in range(count)]
        self.loops = ReplicaLoops(models, self.build)
        first = models[0]
        loop, admission = cast("EngineLoop", self.loops), first.engine[1]
        self.model = replace(first, loop=loop, client=EngineClient(loop, admission, first.tokenizer), executor=None)

    def build(self, number: int) -> ServedModel:
        assert self.may_build.wait(20)
        self.built[number] += 1
        runner = self.runners[number] = Mortal()
        folder = self.folder / f"{number}-{self.built[number]}"
        return replace(fake_model(folder, runner), executor=cast("Any", FakeExecutor()))

    def kill(self, number: int) -> None:
        """Lose the processes of a replica, as the supervisor tells the engine of it."""
        self.runners[number].lost = True
        self.loops.replicas[number].loop.lose(RanksLost("Rank 0 was killed by signal 9."))


@pytest.fixture
def fleet(tmp_path: Path) -> Fleet:
    return Fleet(tmp_path, 2)


@pytest.fixture
def server(fleet: Fleet) -> Iterator[LiveServer]:
    with LiveServer(fleet.model) as running:
        yield running
        for runner in fleet.runners.values():
            runner.gate.set()


def ask(server: LiveServer, prompt: str, **more: Any) -> httpx.Response:
    headers = more.pop("headers", {})
    return server.post("/v1/completions", {"model": "tiny", "prompt": prompt, "max_tokens": 4, **more}, headers=headers)


def routed(fleet: Fleet) -> list[int]:
    return [sum(each.routed.values()) for each in fleet.loops.replicas]


class Streams:
    """Streams that run at the same time, each with its text so far and its error."""

    def __init__(self, server: LiveServer, fleet: Fleet, count: int, max_tokens: int = 300) -> None:
        self.texts, self.errors = [""] * count, [dict[str, Any]() for _ in range(count)]
        self.replicas: list[int] = []
        self._threads = []
        for number in range(count):
            before = routed(fleet)
            thread = threading.Thread(target=self._read, args=(server, number, max_tokens))
            thread.start()
            self._threads.append(thread)
            wait_until(lambda before=before: routed(fleet) != before)  # type: ignore[misc]
            self.replicas.append([now - was for now, was in zip(routed(fleet), before, strict=True)].index(1))

    def _read(self, server: LiveServer, number: int, max_tokens: int) -> None:
        body = {"model": "tiny", "prompt": f"{number} one two", "max_tokens": max_tokens, "stream": True}
        with (
            httpx.Client(base_url=server.url, timeout=60) as http,
            http.stream("POST", "/v1/completions", json=body) as answer,
        ):
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    event = json.loads(line[6:])
                    self.errors[number] = event.get("error") or self.errors[number]
                    self.texts[number] += "".join(each["text"] for each in event.get("choices", ()))

    def join(self) -> None:
        for thread in self._threads:
            thread.join(60)
            assert not thread.is_alive()


def test_requests_take_turns_and_conversations_stay(fleet: Fleet, server: LiveServer) -> None:
    prompts = [f"{number} " + "word " * 60 for number in range(6)]
    for prompt in prompts:
        assert ask(server, prompt).status_code == 200
    first = routed(fleet)
    assert max(first) - min(first) <= 1
    before = [dict(each.routed) for each in fleet.loops.replicas]
    for prompt in prompts:
        cached = ask(server, prompt + "and more").json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert cached > 0  # the replica that has the prefix answered
    assert before != [dict(each.routed) for each in fleet.loops.replicas]
    assert sum(each.routed["prefix"] for each in fleet.loops.replicas) >= 6


def test_prompts_that_are_still_computed_count_as_cached(fleet: Fleet, server: LiveServer) -> None:
    for runner in fleet.runners.values():
        runner.gate.clear()
    asking = threading.Thread(target=ask, args=(server, "word " * 80))
    asking.start()
    wait_until(lambda: any(each.open for each in fleet.loops.replicas))
    busy, idle = sorted(fleet.loops.replicas, key=lambda each: not each.open)
    [held] = busy.open.values()
    wait_until(lambda: busy.hit_tokens(held.names) == len(held.names) * BLOCK_SIZE)  # the server's thread notes them
    assert idle.hit_tokens(held.names) == 0
    assert busy.hit_tokens((*held.names[:3], b"another")) == 3 * BLOCK_SIZE
    assert busy.queued_tokens == held.request.prompt_len
    for runner in fleet.runners.values():
        runner.gate.set()
    asking.join(20)
    assert busy.hit_tokens(held.names) == len(held.names) * BLOCK_SIZE  # now from its cache


def test_a_header_names_the_replica(fleet: Fleet, server: LiveServer) -> None:
    for _ in range(3):
        assert ask(server, "Hi", headers={"x-data-parallel-rank": "1"}).status_code == 200
    assert routed(fleet) == [0, 3]
    assert fleet.loops.replicas[1].routed["pinned"] == 3
    for wrong in ("2", "-1", "x"):
        refused = ask(server, "Hi", headers={"x-data-parallel-rank": wrong})
        assert refused.status_code == 400
        assert "has 2, numbered from 0" in refused.json()["error"]["message"]


def test_choices_of_one_request_stay_together(fleet: Fleet, server: LiveServer) -> None:
    assert len(ask(server, "Hi", n=3).json()["choices"]) == 3
    assert sorted(routed(fleet)) == [0, 3]


def test_streams_of_a_lost_replica_hear_it_and_others_do_not(fleet: Fleet, server: LiveServer) -> None:
    for runner in fleet.runners.values():
        runner.step_s = 0.01
    streams = Streams(server, fleet, 4)
    wait_until(lambda: all(streams.texts))
    fleet.may_build.clear()
    began_s = time.monotonic()
    fleet.kill(0)
    mine = [number for number in range(4) if streams.replicas[number] == 0]
    wait_until(lambda: all(streams.errors[number] for number in mine), 10)
    assert time.monotonic() - began_s < 1
    assert ask(server, "Hi").status_code == 200  # the other replica answers meanwhile
    fleet.may_build.set()
    streams.join()
    assert {streams.errors[number]["code"] for number in mine} == {"ranks_lost"}
    assert mine
    others = [number for number in range(4) if number not in mine]
    assert others
    assert not any(streams.errors[number] for number in others)
    wait_until(lambda: fleet.loops.replicas[0].is_up)
    assert fleet.built == {0: 2, 1: 1}
    assert ask(server, "Hi", headers={"x-data-parallel-rank": "0"}).status_code == 200


def test_a_request_without_a_token_is_answered_by_another_replica(fleet: Fleet, server: LiveServer) -> None:
    fleet.runners[0].gate.clear()
    answers: list[httpx.Response] = []
    direct = ask(server, "one two three", headers={"x-data-parallel-rank": "1"}).json()["choices"][0]["text"]
    fleet.loops.replicas[1].is_up = False  # so that the next one goes to the first
    asking = threading.Thread(target=lambda: answers.append(ask(server, "one two three", temperature=0)))
    asking.start()
    wait_until(lambda: bool(fleet.loops.replicas[0].open))
    fleet.loops.replicas[1].is_up = True
    fleet.kill(0)
    fleet.runners[0].gate.set()
    asking.join(20)
    assert answers[0].status_code == 200
    assert len(answers[0].json()["choices"][0]["text"]) > 0
    assert fleet.loops.replicas[1].routed["retry"] == 1
    assert isinstance(direct, str)


def test_counters_are_nil_when_idle(fleet: Fleet, server: LiveServer) -> None:
    for number in range(4):
        ask(server, f"{number} hello")
    for each in fleet.loops.replicas:
        wait_until(lambda each=each: not each.open)  # type: ignore[misc]
        assert (each.queued_tokens, +each.names) == (0, Counter())


def test_metrics_have_each_replica_and_pages_their_sum(fleet: Fleet, server: LiveServer) -> None:
    for number in range(4):
        ask(server, f"{number} hello")
    text = server.get("/metrics").text
    for engine in ("0", "1"):
        assert f'localllm:generation_tokens_total{{engine="{engine}",model_name="tiny"}} 8.0' in text
    stats = fleet.model.client.stats()
    assert (stats.generation_tokens, sum(stats.finished.values()), stats.e2e.count) == (16, 4, 4)
    assert stats.max_num_seqs == 16
    assert stats.total_blocks == 2 * 256


def test_all_replicas_lost_end_the_model(fleet: Fleet, server: LiveServer) -> None:
    fleet.may_build.clear()
    for number in range(2):
        fleet.kill(number)
    wait_until(lambda: fleet.loops.why_ended is not None)
    assert not fleet.loops.is_running
    fleet.may_build.set()


def test_a_replica_is_tried_again_until_it_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("localllm.fleet.replicas.RETRY_S", (0.01,))
    fleet = Fleet(tmp_path, 2)
    build, failures = fleet.loops._build, [RanksLost("No."), OSError("No."), RanksLost("No.")]

    def failing(number: int) -> ServedModel:
        if failures:
            raise failures.pop()
        return build(number)

    fleet.loops._build = failing
    with LiveServer(fleet.model) as server:
        fleet.kill(1)
        wait_until(lambda: fleet.loops.replicas[1].restarts == 1)
        assert not failures
        assert ask(server, "Hi", headers={"x-data-parallel-rank": "1"}).status_code == 200


def test_what_needs_one_owner_of_the_weights_is_refused_by_name(fleet: Fleet, server: LiveServer) -> None:
    """Sleep, tuning, adapters and traces; and the model goes on."""
    [entry] = server.manager.entries
    entry.settings = Settings(EngineConfig(data_parallel_size=2), ServerConfig())
    refused = {
        "/localllm/v1/models/sleep": ({"model": "tiny"}, "tiny cannot sleep."),
        "/v1/load_lora_adapter": ({"lora_name": "a", "lora_path": "/a"}, "tiny"),
        "/start_profile": ({}, "profil"),
    }
    for path, (body, words) in refused.items():
        answer = server.post(path, body)
        assert 400 <= answer.status_code < 500, (path, answer.text)
        assert words in answer.text, (path, answer.text)

    loop = fleet.model.client._event_loop
    assert loop is not None
    lent = server.manager.lending.lend("tiny", lambda model, settings: None, lambda: None)
    with pytest.raises(UnsupportedOption, match="runs as several replicas"):
        asyncio.run_coroutine_threadsafe(lent, loop).result(20)
    assert ask(server, "Hi").status_code == 200


# Settings -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "refused",
    [
        {"enable_lora": True},
        {"deterministic": True},
        {"torch_profiler_dir": "/tmp"},
        {"enable_prompt_embeds": True},
    ],
)
def test_what_does_not_work_over_replicas_is_refused_by_name(refused: dict[str, Any]) -> None:
    [name] = refused
    config = EngineConfig(data_parallel_size=2, device="cpu", **refused)
    with pytest.raises(UnsupportedOption) as error:
        build_replicas(Settings(config, ServerConfig()))
    assert error.value.param == name


def test_each_replica_has_its_own_gpus() -> None:
    settings = Settings(EngineConfig(data_parallel_size=2, device_ids=("0", "1", "2", "3")), ServerConfig())
    assert [settings_of(settings, number).engine.device_ids for number in range(2)] == [("0", "1"), ("2", "3")]
    odd = replace(settings, engine=replace(settings.engine, device_ids=("0", "1", "2")))
    with pytest.raises(ConfigError, match="3 GPUs for 2 replicas"):
        settings_of(odd, 0)


# Processes ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_two_replicas_of_the_demo_survive_a_kill(tmp_path: Path) -> None:
    """Real rank processes: one of them is killed while streams of both run."""
    with Server(tmp_path, "serve", "demo", "--device", "cpu", "--data-parallel-size", "2", "--no-ui") as server:
        url = server.wait_for("ready")["url"]
        with httpx.Client(base_url=url, timeout=120) as http:
            asyncio.run(_kill_one(url, http))
            deadline_s = time.monotonic() + 120
            while _is_down(http.get("/metrics").text):
                assert time.monotonic() < deadline_s
                time.sleep(0.5)
            body = {"model": "demo", "prompt": "Hi", "max_tokens": 4}
            for rank in ("0", "1"):
                assert (
                    http.post("/v1/completions", json=body, headers={"x-data-parallel-rank": rank}).status_code == 200
                )


@pytest.mark.slow
def test_each_replica_may_have_several_ranks(tmp_path: Path) -> None:
    """Two replicas of two ranks: four processes, and the same text from both replicas."""
    words = ("--device", "cpu", "--dtype", "float32", "--data-parallel-size", "2", "--tensor-parallel-size", "2")
    with (
        Server(tmp_path, "serve", "demo", *words, "--no-ui") as server,
        httpx.Client(base_url=server.wait_for("ready")["url"], timeout=120) as http,
    ):
        body = {
            "model": "demo",
            "prompt": "What is a KV cache?",
            "max_tokens": 16,
            "temperature": 0,
            "ignore_eos": True,
        }
        answers = [
            http.post("/v1/completions", json=body, headers={"x-data-parallel-rank": rank}).json() for rank in "01"
        ]
        assert answers[0]["choices"][0]["text"] == answers[1]["choices"][0]["text"] != ""
        assert http.get("/metrics").text.count("localllm:rank_up{") == 4


def _is_down(metrics: str) -> bool:
    ups = [line for line in metrics.splitlines() if line.startswith("localllm:rank_up{")]
    return len(ups) < 2 or any(line.endswith(" 0.0") for line in ups)


async def _kill_one(url: str, http: httpx.Client) -> None:
    import psutil

    ranks = [
        each for each in psutil.process_iter(["cmdline"]) if "localllm.ranks" in " ".join(each.info["cmdline"] or ())
    ]
    parents = Counter(each.ppid() for each in ranks)
    mine = [each for each in ranks if parents[each.ppid()] >= 2]
    async with httpx.AsyncClient(base_url=url, timeout=120) as client:

        async def stream(rank: int) -> tuple[str, float]:
            body = {"model": "demo", "prompt": "Once", "max_tokens": 400, "stream": True, "ignore_eos": True}
            code = ""
            headers = {"x-data-parallel-rank": str(rank)}
            async with client.stream("POST", "/v1/completions", json=body, headers=headers) as answer:
                async for line in answer.aiter_lines():
                    if line.startswith("data: {") and "error" in (event := json.loads(line[6:])):
                        code = event["error"]["code"]
            return code, time.monotonic()

        tasks = [asyncio.create_task(stream(rank)) for rank in (0, 1)]
        await asyncio.sleep(0.5)
        killed_s = time.monotonic()
        os.kill(mine[0].pid, signal.SIGKILL)
        codes = [await task for task in tasks]
        lost = [at_s for code, at_s in codes if code == "ranks_lost"]
        assert len(lost) == 1
        print(f"the stream of the killed replica had its error after {lost[0] - killed_s:.2f} s")
        assert lost[0] - killed_s < 1
        assert "" in [code for code, _ in codes]


def test_a_replica_without_memory_ends_those_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = []

    def build(settings: Settings, on_phase: Any, limits: LoadLimits, stores: Any) -> Any:
        if limits.kv_is_compared:  # it is not the first one
            raise DoesNotFit("demo does not fit into this machine.", "Its weights need 9 GiB.")
        return SimpleNamespace(close=lambda: closed.append(0))

    monkeypatch.setattr("localllm.fleet.replicas.build_engine", build)
    with pytest.raises(DoesNotFit, match="1 of 3 replicas were loaded before") as refused:
        build_replicas(Settings(EngineConfig(data_parallel_size=3), ServerConfig()))
    assert refused.value.hint == "--data-parallel-size 1"
    assert closed == [0]


def test_only_the_first_replica_compares_a_cache_of_4_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = []

    def build(settings: Settings, on_phase: Any, limits: LoadLimits, stores: Any) -> Any:
        compared.append(not limits.kv_is_compared)
        if len(compared) == 3:
            raise ConfigError("That is enough.")
        return SimpleNamespace(close=lambda: None)

    monkeypatch.setattr("localllm.fleet.replicas.build_engine", build)
    with pytest.raises(ConfigError, match="enough"):
        build_replicas(Settings(EngineConfig(data_parallel_size=3, kv_cache_dtype="int4"), ServerConfig()))
    assert compared == [True, False, False]
