"""Files sent with a message: read as text or as pictures, with their size and token count.

A file is uploaded when it is chosen and stays on the tray until its message is sent; without scripts it arrives with
the message. A file that is not text is refused by name. A file that does not fit into the room that the chat leaves is
searched instead of read whole.
Does not know: HTTP, templates, what a message is, how a file is searched (long_files.py).
"""

from __future__ import annotations

import secrets
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Self

from localllm.web.api.documents import FileText, FileTooLarge, UnreadableFile

MAX_FILES = 10
"""Most files per message."""

MAX_WHOLE_BYTES = 1_000_000
"""A longer file is searched, whatever the model's context is."""

MAX_TRAY_FILES = 100
"""Most files of all owners; beyond that the oldest is dropped."""

MAX_TRAY_BYTES = 400_000_000
"""Most bytes of all files together; beyond that the oldest is dropped."""

TRAY_S = 3600.0


class ExpectedCost(NamedTuple):
    """Tokens and seconds that pictures are expected to take of the model that their message goes to."""

    num_tokens: int
    shown: str = ""  # size to which the first one is scaled; empty: its own
    seconds: float | None = None  # before the answer begins; None: not known
    has_detail: bool = False  # how finely they are read can be chosen


@dataclass(frozen=True, slots=True)
class Attachment:
    """A file of the next message."""

    file: FileText  # of pictures its name alone
    num_bytes: int  # of its text, or of its pictures
    num_tokens: int
    is_estimate: bool = False  # `num_tokens` is not counted: the file is long, or no model is loaded that could count
    searched: bool = False  # it does not fit, so it is searched and not read whole
    pictures: tuple[dict[str, Any], ...] = ()  # as pictures.py describes them; several are pages of a PDF
    cost: ExpectedCost | None = None  # of pictures; None: no model is loaded that could tell
    note: str = ""  # what is not read of the file
    sound: bytes = b""  # of the file whose transcript this is, kept while it can be read again
    speech: tuple[str, ...] = ()  # other models that can transcribe the sound
    id: str = field(default_factory=lambda: secrets.token_urlsafe(12))

    @classmethod
    def of_pictures(cls, name: str, pictures: Sequence[dict[str, Any]], cost: ExpectedCost | None) -> Self:
        num_bytes, num_tokens = sum(each["num_bytes"] for each in pictures), cost.num_tokens if cost else 0
        file = FileText(name, "")
        return cls(file, num_bytes, num_tokens, cost is None, pictures=tuple(pictures), cost=cost)

    @property
    def detail(self) -> str:
        """The level of detail of its pictures; empty: it has none."""
        return self.pictures[0].get("detail", "auto") if self.pictures else ""

    @property
    def held_bytes(self) -> int:
        return self.num_bytes + len(self.sound)

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
        is_long = file.num_tokens > room_tokens or file.num_bytes > MAX_WHOLE_BYTES
        searched = is_long and not file.pictures
        room_tokens -= 0 if searched else file.num_tokens
        found.append(replace(file, searched=searched))
    return found


class PendingAttachments:
    """Files that wait for their message."""

    def __init__(self) -> None:
        self._files: OrderedDict[str, tuple[str, float, Attachment]] = OrderedDict()

    def put(self, owner: str, attachment: Attachment) -> Attachment:
        """Keep a file, in place of the one with its id if there is one."""
        now = time.monotonic()
        self._files[attachment.id] = (owner, now, attachment)
        tray_bytes = sum(each.held_bytes for _, _, each in self._files.values())
        for each, (_, since, old) in list(self._files.items())[:-1]:
            if len(self._files) > MAX_TRAY_FILES or tray_bytes > MAX_TRAY_BYTES or now - since > TRAY_S:
                del self._files[each]
                tray_bytes -= old.held_bytes
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
