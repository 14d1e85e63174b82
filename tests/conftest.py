"""Fixtures every room may use: tiny random models on disk, one per family and session."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.tiny import make_tiny_model


@pytest.fixture(autouse=True)
def nobody_asks_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that is not on this machine is refused; tests/hub lifts this for a hub of its own."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.fixture(scope="session")
def tiny_model_path(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`tiny_model_path(family)`: a folder with a tiny random checkpoint and a tokenizer, made once."""
    made: dict[str, Path] = {}

    def path_of(family: str = "llama") -> Path:
        if family not in made:
            made[family] = make_tiny_model(tmp_path_factory.mktemp("models") / f"tiny-{family}", family)
        return made[family]

    return path_of


@pytest.fixture(scope="session")
def tiny_llama_path(tiny_model_path: Callable[[str], Path]) -> Path:
    return tiny_model_path("llama")
