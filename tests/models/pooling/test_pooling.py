"""Models that embed and score, against each input computed alone by transformers and pooled by the definition."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from localllm.errors import CorruptModel, LocalLLMError, UnsupportedModel
from localllm.models.encoders.model import PoolingModel, load_pooling_model
from localllm.models.encoders.recipe import PoolingRecipe, read_recipe, task_of

CPU = torch.device("cpu")
SIZES = {
    "vocab_size": 100,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 66,
    "pad_token_id": 1,
    "initializer_range": 0.3,
}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("BertConfig", {}),
    "xlm-roberta": ("XLMRobertaConfig", {"type_vocab_size": 1}),
    "modernbert": ("ModernBertConfig", {"local_attention": 16, "global_attn_every_n_layers": 2}),
    "qwen3": ("Qwen3Config", {"num_key_value_heads": 2, "head_dim": 8}),
}
LENGTHS = (5, 31, 1, 17, 17)


def make(path: Path, kind: str, head: str = "AutoModel", **more: Any) -> Any:
    name, own = KINDS[kind]
    config = getattr(transformers, name)(**{**SIZES, **own, **more})
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = getattr(transformers, head).from_config(config)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(path)
    return model.eval()


def inputs() -> list[list[int]]:
    choose = random.Random(0)
    return [choose.choices(range(2, 100), k=length) for length in LENGTHS]


def sentence_transformers_files(path: Path, **pooling: Any) -> None:
    kinds = {"": "Transformer", "1_Pooling": "Pooling", "2_Normalize": "Normalize"}
    modules = [{"type": f"sentence_transformers.models.{kind}", "path": folder} for folder, kind in kinds.items()]
    (path / "modules.json").write_text(json.dumps(modules))
    (path / "1_Pooling").mkdir()
    (path / "1_Pooling" / "config.json").write_text(json.dumps(pooling))


def states_alone(model: Any, token_ids: list[int]) -> Tensor:
    with torch.no_grad():
        return model(input_ids=torch.tensor([token_ids])).last_hidden_state[0].double()


POOLED = {
    "cls": lambda states: states[0],
    "last": lambda states: states[-1],
    "max": lambda states: states.amax(0),
    "mean": lambda states: states.mean(0),
    "weightedmean": lambda states: (
        (states * torch.arange(1, len(states) + 1)[:, None]).sum(0) / sum(range(1, len(states) + 1))
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_vectors_of_a_padded_batch_are_those_of_each_input_alone(kind: str, tmp_path: Path) -> None:
    reference = make(tmp_path, kind)
    assert task_of(tmp_path) == "embed"
    for mode, definition in POOLED.items():
        recipe = PoolingRecipe("embed", 64, mode, normalize=mode != "max")
        ours = load_pooling_model(tmp_path, recipe, CPU, torch.float32).run(inputs())
        wanted = torch.stack([definition(states_alone(reference, ids)) for ids in inputs()])
        if recipe.normalize:
            wanted = wanted / wanted.norm(dim=-1, keepdim=True)
        torch.testing.assert_close(ours.double(), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["bert", "xlm-roberta", "qwen3"])
@pytest.mark.parametrize("num_labels", [1, 3])
def test_scores(kind: str, num_labels: int, tmp_path: Path) -> None:
    reference = make(tmp_path, kind, "AutoModelForSequenceClassification", num_labels=num_labels)
    assert task_of(tmp_path) == "score"
    model = load_pooling_model(tmp_path, read_recipe(tmp_path, "score"), CPU, torch.float32)
    assert model.dim == num_labels
    with torch.no_grad():
        logits = torch.cat([reference(input_ids=torch.tensor([ids])).logits for ids in inputs()])
    wanted = logits.sigmoid() if num_labels == 1 else logits.softmax(-1)
    torch.testing.assert_close(model.run(inputs()), wanted, rtol=1e-4, atol=1e-5)


def test_the_second_text_of_a_pair_is_told_apart(tmp_path: Path) -> None:
    reference = make(tmp_path, "bert", "AutoModelForSequenceClassification", num_labels=1)
    model = load_pooling_model(tmp_path, read_recipe(tmp_path, "score"), CPU, torch.float32)
    ids, types = [[3, 4, 5, 6]], [[0, 0, 1, 1]]
    with torch.no_grad():
        wanted = reference(input_ids=torch.tensor(ids), token_type_ids=torch.tensor(types)).logits.sigmoid()
    torch.testing.assert_close(model.run(ids, types), wanted, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(model.run(ids), wanted, atol=1e-4)


def test_a_vector_passes_the_dense_layers(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    reference = make(tmp_path, "bert")
    sentence_transformers_files(tmp_path, pooling_mode_cls_token=True)
    modules = json.loads((tmp_path / "modules.json").read_text())
    modules.insert(2, {"type": "sentence_transformers.models.Dense", "path": "2_Dense"})
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    (tmp_path / "2_Dense").mkdir()
    config = {"in_features": 32, "out_features": 8, "activation_function": "torch.nn.modules.activation.Tanh"}
    (tmp_path / "2_Dense" / "config.json").write_text(json.dumps(config))
    weight, bias = torch.randn(8, 32), torch.randn(8)
    save_file({"linear.weight": weight, "linear.bias": bias}, tmp_path / "2_Dense" / "model.safetensors")

    recipe = read_recipe(tmp_path, "embed")
    model = load_pooling_model(tmp_path, recipe, CPU, torch.float32)
    assert (recipe.mode, model.dim) == ("cls", 8)
    wanted = torch.stack([torch.tanh(weight.double() @ states_alone(reference, ids)[0] + bias) for ids in inputs()])
    wanted /= wanted.norm(dim=-1, keepdim=True)
    torch.testing.assert_close(model.run(inputs()).double(), wanted, rtol=1e-4, atol=1e-5)


def test_sixteen_bits(tmp_path: Path) -> None:
    make(tmp_path, "bert")
    recipe = PoolingRecipe("embed", 64)
    exact = load_pooling_model(tmp_path, recipe, CPU, torch.float32).run(inputs())
    rounded = load_pooling_model(tmp_path, recipe, CPU, torch.bfloat16).run(inputs())
    assert (exact * rounded).sum(-1).min() > 0.99
    assert rounded.dtype == torch.float32


# ---- what the checkpoint says ----------------------------------------------------------------------------------------


def test_recipe_of_sentence_transformers(tmp_path: Path) -> None:
    make(tmp_path, "xlm-roberta")
    sentence_transformers_files(tmp_path, pooling_mode_mean_tokens=True, pooling_mode_cls_token=False)
    (tmp_path / "sentence_bert_config.json").write_text('{"max_seq_length": 48}')
    prompts = {"prompts": {"query": "query: ", "document": ""}, "default_prompt_name": "query"}
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    recipe = read_recipe(tmp_path, "embed")
    assert (recipe.mode, recipe.normalize, recipe.max_length, recipe.note) == ("mean", True, 48, "")
    assert recipe.prompts == {"query": "query: ", "document": ""}
    assert recipe.default_prompt == "query"


def test_without_those_files_the_guess_is_said(tmp_path: Path) -> None:
    make(tmp_path, "xlm-roberta")
    recipe = read_recipe(tmp_path, "embed")
    assert recipe.mode == "mean"
    assert "names no pooling method" in recipe.note
    assert recipe.max_length == 64, "positions begin behind the padding token"


@pytest.mark.parametrize(
    ("pooling", "message"),
    [
        ({}, "no known method"),
        ({"pooling_mode_cls_token": True, "pooling_mode_max_tokens": True}, "cls, max"),
        ({"pooling_mode_cls_token": True, "include_prompt": False}, "without the prompt"),
    ],
)
def test_other_ways_to_pool_are_refused(pooling: dict[str, Any], message: str, tmp_path: Path) -> None:
    make(tmp_path, "bert")
    sentence_transformers_files(tmp_path, **pooling)
    with pytest.raises(UnsupportedModel, match=message):
        read_recipe(tmp_path, "embed")


@pytest.mark.parametrize(
    ("file", "text", "error"),
    [
        ("modules.json", "{", CorruptModel),
        ("modules.json", '[{"type": "x.LSTM", "path": ""}]', UnsupportedModel),
        ("modules.json", "[]", UnsupportedModel),
        ("config.json", "[]", CorruptModel),
        ("sentence_bert_config.json", "no json", CorruptModel),
        ("config_sentence_transformers.json", '{"prompts": 3}', CorruptModel),
    ],
)
def test_damaged_files_are_refused(file: str, text: str, error: type[LocalLLMError], tmp_path: Path) -> None:
    make(tmp_path, "bert")
    (tmp_path / file).write_text(text)
    with pytest.raises(error):
        read_recipe(tmp_path, "embed")


def test_missing_tensors_are_named(tmp_path: Path) -> None:
    make(tmp_path, "bert")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))
    with pytest.raises(CorruptModel, match=r"missing keys: encoder\.layer\.2"):
        load_pooling_model(tmp_path, PoolingRecipe("embed", 64), CPU, torch.float32)


def test_a_head_above_the_states_does_not_matter(tmp_path: Path) -> None:
    make(tmp_path, "bert", "AutoModelForMaskedLM")
    assert task_of(tmp_path) == "embed"
    model = load_pooling_model(tmp_path, read_recipe(tmp_path, "embed"), CPU, torch.float32)
    assert isinstance(model, PoolingModel)
    assert model.run([[3, 4]]).shape == (1, 32)


def test_generating_models_stay_what_they_are(tiny_llama_path: Path) -> None:
    assert task_of(tiny_llama_path) == "generate"
    assert task_of(tiny_llama_path, "embed") == "embed"
    model = load_pooling_model(tiny_llama_path, read_recipe(tiny_llama_path, "embed"), CPU, torch.float32)
    assert model.recipe.mode == "last"
    assert model.run([[5, 6, 7]]).shape == (1, 64)


# ---- what newer sentence-transformers say ----------------------------------------------------------------------------


@pytest.mark.parametrize(("asked", "mode"), [("lasttoken", "last"), ("last", "last"), (["mean"], "mean")])
def test_a_mode_by_the_name_that_version_6_writes(asked: object, mode: str, tmp_path: Path) -> None:
    make(tmp_path, "bert")
    sentence_transformers_files(tmp_path, pooling_mode=asked, embedding_dimension=32, include_prompt=True)
    assert read_recipe(tmp_path, "embed").mode == mode


@pytest.mark.parametrize(
    ("pooling_mode", "message"),
    [(["cls", "mean"], "cls, mean, concatenated"), ("mean_sqrt_len_tokens", "mean_sqrt_len_tokens; ")],
)
def test_a_refused_mode_is_named(pooling_mode: object, message: str, tmp_path: Path) -> None:
    make(tmp_path, "bert")
    sentence_transformers_files(tmp_path, pooling_mode=pooling_mode)
    with pytest.raises(UnsupportedModel, match=message):
        read_recipe(tmp_path, "embed")


@pytest.mark.parametrize("name", ["GPT2LMHeadModel", "QWenLMHeadModel"])
def test_a_language_model_whose_class_ends_in_model_generates(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [name]}))
    assert task_of(tmp_path) == "generate"


def modality(kind: str, **how: str) -> dict[str, Any]:
    return {"modality_config": {kind: {"method": "forward", "method_output_name": "last_hidden_state", **how}}}


def test_texts_are_messages_where_the_files_say_so(tmp_path: Path) -> None:
    make(tmp_path, "bert")
    sentence_transformers_files(tmp_path, pooling_mode="mean")
    assert not read_recipe(tmp_path, "embed").as_message
    both = modality("text")["modality_config"] | modality("message", format="flat")["modality_config"]
    config = {"modality_config": both, "processing_kwargs": {"chat_template": {"add_generation_prompt": True}}}
    (tmp_path / "sentence_bert_config.json").write_text(json.dumps(config))
    recipe = read_recipe(tmp_path, "embed")
    assert (recipe.as_message, recipe.template_switches) == (True, {"add_generation_prompt": True})


@pytest.mark.parametrize(
    ("config", "task", "message"),
    [
        (modality("image"), "embed", "reads image"),
        (modality("text", method="get_text_features"), "embed", "get_text_features"),
        ({"transformer_task": "fill-mask"}, "embed", "fill-mask"),
        ({"processing_kwargs": {"text": {"padding": "max_length"}}}, "embed", "sets text"),
        ({"query_expansion": {"strategy": "fixed", "length": 32}}, "embed", "query_expansion"),
        (modality("message", format="flat"), "score", "reads message"),
    ],
)
def test_other_ways_to_read_a_text_are_refused(config: dict[str, Any], task: Any, message: str, tmp_path: Path) -> None:
    make(tmp_path, "bert")
    sentence_transformers_files(tmp_path, pooling_mode="mean")
    (tmp_path / "sentence_bert_config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModel, match=message):
        read_recipe(tmp_path, task)


@pytest.mark.parametrize(
    ("tokenizer", "told"),
    [
        ({"tokenizer_class": "BertTokenizer"}, True),
        ({"tokenizer_class": "PreTrainedTokenizerFast"}, True),
        ({"tokenizer_class": "TokenizersBackend"}, False),
        ({"tokenizer_class": "TokenizersBackend", "model_input_names": ["input_ids", "token_type_ids"]}, True),
        ({"tokenizer_class": "BertTokenizer", "model_input_names": ["input_ids", "attention_mask"]}, False),
        ({}, True),  # of a model of BERT's kind
    ],
)
def test_token_types_are_those_of_the_checkpoints_tokenizer(
    tokenizer: dict[str, Any], told: bool, tmp_path: Path
) -> None:
    make(tmp_path, "bert", "AutoModelForSequenceClassification", num_labels=1)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    model = load_pooling_model(tmp_path, read_recipe(tmp_path, "score"), CPU, torch.float32)
    ids, types = [[3, 4, 5, 6]], [[0, 0, 1, 1]]
    assert torch.equal(model.run(ids, types), model.run(ids)) is not told
