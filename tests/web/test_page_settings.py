"""The settings page over a real socket: values and sources, lines for the file, keys that lock nobody out unsaid."""

import errno
import logging
import os
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest

from localllm.config.resolve import resolve
from localllm.config.settings import SETTINGS, ModelTable, ServerConfig, Settings
from localllm.engine.memory.block_stores import DiskStore
from localllm.files.record_file import write_records
from localllm.machine.install_kind import InstallKind
from localllm.web.access.keys import Key, add_key, keys_path, read_keys
from localllm.web.pages.chat.store.database import chats_path
from localllm.web.pages.settings import handlers, restart, setting_rows
from localllm.web.pages.settings.key_handlers import lockout_warning
from tests.web.live_server import LiveServer
from tests.web.pages_stub import StubModel, stub_plan


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        home = tmp_path_factory.mktemp("home")
        for name in ("XDG_DATA_HOME", "XDG_CONFIG_HOME", "HF_HOME", "HF_HUB_CACHE"):
            patch.setenv(name, str(home / name.lower()))
        yield home


@pytest.fixture(scope="module")
def server(home: Path) -> Iterator[LiveServer]:
    path = home / "config.toml"
    path.write_text("max_num_seqs = 8\n")
    settings = resolve({"port": 0, "rate_limit": 6000}, {"LOCALLLM_LOG_LEVEL": "debug"}, path)
    with LiveServer(StubModel(), settings) as live:  # type: ignore[arg-type]
        yield live


@pytest.fixture
def unlocked(server: LiveServer) -> Iterator[LiveServer]:
    yield server
    keys_path().unlink(missing_ok=True)
    server.server.app.state.key_ring._locked = False


def change(server: LiveServer, method: str, **fields: str) -> httpx.Response:
    kind = {"params": fields} if method == "GET" else {"data": fields}
    return server.http.request(method, "/settings/change", **kind)  # type: ignore[arg-type]


# Values -------------------------------------------------------------------------------------------------------------


def test_every_setting_is_shown(server: LiveServer) -> None:
    page = server.get("/settings").text
    assert set(re.findall(r'settings__name"><code>(\w+)</code>', page)) == set(SETTINGS)


def test_the_server_is_folded_below_what_people_look_for(server: LiveServer) -> None:
    page = server.get("/settings").text
    at = [page.index(f'id="{name}"') for name in ("keys", "appearance", "privacy", "storage", "server", "about")]
    assert at == sorted(at)
    assert page.count('<details class="card card--full settings__group">') > 5
    assert 'settings__group" open' not in page


@pytest.mark.parametrize(
    ("find", "finds", "leaves_out"),
    [
        ("max-num-seqs", {"max_num_seqs"}, {"port"}),
        ("KV cache", {"kv_cache_dtype", "kv_cache_memory_bytes"}, {"host"}),
        ("--open", {"open_browser"}, {"host"}),
        ("<b>", set(), set(SETTINGS)),
        ("", set(SETTINGS), set()),
    ],
)
def test_settings_are_found_by_their_words(
    server: LiveServer, find: str, finds: set[str], leaves_out: set[str]
) -> None:
    part = server.get("/settings", params={"find": find}, headers={"hx-request": "true"}).text
    assert part.startswith('<div class="settings__sections" id="setting-groups">')
    whole = server.get("/settings", params={"find": find}).text
    for text in (part, whole):
        shown = set(re.findall(r'settings__name"><code>(\w+)</code>', text))
        assert finds <= shown
        assert not leaves_out & shown
    assert ("No setting contains" in part) == (not finds)
    assert ('settings__group" open' in part) == (bool(find) and bool(finds))
    assert server.get("/settings", params={"find": "x" * 201}).status_code == 400


def test_a_value_is_typed_as_it_is_read_again() -> None:
    for spec in SETTINGS.values():
        text = spec.typed(spec.default)
        assert not text or spec.parse(text) == spec.default, spec.name
    for name, values in {"keep_alive": (float("inf"), 0.5, 12345678.25), "max_body_bytes": (2**30, 1000001)}.items():
        for value in values:
            assert SETTINGS[name].parse(SETTINGS[name].typed(value)) == value
    assert SETTINGS["api_key"].typed("sk-secret") == ""


