"""Downloads through the real client from a hub that misbehaves: what arrives is whole, and comes once."""

import hashlib
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from localllm.errors import (
    AccessDenied,
    CorruptModel,
    DiskFull,
    DownloadCancelled,
    HubError,
    HubOffline,
    HubUnreachable,
    LocalLLMError,
    ModelNotFound,
)
from localllm.models.library.catalog import hub_cache_dir, resolve_model
from localllm.models.library.hub import cache, client, plan, transfer
from localllm.models.library.hub.downloads import Downloads
from localllm.models.library.hub.plan import DownloadPlan, plan_download
from localllm.models.library.hub.pull import PullProgress, drop_damaged, pull
from localllm.models.library.hub.repository import search
from tests.hub.conftest import make_checkpoint, write_safetensors
from tests.hub.local_hub import LocalHub, Trouble, wait_until_stalled
from tests.web.live_server import wait_until

NEEDED = ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]
WEIGHTS = "model.safetensors"


@pytest.fixture
def repo(hub: LocalHub, checkpoint: Path) -> Path:
    """org/name on the hub; the folder that it is made of."""
    hub.add_repo("org/name", checkpoint)
    return checkpoint


def same(snapshot: Path, folder: Path) -> bool:
    return all((snapshot / name).read_bytes() == (folder / name).read_bytes() for name in NEEDED)


def size(folder: Path, name: str = WEIGHTS) -> int:
    return (folder / name).stat().st_size


def partial_of(folder: Path, repo_id: str = "org/name") -> Path:
    digest = hashlib.sha256((folder / WEIGHTS).read_bytes()).hexdigest()
    return cache.repository_folder(repo_id) / "blobs" / f"{digest}.incomplete"


def refusal(kind: type[LocalLLMError], name: str = "org/name", revision: str | None = None) -> LocalLLMError:
    with pytest.raises(kind) as caught:
        pull(plan_download(name, revision))
    assert caught.value.what
    return caught.value


# What is fetched ----------------------------------------------------------------------------------------------------


def test_only_what_a_load_needs_travels(hub: LocalHub, repo: Path) -> None:
    planned = plan_download("org/name")
    assert [file.name for file in planned.files] == NEEDED
    assert planned.total_bytes == planned.needed_bytes == sum(size(repo, name) for name in NEEDED)
    assert hub.bytes_sent(WEIGHTS) == 0, "a plan costs no weights"
    snapshot = pull(planned)
    assert same(snapshot, repo)
    assert sorted(path.name for path in snapshot.iterdir()) == NEEDED
    assert resolve_model("org/name").path == snapshot
    assert hub.bytes_sent(WEIGHTS) == size(repo)
    again = plan_download("org/name")
    assert (again.needed_bytes, again.is_cached) == (0, True)
    pull(again)
    assert hub.bytes_sent(WEIGHTS) == size(repo), "what is here is not fetched again"


def test_the_cache_is_as_the_library_keeps_it(hub: LocalHub, repo: Path) -> None:
    from huggingface_hub import scan_cache_dir, snapshot_download

    snapshot = pull(plan_download("org/name"))
    before = hub.bytes_sent(WEIGHTS)
    theirs = snapshot_download(
        "org/name", endpoint=hub.url, cache_dir=hub_cache_dir(), allow_patterns=["*.safetensors", "*.json"],
        ignore_patterns=["consolidated*"],
    )  # fmt: skip
    assert Path(theirs).resolve() == snapshot.resolve()
    assert hub.bytes_sent(WEIGHTS) == before
    (found,) = scan_cache_dir(hub_cache_dir()).repos
    assert (found.repo_id, found.size_on_disk) == ("org/name", sum(size(repo, name) for name in NEEDED))


