"""Modules of `transformers`: load them, and build them from shapes alone.

Does not know: attention, caches, steps.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from localllm.errors import CorruptModel, ModelError, UnsupportedModel
from localllm.kernels.cpu.pack import CpuPacker
from localllm.kernels.gguf_blocks import BLOCK_TYPES
from localllm.models.families.bamba import time_step_limits
from localllm.models.families.text_part import WITHIN
from localllm.models.formats.at_load import AtLoad
from localllm.models.formats.checkpoint import FLOATS, Checkpoint, is_gguf
from localllm.models.formats.gguf.matrices import DEQUANTISED, widen_rows
from localllm.models.formats.linear_format import LinearFormat
from localllm.models.formats.registry import open_checkpoint
from localllm.models.spec.model_spec import ModelSpec
from localllm.models.transformers_backend.config_class import (
    causal_classes,
    first_line,
    load_causal_config,
    load_config,
    text_part,
    whole_names,
)
from localllm.models.transformers_backend.layouts import (
    NameOf,
    Quantization,
    QuantizedReader,
    find_places,
    place_parts,
)
from localllm.models.weights.layout import wrong_shape

_TEXT_PART = re.compile(rf"{WITHIN}(?:model\.)?(.*)")
"""Names of tensors of a text part."""


class StoredTable(nn.Module):
    """A table whose rows are read where the checkpoint's files store them, mapped: it takes no memory of its own.

    It stands for an embedding that is too large for the class itself to place it on a device (Qwen4-Exp's of n-grams:
    95 GiB in 16 bits, of which a token reads 16 rows).
    """

    stays_in_ram = True

    def __init__(self, parts: Sequence[Tensor], dtype: torch.dtype, block_type: str = "", width: int = 0) -> None:
        """parts [rows, width]: views into the files, one after the other. dtype: of the rows that a call returns.
        block_type, width: of GGUF blocks, which come as uint8 [rows, bytes of a row]."""
        super().__init__()
        self._parts, self._dtype = tuple(parts), dtype
        self._block_type, self._width = block_type, width or self._parts[0].shape[1]
        self._ends = torch.tensor([len(part) for part in parts], device="cpu").cumsum(0)
        self._is_hf_initialized = True  # nothing is drawn for it

    @property
    def weight(self) -> Tensor:
        """Return a part, whose device is read."""
        return self._parts[0]

    def forward(self, ids: Tensor) -> Tensor:
        """Map ids [...] to rows [..., width], all in RAM."""
        flat = ids.flatten()
        of_part = torch.bucketize(flat, self._ends, right=True)
        rows = torch.empty(len(flat), self._width, dtype=self._dtype)
        for number in of_part.unique().tolist():
            (own,), part = torch.nonzero(of_part == number, as_tuple=True), self._parts[number]
            found = part.index_select(0, flat[own] - (self._ends[number] - len(part)))
            if self._block_type:
                found = widen_rows(found, self._block_type, self._width, self._dtype)
            rows[own] = found.to(self._dtype)
        return rows.view(*ids.shape, -1)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Embedding:
        """Return an embedding without data, for a call that finds what a module keeps."""
        return nn.Embedding(int(self._ends[-1]), self._width, device="meta", dtype=self._dtype)


def open_for_class(path: Path) -> Checkpoint:
    """Open a checkpoint for its class of transformers: a GGUF file with the values that the class expects."""
    if not is_gguf(path):
        return open_checkpoint(path)
    from localllm.models.formats.gguf.checkpoint import open_gguf_of_class

    return open_gguf_of_class(path)


class ModelClass(NamedTuple):
    """A class of transformers that may compute a checkpoint, and how."""

    auto: Any  # the class, or an Auto class that finds it
    config: Any
    name_of: NameOf | None  # names of the text part's or a GGUF file's tensors; None: all are the model's, as named


def classes_of(path: Path, spec: ModelSpec, *, trust_remote_code: bool) -> list[ModelClass]:
    """Return the classes to try. If the model reads more than text: that of its text part, then the whole model's,
    which may read other names."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    config = load_causal_config(path, spec.architecture, trust_remote_code=trust_remote_code)
    if is_gguf(path):
        from localllm.models.formats.gguf.checkpoint import class_facts

        whole = load_config(path, trust_remote_code=trust_remote_code)
        auto = AutoModelForCausalLM if config.model_type == whole.model_type else AutoModelForImageTextToText
        return [ModelClass(auto, whole, class_facts(path).name_of)]
    if config.model_type != spec.text_type:
        return [ModelClass(AutoModelForCausalLM, config, None)]
    whole = load_config(path, trust_remote_code=trust_remote_code)
    found = [ModelClass(kind, config, _name_in_text) for kind in causal_classes(config)[:1]]
    if not found or spec.architecture in whole_names(whole):
        found.append(ModelClass(AutoModelForImageTextToText, whole, None))
    return found


