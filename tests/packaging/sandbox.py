"""A made-up machine for install.sh: a PATH of its own, folders in place of /proc and /sys, and programs that answer as
those of the machine would. uv is a script that records how it was called and creates what uv would create.

Does not know: what install.sh should say (test_install.py).
"""

from __future__ import annotations

import os
import pty
import shutil
import subprocess
import zipfile
from dataclasses import dataclass, field
from pathlib import Path

from scripts.layout import ROOT

INSTALL = ROOT / "install.sh"
REAL_PROGRAMS = """
sh awk cat chmod cut date dirname env grep head ln mkdir mv readlink rm rmdir sed sleep sort tail touch tr wc
""".split()  # noqa: SIM905  one name after the other is easier to read
UV_VERSION = next(line[11:] for line in INSTALL.read_text().splitlines() if line.startswith("uv_version="))
UV = """#!/bin/sh
case "$1 $2" in
  "--version ") echo "uv VERSION (made up)"; exit 0 ;;
  "python find")
    case $* in *--managed-python*) echo "$UV_PYTHON_INSTALL_DIR/cpython/bin/python3"; exit ;; esac
    [ ! -e "$LOG/no-python" ] && echo python3; exit ;;
  "python install") [ ! -e "$LOG/no-download" ]; exit ;;
esac
echo "uv $*" >>"$LOG/calls"
env | grep -E '^(UV_|VIRTUAL_ENV|PYTHON)' | sort >"$LOG/environment"
[ ! -e "$LOG/uv-fails" ] || { echo "error: made up" >&2; exit 2; }
[ ! -e "$LOG/uv-waits" ] || { touch "$LOG/uv-runs"; sleep 20; exit 2; }
mkdir -p "$UV_TOOL_DIR/localllm/bin" "$UV_TOOL_BIN_DIR" "$UV_CACHE_DIR"
{ echo '#!/bin/sh'; echo 'echo "localllm $*" >>"$LOG/calls"'; echo '[ "$1" != --version ] || echo localllm 0.0.9'
} >"$UV_TOOL_DIR/localllm/bin/localllm"
chmod +x "$UV_TOOL_DIR/localllm/bin/localllm"
[ -e "$UV_TOOL_BIN_DIR/localllm" ] || ln -s "$UV_TOOL_DIR/localllm/bin/localllm" "$UV_TOOL_BIN_DIR/localllm"
"""
DEBIAN_12 = "ldd (Debian GLIBC 2.36-9+deb12u4) 2.36"
PINNED_SHA256 = [line.split("=")[-1].split(" ")[0] for line in INSTALL.read_text().splitlines() if " sha=" in line]


@dataclass
class Machine:
    """What the programs of a machine say. `files`: path below / -> content. `gpu`: what nvidia-smi prints."""

    system: str = "Linux"
    processor: str = "x86_64"
    libc: str | None = DEBIAN_12
    free_mb: int = 50_000
    gpu: str | None = None
    files: dict[str, str] = field(default_factory=dict)


