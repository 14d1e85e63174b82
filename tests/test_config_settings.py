"""The table of settings: each has one description, and the bounds it names are those that construction enforces."""

import ast
import inspect
import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from localllm.cli import build_parser, main, parse
from localllm.config.flags import settings_from
from localllm.config.resolve import resolve, unknown_variables
from localllm.config.settings import SETTINGS, EngineConfig, ServerConfig
from localllm.errors import ConfigError
from localllm.llm import LLM

REPOSITORY = Path(__file__).parent.parent


def make(name: str, value: Any) -> EngineConfig | ServerConfig:
    config: Any = EngineConfig if hasattr(EngineConfig(), name) else ServerConfig
    made: EngineConfig | ServerConfig = config(**{name: value})
    return made


@pytest.mark.parametrize("field", [*fields(EngineConfig), *fields(ServerConfig)], ids=lambda field: field.name)
def test_a_setting_describes_itself(field: Any) -> None:
    spec = field.metadata["spec"]
    for text in (spec.group, spec.text):
        assert text.strip() == text != ""
        assert not text.endswith(".")
    assert SETTINGS[field.name].default == field.default
    assert SETTINGS[field.name].meaning.startswith(spec.text)
    assert spec.unset != "none" or "None" not in field.type or field.name in OFF, "say what None means"


OFF = {"revision", "quantization", "api_key", "otlp_traces_endpoint", "ssl_certfile", "ssl_keyfile", "draft"}
"""Settings that are off, or not needed, while they are not set."""


def test_settings_of_one_group_are_neighbours_and_each_text_belongs_to_one_setting() -> None:
    groups = [spec.group for spec in SETTINGS.values()]
    assert sorted(groups, key=groups.index) == groups
    assert len({spec.text for spec in SETTINGS.values()}) == len(SETTINGS)


OTHER = {"model", "keep_alive", "seed"}
"""Names of settings that are also fields of requests and of stored files."""
HEADS_OF_COLUMNS = REPOSITORY / "localllm" / "tuning" / "words.py"


def described_again(tree: ast.AST) -> Iterator[str]:
    """Yield the settings that a module describes: a name, then a text with a space, in a call, a pair or a dict."""
    for node in ast.walk(tree):
        pairs: list[tuple[ast.expr | None, ast.expr]] = []
        if isinstance(node, ast.Call) and len(node.args) > 1:
            pairs = [(node.args[0], node.args[1])]
        elif isinstance(node, ast.Tuple | ast.List) and len(node.elts) > 1:
            pairs = [(node.elts[0], node.elts[1])]
        elif isinstance(node, ast.Dict):
            pairs = [(key, _first_argument(value)) for key, value in zip(node.keys, node.values, strict=True)]
        for key, text in pairs:
            if isinstance(key, ast.Constant) and key.value in SETTINGS.keys() - OTHER and _is_phrase(text):
                yield key.value


def _first_argument(value: ast.expr) -> ast.expr:
    return value.args[0] if isinstance(value, ast.Call) and value.args else value


def _is_phrase(text: ast.expr) -> bool:
    return isinstance(text, ast.Constant) and isinstance(text.value, str) and text.value.count(" ") >= 2


def test_no_other_module_describes_a_setting() -> None:
    found = [
        f"{path.relative_to(REPOSITORY)}: {name}"
        for path in (*REPOSITORY.glob("localllm/**/*.py"), REPOSITORY / "scripts" / "make_docs")
        if path != HEADS_OF_COLUMNS
        for name in described_again(ast.parse(path.read_text(encoding="utf-8")))
    ]
    assert not found
    assert set(described_again(ast.parse('Flag("port", "the port to use"), {"host": Words("where it listens")}'))) == {
        "port",
        "host",
    }


@pytest.fixture(scope="module")
def flags_of_serve() -> list[Any]:
    return build_parser()[1]["serve"]._actions


@pytest.mark.parametrize("spec", [spec for spec in SETTINGS.values() if spec.has_flag], ids=lambda spec: spec.name)
def test_the_flag_says_what_the_table_says(spec: Any, flags_of_serve: list[Any]) -> None:
    [action] = [each for each in flags_of_serve if each.dest == spec.name]
    assert action.help.replace("%%", "%").startswith(spec.meaning)
    assert action.option_strings[0] == spec.flag


