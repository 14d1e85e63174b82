"""Records: what is sent is what arrives, and what is damaged ends the reader with an error."""

import socket
import threading
import time
from array import array
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from localllm.engine.media import Encode, EncoderPrompt, MediaSpan
from localllm.engine.params import SamplingParams
from localllm.engine.step import (
    HostBlocks,
    Move,
    NewSlot,
    Row,
    RowResult,
    RunnerStats,
    StateUse,
    StepPlan,
    StepResult,
    TokenLogprobs,
    TokenMasks,
)
from localllm.models.prompt_embeds import PromptEmbedsTensor
from localllm.ranks import wire
from localllm.ranks.channel import Channel
from localllm.ranks.wire import (
    HEADER,
    MAGIC,
    Answer,
    BadRecord,
    Kind,
    New,
    Params,
    Plan,
    Record,
    SentPicture,
    SentTensor,
    decode,
    decode_blocks,
    decode_plan,
    decode_sample,
    encode,
    encode_blocks,
    encode_plan,
    encode_record,
    encode_sample,
)  # fmt: skip
from tests.draws import draws

counts = st.integers(0, 2**31 - 1)
ids = st.lists(counts, max_size=4).map(tuple)
tables = st.lists(ids, min_size=1, max_size=3).map(tuple)  # block ids of each KV group
uses = st.none() | st.builds(StateUse, st.integers(-1, 9), counts, counts)
rows = st.builds(Row, counts, st.text(max_size=8), counts, counts, tables, st.booleans(), ids, uses, counts, counts)
params = st.builds(
    SamplingParams, temperature=st.floats(0, 2), top_k=st.integers(0, 9),
    seed=st.none() | st.integers(-(2**63), 2**63 - 1),
    logit_bias=st.none() | st.dictionaries(counts, st.floats(-100, 100), max_size=3),
    allowed_token_ids=st.none() | st.lists(counts, min_size=1, max_size=3), stop_token_ids=ids,
    logprobs=st.none() | st.integers(-1, 20), min_tokens=st.integers(0, 99), max_tokens=st.none(),
)  # fmt: skip
news = st.builds(
    NewSlot, counts, st.text(max_size=8), st.lists(counts, max_size=9).map(lambda x: array("i", x)), counts, params,
    tables, counts, ids, st.lists(ids, max_size=2).map(tuple), st.integers(-1, 9), st.none(), counts,
    st.lists(counts, max_size=9).map(lambda x: array("i", x)), source=st.binary(max_size=4),
)  # fmt: skip
plans = st.builds(
    StepPlan, counts, st.lists(rows, max_size=5).map(tuple), st.lists(news, max_size=2).map(tuple), ids,
    st.lists(st.tuples(counts, ids), max_size=2).map(tuple), counts,
)  # fmt: skip


def test_records_have_every_field_of_a_plan() -> None:
    here = {"gives_way"}  # of models in the server's process alone
    for record, plain in ((Plan, StepPlan), (New, NewSlot)):
        assert record.__struct_fields__ == tuple(field.name for field in fields(plain) if field.name not in here)
    assert set(Params.__struct_fields__) < {field.name for field in fields(SamplingParams)}


@given(plans)
@draws(20)
def test_a_plan_arrives_as_it_was_sent(plan: StepPlan) -> None:
    assert decode_plan(encode_plan(plan)) == plan


def test_the_prompt_of_an_encoder_arrives() -> None:
    read = EncoderPrompt.of([5, 70_000, 9], 8)
    plan = StepPlan(1, (), (), encodes=(Encode(read.digest, read.rows, read.inputs),))
    (arrived,) = decode_plan(encode_plan(plan)).encodes
    assert (arrived.digest, arrived.rows) == (read.digest, read.rows)
    assert arrived.inputs.pixels()["token_ids"].tolist() == [5, 70_000, 9]


def test_a_child_of_n_may_have_a_seed_that_no_request_may_bring() -> None:
    child = SamplingParams(seed=2**63 - 1, n=8).child(7)
    plan = StepPlan(1, (), (NewSlot(0, "a", [1], 1, child, (), 0),))
    assert decode_plan(encode_plan(plan)).new_slots[0].params.seed == 2**63 + 6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_prompt_embeddings_arrive_bit_for_bit(dtype: torch.dtype) -> None:
    embeds = PromptEmbedsTensor(torch.randn(3, 5).to(dtype), "digest")
    new = NewSlot(0, "a", [0, 0, 0], 3, SamplingParams(), (), 0, prompt_embeds=embeds)
    arrived = decode_plan(encode_plan(StepPlan(1, (), (new,)))).new_slots[0].prompt_embeds
    assert isinstance(arrived, PromptEmbedsTensor)
    assert arrived.digest == "digest"
    assert torch.equal(arrived.values, embeds.values)


def test_blocks_arrive_as_they_were_sent() -> None:
    rows = [np.arange(12, dtype=np.uint8), np.arange(12, 24, dtype=np.uint8)]
    moves = (Move(0, (3, 5), True, HostBlocks(lambda: rows)), Move(1, (7,), False, HostBlocks(list)))
    loads, leaves = decode_plan(encode_plan(StepPlan(1, (), moves=moves))).moves
    assert (loads[:3], leaves[:3]) == ((0, (3, 5), True), (1, (7,), False))
    assert [row.tolist() for row in loads.host.result()] == [row.tolist() for row in rows]
    [sent] = encode_blocks([loads.host])
    assert [row.tolist() for row in decode_blocks(sent).result()] == [row.tolist() for row in rows]


def test_a_load_with_too_few_contents_is_refused() -> None:
    move = Move(0, (3, 5), True, HostBlocks(lambda: [np.zeros(4, np.uint8)]))
    with pytest.raises(BadRecord, match="1 contents came for 2 blocks"):
        decode_plan(encode_plan(StepPlan(1, (), moves=(move,))))


