"""Access checks and a request id for every request. They run before routing, so they cover every URL.

- Host allow-list: a page of another site that rebinds its DNS name to this machine still sends its own Host.
- Origin and Sec-Fetch-Site: requests from pages of other sites are refused, reads as well as writes, unless the origin
  may call the API (origins.py) or the user follows a link to one of our pages.
- Key: required on every route but the probes, with the scope that the route needs (scopes.py). Programs send Bearer or
  x-api-key; a browser is redirected to /login and returns with a cookie. Basic also works (any user name, the key as
  password).
- Without keys, the kernel says which user of this machine sends a request: the server's own user and root may do
  everything, another or an unknown user has the rights of a key with the scope infer. Where the kernel does not say
  (macOS, Windows), every user of this machine has all rights.
- Limits: requests per minute and at a time per key, wrong keys per minute per address, bytes of all bodies (limits.py).
- x-request-id on each response, and one access log line per request. The line names the key; it never contains the key
  itself or a prompt.

Does not know: dialects, models, where keys are stored.
"""

from __future__ import annotations

import base64
import binascii
import ipaddress
import json
import logging
import re
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from urllib.parse import quote

from litestar.enums import ScopeType
from litestar.response.redirect import ASGIRedirectResponse
from litestar.types import ASGIApp, HTTPScope, Message, Receive, Scope, Send
from litestar.utils import normalize_path

from localllm.config.settings import MAX_UPLOAD_BYTES, ServerConfig
from localllm.errors import LocalLLMError
from localllm.machine.peer_user import KNOWS_USERS, is_owner
from localllm.units import format_bytes, format_seconds
from localllm.web.access.caller import missing_scope
from localllm.web.access.keys import Key, KeyRing, guest
from localllm.web.access.limits import Bodies, Guesses, Limits
from localllm.web.access.origins import Origins, netloc_of
from localllm.web.access.proxies import Proxies
from localllm.web.access.scopes import API_RULES, PROBES, RouteRules, is_open, needs_no_key
from localllm.web.errors import (
    Forbidden,
    HeadTooLarge,
    MalformedRequest,
    Unauthorized,
    error_response,
    is_api,
    speaks_anthropic,
    wants_html,
)

log = logging.getLogger("localllm.access")

SESSION_COOKIE = "localllm_session"
QUIET_PATHS = PROBES | {"/metrics", "/localllm/v1/models/stats"}
"""Machines poll these every few seconds, so they are logged at debug level only. So are the files, the
parts and the live connections of our own pages: about eight lines for each page that is opened."""
LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})
SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
ONCE = (b"host", b"origin", b"authorization", b"x-api-key")
"""Headers that may occur only once: a repeated one could make a proxy and this server read different values."""
MAX_COOKIE_BYTES = 16 * 1024
"""Our own cookies take a few hundred bytes; a browser also sends those of other programs on this machine."""
FOREIGN_SITES = frozenset({b"cross-site", b"same-site"})
"""Values of Sec-Fetch-Site. "same-site" includes other ports of this machine, which are other programs."""
GUARDS = ((b"x-content-type-options", b"nosniff"), (b"cross-origin-resource-policy", b"same-origin"))
"""Headers of every answer; they stop pages of other sites from loading it as an image, a script or a style."""
_PLAIN = re.compile(r"[!#-~]+")
_HOST = re.compile(r"(?:\[([^\[\]]+)\]|([^:\[\]]*))(?::\d*)?")
_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")


