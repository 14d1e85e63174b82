"""One client connection, with limits on the size of headers, on arrival time, and on clients that do not read their
answers.

uvicorn parses and answers; this module adds the limits that uvicorn has no settings for. A refused request never
reaches the application: the client gets a status and the usual error body, and the connection is closed. When there are
too many connections, those are closed that wait for their client, the ones that have been silent for longest first.
Does not know: routes, bodies (the router limits their size).
"""

from __future__ import annotations

import asyncio
import hashlib
import http
import logging
import re
import ssl
import sys
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from functools import cache
from pathlib import Path
from typing import Any

import httptools
import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from localllm.config.settings import ServerConfig
from localllm.errors import ConfigError, LocalLLMError
from localllm.machine.peer_user import user_of
from localllm.machine.platforms import most_open_files
from localllm.units import format_bytes, format_count
from localllm.web.errors import HeadTooLarge, MalformedRequest, RequestTimeout, UrlTooLong, openai_error

log = logging.getLogger("localllm.access")

MAX_URL_BYTES = 16 * 1024
MAX_HEADERS = 100
MAX_HEAD_BYTES = 64 * 1024
"""URL and headers together. A key, a cookie and a trace id take one or two KiB."""
MAX_PIPELINED = 8
"""Pipelined requests that may wait behind the current one; the few clients that pipeline send only a few."""

MAX_CONNECTIONS = 4096
"""The Python objects of this many connections take some 100 MiB."""
OTHER_FILES = 256
"""Open files that are not connections: weights, databases, logs, pipes."""

UPGRADE_HEADERS = (b"upgrade", b"http2-settings")

HEAD_S = 30.0
"""Time limit for the headers, from the first byte of a request or from the start of the connection."""
BODY_S, BODY_BYTES_PER_S = 10.0, 64 * 1024
"""Time limit for the body, from the end of the headers, and the speed from which a body may take longer."""
LINGER_S = 2.0
"""How long the rest of a body is still received after its request was answered. A client that is still sending does not
read yet, and closing the connection at once could discard the answer.
"""
UNREAD_S = 60.0
"""A client that reads none of its waiting answer for this long is considered gone."""


