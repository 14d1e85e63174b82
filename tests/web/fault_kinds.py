"""The faults: each sends something that no client should, and says what came of it in a word.

Does not know: who throws them, how often.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

from tests.text.test_grammar import HOSTILE
from tests.text.test_grammar_bounds import CHAINS

TEXT = "/v1/completions"
ROUTES = (TEXT, "/v1/chat/completions", "/v1/responses", "/v1/messages", "/api/chat", "/api/generate", "/tokenize")
HEAD = "GET /v1/models HTTP/1.1\r\nhost: localhost\r\n"
USER = [{"role": "user", "content": "Hi"}]
CLOSED = "closed"


@dataclass(frozen=True, slots=True)
class Target:
    port: int
    random: random.Random


@dataclass(frozen=True, slots=True)
class Fault:
    name: str
    throw: Callable[[Target], Awaitable[str]]
    expected: frozenset[str]


FAULTS: list[Fault] = []


def fault(*expected: int | str) -> Callable[[Callable[[Target], Awaitable[str]]], None]:
    """What may come of it: statuses, or that the connection is closed."""

    def register(throw: Callable[[Target], Awaitable[str]]) -> None:
        FAULTS.append(Fault(throw.__name__, throw, frozenset(map(str, expected))))

    return register


async def exchange(target: Target, *pieces: bytes, wait_s: float = 0.0) -> str:
    """Send, and read to the end; the status of the first answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", target.port)
    seen = b""
    try:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(wait_s)
    except ConnectionError:
        pass  # it was refused before its end
    try:
        while piece := await reader.read(65536):
            seen = seen or piece
    except ConnectionError:
        pass
    finally:
        writer.transport.abort()
    return seen[9:12].decode() if seen.startswith(b"HTTP/1.1 ") else CLOSED


def posted(path: str, body: bytes, *headers: str) -> bytes:
    more = "".join(f"{header}\r\n" for header in headers)
    return (
        f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\nconnection: close\r\n{more}"
        f"content-length: {len(body)}\r\n\r\n"
    ).encode() + body


async def sent(target: Target, path: str, body: Any) -> str:
    return await exchange(target, posted(path, json.dumps(body).encode()))


# Bodies -------------------------------------------------------------------------------------------------------------


@fault(400)
async def malformed_json(target: Target) -> str:
    whole = json.dumps({"messages": USER, "prompt": "Hi", "input": "Hi", "max_tokens": 3}).encode()
    cut = whole[: target.random.randrange(len(whole))]
    return await exchange(target, posted(target.random.choice(ROUTES), cut))


@fault(400)
async def deep_json(target: Target) -> str:
    opener, closer = target.random.choice([(b"[", b"]"), (b'{"a":', b"}")])
    body = opener * 10_000 + b"1" + closer * 10_000
    where = target.random.choice([b"%b", b'{"messages": %b}', b'{"prompt": "a", "response_format": %b}'])
    return await exchange(target, posted(target.random.choice(ROUTES), where % body))


