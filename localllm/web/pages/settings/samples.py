"""Invented samples of the settings' views, for `/dev/patterns` and the template tests."""

from __future__ import annotations

from dataclasses import replace

from localllm.web.pages.frame import views
from localllm.web.pages.settings import mcp_samples
from localllm.web.pages.settings import views as v

_WHAT = "longest prompt and output together"


def samples(shell: views.Shell) -> list[views.View]:
    change = "/settings/change?name=max_model_len"
    row = v.SettingRow(
        "max_model_len",
        _WHAT,
        _WHAT,
        "auto",
        "tokens",
        "32,768 tokens",
        "32768",
        "at least 1",
        "auto",
        "default",
        False,
    )
    row = replace(row, change_url=change, note="8k is 8000, 8K is 8192")
    said = v.SettingRow(
        "log_level", "Level", "what is logged", "debug", "", "", "debug", "info", "info", "flag", True, True, change
    )
    group = v.SettingGroup("group-0", "Engine", (row, said), 1, True)
    groups = v.SettingGroups((group,))
    restart = v.Restart("This server is a service.", "systemctl --user restart localllm.service")
    key = v.KeyRow("laptop", "admin", "2026-01-02", "x9Kd", True, "/settings/keys/laptop/remove")
    warning = views.ErrorNotice("This first key would lock you out of this page.", "It is for infer.", "Try another.")
    keys = v.KeysCard((key, replace(key, name="phone", scope="infer", is_mine=False)), True, 1, ("admin", "infer"))
    refused = v.KeysCard((), False, 0, ("admin", "infer"), "phone", "infer", warning, confirms=True)
    stored = (
        v.StoredRow("Models", "Weights from the hub.", 27 * 2**30, "~/.cache/huggingface/hub", "Models", "/library"),
        v.StoredRow("Chats", "Kept in memory until the server stops.", 0, ""),
    )
    storage = v.StorageCard(stored, 182 * 2**30)
    report = v.DoctorReport(
        (
            v.FindingRow("ok", "cpu", "8 cores"),
            v.FindingRow("note", "gpu", "No NVIDIA GPU: models run on the CPU."),
            v.FindingRow("problem", "memory", "1.2 of 8.0 GiB available", "Close something."),
        )
    )
    facts = (views.Fact("localllm", "0.1.0", "Apache-2.0"),)
    levels = ("debug", "info", "warning", "error")
    page = v.SettingsPage(
        shell, groups, keys, storage, facts, facts, v.DoctorReport(), "info", levels, "~/.config/config.toml", ""
    )
    file = "~/.config/localllm/config.toml"
    lines = ('max_model_len = "8k"', "max_model_len = 4096")
    shown = v.ChangePage(shell, row, (), "8k", file, restart, True, *lines, beaten_by="flag")
    return [
        *mcp_samples.samples(shell),
        group,
        groups,
        v.SettingGroups((), "nothing"),
        restart,
        v.Restart("Stop the server with Ctrl+C."),
        v.Restart(""),
        v.RestartingPage(shell),
        keys,
        refused,
        storage,
        report,
        v.DoctorReport(error=warning),
        page,
        replace(page, keys=refused, doctor=report, chats_path="~/.local/share/localllm/chats.db"),
        v.ChangePage(shell, row, (), "32768", file, restart),
        shown,
        replace(shown, written=True),
        replace(shown, line="", removes=True),
        v.ChangePage(shell, said, levels, "loud", file, restart, error=warning),
        v.NewKeyPage(shell, "laptop", "admin", "sk-local-abc", locks=True),
        v.NewKeyPage(shell, "laptop", "infer", "sk-local-abc", locks=False),
        v.RemoveKeyPage(shell, "laptop", "/settings/keys/laptop/remove", warning),
    ]
