"""Embeddings in place of tokens: they go where the model's own would, and what is none is refused for what it is."""

import base64
import io
import os
import pickle
import random
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from localllm.errors import ContextTooLong, InvalidParameter
from localllm.models.inputs import GivenEmbeds
from localllm.models.loader import load_model
from localllm.models.prompt_embeds import PromptEmbedsReader
from localllm.models.read_spec import read_spec
from tests.models.harness import CPU, ModelHarness, Sequence, assert_close, prompt, reference

FAMILIES = ("llama", "gemma2", "gemma3", "granite", "gpt2", "bloom")
"""Scales inside and outside of the embedding, positions and norms after it."""
HIDDEN, MAX_LEN = 8, 50


# ---- where they go ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "implementation"),
    [
        *((family, "localllm") for family in FAMILIES),
        ("granite", "transformers"),
        ("granite_swa", "auto"),
    ],
)
def test_given_embeddings_stand_where_transformers_puts_them(
    family: str, implementation: str, tiny_model_path: Callable[[str], Path]
) -> None:
    path, tokens = tiny_model_path(family), prompt(40)
    model = reference(path)
    with torch.no_grad():
        rows = model.get_input_embeddings()(torch.tensor(tokens))
        rows[5:25] += torch.randn(20, rows.shape[1], generator=torch.Generator().manual_seed(1)) * rows.std()
        wanted = model(inputs_embeds=rows[None]).logits[0].float()
    spec = read_spec(path, model_impl=implementation)
    harness, sequence = ModelHarness(load_model(path, spec, CPU, torch.float32)), Sequence(tokens)
    logits = []
    for count in (9, 11, 20):  # the first chunk ends and the second begins among those that are given
        given = [place for place in range(sequence.computed, sequence.computed + count) if place < 30]
        make = harness._inputs

        def with_embeds(
            rows_: Any, all_logits: bool, make: Any = make, given: list[int] = given, first: int = sequence.computed
        ) -> Any:
            embeds = GivenEmbeds(torch.tensor(given) - first, rows[given]) if given else None
            return replace(make(rows_, all_logits), embeds=embeds)

        harness._inputs = with_embeds  # type: ignore[method-assign]
        logits += harness.step([(sequence, count)], all_logits=True)
        harness._inputs = make  # type: ignore[method-assign]
    assert_close(torch.cat(logits), wanted)


# ---- what is read ----------------------------------------------------------------------------------------------------


@pytest.fixture
def reader() -> PromptEmbedsReader:
    return PromptEmbedsReader(HIDDEN, torch.float16, MAX_LEN)


def saved(value: Any, **how: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer, **how)
    return buffer.getvalue()


ROWS = torch.arange(3 * HIDDEN).view(3, HIDDEN) / 7.0
READ: dict[str, Any] = {
    "float32": ROWS,
    "float16": ROWS.half(),
    "bfloat16": ROWS.bfloat16(),
    "one batch": ROWS[None],
    "part of a larger one": torch.cat((ROWS, ROWS))[3:],
    "transposed": ROWS.t().contiguous().t(),
    "a parameter": torch.nn.Parameter(ROWS),
    "wants a gradient": ROWS.clone().requires_grad_(),
}


@pytest.mark.parametrize("name", READ)
def test_every_dense_tensor_of_the_right_width_is_read(reader: PromptEmbedsReader, name: str) -> None:
    embeds = reader.of_base64(base64.b64encode(saved(READ[name])).decode())
    assert embeds.num_tokens == 3
    assert embeds.values.dtype == torch.float16
    assert not embeds.values.requires_grad
    assert torch.equal(embeds.values, READ[name].detach().half().view(3, HIDDEN))


def test_equal_embeddings_have_equal_digests_and_others_have_others(reader: PromptEmbedsReader) -> None:
    first = reader.of_tensor(ROWS)
    assert first.digest == reader.of_file(saved(ROWS[None])).digest
    others = [ROWS.flip(0), ROWS[:2], ROWS + 1, torch.zeros(2, HIDDEN), torch.zeros(3, HIDDEN)]
    assert len({first.digest, *(reader.of_tensor(other).digest for other in others)}) == 6


def zipped(records: dict[str, bytes], compression: int = zipfile.ZIP_STORED) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", compression) as archive:
        for name, content in records.items():
            archive.writestr(name, content)
    return file.getvalue()


def parts(raw: bytes) -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(raw)) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


class Runs:
    """A pickle that runs a command."""

    def __reduce__(self) -> Any:
        return os.system, ("touch /tmp/localllm-was-here",)


def claiming(count: int) -> bytes:
    """A file whose pickle speaks of more numbers than it brings."""
    whole = parts(saved(torch.zeros(count, HIDDEN)))
    return zipped({name: b"\0" * 64 if name.endswith("data/0") else content for name, content in whole.items()})


