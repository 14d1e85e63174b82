"""Settings: the table of all of them, and the values that the user asked for. Frozen; each value knows its source.

Each field carries its description (config/setting_spec.py). The command line, the config file, the settings page and
the reference page read it there, and construction checks values against it.
Precedence: flag > environment > config file > profile > default. A profile is what `localllm tune` found;
serving/profiles.py applies it when a model starts. `resolve` builds the values once, and they do not change afterwards.
What the checkpoint says is in `models/spec/`, what this machine allows in `models/fit/`.
Does not know: where values are read (config/resolve.py), argparse, torch, models.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

from localllm.config.lora_modules import LoraModule, read_lora_modules
from localllm.config.mcp_servers import McpServer
from localllm.config.setting_spec import SettingSpec, setting
from localllm.config.speculative import (
    SpeculationChoice,
    is_method_or_model,
    read_speculative_config,
    speculation_choice,
    without_drafter,
)
from localllm.config.upstreams import UpstreamConfig, read_upstream_flag
from localllm.errors import ConfigError
from localllm.units import parse_count

Task = Literal["generate", "embed", "score", "transcribe"]
TASKS: tuple[Task, ...] = ("generate", "embed", "score", "transcribe")
Source = Literal["default", "profile", "file", "environment", "flag"]

MODEL, ADAPTERS, REQUESTS, MEMORY, SCHEDULING = "Model", "Adapters", "Requests", "Memory", "Scheduling"
PICTURES = "Pictures"
PARALLEL = "Several GPUs"
SERVER, ACCESS, SEVERAL_MODELS, SEVERAL_SERVERS = "Server", "Access", "Several models", "Several servers"

PLACEMENT = ("n_cpu_moe", "cpu_moe", "cpu_offload_gb", "weights_on", "expert_cache_gib")
"""The settings that put experts on the GPU, in RAM or on disk."""
ALL_LAYERS = 10_000
"""More layers than any model has."""
MAX_UPLOAD_BYTES = 64 * 1024**2
"""The largest body with files that a page accepts; not a setting. Files are received to disk."""
MIN_INFLIGHT_BODY_BYTES = 16 * 1024**2


def _parse_length(raw: Any) -> int | None:
    return None if str(raw).lower() in ("auto", "-1") else parse_count(raw)


def _parse_far_layers(raw: Any) -> str:
    return str(raw).strip().lower()


def _parse_size(raw: Any) -> int | None:
    return None if str(raw).lower() == "auto" else parse_count(raw)


def _parts(raw: Any) -> list[Any]:
    """Return the values of a list, of a text with commas, or of a single value."""
    return raw.split(",") if isinstance(raw, str) else list(raw) if isinstance(raw, list | tuple) else [raw]


def _parse_numbers(raw: Any) -> tuple[float, ...]:
    numbers = [float(part) for part in _parts(raw)]
    return tuple(int(number) if number.is_integer() else number for number in numbers)


def _parse_counts(raw: Any) -> tuple[int, ...]:
    numbers = _parse_numbers(raw)
    if not all(isinstance(number, int) for number in numbers):
        raise ValueError(raw)
    return tuple(map(int, numbers))


def _parse_devices(raw: Any) -> tuple[str, ...]:
    return tuple(text for part in _parts(raw) if (text := str(part).strip()))


MEDIA_LIMITS = {"image": 100, "audio": 32}
"""Most pictures and sounds of a request, unless the setting says otherwise."""


def _parse_media_limits(raw: Any) -> str:
    """Return `image=4,audio=2` from the same, one of both, vLLM's `{"image": 4}`, or `4` pictures. Other media are not
    supported."""
    limits = raw if isinstance(raw, dict) else {"image": raw}
    if isinstance(raw, str) and not raw.strip().isdecimal():
        limits = json.loads(raw) if raw.lstrip().startswith("{") else dict(part.split("=") for part in raw.split(","))
    counts = {str(name).strip(): parse_count(count) for name, count in limits.items()}
    if any(count for name, count in counts.items() if name not in MEDIA_LIMITS) or min(counts.values(), default=0) < 0:
        raise ValueError(raw)
    return ",".join(f"{name}={counts.get(name, most)}" for name, most in MEDIA_LIMITS.items())


def _parse_object(raw: Any) -> str | None:
    """Return a JSON object as text with sorted keys."""
    found = json.loads(raw) if isinstance(raw, str) else raw
    if not isinstance(found, dict):
        raise ValueError(raw)
    return json.dumps(found, sort_keys=True)


def _parse_keys(raw: Any) -> str | tuple[str, ...]:
    return raw if isinstance(raw, str) else tuple(map(str, raw))  # a key may hold a comma


def _is_network(text: str) -> bool:
    from ipaddress import ip_network

    try:
        ip_network(text, strict=False)
    except ValueError:
        return False
    return True


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Settings of the engine. None: decide from the model and the machine, and report the decision."""

    # fmt: off
    model: str = setting(
        "demo", MODEL, "model to load at start", has_flag=False, environment="LOCALLLM_MODEL",
        allowed_text="ORG/NAME, ORG/NAME:QUANT, a folder, a .gguf file, a name that `localllm list` shows, or demo")
    revision: str | None = setting(
        None, MODEL, "branch, tag or commit of a repository", is_of_one_model=True)
    offline: bool = setting(
        False, MODEL, "never contact the hub", note="a model that is not on this machine is refused")
    device: str = setting(
        "auto", MODEL, "device that runs the model", allowed_text="auto, cpu, cuda or cuda:N")
    dtype: str = setting(
        "auto", MODEL, "precision of weights and activations", choices=("auto", "float32", "bfloat16", "float16"))
    quantization: str | None = setting(
        None, MODEL, "quantise 16-bit weights at load", aliases=("-q",), is_of_one_model=True,
        allowed_text="int4, int8 or fp8", note="a quantised checkpoint is detected")
    cpu_weights: str = setting(
        "fast", MODEL, "how a CPU runs quantised and bf16 weights", choices=("fast", "small", "exact"),
        allowed_text="fast, small (Q5 and Q6 in the file's bits) or exact (as stored, steps unrounded: slow)")
    task: str = setting(
        "auto", MODEL, "task of the model", choices=("auto", *TASKS), is_of_one_model=True,
        allowed_text="generate, embed, score or auto (from the checkpoint's files)")
    model_impl: str = setting(
        "auto", MODEL, "implementation of the model", choices=("auto", "localllm", "transformers"),
        allowed_text="localllm, transformers or auto (localllm's code, or transformers' where localllm has none)",
        is_of_one_model=True)
    verify: bool | None = setting(
        None, MODEL, "compare logits with transformers at load", unset="only where transformers runs the model")
    trust_remote_code: bool = setting(
        False, MODEL, "run the Python code in a checkpoint's repository, with your rights", is_of_one_model=True,
        note="read the code first",
        by_hand="It lets a checkpoint run code with your rights: edit the file yourself.")
    profile: str = setting(
        "auto", MODEL, "values found by localllm tune, for settings that nothing else sets",
        allowed_text="auto (the applied profile), none or a profile's name")

    enable_lora: bool = setting(
        False, ADAPTERS, "reserve memory for LoRA adapters, so that they can be loaded while the server runs",
        note="lora_modules implies it", is_of_one_model=True)
    lora_modules: tuple[LoraModule, ...] = setting(
        (), ADAPTERS, "LoRA adapters to load at start, named by requests as models", allowed_text="NAME=PATH",
        note="a path is a folder or a cached repository", parser=read_lora_modules, metavar_text="NAME=PATH",
        takes_words=True, is_of_one_model=True)
    max_loras: int = setting(
        4, ADAPTERS, "most LoRA adapters loaded at the same time", low=1, high=64)
    max_lora_rank: int = setting(
        16, ADAPTERS, "largest rank of a LoRA adapter", low=1, high=512)

    generation_config: str = setting(
        "auto", REQUESTS, "sampling defaults of requests", choices=("auto", "vllm"),
        allowed_text="auto (the checkpoint's) or vllm (neutral ones)")
    seed: int | None = setting(
        None, REQUESTS, "seed for requests that bring none", unset="random at each load, shown in the log")
    enable_prompt_embeds: bool = setting(
        False, REQUESTS, "accept embeddings in place of prompt tokens, from any client that may send requests")
    max_logprobs: int = setting(
        20, REQUESTS, "most logprobs per position that a request may ask for", unit="per token", low=-1,
        allowed_text="at least 0, or -1 for the whole vocabulary")

    limit_mm_per_prompt: str = setting(
        _parse_media_limits({}), PICTURES, "most pictures and sounds of a request", parser=_parse_media_limits,
        metavar_text="image=N,audio=N", allowed_text="image=N, audio=N or both",
        note="vLLM's JSON is read, too. 0: the part of the model that sees or hears is not loaded")
    image_max_tokens: int | None = setting(
        None, PICTURES, "most tokens of a picture", unit="tokens", low=1,
        unset="4096, or less if the checkpoint, the context or the memory allow less",
        note="larger pictures are scaled down, which the answer reports")
    image_min_tokens: int | None = setting(
        None, PICTURES, "fewest tokens of a picture, where a model can choose", unit="tokens", low=1,
        unset="the checkpoint's", note="smaller pictures are scaled up")
    mmproj: str | None = setting(
        None, PICTURES, "projector of a GGUF model: the file with the part that sees", metavar_text="FILE",
        unset="the mmproj file beside the model", note="none: the text part alone")
    max_image_pixels: int = setting(
        100_000_000, PICTURES, "most pixels of a picture that is decoded", unit="pixels", low=1,
        note="of a JPEG, two and a half times as many")
    mm_processor_kwargs: str | None = setting(
        None, PICTURES, "options of the image processor, where a request brings none", unset="the checkpoint's",
        parser=_parse_object,
        metavar_text="JSON", is_of_one_model=True,
        allowed_text="a JSON object such as {\"max_pixels\": 1000000}", note="each family has its own")

    max_model_len: int | None = setting(
        None, MEMORY, "longest prompt plus output, in tokens", unit="tokens", low=1, parser=_parse_length,
        note="8k is 8000, 8K is 8192", unset="auto, the longest that fits", metavar_text="N|auto",
        aliases=("--ctx", "-c"), is_of_one_model=True)
    gpu_memory_utilization: float = setting(
        0.90, MEMORY, "share of the GPU's free memory that may be used", allowed_text="above 0 and at most 1",
        accepts=lambda share: 0 < share <= 1)
    n_cpu_moe: str = setting(
        "auto", MEMORY, "layers whose experts are in RAM and computed by the CPU, counted from the last; of a dense "
        "model whose feed-forward parts",
        parser=_parse_far_layers, accepts=lambda text: text in ("auto", "all") or text.isdecimal(), metavar_text="N",
        allowed_text="auto (as few as a context of 8,192 tokens needs), all, or a number",
        note="for models that are larger than the GPU", is_of_one_model=True)
    cpu_moe: bool = setting(
        False, MEMORY, "keep the experts or feed-forward parts of all layers in RAM, as n_cpu_moe all does",
        is_of_one_model=True)
    cpu_offload_gb: float = setting(
        0.0, MEMORY, "move the parts of as few layers to RAM as take this much of the GPU, in GiB", unit="GiB", low=0,
        is_of_one_model=True)
    cpu_embeddings: str = setting(
        "auto", MEMORY,
        "keep in RAM the embedding, if it is not also the head, and per-layer embeddings (Gemma 3n and 4)",
        choices=("auto", "on", "off"),
        allowed_text="auto (if a context of 8,192 tokens does not fit beside them on the GPU), on, or off",
        note="a token reads one row of each", is_of_one_model=True)
    stream_prompts: str = setting(
        "auto", MEMORY, "tokens of a step from which experts in RAM are copied to the GPU and computed there",
        parser=_parse_far_layers, accepts=lambda text: text in ("auto", "off") or (text.isdecimal() and int(text) > 0),
        metavar_text="auto|off|T", allowed_text="auto (measured at start), off (the CPU computes them), or a number",
        note="takes up to 0.5 GiB of the GPU", is_of_one_model=True)
    weights_on: str = setting(
        "auto", MEMORY, "memory of the experts that the GPU does not hold", choices=("auto", "ram", "disk"),
        allowed_text="auto (disk as the last place, from one token per second on), ram, or disk",
        note="disk: for mixtures of experts that are larger than RAM; slow", is_of_one_model=True)
    expert_cache_gib: float = setting(
        0.0, MEMORY, "RAM for the latest used experts of a model on disk, in GiB", unit="GiB", low=0,
        unset="most of what is free", is_of_one_model=True)
    kv_cache_memory_bytes: int | None = setting(
        None, MEMORY, "size of the KV cache, e.g. 4GiB", unit="bytes", low=1, unset="all remaining memory")
    kv_cache_dtype: str = setting(
        "auto", MEMORY, "data type of the KV cache",
        choices=("auto", "fp8", "fp8_e4m3", "int8", "int8_per_token_head", "k8v4", "int4", "int4_per_token_head"),
        allowed_text="auto (the model's), fp8 (also spelled fp8_e4m3), int8 (or int8_per_token_head), k8v4 (keys in 8 "
        "bits, values in 4) or int4 (or int4_per_token_head)",
        note="of a 16-bit cache fp8 and int8 need half the memory, k8v4 0.42 and int4 0.29; 4 bits are compared with "
        "the model's own answers at load")
    block_size: int | None = setting(
        None, MEMORY, "token positions per KV block", unit="tokens", choices=(8, 16, 32, 64, 128),
        unset="64 on a GPU, 16 on CPU")
    enable_prefix_caching: bool = setting(
        True, MEMORY, "reuse the KV blocks of prompts with a common prefix")
    kv_offloading_size: float | None = setting(
        None, MEMORY, "RAM for KV blocks that have left the cache, in GiB", unit="GiB", low=0,
        aliases=("--kv-offload-gib",), unset="an eighth of the free RAM up to 8 on a GPU, 0 on a CPU",
        note="they come back when a prompt begins alike, and after a preemption")
    swap_space: float | None = setting(
        None, MEMORY, "of that RAM, what preempted requests may hold until they run again, in GiB", unit="GiB", low=0,
        unset="half of it", note="more than kv_offloading_size makes it as large; 0: their KV may be computed again")
    kv_disk_gib: float = setting(
        0.0, MEMORY, "disk for KV blocks, in GiB", unit="GiB", low=0,
        note="prompts are found there after a restart; what is kept can be turned back into text: localllm kv clear")
    kv_offload_dir: str | None = setting(
        None, MEMORY, "folder of the KV blocks on disk", unset="kv in the cache folder", is_path=True,
        metavar_text="FOLDER")

    tensor_parallel_size: int | None = setting(
        None, PARALLEL, "number of ranks that share each layer", unit="ranks", low=1, high=64, parser=_parse_size,
        metavar_text="N|auto", unset="auto, as few GPUs as hold the model", aliases=("-tp",))
    pipeline_parallel_size: int | None = setting(
        None, PARALLEL, "number of stages, each with a part of the layers", unit="stages", low=1, high=64,
        parser=_parse_size, metavar_text="N|auto", unset="auto, as few GPUs as hold the model", aliases=("-pp",))
    data_parallel_size: int = setting(
        1, PARALLEL, "number of replicas of the model, each in processes of its own", unit="replicas", low=1, high=64,
        aliases=("-dp",), is_of_one_model=True,
        note="each needs the memory of a whole model; requests go where their prefix is cached or the queue is short")
    routing_policy: str = setting(
        "prefix", PARALLEL, "how a request's replica is chosen", choices=("prefix", "least_loaded", "round_robin"),
        note="prefix weighs cached prefixes, queues, blocks and speed in seconds")
    prefill_replicas: int = setting(
        0, PARALLEL, "replicas that compute long prompts, whose answers the other replicas generate", unit="replicas",
        low=0, high=63, is_of_one_model=True,
        note="of --data-parallel-size; it seldom pays: docs/guides/several-gpus.md")
    tensor_split: tuple[float, ...] = setting(
        (), PARALLEL, "share of each rank in a layer", allowed_text="numbers above 0 such as 3,1",
        note="rounded to whole KV heads", parser=_parse_numbers, accepts=lambda share: 0 < share < math.inf,
        unset="by memory and bandwidth", metavar_text="SHARES", is_of_one_model=True)
    pipeline_layer_partition: tuple[int, ...] = setting(
        (), PARALLEL, "layers of each stage", allowed_text="numbers such as 20,12", parser=_parse_counts,
        accepts=lambda count: count > 0, unset="by memory and bandwidth", metavar_text="LAYERS", is_of_one_model=True)
    device_ids: tuple[str, ...] = setting(
        (), PARALLEL, "GPUs to use, in the order of the ranks", allowed_text="indexes or UUIDs such as 0,2",
        parser=_parse_devices, unset="all", metavar_text="GPUS")
    enable_expert_parallel: bool | None = setting(
        None, PARALLEL, "give each rank whole experts instead of a slice of every expert", aliases=("-ep",),
        unset="only where the slices would be too narrow")
    nodes: int = setting(
        1, PARALLEL, "number of machines that the ranks are placed on, through Ray", unit="machines", low=1, high=64,
        is_of_one_model=True, note="needs localllm[ray], and a cluster that ray start has made")
    ray_address: str = setting(
        "auto", PARALLEL, "address of the Ray cluster", allowed_text="auto or HOST:PORT", metavar_text="ADDRESS")
    distributed_executor_backend: str = setting(
        "auto", PARALLEL, "what starts the ranks", choices=("auto", "mp", "ray", "external_launcher"),
        allowed_text="auto (ray if nodes is above 1), mp (processes of this machine), ray or external_launcher",
        note="external_launcher is torchrun")
    rank_timeout: int = setting(
        60, PARALLEL, "longest wait for the ranks' answer to a step", unit="s", low=1, high=3600)

    max_num_seqs: int = setting(
        64, SCHEDULING, "most requests in one step", unit="requests", low=1, high=4096,
        aliases=("--parallel", "-np"))
    max_num_batched_tokens: int | None = setting(
        None, SCHEDULING, "most tokens in one step", unit="tokens", low=1, unset="2048 on a GPU, 1024 on CPU")
    long_prefill_token_threshold: int | None = setting(
        None, SCHEDULING, "longest prefill chunk, in tokens, while other requests decode", unit="tokens", low=1,
        unset="a quarter of max_num_batched_tokens; on a CPU as many as a step of 0.2 s allows")
    max_num_queued_reqs: int = setting(
        1024, SCHEDULING, "most waiting requests", unit="requests", low=1,
        note="further ones are refused with status 503")
    scheduling_policy: str = setting(
        "fcfs", SCHEDULING, "queue order", choices=("fcfs", "priority"),
        allowed_text="fcfs (first come, first served) or priority")
    async_scheduling: bool | None = setting(
        None, SCHEDULING, "schedule the next step while the current one runs", unset="true on a GPU, false on CPU")
    speculative: str = setting(
        "auto", SCHEDULING, "guess tokens ahead and verify them in one step; answers stay the same",
        accepts=is_method_or_model,
        allowed_text="auto (lookup, where the device supports it), ngram (the same, refused elsewhere), mtp (the "
        "model's own prediction layers), off, or ORG/NAME of a drafter")
    draft: str | None = setting(
        None, SCHEDULING, "drafter with weights: a smaller model of the same vocabulary, or an EAGLE head",
        aliases=("-md",), metavar_text="MODEL", is_of_one_model=True, allowed_text="as the model itself is named")
    draft_max: int | None = setting(
        None, SCHEDULING, "most tokens guessed ahead at a time", unit="tokens", low=0,
        unset="as many as a step verifies at the least cost")
    speculative_config: str | None = setting(
        None, SCHEDULING, "speculation in vLLM's form", parser=read_speculative_config, metavar_text="JSON",
        unset="as speculative says",
        allowed_text="a JSON object with method (ngram, draft_model, eagle, eagle3 or mtp), model and "
        "num_speculative_tokens", is_of_one_model=True)
    enforce_eager: bool = setting(
        False, SCHEDULING, "do not use CUDA graphs")
    programmatic_launch: bool | None = setting(
        None, SCHEDULING, "start kernels while the previous one finishes",
        unset="on for compute capability 9.x and 10.x, off for 12.x, where it is not proven yet",
        note="only GPUs of compute capability 9.0 and later can, with a driver for CUDA 12.3 or newer")
    kernels: str = setting(
        "auto", SCHEDULING, "what computes on a GPU: Triton kernels, or PyTorch alone",
        choices=("auto", "checked", "torch"),
        note="checked refuses to serve kernels that could not be compared with PyTorch on this GPU. torch is slow; it "
        "tells a wrong kernel from a wrong checkpoint")
    check_kernels: str = setting(
        "first", SCHEDULING, "when kernels are compared with PyTorch on the GPU", choices=("first", "always", "off"),
        note="first: once for each GPU, driver, version and kind of model")
    deterministic: bool = setting(
        False, SCHEDULING, "bit-identical output whatever else is in the batch", note="slower")
    torch_profiler_dir: str | None = setting(
        None, SCHEDULING, "folder for traces of the engine's steps, between POST /start_profile and /stop_profile",
        metavar_text="DIR", is_path=True, unset="no traces, and steps without NVTX ranges")
    # fmt: on

    def __post_init__(self) -> None:
        _check(self)
        speculation_choice(self.speculative, self.draft_max, self.speculative_config, self.draft)
        if self.kernels == "checked" and self.check_kernels == "off":
            why = "--kernels checked serves only what was compared with PyTorch."
            raise ConfigError("--check-kernels off does not go with --kernels checked.", why, "--check-kernels first")
        asked = [self.n_cpu_moe != "auto", self.cpu_moe, self.cpu_offload_gb > 0]
        if sum(asked) > 1:
            what = "Only one of --n-cpu-moe, --cpu-moe and --cpu-offload-gb can be set."
            raise ConfigError(what, "Each says which experts are in RAM.", "--n-cpu-moe N", param="n_cpu_moe")
        if self.expert_cache_gib and self.weights_on != "disk":
            what, why = "--expert-cache-gib is for experts on disk.", f"--weights-on is {self.weights_on}."
            raise ConfigError(what, why, "--weights-on disk", param="expert_cache_gib")
        count = len(self.lora_modules)
        if count > self.max_loras:
            what, why = f"--lora-modules names {count} adapters.", f"--max-loras is {self.max_loras}."
            raise ConfigError(what, why, f"--max-loras {count}", param="lora_modules")

    @property
    def speculation(self) -> SpeculationChoice:
        return speculation_choice(self.speculative, self.draft_max, self.speculative_config, self.draft)

    @property
    def far_layers(self) -> int | None:
        """Layers whose experts are in RAM, at most as many as there are; None: as few as needed."""
        if self.cpu_moe or self.n_cpu_moe == "all" or self.cpu_offload_gb:
            return ALL_LAYERS
        return None if self.n_cpu_moe == "auto" else int(self.n_cpu_moe)

    @property
    def placement(self) -> tuple[str | float, ...]:
        """The settings that put experts somewhere. Loaded experts do not move: another value needs another load."""
        return tuple(getattr(self, name) for name in PLACEMENT)

    @property
    def streams_prompts(self) -> bool:
        """Return whether a GPU may compute long prompts with experts in RAM. Not in deterministic mode: a token's bits
        would depend on how many are in its step."""
        return self.stream_prompts != "off" and not self.deterministic

    @property
    def moves_experts(self) -> bool:
        """Return whether experts were asked for in RAM or on disk."""
        return bool(self.far_layers) or self.weights_on == "disk"

    @property
    def far_flag(self) -> str:
        """The flag that asks for experts in RAM or on disk."""
        if self.weights_on == "disk" and not self.far_layers:
            return "--weights-on disk"
        return "--cpu-moe" if self.cpu_moe else "--cpu-offload-gb" if self.cpu_offload_gb else "--n-cpu-moe"

    @property
    def ram_flag(self) -> str:
        """The flag that asks for parts in RAM or on disk beside a GPU; empty: there is none."""
        flag = "--cpu-embeddings on" if self.cpu_embeddings == "on" else ""
        return self.far_flag if self.moves_experts else flag

    @property
    def takes_adapters(self) -> bool:
        return self.enable_lora or bool(self.lora_modules)

    def most_media(self, kind: str) -> int:
        """Return the most pictures (image) or sounds (audio) of a request."""
        return int(dict(part.split("=") for part in self.limit_mm_per_prompt.split(","))[kind])

    @property
    def keeps_half_weights(self) -> bool:
        """Return whether 16-bit matrices stay so on a CPU that computes in float32; --dtype float32 widens them."""
        return self.dtype == "auto"


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """Settings of the server."""

    # fmt: off
    host: str = setting(
        "127.0.0.1", SERVER, "address to listen on", note="any but loopback needs an API key",
        metavar_text="ADDRESS", environment="LOCALLLM_HOST")
    port: int = setting(
        8000, SERVER, "port to listen on", low=0, high=65535, note="0: any free port", environment="LOCALLLM_PORT")
    ui: bool = setting(
        True, SERVER, "serve the chat and dashboard pages")
    chat_history: bool = setting(
        True, SERVER, "store the page's chats on disk, in chats.db of the data folder")
    chat_titles: str = setting(
        "auto", SERVER, "have the model write a title for each new chat, after its first reply",
        choices=("auto", "on", "off"), note="auto: only a model on a GPU")
    open_browser: bool = setting(
        False, SERVER, "open the chat page in a browser when ready", aliases=("--open",))
    exit_when_idle: float | None = setting(
        None, SERVER, "end the server after this time without a request", unit="seconds",
        allowed_text="a time such as 30m, 90s or 1800, more than 0",
        accepts=lambda seconds: 0 < seconds < math.inf, unset="never",
        note="pages that are open in a browser do not count", environment="LOCALLLM_EXIT_WHEN_IDLE")
    log_level: str = setting(
        "info", SERVER, "lowest level that is logged", choices=("debug", "info", "warning", "error"),
        environment="LOCALLLM_LOG_LEVEL")
    metrics_aliases: tuple[str, ...] = setting(
        (), SERVER, "other servers whose metric names /metrics also exports", choices=("vllm", "llamacpp"))
    otlp_traces_endpoint: str | None = setting(
        None, SERVER, "OpenTelemetry collector that receives a span for each request", metavar_text="URL",
        allowed_text="a URL such as http://localhost:4318 (OTLP over HTTP)",
        accepts=lambda text: text.startswith(("http://", "https://")))
    max_body_bytes: int = setting(
        8 * 1024**2, SERVER, "largest request body", unit="bytes", low=2**16,
        note="raise it for large prompt_embeds")
    max_media_body_bytes: int | None = setting(
        None, SERVER, "largest request body with pictures; without them it may have max_body_bytes", unit="bytes",
        low=2**16, unset="64 MiB, or max_inflight_body_bytes if that is less")
    max_audio_bytes: int = setting(
        200 * 1024**2, SERVER, "largest sound file that is transcribed", unit="bytes", low=2**16,
        note="never more than max_inflight_body_bytes")
    max_audio_seconds: int = setting(
        4 * 3600, SERVER, "longest sound that is transcribed", unit="seconds", low=1, high=7 * 24 * 3600)
    max_inflight_body_bytes: int = setting(
        256 * 1024**2, SERVER, "largest total size of the bodies of all running requests", unit="bytes",
        low=MIN_INFLIGHT_BODY_BYTES, note="never less than max_body_bytes")
    max_batch_file_bytes: int | None = setting(
        None, SERVER, "largest file of requests for a batch", unit="bytes", low=2**16,
        unset="200 MiB, or max_inflight_body_bytes if that is less", note="never more than max_inflight_body_bytes")
    max_batch_lines: int = setting(
        50_000, SERVER, "most requests in a batch", unit="requests", low=1, high=10_000_000)
    max_batch_files: int = setting(
        1000, SERVER, "most files of batches that are stored, outputs included", unit="files", low=4, high=100_000)
    max_batch_storage_bytes: int = setting(
        8 * 1024**3, SERVER, "largest total size of the stored files of batches", unit="bytes", low=2**20,
        note="a key with the scope infer can use half of it")

    api_key: str | tuple[str, ...] | None = setting(
        None, ACCESS, "admin key that clients must send",
        note="repeat the flag for several. Safer: LOCALLLM_API_KEY, or localllm keys",
        parser=_parse_keys, repeats=True, metavar_text="KEY", environment="LOCALLLM_API_KEY", is_secret=True,
        by_hand="Secrets are not stored in this file: create an API key instead.")
    rate_limit: int | None = setting(
        None, ACCESS, "requests per minute for each key, or for each address if no key is required",
        unit="per minute", low=1, unset="no limit")
    max_concurrent_requests: int | None = setting(
        None, ACCESS, "concurrent requests for each key or address", unit="requests", low=1, unset="no limit")
    share_prefix_cache: bool = setting(
        False, ACCESS, "let keys with the scope infer reuse each other's cached prompt prefixes")
    allowed_hosts: tuple[str, ...] = setting(
        (), ACCESS, "host names besides localhost that are allowed in the Host header",
        environment="LOCALLLM_ALLOWED_HOSTS")
    allowed_origins: tuple[str, ...] = setting(
        (), ACCESS, "web origins that may call the API (CORS)", note="local: origins on this machine",
        metavar_text="URLS", environment="LOCALLLM_ORIGINS")
    allowed_media_domains: tuple[str, ...] = setting(
        (), ACCESS, "hosts that pictures may be fetched from", metavar_text="HOSTS",
        allowed_text="names such as example.org, *.example.org or * (every public host)",
        unset="none: requests bring their pictures along")
    trusted_proxies: tuple[str, ...] = setting(
        (), ACCESS, "proxies whose X-Forwarded-For and X-Forwarded-Proto are trusted", metavar_text="ADDRESSES",
        allowed_text="addresses or networks such as 10.0.0.0/8", accepts=_is_network)
    ssl_certfile: str | None = setting(
        None, ACCESS, "serve HTTPS with this certificate (chain), a PEM file", metavar_text="FILE", is_path=True)
    ssl_keyfile: str | None = setting(
        None, ACCESS, "the certificate's private key, unless it is in the same file", metavar_text="FILE",
        is_path=True)

    served_model_name: tuple[str, ...] = setting(
        (), SEVERAL_MODELS, "names that clients use for the model", note="the first one is shown",
        unset="from its path or repository", aliases=("--alias",), repeats=True)
    load_at_start: bool = setting(
        True, SEVERAL_MODELS, "load the model at the start", note="otherwise the first request that needs it loads it")
    on_demand: bool = setting(
        True, SEVERAL_MODELS, "load another installed model when a request names it")
    models_max: int | None = setting(
        None, SEVERAL_MODELS, "most models loaded at the same time", unit="models", low=1, unset="as many as fit",
        note="the speech model does not count")
    speech_model: str | None = setting(
        None, SEVERAL_MODELS, "model that transcribes what is said on the pages, loaded at its first use",
        allowed_text="ORG/NAME, a folder, a name that `localllm list` shows, or none",
        unset="a loaded model that transcribes, if there is one", environment="LOCALLLM_SPEECH_MODEL")
    keep_alive: float | None = setting(
        None, SEVERAL_MODELS, "how long a model stays loaded without a request", unit="seconds",
        allowed_text="a time such as 5m, 90s or 300; -1: for ever; 0: unload at once",
        unset="5m, or for ever for the model named at start")

    upstream: tuple[str, ...] = setting(
        (), SEVERAL_SERVERS, "OpenAI-compatible servers that answer requests for their models behind this address",
        allowed_text="URL or NAME=URL", note="without a MODEL, none is loaded here at the start",
        parser=read_upstream_flag, repeats=True, metavar_text="URL")
    upstream_api_key: str | None = setting(
        None, SEVERAL_SERVERS, "key that is sent to upstreams without a key of their own", metavar_text="KEY",
        unset="no key", environment="LOCALLLM_UPSTREAM_API_KEY", is_secret=True,
        by_hand="Secrets are not written by this page: edit the file yourself.")
    upstream_timeout: float = setting(
        600.0, SEVERAL_SERVERS, "longest silence of an upstream during an answer", unit="seconds",
        allowed_text="a time such as 5m or 90s, more than 0",
        accepts=lambda seconds: 0 < seconds < math.inf)
    # fmt: on

    def __post_init__(self) -> None:
        _check(self)
        if self.max_inflight_body_bytes < self.max_body_bytes:
            what = f"--max-inflight-body-bytes {self.max_inflight_body_bytes} is out of range."
            why = f"Allowed: at least {self.max_body_bytes}, the largest size of one body."
            raise ConfigError(what, why, param="max_inflight_body_bytes")
        if (self.max_batch_file_bytes or 0) > self.max_inflight_body_bytes:
            what = f"--max-batch-file-bytes {self.max_batch_file_bytes} is out of range."
            why = f"Allowed: at most {self.max_inflight_body_bytes}, the largest size of all bodies together."
            hint = f"--max-inflight-body-bytes {self.max_batch_file_bytes}"
            raise ConfigError(what, why, hint, param="max_batch_file_bytes")
        if self.ssl_keyfile and not self.ssl_certfile:
            why = "HTTPS needs the certificate that belongs to the private key."
            raise ConfigError(
                "--ssl-keyfile needs --ssl-certfile.", why, "--ssl-certfile FILE.pem", param="ssl_keyfile"
            )
        if not all(self.api_keys):
            raise ConfigError("--api-key is empty.", "An empty key would let everybody in.", param="api_key")

    @property
    def api_keys(self) -> tuple[str, ...]:
        given = self.api_key
        return () if given is None else (given,) if isinstance(given, str) else given

    @property
    def largest_media_body_bytes(self) -> int:
        asked = self.max_media_body_bytes or 64 * 1024**2
        return max(min(asked, self.max_inflight_body_bytes), self.max_body_bytes)

    @property
    def largest_audio_bytes(self) -> int:
        return min(self.max_audio_bytes, self.max_inflight_body_bytes)

    @property
    def largest_batch_file_bytes(self) -> int:
        return self.max_batch_file_bytes or min(200 * 1024**2, self.max_inflight_body_bytes)

    @property
    def scheme(self) -> str:
        return "https" if self.ssl_certfile else "http"

    @property
    def client_key(self) -> str | None:
        """The key that a client with the same settings sends."""
        return next(iter(self.api_keys), None)

    @property
    def is_loopback(self) -> bool:
        return self.host in ("localhost", "::1") or self.host.startswith("127.")

    def at(self, address: tuple[str, int]) -> ServerConfig:
        """Return the same settings for a server that listens on `address`, as keys and host names depend on it."""
        return replace(self, host=address[0], port=address[1])


