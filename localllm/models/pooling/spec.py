"""The spec of a model that embeds or scores, in a decoder's terms: sizes for the plan and for display.

Does not know: weights.
"""

from __future__ import annotations

from pathlib import Path

from localllm.models.architectures.read_spec import read_spec
from localllm.models.architectures.transformers_backend.config_class import load_config
from localllm.models.architectures.transformers_backend.spec import sizes_of
from localllm.models.pooling.recipe import PoolingRecipe, read_recipe, task_of
from localllm.models.spec.model_spec import ModelSpec
from localllm.models.spec.rope import RopeSpec


def spec_of_any(
    path: Path, *, task: str = "auto", model_impl: str = "auto", trust_remote_code: bool = False
) -> ModelSpec:
    """Return the spec of any model in folder or GGUF file `path`. Raises what `read_spec` and `read_recipe` raise."""
    found = task_of(path, task)
    if found == "generate":
        return read_spec(path, model_impl=model_impl, trust_remote_code=trust_remote_code)
    return pooling_spec(path, read_recipe(path, found), trust_remote_code=trust_remote_code)


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
