"""Transcription over a real socket, with tiny random models: every format, streams, refusals, the real client."""

from __future__ import annotations

import json
import re
from base64 import b64decode
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from localllm.cli import main
from localllm.config.settings import EngineConfig, ServerConfig, Settings
from localllm.errors import LocalLLMError
from localllm.llm import LLM
from localllm.media import speech
from localllm.serving.build import build_engine
from localllm.text.transcript import TimedToken, TranscriptSegment, Word, cues_of, segments_of, srt, vtt, words_of
from tests.media.sounds import sounds, tone, wav
from tests.models.speech_models import save_moonshine, save_parakeet, save_whisper
from tests.web.harness import browser_of
from tests.web.live_server import LiveServer, settings
from tests.web.pages_stub import StubModel

PATH = "/v1/audio/transcriptions"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_parakeet(tmp_path_factory.mktemp("tdt"), "tdt")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[LiveServer]:
    engine = EngineConfig(model=str(folder), device="cpu")
    model = build_engine(Settings(engine, ServerConfig(served_model_name=("tdt",))))
    with LiveServer(model, settings(max_audio_seconds=60)) as server:
        yield server


def noise(seconds: float = 3.0) -> bytes:
    return wav(sounds(seconds)[0] / 32767)


def post(server: LiveServer, data: bytes | None = None, path: str = PATH, **fields: Any) -> httpx.Response:
    """Post a form with the fields; a random model hears no speech in noise, so nothing is left out."""
    fields = {"vad_filter": "false", **fields}
    files = {"file": ("talk.webm", noise() if data is None else data, "video/webm")}  # neither is believed
    return httpx.post(f"{server.url}{path}", data=fields, files=files, timeout=60)


def test_every_format_has_the_same_words(server: LiveServer) -> None:
    answer = post(server).json()
    assert answer["text"]
    assert answer["usage"] == {"type": "duration", "seconds": 3.0}
    assert post(server, response_format="text").text == answer["text"] + "\n"
    both = ["word", "segment"]
    verbose = post(server, response_format="verbose_json", **{"timestamp_granularities[]": both}).json()
    assert verbose["text"] == answer["text"] == " ".join(each["text"] for each in verbose["segments"])
    assert answer["text"].split() == [part for each in verbose["words"] for part in each["word"].split()]
    assert (verbose["duration"], verbose["task"]) == (3.0, "transcribe")
    for each in verbose["segments"]:
        assert 0 <= each["start"] < each["end"] <= 3.2
        assert each["avg_logprob"] <= 0
        assert each["tokens"]
    assert [each["id"] for each in verbose["segments"]] == list(range(len(verbose["segments"])))
    for kind in ("srt", "vtt"):
        written = post(server, response_format=kind)
        lines = [line for line in written.text.splitlines() if line and "-->" not in line and not line.isdigit()]
        assert "".join("".join(lines).removeprefix("WEBVTT").split()) == "".join(answer["text"].split())


def test_the_openai_client_transcribes_and_streams(server: LiveServer) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
    file, extra = ("a.wav", noise()), {"vad_filter": False}
    plain = client.audio.transcriptions.create(model="tdt", file=file, extra_body=extra)
    verbose = client.audio.transcriptions.create(
        model="tdt", file=file, response_format="verbose_json", timestamp_granularities=["word"], extra_body=extra
    )
    assert plain.text == verbose.text
    assert verbose.words
    assert verbose.segments is None
    events = list(client.audio.transcriptions.create(model="tdt", file=file, stream=True, extra_body=extra))
    assert "".join(each.delta for each in events if each.type == "transcript.text.delta") == plain.text
    assert (events[-1].type, events[-1].text) == ("transcript.text.done", plain.text)
    subtitles = client.audio.transcriptions.create(model="tdt", file=file, response_format="srt", extra_body=extra)
    assert "-->" in str(subtitles)


def test_long_sound_is_cut_into_windows_that_are_told_in_order(server: LiveServer) -> None:
    data = noise(50)
    words = post(server, data, response_format="verbose_json", **{"timestamp_granularities[]": "word"}).json()["words"]
    starts = [each["start"] for each in words]
    assert starts == sorted(starts)
    assert starts[-1] > 30


def test_silence_is_an_empty_text_with_a_warning(server: LiveServer) -> None:
    answer = post(server, wav(np.zeros(32_000)), vad_filter="true")
    assert (answer.status_code, answer.json()["text"]) == (200, "")
    assert answer.headers["x-localllm-warning"] == "no speech found in 2.0 s"
    verbose = post(server, wav(np.zeros(32_000)), vad_filter="true", response_format="verbose_json").json()
    assert verbose["segments"] == []


