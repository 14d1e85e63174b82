"""The text of a file: UTF-8, or the pages of a PDF through pypdf, which is an extra.

A file that is not text is refused by name. Long files are read off the event loop.
Does not know: HTTP, which message a file belongs to.
"""

from __future__ import annotations

import asyncio
import io
import re
import time
from dataclasses import dataclass
from pathlib import PurePath

from localllm.errors import RequestError, UnsupportedOption
from localllm.machine.install_kind import how_to_install
from localllm.serving.answers.off_loop import off_loop
from localllm.units import format_bytes, format_count

PAGE = "\f"
"""Between the pages of a text."""

MAX_FILE_BYTES = 20 * 1024**2
"""Most bytes of a text file, and of the text of a PDF: some ten long books."""

MAX_PDF_BYTES = 50 * 1024**2
MAX_PDF_PAGES = 5_000
PDF_S = 120.0
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
    textless: tuple[int, ...] = ()  # numbers of pages without text, from 1: perhaps scans

    @property
    def whole(self) -> str:
        """The text as a model reads it."""
        return re.sub(f"{PAGE}+", "\n\n", self.text).strip("\n") if self.paged else self.text


async def read_file(name: str, body: bytes, *, scans: bool = False) -> FileText:
    """Return a file's text. Raises the error that says why it has none. Long files are decoded off the event loop.

    scans: a PDF without any text is not refused, since its pages will be read as pictures.
    """
    name = plain_name(name)
    if not body:
        raise UnreadableFile(f"{name} is empty.", hint="Choose another file.")
    webp = body[:4] == b"RIFF" and body[8:12] == b"WEBP"
    if body.startswith(IMAGES) or webp or PurePath(name).suffix.lower() in IMAGE_SUFFIXES:
        raise UnreadableFile(
            f"{name} is an image, which is not read here.",
            "Files are read as text.",
            "Describe it, or attach its text.",
        )
    if body.startswith(b"%PDF-"):
        return await _pdf_text(name, body, scans=scans)
    if len(body) > MAX_FILE_BYTES:
        raise too_large(name, len(body), MAX_FILE_BYTES)
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


def too_large(name: str, size: int, most: int) -> FileTooLarge:
    why = f"It has {format_bytes(size)}; at most {format_bytes(most)} are allowed."
    return FileTooLarge(f"{name} is too large.", why, "Attach a part of it.")


async def _pdf_text(name: str, body: bytes, *, scans: bool) -> FileText:
    if len(body) > MAX_PDF_BYTES:
        raise too_large(name, len(body), MAX_PDF_BYTES)
    try:
        import pypdf  # noqa: F401
    except ImportError:
        raise UnsupportedOption(
            f"{name} is a PDF, and the package that reads PDFs is not installed.",
            hint=f"Install it with: {how_to_install('localllm[pdf]')}",
        ) from None
    async with _one_pdf:  # so a slow PDF occupies one thread and not all of them
        return await asyncio.to_thread(_pages_text, name, body, scans=scans)


def _pages_text(name: str, body: bytes, *, scans: bool) -> FileText:
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
            # A damaged font leaves half characters and control characters.
            text = page.extract_text().encode("utf-8", "replace").decode()
            text = _CONTROLS.sub("", text).replace(PAGE, "\n").strip()
            texts.append(text)
            length += len(text)
            if length > MAX_FILE_BYTES:
                raise too_large(f"The text of {name}", length, MAX_FILE_BYTES)
            if time.monotonic() > deadline:
                why = f"{len(texts)} of its {len(reader.pages)} pages took {PDF_S:.0f} s."
                raise FileTooLarge(f"{name} takes too long to read.", why, "Attach a part of it.")
    except RequestError:
        raise
    except (PyPdfError, ValueError, KeyError, TypeError, AttributeError, IndexError, OSError, RecursionError) as error:
        # A damaged file ends in any of these.
        raise UnreadableFile(f"{name} is damaged, or it is not a PDF.", f"{error}."[:200], "Save it again.") from error
    textless = tuple(number for number, text in enumerate(texts, 1) if not text)
    if not any(texts) and not scans:
        raise UnreadableFile(
            f"{name} contains no text.",
            "Its pages are images, perhaps scans.",
            "Attach text, or send its pages as pictures to a model that sees.",
        )
    return FileText(name, PAGE.join(texts) if any(texts) else "", paged=True, textless=textless)
