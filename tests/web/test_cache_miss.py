"""What clients and the dashboard say about a prompt that was not found in the prefix cache, and to whom."""

import html
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from localllm.web.access.keys import add_key, keys_path
from localllm.web.api.timings import ApiCacheMiss
from tests.web.live_server import LiveServer, PacedRunner, fake_model, settings, wait_until

SYSTEM = "You are an agent that edits files. " * 8
PATHS = ("/v1/chat/completions", "/v1/responses")
LINE = "cc_version={}; cch={};\n"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[LiveServer]:
    with LiveServer(fake_model(tmp_path / "tiny", PacedRunner()), settings(ui=True)) as live:
        yield live


def ask(server: LiveServer, version: str, question: str = "Hi", path: str = PATHS[0], **more: Any) -> dict[str, Any]:
    """Send a request like a coding program's, whose first line changes; return its timings."""
    headers = more.pop("headers", {})
    turns = [
        {"role": "system", "content": LINE.format(version, version) + SYSTEM},
        {"role": "user", "content": question},
    ]
    body = {"max_output_tokens" if "responses" in path else "max_tokens": 16, **more}
    answer = server.post(path, {**body, "input" if "responses" in path else "messages": turns}, headers=headers)
    assert answer.status_code == 200, answer.text
    server.wait_idle()
    timings: dict[str, Any] = answer.json()["timings"]
    return timings