def test_log_probabilities_spell_the_text(server: LiveServer, request: pytest.FixtureRequest) -> None:
    for each in (server, request.getfixturevalue("whisper")):
        answer = post(each, **{"include[]": "logprobs"}).json()
        verbose = post(each, response_format="verbose_json").json()["segments"]
        assert len(answer["logprobs"]) == sum(len(segment["tokens"]) for segment in verbose)
        whole = [bytes(token["bytes"]) for token in answer["logprobs"] if "\ufffd" not in token["token"]]
        assert all(raw.decode() in " " + answer["text"] for raw in whole if raw.isalnum())
        assert len(whole) > 3
        assert all(token["logprob"] <= 0 for token in answer["logprobs"])
        assert "logprobs" not in post(each).json()
        lines = post(each, stream="true", **{"include[]": "logprobs"}).text.splitlines()
        events = [json.loads(line.removeprefix("data: ")) for line in lines if line]
        told = [token for event in events[:-1] for token in event["logprobs"]]
        assert told == answer["logprobs"]


def test_hints_without_effect_are_named(server: LiveServer) -> None:
    answer = post(server, prompt="names", language="de", temperature="0.4", colour="red", beam_size="2")
    warning = answer.headers["x-localllm-warning"]
    assert warning.split("; ") == [
        "unknown field 'colour' ignored", "language has no effect", "prompt has no effect",
        "temperature has no effect", "beam_size has no effect",
    ]  # fmt: skip


REFUSED: list[tuple[dict[str, Any], int, str]] = [
    ({"response_format": "diarized_json"}, 400, "response_format 'diarized_json' is not supported."),
    ({"response_format": "docx"}, 400, "Supported: text, json, srt, vtt, verbose_json."),
    ({"timestamp_granularities[]": "word"}, 400, "timestamp_granularities does not apply to json."),
    ({"timestamp_granularities[]": "letter", "response_format": "verbose_json"}, 400, "'letter' is not supported"),
    ({"include[]": "speakers"}, 400, "include 'speakers' is not supported."),
    ({"include[]": "logprobs", "response_format": "srt"}, 400, "include does not apply to srt."),
    ({"known_speaker_names[]": "Ada"}, 400, "Speakers are not told apart."),
    ({"stream": "true", "response_format": "srt"}, 400, "response_format srt cannot be streamed."),
    ({"stream": "perhaps"}, 400, "It must be true or false."),
    ({"chunking_strategy": '{"type": "server_vad", "threshold": 2}', "vad_filter": "true"}, 400, "chunking_strategy"),
    ({"data": b"%PDF-1.7 ......"}, 415, "It begins like a PDF."),
    ({"data": b""}, 415, "It begins like an empty file."),
    ({"data": noise()[:50_000]}, 400, "file is damaged. Decoding ended after 1."),
    ({"data": wav(tone(61))}, 413, "file holds more than 60 s of sound."),
    ({"path": "/v1/audio/translations"}, 400, "tdt does not translate."),
]  # fmt: skip


@pytest.mark.parametrize("case", range(len(REFUSED)))
def test_what_is_refused_is_named_and_the_server_answers_on(server: LiveServer, case: int) -> None:
    fields, status, text = REFUSED[case]
    answer = post(server, **fields)
    assert (answer.status_code, text in answer.json()["error"]["message"]) == (status, True), answer.text


def test_other_requests_are_refused_by_name(server: LiveServer) -> None:
    missing = httpx.post(f"{server.url}{PATH}", files={"model": (None, "tdt")})
    assert (missing.status_code, missing.json()["error"]["param"]) == (400, "file")
    plain = httpx.post(f"{server.url}{PATH}", json={"file": "x"})
    assert plain.status_code == 415
    chat = server.post("/v1/chat/completions", {"model": "tdt", "messages": [{"role": "user", "content": "a"}]})
    assert "transcribes speech" in chat.json()["error"]["message"]
    assert server.get("/v1/models").json()["data"][0]["capabilities"] == ["transcription"]


def test_a_damaged_file_is_read_on_request(server: LiveServer) -> None:
    answer = post(server, noise()[:50_000], allow_damaged="true")
    assert answer.status_code == 200
    assert "file is damaged: 1.4 s are missing" in answer.headers["x-localllm-warning"]


