"""The flags shared by `up`, `serve`, `run` and `LLM`, spelled as in vLLM. Each flag is one field of config/settings.py.

A known but unsupported flag is refused by name, never ignored; for an unknown flag the nearest existing one is
suggested. Does not know: what a setting does, where else it can come from (config/settings.py).
"""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NoReturn

from localllm.config.settings import EngineConfig, ServerConfig, Settings, resolve
from localllm.config.unsupported import UNSUPPORTED
from localllm.errors import ConfigError, UnsupportedOption


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
    Flag("offline", "never contact the hub: a model that is not on this machine is refused"),
    Flag("device", "auto, cpu, cuda or cuda:N", "NAME"),
    Flag("dtype", "auto, float32, bfloat16 or float16", "NAME"),
    Flag(
        "quantization",
        "quantise 16-bit weights at load: int4, int8, fp8; a quantised checkpoint is detected",
        "NAME",
        ("-q",),
    ),
    Flag(
        "cpu_weights",
        "how a CPU runs quantised weights: fast; small: less memory, slower in batches; exact: as stored, slow",
        "NAME",
    ),
    Flag("generation_config", "auto: the checkpoint's sampling defaults; vllm: neutral ones", "auto|vllm"),
    Flag("task", "generate, embed or score; auto: read from the checkpoint's files", "NAME"),
    Flag(
        "model_impl",
        "auto, localllm or transformers; auto: localllm's code, or transformers' where localllm has none",
        "NAME",
    ),
    Flag("verify", "compare logits with transformers at load; default: only where transformers runs the model"),
    Flag(
        "trust_remote_code", "run the Python code in a checkpoint's repository, with your rights; read the code first"
    ),
    Flag("enable_lora", "reserve memory for LoRA adapters, so that they can be loaded while the server runs"),
    Flag(
        "lora_modules",
        "LoRA adapters to load at start, named by requests as models: folders or cached repositories",
        "NAME=PATH",
        several=True,
    ),
    Flag("max_loras", "most LoRA adapters loaded at the same time", "N"),
    Flag("max_lora_rank", "largest rank of a LoRA adapter", "N"),
    Flag("profile", "settings found by localllm tune. auto: the applied profile; none; or a profile's name", "NAME"),
    Flag("enable_prompt_embeds", "accept embeddings in place of prompt tokens, from any client that may send requests"),
    Flag("max_logprobs", "most logprobs per position that a request may ask for; -1: the whole vocabulary", "N"),
    Flag("seed", "seed for requests that bring none; default: random, shown in the log", "N"),
)

MEMORY_FLAGS = (
    Flag(
        "max_model_len",
        "longest prompt plus output, in tokens; auto: the longest that fits. 8k is 8000, 8K is 8192",
        "N|auto",
        ("--ctx", "-c"),
    ),
    Flag("gpu_memory_utilization", "share of the GPU's free memory that may be used, 0 to 1", "X"),
    Flag("kv_cache_memory_bytes", "size of the KV cache, e.g. 4GiB; default: all remaining memory", "SIZE"),
    Flag("kv_cache_dtype", "auto: the model's dtype; fp8 or int8: half the memory of a 16-bit cache", "NAME"),
    Flag("block_size", "token positions per KV block: 8, 16, 32, 64 or 128; default: 64 on a GPU, 16 on CPU", "N"),
    Flag("enable_prefix_caching", "reuse the KV blocks of prompts with a common prefix"),
)

SCHEDULER_FLAGS = (
    Flag("max_num_seqs", "most requests in one step", "N", ("--parallel", "-np")),
    Flag("max_num_batched_tokens", "most tokens in one step", "N"),
    Flag("long_prefill_token_threshold", "longest prefill chunk, in tokens, while other requests decode", "N"),
    Flag("max_num_queued_reqs", "most waiting requests; further ones are refused with status 503", "N"),
    Flag("scheduling_policy", "fcfs (first come, first served) or priority", "NAME"),
    Flag("async_scheduling", "schedule the next step while the current one runs"),
    Flag("enforce_eager", "do not use CUDA graphs"),
    Flag("deterministic", "bit-identical output whatever else is in the batch; slower"),
    Flag("tensor_parallel_size", "number of GPUs that share each layer", "N", ("-tp",)),
)

