"""The model that a person without one should try: one that is installed, else the suggested one that fits.

Does not know: how it is shown (start_lines.py, run.py), the network.
"""

from __future__ import annotations

from localllm.config.settings import Settings
from localllm.errors import LocalLLMError
from localllm.machine.bandwidth import memory_bandwidth
from localllm.machine.hardware import Hardware, read_hardware
from localllm.models.encoders.recipe import task_of
from localllm.models.library.catalog import DEMO_NAME, ResolvedModel, list_models
from localllm.models.library.picks import FittingPick, fitting_picks


def installed_model() -> str | None:
    """Return the first model on this machine that generates, besides the demo; None: there is none."""
    return next((model.name for model in list_models() if model.name != DEMO_NAME and _generates(model)), None)


def best_pick(settings: Settings, hardware: Hardware | None = None) -> FittingPick | None:
    """Return the best suggested model that fits. Raises `ConfigError` for a wrong list in the config file."""
    hardware = hardware or read_hardware()
    return next(iter(fitting_picks(hardware, settings, memory_bandwidth(hardware), count=1)), None)


def _generates(model: ResolvedModel) -> bool:
    try:
        return task_of(model.path) == "generate"
    except LocalLLMError:  # a damaged checkpoint
        return False