class FrontDoor:
    """ASGI middleware around the whole router."""

    def __init__(
        self,
        app: ASGIApp,
        config: ServerConfig,
        keys: KeyRing,
        counts: Counter[tuple[str, str, int]],
        guesses: Guesses,
        rules: RouteRules = API_RULES,
    ) -> None:
        """`counts` receives the number of answers by method, route and status, for /metrics. `guesses` is shared with
        /login. `rules`: who may use which route.
        """
        self.app = app
        self.rules = rules
        self.counts = counts
        self.config = config
        self.keys = keys
        self.origins, self.proxies = Origins(config.allowed_origins), Proxies(config.trusted_proxies)
        self.limits = Limits(config.rate_limit, config.max_concurrent_requests)
        self.bodies = Bodies(config.max_inflight_body_bytes)
        self.guesses = guesses
        self.names = LOOPBACK_NAMES | {config.host.lower()} | {name.lower() for name in config.allowed_hosts}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != ScopeType.HTTP:
            await self.app(scope, receive, send)
            return
        await self._admit(scope, receive, send)

    async def _admit(self, scope: HTTPScope, receive: Receive, send: Send) -> None:
        headers = dict(scope["headers"])
        peer = scope.get("client")
        self.proxies.apply(scope, headers)
        given = headers.get(b"x-request-id", b"")  # the caller's own, if it is safe to log
        request_id = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex.encode()
        scope["state"]["request_id"] = request_id.decode()
        origin = headers.get(b"origin", b"").decode("latin-1")
        asking = origin if origin and is_api(scope["path"]) and self.origins.may_ask(origin) else ""
        cors = self.origins.headers(asking) if asking else []
        # Anthropic's clients look for a header of their own.
        names = [b"x-request-id", b"request-id"] if speaks_anthropic(scope) else [b"x-request-id"]
        answer = _Answer(send, [*((name, request_id) for name in names), *cors])
        started_s = time.perf_counter()
        shown, typed = _shown_keys(headers), _basic_password(headers)
        shown_key = self.keys.find(shown)
        key = shown_key or self.keys.find([typed]) or session_key(self.keys, scope)
        if key is None and not self.keys.is_locked:
            key = _guest(scope, is_forwarded=scope.get("client") != peer)
        scope["state"]["key"] = key
        try:
            with ExitStack() as held:
                try:
                    self._check_name(scope, headers)
                    if asking and scope["method"] == "OPTIONS" and b"access-control-request-method" in headers:
                        await answer.send_empty(self.origins.preflight_headers(headers))
                        return
                    # Before everything that depends on the key: any other answer would tell an attacker about a guess.
                    if any((*shown, typed)) and self.keys.is_locked and not is_open(normalize_path(scope["path"])):
                        self.guesses.check(address_of(scope), key)
                    self._check_site(scope, headers, shows_key=shown_key is not None)
                    self._check_key(scope, key)
                    held.enter_context(self._counted(scope, key))
                    announced_bytes = self._announced_bytes(headers)
                    receive = held.enter_context(self.bodies.counted(receive, announced_bytes, client_of(scope, key)))
                except LocalLLMError as refusal:
                    await self._refuse(scope, headers, refusal)(scope, receive, answer.send)
                else:
                    await self.app(scope, receive, answer.send)
        finally:
            self.counts[scope["method"], scope.get("path_template", "other"), answer.status] += 1
            _log_access(scope, answer, time.perf_counter() - started_s, key)

    def _refuse(self, scope: HTTPScope, headers: dict[bytes, bytes], refusal: LocalLLMError) -> ASGIApp:
        """Return the answer to a refused request: programs get the error in their dialect, a browser without a key is
        redirected to /login.
        """
        if not isinstance(refusal, Unauthorized):
            return error_response(scope, refusal)
        if not (wants_html(scope) and self.config.ui):
            return error_response(scope, refusal, {"www-authenticate": "Bearer"})
        if b"hx-request" in headers:
            return error_response(scope, refusal, {"hx-redirect": "/login"})
        query = scope["query_string"].decode("latin-1")
        page = scope["path"] + (f"?{query}" if query else "")
        following = f"?next={quote(page, safe='/')}" if scope["method"] == "GET" else ""
        return ASGIRedirectResponse(f"/login{following}", status_code=303)

    @contextmanager
    def _counted(self, scope: HTTPScope, key: Key | None) -> Iterator[None]:
        """Count a request against its client's limits. Probes and static files are free. Only methods that do work
        count as running: a dashboard may stay open.
        """
        path, client = normalize_path(scope["path"]), client_of(scope, key)
        if is_open(path):
            yield
            return
        self.limits.take(client)
        with nullcontext() if scope["method"] in SAFE_METHODS else self.limits.running(client):
            yield

    def _check_name(self, scope: HTTPScope, headers: dict[bytes, bytes]) -> None:
        """Raise if the headers are invalid: repeated, too large, or for an unknown host."""
        if twice := [name for name in ONCE if sum(each == name for each, _ in scope["headers"]) > 1]:
            raise MalformedRequest(f"The header {twice[0].decode()} may occur only once.")
        if sum(len(value) for name, value in scope["headers"] if name == b"cookie") > MAX_COOKIE_BYTES:
            raise HeadTooLarge(
                "The cookies are too large.",
                f"The limit is {format_bytes(MAX_COOKIE_BYTES)}.",
                "A browser sends the cookies of all ports of a host: delete the cookies of this host.",
            )
        host = headers.get(b"host", b"").decode("latin-1")
        if not self._knows_host(host):
            raise Forbidden(
                f"This server does not answer to the name {_hostname(host)!r}.",
                "Only known host names are accepted, so that other sites cannot reach the server through your browser.",
                f"Start with --allowed-hosts {_hostname(host)} to add it.",
            )

    def _check_site(self, scope: HTTPScope, headers: dict[bytes, bytes], *, shows_key: bool) -> None:
        """Raise `Forbidden` if a page of another site sends this request and may not."""
        origin, host = (headers.get(name, b"").decode("latin-1") for name in (b"origin", b"host"))
        is_foreign = bool(origin) and netloc_of(origin) != host.lower()
        if not is_foreign and headers.get(b"sec-fetch-site") not in FOREIGN_SITES:
            return
        if is_api(scope["path"]):
            if origin and self.origins.may_call(origin, shows_key=shows_key):
                return
        elif self._is_link(scope, headers):
            return
        if not origin:
            raise Forbidden(
                "This request came from a page of another site.",
                "Other sites may only link to the start page.",
                "Open the page from the start page, or enter its address.",
            )
        raise Forbidden(f"Pages of {origin} may not use this server.", hint=self.origins.hint(origin))

    def _is_link(self, scope: HTTPScope, headers: dict[bytes, bytes]) -> bool:
        """Return whether a browser opens a page in its own window, and the page only displays something."""
        opens = headers.get(b"sec-fetch-mode") == b"navigate" and headers.get(b"sec-fetch-dest") == b"document"
        return opens and scope["method"] == "GET" and normalize_path(scope["path"]) in self.rules.linked

    def _check_key(self, scope: HTTPScope, key: Key | None) -> None:
        """Raise if the request needs a key and has none, or if its key, or its user, lacks the scope."""
        if needs_no_key(normalize_path(scope["path"])):
            return
        if key is None:
            if not self.keys.is_locked:
                return
            raise Unauthorized(
                "The API key is missing or wrong.",
                hint="Send the header 'Authorization: Bearer KEY' with a key of this server (localllm keys add NAME).",
            )
        needed = self.rules.scope_of(scope["method"], scope["path"])
        if not key.may(needed):
            raise missing_scope(key, needed)

    def _announced_bytes(self, headers: dict[bytes, bytes]) -> int:
        """Return the Content-Length, or 0 if it is above every limit: the router refuses such a request, and a retry
        would not help.
        """
        length = headers.get(b"content-length", b"")
        size_bytes = int(length) if length.isdigit() else 0
        config = self.config
        largest = max(
            config.largest_media_body_bytes,
            MAX_UPLOAD_BYTES,
            config.largest_batch_file_bytes,
            config.largest_audio_bytes,
        )
        return size_bytes if size_bytes <= largest else 0

    def _knows_host(self, host: str) -> bool:
        """Return whether a Host header is allowed. A request without one is not from a browser. On an address other
        than loopback every literal IP is allowed, because DNS rebinding needs a name.
        """
        if not host or "*" in self.names:
            return True
        name = _hostname(host)
        return name in self.names or (not self.config.is_loopback and _is_ip(name))


