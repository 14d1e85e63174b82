"""One file for each way of writing tool calls; the grammar stands at its beginning."""

from localllm.text.answers.formats.base import ToolFormat
from localllm.text.answers.formats.deepseek import DeepSeek
from localllm.text.answers.formats.harmony import Harmony
from localllm.text.answers.formats.hermes import Hermes
from localllm.text.answers.formats.json_list import Apriel, Granite, Nemotron, Phi4
from localllm.text.answers.formats.llama3 import Llama3Json
from localllm.text.answers.formats.mistral import Mistral
from localllm.text.answers.formats.pythonic import Pythonic
from localllm.text.answers.formats.tagged import Glm4, Qwen3Coder, SeedOss

FORMATS: dict[str, ToolFormat] = {
    format.name: format
    for format in (
        Hermes(),
        Qwen3Coder(),
        SeedOss(),
        Glm4(),
        DeepSeek(),
        Harmony(),
        Mistral(),
        Granite(),
        Phi4(),
        Nemotron(),
        Apriel(),
        Llama3Json(),
        Pythonic(),
    )
}
"""By the names that people see."""

__all__ = ["FORMATS", "ToolFormat"]
