"""Where requests come from on the dashboard, cancelling all of them, several models, and the first request of all."""

import html
import json
import re
import shlex
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from localllm.web.access.keys import add_key, keys_path
from tests.web.live_server import LiveServer, PacedRunner, fake_model, settings, wait_until

ASK = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
SCRIPTED = {"hx-request": "true"}


def words(page: str) -> str:
    return html.unescape(re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", page)))


def rows(page: str) -> list[str]:
    """Where the requests of a page come from."""
    return re.findall(r'class="requests__who">(?:<span[^>]*></span>)?<a [^>]*>([^<]*?) <small>', page)


class TwoModels(LiveServer):
    """Serves tiny and second."""

    def __init__(self, folder: Path) -> None:
        super().__init__(fake_model(folder, PacedRunner()), settings(ui=True))
        self.second = replace(fake_model(folder, PacedRunner()), name="second", aliases=frozenset())

    async def _serve(self) -> None:
        await self.second.client.start()
        self.manager.adopt(self.second)
        await super()._serve()


@pytest.fixture
def pace() -> PacedRunner:
    return PacedRunner()


@pytest.fixture
def live(tmp_path: Path, pace: PacedRunner) -> Iterator[LiveServer]:
    with LiveServer(fake_model(tmp_path, pace), settings(ui=True)) as live:
        yield live


def test_a_server_without_requests_says_how_to_send_the_first(live: LiveServer) -> None:
    page = live.get("/dashboard").text
    assert "No request yet. Send one from the chat , or:" in words(page)
    assert "0 of 0 tokens" not in words(page)
    assert "No step yet." in page
    command = re.search(r'<pre class="first-request"[^>]*>(.*?)</pre>', page, re.DOTALL)
    assert command
    curl, url, _, header, _, body = shlex.split(html.unescape(command[1]))
    assert (curl, url) == ("curl", f"{live.url}/v1/chat/completions")
    name, _, value = header.partition(": ")
    assert httpx.post(url, content=body, headers={name: value}, timeout=20).status_code == 200
    page = live.get("/dashboard").text
    assert "first-request" not in page
    assert page.index("Time to first token") < page.index("Generation speed"), "waiting time comes first"
    assert len(re.findall(">KV cache<", page)) == 1
    assert re.search(r"95 % within [\d.]+ ms", page)


def test_a_request_shows_where_it_comes_from_and_the_key_only_to_admins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    laptop, other = (add_key(keys_path(), name, scope="infer") for name in ("laptop", "phone"))
    admin = add_key(keys_path(), "owner", scope="admin")
    with LiveServer(fake_model(tmp_path, PacedRunner()), settings(ui=True)) as live:

        def bearer(key: str) -> dict[str, str]:
            return {"authorization": f"Bearer {key}"}

        assert live.http.post("/v1/chat/completions", json=ASK, headers=bearer(laptop)).status_code == 200
        form = {"tab": "completions", "text": "a", "max_tokens": "2"}
        assert live.http.post("/playground", data=form, headers=bearer(admin) | SCRIPTED).status_code == 200
        assert live.http.post("/chat", data={"message": "hi"}, headers=bearer(admin)).status_code in (200, 303)
        wait_until(lambda: len(rows(live.http.get("/dashboard/requests", headers=bearer(admin)).text)) == 3)
        seen = {
            key: sorted(rows(live.http.get("/dashboard/requests", headers=bearer(key)).text)) for key in (admin, other)
        }
        assert seen == {admin: ["chat", "laptop", "playground, owner"], other: ["API", "chat", "playground"]}
        for path in ("/dashboard", "/dashboard/stats.json", "/dashboard/requests.csv"):
            assert "laptop" in live.http.get(path, headers=bearer(admin)).text, path
            assert "laptop" not in live.http.get(path, headers=bearer(other)).text, path
        stats = json.loads(live.http.get("/dashboard/stats.json", headers=bearer(other)).text)
        one = live.http.get(f"/dashboard/requests/{stats['recent'][-1]['request_id']}", headers=bearer(other)).text
        assert "From API" in words(one)


def test_all_requests_are_cancelled_at_once(live: LiveServer, pace: PacedRunner) -> None:
    pace.step_s = 0.05
    ends: list[str] = []

    def ask() -> None:
        with suppress(httpx.HTTPError):
            body = {**ASK, "max_tokens": 400, "ignore_eos": True}
            ends.append(live.post("/v1/chat/completions", body).json()["choices"][0]["finish_reason"])

    asking = [threading.Thread(target=ask) for _ in range(3)]
    for thread in asking:
        thread.start()
    wait_until(lambda: len(rows(live.get("/dashboard").text)) == 3)
    page = live.get("/dashboard").text
    assert 'hx-confirm="Cancel all 3 requests?"' in page
    foreign = live.http.post("/dashboard/requests/cancel", headers={"origin": "https://evil.example"})
    assert foreign.status_code == 403
    done = live.http.post("/dashboard/requests/cancel", headers={"accept": "text/html"})
    assert (done.status_code, done.headers["location"]) == (303, "/dashboard")
    for thread in asking:
        thread.join(20)
        assert not thread.is_alive()
    live.wait_idle()
    assert "Cancel all" not in live.get("/dashboard").text
    assert live.http.post("/dashboard/requests/cancel", headers=SCRIPTED).status_code == 204, "nothing runs"


def test_each_of_several_models_has_a_dashboard(live: LiveServer, tmp_path: Path) -> None:
    """One model: no choice. Two: tabs, and each shows its own requests; one that is gone is not offered."""
    assert '<nav class="models"' not in live.get("/dashboard").text
    with TwoModels(tmp_path) as two:
        show_each(two)


def show_each(live: LiveServer) -> None:
    first = "tiny"
    assert live.post("/v1/chat/completions", {**ASK, "model": "second"}).status_code == 200
    page = live.get(f"/dashboard?model={first}&last=5m").text
    assert re.findall(r'<a class="models__link" href="([^"]+)"( aria-current="page")?>', page) == [
        ("/dashboard?model=second&amp;last=5m", ""),
        (f"/dashboard?model={first}&amp;last=5m", ' aria-current="page"'),
    ]
    assert f'hx-sse:connect="/live/dashboard?model={first}&amp;last=5m"' in page
    assert "first-request" in page, "the other model's request is not this one's"
    page = live.get("/dashboard?model=second").text
    assert rows(page) == ["API"]
    assert "<b>second</b>, planned memory" in page
    id = re.search(r'href="/dashboard/requests/([^"]+)"', page)
    assert id
    assert live.get(f"/dashboard/requests/{id[1]}").status_code == 200
    absent = live.get("/dashboard?model=absent").text
    assert 'hx-sse:connect="/live/dashboard?model=second"' in absent, "the one that was used last, and it stays"
    with live.http.stream("GET", "/live/dashboard?model=second") as stream:
        lines = stream.iter_lines()
        assert any("<b>second</b>, planned memory" in line for line in lines)
        assert live.post("/localllm/v1/models/unload", {"model": "second"}).status_code == 200
        assert "event: ready" in lines, "the page is told to reload: there is nothing to choose any more"
    assert '<nav class="models"' not in live.get("/dashboard?model=second").text
