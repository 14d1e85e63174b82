"""The server of tools for the web: a stub SearXNG over HTTP, pages as text, and addresses that are not read."""

import ipaddress
import socket
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest

from localllm.config.mcp_servers import McpServer
from localllm.mcp import web_search
from localllm.mcp.servers import McpServers
from tests.mcp.programs import SearxngStub, searxng_stub


@pytest.fixture
def searxng() -> Iterator[str]:
    with searxng_stub() as address:
        yield address


@pytest.fixture
def everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the test's own server pass for a public address."""
    monkeypatch.setattr(ipaddress.IPv4Address, "is_global", True)


def test_a_search_gives_the_first_results_as_text(searxng: str) -> None:
    text = web_search.search(f"{searxng}/", "paged attention?", 2)
    assert SearxngStub.asked == [{"q": ["paged attention?"], "format": ["json"], "pageno": ["2"]}]
    assert text.startswith("1. Result 0\nhttps://example.com/0\nAbout blocks 0.\n\n2. Result 1")
    assert text.count("https://") == web_search.MAX_RESULTS


def test_a_searxng_without_json_says_what_to_change(searxng: str) -> None:
    SearxngStub.status = 403
    with pytest.raises(web_search.Unreached, match=r"Add json to search\.formats"):
        web_search.search(searxng, "x")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        with pytest.raises(web_search.Unreached, match="was not reached"):
            web_search.search(f"http://127.0.0.1:{free.getsockname()[1]}", "x")


@pytest.mark.usefixtures("everywhere")
def test_a_page_is_its_text_without_scripts_and_menus(searxng: str) -> None:
    text = "Blocks\n\n# Paged & kept\n\nOne block has tokens.\n\n- first\n\n- second"
    assert web_search.read_page(f"{searxng}/page") == text
    assert web_search.read_page(f"{searxng}/moved") == text
    with pytest.raises(web_search.Unreached, match="image/png"):
        web_search.read_page(f"{searxng}/picture")
    with pytest.raises(web_search.Unreached, match="redirects more than"):
        web_search.read_page(f"{searxng}/loop")


@pytest.mark.parametrize(
    "address",
    [
        "http://127.0.0.1/", "http://localhost:8000/settings", "http://[::1]/", "http://169.254.169.254/latest",
        "http://10.0.0.1/", "http://192.168.1.1/", "http://0.0.0.0/", "http://[::ffff:127.0.0.1]/", "http://2130706433/",
    ],
)  # fmt: skip
def test_addresses_of_this_machine_and_its_network_are_not_read(address: str) -> None:
    with pytest.raises(web_search.Unreached, match="not a public address"):
        web_search.read_page(address)


@pytest.mark.parametrize(
    "address", ["file:///etc/passwd", "ftp://example.com/", "example.com", "http://", "http://x:y/"]
)
def test_what_is_not_an_address_of_the_web_is_refused(address: str) -> None:
    with pytest.raises(web_search.Unreached, match="is not an address"):
        web_search.read_page(address)


def test_a_redirect_to_this_machine_is_not_followed(searxng: str, monkeypatch: pytest.MonkeyPatch) -> None:
    looked = socket.getaddrinfo

    def public_name(host: str, port: int, *more: Any, **options: Any) -> Any:
        return looked("127.0.0.1" if host == "public.example" else host, port, *more, **options)

    monkeypatch.setattr(socket, "getaddrinfo", public_name)
    real = ipaddress.ip_address
    checked = list[str]()

    def first_is_public(text: str) -> Any:
        checked.append(text)
        return real("93.184.216.34") if len(checked) == 1 else real(text)

    monkeypatch.setattr(ipaddress, "ip_address", first_is_public)
    port = urlsplit(searxng).port
    with pytest.raises(web_search.Unreached, match=r"127\.0\.0\.1 is not a public address"):
        web_search.read_page(f"http://public.example:{port}/moved")


async def test_it_runs_as_a_server_of_tools(searxng: str) -> None:
    servers = McpServers({"web": McpServer("web", searxng=searxng)})
    try:
        listing = await servers.tools("web")
        assert [tool.name for tool in listing.tools] == ["search_web", "read_page"]
        search, read = listing.tools
        found = await servers.outcome("web", "search_web", search.digest, {"query": "blocks"})
        assert (found.fails, "Result 0" in found.text) == ("", True)
        refused = await servers.outcome("web", "read_page", read.digest, {"address": f"{searxng}/page"})
        assert (refused.fails, "not a public address" in refused.text) == ("tool", True)
    finally:
        await servers.close()
