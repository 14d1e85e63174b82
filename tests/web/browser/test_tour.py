"""A person's way through all of it, on the demo model and a local hub: talk, watch, fetch a model, try, tune.

Once with a finger on 360 px, with a mouse on 768 and on 1920, and on 1280 with nothing but the keyboard. Every stop is
photographed; `scripts/make_screenshots` keeps the pictures that docs/ shows.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from localllm.config.settings import EngineConfig
from localllm.logs.recent_logs import RecentLogs
from tests.draws import DAY
from tests.hub import conftest as hub_fixtures
from tests.hub.local_hub import LocalHub
from tests.web.browser.harness import Finger, Hand, Keyboard, Mouse, Tour
from tests.web.browser.looks import changed_pictures, opened
from tests.web.tuned_server import TunedServer, be_quick

if TYPE_CHECKING:
    from playwright.sync_api import Browser

hub = hub_fixtures.hub
SLOW = pytest.mark.slow  # half a minute each


@pytest.fixture
def told() -> Iterator[None]:
    """What a server says is there to be seen on the page of logs."""
    root, ours, handler = logging.getLogger(), logging.getLogger("localllm"), RecentLogs()
    before = ours.level
    ours.setLevel(logging.INFO)
    root.addHandler(handler)
    yield
    root.removeHandler(handler)
    ours.setLevel(before)


@pytest.fixture
def server(
    hub: LocalHub, told: None, tiny_llama_path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[TunedServer]:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    be_quick(monkeypatch, trial_s=0.2, soak_s=0.3)
    hub.add_repo("org/tiny", tiny_llama_path)
    engine = EngineConfig(model="demo", kv_cache_memory_bytes=64 << 20, max_num_seqs=16)
    with TunedServer(engine, "demo", ("kv_cache_memory_bytes", "max_num_batched_tokens", "kv_cache_dtype")) as live:
        yield live


@pytest.mark.parametrize(
    ("look", "width", "hand", "options"),
    [
        pytest.param("-small", 360, Finger(), {"has_touch": True, "is_mobile": True}, id="finger-360", marks=SLOW),
        pytest.param("-dark", 768, Mouse(), {"color_scheme": "dark"}, id="mouse-768", marks=SLOW),
        pytest.param("", 1280, Keyboard(), {}, id="keyboard-1280"),
        pytest.param("-wide", 1920, Mouse(), {}, id="mouse-1920", marks=SLOW),
    ],
)
def test_a_way_through_all_pages(
    chromium: Browser, server: TunedServer, tmp_path: Path, look: str, width: int, hand: Hand, options: dict[str, Any]
) -> None:
    pictures = Path(os.environ.get("LOCALLLM_PICTURES", tmp_path))
    with opened(chromium, width, 740 if width < 768 else 900, **options) as page:
        page.set_default_timeout(20_000)
        tour = Tour(page, server, hand, pictures, look)
        tour.chat()
        tour.dashboard()
        tour.models()
        tour.playground()
        tour.others()
        tour.tune()
        tour.chat_goes_on()
    if "LOCALLLM_PICTURES" not in os.environ and not DAY:  # else they are taken to be agreed on, or it has to be quick
        assert changed_pictures(pictures, look) == {}
