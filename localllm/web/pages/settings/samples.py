"""Invented samples of the settings' views, for `/dev/patterns` and the template tests."""

from __future__ import annotations

from dataclasses import replace

from localllm.web.pages.frame import views
from localllm.web.pages.settings import mcp_samples
from localllm.web.pages.settings import views as v

_WHAT = "longest prompt and output together"


_CHANGE = "/settings/change?name=max_model_len"
_LEVELS = ("debug", "info", "warning", "error")
_WARNING = views.ErrorNotice("This first key would lock you out of this page.", "It is for infer.", "Try another.")
_RESTART = v.Restart("This server is a service.", "systemctl --user restart localllm.service")
_OPEN = v.SettingRow(
    "max_model_len", _WHAT, _WHAT, "auto", "tokens", "32,768 tokens", "32768", "at least 1", "auto", "default", False,
    change_url=_CHANGE, note="8k is 8000, 8K is 8192",
)  # fmt: skip
_SET = v.SettingRow(
    "log_level", "Level", "what is logged", "debug", "", "", "debug", "info", "info", "flag", True, True, _CHANGE
)


def samples(shell: views.Shell) -> list[views.View]:
    group = v.SettingGroup("group-0", "Engine", (_OPEN, _SET), 1, True)
    groups = v.SettingGroups((group,))
    key = v.KeyRow("laptop", "admin", "2026-01-02", "x9Kd", True, "/settings/keys/laptop/remove")
    keys = v.KeysCard((key, replace(key, name="phone", scope="infer", is_mine=False)), True, 1, ("admin", "infer"))
    refused = v.KeysCard((), False, 0, ("admin", "infer"), "phone", "infer", _WARNING, confirms=True)
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
    page = v.SettingsPage(
        shell, groups, keys, storage, facts, facts, v.DoctorReport(), "info", _LEVELS, "~/.config/config.toml", ""
    )
    return [
        *mcp_samples.samples(shell),
        group,
        groups,
        v.SettingGroups((), "nothing"),
        _RESTART,
        v.Restart("Stop the server with Ctrl+C."),
        v.Restart(""),
        keys,
        refused,
        storage,
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
        v.RestartingPage(shell),
        v.NewKeyPage(shell, "laptop", "admin", "sk-local-abc", locks=True),
        v.NewKeyPage(shell, "laptop", "infer", "sk-local-abc", locks=False),
        v.RemoveKeyPage(shell, "laptop", "/settings/keys/laptop/remove", _WARNING),
    ]
