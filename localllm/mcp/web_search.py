"""A server of tools for the web: search through a SearXNG, and read one page as text. It runs as a child process.

    python -P web_search.py ADDRESS        ADDRESS: of a SearXNG, such as http://127.0.0.1:8888

A search asks the SearXNG for JSON, which its settings must allow (`search: formats: [html, json]`). Pages are read from
public addresses alone: a page that the model reads may name an address of this machine or its network, and the model
may follow it. Each redirect is checked again, and the connection goes to the address that was checked.
Does not know: chats, consent, other modules of localllm (stdio.py starts it as any server of tools).
"""

from __future__ import annotations

import http.client
import ipaddress
import json
import re
import socket
import ssl
import sys
from collections.abc import Mapping
from html.parser import HTMLParser
from typing import Any
from urllib.parse import urlencode, urljoin, urlsplit

from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

TIMEOUT_S = 20.0
MAX_BYTES = 4 * 2**20
"""Most bytes of an answer that are read."""

MAX_CHARS = 40_000
"""Most characters of a page that the model gets."""

MAX_RESULTS, MAX_REDIRECTS, MAX_SNIPPET_CHARS = 8, 5, 500
HEADERS = {"User-Agent": "localllm", "Accept-Encoding": "identity"}
SKIPPED = frozenset(("script", "style", "noscript", "template", "svg", "iframe", "nav", "footer", "form", "button"))
BREAKS = frozenset(
    ("p", "div", "br", "li", "ul", "ol", "tr", "table", "section", "article", "header", "main", "blockquote", "pre",
     "h1", "h2", "h3", "h4", "h5", "h6", "title", "dt", "dd", "figure", "figcaption")
)  # fmt: skip


class Unreached(Exception):
    """An address was not read, with the reason."""


def search(base: str, query: str, page: int = 1) -> str:
    """Return the results of a search as text: title, address and beginning of each. Raises `Unreached`."""
    asked = urlencode({"q": query, "format": "json", "pageno": max(1, page)})
    status, _, body = _get(f"{base.rstrip('/')}/search?{asked}", public=False)
    if status == 403:
        raise Unreached("The SearXNG refuses JSON. Add json to search.formats in its settings.yml.")
    try:
        found = json.loads(body)["results"] if status == 200 else None
    except (ValueError, KeyError, TypeError):
        found = None
    if not isinstance(found, list):
        raise Unreached(f"The SearXNG did not answer with results (status {status}).")
    rows = [each for each in found if isinstance(each, dict) and each.get("url")][:MAX_RESULTS]
    texts = []
    for number, row in enumerate(rows, 1):
        content = " ".join(str(row.get("content") or "").split())[:MAX_SNIPPET_CHARS]
        texts.append("\n".join(filter(None, (f"{number}. {row.get('title') or row['url']}", str(row["url"]), content))))
    return "\n\n".join(texts) or f"Nothing was found for {query!r}."


def read_page(address: str) -> str:
    """Return the text of a page, from a public address alone. Raises `Unreached`."""
    for _ in range(MAX_REDIRECTS + 1):
        status, headers, body = _get(address, public=True)
        if status not in (301, 302, 303, 307, 308) or not headers.get("location"):
            break
        address = urljoin(address, headers["location"])
    else:
        raise Unreached(f"The page redirects more than {MAX_REDIRECTS} times.")
    if status >= 400:
        raise Unreached(f"The page answered with status {status}.")
    kind, _, parameters = headers.get("content-type", "text/html").partition(";")
    if not kind.strip().startswith("text/") and "json" not in kind and "xml" not in kind:
        raise Unreached(f"The page is {kind.strip()}, which is not read here.")
    charset = re.search(r"charset=[\"']?([\w-]+)", parameters)
    try:
        text = body.decode(charset[1] if charset else "utf-8", "replace")
    except LookupError:
        text = body.decode("utf-8", "replace")
    if "html" in kind:
        parser = PageText()
        parser.feed(text)
        text = parser.text
    return text if len(text) <= MAX_CHARS else f"{text[:MAX_CHARS]}\n… {len(text) - MAX_CHARS:,} more characters"


class PageText(HTMLParser):
    """The text of an HTML page, without scripts, menus and forms."""

    def __init__(self) -> None:
        super().__init__()
        self._parts: list[str] = []
        self._skipped = 0

    @property
    def text(self) -> str:
        lines = (" ".join(line.split()) for line in "".join(self._parts).split("\n"))
        return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._skipped += tag in SKIPPED
        if tag in BREAKS:
            self._parts.append("\n# " if tag in ("h1", "h2", "h3") else "\n- " if tag == "li" else "\n")

    def handle_endtag(self, tag: str) -> None:
        self._skipped = max(0, self._skipped - (tag in SKIPPED))
        if tag in BREAKS:
            self._parts.append("\n")

    def handle_data(self, data: str) -> None:
        if not self._skipped:
            self._parts.append(data.replace("\n", " "))


def _get(address: str, *, public: bool) -> tuple[int, Mapping[str, str], bytes]:
    """Return status, headers by lower-case name, and body. `public`: refuse addresses of this machine and its
    network.
    """
    parts = urlsplit(address)
    try:
        port = parts.port or (443 if parts.scheme == "https" else 80)
    except ValueError as error:
        raise Unreached(f"{address[:200]} is not an address.") from error
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise Unreached(f"{address[:200]} is not an address of the web.")
    try:
        found = socket.getaddrinfo(parts.hostname, port, type=socket.SOCK_STREAM)
        numbers = [str(each[4][0]) for each in found]
        if public and not all(ipaddress.ip_address(number.partition("%")[0]).is_global for number in numbers):
            raise Unreached(f"{parts.hostname} is not a public address, so it is not read.")
        connection = http.client.HTTPConnection(parts.hostname, port, timeout=TIMEOUT_S)
        sock = socket.create_connection((numbers[0], port), TIMEOUT_S)
        if parts.scheme == "https":
            sock = ssl.create_default_context().wrap_socket(sock, server_hostname=parts.hostname)
        connection.sock = sock
        try:
            path = f"{parts.path or '/'}?{parts.query}" if parts.query else parts.path or "/"
            connection.request("GET", path, headers={**HEADERS, "Host": parts.netloc.rpartition("@")[2]})
            answer = connection.getresponse()
            body = answer.read(MAX_BYTES)
            return answer.status, {name.lower(): text for name, text in answer.getheaders()}, body
        finally:
            connection.close()
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise Unreached(f"{parts.hostname} was not reached: {error}.") from error


def serve(base: str) -> None:
    """Offer both tools over stdin and stdout."""
    server = MCPServer("web", log_level="ERROR")

    @server.tool()
    def search_web(query: str, page: int = 1) -> str:
        """Search the web. Returns titles, addresses and beginnings of pages; `page` 2 has the next results."""
        return _said(lambda: search(base, query, page))

    @server.tool(name="read_page")
    def read(address: str) -> str:
        """Read a page of the web as text, by its http or https address."""
        return _said(lambda: read_page(address))

    server.run("stdio")


def _said(work: Any) -> str:
    try:
        return str(work())
    except Unreached as error:
        raise ToolError(str(error)) from error


if __name__ == "__main__":
    serve(sys.argv[1])
