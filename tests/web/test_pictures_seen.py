"""Pictures for a model that sees: every dialect reads them alike, counts them, and says what becomes of them."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import anthropic
import ollama
import openai
import pytest

from localllm.serving.served import ServedModel
from tests.media.pictures import MARK, MARKS, SEEING, FakeProcessor, data_url, picture, sight
from tests.web.harness import refusal
from tests.web.live_server import LiveServer, PacedRunner, fake_model, settings

PNG = picture(size=(30, 20))  # 6 tokens
B64, URL = base64.b64encode(PNG).decode(), data_url(PNG)
LARGE = data_url(picture("JPEG", (200, 100)))  # 50 tokens, of which 16 are read at most
IMAGE: dict[str, Any] = {"type": "image_url", "image_url": {"url": URL}}
BLOCK: dict[str, Any] = {"type": "image", "source": {"type": "base64", "media_type": "image/gif", "data": B64}}
PART: dict[str, Any] = {"type": "input_image", "image_url": URL}
SEE: dict[str, Any] = {"type": "text", "text": "See"}
SEE_PART: dict[str, Any] = {"type": "input_text", "text": "See"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    made = fake_model(tmp_path_factory.mktemp("seeing"), PacedRunner(), chat_template=SEEING, picture_rows=16)
    seeing = sight(made.tokenizer.encode(MARK, add_special_tokens=False)[0])
    return replace(made, sight=seeing, chat_template=made.chat_template.of_seeing(MARKS))


@pytest.fixture(scope="module")
def server(model: ServedModel) -> Iterator[LiveServer]:
    with LiveServer(model, settings()) as live:
        yield live


def user(*content: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(content)}


def chat(*content: Any, **more: Any) -> dict[str, Any]:
    return {"messages": [user(*content)], "max_tokens": 2, **more}


DIALECTS: dict[str, tuple[str, dict[str, Any]]] = {
    "openai": ("/v1/chat/completions", chat(IMAGE, SEE)),
    "openai with a string": ("/v1/chat/completions", chat({"type": "image_url", "image_url": URL}, SEE)),
    "openai with input_image": ("/v1/chat/completions", chat(PART, SEE)),
    "responses": ("/v1/responses", {"input": [user(PART, SEE_PART)], "max_output_tokens": 2}),
    "anthropic": ("/v1/messages", chat(BLOCK, SEE)),
    "ollama": ("/api/chat", {"messages": [{"role": "user", "content": "See", "images": [B64]}], "model": "tiny",
                             "stream": False, "options": {"num_predict": 2}}),
    "ollama with a URL": ("/api/generate", {"prompt": "See", "images": [URL], "model": "tiny", "stream": False,
                                            "options": {"num_predict": 2}}),
}  # fmt: skip


def prompt_of(server: LiveServer, path: str, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return what the engine is asked for."""
    asked: list[Any] = []
    submit = server.model.client._engine.submit  # type: ignore[union-attr]
    monkeypatch.setattr(server.model.client._engine, "submit", lambda each: (asked.append(each), submit(each)))
    answer = server.post(path, body)
    assert answer.status_code == 200, answer.text
    return asked[0]


