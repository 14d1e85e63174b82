"""What crosses between the server and an engine in a child process: frames on a socket, one per step.

    frame     length u32, kind u8, payload
    STEP      count u32, handles u32[count], token ids i32[count], then the other outputs in MessagePack

Nearly every output is one token of one request, so a step of 256 of them is two arrays of a kilobyte each. A *handle*
is a small number that stands for a request while it is open. What is rare (a build, its outcome, an error) is pickled:
both ends are this program, and nobody else can reach the socket.
Does not know: processes, asyncio, what is built.
"""

from __future__ import annotations

import pickle
import socket
import struct
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import IntEnum
from typing import Any

import msgspec

from localllm.engine.outputs import EngineOutput
from localllm.engine.params import SamplingParams
from localllm.engine.request import Request
from localllm.engine.stats import EngineStats
from localllm.errors import LocalLLMError

HEAD = struct.Struct("<IB")
COUNT = struct.Struct("<I")
READ_BYTES = 1 << 18


class Kind(IntEnum):
    """To the child, then from it."""

    BUILD = 1  # pickle: who builds, with which argument, log level
    START = 2
    SUBMIT = 3  # MessagePack: requests
    CANCEL = 4  # a request id
    STOP = 5

    PROGRESS = 16  # pickle: whatever the builder reports
    BUILT = 17  # pickle: what the builder tells about the engine
    FAILED = 18  # pickle: why there is no engine
    STATS = 19  # MessagePack: one EngineStats
    STEP = 20
    LOST = 21  # pickle: the device is gone and the engine with it
    LOG = 22  # pickle: logger, level, text
    ENDED = 23  # stopped as asked; nothing follows


def frame(kind: Kind, payload: bytes = b"") -> bytes:
    return HEAD.pack(len(payload), kind) + payload


def pickled(kind: Kind, value: object) -> bytes:
    return frame(kind, pickle.dumps(value))


class Frames:
    """Cuts what comes from a socket into frames."""

    def __init__(self) -> None:
        self._waiting = bytearray()

    def feed(self, data: bytes) -> Iterator[tuple[Kind, bytes]]:
        self._waiting += data
        begin, end = 0, len(self._waiting)
        while end - begin >= HEAD.size:
            length, kind = HEAD.unpack_from(self._waiting, begin)
            if end - begin - HEAD.size < length:
                break
            begin += HEAD.size
            payload = bytes(self._waiting[begin : begin + length])
            begin += length
            yield Kind(kind), payload
        del self._waiting[:begin]


def frames_of(connection: socket.socket) -> Iterator[tuple[Kind, bytes]]:
    """Frames as they come, blocking; ends when the other side is gone."""
    frames = Frames()
    while True:
        try:
            data = connection.recv(READ_BYTES)
        except ConnectionError:
            return
        if not data:
            return
        yield from frames.feed(data)


# Requests -----------------------------------------------------------------------------------------------------------


class _Asked(msgspec.Struct, array_like=True):
    """A `Request` before the scheduler has seen it."""

    handle: int
    request_id: str
    prompt: bytes  # int32
    params: SamplingParams
    max_output_tokens: int
    eos_token_ids: tuple[int, ...]
    bad_words_token_ids: tuple[tuple[int, ...], ...]
    priority: int
    cache_salt: str | None
    arrived_s: float


def _encode_error(value: object) -> bytes:
    if isinstance(value, LocalLLMError):
        return pickle.dumps(value.with_traceback(None))
    raise NotImplementedError(f"{type(value).__name__} does not cross")


def _decode_error(kind: type, value: Any) -> Any:
    assert kind is LocalLLMError
    return pickle.loads(value)


_encode = msgspec.msgpack.Encoder(enc_hook=_encode_error).encode
_decode_requests = msgspec.msgpack.Decoder(list[_Asked]).decode
_decode_outputs = msgspec.msgpack.Decoder(list[EngineOutput], dec_hook=_decode_error).decode
_decode_stats = msgspec.msgpack.Decoder(EngineStats).decode


def encode_requests(requests: Iterable[tuple[int, Request]]) -> bytes:
    """Requests with their handles."""
    return _encode([
        _Asked(
            handle,
            request.request_id,
            request.token_ids.tobytes(),
            request.params,
            request.max_output_tokens,
            request.eos_token_ids,
            request.bad_words_token_ids,
            request.priority,
            dict(request.cache_extras).get("salt"),
            request.arrived_s,
        )
        for handle, request in requests
    ])  # fmt: skip


def decode_requests(payload: bytes) -> list[tuple[int, Request]]:
    return [
        (
            asked.handle,
            Request(
                asked.request_id,
                array("i", asked.prompt),
                asked.params,
                max_output_tokens=asked.max_output_tokens,
                eos_token_ids=asked.eos_token_ids,
                bad_words_token_ids=asked.bad_words_token_ids,
                priority=asked.priority,
                cache_salt=asked.cache_salt,
                arrived_s=asked.arrived_s,
            ),
        )
        for asked in _decode_requests(payload)
    ]


# Outputs and stats --------------------------------------------------------------------------------------------------


def encode_outputs(outputs: Sequence[EngineOutput], handles: Mapping[str, int]) -> bytes:
    """One step's news."""
    named, token_ids, others = array("I"), array("i"), []
    for output in outputs:
        if _is_one_token(output):
            named.append(handles[output.request_id])
            token_ids.append(output.token_ids[0])
        else:
            others.append(output)
    rest = _encode(others) if others else b""
    return b"".join((COUNT.pack(len(named)), named.tobytes(), token_ids.tobytes(), rest))


def decode_outputs(payload: bytes, names: Mapping[int, str]) -> list[EngineOutput]:
    """`names`: request ids by handle. One-token news come first; a request is in a step once."""
    (count,) = COUNT.unpack_from(payload)
    middle, end = COUNT.size + 4 * count, COUNT.size + 8 * count
    handles, token_ids = array("I", payload[COUNT.size : middle]), array("i", payload[middle:end])
    outputs = [EngineOutput(names[handle], (token,)) for handle, token in zip(handles, token_ids, strict=True)]
    return outputs + _decode_outputs(payload[end:]) if len(payload) > end else outputs


def _is_one_token(output: EngineOutput) -> bool:
    return (
        output.finish_reason is None
        and len(output.token_ids) == 1
        and not output.logprobs
        and output.prompt_logprobs is None
    )


def encode_stats(stats: EngineStats) -> bytes:
    return _encode(stats)


def decode_stats(payload: bytes) -> EngineStats:
    return _decode_stats(payload)