def test_the_offline_api_has_the_same_words(server: LiveServer) -> None:
    assert server.model is not None
    with LLM(str(server.model.path), device="cpu") as llm:
        found = llm.transcribe(noise(), vad_filter=False)
        assert found.text == post(server).json()["text"] == " ".join(each.text for each in found.segments)
        assert llm.transcribe((sounds(3.0)[0] / 32768, 16_000), vad_filter=False).words == found.words
        with pytest.raises(LocalLLMError, match="transcribes speech"):
            llm.embed("a")


def test_the_command_line_writes_the_formats_of_the_api(
    server: LiveServer, folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model = ["--model", str(folder), "--device", "cpu"]
    good, bad = tmp_path / "talk.wav", tmp_path / "other.wav"
    good.write_bytes(noise())
    bad.write_bytes(b"%PDF-1.7 ......")
    assert main(["transcribe", str(good), str(bad), *model, "--no-vad-filter", "--format", "verbose_json", "--words",
                 "-o", str(tmp_path)]) != 0  # fmt: skip
    both = {"response_format": "verbose_json", "timestamp_granularities[]": ["word", "segment"]}
    assert json.loads((tmp_path / "talk.json").read_text()) == post(server, **both).json()
    assert not (tmp_path / "other.json").exists()
    assert "It begins like a PDF." in capfd.readouterr().err
    assert main(["transcribe", str(good), *model, "--no-vad-filter"]) == 0
    assert capfd.readouterr().out == post(server, response_format="text").text


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["none.wav"], "none.wav is not a file."),
        (["a.wav", "--words"], "--words does not apply to text."),
        (["a.wav", "--logprobs"], "--logprobs does not apply to text."),
        (["a.wav", "--chunking-strategy", "{}"], "chunking_strategy is not valid."),
        (["a.wav", "b/a.wav", "-o", "b"], "One text would overwrite another."),
        (["a.wav", "b/a.wav", "-o", "c"], "c is not a folder."),
        (["a.wav", "-o", "c/d.txt"], "c/d.txt cannot be written."),
    ],
)
def test_a_wrong_command_is_refused_before_a_model_is_loaded(
    words: list[str], what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "b").mkdir()
    for name in ("a.wav", "b/a.wav"):
        Path(name).write_bytes(b"")
    assert main(["transcribe", *words, "--model", "nowhere"]) != 0
    assert what in capsys.readouterr().err


# The pages ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def desk(folder: Path) -> Iterator[LiveServer]:
    """A server that chats, with a speech model beside it."""
    model: Any = StubModel()
    with LiveServer(model, settings(ui=True, chat_history=False, speech_model=str(folder))) as server:
        yield server


def test_the_pages_transcribe_with_the_speech_model(desk: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speech, "VadOptions", lambda: None)
    with browser_of(desk) as browser:
        page = browser.get("/")
        assert 'id="dictate"' in page.text
        assert "microphone=(self)" in page.headers["permissions-policy"]
        said = browser.post("/chats/dictate", files={"sound": noise()})
        assert (said.status_code, said.headers["content-type"]) == (200, "text/plain; charset=utf-8")
        attached = browser.post("/chats/attach", files={"file": ("talk.mp3", noise())})
        assert "3.0 s of speech by" in attached.text
        told = browser.post("/playground/transcribe", files={"file": ("talk.wav", noise())})
        [text] = re.findall('href="data:text/plain;charset=utf-8;base64,([^"]*)" download="talk.txt"', told.text)
        assert b64decode(text).decode() == said.text + "\n"
        assert "talk.srt" in told.text
        assert "language has no effect" in browser.post(
            "/playground/transcribe", data={"language": "de"}, files={"file": ("talk.wav", noise())}
        ).text  # fmt: skip
        for path, files in (("/chats/dictate", {"sound": b"%PDF-1.7"}), ("/playground/transcribe", {"file": b"{}"})):
            refused = browser.post(path, files=files)
            assert (refused.status_code, "is not sound that is read here" in refused.text) == (415, True)
    assert httpx.post(f"{desk.url}{PATH}", files={"file": noise()}).status_code == 200  # without a model's name


