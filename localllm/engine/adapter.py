"""A LoRA adapter as the engine knows it: a name, the slot of the model that holds it, and how many requests use it.

A request counts from the moment it is handed to the engine until it has ended there. An adapter that is closed takes no
new ones; when the last one has ended its slot may be used for another.
Does not know: what an adapter does, torch.
"""

from __future__ import annotations

import threading

from localllm.errors import ModelNotFound


class Adapter:
    """May be called from any thread."""

    __slots__ = ("_changed", "_is_open", "_num_requests", "fingerprint", "name", "slot")

    def __init__(self, name: str, slot: int, fingerprint: str) -> None:
        """fingerprint: of its contents; what the KV cache holds under it depends on them."""
        self.name, self.slot, self.fingerprint = name, slot, fingerprint
        self._is_open, self._num_requests = True, 0
        self._changed = threading.Condition()

    @property
    def cache_extra(self) -> tuple[str, str]:
        """What keeps prefixes under this adapter apart from all others."""
        return "lora", f"{self.fingerprint} {self.name}"

    def begin(self) -> None:
        """Count a request. Raises `ModelNotFound` once it is closed."""
        with self._changed:
            if not self._is_open:
                raise ModelNotFound(f"The adapter {self.name!r} has been unloaded.", param="model")
            self._num_requests += 1

    def end(self) -> None:
        with self._changed:
            self._num_requests -= 1
            assert self._num_requests >= 0, f"{self.name} ended more requests than it began"
            self._changed.notify_all()

    @property
    def num_requests(self) -> int:
        return self._num_requests

    def close(self, wait_s: float) -> bool:
        """Take no new requests, and wait until the others have ended. False: they have not, and it is open again."""
        with self._changed:
            self._is_open = False
            self._is_open = not self._changed.wait_for(lambda: not self._num_requests, wait_s)
            return not self._is_open
