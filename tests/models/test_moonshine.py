"""Moonshine's states, logits and greedy texts are transformers', alone and beside other windows, of both series."""

from __future__ import annotations

import json
from collections.abc import Generator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from localllm.errors import CorruptModel, UnsupportedModel
from localllm.kernels.cpu.native.library import native
from localllm.models.decoder import native_program
from localllm.models.encoders import moonshine
from localllm.models.encoders.moonshine import MoonshineModel, load_moonshine, states_of
from localllm.models.encoders.speech_rows import Read, SpeechRows
from localllm.models.encoders.transcriber import transcriber_sizes
from localllm.models.encoders.whisper import Decoding
from localllm.models.weights.parameters import held_bytes
from tests.media.sounds import sounds
from tests.models.harness import assert_close
from tests.models.operations import DefinedLibrary
from tests.models.speech_models import save_moonshine, written

GREEDY = Decoding(temperatures=(0.0,))
WINDOWS = (2.5, 0.02, 7.3, 30)


@pytest.fixture(scope="module", params=[False, True], ids=["moonshine", "streaming"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_moonshine(tmp_path_factory.mktemp("moonshine"), streaming=request.param)


@pytest.fixture(scope="module")
def model(folder: Path) -> MoonshineModel:
    return load_moonshine(folder, torch.device("cpu"), torch.float32)


@pytest.fixture(scope="module")
def reference(folder: Path) -> Any:
    from transformers import AutoModelForSpeechSeq2Seq

    return AutoModelForSpeechSeq2Seq.from_pretrained(folder, attn_implementation="eager").eval()


def inputs(reference: Any, window: np.ndarray) -> dict[str, torch.Tensor]:
    """Return what transformers reads of a window: padded to frames, with a mask, for the second series."""
    x = torch.from_numpy(window.astype(np.float32) / 32768)
    x = torch.cat((x, torch.zeros(max(0, moonshine.LEAST_SAMPLES - len(x)))))
    if not hasattr(reference.config, "encoder_config"):
        return {"input_values": x[None]}
    padded = torch.cat((x, torch.zeros(-len(x) % 80)))
    return {"input_values": padded[None], "attention_mask": (torch.arange(len(padded)) < len(x))[None]}


def logits_of(answer: list[int]) -> Generator[Read, torch.Tensor, torch.Tensor]:
    """Read an answer in a chunk, then token by token."""
    found = [(yield Read([answer[:7]], 0, range(7)))[0]]
    for place, token in enumerate(answer[7:], 7):
        found.append((yield Read([[token]], place))[0])
    return torch.cat(found)


@torch.inference_mode()
def test_logits_are_those_of_transformers(model: MoonshineModel, reference: Any) -> None:
    """Of windows side by side, through the native library where there is one."""
    windows = sounds(*WINDOWS)
    answers = [torch.arange(3 + row, 23 + row).tolist() for row in range(len(windows))]
    found = written(model, windows, [logits_of(answer) for answer in answers])
    for window, answer, logits in zip(windows, answers, found, strict=True):
        expected = reference(**inputs(reference, window), decoder_input_ids=torch.tensor([answer])).logits[0]
        assert_close(logits, expected)
        assert len(model.encode(window)) == states_of(reference.config, max(len(window), moonshine.LEAST_SAMPLES))
    assert len(model.encode(windows[-1])) == model.source_len


def greedy(reference: Any, window: np.ndarray) -> list[int]:
    ids = reference.generate(**inputs(reference, window), max_new_tokens=32, do_sample=False, num_beams=1)[0].tolist()
    return ids[1 : ids.index(2)] if 2 in ids else ids[1:]


def test_greedy_texts_are_those_of_transformers(model: MoonshineModel, reference: Any) -> None:
    windows = sounds(*WINDOWS)
    with patch.object(moonshine, "looped_tokens", lambda ids: 0), patch(
        "localllm.models.encoders.speech_rows.looped_tokens", lambda ids: 0
    ):  # fmt: skip
        for places in (4, 1):
            with patch.object(moonshine, "MOST_TOKENS_PER_S", 32.0), patch.object(model, "text_len", 33):
                found = written(model, windows, [model.write(each, GREEDY, len) for each in windows], places=places)
            for window, text in zip(windows, found, strict=True):
                ids = greedy(reference, window)
                assert [list(each.token_ids) for each in text.segments] == ([ids] if ids else [])
                assert all((each.start_s, each.stop_s) == (0, len(window) / 16_000) for each in text.segments)


def test_beams_are_those_of_transformers(model: MoonshineModel, reference: Any) -> None:
    windows, asked = sounds(*WINDOWS), GREEDY._replace(beams=3)
    with patch("localllm.models.encoders.speech_rows.looped_tokens", lambda ids: 0), patch.object(
        moonshine, "looped_tokens", lambda ids: 0
    ), patch.object(moonshine, "MOST_TOKENS_PER_S", 12.0), patch.object(model, "text_len", 13):  # fmt: skip
        found = written(model, windows, [model.write(each, asked, len) for each in windows], beams=3)
    for window, text in zip(windows, found, strict=True):
        ids = reference.generate(
            **inputs(reference, window), max_new_tokens=12, num_beams=3, early_stopping=True, do_sample=False
        )[0].tolist()  # fmt: skip
        ids = ids[1 : ids.index(2)] if 2 in ids else ids[1:]
        assert [list(each.token_ids) for each in text.segments] == ([ids] if ids else [])


def test_native_steps_are_torchs(model: MoonshineModel, monkeypatch: pytest.MonkeyPatch) -> None:
    if native() is None:
        monkeypatch.setattr(native_program, "native", DefinedLibrary)
    windows, found = sounds(*WINDOWS), list[Any]()
    for is_native in (True, False):
        if not is_native:
            monkeypatch.setattr(SpeechRows, "_native", lambda self: None)
        found.append(written(model, windows, [logits_of(list(range(9, 29))) for _ in windows]))
    for ours, torchs in zip(*found, strict=True):
        assert (ours - torchs).abs().max() <= 1e-5 * torchs.abs().max()


def test_a_text_is_as_long_as_its_sound_allows_and_a_loop_is_cut(model: MoonshineModel) -> None:
    (window,) = sounds(2.0)

    def drive(tokens: list[int]) -> Any:
        """Send logits whose likeliest tokens are these."""
        writing = model.write(window, GREEDY, len)
        next(writing)
        try:
            for token in tokens:
                writing.send(torch.nn.functional.one_hot(torch.tensor([[token]]), 40).float())
        except StopIteration as end:
            return end.value
        return None

    assert len(drive(list(range(3, 33))).segments[0].token_ids) == 26  # 13 a second
    assert drive([5, 6, *[7, 8] * 12]).segments[0].token_ids == (5, 6, 7, 8)
    assert drive([5, 6, 2]).segments[0].token_ids == (5, 6)
    assert drive([2]).segments == ()


@pytest.mark.skipif(native() is None, reason="torch rounds products by the number of rows")
def test_draws_depend_on_the_seed_alone(model: MoonshineModel) -> None:
    windows = sounds(2.5, 7.3)
    asked = [Decoding(temperatures=(1.0,), seed=seed) for seed in (1, 2)]
    first, second = written(model, windows[1:] * 2, [model.write(windows[1], each, len) for each in asked])
    assert first.segments != second.segments
    (again,) = written(model, windows[1:], [model.write(windows[1], asked[0], len)])
    assert again.segments == first.segments


def test_the_memory_is_predicted(model: MoonshineModel, folder: Path) -> None:
    sizes = transcriber_sizes(folder)
    assert sizes.weights_bytes("cpu", "float32") == held_bytes(model.decoder) + model.encoder.bytes_held
    assert (sizes.source_len, sizes.text_len) == (model.source_len, model.text_len)
    assert sizes.per_position == sum(2 * row.k.shape[0] * row.k.shape[-1] for row in SpeechRows(model, 1)._texts.layers)


def test_other_rates_heads_and_ends_are_refused_by_name(tmp_path: Path) -> None:
    path = save_moonshine(tmp_path / "model")
    kept = json.loads((path / "config.json").read_text())
    (path / "preprocessor_config.json").write_text(json.dumps({"sampling_rate": 8000}))
    with pytest.raises(UnsupportedModel, match="reads 8000 samples a second"):
        load_moonshine(path, torch.device("cpu"), torch.float32)
    (path / "preprocessor_config.json").unlink()
    (path / "generation_config.json").unlink()
    for change, error in (({"eos_token_id": None}, CorruptModel), ({"decoder_num_key_value_heads": 1},
                          UnsupportedModel)):  # fmt: skip
        (path / "config.json").write_text(json.dumps(kept | change))
        with pytest.raises(error):
            load_moonshine(path, torch.device("cpu"), torch.float32)
