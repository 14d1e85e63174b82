"""A model that embeds or scores, computed by transformers' code, with its matrices in our `Linear` layout.

One call is one padded batch, for encoders and decoders alike. Only the states of each input's own tokens are pooled.
The recipe names the head. transformers has no class for rewards and token vectors, so these heads are read from the
checkpoint's tensors:

    reward      Linear, ReLU, Linear of each token; the last token's value counts    Qwen2ForRewardModel
    process     the same, and each token's values count                              Qwen2ForProcessRewardModel
    colbert     Linear of each token, brought to length 1                            HF_ColBERT, ColBERTModel

Does not know: text, queues.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from localllm.errors import CorruptModel, UnsupportedModel
from localllm.files.json_file import read_json, read_json_object
from localllm.models.encoders.recipe import PoolingRecipe, Want
from localllm.models.formats.safetensors import SafetensorsCheckpoint
from localllm.models.transformers_backend.config_class import load_config
from localllm.models.transformers_backend.layouts import use_device_layouts
from localllm.models.transformers_backend.module import read_module

TENSORS: dict[str, tuple[tuple[str, bool], ...]] = {
    "reward": (("score.0", True), ("score.2", True)),
    "process": (("score.0", True), ("score.2", True)),
    "colbert": (("linear", False),),
}
"""Layers of each head, in order: the name of its weight, and whether it has a bias."""

HEAD_LAYERS = {kind: tuple(f"{name}." for name, _ in layers) for kind, layers in TENSORS.items()}
"""Beginnings of the names of a head's tensors."""


class TokenHead:
    """A head of one or two layers, in fp32."""

    def __init__(self, kind: str, layers: Sequence[tuple[Tensor, Tensor | None]]) -> None:
        self.kind, self.layers = kind, tuple(layers)

    @property
    def dim(self) -> int:
        """Numbers for each token."""
        return int(self.layers[-1][0].shape[0])

    def __call__(self, states: Tensor) -> Tensor:
        """Map states [T, H] to [T, dim] fp32."""
        x = states.float()
        for i, (weight, bias) in enumerate(self.layers):
            x = F.linear(torch.relu(x) if i else x, weight, bias)
        return F.normalize(x, dim=-1) if self.kind == "colbert" else x


def load_head(path: Path, kind: str, device: torch.device) -> TokenHead:
    """Load a head. Raises `CorruptModel` if the checkpoint lacks one of its tensors."""
    with SafetensorsCheckpoint(path) as checkpoint:
        wanted = [f"{name}.{part}" for name, has_bias in TENSORS[kind] for part in ("weight", *["bias"] * has_bias)]
        if missing := [name for name in wanted if name not in checkpoint.tensors]:
            raise CorruptModel(
                f"{path} lacks {', '.join(missing)}.", f"The head of its architecture has {len(wanted)}."
            )
        tensors = {name: checkpoint.tensor(name).to(device, torch.float32, copy=True) for name in wanted}
    return TokenHead(kind, [(tensors[f"{name}.weight"], tensors.get(f"{name}.bias")) for name, _ in TENSORS[kind]])


_UNUSED = ("pooler.", "cls.", "lm_head.", "head.", "decoder.", "classifier.", "score.", "qa_outputs.", "vocab_")
"""Modules above the token states: an embedding does not need them, so the checkpoint may lack them."""
_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "Identity": lambda x: x,
    "Tanh": torch.tanh,
    "ReLU": torch.relu,
    "GELU": F.gelu,
}


