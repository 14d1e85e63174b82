"""A server whose model is real, tiny and quickly tuned: most of what could be searched is set, trials are short."""

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import httpx
import pytest

from localllm.config.settings import EngineConfig, ServerConfig, Settings, Source
from localllm.tuning.run import TuneOptions
from localllm.web.pages.tune import forms
from tests.web.live_server import ManagedServer, wait_until

CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "temperature": 0}
BROWSER = {"accept": "text/html,*/*;q=0.8"}


class TunedServer(ManagedServer):
    """A server of a real, tiny model. fixed: settings that tuning does not search."""

    def __init__(self, engine: EngineConfig, name: str, fixed: Sequence[str], **server: Any) -> None:
        flag: Source = "flag"
        config = ServerConfig(port=0, served_model_name=(name,), **server)
        super().__init__(Settings(engine, config, sources=dict.fromkeys(fixed, flag)))

    @classmethod
    def tiny(cls, path: Path, **server: Any) -> Self:
        engine = EngineConfig(model=str(path), max_model_len=256, kv_cache_memory_bytes=1 << 20, max_num_seqs=4)
        return cls(engine, "tiny", ("kv_cache_memory_bytes", "max_num_seqs", "kv_cache_dtype"), **server)

    def browse(self, path: str, form: dict[str, str] | None = None) -> httpx.Response:
        """As a browser without scripts does."""
        if form is None:
            return self.http.get(path, headers=BROWSER, follow_redirects=True)
        return self.http.post(path, data=form, headers=BROWSER, follow_redirects=True)

    def ask(self) -> httpx.Response:
        return self.post("/v1/chat/completions", CHAT)

    def begin(self, goal: str = "chat", **limits: str) -> httpx.Response:
        return self.browse("/tune/run", {"goal": goal, "model": "tiny", "effort": "quick", **limits})

    def finish(self) -> str:
        """The page of the result, once the run has ended."""
        wait_until(lambda: self.http.get("/tune/run", headers=BROWSER).status_code == 303, 60)
        return self.browse("/tune/result").text


def be_quick(monkeypatch: pytest.MonkeyPatch, trial_s: float = 0.05, soak_s: float = 0.2) -> None:
    quick = replace(TuneOptions.quick(), trial_s=trial_s, soak_s=soak_s)
    monkeypatch.setitem(forms.EFFORTS, "quick", quick)


def text_of(page: str) -> str:
    """What is read, tags left out."""
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", page))
