"""Settings: what the user *asked* of the engine and of the server. Frozen; each value knows its source.

Precedence: flag > environment > config file > profile > default. A profile is what `localllm tune` found;
serving/profiles.py applies it when a model starts. `resolve` builds the values once, and they do not change afterwards.
What the checkpoint says is in `models/spec/`, what this machine allows in `models/fit/`.
Does not know: the command line's spelling (cli/flags.py), torch, models.
"""

from __future__ import annotations

import ipaddress
import json
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from localllm.errors import ConfigError
from localllm.files.folders import config_home
from localllm.units import parse_bytes, parse_count, parse_keep_alive

Task = Literal["generate", "embed", "score"]
TASKS: tuple[Task, ...] = ("generate", "embed", "score")
Source = Literal["default", "profile", "file", "environment", "flag"]


class LoraModule(NamedTuple):
    """A LoRA adapter: the name that requests use, and its path."""

    name: str
    path: str


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Settings of the engine. None: decide from the model and the machine, and report the decision."""

    model: str = "demo"  # path, name in the Hugging Face cache, or the bundled demo
    revision: str | None = None  # branch, tag or commit of a repository
    offline: bool = False  # never contact the hub: a model that is not on this machine is refused
    device: str = "auto"  # auto, cpu, cuda, cuda:1
    dtype: str = "auto"  # auto, float32, bfloat16, float16
    max_model_len: int | None = None  # tokens, prompt and output together; None: the largest that fits
    max_num_seqs: int = 64  # requests in one step
    max_num_batched_tokens: int | None = None  # tokens in one step; None: 2048 on a GPU, 1024 on CPU
    long_prefill_token_threshold: int | None = None  # prefill tokens per step while others decode; None: a quarter
    block_size: int | None = None  # token positions per block; None: 64 on a GPU, 16 on CPU
    kv_cache_dtype: str = "auto"  # auto: the model's; fp8 (e4m3), int8: half of a 16-bit cache
    gpu_memory_utilization: float = 0.90  # share of the GPU's free memory we may fill, 0 to 1
    kv_cache_memory_bytes: int | None = None  # size of the KV cache; None: what the budget leaves
    enable_prefix_caching: bool = True
    scheduling_policy: str = "fcfs"  # fcfs, priority
    max_num_queued_reqs: int = 1024  # waiting requests; further ones are refused with status 503
    async_scheduling: bool | None = None  # two steps in flight; None: on a GPU yes, on CPU no
    enforce_eager: bool = False  # no CUDA graphs
    deterministic: bool = False  # bit-identical output whatever else is in the batch
    generation_config: str = "auto"  # auto: the checkpoint's defaults; vllm: neutral defaults
    task: str = "auto"  # auto, generate, embed, score; auto: read from the checkpoint's files
    model_impl: str = "auto"  # auto, localllm, transformers: whose code runs the model
    verify: bool | None = None  # compare logits with transformers at load; None: where transformers runs the model
    trust_remote_code: bool = False  # run Python code that comes with a checkpoint
    quantization: str | None = (
        None  # int4, int8, fp8: quantise 16-bit weights at load; a quantised checkpoint is detected
    )
    cpu_weights: str = "fast"  # how quantised weights run on a CPU: fast, small, exact
    enable_lora: bool = False  # reserve memory for LoRA adapters; lora_modules implies it
    lora_modules: tuple[LoraModule, ...] = ()  # name=path: adapters to load at start
    max_loras: int = 4  # most adapters loaded at the same time
    max_lora_rank: int = 16  # largest rank of an adapter
    enable_prompt_embeds: bool = False  # requests may send embeddings in place of prompt tokens
    max_logprobs: int = 20  # most logprobs per position that a request may ask for; -1: the whole vocabulary
    tensor_parallel_size: int = 1
    seed: int | None = None  # requests that bring no seed draw theirs from this one; None: random at each load
    profile: str = (
        "auto"  # tuned values for settings left at their default. auto: the applied profile; none; or a profile's name
    )

    def __post_init__(self) -> None:
        _require(1 <= self.max_num_seqs <= 4096, "max_num_seqs", self.max_num_seqs, "1 to 4096")
        block_sizes = (None, 8, 16, 32, 64, 128)
        _require(self.block_size in block_sizes, "block_size", self.block_size, "8, 16, 32, 64 or 128")
        _require(
            self.kv_cache_dtype in ("auto", "fp8", "fp8_e4m3", "int8"),
            "kv_cache_dtype",
            self.kv_cache_dtype,
            "auto, fp8 (also spelled fp8_e4m3) or int8",
        )
        utilization = self.gpu_memory_utilization
        _require(0.0 < utilization <= 1.0, "gpu_memory_utilization", utilization, "above 0 and at most 1")
        _require(
            self.scheduling_policy in ("fcfs", "priority"),
            "scheduling_policy",
            self.scheduling_policy,
            "fcfs or priority",
        )
        _require(
            self.dtype in ("auto", "float32", "bfloat16", "float16"),
            "dtype",
            self.dtype,
            "auto, float32, bfloat16 or float16",
        )
        _require(
            self.generation_config in ("auto", "vllm"), "generation_config", self.generation_config, "auto or vllm"
        )
        _require(self.task in ("auto", *TASKS), "task", self.task, f"auto, {', '.join(TASKS)}")
        implementations = ("auto", "localllm", "transformers")
        _require(self.model_impl in implementations, "model_impl", self.model_impl, "auto, localllm or transformers")
        _require(
            self.cpu_weights in ("fast", "small", "exact"), "cpu_weights", self.cpu_weights, "fast, small or exact"
        )
        _require(
            self.max_logprobs >= -1, "max_logprobs", self.max_logprobs, "at least 0, or -1 for the whole vocabulary"
        )
        _require(self.max_num_queued_reqs >= 1, "max_num_queued_reqs", self.max_num_queued_reqs, "at least 1")
        for name in (
            "max_model_len",
            "max_num_batched_tokens",
            "long_prefill_token_threshold",
            "kv_cache_memory_bytes",
            "tensor_parallel_size",
            "max_loras",
            "max_lora_rank",
        ):
            value = getattr(self, name)
            _require(value is None or value >= 1, name, value, "at least 1")
        _require(self.max_loras <= 64, "max_loras", self.max_loras, "1 to 64")
        _require(self.max_lora_rank <= 512, "max_lora_rank", self.max_lora_rank, "1 to 512")
        count = len(self.lora_modules)
        if count > self.max_loras:
            why = f"--max-loras is {self.max_loras}."
            raise ConfigError(
                f"--lora-modules names {count} adapters.", why, f"--max-loras {count}", param="lora_modules"
            )

    @property
    def takes_adapters(self) -> bool:
        return self.enable_lora or bool(self.lora_modules)


MAX_UPLOAD_BYTES = 16 * 1024**2
"""The largest file that a page accepts as an upload; not a setting."""


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """Settings of the server."""

    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | tuple[str, ...] | None = field(
        default=None, repr=False
    )  # one or several admin keys; further keys: web/access/keys.py
    rate_limit: int | None = (
        None  # requests per minute for each key, or for each address if no key is required; None: no limit
    )
    max_concurrent_requests: int | None = None  # concurrent requests for each key or address; None: no limit
    share_prefix_cache: bool = False  # keys with the scope infer reuse the KV blocks of each other's prompts
    max_body_bytes: int = 8 * 1024**2  # largest body of one API request
    max_inflight_body_bytes: int = 256 * 1024**2  # largest total of the bodies of all running requests
    ssl_certfile: str | None = None  # certificate chain in PEM: the server then speaks HTTPS
    ssl_keyfile: str | None = None  # the certificate's private key; None: it is in ssl_certfile
    otlp_traces_endpoint: str | None = None  # OTLP/HTTP collector that receives a span for each request
    served_model_name: tuple[str, ...] = ()  # names clients use; the first is shown; empty: from path or repository
    on_demand: bool = True  # a request that names another installed model loads it
    models_max: int | None = None  # most models loaded at the same time; None: as many as fit
    keep_alive: float | None = None  # seconds a model stays loaded without a request, inf: for ever; None: see docs
    allowed_hosts: tuple[str, ...] = ()  # names besides localhost that are allowed in the Host header
    allowed_origins: tuple[str, ...] = ()  # web origins that may call the API (CORS); local: origins on this machine
    trusted_proxies: tuple[str, ...] = ()  # addresses or networks whose X-Forwarded-For and -Proto are trusted
    ui: bool = True  # chat and dashboard pages
    chat_history: bool = True  # store the page's chats on disk; otherwise they are lost when the server ends
    open_browser: bool = False
    log_level: str = "info"
    metrics_aliases: tuple[str, ...] = ()  # vllm, llamacpp: /metrics also exports their metric names

    def __post_init__(self) -> None:
        _require(0 <= self.port <= 65535, "port", self.port, "0 to 65535 (0: any free port)")
        _require(
            self.log_level in ("debug", "info", "warning", "error"),
            "log_level",
            self.log_level,
            "debug, info, warning or error",
        )
        _require(self.models_max is None or self.models_max >= 1, "models_max", self.models_max, "at least 1")
        known = set(self.metrics_aliases) <= {"vllm", "llamacpp"}
        _require(known, "metrics_aliases", ",".join(self.metrics_aliases), "vllm, llamacpp or both, comma-separated")
        for name in ("rate_limit", "max_concurrent_requests"):
            value = getattr(self, name)
            _require(value is None or value >= 1, name, value, "at least 1")
        body_bytes, size_bytes = self.max_body_bytes, self.max_inflight_body_bytes
        _require(body_bytes >= 2**16, "max_body_bytes", body_bytes, f"at least {2**16}")
        least_bytes = max(body_bytes, MAX_UPLOAD_BYTES)
        least = f"at least {least_bytes}, the largest size of one body"
        _require(size_bytes >= least_bytes, "max_inflight_body_bytes", size_bytes, least)
        if self.ssl_keyfile and not self.ssl_certfile:
            why = "HTTPS needs the certificate that belongs to the private key."
            raise ConfigError(
                "--ssl-keyfile needs --ssl-certfile.", why, "--ssl-certfile FILE.pem", param="ssl_keyfile"
            )
        for each in self.trusted_proxies:
            _require(_is_network(each), "trusted_proxies", each, "an address or a network, such as 10.0.0.0/8")
        endpoint = self.otlp_traces_endpoint
        is_url = endpoint is None or endpoint.startswith(("http://", "https://"))
        _require(is_url, "otlp_traces_endpoint", endpoint, "a URL such as http://localhost:4318 (OTLP over HTTP)")
        if not all(self.api_keys):
            raise ConfigError("--api-key is empty.", "An empty key would let everybody in.", param="api_key")

    @property
    def api_keys(self) -> tuple[str, ...]:
        given = self.api_key
        return () if given is None else (given,) if isinstance(given, str) else given

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
class Settings:
    """Both configurations, the source of every field, and the models that have a table in the config file."""

    engine: EngineConfig = field(default_factory=EngineConfig)
    server: ServerConfig = field(default_factory=ServerConfig)
    sources: Mapping[str, Source] = field(default_factory=dict)
    models: Mapping[str, ModelTable] = field(default_factory=dict)
    file: Path | None = None  # the config file that was looked for, there or not; None: nobody looked

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
        engine = replace(self.engine, **{**_OF_ONE_MODEL, **own, "offline": True})
        return replace(self, engine=engine, server=replace(self.server, served_model_name=names))


_OF_ONE_MODEL: Mapping[str, Any] = {
    "revision": None, "quantization": None, "max_model_len": None, "task": "auto", "model_impl": "auto",
    "trust_remote_code": False, "enable_lora": False, "lora_modules": (),
}  # fmt: skip
"""Settings of one checkpoint that other models must not inherit, `trust_remote_code` above all. Settings of memory and
scheduling apply to every model."""


ENVIRONMENT = {
    "host": "LOCALLLM_HOST",
    "port": "LOCALLLM_PORT",
    "api_key": "LOCALLLM_API_KEY",
    "model": "LOCALLLM_MODEL",
    "allowed_origins": "LOCALLLM_ORIGINS",
    "allowed_hosts": "LOCALLLM_ALLOWED_HOSTS",
    "log_level": "LOCALLLM_LOG_LEVEL",
}


def resolve(flags: Mapping[str, Any], environ: Mapping[str, str] | None = None, file: Path | None = None) -> Settings:
    """Build the `Settings` from the given flags (None: not given), the environment and the config file.

    Raises `ConfigError` naming the flag, variable or line that is wrong.
    """
    environ = os.environ if environ is None else environ
    explicit_file = file or (Path(environ["LOCALLLM_CONFIG"]) if environ.get("LOCALLLM_CONFIG") else None)
    path = explicit_file or default_config_path(environ)
    in_file = dict(_read_file(path, must_exist=explicit_file is not None))
    tables = in_file.pop("models", {})
    layers: list[tuple[Source, Mapping[str, Any]]] = [
        ("file", in_file),
        ("environment", {name: environ[var] for name, var in ENVIRONMENT.items() if environ.get(var)}),
        ("flag", {name: value for name, value in flags.items() if value is not None}),
    ]
    known = {f.name: f for f in (*fields(EngineConfig), *fields(ServerConfig))}
    values: dict[str, Any] = {}
    sources: dict[str, Source] = {}
    for source, layer in layers:
        for name, raw in layer.items():
            if name not in known:
                raise ConfigError(f"Unknown setting {name!r} in the {source}.", f"Known: {', '.join(sorted(known))}.")
            values[name], sources[name] = _coerce(name, str(known[name].type), raw), source
    engine = EngineConfig(**{f.name: values[f.name] for f in fields(EngineConfig) if f.name in values})
    server = ServerConfig(**{f.name: values[f.name] for f in fields(ServerConfig) if f.name in values})
    return Settings(engine, server, sources, _read_tables(tables, path), path)


def default_config_path(environ: Mapping[str, str] | None = None) -> Path:
    """Return $XDG_CONFIG_HOME/localllm/config.toml."""
    return config_home(environ) / "localllm" / "config.toml"


def _read_file(path: Path, *, must_exist: bool) -> Mapping[str, Any]:
    try:
        return {name.replace("-", "_"): value for name, value in tomllib.loads(path.read_text()).items()}
    except FileNotFoundError:
        if must_exist:
            raise ConfigError(f"Config file {path} does not exist.") from None
        return {}
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"Cannot read config file {path}.", str(error)) from error


OWN_KEYS = ("alias", "pin", "keep_alive")
"""Keys that a `[models.NAME]` table may hold besides the engine's settings."""


