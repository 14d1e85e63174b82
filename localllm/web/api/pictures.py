"""Pictures and sounds of a conversation, and parts that a model cannot read: pictures for a model that reads text, and
documents without a text. One rule for all dialects.

A model that sees gets every picture (serving/answers/pictures.py), one that hears every sound. For another one, in
earlier turns and in results of tools, such a part becomes a short text, and the answer has a warning header: refusing
it would end the conversation for good, since clients send it again with every turn. In the user's newest message it is
refused. A dialect brings its pictures into OpenAI's form, an `image_url` part, and calls `readable`.
Does not know: any dialect's words but OpenAI's, HTTP.
"""

from __future__ import annotations

import base64
import binascii
import struct
from collections.abc import Mapping, Sequence
from typing import Any

from localllm.errors import UnsupportedParameter
from localllm.serving.answers.pictures import PICTURE_PARTS
from localllm.serving.answers.sounds import SOUND_PARTS
from localllm.serving.served import ServedModel
from localllm.units import format_bytes

Message = dict[str, Any]

UNREAD = "unread"
"""Type of a part that a dialect could not read: it has its `said`, `error` and `where`."""
NOT_THE_USERS = ("system", "developer")
LEAVE_OUT = "Leave the picture out, or describe it."
NOT_LOADED = "The part of the model that sees was not loaded: start without --limit-mm-per-prompt image=0."
NOT_HEARING = "The part of the model that hears was not loaded: start without --limit-mm-per-prompt audio=0."
HEAD_CHARS = 350_000
"""Characters of a picture in base64 that are decoded to find its size, which may be behind a thumbnail."""


def picture_part(url: object, where: str) -> Message:
    """Return a picture in OpenAI's form. `where`: its path in the request."""
    return {"type": "image_url", "image_url": {"url": url if isinstance(url, str) else ""}, "where": where}


def unread_part(said: str, error: Exception, where: str) -> Message:
    """Return a part that could not be read. `said`: the text that replaces it, unless it is the user's newest."""
    return {"type": UNREAD, "said": said, "error": error, "where": where}


def readable(
    messages: Sequence[Mapping[str, Any]],
    model: ServedModel,
    newest_at: str = "",
    options: Mapping[str, Any] | None = None,
) -> tuple[list[Mapping[str, Any]], list[str]]:
    """Return the messages with the pictures for a model that sees, the sounds for one that hears, and with all that the
    model cannot read as short texts, of which there is a warning.

    Raises the error of the part if it is in the user's newest message, whose path in the request is `newest_at`.
    options: of the image processor.
    """
    if not any(isinstance(message, Mapping) and _unreadable(message) for message in messages):
        return list(messages), []
    newest, num_replaced, found, nouns = _newest(messages), 0, list[Mapping[str, Any]](), ["picture", "document"]
    for i, message in enumerate(messages):
        parts = _unreadable(message) if isinstance(message, Mapping) else []
        if not parts:
            found.append(message)
            continue
        content = list(message["content"])
        for j in parts:
            at = newest_at if i == newest and newest_at else f"messages[{i}].content"
            where = content[j].get("where") or f"{at}[{j}]"
            kind = content[j]["type"]
            if model.sight is not None and kind in PICTURE_PARTS:
                content[j] = model.sight.part(content[j], where, options)
                continue
            if model.hearing is not None and kind in SOUND_PARTS:
                content[j] = model.hearing.part(content[j], where)
                continue
            if i == newest:
                raise content[j].get("error") or (_deaf if kind in SOUND_PARTS else _blind)(model, where)
            said = "[sound: this model does not hear]" if kind in SOUND_PARTS else picture_text(_url(content[j]))
            nouns = ["picture", "sound", "document"] if kind in SOUND_PARTS else nouns
            content[j] = {"type": "text", "text": content[j].get("said") or said}
            num_replaced += 1
        found.append({**message, "content": content})
    if not num_replaced:
        return found, []
    many = " and ".join((", ".join(f"{noun}s" for noun in nouns[:-1]), f"{nouns[-1]}s"))
    one = f"a {', '.join(nouns[:-1])} or {nouns[-1]}"
    what = one if num_replaced == 1 else f"each of {num_replaced} {many}"
    return found, [f"a short text replaces {what} that the model cannot read"]


