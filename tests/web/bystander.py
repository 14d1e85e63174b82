"""A client that does nothing wrong, beside clients that do: a process of its own, so that nothing it measures is ours.

    python -m tests.web.bystander 8000

asks for /health again and again, and reads one stream after the other. One JSON line for each answer:
[what, began, took, complaint], times in seconds of `time.monotonic`, which is one clock for all processes on Linux. For
a stream `took` is the longest wait for its next piece.
Does not know: what the others do.
"""

import http.client
import json
import sys
import threading
import time
from collections.abc import Callable

PROBE_EVERY_S, READ_EVERY_S = 0.02, 0.2
MAX_TOKENS = 96
PATIENCE_S = 120.0
BODY = {"prompt": "Once upon a time", "temperature": 0, "max_tokens": MAX_TOKENS, "ignore_eos": True, "stream": True}


def main(port: int) -> None:
    for measure, pause_s in ((_probe, PROBE_EVERY_S), (_read, READ_EVERY_S)):
        threading.Thread(target=_again_and_again, args=(measure, port, pause_s), daemon=True).start()
    sys.stdin.read()  # until who started it lets go


def _again_and_again(measure: Callable[[int], None], port: int, pause_s: float) -> None:
    while True:
        measure(port)
        time.sleep(pause_s)


def _probe(port: int) -> None:
    began, complaint = time.monotonic(), ""
    try:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
        connection.request("GET", "/health")
        answer = connection.getresponse()
        told = answer.read()
        complaint = "" if answer.status == 200 else f"{answer.status} {told.decode()[:300]}"
        connection.close()
    except OSError as error:
        complaint = repr(error)
    _tell("health", began, time.monotonic() - began, complaint)


def _read(port: int) -> None:
    began = seen = time.monotonic()
    longest, text, complaint = 0.0, [], ""
    try:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
        connection.request("POST", "/v1/completions", json.dumps(BODY), {"content-type": "application/json"})
        answer = connection.getresponse()
        while line := answer.readline():
            longest, seen = max(longest, time.monotonic() - seen), time.monotonic()
            if line.startswith(b"data: {"):
                text.append(json.loads(line[6:])["choices"][0]["text"])
        connection.close()
        complaint = _compare("".join(text))
    except (OSError, ValueError, KeyError, IndexError, http.client.HTTPException) as error:
        complaint = repr(error)
    _tell("stream", began, max(longest, time.monotonic() - seen), complaint)


_first: list[str] = []


def _compare(text: str) -> str:
    """The model is greedy: every stream says what the first one said."""
    _first[:] = _first or [text]
    return "" if text and text == _first[0] else f"{text!r}, not {_first[0]!r}"


_telling = threading.Lock()


def _tell(*facts: object) -> None:
    with _telling:
        print(json.dumps(facts), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