def _read_tables(tables: Any, path: Path) -> dict[str, ModelTable]:
    if not isinstance(tables, dict) or not all(isinstance(table, dict) for table in tables.values()):
        raise ConfigError(f"{path}: models must be a table of tables.", "Write one table per model: [models.NAME].")
    known = {f.name: f for f in fields(EngineConfig)}
    read: dict[str, ModelTable] = {}
    for name, table in tables.items():
        given = {key.replace("-", "_"): value for key, value in table.items()}
        unknown = sorted(given.keys() - known.keys() - set(OWN_KEYS))
        if unknown:
            allowed = ", ".join(sorted([*known, *OWN_KEYS]))
            raise ConfigError(f"Unknown setting {unknown[0]!r} in [models.{name}] of {path}.", f"Known: {allowed}.")
        engine = {key: _coerce(key, str(known[key].type), given[key]) for key in given.keys() & known.keys()}
        EngineConfig(**engine)  # report a value out of range now, not when the model is first requested
        keep_alive = _coerce("keep_alive", "float", given["keep_alive"]) if "keep_alive" in given else None
        aliases = _coerce("alias", "tuple", given.get("alias", ()))
        read[name] = ModelTable(name, engine, aliases, _coerce("pin", "bool", given.get("pin", False)), keep_alive)
    return read