SERVER_FLAGS = (
    Flag("host", "address to listen on; any but loopback needs an API key", "ADDRESS"),
    Flag("port", "port to listen on; 0: any free one", "N"),
    Flag(
        "api_key",
        "admin key that clients must send; repeat for several. Safer: LOCALLLM_API_KEY, or localllm keys",
        "KEY",
        repeats=True,
    ),
    Flag("rate_limit", "requests per minute for each key, or for each address if no key is required", "N"),
    Flag("max_concurrent_requests", "concurrent requests for each key or address", "N"),
    Flag("share_prefix_cache", "let keys with the scope infer reuse each other's cached prompt prefixes"),
    Flag("max_body_bytes", "largest request body; raise it for large prompt_embeds", "SIZE"),
    Flag("max_inflight_body_bytes", "largest total size of the bodies of all running requests", "SIZE"),
    Flag("ssl_certfile", "serve HTTPS with this certificate (chain), a PEM file", "FILE"),
    Flag("ssl_keyfile", "the certificate's private key, unless it is in the same file", "FILE"),
    Flag("served_model_name", "names that clients use for the model, comma-separated", "NAMES", ("--alias",), True),
    Flag("on_demand", "load another installed model when a request names it"),
    Flag("models_max", "most models loaded at the same time; default: as many as fit", "N"),
    Flag(
        "keep_alive",
        "how long a model stays loaded without a request: 5m, 90s; -1: for ever; 0: unload at once",
        "TIME",
    ),
    Flag("allowed_hosts", "further host names allowed in the Host header, comma-separated", "NAMES"),
    Flag(
        "allowed_origins",
        "web origins that may call the API (CORS), comma-separated; local: origins on this machine",
        "URLS",
    ),
    Flag("trusted_proxies", "addresses or networks whose X-Forwarded-For is trusted, comma-separated", "ADDRESSES"),
    Flag("ui", "serve the chat and dashboard pages"),
    Flag("chat_history", "store the page's chats on disk, in chats.db of the data folder"),
    Flag("open_browser", "open the chat page in a browser when ready", None, ("--open",)),
    Flag(
        "otlp_traces_endpoint", "OpenTelemetry collector that receives a span for each request (OTLP over HTTP)", "URL"
    ),
    Flag("log_level", "debug, info, warning or error", "NAME"),
    Flag("metrics_aliases", "also export /metrics under the names of vllm, llamacpp, or both", "NAMES"),
)

ADAPTER_FLAGS = ("enable_lora", "lora_modules", "max_loras", "max_lora_rank")
ENGINE_GROUPS = (("model", MODEL_FLAGS), ("memory", MEMORY_FLAGS), ("scheduling", SCHEDULER_FLAGS))
SERVER_GROUPS = (*ENGINE_GROUPS, ("server", SERVER_FLAGS))


def add_engine_flags(parser: argparse.ArgumentParser, leave_out: Sequence[str] = ()) -> None:
    """Add the flags shared by `run`, `bench` and the server."""
    _add_groups(parser, ENGINE_GROUPS, leave_out)
    _add_common(parser)


def add_server_flags(
    parser: argparse.ArgumentParser, json: str = "one JSON object per start-up phase instead of text"
) -> None:
    """Add the flags of `up` and `serve`, and of `service`, which passes them on."""
    _add_groups(parser, SERVER_GROUPS)
    _add_common(parser)
    parser.add_argument("--json", action="store_true", help=json)


def settings_from(options: argparse.Namespace) -> Settings:
    """Return the settings: the given flags, then the environment, the config file and the defaults."""
    names = {f.name for f in (*fields(EngineConfig), *fields(ServerConfig))}
    given = {name: value for name, value in vars(options).items() if name in names and value is not None}
    return resolve(given, file=options.config)


def refuse_unknown(leftover: Sequence[str], known: Iterable[str], hint: str) -> NoReturn:
    """Raise an error for the first unknown word: say that it is unsupported, or suggest the nearest flag."""
    word = next((w for w in leftover if w.startswith("-")), leftover[0])
    flag = word.split("=", 1)[0]
    if flag == "--model":
        raise ConfigError(
            "There is no --model flag: pass the model as an argument.", "", "localllm up MODEL", param=flag
        )
    name = flag.lstrip("-").removeprefix("no-").replace("-", "_")
    if flag.startswith("-") and name in UNSUPPORTED:
        raise UnsupportedOption(f"{flag} is not supported.", UNSUPPORTED[name], f"leave {flag} out", param=flag)
    if not flag.startswith("-"):
        raise ConfigError(f"Unexpected argument {word!r}.", "A prompt with spaces must be quoted.", param=word)
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
    """Return argparse's arguments for a flag. Every default is None, 'not given', so that the configuration decides."""
    if flag.metavar is None:
        return {"action": argparse.BooleanOptionalAction, "default": None}
    if flag.several:
        return {"metavar": flag.metavar, "default": None, "action": "extend", "nargs": "+"}
    action = {"action": "append"} if flag.repeats else {}
    return {"metavar": flag.metavar.replace("%", "%%"), "default": None, **action}


def _add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", type=Path, metavar="FILE", help="a TOML file of settings (or LOCALLLM_CONFIG)")
    # Prefill is always chunked: the flag is accepted without effect, and its negation is refused as unsupported.
    parser.add_argument("--enable-chunked-prefill", action="store_true", help="no effect: prefill is always chunked")
    add_debug_flag(parser)


def add_debug_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
