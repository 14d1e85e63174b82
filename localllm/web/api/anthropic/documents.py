"""Documents in messages: text as it is, PDFs through the extra `pdf`.

Clients send a document again with every turn, so the texts of the newest PDFs are kept. A document that cannot be read
is a part that pictures.py decides about.
Does not know: HTTP, the model.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

from localllm.errors import LocalLLMError, UnsupportedParameter
from localllm.web.api.anthropic.schema import CountBody
from localllm.web.api.documents import read_file
from localllm.web.api.pictures import short_bytes, unread_part
from localllm.web.api.reading import wrong_type
from localllm.web.errors import InvalidType

Block = dict[str, Any]
MAX_KEPT_CHARS = 20_000_000


class _PdfTexts:
    """The texts of the newest PDFs, by the digest of their base64."""

    def __init__(self) -> None:
        self._texts: OrderedDict[bytes, str] = OrderedDict()

    async def of(self, name: str, data: str, where: str) -> str:
        """Return the text of a PDF. Raises the error that says why it has none."""
        key = hashlib.sha256(data.encode()).digest()
        if (text := self._texts.pop(key, None)) is None:
            try:
                body = base64.b64decode(data, validate=True)
            except (binascii.Error, ValueError) as error:
                raise InvalidType(f"Invalid type for '{where}.data'.", f"{error}.", param=where) from None
            text = (await read_file(name, body)).whole
        self._texts[key] = text
        while sum(map(len, self._texts.values())) > MAX_KEPT_CHARS and len(self._texts) > 1:
            self._texts.popitem(last=False)
        return text


_pdf_texts = _PdfTexts()


async def read_documents(body: CountBody) -> None:
    """Replace each `document` block of the messages, also within results of tools, by blocks of text."""
    for i, message in enumerate(body.messages):
        if isinstance(message.content, list) and _has_documents(message.content):
            message.content = await _read(message.content, f"messages[{i}].content")


def _has_documents(blocks: Sequence[Any]) -> bool:
    return any(
        block.get("type") == "document" or (isinstance(inner := block.get("content"), list) and _has_documents(inner))
        for block in blocks
        if isinstance(block, dict)
    )


async def _read(blocks: Sequence[Any], where: str) -> list[Any]:
    found: list[Any] = []
    for i, block in enumerate(blocks):
        here = f"{where}[{i}]"
        if isinstance(block, dict) and block.get("type") == "document":
            found += await _blocks_of(block, here)
        elif isinstance(block, dict) and isinstance(inner := block.get("content"), list) and _has_documents(inner):
            found.append({**block, "content": await _read(inner, f"{here}.content")})
        else:
            found.append(block)
    return found


async def _blocks_of(block: Mapping[str, Any], where: str) -> list[Block]:
    """Return a document as blocks of text, the first of which has its title and context."""
    title = block["title"] if isinstance(block.get("title"), str) else ""
    about = [f"Document: {title}"] if title else []
    about += [block["context"]] if isinstance(block.get("context"), str) else []
    head: list[Block] = [{"type": "text", "text": "\n".join(about)}] if about else []
    match block.get("source"):
        case {"type": "text", "data": str(text)}:
            return [*head, {"type": "text", "text": text}]
        case {"type": "content", "content": str(text)}:
            return [*head, {"type": "text", "text": text}]
        case {"type": "content", "content": list(inner)}:
            return [*head, *inner]
        case {"type": "base64", "media_type": "application/pdf", "data": str(data)}:
            try:
                text = await _pdf_texts.of(f"{title or 'document'}.pdf", data, f"{where}.source")
            except LocalLLMError as error:
                error.param = where
                said = f"[document, PDF, {short_bytes(len(data) * 3 // 4)}: {error.what}]"
                return [*head, unread_part(said, error, where)]
            return [*head, {"type": "text", "text": text}]
        case {"type": "url" | "file"}:
            why = "This server opens no URLs and stores no files."
            refusal = UnsupportedParameter(
                f"{where} is a document elsewhere.", why, "Send its text or its base64 data.", param=where
            )
            return [*head, unread_part("[document: this server opens no URLs]", refusal, where)]
        case source:
            raise wrong_type(f"{where}.source", "text, content, a PDF in base64, or a URL", source)
