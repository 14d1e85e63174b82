"""The wizard's handlers: four steps with a URL each, which work without scripts.

    GET  /tune                  choose a goal; the saved profiles
    GET  /tune/limits           choose limits
    POST /tune/run              start; GET: show the run, live through /live/tune
    POST /tune/run/cancel
    GET  /tune/result           the result; POST /apply, /save; GET /flags.txt, /profile.toml
    POST /tune/plans/delete

All routes need the scope admin.
Does not know: how a run works (wizard.py), what the pages show (views.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import Any

from litestar import Request, get, post
from litestar.response import Redirect, Response, Stream

from localllm.errors import LocalLLMError
from localllm.serving.entry import ModelEntry
from localllm.serving.phases import DRAIN_S
from localllm.serving.profiles import delete_profile
from localllm.tuning.goals import GOALS, goal_of
from localllm.tuning.run import TuneOptions
from localllm.units import format_seconds
from localllm.web.pages.frame.errors import notice
from localllm.web.pages.frame.forms import fields_of
from localllm.web.pages.frame.live import changed, live_stream, sse
from localllm.web.pages.frame.render import render
from localllm.web.pages.frame.state import PagesState, html, once_per_app, pages_state
from localllm.web.pages.frame.views import ErrorNotice, LiveUpdate
from localllm.web.pages.tune import forms, saved_profiles, views
from localllm.web.pages.tune.views import Effort, GoalPage, LimitsPage, ResultPage, RunPage
from localllm.web.pages.tune.wizard import Job, NothingTuned, Wizard

SMALL_BODY_BYTES = 10_000


@get("/tune")
async def goal_page(request: Request[Any, Any, Any]) -> Response[str]:
    """Show the first step: the choice of a goal."""
    state, wizard = pages_state(request), wizard_of(request)
    models = views.tunable(state.manager.entries)
    chosen = request.query_params.get("model", "")
    model = chosen if chosen in models else next(iter(models), "")
    return html(
        GoalPage(
            shell=state.shell(request, "Tune", "tune"),
            steps=views.steps("goal", runs=wizard.running is not None, ended=_has_ended(wizard)),
            model=model,
            models=tuple(models),
            goals=tuple(views.goal_card(goal, model) for goal in GOALS.values()),
            plans=await asyncio.to_thread(saved_profiles.profile_table, state.manager),
            under_way=wizard.running.goal.name if wizard.running is not None else "",
            has_result=_has_ended(wizard),
        )
    )


@get("/tune/limits", sync_to_thread=False)
def limits_page(request: Request[Any, Any, Any]) -> Response[str]:
    """Show the second step: limits and effort."""
    return html(_limits_page(request, dict(request.query_params)))


@post("/tune/run", status_code=200, request_max_body_size=SMALL_BODY_BYTES)
async def start_run(request: Request[Any, Any, Any]) -> Response[Any]:
    """Start the run, or show the form again with the error."""
    form = await fields_of(request)
    wizard = wizard_of(request)
    try:
        wanted = forms.read_form(form)
        wizard.start(wanted.model, wanted.goal, wanted.options)
    except LocalLLMError as error:
        return html(_limits_page(request, form, notice(error)), error.status)
    return Redirect("/tune/run", status_code=303)


@get("/tune/run", sync_to_thread=False)
def run_page(request: Request[Any, Any, Any]) -> Response[Any]:
    """Show the run."""
    wizard, state = wizard_of(request), pages_state(request)
    job = wizard.running
    if job is None:
        return Redirect("/tune/result" if wizard.job is not None else "/tune", status_code=303)
    return html(
        RunPage(
            shell=state.shell(request, f"Tuning for {job.goal.name}", "tune", "/live/tune", moves=True),
            steps=views.steps("run"),
            progress=views.progress(job),
            best=views.best(job),
            scatter=views.plot(job),
            trials=views.trials(job),
        )
    )


@get("/live/tune", sync_to_thread=False)
def live_run(request: Request[Any, Any, Any]) -> Stream:
    """Stream every changed part of the run's page. At the end of the run, or without one, tell the page to reload."""
    return live_stream(request, _events(pages_state(request), wizard_of(request)))


@post("/tune/run/cancel", status_code=303, sync_to_thread=False)
def cancel_run(request: Request[Any, Any, Any]) -> Redirect:
    """Cancel the run; finished measurements are kept."""
    wizard_of(request).cancel()
    return Redirect("/tune/run", status_code=303)


@get("/tune/result", sync_to_thread=False)
def result_page(request: Request[Any, Any, Any]) -> Response[Any]:
    """Show the result of the last run."""
    job = wizard_of(request).job
    if job is None or not job.is_over:
        return Redirect("/tune/run" if job is not None else "/tune", status_code=303)
    return html(_result_page(request, job))


@post("/tune/result/apply", status_code=200, request_max_body_size=SMALL_BODY_BYTES)
async def apply_result(request: Request[Any, Any, Any]) -> Response[Any]:
    """Reload the model with the recommended settings; every later start uses them, too."""
    return await _save(request, apply=True)


@post("/tune/result/save", status_code=200, request_max_body_size=SMALL_BODY_BYTES)
async def save_result(request: Request[Any, Any, Any]) -> Response[Any]:
    """Save the recommended settings as a profile, for starts that name it."""
    return await _save(request, apply=False)


@get("/tune/result/flags.txt", sync_to_thread=False)
def flags_file(request: Request[Any, Any, Any]) -> Response[str]:
    return _file(wizard_of(request), "flags")


@get("/tune/result/profile.toml", sync_to_thread=False)
def toml_file(request: Request[Any, Any, Any]) -> Response[str]:
    return _file(wizard_of(request), "toml")


