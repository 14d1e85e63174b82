"""The front door: who may come in, and a name for every request. Runs before routing, so it covers every URL.

- Host allow-list: a page of another site that rebinds its DNS name to this machine still sends its own Host.
- Origin and Sec-Fetch-Site: what a page of another site sends is refused, to read as well as to write, unless that
  origin may call the API (origins.py), or somebody follows a link to one of our pages.
- Key: on every route but the probes, and for what the route is for (scopes.py). Bearer and x-api-key for programs;
  a browser is sent to /login and comes back with a cookie. Basic (any user name, the key as password) works too.
- Limits: requests a minute and at a time for each key, wrong keys a minute from an address, bytes of all (limits.py).
- x-request-id on each response, and one access line per request, which names the key and never holds it or a prompt.

Does not know: dialects, models, where keys are kept.
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
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from urllib.parse import quote

from litestar.enums import ScopeType
from litestar.response.redirect import ASGIRedirectResponse
from litestar.types import ASGIApp, HTTPScope, Message, Receive, Scope, Send
from litestar.utils import normalize_path

from localllm.config import MAX_UPLOAD_BYTES, ServerConfig
from localllm.errors import LocalLLMError
from localllm.keys import Key, KeyRing
from localllm.units import format_bytes, format_seconds
from localllm.web.caller import missing_scope
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
from localllm.web.limits import Bodies, Guesses, Limits
from localllm.web.origins import Origins, netloc_of
from localllm.web.proxies import Proxies
from localllm.web.scopes import PROBES, is_open, scope_of

log = logging.getLogger("localllm.access")

SESSION_COOKIE = "localllm_session"
QUIET_PATHS = PROBES | {"/metrics", "/localllm/v1/models/stats"}
"""Polled by machines every few seconds: logged at debug level only."""
LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})
SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
ONCE = (b"host", b"origin", b"authorization", b"x-api-key")
"""Whoever sends two of these wants one part of the way to read the one and the next part the other."""
MAX_COOKIE_BYTES = 16 * 1024
"""Ours come to a few hundred; a browser adds those of other programs on this machine, which share its name."""
FOREIGN_SITES = frozenset({b"cross-site", b"same-site"})
"""As Sec-Fetch-Site has it. Another port of this machine is the same site, and another program all the same."""
LINKED_PAGES = frozenset({"/", "/login", "/dashboard", "/playground"})
"""Other sites may have links to these: they ask nobody and start nothing. The pages below /c/ are such, too."""
GUARDS = ((b"x-content-type-options", b"nosniff"), (b"cross-origin-resource-policy", b"same-origin"))
"""Of every answer: nobody else's page may take it for an image, a script or a style."""
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
    ) -> None:
        """`counts`: answers by method, route and status, for /metrics. `guesses` are shared with /login."""
        self.app = app
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
        self.proxies.apply(scope, headers)
        request_id = _request_id(headers)
        scope["state"]["request_id"] = request_id.decode()
        asking = self._asking_origin(scope, headers)
        cors = self.origins.headers(asking) if asking else []
        answer = _Answer(send, [*((name, request_id) for name in _id_headers(scope)), *cors])
        started_s = time.perf_counter()
        shown, typed = _shown_keys(headers), _basic_password(headers)
        shown_key = self.keys.find(shown)
        key = shown_key or self.keys.find([typed]) or session_key(self.keys, scope)
        scope["state"]["key"] = key
        try:
            with ExitStack() as held:
                try:
                    self._check_name(scope, headers)
                    if asking and _is_preflight(scope, headers):
                        await answer.send_empty(self.origins.preflight_headers(headers))
                        return
                    self._check_guess(scope, key, is_guess=any((*shown, typed)))
                    self._check_site(scope, headers, shows_key=shown_key is not None)
                    self._check_key(scope, key)
                    held.enter_context(self._counted(scope, key))
                    receive = held.enter_context(self.bodies.counted(receive, self._announced_bytes(headers)))
                except LocalLLMError as refusal:
                    await self._refuse(scope, headers, refusal)(scope, receive, answer.send)
                else:
                    await self.app(scope, receive, answer.send)
        finally:
            self.counts[scope["method"], scope.get("path_template", "other"), answer.status] += 1
            _log_access(scope, answer.status, time.perf_counter() - started_s, key)

    def _refuse(self, scope: HTTPScope, headers: dict[bytes, bytes], refusal: LocalLLMError) -> ASGIApp:
        """A program gets the error in its dialect; a browser without a key is shown where to give one."""
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
        """Probes and files cost nothing. Only what makes work counts as running: a dashboard may stay open."""
        path, client = normalize_path(scope["path"]), _client(scope, key)
        if is_open(path):
            yield
            return
        self.limits.take(client)
        with nullcontext() if scope["method"] in SAFE_METHODS else self.limits.running(client):
            yield

    def _check_name(self, scope: HTTPScope, headers: dict[bytes, bytes]) -> None:
        """Raises what there is against the head of this request."""
        if twice := [name for name in ONCE if sum(each == name for each, _ in scope["headers"]) > 1]:
            raise MalformedRequest(f"The header {twice[0].decode()} may stand there once.")
        if sum(len(value) for name, value in scope["headers"] if name == b"cookie") > MAX_COOKIE_BYTES:
            raise HeadTooLarge(
                "The cookies are too large.",
                f"At most {format_bytes(MAX_COOKIE_BYTES)} are read.",
                "A browser sends the cookies of every port of a host: delete those of this host.",
            )
        host = headers.get(b"host", b"").decode("latin-1")
        if not self._knows_host(host):
            raise Forbidden(
                f"This server does not answer to the name {_hostname(host)!r}.",
                "Only known names are answered, so that another site cannot reach it through your browser.",
                f"Start with --allowed-hosts {_hostname(host)} to add it.",
            )

    def _check_guess(self, scope: HTTPScope, key: Key | None, *, is_guess: bool) -> None:
        """Raises after too many wrong keys. `is_guess`: one was sent, whether right or wrong. Before anything else that
        depends on the key: every answer that does tells whoever guesses."""
        if is_guess and self._needs_key(scope):
            self.guesses.check(address_of(scope), key)

    def _check_site(self, scope: HTTPScope, headers: dict[bytes, bytes], *, shows_key: bool) -> None:
        """Raises where a page of another site sends this request that may not."""
        origin, host = (headers.get(name, b"").decode("latin-1") for name in (b"origin", b"host"))
        is_foreign = bool(origin) and netloc_of(origin) != host.lower()
        if not is_foreign and headers.get(b"sec-fetch-site") not in FOREIGN_SITES:
            return
        if is_api(scope["path"]):
            if origin and self.origins.may_call(origin, shows_key=shows_key):
                return
        elif _is_link(scope, headers):
            return
        if not origin:
            raise Forbidden(
                "A page of another site asked for this.",
                "Other sites may lead here by a link to the start page, and no further.",
                "Open it from there, or by its address.",
            )
        raise Forbidden(f"Pages of {origin} may not use this server.", hint=self.origins.hint(origin))

    def _needs_key(self, scope: HTTPScope) -> bool:
        return self.keys.is_locked and not is_open(normalize_path(scope["path"]))

    def _check_key(self, scope: HTTPScope, key: Key | None) -> None:
        """Raises where a key is needed that is not there, or not for this."""
        if not self._needs_key(scope):
            return
        if key is None:
            raise Unauthorized(
                "A key is needed, and it is missing or wrong.",
                hint="Send the header 'Authorization: Bearer KEY' with a key of this server (localllm keys add NAME).",
            )
        needed = scope_of(scope["method"], scope["path"])
        if not key.may(needed):
            raise missing_scope(key, needed)

    def _asking_origin(self, scope: HTTPScope, headers: dict[bytes, bytes]) -> str:
        """Of a page that asks the API and hears the answer, a refusal included; empty where there is none."""
        origin = headers.get(b"origin", b"").decode("latin-1")
        return origin if origin and is_api(scope["path"]) and self.origins.may_ask(origin) else ""

    def _announced_bytes(self, headers: dict[bytes, bytes]) -> int:
        """0 where it is more than anybody may send: the router refuses that, and trying again will not help."""
        length = headers.get(b"content-length", b"")
        size_bytes = int(length) if length.isdigit() else 0
        return size_bytes if size_bytes <= max(self.config.max_body_bytes, MAX_UPLOAD_BYTES) else 0

    def _knows_host(self, host: str) -> bool:
        """No Host header at all means no browser. On an open address every literal IP is fine: DNS cannot rebind it."""
        if not host or "*" in self.names:
            return True
        name = _hostname(host)
        return name in self.names or (not self.config.is_loopback and _is_ip(name))


