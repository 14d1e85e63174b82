"""The client of MCP servers against real servers: well-behaved ones over both transports, and hostile ones."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from localllm.config.mcp_servers import McpServer
from localllm.mcp import connection, servers
from localllm.mcp.servers import McpServers
from localllm.mcp.values import ToolRefused, ToolServerFailed
from tests.mcp.harness import N, call, calling, refusal, using
from tests.mcp.programs import friendly, friendly_over_http, hostile


def is_alive(pid: int) -> bool:
    """Return whether a process runs; one that has ended and was not waited for does not."""
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


def wait_for_end(*pids: int) -> None:
    until = time.monotonic() + 30
    while any(map(is_alive, pids)):
        assert time.monotonic() < until, "a process outlived its end"
        time.sleep(0.02)


def test_the_official_server_over_stdio_is_listed_and_called(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCALLLM_API_KEY", "sk-secret")

    async def use(each: McpServers) -> None:
        listing = await each.tools("friendly")
        assert {tool.name for tool in listing.tools} >= {"add", "markup", "picture", "fail"}
        assert not listing.refused
        assert (await call(each, "add", {"a": 2, "b": 40})).text == "42"
        picture = await call(each, "picture", {})
        assert picture.text == "See:\n\n[image, 12.0 KiB, not shown to the model]"
        failed = await call(each, "fail", {})
        assert failed.is_error
        assert "the disk is full" in failed.text
        assert (await call(each, "markup", {})).text.startswith("<img src=x")
        assert (await call(each, "environment", {"name": "LOCALLLM_API_KEY"})).text == "not set"
        assert (await call(each, "environment", {"name": "GREETING"})).text == "hello"
        for arguments, says in (
            ({"a": "two", "b": 1}, "'two' is not of type 'integer'"),
            ({"a": 1}, "'b' is a required"),
        ):
            with pytest.raises(ToolRefused) as refused:
                await call(each, "add", arguments)
            assert says in refused.value.why
        assert each.state("friendly").state == "running"
        assert "friendly is listening" in each.state("friendly").tail

    using(friendly(env={"GREETING": "hello"}), use)


def test_the_official_server_over_http_is_listed_and_called() -> None:
    with friendly_over_http() as url:
        result = calling(McpServer("web", url=url, headers={"X-Test": "1"}), "add", {"a": 1, "b": 2})
    assert result.text == "3"


def test_the_reference_server_for_the_time_answers() -> None:
    pytest.importorskip("mcp_server_time")
    server = McpServer("time", sys.executable, ("-m", "mcp_server_time", "--local-timezone", "UTC"))
    assert '"timezone": "UTC"' in calling(server, "get_current_time", {"timezone": "UTC"}).text


def test_a_server_is_started_once_at_first_use_and_again_after_it_was_idle() -> None:
    """What it started ends with it."""

    async def use(each: McpServers) -> None:
        assert each.state("spawns").state == "not started"
        first = await asyncio.gather(*(call(each, "tool", N) for _ in range(3)))
        pids = [int(pid) for result in first for pid in result.text.split()]
        assert len(set(pids)) == 4, "one server, with a child for each call"
        assert all(map(is_alive, pids))
        while each.state("spawns").state == "running":
            await asyncio.sleep(0.05)
        wait_for_end(*pids)
        again = (await call(each, "tool", N)).text.split()
        assert int(again[0]) not in pids
        pids[:] = map(int, again)
        await each.close()
        wait_for_end(*pids)

    using(hostile("spawns"), use, idle_s=2.0)


KILLED = """
import asyncio, sys
from localllm.mcp.servers import McpServers
from tests.mcp.programs import hostile
from tests.mcp.harness import call
async def main():
    each = McpServers({"stays": hostile("stays")})
    print((await call(each, "tool", {"n": 1})).text, flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""


def test_a_server_does_not_outlive_a_killed_localllm() -> None:
    with subprocess.Popen([sys.executable, "-c", KILLED], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pids = list(map(int, process.stdout.readline().split()))
        assert len(pids) == 2
        os.kill(process.pid, signal.SIGKILL)
    wait_for_end(*pids)


# ---- hostile servers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "says"),
    [
        ("dies", "status 3"),
        ("huge", "a line of more than 4.0 MiB"),
        ("endless", "a line of more than 4.0 MiB"),
        ("flood", "more than 2,000 messages"),
        ("deep", "a message that cannot be read"),
        ("list", "tools.1.inputSchema.type: Input should be 'object'"),
        ("garbage", "does not follow the protocol"),
        ("exits", "status 7"),
    ],
)
def test_a_server_that_breaks_a_bound_ends_with_a_reason(mode: str, says: str) -> None:
    error = refusal(hostile(mode))
    assert says in f"{error.what} {error.why}"
    if mode == "dies":
        assert "out of cheese" in error.why
    if mode == "exits":
        assert "did not start" in error.what
        assert "missing configuration" in error.why


def test_a_server_that_hangs_is_given_up_and_serves_the_next_caller() -> None:
    error = refusal(hostile("hangs", timeout_s=0.5))
    assert "did not answer the call of tool within" in error.what


def test_a_server_that_never_answers_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "START_S", 0.5)
    error = refusal(hostile("silent", timeout_s=0.5))
    assert "did not start" in error.what
    assert "did not answer within" in error.why


