"""The records between a server and its ranks, and how they become bytes.

A record is a header and a payload in MessagePack with types. The server's records carry a sequence number without gaps,
so that every rank applies the same records in the same order; an answer carries the number of its record.
A record that is damaged, unknown or of another type raises `BadRecord`, which ends the rank.
Does not know: sockets, processes, what a record does.
"""

from __future__ import annotations

import struct
import zlib
from array import array
from collections.abc import Sequence
from enum import IntEnum
from functools import cache
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, NamedTuple, Self, TypeVar, cast

import msgspec
import numpy as np

from localllm.engine.media import Encode, MediaSpan
from localllm.engine.params import SamplingParams
from localllm.engine.step import HostBlocks, Move, NewSlot, Row, RunnerStats, StepPlan, StepResult, TokenMasks

if TYPE_CHECKING:
    from localllm.models.prompt_embeds import PromptEmbedsTensor

T = TypeVar("T")

HEADER = struct.Struct("<IIIIQ")  # magic, kind, bytes of the payload, their checksum, sequence number
_ORDER = struct.Struct("<IQ")  # what the checksum covers besides the payload
MAGIC = 0x314B4E52
MOST_BYTES = 2**31
"""Largest payload. Prompt embeddings of 128k tokens x 8192 numbers of 2 bytes just fit."""


class Kind(IntEnum):
    """The kinds of records, for a rank, and of answers, from 64 on."""

    CONNECT = 14  # meet the other ranks
    CHECK = 15  # compare the files of the checkpoint, on machines of their own
    OPEN = 1  # load this rank's share of a model
    OPEN_RUNNER = 2
    ALLOCATE = 3  # the memory plan made from every rank's MEASURED; without a payload: a rank has refused
    CLOSE_RUNNER = 4
    FORWARD = 5
    SAMPLE = 6
    IDLE = 7
    RESET = 8
    STATS = 9
    SLEEP = 10
    WAKE = 11
    ADAPTER = 12
    STOP = 13
    HELLO = 64  # the first answer of a rank, before any record
    REPORT = 65  # progress of a record that takes long
    MEASURED = 66
    RESULT = 67
    DONE = 68
    FAILED = 69
    LOG = 70
    BEAT = 71  # a sign of life with the line of the progress table, from another machine
    JOIN = 72  # of a rank on another machine, before HELLO: its introduction, answered with a refusal or ""


class BadRecord(Exception):
    """Bytes that are not a record of this version."""


class Header(NamedTuple):
    kind: Kind
    size: int  # bytes of the payload
    checksum: int
    seq: int


class Record(NamedTuple):
    """One record or answer."""

    kind: Kind
    seq: int
    payload: bytes


def encode_record(kind: Kind, seq: int, payload: bytes = b"") -> bytes:
    return HEADER.pack(MAGIC, kind, len(payload), _checksum(kind, seq, payload), seq) + payload


def decode_header(raw: bytes | bytearray | memoryview) -> Header:
    """Return the header at the beginning of `raw`. Raises `BadRecord`."""
    magic, kind, size, checksum, seq = HEADER.unpack_from(raw)
    if magic != MAGIC or size > MOST_BYTES:
        raise BadRecord(f"a record of this version begins otherwise: {bytes(raw[: HEADER.size]).hex()}")
    try:
        return Header(Kind(kind), size, checksum, seq)
    except ValueError as error:
        raise BadRecord(f"{kind} is not a kind of record") from error


def check_payload(header: Header, payload: bytes) -> Record:
    """Return the record. Raises `BadRecord` if the payload is not the one that was sent."""
    if _checksum(header.kind, header.seq, payload) != header.checksum:
        raise BadRecord(f"the {header.size} bytes of record {header.seq} ({header.kind.name}) are damaged")
    return Record(header.kind, header.seq, payload)


def _checksum(kind: Kind, seq: int, payload: bytes) -> int:
    """Return a checksum that also differs with the kind and the number."""
    return zlib.crc32(payload, zlib.crc32(_ORDER.pack(kind, seq)))


# ---- steps -----------------------------------------------------------------------------------------------------------


