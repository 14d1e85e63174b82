"""The releases of localllm: at a package index, on a page that links wheels, or in a folder of wheels.

A release's wheel is not downloaded: its metadata and its changelog are read with HTTP ranges, some 100 KB.
Does not know: what is installed, how an update is done (installers.py).
"""

from __future__ import annotations

import base64
import io
import json
import platform
import re
import ssl
import urllib.error
import urllib.request
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from html.parser import HTMLParser
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urldefrag, urljoin, urlsplit, urlunsplit

from localllm.errors import ConfigError, LocalLLMError

TIMEOUT_S = 20.0
BUFFER_BYTES = 1 << 16
JSON = "application/vnd.pypi.simple.v1+json"
ACCEPT = f"{JSON}, application/vnd.pypi.simple.v1+html;q=0.2, text/html;q=0.1"
"""The formats of a package index (PEP 691), the one with sizes first."""


class UpdateError(LocalLLMError):
    """No release could be found, or the program that installs one failed."""

    code = "update_failed"


class SourceKind(StrEnum):
    INDEX = "package index"
    PAGE = "page"
    FOLDER = "folder"


@dataclass(frozen=True, slots=True)
class Source:
    """A place with releases."""

    address: str
    kind: SourceKind

    @property
    def shown(self) -> str:
        """The address without a password."""
        return _without_credentials(self.address)


@dataclass(frozen=True, slots=True)
class Release:
    """One version, with its wheel for this machine."""

    version: str
    wheel: str  # URL or path
    size_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class WheelFacts:
    """Facts of a wheel that decide what an update changes."""

    size_bytes: int
    requirements: tuple[str, ...]  # Requires-Dist of its metadata
    changelog: str  # empty: the wheel has none


def source_of(address: str) -> Source:
    """Return the source at an address. An index ends in /simple, as pip's and uv's addresses do.

    Raises `ConfigError` for a folder that does not exist.
    """
    if address.startswith("file://"):
        address = unquote(urlsplit(address).path)
    if address.startswith(("http://", "https://")):
        is_index = re.search(r"simple/?$", address)
        return Source(address.rstrip("/"), SourceKind.INDEX if is_index else SourceKind.PAGE)
    folder = Path(address).expanduser()
    if not folder.is_dir():
        raise ConfigError(f"{address} is not a folder.", "", "--from https://HOST/simple, or a folder with wheels")
    return Source(str(folder.resolve()), SourceKind.FOLDER)


def find_releases(source: Source) -> list[Release]:
    """Return the releases that this machine can run, the oldest first; drafts (0.2.0rc1) are left out.

    Raises `UpdateError` if the source cannot be read or has no release.
    """
    from packaging.specifiers import InvalidSpecifier, SpecifierSet
    from packaging.tags import sys_tags
    from packaging.utils import InvalidWheelFilename, parse_wheel_filename
    from packaging.version import Version

    rank = {tag: place for place, tag in enumerate(sys_tags())}
    best: dict[Version, tuple[int, Release]] = {}
    for name, wheel, size, python in _wheels(source):
        try:
            project, version, _, tags = parse_wheel_filename(name)
            if not SpecifierSet(python).contains(platform.python_version(), prereleases=True):
                continue
        except (InvalidWheelFilename, InvalidSpecifier):
            continue
        fit = min((rank[tag] for tag in tags if tag in rank), default=None)
        if project != "localllm" or version.is_prerelease or fit is None:
            continue
        if version not in best or fit < best[version][0]:
            best[version] = fit, Release(str(version), wheel, size)
    if not best:
        what = f"{source.shown} has no release of localllm for this machine."
        raise UpdateError(what, hint="localllm update --from ADDRESS   (an index, a page or a folder)")
    return [best[version][1] for version in sorted(best)]


def read_wheel(wheel: str) -> WheelFacts | None:
    """Read a wheel's metadata and changelog. Return None where its server does not support ranges."""
    try:
        with _open_wheel(wheel) as file, zipfile.ZipFile(file) as archive:
            size = file.seek(0, io.SEEK_END)
            return WheelFacts(size, tuple(_requirements(archive)), _text(archive, "/CHANGELOG.md"))
    except (OSError, HTTPException, zipfile.BadZipFile):
        return None


def changes_between(changelog: str, before: str, after: str) -> list[str]:
    """Return the changelog's lines about the versions after `before`, up to and with `after`."""
    from packaging.version import InvalidVersion, Version

    kept: list[str] = []
    wanted = False
    for line in changelog.splitlines():
        if line.startswith("## "):
            try:
                wanted = Version(before) < Version(line.split()[1]) <= Version(after)
            except (InvalidVersion, IndexError):
                wanted = False
        if wanted:
            kept.append(line)
    return kept


