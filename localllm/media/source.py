"""The bytes of a picture or a sound that a request names: a data URL, base64, or an address on the web.

Web addresses are refused unless an operator allows their host. A host is resolved once, every address of it has to be
global, and the connection goes to that very address, so that no name can lead into a private network. Nothing of the
environment is used: no proxy, no cookies, no credentials.
Does not know: pictures, sound, models, HTTP of this server.
"""

from __future__ import annotations

import base64
import binascii
import http.client
import ipaddress
import socket
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import SplitResult, unquote_to_bytes, urljoin, urlsplit

from localllm.errors import InvalidParameter, MediaUnreachable, UnreadableMedia, UnsupportedParameter
from localllm.media.picture import MOST_BYTES, too_many_bytes

CONNECT_S, FETCH_S = 3.0, 10.0
MOST_REDIRECTS = 3
PORTS = {"http": 80, "https": 443}
CHUNK_BYTES = 64 * 1024
REDIRECTS = (301, 302, 303, 307, 308)
_EMBEDS_IPV4 = {"2002::/16": 80, "64:ff9b::/96": 0}
"""IPv6 networks whose addresses hold an IPv4 address, and the bits below it: 6to4 and NAT64."""

Resolve = Callable[[str, int], Sequence[tuple[Any, ...]]]


