"""The keys that open this machine's server: whose each one is and what it may do, kept as hashes in a file.

    $XDG_DATA_HOME/localllm/keys.toml      mode 0600; `localllm keys` writes it, a running server sees the change

One SHA-256 is the right hash here: slow hashes are for what people choose, and nobody guesses 32 random bytes. A key
is shown once, when it is made, and kept nowhere.
Does not know: HTTP, which route needs which scope (web/scopes.py).
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import re
import secrets
import time
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from filelock import FileLock

from localllm.errors import ConfigError
from localllm.folders import data_folder, make_private, open_private

log = logging.getLogger(__name__)

Scope = Literal["infer", "admin"]
SCOPES: tuple[Scope, ...] = get_args(Scope)
GIVEN = "api-key"
"""What keys of --api-key and LOCALLLM_API_KEY are called in the log."""

SESSION_S = 30 * 24 * 3600
"""How long a browser that has shown a key need not show it again."""
MAX_SESSIONS = 100
"""Browsers that are logged in with one key. One more logs out the one that logged in first."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")
_ID = re.compile(rf"#?{_NAME.pattern}|")
_HEAD = "# Written by `localllm keys`. Only SHA-256 hashes of the keys are stored, not the keys themselves.\n"


@dataclass(frozen=True, slots=True)
class Key:
    """A key without the key."""

    name: str
    scope: Scope
    sha256: str  # hexadecimal
    created: str = ""  # UTC, ISO 8601
    last: str = ""  # its last four characters, to recognise it by
    id: str = ""  # '#' and 16 hexadecimal digits; keys of versions before ids have none

    @property
    def owner(self) -> str:
        """Whose things its holder sees. No two keys that `add_key` makes have the same; a name begins with no '#'."""
        return self.id or self.name

    def may(self, scope: Scope) -> bool:
        return self.scope == "admin" or scope == "infer"


@dataclass(frozen=True, slots=True)
class _Session:
    """A browser that is logged in."""

    key_sha256: str
    until_s: float


class KeyRing:
    """Every key that opens a server: those it was given at the start, and those of the file as it is now."""

    def __init__(self, given: Iterable[str] = (), path: Path | None = None, *, always_locked: bool = False) -> None:
        """Raises `ConfigError` for a file that cannot be read; one that breaks later leaves the keys as they were."""
        self.path = path or keys_path()
        self._given = tuple(Key(GIVEN, "admin", _sha256(key.encode())) for key in given)
        self._stamp = _stamp(self.path)
        self._filed = read_keys(self.path)
        self._locked = always_locked or bool(self._given or self._filed)
        self._sessions: dict[str, _Session] = {}  # by the hash of what the browser holds; oldest first

    @property
    def is_locked(self) -> bool:
        """Whether a key is needed. Once there was one, taking the last one away locks everybody out: it must not
        open the door to everybody."""
        self._locked = bool(self._current()) or self._locked
        return self._locked

    def find(self, offered: Sequence[bytes]) -> Key | None:
        """The key that was offered. Every offer is compared with every key in constant time, found or not."""
        found = None
        hashes = [_sha256(each) for each in offered]
        for key in self._current():
            if sum(hmac.compare_digest(each, key.sha256) for each in hashes):
                found = key
        return found

    def session(self, key: Key) -> str:
        """What stands for this key in a browser until it expires, is ended, the key is removed or this process ends."""
        token, now_s = secrets.token_urlsafe(32), time.time()
        self._sessions = {each: session for each, session in self._sessions.items() if session.until_s > now_s}
        same = [each for each, session in self._sessions.items() if session.key_sha256 == key.sha256]
        for each in same[: max(0, len(same) + 1 - MAX_SESSIONS)]:
            del self._sessions[each]
        self._sessions[_sha256(token.encode())] = _Session(key.sha256, now_s + SESSION_S)
        return token

    def of_session(self, token: str) -> Key | None:
        """The key that a session stands for."""
        session = self._sessions.get(_sha256(token.encode()))
        if session is None or session.until_s <= time.time():
            return None
        return next((key for key in self._current() if key.sha256 == session.key_sha256), None)

    def end_session(self, token: str) -> None:
        """From now on it stands for nothing, wherever a copy of it is."""
        self._sessions.pop(_sha256(token.encode()), None)

    def _current(self) -> tuple[Key, ...]:
        """Looks at the file's stamp each time, some two microseconds, and reads it when that changed."""
        stamp = _stamp(self.path)
        if stamp != self._stamp:
            self._stamp = stamp
            try:
                self._filed = read_keys(self.path)
                log.info("keys read path=%s count=%d", self.path, len(self._filed))
            except ConfigError as error:
                log.error("the changed keys file was rejected, the previous keys stay in force: %s", error)
        return self._given + self._filed