@pytest.mark.parametrize("spec", [s for s in SETTINGS.values() if s.low is not None or s.choices], ids=lambda s: s.name)
def test_the_bounds_are_enforced(spec: Any) -> None:
    several = spec.kind == "tuple"
    inside = [*spec.choices, *(bound for bound in (spec.low, spec.high) if bound is not None)]
    outside = [7 if spec.kind == "int" else "other"] if spec.choices else [spec.low - 1]
    outside += [spec.high + 1] if spec.high is not None else []
    for value in inside:
        make(spec.name, (value,) if several else value)
    for value in outside:
        with pytest.raises(ConfigError, match=f"^{spec.flag} {value} is out of range") as refused:
            make(spec.name, (value,) if several else value)
        assert refused.value.param == spec.name
        assert refused.value.why == f"Allowed: {spec.allowed}."


@pytest.mark.parametrize("spec", SETTINGS.values(), ids=lambda spec: spec.name)
def test_a_value_that_was_parsed_may_be_parsed_again(spec: Any) -> None:
    """`localllm run` hands the values of its settings to `LLM`, which parses some of them."""
    values = {"lora_modules": "sql=/a", "api_key": "one,two", "keep_alive": "-1", "max_model_len": "8k", "seed": "7"}
    once = spec.parse(values.get(spec.name, spec.default))
    assert once is not None or spec.default is None
    assert spec.parse(once) == once


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("gpu_memory_utilization", 0.0),
        ("gpu_memory_utilization", 1.01),
        ("gpu_memory_utilization", float("nan")),
        ("otlp_traces_endpoint", "localhost:4318"),
        ("trusted_proxies", ("10.0.0.0/8", "proxy.lan")),
        ("max_num_seqs", None),
    ],
)
def test_other_values_that_are_not_allowed_are_refused(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match="is out of range"):
        make(name, value)


def test_the_offline_api_has_the_defaults_of_the_table() -> None:
    """Its seed is 0, as vLLM's: the same script gives the same answers."""
    parameters = inspect.signature(LLM.__init__).parameters
    shared = (parameters.keys() & SETTINGS.keys()) - {"model", "seed"}
    assert len(shared) > 5
    assert {name: parameters[name].default for name in shared} == {name: SETTINGS[name].default for name in shared}


@pytest.mark.parametrize(
    ("raw", "most"),
    [
        ("image=4,audio=2", (4, 2)), ("audio=0", (100, 0)), ("image=1k", (1000, 32)), ("7", (7, 32)), (3, (3, 32)),
        ('{"image": 4, "audio": 3, "video": 0}', (4, 3)), ({"audio": 1}, (100, 1)), ({}, (100, 32)),
    ],
)  # fmt: skip
def test_media_of_a_request_are_limited_by_kind(raw: Any, most: tuple[int, int]) -> None:
    config = EngineConfig(limit_mm_per_prompt=SETTINGS["limit_mm_per_prompt"].parse(raw))
    assert (config.most_media("image"), config.most_media("audio")) == most


@pytest.mark.parametrize("raw", ["video=3", "image=-1", "image", '{"image": "many"}', "image=4,video=1", [4]])
def test_other_limits_of_media_are_refused(raw: Any) -> None:
    with pytest.raises(ConfigError, match="It must be image=N, audio=N or both"):
        SETTINGS["limit_mm_per_prompt"].parse(raw)