def test_each_value_says_where_it_comes_from(server: LiveServer) -> None:
    settings = server.settings
    rows = {name: setting_rows.row(name, settings, None) for name in SETTINGS}
    assert (rows["max_num_seqs"].value, rows["max_num_seqs"].source) == ("8", "file")
    assert (rows["log_level"].value, rows["log_level"].source) == ("debug", "environment")
    assert (rows["rate_limit"].value, rows["rate_limit"].source) == ("6,000", "flag")
    assert (rows["block_size"].value, rows["block_size"].source) == ("64 on a GPU, 16 on CPU", "default")
    model: Any = SimpleNamespace(tuned={"block_size": 32, "max_num_seqs": 99}, plan=stub_plan())
    assert setting_rows.row("models_max", settings, None).value == "as many as fit"
    tuned = setting_rows.row("block_size", settings, model)
    assert (tuned.value, tuned.source) == ("32", "profile")
    assert setting_rows.row("max_num_seqs", settings, model).source == "file"
    assert setting_rows.row("max_model_len", settings, model).now == "2,048 tokens"
    assert setting_rows.row("max_model_len", settings, model).typed == "2048"
    assert setting_rows.row("max_body_bytes", settings, None).typed == "8MiB"
    assert setting_rows.row("kv_cache_dtype", settings, model).typed == "auto"
    table = replace(settings, models={"demo": ModelTable("demo", {"block_size": 16})})
    assert (
        setting_rows.row("block_size", table, model).value,
        setting_rows.row("block_size", table, model).source,
    ) == ("16", "file")


def test_a_key_of_the_command_line_is_never_shown() -> None:
    settings = Settings(server=ServerConfig(api_key="sk-secret"), sources={"api_key": "flag"})
    assert "secret" not in repr(setting_rows.row("api_key", settings, None))


# The file -----------------------------------------------------------------------------------------------------------


def test_a_line_is_shown_before_it_is_written(server: LiveServer, home: Path) -> None:
    path = home / "config.toml"
    before = path.read_text()
    first = change(server, "GET", name="max_model_len").text
    assert "Longest prompt plus output, in tokens (<code>max_model_len</code>)" in first
    assert "2,048 tokens (chosen at the start)" in first
    assert 'name="value" required' in first
    assert 'value="2048"' in first
    assert "Remove the line" not in first
    page = change(server, "GET", name="max_model_len", value="8k").text
    assert "max_model_len = &#34;8k&#34;" in page
    assert 'spellcheck="false" value="8k"' in page
    assert "takes effect at the next start" in page
    assert str(path) in page
    assert path.read_text() == before
    written = change(server, "POST", name="max_model_len", value="8k").text
    assert "This line is now in" in written
    assert "The change takes effect at the next start." in written
    assert "Remove the line from the file" in written
    assert path.read_text() == before + 'max_model_len = "8k"\n'
    gone = change(server, "POST", name="max_model_len", remove="yes")
    assert "The line was removed" in gone.text
    assert "Remove the line from the file" not in gone.text
    assert path.read_text() == before
    assert "overrides the file" in change(server, "GET", name="rate_limit", value="5").text


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"name": "max_num_seqs", "value": "5000"}, "1 to 4096"),
        ({"name": "max_num_seqs", "value": ""}, "is not valid"),
        ({"name": "trust_remote_code", "value": "true"}, "cannot be set here"),
        ({"name": "api_key", "value": "x"}, "create an API key instead"),
        ({"name": "nonsense", "value": "1"}, "Unknown setting"),
        ({"name": "x" * 5000, "value": "1"}, "Unknown setting"),
        ({"value": "1"}, "Unknown setting"),
    ],
)
def test_what_a_start_would_refuse_is_not_written(
    server: LiveServer, home: Path, fields: dict[str, str], says: str
) -> None:
    before = (home / "config.toml").read_text()
    for method in ("GET", "POST"):
        refused = change(server, method, **fields)
        assert refused.status_code == 400
        assert says in refused.text
    assert change(server, "POST", name="port").status_code == 400
    assert (home / "config.toml").read_text() == before


