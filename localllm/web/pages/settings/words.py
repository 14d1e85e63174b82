"""Every setting in plain words: what it is for, its unit, what it may be.

The bounds are config.py's own; a test holds the two together.
Does not know: values.
"""

from __future__ import annotations

from dataclasses import dataclass

from localllm.config import MAX_UPLOAD_BYTES
from localllm.units import format_count


@dataclass(frozen=True, slots=True)
class Words:
    """`low` and `high` bound a number; `choices` are all there is to choose from, if there are any."""

    meaning: str
    unit: str = ""
    low: int | None = None
    high: int | None = None
    choices: tuple[str, ...] = ()
    allowed: str = ""  # where neither says it
    unset: str = "none"  # what it is where nobody says a value

    @property
    def range(self) -> str:
        if self.low is not None and self.high is not None:
            return f"{format_count(self.low)} to {format_count(self.high)}"
        return f"at least {format_count(self.low)}" if self.low is not None else self.allowed or ", ".join(self.choices)


SWITCH = ("true", "false")
DECIDED = "decided at the start"

MODEL = {
    "model": Words("what is loaded at the start", allowed="a folder, a name in the Hugging Face cache, or demo"),
    "revision": Words("which state of a repository", allowed="a branch, tag or commit"),
    "offline": Words("never ask the hub", choices=SWITCH),
    "device": Words("where the model runs", allowed="auto, cpu, cuda, cuda:1"),
    "dtype": Words("numbers to calculate with", choices=("auto", "float32", "bfloat16", "float16")),
    "quantization": Words("make 16-bit weights smaller while they are read", allowed="int4, int8, fp8"),
    "cpu_weights": Words("how quantised weights run on a CPU", choices=("fast", "small", "exact")),
    "task": Words("what the model is to do", choices=("auto", "generate", "embed", "score")),
    "model_impl": Words("whose code computes the model", choices=("auto", "localllm", "transformers")),
    "verify": Words("compare with transformers at the load", choices=SWITCH, unset=DECIDED),
    "trust_remote_code": Words("run code that comes with a checkpoint", choices=SWITCH),
    "profile": Words("settings that a tuning found", allowed="auto, none, or a profile's name"),
    "enable_lora": Words("leave room for LoRA adapters", choices=SWITCH),
    "lora_modules": Words("adapters that are there from the start", allowed="NAME=PATH, separated by commas"),
    "max_loras": Words("most adapters at a time", low=1, high=64),
    "max_lora_rank": Words("largest rank of an adapter", low=1, high=512),
}
DEFAULTS = {
    "generation_config": Words("sampling where a request says nothing", choices=("auto", "vllm")),
    "seed": Words("where seeds of requests without one come from", allowed="a whole number"),
    "enable_prompt_embeds": Words("take embeddings in place of a prompt's tokens", choices=SWITCH),
    "max_logprobs": Words("most alternatives that a request may ask for", "per token", low=-1),
}
MEMORY = {
    "max_model_len": Words("longest prompt and output together", "tokens", low=1, unset=DECIDED),
    "gpu_memory_utilization": Words("share of the GPU's free memory to fill", allowed="above 0, up to 1"),
    "kv_cache_memory_bytes": Words("size of the KV cache", "bytes", low=1, unset=DECIDED),
    "kv_cache_dtype": Words("numbers in the KV cache", choices=("auto", "fp8", "fp8_e4m3", "int8")),
    "block_size": Words(
        "size of a block of the KV cache", "tokens", choices=("8", "16", "32", "64", "128"), unset=DECIDED
    ),
    "enable_prefix_caching": Words("keep the KV blocks of prompts that begin alike", choices=SWITCH),
    "tensor_parallel_size": Words("GPUs that share each layer", "GPUs", low=1),
}
SCHEDULING = {
    "max_num_seqs": Words("most requests in one step", "requests", low=1, high=4096),
    "max_num_batched_tokens": Words("most tokens in one step", "tokens", low=1, unset=DECIDED),
    "long_prefill_token_threshold": Words(
        "longest piece of a prompt while others are answered", "tokens", low=1, unset=DECIDED
    ),
    "max_num_queued_reqs": Words("requests that may wait", "requests", low=1),
    "scheduling_policy": Words("who comes first", choices=("fcfs", "priority")),
    "async_scheduling": Words("plan the next step while this one runs", choices=SWITCH, unset=DECIDED),
    "enforce_eager": Words("do without CUDA graphs", choices=SWITCH),
    "deterministic": Words("the same bits for a request in any company", choices=SWITCH),
}
SERVER = {
    "host": Words("address to listen on", allowed="beyond this machine only with a key"),
    "port": Words("port to listen on", low=0, high=65535),
    "allowed_hosts": Words("further names of this machine", allowed="names, separated by commas"),
    "allowed_origins": Words("pages of others that may call the API", allowed="origins or local, separated by commas"),
    "trusted_proxies": Words(
        "proxies that tell whom a request comes from", allowed="addresses or networks, separated by commas"
    ),
    "api_key": Words("admin keys of this run", allowed="on the command line or in the environment"),
    "rate_limit": Words("most requests of a key or an address", "per minute", low=1, unset="no limit"),
    "max_concurrent_requests": Words(
        "most requests of a key or an address at once", "requests", low=1, unset="no limit"
    ),
    "share_prefix_cache": Words("let keys reuse each other's cached prompts", choices=SWITCH),
    "max_body_bytes": Words("most that one request's body has", "bytes", low=2**16),
    "max_inflight_body_bytes": Words(
        "most that the bodies of all running requests have together", "bytes", low=MAX_UPLOAD_BYTES
    ),
    "ssl_certfile": Words("certificate, for https", allowed="a file in PEM"),
    "ssl_keyfile": Words("the certificate's private key", allowed="a file in PEM"),
    "otlp_traces_endpoint": Words("collector that gets a span for each request", allowed="a URL"),
    "ui": Words("serve these pages", choices=SWITCH),
    "chat_history": Words("keep the chats of these pages on disk", choices=SWITCH),
    "open_browser": Words("open a browser at the start", choices=SWITCH),
    "log_level": Words("what is logged", choices=("debug", "info", "warning", "error")),
    "metrics_aliases": Words("whose names /metrics tells too", allowed="vllm, llamacpp, separated by a comma"),
}
SEVERAL = {
    "served_model_name": Words("names that clients use", allowed="names, separated by commas"),
    "on_demand": Words("load another model when a request names it", choices=SWITCH),
    "models_max": Words("most models ready at a time", "models", low=1, unset="as many as fit"),
    "keep_alive": Words(
        "how long a model stays unused", "seconds", allowed="5m, 90s, 300; -1: for good", unset=DECIDED
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