def _is_link(scope: HTTPScope, headers: dict[bytes, bytes]) -> bool:
    """Whether a browser opens a page in a window of its own, one that does nothing but show itself."""
    path = normalize_path(scope["path"])
    opens = headers.get(b"sec-fetch-mode") == b"navigate" and headers.get(b"sec-fetch-dest") == b"document"
    return opens and scope["method"] == "GET" and (path in LINKED_PAGES or path.startswith("/c/"))


def _is_preflight(scope: HTTPScope, headers: dict[bytes, bytes]) -> bool:
    return scope["method"] == "OPTIONS" and b"access-control-request-method" in headers


class _Answer:
    """`send`, with headers added that every response has; the status is remembered."""

    __slots__ = ("_headers", "_send", "status")

    def __init__(self, send: Send, headers: list[tuple[bytes, bytes]]) -> None:
        self._send, self._headers, self.status = send, headers, 0

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            own = {name.lower() for name, _ in message["headers"]}
            guards = [header for header in GUARDS if header[0] not in own]
            message["headers"] = [*message["headers"], *guards, *self._headers]
        await self._send(message)

    async def send_empty(self, headers: list[tuple[bytes, bytes]]) -> None:
        await self.send({"type": "http.response.start", "status": 204, "headers": headers})
        await self.send({"type": "http.response.body", "body": b"", "more_body": False})


