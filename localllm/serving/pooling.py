"""Build a served model from a checkpoint that embeds or scores: like build.py, with fewer phases.

Does not know: which models stay loaded (manager.py), HTTP.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

from localllm.config.settings import Settings
from localllm.engine.pooling import PoolingInput, PoolingLoop
from localllm.engine.pooling_client import BatchClient, PoolingClient, PoolingLimits, TextEncoder
from localllm.errors import InvalidParameter, UnsupportedModel
from localllm.serving.compute import start_torch
from localllm.serving.phases import OnPhase, PhaseReporter, report_phase
from localllm.serving.served import NO_LIMITS, LoadLimits, ServedModel, names_of
from localllm.units import format_bytes

if TYPE_CHECKING:
    from localllm.models.encoders.model import PoolingModel
    from localllm.models.encoders.recipe import PoolingRecipe
    from localllm.models.fit import MemoryPlan
    from localllm.models.library.catalog import ResolvedModel
    from localllm.models.spec.model_spec import ModelSpec
    from localllm.text.tokenizer import Tokenizer


def build_pooling(
    settings: Settings,
    found: ResolvedModel,
    task: Literal["embed", "score"],
    on_phase: OnPhase = lambda phase: None,
    limits: LoadLimits = NO_LIMITS,
) -> ServedModel:
    """Read, fit and load the model. Blocking. Raises UnsupportedModel, CorruptModel, DoesNotFit, ConfigError."""
    from localllm.models.encoders.recipe import pooling_spec, read_recipe
    from localllm.models.fit.pooling import plan_pooling
    from localllm.text.tokenizer import load_tokenizer

    config = settings.engine
    recipe = read_recipe(found.path, task)
    hardware = start_torch(on_phase, limits)
    with report_phase("fit", on_phase) as report:
        from localllm.models.encoders.model import count_parameters

        spec = pooling_spec(found.path, recipe, trust_remote_code=config.trust_remote_code)
        parameters = count_parameters(found.path, recipe, trust_remote_code=config.trust_remote_code)
        plan = plan_pooling(config, spec, recipe, parameters, hardware)
        report(f"{plan.device} · {plan.dtype} · weights {format_bytes(plan.weights_bytes)}")
    with report_phase("tokenizer", on_phase) as report:
        tokenizer = load_tokenizer(found.path)
        encoder = _encoder(found, recipe, tokenizer)
        report(f"{tokenizer.vocab_size} tokens{', through the chat template' if recipe.as_message else ''}")
    with report_phase("weights", on_phase) as report:
        model = _load(found, recipe, plan.device, plan.dtype, config.trust_remote_code, report)
    pooling_limits = PoolingLimits(plan.max_model_len, plan.max_num_seqs, model.vocab_size)
    loop = loop_in_batches(BatchRunner(model, _outputs), plan, config.max_num_queued_reqs)
    client = PoolingClient(loop, encoder, pooling_limits, model.dim, recipe.prompts, model.labels, model.wants)
    return serve_inputs(settings, found, spec, plan, tokenizer, loop, client)


def loop_in_batches(runner: BatchRunner, plan: MemoryPlan, max_num_queued: int) -> PoolingLoop:
    return PoolingLoop(
        runner,
        max_num_seqs=plan.max_num_seqs,
        max_num_batched_tokens=plan.max_num_batched_tokens,
        max_num_queued=max_num_queued,
    )


def serve_inputs(
    settings: Settings,
    found: ResolvedModel,
    spec: ModelSpec,
    plan: MemoryPlan,
    tokenizer: Tokenizer,
    loop: PoolingLoop,
    client: BatchClient,
) -> ServedModel:
    """Return the served model around a loop whose inputs are independent of each other."""
    from localllm.text.chat_template import ChatTemplate

    config = settings.engine
    name, aliases = names_of(settings, found)
    return ServedModel(
        name=name,
        path=found.path,
        spec=spec,
        plan=plan,
        tokenizer=tokenizer,
        chat_template=ChatTemplate.of(tokenizer),
        client=client,
        created_s=time.time(),
        loop=loop,
        sampling_defaults={},
        max_num_queued_reqs=config.max_num_queued_reqs,
        aliases=aliases,
    )


class BatchRunner:
    """The runner that the loop calls with a batch; closing it frees the model."""

    def __init__(self, model: Any, run: Callable[[Any, Sequence[Any]], list[Any]]) -> None:
        """run(model, batch): returns one result for each input."""
        self._model, self._run = model, run

    def __call__(self, batch: Sequence[Any]) -> list[Any]:
        assert self._model is not None, "the runner is closed"
        from localllm.runner.device_errors import check_device, translated

        try:
            with translated():
                return self._run(self._model, batch)
        except Exception:
            check_device(self._model.device)  # raises if the device is lost, which the batch may not have reported
            raise

    def close(self) -> None:
        self._model = None


def _outputs(model: PoolingModel, batch: Sequence[PoolingInput]) -> list[list[float]]:
    types = None if any(each.type_ids is None for each in batch) else [each.type_ids or () for each in batch]
    return model.outputs([each.token_ids for each in batch], types, [each.want for each in batch])


def _encoder(found: ResolvedModel, recipe: PoolingRecipe, tokenizer: Tokenizer) -> TextEncoder:
    """Return the encoder of texts. Raises `UnsupportedModel` if the chat template cannot render a single text."""
    from localllm.text.chat_template import ChatTemplate

    if not recipe.as_message:
        return TextEncoder(tokenizer, lower_case=recipe.lower_case)
    encoder = TextEncoder(tokenizer, ChatTemplate.of(tokenizer), recipe.template_switches, recipe.lower_case)
    try:
        encoder.encode("a text")
    except InvalidParameter as error:
        raise UnsupportedModel(
            f"{found.path.name} embeds texts as messages, but its chat template does not render one.",
            f"{error.what} {error.why}".strip(),
        ) from error
    return encoder


def _load(
    found: ResolvedModel, recipe: PoolingRecipe, device: str, dtype: str, trust_remote_code: bool, report: PhaseReporter
) -> PoolingModel:
    import torch

    from localllm.models.encoders.model import load_pooling_model

    model = load_pooling_model(
        found.path, recipe, torch.device(device), getattr(torch, dtype), trust_remote_code=trust_remote_code
    )
    report(f"{recipe.mode} pooling" if recipe.task == "embed" else f"{model.num_labels} scores")
    return model
