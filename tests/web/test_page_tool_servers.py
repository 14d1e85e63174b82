"""The page for servers of tools, over a real socket: add, test, disable and remove one, and what it refuses."""

import html
import re
import shlex
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from localllm.web.access.keys import add_key, keys_path
from tests.mcp.programs import HERE, hostile
from tests.web.harness import browser_of
from tests.web.live_server import LiveServer, PacedRunner, fake_model, settings, wait_until

PAGE = "/settings/tools"
KEPT = '# my settings\nlog_level = "info"\n\n[models.small]\nmodel = "demo"\n'


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("config") / "config.toml"
    path.write_text(KEPT)
    return path


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory, own_data: None, config: Path) -> Iterator[httpx.Client]:
    model = fake_model(tmp_path_factory.mktemp("tiny"), PacedRunner())
    with LiveServer(model, replace(settings(ui=True), file=config)) as server, browser_of(server) as client:
        client.get(server.link())
        yield client


def command(mode: str) -> str:
    return shlex.join([sys.executable, "-S", str(HERE / "hostile.py"), mode])


def fields(page: str) -> dict[str, str]:
    """The hidden fields of the page that shows a new server."""
    found = dict(re.findall(r'<input type="hidden" name="(\w+)" value="([^"]*)">', page))
    found |= dict(re.findall(r'<textarea name="(\w+)" hidden>\n(.*?)</textarea>', page, re.S))
    return {name: html.unescape(text) for name, text in found.items()}


def add(browser: httpx.Client, **form: str) -> httpx.Response:
    """Send the form, and save what the next page shows."""
    shown = browser.post(f"{PAGE}/add", data=form)
    assert shown.status_code == 200, shown.text
    return browser.post(f"{PAGE}/add", data=fields(shown.text) | {"confirm": "yes"})


def test_a_server_is_shown_in_full_saved_tested_disabled_and_removed(browser: httpx.Client, config: Path) -> None:
    assert 'href="/settings/tools"' in browser.get("/settings").text
    form = {
        "name": "mine",
        "command": f"{command('plain')} 'two words'",
        "env": "API_KEY=s3cret\nMODE=a=b",
        "in_new_chats": "on",
    }
    shown = browser.post(f"{PAGE}/add", data=form).text
    assert "two words" in shown
    assert "with your rights" in shown
    assert config.read_text() == KEPT, "nothing is written before the confirmation"
    page = browser.post(f"{PAGE}/add", data=fields(shown) | {"confirm": "yes"}).text
    table = tomllib.loads(config.read_text())["mcp"]["servers"]["mine"]
    assert table["args"][-2:] == ["plain", "two words"]
    assert table["env"] == {"API_KEY": "s3cret", "MODE": "a=b"}
    assert config.read_text().startswith(KEPT)
    assert "not started" in page
    assert "s3cret" not in page
    page = browser.post(f"{PAGE}/mine/test").text
    assert "running" in page
    assert "<code>tool</code> Does things" in page
    assert "not started" in browser.post(f"{PAGE}/mine/stop").text
    assert "disabled" in browser.post(f"{PAGE}/mine/disable").text
    assert tomllib.loads(config.read_text())["mcp"]["servers"]["mine"]["enabled"] is False
    assert "mine" not in browser.get("/chats/tools").text
    assert "not started" in browser.post(f"{PAGE}/mine/enable").text
    assert tomllib.loads(config.read_text())["mcp"]["servers"]["mine"]["enabled"] is True
    assert "server-mine" not in browser.post(f"{PAGE}/mine/remove").text
    assert config.read_text().rstrip() == KEPT.rstrip()
    assert browser.post(f"{PAGE}/mine/test").status_code == 400


def test_a_server_that_does_not_start_shows_why_and_its_errors(browser: httpx.Client) -> None:
    add(browser, name="broken", command=command("exits"))
    page = browser.post(f"{PAGE}/broken/test").text
    assert "broken did not start." in page
    assert "status 7" in page
    assert "missing configuration" in page
    browser.post(f"{PAGE}/broken/remove")


@pytest.mark.parametrize(
    ("form", "says"),
    [
        ({"name": "Bad Name", "command": "x"}, "is not allowed"),
        ({"name": "a"}, "Give a command or an address."),
        ({"name": "a", "command": "x", "address": "http://x/mcp"}, "either a command or an address"),
        ({"name": "a", "command": "x 'y"}, "No closing quotation"),
        ({"name": "a", "command": "x", "env": "no value"}, "A variable cannot be read."),
        ({"name": "a", "command": "x", "env": "A-B=1"}, "env"),
        ({"name": "a", "address": "file:///etc/passwd"}, "http://"),
        ({"name": "a", "address": "http://x/mcp", "headers": "Bad Header: 1"}, "headers"),
        ({"name": "a", "command": "x", "timeout_s": "soon"}, "a number of seconds"),
        ({"name": "a", "command": "x", "timeout_s": "1e9"}, "at most 3600"),
    ],
)
def test_what_cannot_be_a_server_is_refused_with_the_typed_text(
    browser: httpx.Client, config: Path, form: dict[str, str], says: str
) -> None:
    before = config.read_text()
    answer = browser.post(f"{PAGE}/add", data=form | {"confirm": "yes"})
    assert answer.status_code == 400
    assert says in html.unescape(answer.text)
    assert all(html.escape(text) in answer.text or text in html.unescape(answer.text) for text in form.values())
    assert config.read_text() == before