def _blind(model: ServedModel, where: str) -> UnsupportedParameter:
    return UnsupportedParameter(
        f"{where} is a picture, and {model.shown_name} reads text.",
        "Pictures of earlier turns and in results of tools are left out instead.",
        LEAVE_OUT if model.spec.vision is None else NOT_LOADED,
        param=where,
    )


def _deaf(model: ServedModel, where: str) -> UnsupportedParameter:
    hearing = f"Loaded models that hear: {', '.join(model.hearing_models)}." if model.hearing_models else ""
    hint = "Send it to one of them." if hearing else "Transcribe it first: POST /v1/audio/transcriptions."
    return UnsupportedParameter(
        f"{where} is sound, and {model.shown_name} does not hear.",
        hearing or "No loaded model hears.",
        hint if model.spec.hearing is None else NOT_HEARING,
        param=where,
    )


def _unreadable(message: Mapping[str, Any]) -> list[int]:
    """Return the places of parts that the model cannot read."""
    content = message.get("content")
    if not isinstance(content, list):
        return []
    kinds = (*PICTURE_PARTS, *SOUND_PARTS, UNREAD)
    return [j for j, part in enumerate(content) if isinstance(part, Mapping) and part.get("type") in kinds]


def _newest(messages: Sequence[Mapping[str, Any]]) -> int | None:
    """Return the index of the user's newest message, if the model has not answered it.

    A message directly after a tool's result belongs to the result: clients whose results hold only text send pictures
    of tools in this way.
    """
    roles = [message.get("role") if isinstance(message, Mapping) else None for message in messages]
    i = len(roles) - 1
    while i >= 0 and roles[i] in NOT_THE_USERS:
        i -= 1
    is_users = i >= 0 and roles[i] == "user" and (i == 0 or roles[i - 1] not in ("tool", "function"))
    return i if is_users else None


def _url(part: Mapping[str, Any]) -> str:
    url = part.get("image_url")
    url = url.get("url") if isinstance(url, Mapping) else url
    return url if isinstance(url, str) else ""


def picture_text(url: str) -> str:
    """Return the text in place of a picture, such as `[image, 32 x 32, 1 KiB: this model reads text]`."""
    head, _, data = url.partition(",")
    if not data or not head.startswith("data:") or not head.endswith(";base64"):
        return "[image: this model reads text]"
    size = _size(data)
    shown = "" if size is None else f", {size[0]} x {size[1]}"
    return f"[image{shown}, {short_bytes(len(data) * 3 // 4 - data[-2:].count('='))}: this model reads text]"


def short_bytes(count: int) -> str:
    """Format bytes without a decimal zero: 1024 -> '1 KiB'."""
    return format_bytes(count).replace(".0 ", " ")


def _size(data: str) -> tuple[int, int] | None:
    """Return width and height in pixels, from the head of a PNG, GIF, WebP or JPEG in base64."""
    try:
        head = base64.b64decode(data[: HEAD_CHARS // 4 * 4], validate=False)
        if head.startswith(b"\x89PNG"):
            width, height = struct.unpack(">II", head[16:24])
        elif head.startswith(b"GIF8"):
            width, height = struct.unpack("<HH", head[6:10])
        elif head[8:16] == b"WEBPVP8X":
            width, height = (int.from_bytes(head[i : i + 3], "little") + 1 for i in (24, 27))
        elif head[8:16] == b"WEBPVP8 ":
            width, height = (each & 0x3FFF for each in struct.unpack("<HH", head[26:30]))
        elif head[8:16] == b"WEBPVP8L":
            bits = int.from_bytes(head[21:25], "little")
            width, height = (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
        else:
            return _jpeg_size(head) if head.startswith(b"\xff\xd8") else None
    except (struct.error, binascii.Error, ValueError):
        return None
    return width, height


def _jpeg_size(head: bytes) -> tuple[int, int] | None:
    """Return the size of a JPEG: its segments are skipped until the start of a frame."""
    at = 2
    while at + 9 <= len(head) and head[at] == 0xFF:
        kind, length = head[at + 1], int.from_bytes(head[at + 2 : at + 4], "big")
        if 0xC0 <= kind <= 0xCF and kind not in (0xC4, 0xC8, 0xCC):
            return int.from_bytes(head[at + 7 : at + 9], "big"), int.from_bytes(head[at + 5 : at + 7], "big")
        at += 2 + max(length, 2)
    return None
