"""The flags that `up`, `serve`, `run` and `LLM` have in common: spelled as in vLLM, each one field of config.py.

A flag that the field knows and this version does not honour is refused by name, never ignored; a flag that nobody
knows gets the nearest one that exists. Does not know: what a setting does, where else it can come from (config.py).
"""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NoReturn

from localllm.config import EngineConfig, ServerConfig, Settings, resolve
from localllm.errors import ConfigError, UnsupportedOption
from localllm.unsupported import UNSUPPORTED


@dataclass(frozen=True, slots=True)
class Flag:
    """One setting on the command line. `metavar` None: a switch with a --no- twin."""

    name: str
    help: str
    metavar: str | None = None
    aliases: tuple[str, ...] = ()
    repeats: bool = False  # may be given several times
    several: bool = False  # takes several words at once

    @property
    def spelling(self) -> str:
        return "--" + self.name.replace("_", "-")


MODEL_FLAGS = (
    Flag("revision", "branch, tag or commit of a repository", "NAME"),
    Flag("offline", "never ask the hub: a model that is not on this machine is refused"),
    Flag("device", "auto, cpu, cuda or cuda:N", "NAME"),
    Flag("dtype", "auto, float32, bfloat16 or float16", "NAME"),
    Flag(
        "quantization",
        "quantise 16-bit weights at load: int4, int8, fp8; what a checkpoint has is found by itself",
        "NAME",
        ("-q",),
    ),
    Flag(
        "cpu_weights",
        "quantised weights on a CPU: fast; small: less memory, slower in batches; exact: as stored, slow",
        "NAME",
    ),
    Flag("generation_config", "auto: the checkpoint's sampling defaults; vllm: neutral ones", "auto|vllm"),
    Flag("task", "generate, embed or score; auto: what the checkpoint's files say", "NAME"),
    Flag(
        "model_impl", "whose code computes the model; auto: localllm's own, transformers' where there is none", "NAME"
    ),
    Flag("verify", "compare logits with transformers at load; default: where transformers' code computes the model"),
    Flag("trust_remote_code", "run the Python code that comes with a checkpoint, with your rights; read it first"),
    Flag("enable_lora", "leave room for LoRA adapters, which may come and go while the server runs"),
    Flag(
        "lora_modules",
        "LoRA adapters that requests name as models: folders, or repositories in the cache",
        "NAME=PATH",
        several=True,
    ),
    Flag("max_loras", "most LoRA adapters at a time", "N"),
    Flag("max_lora_rank", "the largest rank of a LoRA adapter there is room for", "N"),
    Flag(
        "profile", "settings found by localllm tune. auto: those that were applied; none; or a profile's name", "NAME"
    ),
    Flag("enable_prompt_embeds", "take embeddings in place of a prompt's tokens: whoever may ask can send any"),
    Flag("max_logprobs", "most logprobs a request may ask for at each position; -1: the whole vocabulary", "N"),
    Flag("seed", "where the seeds of requests without one are drawn from; without it a number that the log has", "N"),
)

MEMORY_FLAGS = (
    Flag(
        "max_model_len",
        "longest prompt plus output in tokens; auto: what fits. 8k is 8000, 8K is 8192",
        "N|auto",
        ("--ctx", "-c"),
    ),
    Flag("gpu_memory_utilization", "share of the GPU's free memory that may be used, 0 to 1", "X"),
    Flag("kv_cache_memory_bytes", "size of the KV cache, e.g. 4GiB; default: what is left", "SIZE"),
    Flag("kv_cache_dtype", "auto: the model's; fp8 or int8: half the memory of a 16-bit cache", "NAME"),
    Flag("block_size", "token positions per KV block: 8, 16, 32, 64 or 128; default: 64 on a GPU, 16 on CPU", "N"),
    Flag("enable_prefix_caching", "reuse the KV blocks of prompts that begin alike"),
)

SCHEDULER_FLAGS = (
    Flag("max_num_seqs", "most requests in one step", "N", ("--parallel", "-np")),
    Flag("max_num_batched_tokens", "most tokens in one step", "N"),
    Flag("long_prefill_token_threshold", "longest prefill chunk while others decode", "N"),
    Flag("max_num_queued_reqs", "requests that may wait before new ones are told to come back", "N"),
    Flag("scheduling_policy", "fcfs or priority", "NAME"),
    Flag("async_scheduling", "schedule the next step while this one runs"),
    Flag("enforce_eager", "launch each step without CUDA graphs"),
    Flag("deterministic", "the same bits for a request whatever else is in the batch; slower"),
    Flag("tensor_parallel_size", "GPUs that share each layer", "N", ("-tp",)),
)

