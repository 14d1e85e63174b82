"""Ranks that come over TCP: the key, versions and files are compared, and every loss is noticed, with fake models."""

import logging
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import TCPStore

from localllm.config.settings import EngineConfig
from localllm.errors import ConfigError, EngineError, ModelNotFound, RanksLost
from localllm.logs.recent_logs import RecentLogs
from localllm.machine.hardware import Gpu, Hardware
from localllm.ranks import executor as executors
from localllm.ranks.executor import RankExecutor
from localllm.ranks.handshake import (
    NotAdmitted,
    admit,
    answer_challenge,
    challenge,
    checkpoint_fingerprint,
    difference,
    introduce,
    own_versions,
)
from localllm.ranks.machines import Gate, MachineSupervisor
from localllm.ranks.placement import TorchrunPlacement, placement_of, together
from localllm.ranks.supervisor import RankPlace
from localllm.ranks.wire import Kind, encode, encode_record
from localllm.web.pages.frame.render import render
from localllm.web.pages.logs.views import LogTable, row
from tests.ranks.group_checks import check_tokens, nothing_left, opened
from tests.ranks.harness import SPEC, fake_plan

KEY = b"k" * 32
RANK = """
import socket, sys
from localllm.ranks.machines import Gate, join
from tests.ranks.fakes import FakeShare
port, rank, size = map(int, sys.argv[1:4])
socket.gethostname = lambda: f"node{rank}"
join(Gate("127.0.0.1", port, bytes.fromhex(sys.argv[4])), rank, size, size, FakeShare)
"""


class Started:
    """A `Placement` whose ranks are processes of this machine. missing: a rank that is not started."""

    host, key, note = "127.0.0.1", None, ""

    def __init__(self, size: int, missing: int = -1, key: bytes | None = None) -> None:
        """key: that the ranks are given instead of the group's."""
        self.devices, self._missing, self._given = ["cpu"] * size, missing, key
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self, gate: Gate) -> None:
        for rank in range(len(self.devices)):
            if rank != self._missing:
                words = map(str, (gate.port, rank, len(self.devices), (self._given or gate.key).hex()))
                self.processes.append(subprocess.Popen([sys.executable, "-c", RANK, *words], stderr=subprocess.DEVNULL))

    def why_ended(self, rank: int) -> str:
        return f"No word of rank {rank}."

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()


@contextmanager
def group(monkeypatch: pytest.MonkeyPatch, placement: Started, tick_s: float = 1.0) -> Iterator[RankExecutor]:
    monkeypatch.setattr(executors, "placement_of", lambda config: placement)
    monkeypatch.setattr(executors, "checkpoint_fingerprint", lambda path: {"fake": "same"})
    size = len(placement.devices)
    executor = RankExecutor.load(
        Path("{}"), SPEC, EngineConfig(), fake_plan(size), lambda a, b: None, lambda text: None, tick_s=tick_s
    )
    try:
        yield executor
    finally:
        executor.close()


def test_ranks_of_machines_answer_as_others_and_a_killed_one_is_noticed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)  # the first one leaves a pipe for all later ones

    lost: list[RanksLost] = []
    kept = RecentLogs()
    kept.setFormatter(logging.Formatter("%(message)s"))
    monkeypatch.setattr(logging.getLogger(), "handlers", [kept])
    caplog.set_level(logging.INFO)
    with nothing_left():
        placement = Started(2)
        with group(monkeypatch, placement) as executor:
            runner = opened(executor)
            executor.when_lost(lost.append)
            check_tokens(runner)
            page = render(LogTable(tuple(row(line, {}) for line in kept.after())))
            for rank in range(2):  # each rank's line under the name of its machine
                assert f"rank {rank} (cpu on node{rank}): rank {rank} loads its share" in page
            assert [each.pid for each in runner.stats().ranks] == [each.pid for each in placement.processes]
            until = time.monotonic() + 20
            while not all(line.steps for line in executor.progress):  # the lines come as records
                assert time.monotonic() < until
                time.sleep(0.05)
            placement.processes[1].send_signal(signal.SIGKILL)
            begun = time.monotonic()
            while not lost:
                assert time.monotonic() - begun < 10
                time.sleep(0.01)
            assert str(lost[0]).startswith("Rank 1 (cpu on node1) died. No word of rank 1.")
            with pytest.raises(RanksLost):
                runner.reset()


