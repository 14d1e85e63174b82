"""A pod of the Deployment, played with the real server process: the variables of the image and the pod, a folder for
/data, and the probes of a kubelet.

The process has a network address of this machine only, but the headers of requests are those that a cluster sends.
Does not know: containers (test_image_build.py), what the probes should answer.
"""

import http.client
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Self

import httpx

from scripts.layout import ROOT
from tests.packaging.image_files import container, image_environment, pod_environment, pod_spec

KEY = "the-key-of-the-secret"
POD_ADDRESS = "10.244.1.7"
OWN = ("PATH", "HOME", "LANG", "TMPDIR", "PYTHONPATH", "LD_LIBRARY_PATH")
"""Variables of the tests' process that a pod's process keeps."""


class Pod:
    """Runs until the `with` block ends. `command`: what runs in place of `localllm serve`."""

    def __init__(
        self, folder: Path, *, command: Sequence[str] = (), before: Sequence[str] = (), **environ: str
    ) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.data, self.log_path = folder / "data", folder / "pod.log"
        self.data.mkdir(exist_ok=True)
        kept = {name: os.environ[name] for name in OWN if name in os.environ}
        image = {name: value.replace("/data", str(self.data)) for name, value in image_environment().items()}
        self.environ = image | pod_environment({"api-key": KEY}) | {"OMP_NUM_THREADS": "1"} | environ | kept
        self.environ |= {"LOCALLLM_PORT": str(self.port), "HOME": str(self.data)}
        self.command = [*before, sys.executable, *(command or ("-m", "localllm")), "serve"]
        self.url = f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        with self.log_path.open("w") as log:
            self.process = subprocess.Popen(self.command, cwd=ROOT, env=self.environ, stdout=log, stderr=log)
        return self

    def __exit__(self, *exc: object) -> None:
        with self.process:
            self.process.kill()

    @property
    def log(self) -> str:
        return self.log_path.read_text()

    # What a kubelet does --------------------------------------------------------------------------------------------

    def probe(self, name: str) -> int | None:
        """Send the probe `startup`, `readiness` or `liveness`. Return the status; None if nothing listens. The probe's
        own timeout is not kept: the machine of a test may be busy with others."""
        return self.get(container()[f"{name}Probe"]["httpGet"]["path"], f"{POD_ADDRESS}:{self.port}")

    def get(self, path: str, host: str, timeout_s: float = 60) -> int | None:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout_s)
        try:
            connection.request("GET", path, headers={"host": host, "user-agent": "kube-probe/1.33"})
            return connection.getresponse().status
        except (ConnectionError, http.client.HTTPException):
            return None
        finally:
            connection.close()

    def wait_for(self, name: str, status: int | None, seconds: float = 90) -> None:
        """Send a probe until it answers with that status."""
        self.wait_until(lambda: self.probe(name) == status, f"{name} was not {status}", seconds)

    def wait_until(self, holds: Callable[[], bool], what: str, seconds: float = 90) -> None:
        deadline = time.monotonic() + seconds
        while not holds():
            assert self.process.poll() is None, f"{what}; exit code {self.process.returncode}:\n{self.log}"
            assert time.monotonic() < deadline, f"{what}:\n{self.log}"
            time.sleep(0.05)

    def terminate(self) -> int:
        """Send SIGTERM as a kubelet does. Return the exit code; a pod that outlives its grace period fails."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(pod_spec()["terminationGracePeriodSeconds"])

    # What a client does ---------------------------------------------------------------------------------------------

    def client(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=60, headers={"authorization": f"Bearer {KEY}"})

    def post(self, path: str, **body: object) -> httpx.Response:
        with self.client() as client:
            return client.post(path, json=body)
