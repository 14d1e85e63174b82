"""The programs that start ranks on several machines, a Ray cluster or torchrun. Both run the rank of machines.py.

Ray reserves a bundle on each node, starts one actor per rank there, and says why one has ended; steps do not go through
it. torchrun has started all processes already: that of rank 0 became the server, the others wait for its address.
Does not know: records, memory plans beyond the devices of ranks.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from typing import Any

from localllm.config.settings import EngineConfig
from localllm.errors import ConfigError, EngineError, UnsupportedOption
from localllm.machine.hardware import Hardware, read_hardware
from localllm.machine.processes import threads_per_process
from localllm.models.fit.devices import asked_division
from localllm.ranks.machines import Gate, Placement, join
from localllm.ranks.supervisor import RANKS_S

EXTERNAL = "external_launcher"
CLUSTER_KEY = "LOCALLLM_CLUSTER_KEY"
"""Variable with the key of the ranks that torchrun starts. Without it the server's key travels through torchrun's
store, which anybody on the network can read."""
GATE_KEY = "LOCALLLM_GATE_KEY"
"""Variable with the key for the rank that the server under torchrun starts itself."""
WAIT = timedelta(days=1)
"""How long a process of torchrun waits for the server to load a model. The server's end ends all of them at once."""


def placement_of(config: EngineConfig) -> Placement | None:
    """Return what places the ranks on machines; None: all of them are children of this process."""
    if config.distributed_executor_backend == EXTERNAL:
        return TorchrunPlacement(config, os.environ)
    return RayPlacement(config) if is_over_ray(config) else None


def is_over_ray(config: EngineConfig) -> bool:
    """Return whether Ray starts the ranks. Raises `ConfigError` for `--nodes` with another backend."""
    backend = config.distributed_executor_backend
    if config.nodes > 1 and backend in ("mp", EXTERNAL):
        why = "mp starts processes on this machine." if backend == "mp" else "torchrun has --nnodes for it."
        what = f"--nodes {config.nodes} cannot be combined with --distributed-executor-backend {backend}."
        raise ConfigError(what, why, "Leave out one of the two.", param="nodes")
    return backend == "ray" or config.nodes > 1


def hardware_of_machines(config: EngineConfig, here: Hardware) -> Hardware:
    """Return the hardware of all machines that the ranks will run on, as if it were one machine's."""
    if config.distributed_executor_backend == EXTERNAL:
        placed = TorchrunPlacement(config, os.environ)
        return together([here] * placed.num_nodes)
    return together(RayPlacement(config).read_hardware()) if is_over_ray(config) else here


def together(machines: Sequence[Hardware]) -> Hardware:
    """Return machines as one: all GPUs, numbered one after the other, and of main memory as if all had the least."""
    if len(machines) == 1:
        return machines[0]
    gpus = [gpu for each in machines for gpu in each.gpus]
    return replace(
        machines[0],
        gpus=tuple(replace(gpu, index=index, links=()) for index, gpu in enumerate(gpus)),
        ram_total_bytes=len(machines) * min(each.ram_total_bytes for each in machines),
        ram_available_bytes=len(machines) * min(each.ram_available_bytes for each in machines),
    )


def _num_ranks(config: EngineConfig, num_nodes: int) -> int:
    """Return the number of ranks. Raises `ConfigError` unless the sizes are given, and each machine gets as many."""
    division = asked_division(config)
    count = 0 if division is None else division.num_ranks
    if count < 2 or count % num_nodes:
        raise ConfigError(
            f"--nodes {num_nodes} needs several ranks, as many on each node.",
            f"The sizes make {count}." if count else "Their number is not chosen automatically over machines.",
            f"-pp {max(2, num_nodes)}, or -tp and -pp whose product is a multiple of {num_nodes}",
            param="nodes",
        )
    return count


def _network_note(config: EngineConfig, per_node: int) -> str:
    """Return what it means if ranks that share a layer are on several machines; empty if they are not."""
    division = asked_division(config)
    if division is None or per_node % division.tensor == 0:
        return ""
    return (
        f"The {division.tensor} ranks of each layer are on several machines, and exchange over the network twice in "
        f"each layer. -tp {per_node} with -pp for the machines keeps these exchanges inside a machine."
    )


# ---- Ray -------------------------------------------------------------------------------------------------------------


class RankActor:
    """One rank in a worker process of Ray."""

    def run(self, gate: Gate, rank: int, size: int, local_size: int) -> None:
        join(gate, rank, size, local_size)


