"""Files sent with a message: read as text, with their size and token count.

A file is uploaded when it is chosen and stays on the tray until its message is sent; without scripts it arrives with
the message. A file that is not text is refused by name. A file that does not fit into the room that the chat leaves is
searched instead of read whole.
Does not know: HTTP, templates, what a message is, how a file is searched (long_files.py).
"""

from __future__ import annotations

import asyncio
import io
import re
import secrets
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import Any

from localllm.errors import RequestError, UnsupportedOption
from localllm.machine.install_kind import how_to_install
from localllm.units import format_bytes, format_count
from localllm.web.api.off_loop import off_loop
from localllm.web.pages.chat.passages.cut import PAGE

MAX_FILE_BYTES = 20 * 1024**2
"""Most bytes of a text file, and of the text of a PDF: some ten long books."""

MAX_PDF_BYTES = 50 * 1024**2
MAX_PDF_PAGES = 5_000
PDF_S = 120.0
MAX_FILES = 10
"""Most files per message."""

MAX_WHOLE_BYTES = 1_000_000
"""A longer file is searched, whatever the model's context is."""

MAX_TRAY_FILES = 100
"""Most files of all owners; beyond that the oldest is dropped."""

MAX_TRAY_CHARS = 100_000_000
"""Most characters of all files together; beyond that the oldest is dropped."""

TRAY_S = 3600.0
IMAGES = (b"\x89PNG", b"\xff\xd8\xff", b"GIF8", b"BM", b"II*\x00", b"MM\x00*")
IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".gif", ".webp", ".bmp", ".tif", ".tiff", ".heic", ".avif")
_CONTROLS = re.compile(r"[\x00-\x08\x0e-\x1a\x1c-\x1f]")
_one_pdf = asyncio.Semaphore(1)


class UnreadableFile(RequestError):
    """The file cannot be sent with a message."""

    code = "unreadable_file"


class FileTooLarge(RequestError):
    """The file is larger than a message allows."""

    status, code = 413, "file_too_large"


@dataclass(frozen=True, slots=True)
class FileText:
    """The text of a file. `paged`: `PAGE` stands between its pages."""

    name: str
    text: str
    paged: bool = False

    @property
    def whole(self) -> str:
        """The text as a model reads it."""
        return re.sub(f"{PAGE}+", "\n\n", self.text).strip("\n") if self.paged else self.text


@dataclass(frozen=True, slots=True)
class Attachment:
    """A file of the next message."""

    id: str
    file: FileText
    num_bytes: int  # of its text
    num_tokens: int
    is_estimate: bool = False  # `num_tokens` is not counted: the file is long, or no model is loaded that could count
    searched: bool = False  # it does not fit, so it is searched and not read whole

    @property
    def name(self) -> str:
        return self.file.name

    def details(self) -> dict[str, Any]:
        """Return what is stored with the message; long_files.py stores the text of a searched file elsewhere."""
        if not self.searched:
            return {"name": self.name, "text": self.file.whole}
        paged = self.file.paged
        return {
            "name": self.name,
            "num_bytes": self.num_bytes,
            "searched": True,
            "paged": paged,
            "body": self.file.text,
        }


def divided(files: Sequence[Attachment], room_tokens: int) -> list[Attachment]:
    """Return the files, and mark as searched those that do not fit into the room beside the ones before them."""
    found = []
    for file in files:
        searched = file.num_tokens > room_tokens or file.num_bytes > MAX_WHOLE_BYTES
        room_tokens -= 0 if searched else file.num_tokens
        found.append(replace(file, searched=searched))
    return found


async def read_file(name: str, body: bytes) -> FileText:
    """Return a file's text. Raises the error that says why it has none. Long files are decoded off the event loop."""
    name = plain_name(name)
    if not body:
        raise UnreadableFile(f"{name} is empty.", hint="Choose another file.")
    webp = body[:4] == b"RIFF" and body[8:12] == b"WEBP"
    if body.startswith(IMAGES) or webp or PurePath(name).suffix.lower() in IMAGE_SUFFIXES:
        raise UnreadableFile(
            f"{name} is an image, which the model cannot see.",
            "The models on this server support only text.",
            "Describe it, or attach its text.",
        )
    if body.startswith(b"%PDF-"):
        return FileText(name, await _pdf_text(name, body), paged=True)
    if len(body) > MAX_FILE_BYTES:
        raise _too_large(name, len(body), MAX_FILE_BYTES)
    return await off_loop(len(body), lambda: FileText(name, _decoded(name, body)))


def _decoded(name: str, body: bytes) -> str:
    try:
        text = body.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UnreadableFile(
            f"{name} is not text in UTF-8.", f"Byte {error.start:,} is not valid.", "Attach text, code or a PDF."
        ) from None
    if _CONTROLS.search(text):
        raise UnreadableFile(f"{name} is not text.", "It contains control characters.", "Attach text, code or a PDF.")
    return text.replace("\r\n", "\n").replace("\r", "\n")


