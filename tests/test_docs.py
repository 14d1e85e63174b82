"""The documentation says what the code does, and leads somewhere."""

import os
import re
import runpy
import shlex
import subprocess
from dataclasses import fields
from pathlib import Path

import pytest

from localllm import cli
from localllm.cli.programs import guide_page
from localllm.config.settings import EngineConfig, ServerConfig
from localllm.config.unsupported import UNSUPPORTED
from localllm.kernels.launch import HAS_TRITON, INTERPRETED
from localllm.serving.manager import ModelManager
from localllm.web.access.scopes import is_open, scope_of
from localllm.web.app import create_app
from scripts import layout
from tests.web.live_server import settings

ROOT = Path(__file__).parent.parent
REFERENCE = ROOT / "docs" / "reference"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
MAKER = runpy.run_path(str(ROOT / "scripts" / "make_docs"))
WRITTEN = MAKER["pages"]()
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]


@pytest.mark.parametrize("name", WRITTEN)
def test_reference_is_up_to_date(name: str) -> None:
    assert (REFERENCE / name).read_text(encoding="utf-8") == WRITTEN[name], "run scripts/make_docs"


def test_the_guide_to_programs_is_up_to_date() -> None:
    assert (ROOT / "docs" / "guides" / "programs.md").read_text(encoding="utf-8") == guide_page(), (
        "run scripts/make_docs"
    )


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md"])
def test_the_map_is_up_to_date(name: str) -> None:
    assert (ROOT / name).read_text(encoding="utf-8") == layout.pages()[name], "run scripts/make_docs"


@pytest.mark.skipif(INTERPRETED or not HAS_TRITON, reason="needs Triton's compiler, not its interpreter")
def test_every_kernel_variant_is_in_the_table() -> None:
    """Names only: the numbers are those of one Triton, and test_ahead_of_time.py holds every Triton to the budgets."""
    rows = re.findall(r"^\| (`\w+` \| .*? \| sm_\d+) \|", (REFERENCE / "kernels.md").read_text(encoding="utf-8"), re.M)
    wanted = [" | ".join((*MAKER["kernel_row"](v), f"sm_{MAKER['shown_arch'](v)}")) for v in MAKER["listed_variants"]()]
    assert sorted(rows) == sorted(wanted), "run scripts/make_docs"


@pytest.mark.parametrize("field", [f.name for config in (EngineConfig, ServerConfig) for f in fields(config)])
def test_every_setting_has_an_entry(field: str) -> None:
    assert f"| `{field}` |" in WRITTEN["settings.md"]


def test_every_flag_has_an_entry() -> None:
    known = {flag for parser in cli.build_parser()[1].values() for flag in parser._option_string_actions}
    missing = [flag for flag in known if not re.search(rf"`{re.escape(flag)}[ `]", WRITTEN["cli.md"])]
    assert not missing
    assert all(f"`--{name.replace('_', '-')}`" in WRITTEN["cli.md"] for name in UNSUPPORTED)


def test_every_endpoint_has_an_entry() -> None:
    paths = {route.path for route in create_app(ModelManager(), settings()).routes}
    pattern = {re.sub(r"\{(\w+):\w+\}", r"{\1}", path) for path in paths}
    assert not [path for path in pattern if f"{path}`" not in WRITTEN["api.md"]]


def test_every_endpoint_names_the_scope_it_needs() -> None:
    rows = re.findall(r"^\| `(GET|POST|DELETE) (\S+)`.* \| (\w+) \|$", WRITTEN["api.md"], flags=re.M)
    assert len(rows) > 20
    for method, path, scope in rows:
        assert scope == ("no" if is_open(path) else scope_of(method, path)), f"{method} {path}"


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_links_lead_to_files(page: Path) -> None:
    links = re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))
    targets = [link for link in links if not link.startswith(("http:", "https:"))]
    assert not [target for target in targets if not (page.parent / target).exists()]


def _commands() -> list[str]:
    """Lines of code blocks, and code spans, that call localllm."""
    found = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        if page.parent != REFERENCE:
            found += re.findall(r"^(?:\.venv/bin/)?(localllm .*)$", text, flags=re.M)
            found += re.findall(r"`(localllm [a-z][^`]*)`", text)
    return sorted(set(found))


@pytest.mark.parametrize("command", _commands())
def test_commands_in_the_docs_are_understood(command: str) -> None:
    if "|" in command:  # a table's alternatives: the first stands for them
        command = command.split("\\|")[0]
    words = [word.strip("[]") for word in shlex.split(command)[1:]]
    assert cli.parse(words)


@pytest.mark.parametrize("script", ["scripts/up", "scripts/check", ".ci/run"])
def test_scripts_named_in_the_docs_can_be_run(script: str) -> None:
    assert os.access(ROOT / script, os.X_OK)
    subprocess.run(["bash", "-n", str(ROOT / script)], check=True)


def test_ci_does_nothing_that_the_readme_does_not_tell() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert "scripts/check" in readme
    assert "apt-get install -y chromium" in readme


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_addresses_are_public_or_examples(page: Path) -> None:
    known = {"127.0.0.1", "localhost", "arxiv.org", "github.com", "huggingface.co", "app.example", "ui.perfetto.dev",
             "mirror.example", "zed.dev", "code.visualstudio.com"}  # fmt: skip
    hosts = set(re.findall(r"https?://([\w.-]+)", page.read_text(encoding="utf-8")))
    assert hosts <= known
