"""Verbs about the models of a running server: `ps`, `load`, `unload` (also `stop`), `sleep`, `wake`, `pin`.

The server is the one that --url names, else the one that this user started last, else the one of the settings.
Does not know: how models come and go.
"""

from __future__ import annotations

import argparse
import json
import os
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from localllm.cli.tell import print_table
from localllm.config import resolve
from localllm.errors import LocalLLMError
from localllm.units import format_bytes, format_count, format_seconds

ROOT = "/localllm/v1/models"


class ServerRefused(LocalLLMError):
    """A running server said no, or no server answered."""

    code = "server_refused"


def ps(options: argparse.Namespace) -> int:
    """Every model that the server has, with its state."""
    models = Server.of(options).ask("GET", f"{ROOT}/loaded")["data"]
    if options.json:
        print(json.dumps(models, indent=2))
        return 0
    heads = ("NAME", "SIZE", "DEVICE", "CONTEXT", "KV %", "REQS", "UNTIL", "STATE")
    print_table([heads, *(_row(model) for model in models)])
    return 0


def load(options: argparse.Namespace) -> int:
    """Load a model, or wake it."""
    body = {"model": _model(options.model), "keep_alive": options.keep_alive, "pin": options.pin or None}
    return _tell(options, "load", body | {"wait": not options.no_wait})


def unload(options: argparse.Namespace) -> int:
    """Give all memory of a model back; a load is ended."""
    return _tell(options, "unload", {"model": options.model})


def sleep(options: argparse.Namespace) -> int:
    """Keep the weights in host memory and give the rest back."""
    return _tell(options, "sleep", {"model": options.model})


def wake(options: argparse.Namespace) -> int:
    """Serve a sleeping model again."""
    return _tell(options, "wake", {"model": options.model})


def pin(options: argparse.Namespace) -> int:
    """Keep a model, whoever else wants the room; or no longer."""
    return _tell(options, "pin", {"model": options.model, "pinned": not options.off})


def _tell(options: argparse.Namespace, verb: str, body: Mapping[str, Any]) -> int:
    model = Server.of(options).ask("POST", f"{ROOT}/{verb}", {k: v for k, v in body.items() if v is not None})
    print(json.dumps(model, indent=2) if options.json else f"{model['name']}: {_state(model)}")
    return 0


def _model(name: str) -> str:
    """A folder is named from where the user is; the server may be elsewhere."""
    path = Path(name).expanduser()
    return str(path.resolve()) if name.startswith((".", "/", "~")) else name


class Server:
    """A server that is running, as a client sees it."""

    def __init__(self, url: str, api_key: str | None) -> None:
        self.url, self._api_key = url.rstrip("/").removesuffix("/v1"), api_key

    @classmethod
    def of(cls, options: argparse.Namespace) -> Server:
        settings = resolve({"api_key": options.api_key}).server
        host = f"[{settings.host}]" if ":" in settings.host else settings.host
        return cls(options.url or _started_here() or f"{settings.scheme}://{host}:{settings.port}", settings.client_key)

    def ask(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """The server's answer. Raises `ServerRefused` in the server's own words."""
        headers = {"content-type": "application/json"}
        if self._api_key:
            headers["authorization"] = f"Bearer {self._api_key}"
        data = None if body is None else json.dumps(body).encode()
        try:
            request = urllib.request.Request(self.url + path, data, headers, method=method)
            with urllib.request.urlopen(request) as answer:
                told: dict[str, Any] = json.load(answer)
                return told
        except urllib.error.HTTPError as error:
            raise _refusal(error) from error
        except (urllib.error.URLError, ValueError, OSError) as error:
            why = f"{getattr(error, 'reason', error)}."
            raise ServerRefused(f"No localllm answers at {self.url}.", why, "localllm up, or --url URL") from error


def _refusal(error: urllib.error.HTTPError) -> ServerRefused:
    try:
        told = json.load(error)["error"]
        refusal = ServerRefused(str(told["message"]))
        refusal.code = told["code"]
    except (ValueError, KeyError, TypeError):
        refusal = ServerRefused(
            f"The server answered {error.code} {error.reason}.", "It is no localllm, or another one."
        )
    return refusal


def _started_here() -> str | None:
    """The server that this user runs, as it says itself (up.py writes the file and removes it)."""
    folder = os.environ.get("XDG_RUNTIME_DIR")
    try:
        told = json.loads((Path(folder) / "localllm.json").read_text()) if folder else {}
        os.kill(told["pid"], 0)
        return str(told["url"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _row(model: Mapping[str, Any]) -> tuple[str, ...]:
    context, kv_usage = model["max_model_len"], model["kv_usage"]
    return (
        model["name"],
        format_bytes(model["size_bytes"]) if model["size_bytes"] else "-",
        model["device"] or "-",
        format_count(context) if context else "-",
        "-" if kv_usage is None else f"{kv_usage:.0%}",
        str(model["num_requests"]),
        _until(model),
        _state(model),
    )


def _until(model: Mapping[str, Any]) -> str:
    if model["state"] != "ready":
        return "-"
    seconds = model["expires_in_s"]
    return "pinned" if model["pinned"] else "for good" if seconds is None else format_seconds(seconds)


def _state(model: Mapping[str, Any]) -> str:
    phase = model["phase"]
    if model["state"] == "loading" and phase:
        fraction = phase["fraction"]
        return f"loading: {phase['name']}" + (f" {fraction:.0%}" if fraction is not None else "")
    return f"{model['state']}: {model['error']}" if model["state"] == "failed" else str(model["state"])