class RayPlacement:
    """Ranks as actors of a Ray cluster: as many on each of `--nodes` nodes, this machine's first."""

    key: bytes | None = None  # a new one for each group; Ray brings it to the ranks

    def __init__(self, config: EngineConfig) -> None:
        """Connect to the cluster. Raises `UnsupportedOption` without Ray, `ConfigError` without a cluster."""
        self._size = _num_ranks(config, config.nodes)
        self._per_node, self._num_nodes = self._size // config.nodes, config.nodes
        self.note = _network_note(config, self._per_node)
        self._ray = _connected(config.ray_address)
        self._on_gpus = config.device != "cpu" and self._ray.cluster_resources().get("GPU", 0) >= self._size
        self.devices: Sequence[str] = [
            "cuda:0" if self._on_gpus else "cpu"
        ] * self._size  # Ray shows an actor its own GPU only
        self.host = str(self._ray.util.get_node_ip_address())
        self._group: Any = None
        self._actors: list[Any] = []
        self._runs: list[Any] = []

    def read_hardware(self) -> list[Hardware]:
        """Return the hardware of each node, as far as its ranks may use it. Raises `ConfigError`."""
        gpus = {"num_gpus": self._per_node} if self._on_gpus else {}
        with self._reserved() as (group, bundles):
            read = self._ray.remote(num_cpus=0, **gpus)(read_hardware)
            return list(self._ray.get([read.options(**_in(group, bundle)).remote() for bundle in bundles]))

    def start(self, gate: Gate) -> None:
        """Reserve the nodes, and start the actors. Raises `ConfigError` if the cluster has too little."""
        self._group, bundles = self._reserve()
        actor = self._ray.remote(num_cpus=0, num_gpus=1 if self._on_gpus else 0, max_restarts=0)(RankActor)
        self._actors = [
            actor.options(**_in(self._group, bundles[rank // self._per_node])).remote() for rank in range(self._size)
        ]
        self._runs = [each.run.remote(gate, rank, self._size, self._per_node) for rank, each in enumerate(self._actors)]

    def why_ended(self, rank: int) -> str:
        """Return Ray's words about an actor that has ended. It learns of an end a moment later."""
        ended, _ = self._ray.wait(self._runs[rank : rank + 1], timeout=0.5)
        if not ended:
            return ""
        try:
            self._ray.get(ended[0])
        except Exception as error:
            lines = [line.strip() for line in str(error).splitlines() if line.strip()]
            return f"Ray says: {lines[-1] if 'Traceback' in lines[0] else lines[0]}"[:300]
        return "Its actor has ended."

    def end(self) -> None:
        for each in self._actors:
            with suppress(Exception):  # the node, or the whole cluster, may be gone
                self._ray.kill(each, no_restart=True)
        if self._group is not None:
            with suppress(Exception):
                self._ray.util.remove_placement_group(self._group)
        self._group, self._actors = None, []

    @contextmanager
    def _reserved(self) -> Iterator[tuple[Any, list[int]]]:
        group, bundles = self._reserve()
        try:
            yield group, bundles
        finally:
            self._ray.util.remove_placement_group(group)

    def _reserve(self) -> tuple[Any, list[int]]:
        """Return a bundle on each node, and the bundles' numbers, that of this machine first. Raises `ConfigError`."""
        wanted = {"GPU": self._per_node} if self._on_gpus else {"CPU": 1}
        util = self._ray.util
        group = util.placement_group([wanted] * self._num_nodes, strategy="STRICT_SPREAD")
        if not group.wait(RANKS_S):
            util.remove_placement_group(group)
            alive = [node for node in self._ray.nodes() if node["Alive"]]
            has = "; ".join(
                f"{node['NodeManagerHostname']} has {node['Resources'].get('CPU', 0):.0f} processors and "
                f"{node['Resources'].get('GPU', 0):.0f} GPUs" for node in alive
            )  # fmt: skip
            each = ", ".join(f"{count} {name}" for name, count in wanted.items())
            what = f"Ray has no {self._num_nodes} nodes with {each} each that are free."
            hint = "ray status shows who uses them; ray start --address HOST:6379 adds a node."
            raise ConfigError(what, f"{len(alive)} nodes are alive: {has}.", hint, param="nodes")
        nodes: Mapping[int, str] = util.placement_group_table(group)["bundles_to_node_id"]
        own = self._ray.get_runtime_context().get_node_id()
        return group, sorted(nodes, key=lambda bundle: (nodes[bundle] != own, bundle))


def _in(group: Any, bundle: int) -> dict[str, Any]:
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    strategy = PlacementGroupSchedulingStrategy(placement_group=group, placement_group_bundle_index=bundle)
    return {"scheduling_strategy": strategy}


CONNECT_S = 10.0
"""How long the address of a Ray cluster may take to answer."""


def _connected(address: str) -> Any:
    """Return Ray, connected to a cluster as one of its nodes."""
    if address.startswith("ray://"):
        raise UnsupportedOption(
            "--ray-address ray:// is not supported.",
            "A Ray client is not a node of the cluster, and the ranks connect to this server.",
            "Start localllm on a node, with --ray-address auto.",
            param="ray_address",
        )
    try:
        import ray
    except ImportError:
        what, hint = "Ray is not installed.", "pip install 'localllm[ray]', on every machine"
        raise UnsupportedOption(what, "--nodes starts ranks through Ray.", hint, param="nodes") from None
    if not ray.is_initialized():
        host, _, port = address.rpartition(":")
        try:
            if host and port.isdigit():  # Ray itself waits for minutes where nothing answers
                socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_S).close()
            ray.init(address=address, namespace="localllm", log_to_driver=False, configure_logging=False)
        except (OSError, OverflowError, RuntimeError, ValueError) as error:
            raise ConfigError(
                f"There is no Ray cluster at {address}.",
                f"{str(error).splitlines()[0]}",
                "ray start --head on this machine, and ray start --address HOST:6379 on the others",
                param="nodes",
            ) from error
    return ray


# ---- torchrun --------------------------------------------------------------------------------------------------------


class TorchrunPlacement:
    """The processes that torchrun has started: this one, of rank 0, is the server and starts its own rank."""

    def __init__(self, config: EngineConfig, environ: Mapping[str, str]) -> None:
        """Raises `ConfigError` outside of torchrun, or if it has started another number of processes."""
        is_over_ray(config)
        try:
            self._size, self._per_node = int(environ["WORLD_SIZE"]), int(environ["LOCAL_WORLD_SIZE"])
            address = environ["MASTER_ADDR"], int(environ["MASTER_PORT"])
        except (KeyError, ValueError) as error:
            what = f"--distributed-executor-backend {EXTERNAL} works under torchrun only."
            hint = f"torchrun --nproc-per-node 2 -m localllm up MODEL -tp 2 --distributed-executor-backend {EXTERNAL}"
            raise ConfigError(what, f"{error} is not set.", hint, param="distributed_executor_backend") from None
        self.num_nodes = self._size // self._per_node
        division = asked_division(config)
        if (count := 1 if division is None else division.num_ranks) != self._size or count < 2:
            what = f"torchrun has started {self._size} processes for {count} ranks."
            hint = f"-tp and -pp whose product is {max(2, self._size)}, with as many processes"
            raise ConfigError(what, "Each process is one rank.", hint, param="tensor_parallel_size")
        self.note = _network_note(config, self._per_node)
        is_gpu = config.device != "cpu" and bool(read_hardware().gpus)
        self.devices: Sequence[str] = [
            f"cuda:{rank % self._per_node}" if is_gpu else "cpu" for rank in range(self._size)
        ]
        self.key = environ[CLUSTER_KEY].encode() if environ.get(CLUSTER_KEY) else None
        with socket.create_connection(address, timeout=5) as connection:
            self.host = str(connection.getsockname()[0])  # by which this machine reaches torchrun's store
        self._own: subprocess.Popen[bytes] | None = None

    def start(self, gate: Gate) -> None:
        """Tell the other processes the address, and start this machine's first rank. Raises `EngineError` the second
        time: torchrun has started each process once."""
        store = _torchrun_store(os.environ)
        if store.add(_name("groups", os.environ), 1) > 1:
            what, why = "The ranks cannot be started again.", "torchrun starts each of them once."
            raise EngineError(what, why, "End the server; torchrun --max-restarts N starts all processes again.")
        key = "" if self.key else gate.key.hex()
        store.set(_name("gate", os.environ), f"{gate.host} {gate.port} {key}")
        words = ("join", gate.host, gate.port, 0, self._size, self._per_node)
        environ = {**os.environ, GATE_KEY: gate.key.hex()}
        self._own = subprocess.Popen(
            [sys.executable, "-m", "localllm.ranks", *map(str, words)], env=environ, stdin=subprocess.DEVNULL,
            start_new_session=True,
        )  # fmt: skip

    def why_ended(self, rank: int) -> str:
        return ""

    def end(self) -> None:
        if self._own is not None:
            self._own.kill()
            self._own.wait()
        self._own = None


def run_under_torchrun(environ: Mapping[str, str]) -> bool:
    """Be a rank until the server ends it, if torchrun has started this process as another one than rank 0. Return
    whether it was one."""
    rank = int(environ.get("RANK", "0"))
    if not rank:
        return False
    local = int(environ["LOCAL_WORLD_SIZE"])
    os.environ["OMP_NUM_THREADS"] = threads_per_process(local, environ)  # the store below imports torch
    store, name = _torchrun_store(environ), _name("gate", environ)
    store.wait([name], WAIT)
    host, port, key = store.get(name).decode().split(" ")
    gate = Gate(host, int(port), bytes.fromhex(key) if key else environ.get(CLUSTER_KEY, "").encode())
    join(gate, rank, int(environ["WORLD_SIZE"]), local)
    return True


def _torchrun_store(environ: Mapping[str, str]) -> Any:
    """Return torchrun's store, which its agent serves, or else the process of rank 0."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    is_master = environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True" and environ.get("RANK") == "0"
    return TCPStore(environ["MASTER_ADDR"], int(environ["MASTER_PORT"]), None, is_master, wait_for_workers=False)


def _name(what: str, environ: Mapping[str, str]) -> str:
    """Return a name in torchrun's store. Each start of all processes has names of its own."""
    return f"localllm/{what}/{environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
