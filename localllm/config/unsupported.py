"""Options known from other servers that this version does not support, each with the reason.

The command line and the offline API refuse these options by name, so that no setting is ignored silently.
Keys are spelled as fields (`kv_cache_dtype`); the command line turns them into flags.
Does not know: who asks.
"""

from __future__ import annotations

_LATER = "This version does not implement it."
_TOKENIZER = "The tokenizer comes from the model's folder."
_CONFIG = "A checkpoint's config.json cannot be overridden."
_TEXT_ONLY = "Only models that read text, or text and pictures, are supported: task selects generate, embed or score."
_PREFILL = "Use long_prefill_token_threshold, which limits a prefill chunk."
_LAYERS = (
    "Attention and the KV cache stay on the GPU: use n_cpu_moe to keep the experts of some layers in RAM, "
    "cpu_embeddings to keep lookup tables there, or device."
)
_LOGS = "Use log_level: info logs one line per request."

UNSUPPORTED: dict[str, str] = {
    # tokenizer and checkpoint
    "tokenizer": _TOKENIZER,
    "tokenizer_mode": _TOKENIZER,
    "tokenizer_revision": _TOKENIZER,
    "skip_tokenizer_init": _TOKENIZER,
    "download_dir": "Models are stored in the Hugging Face cache; HF_HOME moves it.",
    "hf_token": "Use localllm login or HF_TOKEN: a flag would be visible in the list of processes.",
    "load_format": "The format of the weights is detected.",
    "hf_overrides": _CONFIG,
    "rope_scaling": _CONFIG,
    "rope_theta": _CONFIG,
    "override_generation_config": "Send the parameters with the request, or set generation_config to vllm.",
    "chat_template": "The chat template comes from the model's folder.",
    "chat_template_content_format": "The format is detected from the template.",
    "default_chat_template_kwargs": "Send chat_template_kwargs with the request.",
    "logprobs_mode": "Logprobs always come from the model's raw logits.",
    "runner": _TEXT_ONLY,
    "convert": _TEXT_ONLY,
    "allowed_local_media_path": "Pictures are not read from this machine's files: send a data: URL.",
    "media_io_kwargs": "Only pictures are read, always in RGB.",
    # memory
    "calculate_kv_scales": "An fp8 cache uses scale 1; an int8 cache computes a scale for each token.",
    "num_gpu_blocks_override": "Use kv_cache_memory_bytes to set the size of the KV cache.",
    "prefix_caching_hash_algo": "Blocks are always hashed with BLAKE2b.",
    "mlock": _LATER,
    "mmap": "Weights are always memory-mapped.",
    "n_gpu_layers": _LAYERS,
    "gpu_layers": _LAYERS,
    "ngl": _LAYERS,
    "override_tensor": _LAYERS,
    "ot": _LAYERS,
    "cpu_offload_params": _LAYERS,
    # several devices
    "nnodes": _LATER,
    "node_rank": _LATER,
    "master_addr": _LATER,
    "master_port": _LATER,
    "disable_custom_all_reduce": "With NCCL_P2P_DISABLE=1 in the environment NCCL adds up everything.",
    "kv_transfer_config": _LATER,
    # adapters, drafts, grammars
    "max_cpu_loras": "Use max_loras: all loaded adapters are on the device.",
    "lora_dtype": "Adapters use the model's dtype.",
    "fully_sharded_loras": _LATER,
    "structured_outputs_config": _LATER,
    "guided_decoding_backend": _LATER,
    "tool_call_parser": _LATER,
    "enable_auto_tool_choice": _LATER,
    "reasoning_parser": _LATER,
    # speed
    "enable_chunked_prefill": "Prefill is always chunked here: every step has a token budget.",
    "compilation_config": "torch.compile is not used.",
    "cudagraph_capture_sizes": _LATER,
    "performance_mode": _LATER,
    "flash_attn": "The device decides the attention kernel.",
    "num_scheduler_steps": "Use async_scheduling, which schedules the next step while the current one runs.",
    "max_num_partial_prefills": _PREFILL,
    "max_long_partial_prefills": _PREFILL,
    "stream_interval": "Each step's tokens are sent at once.",
    # server
    "enable_sleep_mode": _LATER,
    "ssl_ca_certs": "Clients are authenticated by API keys, not by certificates.",
    "root_path": "Let the reverse proxy strip the prefix.",
    "uds": "The server listens on TCP.",
    "middleware": _LATER,
    "api_server_count": "The API always runs in one process.",
    "headless": "`localllm serve` never opens a browser; --no-ui turns the pages off.",
    "enable_log_requests": _LOGS,
    "disable_log_requests": _LOGS,
    "uvicorn_log_level": _LOGS,
    "disable_log_stats": "The dashboard and /metrics need the statistics.",
    "additional_config": _LATER,
}
