"""All other servers behind this address: which of them answers a request, and what happens when one fails.

A request goes to the server with the least expected cost (routing.py). If it fails there before the first part of its
answer, it is sent to the next one; after that, its client hears the error, because a second answer would differ.
Does not know: dialects, HTTP, the models of this process beyond their load.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import msgspec

from localllm.config.settings import Settings, Task
from localllm.errors import InvalidParameter, ModelNotFound
from localllm.fleet.routing import USUAL_TOKENS_PER_S, Reason, ReplicaLoad, Router
from localllm.fleet.sse import Event
from localllm.fleet.upstream import (
    RemoteFacts,
    Upstream,
    UpstreamFailed,
    UpstreamRefused,
    UpstreamUnavailable,
    says_something,
)
from localllm.serving.lease import Lease

log = logging.getLogger(__name__)

CHECK_EVERY_S = 5.0
"""Between two looks at a server's health and list of models; a failed request is a look as well."""
FIRST_CHECK_S = 6.0
"""How long a request waits for the first look, so that a server answers for others as soon as it answers at all."""
HERE = "here"
"""Name of this process among the servers, for the header that pins a request."""
CHARS_PER_TOKEN = 4
MOST_PREFIXES = 256
"""Prefixes of one prompt that are named: a conversation may have thousands of messages."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as routing sees it: the names of its prefixes, shortest first, and their lengths in tokens."""

    names: tuple[bytes, ...] = ()
    lengths: tuple[int, ...] = ()  # about: by characters

    @property
    def num_tokens(self) -> int:
        return self.lengths[-1] if self.lengths else 0

    @staticmethod
    def of(model: str, parts: Sequence[Any]) -> Prompt:
        """Return the prompt that consists of these parts, such as the messages of a conversation."""
        each_has = max(1, -(-len(parts) // MOST_PREFIXES))
        names, lengths, name, size = [], [], hashlib.blake2b(model.encode(), digest_size=16).digest(), 0
        for start in range(0, len(parts), each_has):
            text = msgspec.json.encode(parts[start : start + each_has])
            name, size = hashlib.blake2b(name + text, digest_size=16).digest(), size + len(text)
            names.append(name)
            lengths.append(max(1, size // CHARS_PER_TOKEN))
        return Prompt(tuple(names), tuple(lengths))


NO_PROMPT = Prompt()


class RemoteModel:
    """A model of other servers, for one request. `servers`: in the order in which they are asked."""

    def __init__(self, name: str, servers: Sequence[tuple[Upstream, Reason]], prompt: Prompt) -> None:
        self.name, self.prompt = name, prompt
        self._servers = servers
        self.answered_by = servers[0][0].name

    async def whole(self, path: str, body: Mapping[str, Any]) -> Event:
        """Return the answer in one piece. Raises `UpstreamFailed`, `UpstreamRefused`."""
        for upstream, can_retry in self._attempts():
            try:
                return await upstream.whole(path, {**body, "model": self.name})
            except (UpstreamFailed, UpstreamRefused) as error:
                await self._failed(upstream, error, can_retry)
        raise AssertionError("the last attempt returns or raises")

    async def stream(self, path: str, body: Mapping[str, Any]) -> AsyncGenerator[list[Event], None]:
        """Yield the events of a streamed answer. What comes before its first part is held back until then, so that
        another server may still answer. Raises `UpstreamFailed`, `UpstreamRefused`.
        """
        for upstream, can_retry in self._attempts():
            held: list[Event] = []
            speaks = False
            uncached = max(0, self.prompt.num_tokens - upstream.prefixes.hit_tokens(self.prompt.names))
            try:
                async with aclosing(upstream.stream(path, {**body, "model": self.name}, uncached)) as batches:
                    async for events in batches:
                        speaks = speaks or any(map(says_something, events))
                        held += events
                        if speaks:
                            batch, held = held, []
                            yield batch
                if held:
                    yield held
                upstream.prefixes.add(self.prompt.names, self.prompt.lengths)
                return
            except (UpstreamFailed, UpstreamRefused) as error:
                await self._failed(upstream, error, can_retry and not speaks)

    async def stream_with_tools(
        self, path: str, body: Mapping[str, Any], without: Callable[[UpstreamRefused], Mapping[str, Any]]
    ) -> AsyncGenerator[list[Event], None]:
        """Yield as `stream`. A server that refuses the body is asked with the one that `without` returns."""
        try:
            async with aclosing(self.stream(path, body)) as batches:
                async for events in batches:
                    yield events
            return
        except UpstreamRefused as error:  # a refusal comes before all events
            refused = error
        next(each for each, _ in self._servers if each.name == self.answered_by).refused_tools(self.name, refused)
        async with aclosing(self.stream(path, without(refused))) as batches:
            async for events in batches:
                yield events

    def _attempts(self) -> list[tuple[Upstream, bool]]:
        """Return the servers to ask, each with whether another one follows."""
        return [(upstream, i + 1 < len(self._servers)) for i, (upstream, _) in enumerate(self._servers)]

    async def _failed(self, upstream: Upstream, error: UpstreamFailed | UpstreamRefused, can_retry: bool) -> None:
        """Return if the next server may be asked, else raise the error."""
        if isinstance(error, UpstreamRefused):
            if error.status != 404:  # another server would refuse it as well
                raise error
            upstream.lied(self.name)
            error = UpstreamFailed(f"{upstream.name} lists {self.name}, and does not have it.", error.why)
        elif isinstance(error, UpstreamUnavailable):
            upstream.failure = upstream.failure or error  # until the next look
        log.warning("upstream failed name=%s model=%s retry=%s error=%s", upstream.name, self.name, can_retry, error)
        if not can_retry:
            raise error
        upstream.stats.retried += 1
        following = self._servers[[each for each, _ in self._servers].index(upstream) + 1][0]
        following.stats.routed["retry"] += 1
        self.answered_by = following.name


class Upstreams:
    """The other servers. A `ModelServer` of their models; without any it serves none."""

    def __init__(self, settings: Settings) -> None:
        server = settings.server
        self.all = tuple(
            Upstream(each, server.upstream_api_key or "", server.upstream_timeout)
            for each in settings.upstreams.values()
        )
        self._router = Router(len(self.all) + 1)  # the last one is this process
        self._routed_here = 0
        self._num_open = 0
        self._looks: list[asyncio.Task[None]] = []

    def __bool__(self) -> bool:
        return bool(self.all)

    @property
    def num_open(self) -> int:
        return self._num_open

    async def start(self) -> None:
        """Begin to look at the servers. Called on the serving event loop."""

        async def look(upstream: Upstream) -> None:
            while True:
                await upstream.check()
                await asyncio.sleep(CHECK_EVERY_S)

        for upstream in self.all:
            upstream.open()
            self._looks.append(asyncio.create_task(look(upstream), name=f"upstream {upstream.name}"))

    async def close(self) -> None:
        """End the looks and the connections: requests that still run end with an error. Idempotent."""
        looks, self._looks = self._looks, []
        for look in looks:
            look.cancel()
        if looks:
            await asyncio.wait(looks)
        for upstream in self.all:
            await upstream.close()

    # Which models ----------------------------------------------------------------------------------------------

    def models(self) -> dict[str, tuple[RemoteFacts, list[Upstream]]]:
        """Return the models of servers that answer, by name, with the servers that have each."""
        found: dict[str, tuple[RemoteFacts, list[Upstream]]] = {}
        for upstream in self.all:
            for facts in upstream.models if upstream.is_up else ():
                if upstream.has(facts.name):
                    found.setdefault(facts.name, (facts, []))[1].append(upstream)
        return found

    def servers_of(self, name: str) -> tuple[str, ...]:
        """Return the names of the servers that have a model, of those that answer."""
        return tuple(each.name for each in self.models().get(name, (None, ()))[1])

    def context_of(self, name: str) -> int:
        """Return the context of a model in tokens; 0: no server says it."""
        facts = self.models().get(name, (None,))[0]
        return facts.context or 0 if facts is not None else 0

    def calls_tools(self, name: str) -> bool:
        """Return whether a model may be offered tools: not if each server that has it says no, or has refused them."""
        servers = self.models().get(name, (None, ()))[1]
        return not servers or any(each.calls_tools(name) for each in servers)

    def lists(self, name: str) -> bool:
        """Return whether a server listed this model when it answered last; it may be down now."""
        return any(upstream.lists(name) for upstream in self.all)

    async def looked(self) -> None:
        """Wait until each server was looked at once, at most `FIRST_CHECK_S`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FIRST_CHECK_S):
                for upstream in self.all:
                    await upstream.looked.wait()

    # Which server ----------------------------------------------------------------------------------------------

    async def acquire(
        self, name: str | None = None, task: Task = "generate", *, keep_alive_s: float | None = None
    ) -> Lease[RemoteModel]:
        """Return a lease on a model of another server. Without a name: the first model of the first server that
        answers. How long a model stays loaded is up to its server.

        Raises `ModelNotFound` if no server lists the model, `UpstreamUnavailable` if none of those that do answers.
        """
        await self.looked()
        name = name or next(iter(self.models()), None)
        if name is None or not self.lists(name):
            names = ", ".join(self.models()) or "none"
            raise ModelNotFound(f"No upstream has the model {name!r}.", f"Their models: {names}.", param="model")
        lease = self.choose(name, NO_PROMPT)
        assert lease is not None
        return lease

    def choose(
        self, name: str, prompt: Prompt, pinned: str = "", here: ReplicaLoad | None = None
    ) -> Lease[RemoteModel] | None:
        """Return a lease on a model that other servers list, or None if this process should answer. pinned: the only
        server that may answer. here: the load of this process, if it has the model, too.

        Raises `UpstreamUnavailable` if nothing that has the model answers, `InvalidParameter` for an unknown `pinned`.
        """
        servers = self._in_order(name, prompt, pinned, here)
        if not servers and (here is None or pinned not in ("", HERE)):
            raise self._none_answers(name)
        if not servers:
            return None

        def release() -> None:
            self._num_open -= 1

        self._num_open += 1
        return Lease(RemoteModel(name, servers, prompt), release)

    def _in_order(
        self, name: str, prompt: Prompt, pinned: str, here: ReplicaLoad | None = None
    ) -> list[tuple[Upstream, Reason]]:
        """Return the servers to ask, best first; none if this process is better than each."""
        if pinned == HERE and here is not None:
            return []
        if pinned and pinned not in {each.name for each in self.all}:
            known = ", ".join(each.name for each in self.all)
            raise InvalidParameter(
                f"There is no upstream {pinned!r}.", f"Known: {known}, {HERE}.", param="x-localllm-upstream"
            )
        # A server that was not asked yet is believed to be as fast as the fastest, so that it is asked.
        expected = max((each.prefill_tokens_per_s or 0.0 for each in self.all), default=0.0) or USUAL_TOKENS_PER_S
        loads = [
            (index, upstream.load(prompt.names, expected))
            for index, upstream in enumerate(self.all)
            if upstream.is_up and upstream.has(name) and pinned in ("", upstream.name)
        ]
        if here is not None and not pinned:
            loads.append((len(self.all), here))
        order = self._router.order(loads, prompt.num_tokens)
        if not order:
            return []
        best, reason = order[0]
        self._router.chosen(best)
        if best == len(self.all):
            self._routed_here += 1
            return []
        self.all[best].stats.routed["pinned" if pinned else reason] += 1
        return [(self.all[index], why) for index, why in order if index < len(self.all)]

    def _none_answers(self, name: str) -> UpstreamUnavailable:
        why = " ".join(
            str(each.failure) if each.failure is not None else f"{each.name} lists it, and refused it a moment ago."
            for each in self.all
            if each.lists(name)
        )
        return UpstreamUnavailable(f"No upstream that has {name} answers.", why, "Try again in a moment.")
