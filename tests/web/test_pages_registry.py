"""One registry of pages: a new page is a folder and its line in `web/pages/__init__.py`."""

import ast
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from litestar import Request, get
from litestar.response import Response

from localllm.web import pages
from localllm.web.access.scopes import Paths, RouteRules
from localllm.web.pages.frame.navigation import Page
from localllm.web.pages.frame.state import html, pages_state
from localllm.web.pages.frame.views import ErrorNotice, ErrorPage, NavEntry, Shell, View
from tests.web.live_server import LiveServer, settings
from tests.web.pages_stub import StubModel

PACKAGE = Path(pages.__file__).parents[2]
FOLDER = Path(pages.__file__).parent
LENT = {("settings", "chat")}
"""(page, the page whose modules it imports): the settings page shows where the chats are stored."""


@get("/notes", sync_to_thread=False)
def notes_page(request: Request[Any, Any, Any]) -> Response[str]:
    shell = pages_state(request).shell(request, "Notes", "notes")
    return html(ErrorPage(shell, ErrorNotice("Two notes.")))


def samples(shell: Shell) -> list[View]:
    return [ErrorNotice("A sample of the notes.", shell.here)]


NOTES = Page(
    NavEntry("notes", "Notes", "/notes", "M3 5h14"),
    handlers=(notes_page,),
    rules=RouteRules(infer=Paths("/notes"), linked=Paths("/notes")),
)


def test_one_line_gives_a_page_its_route_its_entry_its_scope_and_its_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    assert pages.rules().scope_of("GET", "/notes") == "admin"
    monkeypatch.setattr(pages, "PAGES", (*pages.PAGES, NOTES))
    monkeypatch.setitem(sys.modules, "localllm.web.pages.notes.samples", SimpleNamespace(samples=samples))
    with LiveServer(StubModel(), settings(ui=True)) as server:  # type: ignore[arg-type]
        assert "Two notes." in server.get("/notes").text
        assert '<a class="nav__link" href="/notes">' in server.get("/dashboard").text
        assert "A sample of the notes." in server.get("/dev/patterns").text
        foreign = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate", "sec-fetch-dest": "document"}
        assert [server.get(path, headers=foreign).status_code for path in ("/notes", "/logs")] == [200, 403]
    assert pages.rules().scope_of("GET", "/notes") == "infer"


def test_the_registry_has_a_page_for_each_folder() -> None:
    folders = {path.parent.name for path in FOLDER.glob("*/__init__.py")} - {"frame"}
    assert [page.entry.key for page in pages.PAGES if page.entry.key not in folders] == []
    assert len(folders) == len(pages.PAGES)


def test_only_the_registry_imports_a_page() -> None:
    folders = {page.entry.key for page in pages.PAGES}
    for path in (PACKAGE / "web").rglob("*.py"):
        own = path.relative_to(FOLDER).parts[0] if path.is_relative_to(FOLDER) else ""
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.ImportFrom) or path == FOLDER / "__init__.py":
                continue
            parts = (node.module or "").split(".")
            page = parts[3] if parts[:3] == ["localllm", "web", "pages"] and len(parts) > 3 else own
            assert page not in folders - {own} or (own, page) in LENT, f"{path} imports the page {page}"
