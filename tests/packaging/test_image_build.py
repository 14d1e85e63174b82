"""The CPU image, built without a registry and run as its users run it: read-only, without rights, as user 10001.

The base image is a small Debian that mmdebstrap makes; the wheels come from packaging/wheelhouse. Both need a network
the first time: LOCALLLM_TEST_BASE=IMAGE and LOCALLLM_TEST_WHEELS=FOLDER name finished ones, LOCALLLM_TEST_IMAGE=IMAGE a
whole image. Skipped where the tools are missing: sudo apt-get install -y buildah podman runc mmdebstrap
"""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from localllm.version import __version__
from scripts.layout import ROOT
from tests.packaging.image_files import healthcheck

TOOLS = ("buildah", "podman", "runc")
MOST_BYTES = 1_450_000_000
NAME, KEY = "localhost/localllm-test", "the-key-of-the-container"
PODMAN = ("podman", "--cgroup-manager", "cgroupfs", "--runtime", "runc")  # they work for root without systemd
RIGHTS = ("--read-only", "--tmpfs", "/tmp", "--cap-drop", "all", "--security-opt", "no-new-privileges")
LIMITS = ("--network", "host", "--ulimit", "nofile=4096:4096", "--ulimit", "nproc=4096:4096")
PACKAGES = "ca-certificates,libstdc++6,python3,python3-venv"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(os.getuid() != 0, reason="buildah needs root or a set-up of user namespaces"),
    pytest.mark.skipif(not all(map(shutil.which, TOOLS)), reason=f"needs {', '.join(TOOLS)}"),
]