def of_data_url(text: str, where: str, most_bytes: int | None = None) -> bytes:
    """Return the bytes of `data:[type][;base64],...`. The type is not believed. Raises `UnreadableMedia` and
    `MediaTooLarge`. most_bytes: of the file; None: of a picture."""
    head, comma, data = text.partition(",")
    if not comma:
        raise UnreadableMedia(f"{where} is damaged.", "Its data URL has no comma.", "data:image/png;base64,...")
    if not head.lower().rstrip().endswith(";base64"):
        if len(data) > 3 * (most_bytes or MOST_BYTES):
            raise too_many_bytes(len(data) // 3, where, most_bytes)
        return unquote_to_bytes(data)
    text = unquote_to_bytes(data).decode("ascii", "replace") if "%" in data[:4096] else data
    return of_base64(text, where, most_bytes)


def of_base64(text: str, where: str, most_bytes: int | None = None) -> bytes:
    """Return the bytes of a text in base64, which may have line breaks and lack its padding."""
    if len(text) > 2 * (most_bytes or MOST_BYTES):
        raise too_many_bytes(len(text) * 3 // 4, where, most_bytes)
    text = "".join(text.split()).rstrip("=")
    try:
        return base64.b64decode(text + "=" * (-len(text) % 4), validate=True)
    except (binascii.Error, ValueError) as error:
        raise UnreadableMedia(f"{where} is damaged.", f"Its base64 cannot be decoded: {error}.") from None


@dataclass(frozen=True, slots=True)
class Fetcher:
    """Downloads pictures or sounds from allowed hosts. `fetch` blocks: call it on a thread."""

    domains: tuple[str, ...] = ()  # a host, `*.host` for the hosts below it, or `*` for all
    resolve: Resolve = socket.getaddrinfo
    kind: str = "image"  # first part of the type that is asked for: image or audio
    most_bytes: int | None = None  # of a file; None: of a picture

    @property
    def _what(self) -> str:
        return "Sounds" if self.kind == "audio" else "Pictures"

    def fetch(self, url: str, where: str) -> bytes:
        """Return the bytes at a URL. Raises `UnsupportedParameter`, `MediaUnreachable` and `MediaTooLarge`."""
        until_s = time.monotonic() + FETCH_S
        for _ in range(MOST_REDIRECTS + 1):
            parts = self._allowed(url, where)
            try:
                found = self._get(parts, until_s, where)
            except ssl.SSLCertVerificationError as error:
                raise _failed(parts, f"Its certificate is not valid: {error.verify_message}.") from None
            except (OSError, http.client.HTTPException, ValueError) as error:
                is_late = isinstance(error, TimeoutError) or time.monotonic() >= until_s
                why = f"It took longer than {FETCH_S:g} s." if is_late else "The connection failed."
                raise _failed(parts, why) from None
            if isinstance(found, bytes):
                return found
            url = urljoin(url, found)
        raise _failed(parts, f"It redirects more than {MOST_REDIRECTS} times.")

    def _allowed(self, url: str, where: str) -> SplitResult:
        """Return the parts of a URL that may be fetched."""
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError:
            parts, port = urlsplit(""), None
        host = (parts.hostname or "").rstrip(".")
        if parts.scheme not in PORTS or not host or not url.isascii() or any(c <= " " for c in url):
            raise InvalidParameter(
                f"{where} is not a URL that is fetched.", "Supported: data:, http:// and https://.", param=where
            )
        if "@" in parts.netloc or port not in (None, *PORTS.values()):
            why = "A URL may name neither a user nor a port other than 80 and 443."
            raise InvalidParameter(f"{where} is not a URL that is fetched.", why, param=where)
        if not self.domains:
            raise UnsupportedParameter(
                f"{self._what} are not fetched from URLs.",
                "This server opens no connection for a request.",
                "Send a data: URL, or start with --allowed-media-domains example.org (* for all public ones).",
                param=where,
            )
        names = ("*", host, *(f"*.{host.split('.', n)[n]}" for n in range(1, host.count(".") + 1)))
        if not any(domain.lower() in names for domain in self.domains):
            raise UnsupportedParameter(
                f"{self._what} are not fetched from {host}.",
                f"Allowed: {', '.join(self.domains)}.",
                f"Send a data: URL, or start with --allowed-media-domains {','.join((*self.domains, host))}.",
                param=where,
            )
        return parts

    def _get(self, parts: SplitResult, until_s: float, where: str) -> bytes | str:
        """Return the body, or the address that the server redirects to."""
        host, port = (parts.hostname or "").rstrip("."), parts.port or PORTS[parts.scheme]
        address, left_s = self._address(parts, host, port), until_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        sock = socket.create_connection(address, min(CONNECT_S, left_s))
        sock.settimeout(left_s)

        def end() -> None:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

        timer = threading.Timer(left_s, end)
        timer.start()
        try:
            if parts.scheme == "https":
                context = ssl.create_default_context()
                sock = tls = context.wrap_socket(sock, server_hostname=host, do_handshake_on_connect=False)
                tls.do_handshake()
            connection = http.client.HTTPConnection(host, port)
            connection.default_port, connection.sock = port, sock
            target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
            headers = {"Accept": f"{self.kind}/*", "Accept-Encoding": "identity", "User-Agent": "localllm"}
            connection.request("GET", target, headers=headers)
            answer = connection.getresponse()
            if answer.status in REDIRECTS and (location := answer.getheader("location")):
                return location
            if answer.status != 200:
                raise _failed(parts, f"It answered {answer.status}.")
            data = bytearray()
            while piece := answer.read1(CHUNK_BYTES):
                data += piece
                if len(data) > (self.most_bytes or MOST_BYTES):
                    raise too_many_bytes(len(data), where, self.most_bytes)
            if answer.length:
                raise _failed(parts, "The connection ended before the file did.")
            return bytes(data)
        finally:
            timer.cancel()
            sock.close()

    def _address(self, parts: SplitResult, host: str, port: int) -> tuple[str, int]:
        """Resolve the host once and return the first address. Raises `MediaUnreachable` unless all are global."""
        try:
            found = [str(each[4][0]) for each in self.resolve(host, port)]
        except (OSError, UnicodeError):
            found = []
        if not found:
            raise _failed(parts, f"{host} is not a known host.")
        if not all(map(is_global, found)):
            raise _failed(parts, f"{host} is at a private address.")
        return found[0], port


def is_global(address: str) -> bool:
    """Return whether an address belongs to a host on the internet, judging IPv4 addresses inside of IPv6 ones as
    such."""
    try:
        found = ipaddress.ip_address(address)
    except ValueError:  # with a scope, which only local addresses have
        return False
    if isinstance(found, ipaddress.IPv6Address):
        if found.ipv4_mapped is not None:
            return is_global(str(found.ipv4_mapped))
        for network, shift in _EMBEDS_IPV4.items():
            if found in ipaddress.ip_network(network):
                return is_global(str(ipaddress.IPv4Address(int(found) >> shift & 0xFFFFFFFF)))
        if found not in ipaddress.ip_network("2000::/3"):  # all that is assigned to hosts so far
            return False
    return found.is_global and not found.is_multicast


def _failed(parts: SplitResult, why: str) -> MediaUnreachable:
    return MediaUnreachable(f"{parts.scheme}://{parts.hostname}{parts.path[:100]} could not be fetched.", why)
