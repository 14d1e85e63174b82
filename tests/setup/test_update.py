"""`localllm update`: what it finds at real servers, what it says, and what it changes in real environments."""

import base64
import json
import os
import re
import socket
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from localllm.cli import main
from localllm.machine.install_kind import InstallKind
from localllm.machine.running_servers import announced
from localllm.setup.releases import UpdateError, changes_between, find_releases, read_wheel, source_of
from localllm.setup.units import MARK
from localllm.version import __version__
from localllm.web.pages.chat.store import file_versions
from tests.prefixes import CHANGELOG, CONTAINER, NEXT, make_prefix, make_wheel, run, tree

Capture = pytest.CaptureFixture[str]
PASSWORD = "Basic " + base64.b64encode(b"me:s:ecret").decode()


class Index(SimpleHTTPRequestHandler):
    """A package index over a folder of wheels: /simple in JSON, /html in HTML, /page one page; files with ranges."""

    asked: list[str]
    ranges = True
    locked = False

    def do_GET(self) -> None:
        self.asked.append(self.path)
        if self.locked and self.headers.get("Authorization") != PASSWORD:
            self.send_error(401)
        elif self.path in ("/simple/localllm/", "/html/simple/localllm/", "/page"):
            self._list(json_wanted=self.path.startswith("/simple"))
        elif self.path.startswith("/files/"):
            self._send_file(Path(self.directory) / self.path.removeprefix("/files/"))
        else:
            self.send_error(404)

    def _list(self, *, json_wanted: bool) -> None:
        wheels = sorted(Path(self.directory).glob("*.whl"))
        if json_wanted:
            files = [
                {"filename": each.name, "url": f"/files/{each.name}", "size": each.stat().st_size, "hashes": {},
                 "yanked": "99.3" in each.name, "requires-python": ">=4" if "99.4" in each.name else None}
                for each in wheels
            ]  # fmt: skip
            body = json.dumps({"meta": {"api-version": "1.1"}, "name": "localllm", "files": files})
        else:
            up = "../" * (self.path.count("/") - 1)
            body = "".join(
                f'<a href="{up}files/{each.name}#sha256=0"{" data-yanked" * ("99.3" in each.name)}'
                f"{' data-requires-python=&gt;=4' * ('99.4' in each.name)}>{each.name}</a>\n"
                for each in wheels
            )
        kind = "application/vnd.pypi.simple.v1+json" if json_wanted else "text/html"
        self._send(200, body.encode(), {"Content-Type": kind})

    def _send_file(self, path: Path) -> None:
        body = path.read_bytes()
        wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", "")) if self.ranges else None
        if wanted is None:
            return self._send(200, body, {})
        start, end = int(wanted[1]), min(int(wanted[2]), len(body) - 1)
        return self._send(206, body[start : end + 1], {"Content-Range": f"bytes {start}-{end}/{len(body)}"})

    def _send(self, code: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(code)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def wheels(tmp_path: Path) -> Path:
    """Releases: an old one, the next one; newer ones that are a draft, withdrawn, for another Python or machine."""
    folder = tmp_path / "releases"
    for version in ("0.0.1", NEXT, "99.2.0rc1", "99.3.0", "99.4.0"):
        make_wheel(folder, version)
    make_wheel(folder, "99.5.0", tag="cp311-cp311-other_machine")
    (folder / "localllm-broken.whl").write_text("")
    (folder / "localllm_tools-99.6.0-py3-none-any.whl").write_text("")
    return folder


@pytest.fixture
def index(wheels: Path) -> Iterator[tuple[str, type[Index]]]:
    """The address of an index, and the class of its requests."""
    kind = type("OwnIndex", (Index,), {"asked": []})
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(kind, directory=str(wheels))) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", kind
        server.shutdown()
        thread.join()


