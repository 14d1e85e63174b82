"""The API keys of this machine's server: names, scopes and hashes, stored in a file.

    $XDG_DATA_HOME/localllm/keys.toml      mode 0600; `localllm keys` writes it, a running server sees the change

Beside them, a running server has the owner's secret, a key with the scope admin that changes at each start. The verbs
of the server's user find it in a private file, and one-time links for a browser are made from it.

A single SHA-256 is the right hash here: slow hashes protect passwords that people choose, and 32 random bytes cannot be
guessed. A key is shown once, when it is created, and stored nowhere.
Does not know: HTTP, which route needs which scope (web/access/scopes.py).
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
import secrets
import time
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from localllm.errors import ConfigError
from localllm.files.folders import data_folder, translated_write, write_whole
from localllm.web.access.sessions import Sessions, alone, stamp_of

log = logging.getLogger(__name__)

Scope = Literal["infer", "admin"]
SCOPES: tuple[Scope, ...] = get_args(Scope)
GIVEN = "api-key"
"""Name of the keys from --api-key and LOCALLLM_API_KEY in the log."""
OWNER = "@owner"
"""Name of the owner's secret in the log; a key in the file cannot have it."""
LINK_S = 3600
"""How long a one-time link can be opened."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")
_ID = re.compile(rf"#?{_NAME.pattern}|")
_LINK_TOKEN = re.compile(r"[0-9]{1,12}\.[0-9a-f]{16}\.[0-9a-f]{64}")
_HEAD = "# Written by `localllm keys`. Only SHA-256 hashes of the keys are stored, not the keys themselves.\n"


@dataclass(frozen=True, slots=True)
class Key:
    """The stored facts of a key, without the secret."""

    name: str
    scope: Scope
    sha256: str  # hexadecimal
    created: str = ""  # UTC, ISO 8601
    last: str = ""  # the key's last four characters, to recognise it
    id: str = ""  # '#' and 16 hexadecimal digits; keys of old versions have no id

    @property
    def owner(self) -> str:
        """Owner of the chats and responses that this key sees, different for each key that `add_key` creates."""
        return self.id or self.name

    @property
    def is_guest(self) -> bool:
        """True for a user of this machine who has no key (`guest`)."""
        return not self.sha256

    def may(self, scope: Scope) -> bool:
        return self.scope == "admin" or scope == "infer"


def guest(uid: int | None) -> Key:
    """Return what stands for another user of this machine on a server without keys. Each has chats of its own."""
    name = "@unknown" if uid is None else f"@user-{uid}"
    return Key(name, "infer", "", id=name)


class KeyRing:
    """All valid keys of a server: those given at start, and those in the keys file now."""

    def __init__(self, given: Iterable[str] = (), path: Path | None = None, *, always_locked: bool = False) -> None:
        """Read the keys. Raises `ConfigError` for an unreadable file; if it breaks later, the keys stay in force."""
        self.path = path or keys_path()
        self._given = tuple(Key(GIVEN, "admin", _sha256(key.encode())) for key in given)
        self._stamp = stamp_of(self.path)
        self._filed = read_keys(self.path)
        self._locked = always_locked or bool(self._given or self._filed)
        self.owner_secret = secrets.token_urlsafe(32)
        self._owner = Key(OWNER, "admin", _sha256(self.owner_secret.encode()))
        self._opened: dict[str, float] = {}  # one-time links that were opened, until they expire
        self._sessions = Sessions(self.path.with_name("sessions.json"))

    @property
    def is_locked(self) -> bool:
        """Return whether a key is required. Once there was a key, removing the last one locks everybody out, instead of
        giving everybody access."""
        self._locked = bool(self._current()) or self._locked
        return self._locked

    def find(self, offered: Sequence[bytes]) -> Key | None:
        """Return the first offered key that is valid. Every offer is compared with every key in constant time."""
        found = None
        hashes = [_sha256(each) for each in offered]
        for key in (self._owner, *self._current()):
            if sum(hmac.compare_digest(each, key.sha256) for each in hashes):
                found = key
        return found

    def of_owner(self, owner: str) -> Key | None:
        """Return the key with the scope `infer` that owns data as `owner`, or the stand-in for a user of this machine.
        None: the key was removed, or has another scope now."""
        if owner.startswith("@"):
            return None if self.is_locked else Key(owner, "infer", "", id=owner)
        return next((key for key in self._current() if key.owner == owner and key.scope == "infer"), None)

    def session(self, key: Key) -> str:
        """Create a session token of a key for a browser. The token is valid, also after a restart, until it expires or
        is ended, or the key is removed. Blocking: it writes a file."""
        return self._sessions.start(key.owner, key.sha256)

    def of_session(self, token: str) -> Key | None:
        """Return the key of a session."""
        session = self._sessions.find(token)
        if session is None:
            return None
        return next((key for key in (self._owner, *self._current()) if session.is_of(token, key.sha256)), None)

    def open_link(self, token: str) -> Key | None:
        """Return the owner's key for the token of a one-time link, and accept the token no further."""
        if not _LINK_TOKEN.fullmatch(token):
            return None
        until, nonce, _ = token.split(".")
        now_s = time.time()
        if not hmac.compare_digest(token.encode(), _link_token(self.owner_secret, until, nonce).encode()):
            return None
        if float(until) < now_s or token in self._opened:
            return None
        self._opened = {each: end_s for each, end_s in self._opened.items() if end_s > now_s} | {token: float(until)}
        return self._owner

    def end_session(self, token: str) -> None:
        """End a session: its token becomes invalid everywhere. Blocking: it writes a file."""
        self._sessions.end(token)

    def _current(self) -> tuple[Key, ...]:
        """Return the current keys. Each call checks the file's stamp (2 µs) and reads the file when it changed."""
        stamp = stamp_of(self.path)
        if stamp != self._stamp:
            self._stamp = stamp
            try:
                self._filed = read_keys(self.path)
                log.info("keys read path=%s count=%d", self.path, len(self._filed))
            except ConfigError as error:
                log.error("the changed keys file was rejected, the previous keys stay in force: %s", error)
        return self._given + self._filed


