"""A picture comes from a data URL or from an allowed host on the internet, and from nowhere else."""

from __future__ import annotations

import base64
import socket
import socketserver
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import pytest

from localllm.errors import (
    InvalidParameter,
    LocalLLMError,
    MediaTooLarge,
    MediaUnreachable,
    UnreadableMedia,
    UnsupportedParameter,
)
from localllm.media import source
from localllm.media.source import Fetcher, is_global, of_base64, of_data_url

WHERE = "messages[0].content[1]"
DATA = bytes(range(256))
B64 = base64.b64encode(DATA).decode()


@pytest.mark.parametrize(
    "url",
    [
        f"data:image/png;base64,{B64}",
        f"data:;base64,{B64}",
        f"data:image/png;charset=x;base64,{B64}",
        f"DATA:text/plain;BASE64,{B64}",
        f"data:image/png;base64,{B64[:100]}\r\n {B64[100:]}\n",
        "data:image/png;base64," + B64.rstrip("="),
        "data:image/png;base64," + B64.replace("+", "%2B").replace("=", "%3D").replace("/", "%2F"),
        "data:image/png," + "".join(f"%{byte:02x}" for byte in DATA),
    ],
)
def test_a_data_url_is_read(url: str) -> None:
    assert of_data_url(url, WHERE) == DATA


@pytest.mark.parametrize("url", ["data:image/png;base64", "data:;base64,a", "data:;base64,****", "data:;base64,ü"])
def test_a_wrong_data_url_is_damaged(url: str) -> None:
    with pytest.raises(UnreadableMedia, match=r"messages\[0\]\.content\[1\] is damaged"):
        of_data_url(url, WHERE)


def test_a_long_data_url_is_refused_before_it_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "MOST_BYTES", 100)
    for url in ("data:;base64," + "A" * 300, "data:," + "a" * 400):
        with pytest.raises(MediaTooLarge):
            of_data_url(url, WHERE)
    with pytest.raises(MediaTooLarge):
        of_base64("A" * 300, WHERE)


# Addresses ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1", "0.0.0.0", "224.0.0.1",
        "255.255.255.255", "192.0.2.1", "::", "::1", "fe80::1", "fe80::1%eth0", "fc00::1", "ff0e::1",
        "::ffff:127.0.0.1", "::ffff:10.0.0.1", "2002:7f00:0001::", "2002:0a00:0001::1", "64:ff9b::7f00:1",
        "64:ff9b::a9fe:a9fe", "64:ff9b:1::1", "::7f00:1", "2001:db8::1", "nonsense",
    ],
)  # fmt: skip
def test_addresses_that_are_not_on_the_internet(address: str) -> None:
    assert not is_global(address)


@pytest.mark.parametrize(
    "address",
    ["1.1.1.1", "93.184.216.34", "2606:4700::1111", "::ffff:1.1.1.1", "2002:0101:0101::1", "64:ff9b::101:101"],
)
def test_addresses_on_the_internet(address: str) -> None:
    assert is_global(address)


class Names:
    """A resolver of a test: a host's answers in turn, the last one for ever."""

    def __init__(self, **answers: Sequence[Sequence[str]]) -> None:
        self.answers = {host.replace("_", "."): list(found) for host, found in answers.items()}
        self.asked: list[str] = []

    def __call__(self, host: str, port: int) -> list[tuple[Any, ...]]:
        self.asked.append(host)
        if host not in self.answers:
            return list(socket.getaddrinfo(host, port, flags=socket.AI_NUMERICHOST))
        found = self.answers[host]
        now = found.pop(0) if len(found) > 1 else found[0]
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in now]


class Handler(socketserver.StreamRequestHandler):
    server: Host

    def handle(self) -> None:
        head = b""
        while not head.endswith(b"\r\n\r\n"):
            if not (line := self.rfile.readline()):
                return
            head += line
        self.server.heads.append(head.decode())
        path = head.split()[1].decode()
        answer = self.server.answers[path]
        if callable(answer):
            answer(self.wfile)
        else:
            self.wfile.write(answer)


class Host(socketserver.ThreadingTCPServer):
    """A server on loopback that stands for the internet: a test lets connections to any address end here."""

    allow_reuse_address = daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.answers: dict[str, Any] = {}
        self.heads: list[str] = []
        self.dialled: list[tuple[str, int]] = []


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    with Host() as made:
        threading.Thread(target=made.serve_forever, args=(0.01,), daemon=True).start()
        connect = socket.create_connection

        def dial(address: tuple[str, int], timeout: float) -> socket.socket:
            made.dialled.append(address)
            return connect(made.server_address, timeout)  # type: ignore[arg-type]

        monkeypatch.setattr(socket, "create_connection", dial)
        yield made
        made.shutdown()


def ok(body: bytes, *headers: str) -> bytes:
    return "\r\n".join(["HTTP/1.1 200 OK", f"content-length: {len(body)}", *headers, "", ""]).encode() + body


def moved(to: str) -> bytes:
    return f"HTTP/1.1 302 Found\r\nlocation: {to}\r\ncontent-length: 0\r\n\r\n".encode()


PUBLIC = Names(pics_example=[["1.1.1.1"]], a_pics_example=[["8.8.8.8"]])