@pytest.mark.parametrize(
    ("cgroup", "command"),
    [
        ("0::/user.slice/user-7.slice/user@7.service/app.slice/localllm.service\n", "systemctl --user restart "),
        ("0::/system.slice/localllm.service\n", "sudo systemctl restart "),
        ("0::/user.slice/user-7.slice/user@7.service/app.slice/terminal.scope\n", ""),
    ],
)
def test_a_service_is_restarted_by_its_manager(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cgroup: str, command: str
) -> None:
    monkeypatch.setattr(restart, "CGROUP", tmp_path / "cgroup")
    monkeypatch.setattr(restart, "install_kind", lambda: InstallKind.PIP)
    request: Any = SimpleNamespace(app=SimpleNamespace(state={}))
    assert restart.how_to_restart(request).what == restart.AT_A_TERMINAL
    (tmp_path / "cgroup").write_text(cgroup)
    assert restart.how_to_restart(request).command == ""  # a terminal that a service started, for example
    monkeypatch.setenv("NOTIFY_SOCKET", "/run/notify")
    assert restart.how_to_restart(request).command == (f"{command}localllm.service" if command else "")


def test_a_server_that_may_not_replace_itself_says_how_it_is_restarted(server: LiveServer) -> None:
    refused = server.http.post("/settings/restart", headers={"accept": "text/html"})
    assert refused.status_code == 409
    assert "This server cannot restart itself." in refused.text
    back = server.get("/settings/restarting", params={"from": "another process"})
    assert (back.status_code, back.headers["location"]) == (303, "/settings")
    assert "event: ready" in server.get("/settings/live/restart", params={"from": "another process"}).text


def test_posts_of_other_sites_change_nothing(server: LiveServer, home: Path) -> None:
    before = (home / "config.toml").read_text()
    for path in (
        "/settings/change",
        "/settings/keys",
        "/settings/keys/a/remove",
        "/settings/log-level",
        "/settings/restart",
    ):
        sent = {"name": "port", "value": "1", "scope": "admin", "level": "error"}
        assert server.http.post(path, data=sent, headers={"sec-fetch-site": "cross-site"}).status_code == 403
    assert (home / "config.toml").read_text() == before
    assert not keys_path().exists()


def test_the_log_level_changes_at_once(server: LiveServer) -> None:
    root = logging.getLogger()
    before = root.level
    try:
        assert server.http.post("/settings/log-level", data={"level": "error"}).status_code == 303
        assert root.level == logging.ERROR
        assert "<option selected>error" in server.get("/settings").text
        assert server.http.post("/settings/log-level", data={"level": "loud"}).status_code == 400
    finally:
        root.setLevel(before)


# Keys ---------------------------------------------------------------------------------------------------------------


def test_the_first_admin_key_is_shown_once_and_logs_this_browser_in(unlocked: LiveServer) -> None:
    with httpx.Client(base_url=unlocked.url) as browser:
        refused = browser.post("/settings/keys", data={"name": "laptop", "scope": "admin"})
        assert refused.status_code == 403  # a key of this kind is a proof itself
        assert "localllm link" in refused.text
        browser.get(unlocked.link())
        assert '<option value="admin" selected>' in browser.get("/settings").text  # another would lock this page
        made = browser.post("/settings/keys", data={"name": "laptop", "scope": "admin"})
        assert "Key “laptop” is made" in made.text
        assert 'data-copy="new-key"' in made.text
        assert '<option value="infer" selected>' in browser.get("/settings").text
        [key] = re.findall(r"sk-local-[\w-]+", made.text)
        assert made.headers["cache-control"] == "no-store"
        page = browser.get("/settings").text
        assert "this browser" in page
        assert key not in page
        assert f"…{key[-4:]}" in page
        browser.post("/settings/keys", data={"name": "phone", "scope": "infer"})
        browser.post("/settings/keys/phone/remove")
        assert [each.name for each in read_keys(keys_path())] == ["laptop"]
        assert unlocked.get("/settings").status_code == 401
        refused = browser.post("/settings/keys/laptop/remove")
        assert refused.status_code == 409
        assert "It is the last key" in refused.text
        assert len(read_keys(keys_path())) == 1
        assert browser.post("/settings/keys/laptop/remove", data={"confirm": "yes"}).status_code == 303
        assert read_keys(keys_path()) == ()


