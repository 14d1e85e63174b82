"""The client's address and scheme behind a trusted proxy, taken from the headers that the proxy adds.

Does not know: routes, limits, keys.
"""

from __future__ import annotations

import ipaddress
import logging
from collections.abc import Sequence

from litestar.types import HTTPScope

log = logging.getLogger(__name__)

MAX_HOPS = 20
"""Addresses of X-Forwarded-For that are examined, from the end: each proxy appends one."""


class Proxies:
    """The trusted proxies. `trusted`: addresses or networks, the setting `trusted_proxies`."""

    def __init__(self, trusted: Sequence[str]) -> None:
        self._networks = [ipaddress.ip_network(each, strict=False) for each in trusted]
        self._has_warned = False

    def apply(self, scope: HTTPScope, headers: dict[bytes, bytes]) -> None:
        """Replace the address and the scheme in the scope by those that a trusted proxy reports.

        The address is the last one in X-Forwarded-For that does not belong to a trusted proxy: the client may have
        written the addresses before it.
        """
        if b"x-forwarded-for" not in headers and b"x-forwarded-proto" not in headers:
            return
        client = scope.get("client")
        if client is None or not self._trusts(client[0]):
            host = client[0] if client else "-"
            if not self._has_warned:
                self._has_warned = True
                log.warning("X-Forwarded-For from %s is ignored; to trust this proxy: --trusted-proxies %s", host, host)
            return
        scheme = headers.get(b"x-forwarded-proto", b"").decode("latin-1").strip().lower()
        if scheme in ("http", "https"):
            scope["scheme"] = scheme
        hops = headers.get(b"x-forwarded-for", b"").decode("latin-1").split(",")
        for hop in reversed(hops[-MAX_HOPS:]):
            address = _address(hop)
            if address is None:  # not an address, so nothing before it can be trusted either
                return
            scope["client"] = (address, 0)
            if not self._trusts(address):
                return

    def _trusts(self, host: str) -> bool:
        address = _address(host)
        if address is None:
            return False
        parsed = ipaddress.ip_address(address)
        return any(parsed in network for network in self._networks)


def _address(text: str) -> str | None:
    """Return the address without brackets and port: '10.0.0.1', '[::1]:8000', '10.0.0.1:99'; None if there is none."""
    text = text.strip()
    if text.startswith("["):
        text = text[1:].partition("]")[0]
    elif text.count(":") == 1:
        text = text.partition(":")[0]
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return None
    mapped = address.ipv4_mapped if address.version == 6 else None
    return str(mapped or address)
