"""The folder of a project over a real socket: found in a question, read again when it changes, of nobody else."""

import os
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from localllm.web.pages.chat.projects import folder as folders
from localllm.web.pages.chat.store.projects import HOLDS_FOLDERS
from tests.web.harness import browser_of, new_project, pdf_of
from tests.web.live_server import LiveServer, settings
from tests.web.pages_stub import StubModel, stub_plan


@pytest.fixture(scope="module")
def model() -> StubModel:
    stub = StubModel(plan=replace(stub_plan(), max_model_len=16_384))
    stub.client.every_s, stub.client.chars = 0.0, 40
    return stub


@pytest.fixture(scope="module")
def server(model: StubModel, own_data: None) -> Iterator[LiveServer]:
    with LiveServer(model, settings(ui=True)) as live:  # type: ignore[arg-type]
        yield live


@pytest.fixture
def browser(server: LiveServer) -> Iterator[httpx.Client]:
    with browser_of(server) as client:
        client.get(server.link())
        yield client


@pytest.fixture
def notes(tmp_path: Path) -> Path:
    root = tmp_path / "notes"
    (root / "plans").mkdir(parents=True)
    (root / "plans" / "harbour.md").write_text("# Plans\n\nWe build.\n\nThe lighthouse was painted vermilion in May.\n")
    (root / "paper.pdf").write_bytes(pdf_of(["Nothing here.", "The ferry is called Albatross."]))
    (root / "photo.bin").write_bytes(b"\0\1\2 vermilion")
    (root / ".secret").write_text("The vermilion password.")
    (root / "node_modules").mkdir()
    (root / "node_modules" / "x.js").write_text("vermilion()")
    outside = tmp_path / "outside.txt"
    outside.write_text("The vermilion key is under the mat.")
    (root / "link.txt").symlink_to(outside)
    return root


def prompt(model: StubModel) -> str:
    return "".join(map(chr, model.client.asked[-1].prompt_token_ids))


def ask(browser: httpx.Client, project: str, message: str) -> str:
    answer = browser.post("/chat", data={"message": message, "conversation": "", "project": project.split("/")[-1]})
    assert answer.status_code == 200
    return answer.text


def sources(page: str) -> list[str]:
    return re.findall(r'<summary class="sources__head">([^<]*)</summary>', page)


def test_a_question_finds_the_file_with_its_lines_and_pages(
    browser: httpx.Client, model: StubModel, notes: Path
) -> None:
    project = new_project(browser, "Notes")
    page = browser.post(f"{project}/folder", data={"folder": str(notes)}).text
    assert str(notes) in page
    assert "photo.bin" in browser.get(project).text
    answer = ask(browser, project, "What colour was the lighthouse painted, vermilion?")
    assert "The lighthouse was painted vermilion in May." in prompt(model)
    assert sources(answer) == ["From plans/harbour.md, lines 1–5"]
    for kept_out in ("password", "under the mat", "vermilion()"):
        assert kept_out not in prompt(model)
    answer = ask(browser, project, "Is the ferry called Albatross?")
    assert sources(answer) == ["From paper.pdf, p. 2"]
    elsewhere = browser.post("/chat", data={"message": "The lighthouse, vermilion?", "conversation": ""}).text
    assert sources(elsewhere) == [], "a chat outside of the project"
    nothing = ask(browser, project, "zygote quagmire")
    assert sources(nothing) == [], "no samples of files that do not match"


