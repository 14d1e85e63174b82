"""`localllm uninstall`: in environments of every kind of install, with everything that localllm stores."""

import os
import subprocess
from pathlib import Path

import pytest

from localllm.machine.install_kind import InstallKind
from localllm.setup.units import MARK
from tests.prefixes import CONTAINER, make_prefix, prefix_of, run, tree

OURS = {
    ".config/systemd/user/localllm.service": f"{MARK}\n[Service]\n",
    ".cache/localllm/kernels/measured.json": "{}",
    ".config/localllm/config.toml": "port = 9000\n",
    ".local/share/localllm/keys.toml": "[keys]\n",
    ".local/share/localllm/chats.db": "chats",
    ".local/share/localllm/chats.db-wal": "chats",
    ".local/share/localllm/logs/8000.log": "log",
    ".local/share/localllm/profiles/one.toml": "profile",
    ".local/share/localllm/aliases/mine": "org/name",
    ".local/share/localllm/run/localllm-8000.json": "{}",
}
PROGRAM = (".config/systemd", ".cache", ".local/share/localllm/run", ".local/share/bash-completion")
THEIRS = {
    ".config/systemd/user/localllm-notes.service": "[Service]\nExecStart=of somebody else\n",
    ".config/fish/completions/localllm.fish": "# by hand\n",
    ".cache/huggingface/hub/models--org--name/blobs/0": "weights",
    ".cache/huggingface/token": "hf_token",
    ".triton/cache/kernel": "compiled",
    ".local/bin/other": "#!/bin/sh\n",
    "notes.txt": "mine",
}
PACKAGE_ONLY = (InstallKind.PIP, InstallKind.CONTAINER)
CASES = [(kind, False) for kind in InstallKind] + [(InstallKind.UV_TOOL, True)]