class Params(msgspec.Struct, frozen=True, array_like=True, omit_defaults=False):
    """The sampling parameters that a runner reads. Stop strings, formats and text stay in the server."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    repeat_last_n: int
    min_tokens: int
    logit_bias: dict[int, float] | None
    allowed_token_ids: tuple[int, ...] | None
    stop_token_ids: tuple[int, ...]
    ignore_eos: bool
    seed: int | None
    logprobs: int | None
    prompt_logprobs: int | None
    dry_multiplier: float
    dry_base: float
    dry_allowed_length: int
    dry_penalty_last_n: int
    top_n_sigma: float
    typical_p: float
    xtc_probability: float
    xtc_threshold: float
    dynatemp_range: float
    dynatemp_exponent: float
    mirostat: int
    mirostat_tau: float
    mirostat_eta: float


class Embeds(msgspec.Struct, frozen=True, array_like=True):
    """Prompt embeddings [tokens, hidden] as the bytes of their numbers."""

    num_tokens: int
    digest: str
    dtype: str
    values: bytes


class SentTensor(msgspec.Struct, frozen=True, array_like=True):
    """A tensor on the host as the bytes of its numbers."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    values: bytes

    @classmethod
    def of(cls, name: str, tensor: Any) -> Self:
        raw = tensor.contiguous().view(-1).view(_torch().uint8).numpy().tobytes()
        return cls(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), raw)

    @classmethod
    def of_ids(cls, name: str, token_ids: Sequence[int]) -> Self:
        return cls(name, "int64", (len(token_ids),), array("q", token_ids).tobytes())

    def tensor(self) -> Any:
        """Return the tensor. Raises `BadRecord` if its bytes do not fit its shape."""
        torch = _torch()
        try:
            return torch.frombuffer(bytearray(self.values), dtype=getattr(torch, self.dtype)).view(self.shape)
        except (AttributeError, RuntimeError, TypeError, ValueError) as error:
            raise BadRecord(f"{len(self.values)} bytes are not {self.shape} numbers of {self.dtype!r}") from error


class SentPicture(msgspec.Struct, frozen=True, array_like=True):
    """An `Encode`, which is its own `inputs` where it arrives."""

    digest: bytes
    rows: int
    tensors: tuple[SentTensor, ...]

    def pixels(self) -> dict[str, Any]:
        """Return the tensors that a tower reads. Raises `BadRecord`."""
        return {each.name: each.tensor() for each in self.tensors}


class SentSpan(msgspec.Struct, frozen=True, array_like=True):
    """A `MediaSpan`, whose pixels come with the step that encodes them."""

    start: int
    end: int
    places: tuple[int, ...] | None
    rows: int
    digest: bytes
    grid: tuple[int, int] | None
    both_ways: bool


class New(msgspec.Struct, frozen=True, array_like=True):
    """A `NewSlot`. `token_ids`, `prediction_token_ids`: int32."""

    slot: int
    request_id: str
    token_ids: bytes
    prompt_len: int
    params: Params
    block_ids: tuple[tuple[int, ...], ...]
    num_computed_tokens: int
    eos_token_ids: tuple[int, ...]
    bad_words_token_ids: tuple[tuple[int, ...], ...]
    adapter: int
    prompt_embeds: Embeds | None
    max_drafts: int
    prediction_token_ids: bytes
    dry_breakers: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
    media: tuple[SentSpan, ...] = ()
    source: bytes = b""


class SentMove(msgspec.Struct, frozen=True, array_like=True):
    """A `Move`. rows: the content of each block that is copied in; of one that is copied out it comes with `Answer`."""

    group: int
    blocks: tuple[int, ...]
    is_load: bool
    rows: tuple[bytes, ...]

    def as_move(self) -> Move:
        """Return the move. Raises `BadRecord` if contents are missing."""
        if self.is_load and len(self.rows) != len(self.blocks):
            raise BadRecord(f"{len(self.rows)} contents came for {len(self.blocks)} blocks")
        return Move(self.group, self.blocks, self.is_load, decode_blocks(self.rows))


class Plan(msgspec.Struct, frozen=True, array_like=True):
    """A `StepPlan`. Rows are sent as they are, with their request's id: leaving it out costs more than it saves."""

    step_id: int
    rows: tuple[Row, ...]
    new_slots: tuple[New, ...]
    freed_slots: tuple[int, ...]
    known_token_ids: tuple[tuple[int, tuple[int, ...]], ...]
    propose: int
    is_unmasked: bool
    dropped: tuple[bytes, ...] = ()
    encodes: tuple[SentPicture, ...] = ()
    moves: tuple[SentMove, ...] = ()


