"""Models that embed and score, offline and over a real socket with the real `openai` client."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest
import torch
import transformers

from localllm.cli import main
from localllm.config.settings import EngineConfig, Settings
from localllm.engine.pooling_client import TextEncoder
from localllm.errors import ContextTooLong, InvalidParameter, UnsupportedModel, UnsupportedOption
from localllm.llm import LLM
from localllm.serving.build import build_engine
from localllm.serving.served import WrongTask
from localllm.text.chat_template import ChatTemplate
from localllm.text.tokenizer import load_tokenizer
from tests.models.pooling.checkpoints import save_bert, save_cross_encoder, save_sentence_transformer
from tests.web.live_server import LiveServer, settings

TEXTS = ["The quick brown fox", "Paris is the capital of France.", "a"]


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_bert(tmp_path_factory.mktemp("bert"))


@pytest.fixture(scope="module")
def cross_encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_cross_encoder(tmp_path_factory.mktemp("cross"))


@pytest.fixture(scope="module")
def embedding_server(bert: Path) -> Iterator[LiveServer]:
    model = build_engine(Settings(EngineConfig(model=str(bert), device="cpu")))
    with LiveServer(model, settings(ui=True)) as server:
        yield server


@pytest.fixture(scope="module")
def score_server(cross_encoder: Path) -> Iterator[LiveServer]:
    with LiveServer(build_engine(Settings(EngineConfig(model=str(cross_encoder), device="cpu")))) as server:
        yield server


def by_definition(path: Path, text: str) -> torch.Tensor:
    """Mean of the token states, brought to length 1, by transformers."""
    from tokenizers import Tokenizer

    ids = Tokenizer.from_file(str(path / "tokenizer.json")).encode(text).ids
    model = transformers.AutoModel.from_pretrained(path).eval()
    with torch.no_grad():
        mean = model(input_ids=torch.tensor([ids])).last_hidden_state[0].mean(0)
    return mean / mean.norm()


# ---- offline ---------------------------------------------------------------------------------------------------------


def test_llm_embeds(bert: Path) -> None:
    with LLM(str(bert), device="cpu") as llm:
        vectors = [output.embedding for output in llm.embed(TEXTS)]
        for text, vector in zip(TEXTS, vectors, strict=True):
            torch.testing.assert_close(torch.tensor(vector), by_definition(bert, text), rtol=1e-4, atol=1e-5)
        assert llm.embed({"prompt_token_ids": [5, 6, 7]})[0].embedding
        with pytest.raises(ContextTooLong, match=r"longest input has 64"):
            llm.embed("word " * 200)
        assert llm.embed("word " * 200, truncate_prompt_tokens=-1)
        with pytest.raises(InvalidParameter, match="vocabulary"):
            llm.embed({"prompt_token_ids": [512]})
        with pytest.raises(WrongTask, match="embeds"):
            llm.generate("Hello")
        with pytest.raises(WrongTask):
            llm.score("a", "b")


def test_settings_of_a_kv_cache_are_named_where_there_is_none(bert: Path) -> None:
    """They are for the generating models beside it."""
    model = build_engine(Settings(EngineConfig(model=str(bert), kv_disk_gib=1.0, swap_space=0.5)))
    model.close()
    [note] = [note for note in model.plan.notes if "--kv-disk-gib" in note]
    assert note.startswith("--swap-space, --kv-disk-gib: not used by ")
    plain = build_engine(Settings(EngineConfig(model=str(bert))))
    plain.close()
    assert plain.plan.notes == tuple(each for each in model.plan.notes if each != note)


def test_llm_scores(cross_encoder: Path) -> None:
    with LLM(str(cross_encoder), device="cpu") as llm:
        scores = [output.score for output in llm.score("What is the capital?", TEXTS)]
        assert len(set(scores)) == len(TEXTS)
        assert scores == pytest.approx([llm.score("What is the capital?", text)[0].score for text in TEXTS], abs=1e-6)
        with pytest.raises(WrongTask, match="scores pairs"):
            llm.generate("Hello")


def test_a_generating_model_does_not_embed(tiny_llama_path: Path) -> None:
    with LLM(str(tiny_llama_path), device="cpu") as llm, pytest.raises(WrongTask, match="generates text"):
        llm.embed("Hello")
    with LLM(str(tiny_llama_path), device="cpu", task="embed") as llm:
        assert len(llm.embed("Hello")[0].embedding) == 64


MESSAGES = {"modality_config": {"text": {"method": "forward"}, "message": {"method": "forward", "format": "flat"}}}


def test_a_text_is_rendered_as_a_message_where_the_checkpoint_says_so(tmp_path: Path) -> None:
    """As sentence-transformers does: one message of the user, behind the prompt as the system's."""
    path = save_sentence_transformer(tmp_path, **MESSAGES)
    user = "<|im_start|>user\na dog<|im_end|>"
    wanted = [by_definition(path, user), by_definition(path, "<|im_start|>system\nFind: <|im_end|>" + user)]
    model = build_engine(Settings(EngineConfig(model=str(path), device="cpu")))
    with LiveServer(model) as server, client(server) as sdk:
        plain = sdk.embeddings.create(model=path.name, input="a dog")
        asked = sdk.embeddings.create(model=path.name, input="a dog", extra_body={"prompt_name": "query"})
        long = sdk.embeddings.create(model=path.name, input="a dog" * 50, extra_body={"truncate_prompt_tokens": -1})
    for answer, vector in zip((plain, asked), wanted, strict=True):
        torch.testing.assert_close(torch.tensor(answer.data[0].embedding), vector, rtol=1e-4, atol=1e-5)
    assert long.usage.prompt_tokens == 64


