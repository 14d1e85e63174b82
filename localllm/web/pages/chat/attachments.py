"""Files sent with a message: read as text, with their size and token count.

A file is uploaded when it is chosen and stays on the tray until its message is sent; without scripts it arrives with
the message. A file that is not text is refused by name.
Does not know: HTTP, templates, what a message is.
"""

from __future__ import annotations

import asyncio
import io
import re
import secrets
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePath

from localllm.errors import RequestError, UnsupportedOption
from localllm.machine.install_kind import how_to_install
from localllm.units import format_bytes

MAX_FILE_BYTES = 1_000_000
"""Most bytes of a text file, and of the text of a PDF."""

MAX_PDF_BYTES = 10_000_000
MAX_PDF_PAGES = 300
PDF_S = 20.0
MAX_FILES = 10
"""Most files per message."""

MAX_TRAY_FILES = 100
"""Most files of all owners; beyond that the oldest is dropped."""

TRAY_S = 3600.0
IMAGES = (b"\x89PNG", b"\xff\xd8\xff", b"GIF8", b"BM", b"II*\x00", b"MM\x00*")
IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".gif", ".webp", ".bmp", ".tif", ".tiff", ".heic", ".avif")
_one_pdf = asyncio.Semaphore(1)


class UnreadableFile(RequestError):
    """The file cannot be sent with a message."""

    code = "unreadable_file"


class FileTooLarge(RequestError):
    """The file is larger than a message allows."""

    status, code = 413, "file_too_large"


@dataclass(frozen=True, slots=True)
class Attachment:
    """A file's text. `num_tokens` None: no model is loaded that could count."""

    id: str
    name: str
    text: str
    num_bytes: int
    num_tokens: int | None = None


async def read_file(name: str, body: bytes) -> tuple[str, str]:
    """Return a file's name and text. Raises the error that says why it has no text."""
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
        return name, await _pdf_text(name, body)
    if len(body) > MAX_FILE_BYTES:
        raise _too_large(name, len(body), MAX_FILE_BYTES)
    try:
        text = body.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UnreadableFile(
            f"{name} is not text in UTF-8.", f"Byte {error.start:,} is not valid.", "Attach text, code or a PDF."
        ) from None
    if re.search(r"[\x00-\x08\x0e-\x1a\x1c-\x1f]", text):
        raise UnreadableFile(f"{name} is not text.", "It contains control characters.", "Attach text, code or a PDF.")
    return name, text.replace("\r\n", "\n").replace("\r", "\n")


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
            why = f"It has {len(reader.pages)} pages; at most {MAX_PDF_PAGES} are allowed."
            raise FileTooLarge(f"{name} has too many pages.", why, "Attach a part of it.")
        for page in reader.pages:
            text = page.extract_text().strip()
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
    return "\n\n".join(text for text in texts if text)


class PendingAttachments:
    """Files that wait for their message."""

    def __init__(self) -> None:
        self._files: OrderedDict[str, tuple[str, float, Attachment]] = OrderedDict()

    def put(self, owner: str, name: str, text: str, num_tokens: int | None) -> Attachment:
        attachment = Attachment(secrets.token_urlsafe(12), name, text, len(text.encode()), num_tokens)
        now = time.monotonic()
        self._files[attachment.id] = (owner, now, attachment)
        for each, (_, since, _) in list(self._files.items()):
            if len(self._files) > MAX_TRAY_FILES or now - since > TRAY_S:
                del self._files[each]
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