def _id_headers(scope: HTTPScope) -> list[bytes]:
    """Anthropic's clients look for the id under a name of their own."""
    return [b"x-request-id", b"request-id"] if speaks_anthropic(scope) else [b"x-request-id"]


def _request_id(headers: dict[bytes, bytes]) -> bytes:
    """The caller's own id where it is harmless to log, else a new one."""
    given = headers.get(b"x-request-id", b"")
    return given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex.encode()


def _hostname(host: str) -> str:
    """'[::1]:8000' -> '::1', 'Localhost:8000' -> 'localhost'. What is no host with a port stays as it is: unknown."""
    parts = _HOST.fullmatch(host)
    return (parts[1] or parts[2]).lower() if parts else host


def _is_ip(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _shown_keys(headers: dict[bytes, bytes]) -> list[bytes]:
    """Whatever a program sent that may be a key."""
    scheme, _, value = headers.get(b"authorization", b"").partition(b" ")
    return [headers.get(b"x-api-key", b""), value.strip() if scheme.lower() == b"bearer" else b""]


def _basic_password(headers: dict[bytes, bytes]) -> bytes:
    """What a browser sends by itself once it was typed."""
    scheme, _, value = headers.get(b"authorization", b"").partition(b" ")
    if scheme.lower() != b"basic":
        return b""
    try:
        return base64.b64decode(value, validate=True).partition(b":")[2]
    except binascii.Error:
        return b""


def session_key(keys: KeyRing, scope: Scope) -> Key | None:
    """The key that this browser has shown at /login."""
    session = session_of(scope)
    return keys.of_session(session) if session else None


def session_of(scope: Scope) -> str:
    """The session that this browser holds; empty where it has none."""
    for name, value in scope["headers"]:
        for part in value.decode("latin-1").split(";") if name == b"cookie" else ():
            cookie, _, session = part.strip().partition("=")
            if cookie == SESSION_COOKIE:
                return session.strip('"')
    return ""


def _client(scope: HTTPScope, key: Key | None) -> str:
    """Who is counted: a key, else an address."""
    return f"key {key.name}" if key is not None else address_of(scope)


def address_of(scope: HTTPScope) -> str:
    client = scope.get("client")
    return client[0] if client else "-"


def _log_access(scope: HTTPScope, status: int, seconds: float, key: Key | None) -> None:
    log.log(
        logging.DEBUG if scope["path"] in QUIET_PATHS else logging.INFO,
        "%s %s status=%s time=%s client=%s key=%s id=%s",
        scope["method"],
        _quoted(scope["path"]),
        status or "none",
        format_seconds(seconds),
        address_of(scope),
        _quoted(key.name) if key is not None else "-",
        scope["state"]["request_id"],
    )


def _quoted(value: str) -> str:
    """Whole where it cannot be taken for anything else of the line; else as JSON: blanks and line ends would end it."""
    return value if _PLAIN.fullmatch(value) else json.dumps(value)
