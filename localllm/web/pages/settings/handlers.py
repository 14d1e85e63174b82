"""The settings page, changes to config.toml, and the checks of this machine.

Does not know: how a setting is shown (setting_rows.py), how the file is changed (config/edit.py).
"""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
from typing import Any

import msgspec
from litestar import Request, get, post
from litestar.response import Redirect, Response

from localllm.config.edit import planned, present_line, write
from localllm.config.settings import SETTINGS
from localllm.engine.memory.block_stores import delete_kept, kept_models, kv_folder
from localllm.errors import ConfigError, InvalidParameter, LocalLLMError, NotWritable
from localllm.files.folders import experts_folder
from localllm.files.record_file import delete_unused
from localllm.web.pages.frame.errors import notice
from localllm.web.pages.frame.forms import is_scripted
from localllm.web.pages.frame.state import html, pages_state
from localllm.web.pages.frame.views import ErrorNotice
from localllm.web.pages.settings import key_handlers, restart, setting_rows
from localllm.web.pages.settings.views import (
    LEVELS,
    ChangePage,
    DoctorReport,
    FindingRow,
    file_of,
    keys_card,
    settings_of,
    whole_page,
)

log = logging.getLogger(__name__)

LONGEST_QUERY_CHARS = 200

_examining = asyncio.Lock()
"""One check at a time, because each starts a process."""


COMMAND = (sys.executable, "-m", "localllm", "doctor", "--json")
LIMIT_S = 60.0


class NoReport(LocalLLMError):
    """The doctor did not finish."""


def run_doctor() -> DoctorReport:
    """Run the doctor, which takes seconds. Raises `NoReport`."""
    hint = "localllm doctor, in a terminal"
    try:
        ended = subprocess.run(COMMAND, capture_output=True, timeout=LIMIT_S, check=False)
        if not ended.stdout.strip():
            said = ended.stderr.decode(errors="replace").strip().splitlines()
            raise NoReport("The check failed.", said[-1] if said else f"Its exit code is {ended.returncode}.", hint)
        return DoctorReport(tuple(msgspec.json.decode(ended.stdout, type=list[FindingRow])))
    except subprocess.TimeoutExpired as error:
        raise NoReport("The check timed out.", f"Its limit is {LIMIT_S:.0f} s.", hint) from error
    except (OSError, msgspec.DecodeError) as error:
        raise NoReport("The check failed.", f"{error}.", hint) from error


@get("/settings")
async def settings_page(request: Request[Any, Any, Any]) -> Response[str]:
    """Show all sections. With a query, only the settings that contain its words; htmx gets these alone."""
    query = request.query_params.get("find", "")
    if len(query) > LONGEST_QUERY_CHARS:
        why = f"It has {len(query)} characters; the limit is {LONGEST_QUERY_CHARS}."
        raise InvalidParameter("The search text is too long.", why, param="find")
    if is_scripted(request):
        return html(setting_rows.groups(settings_of(request), pages_state(request).served, query))
    return html(await whole_page(request, keys_card(request), query=query))


@get("/settings/change", sync_to_thread=False)
def change_page(request: Request[Any, Any, Any]) -> Response[str]:
    """Ask for a value, then preview the line to be written."""
    query = request.query_params
    page, _ = _change(request, query.get("name", ""), query.get("value"), removes="remove" in query)
    return html(page, 400 if page.error else 200)


@post("/settings/change", status_code=200, request_max_body_size=100_000)
async def write_change(request: Request[Any, Any, Any]) -> Response[str]:
    """Write the previewed line."""
    form = await request.form()
    name, value = str(form.get("name", "")), form.get("value")
    removes = form.get("remove") == "yes"
    page, written = _change(request, name, None if value is None else str(value), removes=removes, writes=True)
    if written:
        log.info("setting written name=%s path=%s", name, page.config_file)
    return html(page, 400 if page.error else 200)