def load_module(
    path: Path, spec: ModelSpec, device: torch.device, dtype: torch.dtype, *, trust_remote_code: bool,
    format: LinearFormat | None = None, at_load: AtLoad | None = None, packer: CpuPacker | None = None,
) -> Any:  # fmt: skip
    """Load the causal language model of folder `path` with eager attention onto the device. If only the whole model has
    a class, or reads the stored names, the whole model.

    format: how matrices are stored; None: unquantised. at_load: quantises unquantised matrices. packer: packs quantised
    ones on a CPU.
    """
    found = classes_of(path, spec, trust_remote_code=trust_remote_code)
    for kind in found:
        # Falcon with ALiBi: eager attention of transformers 5.23 adds the slopes twice, once in the mask.
        attention = "sdpa" if kind.config.model_type == "falcon" and kind.config.alibi else "eager"
        options: dict[str, Any] = {"attention": attention, "trust_remote_code": trust_remote_code}
        if device.type == "cpu":  # one expert after another: as fast, and a long prompt holds the rows of one alone
            kind.config._experts_implementation = "eager"
        try:
            if format is not None or at_load is not None or is_gguf(path):
                with open_for_class(path) as checkpoint:
                    matrices = Quantization(checkpoint, format, at_load, device)
                    reader = QuantizedReader(matrices, device, dtype, packer or CpuPacker())
                    module = _read_quantized(kind, path, reader, **options)
            elif kind.name_of is None and not table_stems(kind):
                module = read_module(kind.auto, path, kind.config, dtype, **options)
            else:
                with open_checkpoint(path) as checkpoint:
                    tables = stored_tables(kind, checkpoint)
                    placed = {name for names in tables.values() for name in names}
                    renamed = {name: (kind.name_of or str)(name) for name in checkpoint.tensors if name not in placed}
                    state = {new: checkpoint.tensor(old).clone() for old, new in renamed.items() if new is not None}
                    prepare = _placing_tables(tables, checkpoint, dtype) if tables else None
                    auto = causal_classes(kind.config)[0] if tables else kind.auto
                    module = read_module(auto, path, kind.config, dtype, state=state, prepare=prepare, **options)
        except CorruptModel as error:
            if kind is not found[-1]:
                continue
            if kind.name_of is None or is_gguf(path):
                raise
            what = f"The text part of {spec.architecture} is not read alone."
            raise UnsupportedModel(what, f"{error.what} {error.why}") from error
        break
    _remove_floor_of_time_steps(module)
    return module.to(device)


def _read_quantized(
    kind: ModelClass, path: Path, reader: QuantizedReader, *, attention: str, trust_remote_code: bool
) -> Any:
    """Load a model whose matrices stay quantised. They are read before the class allocates memory for its others."""
    empty = _on_meta(kind.auto, kind.config, trust_remote_code=trust_remote_code)
    places = find_places(empty, reader.quantization, kind.name_of or str)
    if places.unknown:
        raise _does_not_match(path, empty, "unexpected keys", [f"{stem}.weight" for stem in places.unknown])
    checkpoint = reader.quantization.checkpoint
    tables = stored_tables(kind, checkpoint)
    for name in (name for names in tables.values() for name in names):
        places.plain.pop(name, None)
        places.dequantized.pop(name.removesuffix(".weight"), None)
    parts, state = reader.parts(empty, places), reader.others(places)

    place_tables = _placing_tables(tables, checkpoint, reader.dtype)

    def prepare(module: Any) -> None:
        if is_gguf(path) and text_part(kind.config) is not kind.config:
            keep_decoder(module)  # the file holds the text part alone
        place_parts(module, parts, reader.packer)
        place_tables(module)

    return read_module(
        type(empty), path, kind.config, reader.dtype, state=state, attention=attention,
        trust_remote_code=trust_remote_code, prepare=prepare,
    )  # fmt: skip


