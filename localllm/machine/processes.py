"""Processes of localllm: their compute threads, how they import torch, the life of a child, and a restart in place.

libgomp reads the environment variables of compute threads once, when torch loads it. So they are set before torch is
imported, on the command line and in the offline API. Values that the user has set stay.

A process may restart itself only if no other program expects it to start differently. A service of systemd may not:
systemd's watchdog is already counting, and would end the new server while it loads a large model. Neither may a process
on Windows, where a process cannot be replaced.
Does not know: what a process does, who asks.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import signal
import sys
import threading
from collections.abc import Mapping, MutableMapping
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import NoReturn

from localllm.machine.hardware import count_cores

PR_SET_PDEATHSIG = 1
NODES = Path("/sys/devices/system/node")


def end_with_parent(parent: int) -> None:
    """Have the system kill this process when the thread that started it ends, and end it now if that has happened.

    parent: id of the process that should be the parent. Only Linux can do this; elsewhere nothing happens.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def bind_to_node(node: int) -> None:
    """Keep this process on the processors of a NUMA node, if it may use any of them. -1: leave it where it is."""
    cores = cores_of_node(node) if node >= 0 else set()
    allowed = cores & os.sched_getaffinity(0) if cores else cores
    if allowed:
        os.sched_setaffinity(0, allowed)


def cores_of_node(node: int, nodes: Path = NODES) -> set[int]:
    """Return the processors of a NUMA node, e.g. of the list "0-3,8"; empty: unknown."""
    try:
        listed = (nodes / f"node{node}" / "cpulist").read_text().strip()
    except OSError:
        return set()
    spans = [part.partition("-") for part in listed.split(",") if part]
    return {core for first, _, last in spans for core in range(int(first), int(last or first) + 1)}


def threads_per_process(processes: int, environ: Mapping[str, str]) -> str:
    """Return OMP_NUM_THREADS for each of several processes that compute at the same time on this machine.

    A number that the user has set stays. The number of this process alone is divided.
    """
    cores = count_cores()
    set_by_user = environ.get("OMP_NUM_THREADS", "")
    return set_by_user if set_by_user not in ("", str(cores)) else str(max(1, cores // processes))


SPIN_COUNT = "10000"


def set_thread_environment(environ: MutableMapping[str, str] | None = None) -> None:
    """Set one thread per physical core that this process may use, and let waiting threads spin for microseconds only.

    By default, a libgomp thread that has finished its share spins for milliseconds. On a machine with other work, such
    as a browser, the spinning thread occupies the core that the last share still needs: a small matrix-vector product
    becomes four times slower. Sleeping at once (OMP_WAIT_POLICY=passive) costs a wake-up per operation, a quarter of a
    decode step. A short spin bridges the gap between two operations.
    """
    environ = os.environ if environ is None else environ
    environ.setdefault("OMP_NUM_THREADS", str(count_cores()))
    if "OMP_WAIT_POLICY" not in environ:
        environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)


class ShortTorchImport(MetaPathFinder):
    """Imports torch without the module that describes its operations to its compiler (`torch._meta_registrations`, a
    quarter of the processor time of the import). A server computes without it. It is imported once something asks for
    one of its names, or before a package of `NEED_IT` is imported.

    For a process that is ours alone: not for the library, whose caller may compile.
    """

    LEFT_OUT = "torch._meta_registrations"
    NEED_IT = frozenset({"torch._dynamo", "torch._inductor", "transformers", "torchao"})

    def install(self) -> bool:
        """Return False if torch is imported already."""
        if "torch" in sys.modules:
            return False
        sys.meta_path.insert(0, self)
        return True

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name == self.LEFT_OUT:
            return ModuleSpec(name, self, origin="left out")  # type: ignore[arg-type]  # a loader by its two methods
        if name in self.NEED_IT:
            self.complete()
        return None

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        def from_complete(name: str) -> object:
            if name.startswith("__"):  # asked by the import system itself
                raise AttributeError(name)
            self.complete()
            return getattr(sys.modules[self.LEFT_OUT], name)

        vars(module)["__getattr__"] = from_complete

    def complete(self) -> None:
        """Import what was left out. Nothing happens if torch is not imported yet, except that it will be whole."""
        if self not in sys.meta_path:
            return
        sys.meta_path.remove(self)
        if sys.modules.pop(self.LEFT_OUT, None) is not None:
            importlib.import_module(self.LEFT_OUT)


def preload_torch_library() -> threading.Thread | None:
    """Load torch's largest library in a thread, which is a sixth of importing torch and needs no Python: the call of
    the system's `dlopen` lets other threads run. Return None if torch is not installed, or not on Linux.

    Threads of OpenMP read their environment when the library is loaded: call `set_thread_environment` before.
    """
    found = find_spec("torch") if sys.platform == "linux" else None
    if found is None or found.origin is None:
        return None
    library = Path(found.origin).parent / "lib" / "libtorch_cpu.so"
    load = ctypes.CDLL(None).dlopen
    load.restype = ctypes.c_void_p
    flags = os.RTLD_NOW | os.RTLD_LOCAL  # a failure is left to the import, which has words for it
    thread = threading.Thread(target=load, args=(os.fsencode(library), flags), name="preload", daemon=True)
    thread.start()
    return thread


RESTARTED = "LOCALLLM_RESTARTED"
"""Environment variable of a process that was restarted; `was_restarted` removes it."""
MOST_FILES = 65_536


def can_restart() -> bool:
    """Return whether this process is the command `localllm` on a Unix, and not a service of systemd."""
    is_ours = Path(sys.argv[0]).stem in ("localllm", "__main__") and bool(sys.executable)
    return os.name == "posix" and is_ours and "NOTIFY_SOCKET" not in os.environ


def was_restarted() -> bool:
    """Return whether this process replaced one that restarted. The first call takes the mark from the environment."""
    return bool(os.environ.pop(RESTARTED, ""))


def restart(environ: Mapping[str, str]) -> NoReturn:
    """Replace this process. Call it when everything is stopped; `environ` is the environment it was started with.

    All files but the standard streams are closed first: a library may have opened a device without the mark that
    closes it here, and the memory of a GPU is free only once the device is closed.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os.closerange(3, MOST_FILES)
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**environ, RESTARTED: "1"})
