"""Which files of a repository are fetched, and what GGUF files' names mean: tables of names, no hub."""

import pytest

from localllm.errors import CorruptModel, LocalLLMError, ModelNotFound, UnsupportedModel
from localllm.models.formats.gguf.file_names import choose, gguf_models, quant_of
from localllm.models.library.hub.repository import included_files, load_files
from localllm.models.library.names import ModelName, parse_name

SIDE = ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"]
SHARDS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
INDEX = "model.safetensors.index.json"
PARTS = [f"Q8_0/big-Q8_0-0000{number}-of-00003.gguf" for number in (1, 2, 3)]


@pytest.mark.parametrize(
    ("needed", "not_needed"),
    [
        ("model.safetensors", ""),
        ("model.safetensors", "pytorch_model.bin tf_model.h5 model.onnx onnx/model.onnx README.md a.png"),
        ("model.safetensors", "consolidated.safetensors original/consolidated.00.pth"),
        (f"{' '.join(SHARDS)} {INDEX}", "consolidated-00001-of-00001.safetensors"),
        ("model.safetensors", "model.fp16.safetensors"),
        ("gptq_model-4bit-128g.safetensors quantize_config.json", ""),
        ("model.safetensors vocab.json merges.txt", "optimizer.pt"),
        ("model.safetensors tokenizer.model chat_template.jinja", "modeling_own.py"),
        ("model.safetensors", "checkpoint-500/model.safetensors checkpoint-500/config.json"),
        ("model.safetensors modules.json 1_Pooling/config.json", ""),
        ("model.safetensors 2_Dense/config.json 2_Dense/model.safetensors", "2_Dense/pytorch_model.bin"),
        ("adapter_config.json adapter_model.safetensors", ""),
        ("model.safetensors", "model-Q8_0.gguf"),
    ],
)
def test_a_load_needs_config_tokenizer_and_one_set_of_weights(needed: str, not_needed: str) -> None:
    shards = SHARDS if INDEX in needed else None
    found = load_files("org/name", [*not_needed.split(), *SIDE, *needed.split()], None, shards)
    assert found == sorted([*SIDE, *needed.split()])


def test_the_index_says_which_shards_there_are() -> None:
    odd = ["part-a.safetensors", "part-b.safetensors"]
    names = ["config.json", INDEX, *odd, "other.safetensors"]
    assert load_files("org/name", names, None, odd) == sorted(["config.json", INDEX, *odd])
    with pytest.raises(CorruptModel, match=r"part-c\.safetensors"):
        load_files("org/name", names, None, [*odd, "part-c.safetensors"])


def test_the_owners_code_is_fetched_only_when_asked_for() -> None:
    names = ["config.json", "model.safetensors", "modeling_own.py"]
    assert load_files("org/name", names, None, code=True) == names


@pytest.mark.parametrize(
    ("names", "quant", "want"),
    [
        (["t-Q4_K_M.gguf", "t-Q8_0.gguf", "README.md", "config.json"], None, ["t-Q4_K_M.gguf"]),
        (["t-Q4_K_M.gguf", "t-Q8_0.gguf"], "Q8_0", ["t-Q8_0.gguf"]),
        (["t-Q4_K_M.gguf", "t-Q8_0.gguf"], "q8_0", ["t-Q8_0.gguf"]),
        (["t.Q4_K_M.gguf", "mmproj-t-f16.gguf", "t-imatrix.gguf"], None, ["t.Q4_K_M.gguf", "mmproj-t-f16.gguf"]),
        (["t-Q4_0.gguf", "mmproj-BF16.gguf", "mmproj-F16.gguf"], "Q4_0", ["t-Q4_0.gguf", "mmproj-F16.gguf"]),
        (["Q4_0/t-Q4_0.gguf", "mmproj-F32.gguf"], None, ["Q4_0/t-Q4_0.gguf", "mmproj-F32.gguf"]),
        (["t-Q4_0.gguf", "mtp-t-Q4_0.gguf", "MTP/mtp-t-Q4_0.gguf"], "Q4_0", ["t-Q4_0.gguf"]),
        (["t-MTP-Q4_0.gguf", "mtp-t-Q8_0.gguf"], None, ["t-MTP-Q4_0.gguf"]),
        (
            ["t-KQuant-17GB-Q4_K_M.gguf", "dflash-t-Q4_K_M.gguf", "mmproj-t-Q4_K_M.gguf"],
            "Q4_K_M",
            ["t-KQuant-17GB-Q4_K_M.gguf", "mmproj-t-Q4_K_M.gguf"],
        ),
        (["t-Q8_0.gguf", "t-DSpark-Q8_0.gguf", "t-EAGLE3.Q8_0.gguf", "t-DFlash2.gguf"], "Q8_0", ["t-Q8_0.gguf"]),
        (["t-Q8_0.gguf", "t-Q3_K_M.gguf", "t-F16.gguf"], None, ["t-Q8_0.gguf"]),
        (["t-UD-Q4_K_XL.gguf", "t-Q4_K_S.gguf"], None, ["t-UD-Q4_K_XL.gguf"]),
        (["t-UD-Q4_K_M.gguf", "t-Q4_K_M.gguf"], "Q4_K_M", ["t-Q4_K_M.gguf"]),
        (["t-UD-IQ1_S.gguf"], "IQ1_S", ["t-UD-IQ1_S.gguf"]),
        ([*PARTS, "Q4_0/big-Q4_0.gguf"], "Q8_0", PARTS),
        (["a-Q4_0.gguf", "b-Q4_0.gguf"], "b-Q4_0", ["b-Q4_0.gguf"]),
        (["a-Q4_0.gguf", "b-Q4_0.gguf"], "b-Q4_0.gguf", ["b-Q4_0.gguf"]),
        (["x/m.gguf", "y/m.gguf"], "y/m.gguf", ["y/m.gguf"]),
        (["t.gguf"], None, ["t.gguf"]),
        (["t.gguf"], "t", ["t.gguf"]),
        (["model.safetensors", "t-Q8_0.gguf"], "Q8_0", ["t-Q8_0.gguf"]),
    ],
)
def test_a_gguf_repository_gives_one_model_and_nothing_beside(
    names: list[str], quant: str | None, want: list[str]
) -> None:
    assert load_files("org/name", names, quant) == want