@post("/settings/log-level", status_code=303, request_max_body_size=100_000)
async def set_log_level(request: Request[Any, Any, Any]) -> Redirect:
    """Set the log level now, until the server stops."""
    level = str((await request.form()).get("level", ""))
    if level not in LEVELS:
        raise InvalidParameter(f"Unknown level {level[:40]!r}.", f"Known: {', '.join(LEVELS)}.", param="level")
    logging.getLogger().setLevel(level.upper())
    log.log(logging.getLevelName(level.upper()), "log level now=%s", level)
    return Redirect("/settings#running", status_code=303)


@post("/settings/kv/delete", status_code=303, sync_to_thread=True, request_max_body_size=1000)
def delete_kv_blocks(request: Request[Any, Any, Any]) -> Redirect:
    """Delete the KV blocks on disk, of all models. Servers that run find nothing there and compute."""
    folder = kv_folder(settings_of(request).engine.kv_offload_dir)
    for each in kept_models(folder):
        try:
            delete_kept(each)
        except OSError as error:
            why = f"{error.strerror or error}."
            raise NotWritable(f"{each.folder} could not be deleted.", why, f"ls -ld {each.folder}") from error
    log.info("kv blocks deleted folder=%s", folder)
    return Redirect("/settings#storage", status_code=303)


@post("/settings/experts/delete", status_code=303, sync_to_thread=True, request_max_body_size=1000)
def delete_experts(request: Request[Any, Any, Any]) -> Redirect:
    """Delete the files of experts that no loaded model reads, of this server or another one."""
    deleted = delete_unused(experts_folder())
    log.info("experts deleted files=%d bytes=%d", len(deleted), sum(each.num_bytes for each in deleted))
    return Redirect("/settings#storage", status_code=303)


@get("/settings/doctor")
async def examine(request: Request[Any, Any, Any]) -> Response[str]:
    """Check this machine; show the result in place for htmx, else on the page."""
    async with _examining:
        try:
            report = await asyncio.to_thread(run_doctor)
        except LocalLLMError as error:
            report = DoctorReport(error=notice(error))
    if is_scripted(request):
        return html(report)
    return html(await whole_page(request, keys_card(request), report))


def _change(
    request: Request[Any, Any, Any], name: str, value: str | None, *, removes: bool, writes: bool = False
) -> tuple[ChangePage, bool]:
    """Return the page, and whether the file was written."""
    state, settings = pages_state(request), settings_of(request)
    if name not in SETTINGS:
        raise InvalidParameter(f"Unknown setting {name[:80]!r}.", hint="Open /settings.", param="name")
    error, change, has_line = None, None, False
    path = file_of(settings)
    try:
        has_line = bool(present_line(path, name))
        if value is not None or removes:
            change = planned(path, name, None if removes else value)
            if writes:
                write(change)
        elif SETTINGS[name].by_hand:
            raise ConfigError(f"{name} cannot be set here.", SETTINGS[name].by_hand, param=name)
        elif writes:
            raise ConfigError("The value is missing.", param="value")
    except (ConfigError, NotWritable) as refused:
        error = ErrorNotice(refused.what, refused.why, refused.hint)
    source = settings.source(name)
    row = setting_rows.row(name, settings, state.served)
    written = writes and error is None
    page = ChangePage(
        shell=state.shell(request, row.text, "settings"),
        row=row,
        choices=SETTINGS[name].options,
        text=row.typed if value is None else value,
        config_file=str(path),
        restart=restart.how_to_restart(request),
        has_line=not removes if written else has_line,
        line=change.line if change else "",
        old_line=change.old_line if change else "",
        removes=removes and change is not None,
        written=written,
        beaten_by=source if source in ("flag", "environment") else "",
        error=error,
    )
    return page, page.written


HANDLERS = (
    settings_page, change_page, write_change, set_log_level, delete_kv_blocks, delete_experts, examine,
    *restart.HANDLERS, *key_handlers.HANDLERS,
)  # fmt: skip