@post("/tune/plans/apply", status_code=303, request_max_body_size=SMALL_BODY_BYTES)
async def apply_plan(request: Request[Any, Any, Any]) -> Redirect:
    """Reload the model with a saved profile; every later start uses it, too."""
    await saved_profiles.apply_saved(pages_state(request).manager, (await fields_of(request)).get("file", ""))
    return Redirect("/tune#plans", status_code=303)


@post("/tune/plans/delete", status_code=303, request_max_body_size=SMALL_BODY_BYTES)
async def delete_plan(request: Request[Any, Any, Any]) -> Redirect:
    """Delete a profile; a model that runs with it keeps running."""
    file = (await fields_of(request)).get("file", "")
    await asyncio.to_thread(delete_profile, file)
    return Redirect("/tune#plans", status_code=303)


def wizard_of(request: Request[Any, Any, Any]) -> Wizard:
    """Return the application's wizard, created at first use."""
    return once_per_app(request.app, "tune_wizard", lambda: Wizard(request.app.state["manager"]))


def _has_ended(wizard: Wizard) -> bool:
    return wizard.job is not None and wizard.job.is_over


# ---- pages -----------------------------------------------------------------------------------------------------------


def _limits_page(
    request: Request[Any, Any, Any], form: Mapping[str, str], error: ErrorNotice | None = None
) -> LimitsPage:
    state, wizard = pages_state(request), wizard_of(request)
    name = form.get("goal", "")
    goal = goal_of(name[: forms.LONGEST_TEXT] if error is None or name in GOALS else "chat")
    entry = _entry(state, form.get("model", ""))
    limit = goal.limits.max_ttft_s
    card = entry.card if entry is not None else None
    return LimitsPage(
        shell=state.shell(request, f"Limits for {goal.name}", "tune"),
        steps=views.steps("limits", runs=wizard.running is not None, ended=_has_ended(wizard)),
        model=entry.name if entry is not None else "",
        goal=views.goal_card(goal, ""),
        typed=forms.typed_limits(form),
        efforts=tuple(_effort(name, options, form.get("effort")) for name, options in forms.EFFORTS.items()),
        places=views.places_offer(entry, form.get("placements") == "on" if error is not None else None),
        asks_people=goal.name == "share",
        own_limit=f"{limit:g} s unless you set another" if limit is not None else "",
        context_note=views.context_note(goal, card.spec.max_position if card is not None else None),
        open_requests=entry.num_leases if entry is not None else 0,
        drain=format_seconds(DRAIN_S).replace(".0", ""),
        error=error,
    )


def _entry(state: PagesState, name: str) -> ModelEntry | None:
    """Return the model of that name, else the first one that can be tuned."""
    models = views.tunable(state.manager.entries)
    wanted = name if name in models else next(iter(models), None)
    return next((entry for entry in state.manager.entries if entry.name == wanted), None)


def _effort(name: str, options: TuneOptions, chosen: str | None) -> Effort:
    what = f"trials of about {options.trial_s:g} s, {options.soak_s:g} s of soak"
    return Effort(name, name.capitalize(), what, (chosen or "quick") == name)


def _result_page(request: Request[Any, Any, Any], job: Job, error: ErrorNotice | None = None) -> ResultPage:
    return ResultPage(
        shell=pages_state(request).shell(request, f"Tuned for {job.goal.name}", "tune"),
        steps=views.steps("result", goal=job.goal.name),
        model=job.model,
        goal=job.goal.name,
        verdict=views.verdict(job),
        notes=views.notes(job),
        found=views.recommendation(job),
        scatter=views.plot(job),
        trials=views.trials(job),
        failure=views.failure(job),
        error=error,
    )


async def _save(request: Request[Any, Any, Any], *, apply: bool) -> Response[Any]:
    wizard = wizard_of(request)
    name = (await fields_of(request)).get("name", "").strip()
    try:
        await wizard.save(name[: forms.LONGEST_TEXT], apply=apply)
    except LocalLLMError as error:
        if wizard.job is None or not wizard.job.is_over:
            raise
        return html(_result_page(request, wizard.job, notice(error)), error.status)
    return Redirect("/tune/result", status_code=303)


def _file(wizard: Wizard, kind: str) -> Response[str]:
    found = views.recommendation(wizard.job) if wizard.job is not None else None
    if found is None:
        raise NothingTuned("There are no settings to export.", "The last run found no settings.", "Tune again.")
    text = found.flags if kind == "flags" else found.toml
    name = f"localllm-{wizard.job.goal.name if wizard.job else ''}." + ("txt" if kind == "flags" else "toml")
    headers = {"Cache-Control": "no-store", "Content-Disposition": f'attachment; filename="{name}"'}
    media_type = "text/plain" if kind == "flags" else "application/toml; charset=utf-8"
    return Response(f"{text}\n", media_type=media_type, headers=headers)


async def _events(state: PagesState, wizard: Wizard) -> AsyncIterator[bytes]:
    sent: dict[str, str] = {}
    async for job in wizard.follow():
        if job.is_over:
            break
        parts = {
            "status-pill": render(state.pill()),
            "tune-progress": render(views.progress(job)),
            "tune-best": render(views.best(job)),
            "tune-scatter": render(views.plot(job)),
            "tune-trials": render(views.trials(job)),
        }
        if news := changed(parts, sent):
            yield sse(render(LiveUpdate(news)))
    yield sse("", "ready")


HANDLERS = (
    goal_page, limits_page, start_run, run_page, live_run, cancel_run, result_page, apply_result, save_result,
    flags_file, toml_file, apply_plan, delete_plan,
)  # fmt: skip
