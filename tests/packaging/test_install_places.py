"""Where install.sh takes PyTorch and the packages from, on made-up machines and networks: what it says before it asks,
and what it gives to uv. Nothing here uses the network.
"""

import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.packaging.harness import SHELLS, gpu, refusal
from tests.packaging.sandbox import INTERNET, PYPI, PYPI_ALONE, PYTORCH, UV_VERSION, Machine, Sandbox, page, wheels

MIRROR = "mirror.example"
COMPANY = {f"{MIRROR}/simple/torch/": page("2.13.0"), f"{MIRROR}/simple/uv/": "uv"}
"""A mirror of PyPI, where nothing else is reached."""


@dataclass
class Case:
    """A machine's configuration and network, and what install.sh makes of them.

    `says` may name the sandbox's folder as {links}. `gives`: variables of uv. `requires`: words of uv's command.
    """

    says: str
    requires: str
    gives: dict[str, str] = field(default_factory=dict)
    machine: Machine = field(default_factory=lambda: Machine(pages=PYPI_ALONE))
    environ: dict[str, str] = field(default_factory=dict)
    pip_conf: str = ""  # of the user
    uv_toml: str = ""
    wheels: list[str] = field(default_factory=list)  # in the folder {links}
    arguments: tuple[str, ...] = ()