class _Answer:
    """Wraps `send`: adds the headers of every response, and remembers the status and whether it is an event stream."""

    __slots__ = ("_headers", "_send", "is_stream", "status")

    def __init__(self, send: Send, headers: list[tuple[bytes, bytes]]) -> None:
        self._send, self._headers, self.status, self.is_stream = send, headers, 0, False

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            own = {name.lower(): value for name, value in message["headers"]}
            self.is_stream = own.get(b"content-type", b"").startswith(b"text/event-stream")
            guards = [header for header in GUARDS if header[0] not in own]
            message["headers"] = [*message["headers"], *guards, *self._headers]
        await self._send(message)

    async def send_empty(self, headers: list[tuple[bytes, bytes]]) -> None:
        await self.send({"type": "http.response.start", "status": 204, "headers": headers})
        await self.send({"type": "http.response.body", "body": b"", "more_body": False})


def _hostname(host: str) -> str:
    """Return the host without its port: '[::1]:8000' -> '::1', 'Localhost:8000' -> 'localhost'. A value that is not a
    host with a port is returned unchanged and so stays unknown.
    """
    parts = _HOST.fullmatch(host)
    return (parts[1] or parts[2]).lower() if parts else host


def _is_ip(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _shown_keys(headers: dict[bytes, bytes]) -> list[bytes]:
    """Return every header value of the request that may be a key."""
    scheme, _, value = headers.get(b"authorization", b"").partition(b" ")
    return [headers.get(b"x-api-key", b""), value.strip() if scheme.lower() == b"bearer" else b""]


def _basic_password(headers: dict[bytes, bytes]) -> bytes:
    """Return the password of HTTP Basic authentication, which browsers send again by themselves."""
    scheme, _, value = headers.get(b"authorization", b"").partition(b" ")
    if scheme.lower() != b"basic":
        return b""
    try:
        return base64.b64decode(value, validate=True).partition(b":")[2]
    except binascii.Error:
        return b""


def _guest(scope: HTTPScope, *, is_forwarded: bool) -> Key | None:
    """Return the user who sends a request without a key, on a server without keys; None for the server's owner."""
    if not KNOWS_USERS:
        return None
    ask: Callable[[], int | None] = scope["state"].get("peer_user", lambda: None)
    uid = None if is_forwarded else ask()
    return None if is_owner(uid) else guest(uid)


def session_key(keys: KeyRing, scope: Scope) -> Key | None:
    """Return the key with which this browser logged in at /login."""
    session = session_of(scope)
    return keys.of_session(session) if session else None


def session_of(scope: Scope) -> str:
    """Return the session id of this browser; empty if there is none."""
    for name, value in scope["headers"]:
        for part in value.decode("latin-1").split(";") if name == b"cookie" else ():
            cookie, _, session = part.strip().partition("=")
            if cookie == SESSION_COOKIE:
                return session.strip('"')
    return ""


def client_of(scope: HTTPScope, key: Key | None) -> str:
    """Return the client that limits apply to: a key, else an address."""
    return f"key {key.name}" if key is not None else address_of(scope)


def address_of(scope: HTTPScope) -> str:
    client = scope.get("client")
    return client[0] if client else "-"


def _log_access(scope: HTTPScope, answer: _Answer, seconds: float, key: Key | None) -> None:
    log.log(
        logging.DEBUG if _is_quiet(scope, answer) else logging.INFO,
        "%s %s status=%s time=%s client=%s key=%s id=%s",
        scope["method"],
        _quoted(scope["path"]),
        answer.status or "none",
        format_seconds(seconds),
        address_of(scope),
        _quoted(key.name) if key is not None else "-",
        scope["state"]["request_id"],
    )


def _is_quiet(scope: HTTPScope, answer: _Answer) -> bool:
    path = scope["path"]
    is_part = scope["method"] == "GET" and any(name == b"hx-request" for name, _ in scope["headers"])
    of_page = path.startswith("/static/") or ((answer.is_stream or is_part) and not is_api(path))
    return path in QUIET_PATHS or (of_page and answer.status < 400)


def _quoted(value: str) -> str:
    """Return the value unchanged if it cannot be confused with other parts of the log line, else as JSON: spaces and
    line breaks would end it.
    """
    return value if _PLAIN.fullmatch(value) else json.dumps(value)
