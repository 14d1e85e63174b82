"""Inputs of a request's encoder, and the ones that are held encoded: pictures and sounds, with the places that they
take in the prompt, or the prompt of an encoder-decoder as a whole, the source of its answer.

Sounds are treated as pictures are: what is said of pictures here holds for both. A picture's rows are made in a step,
before the forward pass that reads them. The scheduler decides when, and which rows stay; the rows themselves are the
runner's (runner/pictures.py).
Does not know: torch, pixels, what a row is made of.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, Literal, NamedTuple, Protocol

from localllm.errors import InvalidParameter

DIGEST_BYTES = 16


class MediaInputs(Protocol):
    """The tensors that a tower reads to make the rows of one picture."""

    def pixels(self) -> Mapping[str, Any]: ...


class Picture(MediaInputs, Protocol):
    """A picture before its places in a prompt are known (models/vision/processor.py)."""

    @property
    def rows(self) -> int: ...
    @property
    def grid(self) -> tuple[int, int] | None: ...
    @property
    def both_ways(self) -> bool: ...
    @property
    def digest(self) -> bytes: ...


@dataclass(frozen=True, slots=True)
class MediaSpan:
    """The places [start, end) of a prompt that one picture takes, and what becomes of them."""

    start: int
    end: int
    places: tuple[int, ...] | None  # offsets from `start` that take a row, ascending; None: all
    rows: int
    digest: bytes  # 16; of the picture, what was asked of its processor, and the cache salt
    grid: tuple[int, int] | None  # rows and columns of tokens; None: positions are plain
    both_ways: bool  # tokens of the picture attend to all of it, so it is computed in one step
    inputs: MediaInputs


def spans_of(
    token_ids: Sequence[int], placeholder_id: int, pictures: Sequence[Picture], salt: str | None = None,
    kind: str = "picture",
) -> tuple[MediaSpan, ...]:  # fmt: skip
    """Return the span of each picture: in order, each takes its number of the placeholders. Raises `InvalidParameter`
    if there are more or fewer placeholders than rows. kind: picture or sound, for the error."""
    found = [place for place, token in enumerate(token_ids) if token == placeholder_id]
    rows = sum(picture.rows for picture in pictures)
    if len(found) != rows:
        raise InvalidParameter(
            f"The prompt has {len(found)} {kind} tokens; its {kind}s have {rows}.",
            f"Each {kind} needs its mark exactly once.",
            f"Leave marks of {kind}s out of the text.",
            param="messages",
        )
    key = blake2b((salt or "").encode(), digest_size=32).digest()
    spans, first = list[MediaSpan](), 0
    for picture in pictures:
        places = found[first : first + picture.rows]
        first += picture.rows
        start, end = places[0], places[-1] + 1
        holes = None if end - start == picture.rows else tuple(place - start for place in places)
        digest = blake2b(picture.digest, key=key, digest_size=DIGEST_BYTES).digest()
        spans.append(MediaSpan(start, end, holes, picture.rows, digest, picture.grid, picture.both_ways, picture))
    return tuple(spans)


@dataclass(frozen=True, slots=True)
class EncoderPrompt:
    """The prompt of an encoder-decoder. Each token of the answer attends to all of it, so it is held while its request
    runs."""

    token_ids: tuple[int, ...]
    digest: bytes
    rows: int  # that it takes: its tokens, in whole blocks
    forced_end: int | None = None  # the last token of an answer that reaches its limit; None: what the model draws

    @staticmethod
    def of(
        token_ids: Sequence[int], block_size: int, salt: str | None = None, forced_end: int | None = None
    ) -> EncoderPrompt:
        ids = array("i", token_ids)
        key = blake2b((salt or "").encode(), digest_size=32).digest()
        digest = blake2b(ids.tobytes(), key=key, digest_size=DIGEST_BYTES).digest()
        return EncoderPrompt(tuple(ids), digest, -(-len(ids) // block_size) * block_size, forced_end)

    @property
    def inputs(self) -> EncoderPrompt:
        return self

    def pixels(self) -> Mapping[str, Any]:
        """Return what the encoder reads, as `MediaInputs` names it."""
        return {"token_ids": self.token_ids}


class Encode(NamedTuple):
    """A picture or a source to encode in a step, before its forward pass."""

    digest: bytes
    rows: int
    inputs: MediaInputs


@dataclass(slots=True)
class _Held:
    rows: int
    holders: set[str] = field(default_factory=set)  # requests that still read the rows


class EncoderStore:
    """The pictures or sources that are held encoded, up to a number of rows. Those that no request reads any more stay
    until their room is needed, oldest first.

    A request that holds a picture can use up its rows without another one, and a request with a source needs no second
    one, so requests never wait for each other in a circle."""

    def __init__(self, capacity_rows: int) -> None:
        """capacity_rows: at least the rows of the largest picture or source."""
        self.capacity_rows = capacity_rows
        self._held: OrderedDict[bytes, _Held] = OrderedDict()
        self._of: dict[str, set[bytes]] = {}  # by request, so that its end costs no search
        self._encodes: dict[bytes, Encode] = {}  # of the next plan
        self._dropped: set[bytes] = set()

    @property
    def num_rows(self) -> int:
        return sum(each.rows for each in self._held.values())

    def ask(self, span: MediaSpan | EncoderPrompt) -> Literal["there", "encode", "full"]:
        """Return what `take` would, without a change."""
        if span.digest in self._held:
            return "there"
        free = self.capacity_rows - sum(each.rows for each in self._held.values() if each.holders)
        return "encode" if span.rows <= free else "full"

    def take(self, span: MediaSpan | EncoderPrompt, request_id: str) -> Literal["there", "encode", "full"]:
        """Hold a picture for a request. encode: it is new, and part of the next plan. full: its rows do not fit beside
        those that requests read, and nothing has changed."""
        answer, digest = self.ask(span), span.digest
        if answer == "full":
            return answer
        if answer == "encode":
            self._make_room(span.rows)
            self._held[digest] = _Held(span.rows)
            self._encodes[digest] = Encode(digest, span.rows, span.inputs)
        self._held.move_to_end(digest)
        self._held[digest].holders.add(request_id)
        self._of.setdefault(request_id, set()).add(digest)
        return answer

    def _make_room(self, rows: int) -> None:
        num_rows = self.num_rows
        for digest in [digest for digest, each in self._held.items() if not each.holders]:
            if num_rows + rows <= self.capacity_rows:
                return
            num_rows -= self._held.pop(digest).rows
            if self._encodes.pop(digest, None) is None:
                self._dropped.add(digest)

    def release(self, digest: bytes, request_id: str) -> None:
        """Let go of a picture; no change if the request does not hold it."""
        if digest in self._of.get(request_id, ()):
            self._of[request_id].discard(digest)
            self._held[digest].holders.discard(request_id)

    def release_all(self, request_id: str) -> None:
        """Let go of every picture of a request."""
        for digest in self._of.pop(request_id, ()):
            self._held[digest].holders.discard(request_id)

    def changes(self) -> tuple[tuple[bytes, ...], tuple[Encode, ...]]:
        """Return the pictures that were evicted, and those to encode, since the last call, for the next plan."""
        changes = tuple(sorted(self._dropped)), tuple(self._encodes.values())
        self._encodes, self._dropped = {}, set()
        return changes

    def clear(self) -> None:
        """Forget everything, as the runner does after a failed step."""
        self._held.clear()
        self._of.clear()
        self._encodes.clear()
        self._dropped.clear()

    def check_invariants(self, live: Collection[str]) -> None:
        """Assert that the rows fit, and that only requests of `live` hold some."""
        assert self.num_rows <= self.capacity_rows, (self.num_rows, self.capacity_rows)
        holders = {request for each in self._held.values() for request in each.holders}
        assert holders <= set(live), holders - set(live)
        assert holders == {request for request, digests in self._of.items() if digests}
