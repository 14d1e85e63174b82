"""Invented samples of the logs page's views, for `/dev/patterns` and the template tests."""

from __future__ import annotations

from dataclasses import replace

from localllm.web.pages.frame import views
from localllm.web.pages.logs import views as v
from localllm.web.pages.logs.views import KINDS, LEVELS


def samples(shell: views.Shell) -> list[views.View]:
    at = "2026-01-02T09:41:07+0100"
    rows = (
        v.LogRow("info", "INFO", "09:41:07.120", at, "access", "GET / status=200 time=3.1 ms client=127.0.0.1 id=4f2a"),
        v.LogRow(
            "info",
            "INFO",
            "09:41:07.190",
            at,
            "access",
            "POST /v1/chat/completions status=200 id=",
            "4f2a91cc0d5b47a0",
            "4f2a91cc…",
            "/dashboard/requests/4f2a91cc0d5b47a0",
            " done",
        ),
        v.LogRow(
            "info",
            "INFO",
            "09:41:07.210",
            at,
            "access",
            "GET /settings id=",
            "77aa91cc0d5b47a0",
            "77aa91cc…",
        ),
        v.LogRow("debug", "DEBUG", "09:41:07.250", at, "access", "GET /health status=200 time=0.4 ms"),
        v.LogRow("warning", "WARNING", "09:41:08.002", at, "manager", "load failed name=big error=It does not fit."),
        v.LogRow("error", "ERROR", "09:41:09.870", at, "engine", "step failed step=812\nTraceback:\n  StepFailed"),
    )
    live, download = "/logs/live?after=4", "/logs/download"
    path = "~/.local/share/localllm/logs/server-8000.log"
    card = v.LogCard(v.LogTable(rows), True, live, download, 6, 2, 1204)
    nothing_yet = v.LogCard(v.LogTable(()), False, "", download, 0, 0, 0)
    kinds = tuple(KINDS.items())
    page = v.LogsPage(shell, card, "requests", kinds, "info", LEVELS, "status", "", 2000, path)
    nothing = views.ErrorNotice("This server keeps no log in memory.")
    return [
        v.LogTable(rows, missed=12),
        replace(card, live_url=""),  # on the page of patterns it would connect
        v.LogCard(v.LogTable(()), True, "", download, 0, 0, 1204),
        page,
        v.LogsPage(shell, nothing_yet, "", kinds, "", LEVELS, "", "4f2a", 2000, path, nothing),
    ]
