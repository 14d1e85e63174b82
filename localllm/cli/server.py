"""A running server, as the verbs that speak to one see it.

It is the one that --url names, else the one that this user started last, else the one of the settings.
Does not know: what is asked of it.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import re
import urllib.error
import urllib.request
from collections.abc import Generator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from localllm.config import resolve
from localllm.errors import ConfigError, LocalLLMError


class ServerRefused(LocalLLMError):
    """A running server said no, or no server answered."""

    code: str | None = "server_refused"


class Server:
    """A server that is running, as a client sees it."""

    def __init__(self, url: str, api_key: str | None = None, *, kind: str = "localllm") -> None:
        """`kind`: what is expected there. Raises `ConfigError` for what is no URL."""
        url = (url if "://" in url else f"http://{url}").rstrip("/")
        if not re.match(r"https?://[^/\s]+[^\s]*$", url):
            raise ConfigError(f"{url!r} is not the URL of a server.", hint="--url http://127.0.0.1:8000", param="url")
        self.url, self._api_key, self._kind = url.removesuffix("/v1"), api_key, kind
        # Some name the version otherwise (/v1beta/openai); where the path names none it is /v1.
        self.v1 = url if re.search(r"/v\d\w*(/|$)", urlsplit(url).path) else f"{url}/v1"

    @classmethod
    def of(cls, options: argparse.Namespace) -> Server:
        """A localllm: the key of this user's settings opens it."""
        settings = resolve({"api_key": options.api_key}).server
        host = f"[{settings.host}]" if ":" in settings.host else settings.host
        here = started_here().get("url") or f"{settings.scheme}://{host}:{settings.port}"
        return cls(options.url or here, settings.client_key)

    @classmethod
    def of_anyone(cls, options: argparse.Namespace) -> Server:
        """Any server that speaks OpenAI's API. One that is elsewhere is not told the key of this user's localllm."""
        host = urlsplit(cls(options.url).url).hostname if options.url else "localhost"
        if host in ("localhost", "::1") or re.fullmatch(r"127\.\d+\.\d+\.\d+", host or ""):
            return cls.of(options)
        return cls(options.url, options.api_key or os.environ.get("OPENAI_API_KEY"), kind="server")

    def ask(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, *, timeout_s: float | None = None
    ) -> dict[str, Any]:
        """The server's answer; `path` may be a whole URL. Raises `ServerRefused` in the server's own words."""
        try:
            with closing(self._open(method, path, body, timeout_s)) as answer:
                told: dict[str, Any] = json.load(answer)
                return told
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise self._silent(error) from error

    def stream(self, path: str, body: Mapping[str, Any]) -> Generator[dict[str, Any]]:
        """The events of an answer in OpenAI's manner, as they come. Closing it hangs up, which ends the request."""
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
            raise ServerRefused("The answer broke off.", f"{error or type(error).__name__}.") from error

    def _open(
        self, method: str, path: str, body: Mapping[str, Any] | None, timeout_s: float | None
    ) -> http.client.HTTPResponse:
        headers = {"content-type": "application/json"}
        if self._api_key:
            headers["authorization"] = f"Bearer {self._api_key}"
        data = None if body is None else json.dumps(body).encode()
        try:
            url = path if "://" in path else self.url + path
            request = urllib.request.Request(url, data, headers, method=method)
            opened: http.client.HTTPResponse = urllib.request.urlopen(request, timeout=timeout_s)
            return opened
        except urllib.error.HTTPError as error:
            raise self._refusal(error) from error
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise self._silent(error) from error

    def _silent(self, error: Exception) -> ServerRefused:
        why = f"{getattr(error, 'reason', None) or error or type(error).__name__}."
        return ServerRefused(f"No {self._kind} answers at {self.url}.", why, "localllm up, or --url URL")

    def _refusal(self, error: urllib.error.HTTPError) -> ServerRefused:
        hint = "--api-key KEY" if error.code == 401 else ""
        try:
            told = json.load(error)["error"]
            refusal = ServerRefused(str(told if isinstance(told, str) else told["message"]), hint=hint)
            if isinstance(told, dict):
                refusal.code = told.get("code")
        except (ValueError, KeyError, TypeError, OSError):
            why = f"There is no {self._kind} at {self.url}, or another one than this knows."
            refusal = ServerRefused(f"The server answered {error.code} {error.reason}.", why, hint)
        return refusal


def _event(data: bytes) -> dict[str, Any]:
    """One event of a stream. Raises `ServerRefused` for one that tells an error."""
    try:
        event: dict[str, Any] = json.loads(data)
        error = event.get("error")
    except (ValueError, AttributeError) as broken:
        raise ServerRefused("The server's answer is unreadable.", f"{broken}.") from broken
    if error:
        raise ServerRefused(str(error.get("message", error) if isinstance(error, dict) else error))
    return event


def started_here() -> dict[str, Any]:
    """`url` and `pid` of the server that this user runs, as it says itself (up.py writes the file and removes it)."""
    folder = os.environ.get("XDG_RUNTIME_DIR")
    try:
        told: dict[str, Any] = json.loads((Path(folder) / "localllm.json").read_text()) if folder else {}
        os.kill(told["pid"], 0)
        return told
    except (OSError, ValueError, KeyError, TypeError):
        return {}