def run(*words: str | Path, **environ: str) -> str:
    done = subprocess.run(words, env=os.environ | environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{words}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    given = os.environ.get("LOCALLLM_TEST_BASE")
    if given:
        return given
    if not shutil.which("mmdebstrap"):
        pytest.skip("needs mmdebstrap or LOCALLLM_TEST_BASE")
    root = tmp_path_factory.mktemp("base") / "root.tar"
    run("mmdebstrap", "--variant=essential", f"--include={PACKAGES}", "bookworm", root)
    run("podman", "import", root, "localhost/localllm-test-base")
    return "localhost/localllm-test-base"


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    given = os.environ.get("LOCALLLM_TEST_WHEELS")
    if given:
        return Path(given)
    folder, own = tmp_path_factory.mktemp("wheels") / "all", tmp_path_factory.mktemp("own")
    run(sys.executable, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", own, ROOT, LOCALLLM_NATIVE="require")
    [wheel] = own.glob("localllm-*.whl")
    run(sys.executable, ROOT / "packaging" / "wheelhouse", "--torch", "cpu", "--out", folder, "--wheel", wheel)
    return folder


@pytest.fixture(scope="module")
def image(request: pytest.FixtureRequest) -> Iterator[str]:
    given = os.environ.get("LOCALLLM_TEST_IMAGE")
    if given:
        yield given
        return
    base, wheels = request.getfixturevalue("base"), request.getfixturevalue("wheels")
    words = ("--with", "buildah", "--name", NAME, "--base", base, "--wheels", wheels)
    said = run(sys.executable, ROOT / "scripts" / "image", *words, "--", "--isolation", "chroot", "--network", "host")
    assert f"Built {NAME}:cpu" in said
    yield f"{NAME}:cpu"
    run(*PODMAN, "rmi", "--force", f"{NAME}:cpu", f"{NAME}:{__version__}-cpu")


@pytest.fixture
def container(image: str) -> Iterator[tuple[str, str]]:
    """Yield the name and the URL of a running container with a volume of its own."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    name = f"localllm-test-{port}"
    variables = ("-e", f"LOCALLLM_API_KEY={KEY}", "-e", f"LOCALLLM_PORT={port}")
    run(
        *PODMAN,
        "run",
        "--detach",
        "--name",
        name,
        "-v",
        f"{name}:/data",
        "--no-healthcheck",
        *LIMITS,
        *RIGHTS,
        *variables,
        image,
    )
    yield name, f"http://127.0.0.1:{port}"
    run(*PODMAN, "rm", "--force", "--volumes", name)
    run(*PODMAN, "volume", "rm", "--force", name)


def test_the_image_is_small_and_has_a_layer_for_each_part(image: str) -> None:
    [facts] = json.loads(run("podman", "image", "inspect", image))
    size = facts["Size"]
    print(f"CPU image: {size / 1e9:.3f} GB")
    assert size <= MOST_BYTES
    assert facts["Config"]["User"] == "10001:10001"
    assert facts["Config"]["Labels"]["org.opencontainers.image.version"] == __version__
    assert facts["Config"]["StopSignal"] in ("SIGTERM", "15")
    assert facts["Healthcheck"]["Interval"] == 15 * 10**9
    history = json.loads(run("podman", "history", "--format", "json", image))  # the newest first
    copied = [each["size"] for each in history if "COPY" in each["CreatedBy"]]
    assert len(copied) == 3
    assert copied[0] <= 30e6  # localllm: what an update downloads, before compression


def test_a_container_is_refused_without_a_key(image: str) -> None:
    words = (*PODMAN, "run", "--rm", *LIMITS, *RIGHTS, image)
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "Refusing to listen on 0.0.0.0 without a key." in done.stderr
    assert "-e LOCALLLM_API_KEY=" in done.stderr


def test_a_read_only_container_gets_healthy_answers_and_drains(container: tuple[str, str]) -> None:
    name, url = container
    began_s = time.monotonic()
    while run_check(name) != 0:
        assert time.monotonic() - began_s < 120, log_of(name)
        time.sleep(0.2)
    print(f"healthy after {time.monotonic() - began_s:.1f} s")
    asked = {"model": "demo", "messages": [{"role": "user", "content": "What is a KV cache?"}], "max_tokens": 8}
    with httpx.Client(base_url=url, timeout=60) as client:
        assert client.post("/v1/chat/completions", json=asked).status_code == 401
        key = {"authorization": f"Bearer {KEY}"}
        answer = client.post("/v1/chat/completions", json=asked, headers=key)
        assert answer.json()["usage"]["completion_tokens"] > 0
        pages = client.get("/", headers=key, follow_redirects=True)
        assert pages.status_code == 200
    assert inside(name, "id", "-u").strip() == "10001"
    assert inside(name, "python", "-c", "import getpass; print(getpass.getuser())").strip() == "localllm"
    assert inside(name, "sh", "-c", "touch /opt/x 2>&1 || echo refused").endswith("refused\n")
    native = "from localllm.kernels.cpu.native.library import native, why_none; print(native(), why_none())"
    assert not inside(name, "python", "-c", native).startswith("None")
    began_s = time.monotonic()
    run(*PODMAN, "stop", "--time", "45", name)
    print(f"stopped after {time.monotonic() - began_s:.1f} s")
    [facts] = json.loads(run(*PODMAN, "inspect", name))
    assert facts["State"]["ExitCode"] == 0
    assert "Read-only file system" not in log_of(name)
    written = [line.split(maxsplit=1)[1] for line in run(*PODMAN, "diff", name).splitlines()]
    allowed = ("/data", "/tmp", "/run", "/etc", "/dev", "/proc", "/sys")  # the engine's own mounts
    assert not [path for path in written if not path.startswith(allowed)]


def run_check(name: str) -> int:
    """Run the image's HEALTHCHECK in the container."""
    words = (*PODMAN, "exec", name, "sh", "-c", healthcheck())
    return subprocess.run(words, capture_output=True, check=False).returncode


def inside(name: str, *words: str) -> str:
    return run(*PODMAN, "exec", name, *words)


def log_of(name: str) -> str:
    done = subprocess.run((*PODMAN, "logs", name), capture_output=True, text=True, check=False)
    return done.stdout + done.stderr
