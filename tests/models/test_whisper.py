"""Whisper's features, rules and greedy texts are transformers', alone and in a batch; attempts follow the paper."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, patch

import numpy as np
import pytest
import torch

from localllm.kernels.cpu.native.library import native
from localllm.models.decoder import native_program
from localllm.models.encoders.speech_rows import Read, SpeechRows, WrittenText, looped_tokens
from localllm.models.encoders.whisper import (
    Attempt,
    Decoding,
    SpecialTokens,
    SpokenText,
    Thresholds,
    WhisperModel,
    align,
    load_whisper,
    restrict,
    segments_of,
)
from tests.marks import needs_library
from tests.media.sounds import sounds
from tests.models.operations import DefinedLibrary
from tests.models.speech_models import save_whisper, written

GREEDY = (0.0,)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_whisper(tmp_path_factory.mktemp("whisper"))


@pytest.fixture(scope="module")
def model(folder: Path) -> WhisperModel:
    return load_whisper(folder, torch.device("cpu"), torch.float32)


@pytest.fixture(scope="module")
def reference(folder: Path) -> Any:
    from transformers import WhisperForConditionalGeneration

    return WhisperForConditionalGeneration.from_pretrained(folder, attn_implementation="eager").eval()


def attempts(model: WhisperModel, windows: list[np.ndarray], asked: Decoding, language: str = "de") -> list[Attempt]:
    """Return one attempt at each window, with its timestamps."""
    prompt = model.special.prompt(asked, language)
    return written(model, windows, [model.attempt(prompt, asked.temperatures[0], asked.seed) for _ in windows])


def transcribed(
    model: WhisperModel, windows: list[np.ndarray], asked: list[Decoding], ratio_of: Any
) -> list[SpokenText]:
    return written(model, windows, [model.write(*each, ratio_of) for each in zip(windows, asked, strict=True)])


def test_features_are_those_of_transformers(model: WhisperModel) -> None:
    from transformers import WhisperFeatureExtractor

    windows = [*sounds(0.001, 2.5, 30), np.zeros(8000, np.int16)]
    extract = WhisperFeatureExtractor()
    found = model.features(windows)
    for row, window in zip(found, windows, strict=True):
        expected = extract(window.astype(np.float32) / 32768, sampling_rate=16_000, return_tensors="pt").input_features
        assert torch.allclose(row, expected[0], atol=1e-5)


def rules(reference: Any, first: int) -> list[Any]:
    """Return transformers' rules for a text that begins at a place."""
    from transformers.generation.logits_process import (
        SuppressTokensAtBeginLogitsProcessor,
        SuppressTokensLogitsProcessor,
        WhisperTimeStampLogitsProcessor,
    )

    config = reference.generation_config
    return [
        SuppressTokensAtBeginLogitsProcessor(config.begin_suppress_tokens, begin_index=first),
        SuppressTokensLogitsProcessor(config.suppress_tokens),
        WhisperTimeStampLogitsProcessor(config, begin_index=first),
    ]


@torch.inference_mode()
def greedy(reference: Any, features: torch.Tensor, prompt: list[int], end: int) -> list[int]:
    """Return the tokens that transformers' model and rules write, without a cache."""
    encoded = reference.model.encoder(features)
    ids, chain = torch.tensor([prompt]), rules(reference, len(prompt))
    while ids.shape[1] < 64:
        logits = reference(encoder_outputs=encoded, decoder_input_ids=ids).logits[:, -1].float()
        for each in chain:
            logits = each(ids, logits)
        if int(logits.argmax()) == end:
            break
        ids = torch.cat((ids, logits.argmax(-1)[:, None]), dim=1)
    return ids[0, len(prompt) :].tolist()


@pytest.mark.parametrize("asked", [Decoding("de", temperatures=GREEDY), Decoding("de", True, (7, 9), GREEDY)])
def test_greedy_tokens_are_those_of_transformers_and_the_same_in_a_batch(
    model: WhisperModel, reference: Any, asked: Decoding
) -> None:
    windows = sounds(2.5, 30, 11)
    together = attempts(model, windows, asked)
    for window, beside in zip(windows, together, strict=True):
        alone = attempts(model, [window], asked)[0]
        ids = greedy(reference, model.features([window]), model.special.prompt(asked, "de"), model.special.end)
        found = list(alone.text.token_ids)
        assert found == (ids[: len(found)] if looped_tokens(found) else ids)
        assert beside.text.token_ids == alone.text.token_ids
        assert beside.text.avg_logprob == pytest.approx(alone.text.avg_logprob, abs=1e-4)
    assert len({each.text.token_ids for each in together}) == 3