def sparse() -> Tensor:
    return torch.sparse_coo_tensor(torch.tensor([[0, 2]]), torch.ones(2, HIDDEN), (3, HIDDEN), check_invariants=True)


PLAIN = saved(ROWS)
REFUSED: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", "not a file written by torch.save"),
    "noise": (random.Random(1).randbytes(500), "not a file written by torch.save"),
    "an old format": (saved(ROWS, _use_new_zipfile_serialization=False), "not a file written by torch.save"),
    "cut": (PLAIN[:-30], "not a file written by torch.save"),
    "compressed": (zipped(parts(saved(torch.zeros(40, HIDDEN))), zipfile.ZIP_DEFLATED), "compressed"),
    "a plain zip": (zipped({"a/b": b"c"}), "one tensor"),
    "code": (zipped({"a/data.pkl": pickle.dumps(Runs(), 2), "a/data/0": b""}), "names posix system"),
    "code of today": (zipped({"a/data.pkl": pickle.dumps(Runs(), 4), "a/data/0": b""}), "dense tensor"),
    "no pickle": (zipped({"a/data.pkl": b"\xff" * 40, "a/data/0": b""}), "cannot be read"),
    "an endless pickle": (zipped({"a/data.pkl": b"(" * 100_000, "a/data/0": b""}), "description has 100000 bytes"),
    "a number": (zipped({"a/data.pkl": pickle.dumps(3, 2), "a/data/0": b""}), "dense tensor"),
    "a dictionary": (saved({"a": ROWS}), "dense tensor"),
    "two tensors": (saved([ROWS, ROWS.clone()]), "2 blocks of data"),
    "sparse": (saved(sparse()), "blocks of data"),
    "integers": (saved(torch.ones(3, HIDDEN, dtype=torch.int64)), "LongStorage"),
    "double": (saved(ROWS.double()), "DoubleStorage"),
    "more than it brings": (claiming(40), "damaged|cannot be read"),
    "far more than it brings": (claiming(100_000), "damaged|cannot be read"),
    "other bytes": (zipped({**parts(PLAIN), "archive/byteorder": b"big"}), "big-endian"),
    "too wide": (saved(torch.zeros(3, HIDDEN + 1)), r"shape is \[3, 9\]"),
    "one row": (saved(torch.zeros(HIDDEN)), r"shape is \[8\]"),
    "two batches": (saved(torch.zeros(2, 3, HIDDEN)), r"shape is \[2, 3, 8\]"),
    "no rows": (saved(torch.zeros(0, HIDDEN)), r"shape is \[0, 8\]"),
    "a scalar": (saved(torch.tensor(1.0)), r"shape is \[\]"),
    "NaN": (saved(ROWS.where(ROWS != 0, torch.nan)), "finite"),
    "infinity": (saved(ROWS.where(ROWS != 0, -torch.inf)), "finite"),
    "beyond float16": (saved(ROWS * 1e6), "to float16"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_anything_else_is_refused_for_what_it_is(reader: PromptEmbedsReader, name: str) -> None:
    raw, said = REFUSED[name]
    with pytest.raises(InvalidParameter, match=said) as caught:
        reader.of_file(raw)
    assert caught.value.param == "prompt_embeds"
    assert not Path("/tmp/localllm-was-here").exists()


def test_what_only_python_can_bring_is_refused_as_well(reader: PromptEmbedsReader) -> None:
    for value in (sparse(), ROWS.to("meta"), ROWS.tolist(), None, ROWS.int(), OrderedDict()):
        with pytest.raises(InvalidParameter):
            reader.of_tensor(value)
    with pytest.raises(InvalidParameter, match="not base64"):
        reader.of_base64("not base64!")
    with pytest.raises(InvalidParameter, match="not base64"):
        reader.of_base64("größe")


def test_too_many_are_refused_with_both_numbers_however_few_bytes_they_take(reader: PromptEmbedsReader) -> None:
    for tensor in (torch.zeros(MAX_LEN, HIDDEN), torch.zeros(1, HIDDEN).expand(10**12, HIDDEN)):
        for value, read in ((tensor, reader.of_tensor), (saved(tensor), reader.of_file)):
            with pytest.raises(ContextTooLong, match="50 tokens") as caught:
                read(value)  # type: ignore[operator]
            assert str(len(tensor)) in caught.value.why


def test_damaged_files_are_refused_or_read(reader: PromptEmbedsReader) -> None:
    dice = random.Random(3)
    for _ in range(300):
        damaged = bytearray(PLAIN)
        for _ in range(dice.randint(1, 8)):
            damaged[dice.randrange(len(damaged))] = dice.randrange(256)
        try:
            assert reader.of_file(bytes(damaged)).values.shape[1] == HIDDEN
        except (InvalidParameter, ContextTooLong):
            pass