def test_a_first_key_that_would_lock_out_is_made_only_when_asked_again(unlocked: LiveServer) -> None:
    sent = {"name": "phone", "scope": "infer"}
    owner = {"x-api-key": unlocked.server.app.state.key_ring.owner_secret}
    refused = unlocked.http.post("/settings/keys", data=sent, headers=owner)
    assert refused.status_code == 409
    assert "would lock you out" in refused.text
    assert 'value="phone"' in refused.text
    assert not keys_path().exists()
    assert "sk-local-" in unlocked.http.post("/settings/keys", data={**sent, "confirm": "yes"}, headers=owner).text


@pytest.mark.parametrize(
    ("others", "given", "mine", "says"),
    [
        ([], False, True, "last key:"),
        ([], True, False, ""),
        ([], True, True, "This browser"),
        (["infer"], False, False, "last key with the scope admin"),
        (["infer"], True, False, ""),
        (["admin"], False, False, ""),
        (["admin"], False, True, "This browser"),
    ],
)
def test_removing_a_key_says_who_is_locked_out(others: list[Any], given: bool, mine: bool, says: str) -> None:
    left = [Key(f"k{n}", scope, "0" * 64) for n, scope in enumerate(others)]
    why = lockout_warning(Key("k", "admin", "1" * 64), left, given=given, mine=mine)
    assert says in why
    assert bool(why) == bool(says)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"name": "", "scope": "admin"}, "not a valid name for a key"),
        ({"name": "a b", "scope": "admin"}, "not a valid name for a key"),
        ({"name": "x" * 65, "scope": "admin"}, "not a valid name for a key"),
        ({"name": "a", "scope": "root"}, "Unknown scope"),
        ({"name": "a"}, "Unknown scope"),
    ],
)
def test_a_key_that_cannot_be_made_is_refused_on_the_page(
    unlocked: LiveServer, fields: dict[str, str], says: str
) -> None:
    owner = {"x-api-key": unlocked.server.app.state.key_ring.owner_secret}
    refused = unlocked.http.post("/settings/keys", data=fields, headers=owner)
    assert refused.status_code == 400
    assert says in refused.text
    assert not keys_path().exists()


@pytest.mark.parametrize(("number", "says"), [(errno.ENOSPC, "No space left"), (errno.EROFS, "Read-only")])
def test_a_key_that_the_disk_does_not_take_is_refused_in_words(
    unlocked: LiveServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, number: int, says: str
) -> None:
    def full(path: Path, text: str) -> None:
        raise OSError(number, os.strerror(number), str(path))

    monkeypatch.setattr("localllm.web.access.keys.write_whole", full)
    owner = {"x-api-key": unlocked.server.app.state.key_ring.owner_secret}
    refused = unlocked.http.post("/settings/keys", data={"name": "a", "scope": "admin"}, headers=owner)
    assert refused.status_code == 503
    assert "The key a could not be saved." in refused.text
    assert says in refused.text
    assert 'value="a"' in refused.text
    assert "unhandled" not in caplog.text


def test_a_key_for_infer_sees_none_of_it(unlocked: LiveServer) -> None:
    add_key(keys_path(), "ops", "admin")
    key = {"x-api-key": add_key(keys_path(), "phone", "infer")}
    for path in ("/settings", "/settings/change?name=port", "/settings/doctor", "/logs", "/logs/live"):
        assert unlocked.get(path, headers=key).status_code == 403
    assert unlocked.http.post("/settings/keys/ops/remove", headers=key).status_code == 403
    gone = unlocked.http.post("/settings/keys/nobody/remove", headers={"x-api-key": add_key(keys_path(), "b", "admin")})
    assert gone.status_code == 400


