"""The wizard's pages without scripts, on a tiny model that is really tuned; and what becomes of requests meanwhile."""

import html
import re
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch

from localllm.serving.profiles import read_profiles, save_profile, stored_profiles
from localllm.tuning import run, trial
from localllm.web import pages
from localllm.web.access.keys import Key
from tests.web.live_server import wait_until
from tests.web.tuned_server import TunedServer, be_quick, text_of

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def live(tiny_model_path: Callable[[str], Path]) -> Iterator[TunedServer]:
    with TunedServer.tiny(tiny_model_path("llama")) as live:
        yield live


@pytest.fixture
def server(live: TunedServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[TunedServer]:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    be_quick(monkeypatch)
    yield live
    live.browse("/tune/run/cancel", {})
    live.finish()
    assert live.ask().status_code == 200


class Held:
    """Trials wait here until they may go on."""

    def __init__(self) -> None:
        self.began, self.go_on = Event(), Event()


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[Held]:
    made, measure = Held(), trial.TrialRunner.run

    def wait(self: Any, number: int, *args: Any, should_stop: Callable[[], bool], **options: Any) -> Any:
        if number == 2:
            made.began.set()
            wait_until(lambda: made.go_on.is_set() or should_stop())
        return measure(self, number, *args, should_stop=should_stop, **options)

    monkeypatch.setattr(trial.TrialRunner, "run", wait)
    yield made
    made.go_on.set()


def test_a_walk_from_a_goal_to_settings_in_use(server: TunedServer) -> None:
    """Goal, limits, run, result, apply, export, and the plan in the history; every step a plain page."""
    goals = server.browse("/tune").text
    assert len(re.findall(r'href="/tune/limits\?goal=', goals)) == 6
    link = re.search(r'href="(/tune/limits\?goal=chat[^"]*)"', goals)
    assert link
    limits = server.browse(html.unescape(link[1])).text
    assert 'action="/tune/run"' in limits
    assert "does not answer until the run ends" in limits
    page = server.begin(max_ttft="30", min_context="128")
    assert page.url.path == "/tune/run"
    assert '<meta http-equiv="refresh" content="2">' in page.text
    result = text_of(server.finish())
    assert "Tuned in" in result
    assert "Predicted and measured" in result
    assert "passed" in result
    before = server.ask().json()
    applied = server.browse("/tune/result/apply", {"name": "mine"}).text
    assert "In use now and saved as mine" in applied
    assert server.ask().json()["choices"][0]["message"] == before["choices"][0]["message"]
    [profile] = read_profiles()
    assert (profile.name, profile.applied) == ("mine", True)
    plan = server.manager.ready[0].plan
    assert plan.max_num_batched_tokens == profile.settings.get("max_num_batched_tokens", plan.max_num_batched_tokens)
    flags, toml = (server.get(f"/tune/result/{file}") for file in ("flags.txt", "profile.toml"))
    assert flags.text.startswith("localllm up ")
    assert "attachment" in toml.headers["content-disposition"]
    [table] = tomllib.loads(toml.text)["models"].values()
    assert table == profile.settings
    history = server.browse("/tune").text
    assert "Every start uses it." in history
    file = re.search(r'name="file" value="([^"]+)"', history)
    assert file
    assert (
        "There are no saved profiles yet" in server.browse("/tune/plans/delete", {"file": html.unescape(file[1])}).text
    )
    assert read_profiles() == []


def test_a_plan_of_before_is_applied(server: TunedServer) -> None:
    server.begin()
    server.finish()
    server.browse("/tune/result/save", {"name": "later"})
    [stored] = stored_profiles()
    stored.path.unlink()  # kept under another of the model's names, which it keeps
    path = save_profile(replace(stored.profile, settings={"max_num_batched_tokens": 128}), "another-name")
    [stored] = stored_profiles()
    history = server.browse("/tune").text
    assert "A start with --profile later uses it." in text_of(history)
    assert 'formaction="/tune/plans/apply"' in history
    applied = server.browse("/tune/plans/apply", {"file": stored.path.name})
    assert (applied.status_code, applied.url.path) == (200, "/tune")
    assert "Every start uses it." in applied.text
    assert 'formaction="/tune/plans/apply"' not in applied.text
    assert server.manager.ready[0].plan.max_num_batched_tokens == 128
    assert [each.path for each in stored_profiles()] == [path]
    assert server.ask().status_code == 200
    other = replace(stored.profile, name="other", key=replace(stored.profile.key, device="another"))
    path = save_profile(other, stored.model)
    refused = server.browse("/tune/plans/apply", {"file": path.name})
    assert refused.status_code == 400
    assert "cannot be applied" in refused.text
    assert server.browse("/tune/plans/apply", {"file": "../good"}).status_code == 400


def test_requests_during_a_run_are_told_to_come_again(server: TunedServer, held: Held) -> None:
    server.begin()
    assert held.began.wait(20)
    refused = server.ask()
    assert refused.status_code == 503
    assert refused.json()["error"]["code"] == "model_tuning"
    assert int(refused.headers["retry-after"]) > 2
    assert server.get("/health").status_code == 503
    chat = server.browse("/chat", {"message": "hi"})
    assert "is being tuned" in chat.text
    page = text_of(server.browse("/tune/run").text)
    assert "Trial 2:" in page
    assert "running" in page
    second = server.begin("throughput")
    assert second.status_code == 409
    assert "A tuning run is under way." in second.text
    with server.http.stream("GET", "/live/tune") as one, server.http.stream("GET", "/live/tune") as other:
        tabs = [stream.iter_text() for stream in (one, other)]
        for tab in tabs:  # each has all of it at once
            said = next(tab)
            for part in ("tune-progress", "tune-best", "tune-scatter", "tune-trials"):
                assert f'hx-target="#{part}"' in said
        held.go_on.set()
        assert "event: ready" in "".join(tabs[0])
    server.finish()
    assert server.ask().status_code == 200


def test_a_cancelled_run_shows_what_was_measured_and_the_model_serves(server: TunedServer, held: Held) -> None:
    server.begin()
    assert held.began.wait(20)
    assert "Cancelling" in server.browse("/tune/run/cancel", {}).text or server.finish()
    result = text_of(server.finish())
    assert "Cancelled after" in result
    assert "There was no soak test." in result
    assert server.ask().status_code == 200


def test_a_trial_out_of_memory_is_a_line_of_the_table(server: TunedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    def open_or_not(self: trial.TrialRunner, settings: Any) -> Any:
        if settings.get("max_num_batched_tokens") == 256:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")
        return opened(self, settings)

    opened = trial.TrialRunner.open
    monkeypatch.setattr(trial.TrialRunner, "open", open_or_not)
    server.begin()
    result = text_of(server.finish())
    assert "out of memory CUDA out of memory. Tried to allocate 20.00 GiB." in result
    assert "Predicted and measured" in result


def test_a_run_that_breaks_is_told_and_the_model_serves(server: TunedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run.TuningRun, "space", lambda self: 1 // 0)
    server.begin()
    result = text_of(server.finish())
    assert "The run failed. ZeroDivisionError" in result
    assert server.ask().status_code == 200
    assert server.browse("/tune/result/apply", {"name": "x"}).status_code == 409
    assert server.get("/tune/result/flags.txt").status_code == 409


def test_where_nothing_keeps_the_limits_the_page_says_why(server: TunedServer) -> None:
    server.begin(min_context="100k")
    assert "No settings reached the goal. over a limit: its context of 256 is below the minimum of 100000" in text_of(
        server.finish()
    )


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("max_ttft", "soon", "The longest wait for the first token is not valid."),
        ("max_ttft", "nan", "above 0"),
        ("max_tpot", "-1", "The longest time for each token is not valid."),
        ("min_context", "1e400", "The shortest context is not valid."),
        ("max_memory", "9" * 5000, "The most memory is not valid."),
        ("max_memory", "<script>alert(1)</script>", "a size, such as 6 GiB"),
        ("people", "4", "--people is not valid here."),
        ("goal", "fame", "Unknown goal"),
        ("effort", "endless", "Unknown effort"),
        ("model", "nobody", "not loaded"),
        ("colour", "red", "The form has no field"),
    ],
)
def test_what_is_not_understood_is_refused_by_name_and_given_back(
    server: TunedServer, field: str, value: str, said: str
) -> None:
    answer = server.begin(**{"goal": "chat", field: value})
    assert answer.status_code in (400, 409)
    assert said in html.unescape(answer.text)
    assert "<script>alert" not in answer.text
    if field.startswith("m") and field != "model":
        assert html.escape(value[:100]).replace("&#x27;", "&#39;") in answer.text


def test_a_name_that_is_none_keeps_nothing(server: TunedServer) -> None:
    server.begin()
    server.finish()
    refused = server.browse("/tune/result/save", {"name": "../../evil"})
    assert refused.status_code == 400
    assert "is not a valid name for a profile" in refused.text
    assert read_profiles() == []
    assert "Saved as good" in server.browse("/tune/result/save", {"name": "good"}).text
    assert [(each.name, each.applied) for each in read_profiles()] == [("good", False)]
    assert server.get("/live/tune").text == "event: ready\ndata: \n\n"  # a page that finds no run is told to reload
    assert server.browse("/tune/plans/delete", {"file": "../good"}).status_code == 400


def test_the_wizard_is_for_whoever_has_the_machine(server: TunedServer) -> None:
    for method, path in (("GET", "/tune"), ("POST", "/tune/run"), ("POST", "/tune/result/apply"), ("GET", "/tune/run")):
        assert pages.rules().scope_of(method, path) == "admin"
    assert not Key("a", "infer", "").may(pages.rules().scope_of("POST", "/tune/run/cancel"))
    foreign = server.http.post("/tune/run", data={"goal": "chat"}, headers={"sec-fetch-site": "cross-site"})
    assert foreign.status_code == 403