def test_a_server_without_a_speech_model_has_no_microphone_and_says_what_to_do() -> None:
    model: Any = StubModel()
    with LiveServer(model, settings(ui=True, chat_history=False)) as server, browser_of(server) as browser:
        assert 'id="dictate"' not in browser.get("/").text
        assert "transcribe" not in browser.get("/playground").text
        refused = browser.post("/chats/attach", files={"file": ("talk.wav", noise())}).text
        assert "talk.wav is sound, and no model here transcribes speech." in refused
        assert "--speech-model" in refused
        asked = httpx.post(f"{server.url}{PATH}", files={"file": noise()})
        assert (asked.status_code, "No model here transcribes speech." in asked.text) == (404, True)


# Whisper --------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whisper(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    path = save_whisper(tmp_path_factory.mktemp("whisper"))
    engine = EngineConfig(model=str(path), device="cpu")
    model = build_engine(Settings(engine, ServerConfig(served_model_name=("whisper",))))
    with LiveServer(model, settings(max_audio_seconds=60)) as server:
        yield server


def test_whisper_writes_segments_in_every_format(whisper: LiveServer) -> None:
    verbose = post(whisper, noise(33), response_format="verbose_json", language="German").json()
    assert (verbose["task"], verbose["language"], verbose["duration"]) == ("transcribe", "de", 33.0)
    assert verbose["text"] == " ".join(each["text"] for each in verbose["segments"])
    assert len({each["start"] for each in verbose["segments"]}) > 1
    for each in verbose["segments"]:
        assert 0 <= each["start"] <= each["end"] <= 33
        assert each["tokens"]
        assert (each["temperature"] in (0.0, 0.2, 0.4, 0.6, 0.8, 1.0), each["avg_logprob"] < 0) == (True, True)
    assert post(whisper, noise(33), language="de").json()["text"] == verbose["text"]
    subtitles = post(whisper, noise(33), language="de", response_format="srt").text
    lines = [line for line in subtitles.splitlines() if line and "-->" not in line and not line.isdigit()]
    assert "".join("".join(lines).split()) == "".join(verbose["text"].split())


def test_whisper_finds_the_language_translates_and_reads_a_prompt(whisper: LiveServer) -> None:
    plain = post(whisper, response_format="verbose_json").json()
    assert plain["language"] in ("en", "de", "fr", "zh")
    told = post(whisper, response_format="verbose_json", language=plain["language"]).json()
    assert told["text"] == plain["text"]
    named = post(whisper, language=plain["language"], prompt="names", hotwords="and words")
    assert named.json()["text"] != plain["text"]
    assert "x-localllm-warning" not in named.headers
    long = post(whisper, language="de", prompt="a word " * 300)
    assert re.fullmatch(r"prompt has \d+ tokens; its last 31 are used", long.headers["x-localllm-warning"])
    translated = post(whisper, path="/v1/audio/translations", response_format="verbose_json").json()
    assert (translated["task"], translated["language"]) == ("translate", "en")
    assert translated["text"] != plain["text"]


def test_whisper_has_times_for_words(whisper: LiveServer) -> None:
    both = ["word", "segment"]
    fields = {"language": "de", "response_format": "verbose_json", "timestamp_granularities[]": both}
    answer = post(whisper, noise(33), **fields).json()
    words, segments = answer["words"], answer["segments"]
    assert "".join(each["word"] for each in words).split() == "".join(answer["text"].split()).split()
    assert all(before["start"] <= after["start"] for before, after in pairwise(words))
    assert words[-1]["start"] > 30  # times of the second window are those of the file
    for each in words:
        assert 0 <= each["probability"] <= 1
        assert any(one["start"] <= each["start"] <= each["end"] <= one["end"] for one in segments)
    chinese = post(whisper, **{**fields, "language": "zh"}).json()
    assert "".join(each["word"] for each in chinese["words"]) == "".join(chinese["text"].split())
    assert len(chinese["words"]) > len(chinese["text"].split())


def test_whisper_searches_and_reads_what_was_said_before(whisper: LiveServer) -> None:
    sound, fields = noise(33), {"language": "de", "response_format": "verbose_json"}
    plain = post(whisper, sound, **fields).json()
    short = post(whisper, sound, max_completion_tokens="4", logprob_threshold="-99", **fields).json()
    assert 0 < len(short["text"]) < len(plain["text"])
    assert {each["temperature"] for each in short["segments"]} == {0.0}
    lenient = {"logprob_threshold": "-99", "compression_ratio_threshold": "99", "max_completion_tokens": "9", **fields}
    searched = [post(whisper, noise(33), beam_size=width, **lenient).json()["text"] for width in (1, 2, 5, 8)]
    drawn = post(whisper, noise(33), **lenient).json()["text"]
    assert searched[0] == drawn
    assert len({*searched}) > 1
    each, both = (post(whisper, sound, condition_on_previous_text=on, **lenient).json() for on in ("false", "true"))
    first, last = ([[part["text"] for part in answer["segments"] if (part["start"] < 20) == early]
                    for answer in (each, both)] for early in (True, False))  # fmt: skip
    assert (first[0] == first[1], last[0] == last[1]) == (True, False)


