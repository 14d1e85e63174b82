"""OpenAI's dialect, as its SDK and vLLM's clients speak it: chat completions, completions, infilling, embeddings,
reranking,
transcription, models.

`schema` parses bodies and has the rules for every request field, `params` and `prompts` translate them into one
`GenerationRequest` per prompt, `answer` translates events back.
"""

from __future__ import annotations

from litestar.types import ControllerRouterHandler

from localllm.config.settings import ServerConfig
from localllm.web.api.openai.adapters import load_lora_adapter, unload_lora_adapter
from localllm.web.api.openai.audio import audio_routes
from localllm.web.api.openai.chat import apply_template, chat_completions, chat_input_tokens
from localllm.web.api.openai.completions import completions
from localllm.web.api.openai.embeddings import embeddings
from localllm.web.api.openai.infill import infill
from localllm.web.api.openai.pooling import classify, pooling
from localllm.web.api.openai.rerank import rerank, score
from localllm.web.api.openai.tokenize import detokenize, tokenize, tokenizer_info


def routes(config: ServerConfig) -> list[ControllerRouterHandler]:
    return [
        chat_completions, chat_input_tokens, completions, infill, tokenize, detokenize, tokenizer_info,
        apply_template, embeddings, pooling, classify, rerank, score, load_lora_adapter, unload_lora_adapter,
        *audio_routes(config),
    ]  # fmt: skip