def stored_tables(kind: ModelClass, checkpoint: Checkpoint) -> dict[str, list[str]]:
    """Return the stored tensors, in order, of each `StoredTable`, by the name of its module. Quantised tables
    are left to the class, except in blocks of GGUF."""
    from transformers.core_model_loading import dot_natural_key

    found: dict[str, list[str]] = {}
    for stem in table_stems(kind):
        for stored in sorted(checkpoint.tensors, key=dot_natural_key):
            name = (kind.name_of or str)(stored)
            if name is not None and stem in name:
                found.setdefault(name[: name.index(stem) + len(stem)], []).append(stored)
    return {table: names for table, names in found.items() if all(map(partial(_is_plain, checkpoint), names))}


def _is_plain(checkpoint: Checkpoint, name: str) -> bool:
    return name.endswith(".weight") and checkpoint.tensors[name].dtype in (*FLOATS, *BLOCK_TYPES, *DEQUANTISED)


def table_stems(kind: ModelClass) -> list[str]:
    """Return the ends of the names of modules whose weight the class never places on a device."""
    ends = {end for each in causal_classes(kind.config) for end in getattr(each, "_no_placement_params", None) or ()}
    return sorted(end.removesuffix(".weight") for end in ends)


def _placing_tables(
    tables: Mapping[str, list[str]], checkpoint: Checkpoint, dtype: torch.dtype
) -> Callable[[Any], None]:
    """Return a function that puts the tables in place of a module's embeddings. transformers copies what it calls, and
    a function is not copied. Raises `CorruptModel` for other sizes."""

    def place(module: Any) -> None:
        for name, stored in tables.items():
            table, parts = module.get_submodule(name), [checkpoint.tensor(each) for each in stored]
            info, wanted = checkpoint.tensors[stored[0]], (table.num_embeddings, table.embedding_dim)
            shape, block_type = (sum(map(len, parts)), info.shape[1]), "" if info.dtype in FLOATS else info.dtype
            if shape != wanted:
                raise wrong_shape([f"{name}.weight"], shape, wanted)
            module.set_submodule(name, StoredTable(parts, dtype, block_type, info.shape[1]))

    return place


def _name_in_text(name: str) -> str | None:
    """Return the name of a tensor of a text part in a model of text; None: it belongs to another part."""
    inner = _TEXT_PART.fullmatch(name)
    if inner is None:
        return name if name.startswith("lm_head.") else None
    return inner[1] if inner[1].startswith("lm_head.") else f"model.{inner[1]}"


def _remove_floor_of_time_steps(module: nn.Module) -> None:
    """Set the limits of Mamba-2's time step to the config's; missing: none.

    transformers 5.23 gives some classes config.time_step_min, which is the range of an initialisation, as a floor that
    their scan of several tokens has and their single step has not: a state would depend on how a token was computed.
    """
    for part in module.modules():
        config = getattr(part, "config", None) or module.config
        floor = (getattr(config, "time_step_min", None), float("inf"))
        if tuple(getattr(part, "time_step_limit", None) or ()) == floor:
            limits: Any = time_step_limits({"time_step_limit": getattr(config, "time_step_limit", None)})
            part.time_step_limit = limits


def read_module(
    auto: Any,
    path: Path,
    config: Any,
    dtype: torch.dtype,
    *,
    attention: str,
    trust_remote_code: bool,
    unused: tuple[str, ...] = (),
    state: dict[str, Tensor] | None = None,
    prepare: Callable[[Any], None] | None = None,
) -> Any:
    """Load a transformers module from folder `path` onto the CPU.

    Raises `CorruptModel` if the module and the checkpoint do not have the same tensors, `UnsupportedModel` if the
    class fails. unused: prefixes of names that may differ. state: the tensors, in place of those in the folder.
    prepare: called with the module before tensors are allocated for its parameters, which it may take away.
    """
    more = {} if prepare is None else {"quantization_config": _calling(prepare)}
    try:
        with read_quietly():
            module, report = auto.from_pretrained(
                path if state is None else None,
                config=config,
                state_dict=state,
                dtype=dtype,
                attn_implementation=attention,
                local_files_only=True,
                trust_remote_code=trust_remote_code,
                output_loading_info=True,
                **more,
            )
    except ModelError:  # of `prepare`
        raise
    except Exception as error:  # the class may raise anything
        raise _translated(path, config, error) from error
    for kind in ("missing_keys", "mismatched_keys", "unexpected_keys"):
        names = sorted(name for name in map(str, report.get(kind) or ()) if not name.startswith(unused))
        if names:
            raise _does_not_match(path, module, kind.replace("_", " "), names)
    return module.eval().requires_grad_(False)