def test_the_command_line_takes_whispers_fields(whisper: LiveServer, tmp_path: Path, capfd: Any) -> None:
    """Its texts are those of the API, with log probabilities and with the temperature of the first attempt."""
    assert whisper.model is not None
    (tmp_path / "a.wav").write_bytes(noise(33))
    vad = '{"type": "server_vad", "threshold": 0.001}'
    searched: dict[str, Any] = {
        "language": "de", "prompt": "names", "hotwords": "and words", "beam_size": 3, "max_completion_tokens": 9,
        "logprob_threshold": -99, "compression_ratio_threshold": 99, "no_speech_threshold": 0.9,
        "chunking_strategy": vad,
    }  # fmt: skip
    drawn: dict[str, Any] = {"language": "de", "temperature": 0.4, "seed": 5, "max_completion_tokens": 9}
    command = ["transcribe", str(tmp_path / "a.wav"), "--model", str(whisper.model.path), "--device", "cpu"]
    for fields, kind, more, on in (
        (searched, "json", {"include[]": "logprobs", "condition_on_previous_text": "true", "vad_filter": "true"},
         ["--logprobs", "--condition-on-previous-text"]),
        (drawn, "verbose_json", {"vad_filter": "false"}, ["--no-vad-filter"]),
    ):  # fmt: skip
        flags = [text for name, value in fields.items() for text in (f"--{name.replace('_', '-')}", str(value))]
        assert main([*command, *flags, *on, "--format", kind]) == 0
        answer = post(whisper, noise(33), response_format=kind, **more, **fields, model="whisper")
        assert json.loads(capfd.readouterr().out) == answer.json()
        assert answer.json()["text"]


def test_whisper_streams_the_text_of_its_windows(whisper: LiveServer) -> None:
    fields: Any = {"model": "whisper", "file": ("a.wav", noise(33)), "language": "de"}
    extra = {"vad_filter": False}
    with openai.OpenAI(base_url=f"{whisper.url}/v1", api_key="none") as client:
        plain = client.audio.transcriptions.create(**fields, extra_body=extra).text
        events = list(client.audio.transcriptions.create(**fields, stream=True, extra_body=extra))
    assert "".join(each.delta for each in events if each.type == "transcript.text.delta") == plain


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        ({"language": "Klingon"}, "whisper does not know the language 'Klingon'. It knows de, en, fr, zh."),
        ({"temperature": "1.5"}, "It must be 0 to 1."),
        ({"temperature": "warm"}, "Invalid type for 'temperature'."),
        ({"beam_size": "9"}, "It must be 1 to 8."),
        ({"max_completion_tokens": "0"}, "It must be at least 1."),
    ],
)
def test_what_whisper_cannot_do_is_refused_by_name(whisper: LiveServer, fields: dict[str, Any], what: str) -> None:
    answer = post(whisper, **fields)
    assert (answer.status_code, what in answer.json()["error"]["message"]) == (400, True), answer.text


def test_whisper_is_served_in_eight_bits(tmp_path: Path) -> None:
    path = save_whisper(tmp_path)
    with LLM(str(path), device="cpu", quantization="int8") as llm:
        assert "int8 made at load" in llm._engine.plan.quantization
        assert llm.transcribe(noise(), language="de", vad_filter=False).segments


def test_a_distilled_or_english_whisper_does_not_translate(tmp_path: Path) -> None:
    for name, how in (("distilled", {"decoder_layers": 1}), ("english", {"english": True})):
        path = save_whisper(tmp_path / name, **how)
        with LLM(str(path), device="cpu") as llm:
            with pytest.raises(LocalLLMError, match="does not translate"):
                llm.transcribe(noise(), translate=True)
            found = llm.transcribe(noise(), vad_filter=False)
            assert found.segments
            assert found.language in (("en",) if name == "english" else ("en", "de", "fr", "zh"))


# Moonshine ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def moonshine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    path = save_moonshine(tmp_path_factory.mktemp("moonshine"))
    engine = EngineConfig(model=str(path), device="cpu")
    model = build_engine(Settings(engine, ServerConfig(served_model_name=("moonshine",))))
    with LiveServer(model, settings(max_audio_seconds=60)) as server:
        yield server