BOTH = wheels("2.12.0+cpu", "2.13.0+cpu")
CASES = {
    "find-links in a variable": Case(
        "PyTorch comes from {links} (pip's configuration).", "--with torch==2.13.0+cpu",
        {"UV_FIND_LINKS": "{links}"}, environ={"PIP_FIND_LINKS": "{links}"}, wheels=BOTH,
    ),
    "find-links in pip.conf": Case(
        "PyTorch comes from {links} (pip's configuration).", "--with torch==2.13.0+cpu",
        {"UV_FIND_LINKS": "/nowhere,{links}", "UV_INDEX": f"https://{MIRROR}/simple https://other.example/simple",
         "UV_INDEX_STRATEGY": "unsafe-best-match"},
        pip_conf="# mine\n[list]\nfind-links = /wrong\n[global]\nfind_links =\n    /nowhere\n    ; a comment\n"
        "    {links}\n"
        f"timeout = 5\nextra-index-url: https://{MIRROR}/simple\n  https://other.example/simple\n",
        wheels=BOTH,
    ),
    "the section of pip's install is stronger": Case(
        "PyTorch comes from {links} (pip's configuration).", "--with torch==2.13.0+cpu",
        {"UV_FIND_LINKS": "{links}"},
        pip_conf="[global]\nfind-links=/wrong\n[install]\nfind-links={links}\n", wheels=BOTH,
    ),
    "a folder for one Python decides on the Python": Case(
        "PyTorch comes from {links}", "--python 3.11 --with torch==2.13.0+cpu", environ={"PIP_FIND_LINKS": "{links}"},
        wheels=wheels("2.13.0+cpu", pythons=("cp310", "cp311", "cp314")),
    ),
    "a folder for a Python that is too old": Case(
        "PyTorch comes from PyPI.", "--with torch==2.13.0 ", environ={"PIP_FIND_LINKS": "{links}"},
        wheels=wheels("2.13.0+cpu", pythons=("cp310",)),
    ),
    "an extra index": Case(
        f"PyTorch comes from https://{MIRROR}/extra (pip's configuration).", "--with torch==2.13.0+cpu",
        {"UV_INDEX": f"https://{MIRROR}/extra/", "UV_INDEX_STRATEGY": "unsafe-best-match"},
        Machine(pages=PYPI_ALONE | {f"{MIRROR}/extra/torch/": page("2.13.0+cpu")}),
        environ={"PIP_EXTRA_INDEX_URL": f"https://{MIRROR}/extra/"},
    ),
    "uv's variables, which pip's do not touch": Case(
        f"PyTorch comes from https://{MIRROR}/extra (uv's configuration).", "--with torch==2.13.0+cpu",
        {"UV_INDEX": f"company=https://{MIRROR}/extra", "UV_INDEX_STRATEGY": "unsafe-best-match"},
        Machine(pages=PYPI_ALONE | {f"{MIRROR}/extra/torch/": page("2.13.0+cpu")}),
        environ={"UV_INDEX": f"company=https://{MIRROR}/extra", "PIP_INDEX_URL": "https://wrong.example"},
    ),
    "uv's own folder": Case(
        "PyTorch comes from {links} (uv's configuration).", "--with torch==2.13.0+cpu",
        {"UV_FIND_LINKS": "/nowhere,{links}"},
        environ={"UV_FIND_LINKS": "/nowhere,{links}"}, wheels=BOTH,
    ),
    "uv's file": Case(
        f"PyTorch comes from https://{MIRROR}/simple.", "--with torch==2.13.0 ", {"UV_DEFAULT_INDEX": ""},
        Machine(pages=COMPANY),
        uv_toml=f'[[index]]\nname = "company"\nurl = "https://{MIRROR}/simple"\ndefault = true\n',
    ),
    "the package index alone": Case(
        f"PyTorch's index ({PYTORCH}) cannot be reached: PyTorch comes from PyPI.\n"
        "localllm 0.2.0 with PyTorch for CUDA (it runs on CPUs, too): about 2.8 GB to download, 6 GB on disk, in ",
        "--with torch==2.13.0 ",
    ),
    "a mirror of the package index alone": Case(
        f"PyTorch comes from https://{MIRROR}/simple.", "--with torch==2.13.0 ",
        {"UV_DEFAULT_INDEX": f"https://{MIRROR}/simple"}, Machine(pages=COMPANY),
        pip_conf=f"[global]\nindex-url = https://{MIRROR}/simple/\n",
    ),
    "aarch64 and the package index alone": Case(
        "PyTorch for CPUs: about 280 MB", "--with torch==2.10.0 ",
        machine=Machine(processor="aarch64", pages=PYPI_ALONE),
    ),
    "aarch64 and --cpu": Case(
        "PyTorch for CPUs: about 280 MB", "--with torch==2.10.0 ",
        machine=Machine(processor="aarch64", pages=PYPI_ALONE),
        arguments=("--cpu",),
    ),
    "driver 580 and the package index alone": Case(
        "with PyTorch for CUDA 13.0: about 2.8 GB", "--with torch==2.13.0 ", machine=gpu("580.65", pages=PYPI_ALONE),
    ),
    "driver 550 and an own folder": Case(
        "with PyTorch for CUDA 12.9: about 3.1 GB", "--with torch==2.13.0+cu129",
        machine=gpu("550.54", pages=PYPI_ALONE),
        environ={"PIP_FIND_LINKS": "{links}"}, wheels=wheels("2.13.0+cpu", "2.13.0+cu129"),
    ),
    "a mirror of PyTorch's index": Case(
        f"PyTorch comes from https://{MIRROR}/whl/cpu (LOCALLLM_TORCH_INDEX).", "--with torch==2.13.0+cpu",
        {"UV_FIND_LINKS": f"https://{MIRROR}/whl/cpu/torch/"},
        Machine(pages=PYPI_ALONE | {f"{MIRROR}/whl/cpu/torch/": page("2.13.0+cpu")}),
        environ={"LOCALLLM_TORCH_INDEX": f"https://{MIRROR}/whl/cpu/"},
    ),
    "PyTorch's own index": Case(
        "with PyTorch for CPUs: about 280 MB to download, 1.3 GB on disk", "--with torch==2.13.0+cpu",
        {"UV_FIND_LINKS": f"https://{PYTORCH}/whl/cpu/torch/"}, Machine(),
    ),
    "a proxy and a certificate of pip": Case(
        "PyTorch for CPUs", "--with torch==2.13.0+cpu",
        {"HTTPS_PROXY": "http://proxy.example:3128", "SSL_CERT_FILE": "/etc/company.pem"}, Machine(),
        pip_conf="[global]\nproxy = http://proxy.example:3128\ncert = /etc/company.pem\n",
    ),
    "a file of the machine, and none for --isolated": Case(
        "Packages come from https://mirror.example/simple (pip's configuration).", "--with torch==2.13.0+cpu",
        {"UV_DEFAULT_INDEX": f"https://{MIRROR}/simple"},
        Machine(pages=INTERNET | COMPANY, files={"etc/pip.conf": f"[global]\nindex-url = https://{MIRROR}/simple\n"}),
    ),
    "pip's files are switched off": Case(
        "PyTorch for CPUs", "--with torch==2.13.0+cpu", {"UV_FIND_LINKS": f"https://{PYTORCH}/whl/cpu/torch/"},
        Machine(files={"etc/pip.conf": "[global]\nindex-url = https://wrong.example/simple\n"}),
        environ={"PIP_CONFIG_FILE": "/dev/null"},
    ),
}  # fmt: skip


