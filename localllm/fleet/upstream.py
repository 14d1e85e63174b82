"""Another server that speaks OpenAI's API: its models, its health, and requests to it.

Does not know: which of several servers is asked (upstreams.py), dialects, what an answer's events mean.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from localllm.config.upstreams import UpstreamConfig
from localllm.errors import EngineError, LocalLLMError, RequestError
from localllm.fleet.routing import MEMORY, USUAL_STEP_S, PrefixMemory, ReplicaLoad
from localllm.fleet.sse import BrokenAnswer, Event, read_events, read_whole
from localllm.units import format_seconds

if TYPE_CHECKING:
    import httpx

log = logging.getLogger(__name__)

CONNECT_S = 5.0
CHECK_S = 5.0
"""Longest time for the list of models, which is also the sign of health."""
MOST_MODELS, LONGEST_NAME = 1000, 300
MOST_ERROR_CHARS = 400
LIED_S = 60.0
"""For this long a model is not asked for again where the server listed it and then did not have it."""
FORWARDED = "x-localllm-forwarded"
"""Header of requests that one server passes to another, which answers them itself: no request runs in circles."""
SLOTS = 8
"""Requests that an upstream is assumed to run at a time; none says how many it does."""
SAID = ("content", "text", "reasoning_content", "reasoning", "tool_calls")
"""Fields of a piece of an answer, in chats and in completions."""


class UpstreamFailed(EngineError):
    """Another server could not be reached, broke its answer off, or sent what is not an answer."""

    status, code = 502, "upstream_failed"


class UpstreamUnavailable(UpstreamFailed):
    """No server that has the model can answer at the moment."""

    status, code, type = 503, "upstream_unavailable", "unavailable_error"
    retry_after_s = 5


class UpstreamRefused(RequestError):
    """Another server refused the request; the status and the words are that server's."""

    code = "upstream_refused"


@dataclass(frozen=True, slots=True)
class RemoteFacts:
    """One model in the list of another server."""

    name: str
    context: int | None = None  # tokens; None: the server does not say
    calls_tools: bool = True  # False: the server says that the model cannot


@dataclass(slots=True)
class UpstreamStats:
    """Counts of one upstream since the start."""

    requests: Counter[str] = field(default_factory=Counter)  # by outcome: ok, refused, failed, cancelled
    routed: Counter[str] = field(default_factory=Counter)  # by what decided: prefix, load, tie, pinned, retry
    retried: int = 0  # requests that failed here and were sent elsewhere
    completion_tokens: int = 0  # as the server counts, else one for each event
    ttft_s: float = 0.0  # sum over `first_tokens` answers
    first_tokens: int = 0
    failed_checks: int = 0


