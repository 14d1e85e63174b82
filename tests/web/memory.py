"""Resident memory of a server of its own: when it is ready, and after 2,000 requests, no two alike.

    python -m tests.web.memory                        # requests of all kinds to the demo
    python -m tests.web.memory --chats                # small chats, every second one streamed
    python -m tests.web.memory --chats --model FILE   # the same with another model
    python -m tests.web.memory --chats --model FILE --flags="--max-model-len 2048"   # and with flags of the server

prints a line for every tenth of them, the highest that was seen, and what is left when the server has rested. Of that,
`private` is what no other process has: without the pages of files.
Does not know: who holds it.
"""

import argparse
import json
import random
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

from tests.web.child_server import ChildServer
from tests.web.fuzz_bodies import BODIES, crossed

AT_ONCE = 8
REST_S = 20.0
SHOWN = ("ready", "highest", "at_end", "rested")
ROUTES = {
    "/v1/chat/completions": ("openai", "chat/completions"), "/v1/completions": ("openai", "completions"),
    "/tokenize": ("openai", "tokenize"), "/v1/responses": ("responses", "responses"),
    "/v1/messages": ("anthropic", "messages"), "/api/chat": ("ollama", "chat"), "/api/generate": ("ollama", "generate"),
}  # fmt: skip
PAGES = ("/", "/chat", "/chats", "/dashboard", "/library", "/settings", "/playground", "/login", "/logs", "/metrics")
LANGUAGES = ("python", "c", "java", "rust", "bash", "json", "html", "sql", "typescript", "markdown")


@dataclass(slots=True)
class Usage:
    """Bytes of resident memory."""

    ready: int = 0
    highest: int = 0
    at_end: int = 0
    rested: int = 0
    private: int = 0  # of the server at rest
    statuses: Counter[int] = field(default_factory=Counter)
    seconds: float = 0.0

    def __str__(self) -> str:
        mib = {name: f"{getattr(self, name) / 2**20:.0f} MiB" for name in (*SHOWN, "private")}
        asked = f"{self.statuses.total()} requests in {self.seconds:.0f} s: {dict(sorted(self.statuses.items()))}"
        rss = f"ready {mib['ready']}, highest {mib['highest']}, after the last {mib['at_end']}, rested {mib['rested']}"
        return f"{asked}\n{rss} (private {mib['private']})"


Ask = Callable[[httpx.Client, random.Random], int]


def _body(http: httpx.Client, rng: random.Random) -> int:
    """A real one of some dialect, with an own prompt where it has one."""
    path = rng.choice([*ROUTES])
    body = {**crossed(*rng.choices(BODIES[ROUTES[path]], k=2), rng)}
    if isinstance(body.get("prompt"), str):
        body["prompt"] = _text(rng, rng.randrange(1, 400))
    return http.post(path, json=body | {"model": "demo"}).status_code


def _schema(http: httpx.Client, rng: random.Random) -> int:
    """Each is another one: nothing that was compiled for others helps."""
    names = [
        f"{rng.choice(['name', 'city', 'count', 'note'])}_{rng.randrange(10**6)}" for _ in range(rng.randrange(2, 150))
    ]
    kinds: list[dict[str, Any]] = [{"type": "string"}, {"type": "integer"}, {"enum": names[:5]}, {"type": "array"}]
    schema = {"type": "object", "properties": {name: rng.choice(kinds) for name in names}, "required": names[:3]}
    asked = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 8, "response_format": asked}
    return http.post("/v1/chat/completions", json=body).status_code


def _long(http: httpx.Client, rng: random.Random) -> int:
    """Hundreds of kilobytes, most of it refused."""
    text = _text(rng, rng.randrange(10_000, 100_000))
    path, name = rng.choice([("/v1/completions", "prompt"), ("/tokenize", "prompt"), ("/api/generate", "prompt")])
    return http.post(path, json={name: text, "max_tokens": 1}).status_code


def _page(http: httpx.Client, rng: random.Random) -> int:
    query = {f"k{rng.randrange(10**6)}": "x" * rng.randrange(500)}
    return http.get(rng.choice(PAGES), params=query, headers={"cookie": f"a={rng.randrange(10**9)}"}).status_code


def _chat(http: httpx.Client, rng: random.Random) -> int:
    """Import one with code in it, and open it."""
    code = "\n".join(f"x{rng.randrange(10**6)} = {rng.random()}" for _ in range(100))
    said = [
        {"role": ("user", "assistant")[i % 2], "content": f"```{rng.choice(LANGUAGES)}\n{code}\n```"} for i in range(6)
    ]
    file = {"file": ("chat.json", json.dumps({"messages": said}).encode())}
    return http.post("/chats/import", files=file, follow_redirects=True).status_code


def _small_chat(http: httpx.Client, rng: random.Random) -> int:
    body = {"messages": [{"role": "user", "content": _text(rng, rng.randrange(1, 12))}], "max_tokens": 4}
    is_streamed = rng.random() < 0.5
    answer = http.post("/v1/chat/completions", json=body | {"stream": is_streamed, "temperature": rng.random()})
    return answer.status_code if not is_streamed or answer.text.endswith("data: [DONE]\n\n") else 0


KINDS: list[tuple[Ask, int]] = [(_body, 10), (_schema, 4), (_long, 2), (_page, 5), (_chat, 1)]
SMALL_CHATS: list[tuple[Ask, int]] = [(_small_chat, 1)]


def _text(rng: random.Random, words: int) -> str:
    return " ".join(f"w{rng.randrange(10**5)}" for _ in range(words))


def measure(
    folder: Path,
    times: int,
    say: Callable[[str], object] = lambda line: None,
    *,
    kinds: list[tuple[Ask, int]] = KINDS,
    model: str = "demo",
    flags: tuple[str, ...] = (),
    rest_s: float = REST_S,
) -> Usage:
    usage = Usage()
    with ChildServer(folder, *flags, model=model, with_bystander=False) as server:
        time.sleep(2)
        usage.ready = usage.highest = server.rss()
        say(f"ready {usage.ready / 2**20:.0f} MiB")
        began_s = time.monotonic()
        with (
            httpx.Client(base_url=server.url, timeout=300, trust_env=False) as http,
            ThreadPoolExecutor(AT_ONCE) as pool,
        ):

            def ask(number: int) -> int:
                rng = random.Random(number)
                [(kind, _)] = rng.choices(kinds, [weight for _, weight in kinds])
                return kind(http, rng)

            for number, status in enumerate(pool.map(ask, range(times)), 1):
                usage.statuses[status] += 1
                usage.highest = max(usage.highest, server.rss())
                if not number % (times // 10 or 1):
                    say(f"{number:6} {server.rss() / 2**20:.0f} MiB")
        usage.at_end, usage.seconds = server.rss(), time.monotonic() - began_s
        time.sleep(rest_s)
        usage.rested, usage.private = server.rss(), psutil.Process(server.pid).memory_full_info().uss
    return usage


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("requests", type=int, nargs="?", default=2000)
    parser.add_argument("--chats", action="store_true", help="small chats alone")
    parser.add_argument("--model", default="demo")
    parser.add_argument(
        "--rest", type=float, default=REST_S, metavar="SECONDS", help="between the last answer and the end"
    )
    parser.add_argument("--flags", type=str.split, default=[], help="of the server")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        usage = measure(
            Path(folder), asked.requests, lambda line: print(line, flush=True),
            kinds=SMALL_CHATS if asked.chats else KINDS, model=asked.model, flags=tuple(asked.flags), rest_s=asked.rest,
        )  # fmt: skip
        print(usage)


if __name__ == "__main__":
    main()
