"""Views of the settings page and of the pages it links to."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from localllm.web.pages.chat.sidebar.views import WipeChats
from localllm.web.pages.frame.views import ErrorNotice, Fact, Shell, View, view


@dataclass(frozen=True, slots=True)
class SettingRow:
    """One setting. All texts are ready to show."""

    name: str
    text: str  # what it does, as a title
    meaning: str  # the text with the allowed values and the note
    value: str
    unit: str
    now: str  # the value that was chosen at the start if the setting leaves it open; empty: none
    typed: str  # the value in force, as it can be typed; empty: none
    allowed: str
    default: str
    source: str  # flag, environment, file, profile, default
    is_set: bool  # differs from the default because a source sets it
    at_once: bool = False  # a change takes effect without a restart
    change_url: str = ""  # empty: the page cannot change this setting
    note: str = ""


@view("settings/_group.html")
class SettingGroup(View):
    """Settings of one subject."""

    id: str
    title: str
    rows: tuple[SettingRow, ...]
    num_set: int  # not at their default
    is_open: bool


@view("settings/_groups.html")
class SettingGroups(View):
    """All groups, or those with a setting that a search found."""

    groups: tuple[SettingGroup, ...]
    query: str = ""  # empty: all


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


@dataclass(frozen=True, slots=True)
class StoredRow:
    """One kind of data on disk."""

    name: str
    what: str
    size_bytes: int
    path: str
    delete: str = "delete the files"
    delete_url: str = ""  # URL of the page that deletes it; empty: there is none


@view("settings/_storage.html")
class StorageCard(View):
    """All data that localllm stores on this machine."""

    rows: tuple[StoredRow, ...]
    free_bytes: int


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
    wipe: View = field(default_factory=WipeChats)  # the form that deletes all chats


@view("settings/_restart.html")
class Restart(View):
    """The next step after a change of the file: a restart, by the page or by hand."""

    what: str  # what to do; empty: the page offers it
    command: str = ""  # to be typed on the server's machine; empty: a command alone does not do it


@view("settings/restarting.html")
class RestartingPage(View):
    """Shown until the server has restarted."""

    shell: Shell


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