SERVER_FLAGS = (
    Flag("host", "address to listen on; anything but loopback needs a key", "ADDRESS"),
    Flag("port", "port to listen on; 0: any free one", "N"),
    Flag(
        "api_key",
        "admin key that clients must send, more than once for several; better LOCALLLM_API_KEY, or localllm keys",
        "KEY",
        repeats=True,
    ),
    Flag("rate_limit", "requests a minute for each key, or for each address where no key is asked for", "N"),
    Flag("max_concurrent_requests", "requests at once for each key or address", "N"),
    Flag("share_prefix_cache", "let keys for infer reuse the cached prefixes of each other's prompts"),
    Flag("max_body_bytes", "bytes that one request's body may have; large prompt_embeds need more", "SIZE"),
    Flag("max_inflight_body_bytes", "bytes that the bodies of all requests being answered may have together", "SIZE"),
    Flag("ssl_certfile", "speak https with this certificate (chain) in PEM", "FILE"),
    Flag("ssl_keyfile", "the certificate's private key, unless it is in the same file", "FILE"),
    Flag("served_model_name", "names that clients use for the model, comma-separated", "NAMES", ("--alias",), True),
    Flag("on_demand", "load another installed model when a request names it"),
    Flag("models_max", "most models ready at a time; default: as many as fit", "N"),
    Flag("keep_alive", "how long a model stays without a request: 5m, 90s, -1 for good, 0 not at all", "TIME"),
    Flag("allowed_hosts", "further names that the Host header may carry, comma-separated", "NAMES"),
    Flag(
        "allowed_origins",
        "web origins that may call the API (CORS), comma-separated; local: of programs on this machine",
        "URLS",
    ),
    Flag("trusted_proxies", "addresses or networks whose X-Forwarded-For is believed, comma-separated", "ADDRESSES"),
    Flag("ui", "serve the chat and dashboard pages"),
    Flag("chat_history", "keep the page's chats on disk, in chats.db of the data folder"),
    Flag("open_browser", "open the chat page in a browser when ready", None, ("--open",)),
    Flag("otlp_traces_endpoint", "OpenTelemetry collector that gets a span for each request (OTLP over HTTP)", "URL"),
    Flag("log_level", "debug, info, warning or error", "NAME"),
    Flag("metrics_aliases", "whose names /metrics tells beside its own: vllm, llamacpp, or both", "NAMES"),
)

ADAPTER_FLAGS = ("enable_lora", "lora_modules", "max_loras", "max_lora_rank")
ENGINE_GROUPS = (("model", MODEL_FLAGS), ("memory", MEMORY_FLAGS), ("scheduling", SCHEDULER_FLAGS))
SERVER_GROUPS = (*ENGINE_GROUPS, ("server", SERVER_FLAGS))


def add_engine_flags(parser: argparse.ArgumentParser, leave_out: Sequence[str] = ()) -> None:
    """What `run`, `bench` and the server share."""
    _add_groups(parser, ENGINE_GROUPS, leave_out)
    _add_common(parser)


def add_server_flags(
    parser: argparse.ArgumentParser, json: str = "one JSON object per start-up phase instead of text"
) -> None:
    """What `up` and `serve` take, and `service`, which hands it on."""
    _add_groups(parser, SERVER_GROUPS)
    _add_common(parser)
    parser.add_argument("--json", action="store_true", help=json)


def settings_from(options: argparse.Namespace) -> Settings:
    """The flags that were given, over the environment, the config file and the defaults."""
    names = {f.name for f in (*fields(EngineConfig), *fields(ServerConfig))}
    given = {name: value for name, value in vars(options).items() if name in names and value is not None}
    return resolve(given, file=options.config)


def refuse_unknown(leftover: Sequence[str], known: Iterable[str], hint: str) -> NoReturn:
    """Say of the first word that no flag took whether the field knows it, or what was probably meant."""
    word = next((w for w in leftover if w.startswith("-")), leftover[0])
    flag = word.split("=", 1)[0]
    if flag == "--model":
        raise ConfigError("The model is no flag here.", "", "localllm up MODEL", param=flag)
    name = flag.lstrip("-").removeprefix("no-").replace("-", "_")
    if flag.startswith("-") and name in UNSUPPORTED:
        raise UnsupportedOption(f"{flag} is not supported.", UNSUPPORTED[name], f"leave {flag} out", param=flag)
    if not flag.startswith("-"):
        raise ConfigError(f"Unexpected argument {word!r}.", "Quote a prompt that has spaces.", param=word)
    near = difflib.get_close_matches(flag, known, n=1, cutoff=0.6)
    raise ConfigError(f"Unknown flag {flag}.", f"Did you mean {near[0]}?" if near else "", hint, param=flag)


def _add_groups(
    parser: argparse.ArgumentParser, groups: Iterable[tuple[str, tuple[Flag, ...]]], leave_out: Sequence[str] = ()
) -> None:
    for title, flags in groups:
        group = parser.add_argument_group(title)
        for flag in flags:
            if flag.name in leave_out:
                continue
            group.add_argument(flag.spelling, *flag.aliases, dest=flag.name, help=flag.help, **_kind(flag))


def _kind(flag: Flag) -> dict[str, Any]:
    """argparse's words for a value or a switch. Every default is None: 'not given', so that config.py decides."""
    if flag.metavar is None:
        return {"action": argparse.BooleanOptionalAction, "default": None}
    if flag.several:
        return {"metavar": flag.metavar, "default": None, "action": "extend", "nargs": "+"}
    action = {"action": "append"} if flag.repeats else {}
    return {"metavar": flag.metavar.replace("%", "%%"), "default": None, **action}


def _add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", type=Path, metavar="FILE", help="a TOML file of settings (or LOCALLLM_CONFIG)")
    # True of every step here: the flag states a fact, and its negation is refused as unsupported.
    parser.add_argument("--enable-chunked-prefill", action="store_true", help="a fact: prefill is always chunked")
    add_debug_flag(parser)


def add_debug_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
