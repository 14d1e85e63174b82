"""The command line: what each word means, what is refused and how, what comes out."""

import json
import math
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from localllm.cli import VERBS, build_parser, doctor, findings, main, parse
from localllm.config import flags
from localllm.config.flags import FLAGS, help_of, settings_from
from localllm.config.resolve import resolve
from localllm.config.settings import EngineConfig, ServerConfig
from localllm.config.unsupported import UNSUPPORTED
from localllm.errors import ConfigError, LocalLLMError
from localllm.machine import processes
from localllm.units import parse_keep_alive

FIELDS = [field.name for config in (EngineConfig, ServerConfig) for field in fields(config)]


@pytest.fixture(autouse=True)
def no_settings_of_this_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Neither this user's config file nor environment decides a test."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in ("HOST", "PORT", "API_KEY", "MODEL", "CONFIG", "LOG_LEVEL", "ORIGINS", "ALLOWED_HOSTS"):
        monkeypatch.delenv(f"LOCALLLM_{name}", raising=False)


# ---- words -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FIELDS)
def test_every_setting_has_a_flag(name: str) -> None:
    assert name == "model" or name in {spec.name for spec in FLAGS}


@pytest.mark.parametrize(
    ("words", "name", "value"),
    [
        ("demo", "model", "demo"),
        ("--revision v2", "revision", "v2"),
        ("--device cuda:1", "device", "cuda:1"),
        ("--dtype bfloat16", "dtype", "bfloat16"),
        ("--max-model-len 8k", "max_model_len", 8000),
        ("--ctx 8K", "max_model_len", 8192),
        ("--max-model-len auto", "max_model_len", None),
        ("-c 4096", "max_model_len", 4096),
        ("--max-num-seqs 8", "max_num_seqs", 8),
        ("-np 8", "max_num_seqs", 8),
        ("--parallel=8", "max_num_seqs", 8),
        ("--max-num-batched-tokens 1024", "max_num_batched_tokens", 1024),
        ("--long-prefill-token-threshold 256", "long_prefill_token_threshold", 256),
        ("--block-size 32", "block_size", 32),
        ("--gpu-memory-utilization 0.5", "gpu_memory_utilization", 0.5),
        ("--kv-cache-memory-bytes 1GiB", "kv_cache_memory_bytes", 2**30),
        ("--enable-prefix-caching", "enable_prefix_caching", True),
        ("--no-enable-prefix-caching", "enable_prefix_caching", False),
        ("--scheduling-policy priority", "scheduling_policy", "priority"),
        ("--max-num-queued-reqs 5", "max_num_queued_reqs", 5),
        ("--async-scheduling", "async_scheduling", True),
        ("--enforce-eager", "enforce_eager", True),
        ("--torch-profiler-dir traces", "torch_profiler_dir", "traces"),
        ("--generation-config vllm", "generation_config", "vllm"),
        ("--trust-remote-code", "trust_remote_code", True),
        ("--quantization awq", "quantization", "awq"),
        ("-tp 2", "tensor_parallel_size", 2),
        ("--seed 7", "seed", 7),
        ("--host 127.0.0.2", "host", "127.0.0.2"),
        ("--port 9000", "port", 9000),
        ("--api-key secret", "api_key", ("secret",)),
        ("--api-key one --api-key two,three", "api_key", ("one", "two,three")),
        ("--ssl-certfile cert.pem", "ssl_certfile", "cert.pem"),
        ("--ssl-certfile cert.pem --ssl-keyfile key.pem", "ssl_keyfile", "key.pem"),
        ("--otlp-traces-endpoint http://h:4318", "otlp_traces_endpoint", "http://h:4318"),
        ("--rate-limit 60", "rate_limit", 60),
        ("--max-concurrent-requests 4", "max_concurrent_requests", 4),
        ("--served-model-name m,n", "served_model_name", ("m", "n")),
        ("--alias m --alias n", "served_model_name", ("m", "n")),
        ("--allowed-hosts a.lan,b.lan", "allowed_hosts", ("a.lan", "b.lan")),
        ("--metrics-aliases vllm,llamacpp", "metrics_aliases", ("vllm", "llamacpp")),
        ("--share-prefix-cache", "share_prefix_cache", True),
        ("--allowed-origins http://a", "allowed_origins", ("http://a",)),
        ("--no-ui", "ui", False),
        ("--open", "open_browser", True),
        ("--log-level debug", "log_level", "debug"),
    ],
)
def test_flag_sets_its_setting(words: str, name: str, value: object) -> None:
    settings = settings_from(parse(["up", *words.split()]))
    assert settings.value(name) == value
    assert settings.source(name) == "flag"


