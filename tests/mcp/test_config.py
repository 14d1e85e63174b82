"""The tables of servers in config.toml: what is read, what is refused by name, and changes of single tables."""

from pathlib import Path
from typing import Any

import pytest

from localllm.config.edit import enabling, with_server, without_server, write
from localllm.config.mcp_servers import McpServer, read_mcp_servers
from localllm.config.resolve import resolve
from localllm.errors import ConfigError

BOTH = """# mine
max_model_len = 4096

[mcp.servers.files]  # the notes
command = "uvx"
args = ["mcp-server-files", "[x]"]

[mcp.servers.files.env]
TOKEN = "a # b"

# the web
[mcp.servers.web]
url = "https://tools.example.com/mcp"
headers = { Authorization = "Bearer x" }
timeout_s = 5
in_new_chats = false
scope = "infer"

[models.small]
model = "demo"
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.toml"
    path.write_text(BOTH)
    return path


def servers(path: Path) -> dict[str, McpServer]:
    return dict(resolve({}, {}, path).mcp)


def test_tables_are_read(config: Path) -> None:
    assert servers(config) == {
        "files": McpServer("files", "uvx", ("mcp-server-files", "[x]"), {"TOKEN": "a # b"}),
        "web": McpServer(
            "web", url="https://tools.example.com/mcp", headers={"Authorization": "Bearer x"}, timeout_s=5,
            in_new_chats=False, scope="infer",
        ),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("table", "says"),
    [
        (3, "must be a table of servers"),
        ({"server": {}}, "must be a table of servers"),
        ({"servers": {"Files": {"command": "x"}}}, "'Files'"),
        ({"servers": {"a": 3}}, "is not a table"),
        ({"servers": {"a": {}}}, "none of them"),
        ({"servers": {"a": {"command": "x", "url": "http://x"}}}, "more than one"),
        ({"servers": {"a": {"command": "x", "headers": {"A": "b"}}}}, "Headers belong to a url"),
        ({"servers": {"a": {"url": "http://x", "env": {"A": "b"}}}}, "belong to a command"),
        ({"servers": {"a": {"command": "x", "timeout": 3}}}, "'timeout'"),
        ({"servers": {"a": {"command": ["x"]}}}, "command"),
        ({"servers": {"a": {"command": "x", "args": "y"}}}, "args"),
        ({"servers": {"a": {"command": "x", "args": ["a\0b"]}}}, "args"),
        ({"servers": {"a": {"command": "x", "env": {"A B": "c"}}}}, "env"),
        ({"servers": {"a": {"url": "ftp://x"}}}, "url"),
        ({"servers": {"a": {"url": "http://x", "headers": {"A": "b\nC: d"}}}}, "headers"),
        ({"servers": {"a": {"command": "x", "timeout_s": True}}}, "timeout_s"),
        ({"servers": {"a": {"command": "x", "timeout_s": float("inf")}}}, "timeout_s"),
        ({"servers": {"a": {"command": "x", "enabled": "yes"}}}, "enabled"),
        ({"servers": {"a": {"command": "x", "scope": "all"}}}, "scope"),
        ({"servers": {"a": {"searxng": "127.0.0.1:8888"}}}, "searxng"),
        ({"servers": {"a": {"searxng": "http://x", "url": "http://x"}}}, "more than one"),
        ({"servers": {"a": {"searxng": "http://x", "headers": {"A": "b"}}}}, "Headers belong to a url"),
    ],
)
def test_wrong_tables_are_refused_by_name(table: Any, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_mcp_servers(table, "config.toml")
    assert says in f"{caught.value.what} {caught.value.why}"


def test_a_change_touches_one_table(config: Path) -> None:
    write(enabling(config, "files", False))
    assert not servers(config)["files"].enabled
    assert config.read_text().replace("enabled = false\n", "") == BOTH
    write(enabling(config, "files", True))
    assert servers(config)["files"].enabled
    write(without_server(config, "files"))
    assert config.read_text() == BOTH[: BOTH.index("[mcp")] + BOTH[BOTH.index("# the web") :]
    added = McpServer("new", "/opt/a b", ("--x", 'quo"te', "ä\\"), {"K": "v\nw"}, timeout_s=2.5, in_new_chats=False)
    write(with_server(config, added))
    assert servers(config)["new"] == added
    with pytest.raises(ConfigError, match="exists already"):
        with_server(config, added)
    write(without_server(config, "new"))
    assert list(servers(config)) == ["web"]


@pytest.mark.parametrize(
    "text",
    [
        'mcp = { servers = { a = { command = "x" } } }\n',
        '[mcp.servers]\na = { command = "x" }\n',
        '[mcp]\nservers.a.command = "x"\n',
    ],
)
def test_a_table_written_in_another_way_is_left_to_an_editor(tmp_path: Path, text: str) -> None:
    path = tmp_path / "config.toml"
    path.write_text(text)
    assert "a" in servers(path)
    for change in (lambda: without_server(path, "a"), lambda: enabling(path, "a", False)):
        with pytest.raises(ConfigError, match="was not changed"):
            change()


def test_a_first_server_makes_the_file(tmp_path: Path) -> None:
    path = tmp_path / "localllm" / "config.toml"
    write(with_server(path, McpServer("web", url="http://127.0.0.1:1/mcp")))
    assert servers(path) == {"web": McpServer("web", url="http://127.0.0.1:1/mcp")}
    assert path.stat().st_mode & 0o777 == 0o600
