"""Environments of every kind of install, made of a real Python without packages, and wheels of made-up releases.

The environments run this checkout's code; their metadata says how they were installed.
"""

import base64
import hashlib
import json
import os
import shutil
import subprocess
import sysconfig
import venv
import zipfile
from collections.abc import Sequence
from pathlib import Path

from localllm.machine.install_kind import InstallKind
from localllm.version import __version__
from scripts.layout import ROOT

CHANGELOG = """# Changelog

## {next}

- New thing of the next release.

## {now}

- Old thing.
"""
NEXT = "99.1.0"
CONTAINER = {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}


def make_wheel(
    folder: Path, version: str, requires: Sequence[str] = ("torch>=2.9",), tag: str = "py3-none-any"
) -> Path:
    """Write the wheel of a release whose package is one text file."""
    info = f"localllm-{version}.dist-info"
    files = {
        "localllm/release.txt": version,
        f"localllm-{version}.data/data/share/doc/localllm/CHANGELOG.md": CHANGELOG.format(next=NEXT, now=__version__),
        f"{info}/METADATA": f"Metadata-Version: 2.4\nName: localllm\nVersion: {version}\n"
        + "".join(f"Requires-Dist: {each}\n" for each in requires)
        + "\nRequires-Dist: of-the-description\n",
        f"{info}/WHEEL": f"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: {tag}\n",
        f"{info}/entry_points.txt": "[console_scripts]\nlocalllm=localllm.cli:main\n",
    }
    record = "".join(f"{name},sha256={_hash(text)},{len(text.encode())}\n" for name, text in files.items())
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"localllm-{version}-{tag}.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in {**files, f"{info}/RECORD": f"{record}{info}/RECORD,,\n"}.items():
            archive.writestr(name, text)
    return path


def _hash(text: str) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()


def prefix_of(home: Path, kind: InstallKind, *, own_root: bool = False) -> Path:
    """Return the folder in which an installer of this kind makes the environment. own_root: as install.sh does."""
    share = home / ".local" / "share"
    return {
        InstallKind.UV_TOOL: share / ("localllm" if own_root else "uv") / "tools" / "localllm",
        InstallKind.PIPX: share / "pipx" / "venvs" / "localllm",
        InstallKind.BUNDLE: share / "localllm" / "app" / __version__ / "python",
        InstallKind.CHECKOUT: home / "clone" / ".venv",
        InstallKind.CONTAINER: home / "opt" / "localllm",
        InstallKind.PIP: home / "my-env",
    }[kind]


def make_prefix(home: Path, kind: InstallKind, *, own_root: bool = False) -> Path:
    """Make an environment with the marks of its installer, and the link to its command. Return its Python."""
    prefix = prefix_of(home, kind, own_root=own_root)
    venv.EnvBuilder(symlinks=True).create(prefix)
    packages = next((prefix / "lib").glob("python*")) / "site-packages"
    here = "import localllm.machine.install_kind as kinds; kinds.CONTAINER_MARKS = ()"  # tests may run in a container
    here += "; kinds.CONTAINER_VARIABLES = ('KUBERNETES_SERVICE_HOST',)"
    (packages / "sources.pth").write_text(f"{ROOT}\n{sysconfig.get_paths()['purelib']}\n{here}\n")
    python = prefix / "bin" / "python"
    wheel = make_wheel(prefix / "of the test", __version__)
    _unpack(wheel, prefix, packages)
    shutil.rmtree(wheel.parent)
    info = packages / f"localllm-{__version__}.dist-info"
    command = prefix / "bin" / "localllm"
    command.write_text(f"#!{python}\nimport sys\nfrom localllm.cli import main\nsys.exit(main())\n")
    command.chmod(0o755)
    if kind is InstallKind.UV_TOOL:
        (prefix / "uv-receipt.toml").write_text('[tool]\nrequirements = [{ name = "localllm" }]\n')
    elif kind is InstallKind.PIPX:
        (prefix / "pipx_metadata.json").write_text("{}")
    elif kind is InstallKind.BUNDLE:
        (prefix.parent / "BUNDLE").write_text(f"{__version__} sha256\n")
        command = prefix.parent / "localllm"
        command.write_text(
            '#!/bin/sh\nexec "$(dirname "$(readlink -f "$0")")/python/bin/python3" -I -m localllm "$@"\n'
        )
        command.chmod(0o755)
    elif kind is InstallKind.CHECKOUT:
        record = {"url": (home / "clone").as_uri(), "dir_info": {"editable": True}}
        (info / "direct_url.json").write_text(json.dumps(record))
    if own_root:
        root = prefix.parent.parent
        (root / "torch").write_text("cpu\n")
        for name in ("python/cpython-3.12.4-linux-x86_64-gnu/bin/python", "bin/uv"):
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text("made by install.sh")
    if kind in (InstallKind.UV_TOOL, InstallKind.PIPX, InstallKind.BUNDLE):
        link = home / ".local" / "bin" / "localllm"
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(command)
    return python


def _unpack(wheel: Path, prefix: Path, packages: Path) -> None:
    """Install a wheel as installers do: the files under data go to the prefix, and RECORD names their new places."""
    data = f"localllm-{__version__}.data/data/"
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            path = prefix / name.removeprefix(data) if name.startswith(data) else packages / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(archive.read(name))
    record = packages / f"localllm-{__version__}.dist-info" / "RECORD"
    record.write_text(record.read_text().replace(data, "../../../"))


def run(python: Path, home: Path, *words: str, stdin: str = "", **environ: str) -> subprocess.CompletedProcess[str]:
    """Run `localllm` of an environment, as its person does: with the home folder and almost no variables."""
    command = [str(python), "-m", "localllm", *words]
    kept = {"PATH": "/usr/bin:/bin"}  # pip asks every rustc in PATH for its version, which makes files
    return subprocess.run(
        command,
        cwd=home,
        env={**kept, "HOME": str(home), "PIP_CONFIG_FILE": os.devnull, **environ},
        input=stdin,
        capture_output=True,
        text=True,
        check=False,
    )


def tree(folder: Path) -> dict[str, str]:
    """Return every path below a folder: the text of files, the target of links, '/' for folders."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_symlink():
            found[name] = os.readlink(path)
        else:
            found[name] = "/" if path.is_dir() else path.read_text(errors="replace")
    return found
