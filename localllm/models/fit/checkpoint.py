"""The fit of a checkpoint from its headers: a folder, a GGUF file, or a remote checkpoint (models/library/hub/peek.py).

Does not know: where the files came from.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from localllm.config.settings import EngineConfig
from localllm.machine.bandwidth import probed
from localllm.machine.hardware import Hardware
from localllm.models.encoders.recipe import spec_of_any
from localllm.models.fit.conversation_bytes import RequestCost
from localllm.models.fit.estimate import Estimate, estimate
from localllm.models.fit.far import CheckpointBytes, LayerExperts, TableBytes
from localllm.models.fit.pictures import with_tower
from localllm.models.fit.speed import predict_speech
from localllm.models.formats.registry import Headers
from localllm.models.spec.model_spec import ModelSpec
from localllm.models.spec.shard import Shard

if TYPE_CHECKING:
    from localllm.models.layers.lora import LoraLimits

WithDrafter = Callable[[EngineConfig, Path, ModelSpec], ModelSpec]


def lora_limits(config: EngineConfig) -> LoraLimits | None:
    """Return the adapter sizes to plan for, or None if adapters are not enabled."""
    from localllm.models.layers.lora import LoraLimits

    return LoraLimits(config.max_loras, config.max_lora_rank) if config.takes_adapters else None


def count_resident_for(
    config: EngineConfig, path: Path, spec: ModelSpec, headers: Headers | None = None
) -> CheckpointBytes:
    """Return `count_resident` of the checkpoint as this configuration loads it, with its drafter."""
    cpu_weights, half = config.cpu_weights, config.keeps_half_weights
    own = count_resident(path, spec, cpu_weights, lora_limits(config), half_weights=half, headers=headers)
    if spec.drafter is None:
        return own
    import torch

    from localllm.models.drafters.opening import drafter_bytes

    @cache
    def count(device: str, dtype: str, max_model_len: int, quantization: str | None, shard: Shard | None = None) -> int:
        whole = own(device, dtype, max_model_len, quantization, shard)
        if shard is not None and shard.layers.stop < spec.num_layers:
            return whole  # the drafter is on the last stage
        where, kind = torch.device(device), getattr(torch, dtype)
        return whole + drafter_bytes(
            spec, where, kind,
            max_model_len=max_model_len, target_shard=shard, cpu_weights=cpu_weights, half_weights=half,
        )  # fmt: skip

    return CheckpointBytes(count, own.experts, tables=own.tables)


def count_resident(
    path: Path,
    spec: ModelSpec,
    cpu_weights: str = "fast",
    lora: LoraLimits | None = None,
    *,
    half_weights: bool = False,
    headers: Headers | None = None,
) -> CheckpointBytes:
    """Return functions that count the bytes the loader would hold. The model is built without data once for each type
    of device, dtype and shard. headers: of the checkpoint, for a caller that needs more of them."""
    import torch

    from localllm.models.loader import HeldBytes, count_model, expert_bytes

    read = headers or Headers(path)

    @cache
    def counted(kind: str, dtype: str, quantization: str | None, shard: Shard | None) -> HeldBytes:
        """kind: of the device, since sizes do not depend on its number."""
        return count_model(
            path, spec, torch.device(kind), getattr(torch, dtype),
            quantization=quantization, lora=lora, cpu_weights=cpu_weights, half_weights=half_weights, shard=shard,
            headers=read,
        )  # fmt: skip

    def count(device: str, dtype: str, max_model_len: int, quantization: str | None, shard: Shard | None = None) -> int:
        return counted(device.partition(":")[0], dtype, quantization, shard).at(max_model_len)

    @cache
    def experts(device: str, dtype: str, quantization: str | None) -> tuple[LayerExperts, ...]:
        kind = device.partition(":")[0]
        found = expert_bytes(
            path, spec, torch.device(kind), getattr(torch, dtype), quantization=quantization, cpu_weights=cpu_weights,
            half_weights=half_weights, known=counted(kind, dtype, quantization, None).experts,
            headers=read,
        )  # fmt: skip
        return tuple(LayerExperts(layer, *sizes) for layer, sizes in sorted(found.items()))

    def tables(device: str, dtype: str, quantization: str | None) -> list[TableBytes]:
        found = counted(device.partition(":")[0], dtype, quantization, None).tables
        return [TableBytes(*each) for each in found.items()]

    return CheckpointBytes(count, experts, tables=tables)


def estimate_checkpoint(
    path: Path, config: EngineConfig, hardware: Hardware, with_drafter: WithDrafter | None = None
) -> tuple[ModelSpec, list[Estimate]]:
    """Estimate the checkpoint on every device of the machine, the device that a load would choose first.

    with_drafter: adds the drafter that the settings name to the spec; None: the model alone.
    Raises `UnsupportedModel` and `CorruptModel` as a load would, `ConfigError` for flags that are not possible.
    """
    spec = spec_of_any(
        path, task=config.task, model_impl=config.model_impl, trust_remote_code=config.trust_remote_code,
        mmproj=config.mmproj,
    )  # fmt: skip
    if spec.task != "generate":
        return spec, [_estimate_pooling(path, spec, config, hardware)]
    spec = with_tower(path, spec if with_drafter is None else with_drafter(config, path, spec))
    headers = Headers(path)
    resident = count_resident_for(config, path, spec, headers)
    return spec, estimate(config, spec, headers.stored_bytes, hardware, resident)


def estimate_measured(
    path: Path, config: EngineConfig, hardware: Hardware, with_drafter: WithDrafter | None = None
) -> tuple[ModelSpec, list[Estimate]]:
    """Do `estimate_checkpoint` with the speeds of this machine, which are measured once: of its disk only if the model
    fits nowhere else."""
    from localllm.kernels.cpu.native_product import product_speeds

    hardware = probed(hardware, product_speeds)
    found = estimate_checkpoint(path, config, hardware, with_drafter)
    on_disk = (each.plan.far for each in found[1] if each.plan is not None and each.plan.far is not None)
    if hardware.speeds.disk is None and any(far.disk is not None for far in on_disk):
        hardware = probed(hardware, product_speeds, disk=True)
        found = estimate_checkpoint(path, config, hardware, with_drafter)
    return found


def _estimate_pooling(path: Path, spec: ModelSpec, config: EngineConfig, hardware: Hardware) -> Estimate:
    """Estimate the chosen device only: without a KV cache there is nothing to reduce. Raises `DoesNotFit`."""
    from localllm.models.fit.pooling import plan_pooling, plan_transcriber

    assert spec.task != "generate"
    if spec.task == "transcribe":
        from localllm.models.encoders.source import HeldAs
        from localllm.models.encoders.transcriber import transcriber_sizes

        sizes = transcriber_sizes(path, HeldAs.asked(config))
        plan = plan_transcriber(config, spec, sizes, hardware)
    else:
        from localllm.models.encoders.model import count_parameters
        from localllm.models.encoders.recipe import read_recipe

        recipe = read_recipe(path, spec.task)
        parameters = count_parameters(path, recipe, trust_remote_code=config.trust_remote_code)
        plan = plan_pooling(config, spec, recipe, parameters, hardware)
    names = {f"cuda:{gpu.index}": gpu.name for gpu in hardware.gpus}
    return Estimate(
        plan.device,
        names.get(plan.device, "CPU"),
        plan,
        plan,
        None,
        RequestCost(),
        plan.max_model_len,
        (),
        is_chosen=True,
        speech=predict_speech(plan.speech, plan.device, hardware),
    )