class Sandbox:
    """The folders of one machine: home/, root/ (its /proc and /sys), bin/ (its PATH), log/, and clone/ of localllm."""

    def __init__(self, folder: Path, machine: Machine, *, own_uv: str | None = UV_VERSION) -> None:
        self.folder = folder
        self.home, self.root, self.bin, self.log = (folder / name for name in ("home", "root", "bin", "log"))
        for made in (self.home, self.root, self.bin, self.log, self.data):
            made.mkdir(parents=True)
        for name in REAL_PROGRAMS:
            found = shutil.which(name)
            assert found, name
            (self.bin / name).symlink_to(found)
        for path, content in machine.files.items():
            (self.root / path).parent.mkdir(parents=True, exist_ok=True)
            (self.root / path).write_text(content)
        self.program("uname", f"case $1 in -m) echo {machine.processor} ;; *) echo {machine.system} ;; esac")
        self.program("df", f"echo Filesystem; echo /dev/made-up 1 1 {machine.free_mb * 1000_000 // 1024} 1% /")
        if machine.libc is not None:
            self.program("ldd", f"echo '{machine.libc}' >&2; exit {int('musl' in machine.libc)}")
        if machine.gpu is not None:
            self.program("nvidia-smi", f"echo '{machine.gpu}'" if machine.gpu else "echo NVIDIA-SMI has failed; exit 9")
        if own_uv is not None:
            self.program("uv", UV.replace("VERSION", own_uv).partition("\n")[2])
        self.source = self.clone()

    @property
    def data(self) -> Path:
        return self.home / ".local/share"

    @property
    def installed(self) -> Path:
        return self.data / "localllm"

    @property
    def command(self) -> Path:
        return self.home / ".local/bin/localllm"

    def program(self, name: str, body: str) -> None:
        path = self.bin / name
        path.unlink(missing_ok=True)
        path.write_text(f"#!/bin/sh\n{body}\n")
        path.chmod(0o755)

    def clone(self) -> Path:
        """What install.sh reads of a clone."""
        clone = self.folder / "clone"
        (clone / "localllm").mkdir(parents=True)
        (clone / "packaging").mkdir()
        shutil.copy(INSTALL, clone)
        (clone / "pyproject.toml").write_text("")
        (clone / "packaging/wheelhouse").write_text("")
        (clone / "localllm/version.py").write_text('__version__ = "0.2.0"\n')
        return clone

    def serve_uv(self, *, exit_status: int = 0, sha256: str | None = PINNED_SHA256[0]) -> None:
        """Take uv from the machine; curl gives uv's wheel instead, or fails. `sha256` is what sha256sum prints."""
        (self.bin / "uv").unlink(missing_ok=True)
        wheel = self.folder / "uv.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr(f"uv-{UV_VERSION}.data/scripts/uv", UV.replace("VERSION", UV_VERSION))
        give = f'echo "curl $*" >>"$LOG/calls"; while [ "$1" != -o ]; do shift; done; cp "{wheel}" "$2"'
        self.program("curl", f"exit {exit_status}" if exit_status else give)
        for name in ("cp", "unzip" if shutil.which("unzip") else "python3"):
            found = shutil.which(name)
            assert found
            (self.bin / name).symlink_to(found)
        if sha256 is not None:
            self.program("sha256sum", f"echo '{sha256}  file'")

    def run(self, *arguments: str, shell: str = "sh", script: Path | None = None, answer: str | None = None,
            **environ: str) -> subprocess.CompletedProcess[str]:  # fmt: skip
        """Run install.sh of the clone; with `answer` at a terminal."""
        interpreter = shutil.which(shell)
        assert interpreter
        command = [interpreter, str(script or self.source / "install.sh"), *arguments]
        terminal = None
        if answer is not None:
            terminal, stdin = pty.openpty()
            os.write(terminal, answer.encode())
        else:
            stdin = os.open(os.devnull, os.O_RDONLY)
        try:
            return subprocess.run(
                command,
                stdin=stdin,
                env=self.environ(**environ),
                capture_output=True,
                text=True,
                timeout=60,
                check=False,
            )
        finally:
            os.close(stdin)
            if terminal is not None:
                os.close(terminal)

    def environ(self, **more: str) -> dict[str, str]:
        return {
            "PATH": str(self.bin),
            "HOME": str(self.home),
            "LOG": str(self.log),
            "LOCALLLM_ROOT": str(self.root),
        } | more

    def calls(self) -> list[str]:
        """Return the calls of uv, curl and localllm, in order."""
        file = self.log / "calls"
        return file.read_text().splitlines() if file.exists() else []

    def uv_call(self) -> str:
        """Return the only call of `uv tool install`; "" if there was none."""
        found = [call for call in self.calls() if call.startswith("uv tool install")]
        assert len(found) <= 1
        return found[0] if found else ""
