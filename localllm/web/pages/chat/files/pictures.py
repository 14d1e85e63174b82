"""Pictures of a message: read when they are chosen, stored with the message, and given to the model.

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
from localllm.media.picture import look, thumbnail
from localllm.serving.answers.pictures import SCALED, PicturePart
from localllm.serving.served import ServedModel
from localllm.text.messages import images_of
from localllm.web.pages.chat.store import Chat, Chats, ChatStore, StoredMessage

THUMB_PX = 192
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


async def cost_of(served: ServedModel, pictures: Sequence[Mapping[str, Any]]) -> tuple[int, str]:
    """Return the tokens of pictures, and the size to which the first is scaled; empty: it is not. Raises
    `RequestError`."""
    assert served.sight is not None
    seen = await served.sight.look(
        [
            PicturePart(each["name"], data=each["data"], detail=served.sight.detail({}, each["name"]))
            for each in pictures
        ]
    )
    width, height = seen[0].layout.shown
    is_scaled = width * height < SCALED * seen[0].width * seen[0].height
    return sum(each.layout.rows for each in seen), f"{width} x {height}" if is_scaled else ""


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
    parts = [{"type": "image", "media": PicturePart(each["name"], data=each["data"])} for each in pictures]
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
    """Return the messages for a model: one that reads text gets the names of earlier pictures. Raises
    `UnsupportedParameter` for pictures of the newest message."""
    if served.sight is not None or not any(images_of(message) for message in messages):
        return list(messages)
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
