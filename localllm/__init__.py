"""localllm: a local LLM server with a paged-KV continuous-batching engine.

`from localllm import LLM, SamplingParams` is the offline API; `localllm up` is the server. Nothing heavy is
imported until one of these names is touched, so that the command line answers `--help` at once.
"""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["LLM", "LoRARequest", "SamplingParams", "__version__"]

if TYPE_CHECKING:
    from localllm.engine.params import SamplingParams
    from localllm.llm import LLM, LoRARequest


def __getattr__(name: str) -> Any:
    if name == "SamplingParams":
        from localllm.engine.params import SamplingParams

        return SamplingParams
    if name == "LLM":
        from localllm.llm import LLM

        return LLM
    if name == "LoRARequest":
        from localllm.llm import LoRARequest

        return LoRARequest
    raise AttributeError(f"module 'localllm' has no attribute {name!r}")