def test_native_steps_write_what_torchs_write(model: WhisperModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """The steps of a batch run in the native library, or by its definitions; their logits are torch's to 1e-5."""
    if native() is None:
        monkeypatch.setattr(native_program, "native", DefinedLibrary)
    calls, found = list[torch.Tensor](), dict[bool, list[torch.Tensor]]()
    plain = SpeechRows._next_tokens

    def watched(self: SpeechRows, texts: dict[Any, Any]) -> dict[Any, torch.Tensor]:
        found = plain(self, texts)
        calls.extend(found.values())
        return found

    monkeypatch.setattr(SpeechRows, "_next_tokens", watched)
    forward = Mock(side_effect=native_program.NativeProgram.forward, autospec=True)
    for is_native in (True, False):
        if not is_native:
            monkeypatch.setattr(SpeechRows, "_native", lambda self: None)
        with patch.object(native_program.NativeProgram, "forward", lambda *call: forward(*call)):
            attempts(model, sounds(2.5, 30, 11), Decoding("de", temperatures=GREEDY))
        found[is_native] = calls[:]
        calls.clear()
    assert len(found[True]) > forward.call_count > 5  # one call for all rows
    for ours, torchs in zip(found[True], found[False], strict=True):
        assert (ours - torchs).abs().max() <= 1e-5 * torchs.abs().max()


@needs_library
def test_sound_in_16_bits_changes_logits_little(model: WhisperModel) -> None:
    """Through the native library and, with times of words, through torch."""
    windows, found = sounds(2.5, 11), list[list[torch.Tensor]]()
    prompt = model.special.prompt(Decoding("de"), "de")

    def read(tokens: list[int]) -> Any:
        logits = [(yield Read([prompt], 0))[0]]
        for place, token in enumerate(tokens, len(prompt)):
            logits.append((yield Read([[token]], place))[0])
        return torch.cat(logits)

    for halves in (False, True):
        rows = SpeechRows(model, 2, halves=halves)
        assert rows._sources.layers[0].k.dtype == (torch.float16 if halves else torch.float32)
        for key, window in enumerate(windows):
            rows.join(key, window, read(list(range(7, 15))))
        ended = dict[Any, Any]()
        while rows.keys:
            ended |= dict(rows.step())
        found.append([ended[0], ended[1]])
    for halved, whole in zip(found[1], found[0], strict=True):
        assert 0 < (halved - whole).abs().max() <= 5e-3 * whole.abs().max()
    asked = Decoding("de", temperatures=GREEDY, words=True)
    rows = SpeechRows(model, 1, halves=True)
    rows.join(0, windows[0], model.write(windows[0], asked, lambda ids: 1.0))
    while not (ended := dict(rows.step())):
        pass
    assert ended[0].segments[0].tokens


def history(draw: np.random.Generator, special: SpecialTokens, count: int) -> list[int]:
    """Return tokens that the rules allow: texts between pairs of ascending timestamps."""
    found, time = list[int](), special.first_time
    while len(found) < count:
        time += int(draw.integers(0, 40))
        found += [min(time, special.first_time + 1500)] * int(draw.integers(1, 3))
        found += draw.integers(0, 300, int(draw.integers(1, 4))).tolist()
    return found[:count]


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 9))])
def test_the_rules_are_those_of_transformers_for_random_texts(model: WhisperModel, reference: Any, seed: int) -> None:
    special, draw = model.special, np.random.default_rng(seed)
    chain = rules(reference, 3)
    changed = 0
    for trial in range(300):
        count = int(draw.integers(0, 12))
        written = torch.tensor([history(draw, special, count) for _ in range(4)], dtype=torch.int64).view(4, count)
        logits = torch.from_numpy(draw.standard_normal((4, special.first_time + 1501)).astype(np.float32))
        logits[:, special.first_time :] += float(draw.choice([-8, 0, 2]))
        expected = logits.clone()
        ids = torch.cat((torch.full((4, 3), special.start), written), dim=1)
        for each in chain:
            expected = each(ids, expected)
        found = restrict(logits, written.tolist(), special)
        assert torch.equal(found, expected), trial
        changed += int(torch.isinf(found[:, : special.first_time]).all(dim=1).sum())
    assert changed > 100