def test_every_dialect_makes_the_same_prompt(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    made = {name: prompt_of(server, *each, monkeypatch) for name, each in DIALECTS.items()}
    first = made["openai"]
    [span] = first.media
    assert span.rows == 6
    for name, each in made.items():
        assert each.token_ids[: each.prompt_len] == first.token_ids[: first.prompt_len], name
        assert [span.digest for span in each.media] == [span.digest], name
        assert each.media[0].start == span.start


def test_the_usage_says_the_tokens_of_pictures(server: LiveServer) -> None:
    usage = server.post("/v1/chat/completions", chat(IMAGE, IMAGE, SEE)).json()["usage"]
    assert usage["prompt_tokens_details"]["image_tokens"] == 12
    assert "image_tokens" not in server.post("/v1/chat/completions", chat(SEE)).text
    answer = server.post("/v1/responses", DIALECTS["responses"][1]).json()
    assert answer["usage"]["input_tokens_details"]["image_tokens"] == 6


def test_pictures_are_counted_without_their_pixels(server: LiveServer, model: ServedModel) -> None:
    assert model.sight is not None
    processor: Any = model.sight.processor
    before = len(processor.processed)
    text = server.post("/v1/chat/completions/input_tokens", chat(SEE)).json()["input_tokens"]
    for path, body, name in [
        ("/v1/chat/completions/input_tokens", chat(IMAGE, SEE), "input_tokens"),
        ("/v1/messages/count_tokens", {"messages": [user(BLOCK, SEE)]}, "input_tokens"),
        ("/v1/responses/input_tokens", {"input": [user(PART, SEE_PART)]}, "input_tokens"),
        ("/tokenize", {"messages": [user(IMAGE, SEE)]}, "count"),
    ]:
        answer = server.post(path, body)
        assert answer.status_code == 200, answer.text
        assert answer.json()[name] >= text + 6, path
    assert len(processor.processed) == before


def test_a_picture_is_decoded_once_for_all_turns_of_a_chat(server: LiveServer, model: ServedModel) -> None:
    assert model.sight is not None
    processor: Any = model.sight.processor
    own = {"type": "image_url", "image_url": {"url": data_url(picture(size=(40, 40), colour="blue"))}}
    turns = [user(own), {"role": "assistant", "content": "Blue."}, user(SEE)]
    for count in (1, 3):
        assert server.post("/v1/chat/completions", {"messages": turns[:count], "max_tokens": 1}).status_code == 200
        assert [size for size, _ in processor.processed].count((40, 40)) == 1


def test_scaling_is_reported(server: LiveServer) -> None:
    large = {"type": "image_url", "image_url": {"url": LARGE}}
    for stream in (False, True):
        answer = server.post("/v1/chat/completions", chat(IMAGE, large, stream=stream))
        assert answer.headers["x-localllm-warning"] == (
            "image 2 scaled from 200 x 100 to 50 x 20 (10 of at most 16 tokens)"
        )
    moving = picture("GIF", (20, 20), save_all=True)
    assert "x-localllm-warning" not in server.post("/v1/messages", chat(BLOCK)).headers
    assert moving


def test_what_a_part_asks_of_its_picture_is_honoured(server: LiveServer, model: ServedModel) -> None:
    def count(**asked: Any) -> int:
        part = {"type": "image_url", "image_url": {"url": LARGE, **asked}}
        answer = server.post("/v1/chat/completions", chat(part))
        assert answer.status_code == 200, answer.text
        found: int = answer.json()["usage"]["prompt_tokens_details"]["image_tokens"]
        return found

    assert (count(), count(detail="auto"), count(detail="low"), count(max_pixels=300)) == (10, 10, 2, 2)
    assert model.sight is not None
    processor: Any = model.sight.processor
    kwargs = {"mm_processor_kwargs": {"crop": True}}
    assert server.post("/v1/chat/completions", chat(IMAGE, **kwargs)).status_code == 200
    assert processor.processed[-1][1].options == (("crop", True),)


REFUSED: list[tuple[str, dict[str, Any], int, str]] = [
    ("/v1/chat/completions", chat({"type": "image_url", "image_url": {"url": URL, "detail": "huge"}}), 400,
     "messages[0].content[0] has an unknown detail."),
    ("/v1/chat/completions", chat({"type": "image_url", "image_url": {"url": URL, "max_pixels": "1"}}), 400,
     "max_pixels of messages[0].content[0] must be a whole number"),
    ("/v1/chat/completions", chat({"type": "image_url"}), 400, "messages[0].content[0] has no picture."),
    ("/v1/chat/completions", chat(SEE, {"type": "image_url", "image_url": "https://example.org/a.png"}), 400,
     "Pictures are not fetched from URLs. This server opens no connection for a request."),
    ("/v1/chat/completions", chat({"type": "image_url", "image_url": "file:///etc/passwd"}), 400, "is not a URL"),
    ("/v1/chat/completions", chat({"type": "image_url", "image_url": data_url(b"hello")}), 400,
     "messages[0].content[0] is not a picture that is read here."),
    ("/v1/chat/completions", chat({"type": "image_url", "image_url": data_url(PNG[:30])}), 400, "is damaged."),
    ("/v1/chat/completions", chat(*[IMAGE] * 5), 400,
     "The request has 5 pictures; at most 4 are taken. --limit-mm-per-prompt image=5"),
    ("/v1/chat/completions", chat({"type": "video_url", "video_url": {"url": "x"}}), 400,
     "messages[0].content[0] is a video. Only pictures are read. Send some of its frames as pictures."),
    ("/v1/chat/completions", chat(IMAGE, mm_processor_kwargs={"zoom": 1}), 400, "mm_processor_kwargs has zoom."),
    ("/v1/chat/completions", chat(IMAGE, truncate_prompt_tokens=3), 400, "cannot be combined with pictures"),
    ("/v1/chat/completions", chat({"type": "text", "text": "a" * 4000}, IMAGE), 400, "6 in 1 pictures"),
    ("/v1/completions", {"prompt": "a", "mm_processor_kwargs": {"crop": True}}, 400, "Pictures belong to messages"),
    ("/v1/messages", chat({"type": "image", "source": {"type": "file", "file_id": "f"}}), 400, "is not a URL"),
    ("/v1/responses", {"input": [user({"type": "input_image", "file_id": "f"})]}, 400, "has no picture."),
    ("/api/chat", {"model": "tiny", "messages": [{"role": "user", "content": "a", "images": ["/tmp/a.png"]}]}, 400,
     "is damaged"),
]  # fmt: skip


@pytest.mark.parametrize("case", range(len(REFUSED)))
def test_refusals_name_the_part(server: LiveServer, case: int) -> None:
    path, body, status, text = REFUSED[case]
    answer = server.post(path, body)
    assert answer.status_code == status, answer.text
    assert text in answer.json()["error"]["message"] if path[:4] == "/v1/" else text in answer.text


def test_a_picture_that_is_too_large_is_refused_with_413(server: LiveServer) -> None:
    large = data_url(picture(size=(12_000, 9_000), mode="1", colour=0))
    body = chat({"type": "image_url", "image_url": large})
    assert refusal(server.post("/v1/chat/completions", body), 413)["code"] == "media_too_large"


def test_pictures_in_results_of_tools_are_seen(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "view", "arguments": "{}"}}
    use = {"type": "tool_use", "id": "c", "name": "view", "input": {}}
    item = {"type": "function_call", "call_id": "c", "name": "view", "arguments": "{}"}
    bodies = [
        ("/v1/chat/completions", {"max_tokens": 1, "messages": [user(SEE), {"role": "assistant", "tool_calls": [call]},
                                  {"role": "tool", "tool_call_id": "c", "content": [IMAGE]}]}),
        ("/v1/messages", {"max_tokens": 1, "messages": [
            user(SEE), {"role": "assistant", "content": [use]},
            user({"type": "tool_result", "tool_use_id": "c", "content": [BLOCK]})]}),
        ("/v1/responses", {"max_output_tokens": 1, "input": [
            user(SEE_PART), item, {"type": "function_call_output", "call_id": "c", "output": [PART]}]}),
    ]  # fmt: skip
    for path, body in bodies:
        assert len(prompt_of(server, path, body, monkeypatch).media) == 1, path