class PoolingModel:
    def __init__(
        self,
        module: Any,
        recipe: PoolingRecipe,
        dense: Sequence[DenseLayer],
        device: torch.device,
        *,
        takes_types: bool = True,
        head: TokenHead | None = None,
    ) -> None:
        """head: of the recipe, applied to token states. takes_types: the model accepts token types, which tell the two
        texts of a pair apart."""
        self.module, self.recipe, self.dense, self.device = module, recipe, tuple(dense), device
        self.vocab_size: int = module.config.vocab_size
        self.head = head
        self.num_labels: int = getattr(module.config, "num_labels", 1) if recipe.task == "score" else 0
        if head is not None and recipe.task == "score":
            self.num_labels = head.dim
        names = getattr(module.config, "id2label", None) or {}
        self.labels = tuple(str(names.get(i, f"LABEL_{i}")) for i in range(self.num_labels))
        self._problem = getattr(module.config, "problem_type", None)
        self._takes_types = takes_types and getattr(module.config, "type_vocab_size", 0) > 1
        # An encoder classifies by its first token, a decoder by its last.
        is_encoder = any(getattr(part, "is_causal", None) is False for part in module.modules())
        self._is_causal = recipe.task == "score" and head is None and not is_encoder

    @property
    def dim(self) -> int:
        """Numbers in one output."""
        if self.head is not None:
            return self.head.dim
        if self.recipe.task == "score":
            return self.num_labels
        return int(self.dense[-1].weight.shape[0] if self.dense else self.module.config.hidden_size)

    @property
    def wants(self) -> frozenset[Want]:
        """The kind of result that an input can ask for."""
        if self.head is None:
            return frozenset({"pooled", "raw"} if self.recipe.task == "score" else {"pooled", "tokens"})
        return frozenset({"reward": {"pooled", "raw", "tokens"}}.get(self.head.kind, {"tokens"}))  # type: ignore[arg-type]

    @torch.inference_mode()
    def outputs(
        self,
        token_ids: Sequence[Sequence[int]],
        type_ids: Sequence[Sequence[int]] | None,
        wants: Sequence[Want],
    ) -> list[list[float]]:
        """Run one batch and return, for each input, `dim` numbers, or as many for each of its tokens.

        pooled: a vector, or scores through the model's activation. raw: scores without it. tokens: the output for each
        token, as the head or the recipe has it.
        """
        if self.head is None and all(want == "pooled" for want in wants):
            rows: list[list[float]] = self.run(token_ids, type_ids).tolist()
            return rows
        if self.head is None and self.recipe.task == "score":
            logits = self._logits(token_ids, type_ids)
            return [
                (self._activated(row) if want == "pooled" else row).tolist()
                for row, want in zip(logits, wants, strict=True)
            ]
        inputs, lengths = self._padded(token_ids, type_ids)
        states = self.module(**inputs, return_dict=True).last_hidden_state
        found = []
        for i, (want, length) in enumerate(zip(wants, lengths.tolist(), strict=True)):
            own = states[i, :length]
            if self.head is not None:
                values = self.head(own if want == "tokens" else own[-1:])
            else:
                values = own.float() if want == "tokens" else pool(own[None], lengths[i : i + 1], self.recipe.mode)
                for layer in self.dense:
                    values = layer(values)
                values = F.normalize(values, dim=-1) if self.recipe.normalize else values
            found.append(values.flatten().cpu().tolist())
        return found

    def _logits(self, token_ids: Sequence[Sequence[int]], type_ids: Sequence[Sequence[int]] | None) -> Tensor:
        if self._is_causal and len({len(ids) for ids in token_ids}) > 1:
            # transformers finds the last token by the padding id, but a text may end with that token.
            rows = [self._logits([ids], None if type_ids is None else [type_ids[i]]) for i, ids in enumerate(token_ids)]
            return torch.cat(rows)
        inputs, _ = self._padded(token_ids, type_ids)
        logits: Tensor = self.module(**inputs, return_dict=True).logits.float().cpu()
        return logits

    def _activated(self, logits: Tensor) -> Tensor:
        """Map logits [..., labels] as the checkpoint's `problem_type` says. Without one, a single score goes through a
        sigmoid and several through a softmax."""
        if self._problem == "regression":
            return logits
        if self._problem == "multi_label_classification" or self.num_labels == 1:
            return logits.sigmoid()
        return logits.softmax(dim=-1)

    @torch.inference_mode()
    def run(self, token_ids: Sequence[Sequence[int]], type_ids: Sequence[Sequence[int]] | None = None) -> Tensor:
        """Run one batch -> [B, dim] fp32 on the CPU: vectors, or scores.

        type_ids: 0 for the first text of a pair and 1 for the second, if the model tells them apart.
        """
        if self.recipe.task == "score":
            return self._activated(self._logits(token_ids, type_ids))
        inputs, lengths = self._padded(token_ids, type_ids)
        out = self.module(**inputs, return_dict=True)
        pooled = pool(out.last_hidden_state, lengths, self.recipe.mode)
        for layer in self.dense:
            pooled = layer(pooled)
        return (F.normalize(pooled, dim=-1) if self.recipe.normalize else pooled).cpu()

    def _padded(
        self, token_ids: Sequence[Sequence[int]], type_ids: Sequence[Sequence[int]] | None
    ) -> tuple[dict[str, Tensor], Tensor]:
        """Pad inputs on the right with token 0, which the mask hides."""
        lengths = torch.tensor([len(ids) for ids in token_ids])
        width = int(lengths.max())

        def filled(rows: Sequence[Sequence[int]]) -> Tensor:
            return torch.tensor([[*row, *[0] * (width - len(row))] for row in rows]).to(self.device)

        mask = (torch.arange(width) < lengths[:, None]).long().to(self.device)
        inputs = {"input_ids": self._with_padding(filled(token_ids), mask), "attention_mask": mask}
        if self._takes_types and type_ids is not None:
            inputs["token_type_ids"] = filled(type_ids)
        return inputs, lengths.to(self.device)

    def _with_padding(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Replace padding by the model's real padding token, as RoBERTa models compute positions from it."""
        pad = getattr(self.module.config, "pad_token_id", None)
        return ids if not pad else torch.where(mask.bool(), ids, pad)


class DenseLayer:
    """A Dense module of sentence-transformers: activation(x W^T + b)."""

    __slots__ = ("activation", "bias", "weight")

    def __init__(self, weight: Tensor, bias: Tensor | None, activation: str) -> None:
        self.weight, self.bias, self.activation = weight, bias, activation

    def __call__(self, x: Tensor) -> Tensor:
        """Map [B, K] to [B, N] fp32."""
        y: Tensor = _ACTIVATIONS[self.activation](F.linear(x, self.weight, self.bias))
        return y


def pool(states: Tensor, lengths: Tensor, mode: str) -> Tensor:
    """Pool states [B, T, H] with lengths [B] to [B, H] fp32 over each input's own tokens; padding must be finite."""
    states = states.float()
    if mode == "cls":
        return states[:, 0]
    if mode == "last":
        return states[torch.arange(len(lengths), device=states.device), lengths - 1]
    inside = torch.arange(states.shape[1], device=states.device) < lengths[:, None]
    if mode == "max":
        return states.masked_fill(~inside[..., None], float("-inf")).amax(dim=1)
    weights = inside.float()
    if mode == "weightedmean":
        weights = weights * torch.arange(1, states.shape[1] + 1, device=states.device)
    return (states * weights[..., None]).sum(dim=1) / weights.sum(dim=1, keepdim=True)


def count_parameters(path: Path, recipe: PoolingRecipe, *, trust_remote_code: bool = False) -> int:
    """Return the number of parameters that `load_pooling_model` will hold, from shapes alone."""
    config = load_config(path, trust_remote_code=trust_remote_code)
    with torch.device("meta"):
        module = _auto(recipe).from_config(config, trust_remote_code=trust_remote_code)
    dense = [SafetensorsCheckpoint(folder).tensors.values() for folder in recipe.dense]
    extra = sum(torch.Size(info.shape).numel() for infos in dense for info in infos)
    own: int = sum(tensor.numel() for tensor in (*module.parameters(), *module.buffers()))
    if recipe.head:
        with SafetensorsCheckpoint(path) as checkpoint:
            shapes = [
                info.shape for name, info in checkpoint.tensors.items() if name.startswith(HEAD_LAYERS[recipe.head])
            ]
        extra += sum(torch.Size(shape).numel() for shape in shapes)
    return own + extra


def _auto(recipe: PoolingRecipe) -> Any:
    import transformers

    is_classifier = recipe.task == "score" and not recipe.head
    return transformers.AutoModelForSequenceClassification if is_classifier else transformers.AutoModel


def load_pooling_model(
    path: Path, recipe: PoolingRecipe, device: torch.device, dtype: torch.dtype, *, trust_remote_code: bool = False
) -> PoolingModel:
    """Load the model. Raises `CorruptModel`, `UnsupportedModel`."""
    config = load_config(path, trust_remote_code=trust_remote_code)
    module = read_module(
        _auto(recipe),
        path,
        config,
        dtype,
        attention="sdpa",
        trust_remote_code=trust_remote_code,
        unused=(*_UNUSED, "linear.", "v_head.") if recipe.task == "embed" or recipe.head else (),
    )
    if getattr(module.config, "is_encoder_decoder", False):
        raise UnsupportedModel(
            f"{type(module).__name__} has an encoder and a decoder.", "Only one of the two is supported."
        )
    with torch.inference_mode():
        module = module.to(device)
        use_device_layouts(module)
        dense = [_dense(folder, device) for folder in recipe.dense]
        head = load_head(path, recipe.head, device) if recipe.head else None
        takes_types = _tokenizer_makes_types(path, config.model_type)
        return PoolingModel(module, recipe, dense, device, takes_types=takes_types, head=head)


def _tokenizer_makes_types(path: Path, model_type: str) -> bool:
    """Return whether the checkpoint's tokenizer produces token types: by its config, else by its class.

    The generic class does in checkpoints of transformers 4, and not with transformers 5, which renamed it.
    """
    import transformers
    from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES

    file = path / "tokenizer_config.json"
    config = read_json_object(file) if file.is_file() else {}
    names = config.get("model_input_names")
    if names is None:
        name = config.get("tokenizer_class") or TOKENIZER_MAPPING_NAMES.get(model_type)
        if name in (None, "PreTrainedTokenizerFast"):
            return True
        names = getattr(getattr(transformers, str(name), None), "model_input_names", ["token_type_ids"])
    return "token_type_ids" in names


def _dense(folder: Path, device: torch.device) -> DenseLayer:
    try:
        config = read_json(folder / "config.json")
        activation = str(config["activation_function"]).rpartition(".")[2]
    except (KeyError, TypeError) as error:
        raise CorruptModel(f"Cannot parse {folder}/config.json.", f"{type(error).__name__}: {error}.") from error
    if activation not in _ACTIVATIONS:
        raise UnsupportedModel(f"{folder} applies {activation}.", f"Supported: {', '.join(_ACTIVATIONS)}.")
    with SafetensorsCheckpoint(folder) as checkpoint:
        if "linear.weight" not in checkpoint.tensors:
            raise CorruptModel(f"{folder} lacks linear.weight.")
        tensors = {
            name: checkpoint.tensor(f"linear.{name}").to(device, torch.float32, copy=True)
            for name in ("weight", "bias")
            if f"linear.{name}" in checkpoint.tensors
        }
    return DenseLayer(tensors["weight"], tensors.get("bias"), activation)