class Masks(msgspec.Struct, frozen=True, array_like=True):
    """`TokenMasks`: `bits` is int32 [rows, words]."""

    rows: tuple[int, ...]
    words: int
    bits: bytes
    places: tuple[int, ...]


class Sample(msgspec.Struct, frozen=True, array_like=True):
    """The order to sample the step that was forwarded last."""

    step_id: int
    masks: Masks | None


class Answer(msgspec.Struct, frozen=True, array_like=True):
    """The result of a step. stats: now and then, since reading them may wait for a device. moved: the content of the
    blocks that the step copied out, by move."""

    result: StepResult
    stats: RunnerStats | None
    moved: tuple[tuple[bytes, ...], ...] = ()


def encode(value: Any) -> bytes:
    return _ENCODER.encode(value)


def decode(payload: bytes, kind: type[T]) -> T:
    """Return a payload as a value of this type. Raises `BadRecord`."""
    try:
        decoded: T = _decoder(cast("Any", kind)).decode(payload)
        return decoded
    except (msgspec.DecodeError, ValueError, TypeError) as error:
        raise BadRecord(f"a {getattr(kind, '__name__', kind)} was expected: {error}") from error


_MAKING = Lock()
"""Held while a decoder is made: a type that two threads look into for the first time can end the process."""


@cache
def _decoder(kind: Any) -> Any:
    with _MAKING:
        return msgspec.msgpack.Decoder(kind, dec_hook=_from_plain)


def encode_plan(plan: StepPlan) -> bytes:
    news = tuple(map(_new, plan.new_slots))
    moves = tuple([
        SentMove(each.group, each.blocks, each.is_load, encode_blocks([each.host])[0] if each.is_load else ())
        for each in plan.moves
    ])  # fmt: skip
    sizes = plan.step_id, plan.rows, news, plan.freed_slots, plan.known_token_ids, plan.propose
    encodes = tuple([
        SentPicture(each.digest, each.rows, tuple([
            SentTensor.of(name, value) if hasattr(value, "dtype") else SentTensor.of_ids(name, value)
            for name, value in each.inputs.pixels().items() if hasattr(value, "dtype") or name == "token_ids"
        ]))
        for each in plan.encodes
    ])  # fmt: skip
    return encode(Plan(*sizes, plan.is_unmasked, plan.dropped, encodes, moves))


def decode_plan(payload: bytes) -> StepPlan:
    """Return the plan. Raises `BadRecord`."""
    try:
        plan = _PLANS.decode(payload)
        news = tuple(map(_new_slot, plan.new_slots))
        return StepPlan(
            plan.step_id, plan.rows, news, plan.freed_slots, plan.known_token_ids, plan.propose, plan.is_unmasked,
            dropped=plan.dropped,
            encodes=tuple([Encode(each.digest, each.rows, each) for each in plan.encodes]),
            moves=tuple([each.as_move() for each in plan.moves]),
        )  # fmt: skip
    except (msgspec.DecodeError, ValueError, TypeError) as error:
        raise BadRecord(f"a plan was expected: {error}") from error


def encode_blocks(hosts: Sequence[HostBlocks]) -> tuple[tuple[bytes, ...], ...]:
    """Return the content of blocks that were copied out, for `Answer.moved`. Waits for copies from a device."""
    return tuple([tuple([row.tobytes() for row in host.result()]) for host in hosts])


def decode_blocks(rows: Sequence[bytes]) -> HostBlocks:
    found = [np.frombuffer(row, np.uint8) for row in rows]
    return HostBlocks(lambda: found)


def encode_sample(plan: StepPlan, masks: TokenMasks | None = None) -> bytes:
    packed = None if masks is None else Masks(masks.rows, masks.bits.shape[1], masks.bits.tobytes(), masks.places)
    return encode(Sample(plan.step_id, packed))


