"""What a rank inherits: threads, processors, interfaces; and what a client hears of its loss."""

from pathlib import Path

import pytest

from localllm.errors import DeviceLost, RanksLost
from localllm.machine.hardware import count_cores
from localllm.machine.processes import bind_to_node, cores_of_node, threads_per_process
from localllm.ranks.group import transport_of
from localllm.ranks.supervisor import ended_how, environment
from localllm.web.errors import retry_headers


@pytest.mark.parametrize(("listed", "cores"), [("0-3,8", {0, 1, 2, 3, 8}), ("5", {5}), ("", set())])
def test_processors_of_a_numa_node(listed: str, cores: set[int], tmp_path: Path) -> None:
    (tmp_path / "node1").mkdir()
    (tmp_path / "node1" / "cpulist").write_text(f"{listed}\n")
    assert cores_of_node(1, tmp_path) == cores
    assert cores_of_node(2, tmp_path) == set()


def test_no_node_and_an_unknown_one_leave_the_process_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_setaffinity", lambda pid, cores: pytest.fail("moved"))
    bind_to_node(-1)
    bind_to_node(10_000)


def test_ranks_share_the_processors_unless_the_user_has_set_threads() -> None:
    cores = count_cores()
    assert (
        threads_per_process(2, {}) == threads_per_process(2, {"OMP_NUM_THREADS": str(cores)}) == str(max(1, cores // 2))
    )
    assert threads_per_process(2, {"OMP_NUM_THREADS": str(cores + 5)}) == str(cores + 5)


def test_ranks_meet_on_loopback_and_see_the_devices_that_the_server_sees() -> None:
    made = environment({"CUDA_VISIBLE_DEVICES": "GPU-1234,3", "GLOO_SOCKET_IFNAME": "vpn0"}, 2)
    assert made["CUDA_VISIBLE_DEVICES"] == "GPU-1234,3"
    assert made["GLOO_SOCKET_IFNAME"] == made["NCCL_SOCKET_IFNAME"] == "lo"


def test_a_client_may_send_again_after_ranks_are_lost() -> None:
    error = RanksLost("Rank 1 (cpu) died.")
    assert (error.status, error.code, retry_headers(error)) == (503, "ranks_lost", {"retry-after": "5"})
    assert not error.ends_process
    assert DeviceLost("").ends_process


@pytest.mark.parametrize(("code", "words"), [(3, "exit code 3"), (-9, "SIGKILL"), (-200, "signal 200")])
def test_words_for_an_end(code: int, words: str) -> None:
    assert words in ended_how(code)


def test_the_start_says_which_nccl_talks_and_which_settings_change_its_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.nccl.version", lambda: (2, 27, 5))
    environ = {"NCCL_NVLS_ENABLE": "0", "NCCL_DEBUG": "WARN", "NCCL_P2P_DISABLE": "1"}
    assert transport_of("nccl", environ) == "NCCL 2.27.5, NCCL_P2P_DISABLE=1, NCCL_NVLS_ENABLE=0"
    assert transport_of("nccl", {}) == "NCCL 2.27.5"
    assert transport_of("gloo", environ) == "gloo"