def _coerce(name: str, kind: str, raw: Any) -> Any:
    """Convert a value to the field's type. The environment gives strings, flags and TOML give typed values."""
    if name == "lora_modules":
        return read_lora_modules(raw)
    if name == "api_key":  # may hold a comma
        return raw if isinstance(raw, str) else tuple(map(str, raw))
    try:
        if kind.startswith("tuple"):
            texts = [raw] if isinstance(raw, str) else raw
            return tuple(part.strip() for text in texts for part in text.split(",") if part.strip())
        if name == "keep_alive":
            return raw if raw is None else parse_keep_alive(raw)
        if kind.startswith("bool"):
            return {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}[str(raw).lower()]
        if name == "max_model_len" and isinstance(raw, str) and raw.lower() in ("auto", "-1"):
            return None
        if name.endswith("_bytes"):
            return parse_bytes(raw)
        if kind.startswith("int"):
            return parse_count(raw)
        if kind.startswith("float"):
            return float(raw)
        return raw if raw is None else str(raw)
    except (KeyError, ValueError, TypeError, AttributeError):
        flag = "--" + name.replace("_", "-")
        raise ConfigError(
            f"{flag} {raw!r} is not valid.", f"It must be {_kind_in_words(name, kind)}.", param=name
        ) from None


def read_lora_modules(raw: Any) -> tuple[LoraModule, ...]:
    """Parse adapters: `name=path` or a JSON object with both, one or a list; in a file also a table of names and
    paths."""
    if isinstance(raw, Mapping) and not {"name", "path"} <= raw.keys():
        return tuple(_lora_module({"name": name, "path": path}) for name, path in raw.items())
    return tuple(_lora_module(each) for each in ([raw] if isinstance(raw, str | Mapping) else raw))


