"""The list of suggested models: picks.toml beside this file, or the list that the config file names instead.

    date = 2026-11-23            optional in a list of one's own
    [[pick]]
    name = "org/name:Q4_K_M"     what `localllm up` takes
    bytes = 2_740_000_000        of the files to download, and of the weights in a GPU's memory
    parameters = 4_200_000_000
    config = { ... }             of config.json what the memory plan reads: architectures and sizes
    title, says, license         optional, for display
    bytes_per_token              optional: weight bytes that one token reads, fewer than `bytes` in a mixture of experts
    [[speech]]                   a model that transcribes: the same without bytes_per_token; config is optional, and the
                                 expected speed is computed from its sizes

On a CPU quantised matrices keep their bits with the native library, but types of 8 bits lose their scales, and Q5 and
Q6 get 8 bits on a processor with products of bytes; without the library all of them get 8 bits (kernels/cpu/pack.py).
The file name gives the main block type; the bits per parameter give the share of the second type. A tied head in 8 bits
is a second copy: the embedding stays as stored.
Does not know: which entries fit (picks.py), the network.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from datetime import date
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from localllm.config.settings import EngineConfig, PicksTable
from localllm.errors import ConfigError, LocalLLMError
from localllm.machine.hardware import Hardware
from localllm.models.fit import speed
from localllm.models.fit.far import CheckpointBytes, ExpertBytes, LayerExperts
from localllm.models.fit.memory_plan import MemoryPlan, SpeechWork
from localllm.models.fit.plan import make_plan
from localllm.models.fit.shard_sizes import count_shard
from localllm.models.library.names import parse_name
from localllm.models.read_spec import spec_of_config
from localllm.models.spec.model_spec import ModelSpec
from localllm.models.spec.shard import Shard

LIST = Path(__file__).with_name("picks.toml")
FOUR_BITS = {"Q4_0": (4.5, 4.5), "Q4_1": (5.0, 5.0), "Q4_K": (4.5, 5.0)}
"""Main type of a file -> bits per weight in the file, and in RAM with the native library (kernels/cpu/q4.py)."""
OTHER_BITS = 6.5625  # Q6_K, the type of the other matrices of a 4-bit file
BYTE = 8
OLD_AFTER_MONTHS = 12
"""Newer models answer better at the same size, so an older list says so."""


@dataclass(frozen=True)
class Pick:
    """One entry of the list."""

    name: str  # the name for `up`, `run` and `pull`
    bytes: int
    parameters: int
    config: Mapping[str, Any]
    title: str = ""
    says: str = ""  # what it is good for
    license: str = ""
    bytes_per_token: int = 0

    @cached_property
    def spec(self) -> ModelSpec:
        return spec_of_config({"torch_dtype": "bfloat16", **self.config})

    def plan(self, config: EngineConfig, hardware: Hardware) -> MemoryPlan:
        """Plan the model. Raises `DoesNotFit`, and the errors of settings that this model does not support."""

        def resident(
            device: str, dtype: str, max_model_len: int, quantization: str | None, shard: Shard | None = None
        ) -> int:
            whole = self.cpu_bytes(config, dtype) if device == "cpu" else self.bytes
            return whole if shard is None else count_shard(self.spec, shard, whole, dtype)

        def looked_up(device: str, dtype: str) -> float:
            """Return the bytes of a dense model's tables that a token reads a row of."""
            named = self.name, self.bytes, self.parameters, self.bytes_per_token
            read = cpu_read_bytes(*named, config, dtype) if device == "cpu" else self.bytes_per_token
            return resident(device, dtype, 0, None) - read

        is_mixture = self.spec.mixture is not None
        sizes = CheckpointBytes(
            resident,
            self._experts(config) if is_mixture else lambda *_: [],
            looked_up=None if is_mixture else looked_up,
        )
        return make_plan(config, self.spec, self.bytes, hardware, resident_bytes=sizes)

    def _experts(self, config: EngineConfig) -> ExpertBytes:
        """Return the sizes of the experts: what a token does not read is the experts that it does not choose."""
        mixture = self.spec.mixture
        assert mixture is not None
        layers = [layer for layer in range(self.spec.num_layers) if mixture.is_in(layer)]
        whole = (self.bytes - self.bytes_per_token) / (1 - mixture.top_k / mixture.num_experts)

        def experts(device: str, dtype: str, quantization: str | None) -> list[LayerExperts]:
            in_ram = (
                whole * cpu_weight_bytes(self.name, self.bytes, self.parameters, self.spec, config, dtype) / self.bytes
            )
            sizes = int((in_ram if device == "cpu" else whole) / len(layers)), int(in_ram / len(layers))
            return [LayerExperts(layer, *sizes) for layer in layers]

        return experts

    def cpu_bytes(self, config: EngineConfig, dtype: str = "float32") -> int:
        """Return the bytes of the weights in RAM, as a CPU holds them."""
        return cpu_weight_bytes(self.name, self.bytes, self.parameters, self.spec, config, dtype)