# Storage, and this machine ------------------------------------------------------------------------------------------


def test_privacy_says_where_kv_blocks_are_kept_and_deleting_them_ends_it(
    server: LiveServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert "the KV cache is never written to disk" in server.get("/settings").text
    store = DiskStore(tmp_path / "localllm" / "kv", bytes(16), 10**6, "a model")
    store.put((0, bytes(16)), np.zeros(1000, np.uint8))
    store.close()
    page = server.get("/settings").text
    assert "never written to disk" not in page
    assert f"<code>{tmp_path / 'localllm' / 'kv'}</code>" in page
    assert "can turn them back into prompts and answers" in page
    assert server.http.post("/settings/kv/delete").status_code == 303
    assert "the KV cache is never written to disk" in server.get("/settings").text


def test_files_of_experts_are_in_the_storage_and_the_unused_ones_can_be_deleted(
    server: LiveServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert "Experts on disk" not in server.get("/settings").text
    path = tmp_path / "localllm" / "experts" / "a.experts"
    write_records(path, "digest", {}, [100], [[bytes(100)]])
    page = server.get("/settings").text
    assert "1 file, 1 of them of no loaded model" in page
    assert 'action="/settings/experts/delete"' in page
    assert server.http.post("/settings/experts/delete").status_code == 303
    assert not path.exists()


def test_storage_tells_sizes_as_they_are(
    server: LiveServer, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))  # where no chat has been yet
    blobs = home / "hf_hub_cache" / "models--a--b" / "blobs"
    blobs.mkdir(parents=True)
    (blobs / "x.incomplete").write_bytes(b"x" * 2048)
    (blobs / "link").symlink_to(blobs / "x.incomplete")
    page = server.get("/settings").text
    assert "2.0 KiB belong to unfinished downloads" in page
    assert 'data-label="Size">2.0 KiB<' in page
    assert "None yet. They are written here with the first one." in page
    assert f"<code>{chats_path()}</code>" in page
    links = re.findall(r'data-label="How to delete it"><a class="button button--quiet" href="([^"#]+)', page)
    assert links == ["/library/downloads", "/tune"]
    assert [server.get(link).status_code for link in links] == [200, 200]
    keys_path().parent.mkdir(parents=True, exist_ok=True)
    chats = [keys_path().with_name(f"chats.db{ending}") for ending in ("", "-wal", "-shm")]
    for path, size_bytes in zip(chats, (4096, 40960, 32768), strict=True):
        path.write_bytes(b"x" * size_bytes)
    page = server.get("/settings").text
    assert 'data-label="Size">76.0 KiB<' in page
    assert "are stored on this machine until you delete them" in page
    assert "<code>-wal</code>" in page
    for path in chats:
        path.unlink()


def test_the_doctor_is_asked_in_a_process_of_its_own(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    said = '[{"subject": "disk", "verdict": "problem", "text": "<full>", "remedy": "delete"}]'
    monkeypatch.setattr(handlers, "COMMAND", ("echo", said))
    fragment = server.get("/settings/doctor", headers={"hx-request": "true"}).text
    assert fragment.startswith('<div id="doctor">')
    assert "&lt;full&gt;" in fragment
    assert "&lt;full&gt;" in server.get("/settings/doctor").text
    broken = (
        (("false",), "Its exit code is 1."),
        (("ls", "/nowhere"), "No such file"),
        (("echo", "{}"), "failed"),
        (("sleep", "9"), "timed out"),
        (("/nowhere",), "failed"),
    )
    for command, says in broken:
        monkeypatch.setattr(handlers, "COMMAND", command)
        monkeypatch.setattr(handlers, "LIMIT_S", 1.0)
        assert says in server.get("/settings/doctor").text