@pytest.mark.parametrize(
    ("names", "want"),
    [
        (["t-Q4_0.gguf", "mtp-t-Q8_0.gguf", "mtp-t-Q4_0.gguf", "mtp-u-Q4_0.gguf"], ["t-Q4_0.gguf", "mtp-t-Q4_0.gguf"]),
        (["t-Q4_0.gguf", "MTP/mtp-t-BF16.gguf"], ["t-Q4_0.gguf", "MTP/mtp-t-BF16.gguf"]),
        (["Q4_0/t-Q4_0.gguf", "mmproj-F16.gguf", "mtp-T.gguf"], ["Q4_0/t-Q4_0.gguf", "mmproj-F16.gguf", "mtp-T.gguf"]),
        (["a/t-Q4_0.gguf", "b/mtp-t-Q4_0.gguf", "mtp-t2-Q4_0.gguf"], ["a/t-Q4_0.gguf"]),
        (["model.safetensors", "mtp-t.gguf"], ["model.safetensors"]),
    ],
)
def test_a_prediction_layer_is_fetched_with_its_gguf_model_only_when_asked_for(
    names: list[str], want: list[str]
) -> None:
    assert load_files("org/name", names, None, prediction_layer=True) == want
    without = [name for name in want if not name.rpartition("/")[2].startswith("mtp-")]
    assert load_files("org/name", names, None) == without


@pytest.mark.parametrize(
    ("names", "quant", "kind", "words"),
    [
        (["config.json", "pytorch_model.bin"], None, UnsupportedModel, "pickles (pytorch_model.bin)"),
        (["README.md", "data.parquet"], None, UnsupportedModel, "It has README.md, data.parquet."),
        ([], None, UnsupportedModel, "no files"),
        (["config.json", "flax_model.msgpack"], None, UnsupportedModel, "no weights"),
        (["t-Q4_K_M.gguf"], "Q2_K", ModelNotFound, "It has Q4_K_M."),
        (["model.safetensors"], "Q2_K", ModelNotFound, "no GGUF file"),
        (["a-Q4_0.gguf", "b-Q4_0.gguf"], "Q4_0", ModelNotFound, "a-Q4_0, b-Q4_0"),
        (PARTS[:2], None, CorruptModel, PARTS[2]),
    ],
)
def test_refusals_say_what_is_there_instead(
    names: list[str], quant: str | None, kind: type[LocalLLMError], words: str
) -> None:
    with pytest.raises(kind) as caught:
        load_files("org/name", names, quant)
    assert words in str(caught.value)


def test_include_takes_exactly_what_matches() -> None:
    names = ["config.json", "onnx/model.onnx", "pytorch_model.bin"]
    assert included_files("org/name", names, ["*.bin", "onnx/*"]) == ["onnx/model.onnx", "pytorch_model.bin"]
    with pytest.raises(ModelNotFound, match=r"No file of org/name matches \*\.txt"):
        included_files("org/name", names, ["*.txt"])


@pytest.mark.parametrize(
    ("name", "quant"),
    [
        ("Qwen3-0.6B-Q4_K_M.gguf", "Q4_K_M"),
        ("model.q8_0.gguf", "Q8_0"),
        ("gemma-3-4b-it-qat-q4_0.gguf", "Q4_0"),
        ("gpt-oss-20b-mxfp4.gguf", "MXFP4"),
        ("m-IQ2_XXS-00001-of-00002.gguf", "IQ2_XXS"),
        ("m-UD-Q2_K_XL.gguf", "UD-Q2_K_XL"),
        ("Llama-3.2-1B-BF16.gguf", "BF16"),
        ("ggml-model-f16.gguf", "F16"),
        ("Q6_K/model.gguf", "Q6_K"),
        ("Q8K-something.gguf", ""),
        ("plain.gguf", ""),
    ],
)
def test_quantisations_are_read_from_names(name: str, quant: str) -> None:
    assert quant_of(name) == quant


def test_nothing_asked_of_nothing_is_nothing() -> None:
    assert choose([], None) == []
    assert gguf_models(["a.txt", "mmproj-model-f16.gguf"]) == []


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("org/name", ModelName("org/name")),
        ("org/name:Q4_K_M", ModelName("org/name", "Q4_K_M")),
        ("org/name@v2", ModelName("org/name", revision="v2")),
        ("org/name:Q4_K_M@refs/pr/1", ModelName("org/name", "Q4_K_M", "refs/pr/1")),
        ("ollama:llama3.2:1b", ModelName("llama3.2:1b", program="ollama")),
        ("lmstudio:a/b/c", ModelName("a/b/c", program="lmstudio")),
        ("name", ModelName("name")),
    ],
)
def test_names_come_apart_and_together_again(text: str, want: ModelName) -> None:
    assert parse_name(text) == want
    assert str(want) == text
