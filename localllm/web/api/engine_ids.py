"""The engine's ids of the latest generations, by the id of their HTTP request.

An HTTP request's id may be chosen by its client, so that two requests may have the same one; the engine needs unique
ids and makes its own. A log line has the first, the dashboard has the second.
Does not know: who looks them up.
"""

from __future__ import annotations

MOST = 500


class EngineIds:
    """A dictionary that forgets the oldest entries. Used on the event loop only."""

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._ids: dict[str, str] = {}

    def note(self, request_id: str, engine_id: str) -> None:
        self._ids.pop(request_id, None)
        self._ids[request_id] = engine_id
        if len(self._ids) > self._most:
            del self._ids[next(iter(self._ids))]

    def pairs(self) -> list[tuple[str, str]]:
        """Return (id of the HTTP request, id of the engine), oldest first."""
        return list(self._ids.items())