@fault(400)
async def invalid_utf8_body(target: Target) -> str:
    odd = target.random.choice(
        [b"\xff\xfe", b"\xc0\xaf", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\\ud800", b"\\udc00x"]
    )
    return await exchange(target, posted(TEXT, b'{"max_tokens": 2, "prompt": "a%b"}' % odd))


@fault(400)
async def megabytes_of_stops(target: Target) -> str:
    stops: list[Any] = [["x" * 1000] * 1000, "x" * 2**20, ["\x00" * 2**16] * 16]
    return await sent(target, TEXT, {"prompt": "a", "max_tokens": 1, "stop": target.random.choice(stops)})


@cache
def _half_a_million_biases() -> bytes:
    biases = {str(i): 1 for i in range(500_000)}
    return posted(TEXT, json.dumps({"prompt": "a", "max_tokens": 1, "logit_bias": biases}).encode())


@fault(400)
async def half_a_million_biases(target: Target) -> str:
    return await exchange(target, _half_a_million_biases())


@fault(400, 413)
async def much_for_few_bytes(target: Target) -> str:
    """Outputs, objects and values by the hundred thousand."""
    path, body = target.random.choice(
        [
            (TEXT, {"prompt": ["x"] * 2048, "n": 256, "max_tokens": 1}),
            ("/v1/chat/completions", {"messages": [{}] * 100_000}),
            ("/detokenize", {"tokens": [1] * 2_000_100}),
            ("/tokenize", {"content": "a" * 2_000_000}),
            ("/v1/score", {"text_1": "a", "text_2": ["b"] * 100_000}),
        ]
    )
    return await sent(target, path, body)


SCHEMAS: list[Any] = [
    {"$ref": "#"},
    {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
    {"allOf": [{"$ref": "#"}, {"$ref": "#"}]},
    {"$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}] * 9}}, "$ref": "#/$defs/a"},
    {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
    {"type": "array", "items": {"$ref": "#"}, "minItems": 2**31},
    {"$ref": "http://localhost:1/schema"},
    {"$ref": "#/" + "a/" * 10_000},
    {"type": "object", "patternProperties": {"(a+)+$": {"$ref": "#"}}},
    {"type": "string", "pattern": "^(a|aa)+$", "minLength": 10**9},
    {"enum": [["x"] * 100] * 100},
]


def in_every_dialect(schema: Any) -> list[tuple[str, dict[str, Any]]]:
    """The schema as every dialect is asked for it."""
    asked = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    return [
        ("/v1/chat/completions", {"messages": USER, "max_tokens": 4, "response_format": asked}),
        ("/v1/chat/completions", {"messages": USER, "max_tokens": 4, "tools": [tool], "tool_choice": "required"}),
        ("/v1/responses", {"input": "Hi", "max_output_tokens": 4, "text": {"format": {"schema": schema, **asked}}}),
        (
            "/v1/messages",
            {"messages": USER, "max_tokens": 4, "output_config": {"format": {"type": "json_schema", "schema": schema}}},
        ),
        ("/api/chat", {"messages": USER, "options": {"num_predict": 4}, "format": schema, "stream": False}),
    ]


@fault(200, 400)
async def recursive_schemas(target: Target) -> str:
    return await sent(target, *target.random.choice(in_every_dialect(target.random.choice(SCHEMAS))))


@fault(200, 400, 503)
async def chains_of_references(target: Target) -> str:
    """Longer than the stack of a thread; each would end the process by a signal."""
    asked = target.random.choice([each for name, each in CHAINS.items() if name != "too many rules"])
    if "json" in asked and target.random.random() < 0.7:
        return await sent(target, *target.random.choice(in_every_dialect(asked["json"])))
    return await sent(target, TEXT, {"prompt": "a", "max_tokens": 4, "structured_outputs": asked})


@fault(400)
async def grammars_too_large(target: Target) -> str:
    asked = target.random.choice([CHAINS["too many rules"], {"grammar": "\n" * 2**20}, {"grammar": "root ::= "}])
    return await sent(target, TEXT, {"prompt": "a", "max_tokens": 4, "structured_outputs": asked})


@fault(200, 400)
async def hostile_grammars(target: Target) -> str:
    asked = target.random.choice(list(HOSTILE.values()))
    return await sent(target, TEXT, {"prompt": "a", "max_tokens": 4, "structured_outputs": asked})


# Heads --------------------------------------------------------------------------------------------------------------


@fault(431, CLOSED)
async def header_floods(target: Target) -> str:
    flood = target.random.choice(
        ["".join(f"x-{i}: 1\r\n" for i in range(1000)), "x: " + "a" * 400_000, "a" * 400_000, "x: a\r\n" * 20_000]
    )
    return await exchange(target, f"{HEAD}{flood}\r\n\r\n".encode())


@fault(400, 403)
async def forged_hosts(target: Target) -> str:
    host = target.random.choice(
        ["evil.example", "localhost@evil.example", "localhost.", "127.0.0.1.nip.example", "[::1", "\xe9",
         "localhost\r\nhost: evil.example", "localhost:1:2", "169.254.169.254"]
    )  # fmt: skip
    head = f"GET /v1/models HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n\r\n"
    return await exchange(target, head.encode("latin-1"))


@fault(400, 403)
async def forged_origins(target: Target) -> str:
    origin = target.random.choice(
        ["null", "http://evil.example", "http://localhost.evil.example", "http://localhost@evil.example", "http://[",
         "http://localhost\r\norigin: http://evil.example", "\xe9"]
    )  # fmt: skip
    return await exchange(target, posted("/tokenize", b'{"content": "a"}', f"origin: {origin}"))


PATHS = (
    "/static/../../../../etc/passwd", "/static/%2e%2e/%2e%2e/%2e%2e/etc/passwd", "/static/..%2f..%2fapp.py",
    "/static/..%5c..%5capp.py", "/static//etc/passwd", "/static/app.css/../../app.py", "/static/%00app.css",
    "/static/app.css%00.txt", "/static/....//....//app.py", "/static/%252e%252e/app.py", "/static/vendor/../../app.py",
    "/static/%c0%ae%c0%ae/app.py", "/static/C:%5cwindows%5cwin.ini", "/static/\\..\\app.py", "/static/.",
    "/c/..%2f..%2fetc%2fpasswd", "/v1/models/..%2f..%2fetc%2fpasswd", "/static/vendor",
)  # fmt: skip


@fault(400, 404)
async def path_traversal(target: Target) -> str:
    path = target.random.choice(PATHS)
    return await exchange(target, f"GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n".encode())


@fault(200, 400, 404, 431)
async def invalid_utf8_heads(target: Target) -> str:
    odd = bytes(target.random.randrange(128, 256) for _ in range(4))
    line = target.random.choice([b"GET /v1/models/%b", b"GET /v1/models?limit=%b", b"GET /%%ff%%fe%b"]) % odd
    more = target.random.choice([b"", b"authorization: Bearer %b\r\n", b"x-request-id: %b\r\n", b"accept: %b\r\n"])
    more = more % odd if b"%" in more else more
    return await exchange(target, line + b" HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n" + more + b"\r\n")


# Connections --------------------------------------------------------------------------------------------------------


@fault(CLOSED)
async def half_closed(target: Target) -> str:
    reader, writer = await asyncio.open_connection("127.0.0.1", target.port)
    writer.write(posted(TEXT, json.dumps({"prompt": "a", "max_tokens": 400}).encode()))
    writer.write_eof()
    seen = await reader.read()
    writer.transport.abort()
    return seen[9:12].decode() or CLOSED


@fault(200, CLOSED)
async def pipelined_garbage(target: Target) -> str:
    """What waits behind it is ended with it."""
    garbage = target.random.randbytes(target.random.randrange(1, 3000))
    return await exchange(target, f"{HEAD}\r\n".encode() * target.random.randrange(1, 6) + b"\x00" + garbage)


@fault(400, 408, 431, CLOSED)
async def noise(target: Target) -> str:
    return await exchange(target, b"\x00" + target.random.randbytes(target.random.randrange(1, 5000)))


@fault(200, CLOSED)
async def a_pipeline_without_end(target: Target) -> str:
    return await exchange(target, f"{HEAD}\r\n".encode() * 5000)


@fault("left")
async def vanishing(target: Target) -> str:
    body = {"prompt": "Hello", "max_tokens": 480, "stream": True}
    reader, writer = await asyncio.open_connection("127.0.0.1", target.port)
    writer.write(posted(TEXT, json.dumps(body).encode()))
    await reader.read(target.random.randrange(1, 2000))
    writer.transport.abort()
    return "left"


@fault("left")
async def promises(target: Target) -> str:
    """A body that is announced and does not come; part of a head."""
    _, writer = await asyncio.open_connection("127.0.0.1", target.port)
    whole = posted(TEXT, b"", "x-a: b").replace(b"content-length: 0", b"content-length: 60000000")
    writer.write(target.random.choice([whole + b"{", whole[: target.random.randrange(len(whole))]]))
    await asyncio.sleep(target.random.random() * 0.2)
    writer.transport.abort()
    return "left"


@fault(400, 413, CLOSED)
async def broken_chunks(target: Target) -> str:
    head = posted(TEXT, b"").replace(b"content-length: 0", b"transfer-encoding: chunked")
    chunk = target.random.choice(
        [b"zz\r\nab\r\n", b"ffffffffffffffffff\r\na", b"-1\r\n\r\n", b"3\r\nabcdef\r\n0\r\n\r\n"]
    )
    return await exchange(target, head + chunk)