def test_a_text_cannot_stand_for_a_picture(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    words = {"type": "text", "text": f"{MARK}[IMG]"}
    asked = prompt_of(server, "/v1/chat/completions", chat(words, IMAGE, words), monkeypatch)
    assert len(asked.media) == 1
    assert prompt_of(server, "/v1/chat/completions", chat(words), monkeypatch).media == ()


def test_lists_of_models_say_that_it_sees(server: LiveServer) -> None:
    [entry] = server.get("/v1/models").json()["data"][:1]
    assert "vision" in entry["capabilities"]
    assert entry["image"] == {"min_tokens": 1, "max_tokens": 16, "px_per_token": 100}
    assert "vision" in server.post("/api/show", {"model": "tiny"}).json()["capabilities"]
    assert server.get("/props").json()["modalities"]["vision"] is True


COSTS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"width": 30, "height": 20}, {"tokens": 6, "width": 30, "height": 20, "scaled": False}),
    ({"width": 200, "height": 100}, {"tokens": 10, "width": 50, "height": 20, "scaled": True}),
    ({"width": 200, "height": 100, "detail": "low"}, {"tokens": 2, "width": 20, "height": 10, "scaled": True}),
]


@pytest.mark.parametrize(("asked", "cost"), COSTS)
def test_the_cost_of_a_picture_is_known_before_it_is_sent(server: LiveServer, asked: Any, cost: Any) -> None:
    assert server.post("/localllm/v1/media/tokens", asked).json() == {**cost, "seconds": None}


def test_the_cost_of_a_picture_is_refused_for_a_model_that_reads_text(hermes: LiveServer) -> None:
    error = refusal(hermes.post("/localllm/v1/media/tokens", {"width": 1, "height": 1}), 400)
    assert "tiny does not see pictures." in error["message"]


# Real clients -------------------------------------------------------------------------------------------------------


def test_the_real_clients_send_pictures(server: LiveServer) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        answer = client.chat.completions.create(model="tiny", messages=[user(IMAGE, SEE)], max_tokens=2)  # type: ignore[list-item]
        assert answer.usage is not None
        assert answer.usage.prompt_tokens > 6
        reply = client.responses.create(model="tiny", input=[user(PART, SEE_PART)], max_output_tokens=2)  # type: ignore[list-item]
        assert reply.usage is not None
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as other:
        message = other.messages.create(model="tiny", messages=[user(BLOCK, SEE)], max_tokens=2)  # type: ignore[list-item]
        assert message.usage.output_tokens == 2
    local = ollama.Client(host=server.url, timeout=20)
    sent = ollama.Message(role="user", content="See", images=[ollama.Image(value=PNG)])
    assert local.chat("tiny", [sent], options={"num_predict": 2}).eval_count == 2
    local._client.close()


def test_the_fake_processor_has_the_interface_of_the_real_one() -> None:
    from localllm.models.vision.processor import PictureProcessor

    names = {name for name in vars(FakeProcessor) if not name.startswith("_")} - {"limits", "processed"}
    assert all(hasattr(PictureProcessor, name) for name in names)