def plain_name(name: str) -> str:
    """Return the name without folders, and without characters that could break the line or the fence around it."""
    last = re.split(r"[/\\]", name)[-1]
    return "".join(each for each in last if each.isprintable() and each not in "`<>")[:100].strip() or "file.txt"


def _too_large(name: str, size: int, most: int) -> FileTooLarge:
    why = f"It has {format_bytes(size)}; at most {format_bytes(most)} are allowed."
    return FileTooLarge(f"{name} is too large.", why, "Attach a part of it.")


async def _pdf_text(name: str, body: bytes) -> str:
    if len(body) > MAX_PDF_BYTES:
        raise _too_large(name, len(body), MAX_PDF_BYTES)
    try:
        import pypdf  # noqa: F401
    except ImportError:
        raise UnsupportedOption(
            f"{name} is a PDF, and the package that reads PDFs is not installed.",
            hint=f"Install it with: {how_to_install('localllm[pdf]')}",
        ) from None
    async with _one_pdf:  # so a slow PDF occupies one thread and not all of them
        return await asyncio.to_thread(_pages_text, name, body)


def _pages_text(name: str, body: bytes) -> str:
    import pypdf
    from pypdf.errors import PyPdfError

    deadline, texts, length = time.monotonic() + PDF_S, list[str](), 0
    try:
        reader = pypdf.PdfReader(io.BytesIO(body))
        if reader.is_encrypted and not reader.decrypt(""):
            raise UnreadableFile(f"{name} is locked with a password.", hint="Attach it without a password.")
        if len(reader.pages) > MAX_PDF_PAGES:
            why = f"It has {format_count(len(reader.pages))} pages; at most {format_count(MAX_PDF_PAGES)} are allowed."
            raise FileTooLarge(f"{name} has too many pages.", why, "Attach a part of it.")
        for page in reader.pages:
            text = _clean(page.extract_text())
            texts.append(text)
            length += len(text)
            if length > MAX_FILE_BYTES:
                raise _too_large(f"The text of {name}", length, MAX_FILE_BYTES)
            if time.monotonic() > deadline:
                why = f"{len(texts)} of its {len(reader.pages)} pages took {PDF_S:.0f} s."
                raise FileTooLarge(f"{name} takes too long to read.", why, "Attach a part of it.")
    except RequestError:
        raise
    except (PyPdfError, ValueError, KeyError, TypeError, AttributeError, IndexError, OSError, RecursionError) as error:
        # A damaged file ends in any of these.
        raise UnreadableFile(f"{name} is damaged, or it is not a PDF.", f"{error}."[:200], "Save it again.") from error
    if not any(texts):
        raise UnreadableFile(f"{name} contains no text.", "Its pages are images, perhaps scans.", "Attach text.")
    return PAGE.join(texts)


def _clean(text: str) -> str:
    """Return the text of a page without what a damaged font leaves in it: half characters, and control characters."""
    return _CONTROLS.sub("", text.encode("utf-8", "replace").decode()).replace(PAGE, "\n").strip()


class PendingAttachments:
    """Files that wait for their message."""

    def __init__(self) -> None:
        self._files: OrderedDict[str, tuple[str, float, Attachment]] = OrderedDict()

    def put(self, owner: str, file: FileText, num_tokens: int, *, is_estimate: bool) -> Attachment:
        num_bytes = len(file.text.encode())
        attachment = Attachment(secrets.token_urlsafe(12), file, num_bytes, num_tokens, is_estimate)
        now = time.monotonic()
        self._files[attachment.id] = (owner, now, attachment)
        num_chars = sum(len(each.file.text) for _, _, each in self._files.values())
        for each, (_, since, old) in list(self._files.items())[:-1]:
            if len(self._files) > MAX_TRAY_FILES or num_chars > MAX_TRAY_CHARS or now - since > TRAY_S:
                del self._files[each]
                num_chars -= len(old.file.text)
        return attachment

    def get(self, owner: str, ids: Sequence[str]) -> list[Attachment]:
        """Return the files with these ids. Raises if one is gone."""
        self.require_count(len(ids))
        found = [self._files.get(each) for each in dict.fromkeys(ids)]
        if any(each is None or each[0] != owner for each in found):
            raise UnreadableFile("An attached file is no longer on the server.", hint="Remove it and attach it again.")
        return [each[2] for each in found if each is not None]

    def require_count(self, count: int) -> None:
        """Raise if this many files are too many for a message."""
        if count > MAX_FILES:
            raise FileTooLarge(
                "There are too many files.",
                f"A message may have at most {MAX_FILES} files.",
                "Send some of them first.",
            )

    def drop(self, attachments: Sequence[Attachment]) -> None:
        """Remove the files, because their message was sent."""
        for each in attachments:
            self._files.pop(each.id, None)
