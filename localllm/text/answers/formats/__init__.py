"""The formats of tool calls, one kind per file; each file starts with its grammars."""

from localllm.text.answers.formats.arg_pairs import Glm4, Hunyuan3, Hunyuan3Preview
from localllm.text.answers.formats.base import ToolFormat
from localllm.text.answers.formats.gemma import FunctionGemma, Gemma4
from localllm.text.answers.formats.json_list import Apertus, Apriel, Command, Granite, Mistral, Nemotron, Phi4
from localllm.text.answers.formats.json_objects import GigaChat, Hermes, Llama3Json, MiniMaxM1
from localllm.text.answers.formats.marked import DeepSeek, DeepSeek31, Functionary, KimiK2, Solar
from localllm.text.answers.formats.messages import Harmony, Inkling, Muse
from localllm.text.answers.formats.nested import MiniMaxM3
from localllm.text.answers.formats.pythonic import Pythonic
from localllm.text.answers.formats.tagged import DeepSeek4, DeepSeek32, MiMo, MiniCpm, MiniMaxM2, Qwen3Coder, SeedOss

FORMATS: dict[str, ToolFormat] = {
    format.name: format
    for format in (
        Hermes(),
        MiMo(),
        Qwen3Coder(),
        SeedOss(),
        Glm4(),
        DeepSeek31(),
        DeepSeek(),
        DeepSeek32(),
        DeepSeek4(),
        Harmony(),
        Muse(),
        Inkling(),
        KimiK2(),
        MiniMaxM1(),
        MiniMaxM2(),
        MiniMaxM3(),
        Gemma4(),
        FunctionGemma(),
        Mistral(),
        Command(),
        Granite(),
        Phi4(),
        Nemotron(),
        Apriel(),
        Apertus(),
        Hunyuan3(),
        Hunyuan3Preview(),
        MiniCpm(),
        GigaChat(),
        Solar(),
        Functionary(),
        Llama3Json(),
        Pythonic(),
    )
}
"""Formats by name. Of two that read the same call, the first is the one whose models write it."""

__all__ = ["FORMATS", "ToolFormat"]