def _wheels(source: Source) -> Iterator[tuple[str, str, int | None, str]]:
    """Yield file name, URL or path, size in bytes (None: unknown), and the versions of Python of each wheel."""
    if source.kind is SourceKind.FOLDER:
        for path in Path(source.address).glob("localllm-*.whl"):
            yield path.name, str(path), path.stat().st_size, ""
        return
    url = f"{source.address}/localllm/" if source.kind is SourceKind.INDEX else source.address
    with _opened(url, accept=ACCEPT) as answer:
        body, kind = answer.read(), answer.headers.get_content_type()
    if kind == JSON:
        for file in json.loads(body)["files"]:
            if not file.get("yanked"):
                wheel = _with_credentials(urljoin(url, file["url"]), url)
                yield file["filename"], wheel, file.get("size"), file.get("requires-python") or ""
        return
    links = _Links()
    links.feed(body.decode("utf-8", "replace"))
    for link, python in links.found:
        target = urldefrag(urljoin(url, link)).url
        yield unquote(urlsplit(target).path.rpartition("/")[2]), _with_credentials(target, url), None, python


class _Links(HTMLParser):
    """Collects the links of a page, except those to withdrawn files."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, str]] = []  # target, versions of Python

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        told = dict(attrs)
        if tag == "a" and told.get("href") and "data-yanked" not in told:
            self.found.append((str(told["href"]), told.get("data-requires-python") or ""))


def _opened(url: str, *, accept: str = "*/*") -> HTTPResponse:
    """Send a GET. Raises `UpdateError` with what to try."""
    try:
        return _request(url, {"Accept": accept})
    except urllib.error.HTTPError as error:
        what = f"{_without_credentials(url)} answers {error.code} {error.reason}."
        why = "There is no localllm at this address." if error.code == 404 else ""
        raise UpdateError(what, why, "localllm update --from ADDRESS   (an index, a page or a folder)") from error
    except (OSError, HTTPException, ValueError) as error:
        reason = getattr(error, "reason", error)
        hint = "the same when the network is there, or: localllm update --from FOLDER   (with the new wheel)"
        if isinstance(reason, ssl.SSLCertVerificationError):
            hint = "SSL_CERT_FILE=/path/to/your/certificates.pem localllm update"
        raise UpdateError(f"{_without_credentials(url)} cannot be reached.", f"{reason}.", hint) from error


def _request(url: str, headers: Mapping[str, str]) -> HTTPResponse:
    """Send a GET with HTTP Basic authentication if the URL has a user and a password."""
    parts = urlsplit(url)
    request = urllib.request.Request(_without_credentials(url), headers={"User-Agent": "localllm", **headers})
    if parts.username is not None:
        pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
        # Not sent to the server of a redirect.
        request.add_unredirected_header("Authorization", f"Basic {base64.b64encode(pair.encode()).decode()}")
    answer: HTTPResponse = urllib.request.urlopen(request, timeout=TIMEOUT_S)
    return answer


def _without_credentials(url: str) -> str:
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))


def _with_credentials(url: str, page: str) -> str:
    """Add the user and password of a page to the URL of a file on the same server."""
    parts, given = urlsplit(url), urlsplit(page).netloc
    same = parts.netloc == given.rpartition("@")[2] and parts.scheme == urlsplit(page).scheme
    return urlunsplit(parts._replace(netloc=given)) if same else url


# The inside of a wheel -----------------------------------------------------------------------------------------------


def _open_wheel(wheel: str) -> io.BufferedIOBase:
    if not wheel.startswith(("http://", "https://")):
        return open(wheel, "rb")
    return io.BufferedReader(_RemoteFile(wheel), BUFFER_BYTES)


def _requirements(archive: zipfile.ZipFile) -> Iterator[str]:
    for line in _text(archive, ".dist-info/METADATA").splitlines():
        if not line:
            return  # the description begins
        name, _, value = line.partition(": ")
        if name == "Requires-Dist":
            yield value


def _text(archive: zipfile.ZipFile, end: str) -> str:
    name = next((name for name in archive.namelist() if name.endswith(end)), None)
    return "" if name is None else archive.read(name).decode("utf-8", "replace")


class _RemoteFile(io.RawIOBase):
    """A file on a web server, read with ranges. Raises `OSError` if the server does not support ranges."""

    def __init__(self, url: str) -> None:
        self._url, self._at = url, 0
        self._size = self._read_range(0, 1)[1]

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        count = min(len(buffer), self._size - self._at)
        if count <= 0:
            return 0
        body = self._read_range(self._at, count)[0]
        buffer[: len(body)] = body
        self._at += len(body)
        return len(body)

    def _read_range(self, start: int, count: int) -> tuple[bytes, int]:
        """Return the bytes and the size of the whole file."""
        with _request(self._url, {"Range": f"bytes={start}-{start + count - 1}"}) as answer:
            total = re.fullmatch(r"bytes \d+-\d+/(\d+)", answer.headers.get("Content-Range", ""))
            if answer.status != 206 or total is None:
                raise OSError("The server does not support ranges.")
            return answer.read(count), int(total[1])
