"""Tiny models that hear, served: the real client sends sound in chats, and files to be transcribed."""

from __future__ import annotations

import copy
import dataclasses
import html
import re
from base64 import b64encode
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import httpx
import openai
import pytest
import torch

from localllm import LLM, SamplingParams
from localllm.models.read_spec import read_spec
from tests.adapters import write_config
from tests.media.sounds import wav
from tests.models.hearing import HEARING, PAD, make_hearing, noise, opened, reference_with_sounds
from tests.serving import settings_for
from tests.tiny import make_tiny_model
from tests.web.live_server import ManagedServer

NUM_TOKENS = 6
QUESTION = "What is said?"
SOUND = noise(2.4)
WAV = wav(SOUND / 32768)


class Served:
    """A tiny model behind a server, and as transformers has it."""

    def __init__(self, folder: Path, name: str) -> None:
        self.name, self.path = name, folder / name
        self.model = make_hearing(self.path, name)
        self.live = ManagedServer(settings_for(self.path, max_model_len=512, kv_cache_memory_bytes=8 << 20))

    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.live.url}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module", params=HEARING)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    made = Served(tmp_path_factory.mktemp("hearing"), request.param)
    with made.live:
        yield made


def sound_part(data: bytes = WAV) -> dict[str, Any]:
    return {"type": "input_audio", "input_audio": {"data": b64encode(data).decode(), "format": "wav"}}


