"""Downloads beside a server: paused, resumed, discarded, forgotten."""

from pathlib import Path

from localllm.models.library.hub import cache
from localllm.models.library.hub.downloads import Downloads
from localllm.models.library.hub.plan import plan_download
from localllm.models.library.hub.pull import pull
from tests.hub.conftest import write_safetensors
from tests.hub.local_hub import LocalHub, Trouble, wait_until_stalled
from tests.web.live_server import wait_until

WEIGHTS = "model.safetensors"


def stalled(hub: LocalHub, downloads: Downloads, name: str, file: str) -> str:
    hub.troubles[file] = Trouble(stall_after=100_000)
    started = downloads.start(name)
    wait_until_stalled(hub)
    wait_until(lambda: downloads.get(started.id).progress.have[file] >= 90_000)
    return started.id


def test_asking_for_what_is_paused_goes_on_with_it(hub: LocalHub, checkpoint: Path) -> None:
    hub.add_repo("org/name", checkpoint)
    downloads = Downloads()
    id = stalled(hub, downloads, "org/name", WEIGHTS)
    assert downloads.pause(id).state == "paused"
    assert downloads.pause(id).state == "paused"
    hub.go_on.set()
    assert downloads.start("org/name").id == id
    wait_until(lambda: downloads.get(id).state == "done")
    assert hub.bytes_sent(WEIGHTS) == (checkpoint / WEIGHTS).stat().st_size
    assert downloads.resume(id).state == "done"
    assert downloads.discard(id) == 0, "what is whole is deleted as a model, not as a download"
    assert (downloads.get(id).progress.have[WEIGHTS]) == (checkpoint / WEIGHTS).stat().st_size
    downloads.forget(id)
    assert downloads.list() == []


def test_discarding_takes_only_what_this_download_brought(hub: LocalHub, tmp_path: Path) -> None:
    folder = tmp_path / "ggufs"
    folder.mkdir()
    for name in ("a-Q4_0.gguf", "a-Q8_0.gguf"):
        write_safetensors(folder / name, 300_000, name)
    hub.add_repo("org/name", folder)
    kept = pull(plan_download("org/name:Q4_0")) / "a-Q4_0.gguf"
    downloads = Downloads()
    id = stalled(hub, downloads, "org/name:Q8_0", "a-Q8_0.gguf")
    hub.go_on.set()
    freed = downloads.discard(id)
    assert 90_000 <= freed <= 300_500
    assert downloads.get(id).state == "cancelled"
    assert downloads.get(id).progress.bytes_done == 0
    assert kept.is_file()
    assert cache.incomplete_repositories() == {}
