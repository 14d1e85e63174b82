"""A made-up machine for install.sh: a PATH of its own, folders in place of /proc and /sys, and programs that answer as
those of the machine would. uv is a script that records how it was called and creates what uv would create; curl is a
network of a few pages.

Does not know: what install.sh should say (test_install.py).
"""

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
sh awk cat chmod cut date dirname env grep head ln ls mkdir mktemp mv readlink rm rmdir sed sleep sort tail touch tr wc
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
env | grep -E '^(UV_|VIRTUAL_ENV|PYTHON|SSL_CERT_FILE|HTTPS_PROXY)' | sort >"$LOG/environment"
[ ! -e "$LOG/uv-fails" ] || { echo "error: made up" >&2; exit 2; }
[ ! -e "$LOG/uv-waits" ] || { touch "$LOG/uv-runs"; sleep 20; exit 2; }
mkdir -p "$UV_TOOL_DIR/localllm/bin" "$UV_TOOL_BIN_DIR" "$UV_CACHE_DIR/archive-v0" "$UV_CACHE_DIR/wheels-v10"
mkdir -p "$UV_PYTHON_INSTALL_DIR/cpython-3.12.4-linux-x86_64-gnu/bin"
touch "$UV_CACHE_DIR/CACHEDIR.TAG" "$UV_CACHE_DIR/.lock" "$UV_TOOL_DIR/.lock" "$UV_PYTHON_INSTALL_DIR/.lock"
echo 'requirements = [{ name = "localllm" }]' >"$UV_TOOL_DIR/localllm/uv-receipt.toml"
{ echo '#!/bin/sh'; echo 'echo "localllm $*" >>"$LOG/calls"'; echo '[ "$1" != --version ] || echo localllm 0.0.9'
} >"$UV_TOOL_DIR/localllm/bin/localllm"
chmod +x "$UV_TOOL_DIR/localllm/bin/localllm"
[ -e "$UV_TOOL_BIN_DIR/localllm" ] || ln -s "$UV_TOOL_DIR/localllm/bin/localllm" "$UV_TOOL_BIN_DIR/localllm"
"""
CURL = """
insecure='' out=''
while [ $# -gt 0 ]; do
  case $1 in -o) out=$2; shift ;; -k) insecure=' -k' ;; http*://*) url=$1 ;; esac
  shift
done
host=${url#*://}; host=${host%%/*}; host=${host##*@}
echo "$url$insecure" >>"$LOG/asked"
if [ -e "$PAGES/fails once/$host" ]; then rm "$PAGES/fails once/$host"; exit 28; fi
[ ! -e "$PAGES/fails/$host" ] || exit "$(cat "$PAGES/fails/$host")"
file=$PAGES/$(echo "$url" | sed 's#.*://##; s#.*@##' | tr / _)
case $host in
  files.pythonhosted.org) echo "curl $url" >>"$LOG/calls"; file=$PAGES/uv.whl ;;
  *) [ -e "$PAGES/hosts/$host" ] || exit 6 ;;
esac
[ -e "$file" ] || exit 22
if [ "$out" = - ]; then cat "$file"; else cat "$file" >"$out"; fi
"""
PYTORCH, PYPI = "download.pytorch.org", "pypi.org"


def wheels(*versions: str, pythons: tuple[str, ...] = ("cp311", "cp312", "cp313")) -> list[str]:
    """Return the names of PyTorch's wheels for Linux."""
    return [
        f"torch-{version}-{python}-{python}-manylinux_2_28_{processor}.whl"
        for version in versions
        for python in pythons
        for processor in ("x86_64", "aarch64")
    ]


def page(*versions: str) -> str:
    """Return an index's page of PyTorch, as pip and uv read it."""
    links = (f'<a href="/files/{name.replace("+", "%2B")}#sha256=0">{name}</a><br>' for name in wheels(*versions))
    return "<html>\n" + "\n".join(links)


INTERNET = {
    **{
        f"{PYTORCH}/whl/{build}/torch/": page("2.12.0+" + build, "2.13.0+" + build)
        for build in ("cpu", "cu129", "cu130")
    },
    f"{PYPI}/simple/torch/": page("2.10.0", "2.13.0", "2.14.0"),
    f"{PYPI}/simple/uv/": "uv",
}
"""Pages that everybody reaches, by their address without https://."""