def prepared(case: Case, folder: Path) -> tuple[Sandbox, dict[str, str]]:
    """Return the sandbox and the environment of a case."""
    sandbox = Sandbox(folder, case.machine)
    links = folder / "links"
    links.mkdir()
    for name in case.wheels:
        (links / name).touch()
    for name, text in (("pip/pip.conf", case.pip_conf), ("uv/uv.toml", case.uv_toml)):
        if text:
            (sandbox.home / ".config" / name).parent.mkdir(parents=True)
            (sandbox.home / ".config" / name).write_text(text.replace("{links}", str(links)))
    return sandbox, {name: value.replace("{links}", str(links)) for name, value in case.environ.items()}


@pytest.mark.parametrize("name", CASES)
def test_pytorch_comes_from_the_first_place_that_has_it(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    sandbox, environ = prepared(case, tmp_path)
    ended = sandbox.run("--yes", *case.arguments, shell=SHELLS[0], **environ)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    links = str(tmp_path / "links")
    assert case.says.replace("{links}", links) in ended.stdout
    assert case.requires in sandbox.uv_call() + " "
    given = sandbox.uv_environment()
    wanted = {name: value.replace("{links}", links) for name, value in case.gives.items()}
    assert {name: given.get(name, "").strip() for name in wanted} == wanted
    assert "wrong" not in str(given)
    if "links" in case.says:
        assert sandbox.asked() == [], "no host is asked for what is here"


def test_a_package_for_arm_is_not_held_to_the_lock_of_another_pytorch(tmp_path: Path) -> None:
    sandbox = Sandbox(tmp_path, Machine(processor="aarch64", pages=PYPI_ALONE))
    (sandbox.log / "uv-fails").touch()  # the lock stays beside the downloads
    assert sandbox.run("--yes").returncode == 1
    lock = sandbox.installed / "cache/lock.txt"
    assert f"--constraints {lock} " in sandbox.uv_call()
    assert lock.read_text() == "numpy==2.4.6\n"


REFUSED = {  # name: machine, arguments, environment, what happened, what to type next
    "--cpu and the package index alone": (
        Machine(pages=PYPI_ALONE), ["--cpu"], {},
        f"PyTorch's index ({PYTORCH}) cannot be reached, and only it has PyTorch without CUDA.",
                         ["sh install.sh   (PyTorch with CUDA from your package index: about 2.8 GB",
                          "LOCALLLM_TORCH_INDEX=https://your-mirror/whl/cpu sh install.sh --cpu",
                          "pip download 'torch==2.13.0+cpu' on another machine, then PIP_FIND_LINKS=FOLDER"],
    ),
    "driver 550 and the package index alone": (
        gpu("550.54", pages=PYPI_ALONE), [], {}, "only it has PyTorch for CUDA 12.9, which driver 550.54 needs.",
        ["LOCALLLM_TORCH_INDEX=https://your-mirror/whl/cu129 sh install.sh", "sudo ubuntu-drivers install"],
    ),
    "no network": (
        Machine(pages={}), [], {},
        f"PyTorch's index ({PYTORCH}) cannot be reached.\nNo network: {PYPI} cannot be reached.",
        ["sh install.sh --offline FOLDER"],
    ),
    "no network behind a proxy": (
        Machine(pages={}), [], {"PIP_PROXY": "http://me:secret@proxy.example:3128"},
        f"{PYPI} cannot be reached through the proxy proxy.example:3128.",
        ["HTTPS_PROXY=http://PROXY:PORT sh install.sh"],
    ),
    "a mirror of PyTorch's index that does not answer": (
        Machine(), [], {"LOCALLLM_TORCH_INDEX": "https://me:secret@gone.example/whl/cpu"},
        "PyTorch's index (gone.example) cannot be reached. LOCALLLM_TORCH_INDEX names it.",
        ["curl -I https://gone.example/whl/cpu/torch/"],
    ),
    "a mirror without this build": (
        Machine(pages=INTERNET | {f"{MIRROR}/whl/cpu/torch/": page("2.9.0+cpu")}), [],
        {"LOCALLLM_TORCH_INDEX": f"https://{MIRROR}/whl/cpu"},
        f"https://{MIRROR}/whl/cpu has no torch 2.13.0+cpu for x86_64.", [f"curl -I https://{MIRROR}/whl/cpu/torch/"],
    ),
    "an index without PyTorch": (
        Machine(pages={f"{MIRROR}/simple/torch/": page("1.0")}), [], {"PIP_INDEX_URL": f"https://{MIRROR}/simple"},
        f"https://{MIRROR}/simple has no torch 2.13.0 for x86_64.", ["LOCALLLM_TORCH_INDEX=https://your-mirror/whl/cpu"],
    ),
    "pip's no-index": (
        Machine(pages=PYPI_ALONE), [], {"PIP_NO_INDEX": "1"}, "pip's configuration (no-index) forbids package indexes.",
        ["LOCALLLM_TORCH_INDEX="],
    ),
    "too little disk for the large build": (
        Machine(pages=PYPI_ALONE, free_mb=8_000), [], {}, "8.0 GB free; the install needs 9 GB", ["--dir"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_place_has_is_refused_with_ways_out(name: str, tmp_path: Path) -> None:
    machine, arguments, environ, what, remedies = REFUSED[name]
    sandbox = Sandbox(tmp_path, machine)
    said = refusal(sandbox.run("--yes", *arguments, shell=SHELLS[0], **environ))
    assert what in said
    assert all(remedy in said.partition("\nTry: ")[2] for remedy in remedies), said
    assert "secret" not in said
    assert not any(sandbox.data.iterdir())


def test_a_probe_that_fails_by_chance_does_not_cost_gigabytes(tmp_path: Path) -> None:
    sandbox = Sandbox(tmp_path, Machine())
    sandbox.fail(PYTORCH, once=True)
    assert "about 280 MB" in sandbox.run("--yes").stdout
    assert [address for address in sandbox.asked() if PYTORCH in address] == 2 * [f"https://{PYTORCH}/whl/cpu/torch/"]


def test_passwords_and_untrusted_hosts_stay_where_they_belong(tmp_path: Path) -> None:
    """A password is neither printed nor put on a command line; only the hosts that pip trusts are not verified."""
    sandbox = Sandbox(tmp_path, Machine(pages=COMPANY))
    environ = {"PIP_INDEX_URL": f"https://me:secret@{MIRROR}/simple", "PIP_TRUSTED_HOST": MIRROR}
    ended = sandbox.run("--yes", **environ)
    assert ended.returncode == 0, ended.stderr
    assert "secret" not in ended.stdout + ended.stderr + sandbox.uv_call()
    given = sandbox.uv_environment()
    assert given["UV_DEFAULT_INDEX"] == environ["PIP_INDEX_URL"]
    assert given["UV_INSECURE_HOST"] == MIRROR
    assert {address.endswith(" -k") for address in sandbox.asked() if MIRROR in address} == {True}
    assert {address.endswith(" -k") for address in sandbox.asked() if PYTORCH in address} == {False}


def test_uv_comes_through_pip_where_its_host_is_closed(tmp_path: Path) -> None:
    """pip knows the machine's mirror; the file is compared with the same SHA-256."""
    sandbox = Sandbox(tmp_path, Machine(pages=COMPANY), own_uv=None)
    sandbox.serve_uv(exit_status=6)
    name = f"uv-{UV_VERSION}-py3-none-manylinux_2_17_x86_64.manylinux2014_x86_64.whl"
    give = f'while [ "$1" != --dest ]; do shift; done; cat "{sandbox.pages}/uv.whl" >"$2/{name}"'
    real = shutil.which("python3")
    sandbox.program("python3", f'[ $1 = -m ] || exec {real} "$@"\necho "python3 $*" >>"$LOG/calls"; {give}')
    ended = sandbox.run("--yes", PIP_INDEX_URL=f"https://{MIRROR}/simple")
    assert ended.returncode == 0, ended.stderr
    assert f"uv=={UV_VERSION}" in next(call for call in sandbox.calls() if call.startswith("python3 -m pip download"))
    assert (sandbox.installed / "bin/uv").exists()
    assert not (sandbox.installed / "cache").exists()


def test_uv_says_nothing_that_the_user_can_do_nothing_about(tmp_path: Path) -> None:
    """uv warns of a PATH without its folder for commands; install.sh says this itself, with what to type."""
    sandbox = Sandbox(tmp_path, Machine())
    uv = sandbox.bin / "uv"
    uv.write_text(uv.read_text() + '\ncase :$PATH: in *":$UV_TOOL_BIN_DIR:"*) ;; *) echo "warning: PATH" >&2 ;; esac\n')
    ended = sandbox.run("--yes")
    assert ended.stderr == ""
    assert "~/.local/bin is not in PATH." in ended.stdout


@pytest.mark.skipif(not shutil.which("busybox"), reason="needs busybox: apt-get install busybox")
def test_the_shell_of_busybox_runs_it(tmp_path: Path) -> None:
    sandbox = Sandbox(tmp_path, Machine())
    command = [str(shutil.which("busybox")), "sh", str(sandbox.source / "install.sh"), "--yes"]
    ended = subprocess.run(
        command, env=sandbox.environ(), stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
