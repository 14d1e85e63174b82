"""Programs that people point at a local server, as npm has them: each ends a turn that calls two tools.

A program runs in an empty home, in a folder with two files. The model is scripted (scripted_server.py). It passes
if it prints the model's last answer, which the model gives only after it has read both files.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from urllib.request import urlopen

from scripted_server import DONE, FILES

from localllm.cli.programs import PROGRAMS as LAUNCHED

QUESTION = "Read first.txt and second.txt, one after the other, with a shell command each, and tell me both words."
HELLO = "Say hello."
PROGRAM_S, INSTALL_S = 240, 900


@dataclass(frozen=True, slots=True)
class Program:
    """One program. `{url}`, `{home}` and `{question}` in its command, its environment and its files are replaced."""

    package: str
    binary: str
    command: Sequence[str]
    environ: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)  # path in its home -> content
    launch: str = ""  # its name for `localllm launch`, which then configures it; empty: started directly


PROGRAMS: Mapping[str, Program] = {
    "claude": Program(
        "@anthropic-ai/claude-code", "claude", ["-p", "{question}", "--allowedTools", "Bash"], launch="claude"
    ),
    "codex": Program(
        "@openai/codex", "codex",
        ["exec", "--skip-git-repo-check", "--sandbox", "danger-full-access", "{question}"], launch="codex",
    ),
    "codex --oss": Program(
        "@openai/codex", "codex",
        ["exec", "--skip-git-repo-check", "--sandbox", "danger-full-access", "--oss", "--local-provider", "ollama",
         "-m", "tiny", "{question}"],
        {"CODEX_OSS_BASE_URL": "{url}/v1"},
    ),
    "opencode": Program(
        "opencode-ai", "opencode", ["run", "{question}"], {"OPENCODE_DISABLE_AUTOUPDATE": "1"}, launch="opencode"
    ),
    "copilot": Program("@github/copilot", "copilot", ["-p", "{question}", "--allow-all-tools"], launch="copilot"),
    "qwen": Program("@qwen-code/qwen-code", "qwen", ["-p", "{question}", "--yolo"], launch="qwen"),
    "cn": Program(
        "@continuedev/cli", "cn", ["-p", "{question}", "--config", "{home}/config.yaml", "--auto"],
        {"CONTINUE_TELEMETRY_ENABLED": "0"},
        {"config.yaml": "name: local\nversion: 0.0.1\nschema: v1\nmodels:\n  - name: tiny\n    provider: ollama\n"
                        "    model: tiny\n    apiBase: {url}\n    roles: [chat]\n"
                        "    capabilities: [tool_use]\n    defaultCompletionOptions: {contextLength: 100000}\n"},
    ),
    "cline": Program("cline", "cline", ["--auto-approve", "true", "{question}"], launch="cline"),
}  # fmt: skip


SETTINGS: Mapping[str, Mapping[str, str]] = {
    "claude": {".claude/settings.json": '{"cleanupPeriodDays": 7}\n'},
    "codex": {".codex/config.toml": 'model = "of-the-user"  # stays\n'},
    "opencode": {
        ".config/opencode/opencode.json": '{"$schema": "https://opencode.ai/config.json", "share": "disabled"}\n'
    },
    "copilot": {},
    "qwen": {},
    "cline": {},
}
"""Settings of a user, for the programs that `localllm launch` starts: path in the home, and content."""


@dataclass(frozen=True, slots=True)
class Turn:
    """How a program ended its turn: `why` it failed, or None."""

    version: str
    seconds: float
    why: str | None = None


def install(name: str, folder: Path, *, upgrade: bool) -> str | None:
    """Install a program, unless it is; return why it could not be installed."""
    program = PROGRAMS[name]
    place = folder / program.binary
    if (place / "node_modules" / ".bin" / program.binary).exists() and not upgrade:
        return None
    place.mkdir(parents=True, exist_ok=True)
    command = ["npm", "install", "--no-audit", "--no-fund", "--loglevel=error", "--prefix", str(place), program.package]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{error}"
    return done.stderr.strip()[-300:] if done.returncode else None


@contextmanager
def scripted_server() -> Iterator[str]:
    """Start the server with the scripted model, and yield its URL."""
    command = [sys.executable, str(Path(__file__).with_name("scripted_server.py"))]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log)
        assert process.stdout is not None
        try:
            yield str(json.loads(process.stdout.readline())["url"])
        finally:
            process.communicate(timeout=30)


def run(
    name: str, folder: Path, url: str, question: str = QUESTION, expected: str = DONE, within: Path | None = None
) -> Turn:
    """Let a program answer a question, in a home and a folder of its own, or in those that an earlier run made."""
    program = PROGRAMS[name]
    binary = folder / program.binary / "node_modules" / ".bin" / program.binary
    with tempfile.TemporaryDirectory(prefix=f"{program.binary}-") as place:
        home, work = (within or Path(place)) / "home", (within or Path(place)) / "work"
        work.mkdir(exist_ok=True)
        for file, content in FILES.items():
            (work / file).write_text(content + "\n", encoding="utf-8")

        def filled(text: str) -> str:
            return text.replace("{url}", url).replace("{home}", str(home)).replace("{question}", question)

        for file, content in program.files.items():
            (home / file).parent.mkdir(parents=True, exist_ok=True)
            (home / file).write_text(filled(content), encoding="utf-8")
        home.mkdir(exist_ok=True)
        environ = {"PATH": os.environ["PATH"], "HOME": str(home), "TERM": "dumb", "CI": "1", "NO_COLOR": "1"}
        environ |= {key: filled(value) for key, value in program.environ.items()}
        command = [str(binary), *map(filled, program.command)]
        if program.launch:
            environ["PATH"] = f"{binary.parent}{os.pathsep}{environ['PATH']}"
            command[:1] = [
                sys.executable,
                "-m",
                "localllm",
                "launch",
                program.launch,
                "--url",
                url,
                "--model",
                "tiny",
                "--",
            ]
        version = _version(binary, environ, work)
        started = time.monotonic()
        try:
            done = subprocess.run(
                command, cwd=work, env=environ, stdin=subprocess.DEVNULL, capture_output=True, text=True,
                timeout=PROGRAM_S, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return Turn(version, PROGRAM_S, f"not done after {PROGRAM_S} s")
        seconds = time.monotonic() - started
        changed = [file.path for file in LAUNCHED[program.launch].files] if program.launch else []
        ours = [home / path.relative_to(Path.home()) for path in changed]
        left = [path.name for path in ours if path.exists() and url in path.read_text(encoding="utf-8")]
        left += [str(path) for path in home.glob(".local/share/localllm/launch/*")]
        if expected in done.stdout:
            return Turn(version, seconds, f"left behind: {left}" if left else None)
        return Turn(version, seconds, f"exit {done.returncode}: {(done.stdout + done.stderr).strip()[-600:]}")


def launch_demo(name: str, folder: Path, model: Path) -> Turn:
    """Let `localllm launch` start a server with a model and then a program, in a home that has settings of the program.
    It fails unless the program answers, its settings are as before, and no file, server or folder is left but what the
    program and localllm keep for themselves."""
    program = PROGRAMS[name]
    binary = folder / program.binary / "node_modules" / ".bin" / program.binary
    with tempfile.TemporaryDirectory(prefix=f"{program.binary}-") as place:
        home, work, temporary = (Path(place) / each for each in ("home", "work", "tmp"))
        for each in (home, work, temporary):
            each.mkdir()
        for path, content in SETTINGS[name].items():
            (home / path).parent.mkdir(parents=True, exist_ok=True)
            (home / path).write_text(content, encoding="utf-8")
        subprocess.run(["git", "init", "--quiet", str(work)], check=True)  # codex starts in no other folder
        environ = {"PATH": f"{binary.parent}{os.pathsep}{os.environ['PATH']}", "HOME": str(home), "TERM": "dumb",
                   "TMPDIR": str(temporary), "CI": "1", "NO_COLOR": "1"}  # fmt: skip
        command = [sys.executable, "-m", "localllm", "launch", program.launch, "--model", str(model), "--",
                   *(word.replace("{question}", HELLO) for word in program.command)]  # fmt: skip
        started = time.monotonic()
        try:
            done = subprocess.run(command, cwd=work, env=environ, stdin=subprocess.DEVNULL, capture_output=True,
                                  text=True, timeout=PROGRAM_S, check=False)  # fmt: skip
        except subprocess.TimeoutExpired:
            return Turn("?", PROGRAM_S, f"not done after {PROGRAM_S} s")
        seconds, version = time.monotonic() - started, _version(binary, environ, work)
        ours, data = LAUNCHED[program.launch], home / ".local/share/localllm"
        left = [str(path) for path in [*data.glob("launch/*"), *data.glob("run/*"), *temporary.glob("localllm-*")]]
        left += [f"{path} (changed)" for path, content in SETTINGS[name].items()
                 if (home / path).read_text(encoding="utf-8") != content]  # fmt: skip
        files = [home / file.path.relative_to(Path.home()) for file in ours.files]
        # Cline keeps a file of its own in this place.
        left += [str(path) for path in files if path.exists() and "http://127.0.0.1" in path.read_text("utf-8")]
        if done.returncode or not done.stdout.strip():
            return Turn(version, seconds, f"exit {done.returncode}: {(done.stdout + done.stderr).strip()[-600:]}")
        return Turn(version, seconds, f"left behind: {', '.join(left)}" if left else None)


def _version(binary: Path, environ: Mapping[str, str], work: Path) -> str:
    asked = subprocess.run([binary, "--version"], env=environ, cwd=work, capture_output=True, text=True, timeout=60,
                           stdin=subprocess.DEVNULL, check=False)  # fmt: skip
    found = re.search(r"\d+\.\d+\.\d+", asked.stdout + asked.stderr)
    return found[0] if found else "?"


def table(turns: Mapping[str, Turn], share: float | None) -> str:
    """Return the results as a table. `share`: of Claude Code's prompt that its second session reused."""
    today = date.today().isoformat()
    lines = ["| program | version | date | a turn with two tools | s |", "| --- | --- | --- | --- | --: |"]
    for name, turn in turns.items():
        result = "**failed**" if turn.why else "ends"
        lines.append(f"| {name} | {turn.version} | {today} | {result} | {turn.seconds:.0f} |")
    passed = sum(turn.why is None for turn in turns.values())
    lines += ["", f"{passed} of {len(turns)} programs end the turn."]
    if share is not None:
        lines.append(
            f"A second session of Claude Code in one folder takes {share:.2%} of its prompt from the prefix cache."
        )
    return "\n".join(lines)


