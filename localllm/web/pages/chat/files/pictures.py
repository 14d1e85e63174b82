"""Pictures and sounds of a message, and pages of PDFs that have no text: read when they are chosen, stored with the
message, and given to the model. A sound is kept among the pictures; its details have seconds in place of a size.

Does not know: HTTP, templates, which models see or hear.
"""

from __future__ import annotations

import base64
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from hashlib import sha256
from typing import Any

from localllm.errors import UnsupportedParameter
from localllm.media.decoder import HEADS
from localllm.media.picture import look, page_picture, thumbnail
from localllm.models.spec.vision import Detail
from localllm.serving.answers.pictures import SCALED, PicturePart, Seen
from localllm.serving.answers.sounds import SoundPart
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
         "AVIF": "image/avif", "WAV": "audio/wav", "MP3": "audio/mpeg", "FLAC": "audio/flac", "OGG": "audio/ogg",
         "M4A": "audio/mp4", "WebM": "audio/webm", "AAC": "audio/aac", "AIFF": "audio/aiff"}  # fmt: skip
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


def sound_of(name: str, data: bytes) -> dict[str, Any]:
    """Return a sound as the details of a message hold it, with its bytes. Blocks. Raises like `decode`."""
    from localllm.media.sound import SoundLimits, decode

    with tempfile.TemporaryFile() as file:
        file.write(data)
        samples = decode(file, name, SoundLimits(damaged_advice="Save it again."))
    if not samples.seconds:
        raise UnreadableFile(f"{name} has no sound.", "It has no samples.", "Attach another file.")
    return {
        "digest": sha256(data).hexdigest()[:32], "name": name, "kind": samples.kind, "seconds": samples.seconds,
        "num_bytes": len(data), "data": data,
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
    """Return what pictures or a sound will take. Raises `RequestError`."""
    [message] = seen_by(served, [{"role": "user", "content": content_of("", pictures)}])
    seen = await served.senses.look([part["media"] for part in images_of(message)])
    rows, first, sight = sum(each.layout.rows for each in seen), seen[0], served.sight
    if not isinstance(first, Seen) or sight is None:
        return ExpectedCost(rows)
    width, height = first.layout.shown
    is_scaled = width * height < SCALED * first.width * first.height
    seconds = served.generator.stats().picture_s(rows)
    return ExpectedCost(rows, f"{width} x {height}" if is_scaled else "", seconds, not sight.processor.limits.is_fixed)


def part_of(picture: Mapping[str, Any]) -> PicturePart | SoundPart:
    """Return a picture or a sound as a part of a message."""
    if "seconds" in picture:
        return SoundPart(picture["name"], data=picture["data"])
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
    """Return the content of a user's message: its pictures and sounds, and its text."""
    if not pictures:
        return text
    parts = [{"type": "audio" if "seconds" in each else "image", "media": part_of(each)} for each in pictures]
    return [*parts, {"type": "text", "text": text}]


def sent_as_urls(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the messages for another server: pictures as data URLs and sounds as base64, in OpenAI's form."""

    def sent(part: Mapping[str, Any]) -> Mapping[str, Any]:
        if "media" not in part:
            return part
        data = part["media"].data
        if part["type"] == "audio":
            form = "mp3" if data[:4] != b"RIFF" else "wav"  # the two that OpenAI names
            return {"type": "input_audio", "input_audio": {"data": base64.b64encode(data).decode(), "format": form}}
        kind = next((kind for head, kind in zip(HEADS, TYPES.values(), strict=False) if data.startswith(head)), "")
        kind = kind or TYPES["WEBP" if data[8:12] == b"WEBP" else "AVIF"]
        return {"type": "image_url", "image_url": {"url": f"data:{kind};base64,{base64.b64encode(data).decode()}"}}

    return [
        {**message, "content": list(map(sent, message["content"]))} if images_of(message) else message
        for message in messages
    ]


def seen_by(served: ServedModel, messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the messages for a model: one that sees reads pictures by its own options, one that hears gets sounds, and
    of others in earlier messages it gets the names. Raises `UnsupportedParameter` for others in the newest message."""
    found, reads = list[Mapping[str, Any]](), {"audio": served.hearing, "image": served.sight}
    for i, message in enumerate(messages):
        unread = [part for part in images_of(message) if reads[part["type"]] is None]
        if unread and i == len(messages) - 1 and message["role"] == "user":
            is_sound = unread[0]["type"] == "audio"
            raise UnsupportedParameter(
                f"{served.shown_name} does not {'hear' if is_sound else 'see pictures'}.", "It reads text alone.",
                f"Choose a model that {'hears' if is_sound else 'sees'}.", param="model",
            )  # fmt: skip
        if images_of(message):
            parts = [_as_read(served, part, named=part in unread) for part in message["content"]]
            is_text = all(part["type"] == "text" for part in parts)
            message = {**message, "content": "\n".join([part["text"] for part in parts]) if is_text else parts}
        found.append(message)
    return found


def _as_read(served: ServedModel, part: Mapping[str, Any], *, named: bool) -> Mapping[str, Any]:
    """Return a part by the model's own options. named: its name in place of it."""
    media = part.get("media")
    if named and media is not None:
        is_sound = part["type"] == "audio"
        said = f"[sound {media.where}: this model does not hear]" if is_sound else ""
        return {"type": "text", "text": said or f"[image {media.where}: this model reads text]"}
    if part["type"] == "image" and media is not None and served.sight is not None:
        detail = served.sight.detail({"detail": media.detail.level}, media.where)
        return {**part, "media": replace(media, detail=detail)}
    return part
