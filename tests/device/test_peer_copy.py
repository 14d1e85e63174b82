"""The copy that tests peer access, between two processes on one GPU: the driver's calls are the same for two GPUs."""

from localllm.ranks.peers import run_copies
from tests.device.conftest import DEVICE


def test_two_processes_copy_through_the_driver() -> None:
    index = DEVICE.index or 0
    assert run_copies([(index, index)]) == ({(index, index): True} if DEVICE.type == "cuda" else {})
