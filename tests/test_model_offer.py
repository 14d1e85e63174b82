"""The offered model's states: real downloads from a local hub, the real manager, an engine made of memory."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from localllm.config.settings import EngineConfig, PicksTable, ServerConfig, Settings
from localllm.errors import DiskFull, DoesNotFit, HubUnreachable, InvalidParameter, ModelNotFound
from localllm.models.library.hub import cache, plan
from localllm.models.library.hub.downloads import Downloads
from localllm.models.library.hub.pull import REPORT_EVERY_S
from localllm.serving.manager import ModelManager
from localllm.serving.model_offer import ModelOffer
from localllm.serving.suggestions import Suggestions
from tests.hub import conftest as hub_fixtures
from tests.hub.local_hub import LocalHub, Trouble, wait_until_stalled
from tests.web.library_server import Loads, only_pick

hub, checkpoint = hub_fixtures.hub, hub_fixtures.checkpoint
WEIGHTS = "model.safetensors"
NAME = "org/tiny"
PICKS = only_pick(NAME)


@pytest.fixture
def loads(hub: LocalHub, tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> Loads:
    hub.add_repo(NAME, checkpoint)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))  # names that other tests gave are not installed here
    monkeypatch.setenv("HF_HUB_DOWNLOAD_TIMEOUT", "60")  # a stalled answer stays stalled on a loaded machine
    return Loads(tmp_path / "made", monkeypatch)


@asynccontextmanager
async def served(picks: PicksTable = PICKS, model: str = "demo") -> AsyncIterator[ModelOffer]:
    settings = Settings(EngineConfig(model=model), ServerConfig(), picks=picks)
    manager, downloads = ModelManager(), Downloads()
    offer = ModelOffer(manager, downloads, settings, Suggestions(manager, settings))
    try:
        await manager.start(settings)
        yield offer
    finally:
        downloads.close()
        await offer.close()
        await manager.close()


async def reach(offer: ModelOffer, *states: str) -> list[str]:
    """The states on the way to the last of `states`, each once in a row."""
    seen: list[str] = []
    end_s = time.monotonic() + 60
    while not seen or seen[-1] not in states:
        state = (await offer.status(NAME)).state
        seen += [state] if seen[-1:] != [state] else []
        assert time.monotonic() < end_s, seen
        await asyncio.sleep(0.002)
    return seen


async def begin_and_stop(offer: ModelOffer, hub: LocalHub) -> None:
    """Start a download, and stop it where the hub stalls."""
    offer.start(NAME)
    await asyncio.to_thread(wait_until_stalled, hub)
    await offer.stop(NAME)
    hub.go_on.set()
    await reach(offer, "stopped")


async def test_one_start_downloads_loads_and_switches(hub: LocalHub, loads: Loads) -> None:
    hub.troubles[WEIGHTS] = Trouble(stall_after=100_000)
    async with served() as offer:
        loads.gate.clear()
        found = await offer.find()
        assert found is not None
        assert (found.pick.name, (await offer.status(NAME)).state) == (NAME, "absent")
        assert hub.sent == [], "an offer asks nobody"
        offer.start(NAME)
        offer.start(NAME)  # a second tab
        await asyncio.to_thread(wait_until_stalled, hub)
        status = await offer.status(NAME)
        assert (status.state, status.progress is not None) == ("downloading", True)
        assert await offer.find() == found, "it stays the offer"
        hub.go_on.set()
        seen = await reach(offer, "loading")
        loads.gate.set()
        assert [*seen, *await reach(offer, "ready")][-2:] == ["loading", "ready"]
        manager = offer._manager
        assert manager.register.default is not None
        assert manager.register.default.name == "tiny"
        assert manager.statuses()[0].expires_in_s is None, "it stays loaded, as a model of the command line does"
        assert await offer.find() is None
    assert hub.bytes_sent(WEIGHTS) == next(iter(hub.repos[NAME].commits.values()))[WEIGHTS].size


async def test_a_cancelled_download_keeps_its_bytes_and_resumes(hub: LocalHub, loads: Loads) -> None:
    hub.troubles[WEIGHTS] = Trouble(stall_after=100_000)
    async with served() as offer:
        await begin_and_stop(offer, hub)
        status = await offer.status(NAME)
        assert (status.state, status.held_bytes >= 100_000) == ("stopped", True)
        offer.start(NAME)
        assert (await reach(offer, "ready"))[-1] == "ready"
    assert hub.bytes_sent(WEIGHTS) == next(iter(hub.repos[NAME].commits.values()))[WEIGHTS].size, "no byte came twice"


async def test_another_server_resumes_what_an_ended_one_left(hub: LocalHub, loads: Loads) -> None:
    hub.troubles[WEIGHTS] = Trouble(stall_after=100_000)

    async with served() as offer:
        offer.start(NAME)
        await asyncio.to_thread(wait_until_stalled, hub)
    await asyncio.sleep(2 * REPORT_EVERY_S)  # by then the transfer knows that it is to stop; a real server ends
    hub.go_on.set()
    async with served() as offer:
        found = await offer.find()
        assert found is not None
        status = await offer.status(found.pick.name)
        assert (status.state, status.held_bytes) == ("stopped", 100_000)
        offer.start(NAME)
        await reach(offer, "ready")
    assert any(each.range.startswith("bytes=100000-") for each in hub.sent)


async def test_discarded_files_are_gone(hub: LocalHub, loads: Loads) -> None:
    hub.troubles[WEIGHTS] = Trouble(stall_after=100_000)
    async with served() as offer:
        await begin_and_stop(offer, hub)
        assert await offer.discard(NAME) >= 100_000
        assert (await offer.status(NAME)).state == "absent"
        assert not cache.repository_folder(NAME).exists()


async def test_a_cancelled_load_leaves_the_model_installed(hub: LocalHub, loads: Loads) -> None:
    async with served() as offer:
        loads.gate.clear()
        offer.start(NAME)
        await reach(offer, "loading")
        await offer.stop(NAME)
        await reach(offer, "installed")
        assert (await offer.find()) is not None
        asked = len(hub.sent)
        loads.gate.set()
        offer.start(NAME)
        await reach(offer, "ready")
        assert len(hub.sent) == asked, "the hub is not asked for an installed model"


@pytest.mark.slow
async def test_a_stop_before_the_hub_has_answered_starts_nothing(hub: LocalHub, loads: Loads) -> None:
    async with served() as offer:
        hub.troubles["api"] = Trouble(status=503, retry_after=1, times=1)
        hub.troubles[WEIGHTS] = Trouble(stall_after=100_000)
        offer.start(NAME)
        await asyncio.sleep(0)
        assert (await offer.status(NAME)).state == "starting"
        await offer.stop(NAME)
        await reach(offer, "absent", "stopped")
        while not offer._run.has_begun:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.5)  # the download is told to stop before its bytes go on
        hub.go_on.set()
        while offer._run.is_busy:
            await asyncio.sleep(0.01)
        assert (await offer.status(NAME)).state in ("absent", "stopped")
        offer.start(NAME)
        await reach(offer, "ready")


def _no_network(hub: LocalHub, patch: pytest.MonkeyPatch) -> None:
    patch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")


def _no_room(hub: LocalHub, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(cache, "free_bytes", lambda: plan.SPARE_BYTES)


def _gone(hub: LocalHub, patch: pytest.MonkeyPatch) -> None:
    hub.repos[NAME].private = True


@pytest.mark.parametrize(
    ("trouble", "error", "why"),
    [
        (_no_network, HubUnreachable, "127.0.0.1:9"),
        pytest.param(
            _no_room, DiskFull, "stay free for other programs; 64.0 MiB are free where", marks=pytest.mark.slow
        ),
        pytest.param(_gone, ModelNotFound, "No token was sent", marks=pytest.mark.slow),
    ],
)
async def test_a_failure_before_the_first_byte_is_the_state_until_it_is_tried_again(
    hub: LocalHub, loads: Loads, trouble: Callable[..., None], error: type[Exception], why: str
) -> None:
    async with served() as offer:
        with pytest.MonkeyPatch.context() as patch:
            trouble(hub, patch)
            offer.start(NAME)
            await reach(offer, "failed")
            status = await offer.status(NAME)
            assert isinstance(status.error, error)
            assert why in f"{status.error.what} {status.error.why}"
            found = await offer.find()
            assert found is not None
        hub.repos[NAME].private = False
        offer.start(NAME)
        await reach(offer, "ready")


async def test_bytes_that_arrive_damaged_are_a_failure_of_the_download(hub: LocalHub, loads: Loads) -> None:
    hub.troubles[WEIGHTS] = Trouble(wrong_bytes=True, times=1)
    async with served() as offer:
        offer.start(NAME)
        await reach(offer, "failed")
        status = await offer.status(NAME)
        assert status.error is not None
        assert "arrived damaged" in status.error.what
        offer.start(NAME)
        await reach(offer, "ready")


@pytest.mark.slow
async def test_a_model_that_does_not_fit_after_all_says_so(
    hub: LocalHub, loads: Loads, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with served() as offer:
        loads.error = DoesNotFit("tiny does not fit.", "27.5 GiB needed, 2.1 GiB free.", "Try another.")
        offer.start(NAME)
        await reach(offer, "failed")
        status = await offer.status(NAME)
        assert str(status.error) == str(loads.error)
        default = offer._manager.register.default
        assert default is not None
        assert default.name == "demo", "the demo goes on answering"
        loads.error = None
        offer.start(NAME)
        await reach(offer, "ready")


async def test_no_offer_beside_a_real_model_and_no_other_names(hub: LocalHub, loads: Loads, checkpoint: Path) -> None:
    async with served(model=str(checkpoint)) as offer:
        assert await offer.find() is None
        for name in ("org/other", "../../etc", "x" * 5000):
            with pytest.raises(InvalidParameter):
                await offer.describe(name)
    assert hub.sent == []


async def test_what_does_not_fit_is_not_offered(hub: LocalHub, loads: Loads) -> None:
    async with served(only_pick("org/huge", num_bytes=10**15)) as offer:
        assert await offer.find() is None


async def test_a_wrong_list_in_the_config_file_costs_no_page(hub: LocalHub, loads: Loads) -> None:
    async with served(PicksTable(Path("config.toml"), entries=({"name": 7},))) as offer:
        assert await offer.find() is None
