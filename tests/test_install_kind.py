"""How an environment was installed, and the command that adds a package to it, in environments of every kind."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from localllm.machine import install_kind as module
from localllm.machine.install_kind import InstallKind, how_to_install, install_kind
from tests.prefixes import CONTAINER, make_prefix, prefix_of

ASK = """
import sys
from pathlib import Path
from localllm.machine import install_kind
install_kind.CONTAINER_MARKS = (Path("/nowhere"),)   # the tests themselves may run in a container
install_kind.CONTAINER_VARIABLES = ("KUBERNETES_SERVICE_HOST",)
print(install_kind.install_kind().name)
for requirement in ("torch", "localllm", "localllm[pdf]", "sentencepiece tiktoken"):
    print(install_kind.how_to_install(requirement))
"""
COMMANDS = {
    InstallKind.UV_TOOL: [
        "uv pip install --python {prefix} --reinstall-package torch torch --torch-backend auto",
        "uv pip install --python {prefix} --reinstall-package localllm localllm",
        "uv pip install --python {prefix} 'localllm[pdf]'",
        "uv pip install --python {prefix} sentencepiece tiktoken",
    ],
    InstallKind.PIPX: [
        "pipx runpip localllm install --force-reinstall torch",
        "pipx runpip localllm install --force-reinstall --no-deps localllm",
        "pipx runpip localllm install 'localllm[pdf]'",
        "pipx runpip localllm install sentencepiece tiktoken",
    ],
    InstallKind.BUNDLE: [
        "sh install.sh   (an offline bundle has PyTorch for CPUs only)",
        *["sh install.sh   (an offline bundle does not take further packages)"] * 3,
    ],
    InstallKind.CHECKOUT: [
        "{python} -m pip install --force-reinstall torch",
        "{python} -m pip install --editable {home}/clone",
        "{python} -m pip install --editable '{home}/clone[pdf]'",
        "{python} -m pip install sentencepiece tiktoken",
    ],
    InstallKind.CONTAINER: [
        f"an image of your own: FROM this image, USER 0, RUN python -m pip install {each}, USER 10001"
        for each in ("torch", "localllm", "'localllm[pdf]'", "sentencepiece tiktoken")
    ],
    InstallKind.PIP: [
        "{python} -m pip install --force-reinstall torch",
        "{python} -m pip install --force-reinstall --no-deps localllm",
        "{python} -m pip install 'localllm[pdf]'",
        "{python} -m pip install sentencepiece tiktoken",
    ],
}


@pytest.mark.parametrize("kind", InstallKind)
def test_each_kind_is_known_by_its_marks_and_has_commands(tmp_path: Path, kind: InstallKind) -> None:
    python = make_prefix(tmp_path, kind)
    environ = CONTAINER if kind is InstallKind.CONTAINER else {}
    done = subprocess.run([str(python), "-c", ASK], env=environ, capture_output=True, text=True, check=True)
    name, *commands = done.stdout.splitlines()
    assert name == kind.name
    places = {"prefix": prefix_of(tmp_path, kind), "python": python, "home": tmp_path}
    assert commands == [each.format(**places) for each in COMMANDS[kind]]


def test_uv_of_install_sh_is_called_by_its_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_prefix(tmp_path, InstallKind.UV_TOOL, own_root=True)
    monkeypatch.setattr(sys, "prefix", str(prefix_of(tmp_path, InstallKind.UV_TOOL, own_root=True)))
    own = tmp_path / ".local/share/localllm/bin/uv"
    assert how_to_install("torch").startswith("uv pip "), "it cannot be run"
    own.chmod(0o755)
    assert how_to_install("torch").startswith(f"{own} pip ")


@pytest.mark.parametrize("mark", ["/run/.containerenv", "/.dockerenv"])
def test_marks_of_container_engines_count_only_without_a_mark_of_an_installer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mark: str
) -> None:
    assert Path(mark) in module.CONTAINER_MARKS
    (tmp_path / "mark").touch()
    monkeypatch.setattr(module, "CONTAINER_MARKS", (tmp_path / "mark",))
    monkeypatch.setattr(module, "checkout_folder", lambda: None)
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    assert install_kind() is InstallKind.CONTAINER
    (tmp_path / "uv-receipt.toml").touch()
    assert install_kind() is InstallKind.UV_TOOL


def test_nothing_heavy_is_imported() -> None:
    code = "import localllm.machine.install_kind, sys; print(sorted({'torch', 'psutil', 'pip'} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=dict(os.environ)
    )
    assert done.stdout.strip() == "[]"
