"""The coding programs that `localllm launch` starts, and what each needs to use a server: one table.

The verb, its `--print` and the guide docs/guides/programs.md read it. Texts contain the `PLACEHOLDERS`, which `filled`
replaces. docs/reference/clients.md lists the programs that were run; the other entries name their `sources`.
Does not know: where a server runs, how a program is started or a file is restored (launch.py, borrowed_files.py).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from localllm.files.folders import config_home

PLACEHOLDERS = ("url", "key", "model", "context", "input", "output", "tools", "vision", "catalog")
MAX_OUTPUT = 16_384
"""Most tokens of an answer for which a program reserves room."""
CATALOG, CATALOG_PATH = "{catalog}", "/v1/models?client_version=1"
"""The placeholder for a temporary file, and the list that it holds: the server's models as Codex describes models."""


@dataclass(frozen=True, slots=True)
class Served:
    """The server and the model that a program will use. context: tokens; None: unknown until the model is loaded."""

    url: str
    key: str
    model: str
    context: int | None
    capabilities: Sequence[str] | None = None  # of GET /v1/models; None: not told
    catalog: str | None = None  # path of a file with `CATALOG_PATH`'s answer

    @property
    def output(self) -> int | None:
        """The share of the context, in tokens, for programs that reserve room for each answer."""
        return None if self.context is None else min(self.context // 4, MAX_OUTPUT)

    def value(self, name: str) -> Any:
        """Return the value of a placeholder."""
        if name == "input":
            return None if self.output is None or self.context is None else self.context - self.output
        if name in ("tools", "vision"):
            return self.capabilities is None or name in self.capabilities
        return getattr(self, name)


@dataclass(frozen=True, slots=True)
class ProgramFile:
    """A JSON file of a program that has no variable for the same. `content` is merged into what the file has."""

    folder: str  # ~ (home), config (XDG_CONFIG_HOME) or vscode (the folder of the user's settings)
    name: str
    content: Any

    @property
    def path(self) -> Path:
        roots = {"~": Path.home, "config": config_home, "vscode": _vscode_folder}
        return roots[self.folder]() / self.name

    @property
    def shown(self) -> str:
        """The path on Linux, for documentation."""
        return {"~": "~/", "config": "~/.config/", "vscode": "~/.config/Code/User/"}[self.folder] + self.name


@dataclass(frozen=True, slots=True)
class Program:
    """A program. `arguments` come before the user's arguments."""

    title: str
    binary: str
    install: str  # the command that installs it, or where to get it
    example: str  # arguments of the user in an example
    environ: Mapping[str, Any] = field(default_factory=dict)  # a value that is not a text is written as JSON
    arguments: Sequence[str] = ()
    files: Sequence[ProgramFile] = ()
    default_arguments: Sequence[str] = ()  # added where the user gives none
    prompt_tokens: int = 0  # of its own prompt, as the demo's tokenizer counts them; 0: not measured
    hint: str = ""  # what the user has to do, told at each launch
    note: str = ""  # for the guide
    sources: str = ""  # public documentation and code that an entry, or a part of it, was written from


_CODEX_PROVIDER = (
    'model_providers.localllm={name="localllm",base_url="{url}/v1",wire_api="responses",'
    'env_key="LOCALLLM_LAUNCH_API_KEY"}'
)

PROGRAMS: Mapping[str, Program] = {
    "claude": Program(
        "Claude Code", "claude", "npm install -g @anthropic-ai/claude-code", '-p "What does this folder hold?"',
        {
            "ANTHROPIC_BASE_URL": "{url}", "ANTHROPIC_API_KEY": "", "ANTHROPIC_AUTH_TOKEN": "{key}",
            "ANTHROPIC_MODEL": "{model}", "ANTHROPIC_DEFAULT_OPUS_MODEL": "{model}",
            "ANTHROPIC_DEFAULT_SONNET_MODEL": "{model}", "ANTHROPIC_DEFAULT_HAIKU_MODEL": "{model}",
            "CLAUDE_CODE_SUBAGENT_MODEL": "{model}", "CLAUDE_CODE_AUTO_COMPACT_WINDOW": "{context}",
            "CLAUDE_CODE_ATTRIBUTION_HEADER": "0", "CLAUDE_CODE_TOTAL_TOKENS_REMINDER": "off",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        },
        note="`CLAUDE_CODE_AUTO_COMPACT_WINDOW` tells it the served context; without it, it assumes 200,000 tokens.",
        prompt_tokens=30_600,
    ),
    "codex": Program(
        "Codex", "codex", "npm install -g @openai/codex", 'exec "What does this folder hold?"',
        {"LOCALLLM_LAUNCH_API_KEY": "{key}"},
        ("-c", 'model_provider="localllm"', "-c", _CODEX_PROVIDER, "-c", 'model="{model}"',
         "-c", "model_context_window={context}", "-c", 'model_catalog_json="{catalog}"'),
        note="Without `model_catalog_json`, Codex warns that it has no metadata for the model, and sends instructions "
             "that were written for its own models. `codex exec` starts only in a Git repository, or with "
             "`--skip-git-repo-check`.",
        prompt_tokens=7_200,
        sources="openai/codex: codex-rs/models-manager/src/manager.rs, codex-rs/protocol/src/openai_models.rs",
    ),
    "opencode": Program(
        "OpenCode", "opencode", "npm install -g opencode-ai", 'run "What does this folder hold?"',
        {"OPENCODE_CONFIG_CONTENT": {
            "model": "localllm/{model}", "small_model": "localllm/{model}",
            "provider": {"localllm": {
                "npm": "@ai-sdk/openai-compatible", "name": "localllm",
                "options": {"baseURL": "{url}/v1", "apiKey": "{key}"},
                "models": {"{model}": {"name": "{model}", "limit": {"context": "{context}", "output": "{output}"}}},
            }},
        }, "OPENCODE_DISABLE_MODELS_FETCH": "1"},
        note="It compacts a conversation once the context less twice `output` is full.",
        sources="sst/opencode: packages/opencode/src/session/overflow.ts",
    ),
    "copilot": Program(
        "Copilot CLI", "copilot", "npm install -g @github/copilot", '-p "What does this folder hold?"',
        {"COPILOT_PROVIDER_BASE_URL": "{url}/v1", "COPILOT_PROVIDER_API_KEY": "{key}",
         "COPILOT_PROVIDER_WIRE_API": "responses", "COPILOT_MODEL": "{model}",
         "COPILOT_PROVIDER_MAX_PROMPT_TOKENS": "{input}", "COPILOT_PROVIDER_MAX_OUTPUT_TOKENS": "{output}",
         "COPILOT_OFFLINE": "true"},
        note="`COPILOT_OFFLINE` keeps it from GitHub's servers, so that no account is needed.",
    ),
    "cline": Program(
        "Cline", "cline", "npm install -g cline", '"What does this folder hold?"',
        {"CLINE_TELEMETRY_DISABLED": "1"},
        files=(ProgramFile("~", ".cline/data/settings/providers.json", {
            "version": 1, "lastUsedProvider": "ollama",
            "providers": {"ollama": {
                "settings": {"provider": "ollama", "model": "{model}", "baseUrl": "{url}", "apiKey": "{key}"},
                "updatedAt": "2026-01-01T00:00:00.000Z", "tokenSource": "manual"}},
        }),),
    ),
    "qwen": Program(
        "Qwen Code", "qwen", "npm install -g @qwen-code/qwen-code", '-p "What does this folder hold?"',
        {"OPENAI_BASE_URL": "{url}/v1", "OPENAI_API_KEY": "{key}", "OPENAI_MODEL": "{model}"},
        ("--auth-type", "openai"),
    ),
    "zed": Program(
        "Zed", "zed", "https://zed.dev/download", ".",
        # Zed names the variable after the provider. It is not localllm's own, which terminals in Zed would inherit.
        {"LOCALLLM_LAUNCH_API_KEY": "{key}"}, ("--wait",),
        (ProgramFile("config", "zed/settings.json", {
            "language_models": {"openai_compatible": {"localllm-launch": {
                "api_url": "{url}/v1",
                "available_models": [{
                    "name": "{model}", "display_name": "{model}", "max_tokens": "{context}",
                    # Zed wants all four as soon as one is given.
                    "capabilities": {"tools": "{tools}", "images": "{vision}", "parallel_tool_calls": False,
                                     "prompt_cache_key": False},
                }],
            }}},
            "agent": {"default_model": {"provider": "localllm-launch", "model": "{model}"}},
        }),),
        (".",),
        hint="Close Zed first: a running Zed has another environment, and so not the key.",
        note="On macOS, `zed` starts the application without these variables, unless with `--foreground`: "
             "`localllm launch zed -- --foreground .`",
        sources="zed-industries/zed: docs/src/ai/use-api-access.md, crates/settings_content/src/language_model.rs, "
                "crates/language_models/src/provider/open_ai_compatible.rs, crates/cli/src/main.rs",
    ),
    "vscode": Program(
        "VS Code", "code", "https://code.visualstudio.com/download", ".",
        arguments=("--wait",),
        files=(ProgramFile("vscode", "chatLanguageModels.json", [{
            "name": "localllm", "vendor": "customendpoint", "apiKey": "{key}", "apiType": "chat-completions",
            "models": [{
                "id": "{model}", "name": "{model}", "url": "{url}/v1/chat/completions", "toolCalling": "{tools}",
                "vision": "{vision}", "maxInputTokens": "{input}", "maxOutputTokens": "{output}",
            }],
        }]),),
        default_arguments=(".",),
        hint="Choose the model in the model picker of the Chat view.",
        note="The model needs no GitHub account. Agents are offered only for a model that can call tools. Titles and "
             "commit messages come from it once `chat.byokUtilityModelDefault` is the main agent's model.",
        sources="microsoft/vscode-docs: docs/agent-customization/language-models.md; microsoft/vscode: "
                "extensions/copilot/src/extension/byok/vscode-node/customEndpointProvider.ts",
    ),
}  # fmt: skip


def filled(value: Any, served: Served) -> Any:
    """Return a value of the table for a server. A part that only repeats an unknown value is left out."""
    if isinstance(value, str):
        for name in PLACEHOLDERS:
            if value == f"{{{name}}}":
                return served.value(name)
            if f"{{{name}}}" in value:
                value = value.replace(f"{{{name}}}", str(served.value(name)))
        return value
    if isinstance(value, Mapping):
        made = {filled(key, served): filled(inner, served) for key, inner in value.items()}
        return {key: inner for key, inner in made.items() if inner not in (None, {})}
    return [filled(inner, served) for inner in value] if isinstance(value, list) else value


def lacks(served: Served, text: str) -> bool:
    """Return whether a text of the table has a placeholder whose value is unknown."""
    return any(f"{{{name}}}" in text and served.value(name) is None for name in PLACEHOLDERS)


def environ_of(program: Program, served: Served) -> dict[str, str]:
    """Return the variables of a program, without those that need an unknown context."""
    values = filled(program.environ, served)
    return {name: value if isinstance(value, str) else json.dumps(value) for name, value in values.items()}


def arguments_of(program: Program, served: Served, given: Sequence[str]) -> list[str]:
    """Return the arguments of a program: its own, then `given`."""
    own: list[str] = []
    for word in program.arguments:
        if lacks(served, word):
            own.pop()  # the flag before it
        else:
            own.append(filled(word, served))
    return [*own, *(given or program.default_arguments)]


def guide_page() -> str:
    """Return docs/guides/programs.md."""
    sizes = [f"| {each.title} | {each.prompt_tokens:,} |" for each in PROGRAMS.values() if each.prompt_tokens]
    table = "\n".join(["| program | tokens, about |", "| --- | --: |", *sizes])
    parts = [_GUIDE_HEAD.replace("TABLE", table)]
    for name, program in PROGRAMS.items():
        get = f"Install: {program.install}" if program.install.startswith("http") else f"Install: `{program.install}`"
        parts.append(f"## {program.title}\n\n{get}\n\n```\nlocalllm launch {name} -- {program.example}\n```\n")
        rows = []
        for variable, value in program.environ.items():
            if not isinstance(value, str):
                rows.append(f"| `{variable}` | JSON, below |")
            else:
                rows.append(f"| `{variable}` | {f'`{_shown(value)}`' if value else 'empty'} |")
        if rows:
            parts.append("| variable | value |\n| --- | --- |\n" + "\n".join(rows) + "\n")
        if program.arguments:
            shown = [_shown(word) for word in program.arguments]
            words = [f"'{word}'" if any(letter in word for letter in ' "{') else word for word in shown]
            parts.append("Arguments before yours:\n\n```\n" + " ".join(words) + "\n```\n")
        blocks = [(f"`{name}`", value) for name, value in program.environ.items() if not isinstance(value, str)]
        blocks += [(f"Merged into `{file.shown}`, and undone afterwards", file.content) for file in program.files]
        for title, value in blocks:
            parts.append(f"{title}:\n\n```json\n{_shown(json.dumps(value, indent=2))}\n```\n")
        if note := " ".join(filter(None, (program.hint, program.note))):
            parts.append(f"{note}\n")
        if program.sources:
            parts.append(f"Sources: {program.sources}.\n")
    return "\n".join(parts)


_GUIDE_HEAD = """\
# Coding programs

<!-- Written by scripts/make_docs from the table of `launch`. -->

```
localllm launch claude
localllm launch codex --model MODEL -- exec "What does this folder hold?"
```

`launch` starts an installed program with a model of this machine. Arguments after `--` go to the
program. The server is the one that runs, as for `localllm chat`, or `--url`; where none runs, `launch` starts one and
stops it at the end. The model is `--model` (a name or a folder), else the first that the server lists; it is loaded
first, since only then its context is known. The server's key is sent only where the server needs one.

Most programs are configured by variables of their process alone. Where a program reads a file, `launch` merges
its entries into the file and undoes that when the program ends; if `launch` itself is killed, the next one does
so. Comments in such a file are kept unless the program also writes it. `localllm launch claude --print`
shows variables, arguments and files, and starts nothing. What the programs themselves keep, for example their
histories, stays.

## A context that is long enough

These programs send long prompts with every question: their instructions, and a description of each tool. Counted with
the tokenizer of the bundled demo:

TABLE

The demo's context of 2,048 tokens is therefore too short. To try a program without a download, write a copy of
the demo with a longer context, from a clone of this repository:

```
scripts/make_demo_model --context 65536 --out ~/demo-64k
localllm launch claude --model ~/demo-64k -- -p "hi"
```

Each of its layers sees the last 1,024 tokens (a sliding window), which is what the demo was trained on; so it answers
as briefly as the demo does, and cannot code. `scripts/client_check --launch` does this with Claude Code and Codex.

## By hand

The tables below are for a setup by hand. `KEY` is a key of the server, or any text where it needs none; `MODEL` a name
of `GET /v1/models`, `CONTEXT` its `context_length`, TOOLS and VISION (true or false) its `capabilities`. OUTPUT is a
quarter of the context, at most 16,384, and INPUT the rest. [The reference](../reference/clients.md) lists the programs
that were tried, with versions; Zed and VS Code need a desktop and were not.
"""


EXAMPLES = {"url": "http://127.0.0.1:8000", "catalog": "/tmp/models.json"}


def _shown(text: str) -> str:
    """Return a text of the table with the placeholders that documentation uses."""
    for name in PLACEHOLDERS:
        if name in ("context", "input", "output", "tools", "vision"):  # not a text in JSON
            text = text.replace(f'"{{{name}}}"', name.upper())
        text = text.replace(f"{{{name}}}", EXAMPLES.get(name, name.upper()))
    return text


def _vscode_folder() -> Path:
    """Return the folder of VS Code's settings."""
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Application Support" / "Code" / "User"
    if sys.platform == "win32":
        return Path.home() / "AppData" / "Roaming" / "Code" / "User"
    return config_home() / "Code" / "User"
