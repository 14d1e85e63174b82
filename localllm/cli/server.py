"""The client with which verbs talk to a running server.

The server is the one that --url names, else the one that this user started last, else the one in the settings. The
admin key of this user's server is never sent to another machine; its secret is sent only to the server that made it.
Does not know: what the verbs request.
"""

from __future__ import annotations

import argparse
import hashlib
import hmac
import http.client
import ipaddress
import json
import os
import re
import ssl
import urllib.error
import urllib.request
from collections.abc import Generator, Mapping
from contextlib import closing
from typing import Any
from urllib.parse import urlsplit

from localllm.config.flags import add_json
from localllm.config.resolve import resolve
from localllm.config.settings import ServerConfig
from localllm.errors import ConfigError, LocalLLMError
from localllm.machine.running_servers import running_servers


class ServerRefused(LocalLLMError):
    """A running server refused the request, or no server answered."""

    code: str | None = "server_refused"


class ServerClient:
    """A client of one running server."""

    def __init__(self, url: str, api_key: str | None = None, *, kind: str = "localllm") -> None:
        """`kind`: the expected kind of server, for messages. Raises `ConfigError` for an invalid URL."""
        url = (url if "://" in url else f"http://{url}").rstrip("/")
        if not re.match(r"https?://[^/\s]+[^\s]*$", url):
            raise ConfigError(f"{url!r} is not the URL of a server.", hint="--url http://127.0.0.1:8000", param="url")
        self.url, self._api_key, self._kind = url.removesuffix("/v1"), api_key, kind
        # Some servers have another version path (/v1beta/openai); without one, /v1 is added.
        self.v1 = url if re.search(r"/v\d\w*(/|$)", urlsplit(url).path) else f"{url}/v1"

    @property
    def key(self) -> str | None:
        """The key that is sent; None: none."""
        return self._api_key

    @classmethod
    def of(cls, options: argparse.Namespace) -> ServerClient:
        """Return the client of a localllm. If it is on this machine, the key from this user's settings is sent."""
        settings = resolve({"api_key": options.api_key}).server
        host = f"[{settings.host}]" if ":" in settings.host else settings.host
        secrets = {server.url: server.owner_secret for server in reversed(running_servers())}
        here = next(reversed(secrets), f"{settings.scheme}://{host}:{settings.port}")
        url = options.url or here
        key = settings.client_key if options.api_key or is_ours(url, settings) else None
        return cls(url, key or secrets.get(url.rstrip("/")))

    @classmethod
    def of_anyone(cls, options: argparse.Namespace) -> ServerClient:
        """Return the client of any OpenAI-compatible server. A remote one never gets this user's local key."""
        if not options.url or is_ours(options.url, resolve({}).server):
            return cls.of(options)
        return cls(options.url, options.api_key or os.environ.get("OPENAI_API_KEY"), kind="server")

    def ask(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, *, timeout_s: float | None = None
    ) -> dict[str, Any]:
        """Send a request and return the answer; `path` may be a full URL. Raises `ServerRefused` with the server's
        message."""
        try:
            with closing(self._open(method, path, body, timeout_s)) as answer:
                told: dict[str, Any] = json.load(answer)
                return told
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise self._silent(error) from error

    def upload(self, path: str, fields: Mapping[str, str], name: str, content: bytes) -> dict[str, Any]:
        """Send a form with the file `name`, and return the answer. Raises `ServerRefused`."""
        border = os.urandom(16).hex()
        parts = [
            f'--{border}\r\ncontent-disposition: form-data; name="{field}"\r\n\r\n{value}\r\n'.encode()
            for field, value in fields.items()
        ]
        head = f'--{border}\r\ncontent-disposition: form-data; name="file"; filename="{name}"\r\n\r\n'.encode()
        data = b"".join([*parts, head, content, f"\r\n--{border}--\r\n".encode()])
        try:
            with closing(self._open("POST", path, data, None, f"multipart/form-data; boundary={border}")) as answer:
                told: dict[str, Any] = json.load(answer)
                return told
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise self._silent(error) from error

    def read(self, path: str) -> bytes:
        """Return the content at `path`. Raises `ServerRefused`."""
        try:
            with closing(self._open("GET", path, None, None)) as answer:
                return answer.read()
        except (OSError, http.client.HTTPException) as error:
            raise self._silent(error) from error

    def stream(self, path: str, body: Mapping[str, Any]) -> Generator[dict[str, Any]]:
        """Yield the events of a streamed answer. Closing the generator disconnects, which cancels the request."""
        with closing(self._open("POST", path, body, None)) as answer:
            while line := self._line(answer):
                data = line[5:].strip() if line.startswith(b"data:") else b""
                if data == b"[DONE]":
                    return
                if data:
                    yield _event(data)

    def _line(self, answer: http.client.HTTPResponse) -> bytes:
        try:
            return answer.readline()
        except (OSError, http.client.HTTPException) as error:
            raise ServerRefused("The answer is incomplete.", f"{error or type(error).__name__}.") from error

    def _open(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | bytes | None,
        timeout_s: float | None,
        content_type: str = "application/json",
    ) -> http.client.HTTPResponse:
        headers = {"content-type": content_type}
        if self._api_key:
            headers["authorization"] = f"Bearer {self._api_key}"
        data = json.dumps(body).encode() if isinstance(body, Mapping) else body
        try:
            url = path if "://" in path else self.url + path
            request = urllib.request.Request(url, data, headers, method=method)
            handlers = [_SameOrigin(), *([_PinnedHandler(pinned)] if (pinned := _certificate_of(url)) else [])]
            opener = urllib.request.build_opener(*handlers)
            opened: http.client.HTTPResponse = opener.open(request, timeout=timeout_s)
            return opened
        except urllib.error.HTTPError as error:
            raise self._refusal(error) from error
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise self._silent(error) from error

    def _silent(self, error: Exception) -> ServerRefused:
        reason = getattr(error, "reason", None) or error
        if isinstance(reason, ssl.SSLCertVerificationError):
            hint = "SSL_CERT_FILE=cert.pem before the command, and --url with a name that the certificate holds"
            why = f"{str(getattr(reason, 'verify_message', '') or reason).removesuffix('.')}."
            return ServerRefused(f"The certificate of {self.url} is not trusted.", why, hint)
        if isinstance(reason, ssl.SSLError):
            plain = self.url.replace("https:", "http:", 1)
            return ServerRefused(f"{self.url} does not answer in https.", f"{reason}.", f"--url {plain}")
        why = f"{reason or type(error).__name__}."
        others = [server for server in running_servers() if server.url != self.url]
        known = " or ".join(f"--url {server.url} ({server.model})" for server in others[:3])
        return ServerRefused(f"No {self._kind} answers at {self.url}.", why, known or "localllm up, or --url URL")

    def _refusal(self, error: urllib.error.HTTPError) -> ServerRefused:
        hint = "--api-key KEY" if error.code == 401 else ""
        try:
            told = json.load(error)["error"]
            refusal = ServerRefused(str(told if isinstance(told, str) else told["message"]), hint=hint)
            if isinstance(told, dict):
                refusal.code = told.get("code")
        except (ValueError, KeyError, TypeError, OSError):
            why = f"There is no {self._kind} at {self.url}, or its version is not supported."
            refusal = ServerRefused(f"The server answered {error.code} {error.reason}.", why, hint)
        return refusal