def test_moonshine_writes_a_segment_for_each_window(moonshine: LiveServer) -> None:
    verbose = post(moonshine, noise(33), response_format="verbose_json").json()
    assert [each["start"] for each in verbose["segments"]] == sorted(each["start"] for each in verbose["segments"])
    assert verbose["segments"][-1]["end"] == pytest.approx(33)
    assert (verbose["text"], verbose["language"]) == (" ".join(each["text"] for each in verbose["segments"]), "")
    assert "-->" in post(moonshine, noise(33), response_format="srt").text
    assert post(moonshine, temperature="0.9", seed="1").json()["text"] != post(moonshine).json()["text"]
    hints = post(moonshine, language="de", prompt="names").headers["x-localllm-warning"]
    assert hints.split("; ") == ["prompt has no effect", "language has no effect"]


def test_moonshine_has_no_times_for_words_and_does_not_translate(moonshine: LiveServer) -> None:
    refused = post(moonshine, response_format="verbose_json", **{"timestamp_granularities[]": "word"})
    assert (refused.status_code, "moonshine has no times for words." in refused.text) == (400, True)
    assert "does not translate" in post(moonshine, path="/v1/audio/translations").text


# Words and subtitles --------------------------------------------------------------------------------------------------


def spoken(count: int, pause_at: int = -1) -> list[Word]:
    """Return words of 0.4 s, one after the other, with a pause of a second before one of them."""
    starts = [i * 0.4 + (1.0 if 0 <= pause_at <= i else 0.0) for i in range(count)]
    return [Word(f"word{i}{'.' * (i % 9 == 8)}", start, start + 0.4, 0.9, (i,)) for i, start in enumerate(starts)]


def test_segments_end_at_pauses_sentences_and_before_they_are_long() -> None:
    assert [len(each.words) for each in segments_of(spoken(6, pause_at=4))] == [4, 2]
    segments = segments_of(spoken(60))
    assert [word for each in segments for word in each.words] == spoken(60)
    assert all(each.stop_s - each.start_s <= 10 for each in segments)
    assert segments[0].text.endswith("word8.")


@pytest.mark.parametrize("count", [1, 7, 80])
def test_subtitles_parse_back_and_do_not_overlap(count: int) -> None:
    segments = segments_of(spoken(count, pause_at=count // 2))
    cues = cues_of(segments)
    assert all(before.stop_s <= after.start_s for before, after in pairwise(cues))
    assert all(len(cue.text.splitlines()) <= 2 and max(map(len, cue.text.splitlines())) <= 42 for cue in cues)
    assert " ".join(" ".join(cue.text.split()) for cue in cues) == " ".join(each.text for each in segments)
    for written, comma in ((srt(segments), ","), (vtt(segments), ".")):
        times = re.findall(rf"(\d\d):(\d\d):(\d\d)\{comma}(\d\d\d)", written)
        seconds = [int(h) * 3600 + int(m) * 60 + int(s) + int(ms) / 1000 for h, m, s, ms in times]
        assert np.allclose(seconds, [bound for cue in cues for bound in cue[:2]], atol=0.001)


def test_what_would_end_a_cue_is_escaped() -> None:
    segments = [TranscriptSegment.of([Word("a-->b<i>&", 3599.9996, 3601, 1.0, (1,))])]
    assert "a->b<i>&" in srt(segments)
    assert "01:00:00,000 --> " in srt(segments)
    assert "a->b&lt;i>&amp;" in vtt(segments)


def test_tokens_become_words_at_spaces() -> None:
    pieces = {1: " he", 2: "llo", 3: " ", 4: "!"}
    tokens = [
        TimedToken(2, 0.0, 0.1, 0.5), TimedToken(1, 0.1, 0.2, 0.5), TimedToken(2, 0.2, 0.3, 0.7),
        TimedToken(4, 0.3, 0.4, 0.9), TimedToken(3, 0.5, 0.6, 0.1),
    ]  # fmt: skip
    found = words_of(tokens, lambda ids: "".join(pieces[each] for each in ids), lambda id_: pieces[id_][0] == " ")
    assert [(word.text, word.start_s, word.stop_s) for word in found] == [("llo", 0.0, 0.1), ("hello!", 0.1, 0.4)]
    assert found[1].probability == pytest.approx(0.7)
    assert found[1].token_ids == (1, 2, 4)