def test_files_that_differ_are_refused_with_the_ranks_name(monkeypatch: pytest.MonkeyPatch) -> None:
    placement = Started(1)
    monkeypatch.setattr(executors, "placement_of", lambda config: placement)
    monkeypatch.setattr(executors, "checkpoint_fingerprint", lambda path: {"fake": "other", "more.json": "x"})
    with pytest.raises(ConfigError, match=r"Rank 0 \(cpu on .*\) differs in fake, more.json"):
        RankExecutor.load(Path("{}"), SPEC, EngineConfig(), fake_plan(1), lambda a, b: None, lambda text: None)
    assert placement.processes[0].wait(timeout=10) is not None


@pytest.mark.parametrize("placement", [Started(2, missing=1), Started(2, key=b"wrong" * 8)], ids=["missing", "key"])
def test_ranks_that_do_not_come_are_named(placement: Started, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("localllm.ranks.machines.RANKS_S", 3.0)
    supervisor = MachineSupervisor([RankPlace(), RankPlace()], placement)
    with pytest.raises(EngineError, match=r"of 2 ranks came within 3 s.*Missing: .*rank 1.*No word of rank 1"):
        supervisor.start()
    assert all(process.poll() is not None for process in placement.processes)


def test_other_versions_are_refused_by_name() -> None:
    assert difference("b", own_versions()) is None
    error = difference("b", {**own_versions(), "torch": "1.0"})
    assert error is not None
    assert f"torch {own_versions()['torch']} here, 1.0 on b" in str(error)
    assert "triton" not in str(error)


def both(server: Any, rank: Any) -> tuple[Any, Any]:
    """Run both ends of a handshake. Return what each returned or raised."""
    ours, theirs = socket.socketpair()
    outcomes: dict[str, Any] = {}

    def run(name: str, act: Any, end: socket.socket) -> None:
        try:
            outcomes[name] = act(end)
        except NotAdmitted as error:
            outcomes[name] = error
            end.close()

    thread = threading.Thread(target=run, args=("rank", rank, theirs))
    thread.start()
    run("server", server, ours)
    thread.join()
    ours.close()
    theirs.close()
    return outcomes["server"], outcomes["rank"]


def test_the_key_is_shown_by_both_ends_before_anything_is_read() -> None:
    server, _ = both(lambda end: challenge(end, KEY), lambda end: answer_challenge(end, KEY))
    assert server is None
    server, rank = both(lambda end: challenge(end, KEY), lambda end: answer_challenge(end, b"other"))
    assert isinstance(server, NotAdmitted)
    assert isinstance(rank, NotAdmitted)  # not a byte of a wrong key's answer came back


@pytest.mark.parametrize(
    "sent",
    [b"", b"x" * 500, encode_record(Kind.HELLO, 0, encode(1)), encode_record(Kind.JOIN, 0, encode([1, 2]))],
    ids=["closed", "noise", "another record", "another type"],
)
def test_what_follows_the_key_has_to_be_an_introduction(sent: bytes) -> None:
    def rank(end: socket.socket) -> None:
        answer_challenge(end, KEY)
        end.sendall(sent)
        end.shutdown(socket.SHUT_WR)

    server, _ = both(lambda end: admit(end, KEY), rank)
    assert isinstance(server, NotAdmitted)


def test_a_rank_hears_why_it_is_refused() -> None:
    def server(end: socket.socket) -> int:
        channel, introduction = admit(end, KEY)
        channel.send(Kind.JOIN, 0, encode("too old"))
        return introduction.rank

    number, refused = both(server, lambda end: introduce(end, KEY, 7, 1, "b"))
    assert number == 7
    assert str(refused) == "too old"


def test_a_fingerprint_is_of_contents_and_not_of_places(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
        (tmp_path / name / "model.safetensors").write_bytes(b"w" * 100)
        (tmp_path / name / "notes.txt").write_text(name)
    assert checkpoint_fingerprint(tmp_path / "a") == checkpoint_fingerprint(tmp_path / "b")
    (tmp_path / "b" / "model.safetensors").write_bytes(b"w" * 101)
    one, other = checkpoint_fingerprint(tmp_path / "a"), checkpoint_fingerprint(tmp_path / "b")
    assert [name for name in one if one[name] != other[name]] == ["model.safetensors"]
    with pytest.raises(ModelNotFound):
        checkpoint_fingerprint(tmp_path / "missing")


TORCHRUN = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}


def test_settings_that_no_machines_can_follow_are_refused() -> None:
    for config, words in (
        (EngineConfig(nodes=2, pipeline_parallel_size=3), "The sizes make 3"),
        (EngineConfig(nodes=2), "not chosen automatically"),
        (EngineConfig(nodes=2, distributed_executor_backend="mp"), "mp starts processes on this machine"),
        (EngineConfig(distributed_executor_backend="external_launcher"), "works under torchrun only"),
    ):
        with pytest.raises(ConfigError, match=words):
            placement_of(config)
    assert placement_of(EngineConfig(tensor_parallel_size=2)) is None
    with socket.create_server(("127.0.0.1", 0)) as listener:
        environ = {**TORCHRUN, "MASTER_PORT": str(listener.getsockname()[1])}
        with pytest.raises(ConfigError, match="started 2 processes for 4 ranks"):
            TorchrunPlacement(EngineConfig(tensor_parallel_size=4), environ)
        placement = TorchrunPlacement(EngineConfig(tensor_parallel_size=2, device="cpu"), environ)
        assert (placement.num_nodes, placement.host, placement.devices) == (2, "127.0.0.1", ["cpu", "cpu"])
        assert placement.note.startswith("The 2 ranks of each layer are on several machines")
        assert not TorchrunPlacement(EngineConfig(pipeline_parallel_size=2, device="cpu"), environ).note


def test_machines_are_planned_as_one_with_the_least_memory_of_each() -> None:
    gpus = tuple(Gpu(index, "a GPU", 100, 90, (9, 0)) for index in range(2))
    one, other = Hardware(gpus, "a processor", 4, 100, 80), Hardware(gpus[:1], "a processor", 4, 60, 50)
    whole = together([one, other])
    assert [gpu.index for gpu in whole.gpus] == [0, 1, 2]
    assert (whole.ram_total_bytes, whole.ram_available_bytes) == (120, 100)
    assert together([one]) is one


def test_a_cluster_that_does_not_exist_is_refused_with_the_commands_to_type(monkeypatch: pytest.MonkeyPatch) -> None:
    config = EngineConfig(nodes=2, pipeline_parallel_size=2, ray_address="ray://127.0.0.1:1")
    with pytest.raises(ConfigError, match="is not a node of the cluster"):
        placement_of(config)
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match="Ray is not installed") as refused:
        placement_of(EngineConfig(nodes=2, pipeline_parallel_size=2))
    assert "localllm[ray]" in refused.value.hint

    class Ray:
        is_initialized = staticmethod(lambda: False)

        @staticmethod
        def init(**asked: Any) -> None:
            raise ConnectionError(f"no cluster at {asked['address']}")

    monkeypatch.setitem(sys.modules, "ray", Ray)
    with pytest.raises(ConfigError, match="There is no Ray cluster at auto") as refused:
        placement_of(EngineConfig(nodes=2, pipeline_parallel_size=2))
    assert refused.value.hint == "ray start --head on this machine, and ray start --address HOST:6379 on the others"


@pytest.mark.parametrize("wrong", ["closed", "silent", "no such host"])
def test_a_wrong_address_of_a_cluster_is_named_before_ray_waits(monkeypatch: pytest.MonkeyPatch, wrong: str) -> None:
    """`silent`: connections wait, as behind a firewall that drops packets."""
    monkeypatch.setattr("localllm.ranks.placement.CONNECT_S", 0.3)
    ray = SimpleNamespace(is_initialized=lambda: False, init=lambda **asked: pytest.fail("Ray was asked"))
    monkeypatch.setitem(sys.modules, "ray", ray)
    with ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        if wrong == "silent":
            listener.listen(0)
            for _ in range(3):
                waiting = stack.enter_context(socket.socket())
                waiting.setblocking(False)
                waiting.connect_ex(("127.0.0.1", port))
        address = f"nowhere.invalid:{port}" if wrong == "no such host" else f"127.0.0.1:{port}"
        with pytest.raises(ConfigError, match=re.escape(f"There is no Ray cluster at {address}.")):
            placement_of(EngineConfig(nodes=2, pipeline_parallel_size=2, ray_address=address))