def decode_sample(payload: bytes) -> tuple[int, TokenMasks | None]:
    """Return the step's id and its masks. Raises `BadRecord`."""
    sample = decode(payload, Sample)
    if sample.masks is None:
        return sample.step_id, None
    try:
        shape = len(sample.masks.rows), sample.masks.words
        bits = np.frombuffer(sample.masks.bits, np.int32).reshape(shape).copy()
    except ValueError as error:
        raise BadRecord(f"masks of {len(sample.masks.bits)} bytes do not fit their rows") from error
    return sample.step_id, TokenMasks(sample.masks.rows, bits, sample.masks.places)


def _new(new: NewSlot) -> New:
    return New(
        new.slot, new.request_id, array("i", new.token_ids).tobytes(), new.prompt_len, _params(new.params),
        new.block_ids, new.num_computed_tokens, new.eos_token_ids, new.bad_words_token_ids, new.adapter,
        None if new.prompt_embeds is None else _embeds(new.prompt_embeds),
        new.max_drafts, array("i", new.prediction_token_ids).tobytes(), new.dry_breakers,
        tuple([SentSpan(*[getattr(span, name) for name in SentSpan.__struct_fields__]) for span in new.media]),
        new.source,
    )  # fmt: skip


def _new_slot(new: New) -> NewSlot:
    return NewSlot(
        new.slot, new.request_id, _token_ids(new.token_ids), new.prompt_len, _sampling_params(new.params),
        new.block_ids, new.num_computed_tokens, new.eos_token_ids, new.bad_words_token_ids, new.adapter,
        None if new.prompt_embeds is None else _prompt_embeds(new.prompt_embeds),
        new.max_drafts, _token_ids(new.prediction_token_ids), new.dry_breakers,
        tuple([
            MediaSpan(each.start, each.end, each.places, each.rows, each.digest, each.grid, each.both_ways, _ELSEWHERE)
            for each in new.media
        ]),
        new.source,
    )  # fmt: skip


_ELSEWHERE = SentPicture(b"", 0, ())
"""The pixels of a span: they come with the step that encodes them."""


def _token_ids(raw: bytes) -> Sequence[int]:
    token_ids = array("i")
    token_ids.frombytes(raw)
    return token_ids


def _params(params: SamplingParams) -> Params:
    return Params(*[getattr(params, name) for name in Params.__struct_fields__])


def _sampling_params(params: Params) -> SamplingParams:
    """Return validated parameters. The seed of a choice of `n` may exceed the bound of one that a client may send."""
    values = {name: getattr(params, name) for name in params.__struct_fields__ if name != "seed"}
    checked = SamplingParams(**values, max_tokens=None)
    return checked if params.seed is None else checked.seeded(params.seed)


def _embeds(embeds: Any) -> Embeds:
    values = embeds.values
    raw = values.detach().cpu().contiguous().view(-1).view(_torch().uint8).numpy().tobytes()
    return Embeds(embeds.num_tokens, embeds.digest, str(values.dtype).removeprefix("torch."), raw)


def _prompt_embeds(embeds: Embeds) -> PromptEmbedsTensor:
    from localllm.models.prompt_embeds import TYPES, PromptEmbedsTensor

    dtypes = {name: dtype for dtype, name in TYPES.items()}
    if embeds.dtype not in dtypes or embeds.num_tokens < 1:
        raise BadRecord(f"prompt embeddings of {embeds.num_tokens} tokens and type {embeds.dtype!r}")
    try:
        flat = _torch().frombuffer(bytearray(embeds.values), dtype=dtypes[embeds.dtype])
        values = flat.view(embeds.num_tokens, -1)
    except (RuntimeError, ValueError) as error:
        raise BadRecord(f"prompt embeddings do not fit {embeds.num_tokens} tokens") from error
    return PromptEmbedsTensor(values, embeds.digest)


def _torch() -> Any:
    import torch

    return torch


# ---- values that MessagePack lacks -----------------------------------------------------------------------------------


def _to_plain(value: Any) -> Any:
    if isinstance(value, range):
        return (value.start, value.stop)
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, np.ndarray | np.generic | array):
        return value.tolist()
    raise NotImplementedError(f"{type(value).__name__} cannot be sent")


def _from_plain(kind: type, value: Any) -> Any:
    if kind is range:
        return range(*value)
    if issubclass(kind, Path):
        return Path(value)
    raise NotImplementedError(f"{kind} cannot be received")


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_to_plain)
_PLANS = msgspec.msgpack.Decoder(Plan)
