"""Invented samples of the settings' views, for `/dev/patterns` and the template tests."""

from __future__ import annotations

from dataclasses import replace

from localllm.web.pages.chat.tools.views import ConsentList, ConsentRow, ToolRow
from localllm.web.pages.frame import views
from localllm.web.pages.settings import mcp_views, restart, setting_rows, storage
from localllm.web.pages.settings import views as v

_WHAT = "longest prompt and output together"
_CHANGE = "/settings/change?name=max_model_len"
_LEVELS = ("debug", "info", "warning", "error")
_WARNING = views.ErrorNotice("This first key would lock you out of this page.", "It is for infer.", "Try another.")
_RESTART = restart.Restart("This server is a service.", "systemctl --user restart localllm.service")

_OPEN = setting_rows.SettingRow(
    "max_model_len", _WHAT, _WHAT, "auto", "tokens", "32,768 tokens", "32768", "at least 1", "auto", "default", False,
    change_url=_CHANGE, note="8k is 8000, 8K is 8192",
)  # fmt: skip

_SET = setting_rows.SettingRow(
    "log_level", "Level", "what is logged", "debug", "", "", "debug", "info", "info", "flag", True, True, _CHANGE
)


def samples(shell: views.Shell) -> list[views.View]:
    group = setting_rows.SettingGroup("group-0", "Engine", (_OPEN, _SET), 1, True)
    groups = setting_rows.SettingGroups((group,))
    key = v.KeyRow("laptop", "admin", "2026-01-02", "x9Kd", True, "/settings/keys/laptop/remove")
    keys = v.KeysCard((key, replace(key, name="phone", scope="infer", is_mine=False)), True, 1, ("admin", "infer"))
    refused = v.KeysCard((), False, 0, ("admin", "infer"), "phone", "infer", _WARNING, confirms=True)
    stored = (
        storage.StoredRow(
            "Models", "Weights from the hub.", 27 * 2**30, "~/.cache/huggingface/hub", "Models", "/library"
        ),
        storage.StoredRow("Chats", "Kept in memory until the server stops.", 0, ""),
        storage.StoredRow(
            "KV blocks",
            "Prompts that are not computed again after a restart: demo 120 MiB.",
            120 * 2**20,
            "~/.cache/localllm/kv",
            "Delete now",
            "/settings/kv/delete",
            deletes_at_once=True,
        ),
    )
    disk = storage.StorageCard(stored, 182 * 2**30)
    report = v.DoctorReport(
        (
            v.FindingRow("ok", "cpu", "8 cores"),
            v.FindingRow("note", "gpu", "No NVIDIA GPU: models run on the CPU."),
            v.FindingRow("problem", "memory", "1.2 of 8.0 GiB available", "Close something."),
        )
    )
    facts = (views.Fact("localllm", "0.1.0", "Apache-2.0"),)
    page = v.SettingsPage(
        shell, groups, keys, disk, facts, facts, v.DoctorReport(), "info", _LEVELS, "~/.config/config.toml", "",
        "~/.cache/localllm/kv",
    )  # fmt: skip
    return [
        *_of_tool_servers(shell),
        group,
        groups,
        setting_rows.SettingGroups((), "nothing"),
        _RESTART,
        restart.Restart("Stop the server with Ctrl+C."),
        restart.Restart(""),
        keys,
        refused,
        disk,
        report,
        v.DoctorReport(error=_WARNING),
        page,
        replace(page, keys=refused, doctor=report, chats_path="~/.local/share/localllm/chats.db"),
        *_changes(shell),
    ]


def _changes(shell: views.Shell) -> list[views.View]:
    """Return the pages that the settings page leads to."""
    file = "~/.config/localllm/config.toml"
    lines = ('max_model_len = "8k"', "max_model_len = 4096")
    shown = v.ChangePage(shell, _OPEN, (), "8k", file, _RESTART, True, *lines, beaten_by="flag")
    return [
        v.ChangePage(shell, _OPEN, (), "32768", file, _RESTART),
        shown,
        replace(shown, written=True),
        replace(shown, line="", removes=True),
        v.ChangePage(shell, _SET, _LEVELS, "loud", file, _RESTART, error=_WARNING),
        restart.RestartingPage(shell),
        v.NewKeyPage(shell, "laptop", "admin", "sk-local-abc", locks=True),
        v.NewKeyPage(shell, "laptop", "infer", "sk-local-abc", locks=False),
        v.RemoveKeyPage(shell, "laptop", "/settings/keys/laptop/remove", _WARNING),
    ]


def _of_tool_servers(shell: views.Shell) -> list[views.View]:
    facts = (views.Fact("API_TOKEN", "••••"), views.Fact("Time limit of a call", "60 s"))
    tools = (ToolRow("read_file", "Read a text file."), ToolRow("list_files", ""))
    files = mcp_views.ToolServerCard(
        "files", "/settings/tools/files", "running", ("uvx", "mcp-server-files", "--root", "/home/me/notes"), facts,
        tools, ("'draw' is left out: its schema is nested deeper than 24 levels (25)",), ("listening", "ready"),
    )  # fmt: skip
    error = views.ErrorNotice("time did not start.", "The program 'uvx' is not on this machine.", "Install it.")
    failed = mcp_views.ToolServerCard("time", "/settings/tools/time", "failed", (), facts, error=error)
    form = mcp_views.ToolServerForm("files", "uvx mcp-server-files --root '/home/me/my notes'", "API_TOKEN=secret")
    consents = ConsentList((ConsentRow("files", "read_file", "always", "2026-01-02"),), "/settings/tools")
    page = mcp_views.ToolServersPage(shell, (files, failed), form, consents, False, "~/.config/localllm/config.toml")
    wrong = views.ErrorNotice("Give a command or an address.", "Both are empty.")
    server = mcp_views.NewToolServer(
        "files", files.command, "", (views.Fact("API_TOKEN", "secret"),), '[mcp.servers.files]\ncommand = "uvx"\n'
    )
    at_url = replace(server, command=(), address="https://tools.example.com/mcp")
    web = replace(server, name="web", command=(), variables=(), searxng="http://127.0.0.1:8888")
    new = mcp_views.NewToolServerPage(shell, form, (server,), page.config_file)
    return [
        files,
        failed,
        replace(failed, state="disabled", error=None),
        form,
        replace(form, error=wrong),
        page,
        replace(
            page,
            servers=(),
            searches=True,
            missing=views.ErrorNotice("Tools need the package mcp.", "", "pip install mcp"),
        ),
        new,
        replace(new, servers=(server, at_url)),
        replace(new, servers=(web,)),
        replace(form, pasted="{", error=wrong),
    ]