@dataclass(frozen=True, slots=True)
class SpeechPick:
    """A suggested model that transcribes."""

    name: str  # the name for `pull` and --speech-model
    bytes: int
    parameters: int
    title: str = ""
    says: str = ""
    license: str = ""
    config: Mapping[str, Any] = field(default_factory=dict)  # of config.json the sizes; empty: its speed is not told

    @property
    def cpu_bytes(self) -> int:
        """Bytes of the weights in RAM, in float32."""
        return 4 * self.parameters

    @property
    def work(self) -> SpeechWork | None:
        """The work of a transcription on a CPU; None: there is no config."""
        halves = speed.has_library()
        stored = 2 if halves and self.bytes < 3 * self.parameters else 4
        return speed.speech_work(self.config, stored, 2 if halves else 4)

    def speed_on(self, hardware: Hardware) -> str:
        """Return the expected speed on the CPU for display, "" if unknown: `about 9 times real time`."""
        found = speed.predict_speech(self.work, "cpu", hardware)
        return "" if found is None else found.words()

    def fits(self, hardware: Hardware) -> bool:
        """Return whether it fits beside a chat model: in a quarter of the free memory of this machine."""
        return self.cpu_bytes <= hardware.ram_available_bytes // 4


@dataclass(frozen=True, slots=True)
class PickList:
    """The entries in the order of the list, largest first, and its age."""

    picks: tuple[Pick, ...]
    written: date | None  # None: a list of one's own that does not say
    source: str  # the file it was read from
    speech: tuple[SpeechPick, ...] = ()  # the best first

    def age_months(self, today: date) -> int:
        """Return the whole months since the list's date; 0 without a date."""
        if self.written is None:
            return 0
        months = 12 * (today.year - self.written.year) + today.month - self.written.month
        return max(0, months - (today.day < self.written.day))

    def is_old(self, today: date) -> bool:
        return self.age_months(today) >= OLD_AFTER_MONTHS


def read_picks(table: PicksTable | None = None) -> PickList:
    """Return the list of the config file's [picks] table; without one, localllm's own. Raises `ConfigError` that names
    the entry and the field that is wrong."""
    if table is None:
        return _own_list()
    if table.file is None:
        return _list(table.entries, None, f"[picks] of {table.source}")
    return _read_file(table.file)


@cache
def _own_list() -> PickList:
    return _read_file(LIST)


def _read_file(path: Path) -> PickList:
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ConfigError(f"Cannot read the list of suggested models {path}.", f"{why}.", "[picks] file") from error
    since, entries = content.get("date"), content.get("pick", [])
    if since is not None and not isinstance(since, date):
        raise ConfigError(f"{path}: date = {since!r} is not a date.", "TOML writes one without quotes: 2026-11-23.")
    speech = content.get("speech", [])
    are_lists = isinstance(entries, list) and isinstance(speech, list)
    if not are_lists or (unknown := sorted(content.keys() - {"date", "pick", "speech"})):
        why = f"Unknown: {unknown[0]!r}." if are_lists else "pick or speech is not a list of tables."
        hint = "It has a date, [[pick]] and [[speech]] tables."
        raise ConfigError(f"{path} is not a list of suggested models.", f"{why} {hint}")
    hear = tuple(_speech_pick(entry, f"{path}, speech {number}") for number, entry in enumerate(speech, 1))
    return replace(_list(entries, since, str(path)), speech=hear)


def _list(entries: Any, since: date | None, source: str) -> PickList:
    picks = tuple(_pick(entry, f"{source}, pick {number}") for number, entry in enumerate(entries, 1))
    return PickList(picks, since, source)


def _pick(entry: Any, where: str) -> Pick:
    """Return one entry. Raises `ConfigError` for a missing, unknown or impossible field."""
    given = _checked(entry, where, Pick)
    pick = Pick(**{"bytes_per_token": given["bytes"], **given})
    _require_possible(pick, where)
    return pick


def _speech_pick(entry: Any, where: str) -> SpeechPick:
    """Return one entry. Raises `ConfigError` as `_pick` does, and for a config without the sizes that a speed needs."""
    pick = SpeechPick(**_checked(entry, where, SpeechPick))
    if pick.config and pick.work is None:
        why = "Supported: Whisper, Moonshine and Parakeet, with architectures and the sizes of config.json."
        raise ConfigError(f"{where}: no speed follows from its config.", why, "Complete the config, or leave it out.")
    return pick


