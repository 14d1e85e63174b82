"""Verbs about a running server and its models: `link`, `ps`, `load`, `unload` (also `stop`), `sleep`, `wake`, `pin`.

Does not know: how models are loaded and unloaded, where the server is (server.py).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from localllm.cli.server import ServerClient, add_server
from localllm.config.flags import add_json
from localllm.errors import ConfigError
from localllm.machine.running_servers import running_servers
from localllm.terminal import print_table
from localllm.units import format_bytes, format_count, format_seconds

ROOT = "/localllm/v1/models"


def link_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", metavar="URL", help="default: the server that this user started last")
    parser.add_argument("--open", action="store_true", help="also open it in a browser")
    add_json(parser)


def link(options: argparse.Namespace) -> int:
    """Print a one-time link that logs a browser in as the owner of a server of this user."""
    import webbrowser

    from localllm.web.access.keys import LINK_S, one_time_link

    servers = [server for server in running_servers() if options.url in (None, server.url) and server.owner_secret]
    if not servers:
        raise ConfigError(
            f"No server of this user runs at {options.url}." if options.url else "No server of this user is running.",
            "Only the user who runs a server, and root, can read what a link is made from.",
            'localllm up, or for the machine\'s service: sudo "$(command -v localllm)" link',
        )
    made = one_time_link(servers[0].url, servers[0].owner_secret)
    print(json.dumps({"link": made, "valid_for_s": LINK_S}) if options.json else made)
    if options.open:
        webbrowser.open(made)
    return 0


def ps_arguments(parser: argparse.ArgumentParser) -> None:
    add_server(parser)


def ps(options: argparse.Namespace) -> int:
    """List every model of the server, with its state."""
    models = ServerClient.of(options).ask("GET", f"{ROOT}/loaded")["data"]
    if options.json:
        print(json.dumps(models, indent=2))
        return 0
    heads = ("NAME", "SIZE", "DEVICE", "CONTEXT", "KV %", "REQS", "UNTIL", "STATE")
    print_table([heads, *(_row(model) for model in models)])
    return 0


def load_arguments(parser: argparse.ArgumentParser) -> None:
    add_server(parser, model="a name that `localllm list` shows, or a folder")
    parser.add_argument("--pin", action="store_true", help="pin the model, so that it is never unloaded for another")
    parser.add_argument(
        "--keep-alive", metavar="TIME", help="how long it stays loaded without a request: 5m, 90s; -1: for ever"
    )
    parser.add_argument("--no-wait", action="store_true", help="return at once; `localllm ps` shows the progress")


def load(options: argparse.Namespace) -> int:
    """Load a model, or wake it if it sleeps."""
    body = {"model": model_argument(options.model), "keep_alive": options.keep_alive, "pin": options.pin or None}
    return _tell(options, "load", body | {"wait": not options.no_wait})


def unload_arguments(parser: argparse.ArgumentParser) -> None:
    add_server(parser, model="the model's name")


def unload(options: argparse.Namespace) -> int:
    """Unload a model and free its memory; a running load is cancelled."""
    return _tell(options, "unload", {"model": options.model})


def sleep_arguments(parser: argparse.ArgumentParser) -> None:
    add_server(parser, model="the model's name")


def sleep(options: argparse.Namespace) -> int:
    """Put a model to sleep: keep its weights in host memory and free the rest."""
    return _tell(options, "sleep", {"model": options.model})


def wake_arguments(parser: argparse.ArgumentParser) -> None:
    add_server(parser, model="the model's name")


def wake(options: argparse.Namespace) -> int:
    """Serve a sleeping model again."""
    return _tell(options, "wake", {"model": options.model})


def pin_arguments(parser: argparse.ArgumentParser) -> None:
    add_server(parser, model="the model's name")
    parser.add_argument("--off", action="store_true", help="remove the pin")


def pin(options: argparse.Namespace) -> int:
    """Pin a model, so that it is never evicted for another; with --off, remove the pin."""
    return _tell(options, "pin", {"model": options.model, "pinned": not options.off})


def _tell(options: argparse.Namespace, verb: str, body: Mapping[str, Any]) -> int:
    model = ServerClient.of(options).ask("POST", f"{ROOT}/{verb}", {k: v for k, v in body.items() if v is not None})
    print(json.dumps(model, indent=2) if options.json else f"{model['name']}: {state_of(model)}")
    return 0


def model_argument(name: str) -> str:
    """Return the name; a folder becomes an absolute path, since the server has another working directory."""
    path = Path(name).expanduser()
    return str(path.resolve()) if name.startswith((".", "/", "~")) else name


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
        state_of(model),
    )


def _until(model: Mapping[str, Any]) -> str:
    if model["state"] != "ready":
        return "-"
    seconds = model["expires_in_s"]
    return "pinned" if model["pinned"] else "for ever" if seconds is None else format_seconds(seconds)


def state_of(model: Mapping[str, Any]) -> str:
    """Return the state in words, with the load's progress or the error."""
    phase = model["phase"]
    if model["state"] == "loading" and phase:
        fraction = phase["fraction"]
        return f"loading: {phase['name']}" + (f" {fraction:.0%}" if fraction is not None else "")
    return f"{model['state']}: {model['error']}" if model["state"] == "failed" else str(model["state"])
