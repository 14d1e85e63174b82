"""A pod's life, with the real server process and the requests of a kubelet: slow load, failed load, drain, full disk,
lost GPU. No probe may end a process that needs nothing but time, and every end has the exit code that the docs name.
"""

import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from localllm.errors import CorruptModel, DeviceLost
from tests.hub.local_hub import LocalHub, Trouble, wait_until_stalled
from tests.packaging.image_files import healthcheck, pod_environment
from tests.packaging.pod import KEY, POD_ADDRESS, Pod

WEIGHTS = "model.safetensors"
LONG = {"prompt": "hi", "max_tokens": 1500, "ignore_eos": True, "stream": True}
LOSE_THE_GPU = """
import os, sys, torch
from localllm.cli import main
from localllm.runner import readback

def break_when_asked(self, *args, whole=readback.StepTimer.__init__):
    if os.path.exists(os.environ["BREAK"]):
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered", 700)
    whole(self, *args)

readback.StepTimer.__init__ = break_when_asked
sys.exit(main())
"""
MAY_MOUNT = subprocess.run(
    ["unshare", "--user", "--map-root-user", "--mount", "mount", "-t", "tmpfs", "-o", "size=64k", "none", "/mnt"],
    capture_output=True, check=False,
).returncode == 0 if shutil.which("unshare") else False  # fmt: skip


@pytest.fixture
def stalled_hub(tiny_llama_path: Path) -> Iterator[LocalHub]:
    """A hub that stops in the middle of the weights."""
    with LocalHub() as hub:
        hub.add_repo("org/tiny", tiny_llama_path)
        hub.troubles[WEIGHTS] = Trouble(stall_after=4096)
        yield hub


def of_hub(hub: LocalHub) -> dict[str, str]:
    return {"HF_ENDPOINT": hub.url, "HF_HUB_DISABLE_XET": "1", "NO_PROXY": "127.0.0.1", "LOCALLLM_MODEL": "org/tiny"}


@pytest.mark.slow
def test_a_pod_downloads_serves_fails_to_load_recovers_and_drains(stalled_hub: LocalHub, tmp_path: Path) -> None:
    with Pod(tmp_path, **of_hub(stalled_hub)) as pod:
        pod.wait_for("liveness", 200)
        wait_until_stalled(stalled_hub, 90)
        for _ in range(5):
            assert (pod.probe("startup"), pod.probe("readiness"), pod.probe("liveness")) == (503, 503, 200)
        stalled_hub.go_on.set()
        pod.wait_for("startup", 200)
        assert (pod.probe("readiness"), pod.probe("liveness")) == (200, 200)

        check_names(pod)
        check_healthcheck(pod)
        with pod.client() as client:
            del client.headers["authorization"]
            assert client.get("/v1/models").status_code == 401
        answer = pod.post("/v1/completions", prompt="hi", max_tokens=2)
        assert answer.json()["usage"]["completion_tokens"] == 2

        check_failed_load(pod)
        check_drain(pod)
        assert pod.process.wait(45) == 0


def check_failed_load(pod: Pod) -> None:
    """A damaged file makes a later load fail: not ready, but alive. Once it is repaired, a request loads the model."""
    [weights] = pod.data.glob(f"huggingface/hub/models--org--tiny/snapshots/*/{WEIGHTS}")
    whole = weights.read_bytes()
    assert pod.post("/localllm/v1/models/unload", model="org/tiny").status_code == 200
    weights.write_bytes(whole[:1000])
    asked = {"model": "org/tiny", "prompt": "hi", "max_tokens": 2}
    assert pod.post("/v1/completions", **asked).json()["error"]["code"] == "model_corrupt"
    for _ in range(3):
        assert (pod.probe("readiness"), pod.probe("liveness")) == (500, 200)
    weights.write_bytes(whole)
    pod.wait_until(lambda: pod.post("/v1/completions", **asked).status_code == 200, "the model was not loaded again")
    assert pod.probe("readiness") == 200


def check_names(pod: Pod) -> None:
    """The kubelet's address and the Service's names are known, with and without a port; no other name is."""
    names = pod_environment({}, "default")["LOCALLLM_ALLOWED_HOSTS"].split(",")
    assert {"localllm", "localllm.default.svc", "localllm.default.svc.cluster.local"} <= set(names)
    for host in (POD_ADDRESS, f"{POD_ADDRESS}:8000", *names, f"{names[0]}:80"):
        assert (pod.get("/health", host), pod.get("/version", host)) == (200, 200), host
    assert pod.get("/health", "localllm.other.svc") == 403