def test_a_prompt_goes_before_a_plain_text(tmp_path: Path) -> None:
    path = save_sentence_transformer(tmp_path, modality_config={"text": {"method": "forward"}})
    with LLM(str(path), device="cpu") as llm:
        [asked] = llm._pool(llm._engine.pooler.inputs(["a dog"], prompt="Find: "))
    torch.testing.assert_close(torch.tensor(asked), by_definition(path, "Find: a dog"), rtol=1e-4, atol=1e-5)


def test_a_model_of_messages_without_a_template_is_refused(tmp_path: Path) -> None:
    path = save_sentence_transformer(tmp_path, **MESSAGES)
    config = json.loads((path / "tokenizer_config.json").read_text())
    del config["chat_template"]
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModel, match=r"as messages.*no chat template"):
        LLM(str(path), device="cpu")


def test_a_cut_text_keeps_the_tokens_that_end_every_text(cross_encoder: Path) -> None:
    """What closes a text (`[SEP]`, an end-of-sequence token, a template's end) is what models pool, or have learned."""
    tokenizer = load_tokenizer(cross_encoder)
    start, end = tokenizer.token_id("<|im_start|>"), tokenizer.token_id("<|im_end|>")
    plain = TextEncoder(tokenizer)
    whole = plain.encode("word " * 20)
    assert (whole[0], whole[-1]) == (start, end)
    assert plain.cut(whole, 10) == [*whole[:9], end]
    assert plain.cut(whole, len(whole)) == whole
    assert plain.cut(whole, 1) == [start]
    ids, types = plain.encode_pair("What?", "word " * 20)
    assert plain.cut_pair(ids, types, 20) == ([*ids[:19], end], [*types[:19], types[-1]])
    assert plain.cut_pair(ids, types, len(ids)) == (ids, types)
    message = TextEncoder(tokenizer, ChatTemplate.of(tokenizer))
    whole = message.encode("word " * 20)
    assert message.cut(whole, 10) == [*whole[:9], end]


def test_lower_case(cross_encoder: Path) -> None:
    tokenizer = load_tokenizer(cross_encoder)
    lower = TextEncoder(tokenizer, lower_case=True)
    assert lower.encode("Dog", "FIND: ") == tokenizer.encode("find: dog")
    assert lower.encode_pair("Dog", "Cat") == tokenizer.encode_pair("dog", "cat")


def test_flags_that_mean_nothing_here_are_refused(bert: Path) -> None:
    with pytest.raises(UnsupportedOption, match=r"--quantization does not apply"):
        LLM(str(bert), device="cpu", quantization="int8")


