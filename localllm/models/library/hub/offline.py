"""The switches that forbid asking the hub: --offline, the config file, or a variable of the hub's library.

Does not know: what is asked for.
"""

from __future__ import annotations

from localllm.config.settings import Settings
from localllm.errors import HubOffline
from localllm.models.library.hub import client


def offline_switch(settings: Settings) -> str:
    """Return what switched the hub off, such as `--offline` or `--offline and HF_HUB_OFFLINE`; empty: it is on."""
    own = ""
    if settings.engine.offline:
        own = f"offline in {settings.file}" if settings.source("offline") == "file" else "--offline"
    return " and ".join(filter(None, (own, client.offline_variable())))


def search_off(switch: str) -> HubOffline:
    """Return the error of a search. switch: as `offline_switch` returns it."""
    host = client.endpoint().partition("://")[2]
    return HubOffline(
        "Search is off: this server was started offline.", "", f"Start it without {switch} to search {host}."
    )


def require_hub(settings: Settings) -> None:
    """Raise `HubOffline` if the hub may not be asked."""
    if switch := offline_switch(settings):
        raise HubOffline("This needs the hub, and this server was started offline.", "", f"Start it without {switch}.")