def _lora_module(raw: Any) -> LoraModule:
    given = raw
    if isinstance(raw, str) and raw.lstrip().startswith("{"):
        try:
            given = json.loads(raw)
        except ValueError as error:
            raise ConfigError(f"--lora-modules {raw} is not valid JSON.", f"{error}.", param="lora_modules") from error
    elif isinstance(raw, str):
        given = dict(zip(("name", "path"), (part.strip() for part in raw.split("=", 1)), strict=False))
    given = given if isinstance(given, Mapping) else {}
    name, path = given.get("name"), given.get("path")
    if given.keys() != {"name", "path"} or not all(isinstance(each, str) and each for each in (name, path)):
        why = "An adapter has exactly a name and a path."
        raise ConfigError(f"--lora-modules {raw!r} is not valid.", why, "NAME=PATH", param="lora_modules")
    return LoraModule(str(name), str(path))


def _kind_in_words(name: str, kind: str) -> str:
    if name == "keep_alive":
        return "a time such as 5m, 90s or 300; -1: for ever; 0: unload at once"
    words = {"int": "a whole number such as 8192, 8k or 8K", "float": "a number", "bool": "true or false"}
    return words.get(kind.split()[0].strip("'"), "text")


def _is_network(text: str) -> bool:
    try:
        ipaddress.ip_network(text, strict=False)
    except ValueError:
        return False
    return True


def _require(ok: bool, name: str, value: object, allowed: str) -> None:
    if not ok:
        flag = "--" + name.replace("_", "-")
        raise ConfigError(f"{flag} {value} is out of range.", f"Allowed: {allowed}.", param=name)
