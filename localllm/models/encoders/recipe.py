"""The steps from token states to an output, read from the checkpoint's files before its weights, and the model's spec.

sentence-transformers describes the steps in modules.json and the folders it names. A plain checkpoint only has its
class name: `...ForSequenceClassification` scores, an encoder or a bare `...Model` embeds (not `...LMHeadModel`, which
generates). sentence_bert_config.json says whether the model reads the plain text or a message that a chat template
renders. The spec has a decoder's terms: sizes for the plan and for display.
Does not know: torch, tokens, weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from localllm.config.settings import TASKS, Task
from localllm.errors import ConfigError, CorruptModel, UnsupportedModel
from localllm.files.json_file import read_json, read_json_object
from localllm.models.read_spec import read_spec
from localllm.models.spec.model_spec import ModelSpec
from localllm.models.spec.rope import RopeSpec
from localllm.models.transformers_backend.config_class import load_config
from localllm.models.transformers_backend.spec import sizes_of

Want = Literal["pooled", "raw", "tokens"]
"""What an input asks for: a vector or scores, scores without an activation, or an output for each token."""
Mode = Literal["cls", "mean", "last", "max", "weightedmean"]
_MODES: dict[str, Mode] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_lasttoken": "last",
    "pooling_mode_weightedmean_tokens": "weightedmean",
}
_MODE_NAMES: dict[str, Mode] = {mode: mode for mode in _MODES.values()} | {"lasttoken": "last"}
"""Values of `pooling_mode`, which sentence-transformers writes from version 6 on."""
_KNOWN_MODULES = ("Transformer", "Pooling", "Dense", "Normalize")
WHISPER = "WhisperForConditionalGeneration"
MOONSHINES = ("MoonshineForConditionalGeneration", "MoonshineStreamingForConditionalGeneration")
TRANSCRIBERS = {"ParakeetForCTC": "ctc", "ParakeetForTDT": "tdt", WHISPER: "whisper"}
TRANSCRIBERS |= dict.fromkeys(MOONSHINES, "moonshine")
"""Architectures that transcribe, and what follows their encoder (transcriber.py, whisper.py, moonshine.py)."""
NOT_TRANSCRIBING = {
    "CanaryForConditionalGeneration": "Canary",
    "CohereAsrForConditionalGeneration": "Cohere Transcribe",
}
"""Architectures that transcribe, but not here, by name."""
SPEECH_HINT = "localllm pull nvidia/parakeet-tdt-0.6b-v3, or openai/whisper-base on a small machine."
MOST_BEAMS = 8
"""Texts of one window that are written at once at most."""
_TRANSFORMER_TASKS = {"embed": "feature-extraction", "score": "sequence-classification"}
HEADS = {
    "Qwen2ForRewardModel": "reward",
    "Qwen2ForProcessRewardModel": "process",
    "HF_ColBERT": "colbert",
    "ColBERTModel": "colbert",
}
"""Architectures whose head is in model.py."""
_OTHER_HEADS = ("RewardModel", "ColBERT", "ColQwen2", "ColPali", "ForTokenClassification")
"""Ends of the names of architectures whose head is not supported."""
_MAX_POSITION = ("max_position_embeddings", "n_positions", "max_seq_len")


@dataclass(frozen=True, slots=True)
class PoolingRecipe:
    """The steps from token states to the output."""

    task: Literal["embed", "score"]
    max_length: int  # tokens of one input, special ones included
    mode: Mode = "mean"
    normalize: bool = True  # to length 1
    dense: tuple[Path, ...] = ()  # folders of dense layers for the pooled vector, in order
    prompts: Mapping[str, str] = field(default_factory=dict)  # by name: text to put before an input
    default_prompt: str | None = None
    note: str = ""  # an assumption to show to the user
    as_message: bool = False  # text and prompt become user and system message of the chat template
    template_switches: Mapping[str, Any] = field(default_factory=dict)  # the chat template's variables
    lower_case: bool = False  # convert texts to lower case first
    head: str = ""  # of model.py; empty: that of the checkpoint's class in transformers, or none


def task_of(path: Path, asked: str = "auto") -> Task:
    """Return the task of the model in folder `path`. asked: one of TASKS, or auto to detect it."""
    if asked != "auto":
        if asked not in TASKS:
            raise ConfigError(f"--task {asked} is not known.", f"Known: auto, {', '.join(TASKS)}.", param="task")
        return asked
    if not (path / "config.json").is_file():
        return "generate"
    name = _architecture(read_json_object(path / "config.json"))
    if name in TRANSCRIBERS or name in NOT_TRANSCRIBING:
        return "transcribe"
    if name == "MarianMTModel":  # the only one that generates with such a name
        return "generate"
    if name.endswith(("ForSequenceClassification", "RewardModel", "ForTokenClassification")):
        return "score"
    if name in HEADS or name.endswith(_OTHER_HEADS):
        return "embed"
    if (path / "modules.json").is_file():
        return "embed"
    if name.endswith(("Model", "ForMaskedLM")) and not name.endswith("LMHeadModel"):
        return "embed"
    return "generate"


def read_recipe(path: Path, task: Literal["embed", "score"]) -> PoolingRecipe:
    """Read the recipe. Raises `CorruptModel` for contradictory files, `UnsupportedModel` for unknown modules."""
    config = read_json_object(path / "config.json")
    limit = _max_length(path, config)
    as_message, switches, lower_case = _text_input(path, task)
    name = _architecture(config)
    if name.endswith(_OTHER_HEADS) and name not in HEADS:
        raise UnsupportedModel(f"The head of {name} is not supported.", f"Supported: {', '.join(HEADS)}.")
    if (head := HEADS.get(name, "")) and task == ("embed" if head == "colbert" else "score"):
        return PoolingRecipe(task, limit, "last", lower_case=lower_case, head=head)
    if task == "score":
        return PoolingRecipe("score", limit, lower_case=lower_case)
    prompts, default = _prompts(path)
    modules = _modules(path)
    if modules is None:
        causal = _architecture(config).endswith("ForCausalLM")
        mode: Mode = "last" if causal else "mean"
        note = f"The checkpoint names no pooling method: {mode} of the token states is used."
        return PoolingRecipe("embed", limit, mode, prompts=prompts, default_prompt=default, note=note)
    kinds = [kind for kind, _ in modules]
    dense = tuple(folder for kind, folder in modules if kind == "Dense")
    poolings = [folder for kind, folder in modules if kind == "Pooling"]
    if len(poolings) != 1:
        raise UnsupportedModel(f"{path.name} pools {len(poolings)} times.", "Supported: exactly one pooling step.")
    mode = _mode(poolings[0])
    return PoolingRecipe(
        "embed", limit, mode, "Normalize" in kinds, dense, prompts, default,
        as_message=as_message, template_switches=switches, lower_case=lower_case,
    )  # fmt: skip


def _modules(path: Path) -> list[tuple[str, Path]] | None:
    """Return (kind, folder) of each module in order; None without modules.json."""
    file = path / "modules.json"
    if not file.is_file():
        return None
    try:
        modules = [(str(m["type"]).rpartition(".")[2], path / str(m["path"])) for m in read_json(file)]
    except (KeyError, TypeError) as error:
        raise CorruptModel(f"Cannot parse {file}.", f"{type(error).__name__}: {error}.") from error
    unknown = [kind for kind, _ in modules if kind not in _KNOWN_MODULES]
    if unknown:
        raise UnsupportedModel(
            f"{path.name} passes its vectors through {', '.join(unknown)}.", f"Known: {', '.join(_KNOWN_MODULES)}."
        )
    return modules


def _mode(folder: Path) -> Mode:
    config = read_json_object(folder / "config.json")
    asked = config.get("pooling_mode") or [mode for key, mode in _MODES.items() if config.get(key)]
    names = asked if isinstance(asked, list) else [asked]
    if len(names) == 1 and names[0] in _MODE_NAMES and config.get("include_prompt") is not False:
        return _MODE_NAMES[names[0]]
    why = f"It asks for {', '.join(map(str, names)) or 'no known method'}"
    if config.get("include_prompt") is False:
        why += " without the prompt"
    elif len(names) > 1:
        why += ", concatenated"
    raise UnsupportedModel(
        f"The pooling in {folder} is not supported.",
        f"{why}; supported: one of {', '.join(_MODE_NAMES)} over all tokens.",
    )


def _text_input(path: Path, task: Literal["embed", "score"]) -> tuple[bool, Mapping[str, Any], bool]:
    """Return whether texts become messages, the chat template's variables, and whether texts are lower-cased.

    Raises `UnsupportedModel` for settings whose results would differ from sentence-transformers.
    """
    file = path / "sentence_bert_config.json"
    config = read_json_object(file) if file.is_file() else {}
    modalities = config.get("modality_config", {"text": {}})
    if not isinstance(modalities, dict):
        raise CorruptModel(f"{file} has modality_config = {modalities!r}.", "It must be an object.")
    kind = next((kind for kind in ("message", "text") if kind in modalities), None)
    if kind is None or (kind == "message" and task == "score"):
        can = "Pairs of plain texts are supported" if task == "score" else "Plain texts and messages are supported"
        raise UnsupportedModel(f"{path.name} reads {', '.join(modalities) or 'no text'}.", f"{can}.")
    how = modalities[kind] if isinstance(modalities[kind], dict) else {}
    asked = (how.get("method", "forward"), config.get("transformer_task", _TRANSFORMER_TASKS[task]))
    if asked != ("forward", _TRANSFORMER_TASKS[task]):
        raise UnsupportedModel(
            f"{path.name} uses a method that is not supported.",
            f"{file.name} asks for the method {asked[0]} and the task {asked[1]}; forward and "
            f"{_TRANSFORMER_TASKS[task]} are supported.",
        )
    processing = dict(config.get("processing_kwargs") or {})
    switches = dict(processing.pop("chat_template", None) or {})
    switches.pop("restore_suffix", None)  # for truncated texts
    if other := [*processing, *(["query_expansion"] if config.get("query_expansion") else [])]:
        raise UnsupportedModel(
            f"{path.name} preprocesses texts in a way that is not supported.", f"{file.name} sets {', '.join(other)}."
        )
    return kind == "message", switches, config.get("do_lower_case") is True


def _max_length(path: Path, config: Mapping[str, Any]) -> int:
    """Return the smallest length in three files. RoBERTa models number positions from after the padding token."""
    lengths = [config[name] for name in _MAX_POSITION if _is_length(config.get(name))][:1]
    if lengths and "roberta" in str(config.get("model_type", "")):
        lengths[0] -= 1 + int(config.get("pad_token_id") or 0)
    for name, key in (("sentence_bert_config.json", "max_seq_length"), ("tokenizer_config.json", "model_max_length")):
        if (path / name).is_file():
            value = read_json_object(path / name).get(key)
            lengths += [value] if _is_length(value) else []
    return min(lengths, default=512)


def _is_length(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value < 1 << 30


def _prompts(path: Path) -> tuple[Mapping[str, str], str | None]:
    file = path / "config_sentence_transformers.json"
    config = read_json_object(file) if file.is_file() else {}
    prompts = config.get("prompts") or {}
    if not isinstance(prompts, dict):
        raise CorruptModel(f"{file} has prompts = {prompts!r}.", "It must be an object of texts.")
    default = config.get("default_prompt_name")
    return {str(name): str(text) for name, text in prompts.items()}, None if default is None else str(default)


def _architecture(config: Mapping[str, Any]) -> str:
    names = config.get("architectures")
    return str(names[0]) if isinstance(names, list) and names else ""


def spec_of_any(
    path: Path, *, task: str = "auto", model_impl: str = "auto", trust_remote_code: bool = False,
    mmproj: str | None = None,
) -> ModelSpec:  # fmt: skip
    """Return the spec of any model in folder or GGUF file `path`. Raises what `read_spec` and `read_recipe` raise."""
    found = task_of(path, task)
    if found == "generate":
        return read_spec(path, model_impl=model_impl, trust_remote_code=trust_remote_code, mmproj=mmproj)
    if found == "transcribe":
        return transcriber_spec(path, trust_remote_code=trust_remote_code)
    return pooling_spec(path, read_recipe(path, found), trust_remote_code=trust_remote_code)


class TranscriberSizes(NamedTuple):
    """Sizes of a model that transcribes."""

    weights_bytes: Callable[[str, str], int]  # (device, dtype) -> bytes of the loaded model
    encoded: int = 0  # numbers that are held at once while a window of 30 s is encoded
    per_position: int = 0  # numbers of keys and values of a position, of all layers of the decoder; 0: there is none
    source_len: int = 0  # most positions of a window's sound
    text_len: int = 0  # most positions of a text
    halves_sources: bool = False  # on a CPU, keys and values of the sound take half of float32
    config: Mapping[str, Any] = MappingProxyType({})  # the sizes of config.json, defaults included


def pooling_spec(path: Path, recipe: PoolingRecipe, *, trust_remote_code: bool = False) -> ModelSpec:
    """Return the spec of a pooling model. Raises `CorruptModel`, `UnsupportedModel`."""
    config = load_config(path, trust_remote_code=trust_remote_code)
    names = getattr(config, "architectures", None) or [type(config).__name__]
    dtype = str(getattr(config, "dtype", None) or "float32").removeprefix("torch.")
    sizes = sizes_of(config) | {"max_position": recipe.max_length}
    return ModelSpec(
        architecture=str(names[0]),
        task=recipe.task,
        implementation="remote" if trust_remote_code and getattr(config, "auto_map", None) else "transformers",
        hidden_act="gelu",
        rope=RopeSpec(rotary_dim=sizes["head_dim"]),
        dtype=dtype if dtype in ("float32", "bfloat16", "float16") else "float32",
        **sizes,
    )


def transcriber_spec(path: Path, *, trust_remote_code: bool = False) -> ModelSpec:
    """Return the spec of a model that transcribes, with the sizes of its encoder."""
    config = load_config(path, trust_remote_code=trust_remote_code)
    name = str((config.architectures or [type(config).__name__])[0])
    if name not in TRANSCRIBERS:
        what = f"{NOT_TRANSCRIBING.get(name, name)} is not supported."
        raise UnsupportedModel(what, "Parakeet (CTC, TDT), Whisper and Moonshine transcribe here.", SPEECH_HINT)
    encoder = getattr(config, "encoder_config", config)  # Whisper's and Moonshine's configs have its sizes themselves
    encoder.vocab_size = config.vocab_size
    if hasattr(config, "max_target_positions"):
        encoder.max_position_embeddings = config.max_target_positions
    sizes = sizes_of(encoder)
    dtype = str(getattr(config, "dtype", None) or "float32").removeprefix("torch.")
    return ModelSpec(
        architecture=name,
        task="transcribe",
        implementation="transformers",
        hidden_act="silu",
        rope=RopeSpec(rotary_dim=sizes["head_dim"]),
        dtype=dtype if dtype in ("float32", "bfloat16", "float16") else "float32",
        **sizes,
    )
