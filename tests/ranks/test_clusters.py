"""Real launchers: two nodes of a Ray cluster, and four processes of torchrun, on this machine."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from localllm.config.settings import EngineConfig
from localllm.errors import ConfigError, RanksLost
from localllm.models.read_spec import read_spec
from localllm.ranks.executor import RankExecutor
from localllm.ranks.placement import EXTERNAL, hardware_of_machines
from localllm.ranks.wire import Kind
from scripts.layout import ROOT
from tests.ranks.real import HARDWARE, config_for, plan_for, tokens_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A cluster of two nodes with a processor each, on this machine."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    ray = pytest.importorskip("ray", reason="localllm[ray] is not installed")
    from ray.cluster_utils import Cluster

    node = {"num_cpus": 1, "object_store_memory": 80 << 20}
    made = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
    made.add_node(**node)
    yield made
    ray.shutdown()
    made.shutdown()


def loaded(path: Path, config: EngineConfig) -> RankExecutor:
    plan = plan_for(path, config)
    return RankExecutor.load(path, read_spec(path), config, plan, lambda done, of: None, lambda text: None)


@pytest.mark.parametrize("sizes", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}], ids=["tp", "pp"])
def test_ranks_on_two_nodes_generate_the_same_tokens(
    cluster: Any, sizes: dict[str, int], checkpoint: Path, alone: Any
) -> None:  # fmt: skip
    config = config_for(nodes=2, ray_address=cluster.address, **sizes)
    assert hardware_of_machines(config, HARDWARE).gpus == ()
    executor = loaded(checkpoint, config)
    try:
        runner, plan = executor.open_runner(config, plan_for(checkpoint, config), HARDWARE, lambda text: None)
        assert tokens_of(runner, plan, temperature=0.0) == tokens_of(*alone, temperature=0.0)
        assert tokens_of(runner, plan, seed=3) == tokens_of(*alone, seed=3)
    finally:
        executor.close()


def test_a_killed_rank_is_noticed_at_once_and_the_next_group_runs(cluster: Any, checkpoint: Path) -> None:
    config = config_for(nodes=2, ray_address=cluster.address, pipeline_parallel_size=2)
    executor = loaded(checkpoint, config)
    lost: list[tuple[float, RanksLost]] = []
    executor.when_lost(lambda error: lost.append((time.monotonic(), error)))
    pids = executor._supervisor.pids
    try:
        os.kill(pids[1], signal.SIGKILL)
        began = time.monotonic()
        with pytest.raises(RanksLost, match=r"Rank 1 \(cpu on .*\)"):
            executor._links.call(Kind.STATS, None, type(None), 30.0)
        until = time.monotonic() + 30
        while not lost and time.monotonic() < until:
            time.sleep(0.01)
        print(f"noticed after {lost[0][0] - began:.2f} s: {lost[0][1]}")
    finally:
        executor.close()
    until = time.monotonic() + 30
    while any(map(_exists, pids)) and time.monotonic() < until:
        time.sleep(0.05)
    assert not any(map(_exists, pids))
    loaded(checkpoint, config).close()  # the nodes were given back


def test_nodes_that_are_not_there_are_refused(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("localllm.ranks.placement.RANKS_S", 2.0)
    config = config_for(nodes=3, ray_address=cluster.address, pipeline_parallel_size=3)
    with pytest.raises(ConfigError, match=r"Ray has no 3 nodes with 1 CPU each.*2 nodes are alive"):
        hardware_of_machines(config, HARDWARE)


def _exists(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


# ---- torchrun --------------------------------------------------------------------------------------------------------


@contextmanager
def serving(folder: Path, *words: str, launcher: tuple[str, ...] = ()) -> Iterator[str]:
    """Yield the URL of a server in processes of its own, once it is ready."""
    names = "XDG_RUNTIME_DIR", "XDG_CONFIG_HOME", "XDG_DATA_HOME"
    environ = os.environ | {name: str(folder) for name in names} | {"PYTHONPATH": str(ROOT)}
    command = [
        sys.executable, *launcher, "-m", "localllm", "serve", "demo", "--device", "cpu", "--max-model-len", "256",
        "--port", "0", "--json", *words,
    ]  # fmt: skip
    with (folder / "err").open("wb") as err, subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=err, text=True, env=environ, start_new_session=True
    ) as process:  # fmt: skip
        try:
            assert process.stdout is not None
            events = (json.loads(line) for line in process.stdout if line.startswith("{"))
            ready = next((event for event in events if event["event"] == "ready"), None)
            assert ready is not None, (folder / "err").read_text()[-2000:]
            yield ready["url"]
            os.killpg(process.pid, signal.SIGTERM)
            process.wait(60)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def said(url: str) -> str:
    body = {"messages": [{"role": "user", "content": "Name three colours."}], "max_tokens": 24, "temperature": 0}
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["message"]["content"])


def test_four_processes_of_torchrun_are_a_server_and_its_ranks(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    launcher = (
        "-m", "torch.distributed.run", "--nproc-per-node", "4", "--rdzv-backend", "c10d", "--rdzv-endpoint",
        f"127.0.0.1:{port}",
    )  # fmt: skip
    for name in ("ranks", "alone"):
        (tmp_path / name).mkdir()
    parallel = ("-tp", "2", "-pp", "2", "--distributed-executor-backend", EXTERNAL, "--dtype", "float32")
    with serving(tmp_path / "ranks", *parallel, launcher=launcher) as url:
        several = said(url)
    with serving(tmp_path / "alone", "--dtype", "float32") as url:
        assert several == said(url)
