"""What the browser is given: vendored files as their makers made them, small, and from here only."""

import gzip
import hashlib
import re
import tomllib

from localllm.web.pages import PAGES
from localllm.web.pages.chat.thread.views import ChatPage
from localllm.web.pages.frame.patterns import samples
from localllm.web.pages.frame.render import render
from localllm.web.pages.frame.static import PAGES as PAGES_FOLDER
from localllm.web.pages.frame.static import VENDOR, static_files, static_url

LAZY = {"vendor/temml-0.13.5.min.js"}
"""Fetched only by a page with a formula on it."""

MANIFEST = tomllib.loads((VENDOR / "MANIFEST.toml").read_text())


def test_vendored_files_have_the_sums_of_the_manifest() -> None:
    for package in MANIFEST["package"]:
        assert {"name", "version", "registry", "licence"} <= package.keys()
        for file in package["files"]:
            assert package["version"] in file["file"]
            assert hashlib.sha256((VENDOR / file["file"]).read_bytes()).hexdigest() == file["sha256"]


def test_every_vendored_file_is_in_the_manifest() -> None:
    listed = {file["file"] for package in MANIFEST["package"] for file in package["files"]}
    assert {path.name for path in VENDOR.iterdir()} == listed | {"MANIFEST.toml"}


def test_scripts_weigh_less_than_32_kb_compressed() -> None:
    assert (
        sum(len(file.gzipped) for name, file in static_files().items() if name.endswith(".js") and name not in LAZY)
        < 32_000
    )


def test_texts_of_own_scripts_end_on_their_line() -> None:
    """Indentation and comment lines are removed from what is served, so none may be part of a text."""
    for path in PAGES_FOLDER.rglob("*.js"):
        if VENDOR not in path.parents:
            assert not [text for text in re.findall(r"`[^`]*`", path.read_text()) if "\n" in text], path
            assert "/*" not in path.read_text(), path


ASKED = LAZY | {"dictation.js", "aloud.js"}
"""Scripts that the first page has only where a model transcribes, or where the browser has a voice of its machine."""


def test_first_page_weighs_less_than_50_kb() -> None:
    """The chat page with the sheets, scripts and icon that it links, compressed."""
    page = next(render(sample) for sample in samples(PAGES) if isinstance(sample, ChatPage) and sample.composer)
    assert not any(name in page and f'src="/static/{name}' in page for name in ASKED)
    linked = {name for name in static_files() if f"/static/{name}?" in page} - ASKED
    sent = [static_files()[name] for name in linked if name.endswith((".js", ".css", ".svg"))]
    assert len(sent) > 8
    assert len(gzip.compress(page.encode())) + sum(len(file.gzipped) for file in sent) < 50_000


def test_own_files_refer_to_nothing_elsewhere() -> None:
    own = [file for name, file in static_files().items() if name.endswith((".js", ".css")) and "vendor" not in name]
    assert len(own) >= 4
    for file in own:
        text = file.body.decode()
        assert "http:" not in text
        assert "https:" not in text
        assert "@import" not in text


def test_url_changes_with_the_content() -> None:
    assert static_url("app.css").endswith(static_files()["app.css"].etag)