def _does_not_match(path: Path, module: Any, what: str, names: Sequence[str]) -> CorruptModel:
    return CorruptModel(
        f"The checkpoint in {path} does not match {type(module).__name__}.",
        f"{what}: {', '.join(names[:5])}{', ...' if len(names) > 5 else ''}.",
    )


_METHOD = "localllm"  # the name of the method in transformers' table


def _calling(prepare: Callable[[Any], None]) -> Any:
    """Return a quantization_config with which transformers calls `prepare` before it loads a model's weights.

    Its quantisers are the place where a model may be changed between its making, without data, and its loading.
    """
    from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING, register_quantizer
    from transformers.quantizers.base import HfQuantizer
    from transformers.utils.quantization_config import QuantizationConfigMixin

    if _METHOD not in AUTO_QUANTIZER_MAPPING:

        class Preparing(HfQuantizer):  # type: ignore[misc]
            def _process_model_before_weight_loading(self, model: Any, **_: Any) -> None:
                self.quantization_config.prepare(model)

            def _process_model_after_weight_loading(self, model: Any, **_: Any) -> Any:
                self.remove_quantization_config(model)
                return model

            def is_serializable(self) -> bool:
                return False

            @property
            def is_trainable(self) -> bool:
                return False

        register_quantizer(_METHOD)(Preparing)
    config = QuantizationConfigMixin(quant_method=_METHOD)
    config.prepare = prepare
    return config


def _translated(path: Path, config: Any, error: Exception) -> Exception:
    """Return the error to raise for what transformers raised while it loaded a model."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return error
    if isinstance(error, OSError | SafetensorError) or "mismatch" in str(error):
        return CorruptModel(f"transformers cannot load {path}.", first_line(error))
    return UnsupportedModel(
        f"transformers cannot build the model in {path}.",
        f"Its code for the type {config.model_type!r} fails: {type(error).__name__}: {first_line(error)}",
    )


@contextmanager
def read_quietly() -> Iterator[None]:
    """Turn off transformers' progress bars and tables; relevant problems are raised as errors."""
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)


def module_on_meta(path: Path, architecture: str, *, trust_remote_code: bool) -> Any:
    """Build the same model on `meta`: tensors have shapes only. Of a whole model only what answers."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    config = load_causal_config(path, architecture, trust_remote_code=trust_remote_code)
    whole = load_config(path, trust_remote_code=trust_remote_code)
    if config.model_type != whole.model_type and not causal_classes(config):
        module = _on_meta(AutoModelForImageTextToText, whole, trust_remote_code=trust_remote_code)
        keep_decoder(module)
        return module
    return _on_meta(AutoModelForCausalLM, config, trust_remote_code=trust_remote_code)


def quantized_on_meta(path: Path, spec: ModelSpec, reader: QuantizedReader, *, trust_remote_code: bool) -> Any:
    """Build the model that `load_module` loads with quantised matrices, on `meta`. reader: reads sizes only."""
    found = classes_of(path, spec, trust_remote_code=trust_remote_code)
    for kind in found:
        module = _on_meta(kind.auto, kind.config, trust_remote_code=trust_remote_code)
        places = find_places(module, reader.quantization, kind.name_of or str)
        if not places.unknown or kind is found[-1]:
            break
    place_parts(module, reader.parts(module, places), reader.packer)
    if spec.text_type not in ("", kind.config.model_type):
        keep_decoder(module)
    return module


def _on_meta(auto: Any, config: Any, *, trust_remote_code: bool) -> Any:
    for part in (config, text_part(config)):
        if hasattr(part, "quantization_config"):
            del part.quantization_config
    with torch.device("meta"):
        if not hasattr(auto, "from_config"):
            return auto._from_config(config)
        return auto.from_config(config, trust_remote_code=trust_remote_code)


def keep_decoder(module: Any) -> Any:
    """Return the layers of a whole model, and take away what reads pictures and sound. The whole model's head stays,
    and with it all that its code does to logits."""
    decoder, base = module.get_decoder(), module.base_model
    for name, part in list(base.named_children()):
        if all(inner is not decoder for inner in part.modules()):
            delattr(base, name)
    return decoder
