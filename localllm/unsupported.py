"""Options that the field knows and this version does not honour, each with the reason.

The command line and the offline API refuse them by name, so that nobody believes that a setting is in force.
Keys are spelled as fields (`kv_cache_dtype`); the command line turns them into flags.
Does not know: who asks.
"""

from __future__ import annotations

_LATER = "This version does not have it."
_TOKENIZER = "The tokenizer comes from the model's folder."
_CONFIG = "A checkpoint's config.json is taken as it is."
_TEXT_ONLY = "It runs text generation only."
_PREFILL = "long_prefill_token_threshold bounds a prefill chunk."
_DEVICE = "A model runs on the GPU or on the CPU: the device option."
_LOGS = "The log level decides: info logs one line per request."

UNSUPPORTED: dict[str, str] = {
    # tokenizer and checkpoint
    "tokenizer": _TOKENIZER,
    "tokenizer_mode": _TOKENIZER,
    "tokenizer_revision": _TOKENIZER,
    "skip_tokenizer_init": _TOKENIZER,
    "download_dir": "Models live in the Hugging Face cache; HF_HOME moves it.",
    "hf_token": "localllm login keeps it, or HF_TOKEN in the environment: a flag would show in the list of processes.",
    "load_format": "Weights are read from safetensors files.",
    "hf_overrides": _CONFIG,
    "rope_scaling": _CONFIG,
    "rope_theta": _CONFIG,
    "override_generation_config": "Send the parameters with the request, or set generation_config to vllm.",
    "chat_template": "The chat template comes from the model's folder.",
    "chat_template_content_format": "It is found from the template.",
    "default_chat_template_kwargs": "Send chat_template_kwargs with the request.",
    "logprobs_mode": "Logprobs are those of the model's raw logits.",
    "runner": _TEXT_ONLY,
    "convert": _TEXT_ONLY,
    "limit_mm_per_prompt": _TEXT_ONLY,
    "mm_processor_kwargs": _TEXT_ONLY,
    "allowed_local_media_path": _TEXT_ONLY,
    # memory
    "calculate_kv_scales": "An fp8 cache has scale 1; an int8 cache measures each token.",
    "num_gpu_blocks_override": "kv_cache_memory_bytes sets the size of the KV cache.",
    "prefix_caching_hash_algo": "Blocks are keyed by BLAKE2b.",
    "swap_space": "A preempted request is computed again; nothing is swapped.",
    "cpu_offload_gb": _LATER,
    "kv_offloading_size": _LATER,
    "mlock": _LATER,
    "mmap": "Weights are always memory-mapped.",
    "n_gpu_layers": _DEVICE,
    "ngl": _DEVICE,
    # several devices
    "pipeline_parallel_size": _LATER,
    "data_parallel_size": _LATER,
    "enable_expert_parallel": _LATER,
    "distributed_executor_backend": _LATER,
    "nnodes": _LATER,
    "node_rank": _LATER,
    "master_addr": _LATER,
    "master_port": _LATER,
    "disable_custom_all_reduce": _LATER,
    "kv_transfer_config": _LATER,
    # adapters, drafts, grammars
    "max_cpu_loras": "As many adapters are kept as max_loras says, all of them on the device.",
    "lora_dtype": "Adapters are kept in the model's type.",
    "fully_sharded_loras": _LATER,
    "speculative_config": _LATER,
    "structured_outputs_config": _LATER,
    "guided_decoding_backend": _LATER,
    "tool_call_parser": _LATER,
    "enable_auto_tool_choice": _LATER,
    "reasoning_parser": _LATER,
    # speed
    "enable_chunked_prefill": "Prefill is always chunked here: every step has a token budget.",
    "compilation_config": "Nothing is compiled by torch.compile here.",
    "cudagraph_capture_sizes": _LATER,
    "performance_mode": _LATER,
    "flash_attn": "The attention kernel follows from the device.",
    "num_scheduler_steps": "async_scheduling prepares the next step while one runs.",
    "max_num_partial_prefills": _PREFILL,
    "max_long_partial_prefills": _PREFILL,
    "stream_interval": "Each step's tokens are sent at once.",
    # server
    "enable_sleep_mode": _LATER,
    "ssl_ca_certs": "Clients are known by their keys, not by certificates.",
    "root_path": "Let the proxy in front strip the prefix.",
    "uds": "The server listens on TCP.",
    "middleware": _LATER,
    "api_server_count": "One process serves the API.",
    "headless": "`localllm serve` has no desktop manners.",
    "enable_log_requests": _LOGS,
    "disable_log_requests": _LOGS,
    "uvicorn_log_level": _LOGS,
    "disable_log_stats": "The statistics are what the dashboard shows.",
    "additional_config": _LATER,
}
