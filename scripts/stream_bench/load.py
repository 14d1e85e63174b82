"""Send the same completions to any server, all at once; end with the last answer, and print JSON.

    python -m scripts.stream_bench.load LOAD      # LOAD: a `Load` as JSON

Tokens are counted by the server's own usage, as it may send several tokens in one event.
"""

from __future__ import annotations

import json
import re
import sys
import time
from dataclasses import dataclass

from scripts.stream_bench.readers import Reader, gaps_of, read_all, request


@dataclass(frozen=True, slots=True)
class Load:
    """`streams` prompts of 64 to 79 token ids, `tokens` requested for each. Plain data, passed as JSON."""

    host: str
    port: int
    path: str  # ends in /v1
    model: str
    streams: int
    tokens: int
    streamed: bool  # else each answer is sent as a whole
    seed: int  # another seed gives other prompts, which no prefix cache holds
    read_every_ms: int


def main() -> None:
    load = Load(**json.loads(sys.argv[1]))
    fields = {"model": load.model, "max_tokens": load.tokens, "stream": load.streamed}
    if load.streamed:
        fields["stream_options"] = {"include_usage": True}
    started_s = time.perf_counter()
    readers = [
        Reader(load.port, request(f"{load.path}/completions", index, load.seed, fields, close=True), host=load.host)
        for index in range(load.streams)
    ]
    read_all(readers, load.read_every_ms / 1e3)
    said = {
        "seconds": time.perf_counter() - started_s,
        "tokens": [_tokens(reader.tail) for reader in readers],
        "gap_s": gaps_of(readers) if load.streamed else [],
        "refusal": next((reader.tail.decode(errors="replace") for reader in readers if not _tokens(reader.tail)), ""),
    }
    print(json.dumps(said), flush=True)


def _tokens(tail: bytes) -> int:
    """Return the token count that the server reports for its answer; 0 if it reports none."""
    found = re.findall(rb'"completion_tokens":\s*(\d+)', tail)
    return int(found[-1]) if found else 0


if __name__ == "__main__":
    main()