def test_nothing_but_the_download_is_asked_and_the_cdn_sees_no_token(
    hub: LocalHub, repo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    hub.users["hf_secret"] = "me"
    pull(plan_download("org/name"))
    assert {sent.path.split("/resolve/")[0] for sent in hub.sent if not sent.on_cdn} == {
        "/api/models/org/name",
        "/org/name",
    }
    assert all(sent.authorization == "Bearer hf_secret" for sent in hub.sent if not sent.on_cdn)
    assert [sent.authorization for sent in hub.sent if sent.on_cdn] == [""]


def test_a_sharded_checkpoint_and_its_index(hub: LocalHub, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "sharded")
    (folder / WEIGHTS).unlink()
    shards = ["part-1.safetensors", "part-2.safetensors"]
    for name in shards:
        write_safetensors(folder / name, 100_000, name)
    (folder / "model.safetensors.index.json").write_text(
        '{"weight_map": {"a": "part-1.safetensors", "b": "part-2.safetensors"}}'
    )
    hub.add_repo("org/sharded", folder)
    names = [file.name for file in plan_download("org/sharded").files]
    assert {*shards, "model.safetensors.index.json"} < set(names)
    assert "consolidated.safetensors" not in names
    pull(plan_download("org/sharded"))
    assert resolve_model("org/sharded").source == "cache"


def test_revisions_are_kept_side_by_side(hub: LocalHub, repo: Path, tmp_path: Path) -> None:
    hub.add_repo("org/name", make_checkpoint(tmp_path / "old", weights_bytes=50_000), revision="v1")
    new, old = pull(plan_download("org/name")), pull(plan_download("org/name@v1"))
    assert new != old
    assert resolve_model("org/name").path == new
    assert resolve_model("org/name@v1").path == resolve_model("org/name", "v1").path == old
    assert plan_download("org/name", old.name).is_cached
    assert refusal(ModelNotFound, "org/name@v9").param == "revision"


def test_a_newer_commit_replaces_the_older_once_it_is_whole(hub: LocalHub, repo: Path) -> None:
    old = pull(plan_download("org/name"))
    write_safetensors(repo / WEIGHTS, 200_000, "other")
    hub.add_repo("org/name", repo)
    hub.troubles[WEIGHTS] = Trouble(status=404)
    refusal(HubError)
    assert resolve_model("org/name").path == old, "until then the old one is loaded"
    hub.troubles.clear()
    new = pull(plan_download("org/name"))
    assert resolve_model("org/name").path == new != old


def test_a_renamed_repository_is_kept_under_its_name(hub: LocalHub, repo: Path) -> None:
    hub.repos["org/former"] = hub.repos["org/name"]
    assert pull(plan_download("org/former")).parent.parent.name == "models--org--name"


# Going on -----------------------------------------------------------------------------------------------------------


def test_a_cut_connection_goes_on_where_it_stopped(hub: LocalHub, repo: Path) -> None:
    hub.troubles[WEIGHTS] = Trouble(cut_after=70_000, times=3)
    assert same(pull(plan_download("org/name")), repo)
    assert hub.bytes_sent(WEIGHTS) == size(repo)
    ranges = [sent.range for sent in hub.sent if sent.on_cdn]
    assert ranges[:3] == ["", f"bytes=70000-{size(repo) - 1}", f"bytes=140000-{size(repo) - 1}"]


def test_what_a_failed_attempt_fetched_is_used_by_the_next(hub: LocalHub, repo: Path) -> None:
    stop = threading.Event()

    def stop_half_way(progress: PullProgress) -> None:
        if progress.bytes_done > 90_000:
            stop.set()

    hub.troubles[WEIGHTS] = Trouble(stall_after=100_000)
    with pytest.raises(DownloadCancelled):
        pull(plan_download("org/name"), stop_half_way, stop)
    hub.go_on.set()
    wait_until(lambda: partial_of(repo).stat().st_size == 100_000)
    planned = plan_download("org/name")
    assert size(repo) - planned.needed_bytes == 100_000
    assert same(pull(planned), repo)
    assert hub.bytes_sent(WEIGHTS) == size(repo)
    assert not partial_of(repo).exists()


def test_a_server_that_knows_no_ranges_sends_it_all_again(hub: LocalHub, repo: Path) -> None:
    partial = partial_of(repo)
    partial.parent.mkdir(parents=True)
    partial.write_bytes((repo / WEIGHTS).read_bytes()[:100_000])
    hub.troubles[WEIGHTS] = Trouble(ignore_ranges=True)
    seen: list[PullProgress] = []
    assert same(pull(plan_download("org/name"), seen.append), repo)
    assert [p.bytes_done for p in seen] == sorted(p.bytes_done for p in seen), "progress never goes back"
    assert hub.bytes_sent(WEIGHTS) == size(repo)


@pytest.mark.parametrize("rest", [b"damaged" * 10_000, b"x" * 500_000], ids=["other bytes", "too long"])
def test_a_bad_leftover_is_thrown_away(hub: LocalHub, repo: Path, rest: bytes) -> None:
    partial = partial_of(repo)
    partial.parent.mkdir(parents=True)
    partial.write_bytes(rest)
    assert same(pull(plan_download("org/name")), repo)


def test_a_complete_leftover_costs_nothing(hub: LocalHub, repo: Path) -> None:
    partial = partial_of(repo)
    partial.parent.mkdir(parents=True)
    partial.write_bytes((repo / WEIGHTS).read_bytes())
    assert same(pull(plan_download("org/name")), repo)
    assert hub.bytes_sent(WEIGHTS) == 0


def test_large_files_are_asked_for_piece_by_piece(hub: LocalHub, repo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "LARGEST_ANSWER", 120_000)
    assert same(pull(plan_download("org/name")), repo)
    assert hub.bytes_sent(WEIGHTS) == size(repo)
    assert [sent.range for sent in hub.sent if sent.on_cdn][:2] == ["bytes=0-119999", "bytes=120000-239999"]


def test_two_at_once_fetch_each_file_once(hub: LocalHub, repo: Path) -> None:
    planned, paths = plan_download("org/name"), []
    threads = [threading.Thread(target=lambda: paths.append(pull(planned))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert len(paths) == 2
    assert same(paths[0], repo)
    assert hub.bytes_sent(WEIGHTS) == size(repo)


# What can be wrong --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [429, 503, 500, 408])
def test_a_busy_hub_is_asked_again(hub: LocalHub, repo: Path, status: int) -> None:
    hub.troubles[WEIGHTS] = hub.troubles["config.json"] = Trouble(status=status, times=2)
    hub.troubles["api"] = Trouble(status=status)
    assert same(pull(plan_download("org/name")), repo)


def test_the_hub_says_how_long_to_wait(hub: LocalHub, repo: Path) -> None:
    hub.troubles[WEIGHTS] = Trouble(status=429, retry_after=1)
    started_s, seen = time.monotonic(), []
    pull(plan_download("org/name"), seen.append)
    assert time.monotonic() - started_s >= 1
    assert any(progress.note == "model.safetensors: status 429; retrying in 1 s" for progress in seen)
    assert seen[-1].note == ""


@pytest.mark.parametrize(
    ("trouble", "kind", "words"),
    [
        (Trouble(status=503, times=99), HubUnreachable, "cannot answer now (status 503)"),
        (Trouble(status=429, times=99), HubUnreachable, "too many requests"),
        (Trouble(status=418, times=99), HubError, "status 418"),
        (Trouble(status=401, times=99), AccessDenied, "does not accept the token"),
        (Trouble(status=403, times=99), AccessDenied, "denies access"),
        (Trouble(cut_after=0, times=99), HubUnreachable, "cannot be reached"),
        (Trouble(wrong_bytes=True, times=99), CorruptModel, "arrived damaged"),
    ],
)
def test_trouble_that_stays_is_said_in_our_words(
    hub: LocalHub, repo: Path, trouble: Trouble, kind: type[LocalLLMError], words: str
) -> None:
    hub.troubles[WEIGHTS] = trouble
    error = refusal(kind)
    assert words in error.what
    assert error.hint
    with pytest.raises(LocalLLMError):
        resolve_model("org/name")


def test_wrong_bytes_are_not_kept(hub: LocalHub, repo: Path) -> None:
    hub.troubles[WEIGHTS] = Trouble(wrong_bytes=True)
    refusal(CorruptModel)
    assert not partial_of(repo).exists()
    assert same(pull(plan_download("org/name")), repo)


def test_a_small_file_is_checked_too(hub: LocalHub, repo: Path) -> None:
    hub.troubles["config.json"] = Trouble(wrong_bytes=True)
    assert "config.json arrived damaged" in refusal(CorruptModel).what


@pytest.mark.parametrize("where", ["api", WEIGHTS])
def test_a_hub_that_hangs_is_given_up(hub: LocalHub, repo: Path, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_DOWNLOAD_TIMEOUT", "0.1")
    hub.troubles[where] = Trouble(stall_after=0, times=99)
    started_s = time.monotonic()
    assert "did not answer within 0.1 s" in refusal(HubUnreachable).what
    assert time.monotonic() - started_s < 5


def test_a_stall_in_mid_file_goes_on(hub: LocalHub, repo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_DOWNLOAD_TIMEOUT", "0.2")
    hub.troubles[WEIGHTS] = Trouble(stall_after=100_000)
    assert same(pull(plan_download("org/name")), repo)
    hub.go_on.set()
    wait_until(lambda: hub.bytes_sent(WEIGHTS) == size(repo))


def test_no_hub_at_all(hub: LocalHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert "cannot be reached at http://127.0.0.1:9" in refusal(HubUnreachable).what
    with pytest.raises(HubUnreachable):
        search("anything")


def test_something_that_is_no_hub(hub: LocalHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", hub.cdn_url)
    assert refusal(LocalLLMError).hint


def test_offline_nothing_is_asked(hub: LocalHub, repo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planned = plan_download("org/name")
    hub.sent.clear()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    error = refusal(HubOffline)
    assert error.hint.startswith("localllm pull org/name")
    with pytest.raises(HubOffline):
        search("name")
    with pytest.raises(HubOffline):
        pull(planned)
    assert hub.sent == []


@pytest.mark.parametrize("name", ["org/absent", "absent"])
def test_what_is_not_there_is_not_found(hub: LocalHub, name: str) -> None:
    error = refusal(ModelNotFound, name)
    assert "not on the hub, or it is private" in error.what
    assert "localllm search absent" in error.hint


@pytest.mark.parametrize("name", ["org/na--me", "a/b/c", "-x/y", ""])
def test_a_name_that_is_none_is_refused(hub: LocalHub, name: str) -> None:
    assert refusal(ModelNotFound, name).hint


def test_a_gated_repository_says_where_to_accept(hub: LocalHub, repo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gated = hub.add_repo("org/name", repo, gated=True)
    assert plan_download("org/name").gated
    error = refusal(AccessDenied)
    assert "no token was sent" in error.what
    assert f"{hub.url}/org/name" in error.why
    assert "localllm login" in error.hint
    monkeypatch.setenv("HF_TOKEN", "hf_me")
    hub.users["hf_me"] = "me"
    assert "has no access" in refusal(AccessDenied).what
    gated.allowed.add("me")
    assert same(pull(plan_download("org/name")), repo)


def test_a_private_repository_looks_absent(hub: LocalHub, repo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add_repo("org/name", repo, private=True, allowed={"me"})
    assert "No token was sent" in refusal(ModelNotFound).why
    monkeypatch.setenv("HF_TOKEN", "hf_me")
    hub.users["hf_me"] = "me"
    assert same(pull(plan_download("org/name")), repo)


def test_no_room_is_said_before_the_first_byte(hub: LocalHub, repo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "free_bytes", lambda: plan.SPARE_BYTES + 100)
    error = refusal(DiskFull)
    assert "293 KiB more, and 64.0 MiB stay free for other programs; 64.0 MiB are free" in error.why
    assert hub.bytes_sent(WEIGHTS) == hub.bytes_sent("config.json") == 0


def test_a_disk_that_fills_up_on_the_way(hub: LocalHub, repo: Path) -> None:
    partial = partial_of(repo)
    partial.parent.mkdir(parents=True)
    partial.symlink_to("/dev/full")
    error = refusal(DiskFull)
    assert "No space left on device" in error.why
    assert "localllm rm" in error.hint


def test_file_names_of_the_hub_stay_inside_the_cache(hub: LocalHub, repo: Path, tmp_path: Path) -> None:
    commit = hub.repos["org/name"].refs["main"]
    files = hub.repos["org/name"].commits[commit]
    files["../../../../outside.json"] = files["/etc/x.json"] = files["config.json"]
    snapshot = pull(plan_download("org/name", None, ["*"]))
    assert (snapshot / "config.json").is_file()
    assert not list(tmp_path.rglob("outside.json"))


# Watching, stopping, checking ---------------------------------------------------------------------------------------


def test_progress_only_grows_and_ends_at_all_of_it(hub: LocalHub, repo: Path) -> None:
    hub.troubles[WEIGHTS] = Trouble(cut_after=60_000, times=4)
    seen: list[PullProgress] = []
    pull(plan_download("org/name"), seen.append)
    assert [p.bytes_done for p in seen] == sorted(p.bytes_done for p in seen)
    assert [p.files_done for p in seen] == sorted(p.files_done for p in seen)
    last = seen[-1]
    assert (last.bytes_done, last.files_done, last.eta_s, last.fraction) == (last.bytes_total, 5, 0.0, 1.0)
    assert last.received_bytes == last.bytes_total


def test_a_stop_is_heard_while_nothing_comes(hub: LocalHub, repo: Path) -> None:
    hub.troubles[WEIGHTS] = Trouble(stall_after=100_000)
    stop = threading.Event()
    threading.Thread(target=lambda: (wait_until_stalled(hub), stop.set())).start()
    started_s = time.monotonic()
    with pytest.raises(DownloadCancelled):
        pull(plan_download("org/name"), stop=stop)
    assert time.monotonic() - started_s < 2


def test_damaged_files_are_found_and_fetched_again(hub: LocalHub, repo: Path) -> None:
    snapshot = pull(plan_download("org/name"))
    assert drop_damaged(plan_download("org/name")) == []
    blob = (snapshot / WEIGHTS).resolve()
    blob.write_bytes(blob.read_bytes()[:-1] + b"?")
    (snapshot / "config.json").resolve().write_text("short")
    checked: list[tuple[str, bool]] = []
    damaged = drop_damaged(plan_download("org/name"), lambda file, ok: checked.append((file.name, ok)))
    assert sorted(damaged) == ["config.json", WEIGHTS]
    assert sorted(checked) == [(name, name not in damaged) for name in NEEDED]
    assert same(pull(plan_download("org/name")), repo)


def _states(downloads: Downloads) -> list[str]:
    return [status.state for status in downloads.list()]


def test_several_downloads_run_beside_each_other(hub: LocalHub, repo: Path, tmp_path: Path) -> None:
    hub.add_repo("org/other", make_checkpoint(tmp_path / "other", weights_bytes=100_000))
    hub.troubles[WEIGHTS] = Trouble(stall_after=50_000, times=2)
    downloads = Downloads()
    first, second = downloads.start("org/name"), downloads.start("org/other")
    assert downloads.start("org/name").id == first.id, "the same thing is not fetched twice"
    wait_until_stalled(hub)
    wait_until(lambda: all(downloads.get(each.id).progress.bytes_done > 50_000 for each in (first, second)))
    assert _states(downloads) == ["running", "running"]
    assert downloads.cancel(first.id).state == "cancelled"
    hub.go_on.set()
    wait_until(lambda: downloads.get(second.id).is_over)
    assert _states(downloads) == ["cancelled", "done"]
    assert downloads.get(second.id).progress.fraction == 1.0


def test_more_downloads_than_slots_wait(hub: LocalHub, repo: Path, tmp_path: Path) -> None:
    hub.add_repo("org/other", make_checkpoint(tmp_path / "other", weights_bytes=100_000))
    hub.troubles[WEIGHTS] = Trouble(stall_after=50_000)
    downloads = Downloads(at_once=1)
    downloads.start("org/name")
    wait_until_stalled(hub)
    waiting = downloads.start("org/other")
    assert waiting.state == "waiting"
    assert downloads.cancel(waiting.id).state == "cancelled"
    downloads.close()
    wait_until(lambda: _states(downloads) == ["cancelled", "cancelled"])


def test_a_failed_download_keeps_its_reason(hub: LocalHub, repo: Path) -> None:
    hub.troubles[WEIGHTS] = Trouble(wrong_bytes=True)
    downloads = Downloads()
    started = downloads.start("org/name")
    wait_until(lambda: downloads.get(started.id).is_over)
    failed = downloads.get(started.id)
    assert failed.state == "failed"
    assert isinstance(failed.error, CorruptModel)
    with pytest.raises(ModelNotFound):
        downloads.get("no such id")


# The search ---------------------------------------------------------------------------------------------------------


def test_search_finds_what_we_read(hub: LocalHub, repo: Path, tmp_path: Path) -> None:
    (tmp_path / "gguf").mkdir()
    (tmp_path / "gguf" / "t-Q8_0.gguf").write_bytes(b"GGUF")
    hub.add_repo("org/name-GGUF", tmp_path / "gguf", downloads=900, gated=True)
    (tmp_path / "pickle").mkdir()
    (tmp_path / "pickle" / "pytorch_model.bin").write_bytes(b"x")
    hub.add_repo("org/name-old", tmp_path / "pickle", downloads=5000)
    found = search("NAME")
    assert [(each.repo_id, each.format, each.gated) for each in found] == [
        ("org/name-GGUF", "gguf", True),
        ("org/name", "safetensors", False),
    ]
    assert found[1].license == "apache-2.0"
    assert [each.repo_id for each in search("name", format="safetensors")] == ["org/name"]
    assert [each.repo_id for each in search("name", limit=1)] == ["org/name-GGUF"]
    assert search("nothing like it") == []


def test_a_plan_names_the_model(hub: LocalHub, tmp_path: Path) -> None:
    (tmp_path / "gguf").mkdir()
    for name in ("t-Q4_K_M.gguf", "t-Q8_0.gguf"):
        (tmp_path / "gguf" / name).write_bytes(b"GGUF")
    hub.add_repo("org/t-GGUF", tmp_path / "gguf")
    names: list[DownloadPlan] = [plan_download("org/t-GGUF"), plan_download("org/t-GGUF:q8_0")]
    assert [each.name for each in names] == ["org/t-GGUF:Q4_K_M", "org/t-GGUF:q8_0"]
    pull(names[1])
    assert resolve_model(names[1].name).path.name == "t-Q8_0.gguf"


@pytest.mark.parametrize(
    ("attempt", "header", "want"), [(1, "", 0.01), (3, "", 0.04), (1, "7", 7.0), (1, "9999", 60.0), (20, "", 60.0)]
)
def test_waits_grow_and_end(hub: LocalHub, attempt: int, header: str, want: float) -> None:
    error = OSError("busy")
    error.response = SimpleNamespace(status_code=429, headers={"retry-after": header})  # type: ignore[attr-defined]
    assert client.wait_s(attempt, error) == pytest.approx(want)