def test_a_server_that_failed_is_not_tried_again_at_once() -> None:
    async def use(each: McpServers) -> None:
        reasons = []
        for _ in range(2):
            with pytest.raises(ToolServerFailed) as caught:
                await each.tools("exits")
            reasons.append(caught.value)
        assert reasons[0] is reasons[1]
        assert each.state("exits").state == "failed"
        with pytest.raises(ToolServerFailed) as caught:
            await each.tools("exits", again=True)
        assert caught.value is not reasons[0]

    using(hostile("exits"), use)


def test_a_missing_program_and_a_closed_port_are_named() -> None:
    assert "no-such-program" in refusal(McpServer("gone", "no-such-program")).why
    assert "did not start" in refusal(McpServer("gone", url="http://127.0.0.1:9/mcp")).what


def test_schemas_that_cannot_be_used_are_refused_by_name_and_the_others_are_offered() -> None:
    listing = using(hostile("schemas"), lambda each: each.tools("schemas"))
    assert {tool.name for tool in listing.tools} == {"regex", "loop"}
    said = "\n".join(listing.refused)
    for name, why in {
        "deep": "nested deeper",
        "huge": "100,0",
        "outside": "http://127.0.0.1:9/schema",
        "wrong": "not a JSON schema",
    }.items():
        assert any(f"'{name}'" in line and why in line for line in listing.refused), (name, said)
    assert calling(hostile("schemas"), "regex", {"n": "a" * 40 + "!"}).text.startswith("called")
    assert "cannot be applied" in refusal(hostile("schemas"), "loop", {"n": 1}).why


def test_endless_lists_are_bounded() -> None:
    many = using(hostile("many"), lambda each: each.tools("many"))
    assert len(many.tools) == connection.MAX_TOOLS
    assert "more than 128 tools" in many.refused[-1]
    assert "16 pages" in using(hostile("pages"), lambda each: each.tools("pages")).refused[-1]


def test_a_tool_that_changed_after_the_model_called_it_is_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(servers, "LISTED_S", 0.0)

    async def use(each: McpServers) -> None:
        before = await each.find_tool("changing", "tool")
        (tmp_path / "n").write_text("1")
        assert before is not None
        with pytest.raises(ToolRefused, match="has changed"):
            await each.call("changing", "tool", before.digest, N)
        assert (await call(each, "tool", N)).text.startswith("called")

    using(hostile("changing", str(tmp_path / "n")), use)


def test_a_server_may_not_ask_the_model_and_keeps_a_short_tail_of_errors() -> None:
    assert "error" in calling(hostile("asks")).text

    async def use(each: McpServers) -> None:
        assert (await call(each, "tool", N)).text == "done"
        tail = each.state("noisy").tail
        assert 0 < len(tail) <= 100
        assert all(len(line) <= 501 and "\x1b" not in line for line in tail)

    using(hostile("noisy"), use)
