"""Filling in the middle over HTTP: a suffix in two dialects, and llama.cpp's /infill."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from localllm.text.fill_in import find_fill_in
from tests.fake_runner import expected_output
from tests.tiny import VOCAB_SIZE
from tests.web.live_server import MAX_MODEL_LEN, LiveServer, PacedRunner, fake_model

GREEDY = {"temperature": 0}
ROLES = {"prefix_token": "P", "suffix_token": "S", "middle_token": "M"}


@pytest.fixture(scope="module")
def coder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """A server whose model has tokens for filling in the middle: three letters."""
    folder: Path = tmp_path_factory.mktemp("coder")
    model = fake_model(folder, PacedRunner())
    model.tokenizer.special_tokens |= ROLES
    with LiveServer(model) as live:
        yield live


def expected_text(server: LiveServer, before: str, behind: str, count: int) -> str:
    assert server.model is not None
    tokenizer = server.model.tokenizer
    fill_in = find_fill_in(tokenizer)
    assert fill_in is not None
    return tokenizer.decode(expected_output(fill_in.prompt(before, behind), count, VOCAB_SIZE))


def test_a_suffix_makes_the_models_prompt(coder: LiveServer) -> None:
    wanted = expected_text(coder, "a = ", "\nb", 6)
    body: dict[str, Any] = {"prompt": "a = ", "suffix": "\nb", "max_tokens": 6, **GREEDY}
    assert coder.post("/v1/completions", body).json()["choices"][0]["text"] == wanted
    options = {"num_predict": 6, **GREEDY}
    asked = {"model": "tiny", "prompt": "a = ", "suffix": "\nb", "options": options, "stream": False}
    assert coder.post("/api/generate", asked).json()["response"] == wanted


def test_infill_answers_as_llama_cpp(coder: LiveServer) -> None:
    body = {"input_prefix": "a", "prompt": " = ", "input_suffix": "\nb", "n_predict": 6, "cache_prompt": True, **GREEDY}
    answer = coder.post("/infill", body).json()
    assert answer["content"] == expected_text(coder, "a = ", "\nb", 6)
    assert (answer["stop"], answer["stop_type"], answer["tokens_predicted"]) == (True, "limit", 6)
    assert answer["timings"]["predicted_n"] == 6
    streamed = coder.post("/infill", body | {"stream": True}).text
    pieces = [json.loads(line.removeprefix("data: ")) for line in streamed.split("\n\n") if line]
    assert "".join(piece["content"] for piece in pieces) == answer["content"]
    assert [piece["stop"] for piece in pieces] == [False] * (len(pieces) - 1) + [True]


def test_the_requests_of_llama_vim_are_answered(coder: LiveServer) -> None:
    """One that only warms the cache, and one with other files that do not fit."""
    body = {
        "id_slot": 0, "input_prefix": "x" * 2 * MAX_MODEL_LEN, "input_suffix": "y" * 2 * MAX_MODEL_LEN, "prompt": "",
        "input_extra": [{"text": "z" * 100, "filename": "z.py"}], "n_predict": 8, "top_k": 40, "top_p": 0.9,
        "samplers": ["top_k", "top_p", "infill"], "n_indent": 4, "t_max_predict_ms": 500, "stop": ["!"],
        "response_fields": ["content"], "cache_prompt": True, "stream": False,
    }  # fmt: skip
    answer = coder.post("/infill", body)
    assert answer.status_code == 200
    assert answer.json()["tokens_evaluated"] <= MAX_MODEL_LEN - 8
    assert "samplers" in answer.headers["x-localllm-warning"]
    assert coder.post("/infill", body | {"n_predict": 0}).json()["content"] == ""
    unlimited = coder.post("/infill", {"input_prefix": "a", **GREEDY}).json()
    assert unlimited["tokens_predicted"] + unlimited["tokens_evaluated"] == MAX_MODEL_LEN


@pytest.mark.parametrize(
    ("path", "body", "named"),
    [
        ("/v1/completions", {"prompt": "a", "suffix": "b"}, "suffix"),
        ("/infill", {"input_prefix": "a", "input_suffix": "b"}, "input_suffix"),
    ],
)
def test_a_model_without_markers_refuses_by_name(
    server: LiveServer, path: str, body: dict[str, Any], named: str
) -> None:
    answer = server.post(path, body)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == named
    assert "cannot fill in the middle" in error["message"]


@pytest.mark.parametrize("more", [{"echo": True}, {"prompt": [1, 2]}, {"truncate_prompt_tokens": 3}])
def test_what_a_suffix_cannot_be_combined_with_is_refused(coder: LiveServer, more: dict[str, Any]) -> None:
    answer = coder.post("/v1/completions", {"prompt": "a", "suffix": "b", **more})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == next(iter(more))
