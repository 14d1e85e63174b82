"""The tree of a chat's messages: an edited message is a sibling of the original, a second reply one of the first.

Works on (id, parent id) in order of creation. Does not know: SQL, texts.
"""

from __future__ import annotations

from collections.abc import Iterable

Siblings = dict[str | None, list[str]]


class Tree:
    """The parents and children of messages."""

    def __init__(self, rows: Iterable[tuple[str, str | None]]) -> None:
        self.parents: dict[str, str | None] = dict(rows)
        self.children: Siblings = {}
        for message_id, parent_id in self.parents.items():
            self.children.setdefault(parent_id, []).append(message_id)

    def path(self, leaf: str | None) -> list[str]:
        """Return the ids from the root to the leaf."""
        found = []
        while leaf is not None and leaf in self.parents:
            found.append(leaf)
            leaf = self.parents[leaf]
        return found[::-1]

    def versions(self, message_id: str) -> tuple[str, ...]:
        return tuple(self.children.get(self.parents[message_id], ()))

    def newest_leaf(self, message_id: str | None) -> str | None:
        """Return the leaf that is reached by following the newest child each time."""
        while message_id in self.children:
            message_id = self.children[message_id][-1]
        return message_id

    def below(self, message_id: str) -> list[str]:
        """Return the message and all that follow it, on every branch."""
        found = [message_id]
        for each in found:
            found += self.children.get(each, ())
        return found