PYPI_ALONE = {address: text for address, text in INTERNET.items() if address.startswith(PYPI)}

DEBIAN_12 = "ldd (Debian GLIBC 2.36-9+deb12u4) 2.36"
PINNED_SHA256 = [line.split("=")[-1].split(" ")[0] for line in INSTALL.read_text().splitlines() if " sha=" in line]


@dataclass
class Machine:
    """What the programs of a machine say. `files`: path below / -> content. `gpu`: what nvidia-smi prints.

    `pages`: what it reaches of the network."""

    system: str = "Linux"
    processor: str = "x86_64"
    libc: str | None = DEBIAN_12
    free_mb: int = 50_000
    gpu: str | None = None
    files: dict[str, str] = field(default_factory=dict)
    pages: dict[str, str] = field(default_factory=lambda: INTERNET)


class Sandbox:
    """The folders of one machine: home/, root/ (its /proc and /sys), bin/ (its PATH), log/, and clone/ of localllm."""

    def __init__(self, folder: Path, machine: Machine, *, own_uv: str | None = UV_VERSION) -> None:
        self.folder = folder
        names = ("home", "root", "bin", "log", "pages")
        self.home, self.root, self.bin, self.log, self.pages = (folder / name for name in names)
        for made in (self.home, self.root, self.bin, self.log, self.pages / "hosts", self.data):
            made.mkdir(parents=True)
        for name in REAL_PROGRAMS:
            found = shutil.which(name)
            assert found, name
            (self.bin / name).symlink_to(found)
        for path, content in machine.files.items():
            (self.root / path).parent.mkdir(parents=True, exist_ok=True)
            (self.root / path).write_text(content)
        for address, text in machine.pages.items():
            (self.pages / "hosts" / address.split("/")[0]).touch()
            (self.pages / address.replace("/", "_")).write_text(text)
        self.program("curl", CURL)
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
        (clone / "packaging/lock").mkdir(parents=True)
        (clone / "packaging/lock/cpu.txt").write_text("numpy==2.4.6\ntorch==2.13.0\n")
        shutil.copy(INSTALL, clone)
        (clone / "pyproject.toml").write_text("")
        (clone / "packaging/wheelhouse").write_text("")
        (clone / "localllm/version.py").write_text('__version__ = "0.2.0"\n')
        return clone

    def fail(self, host: str, status: int = 6, *, once: bool = False) -> None:
        """Let curl fail for a host with an exit status; once: only the first time."""
        file = self.pages / ("fails once" if once else "fails") / host
        file.parent.mkdir(exist_ok=True)
        file.write_text(str(status))

    def serve_uv(self, *, exit_status: int = 0, sha256: str | None = PINNED_SHA256[0]) -> None:
        """Take uv from the machine; curl gives uv's wheel instead, or fails. `sha256` is what sha256sum prints."""
        (self.bin / "uv").unlink(missing_ok=True)
        with zipfile.ZipFile(self.pages / "uv.whl", "w") as archive:
            archive.writestr(f"uv-{UV_VERSION}.data/scripts/uv", UV.replace("VERSION", UV_VERSION))
        if exit_status:
            self.fail("files.pythonhosted.org", exit_status)
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
            "PAGES": str(self.pages),
            "LOCALLLM_ROOT": str(self.root),
        } | more

    def calls(self) -> list[str]:
        """Return the calls of uv, curl and localllm, in order."""
        file = self.log / "calls"
        return file.read_text().splitlines() if file.exists() else []

    def asked(self) -> list[str]:
        """Return the addresses that curl was asked for, in order."""
        file = self.log / "asked"
        return file.read_text().splitlines() if file.exists() else []

    def uv_environment(self) -> dict[str, str]:
        lines = (self.log / "environment").read_text().splitlines()
        return dict(line.split("=", 1) for line in lines)

    def uv_call(self) -> str:
        """Return the only call of `uv tool install`; "" if there was none."""
        found = [call for call in self.calls() if call.startswith("uv tool install")]
        assert len(found) <= 1
        return found[0] if found else ""
