"""A run on a server that moves the experts: what it costs is said before, and afterwards all is as it was."""

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from localllm.config.settings import EngineConfig, Settings
from localllm.serving import reopen
from localllm.serving.profiles import read_profiles, save_profile, stored_profiles
from tests.marks import needs_library
from tests.tiny import make_tiny_model
from tests.web.tuned_server import TunedServer, be_quick, text_of

pytestmark = [pytest.mark.slow, needs_library]


def serving(folder: Path, **asked: Any) -> Iterator[TunedServer]:
    path = make_tiny_model(folder / "model", "qwen3_moe")
    fixed = ("kv_cache_memory_bytes", "max_num_seqs", "max_num_batched_tokens", "kv_cache_dtype")
    engine = EngineConfig(
        model=str(path), device="cpu", max_model_len=256, kv_cache_memory_bytes=1 << 20, max_num_seqs=4, **asked
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        with TunedServer(engine, "tiny", fixed) as server:
            yield server


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TunedServer]:
    yield from serving(tmp_path_factory.mktemp("placed"), weights_on="disk")


@pytest.fixture
def server(live: TunedServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[TunedServer]:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    be_quick(monkeypatch)
    before = live.ask().json()["choices"]
    yield live
    live.finish()
    assert live.ask().json()["choices"] == before
    assert is_on_disk(live)


def is_on_disk(server: TunedServer) -> bool:
    far = server.manager.ready[0].plan.far
    return far is not None and far.disk is not None


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Where each further load puts the experts."""
    found, build = list[str](), reopen.build_engine

    def spy(settings: Settings, *args: Any) -> Any:
        found.append(settings.engine.weights_on)
        return build(settings, *args)

    monkeypatch.setattr(reopen, "build_engine", spy)
    return found


def test_the_cost_is_said_before_and_the_experts_are_where_they_were_afterwards(
    server: TunedServer, loads: list[str]
) -> None:
    page = server.browse("/tune/limits?goal=chat&model=tiny").text
    assert re.search(r'<input type="checkbox" name="placements" value="on" *checked>', page)
    said = text_of(page)
    assert "Also try other places Experts in RAM. Each loads tiny again, which took" in said
    assert "for all of them and the way back, and 10 min at most" in said
    server.begin(placements="on")
    result = text_of(server.finish())
    assert "Expert cache" in result
    assert "were for loads that moved experts" in result
    assert loads[0] == "ram"
    assert is_on_disk(server)


def test_nothing_is_loaded_unless_it_is_asked_for(server: TunedServer, loads: list[str]) -> None:
    server.begin()
    assert "Expert cache" not in server.finish()
    assert not loads
    refused = server.begin(placements="maybe")
    assert refused.status_code == 400
    assert "Unknown value &#39;maybe&#39; of placements." in refused.text


def test_a_run_that_is_cancelled_in_a_load_serves_as_before(
    server: TunedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    began, go_on = Event(), Event()
    build = reopen.build_engine

    def hold(settings: Settings, *args: Any) -> Any:
        if settings.engine.weights_on == "ram":
            began.set()
            assert go_on.wait(30)
        return build(settings, *args)

    monkeypatch.setattr(reopen, "build_engine", hold)
    server.begin(placements="on")
    assert began.wait(60)
    shown = text_of(server.browse("/tune/run").text)
    assert "the model is loaded again, about" in shown
    assert server.ask().status_code == 503
    server.browse("/tune/run/cancel", {})
    go_on.set()
    assert "Cancelled after" in text_of(server.finish())
    assert server.manager.statuses()[0].state == "ready"


def test_a_load_that_fails_is_in_the_table_and_the_model_serves_as_before(
    server: TunedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    build = reopen.build_engine

    def refuse(settings: Settings, *args: Any) -> Any:
        if settings.engine.weights_on == "ram":
            raise MemoryError("no pages")
        return build(settings, *args)

    monkeypatch.setattr(reopen, "build_engine", refuse)
    server.begin(placements="on")
    assert "out of memory no pages" in text_of(server.finish())


def test_a_profile_with_another_place_than_a_flag_says_is_refused(server: TunedServer) -> None:
    path = stored(server, weights_on="ram")
    refused = server.browse("/tune/plans/apply", {"file": path.name})
    assert refused.status_code == 400
    said = text_of(refused.text)
    assert "It has --weights-on ram; the server was started with --weights-on disk, which takes precedence." in said
    assert not read_profiles()[0].applied


def stored(server: TunedServer, name: str = "placed", **settings: Any) -> Path:
    """Store a profile with these settings, as of this machine and model."""
    found = {each.profile.key: each for each in stored_profiles()}
    if not found:
        server.begin()
        server.finish()
        server.browse("/tune/result/save", {"name": "first"})
        found = {each.profile.key: each for each in stored_profiles()}
    [first] = found.values()
    return save_profile(replace(first.profile, name=name, settings=settings), first.model)


def test_a_profile_with_another_place_loads_the_model_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loads: list[str]
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    be_quick(monkeypatch)
    for server in serving(tmp_path):
        before = server.ask().json()["choices"]
        on_disk, in_ram = stored(server, "on-disk", weights_on="disk"), stored(server, "in-ram")
        assert server.browse("/tune/plans/apply", {"file": on_disk.name}).status_code == 200
        assert is_on_disk(server)
        assert server.ask().json()["choices"] == before
        assert {each.name: each.applied for each in read_profiles()}["on-disk"]
        assert server.browse("/tune/plans/apply", {"file": in_ram.name}).status_code == 200
        assert not is_on_disk(server)
        assert server.ask().json()["choices"] == before
        assert loads == ["disk", "auto"]