SSL_ERROR = (
    "--ssl-keyfile needs --ssl-certfile. HTTPS needs the certificate that belongs to the private key. "
    "ssl_keyfile is set by {file}."
)


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ('port = "abc"', 'port = "abc" in {file} is not valid. It must be a whole number such as 8192, 8k or 8K.'),
        ("port = 99999", "port = 99999 in {file} is out of range. Allowed: 0 to 65535."),
        ('kv_cache_dtype = "int7"', 'kv_cache_dtype = "int7" in {file} is out of range. Allowed: auto (the '),
        ("prot = 9000", "Unknown setting 'prot' in {file}. Did you mean port? Known: "),
        ("[models.m]\nmax_model_lem = 1",
         "Unknown setting 'max_model_lem' in [models.m] of {file}. Did you mean max_model_len"),
        ('ssl_keyfile = "key.pem"', SSL_ERROR),
    ],
)  # fmt: skip
def test_an_error_of_the_file_names_the_file_and_its_line(tmp_path: Path, line: str, error: str) -> None:
    file = tmp_path / "config.toml"
    file.write_text(line)
    with pytest.raises(ConfigError) as refused:
        resolve({}, {}, file)
    assert str(refused.value).startswith(error.format(file=file))


@pytest.mark.parametrize(
    ("variables", "error"),
    [
        ({"LOCALLLM_PORT": "abc"}, "LOCALLLM_PORT=abc is not valid. It must be a whole number"),
        ({"LOCALLLM_PORT": "99999"}, "LOCALLLM_PORT=99999 is out of range. Allowed: 0 to 65535."),
    ],
)  # fmt: skip
def test_an_error_of_the_environment_names_the_variable(tmp_path: Path, variables: dict[str, str], error: str) -> None:
    with pytest.raises(ConfigError) as refused:
        resolve({}, {"XDG_CONFIG_HOME": str(tmp_path), **variables})
    assert str(refused.value).startswith(error)


def test_a_variable_that_nothing_reads_is_named_with_the_nearest_one() -> None:
    links = {"LOCALLLM_SERVICE_HOST": "10.0.0.1", "LOCALLLM_PORT_8000_TCP": "tcp://10.0.0.1:8000"}
    assert unknown_variables({"LOCALLLM_PROT": "90", "LOCALLLM_PORT": "80", "HOME": "/", **links}) == [
        "The variable LOCALLLM_PROT is not known, and ignored. Did you mean LOCALLLM_PORT?"
    ]


def test_every_variable_that_the_package_or_the_installer_reads_is_known() -> None:
    files = [*REPOSITORY.glob("localllm/**/*.py"), *REPOSITORY.glob("docs/**/*.py"), REPOSITORY / "build_native.py"]
    files += [REPOSITORY / "scripts/_venv.sh", REPOSITORY / "install.sh"]
    text = "".join(file.read_text(encoding="utf-8") for file in files)
    own = {"LOCALLLM_SOURCE_HASH", "LOCALLLM_ROOT"}  # a name in C, and a variable inside a script
    names = set(re.findall(r"LOCALLLM_[A-Z_]+[A-Z]", text)) - own
    assert "LOCALLLM_CPU_SET" in names
    assert unknown_variables(dict.fromkeys(names, "1")) == []


def test_config_show_warns_of_a_variable_that_nothing_reads(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setenv("LOCALLLM_PROT", "90")
    assert main(["config", "show"]) == 0
    assert "Did you mean LOCALLLM_PORT?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "kv_cache_dtype"),
    [
        ("-ctk f16 -ctv f16", "auto"),
        ("-ctk q8_0 -ctv q8_0", "int8"),
        ("--cache-type-k q8_0 --cache-type-v q4_0", "k8v4"),
        ("-ctk q4_0 -ctv q4_0", "int4"),
        ("--kv-cache-dtype int4_per_token_head", "int4_per_token_head"),
    ],
)
def test_types_of_keys_and_values_have_the_names_of_other_servers(words: str, kv_cache_dtype: str) -> None:
    options = parse(["serve", "demo", *words.split()])
    assert settings_from(options, {}).engine.kv_cache_dtype == kv_cache_dtype


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ("-ctk q8_0", "-ctk q8_0 with -ctv f16 is not supported"),
        ("-ctk q4_0 -ctv q8_0", "Supported pairs: -ctk f16 -ctv f16, "),
        ("-ctk q8_0 -ctv q8_0 --kv-cache-dtype int8", "cannot be combined with --kv-cache-dtype"),
    ],
)
def test_other_pairs_of_types_are_refused(words: str, error: str) -> None:
    options = parse(["serve", "demo", *words.split()])
    with pytest.raises(ConfigError, match=re.escape(error)):
        settings_from(options, {})
