"""Memory of a process that loads a model with its experts in RAM: `python -m tests.models.load_memory MODEL FILE`.

Prints the bytes of the arena, the most anonymous memory that the load added, the most of FILE that was in the page
cache while MODEL was loaded, and what was left there.
"""

import ctypes
import json
import mmap
import sys
from pathlib import Path


def resident_bytes(file: Path) -> int:
    """Return the bytes of a file that are in the page cache."""
    size = file.stat().st_size
    states = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
    with file.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY) as mapped:
        view = (ctypes.c_char * size).from_buffer(mapped)
        place = ctypes.c_void_p(ctypes.addressof(view))
        assert ctypes.CDLL(None).mincore(place, ctypes.c_size_t(size), states) == 0
        del view
    return sum(state & 1 for state in states) * mmap.PAGESIZE


def anonymous_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("RssAnon:"))


def main(path: Path, file: Path) -> None:
    import torch

    from localllm.models.decoder.decoder import DecoderModel
    from localllm.models.loader import load_model
    from localllm.models.read_spec import read_spec

    spec, anonymous, resident = read_spec(path), [anonymous_bytes()], list[int]()

    def see(done_bytes: int, total_bytes: int) -> None:
        anonymous.append(anonymous_bytes())
        resident.append(resident_bytes(file))

    layers = range(spec.num_layers)
    model = load_model(path, spec, torch.device("cpu"), torch.float32, see, far_layers=layers)
    assert isinstance(model, DecoderModel)
    assert model.crossing is not None
    assert model.crossing.arena is not None
    added = max(anonymous) - anonymous[0]
    print(json.dumps([model.crossing.arena.num_bytes, added, max(resident), resident_bytes(file)]))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