class Upstream:
    """One other server. All methods are called on the event loop."""

    def __init__(self, config: UpstreamConfig, api_key: str, timeout_s: float) -> None:
        self.config, self.name, self._timeout_s = config, config.name, timeout_s
        self._key = config.api_key or api_key
        self.models: tuple[RemoteFacts, ...] = ()  # from the last list that was read
        self.failure: LocalLLMError | None = UpstreamUnavailable(f"{self.name} has not been asked yet.")
        self.checked_s = -1.0  # time.time() of the last answered check; below 0: never
        self.looked = asyncio.Event()  # the list of models was asked for once
        self.num_open = 0
        self.stats = UpstreamStats()
        self.prefixes = PrefixMemory()
        self._queued_tokens = 0  # of requests without a first token
        self.prefill_tokens_per_s: float | None = None  # running mean; None: not measured yet
        self._step_s = USUAL_STEP_S
        self._lied: dict[str, float] = {}  # by model: until when it is not asked for
        self._refused_tools = set[str]()  # models that were asked with tools, and refused them
        self._client: httpx.AsyncClient | None = None

    # Health -----------------------------------------------------------------------------------------------------

    @property
    def is_up(self) -> bool:
        return self.failure is None

    def has(self, model: str) -> bool:
        """Return whether a request for this model may be sent."""
        return self.lists(model) and time.monotonic() >= self._lied.get(model, 0.0)

    def lists(self, model: str) -> bool:
        """Return whether the server listed this model when it answered last; it may be down now."""
        return any(each.name == model for each in self.models)

    def calls_tools(self, model: str) -> bool:
        """Return whether the model may be offered tools: not if the server says no, or has refused them."""
        return model not in self._refused_tools and all(each.calls_tools for each in self.models if each.name == model)

    async def check(self) -> None:
        """Read the list of models; note the failure if there is none. Raises nothing."""
        try:
            listed = await self._list()
            self.looked.set()
        except LocalLLMError as error:
            self.looked.set()
            if self.is_up or not self.stats.failed_checks:
                log.warning("upstream down name=%s error=%s", self.name, error)
            self.stats.failed_checks += 1
            self.failure = error
            return
        if self.failure is not None:
            log.info("upstream up name=%s url=%s models=%d", self.name, self.config.url, len(listed))
            self.prefixes.clear()  # a server that was restarted has no cache
            self._refused_tools.clear()
        wanted = self.config.models
        self.models = tuple(each for each in listed if not wanted or each.name in wanted)
        self.failure, self.checked_s = None, time.time()

    async def _list(self) -> list[RemoteFacts]:
        try:
            async with asyncio.timeout(2 * CHECK_S), self._answer("GET", "/models", None, CHECK_S) as response:
                found = await read_whole(response.aiter_raw())
        except TimeoutError:
            raise UpstreamFailed(f"{self.name} does not finish its list of models.") from None
        data = found.get("data")
        if not isinstance(data, list):
            raise UpstreamFailed(f"{self.name} sent a list of models that is not one.", "It has no array `data`.")
        facts = [_facts(each) for each in data[:MOST_MODELS]]
        return [each for each in facts if each is not None]

    def lied(self, model: str) -> None:
        """Note that the server listed a model and refuses it as unknown."""
        log.warning("upstream listed a model that it does not have name=%s model=%s", self.name, model)
        self._lied[model] = time.monotonic() + LIED_S

    def refused_tools(self, model: str, error: UpstreamRefused) -> None:
        """Note a refusal of a request with tools, if its words say that they are why."""
        if "tool" in str(error).lower():
            self._refused_tools.add(model)

    # Load -------------------------------------------------------------------------------------------------------

    def load(self, names: Sequence[bytes], expected_rate: float) -> ReplicaLoad:
        """Return what the server has to do, as far as requests of this one tell. names: of the prompt's prefixes.
        expected_rate: of prefill, until this server's own is measured."""
        return ReplicaLoad(
            hit_tokens=self.prefixes.hit_tokens(names),
            queued_tokens=self._queued_tokens,
            prefill_tokens_per_s=self.prefill_tokens_per_s or expected_rate,
            running=self.num_open,
            max_running=SLOTS,
            step_s=self._step_s,
            full_step_s=2 * self._step_s,
            weight=self.config.weight,
        )

    # Requests ---------------------------------------------------------------------------------------------------

    async def whole(self, path: str, body: Mapping[str, Any]) -> Event:
        """Return the answer in one piece. Raises `UpstreamFailed`, `UpstreamRefused`."""
        with self.counted():
            async with self._answer("POST", path, body, self._timeout_s) as response:
                answer = await read_whole(response.aiter_raw())
            _raise_error(self.name, answer)
        self._count_tokens(answer.get("usage"), 0)
        return answer

    async def stream(
        self, path: str, body: Mapping[str, Any], num_tokens: int = 0
    ) -> AsyncGenerator[list[Event], None]:
        """Yield the events of a streamed answer as they arrive. num_tokens: of the prompt that are not cached, about.

        Raises `UpstreamFailed`, also for an answer that ends before its last event, and `UpstreamRefused`.
        """
        self._queued_tokens += num_tokens
        waits = True
        began_s, first_s, num_said = time.monotonic(), 0.0, 0
        usage: Any = None
        try:
            with self.counted():
                async with self._answer("POST", path, body, self._timeout_s) as response:
                    kind = response.headers.get("content-type", "")
                    if "text/event-stream" not in kind:
                        raise UpstreamFailed(
                            f"{self.name} did not stream its answer.", f"Its content type is {kind or 'missing'!r}."
                        )
                    is_over = False
                    async with aclosing(read_events(response.aiter_raw(), self._timeout_s)) as batches:
                        async for arrived in batches:
                            sound = list(takewhile(_is_sound, arrived))
                            for event in sound:
                                usage = event.get("usage") or usage
                                is_over = is_over or any(each.get("finish_reason") for each in _choices(event))
                            said = sum(map(says_something, sound))
                            num_said += said
                            if said and waits:
                                self._queued_tokens -= num_tokens
                                waits, first_s = False, time.monotonic()
                                self._note_first(num_tokens, first_s - began_s)
                            if sound:
                                yield sound
                            for event in arrived[len(sound) :]:
                                _raise_error(self.name, event)
                if not is_over:
                    raise UpstreamFailed(f"{self.name} ended its answer too early.", "No choice has a finish_reason.")
        finally:
            if waits:
                self._queued_tokens -= num_tokens
        self._count_tokens(usage, num_said)
        if num_said > 1:
            self._step_s += MEMORY * ((time.monotonic() - first_s) / (num_said - 1) - self._step_s)

    def _note_first(self, num_tokens: int, ttft_s: float) -> None:
        self.stats.ttft_s += ttft_s
        self.stats.first_tokens += 1
        if num_tokens > 100:  # a short prompt's time is that of the network and of one step
            rate = num_tokens / max(ttft_s, 1e-3)
            before = self.prefill_tokens_per_s or rate
            self.prefill_tokens_per_s = before + MEMORY * (rate - before)

    def _count_tokens(self, usage: object, otherwise: int) -> None:
        said = usage.get("completion_tokens") if isinstance(usage, dict) else None
        self.stats.completion_tokens += said if isinstance(said, int) and 0 <= said < 2**31 else otherwise

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count one request: open while the context lasts, then by its outcome."""
        self.num_open += 1
        outcome = "cancelled"
        try:
            yield
            outcome = "ok"
        except UpstreamRefused:
            outcome = "refused"
            raise
        except Exception:
            outcome = "failed"
            raise
        finally:
            self.num_open -= 1
            self.stats.requests[outcome] += 1

    def open(self) -> None:
        """Create the HTTP client. It reads no proxy and no credentials from the environment."""
        import httpx

        logging.getLogger("httpx").setLevel(logging.WARNING)  # it would log each look at each server
        headers = {"accept-encoding": "identity", FORWARDED: "1"}
        if self._key:
            headers["authorization"] = f"Bearer {self._key}"
        self._client = httpx.AsyncClient(
            headers=headers,
            timeout=httpx.Timeout(CONNECT_S, read=None, write=60.0, pool=CONNECT_S),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=32),
            trust_env=False,
        )

    async def close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            await client.aclose()

    @asynccontextmanager
    async def _answer(
        self, method: str, path: str, body: Mapping[str, Any] | None, timeout_s: float
    ) -> AsyncGenerator[httpx.Response, None]:
        """Send a request; a context with the response, whose status is 200. Raises `UpstreamFailed`,
        `UpstreamRefused`."""
        import httpx
        import msgspec

        if self._client is None:
            raise UpstreamUnavailable(f"{self.name} is not asked any more.", "The server is shutting down.")
        content = None if body is None else msgspec.json.encode(body)
        kind = {} if body is None else {"content-type": "application/json"}
        request = self._client.build_request(method, self.config.url + path, content=content, headers=kind)
        request.extensions["timeout"]["read"] = timeout_s
        try:
            response = await self._client.send(request, stream=True)
        except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
            raise _unreachable(self.name, self.config.url, error, timeout_s) from error
        try:
            if response.headers.get("content-encoding", "identity") != "identity":
                raise UpstreamFailed(f"{self.name} compressed its answer.", "That was not asked for.")
            if response.status_code != 200:
                raise await self._refusal(response)
            yield response
        except BrokenAnswer as error:
            raise UpstreamFailed(f"{self.name} sent a broken answer.", str(error)) from None
        except (httpx.HTTPError, httpx.StreamError, OSError) as error:
            raise _unreachable(self.name, self.config.url, error, timeout_s) from error
        finally:
            await response.aclose()

    async def _refusal(self, response: httpx.Response) -> LocalLLMError:
        """Return the error for a status other than 200, with the server's own words."""
        status = response.status_code
        try:
            body = await read_whole(response.aiter_raw())
        except BrokenAnswer:
            body = {}
        words = _words_of(body) or f"{response.reason_phrase}."
        if status in (401, 403):  # the key is this server's, not the client's
            why = f"It answered {status}: {words}"
            return UpstreamFailed(f"{self.name} does not accept this server's key.", why, "--upstream-api-key KEY")
        if 400 <= status < 500 and status not in (408, 429):
            refused = UpstreamRefused(f"{self.name} refused the request.", words)
            refused.status = status
            problem = body.get("error")
            code, param = (problem.get("code"), problem.get("param")) if isinstance(problem, dict) else (None, None)
            refused.code = code if isinstance(code, str) else refused.code
            refused.param = param if isinstance(param, str) else None
            return refused
        kind = UpstreamUnavailable if status in (429, 503) else UpstreamFailed
        return kind(f"{self.name} could not answer.", f"It answered {status}: {words}")


