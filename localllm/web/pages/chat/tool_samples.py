"""Invented samples of the views of tools, for `/dev/patterns` and the template tests."""

from __future__ import annotations

from dataclasses import replace

from localllm.web.pages.chat.markdown.render import code_block
from localllm.web.pages.chat.thread import messages as m
from localllm.web.pages.chat.tools import views as t
from localllm.web.pages.frame import views


def samples() -> list[views.View]:
    html = code_block('{\n  "path": "notes/todo.md"\n}', "json")
    card = t.ToolCallCard("read_file", html, server="files", url="/c/sample/m/sample-24/calls/0")
    reply = m.ChatMessage("sample-24", "assistant", model="demo", calls=(card,))
    form = t.ResultForm("/c/sample/m/sample-25", "sample-25", ((0, "read_file"),), is_folded=True)
    failed = views.ErrorNotice("time did not start.", "The program 'uvx' is not on this machine.", "Install it.")
    consents = t.ConsentList(
        (
            t.ConsentRow("files", "read_file", "always", "2026-01-02"),
            t.ConsentRow("files", "delete_file", "never", "2026-01-02"),
        ),
        "/chats/tools",
    )
    rows = (t.ToolRow("read_file", "Read a text file."), t.ToolRow("delete_file", "Delete a file."))
    servers = (t.UsableServer("files", "running", rows), t.UsableServer("time", "failed", error=failed))
    return [
        card,
        replace(card, note="The tool has changed since you allowed it."),
        replace(card, state="running"),
        replace(card, state="done", text="<b>milk</b>"),
        t.ToolNotes(("The tools of time are left out. time did not start.",)),
        replace(form, message_id="sample-26"),
        replace(form, message_id="sample-27", calls=(), is_folded=False, goes_on=True, error=failed),
        m.CallsProgress(reply, "The call waits for your answer"),
        t.ToolServers((t.ServerChoice("files", True), t.ServerChoice("time", False, "time did not start."))),
        t.ToolServers((t.ServerChoice("notes", True),), "demo cannot call tools."),
        consents,
        t.ConsentList(()),
        t.ToolsPanel(servers, consents),
        t.ToolsPanel((), t.ConsentList(())),
    ]