def test_attempts_are_accepted_as_the_paper_says() -> None:
    def attempt(avg_logprob: float, no_speech_prob: float = 0.1, *, is_cut: bool = False) -> Attempt:
        return Attempt(WrittenText((1, 2), (-0.5, -0.5), avg_logprob, is_cut), no_speech_prob, 0.0)

    assert attempt(-0.5).is_accepted(1.2)
    assert not attempt(-1.1).is_accepted(1.2)
    assert not attempt(-0.5, is_cut=True).is_accepted(1.2)
    assert not attempt(-0.5).is_accepted(2.5)
    silent = attempt(-1.1, 0.7)
    assert silent.is_silent
    assert silent.is_accepted(9.0)


@pytest.mark.skipif(native() is None, reason="torch rounds products by the number of rows")
def test_a_window_has_as_many_attempts_as_temperatures_until_one_is_accepted(
    model: WhisperModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Attempt, "is_accepted", lambda self, ratio: ratio < 2)  # random texts are never likely
    window = sounds(30)
    asked = [Decoding("de", temperatures=(0.0, 0.4, 1.0), seed=3)]
    assert transcribed(model, window, asked, lambda ids: 1.0)[0].temperature == 0.0
    asked_ratios = iter([9.0, 1.0])
    second = transcribed(model, window, asked, lambda ids: next(asked_ratios))[0]
    assert second.temperature == 0.4
    assert transcribed(model, window, asked, lambda ids: 9.0)[0].temperature == 1.0
    asked_ratios = iter([9.0, 9.0])
    beside = transcribed(model, [*sounds(30), *sounds(4)], asked * 2, lambda ids: next(asked_ratios, 1.0))[0]
    assert beside.segments == second.segments  # a draw does not depend on the neighbours


def test_the_language_is_found_and_a_prompt_is_read(model: WhisperModel, reference: Any) -> None:
    window = sounds(30)
    greedy = Decoding(temperatures=GREEDY)
    found = transcribed(model, window, [greedy], len)[0].language
    ids = reference.detect_language(model.features(window)).tolist()[0]
    assert model.special.languages[found] == ids
    told = transcribed(model, window * 2, [greedy._replace(language="fr", prompt=(7, 8)), greedy], len)
    assert told[0].language == "fr"
    assert told[0].segments != told[1].segments
    assert model.special.prompt(Decoding(prompt=tuple(range(300))), "en")[1] == 300 - 31  # half of 64 positions


def test_paths_are_those_of_transformers_alignment() -> None:
    from transformers.models.whisper.generation_whisper import _dynamic_time_warping

    draw = np.random.default_rng(1)
    for rows, columns in ((1, 1), (1, 9), (5, 5), (7, 40), (12, 3)):
        for costs in (draw.standard_normal((rows, columns)), draw.integers(-1, 2, (rows, columns)).astype(float)):
            texts, times = _dynamic_time_warping(costs)
            expected = [int(times[list(texts).index(row)]) for row in range(rows)]
            assert align(costs) == expected, (rows, columns)


