"""localllm: a local LLM server with a paged-KV continuous-batching engine.

`from localllm import LLM, SamplingParams` is the offline API; `localllm up` is the server. Heavy modules
are imported when one of these names is first used, so that the command line answers `--help` at once.
"""

from typing import TYPE_CHECKING, Any

from localllm.version import __version__

__all__ = ["LLM", "BeamSearchParams", "LoRARequest", "SamplingParams", "StructuredOutputsParams", "__version__"]

if TYPE_CHECKING:
    from localllm.engine.beam_search import BeamSearchParams
    from localllm.engine.params import SamplingParams
    from localllm.llm import LLM, LoRARequest
    from localllm.text.structured import StructuredOutputsParams


_FROM = {
    "BeamSearchParams": "localllm.engine.beam_search",
    "LLM": "localllm.llm",
    "LoRARequest": "localllm.llm",
    "SamplingParams": "localllm.engine.params",
    "StructuredOutputsParams": "localllm.text.structured",
}


def __getattr__(name: str) -> Any:
    if name not in _FROM:
        raise AttributeError(f"module 'localllm' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_FROM[name]), name)
