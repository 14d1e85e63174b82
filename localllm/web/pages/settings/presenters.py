"""Assemble the settings page.

Does not know: how settings are changed (handlers.py, key_handlers.py).
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any
from urllib.parse import quote

from litestar import Request

from localllm.config.resolve import default_config_path
from localllm.config.settings import SETTINGS, Settings
from localllm.web.access.keys import GIVEN, SCOPES, Key, KeyRing, read_keys
from localllm.web.pages.frame.state import pages_state
from localllm.web.pages.settings import setting_rows
from localllm.web.pages.settings.storage import read_storage
from localllm.web.pages.settings.views import DoctorReport, KeyRow, KeysCard, SettingsPage

LEVELS = SETTINGS["log_level"].options
UNASKED = DoctorReport()


async def whole_page(
    request: Request[Any, Any, Any], keys: KeysCard, report: DoctorReport = UNASKED, query: str = ""
) -> SettingsPage:
    state, settings = pages_state(request), settings_of(request)
    storage = await asyncio.to_thread(read_storage, settings.file)
    return SettingsPage(
        shell=state.shell(request, "Settings", "settings"),
        groups=setting_rows.groups(settings, state.served, query),
        keys=keys,
        storage=storage,
        versions=setting_rows.versions(),
        licences=setting_rows.licences(),
        doctor=report,
        log_level=logging.getLevelName(logging.getLogger().getEffectiveLevel()).lower(),
        log_levels=LEVELS,
        config_file=str(file_of(settings)),
        chats_path=next((each.path for each in storage.rows if each.name == "Chats"), ""),
    )


def keys_card(request: Request[Any, Any, Any], **typed: Any) -> KeysCard:
    """Return the card of keys. `typed`: the fields of a refused form, with the error."""
    ring: KeyRing = request.app.state.key_ring
    mine = key_of(request)
    rows = tuple(
        KeyRow(key.name, key.scope, key.created[:10], key.last, key == mine, f"/settings/keys/{quote(key.name)}/remove")
        for key in read_keys(ring.path)
    )
    given = len(request.app.state.settings.server.api_keys)
    # The first key should be able to make others; those after it need it seldom.
    typed.setdefault("scope", "infer" if ring.is_locked else "admin")
    return KeysCard(rows, ring.is_locked, given, SCOPES, **typed)


def key_of(request: Request[Any, Any, Any]) -> Key | None:
    """Return the stored key that this request used."""
    key: Key | None = request.scope["state"].get("key")
    return key if key is not None and key.name != GIVEN else None


def settings_of(request: Request[Any, Any, Any]) -> Settings:
    settings: Settings = request.app.state.settings
    return settings


def file_of(settings: Settings) -> Path:
    """Return the config file that the next start reads, the same as this one."""
    return settings.file or default_config_path()
