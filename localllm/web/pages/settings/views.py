"""The settings page, its keys, and the pages that it links to.

Does not know: how a setting is written.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote

from litestar import Request

from localllm.config.resolve import default_config_path
from localllm.config.settings import SETTINGS, Settings
from localllm.engine.memory.block_stores import kv_folder
from localllm.web.access.keys import GIVEN, SCOPES, Key, KeyRing, read_keys
from localllm.web.pages.chat.sidebar.views import WipeChats
from localllm.web.pages.frame.state import pages_state
from localllm.web.pages.frame.views import ErrorNotice, Fact, Shell, View, view
from localllm.web.pages.settings.restart import Restart
from localllm.web.pages.settings.setting_rows import SettingGroups, SettingRow, groups, licences, versions
from localllm.web.pages.settings.storage import StorageCard, read_storage


@dataclass(frozen=True, slots=True)
class FindingRow:
    """One result of a check by `localllm doctor`."""

    verdict: Literal["ok", "note", "problem"]
    subject: str
    text: str
    remedy: str = ""


@view("settings/_doctor.html")
class DoctorReport(View):
    """The results of `localllm doctor`; empty if it has not run yet."""

    findings: tuple[FindingRow, ...] = ()
    error: ErrorNotice | None = None


@dataclass(frozen=True, slots=True)
class KeyRow:
    """One API key, without its secret."""

    name: str
    scope: str
    created: str
    last: str  # the last four characters
    is_mine: bool  # this browser logged in with it
    remove_url: str


@view("settings/_keys.html")
class KeysCard(View):
    """The keys that open this server."""

    rows: tuple[KeyRow, ...]
    is_locked: bool
    num_given: int  # keys from the command line or the environment, valid for this run
    scopes: tuple[str, ...]
    name: str = ""  # as typed, shown again with the error
    scope: str = ""
    error: ErrorNotice | None = None
    confirms: bool = False  # the user may confirm the action that the error warns about


@view("settings/page.html")
class SettingsPage(View):
    """`/settings`."""

    shell: Shell
    groups: SettingGroups
    keys: KeysCard
    storage: StorageCard
    versions: tuple[Fact, ...]
    licences: tuple[Fact, ...]
    doctor: DoctorReport
    log_level: str  # the current level
    log_levels: tuple[str, ...]
    config_file: str
    chats_path: str  # empty: chats are in memory only
    kv_path: str  # folder of KV blocks; empty: no model keeps them, and there are none
    wipe: View = field(default_factory=WipeChats)  # the form that deletes all chats


@view("settings/change.html")
class ChangePage(View):
    """`/settings/change`: a line for config.toml, before and after it is written."""

    shell: Shell
    row: SettingRow
    choices: tuple[str, ...]
    text: str  # as typed; before that, the value in force
    config_file: str
    restart: Restart
    has_line: bool = False  # the file has a line for this setting
    line: str = ""  # the line that would be written
    old_line: str = ""  # the current line of the file
    removes: bool = False  # the line would be removed
    written: bool = False
    beaten_by: str = ""  # "flag" or "environment": a source that overrides the file
    error: ErrorNotice | None = None


@view("settings/new_key.html")
class NewKeyPage(View):
    """Shows a new key, once."""

    shell: Shell
    name: str
    scope: str
    key: str
    locks: bool  # this is the first key, so the server now requires one


@view("settings/remove_key.html")
class RemoveKeyPage(View):
    """Asks for confirmation before removing a key that would lock users out."""

    shell: Shell
    name: str
    remove_url: str
    warning: ErrorNotice


LEVELS = SETTINGS["log_level"].options
UNASKED = DoctorReport()


async def whole_page(
    request: Request[Any, Any, Any], keys: KeysCard, report: DoctorReport = UNASKED, query: str = ""
) -> SettingsPage:
    state, settings = pages_state(request), settings_of(request)
    kv_path = kv_folder(settings.engine.kv_offload_dir)
    storage = await asyncio.to_thread(read_storage, settings.file, kv_path, keeps_chats=settings.server.chat_history)
    paths = {each.name: each.path for each in storage.rows}
    tables = [table.engine.get("kv_disk_gib") for table in settings.models.values()]
    keeps_kv = "KV blocks" in paths or any([settings.engine.kv_disk_gib, *tables])
    return SettingsPage(
        shell=state.shell(request, "Settings", "settings"),
        groups=groups(settings, state.served, query),
        keys=keys,
        storage=storage,
        versions=versions(),
        licences=licences(),
        doctor=report,
        log_level=logging.getLevelName(logging.getLogger().getEffectiveLevel()).lower(),
        log_levels=LEVELS,
        config_file=str(file_of(settings)),
        chats_path=paths["Chats"],
        kv_path=str(kv_path) if keeps_kv else "",
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
