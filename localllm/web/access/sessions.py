"""The browsers that are logged in, kept in a file beside the keys, so that a restart of the server logs nobody out.

    $XDG_DATA_HOME/localllm/sessions.json      mode 0600; servers that share the data folder share the file

A session is a random token in the cookie of one browser. The file has the token's SHA-256, and an HMAC of the key's
hash under the token. Neither of them opens anything, and a short key from --api-key cannot be guessed from them.
Does not know: HTTP, which keys there are (keys.py).
"""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from filelock import FileLock

from localllm.files.folders import make_private, write_whole

log = logging.getLogger(__name__)

SESSION_S = 30 * 24 * 3600
"""How long a browser stays logged in."""
MAX_SESSIONS = 100
"""Most browsers logged in with one key. One more logs out the oldest."""
LOCK_S = 2.0
"""How long a login waits while another process changes the file."""


@dataclass(frozen=True, slots=True)
class Session:
    """A logged-in browser."""

    owner: str  # of the key, as `Key.owner`; keys from --api-key share one
    proof: str  # HMAC of the key's hash under the token
    until_s: float

    def is_of(self, token: str, key_sha256: str) -> bool:
        """Return whether the browser logged in with the key of this hash."""
        return hmac.compare_digest(_proof(token, key_sha256), self.proof)


class Sessions:
    """The sessions of a file, by the hash of their tokens, oldest first.

    If the file cannot be written, the sessions of this process stay valid until the process ends.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stamp: tuple[int, int, int] | None = None
        self._kept: dict[str, Session] = {}

    def start(self, owner: str, key_sha256: str) -> str:
        """Create the session of a browser that showed a key, and return its token."""
        token, now_s = secrets.token_urlsafe(32), time.time()

        def add(kept: dict[str, Session]) -> None:
            for each in [each for each, session in kept.items() if session.until_s <= now_s]:
                del kept[each]
            same = [each for each, session in kept.items() if session.owner == owner]
            for each in same[: max(0, len(same) + 1 - MAX_SESSIONS)]:
                del kept[each]
            kept[_hash(token)] = Session(owner, _proof(token, key_sha256), now_s + SESSION_S)

        self._change(add)
        return token

    def find(self, token: str) -> Session | None:
        """Return the session of a token, if it has not expired. Each call checks the file's stamp (2 µs)."""
        session = self._current().get(_hash(token))
        return session if session is not None and session.until_s > time.time() else None

    def end(self, token: str) -> None:
        """End a session: its token becomes invalid everywhere."""
        self._change(lambda kept: kept.pop(_hash(token), None))

    def _current(self) -> dict[str, Session]:
        stamp = stamp_of(self._path)
        if stamp != self._stamp:
            self._stamp, self._kept = stamp, _read(self._path)
        return self._kept

    def _change(self, change: Callable[[dict[str, Session]], object]) -> None:
        """Change the sessions and write them; those that another process has written since are kept."""
        try:
            with alone(self._path, LOCK_S):
                change(self._current())
                text = json.dumps({each: asdict(session) for each, session in self._kept.items()}, indent=1)
                write_whole(self._path, text + "\n")
                self._stamp = stamp_of(self._path)
        except OSError as error:
            change(self._kept)
            log.warning("sessions are not kept over a restart path=%s reason=%s", self._path, error)


def stamp_of(path: Path) -> tuple[int, int, int]:
    """Return a value that changes whenever the file is replaced, rewritten or removed."""
    try:
        found = path.stat()
    except OSError:
        return (0, 0, 0)
    return (found.st_ino, found.st_mtime_ns, found.st_size)


@contextmanager
def alone(path: Path, timeout_s: float = -1) -> Iterator[None]:
    """Lock a file, so that two processes at the same time lose no entry: the second waits for the first. Raises
    `TimeoutError`; a negative timeout waits for ever."""
    make_private(path.parent)
    with FileLock(path.with_suffix(".lock"), timeout=timeout_s, mode=0o600):
        yield


def _read(path: Path) -> dict[str, Session]:
    """Return the sessions of a file. A damaged file has none: its browsers log in again."""
    try:
        return {each: Session(**fields) for each, fields in json.loads(path.read_bytes()).items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        log.warning("the file of sessions was rejected, everybody has to log in again path=%s reason=%s", path, error)
        return {}


def _hash(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()


def _proof(token: str, key_sha256: str) -> str:
    return hmac.new(token.encode(), key_sha256.encode(), "sha256").hexdigest()