def words(page: str) -> str:
    return html.unescape(re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", page)))


@pytest.mark.parametrize("path", PATHS)
def test_a_line_that_changes_at_the_head_is_named_with_its_cost(server: LiveServer, path: str) -> None:
    assert ask(server, "2.1", path=path)["cache_miss"] == {"reason": "new", "tokens": 0, "ms": 0.0}
    assert "cache_miss" not in ask(server, "2.1", path=path), "the same prompt again"
    timings = ask(server, "7.9", path=path)
    miss = timings["cache_miss"]
    assert miss["reason"] == "changed"
    assert miss["token"] < 20
    assert miss["before"].endswith("cc_version=")
    assert miss["here"].startswith("7.9; cch=7.9;\nYou")
    assert timings["prompt_n"] - 20 < miss["tokens"] < timings["prompt_n"]
    assert 0 < miss["ms"] < timings["prompt_ms"]
    assert "2.1" not in json.dumps({**miss, "ms": 0}), "the earlier prompt may be another user's of the same key"
    ApiCacheMiss(**miss)


@pytest.mark.parametrize(("path", "last"), [(PATHS[0], -2), (PATHS[1], -1)])
def test_a_stream_ends_with_the_explanation(server: LiveServer, path: str, last: int) -> None:
    ask(server, "2.1")
    turns = [{"role": "system", "content": LINE.format(3, 3) + SYSTEM}, {"role": "user", "content": "Hi"}]
    text = server.post(path, {"input" if "responses" in path else "messages": turns, "stream": True}).text
    end = json.loads([line for line in text.splitlines() if line.startswith("data: ")][last].removeprefix("data: "))
    miss = end.get("response", end)["timings"]["cache_miss"]
    assert (miss["reason"], miss["here"][:5]) == ("changed", "3; cc")


def test_of_several_choices_the_first_one_tells(server: LiveServer) -> None:
    ask(server, "2.1")
    assert ask(server, "7.9", n=3)["cache_miss"]["tokens"] > 0, "the others find its prompt in the cache"


def test_a_continued_conversation_misses_nothing(server: LiveServer) -> None:
    said = [{"role": "user", "content": SYSTEM}]
    for _ in range(3):
        answer = server.post(PATHS[0], {"messages": said, "max_tokens": 8, "ignore_eos": True}).json()
        assert answer["timings"].get("cache_miss", {"reason": "new"})["reason"] in ("new", "changed")
        assert answer["timings"].get("cache_miss", {}).get("tokens", 0) < 8, "at most a part of the answer"
        server.wait_idle()
        said += [answer["choices"][0]["message"], {"role": "user", "content": "And?"}]


def test_blocks_that_are_gone_are_told_from_a_change(server: LiveServer) -> None:
    ask(server, "2.1")
    for place in range(12):  # other prompts take all blocks
        ask(server, "2.1", cache_salt=f"other {place}", question=f"{place} " * 90)
    assert ask(server, "2.1")["cache_miss"]["reason"] == "evicted"
    asked = {"prompt": "Hi there, how are you today?", "max_tokens": 1, "prompt_logprobs": 1}
    assert server.post("/v1/completions", asked).json()["timings"]["cache_miss"]["reason"] == "off"


def test_the_page_of_a_request_shows_both_texts(server: LiveServer) -> None:
    ask(server, "2.1")
    ask(server, "7.9")
    listed = server.get("/dashboard/requests").text
    assert re.search(r"missed \d+</small>", listed)
    newest = json.loads(server.get("/dashboard/stats.json").text)["recent"][0]
    page = server.get(f"/dashboard/requests/{newest['request_id']}").text
    shown = words(page)
    left = f"left an earlier one after {newest['miss_position']} of {newest['num_prompt_tokens']} tokens"
    assert left in shown
    same = f"{newest['num_missed_tokens']} of those behind that place are the same in both, and were computed again in "
    assert same in shown
    marked = [html.unescape(each) for each in re.findall(r"<mark>(.*?)</mark>", page, re.DOTALL)]
    assert [each[:3] for each in marked] == ["7.9", "2.1"]
    earlier = re.search(r'href="(/dashboard/requests/[^"]+)">Earlier request', page)
    assert earlier
    assert "No earlier prompt" in words(server.get(earlier[1]).text)


@pytest.mark.parametrize("shared", [False, True])
def test_the_text_of_a_key_is_shown_to_no_other_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shared: bool
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    alice, bob, owner = (
        {"authorization": f"Bearer {add_key(keys_path(), name, scope=scope)}"}
        for name, scope in (("alice", "infer"), ("bob", "infer"), ("owner", "admin"))
    )
    chosen = settings(ui=True, share_prefix_cache=shared)
    with LiveServer(fake_model(tmp_path / "tiny", PacedRunner()), chosen) as server:

        def get(path: str, key: dict[str, str]) -> httpx.Response:
            return server.http.get(path, headers=key)

        for key in (alice, bob):
            done = server.wait_idle().finished.get("length", 0)
            server.http.post("/chat", data={"message": "a secret " * 20, "max_tokens": "1"}, headers=key)
            wait_until(lambda done=done: server.stats().finished.get("length", 0) > done)
            chat = json.loads(get("/dashboard/stats.json", key).text)["recent"][0]
            finds_it = shared and key is bob
            assert (chat["source"], chat["miss_reason"]) == ("chat", "" if finds_it else "new")
        ask(server, "secret-1", headers=alice)
        foreign = ask(server, "secret-2", headers=bob)
        assert foreign["cache_miss"]["reason"] == "new", "another key's prompt is not an earlier one"
        assert (foreign["cache_n"] > 0) == shared
        assert ask(server, "secret-3", headers=alice)["cache_miss"]["reason"] == "changed"
        newest = json.loads(get("/dashboard/stats.json", owner).text)["recent"][0]["request_id"]
        pages = {who: get(f"/dashboard/requests/{newest}", key) for who, key in
                 (("alice", alice), ("bob", bob), ("owner", owner))}  # fmt: skip
        assert {who: page.status_code for who, page in pages.items()} == dict.fromkeys(pages, 200)
        assert "secret-3" in words(pages["alice"].text)
        assert "secret-1" in words(pages["alice"].text)
        for who, key in (("bob", bob), ("owner", owner)):
            assert "The text is shown only to the key that sent the request." in words(pages[who].text)
            for path in (f"/dashboard/requests/{newest}", "/dashboard", "/dashboard/requests", "/dashboard/stats.json",
                         "/dashboard/requests.csv", "/metrics"):  # fmt: skip
                assert "secret" not in get(path, key).text, path
