"""Invented samples of the views of servers of tools, for `/dev/patterns` and the template tests."""

from __future__ import annotations

from dataclasses import replace

from localllm.web.pages.chat.tools.views import ConsentList, ConsentRow, ToolRow
from localllm.web.pages.frame import views
from localllm.web.pages.settings import mcp_views as v


def samples(shell: views.Shell) -> list[views.View]:
    facts = (views.Fact("API_TOKEN", "••••"), views.Fact("Time limit of a call", "60 s"))
    tools = (ToolRow("read_file", "Read a text file."), ToolRow("list_files", ""))
    files = v.ToolServerCard(
        "files", "/settings/tools/files", "running", ("uvx", "mcp-server-files", "--root", "/home/me/notes"), facts,
        tools, ("'draw' is left out: its schema is nested deeper than 24 levels (25)",), ("listening", "ready"),
    )  # fmt: skip
    error = views.ErrorNotice("time did not start.", "The program 'uvx' is not on this machine.", "Install it.")
    failed = v.ToolServerCard("time", "/settings/tools/time", "failed", (), facts, error=error)
    form = v.ToolServerForm("files", "uvx mcp-server-files --root '/home/me/my notes'", "API_TOKEN=secret")
    consents = ConsentList((ConsentRow("files", "read_file", "always", "2026-01-02"),), "/settings/tools")
    page = v.ToolServersPage(shell, (files, failed), form, consents, "~/.config/localllm/config.toml")
    wrong = views.ErrorNotice("Give a command or an address.", "Both are empty.")
    new = v.NewToolServerPage(
        shell, form, files.command, "", (views.Fact("API_TOKEN", "secret"),), '[mcp.servers.files]\ncommand = "uvx"\n',
        page.config_file,
    )  # fmt: skip
    return [
        files,
        failed,
        replace(failed, state="disabled", error=None),
        form,
        replace(form, error=wrong),
        page,
        replace(page, servers=(), missing=views.ErrorNotice("Tools need the package mcp.", "", "pip install mcp")),
        new,
        replace(new, command=(), address="https://tools.example.com/mcp"),
    ]