def add_server(parser: argparse.ArgumentParser, model: str = "") -> None:
    """Add the flags of a verb that talks to a running server; `model` is the help of its MODEL argument, if any."""
    if model:
        parser.add_argument("model", metavar="MODEL", help=model)
    parser.add_argument("--url", metavar="URL", help="the server; default: the one running on this machine")
    parser.add_argument("--api-key", metavar="KEY", help="the server's API key")
    add_json(parser)


def _event(data: bytes) -> dict[str, Any]:
    """Parse one event of a stream. Raises `ServerRefused` for an error event."""
    try:
        event: dict[str, Any] = json.loads(data)
        error = event.get("error")
    except (ValueError, AttributeError) as broken:
        raise ServerRefused("The server's answer cannot be parsed.", f"{broken}.") from broken
    if error:
        raise ServerRefused(str(error.get("message", error) if isinstance(error, dict) else error))
    return event


class _SameOrigin(urllib.request.HTTPRedirectHandler):
    """Follows redirects only on the same server, because the key is sent along."""

    def redirect_request(
        self, req: urllib.request.Request, fp: Any, code: int, msg: str, headers: Any, newurl: str
    ) -> urllib.request.Request | None:
        if _origin(newurl) != _origin(req.full_url):
            what = f"{req.full_url} redirects to {newurl}."
            raise ServerRefused(what, "It is another server, which must not get the key.", "--url with that address")
        return super().redirect_request(req, fp, code, msg, headers, newurl)


class _PinnedConnection(http.client.HTTPSConnection):
    """A connection that trusts exactly one certificate, whatever names it holds and whoever signed it."""

    def __init__(self, host: str, *, certificate: str, **kwargs: Any) -> None:
        unverified = ssl.create_default_context()
        unverified.check_hostname, unverified.verify_mode = False, ssl.CERT_NONE
        super().__init__(host, context=unverified, **kwargs)
        self._certificate = certificate

    def connect(self) -> None:
        """Compare the certificate before anything is sent, the key above all."""
        super().connect()
        found = hashlib.sha256(self.sock.getpeercert(True) or b"").hexdigest()
        if not hmac.compare_digest(found, self._certificate):
            self.close()
            raise ssl.SSLCertVerificationError(f"The server of this user at port {self.port} published another one.")


class _PinnedHandler(urllib.request.HTTPSHandler):
    def __init__(self, certificate: str) -> None:
        super().__init__()
        self._pinned = certificate

    def https_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        def connect(host: str, **kwargs: Any) -> _PinnedConnection:
            return _PinnedConnection(host, certificate=self._pinned, **kwargs)

        return self.do_open(connect, req)


def _certificate_of(url: str) -> str:
    """Return the fingerprint that a server of this user published for this address, or for its port on loopback."""
    host, port = urlsplit(url).hostname or "", _origin(url)[2]
    for server in running_servers() if url.startswith("https:") else ():
        own = _origin(server.url)
        if own[2] == port and (own[1] == host or (is_loopback(host) and is_loopback(own[1] or ""))):
            return server.certificate
    return ""


def _origin(url: str) -> tuple[str, str | None, int | None]:
    parts = urlsplit(url)
    return parts.scheme, parts.hostname, parts.port or {"http": 80, "https": 443}.get(parts.scheme)


def is_ours(url: str, settings: ServerConfig) -> bool:
    """Return whether a URL points to this machine: to loopback, or to the address of a running server of this user."""
    host = urlsplit(ServerClient(url).url).hostname or ""
    own = {settings.host.lower(), *(urlsplit(server.url).hostname for server in running_servers())}
    return host in own or is_loopback(host)


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
