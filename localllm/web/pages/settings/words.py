"""Every setting in plain words: its meaning, its unit, its allowed values.

The bounds are those of config/settings.py; a test compares the two.
Does not know: values.
"""

from __future__ import annotations

from dataclasses import dataclass

from localllm.config.settings import MAX_UPLOAD_BYTES
from localllm.units import format_count


@dataclass(frozen=True, slots=True)
class Words:
    """The description of a setting. `low` and `high` bound a number; `choices` lists the allowed values, if finite."""

    meaning: str
    unit: str = ""
    low: int | None = None
    high: int | None = None
    choices: tuple[str, ...] = ()
    allowed: str = ""  # allowed values in words, where neither bounds nor choices describe them
    unset: str = "none"  # shown as the value when the setting is not set

    @property
    def range(self) -> str:
        if self.low is not None and self.high is not None:
            return f"{format_count(self.low)} to {format_count(self.high)}"
        return f"at least {format_count(self.low)}" if self.low is not None else self.allowed or ", ".join(self.choices)


SWITCH = ("true", "false")
DECIDED = "decided at the start"

MODEL = {
    "model": Words("model to load at start", allowed="a folder, a name in the Hugging Face cache, or demo"),
    "revision": Words("revision of the model's repository", allowed="a branch, tag or commit"),
    "offline": Words("never contact the hub", choices=SWITCH),
    "device": Words("device that runs the model", allowed="auto, cpu, cuda, cuda:1"),
    "dtype": Words("precision of weights and activations", choices=("auto", "float32", "bfloat16", "float16")),
    "quantization": Words("quantise 16-bit weights at load", allowed="int4, int8, fp8"),
    "cpu_weights": Words("how a CPU runs quantised weights", choices=("fast", "small", "exact")),
    "task": Words("task of the model", choices=("auto", "generate", "embed", "score")),
    "model_impl": Words("implementation of the model", choices=("auto", "localllm", "transformers")),
    "verify": Words("compare logits with transformers at load", choices=SWITCH, unset=DECIDED),
    "trust_remote_code": Words("run Python code from a checkpoint's repository", choices=SWITCH),
    "profile": Words("tuned settings to use", allowed="auto, none, or a profile's name"),
    "enable_lora": Words("reserve memory for LoRA adapters", choices=SWITCH),
    "lora_modules": Words("LoRA adapters to load at start", allowed="NAME=PATH, separated by commas"),
    "max_loras": Words("maximum number of loaded adapters", low=1, high=64),
    "max_lora_rank": Words("largest supported rank of an adapter", low=1, high=512),
}
DEFAULTS = {
    "generation_config": Words("sampling defaults of requests", choices=("auto", "vllm")),
    "seed": Words("seed for requests that bring none", allowed="a whole number"),
    "enable_prompt_embeds": Words("accept embeddings in place of prompt tokens", choices=SWITCH),
    "max_logprobs": Words("most logprobs that a request may ask for", "per token", low=-1),
}
MEMORY = {
    "max_model_len": Words("longest prompt plus output", "tokens", low=1, unset=DECIDED),
    "gpu_memory_utilization": Words("share of the GPU's free memory to use", allowed="above 0, up to 1"),
    "kv_cache_memory_bytes": Words("size of the KV cache", "bytes", low=1, unset=DECIDED),
    "kv_cache_dtype": Words("data type of the KV cache", choices=("auto", "fp8", "fp8_e4m3", "int8")),
    "block_size": Words("size of a KV cache block", "tokens", choices=("8", "16", "32", "64", "128"), unset=DECIDED),
    "enable_prefix_caching": Words("reuse the KV blocks of prompts with a common prefix", choices=SWITCH),
    "tensor_parallel_size": Words("number of GPUs that share each layer", "GPUs", low=1),
}
SCHEDULING = {
    "max_num_seqs": Words("most requests in one step", "requests", low=1, high=4096),
    "max_num_batched_tokens": Words("most tokens in one step", "tokens", low=1, unset=DECIDED),
    "long_prefill_token_threshold": Words(
        "longest prefill chunk while other requests decode", "tokens", low=1, unset=DECIDED
    ),
    "max_num_queued_reqs": Words("most waiting requests", "requests", low=1),
    "scheduling_policy": Words("queue order", choices=("fcfs", "priority")),
    "async_scheduling": Words("schedule the next step while the current one runs", choices=SWITCH, unset=DECIDED),
    "enforce_eager": Words("do not use CUDA graphs", choices=SWITCH),
    "deterministic": Words("bit-identical output whatever else is in the batch", choices=SWITCH),
}
SERVER = {
    "host": Words("address to listen on", allowed="an address; any but loopback needs an API key"),
    "port": Words("port to listen on", low=0, high=65535),
    "allowed_hosts": Words("further host names allowed in the Host header", allowed="names, separated by commas"),
    "allowed_origins": Words(
        "web origins that may call the API (CORS)", allowed="origins or local, separated by commas"
    ),
    "trusted_proxies": Words(
        "proxies whose X-Forwarded-For is trusted", allowed="addresses or networks, separated by commas"
    ),
    "api_key": Words("admin keys of this run", allowed="set on the command line or in the environment"),
    "rate_limit": Words("most requests per key or address", "per minute", low=1, unset="no limit"),
    "max_concurrent_requests": Words(
        "most concurrent requests per key or address", "requests", low=1, unset="no limit"
    ),
    "share_prefix_cache": Words("let keys reuse each other's cached prompt prefixes", choices=SWITCH),
    "max_body_bytes": Words("largest request body", "bytes", low=2**16),
    "max_inflight_body_bytes": Words(
        "largest total size of the bodies of all running requests", "bytes", low=MAX_UPLOAD_BYTES
    ),
    "ssl_certfile": Words("certificate for HTTPS", allowed="a PEM file"),
    "ssl_keyfile": Words("the certificate's private key", allowed="a PEM file"),
    "otlp_traces_endpoint": Words("OpenTelemetry collector that receives a span for each request", allowed="a URL"),
    "ui": Words("serve these pages", choices=SWITCH),
    "chat_history": Words("store the chats of these pages on disk", choices=SWITCH),
    "open_browser": Words("open a browser at start", choices=SWITCH),
    "log_level": Words("lowest level that is logged", choices=("debug", "info", "warning", "error")),
    "metrics_aliases": Words("further naming schemes of /metrics", allowed="vllm, llamacpp, separated by a comma"),
}
SEVERAL = {
    "served_model_name": Words("names that clients use", allowed="names, separated by commas"),
    "on_demand": Words("load another model when a request names it", choices=SWITCH),
    "models_max": Words("most models loaded at the same time", "models", low=1, unset="as many as fit"),
    "keep_alive": Words(
        "how long a model stays loaded without a request",
        "seconds",
        allowed="5m, 90s, 300; -1: for ever",
        unset=DECIDED,
    ),
}

GROUPS = {
    "Server": SERVER,
    "Model": MODEL,
    "Memory": MEMORY,
    "Scheduling": SCHEDULING,
    "Several models": SEVERAL,
    "Defaults": DEFAULTS,
}
WORDS = {name: words for group in GROUPS.values() for name, words in group.items()}