@pytest.fixture(autouse=True)
def own_folders(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("LOCALLLM_SOURCE", "UV_DEFAULT_INDEX", "UV_INDEX_URL", "PIP_INDEX_URL", "XDG_RUNTIME_DIR"):
        monkeypatch.delenv(name, raising=False)
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """This process as one of a uv tool."""
    prefix = tmp_path / "tool"
    prefix.mkdir()
    (prefix / "uv-receipt.toml").write_text('[tool]\nrequirements = [{ name = "localllm" }]\n')
    monkeypatch.setattr(sys, "prefix", str(prefix))
    return prefix


# ---- releases --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/simple", "/simple/", "/html/simple", "/page"])
def test_releases_for_this_machine_are_found_at_an_index_and_on_a_page(
    index: tuple[str, type[Index]], path: str
) -> None:
    found = find_releases(source_of(index[0] + path))
    assert [release.version for release in found] == ["0.0.1", NEXT]
    facts = read_wheel(found[-1].wheel)
    assert facts is not None
    assert facts.requirements == ("torch>=2.9",), "the description is not part of the requirements"
    assert facts.changelog.startswith("# Changelog")
    assert facts.size_bytes > 500


def test_releases_are_found_in_a_folder(wheels: Path) -> None:
    """A folder has no marks of withdrawn files; what is in it was put there on purpose."""
    assert [release.version for release in find_releases(source_of(str(wheels)))][-1] == "99.4.0"
    assert find_releases(source_of(wheels.as_uri())) == find_releases(source_of(str(wheels)))


def test_a_wheel_is_read_without_being_downloaded(index: tuple[str, type[Index]], wheels: Path) -> None:
    name = next(wheels.glob(f"localllm-{NEXT}-*")).name
    padded = wheels / name
    padded.write_bytes(b"\0" * 3_000_000 + padded.read_bytes())  # a zip file is read from its end
    facts = read_wheel(f"{index[0]}/files/{name}")
    assert facts is not None
    assert facts.size_bytes > 3_000_000
    assert len(index[1].asked) <= 6
    index[1].ranges = False
    assert read_wheel(f"{index[0]}/files/{name}") is None


def test_a_password_is_sent_to_its_server_only_and_never_shown(
    index: tuple[str, type[Index]], tool: Path, capsys: Capture
) -> None:
    index[1].locked = True
    assert main(["update", "--check", "--from", f"{index[0]}/simple"]) == 1
    assert "401" in capsys.readouterr().err
    given = index[0].replace("http://", "http://me:s%3Aecret@")
    assert main(["update", "--check", "--from", f"{given}/simple"]) == 0
    said = capsys.readouterr()
    assert NEXT in said.out
    assert "ecret" not in said.out + said.err


@pytest.mark.parametrize(
    ("before", "after", "lines"),
    [
        (__version__, NEXT, ["New thing"]),
        ("0.0.1", NEXT, ["New thing", "Old thing"]),
        ("0.0.1", __version__, ["Old thing"]),
        (NEXT, __version__, []),
        (__version__, __version__, []),
    ],
)
def test_the_changes_are_those_of_the_versions_between(before: str, after: str, lines: list[str]) -> None:
    text = CHANGELOG.format(next=NEXT, now=f"{__version__} (unreleased)")
    told = "\n".join(changes_between(text, before, after))
    assert [line for line in ("New thing", "Old thing") if line in told] == lines


# ---- what is said ----------------------------------------------------------------------------------------------------


def test_check_says_versions_changes_sizes_and_the_command(
    index: tuple[str, type[Index]], tool: Path, capsys: Capture
) -> None:
    before = tree(tool)
    assert main(["update", "--check", "--from", f"{index[0]}/simple"]) == 0
    said = capsys.readouterr().out
    assert f"Installed: {__version__} (uv tool, {tool})" in said
    assert f"{NEXT}, at {index[0]}/simple" in said
    assert all(word in said for word in ("New thing", "B; PyTorch", "stays", "localllm update"))
    assert "Old thing" not in said
    assert tree(tool) == before


def test_a_raised_floor_of_torch_is_told_before_anything_is_downloaded(
    wheels: Path, tool: Path, capsys: Capture
) -> None:
    make_wheel(
        wheels, "99.9.0", requires=("torch>=98", "triton>=98; sys_platform == 'nowhere'", "x>=1; extra == 'dev'")
    )
    assert main(["update", "--check", "--from", str(wheels)]) == 0
    said = capsys.readouterr().out
    assert "and torch>=98." in said
    assert "stays" not in said
    assert "triton" not in said
    assert main(["update", "--from", str(wheels)]) == 2, "no terminal to ask at"
    assert "--yes" in capsys.readouterr().err


def test_the_place_of_the_install_is_asked_first(
    wheels: Path, tool: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    receipt = f'[tool]\nrequirements = []\n[tool.options]\nfind-links = ["/gone", "{wheels}"]\n'
    (tool / "uv-receipt.toml").write_text(receipt)
    assert main(["update", "--check"]) == 0
    assert str(wheels) in capsys.readouterr().out
    monkeypatch.setenv("LOCALLLM_SOURCE", str(tmp_path / "nothing"))
    assert main(["update", "--check"]) == 2
    assert "is not a folder" in capsys.readouterr().err


def test_an_install_from_a_clone_names_the_clone(tool: Path, capsys: Capture) -> None:
    (tool / "uv-receipt.toml").write_text('[tool]\nrequirements = [{ name = "localllm", directory = "/my clone" }]\n')
    assert main(["update"]) == 0
    said = capsys.readouterr().out
    assert "git -C '/my clone' pull && sh '/my clone/install.sh' --yes" in said
    assert "That folder is gone" in said


def test_the_newest_release_is_not_installed_again_and_an_older_one_only_by_name(
    tmp_path: Path, tool: Path, capsys: Capture
) -> None:
    make_wheel(tmp_path / "old", "0.0.1")
    assert main(["update", "--from", str(tmp_path / "old")]) == 0
    assert "nothing to update" in capsys.readouterr().out
    assert main(["update", "--check", "--to", "0.0.1", "--from", str(tmp_path / "old")]) == 2
    assert main(["update", "--to", "0.0.2", "--from", str(tmp_path / "old")]) == 1
    assert "There are 0.0.1." in capsys.readouterr().err


@pytest.mark.parametrize(
    ("path", "words"),
    [("/nothing/simple", ["404", "no localllm"]), ("/simple/", []), ("/other", ["404"])],
)
def test_an_address_without_localllm_is_named(
    index: tuple[str, type[Index]], wheels: Path, tool: Path, capsys: Capture, path: str, words: list[str]
) -> None:
    for wheel in wheels.iterdir():
        wheel.unlink()
    assert main(["update", "--check", "--from", index[0] + path]) == 1
    said = capsys.readouterr().err
    assert all(word in said for word in (*words, index[0], "--from ADDRESS"))


def test_without_a_network_the_address_and_the_way_without_one_are_named(tool: Path, capsys: Capture) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{closed.getsockname()[1]}/simple"
        assert main(["update", "--check", "--from", address]) == 1
    said = capsys.readouterr().err
    assert f"{address}/localllm/ cannot be reached." in said
    assert "--from FOLDER" in said


def test_a_running_server_is_named_and_nothing_is_asked(
    index: tuple[str, type[Index]], tool: Path, capsys: Capture
) -> None:
    with announced("http://127.0.0.1:8123", "demo"):
        for words in (["update"], ["update", "--restart"], ["update", "--to", NEXT]):
            assert main([*words, "--from", f"{index[0]}/simple"]) == 2
            said = capsys.readouterr().err
            assert "http://127.0.0.1:8123 (demo)" in said
            assert "kill " in said
    assert index[1].asked == []


def systemctl(folder: Path, main_pid: int) -> Path:
    """Make a systemctl that says which process the service is. Return the file of its calls."""
    folder.mkdir()
    (folder / "systemctl").write_text(f'#!/bin/sh\necho "$@" >> {folder}/calls\necho MainPID={main_pid}\n')
    (folder / "systemctl").chmod(0o755)
    return folder / "calls"


def test_a_server_of_the_service_may_run_with_restart(
    wheels: Path, tool: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_wheel(tmp_path / "old", "0.0.1")
    monkeypatch.setenv("PATH", str(systemctl(tmp_path / "bin", os.getpid()).parent) + ":/usr/bin:/bin")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    (tmp_path / "systemd" / "user").mkdir(parents=True)
    (tmp_path / "systemd" / "user" / "localllm.service").write_text(MARK)
    with announced("http://127.0.0.1:8123", "demo"):
        assert main(["update", "--from", str(tmp_path / "old")]) == 2
        assert "--restart, or: systemctl --user stop" in capsys.readouterr().err
        assert main(["update", "--restart", "--from", str(tmp_path / "old")]) == 0


@pytest.mark.parametrize("words", [["--check", "--back"], ["--to", "1", "--back"], ["--check", "--to", "1"]])
def test_options_that_exclude_each_other_are_refused(tool: Path, capsys: Capture, words: list[str]) -> None:
    assert main(["update", *words]) == 2
    assert "exclude each other" in capsys.readouterr().err


def test_without_an_update_there_is_nothing_to_go_back_to(tool: Path, capsys: Capture) -> None:
    assert main(["update", "--back"]) == 1
    assert "localllm update --to VERSION" in capsys.readouterr().err


# ---- real environments -----------------------------------------------------------------------------------------------


def test_an_update_and_its_undo_without_a_network(tmp_path: Path, index: tuple[str, type[Index]]) -> None:
    """pip itself installs, from the index; going back needs nothing but the environment."""
    python = make_prefix(tmp_path, InstallKind.PIP)
    packages = next((tmp_path / "my-env" / "lib").glob("python*")) / "site-packages"
    said = run(python, tmp_path, "completion", "bash", "--install")
    script = tmp_path / ".local/share/bash-completion/completions/localllm"
    script.write_text(script.read_text() + "# stale\n")
    before = tree(packages / "localllm")
    calls = systemctl(tmp_path / "systemctl", main_pid=1)
    unit = tmp_path / ".config/systemd/user/localllm.service"
    unit.parent.mkdir(parents=True)
    unit.write_text(MARK)
    path = f"{calls.parent}:/usr/bin:/bin"
    done = run(python, tmp_path, "update", PIP_INDEX_URL=f"{index[0]}/simple", PATH=path)
    assert done.returncode == 2
    assert "localllm update --restart, or: systemctl --user stop localllm.service" in done.stderr
    assert index[1].asked == []
    done = run(python, tmp_path, "update", "--restart", PIP_INDEX_URL=f"{index[0]}/simple", PATH=path)
    assert "--user restart localllm.service" in calls.read_text()
    assert done.returncode == 0, done.stdout + done.stderr + said.stderr
    assert (packages / "localllm" / "release.txt").read_text() == NEXT
    assert f"localllm {NEXT} is installed. To undo: localllm update --back" in done.stdout
    assert "# stale" not in script.read_text(), "completions are those of the new release"
    assert len(list((tmp_path / "my-env/share/localllm/before").iterdir())) == 1
    failed = run(python, tmp_path, "update", "--to", NEXT, "--from", str(tmp_path), PATH="")
    assert failed.returncode == 1
    asked = len(index[1].asked)
    done = run(python, tmp_path, "update", "--back", PIP_INDEX_URL="http://127.0.0.1:9/simple")
    assert done.returncode == 0, done.stdout + done.stderr
    assert tree(packages / "localllm") == before
    assert list(packages.glob("localllm-*.dist-info")) == [packages / f"localllm-{__version__}.dist-info"]
    assert (tmp_path / "my-env" / "share" / "doc" / "localllm" / "CHANGELOG.md").is_file()
    assert len(index[1].asked) == asked


def test_a_checkout_is_told_its_new_commits_and_changes(tmp_path: Path) -> None:
    git = ["git", "-c", "user.name=t", "-c", "user.email=t@t", "-C"]
    upstream, clone = tmp_path / "upstream", tmp_path / "clone"

    def commit(text: str) -> None:
        (upstream / "CHANGELOG.md").write_text(text)
        subprocess.run([*git, upstream, "add", "-A"], check=True)
        subprocess.run([*git, upstream, "commit", "-qm", "Change"], check=True)

    upstream.mkdir()
    subprocess.run([*git, upstream, "init", "-q"], check=True)
    commit("# Changelog\n")
    subprocess.run(["git", "clone", "-q", upstream, clone], check=True)
    commit("# Changelog\n\n- New thing.\n")
    python = make_prefix(tmp_path, InstallKind.CHECKOUT)
    done = run(python, tmp_path, "update")
    assert f"git -C {clone} pull && {clone}/scripts/up" in done.stdout
    assert "commits" not in done.stdout, "nothing is fetched unless --check is typed"
    done = run(python, tmp_path, "update", "--check")
    assert "1 commits after this one" in done.stdout
    assert "- New thing." in done.stdout
    assert "git" in run(python, tmp_path, "update", "--to", "1").stderr
    subprocess.run([*git, clone, "remote", "remove", "origin"], check=True)
    done = run(python, tmp_path, "update", "--check")
    assert done.returncode == 1
    assert "remote -v" in done.stderr


def test_a_container_is_told_the_tag(tmp_path: Path, wheels: Path) -> None:
    python = make_prefix(tmp_path, InstallKind.CONTAINER)
    done = run(python, tmp_path, "update", "--check", "--from", str(wheels), **CONTAINER)
    assert "99.4.0-cpu" in done.stdout
    assert "docker compose pull" in done.stdout


def test_a_bundle_goes_back_to_the_version_beside_it(tmp_path: Path) -> None:
    python = make_prefix(tmp_path, InstallKind.BUNDLE)
    link, here = tmp_path / ".local/bin/localllm", tmp_path / ".local/share/localllm/app" / __version__
    done = run(python, tmp_path, "update")
    assert "-linux-x86_64-cpu.run" in done.stdout
    done = run(python, tmp_path, "update", "--back")
    assert done.returncode == 1
    assert "no other version" in done.stderr
    other = here.with_name("0.0.9")
    other.mkdir()
    (other / "BUNDLE").write_text("0.0.9 sha256\n")
    (other / "localllm").touch()
    chats = tmp_path / ".local/share/localllm/chats.db"
    for path, tables, release in ((chats, 99, "99.0"), (chats.with_name("chats.db.v1"), 1, "0.0.9")):
        with closing(sqlite3.connect(path, isolation_level=None)) as db, pytest.MonkeyPatch.context() as patch:
            db.execute(f"PRAGMA user_version = {tables}")
            patch.setattr(file_versions, "__version__", release)
            file_versions.record_written(db, tables)
    done = run(python, tmp_path, "update", "--back")
    assert done.returncode == 0, done.stderr
    assert link.resolve() == other / "localllm"
    assert "The chats are those from before the update." in done.stdout
    with closing(sqlite3.connect(chats)) as db:
        assert file_versions.read_written(db) == (1, 1, "0.0.9")
    assert str(next(chats.parent.glob("chats.db.newer-*"))) in done.stdout


def test_nothing_to_install_with_is_told(tmp_path: Path, tool: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from localllm.setup import environment

    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(environment.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UpdateError) as caught:
        environment.installer_command()
    assert caught.value.hint == "sh install.sh"
