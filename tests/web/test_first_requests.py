"""First requests of programs, as they were recorded and shortened: each is answered, with the warnings due to it.

The programs themselves are tried by scripts/client_check --programs.
"""

from typing import Any

import pytest

from tests.web.live_server import LiveServer

USER: dict[str, Any] = {"role": "user", "content": "Hi"}
FUNCTION: dict[str, Any] = {"type": "function", "function": {"name": "read", "parameters": {"type": "object"}}}
PLAIN: dict[str, Any] = {"type": "function", "name": "read", "strict": False, "parameters": {"type": "object"}}
ITEM: dict[str, Any] = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi"}]}
CHAT, RESPONSES, MESSAGES, OLLAMA = "/v1/chat/completions", "/v1/responses", "/v1/messages", "/api/chat"

REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "Claude Code": (f"{MESSAGES}?beta=true", {
        "model": "tiny", "max_tokens": 2, "stream": True, "thinking": {"type": "adaptive"},
        "system": [{"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.197.145; cch=0;"},
                   {"type": "text", "text": "You are an agent.", "cache_control": {"type": "ephemeral"}}],
        "messages": [USER, {"role": "system", "content": "Now."}], "metadata": {"user_id": "u"},
        "tools": [{"name": "Read", "input_schema": {"type": "object"}}], "output_config": {"effort": "high"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}}),
    "Codex": (RESPONSES, {
        "model": "tiny", "instructions": "You are Codex.", "stream": True, "store": False, "max_output_tokens": 2,
        "input": [{**ITEM, "role": "developer"}, ITEM], "tool_choice": "auto", "parallel_tool_calls": False,
        "tools": [PLAIN, {"type": "namespace", "name": "multi_agent_v1", "description": "", "tools": [PLAIN]},
                  {"type": "web_search", "external_web_access": False}], "text": {"verbosity": "low"},
        "reasoning": {"effort": "high", "summary": "auto"}, "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "k", "client_metadata": {"a": "b"}}),
    "codex --oss, LM Studio": (RESPONSES, {"model": "tiny", "input": "", "max_output_tokens": 1}),
    "OpenCode": (CHAT, {
        "model": "tiny", "messages": [{"role": "system", "content": "You."}, USER], "max_tokens": 2, "stream": True,
        "stream_options": {"include_usage": True}, "tools": [FUNCTION], "tool_choice": "auto"}),
    "Copilot CLI": (RESPONSES, {
        "model": "tiny", "input": [ITEM], "tools": [PLAIN], "include": ["reasoning.encrypted_content"],
        "reasoning": {"summary": "auto"}, "store": False, "max_output_tokens": 2, "stream": True}),
    "Qwen Code": (CHAT, {"model": "tiny", "messages": [USER], "tools": [FUNCTION], "max_tokens": 2, "stream": True,
                         "stream_options": {"include_usage": True}, "metadata": {"sessionId": "s"}}),
    "Continue": (OLLAMA, {"model": "tiny", "messages": [USER], "options": {"num_ctx": 8192, "num_predict": 2}}),
    "Cline": (OLLAMA, {"model": "tiny", "messages": [USER], "tools": [FUNCTION],
                       "options": {"num_ctx": 32768, "num_predict": 2}}),
    "Zed": (OLLAMA, {"model": "tiny", "messages": [{**USER, "images": None}], "keep_alive": -1, "think": True,
                     "options": {"num_ctx": 16384, "num_predict": 2, "stop": []}, "stream": True}),
    "Home Assistant": (OLLAMA, {"model": "tiny", "messages": [USER], "keep_alive": "60s", "think": False,
                                "format": None, "options": {"num_ctx": 8192, "num_predict": 2}}),
    "aider": (OLLAMA, {"model": "tiny", "messages": [USER], "options": {"num_ctx": 8300, "num_predict": 2}}),
    "LangChain": (CHAT, {"model": "tiny", "messages": [USER], "max_completion_tokens": 2, "store": True,
                         "reasoning_effort": "low", "verbosity": "low"}),
    "LangChain, responses": (RESPONSES, {"model": "tiny", "input": [USER], "reasoning": {"effort": "medium"},
                                         "max_output_tokens": 2}),
    "LangChain, Ollama": (OLLAMA, {"model": "tiny", "messages": [USER], "logprobs": True,
                                   "options": {"num_predict": 2}}),
    "LlamaIndex": (OLLAMA, {"model": "tiny", "messages": [USER], "think": True, "options": {"num_predict": 2}}),
    "LiteLLM": (CHAT, {"model": "tiny", "messages": [USER], "max_tokens": 2, "reasoning_effort": "medium"}),
    "Open WebUI": (CHAT, {"model": "tiny", "messages": [USER], "max_tokens": 2, "user": {"id": "1"}, "stream": True}),
    "VS Code": (CHAT, {"model": "tiny", "messages": [USER], "max_tokens": 2, "stream": True, "tools": [FUNCTION],
                       "stream_options": {"include_usage": True}}),
    "llama.vscode": ("/completion", {"prompt": "Hi", "n_predict": 2, "cache_prompt": True, "stream": True,
                                     "id_slot": 0, "t_max_predict_ms": 500}),
}  # fmt: skip


@pytest.mark.parametrize("program", REQUESTS)
def test_the_first_request_of_a_program_is_answered(hermes: LiveServer, program: str) -> None:
    path, body = REQUESTS[program]
    answer = hermes.post(path, body)
    assert answer.status_code == 200, answer.text
    assert '"error":{' not in answer.text
    if program == "Codex":
        assert "response.completed" in answer.text or "response.incomplete" in answer.text
        for named in ("web_search", "text.verbosity", "reasoning.effort"):
            assert named in answer.headers["x-localllm-warning"]
