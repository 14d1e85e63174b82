"""The style sheets, scripts and images of the pages, read once, with a compressed version and a version tag in the URL.

They are read at start because they are few and small: no path from a request ever touches the disk. Each is compressed
once, when it is first asked for: compressing all of them would be a fortieth of the time until the first page.
Does not know: templates, what the files are for.
"""

from __future__ import annotations

import gzip
import hashlib
import mimetypes
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

PAGES = Path(__file__).resolve().parent.parent
"""Holds a folder for each page, with its files; `frame` holds those of every page."""
VENDOR = PAGES / "frame" / "vendor"
SERVED = (".css", ".js", ".svg", ".txt", ".png", ".toml", ".webmanifest")
JOINED = {"chat.js": ("chats.js", "messages.js")}
"""Scripts that are served behind another, in one file: one request, and together they compress better."""
_UNREAD = {
    ".js": re.compile(rb"^\s*//.*\n|^[^\S\n]+", re.MULTILINE),
    ".css": re.compile(rb"\s*/\*.*?\*/|^[^\S\n]+", re.MULTILINE | re.DOTALL),
}
"""Comments and indentation: whole-line comments of a script. No text of ours goes over several lines."""


@dataclass(frozen=True, slots=True)
class StaticFile:
    """One file, ready to send."""

    body: bytes
    media_type: str
    etag: str

    @property
    def gzipped(self) -> bytes:
        return _gzipped(self.body)

    def answers(self, accept_encoding: str) -> tuple[bytes, bool]:
        """Return the body for a client, and whether it is the compressed one."""
        if "gzip" in accept_encoding.lower() and len(self.gzipped) < len(self.body):
            return self.gzipped, True
        return self.body, False


@cache
def static_files() -> dict[str, StaticFile]:
    """Return every served file by its path below /static, which is its path in the page's folder."""
    paths = [
        (path.relative_to(page).as_posix(), path)
        for page in sorted(PAGES.iterdir())
        for path in sorted(page.rglob("*"))
        if path.is_file() and path.suffix in SERVED
    ]
    assert len(dict(paths)) == len(paths), "two pages have a file of one name"
    bodies = {name: _body(path) for name, path in paths}
    for name, parts in JOINED.items():
        bodies[name] += b"".join(bodies.pop(part) for part in parts)
    return {name: _file(name, body) for name, body in bodies.items()}


def static_url(path: str) -> str:
    """`app.css` -> `/static/app.css?v=1f3a90c2`: changes with the content, so browsers may cache it for ever."""
    return f"/static/{path}?v={static_files()[path].etag}"


def _body(path: Path) -> bytes:
    """Return what is served of a file: own scripts and sheets without comments and indentation, all else as it is."""
    body, unread = path.read_bytes(), _UNREAD.get(path.suffix)
    return unread.sub(b"", body) if unread is not None and VENDOR not in path.parents else body


@cache
def _gzipped(body: bytes) -> bytes:
    return gzip.compress(body, 9, mtime=0)


def _file(name: str, body: bytes) -> StaticFile:
    kind = mimetypes.guess_type(name)[0] or "text/plain"
    other_text = kind.endswith(("javascript", "svg+xml")) and not kind.startswith("text/")
    return StaticFile(
        body=body,
        media_type=f"{kind}; charset=utf-8" if other_text else kind,  # Litestar adds the charset to text/... only
        etag=hashlib.sha256(body).hexdigest()[:12],
    )