@torch.inference_mode()
def test_times_of_tokens_are_found_as_published(model: WhisperModel, reference: Any) -> None:
    from transformers.models.whisper.generation_whisper import _dynamic_time_warping, _median_filter

    asked = Decoding("de", temperatures=GREEDY, words=True, prompt=(7, 9))
    windows = sounds(11, 30, 0.3)
    found = transcribed(model, windows, [asked] * 3, lambda ids: 1.0)
    for window, text in zip(windows, found, strict=True):
        ids = [token for segment in text.segments for token in segment.token_ids]
        prompt = [*model.special.prompt(asked._replace(prompt=()), "de")]
        read = torch.tensor([[*prompt, model.special.no_timestamps, *ids]])
        states = model.features([window])
        answer = reference(states, decoder_input_ids=read, output_attentions=True)
        frames = max(1, round(len(window) / 320))
        heads = torch.stack([answer.cross_attentions[1][0, head, :, :frames] for head in (0, 1)])  # the upper layer
        heads = heads / heads.sum(dim=-1, keepdim=True)
        heads = (heads - heads.mean(dim=-2, keepdim=True)) / heads.std(dim=-2, keepdim=True, unbiased=False)
        matrix = _median_filter(heads[None], 7)[0].mean(dim=0)[len(prompt) :]
        rows, times = _dynamic_time_warping(-matrix.double().numpy())
        starts = [times[list(rows).index(row)] * 0.02 for row in range(len(ids) + 1)]
        chances = answer.logits[0, len(prompt) : -1, : model.special.end].softmax(dim=-1)
        at = 0
        for segment in text.segments:
            assert len(segment.tokens) == len(segment.token_ids)
            for token in segment.tokens:
                bounds = np.clip(starts[at : at + 2], segment.start_s, segment.stop_s)
                assert np.allclose([token.start_s, token.stop_s], bounds, atol=1e-6)
                assert token.probability == pytest.approx(float(chances[at, ids[at]]), rel=1e-3, abs=1e-7)
                at += 1
        assert at
    assert not transcribed(model, windows[:1], [asked._replace(words=False)], lambda ids: 1.0)[0].segments[0].tokens


def test_repeated_tokens_end_an_attempt() -> None:
    assert looped_tokens([5, *[1, 2] * 7]) == 2
    assert looped_tokens([3] * 7) == 1
    assert not looped_tokens([1, 2] * 6)
    assert not looped_tokens(range(100))


def test_segments_are_the_texts_between_timestamps() -> None:
    special: Any = SimpleNamespace(first_time=100)
    ids = (100, 1, 2, 150, 150, 3, 200, 250, 4)
    found = segments_of(WrittenText(ids, tuple(-token / 10 for token in ids), 0.0, False), special, 0.02, 4.0)
    assert [each[:4] for each in found] == [
        ((1, 2), 0.0, 1.0, (-0.1, -0.2)), ((3,), 1.0, 2.0, (-0.3,)), ((4,), 3.0, 4.0, (-0.4,))
    ]  # fmt: skip


def test_a_search_finds_likelier_texts_and_the_same_beside_others(model: WhisperModel) -> None:
    windows, asked = sounds(2.5, 30, 11), Decoding("de", temperatures=GREEDY)
    wide, prompt = asked._replace(beams=4), model.special.prompt(asked, "de")
    drawn = attempts(model, windows, asked)
    alone = [
        written(model, [each], [model.attempt(prompt, 0.0, 0, wide)], beams=4)[0] for each in windows
    ]  # fmt: skip
    beside = written(model, windows, [model.attempt(prompt, 0.0, 0, wide) for _ in windows], beams=4)
    for one, other, greedy in zip(alone, beside, drawn, strict=True):
        assert one.text.token_ids == other.text.token_ids
        assert one.text.avg_logprob >= greedy.text.avg_logprob - 1e-5 or one.text.is_cut
    assert [each.text.token_ids for each in alone] != [each.text.token_ids for each in drawn]


def test_thresholds_decide_and_a_window_has_as_many_tokens_as_asked(model: WhisperModel) -> None:
    window = sounds(30)
    lenient = Decoding("de", thresholds=Thresholds(least_logprob=-100.0, most_ratio=9.0, silence=2.0), most_tokens=5)
    found = transcribed(model, window, [lenient], lambda ids: 8.0)[0]
    assert found.temperature == 0.0
    assert 0 < sum(len(each.token_ids) for each in found.segments) <= 5
    strict = lenient._replace(thresholds=Thresholds(least_logprob=-100.0, most_ratio=7.0, silence=2.0))
    assert transcribed(model, window, [strict], lambda ids: 8.0)[0].temperature == 1.0
    silent = lenient._replace(thresholds=Thresholds(least_logprob=0.0, silence=-1.0))
    assert transcribed(model, window, [silent], lambda ids: 8.0)[0].segments == ()
    after = Decoding("de", prompt=(1,), reads_previous=True).after(found)
    assert after.prompt == (1, *(token for each in found.segments for token in each.token_ids))
    assert after.after(found._replace(temperature=0.6)) == after
    assert lenient.after(found) == lenient