@dataclass(frozen=True, slots=True)
class ModelTable:
    """One `[models.NAME]` table of the config file: the settings that differ for this model."""

    name: str
    engine: Mapping[str, Any] = field(default_factory=dict)  # fields of EngineConfig; `model` names the model to load
    aliases: tuple[str, ...] = ()
    pin: bool = False
    keep_alive: float | None = None

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, *self.aliases)


@dataclass(frozen=True, slots=True)
class PicksTable:
    """The `[picks]` table of the config file: a list of suggested models in place of localllm's own."""

    source: Path  # the config file
    file: Path | None = None  # a file with the list; None: the entries are in the config file
    entries: tuple[Any, ...] = ()  # checked where they are read (models/library/pick_list.py)


@dataclass(frozen=True, slots=True)
class Settings:
    """Both configurations, the source of every field, and the models that have a table in the config file."""

    engine: EngineConfig = field(default_factory=EngineConfig)
    server: ServerConfig = field(default_factory=ServerConfig)
    sources: Mapping[str, Source] = field(default_factory=dict)
    models: Mapping[str, ModelTable] = field(default_factory=dict)
    file: Path | None = None  # path of the config file, even if it does not exist; None: none was searched
    picks: PicksTable | None = None  # None: localllm's own list
    mcp: Mapping[str, McpServer] = field(default_factory=dict)  # servers of tools, by name
    upstreams: Mapping[str, UpstreamConfig] = field(default_factory=dict)  # other servers that answer, by name

    def value(self, name: str) -> Any:
        return getattr(self.engine if hasattr(self.engine, name) else self.server, name)

    def source(self, name: str) -> Source:
        return self.sources.get(name, "default")

    def table(self, name: str) -> ModelTable | None:
        """Return the table whose name or alias is `name`."""
        return next((table for table in self.models.values() if name in table.names), None)

    def of_first_model(self) -> Settings:
        """Return the settings of the model named at start: its table's values, unless a flag or variable sets them."""
        table = self.table(self.engine.model)
        if table is None:
            return self
        said = {name for name, source in self.sources.items() if source in ("flag", "environment")} - {"model"}
        values = {"model": table.name} | {name: value for name, value in table.engine.items() if name not in said}
        names = self.server.served_model_name or table.names
        return replace(
            self, engine=replace(self.engine, **values), server=replace(self.server, served_model_name=names)
        )

    def of_model(self, name: str, names: tuple[str, ...] = ()) -> Settings:
        """Return the settings of any other model that a request names. Settings of the first model's files are reset,
        and the model is never downloaded."""
        table = self.table(name)
        names = table.names if table is not None else names
        own = {"model": name} if table is None else {"model": table.name, **table.engine}
        own = {"profile": "none" if self.engine.profile == "none" else "auto", **own}
        own = {"speculative": without_drafter(self.engine.speculative), **own}
        engine = replace(self.engine, **{**_OF_ONE_MODEL, **own, "offline": True})
        return replace(self, engine=engine, server=replace(self.server, served_model_name=names))


SETTINGS: Mapping[str, SettingSpec] = {
    each.name: replace(each.metadata["spec"], name=each.name, type=str(each.type))
    for config in (EngineConfig, ServerConfig)
    for each in fields(config)
}
"""The description of every setting, by name."""

_OF_ONE_MODEL = {name: spec.default for name, spec in SETTINGS.items() if spec.is_of_one_model}
"""Settings of one checkpoint that other models must not inherit, `trust_remote_code` above all. Settings of memory and
scheduling apply to every model."""


def _check(config: EngineConfig | ServerConfig) -> None:
    for each in fields(config):
        SETTINGS[each.name].check(getattr(config, each.name))