def chat(*content: Any, **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": list(content)}]
    return {"messages": messages, "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True, **more}


def test_the_openai_client_gets_the_answer_of_transformers(served: Served) -> None:
    """The prompt's ids come from the server's own renderer; what follows them is transformers' greedy choice."""
    with served.client() as client:
        messages: Any = [{"role": "user", "content": [sound_part(), {"type": "text", "text": QUESTION}]}]
        answer = client.chat.completions.create(
            model=served.name, messages=messages, max_tokens=NUM_TOKENS, temperature=0, logprobs=True,
            extra_body={"ignore_eos": True, "return_token_ids": True},
        )  # fmt: skip
    body = answer.to_dict()
    sound = opened(read_spec(served.path)).process(SOUND)
    ids: Any = body["prompt_token_ids"]
    assert ids.count(PAD) == sound.rows
    details: Any = body["usage"]
    assert details["prompt_tokens_details"]["audio_tokens"] == sound.rows
    expected: list[int] = []
    for _ in range(NUM_TOKENS):
        logits = reference_with_sounds(served.model, [*ids, *expected], [sound])
        expected.append(int(logits[-1].argmax()))
    choices: Any = body["choices"]
    assert choices[0]["token_ids"] == expected


def text_of(served: Served, prompt: str, samples: Any = SOUND) -> tuple[str, list[int]]:
    """Return the text and ids of transformers' greedy answer to a prompt, in which the family's mark is the sound."""
    from localllm.models.vision.sound import sound_family_of
    from localllm.text.tokenizer import load_tokenizer

    spec, tokenizer = read_spec(served.path), load_tokenizer(served.path)
    assert spec.hearing is not None
    sound, mark = opened(spec).process(samples), sound_family_of(spec.hearing).mark
    ids = tokenizer.encode(prompt.replace(mark, mark * sound.rows), add_special_tokens=False)
    written: list[int] = []
    most = 64 + int(len(samples) / 16_000 * 16)
    while len(written) < most and (not written or written[-1] != 2):
        written.append(int(reference_with_sounds(served.model, [*ids, *written], [sound])[-1].argmax()))
    return tokenizer.decode([token for token in written if token != 2]).strip(), written


PROMPTS = {
    "voxtral": "<s>[INST][BEGIN_AUDIO][AUDIO][/INST]lang:de[TRANSCRIBE]",
    "qwen3_asr": "<|im_start|>user\n<|audio_start|><|audio_pad|><|audio_end|><|im_end|>\n<|im_start|>assistant\n"
                 "language German<asr_text>",
    "glmasr": "<|im_start|>user\n<|begin_of_audio|><|pad|><|end_of_audio|>Please transcribe this audio "
              "into text<|im_end|>\n<|im_start|>assistant\n",
    "gemma4": "<|im_start|>user\nTranscribe the following speech segment in German into German text.\n\nFollow these "
              "specific instructions for formatting the answer:\n* Only output the transcription, with no newlines.\n"
              "* When transcribing numbers, write the digits, i.e. write 1.7 and not one point seven, and write 3 "
              "instead of three.<|audio><|audio|><audio|><|im_end|>\n<|im_start|>assistant\n",
    "granite_speech": "<|im_start|>user\n<|audio|>can you transcribe the speech into a written format?<|im_end|>\n"
                      "<|im_start|>assistant\n",
}  # fmt: skip


def letters(text: str) -> str:
    return re.sub(r"[^a-zA-Z]", "", text)


def post(served: Served, path: str = "transcriptions", data: bytes = WAV, **fields: Any) -> httpx.Response:
    fields = {"vad_filter": "false", **fields}
    return httpx.post(
        f"{served.live.url}/v1/audio/{path}", data=fields, files={"file": ("a.wav", data)}, timeout=120
    )  # fmt: skip


def test_a_file_is_transcribed_as_transformers_does_in_every_format(served: Served) -> None:
    expected, written = text_of(served, PROMPTS[served.name])
    with served.client() as client:
        plain = client.audio.transcriptions.create(
            model=served.name, file=("a.wav", WAV), language="de", extra_body={"vad_filter": False}
        )
    assert plain.text == expected
    assert post(served, language="German", response_format="text").text == f"{expected}\n"
    verbose = post(served, language="de", response_format="verbose_json").json()
    [segment] = verbose["segments"]
    assert (segment["start"], segment["end"], segment["text"]) == (0, 2.4, expected)
    assert segment["tokens"] == [token for token in written if token != 2]
    assert segment["avg_logprob"] < 0
    if served.name in ("voxtral", "qwen3_asr"):
        assert verbose["language"] == "de"
    for kind in ("srt", "vtt"):
        body = post(served, language="de", response_format=kind).text
        shown = re.sub(r"(?m)^(WEBVTT|\d+|.*-->.*)$", "", body)
        assert letters(html.unescape(shown)) == letters(expected)
    with served.client() as client:
        events = list(client.audio.transcriptions.create(
            model=served.name, file=("a.wav", WAV), language="de", stream=True, extra_body={"vad_filter": False}
        ))  # fmt: skip
    assert events[-1].type == "transcript.text.done"
    assert events[-1].text == expected


def test_tokens_are_told_and_hints_without_effect_are_named(served: Served) -> None:
    answer = post(served, **{"include[]": "logprobs", "beam_size": "2", "max_completion_tokens": "3"})
    told = answer.json()["logprobs"]
    assert 0 < len(told) <= 3
    assert all(each["logprob"] <= 0 for each in told)
    assert "beam_size has no effect" in answer.headers["x-localllm-warning"]
    refused = post(served, max_completion_tokens="0")
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "max_completion_tokens")


def test_long_sound_is_transcribed_in_windows_in_order(served: Served) -> None:
    data = wav(noise(9.0, 3) / 32768)
    with mock.patch("localllm.serving.transcription.WINDOW_S", 3.0):
        verbose = post(served, data=data, response_format="verbose_json").json()
    starts = [each["start"] for each in verbose["segments"]]
    assert len(starts) >= 3
    assert starts == sorted(starts)
    assert verbose["duration"] == 9.0


def test_what_a_family_cannot_is_refused_or_named(served: Served) -> None:
    family = opened_family(served)
    words = post(served, response_format="verbose_json", **{"timestamp_granularities[]": "word"})
    assert words.status_code == 400
    assert "has no times for words" in words.json()["error"]["message"]
    translated = post(served, "translations")
    assert translated.status_code == (200 if family.translates else 400), translated.text
    prompted = post(served, prompt="Mr. Quilter")
    assert ("prompt has no effect" in prompted.headers.get("x-localllm-warning", "")) == (not family.prompts)
    unknown = post(served, language="xx")
    if family.languages:
        assert "does not know the language 'xx'" in unknown.json()["error"]["message"]
    else:
        assert "language has no effect" in unknown.headers["x-localllm-warning"]


def opened_family(served: Served) -> Any:
    return opened(read_spec(served.path)).family


def test_an_offline_model_gives_the_same_answers(served: Served) -> None:
    expected, _ = text_of(served, PROMPTS[served.name])
    with LLM(str(served.path), max_model_len=512, kv_cache_memory_bytes=8 << 20, device="cpu") as llm:
        found = llm.transcribe(WAV, language="de", vad_filter=False)
        assert found.text == expected
        messages: Any = [{"role": "user", "content": [sound_part(), {"type": "text", "text": QUESTION}]}]
        params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
        [said] = llm.chat(messages, params, use_tqdm=False)
        prompt = llm.apply_chat_template([{"role": "user", "content": QUESTION}])
        mark = opened_family(served).mark
        given = {"prompt": f"{mark}{prompt}", "multi_modal_data": {"audio": (SOUND / 32768, 16_000)}}
        [generated] = llm.generate([given], params, use_tqdm=False)
        assert len(generated.outputs[0].token_ids) == NUM_TOKENS
    with served.client() as client:
        answer = client.chat.completions.create(
            model=served.name, messages=messages, max_tokens=NUM_TOKENS, temperature=0, extra_body={"ignore_eos": True}
        )
    assert said.outputs[0].text == answer.choices[0].message.content


def test_sounds_by_url_in_responses_and_several_in_one_prompt(served: Served) -> None:
    url = f"data:audio/wav;base64,{b64encode(WAV).decode()}"
    parts = [sound_part(), {"type": "audio_url", "audio_url": {"url": url}}, {"type": "audio_url", "audio_url": url}]
    texts: list[tuple[str, int]] = []
    for part in parts:
        answer = served.live.post("/v1/chat/completions", chat(part, {"type": "text", "text": QUESTION})).json()
        texts.append((answer["choices"][0]["message"]["content"], answer["usage"]["prompt_tokens"]))
    assert len(set(texts)) == 1
    other = wav(noise(1.1, 5) / 32768)
    two = served.live.post("/v1/chat/completions", chat(sound_part(), sound_part(other), sound_part())).json()
    rows = [opened(read_spec(served.path)).process(each).rows for each in (SOUND, noise(1.1, 5))]
    assert two["usage"]["prompt_tokens_details"]["audio_tokens"] == 2 * rows[0] + rows[1]
    body = {"input": [{"role": "user", "content": [sound_part(), {"type": "input_text", "text": QUESTION}]}],
            "max_output_tokens": 16, "temperature": 0}  # fmt: skip
    made = served.live.post("/v1/responses", body)
    assert made.status_code == 200, made.text
    assert made.json()["usage"]["input_tokens_details"]["audio_tokens"] == rows[0]


REFUSED: list[tuple[dict[str, Any], int, str]] = [
    ({"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}, 400, "has no sound"),
    ({"type": "input_audio", "input_audio": {"data": "%%%", "format": "wav"}}, 400, "base64"),
    (sound_part(b"%PDF-1.7 ....."), 415, "It begins like a PDF"),
    (sound_part(WAV[:3000]), 400, "Save it again."),
    ({"type": "audio_url", "audio_url": {"url": "https://example.org/a.wav"}}, 400, "are not fetched from URLs"),
    ({"type": "audio_url", "audio_url": {"url": "file:///etc/passwd"}}, 400, "not a URL that is fetched"),
    (sound_part(wav(noise(50) / 32768)), 413, "of sound"),
    ({"type": "input_audio", "input_audio": {"file_id": "file-1"}}, 400, "has no sound"),
]


@pytest.mark.parametrize(("part", "status", "text"), REFUSED)
def test_what_cannot_be_heard_is_refused_by_name(served: Served, part: Any, status: int, text: str) -> None:
    answer = served.live.post("/v1/chat/completions", chat(part, {"type": "text", "text": QUESTION}))
    assert (answer.status_code, text in answer.json()["error"]["message"]) == (status, True), answer.text
    assert served.live.post("/v1/chat/completions", chat({"type": "text", "text": QUESTION})).status_code == 200


def test_a_request_has_as_many_sounds_as_the_setting_allows(served: Served) -> None:
    answer = served.live.post("/v1/chat/completions", chat(*[sound_part()] * 33))
    assert answer.status_code == 400
    told = answer.json()["error"]["message"]
    assert "The request has 33 sounds; at most 32 are taken. --limit-mm-per-prompt audio=33" in told


def test_a_model_can_be_loaded_without_the_part_that_hears(tmp_path: Path) -> None:
    make_hearing(tmp_path, "voxtral")
    sizes = {"max_model_len": 512, "kv_cache_memory_bytes": 8 << 20}
    with ManagedServer(settings_for(tmp_path, limit_mm_per_prompt="image=1,audio=0", **sizes)) as live:
        answer = live.post("/v1/chat/completions", chat(sound_part()))
    assert answer.status_code == 400
    assert "was not loaded: start without --limit-mm-per-prompt audio=0" in answer.json()["error"]["message"]


def test_granites_adapter_answers_prompts_with_sound_alone(tmp_path: Path) -> None:
    """As transformers' generate: the adapter of the checkpoint is on if there is sound."""
    from safetensors.torch import save_file

    model = make_hearing(tmp_path, "granite_speech")
    draws, tensors = torch.Generator().manual_seed(1), {}
    merged = copy.deepcopy(model)
    for name, matrix in merged.named_parameters():
        if "language_model" in name and name.endswith(("q_proj.weight", "v_proj.weight")):
            a = torch.randn(4, matrix.shape[1], generator=draws) * 0.3
            b = torch.randn(matrix.shape[0], 4, generator=draws) * 0.3
            stem = name.removesuffix(".weight")
            tensors |= {f"base_model.model.{stem}.lora_A.weight": a, f"base_model.model.{stem}.lora_B.weight": b}
            matrix.data += 2 * b @ a
    save_file(tensors, str(tmp_path / "adapter_model.safetensors"))
    write_config(tmp_path, r=4, lora_alpha=8, base_model_name_or_path=str(tmp_path))
    sound = opened(read_spec(tmp_path)).process(SOUND)
    ids = [20, 21, *[PAD] * sound.rows, 30, 31]
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    with LLM(str(tmp_path), max_model_len=512, kv_cache_memory_bytes=8 << 20, device="cpu") as llm:
        text = "thank you <|audio|>what"
        given = {"prompt": text, "multi_modal_data": {"audio": (SOUND / 32768, 16_000)}}
        [found] = llm.generate([given], params, use_tqdm=False)
        tokenizer = llm.get_tokenizer()
        ids = tokenizer.encode(text.replace("<|audio|>", "<|audio|>" * sound.rows))
        [plain] = llm.generate(["thank you"], params, use_tqdm=False)
        thanks = tokenizer.encode("thank you")
    for reference, prompt, sounds, output in ((merged, ids, [sound], found), (model, thanks, [], plain)):
        expected: list[int] = []
        for _ in range(4):
            expected.append(int(reference_with_sounds(reference, [*prompt, *expected], sounds)[-1].argmax()))
        assert output.outputs[0].token_ids == expected


def test_a_model_that_hears_transcribes_beside_a_chat_model(tmp_path: Path) -> None:
    """As the speech model: loaded by the first sound, with a short context, and named to who asks a deaf model."""
    make_tiny_model(tmp_path / "chat", "llama", seed=1)
    make_hearing(tmp_path / "voxtral", "voxtral", max_position_embeddings=4096)
    asked = settings_for(tmp_path / "chat", max_model_len=512, kv_cache_memory_bytes=8 << 20)
    asked = dataclasses.replace(asked, server=dataclasses.replace(asked.server, speech_model=str(tmp_path / "voxtral")))
    with ManagedServer(asked) as live:
        deaf = live.post("/v1/chat/completions", chat(sound_part(), {"type": "text", "text": QUESTION}))
        assert deaf.status_code == 400
        assert "does not hear. No loaded model hears." in deaf.json()["error"]["message"]
        files = {"file": ("a.wav", WAV)}
        heard = httpx.post(f"{live.url}/v1/audio/transcriptions", files=files, data={"vad_filter": "false"}, timeout=60)
        assert heard.status_code == 200, heard.text
        assert heard.json()["text"]
        deaf = live.post("/v1/chat/completions", chat(sound_part(), {"type": "text", "text": QUESTION}, model="chat"))
        assert "Loaded models that hear: voxtral." in deaf.json()["error"]["message"]
        earlier = [{"role": "user", "content": [sound_part()]}, {"role": "assistant", "content": "Yes."},
                   {"role": "user", "content": "Go on."}]  # fmt: skip
        answer = live.post("/v1/chat/completions", {"messages": earlier, "max_tokens": 2, "model": "chat"})
        assert answer.status_code == 200
        assert answer.headers["x-localllm-warning"].startswith("a short text replaces a picture, sound or document")
        card = next(each.card for each in live.manager.entries if each.is_beside)
        assert card is not None
        assert (card.plan.max_model_len, card.plan.max_num_seqs) == (2048, 4)


def test_ranks_hear_what_one_process_hears(tmp_path: Path) -> None:
    make_hearing(tmp_path, "qwen3_asr")
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True)
    asked = [{"role": "user", "content": [sound_part(), {"type": "text", "text": QUESTION}]}]
    answers = []
    for given in ({}, {"tensor_parallel_size": 2}):
        with LLM(str(tmp_path), max_model_len=512, kv_cache_memory_bytes=8 << 20, device="cpu", **given) as llm:
            [result] = llm.chat(asked, params, use_tqdm=False)
            answers.append(result.outputs[0].token_ids)
    assert answers[0] == answers[1]
