"""A LoRA adapter as the engine knows it: a name, its slot in the model, and the number of requests that use it.

A request counts from its submission to the engine until its end there. A closed adapter accepts no new requests; when
its last request has ended, its slot can be reused.
Does not know: what an adapter does, torch.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress

from localllm.errors import ModelNotFound


class Adapter:
    """Thread-safe count of an adapter's requests."""

    __slots__ = ("_ended", "_lock", "_num_requests", "fingerprint", "name", "slot")

    def __init__(self, name: str, slot: int, fingerprint: str) -> None:
        """fingerprint: of the adapter's contents, which its entries in the KV cache depend on."""
        self.name, self.slot, self.fingerprint = name, slot, fingerprint
        self._num_requests = 0
        self._ended: Future[None] | None = None  # of a closed adapter: done when its last request has ended
        self._lock = threading.Lock()

    @property
    def cache_extra(self) -> tuple[str, str]:
        """Extra of the block hash, so that prefixes under different adapters are never shared."""
        return "lora", f"{self.fingerprint} {self.name}"

    def begin(self) -> None:
        """Count a request. Raises `ModelNotFound` once the adapter is closed."""
        with self._lock:
            if self._ended is not None:
                raise ModelNotFound(f"The adapter {self.name!r} has been unloaded.", param="model")
            self._num_requests += 1

    def end(self) -> None:
        with self._lock:
            self._num_requests -= 1
            assert self._num_requests >= 0, f"{self.name} released more requests than it holds"
            if not self._num_requests and self._ended is not None:
                with suppress(InvalidStateError):
                    self._ended.set_result(None)

    @property
    def num_requests(self) -> int:
        return self._num_requests

    def close(self) -> Future[None] | None:
        """Accept no new requests. Return a future that is done when the open ones have ended;
        None if already closed."""
        with self._lock:
            if self._ended is not None:
                return None
            self._ended = Future()
            if not self._num_requests:
                self._ended.set_result(None)
            return self._ended

    def reopen(self) -> bool:
        """Accept requests again. Return False if the last request has ended meanwhile: the adapter stays closed."""
        with self._lock:
            if not self._num_requests:
                return False
            self._ended = None
            return True