def says_something(event: Event) -> bool:
    """Return whether an event has a part of the answer. The first event of most servers has only a role."""
    deltas = [each["delta"] if isinstance(each.get("delta"), dict) else each for each in _choices(event)]
    return any(delta.get(name) for delta in deltas for name in SAID)


def _choices(event: Event) -> list[Mapping[str, Any]]:
    choices = event.get("choices")
    return [each for each in choices if isinstance(each, dict)] if isinstance(choices, list) else []


def _facts(given: Any) -> RemoteFacts | None:
    """Return a model of a list; None for what cannot be named in a request."""
    name = given.get("id") if isinstance(given, dict) else None
    if not isinstance(name, str) or not name.isprintable() or not 0 < len(name) <= LONGEST_NAME:
        return None
    meta = given.get("meta")
    sizes = [given.get("max_model_len"), given.get("context_length"), given.get("context_window")]
    sizes += [meta.get("n_ctx"), meta.get("n_ctx_train")] if isinstance(meta, dict) else []
    abilities = given.get("capabilities")
    lists_abilities = isinstance(abilities, list) and "completion" in abilities
    return RemoteFacts(
        name,
        next((each for each in sizes if type(each) is int and 0 < each < 2**31), None),
        calls_tools=not lists_abilities or "tools" in abilities,
    )


