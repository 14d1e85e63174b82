"""Invented samples of the logs page's views, for `/dev/patterns` and the template tests."""

from __future__ import annotations

from localllm.web.pages.frame import views
from localllm.web.pages.logs import views as v
from localllm.web.pages.logs.filters import LEVELS


def samples(shell: views.Shell) -> list[views.View]:
    at = "2026-01-02T09:41:07+0100"
    rows = (
        v.LogRow("info", "INFO", "09:41:07.120", at, "access", "GET / status=200 time=3.1 ms client=127.0.0.1 id=4f2a"),
        v.LogRow("debug", "DEBUG", "09:41:07.250", at, "access", "GET /health status=200 time=0.4 ms"),
        v.LogRow("warning", "WARNING", "09:41:08.002", at, "manager", "load failed name=big error=It does not fit."),
        v.LogRow("error", "ERROR", "09:41:09.870", at, "engine", "step failed step=812\nTraceback:\n  StepFailed"),
    )
    live, download = "/logs/live?after=4", "/logs/download"
    path = "~/.local/share/localllm/logs/server-8000.log"
    page = v.LogsPage(shell, v.LogTable(rows), "info", LEVELS, "status", "", live, download, 4, 2, 1204, 2000, path)
    nothing = views.ErrorNotice("This server keeps no log in memory.")
    return [
        v.LogTable(rows, missed=12),
        page,
        v.LogsPage(shell, v.LogTable(()), "", LEVELS, "", "4f2a", "", download, 0, 0, 0, 2000, path, nothing),
    ]