def write(home: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = home / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_an_own_folder_without_uv_is_removed_too(tmp_path: Path) -> None:
    """install.sh makes bin, and leaves it empty where the person has uv."""
    home = tmp_path / "home"
    python = installed(home, InstallKind.UV_TOOL, own_root=True)
    (home / ".local/share/localllm/bin/uv").unlink()
    assert run(python, home, "uninstall", "--yes", "--all").returncode == 0
    assert list(home.iterdir()) == []


def installed(home: Path, kind: InstallKind, *, own_root: bool = False) -> Path:
    """Install localllm and let it store everything. Return its Python."""
    python = make_prefix(home, kind, own_root=own_root)
    write(home, OURS)
    wants = home / ".config/systemd/user/default.target.wants/localllm.service"
    wants.parent.mkdir()
    wants.symlink_to("../localllm.service")
    assert run(python, home, "completion", "bash", "--install").returncode == 0
    return python


def environ_of(kind: InstallKind) -> dict[str, str]:
    """Return the variables of a kind; systemctl and the marks of the tests' own container are out of reach."""
    return CONTAINER if kind is InstallKind.CONTAINER else {}


@pytest.mark.parametrize(("kind", "own_root"), CASES, ids=lambda value: str(value))
def test_nothing_is_left_that_the_person_did_not_make(tmp_path: Path, kind: InstallKind, own_root: bool) -> None:
    home = tmp_path / "home"
    write(home, THEIRS)
    if kind is InstallKind.CHECKOUT:
        write(home, {"clone/README.md": "sources"})
    before = tree(home)
    python = installed(home, kind, own_root=own_root)
    full = tree(home)

    listed = run(python, home, "uninstall", "--dry-run", **environ_of(kind))
    assert listed.returncode == 0, listed.stderr
    assert tree(home) == full, "a dry run changes nothing"
    for word in (
        "service",
        "completions",
        "caches",
        "keys",
        "chats",
        "settings",
        "localllm rm MODEL",
        "logs",
        "profiles",
    ):
        assert word in listed.stdout

    done = run(python, home, "uninstall", "--yes", "--all", **environ_of(kind))
    assert done.returncode == 0, done.stdout + done.stderr
    left = tree(home)
    if kind in PACKAGE_ONLY:  # the environment is the person's
        prefix = prefix_of(home, kind).relative_to(home).as_posix()
        gone = f"{prefix}/lib/python3"
        has_package = [name for name in left if name.startswith(gone) and "/localllm" in name]
        assert bool(has_package) is (kind is InstallKind.CONTAINER)
        left = {name: text for name, text in left.items() if name.split("/")[0] != prefix.split("/")[0]}
    assert left == before


def test_data_is_kept_unless_it_is_asked_for(tmp_path: Path) -> None:
    home = tmp_path / "home"
    python = installed(home, InstallKind.UV_TOOL, own_root=True)
    done = run(python, home, "uninstall", "--yes")
    assert done.returncode == 0, done.stderr
    left = tree(home)
    data = {name: text for name, text in OURS.items() if not name.startswith(PROGRAM)}
    assert {name: left.get(name) for name in data} == data
    assert not [name for name in left if name.startswith((*PROGRAM, ".local/bin/localllm"))]
    assert not (home / ".local/share/localllm/tools").exists()
    assert all(word in done.stdout for word in ("Kept:", "settings", "chats", "keys", "logs", "profiles"))
    assert "asked for" not in done.stdout, "nobody was asked"


def test_without_a_terminal_and_an_answer_nothing_is_changed(tmp_path: Path) -> None:
    home = tmp_path / "home"
    python = installed(home, InstallKind.PIPX)
    before = tree(home)
    done = run(python, home, "uninstall", "--all", stdin="y\n")
    assert done.returncode == 2
    assert "--yes --keep-data" in done.stderr
    assert tree(home) == before
    assert run(python, home, "uninstall", "--all", "--keep-data").returncode == 2


def test_at_a_terminal_each_part_of_the_data_is_asked_for(tmp_path: Path) -> None:
    import pty

    home = tmp_path / "home"
    python = installed(home, InstallKind.UV_TOOL)
    master, slave = pty.openpty()
    process = subprocess.Popen(
        [str(python), "-m", "localllm", "uninstall"], stdin=slave, stdout=subprocess.PIPE, text=True, cwd=home,
        env={"HOME": str(home), "PATH": os.environ["PATH"]},
    )  # fmt: skip
    os.close(slave)
    # In the order of the list: the programs; settings, names of models, chats, keys, ...
    os.write(master, b"y\nn\nn\ny\n" + b"n\n" * 5)
    said, _ = process.communicate(timeout=100)
    os.close(master)
    assert process.returncode == 0, said
    assert "Remove chats, too (10 B)?" in said
    assert not (home / ".local/share/localllm/chats.db-wal").exists()
    assert (home / ".local/share/localllm/keys.toml").exists()
    assert (home / ".config/localllm/config.toml").exists()
    assert not prefix_of(home, InstallKind.UV_TOOL).exists()


def test_the_service_is_stopped_before_its_unit_is_removed(tmp_path: Path) -> None:
    home = tmp_path / "home"
    python = installed(home, InstallKind.UV_TOOL)
    tools = tmp_path / "bin"
    tools.mkdir()
    unit = home / ".config/systemd/user/localllm.service"
    (tools / "systemctl").write_text(f'#!/bin/sh\n[ -e {unit} ] && there=yes\necho "$@ $there" >> {tmp_path}/calls\n')
    (tools / "systemctl").chmod(0o755)
    done = run(python, home, "uninstall", "--yes", PATH=f"{tools}:{os.environ['PATH']}")
    assert done.returncode == 0, done.stderr
    calls = (tmp_path / "calls").read_text().splitlines()
    assert "--user disable --now localllm.service yes" in calls
    assert calls[-1].strip() == "--user daemon-reload"


def test_what_cannot_be_removed_is_named(tmp_path: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("root may delete everything")
    home = tmp_path / "home"
    python = installed(home, InstallKind.UV_TOOL)
    folder = home / ".cache/localllm/kernels"
    folder.chmod(0o500)
    done = run(python, home, "uninstall", "--yes")
    folder.chmod(0o700)
    assert done.returncode == 1
    assert "Not everything could be removed." in done.stderr
    assert str(home / ".cache/localllm") in done.stderr


def test_a_running_server_is_named_and_nothing_is_removed(tmp_path: Path) -> None:
    home = tmp_path / "home"
    python = installed(home, InstallKind.UV_TOOL)
    code = "from localllm.machine.running_servers import announced\nimport time, sys\n"
    code += "with announced('http://127.0.0.1:8123', 'demo'):\n    print('up', flush=True)\n    time.sleep(300)"
    environ = {"HOME": str(home), "PATH": os.environ["PATH"]}
    with subprocess.Popen([str(python), "-c", code], env=environ, stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        server.stdout.readline()
        before = tree(home)
        done = run(python, home, "uninstall", "--yes", "--all")
        after = tree(home)
        server.kill()
    assert done.returncode == 2
    assert "http://127.0.0.1:8123" in done.stderr
    assert after == before
