"""The Models page over a real socket, without scripts, on a local hub that real clients ask."""

import asyncio
import re
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from localllm.config.settings import EngineConfig, ModelTable, Settings
from localllm.machine.hardware import Gpu, Hardware, Speeds
from localllm.models.library.hub.plan import plan_download
from localllm.models.library.hub.pull import pull
from localllm.web import pages
from localllm.web.pages.library import fit_checks, state
from localllm.web.pages.library.fit_checks import FitChecks, check_fit
from tests.hub import conftest as hub_fixtures
from tests.hub.local_hub import LocalHub, Trouble, wait_until_stalled
from tests.web.library_server import LibraryServer, Loads, only_pick
from tests.web.live_server import wait_until

pytestmark = pytest.mark.slow

hub, checkpoint = hub_fixtures.hub, hub_fixtures.checkpoint
WEIGHTS = "model.safetensors"
SCRIPTED = {"hx-request": "true"}


@pytest.fixture
def loads(hub: LocalHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Loads:
    return Loads(tmp_path / "made", monkeypatch)


@pytest.fixture
def browser(loads: Loads) -> Iterator[httpx.Client]:
    with LibraryServer() as live, browser_of(live) as client:
        yield client


def browser_of(live: LibraryServer, **options: Any) -> httpx.Client:
    return httpx.Client(
        base_url=live.url, timeout=20, follow_redirects=True, headers={"accept": "text/html,*/*;q=0.8"}, **options
    )


def install(hub: LocalHub, tiny: Path, name: str = "org/tiny") -> Path:
    hub.add_repo(name, tiny)
    return pull(plan_download(name))


def settled(browser: httpx.Client) -> str:
    """The page once the suggested models are planned; a browser without scripts reloads until then."""
    wait_until(lambda: "Looking for models" not in browser.get("/library").text)
    return browser.get("/library").text


def row(page: str, name: str) -> str:
    """One model's or download's part of a page."""
    found = [part for part in page.split('<li class="shelf__row">')[1:] if f">{name}</" in part]
    assert found, f"{name} is not on the page"
    return re.sub(r"\s+", " ", found[0].partition("</li>")[0])


def tags(part: str) -> list[str]:
    return re.findall(r'<span class="tag[^"]*">([^<]*)<', part)


def verbs(part: str) -> list[str]:
    return re.findall(r'name="verb" value="([a-z]+)"', part)


def do(browser: httpx.Client, verb: str, model: str) -> str:
    answer = browser.post("/library/models", data={"model": model, "verb": verb})
    assert answer.status_code == 200, answer.text
    return row(browser.get("/library").text, model)


def test_a_model_is_loaded_pinned_put_to_sleep_woken_unloaded_and_deleted(
    browser: httpx.Client, hub: LocalHub, tiny_llama_path: Path
) -> None:
    snapshot = install(hub, tiny_llama_path)
    shown = row(browser.get("/library").text, "org/tiny")
    assert tags(shown) == ["not loaded"]
    assert "safetensors · float32 · context 2,048 · Hugging Face cache · last read today" in shown
    browser.post("/library/models", data={"model": "org/tiny", "verb": "load"})
    wait_until(lambda: tags(row(browser.get("/library").text, "tiny")) == ["loaded"])
    assert verbs(row(browser.get("/library").text, "tiny")) == ["unload", "sleep", "pin"]
    assert tags(do(browser, "pin", "tiny")) == ["loaded", "pinned"]
    assert tags(do(browser, "unpin", "tiny")) == ["loaded"]
    assert tags(do(browser, "sleep", "tiny")) == ["sleeping"]
    assert tags(do(browser, "wake", "tiny")) == ["loaded"]
    refused = browser.get("/library/delete?model=org/tiny").text
    assert "org/tiny is loaded." in refused
    assert "Unload it first." in refused
    assert browser.post("/library/delete", data={"model": "org/tiny"}).status_code == 409
    assert snapshot.exists()
    assert tags(do(browser, "unload", "tiny")) == ["not loaded"]
    question = browser.get("/library/delete?model=org/tiny").text
    size = re.search(r"This frees (\d+ KiB) in ", question)
    assert size, question
    deleted = browser.post("/library/delete", data={"model": "org/tiny"})
    assert f"org/tiny was deleted; {size[1]} freed." in deleted.text
    assert not snapshot.exists()
    assert "org/tiny" not in browser.get("/library").text


def test_a_model_is_loaded_with_options_which_are_counted_and_remembered(
    hub: LocalHub, loads: Loads, tiny_llama_path: Path, tmp_path: Path
) -> None:
    install(hub, tiny_llama_path)
    file = tmp_path / "config.toml"
    with LibraryServer(file=file) as live, browser_of(live) as browser:
        page = browser.get("/library/model/org/tiny").text
        assert "Load with options" in page
        assert 'name="max_model_len" type="number" min="1" max="2048" required value="2048"' in page
        asked = {"model": "org/tiny", "max_model_len": "512", "kv_cache_dtype": "int8", "max_num_seqs": "2"}
        assert "KV cache" in browser.get("/library/load", params=asked).text
        wrong = browser.get("/library/load", params=asked | {"max_model_len": "many"})
        assert (wrong.status_code, "Context, tokens: " in wrong.text) == (400, True)
        assert browser.get("/library/load", params=asked | {"model": "/etc"}).status_code == 404
        browser.post("/library/load", data=asked | {"remember": "yes"})
        wait_until(lambda: tags(row(browser.get("/library").text, "tiny")) == ["loaded"])
        chosen = loads.configs[-1]
        assert (chosen.max_model_len, chosen.kv_cache_dtype, chosen.max_num_seqs) == (512, "int8", 2)
        assert "Unload and load with these" in browser.get("/library/model/tiny").text
        browser.post("/library/load", data={"model": "tiny", "max_model_len": "256"})
        wait_until(lambda: loads.configs[-1].max_model_len == 256)
        assert loads.configs[-1].kv_cache_dtype == "int8", "what was chosen before stays"
        assert '[models."org/tiny"]' in file.read_text()
        refused = browser.post("/library/load", data={"model": "tiny", "max_model_len": "0"})
        assert (refused.status_code, "out of range" in refused.text) == (400, True)
        assert len(loads.configs) == 3, "a refused option unloads nothing"


def test_a_load_shows_where_it_is_and_can_be_stopped(
    browser: httpx.Client, hub: LocalHub, loads: Loads, tiny_llama_path: Path
) -> None:
    install(hub, tiny_llama_path)
    loads.gate.clear()
    browser.post("/library/models", data={"model": "org/tiny", "verb": "load"})
    wait_until(lambda: "2.3 of 5.7 GiB" in browser.get("/library").text)
    name = "org/tiny" if ">org/tiny</a>" in browser.get("/library").text else "tiny"
    shown = row(browser.get("/library").text, name)
    assert tags(shown) == ["loading"]
    assert '<progress class="phase__bar" max="1" value="0.400"' in shown
    assert "Read the weights" in shown
    assert re.search(r'<progress class="shelf__more shelf__bar" max="1" value="0\.5\d+"', shown), "of the whole load"
    assert verbs(shown) == ["unload"]
    assert tags(do(browser, "unload", name)) == ["not loaded"]


def test_a_search_is_quick_and_each_fit_is_read_from_headers(
    browser: httpx.Client, hub: LocalHub, tiny_llama_path: Path, checkpoint: Path
) -> None:
    hub.add_repo("org/tiny", tiny_llama_path, downloads=1234)
    hub.add_repo("org/tiny-closed", tiny_llama_path, gated=True)
    hub.add_repo("org/tiny-odd", checkpoint, downloads=1)
    assert browser.get("/library/discover").status_code == 200
    assert browser.get("/library").status_code == 200
    assert hub.sent == [], "nothing is asked before somebody searches"
    page = browser.get("/library/discover", params={"q": "tiny"}).text
    assert [sent.path for sent in hub.sent] == ["/api/models"]
    assert "1,234 downloads · 3 likes · apache-2.0" in row(page, "org/tiny")
    assert tags(row(page, "org/tiny-closed")) == ["safetensors", "gated"]
    urls = re.findall(r'hx-get="(/library/fit[^"]+)" hx-trigger="revealed"', page)
    fits, closed, odd = (browser.get(url.replace("&amp;", "&"), headers=SCRIPTED).text for url in urls)
    assert tags(fits) == ["Fits"]
    assert re.search(r"KiB to download</b> · [\d.]+ MiB at 2,048 tokens · [\d.]+ GiB free in memory", fits)
    assert tags(closed) == ["Gated"]
    assert f'href="{hub.url}/org/tiny-closed"' in closed
    assert "localllm login" in closed
    assert tags(odd) == ["Not supported"]
    assert hub.bytes_sent(WEIGHTS) < 3 * 2**18, "headers only"
    asked = len(hub.sent)
    browser.get(urls[0])
    assert len(hub.sent) == asked, "an answer holds for a while"


def test_a_model_page_tells_facts_fit_and_files_before_a_download(
    browser: httpx.Client, hub: LocalHub, tiny_llama_path: Path
) -> None:
    hub.add_repo("org/tiny", tiny_llama_path)
    page = browser.get("/library/model/org/tiny").text
    assert tags(page) == ["Fits"]
    for said in ("LlamaForCausalLM", "KV cache, per token", "model.safetensors", "apache-2.0", "Download 5"):
        assert said in page
    assert browser.get("/library/model/org/absent").status_code == 404
    assert browser.get("/library/model/demo").status_code == 200
    for path in ("%2Fetc%2Fpasswd", "~/x", "pyproject.toml", "x" * 2000):
        assert browser.get(f"/library/model/{path}").status_code == 404


def test_a_models_page_comes_before_a_slow_hub_answers(
    browser: httpx.Client, hub: LocalHub, tiny_llama_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add_repo("org/tiny", tiny_llama_path)
    answers = threading.Event()

    def slow(*asked: Any, **more: Any) -> Any:
        answers.wait(20)
        return check_fit(*asked, **more)

    monkeypatch.setattr(fit_checks, "check_fit", slow)
    page = browser.get("/library/model/org/tiny").text
    assert "Reading what the hub says about it" in page
    assert 'hx-get="/library/model/org/tiny" hx-trigger="load"' in page
    answers.set()
    assert "Does it fit?" in browser.get("/library/model/org/tiny", headers=SCRIPTED).text
    assert "Does it fit?" in browser.get("/library/model/org/tiny?wait").text


def test_a_download_is_paused_goes_on_and_is_loaded(browser: httpx.Client, hub: LocalHub, checkpoint: Path) -> None:
    hub.add_repo("org/name", checkpoint)
    hub.troubles[WEIGHTS] = Trouble(stall_after=100_000)
    page = browser.post("/library/downloads", data={"model": "org/name"})
    assert page.url.path == "/library/downloads"
    wait_until_stalled(hub)
    wait_until(lambda: "of 293 KiB" in (page := browser.get("/library/downloads").text) and 'value="0.3' in page)
    shown = row(browser.get("/library/downloads").text, "org/name")
    assert tags(shown) == ["running"]
    assert 'http-equiv="refresh"' in browser.get("/library/downloads").text
    assert "4 of 5 files" in shown
    assert verbs(shown) == ["pause", "discard"]
    browser.post("/library/downloads/1", data={"verb": "pause"})
    shown = row(browser.get("/library/downloads").text, "org/name")
    assert (tags(shown), verbs(shown)) == (["paused"], ["resume", "discard"])
    hub.go_on.set()
    wait_until(lambda: hub.bytes_sent(WEIGHTS) == 100_000)
    browser.post("/library/downloads/1", data={"verb": "resume"})
    wait_until(lambda: tags(row(browser.get("/library/downloads").text, "org/name")) == ["done"])
    assert hub.bytes_sent(WEIGHTS) == (checkpoint / WEIGHTS).stat().st_size, "no byte came twice"
    assert "org/name" in browser.get("/library").text
    browser.post("/library/downloads/1", data={"verb": "forget"})
    assert "No model is being downloaded." in browser.get("/library/downloads").text


def test_a_cancelled_download_leaves_nothing(browser: httpx.Client, hub: LocalHub, checkpoint: Path) -> None:
    hub.add_repo("org/name", checkpoint)
    hub.troubles[WEIGHTS] = Trouble(stall_after=100_000)
    browser.post("/library/downloads", data={"model": "org/name"})
    wait_until_stalled(hub)
    wait_until(lambda: 'value="0.3' in browser.get("/library/downloads").text)
    refused = browser.post("/library/delete", data={"model": "org/name"})
    assert (refused.status_code, "org/name is being downloaded." in refused.text) == (409, True)
    hub.go_on.set()
    page = browser.post("/library/downloads/1", data={"verb": "discard"})
    assert re.search(r"The download of org/name was cancelled; \d+ KiB freed\.", page.text)
    shown = row(page.text, "org/name")
    assert (tags(shown), "0 B of 293 KiB" in shown) == (["cancelled"], True)
    assert "org/name" not in browser.get("/library").text


def test_a_download_that_fails_says_why_and_is_tried_again(
    browser: httpx.Client, hub: LocalHub, checkpoint: Path
) -> None:
    hub.add_repo("org/name", checkpoint)
    hub.troubles[WEIGHTS] = Trouble(wrong_bytes=True, times=2)
    browser.post("/library/downloads", data={"model": "org/name"})
    wait_until(lambda: tags(row(browser.get("/library/downloads").text, "org/name")) == ["failed"])
    shown = row(browser.get("/library/downloads").text, "org/name")
    assert "model.safetensors arrived damaged." in shown
    assert verbs(shown) == ["resume", "discard"]
    browser.post("/library/downloads/1", data={"verb": "resume"})
    browser.post("/library/downloads/1", data={"verb": "resume"})
    wait_until(lambda: tags(row(browser.get("/library/downloads").text, "org/name")) in (["done"], ["failed"]))
    browser.post("/library/downloads/1", data={"verb": "resume"})
    wait_until(lambda: tags(row(browser.get("/library/downloads").text, "org/name")) == ["done"])


def test_what_an_earlier_server_left_goes_on_or_goes_away(
    browser: httpx.Client, hub: LocalHub, checkpoint: Path, tmp_path: Path
) -> None:
    hub.add_repo("org/name", checkpoint)
    blobs = tmp_path / "hf" / "hub" / "models--org--name" / "blobs"
    blobs.mkdir(parents=True)
    (blobs / "abc.incomplete").write_bytes(bytes(2048))
    assert "2.0 KiB downloaded" in row(browser.get("/library/downloads").text, "org/name")
    page = browser.post("/library/partial", data={"model": "org/name"})
    assert "2.0 KiB of org/name were deleted." in page.text
    assert not blobs.exists()


def test_a_hub_that_is_down_leaves_the_rest_at_work(
    browser: httpx.Client, hub: LocalHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    answer = browser.get("/library/discover", params={"q": "tiny", "format": "gguf"})
    assert answer.status_code == 503
    assert "The hub cannot be reached at http://127.0.0.1:9." in answer.text
    assert 'href="/library/discover?q=tiny&amp;format=gguf"' in answer.text
    refused = browser.post("/library/downloads", data={"model": "org/name"})
    assert (refused.status_code, "cannot be reached" in refused.text) == (503, True)
    assert browser.post("/library/downloads", data={"model": "../../etc"}).status_code == 404
    assert tags(row(browser.get("/library").text, "demo")) == ["loaded"]


@pytest.mark.parametrize("variable", ["", "HF_HUB_OFFLINE"])
def test_an_offline_server_asks_nobody_and_says_what_switched_the_hub_off(
    hub: LocalHub, loads: Loads, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    """Wherever the hub is needed, the page names the flag or the variable, shows what it knows, and leads back."""
    picks, switch = only_pick("org/pick"), variable or "--offline"
    if variable:
        monkeypatch.setenv(variable, "1")
    engine = EngineConfig(offline=not variable)
    with LibraryServer(engine, picks=picks) as live, browser_of(live) as browser:
        search = browser.get("/library/discover?q=qwen3")
        assert search.status_code == 409
        assert "Search is off: this server was started offline." in search.text
        assert f"Start it without {switch} to search {hub.url.partition('://')[2]}." in search.text
        assert "localllm pull" not in search.text
        assert browser.get("/library/discover").status_code == 200
        page = settled(browser)
        assert "Needs the hub" in page
        assert f"start it without <code>{switch}</code>" in page
        assert '/library/downloads"' not in page.partition('class="picks__list"')[2], "no button to download"
        pick = browser.get("/library/model/org/pick")
        assert pick.status_code == 200
        for said in ("Needs the hub", "LlamaForCausalLM", "apache-2.0", "at 4,096 tokens", 'href="/library"', switch):
            assert said in pick.text, said
        absent = browser.get("/library/model/org/name")
        assert absent.status_code == 409
        assert '<a class="button button--primary" href="/library">Back to Models</a>' in absent.text
        assert f"Set: {switch}." in absent.text
        assert "downloads are disabled" in browser.get("/library/fit?model=org/name").text
        refused = browser.post("/library/downloads", data={"model": "org/name"})
        assert (refused.status_code, f"Start it without {switch}." in refused.text) == (409, True)
    assert hub.sent == []


def test_an_unload_tells_what_it_waits_for_and_is_taken_back(
    browser: httpx.Client, hub: LocalHub, loads: Loads
) -> None:
    """A stream runs: the row counts it and offers to keep the model, which then serves on."""
    chat = {"model": "demo", "messages": [{"role": "user", "content": "hi"}], "stream": True, "max_tokens": 20}
    gate = loads.runners[-1].gate
    gate.clear()
    with browser.stream("POST", "/v1/chat/completions", json=chat) as stream:
        lines = stream.iter_lines()
        next(lines)
        browser.post("/library/models", data={"model": "demo", "verb": "unload"})
        shown = row(browser.get("/library").text, "demo")
        assert (tags(shown), verbs(shown)) == (["unloading, 1 request to finish"], ["keep"])
        kept = browser.post("/library/models", data={"model": "demo", "verb": "keep"})
        assert kept.status_code == 200
        wait_until(lambda: tags(row(browser.get("/library").text, "demo")) == ["loaded"])
        gate.set()
        assert "data: [DONE]" in list(lines)
    again = browser.post("/library/models", data={"model": "demo", "verb": "keep"})
    assert (again.status_code, "cannot be kept: it is ready." in again.text) == (409, True)


def test_three_models_to_begin_with_are_named_without_a_question_to_the_hub(
    browser: httpx.Client, hub: LocalHub, tiny_llama_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = Speeds(None, None, narrow=3e11, wide=1e11)
    monkeypatch.setattr(state, "with_kept_speeds", lambda hardware: replace(hardware, speeds=kept))
    page = settled(browser)
    assert page.index('id="installed-title"') < page.index('id="picks-title"'), "what is here comes first"
    assert re.search(r"Runs on [^<]+ free", page)
    assert re.search(r"[\d.]+ [GM]iB at 4,096 tokens \([\d.]+ [GM]iB at its longest, [\d,]+\)", page)
    assert "docs/guides" not in page
    assert "the hub is contacted only when you click" in page
    lists = page.split('class="picks__list"')[1:]
    assert all(1 <= each.count('<li class="pick">') <= most for each, most in zip(lists, (3, 2), strict=False))
    assert ("Models that transcribe speech" in page) == (len(lists) == 2)
    assert all(each.count("times real time; 5 s of dictation") == each.count('<li class="pick">') for each in lists[1:])
    assert hub.sent == []
    install(hub, tiny_llama_path)
    assert "Models to start with" not in browser.get("/library").text


def test_a_path_is_checked_and_loaded(browser: httpx.Client, tiny_llama_path: Path, tmp_path: Path) -> None:
    page = browser.post("/library/import", data={"path": str(tiny_llama_path)})
    name = tiny_llama_path.name
    assert (page.url.path, dict(page.url.params)) == ("/library", {"loads": name})
    wait_until(lambda: tags(row(browser.get("/library").text, name)) == ["loaded"])
    assert f"{name} is loaded." in browser.get(f"/library?loads={name}").text
    assert '<div id="library-notice" aria-live="polite"></div>' in browser.get("/library?loads=absent").text
    assert "Does it fit?" in browser.get(f"/library/model/{name}").text
    chat = {"model": name, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    assert browser.post("/v1/chat/completions", json=chat).status_code == 200
    (tmp_path / "empty").mkdir()
    (tmp_path / "bad.gguf").write_bytes(b"no model")
    for path, status, why in [
        ("tiny", 400, "is not an absolute path"),
        ("/no/where", 404, "No folder or .gguf file there."),
        (str(tiny_llama_path / "config.json"), 404, "is another kind of file"),
        (str(tmp_path / "empty"), 404, "has no config.json"),
        (str(tmp_path / "bad.gguf"), 500, "bad.gguf"),
        ("/" + "x" * 3000, 404, "No folder or .gguf file there."),
        ("/a\0b", 400, "is not an absolute path"),
        ("", 400, "path"),
    ]:
        answer = browser.post("/library/import", data={"path": path})
        assert (answer.status_code, why in answer.text) == (status, True), (path, answer.text[-900:])
        form = answer.text.partition('id="import-path"')[2].partition("</form>")[0]
        assert why in form, "the error stands at the field"
        assert 'aria-invalid="true"' in form


@pytest.mark.parametrize(
    ("url", "form", "status"),
    [
        ("/library/models", {}, 400),
        ("/library/models", {"model": "demo", "verb": "explode"}, 400),
        ("/library/models", {"model": "org/absent", "verb": "load"}, 404),
        ("/library/models", {"model": "nobody", "verb": "sleep"}, 409),
        ("/library/delete", {"model": "demo"}, 400),
        ("/library/delete", {"model": "org/absent"}, 404),
        ("/library/downloads", {"model": "org/name"}, 409),
        ("/library/downloads/99", {"verb": "pause"}, 404),
        ("/library/downloads/99", {"verb": "__init__"}, 400),
        ("/library/partial", {"model": " "}, 400),
        ("/library/models", {"model": "x" * 5000, "verb": "load"}, 400),
    ],
)
def test_refusals_come_as_a_page_and_as_a_fragment(
    refusing: httpx.Client, url: str, form: dict[str, str], status: int
) -> None:
    page = refusing.post(url, data=form)
    assert (page.status_code, "<html" in page.text, 'class="notice"' in page.text) == (status, True, True)
    assert "http-equiv" not in page.text, "a reload would ask again with GET"
    fragment = refusing.post(url, data=form, headers=SCRIPTED)
    assert (fragment.status_code, "<html" in fragment.text) == (status, False)
    other_site = refusing.post(url, data=form, headers={"origin": "https://evil.example"})
    assert other_site.status_code == 403


@pytest.fixture(scope="module")
def refusing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HOME", str(tmp_path_factory.mktemp("home")))
        Loads(tmp_path_factory.mktemp("made"), patch)
        with LibraryServer() as live, browser_of(live) as client:
            yield client


def test_only_who_has_the_machine_may_change_it(hub: LocalHub, loads: Loads) -> None:
    with LibraryServer(api_key="secret") as live:
        for method, url in (("GET", "/library"), ("POST", "/library/models"), ("POST", "/library/downloads")):
            assert live.http.request(method, url, headers={"authorization": "Bearer wrong"}).status_code == 401
        assert live.get("/library", headers={"authorization": "Bearer secret"}).status_code == 200
    reads = ("/library", "/library/discover", "/library/fit", "/library/model/org/name", "/live/library")
    assert {pages.rules().scope_of("GET", path) for path in reads} == {"infer"}
    changes = ("/library/models", "/library/import", "/library/delete", "/library/downloads/1", "/library/partial")
    assert {pages.rules().scope_of("POST", path) for path in changes} == {"admin"}


def test_htmx_gets_the_parts_that_changed(browser: httpx.Client) -> None:
    answer = browser.post("/library/models", data={"model": "demo", "verb": "pin"}, headers=SCRIPTED).text
    assert '<hx-partial hx-target="#installed"' in answer
    assert tags(row(answer, "demo")) == ["loaded", "pinned"]


def test_the_page_is_told_what_changes(browser: httpx.Client) -> None:
    said = ""
    with browser.stream("GET", "/live/library?on=installed") as response:
        for text in response.iter_text():
            said += text
            if "pinned" in said:
                break
            if "#installed" in said and "Unpin" not in said:
                browser.post("/library/models", data={"model": "demo", "verb": "pin"})
    assert '<hx-partial hx-target="#library-tabs"' in said
    assert '<hx-partial hx-target="#status-pill"' in said


MIB, GIB = 1024**2, 1024**3


def machine(ram: int, gpu: int = 0) -> Hardware:
    gpus = (Gpu(0, "RTX", gpu, gpu, (8, 9)),) if gpu else ()
    return Hardware(gpus, "CPU", 4, ram, ram)


@pytest.mark.parametrize(
    ("hardware", "kind", "said"),
    [
        (machine(8 * GIB), "fits", "at 2,048 tokens · 8.0 GiB free in memory"),
        (machine(8 * GIB, 8 * GIB), "fits", "free on RTX"),
        (machine(8 * GIB, 600 * MIB), "offload", "free in memory"),
        (machine(515 * MIB, 0), "no", "the budget is"),
    ],
)
def test_fits_in_words(tiny_llama_path: Path, hardware: Hardware, kind: str, said: str) -> None:
    fit = check_fit(str(tiny_llama_path), EngineConfig(), hardware)
    assert fit.verdict.kind == kind
    assert said in fit.verdict.numbers
    assert fit.table is not None
    assert sum(segment.width for segment in fit.table.segments) == pytest.approx(100, abs=0.1)
    if kind == "offload":
        assert "nor a part of it beside the rest in RAM" in fit.verdict.hint


def test_a_context_that_has_to_be_cut_is_told_with_what_would_give_more(tiny_llama_path: Path) -> None:
    fit = check_fit(str(tiny_llama_path), EngineConfig(kv_cache_memory_bytes=300_000), machine(8 * GIB))
    assert fit.verdict.kind == "shorter"
    assert " of 2,048 tokens" in fit.verdict.numbers
    assert fit.verdict.hint.startswith("Without --kv-cache-memory-bytes: context 2,048 tokens")


async def test_each_model_is_looked_at_with_settings_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, str] = {}

    def note(name: str, config: EngineConfig, *others: Any, **named: Any) -> SimpleNamespace:
        asked[name] = config.cpu_weights
        return SimpleNamespace(error=None)

    monkeypatch.setattr(fit_checks, "check_fit", note)
    tables = {"exact-one": ModelTable("exact-one", {"cpu_weights": "exact"})}
    manager = SimpleNamespace(entries=[], register=SimpleNamespace(find=lambda name: None))
    known = FitChecks(manager, Settings(EngineConfig(cpu_weights="small"), models=tables))  # type: ignore[arg-type]
    await asyncio.gather(known.of("exact-one"), known.of("another"))
    assert asked == {"exact-one": "exact", "another": "small"}