def test_a_name_is_given_once_and_another_site_adds_nothing(browser: httpx.Client, config: Path) -> None:
    add(browser, name="once", command=command("plain"))
    again = browser.post(f"{PAGE}/add", data={"name": "once", "command": "x"})
    assert "exists already" in again.text
    before = config.read_text()
    evil = {"name": "evil", "command": "x", "confirm": "yes"}
    assert browser.post(f"{PAGE}/add", data=evil, headers={"origin": "http://evil.example"}).status_code == 403
    assert browser.post(f"{PAGE}/once/remove", headers={"sec-fetch-site": "cross-site"}).status_code == 403
    assert config.read_text() == before


def test_keys_for_inference_neither_see_nor_change_servers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    asked = replace(settings(ui=True), mcp={"plain": hostile("plain")}, file=tmp_path / "config.toml")
    with LiveServer(fake_model(tmp_path / "tiny", PacedRunner()), asked) as server, browser_of(server) as client:
        client.headers["Authorization"] = f"Bearer {add_key(keys_path(), 'ann', 'infer')}"
        wait_until(lambda: server.http.get(PAGE).status_code != 200)
        assert client.get(PAGE).status_code == 403
        assert client.post(f"{PAGE}/add", data={"name": "x", "command": "x", "confirm": "yes"}).status_code == 403
        assert client.post(f"{PAGE}/plain/test").status_code == 403


PASTED = """{"mcpServers": {
    "Time Now": {"command": "uvx", "args": ["mcp-server-time"], "env": {}, "disabled": false},
    "notes": {"type": "http", "url": "https://tools.example.com/mcp", "headers": {"Authorization": "Bearer x"}}}}"""


def test_pasted_json_is_shown_in_full_and_saved(browser: httpx.Client, config: Path) -> None:
    shown = browser.post(f"{PAGE}/add", data={"pasted": PASTED, "in_new_chats": "on"})
    assert "Add time-now, notes?" in shown.text
    assert "time-now: this command will be run" in shown.text
    assert "time-now" not in config.read_text()
    browser.post(f"{PAGE}/add", data=fields(shown.text) | {"confirm": "yes"})
    servers = tomllib.loads(config.read_text())["mcp"]["servers"]
    assert servers["time-now"] == {"command": "uvx", "args": ["mcp-server-time"]}
    assert servers["notes"] == {"url": "https://tools.example.com/mcp", "headers": {"Authorization": "Bearer x"}}
    for name in ("time-now", "notes"):
        browser.post(f"{PAGE}/{name}/remove")


@pytest.mark.parametrize(
    ("pasted", "said"),
    [
        ("{", "not JSON"),
        ("[]", "holds no servers"),
        ('{"mcpServers": {}}', "holds no servers"),
        ('{"mcpServers": {"a": {"command": "x", "cwd": "/"}}}', "cwd"),
        ('{"a": {"args": []}}', "none of them"),
    ],
)
def test_pasted_json_that_cannot_be_used_is_refused(browser: httpx.Client, pasted: str, said: str) -> None:
    answer = browser.post(f"{PAGE}/add", data={"pasted": pasted})
    assert (answer.status_code, said in html.unescape(answer.text)) == (400, True)


def test_a_known_server_fills_the_form(browser: httpx.Client) -> None:
    page = browser.get(f"{PAGE}?known=time").text
    assert 'value="uvx mcp-server-time"' in page
    assert 'value="uvx' not in browser.get(f"{PAGE}?known=nothing").text


def test_a_searxng_becomes_a_switch_beside_send(browser: httpx.Client, config: Path) -> None:
    assert 'id="web"' not in browser.get("/").text
    assert "Address of a SearXNG" in browser.get(PAGE).text
    add(browser, name="web", searxng="http://127.0.0.1:8888")
    assert tomllib.loads(config.read_text())["mcp"]["servers"]["web"] == {
        "searxng": "http://127.0.0.1:8888",
        "in_new_chats": False,
    }
    page = browser.get("/").text
    assert '<input id="web" type="checkbox" name="mcp-web" value="on">' in page
    assert page.count('name="mcp-web"') == 1, "it is not in the drawer as well"
    assert 'name="mcp_shown"' in page
    assert "Address of a SearXNG" not in browser.get(PAGE).text
    browser.post(f"{PAGE}/web/remove")
