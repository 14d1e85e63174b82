"""A name that only the hub knows, on its way to an engine: fetched as a phase, or refused offline."""

import threading
import time
from pathlib import Path
from typing import Any

import pytest

from localllm.cli.announce import LogAnnouncer
from localllm.config.settings import EngineConfig, Settings
from localllm.errors import EngineStopped, HubOffline
from localllm.models.library.hub.cache import to_remove
from localllm.models.library.hub.pull import PullProgress, progress_line
from localllm.serving.build import build_engine
from localllm.serving.phases import Phase
from tests.hub.local_hub import LocalHub, Trouble, wait_until_stalled
from tests.mtp_models import as_gguf, make_mtp_model


def settings(**engine: Any) -> Settings:
    return Settings(EngineConfig(model="org/tiny", device="cpu", max_model_len=64, **engine))


def test_the_download_is_a_phase_before_the_others(hub: LocalHub, tiny_llama_path: Path) -> None:
    hub.add_repo("org/tiny", tiny_llama_path)
    phases: list[Any] = []
    model = build_engine(settings(), phases.append)
    model.close()
    assert (model.name, model.path.parent.name) == ("tiny", "snapshots")
    names = list(dict.fromkeys(phase.name for phase in phases))
    assert names[:2] == ["download", "find"]
    last = [phase for phase in phases if phase.name == "download"][-1]
    assert last.done
    assert last.detail.startswith("522 KiB of 522 KiB")
    phases.clear()
    build_engine(settings(offline=True), phases.append).close()
    assert "download" not in [phase.name for phase in phases]


def test_the_prediction_layer_of_a_gguf_model_comes_with_it_where_it_is_used(hub: LocalHub, tmp_path: Path) -> None:
    source, ggufs = make_mtp_model(tmp_path / "source", "qwen3_5"), tmp_path / "ggufs"
    ggufs.mkdir()
    as_gguf(source, "qwen3_5", ggufs / "t-Q8_0.gguf", "Q8_0", has_layer=False)
    for name in ("mtp-t-Q8_0.gguf", "mtp-t-F32.gguf"):
        as_gguf(source, "qwen3_5", ggufs / name, name[6:-5])
    hub.add_repo("org/t-GGUF", ggufs)
    asked = EngineConfig(model="org/t-GGUF", device="cpu", max_model_len=64, speculative="mtp")
    model = build_engine(Settings(asked))
    try:
        assert sorted(file.name for file in model.path.parent.iterdir()) == ["mtp-t-Q8_0.gguf", "t-Q8_0.gguf"]
        assert model.spec.drafter is not None
        assert model.spec.drafter.path.name == "mtp-t-Q8_0.gguf"
    finally:
        model.close()
    assert to_remove("org/t-GGUF:Q8_0").names == ("t-Q8_0.gguf", "mtp-t-Q8_0.gguf")


def test_offline_it_is_refused_with_the_command_that_fetches(hub: LocalHub) -> None:
    with pytest.raises(HubOffline) as caught:
        build_engine(settings(offline=True))
    assert caught.value.hint.startswith("localllm pull org/tiny")
    assert hub.sent == []


def test_a_load_that_is_given_up_ends_its_download(hub: LocalHub, tiny_llama_path: Path) -> None:
    hub.add_repo("org/tiny", tiny_llama_path)
    hub.troubles["model.safetensors"] = Trouble(stall_after=100_000)
    given_up = threading.Event()
    threading.Thread(target=lambda: (wait_until_stalled(hub), given_up.set())).start()

    def report(phase: object) -> None:
        if given_up.is_set():
            raise EngineStopped("The load was cancelled.")

    started_s = time.monotonic()
    with pytest.raises(EngineStopped):
        build_engine(settings(), report)
    assert time.monotonic() - started_s < 5


@pytest.mark.parametrize(
    ("progress", "line"),
    [
        (PullProgress(2**30, 4 * 2**30, 1, 3, 2**30, 100 * 2**20, 31), "1.0 GiB of 4.0 GiB · 100 MiB/s · 31.0 s left"),
        (PullProgress(2**30, 2**31, 1, 3, note="m: busy; again in 2 s"), "1.0 GiB of 2.0 GiB · m: busy; again in 2 s"),
        (PullProgress(2**30, 4 * 2**30, 1, 3), "1.0 GiB of 4.0 GiB"),
        (PullProgress(2**30, 2**30, 3, 3, 2**30, 2**20, 0.0), "1.0 GiB of 1.0 GiB"),
    ],
)  # fmt: skip
def test_progress_is_one_line(progress: PullProgress, line: str) -> None:
    assert progress_line(progress) == line


def test_a_long_download_is_logged_now_and_then(caplog: pytest.LogCaptureFixture) -> None:
    log = LogAnnouncer()
    with caplog.at_level("INFO", "localllm"):
        for seconds in (0.0, 5.0, 12.0, 15.0, 23.0):
            log.phase(Phase("download", f"at {seconds:g} s", seconds, 0.5))
            log.phase(Phase("weights", "not told while it goes on", seconds, 0.5))
    assert [record.getMessage() for record in caplog.records] == ["download at 12 s", "download at 23 s"]
