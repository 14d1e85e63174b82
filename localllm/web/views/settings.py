"""Views of the settings page and of the small pages behind it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from localllm.web.views.shared import ErrorNotice, Fact, Shell, View


@dataclass(frozen=True, slots=True)
class SettingRow:
    """One setting. Texts are ready to show."""

    name: str
    meaning: str
    value: str
    unit: str
    now: str  # what was decided where the value leaves it open; empty: nothing to say
    allowed: str
    default: str
    source: str  # flag, environment, file, profile, default
    is_set: bool  # somebody said so
    at_once: bool = False  # a change takes effect without a restart
    change_url: str = ""  # empty: it is not changed from here


@dataclass(frozen=True, slots=True)
class SettingGroup(View):
    """Settings of one subject."""

    template: ClassVar[str] = "settings/_group.html"
    id: str
    title: str
    rows: tuple[SettingRow, ...]
    num_set: int  # not at their default
    is_open: bool


@dataclass(frozen=True, slots=True)
class KeyRow:
    """A key without the key."""

    name: str
    scope: str
    created: str
    last: str  # four characters
    is_mine: bool  # this browser came in with it
    remove_url: str


@dataclass(frozen=True, slots=True)
class KeysCard(View):
    """Who may use this server."""

    template: ClassVar[str] = "settings/_keys.html"
    rows: tuple[KeyRow, ...]
    is_locked: bool
    num_given: int  # keys of this run, from the command line or the environment
    scopes: tuple[str, ...]
    name: str = ""  # as it was typed, beside an error
    scope: str = ""
    error: ErrorNotice | None = None
    confirms: bool = False  # what the error warns of may be done all the same


@dataclass(frozen=True, slots=True)
class StoredRow:
    """Something on the disk."""

    name: str
    what: str
    size_bytes: int
    path: str
    delete: str = "delete the files"
    delete_url: str = ""  # of the page that does it; empty: none does


@dataclass(frozen=True, slots=True)
class StorageCard(View):
    """What is kept on this machine."""

    template: ClassVar[str] = "settings/_storage.html"
    rows: tuple[StoredRow, ...]
    free_bytes: int


@dataclass(frozen=True, slots=True)
class Finding:
    """What a check found."""

    verdict: Literal["ok", "note", "problem"]
    subject: str
    text: str
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class DoctorReport(View):
    """What `localllm doctor` found, or that nobody asked yet."""

    template: ClassVar[str] = "settings/_doctor.html"
    findings: tuple[Finding, ...] = ()
    error: ErrorNotice | None = None


@dataclass(frozen=True, slots=True)
class SettingsPage(View):
    """`/settings`."""

    template: ClassVar[str] = "settings/page.html"
    shell: Shell
    groups: tuple[SettingGroup, ...]
    keys: KeysCard
    storage: StorageCard
    versions: tuple[Fact, ...]
    licences: tuple[Fact, ...]
    doctor: DoctorReport
    log_level: str  # in force now
    log_levels: tuple[str, ...]
    config_file: str
    chats_path: str  # empty: they are in memory only


@dataclass(frozen=True, slots=True)
class ChangePage(View):
    """`/settings/change`: a line for config.toml, before and after it is written."""

    template: ClassVar[str] = "settings/change.html"
    shell: Shell
    row: SettingRow
    choices: tuple[str, ...]
    text: str  # as it was typed
    config_file: str
    line: str = ""  # what would be written
    old_line: str = ""  # what stands there now
    removes: bool = False  # the line would go
    written: bool = False
    beaten_by: str = ""  # flag or environment: goes before the file
    error: ErrorNotice | None = None


@dataclass(frozen=True, slots=True)
class NewKeyPage(View):
    """The only time that a key is shown."""

    template: ClassVar[str] = "settings/new_key.html"
    shell: Shell
    name: str
    scope: str
    key: str
    locks: bool  # it is the first one


@dataclass(frozen=True, slots=True)
class RemoveKeyPage(View):
    """Removing a key would lock somebody out: asked once more."""

    template: ClassVar[str] = "settings/remove_key.html"
    shell: Shell
    name: str
    remove_url: str
    warning: ErrorNotice
