"""The interface of a server of models for a request: a lease on the model that it names, until its last byte is sent.

`ModelManager` serves the models of this process, `fleet.upstreams.Upstreams` serves models of other servers. Both are a
`ModelServer`.
Does not know: how a model is loaded or reached, HTTP.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Generic, Protocol, TypeVar

from localllm.config.settings import Task

Model = TypeVar("Model")
Leased = TypeVar("Leased", covariant=True)


class Lease(Generic[Model]):
    """A claim on a model. Use it as a context manager, or call `release` (idempotent) at the end."""

    def __init__(self, model: Model, on_release: Callable[[], None]) -> None:
        self.model = model
        self._on_release: Callable[[], None] | None = on_release

    def release(self) -> None:
        on_release, self._on_release = self._on_release, None
        if on_release is not None:
            on_release()

    def __enter__(self) -> Model:
        return self.model

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.release()


class HasModel(Protocol[Leased]):
    """A lease, as its holder sees it."""

    @property
    def model(self) -> Leased: ...

    def release(self) -> None: ...


class ModelServer(Protocol[Leased]):
    """Serves models by name: the engines of this process, or another server."""

    async def acquire(
        self, name: str | None = None, task: Task = "generate", *, keep_alive_s: float | None = None
    ) -> HasModel[Leased]:
        """Return a lease on the model of that name. Raises `ModelNotFound` and what hinders serving it."""

    @property
    def num_open(self) -> int:
        """Requests that are being answered."""

    async def close(self) -> None:
        """End running requests with an error. Idempotent."""