def page(table: str) -> str:
    """Return the reference page around a table."""
    return (
        "# Programs that were tried\n\n"
        "<!-- Written by scripts/client_check --programs --write. -->\n\n"
        "Each program ran as npm has it, in an empty home, most of them by `localllm launch`. It was asked to read\n"
        "two files with a tool, and ended the turn if it printed the answer that the scripted model gives only after\n"
        "its prompt had both contents. Seconds include the start of the program, on one busy machine.\n\n"
        f"{table}\n"
    )


def reused(folder: Path, url: str) -> float:
    """Return the share of Claude Code's prompt that a second session reuses of the first one."""
    tokens: list[tuple[float, float]] = []
    with tempfile.TemporaryDirectory(prefix="claude-") as place:
        for _ in range(2):
            turn = run("claude", folder, url, HELLO, "Hello.", Path(place))
            assert turn.why is None, turn.why
            tokens.append(_prefix_counts(url))
    (hits, queries), (more_hits, more_queries) = tokens
    cached, computed = more_hits - hits, more_queries - queries
    return cached / max(cached + computed, 1)


def _prefix_counts(url: str) -> tuple[float, float]:
    """Return the prompt tokens from the prefix cache, and those that were computed."""
    with urlopen(f"{url}/metrics", timeout=30) as answer:
        text = answer.read().decode()
    totals: Callable[[str], float] = lambda name: sum(  # noqa: E731
        float(value) for value in re.findall(rf"^{name}_total\S* (\S+)$", text, re.MULTILINE)
    )
    return totals("localllm:prompt_tokens_cached"), totals("localllm:prompt_tokens")
