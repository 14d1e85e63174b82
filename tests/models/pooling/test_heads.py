"""Classifiers, rewards and token vectors, against transformers' states and the definition of each head in fp32."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from localllm.config.settings import EngineConfig, Settings
from localllm.errors import CorruptModel, UnsupportedModel
from localllm.llm import LLM
from localllm.models.encoders.model import PoolingModel, count_parameters, load_pooling_model
from localllm.models.encoders.recipe import Want, read_recipe, task_of
from localllm.serving.build import build_engine
from tests.models.pooling.checkpoints import SIZES, save_bert
from tests.tiny import save_tiny_tokenizer
from tests.web.live_server import LiveServer

CPU = torch.device("cpu")
INPUTS = [[3, 7, 9, 11, 20], [5, 6], [8] * 9]


def save(path: Path, config: Any, architecture: str, head: dict[str, torch.Tensor], auto: str = "AutoModel") -> Any:
    """Save a model of transformers with the tensors of a head, as the publishers of such models do."""
    torch.manual_seed(0)
    model = getattr(transformers, auto).from_config(config).eval()
    model.save_pretrained(path)
    prefix = "bert." if architecture == "HF_ColBERT" else "model."
    tensors = {f"{prefix}{name}": tensor for name, tensor in load_file(path / "model.safetensors").items()}
    save_file(tensors | head, path / "model.safetensors", {"format": "pt"})
    written = json.loads((path / "config.json").read_text()) | {"architectures": [architecture]}
    (path / "config.json").write_text(json.dumps(written))
    save_tiny_tokenizer(path)
    return model


def reward_head(num_labels: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    return {
        "score.0.weight": torch.randn(32, 32), "score.0.bias": torch.randn(32),
        "score.2.weight": torch.randn(num_labels, 32), "score.2.bias": torch.randn(num_labels),
    }  # fmt: skip


def qwen2() -> Any:
    return transformers.Qwen2Config(**SIZES, num_key_value_heads=2)


def loaded(path: Path, task: Any) -> PoolingModel:
    assert task_of(path) == task
    return load_pooling_model(path, read_recipe(path, task), CPU, torch.float32)


def states_of(model: Any) -> list[torch.Tensor]:
    with torch.no_grad():
        return [model(input_ids=torch.tensor([ids])).last_hidden_state[0] for ids in INPUTS]


def outputs(model: PoolingModel, want: Want) -> list[torch.Tensor]:
    found = model.outputs(INPUTS, None, [want] * len(INPUTS))
    return [torch.tensor(values).view(-1, model.dim) for values in found]


@pytest.mark.parametrize(
    ("architecture", "num_labels"), [("Qwen2ForRewardModel", 1), ("Qwen2ForProcessRewardModel", 2)]
)
def test_rewards(architecture: str, num_labels: int, tmp_path: Path) -> None:
    head = reward_head(num_labels)
    reference = save(tmp_path, qwen2(), architecture, head)
    score = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.ReLU(), torch.nn.Linear(32, num_labels))
    score.load_state_dict({name.removeprefix("score."): tensor for name, tensor in head.items()})
    model = loaded(tmp_path, "score")
    for ours, states in zip(outputs(model, "tokens"), states_of(reference), strict=True):
        torch.testing.assert_close(ours, score(states).detach(), rtol=1e-4, atol=1e-4)
    assert ("pooled" in model.wants) is (num_labels == 1)
    if num_labels == 1:
        for ours, states in zip(outputs(model, "pooled"), states_of(reference), strict=True):
            torch.testing.assert_close(ours, score(states[-1:]).detach(), rtol=1e-4, atol=1e-4)
    own = sum(each.numel() for each in (*reference.parameters(), *reference.buffers()))
    counted = count_parameters(tmp_path, read_recipe(tmp_path, "score"))
    assert counted == own + sum(each.numel() for each in head.values())


def test_token_vectors_of_late_interaction(tmp_path: Path) -> None:
    torch.manual_seed(1)
    weight = torch.randn(16, 32)
    config = transformers.BertConfig(**SIZES)
    reference = save(tmp_path, config, "HF_ColBERT", {"linear.weight": weight})
    model = loaded(tmp_path, "embed")
    assert (model.dim, model.wants) == (16, {"tokens"})
    for ours, states in zip(outputs(model, "tokens"), states_of(reference), strict=True):
        wanted = torch.nn.functional.normalize(states @ weight.T, dim=-1)
        torch.testing.assert_close(ours, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["Llama", "Qwen2", "Qwen3", "Mistral", "Bert"])
def test_classifiers_have_raw_scores_and_probabilities(kind: str, tmp_path: Path) -> None:
    more = {} if kind == "Bert" else {"num_key_value_heads": 2, "head_dim": 8}
    config = getattr(transformers, f"{kind}Config")(**SIZES, **more, num_labels=3, pad_token_id=0)
    torch.manual_seed(0)
    reference = transformers.AutoModelForSequenceClassification.from_config(config).eval()
    reference.save_pretrained(tmp_path)
    model = loaded(tmp_path, "score")
    with torch.no_grad():
        logits = [reference(input_ids=torch.tensor([ids])).logits for ids in INPUTS]
    for raw, probs, wanted in zip(outputs(model, "raw"), outputs(model, "pooled"), logits, strict=True):
        torch.testing.assert_close(raw, wanted, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(probs, wanted.softmax(-1), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("problem", "activation"), [
    ("multi_label_classification", torch.sigmoid), ("regression", lambda x: x),
])  # fmt: skip
def test_the_checkpoint_names_its_activation(problem: str, activation: Any, tmp_path: Path) -> None:
    save_bert(tmp_path, "AutoModelForSequenceClassification", num_labels=3, problem_type=problem)
    model = loaded(tmp_path, "score")
    for raw, ours in zip(outputs(model, "raw"), outputs(model, "pooled"), strict=True):
        torch.testing.assert_close(ours, activation(raw))


@pytest.mark.parametrize("name", ["InternLM2ForRewardModel", "JinaColBERT", "BertForTokenClassification"])
def test_other_heads_are_refused_by_name(name: str, tmp_path: Path) -> None:
    save(tmp_path, qwen2(), name, {})
    with pytest.raises(UnsupportedModel, match=name):
        read_recipe(tmp_path, task_of(tmp_path))  # type: ignore[arg-type]


def test_a_head_without_its_tensors_is_refused(tmp_path: Path) -> None:
    save(tmp_path, qwen2(), "Qwen2ForRewardModel", {})
    with pytest.raises(CorruptModel, match=r"lacks score\.0\.weight"):
        loaded(tmp_path, "score")


def served(path: Path) -> LiveServer:
    return LiveServer(build_engine(Settings(EngineConfig(model=str(path), device="cpu"))))


def test_classify_and_pooling_over_http(tmp_path: Path) -> None:
    labels = {0: "sad", 1: "glad", 2: "mad"}
    save_bert(
        tmp_path, "AutoModelForSequenceClassification", id2label=labels, label2id={v: k for k, v in labels.items()}
    )
    with served(tmp_path) as server, LLM(str(tmp_path), device="cpu") as llm:
        told = server.post("/classify", {"input": ["a fine day", "b"]}).json()
        assert [each["num_classes"] for each in told["data"]] == [3, 3]
        for each, ours in zip(told["data"], llm.classify(["a fine day", "b"]), strict=True):
            assert sum(each["probs"]) == pytest.approx(1, abs=1e-5)
            assert each["label"] == labels[max(range(3), key=each["probs"].__getitem__)]
            assert each["probs"] == pytest.approx(ours.probs, abs=1e-5)
        raw = server.post("/pooling", {"input": "b", "use_activation": False}).json()["data"][0]["data"]
        assert torch.tensor(raw).softmax(-1).tolist() == pytest.approx(told["data"][1]["probs"], abs=1e-5)
        assert llm.encode("b", pooling_task="classify", use_activation=False)[0].data == pytest.approx(raw, abs=1e-5)
        assert server.post("/pooling", {"input": "b", "task": "embed"}).status_code == 400
        assert server.post("/pooling", {"input": "b", "task": "token_classify"}).status_code == 400
        assert server.post("/pooling", {}).json()["error"]["param"] == "input"
        assert server.post("/pooling", {"messages": [], "input": "b"}).status_code == 400


def test_pooling_of_tokens_and_of_a_conversation(tmp_path: Path) -> None:
    save(tmp_path, qwen2(), "Qwen2ForProcessRewardModel", reward_head(2))
    with served(tmp_path) as server, LLM(str(tmp_path), device="cpu") as llm:
        rows = server.post("/pooling", {"input": [[3, 4, 5]]}).json()["data"][0]["data"]
        assert [len(row) for row in rows] == [2, 2, 2]
        (ours,) = llm.reward({"prompt_token_ids": [3, 4, 5]})
        torch.testing.assert_close(torch.tensor(ours.data), torch.tensor(rows))
        chat = {"messages": [{"role": "user", "content": "1 + 1"}, {"role": "assistant", "content": "2"}]}
        assert len(server.post("/pooling", chat).json()["data"][0]["data"]) > 3
        assert "not probabilities" in server.post("/classify", {"input": "a"}).json()["error"]["message"]
    save_bert(tmp_path / "bert")
    with served(tmp_path / "bert") as server:
        vector = server.post("/pooling", {"input": "a b"}).json()["data"][0]["data"]
        assert vector == server.post("/v1/embeddings", {"input": "a b"}).json()["data"][0]["embedding"]
        tokens = server.post("/pooling", {"input": "a b", "task": "token_embed", "encoding_format": "base64"}).json()
        assert all(isinstance(each, str) for each in tokens["data"][0]["data"])
        assert server.post("/classify", {"input": "a"}).json()["error"]["code"] == "wrong_task"