class Connections(ServerState):
    """All connections of a server, and which of them are closed when there are too many. A client that still needs one
    opens it again.

    A connection can be closed while the server waits for its client: between two requests, and while a request arrives.
    Adding and closing take constant time on average, since thousands may come in one turn of the event loop.
    """

    def __init__(self, is_locked: Callable[[], bool]) -> None:
        """`is_locked`: whether requests need a key. If they do, the connections of one address that have not shown a
        key can be a quarter of all.
        """
        super().__init__()
        self._is_locked = is_locked
        self._open: OrderedDict[Connection, None] = OrderedDict()  # those that were silent for longest first
        self._keyless: dict[str, OrderedDict[Connection, None]] = {}  # by address, in the same order

    def add(self, new: Connection) -> None:
        self._open[new] = None
        keyless = self._keyless.setdefault(new.address, OrderedDict())
        keyless[new] = None
        most = most_connections()
        if len(keyless) > most // 4 and self._is_locked():
            self._close_oldest(keyless, most // 4)
        if len(self._open) > most:
            self._close_oldest(self._open, most)

    def heard(self, connection: Connection) -> None:
        """Note that a client has sent something, or that its answer is complete."""
        if connection in self._open:
            self._open.move_to_end(connection)
        keyless = self._keyless.get(connection.address) or OrderedDict()
        if connection in keyless:
            del keyless[connection]
            if not connection.has_key:
                keyless[connection] = None

    def remove(self, lost: Connection) -> None:
        self._open.pop(lost, None)
        keyless = self._keyless.get(lost.address) or OrderedDict()
        keyless.pop(lost, None)
        if not keyless:
            self._keyless.pop(lost.address, None)

    def _close_oldest(self, among: OrderedDict[Connection, None], most: int) -> None:
        """Close a connection, unless all of them are being answered. One that cannot be closed moves to the end."""
        for _ in range(len(among)):
            oldest = next(iter(among))
            if among is not self._open and oldest.has_key:
                del among[oldest]
            elif oldest.waits:
                self.remove(oldest)
                oldest.transport.abort()
            else:
                among.move_to_end(oldest)
            if len(among) <= most:
                return


class Connection(HttpToolsProtocol):
    """uvicorn's protocol with limits. `_deadline` is the time by which the current request must have arrived."""

    server_state: Connections
    address = "-"
    _user: int | None = None
    _has_asked_user = False
    _body_bytes = 0  # received of the current body
    _body_began_s = 0.0
    _received = b""  # bytes given to the parser
    _without_upgrade = b""  # head of a request that asks for a protocol upgrade, without that question
    _deadline: asyncio.TimerHandle | None = None
    _minding: asyncio.TimerHandle | None = None
    _refusal: LocalLLMError | None = None
    _answered: RequestResponseCycle | None = None  # the request being answered; `cycle` is the one that arrived last
    _in_message = False  # between the first byte of a request and its last
    _in_head = True
    _unparsed_bytes = 0  # bytes of a head that is not complete
    _head_bytes = 0  # bytes of it that the parser has reported

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._arm(HEAD_S)
        self.address = self.client[0] if self.client else "-"
        self.server_state.add(self)

    @property
    def waits(self) -> bool:
        """True if nothing but the client's next bytes can go on here."""
        return not self._owes_an_answer

    @property
    def has_key(self) -> bool:
        """True if the last request had a valid key (auth.py)."""
        return self.cycle is not None and self.cycle.scope["state"].get("key") is not None

    def peer_user(self) -> int | None:
        """Return the user of this machine at the other end; None: unknown. The kernel is asked once."""
        if not self._has_asked_user and self.client is not None and self.server is not None:
            self._has_asked_user = True
            self._user = user_of(self.client, (self.server[0], self.server[1] or 0))
        return self._user

    def connection_lost(self, exc: Exception | None) -> None:
        self.server_state.remove(self)
        self._disarm()
        if self._minding is not None:
            self._minding.cancel()
        self._unset_keepalive_if_required()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._received = data
        self.server_state.heard(self)
        super().data_received(data)
        if self.transport.is_closing():
            return
        if self._in_message and self._in_head:
            self._unparsed_bytes += len(data)
            if self._unparsed_bytes > 2 * MAX_HEAD_BYTES:  # one endless header, which the parser has not reported yet
                self._end(_too_large(f"More than {format_count(MAX_HEAD_BYTES)} bytes of headers."))
        elif not self._in_message and self._deadline is None and not self._owes_an_answer:
            self._arm(HEAD_S)  # line breaks between two requests stopped uvicorn's timer but start no request

    # Callbacks of the parser -----------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_message = self._in_head = True
        self._unparsed_bytes = self._head_bytes = 0
        if self._deadline is None:
            self._arm(HEAD_S)

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._head_bytes += len(url)
        if len(self.url) > MAX_URL_BYTES:
            raise self._refused(
                UrlTooLong("The URL is too long.", f"The limit is {format_count(MAX_URL_BYTES)} bytes.")
            )

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        self._head_bytes += len(name) + len(value)
        if len(self.headers) > MAX_HEADERS:
            raise self._refused(_too_large(f"More than {MAX_HEADERS} headers."))
        if self._head_bytes > MAX_HEAD_BYTES:
            raise self._refused(_too_large(f"More than {format_count(MAX_HEAD_BYTES)} bytes of headers."))

    def on_headers_complete(self) -> None:
        if len(self.pipeline) >= MAX_PIPELINED:
            raise self._refused(MalformedRequest("Too many pipelined requests."))
        if self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT":
            self._without_upgrade = self._head_without_upgrade()
            return
        super().on_headers_complete()
        self.scope["state"]["peer_user"] = self.peer_user
        self._in_head, self._body_bytes, self._body_began_s = False, 0, self.loop.time()
        self._arm(BODY_S)

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self._without_upgrade:
            return
        super().on_message_complete()
        self._in_message = False
        self._disarm()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self.server_state.heard(self)
        if self._in_message:
            self._arm(LINGER_S)

    # Other protocols ------------------------------------------------------------------------------------------------

    def _head_without_upgrade(self) -> bytes:
        lines = [b"%b %b HTTP/%b" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())]
        for name, value in self.headers:
            if name == b"connection":
                tokens = [token.strip() for token in value.split(b",")]
                value = b", ".join(token for token in tokens if token.lower() not in UPGRADE_HEADERS)
            if name not in UPGRADE_HEADERS and (value or name != b"connection"):
                lines.append(b"%b: %b" % (name, value))
        return b"\r\n".join([*lines, b"", b""])

    def _unsupported_upgrade_warning(self) -> None:
        """Handle a request that asks for another protocol (WebSocket, h2c): the server may ignore that, and Java's
        client asks with each request. The parser would take everything after the head, including a body, for the other
        protocol; so a new parser reads the head without the question, and then the rest.
        """
        stopped = sys.exc_info()[1]
        head, self._without_upgrade = self._without_upgrade, b""
        if head and isinstance(stopped, httptools.HttpParserUpgrade):
            self._received = head + self._received[stopped.args[0] :]
            self.parser = httptools.HttpRequestParser(self)
            self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does
            super().data_received(self._received)

    # Ends -----------------------------------------------------------------------------------------------------------

    def send_400_response(self, msg: str) -> None:
        """uvicorn's word for anything that the parser could not read; our own refusals come this way, too."""
        self._end(self._refusal or MalformedRequest("This is not an HTTP request."))

    def _refused(self, refusal: LocalLLMError) -> LocalLLMError:
        self._refusal = refusal
        return refusal

    def _too_slow(self) -> None:
        self._deadline = None
        if not self._in_message:
            self.transport.close()
        elif self._in_head:
            self._end(RequestTimeout("The request took too long.", f"The limit for its headers is {HEAD_S:.0f} s."))
        elif (left_s := self._body_s_left()) > 0:
            self._arm(left_s)
        else:
            limit = f"{BODY_S:.0f} s, and a second for each {format_bytes(BODY_BYTES_PER_S)}"
            self._end(RequestTimeout("The request took too long.", f"The limit for its body is {limit}."))

    def _body_s_left(self) -> float:
        """Return how long the body may still take, by its speed so far; 0 also for a request that was answered."""
        if self.cycle.response_complete:
            return 0.0
        if self.flow.read_paused:  # the application has not taken what is here
            return BODY_S
        return self._body_began_s + BODY_S + self._body_bytes / BODY_BYTES_PER_S - self.loop.time()

    def _end(self, refusal: LocalLLMError) -> None:
        """Send the refusal and close. If another answer is due or being sent, only close: the client would take the
        refusal for that answer.
        """
        self._disarm()
        log.info("refused a connection client=%s code=%s", self.client[0] if self.client else "-", refusal.code)
        if not self._owes_an_answer:
            body = msgspec.json.encode(openai_error(refusal))
            head = (
                f"HTTP/1.1 {refusal.status} {http.HTTPStatus(refusal.status).phrase}\r\n"
                f"content-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close\r\n"
                "x-content-type-options: nosniff\r\ncross-origin-resource-policy: same-origin\r\n\r\n"
            )
            self.transport.write(head.encode() + body)
        self.transport.close()
        for cycle in (self._answered, self.cycle, *(cycle for cycle, _ in self.pipeline)):
            if cycle is not None:  # what it would still send has no receiver, and raises
                cycle.disconnected = True
                cycle.message_event.set()

    @property
    def _owes_an_answer(self) -> bool:
        """True if a request has arrived completely, or its answer has begun."""
        cycle = self.cycle
        if cycle is None or (cycle.response_complete and not self.pipeline):
            return False
        return bool(self.pipeline) or cycle.response_started or not cycle.more_body

    def _arm(self, seconds: float) -> None:
        self._disarm()
        self._deadline = self.loop.call_later(seconds, self._too_slow)

    def _disarm(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    # A client that does not read ------------------------------------------------------------------------------------

    def pause_writing(self) -> None:
        super().pause_writing()
        self._mind_unread(None)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        async def minded(scope: Any, receive: Any, send: Any) -> None:
            try:
                await app(scope, receive, send if scope["http_version"] == "1.1" else _unchunked(cycle))
            finally:
                self._mind_unread(None)

        self._answered = cycle
        super()._start_asgi_task(cycle, minded)

    def _mind_unread(self, unread_bytes: int | None) -> None:
        """Check repeatedly whether the client reads what is waiting for it, and drop the connection if not. A plain
        close would wait for the client for ever.
        """
        if self._minding is not None:
            self._minding.cancel()
            self._minding = None
        if self not in self.connections:  # the connection is lost
            return
        left_bytes = self.transport.get_write_buffer_size()
        if left_bytes and left_bytes == unread_bytes:
            self.transport.abort()
        elif left_bytes:
            self._minding = self.loop.call_later(UNREAD_S, self._mind_unread, left_bytes)


def _unchunked(cycle: RequestResponseCycle) -> Callable[[Any], Awaitable[None]]:
    """Return a `send` for clients of HTTP/1.0, which do not support chunks: the end of the connection ends the body.

    uvicorn closes the connection there; without chunks it compares the body with what it takes for the announced
    length.
    """

    is_announced = False

    async def send(message: Any) -> None:
        nonlocal is_announced
        if message["type"] == "http.response.start":
            is_announced = any(name.lower() == b"content-length" for name, _ in message["headers"])
            cycle.chunked_encoding = None if is_announced else False
        elif not is_announced:
            cycle.expected_content_length = len(message.get("body", b""))
        await cycle.send(message)

    return send


@cache
def most_connections() -> int:
    """Return how many connections the process's limit of open files allows."""
    most_files = most_open_files()
    if most_files is None:
        return MAX_CONNECTIONS
    return max(64, min(MAX_CONNECTIONS, most_files - OTHER_FILES))


def _too_large(why: str) -> HeadTooLarge:
    return HeadTooLarge("The headers are too large.", why)


# The certificate: checked before anything is loaded, so that errors appear at once. uvicorn reads the files again.


def check_certificate(config: ServerConfig) -> None:
    """Raise `ConfigError` for files that are missing, unreadable, not PEM or encrypted, or if key and certificate do
    not match.
    """
    certificate = config.ssl_certfile
    if certificate is None:
        return
    for name, path in (("ssl_certfile", certificate), ("ssl_keyfile", config.ssl_keyfile)):
        try:
            if path is not None:
                open(path, "rb").close()
        except OSError as error:
            raise ConfigError(f"Cannot read {path}.", f"{error.strerror}.", _flag(name), param=name) from error
    key = config.ssl_keyfile or certificate
    try:
        # An empty password; without one OpenSSL would ask for it at the terminal.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, config.ssl_keyfile, password="")
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            what = f"The key in {key} does not belong to the certificate in {certificate}."
            raise ConfigError(what, "", _flag("ssl_keyfile"), param="ssl_keyfile") from error
        what = f"{certificate} and {key} are not a certificate and an unencrypted key in PEM."
        why = f"OpenSSL says {error.reason}." if error.reason else f"{error}."
        raise ConfigError(what, why, _flag("ssl_keyfile"), param="ssl_keyfile") from error


def fingerprint(config: ServerConfig) -> str:
    """Return the SHA-256 of the server's own certificate, the first one of its file; empty without https."""
    if config.ssl_certfile is None:
        return ""
    text = Path(config.ssl_certfile).read_text(encoding="ascii", errors="replace")
    first = re.search("-----BEGIN CERTIFICATE-----.*?-----END CERTIFICATE-----", text, re.DOTALL)
    return hashlib.sha256(ssl.PEM_cert_to_DER_cert(first[0])).hexdigest() if first else ""


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')} FILE.pem"