def check_healthcheck(pod: Pod) -> None:
    """The image's own check follows LOCALLLM_PORT, and no proxy of the environment is asked."""
    proxies = {"http_proxy": "http://127.0.0.1:9", "HTTP_PROXY": "http://127.0.0.1:9"}
    assert subprocess.run(healthcheck(), shell=True, env=pod.environ | proxies, check=False).returncode == 0
    elsewhere = {"LOCALLLM_PORT": "1"}
    done = subprocess.run(healthcheck(), shell=True, env=pod.environ | elsewhere, capture_output=True, check=False)
    assert done.returncode == 1


def check_drain(pod: Pod) -> None:
    """After SIGTERM the stream goes on to its end while the pod is not ready, and new connections are refused."""
    with pod.client() as client, client.stream("POST", "/v1/completions", json=LONG) as stream:
        lines = (line for line in stream.iter_lines() if line)
        next(lines)
        pod.process.terminate()
        pod.wait_for("readiness", None, 10)
        pieces = [json.loads(line[6:]) for line in lines if line != "data: [DONE]"]
    assert pieces[-1]["choices"][0]["finish_reason"] == "length"


def test_a_signal_during_the_download_ends_the_process_soon(stalled_hub: LocalHub, tmp_path: Path) -> None:
    with Pod(tmp_path, **of_hub(stalled_hub)) as pod:
        wait_until_stalled(stalled_hub, 90)
        assert pod.probe("liveness") == 200
        assert pod.terminate() == 130, pod.log


def test_a_first_load_that_fails_ends_by_itself_and_says_why(tiny_llama_path: Path, tmp_path: Path) -> None:
    """The kubelet shows the last lines; only the back-off of restarts repeats the load."""
    broken = tmp_path / "broken"
    shutil.copytree(tiny_llama_path, broken)
    (broken / WEIGHTS).write_bytes((tiny_llama_path / WEIGHTS).read_bytes()[:1000])
    with Pod(tmp_path, LOCALLLM_MODEL=str(broken)) as pod:
        seen = set()
        while pod.process.poll() is None:
            seen.add(pod.probe("liveness"))
            time.sleep(0.1)
        assert seen <= {None, 200}
        assert pod.process.returncode == CorruptModel.exit_code
        assert WEIGHTS in pod.log


def test_a_missing_key_is_refused_with_the_variable_to_set(tmp_path: Path) -> None:
    with Pod(tmp_path, KUBERNETES_SERVICE_HOST="10.96.0.1") as pod:
        pass
    del pod.environ["LOCALLLM_API_KEY"]
    done = subprocess.run(pod.command, env=pod.environ, capture_output=True, text=True, check=False, timeout=90)
    assert done.returncode == 2
    assert "Refusing to listen on 0.0.0.0 without a key." in done.stderr


@pytest.mark.skipif(not MAY_MOUNT, reason="this machine does not let a test mount a file system of its own")
def test_a_full_volume_stops_neither_the_server_nor_its_probes(
    stalled_hub: LocalHub, tiny_llama_path: Path, tmp_path: Path
) -> None:
    full = 'mount -t tmpfs -o size=128k none "$0" && { dd if=/dev/zero of="$0/full" 2>&- || :; } && exec "$@"'
    data = str(tmp_path / "data")
    before = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", full, data]
    environ = of_hub(stalled_hub) | {"LOCALLLM_MODEL": str(tiny_llama_path)}
    with Pod(tmp_path, before=before, **environ) as pod:
        pod.wait_for("startup", 200)
        assert pod.post("/v1/completions", prompt="hi", max_tokens=2).status_code == 200
        refused = pod.post("/localllm/v1/models/downloads", model="org/tiny")
        assert refused.json()["error"]["code"] == "disk_full", refused.text
        assert (pod.probe("readiness"), pod.probe("liveness")) == (200, 200)
        assert "cannot be written: No space left on device" in pod.log
        assert pod.terminate() == 0


def test_a_lost_gpu_ends_its_streams_and_the_process(tiny_llama_path: Path, tmp_path: Path) -> None:
    """The kubelet and `restart: unless-stopped` start a new process, and only a new process can use the GPU again."""
    broken = tmp_path / "break"
    command = ("-c", LOSE_THE_GPU)
    with Pod(tmp_path, command=command, LOCALLLM_MODEL=str(tiny_llama_path), BREAK=str(broken)) as pod:
        pod.wait_for("startup", 200)
        with pod.client() as client, client.stream("POST", "/v1/completions", json=LONG) as stream:
            lines = (line for line in stream.iter_lines() if line)
            next(lines)
            broken.touch()
            assert "device_lost" in "".join(lines)
        assert pod.process.wait(45) == DeviceLost.exit_code == 7, pod.log
        assert KEY not in pod.log