def test_an_allowed_host_is_asked_once_by_its_resolved_address(host: Host) -> None:
    host.answers["/a.png?x=1"] = ok(DATA)
    names = Names(pics_example=[["1.1.1.1"], ["127.0.0.1"]])  # the second answer would be private
    assert Fetcher(("pics.example",), names).fetch("http://pics.example/a.png?x=1", WHERE) == DATA
    assert host.dialled == [("1.1.1.1", 80)]
    assert names.asked == ["pics.example"]
    [head] = host.heads
    assert "Host: pics.example\r\n" in head
    assert not any(name in head.lower() for name in ("cookie", "authorization", "referer"))


def test_nothing_is_fetched_unless_an_operator_allows_it(host: Host) -> None:
    with pytest.raises(UnsupportedParameter, match="Pictures are not fetched from URLs") as caught:
        Fetcher((), PUBLIC).fetch("http://pics.example/a.png", WHERE)
    assert "--allowed-media-domains" in caught.value.hint
    for url in ("http://pics.example.evil.example/", "http://evilpics.example/", "http://example/"):
        with pytest.raises(UnsupportedParameter, match="not fetched from"):
            Fetcher(("pics.example", "*.pics.example"), PUBLIC).fetch(url, WHERE)
    assert host.dialled == []


@pytest.mark.parametrize(
    "url",
    [
        "file:///etc/passwd", "ftp://pics.example/a", "gopher://pics.example/", "//pics.example/a", "pics.example/a",
        "http://user@pics.example/", "http://pics.example@127.0.0.1/", "http://pics.example:22/a", "http:///a",
        "http://pics.example:99999/", "http://pics.example/a b", "http://pïcs.example/", "http://[::1/",
    ],
)  # fmt: skip
def test_a_url_that_is_not_plain_is_refused(url: str, host: Host) -> None:
    with pytest.raises(InvalidParameter, match="is not a URL that is fetched"):
        Fetcher(("*",), PUBLIC).fetch(url, WHERE)
    assert host.dialled == []


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1/", "http://127.1/", "http://2130706433/", "http://0x7f000001/", "http://0177.0.0.1/",
        "http://[::1]/", "http://[::ffff:127.0.0.1]/", "http://[64:ff9b::7f00:1]/", "http://169.254.169.254/latest/",
        "http://0/", "http://inside.example/", "http://mixed.example/", "http://localhost./",
    ],
)  # fmt: skip
def test_a_private_address_is_never_dialled(url: str, host: Host) -> None:
    names = Names(inside_example=[["10.0.0.5"]], mixed_example=[["1.1.1.1", "10.0.0.5"]], localhost=[["127.0.0.1"]])
    with pytest.raises(MediaUnreachable, match="is at a private address") as caught:
        Fetcher(("*",), names).fetch(url, WHERE)
    assert host.dialled == []
    assert "10.0.0.5" not in str(caught.value)  # what a name resolves to is not told


def test_a_redirect_is_checked_anew(host: Host) -> None:
    host.answers |= {"/to-private": moved("http://inside.example/"), "/to-file": moved("file:///etc/passwd"),
                     "/elsewhere": moved("http://other.example/a"), "/good": moved("/end"), "/end": ok(DATA),
                     "/loop": moved("/loop"), "/rebind": moved("http://pics.example/end")}  # fmt: skip
    names = Names(pics_example=[["1.1.1.1"]], inside_example=[["10.0.0.5"]], other_example=[["1.1.1.1"]])
    everywhere, only = Fetcher(("*",), names), Fetcher(("pics.example",), names)
    assert only.fetch("http://pics.example/good", WHERE) == DATA
    cases: list[tuple[Fetcher, str, type[LocalLLMError], str]] = [
        (everywhere, "to-private", MediaUnreachable, "private address"),
        (everywhere, "to-file", InvalidParameter, "is not a URL"),
        (only, "elsewhere", UnsupportedParameter, "not fetched from other.example"),
        (only, "loop", MediaUnreachable, "redirects more than 3 times"),
    ]
    for fetcher, path, error, text in cases:
        with pytest.raises(error, match=text):
            fetcher.fetch(f"http://pics.example/{path}", WHERE)
    rebinding = Names(pics_example=[["1.1.1.1"], ["127.0.0.1"]])
    with pytest.raises(MediaUnreachable, match="private address"):
        Fetcher(("*",), rebinding).fetch("http://pics.example/rebind", WHERE)
    assert {address for address, _ in host.dialled} == {"1.1.1.1"}


def test_what_a_host_answers_is_bounded(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "MOST_BYTES", 1000)
    monkeypatch.setattr(source, "FETCH_S", 0.4)

    def drip(sink: Any) -> None:
        with suppress(OSError):  # the client leaves
            for byte in b"HTTP/1.1 200 OK\r\nx: " + b"a" * 200:
                sink.write(bytes([byte]))
                time.sleep(0.05)

    host.answers |= {"/404": b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n", "/large": ok(bytes(2000)),
                     "/endless": b"HTTP/1.1 200 OK\r\n\r\n" + bytes(2000), "/short": ok(DATA)[:-9], "/slow": drip,
                     "/noise": b"\0\1\2\r\n\r\n"}  # fmt: skip
    for path, error, text in [
        ("404", MediaUnreachable, "http://pics.example/404 could not be fetched. It answered 404."),
        ("large", MediaTooLarge, "at most"), ("endless", MediaTooLarge, "at most"),
        ("short", MediaUnreachable, "ended before|connection failed"), ("slow", MediaUnreachable, "took longer"),
        ("noise", MediaUnreachable, "connection failed"),
    ]:  # fmt: skip
        with pytest.raises(error, match=text):
            Fetcher(("*",), PUBLIC).fetch(f"http://pics.example/{path}", WHERE)