def test_settings_not_given_stay_open_to_environment_and_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCALLLM_PORT", "9001")
    settings = settings_from(parse(["up"]))
    assert (settings.server.port, settings.source("port")) == (9001, "environment")
    assert settings.engine == EngineConfig()


def test_config_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text('max-num-seqs = 3\nmodel = "there"\n')
    settings = settings_from(parse(["serve", "here", "--config", str(tmp_path / "mine.toml")]))
    assert (settings.engine.max_num_seqs, settings.engine.model) == (3, "here")


def test_the_command_that_people_bring_from_vllm_is_understood() -> None:
    words = (
        "serve MODEL --host 0.0.0.0 --port 8000 --api-key KEY --gpu-memory-utilization 0.9 --max-model-len 32768 "
        "--max-num-seqs 32 --tensor-parallel-size 4 --quantization awq --enable-prefix-caching --enforce-eager "
        "--trust-remote-code --enable-chunked-prefill"
    )
    settings = settings_from(parse(words.split()))
    assert (settings.engine.model, settings.engine.quantization, settings.server.host) == ("MODEL", "awq", "0.0.0.0")


@pytest.mark.parametrize(
    ("words", "model"),
    [
        ([], None),
        (["--port", "9"], None),
        (["./m"], "./m"),
        (["org/name", "--port", "9"], "org/name"),
        (["demo"], "demo"),
    ],
)
def test_up_is_the_verb_when_none_is_given(words: list[str], model: str | None) -> None:
    assert parse(words).model == model
    assert "json" in parse(words)


def test_flags_may_stand_between_model_and_prompt() -> None:
    options = parse(["run", "demo", "--temperature", "0", "a prompt"])
    assert (options.model, options.prompt, options.temperature) == ("demo", "a prompt", 0.0)


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_leads_to_a_function(verb: str) -> None:
    assert callable(build_parser(verb)[1][verb].get_default("handler"))