def _checked(entry: Any, where: str, kind_of_pick: type[Pick | SpeechPick]) -> dict[str, Any]:
    """Return the fields of an entry. Raises `ConfigError` for a missing, unknown or impossible one."""
    if not isinstance(entry, Mapping):
        raise ConfigError(f"{where} is not a table.", "An entry is a table [[pick]] with a name and sizes.")
    known = [each.name for each in fields(kind_of_pick)]
    if unknown := sorted(entry.keys() - set(known)):
        raise ConfigError(f"{where}: unknown field {unknown[0]!r}.", f"Known: {', '.join(known)}.")
    for name, kind, is_required in (
        ("name", str, True), ("bytes", int, True), ("parameters", int, True), ("config", Mapping, kind_of_pick is Pick),
        ("title", str, False), ("says", str, False), ("license", str, False), ("bytes_per_token", int, False),
    ):  # fmt: skip
        if name not in entry and is_required and name in known:
            needed = ["name", "bytes", "parameters", *(["config"] if kind_of_pick is Pick else [])]
            raise ConfigError(f"{where} has no {name}.", f"Needed: {', '.join(needed)}.")
        if name in entry and (not isinstance(entry[name], kind) or isinstance(entry[name], bool)):
            expected = {str: "text", int: "a whole number"}.get(kind, "a table")
            raise ConfigError(f"{where}: {name} = {entry[name]!r} is not {expected}.")
        if kind is int and name in entry and entry[name] <= 0:
            raise ConfigError(f"{where}: {name} = {entry[name]} is not positive.")
    found = parse_name(entry["name"])
    if not found.is_repository:
        why = "A suggestion is a model of the hub: ORG/NAME, or ORG/NAME:QUANT for one of several GGUF files."
        raise ConfigError(f"{where}: {entry['name']!r} is not the name of a repository.", why)
    return {"title": found.base.rpartition("/")[2].removesuffix("-GGUF"), **entry}


def _require_possible(pick: Pick, where: str) -> None:
    if pick.bytes_per_token > pick.bytes:
        raise ConfigError(f"{where}: bytes_per_token is more than bytes.", "A token reads each weight once at most.")
    try:
        _ = pick.spec  # worked out here, so that an error names the entry
    except LocalLLMError as error:
        raise ConfigError(f"{where}: its config describes no model that localllm runs.", str(error)) from error


# ---- bytes on a CPU, by name ----------------------------------------------------------------------------------------


def cpu_weight_bytes(
    name: str, stored_bytes: int, parameters: int, spec: ModelSpec, config: EngineConfig, dtype: str
) -> int:
    """Return the bytes of the weights in RAM. dtype: of the activations."""
    return _body_bytes(name, stored_bytes, parameters, config, dtype) + _copied_head(name, spec, config)


def cpu_read_bytes(
    name: str, stored_bytes: int, parameters: int, bytes_per_token: int, config: EngineConfig, dtype: str
) -> float:
    """Return the weight bytes that one token reads from RAM. bytes_per_token: the same in the stored layout."""
    return _body_bytes(name, stored_bytes, parameters, config, dtype) * bytes_per_token / stored_bytes


def _body_bytes(name: str, stored_bytes: int, parameters: int, config: EngineConfig, dtype: str) -> int:
    """Return the bytes of all weights without a second copy of the head."""
    quant = _quant(name)
    if quant is None:
        is_half = dtype != "float32" or (speed.has_library() and config.keeps_half_weights)
        return stored_bytes if is_half else 2 * stored_bytes
    if config.cpu_weights == "exact":
        return stored_bytes
    if _gets_bytes(quant, config):
        return parameters
    four = next((found for kind, found in FOUR_BITS.items() if quant.startswith(kind)), None)
    if four is None:
        return stored_bytes
    stored, held = four
    bits = BYTE * stored_bytes / parameters
    others = min(1.0, max(0.0, (bits - stored) / (OTHER_BITS - stored)))
    held_others = BYTE if _gets_bytes("Q6_K", config) else OTHER_BITS
    return int(parameters * (held * (1 - others) + held_others * others) / BYTE)


def _copied_head(name: str, spec: ModelSpec, config: EngineConfig) -> int:
    quant = _quant(name)
    head = "Q6_K" if quant is not None and quant.startswith(tuple(FOUR_BITS)) else quant  # as llama.cpp stores it
    is_copied = head is not None and config.cpu_weights != "exact" and not speed.has_library()
    return spec.vocab_size * spec.hidden_size if is_copied and spec.tie_word_embeddings else 0


def _gets_bytes(quant: str, config: EngineConfig) -> bool:
    """Return whether matrices of a type have 8 bits in RAM."""
    is_rounded = config.cpu_weights == "fast" and speed.has_byte_products()
    return not speed.has_library() or quant.startswith(("Q8", "Q5", "Q6") if is_rounded else "Q8")


def _quant(name: str) -> str | None:
    """Return the type in a name, as Q4_K_M; None: the checkpoint has 16 bits."""
    quant = (parse_name(name).quant or "").upper().removeprefix("UD-")
    return None if quant in ("", "BF16", "F16", "FP16") else quant
