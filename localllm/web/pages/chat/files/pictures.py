"""Pictures of a message, and pages of PDFs that have no text: read when they are chosen, stored with the message, and
given to the model.

Does not know: HTTP, templates, which models see.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import replace
from hashlib import sha256
from typing import Any

from localllm.errors import UnsupportedParameter
from localllm.media.decoder import HEADS
from localllm.media.picture import look, page_picture, thumbnail
from localllm.models.spec.vision import Detail
from localllm.serving.answers.pictures import SCALED, PicturePart
from localllm.serving.served import ServedModel
from localllm.text.messages import images_of
from localllm.units import format_count
from localllm.web.api.documents import FileTooLarge, UnreadableFile
from localllm.web.pages.chat.files.attachments import ExpectedCost
from localllm.web.pages.chat.store import Chat, Chats, ChatStore, StoredMessage

THUMB_PX = 192
MOST_PAGES = 20
"""Most pages of a PDF that are read as pictures."""
DETAILS = ("auto", "low", "high")
"""How finely a picture can be read, for the menu of the page."""
TYPES = {"JPEG": "image/jpeg", "PNG": "image/png", "GIF": "image/gif", "BMP": "image/bmp", "WEBP": "image/webp",
         "AVIF": "image/avif"}  # fmt: skip
"""Types by format; the first ones are in the order of `HEADS`."""


def is_picture(data: bytes) -> bool:
    return data.startswith(HEADS) or (data[:4] == b"RIFF" and data[8:12] == b"WEBP") or data[4:12] == b"ftypavif"


def picture_of(name: str, data: bytes) -> dict[str, Any]:
    """Return a picture as the details of a message hold it, with its bytes. Blocks. Raises like `look`."""
    facts = look(data, name)
    shown = base64.b64encode(thumbnail(data, THUMB_PX)).decode()
    return {
        "digest": sha256(data).hexdigest()[:32], "name": name, "kind": facts.kind, "width": facts.width,
        "height": facts.height, "num_bytes": len(data), "thumb": f"data:image/webp;base64,{shown}", "data": data,
    }  # fmt: skip


def pages_of(name: str, body: bytes, numbers: Sequence[int]) -> list[dict[str, Any]]:
    """Return pages of a PDF as pictures of a message; pages of one colour are left out. Blocks.

    Raises `FileTooLarge`, `UnreadableFile`, and what `page_picture` raises.
    """
    if len(numbers) > MOST_PAGES:
        raise FileTooLarge(
            f"{name} has {format_count(len(numbers))} pages without text.",
            f"At most {MOST_PAGES} are read as pictures.",
            "Attach a part of it.",
        )
    drawn = {f"{name}, page {number}": page_picture(body, number, f"{name}, page {number}") for number in numbers}
    found = [picture_of(where, jpeg) for where, jpeg in drawn.items() if jpeg]
    if not found:
        raise UnreadableFile(f"{name} contains no text.", "Its pages have one colour.", "Attach another file.")
    return found


async def cost_of(served: ServedModel, pictures: Sequence[Mapping[str, Any]]) -> ExpectedCost:
    """Return what pictures will take. Raises `RequestError`."""
    sight = served.sight
    assert sight is not None
    [message] = seen_by(served, [{"role": "user", "content": content_of("", pictures)}])
    seen = await sight.look([part["media"] for part in images_of(message)])
    width, height = seen[0].layout.shown
    is_scaled = width * height < SCALED * seen[0].width * seen[0].height
    rows, shown = sum(each.layout.rows for each in seen), f"{width} x {height}" if is_scaled else ""
    seconds = served.generator.stats().picture_s(rows)
    return ExpectedCost(rows, shown, seconds, not sight.processor.limits.is_fixed)


def part_of(picture: Mapping[str, Any]) -> PicturePart:
    """Return a picture as a part of a message."""
    return PicturePart(picture["name"], data=picture["data"], detail=Detail(picture.get("detail", "auto")))


async def with_pictures(store: ChatStore, chat: Chat, messages: Sequence[StoredMessage]) -> list[StoredMessage]:
    """Return the messages with the bytes of their pictures."""
    digests = {each["digest"] for message in messages for each in message.details.get("pictures", [])}
    if not digests:
        return list(messages)
    files = await store.call(Chats.picture_files, chat.id, digests)

    def loaded(message: StoredMessage) -> StoredMessage:
        found = [{**each, "data": files.get(each["digest"], b"")} for each in message.details.get("pictures", [])]
        return replace(message, details={**message.details, "pictures": found}) if found else message

    return [loaded(message) for message in messages]


def content_of(text: str, pictures: Sequence[Mapping[str, Any]]) -> str | list[dict[str, Any]]:
    """Return the content of a user's message: its pictures and its text."""
    if not pictures:
        return text
    parts = [{"type": "image", "media": part_of(each)} for each in pictures]
    return [*parts, {"type": "text", "text": text}]


def sent_as_urls(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the messages for another server: pictures as data URLs, in OpenAI's form."""

    def sent(part: Mapping[str, Any]) -> Mapping[str, Any]:
        if "media" not in part:
            return part
        data = part["media"].data
        kind = next((kind for head, kind in zip(HEADS, TYPES.values(), strict=False) if data.startswith(head)), "")
        kind = kind or TYPES["WEBP" if data[8:12] == b"WEBP" else "AVIF"]
        return {"type": "image_url", "image_url": {"url": f"data:{kind};base64,{base64.b64encode(data).decode()}"}}

    return [
        {**message, "content": list(map(sent, message["content"]))} if images_of(message) else message
        for message in messages
    ]


def seen_by(served: ServedModel, messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the messages for a model: one that sees reads pictures by its own options, one that reads text gets the
    names of earlier pictures. Raises `UnsupportedParameter` for pictures of the newest message."""
    if not any(images_of(message) for message in messages):
        return list(messages)
    if (sight := served.sight) is not None:

        def by_options(part: Mapping[str, Any]) -> Mapping[str, Any]:
            if (media := part.get("media")) is None:
                return part
            return {**part, "media": replace(media, detail=sight.detail({"detail": media.detail.level}, media.where))}

        return [
            {**message, "content": [*map(by_options, message["content"])]} if images_of(message) else message
            for message in messages
        ]
    if messages[-1]["role"] == "user" and images_of(messages[-1]):
        raise UnsupportedParameter(
            f"{served.shown_name} does not see pictures.", "It reads text alone.", "Choose a model that sees.",
            param="model",
        )  # fmt: skip

    def named(part: Mapping[str, Any]) -> str:
        return f"[image {part['media'].where}: this model reads text]" if "media" in part else str(part["text"])

    return [
        {**message, "content": "\n".join(map(named, message["content"]))} if images_of(message) else message
        for message in messages
    ]