def one_time_link(url: str, owner_secret: str) -> str:
    """Return an address that logs a browser in as the server's owner, once and within an hour."""
    return f"{url}/login?once={_link_token(owner_secret, str(int(time.time() + LINK_S)), secrets.token_hex(8))}"


def _link_token(owner_secret: str, until: str, nonce: str) -> str:
    signature = hmac.new(owner_secret.encode(), f"{until}.{nonce}".encode(), "sha256").hexdigest()
    return f"{until}.{nonce}.{signature}"


def keys_path() -> Path:
    """Return $XDG_DATA_HOME/localllm/keys.toml."""
    return data_folder() / "keys.toml"


def read_keys(path: Path) -> tuple[Key, ...]:
    """Return the keys of a file; none if the file does not exist. Raises `ConfigError`."""
    try:
        tables = tomllib.loads(path.read_text()).get("key", [])
        return tuple(_key(table) for table in tables)
    except FileNotFoundError:
        return ()
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ConfigError(f"Cannot read the keys in {path}.", f"{error}.", "localllm keys list") from error


def add_key(path: Path, name: str, scope: Scope) -> str:
    """Create a key and return its secret, which is not stored. Raises `ConfigError` for an invalid or taken name,
    and `NotWritable`."""
    if not _NAME.fullmatch(name) or name == GIVEN:
        why = f"A name has up to 64 letters, digits and . _ @ -, and is not {GIVEN}."
        raise ConfigError(f"{name!r} is not a valid name for a key.", why, "localllm keys add laptop", param="name")
    key = f"sk-local-{secrets.token_urlsafe(32)}"
    created = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    made = Key(name, scope, _sha256(key.encode()), created, key[-4:], f"#{secrets.token_hex(8)}")
    with translated_write(f"The key {name}", path), alone(path):
        keys = read_keys(path)
        if any(each.name == name for each in keys):
            raise ConfigError(f"The key {name} already exists.", "", f"localllm keys remove {name}", param="name")
        _write(path, (*keys, made))
    return key


def remove_key(path: Path, name: str) -> Key:
    """Delete a key and return its facts. Raises `ConfigError` if there is no key of this name, and
    `NotWritable`."""
    with translated_write("The list of keys", path), alone(path):
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


def _write(path: Path, keys: Iterable[Key]) -> None:
    """Replace the file atomically, since a server may read it at any time. The values need no quoting in TOML."""
    tables = (
        f'\n[[key]]\nname = "{key.name}"\nscope = "{key.scope}"\nsha256 = "{key.sha256}"\n'
        f'created = "{key.created}"\nlast = "{key.last}"\n' + (f'id = "{key.id}"\n' if key.id else "")
        for key in keys
    )
    write_whole(path, _HEAD + "".join(tables))
