"""A LoRA adapter as the engine knows it: a name, the slot of the model that holds it, and how many requests use it.

A request counts from the moment it is handed to the engine until it has ended there. An adapter that is closed takes no
new ones; when the last one has ended its slot may be used for another.
Does not know: what an adapter does, torch.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress

from localllm.errors import ModelNotFound


class Adapter:
    """May be called from any thread."""

    __slots__ = ("_ended", "_lock", "_num_requests", "fingerprint", "name", "slot")

    def __init__(self, name: str, slot: int, fingerprint: str) -> None:
        """fingerprint: of its contents; what the KV cache holds under it depends on them."""
        self.name, self.slot, self.fingerprint = name, slot, fingerprint
        self._num_requests = 0
        self._ended: Future[None] | None = None  # of a closed one: done when its last request has ended
        self._lock = threading.Lock()

    @property
    def cache_extra(self) -> tuple[str, str]:
        """What keeps prefixes under this adapter apart from all others."""
        return "lora", f"{self.fingerprint} {self.name}"

    def begin(self) -> None:
        """Count a request. Raises `ModelNotFound` once it is closed."""
        with self._lock:
            if self._ended is not None:
                raise ModelNotFound(f"The adapter {self.name!r} has been unloaded.", param="model")
            self._num_requests += 1

    def end(self) -> None:
        with self._lock:
            self._num_requests -= 1
            assert self._num_requests >= 0, f"{self.name} ended more requests than it began"
            if not self._num_requests and self._ended is not None:
                with suppress(InvalidStateError):
                    self._ended.set_result(None)

    @property
    def num_requests(self) -> int:
        return self._num_requests

    def close(self) -> Future[None] | None:
        """Take no new requests. The future is done when the others have ended; None: it is closed already."""
        with self._lock:
            if self._ended is not None:
                return None
            self._ended = Future()
            if not self._num_requests:
                self._ended.set_result(None)
            return self._ended

    def reopen(self) -> bool:
        """Take requests again. False where the last one has ended meanwhile: it stays closed."""
        with self._lock:
            if not self._num_requests:
                return False
            self._ended = None
            return True
