"""`python -m localllm.ranks` is one rank, started by a supervisor; with `join HOST PORT RANK SIZE LOCAL_SIZE` one that
connects to a server."""

import os
import sys

from localllm.ranks.machines import Gate, join, torch_share
from localllm.ranks.placement import GATE_KEY
from localllm.ranks.rank import main

if __name__ == "__main__":
    if sys.argv[1] == "join":
        host, port, *numbers = sys.argv[2:]
        rank, size, local_size = map(int, numbers)
        join(Gate(host, int(port), bytes.fromhex(os.environ.pop(GATE_KEY))), rank, size, local_size)
        os._exit(0)
    main(torch_share)