def test_help_needs_nothing_heavy() -> None:
    code = (
        "import sys; from localllm.cli import build_parser; build_parser(); "
        "print([m for m in ('torch', 'litestar', 'rich', 'transformers', 'numpy', 'asyncio') if m in sys.modules])"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "[]"


# ---- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ("sevre demo", 2, "Unknown verb 'sevre'.\nVerbs: up, "),
        (
            "up --max-modl-len 8",
            2,
            "Unknown flag --max-modl-len.\nDid you mean --max-model-len?\nTry: localllm up --help",
        ),
        ("up --no-browser", 2, "Unknown flag --no-browser.\nDid you mean --no-open-browser?"),
        (
            "up --num-gpu-blocks-override 4",
            2,
            "--num-gpu-blocks-override is not supported.\nUse kv_cache_memory_bytes ",
        ),
        ("serve demo --kv-transfer-config={}", 2, "--kv-transfer-config is not supported."),
        ("up --speculative mtpp", 2, "--speculative mtpp is out of range."),
        ("up --no-enable-chunked-prefill", 2, "--no-enable-chunked-prefill is not supported."),
        ("up --model demo", 2, "There is no --model flag: pass the model as an argument.\nTry: localllm up MODEL"),
        ("up one two", 2, "Unexpected argument 'two'."),
        ("up --port", 2, "Argument --port: expected one argument."),
        ("up --port 99999", 2, "--port 99999 is out of range."),
        ("up --port http", 2, "--port 'http' is not valid."),
        ("up --max-num-seqs 0", 2, "--max-num-seqs 0 is out of range."),
        ("up --gpu-memory-utilization 1.5", 2, "--gpu-memory-utilization 1.5 is out of range."),
        ("up --host 0.0.0.0", 2, "Refusing to listen on 0.0.0.0 without a key."),
        ("up --ssl-keyfile key.pem", 2, "--ssl-keyfile needs --ssl-certfile."),
        ("up --ssl-certfile nowhere.pem", 2, "Cannot read nowhere.pem.\nNo such file or directory."),
        ("up --otlp-traces-endpoint h:4317", 2, "--otlp-traces-endpoint h:4317 is out of range."),
        ("up --config nowhere.toml", 2, "Config file nowhere.toml does not exist."),
        ("run", 2, "localllm run needs a model."),
        ("bench speed", 2, "Argument kind: invalid choice: 'speed'"),
        ("bench serve --num-requests 0 --url http://127.0.0.1:9", 2, "--num-requests must be at least 1."),
        ("show no/such-model", 5, ""),
        ("show ./no-such-folder", 5, "The path './no-such-folder' does not exist."),
    ],
)
def test_refusal_says_what_why_and_what_to_try(
    words: str, code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words.split()) == code
    out, err = capsys.readouterr()
    assert err.startswith(said)
    assert "Traceback" not in err
    assert not out
    assert 1 <= len(err.splitlines()) <= 3


def test_unsupported_options_and_settings_are_different_things() -> None:
    known = {flag for parser in build_parser()[1].values() for flag in parser._option_string_actions}
    assert not {name for name in UNSUPPORTED if "--" + name.replace("_", "-") in known} - {"enable_chunked_prefill"}
    assert not set(UNSUPPORTED) & set(FIELDS)
    assert all(reason.endswith(".") for reason in UNSUPPORTED.values())


