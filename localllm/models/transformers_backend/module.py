"""Modules of `transformers`: load them, and build them from shapes alone.

Does not know: attention, caches, steps.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from localllm.errors import CorruptModel, UnsupportedModel
from localllm.models.families.bamba import time_step_limits
from localllm.models.families.text_part import WITHIN
from localllm.models.formats.registry import open_checkpoint
from localllm.models.spec.model_spec import ModelSpec
from localllm.models.transformers_backend.config_class import (
    causal_classes,
    first_line,
    load_causal_config,
    load_config,
    whole_names,
)

_TEXT_PART = re.compile(rf"{WITHIN}(?:model\.)?(.*)")
"""Names of tensors of a text part."""


def load_module(
    path: Path, spec: ModelSpec, device: torch.device, dtype: torch.dtype, *, trust_remote_code: bool
) -> Any:
    """Load the causal language model of folder `path` with eager attention onto the device. If only the whole model has
    a class, or reads the stored names, the whole model."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    config = load_causal_config(path, spec.architecture, trust_remote_code=trust_remote_code)
    # Falcon with ALiBi: eager attention of transformers 5.23 adds the slopes twice, once in the mask.
    attention = "sdpa" if config.model_type == "falcon" and config.alibi else "eager"
    options: dict[str, Any] = {"attention": attention, "trust_remote_code": trust_remote_code}
    if config.model_type == spec.text_type:
        whole = load_config(path, trust_remote_code=trust_remote_code)
        has_whole = spec.architecture in whole_names(whole)
        try:
            if not causal_classes(config):
                module = read_module(AutoModelForImageTextToText, path, whole, dtype, **options)
            else:
                state = _text_tensors(path)
                module = read_module(causal_classes(config)[0], path, config, dtype, state=state, **options)
        except CorruptModel as error:
            if has_whole and causal_classes(config):
                module = read_module(AutoModelForImageTextToText, path, whole, dtype, **options)
            else:
                what = f"The text part of {spec.architecture} is not read alone."
                raise UnsupportedModel(what, f"{error.what} {error.why}") from error
    else:
        module = read_module(AutoModelForCausalLM, path, config, dtype, **options)
    _remove_floor_of_time_steps(module)
    return module.to(device)


def _text_tensors(path: Path) -> dict[str, Tensor]:
    """Return the tensors of the text part of a model that reads more than text, by their names in a model of text."""
    found = dict[str, Tensor]()
    with open_checkpoint(path) as checkpoint:
        for name in checkpoint.tensors:
            inner = _TEXT_PART.fullmatch(name)
            if inner is None and not name.startswith("lm_head."):
                continue
            plain = name if inner is None else inner[1] if inner[1].startswith("lm_head.") else f"model.{inner[1]}"
            found[plain] = checkpoint.tensor(name).clone()
    return found


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
) -> Any:
    """Load a transformers module from folder `path` onto the CPU.

    Raises `CorruptModel` if the module and the checkpoint do not have the same tensors, `UnsupportedModel` if the
    class fails. unused: prefixes of names that may differ. state: the tensors, in place of those in the folder.
    """
    try:
        with _quiet():
            module, report = auto.from_pretrained(
                path if state is None else None,
                config=config,
                state_dict=state,
                dtype=dtype,
                attn_implementation=attention,
                local_files_only=True,
                trust_remote_code=trust_remote_code,
                output_loading_info=True,
            )
    except Exception as error:  # the class may raise anything
        raise _translated(path, config, error) from error
    for kind in ("missing_keys", "mismatched_keys", "unexpected_keys"):
        names = sorted(name for name in map(str, report.get(kind) or ()) if not name.startswith(unused))
        if names:
            raise CorruptModel(
                f"The checkpoint in {path} does not match {type(module).__name__}.",
                f"{kind.replace('_', ' ')}: {', '.join(names[:5])}{', ...' if len(names) > 5 else ''}.",
            )
    return module.eval().requires_grad_(False)


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
def _quiet() -> Iterator[None]:
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
    with torch.device("meta"):
        if config.model_type != whole.model_type and not causal_classes(config):
            module = AutoModelForImageTextToText.from_config(whole)
            keep_decoder(module)
            return module
        return AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)


def keep_decoder(module: Any) -> Any:
    """Return the layers of a whole model, and take away what reads pictures and sound. The whole model's head stays,
    and with it all that its code does to logits."""
    decoder, base = module.get_decoder(), module.base_model
    for name, part in list(base.named_children()):
        if all(inner is not decoder for inner in part.modules()):
            delattr(base, name)
    return decoder