def test_what_changes_in_the_folder_is_found_at_the_next_question(
    browser: httpx.Client, model: StubModel, notes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = list[str]()
    body = folders._body
    monkeypatch.setattr(folders, "_body", lambda path: read.append(path.name) or body(path))
    project = new_project(browser, "Changing")
    browser.post(f"{project}/folder", data={"folder": str(notes)})
    ask(browser, project, "lighthouse vermilion")
    assert sorted(read) == ["harbour.md", "paper.pdf", "photo.bin"]
    read.clear()
    plan = notes / "plans" / "harbour.md"
    plan.write_text("The lighthouse was painted turquoise in June.\n")
    os.utime(plan, (1, 1))
    (notes / "new.txt").write_text("A turquoise boat.")
    (notes / "paper.pdf").unlink()
    ask(browser, project, "What is turquoise, the lighthouse?")
    assert sorted(read) == ["harbour.md", "new.txt"], "what has not changed is not read again"
    assert "painted turquoise" in prompt(model)
    assert "A turquoise boat." in prompt(model)
    assert "vermilion" not in prompt(model)
    assert sources(ask(browser, project, "Albatross ferry")) == []


def test_the_folder_ends_with_its_project_and_no_list_shows_it(
    browser: httpx.Client, server: LiveServer, notes: Path
) -> None:
    def held() -> tuple[int, int]:
        import sqlite3

        from localllm.web.pages.chat.store.database import chats_path

        with sqlite3.connect(chats_path()) as db:
            [chats] = db.execute("SELECT count(*) FROM chat WHERE owner = ?", (HOLDS_FOLDERS,)).fetchone()
            [passages] = db.execute(
                "SELECT count(*) FROM passage_words WHERE passage_words MATCH 'vermilion'"
            ).fetchone()
        return chats, passages

    before = held()
    project = new_project(browser, "Ending")
    browser.post(f"{project}/folder", data={"folder": str(notes)})
    ask(browser, project, "lighthouse")
    assert held() == (before[0] + 1, before[1] + 1)
    assert str(notes) not in browser.get("/chats").text
    page = browser.post(f"{project}/folder", data={"folder": ""}).text
    assert "Search this folder" in page
    assert held() == before


@pytest.mark.parametrize(
    ("typed", "said"),
    [("notes", "not complete"), ("/no/such/folder", "cannot be read"), ("/", "whole disk"), ("/etc/passwd", "cannot")],
)
def test_a_folder_that_cannot_be_searched_is_refused(browser: httpx.Client, typed: str, said: str) -> None:
    answer = browser.post(f"{new_project(browser, 'Wrong')}/folder", data={"folder": typed})
    assert (answer.status_code, said in answer.text) == (400, True)


def test_only_the_owner_of_the_machine_chooses_a_folder(server: LiveServer, notes: Path) -> None:
    with browser_of(server) as other:
        answer = other.post(f"{new_project(other, 'Other')}/folder", data={"folder": str(notes)})
        assert answer.status_code == 403
        assert "one-time link" in answer.text


def test_a_folder_that_is_gone_is_said_at_the_answer(browser: httpx.Client, notes: Path) -> None:
    project = new_project(browser, "Gone")
    browser.post(f"{project}/folder", data={"folder": str(notes)})
    notes.rename(notes.with_name("moved"))
    assert "was not searched" in ask(browser, project, "zygote")


def test_a_large_folder_is_searched_as_far_as_it_is_read(
    browser: httpx.Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folders, "MAX_FILES", 30)
    for number in range(40):
        (tmp_path / f"{number:02}.txt").write_text(f"Number {number} is periwinkle.")
    project = new_project(browser, "Large")
    browser.post(f"{project}/folder", data={"folder": str(tmp_path)})
    monkeypatch.setattr(folders, "WAIT_S", 30.0)
    assert ask(browser, project, "periwinkle")
    page = browser.get(project).text
    assert "30 files are searched" in page
    assert "10 are left out" in page


def test_a_walk_of_a_folder_ends(browser: httpx.Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folders, "MOST_SEEN", 30)
    monkeypatch.setattr(folders, "WAIT_S", 30.0)
    for number in range(20):
        (tmp_path / f"part{number:02}").mkdir()
        (tmp_path / f"part{number:02}" / "a.txt").write_text(f"Number {number} is periwinkle.")
    project = new_project(browser, "Endless")
    browser.post(f"{project}/folder", data={"folder": str(tmp_path)})
    assert ask(browser, project, "periwinkle")
    page = browser.get(project).text
    assert "10 files are searched; the folder has more" in page