def test_show_and_fit_know_such_models(bert: Path, cross_encoder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path, does in ((bert, "embeds texts"), (cross_encoder, "scores pairs of texts")):
        assert main(["show", str(path)]) == 0
        shown = capsys.readouterr().out
        assert does in shown
        assert "64 tokens at most" in shown
        assert main(["fit", str(path), "--device", "cpu"]) == 0
        fit = capsys.readouterr().out
        assert re.search(r"verdict +fits", fit)
        assert "KV" not in fit


# ---- over a socket ---------------------------------------------------------------------------------------------------


def client(server: LiveServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def test_openai_embeddings(embedding_server: LiveServer, bert: Path) -> None:
    """The SDK asks for base64 and decodes it; plain numbers are the same."""
    with client(embedding_server) as sdk:
        answer = sdk.embeddings.create(model=bert.name, input=TEXTS)
        plain = sdk.embeddings.create(model=bert.name, input=TEXTS, encoding_format="float")
        short = sdk.embeddings.create(model=bert.name, input=TEXTS[0], dimensions=8)
        ids = sdk.embeddings.create(model=bert.name, input=[[5, 6], [7]])
    assert [each.index for each in answer.data] == [0, 1, 2]
    for text, one, other in zip(TEXTS, answer.data, plain.data, strict=True):
        torch.testing.assert_close(torch.tensor(one.embedding), by_definition(bert, text), rtol=1e-4, atol=1e-5)
        assert one.embedding == pytest.approx(other.embedding, abs=1e-6)
    assert len(short.data[0].embedding) == 8
    assert sum(x * x for x in short.data[0].embedding) == pytest.approx(1, abs=1e-5)
    assert ids.usage.prompt_tokens == ids.usage.total_tokens == 3


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"input": []}, "input", "list of strings"),
        ({"input": [1, "a"]}, "input", "list of strings"),
        ({"input": ""}, "input", "empty"),
        ({"input": "a", "dimensions": 33}, "dimensions", "have 32"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format", "base64"),
        ({"input": "a", "prompt_name": "query"}, "prompt_name", "no prompt named"),
        ({"input": "word " * 200}, "input", "truncate_prompt_tokens"),
        ({}, "input", "Missing"),
    ],
)
def test_wrong_bodies_are_refused_by_field(
    embedding_server: LiveServer, body: dict[str, object], param: str, message: str
) -> None:
    response = httpx.post(f"{embedding_server.url}/v1/embeddings", json=body)
    error = response.json()["error"]
    assert response.status_code == 400, error
    assert error["param"] == param
    assert message in str(error)


def test_each_kind_of_model_refuses_the_others_work(embedding_server: LiveServer, score_server: LiveServer) -> None:
    chat = {"messages": [{"role": "user", "content": "Hello"}]}
    for server in (embedding_server, score_server):
        for path, body in (("chat/completions", chat), ("completions", {"prompt": "Hello"})):
            response = httpx.post(f"{server.url}/v1/{path}", json=body)
            assert (response.status_code, response.json()["error"]["code"]) == (400, "wrong_task")
    assert httpx.post(f"{score_server.url}/v1/embeddings", json={"input": "a"}).status_code == 400
    assert httpx.post(f"{embedding_server.url}/v1/rerank", json={"query": "a", "documents": ["b"]}).status_code == 400


def test_rerank_and_score(score_server: LiveServer) -> None:
    body = {"query": "What is the capital?", "documents": [TEXTS[0], {"text": TEXTS[1]}, TEXTS[2]]}
    ranked = httpx.post(f"{score_server.url}/v1/rerank", json=body).json()
    scores = [result["relevance_score"] for result in ranked["results"]]
    assert scores == sorted(scores, reverse=True)
    assert {result["index"]: result["document"]["text"] for result in ranked["results"]} == dict(enumerate(TEXTS))
    best = httpx.post(f"{score_server.url}/v1/rerank", json=body | {"top_n": 1, "return_documents": False}).json()
    assert best["results"] == [{k: v for k, v in ranked["results"][0].items() if k != "document"}]

    scored = httpx.post(f"{score_server.url}/v1/score", json={"text_1": body["query"], "text_2": TEXTS}).json()
    by_index = {result["index"]: result["relevance_score"] for result in ranked["results"]}
    assert {each["index"]: each["score"] for each in scored["data"]} == pytest.approx(by_index, abs=1e-6)
    bad = httpx.post(f"{score_server.url}/v1/score", json={"text_1": ["a", "b"], "text_2": ["a", "b", "c"]})
    assert bad.status_code == 400


def test_pages_and_metrics_know_such_a_model(embedding_server: LiveServer) -> None:
    for path in ("/", "/dashboard", "/metrics", "/v1/models", "/health"):
        assert httpx.get(f"{embedding_server.url}{path}", follow_redirects=True).status_code == 200, path
    page = httpx.post(f"{embedding_server.url}/chat", data={"message": "Hello"}, follow_redirects=True)
    assert "embeds; it supports no other task" in page.text