def test_an_error_of_our_own_shows_no_traceback_unless_asked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(flags, "resolve", lambda *args, **kwargs: 1 / 0)
    assert main(["up"]) == 1
    assert capsys.readouterr().err == (
        "localllm failed with an unexpected error.\nZeroDivisionError: division by zero\n"
        "Try: the same command with --debug\n"
    )
    assert main(["up", "--debug"]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_ctrl_c_ends_with_the_code_that_shells_expect(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(flags, "resolve", interrupt)
    assert main(["up"]) == 130


def test_every_argument_has_help_that_names_its_default_once() -> None:
    actions = [each for parser in build_parser()[1].values() for each in parser._actions]
    assert [each.dest for each in actions if not each.help] == []
    helps = [help_of(each) for each in actions]
    assert [help for help in helps if help.count("default: ") > 1] == []
    assert "number of requests; default: 100" in helps


@pytest.mark.parametrize("option", ["--help", "--version"])
def test_help_and_version_end_well(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([option])
    assert ended.value.code == 0
    assert "localllm" in capsys.readouterr().out


# ---- verbs that tell -------------------------------------------------------------------------------------------------


def test_config_show_names_each_source_and_hides_the_key(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LOCALLLM_API_KEY", "very-secret")
    assert main(["config", "show", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert list(shown) == FIELDS
    assert shown["api_key"] == {"value": "(set)", "source": "environment"}
    assert shown["port"] == {"value": 8000, "source": "default"}
    assert main(["config"]) == 0
    assert "very-secret" not in capsys.readouterr().out


def test_config_show_prints_values_as_they_are_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('lora_modules = { sql = "/a" }\nmax_body_bytes = "16MiB"\nkeep_alive = -1\n')
    assert main(["config", "--config", str(file)]) == 0
    rows = {line.split("  ")[0]: line.split("  ", 1)[1].strip() for line in capsys.readouterr().out.splitlines()[1:]}
    assert rows["lora_modules"].split() == ["sql=/a", "file"]
    assert rows["max_body_bytes"].startswith("16 MiB  ")
    assert rows["keep_alive"].startswith("for ever  ")
    assert rows["rate_limit"].startswith("no limit  ")


def test_config_path_is_where_settings_are_read_from(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "path"]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "localllm" / "config.toml")


def test_version_tells_what_it_runs_on(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["version", "--json"]) == 0
    assert {"localllm", "python", "torch", "transformers"} <= set(json.loads(capsys.readouterr().out))


def test_show_tells_what_a_checkpoint_says(tiny_llama_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", str(tiny_llama_path)]) == 0
    assert "LlamaForCausalLM" in capsys.readouterr().out
    assert main(["show", str(tiny_llama_path), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["spec"]["num_layers"] == 2
    assert told["weights_bytes"] > 100_000


def test_list_finds_the_cache(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tiny_llama_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / "models--some--model"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("abc123")
    (repository / "snapshots").mkdir()
    (repository / "snapshots" / "abc123").symlink_to(tiny_llama_path)
    assert main(["list", "--json"]) == 0
    assert "some/model" in [model["name"] for model in json.loads(capsys.readouterr().out)]
    assert main(["list"]) == 0
    assert "some/model" in capsys.readouterr().out


# ---- doctor ----------------------------------------------------------------------------------------------------------


def test_doctor_tells_what_keeps_a_gpu_from_being_used(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    import torch

    import localllm.machine.gpu_support

    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "file" / "cache"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    old = localllm.machine.gpu_support.GpuProblem("Tesla P100 has compute capability 6.0.", "--device cpu")
    monkeypatch.setattr(localllm.machine.gpu_support, "gpu_problems", lambda: [old])
    monkeypatch.setattr(doctor, "CHECKS", (doctor.check_gpu_use,))
    assert main(["doctor"]) == 1
    said = capsys.readouterr().out
    assert "Tesla P100 has compute capability 6.0." in said
    assert "Try: --device cpu" in said
    assert "Set TRITON_CACHE_DIR to another folder." in said


def test_doctor_finds_nothing_in_the_way_here(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["doctor", "--json"])
    findings = {finding["subject"]: finding for finding in json.loads(capsys.readouterr().out)}
    assert {"python", "torch", "cpu", "cpu library", "memory", "disk", "settings", "port"} <= set(findings)
    assert code == int(any(finding["verdict"] == "problem" for finding in findings.values()))


def test_doctor_shows_the_native_library_or_why_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    from localllm.cli import doctor_machine

    monkeypatch.setattr(doctor_machine, "chosen_set", lambda: ("avx2", ""))
    monkeypatch.setattr(doctor_machine, "why_unusable", lambda name: "")
    assert [(each.verdict, each.text) for each in doctor.check_native()] == [("ok", "native, compiled for avx2")]
    monkeypatch.setattr(doctor_machine, "why_unusable", lambda name: "The compiled libraries are older.")
    assert [each.verdict for each in doctor.check_native()] == ["note"]
    monkeypatch.setattr(doctor_machine, "chosen_set", lambda: ("", "LOCALLLM_CPU_SET=none is set."))
    [finding] = doctor.check_native()
    assert finding.verdict == "note"
    assert finding.text.endswith("LOCALLLM_CPU_SET=none is set.")


def test_a_check_that_breaks_is_a_finding_and_the_others_still_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def check_moon() -> None:
        raise LocalLLMError("No moon.", "It is day.", "wait")

    monkeypatch.setattr(doctor, "CHECKS", (check_moon, doctor.check_python))
    assert main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "moon" in out
    assert "Try: wait" in out
    assert "Python 3" in out


def test_report_names_neither_user_nor_machine(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(findings.Path, "home", lambda: Path("/home/somebody"))
    monkeypatch.setattr(findings.socket, "gethostname", lambda: "their-machine")
    found = doctor.Finding("disk", "ok", "free in /home/somebody/.cache on their-machine")
    monkeypatch.setattr(doctor, "CHECKS", (lambda: iter([found]),))
    assert main(["doctor", "--report"]) == 0
    out = capsys.readouterr().out
    assert "free in ~/.cache on HOST" in out
    assert "somebody" not in out


# ---- threads ---------------------------------------------------------------------------------------------------------


def test_thread_environment_is_set_and_the_users_choice_stays() -> None:
    environ = {"OMP_NUM_THREADS": "3"}
    processes.set_thread_environment(environ)
    assert environ == {"OMP_NUM_THREADS": "3", "GOMP_SPINCOUNT": "10000"}
    environ = {}
    processes.set_thread_environment(environ)
    assert int(environ["OMP_NUM_THREADS"]) >= 1


# ---- tables of models ------------------------------------------------------------------------------------------------

TABLES = """
keep_alive = "10m"
[models.fast]
model = "org/small"
alias = ["small", "tiny"]
max-model-len = "8K"
pin = true
[models."org/big"]
keep_alive = -1
kv_cache_dtype = "int8"
deterministic = true
"""


def test_each_model_has_settings_of_its_own(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text(TABLES)
    said = {"model": "fast", "max_num_seqs": 4, "max_model_len": 100, "revision": "v2", "trust_remote_code": True}
    settings = resolve(said, {}, file)
    assert settings.server.keep_alive == 600
    first = settings.of_first_model()
    assert (first.engine.model, first.engine.max_model_len, first.engine.max_num_seqs) == ("org/small", 100, 4)
    assert first.server.served_model_name == ("fast", "small", "tiny")
    table = settings.table("tiny")
    assert table is not None
    assert (table.pin, table.keep_alive) == (True, None)
    asked = settings.of_model("small")
    assert (asked.engine.model, asked.engine.max_model_len, asked.engine.max_num_seqs) == ("org/small", 8192, 4)
    big = settings.of_model("org/big")
    assert (big.engine.model, big.engine.max_model_len, big.engine.kv_cache_dtype) == ("org/big", None, "int8")
    assert (big.engine.deterministic, asked.engine.deterministic) == (True, False)
    assert settings.table("org/big").keep_alive == math.inf  # type: ignore[union-attr]
    other = settings.of_model("another")
    assert (other.engine.revision, other.engine.max_num_seqs, other.engine.offline) == (None, 4, True)
    assert first.engine.trust_remote_code
    assert not other.engine.trust_remote_code  # one checkpoint's code was trusted, not everybody's


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("models = 3", "must be a table of tables"),
        ("[models.a]\nhost = 'b'", r"Unknown setting 'host' in \[models.a\]"),
        ("[models.a]\nmax_num_seqs = 0", r"max_num_seqs = 0 in \[models.a\] of /.*/config.toml is out of range"),
        ('[models.a]\nkeep_alive = "soon"', "It must be a time such as 5m"),
    ],
)
def test_tables_that_are_wrong(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "config.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message):
        resolve({}, {}, file)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("5m", 300), ("1h30m", 5400), ("90s", 90), ("250ms", 0.25), ("7", 7), (0, 0), ("-1", math.inf), (-1, math.inf),
     ("-1m", math.inf)],
)  # fmt: skip
def test_keep_alive_times(text: str | int, seconds: float) -> None:
    assert parse_keep_alive(text) == seconds


@pytest.mark.parametrize("text", ["", "soon", "5 minutes", "m", True, float("nan")])
def test_times_that_are_none(text: str | float) -> None:
    with pytest.raises(ValueError):
        parse_keep_alive(text)