def test_masks_arrive_as_they_were_sent() -> None:
    masks = TokenMasks((0, 2), np.arange(6, dtype=np.int32).reshape(2, 3) - 3, (1, 0))
    step_id, arrived = decode_sample(encode_sample(StepPlan(7, ()), masks))
    assert step_id == 7
    assert arrived is not None
    assert (arrived.rows, arrived.places) == ((0, 2), (1, 0))
    assert np.array_equal(arrived.bits, masks.bits)


def test_a_result_arrives_with_logprobs_from_arrays() -> None:
    scores = TokenLogprobs(np.array([4, 5]), np.array([-0.5, -1.5]), 1)
    result = StepResult(3, (RowResult((4,), (scores,)), RowResult(error="NaN", fault="model")))
    arrived = decode(encode(Answer(result, RunnerStats(1, 2))), Answer)
    assert arrived.stats == RunnerStats(1, 2)
    assert arrived.result.rows[0].logprobs == (TokenLogprobs([4, 5], [-0.5, -1.5], 1),)
    assert arrived.result.rows[1] == result.rows[1]


# ---- damage ----------------------------------------------------------------------------------------------------------


def read_back(raw: bytes) -> list[Record]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(raw)
        ours.shutdown(socket.SHUT_WR)
        return list(Channel(theirs).records())


@pytest.mark.parametrize("chunk", [1, 7, 1000])
def test_records_are_whole_whatever_arrives_at_once(chunk: int) -> None:
    raw = encode_record(Kind.FORWARD, 1, b"x" * 100) + encode_record(Kind.STOP, 2)
    channel = Channel(socket.socket())
    with channel.socket:
        found = [record for i in range(0, len(raw), chunk) for record in channel._taken(raw[i : i + chunk])]
    assert found == [Record(Kind.FORWARD, 1, b"x" * 100), Record(Kind.STOP, 2, b"")]


@given(st.data())
@draws(60)
def test_a_changed_byte_never_gives_another_record(data: st.DataObject) -> None:
    plan = StepPlan(5, (Row(1, "a", 3, 1, ((9,),), True),), (), (2,))
    raw = bytearray(encode_record(Kind.FORWARD, 4, encode_plan(plan)))
    place = data.draw(st.integers(0, len(raw) - 1))
    raw[place] ^= data.draw(st.integers(1, 255))
    try:
        found = read_back(bytes(raw))
    except BadRecord:
        return
    assert not found  # the size has changed: the next record will be part of this one


@pytest.mark.parametrize(
    "raw",
    [b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", b"\x80\x04\x95" + b"x" * 40, HEADER.pack(MAGIC, 99, 0, 0, 1),
     HEADER.pack(MAGIC, Kind.FORWARD, 2**31 + 1, 0, 1), b"\0" * 64],
)  # fmt: skip
def test_other_bytes_are_not_a_record(raw: bytes) -> None:
    with pytest.raises(BadRecord):
        read_back(raw)


@pytest.mark.parametrize(
    "payload", [b"", b"\xc1", encode([1]), encode(["a", [], [], []]), encode([1, [[1, 2]], [], []])]
)
def test_another_type_is_not_a_plan(payload: bytes) -> None:
    with pytest.raises(BadRecord):
        decode_plan(payload)


def test_masks_of_another_size_are_refused() -> None:
    with pytest.raises(BadRecord):
        decode_sample(encode([1, [[0, 1], 3, b"12345678"]]))


def test_a_plan_with_pictures_arrives_as_it_was() -> None:
    """The places of pictures come with their request, the tensors with the step that encodes them."""
    tensors = {"pixel_values": torch.arange(6, dtype=torch.float32).view(2, 3), "grid": torch.tensor([[1, 2, 4]])}
    sent = SentPicture(b"d", 2, tuple(SentTensor.of(name, each) for name, each in tensors.items()))
    span = MediaSpan(1, 4, (0, 2), 2, b"d", (1, 2), True, sent)
    new = NewSlot(0, "a", [1, 9, 2, 9], 4, SamplingParams(max_tokens=None), (), 0, media=(span,))
    plan = StepPlan(3, (), (new,), dropped=(b"old",), encodes=(Encode(b"d", 2, sent),))
    arrived = decode_plan(encode_plan(plan))
    [seen], [encode] = arrived.new_slots[0].media, arrived.encodes
    assert (seen.start, seen.end, seen.places, seen.rows, seen.digest, seen.grid, seen.both_ways) == (
        1, 4, (0, 2), 2, b"d", (1, 2), True,
    )  # fmt: skip
    assert arrived.dropped == (b"old",)
    assert encode[:2] == (b"d", 2)
    pixels = encode.inputs.pixels()
    assert pixels.keys() == tensors.keys()
    assert all(torch.equal(pixels[name], each) for name, each in tensors.items())
    cut = SentTensor("pixel_values", "float32", (2, 3), b"1234")
    with pytest.raises(BadRecord, match="4 bytes are not"):
        cut.tensor()


def test_one_decoder_is_made_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads that look into a type for the first time have ended the process: the replicas of a server, at their
    first piece of idle work."""
    being_made, most = 0, 0

    def slow(*_: Any, **__: Any) -> Any:
        nonlocal being_made, most
        being_made += 1
        most = max(most, being_made)
        time.sleep(0.02)
        being_made -= 1
        return SimpleNamespace(decode=lambda payload: payload)

    class Unseen:
        pass

    monkeypatch.setattr(wire.msgspec.msgpack, "Decoder", slow)
    threads = [threading.Thread(target=wire.decode, args=(b"", Unseen)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 1
