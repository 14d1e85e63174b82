"""The files in scripts/clients of those clients that are installed here, over a real socket with the demo model.

scripts/client_check runs the others too; here the files are kept from rotting.
"""

import re
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from localllm.config.settings import EngineConfig, ServerConfig, Settings
from localllm.serving.build import build_engine
from tests.web.live_server import LiveServer

ROOT = Path(__file__).resolve().parents[2]
FILES = ROOT / "scripts" / "clients"
CAPABILITIES: tuple[str, ...] = runpy.run_path(str(FILES / "checking.py"))["CAPABILITIES"]
KEY = "a-key"
INSTALLED = ("openai", "anthropic", "ollama")


@pytest.fixture(scope="module")
def used() -> Iterator[dict[str, dict[str, Any]]]:
    """The functions of each file, by the client's name; they reach a server with a key."""
    engine = EngineConfig(model="demo", kv_cache_memory_bytes=64 << 20, device="cpu")
    server_settings = Settings(engine, ServerConfig(port=0, ui=False, api_key=KEY))
    with pytest.MonkeyPatch.context() as patch, LiveServer(build_engine(server_settings), server_settings) as server:
        patch.syspath_prepend(str(FILES))
        patch.setenv("LOCALLLM_URL", f"{server.url}/v1")
        patch.setenv("LOCALLLM_API_KEY", KEY)
        names = {client: runpy.run_path(str(FILES / f"with_{client}.py")) for client in INSTALLED}
        yield names
        for each in names.values():
            each["client"].close()
        for module in ("asked", "checking"):
            del sys.modules[module]


def checks_of(file: Path) -> list[str]:
    """The names of its functions that take nothing; files of clients that are not here can be read, not run."""
    return re.findall(r"^(?:async )?def (\w+)\(\) -> None:", file.read_text(encoding="utf-8"), re.MULTILINE)


@pytest.mark.parametrize(
    ("client", "check"), [(client, check) for client in INSTALLED for check in checks_of(FILES / f"with_{client}.py")]
)
def test_a_client_does_what_it_can(used: dict[str, dict[str, Any]], client: str, check: str) -> None:
    used[client][check]()


def test_every_client_has_a_file_that_checks_what_is_known() -> None:
    clients = runpy.run_path(str(ROOT / "scripts" / "client_check"))["CLIENTS"]
    files = {FILES / client.file for client in clients.values()}
    assert files == set(FILES.glob("with_*.py"))
    for file in files:
        assert {"chat", "errors"} <= set(checks_of(file)) <= set(CAPABILITIES)


def test_the_guide_shows_lines_that_are_run() -> None:
    guide = (ROOT / "docs" / "guides" / "connect-a-client.md").read_text(encoding="utf-8")
    shown = re.findall(r"scripts/clients/(with_\w+\.py)\)[^`]*(?:`[^`]+`[^`]*)*?```python\n(.*?)```", guide, re.DOTALL)
    assert len(shown) == 4
    for name, block in shown:
        run = {line.strip() for line in (FILES / name).read_text(encoding="utf-8").splitlines()}
        assert set(block.splitlines()) <= run, name