def keys_path() -> Path:
    """$XDG_DATA_HOME/localllm/keys.toml"""
    return data_folder() / "keys.toml"


def read_keys(path: Path) -> tuple[Key, ...]:
    """The keys of a file; none where there is no file. Raises `ConfigError`."""
    try:
        tables = tomllib.loads(path.read_text()).get("key", [])
        return tuple(_key(table) for table in tables)
    except FileNotFoundError:
        return ()
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ConfigError(f"Cannot read the keys in {path}.", f"{error}.", "localllm keys list") from error


def add_key(path: Path, name: str, scope: Scope) -> str:
    """A new key; the only time that anybody sees it. Raises `ConfigError` for a name that is taken or odd."""
    if not _NAME.fullmatch(name) or name == GIVEN:
        why = f"A name has up to 64 letters, digits and . _ @ -, and is not {GIVEN}."
        raise ConfigError(f"{name!r} is not a valid name for a key.", why, "localllm keys add laptop", param="name")
    key = f"sk-local-{secrets.token_urlsafe(32)}"
    created = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    made = Key(name, scope, _sha256(key.encode()), created, key[-4:], f"#{secrets.token_hex(8)}")
    with _alone(path):
        keys = read_keys(path)
        if any(each.name == name for each in keys):
            raise ConfigError(f"The key {name} already exists.", "", f"localllm keys remove {name}", param="name")
        _write(path, (*keys, made))
    return key


def remove_key(path: Path, name: str) -> Key:
    """Forget a key. Raises `ConfigError` where there is none of that name."""
    with _alone(path):
        keys = read_keys(path)
        found = next((key for key in keys if key.name == name), None)
        if found is None:
            known = ", ".join(key.name for key in keys) or "none"
            raise ConfigError(f"There is no key {name!r}.", f"Keys: {known}.", "localllm keys list", param="name")
        _write(path, [key for key in keys if key is not found])
    return found


def _key(table: Mapping[str, Any]) -> Key:
    key = Key(**table)
    if key.scope not in SCOPES or not re.fullmatch("[0-9a-f]{64}", key.sha256) or not _NAME.fullmatch(key.name):
        raise ValueError(f"key {key.name!r} needs a scope ({', '.join(SCOPES)}) and a sha256 of 64 hexadecimal digits")
    if not _ID.fullmatch(key.id):
        raise ValueError(f"the id of key {key.name!r} must be '#' and 16 hexadecimal digits, or the name of a key")
    return key


def _sha256(key: bytes) -> str:
    return hashlib.sha256(key).hexdigest()


def _stamp(path: Path) -> tuple[int, int, int]:
    """Changes whenever the file is replaced, rewritten or removed."""
    try:
        found = path.stat()
    except OSError:
        return (0, 0, 0)
    return (found.st_ino, found.st_mtime_ns, found.st_size)


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Two commands at once lose no key: the second waits for the first."""
    make_private(path.parent)
    with FileLock(path.with_suffix(".lock"), mode=0o600):
        yield


def _write(path: Path, keys: Iterable[Key]) -> None:
    """Whole or not at all: a server may read it at any time. What is written needs no quoting in TOML."""
    tables = (
        f'\n[[key]]\nname = "{key.name}"\nscope = "{key.scope}"\nsha256 = "{key.sha256}"\n'
        f'created = "{key.created}"\nlast = "{key.last}"\n' + (f'id = "{key.id}"\n' if key.id else "")
        for key in keys
    )
    new = path.with_suffix(".new")
    new.unlink(missing_ok=True)
    with open(open_private(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "w") as file:
        file.write(_HEAD + "".join(tables))
    new.replace(path)