def _is_sound(event: Event) -> bool:
    """Return whether an event is a part of the answer, and not an error in its place."""
    return not event.get("error") or "choices" in event


def _raise_error(name: str, event: Event) -> None:
    if not _is_sound(event):
        raise UpstreamFailed(f"{name} could not finish its answer.", _words_of(event) or "It does not say why.")


def _words_of(body: Event) -> str:
    """Return the message of an error body in any of the usual forms, on one line."""
    problem = body.get("error", body)
    said = problem.get("message") if isinstance(problem, dict) else problem
    words: object = said if isinstance(said, str) else body.get("detail")
    text = words if isinstance(words, str) else ""
    text = " ".join("".join(each if each.isprintable() else " " for each in text).split())
    return text if len(text) <= MOST_ERROR_CHARS else f"{text[:MOST_ERROR_CHARS]}…"


def _unreachable(name: str, url: str, error: Exception, timeout_s: float) -> UpstreamFailed:
    """Return an error of the connection in words."""
    import httpx

    if isinstance(error, httpx.ReadTimeout):
        return UpstreamFailed(f"{name} does not answer.", f"It sent nothing for {format_seconds(timeout_s)}.")
    if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout | httpx.PoolTimeout):
        why = (
            "It did not answer in time" if isinstance(error, httpx.TimeoutException) else str(error) or "no connection"
        )
        return UpstreamUnavailable(f"{name} cannot be reached.", f"{url}: {why}.")
    return UpstreamFailed(f"{name} broke off its answer.", f"{type(error).__name__}: {error}.")
