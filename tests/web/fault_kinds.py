"""The faults: each sends something that no client should, and says what came of it in a word.

Does not know: who throws them, how often.
"""

import asyncio
import json
import random
import struct
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

from tests.text.harness import CHAINS, HOSTILE

TEXT = "/v1/completions"
ROUTES = (TEXT, "/v1/chat/completions", "/v1/responses", "/v1/messages", "/api/chat", "/api/generate", "/tokenize")
HEAD = "GET /v1/models HTTP/1.1\r\nhost: localhost\r\n"
USER = [{"role": "user", "content": "Hi"}]
CLOSED = "closed"


@dataclass(frozen=True, slots=True)
class Target:
    port: int
    random: random.Random
    files: Path  # hostile files that the server can be pointed at (`lay_out_files`)


@dataclass(frozen=True, slots=True)
class Fault:
    name: str
    throw: Callable[[Target], Awaitable[str]]
    expected: frozenset[str]
    most: int
    most_kept_bytes: int


FAULTS: list[Fault] = []
MOST, MOST_KEPT_MIB = 1024, 64


def fault(
    *expected: int | str, most: int = MOST, most_kept_mib: int = MOST_KEPT_MIB
) -> Callable[[Callable[[Target], Awaitable[str]]], None]:
    """What may come of it: statuses, or that the connection is closed. `most`: times in a long run, less where once
    costs the server or its client seconds. `most_kept_mib`: resident memory that all of them may keep."""

    def register(throw: Callable[[Target], Awaitable[str]]) -> None:
        FAULTS.append(Fault(throw.__name__, throw, frozenset(map(str, expected)), most, most_kept_mib * 2**20))

    return register


async def exchange(target: Target, *pieces: bytes, wait_s: float = 0.0) -> str:
    """Send, and read to the end; the status of the first answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", target.port)
    answer = asyncio.create_task(_first_piece(reader))  # it may come, and the connection end, before all is sent
    try:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(wait_s)
    except ConnectionError:
        pass  # it was refused before its end
    try:
        seen = await answer
    finally:
        answer.cancel()
        writer.transport.abort()
    return seen[9:12].decode() if seen.startswith(b"HTTP/1.1 ") else CLOSED


async def _first_piece(reader: asyncio.StreamReader) -> bytes:
    """Read to the end; what came first."""
    seen = b""
    try:
        while piece := await reader.read(65536):
            seen = seen or piece
    except ConnectionError:
        pass
    return seen


def posted(path: str, body: bytes, *headers: str) -> bytes:
    more = "".join(f"{header}\r\n" for header in headers)
    return (
        f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\nconnection: close\r\n{more}"
        f"content-length: {len(body)}\r\n\r\n"
    ).encode() + body


async def sent(target: Target, path: str, body: Any) -> str:
    return await exchange(target, posted(path, json.dumps(body).encode()))


async def fetched(target: Target, path: str, *headers: str) -> str:
    more = "".join(f"{header}\r\n" for header in headers)
    return await exchange(
        target, f"GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n{more}\r\n".encode("latin-1")
    )


def form(path: str, body: bytes, media_type: str = "application/x-www-form-urlencoded") -> bytes:
    return posted(path, body).replace(b"application/json", media_type.encode(), 1)


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


@fault(200, 400, 503, most_kept_mib=192)  # some compile, and are kept: of thousands of rules, 10 MiB each
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


@cache
def _rules(kind: str) -> bytes:
    count = 12_000
    if kind == "lark":
        grammar = "start: r0\n" + "\n".join(f"r{i}: r{i + 1}" for i in range(count)) + f'\nr{count}: "c"'
    else:
        grammar = "root ::= r0\n" + "\n".join(f'r{i} ::= "a" r{i + 1}' for i in range(count)) + f'\nr{count} ::= "c"'
    return posted(
        TEXT, json.dumps({"prompt": "a", "max_tokens": 4, "structured_outputs": {"grammar": grammar}}).encode()
    )


@fault(400)
async def grammars_of_thousands_of_rules(target: Target) -> str:
    return await exchange(target, _rules(target.random.choice(["lark", "gbnf"])))


@cache
def _wide(kind: str, megabytes: int) -> bytes:
    head, item = {
        "objects": (b'{"messages": [', b"{},"),
        "arrays": (b'{"messages": [', b"[],"),
        "numbers": (b'{"prompt": [', b"1,"),
    }[kind]
    return posted(TEXT, head + item * (megabytes * 2**20 // len(item)) + b"1]}")


@fault(400, 413, most=128)
async def wide_json(target: Target) -> str:
    return await exchange(target, _wide(target.random.choice(["objects", "arrays", "numbers"]), 63))


@fault(400, 413, most=256)
async def json_that_is_fairly_wide(target: Target) -> str:
    return await exchange(target, _wide(target.random.choice(["objects", "arrays", "numbers"]), 7))


@cache
def _many_ids() -> bytes:
    return posted("/detokenize", json.dumps({"tokens": [1] * 10_000_000}).encode())


@fault(400, 413, most=128)
async def ten_million_ids(target: Target) -> str:
    return await exchange(target, _many_ids())


@cache
def _long_text(megabytes: int) -> bytes:
    text = "word " * (megabytes * 2**20 // 5)
    return posted("/tokenize", json.dumps({"prompt": text, "return_token_strs": True}).encode())


@fault(400, 413, most=128)
async def megabytes_to_tokenize(target: Target) -> str:
    return await exchange(target, _long_text(16))


@fault(400, most=128)
async def megabytes_of_prompt(target: Target) -> str:
    """Fifty times what the model takes."""
    words = target.random.choice(["word ", "a", "\U0001f600", " "])
    return await sent(target, TEXT, {"prompt": words * (600_000 // len(words)), "max_tokens": 1})


@fault(400)
async def min_tokens_without_end(target: Target) -> str:
    count = target.random.choice([2**63, 2**63 - 1, 2**31, 10**30])
    return await sent(target, "/v1/chat/completions", {"messages": USER, "min_tokens": count})


@fault(200, 400)
async def extreme_numbers(target: Target) -> str:
    name, value = target.random.choice(
        [("repetition_penalty", 1e-300), ("temperature", 1e-300), ("top_p", 1e-300), ("min_p", 1 - 1e-12),
         ("seed", -(2**63)), ("logit_bias", {"5": 1e308}), ("top_k", 2**62), ("priority", -(2**70)),
         ("truncate_prompt_tokens", 2**62), ("max_tokens", 2**62), ("frequency_penalty", 1e308)]
    )  # fmt: skip
    return await sent(target, TEXT, {"prompt": "a", "max_tokens": 3, name: value})


@cache
def _alike() -> list[str]:
    """Stop strings that all begin as the answer does, so that much of it is held back."""
    return ["ab" * 499 + f"{i:02x}" for i in range(255)] + ["a" * 1000]


@fault(200, 400, most=64)
async def stop_strings_that_nearly_come(target: Target) -> str:
    body = {"prompt": "a", "max_tokens": 400, "stop": _alike(), "logit_bias": {"65": 100}, "n": 4, "ignore_eos": True}
    return await sent(target, TEXT, body)


@fault(200, 400, most=128)
async def thousands_of_bad_words(target: Target) -> str:
    return await sent(target, TEXT, {"prompt": "a", "max_tokens": 1, "bad_words": [f"{i} " * 250 for i in range(1000)]})


@fault(400, most=256)
async def a_million_allowed_ids(target: Target) -> str:
    return await exchange(target, _million_ids())


@cache
def _million_ids() -> bytes:
    return posted(TEXT, json.dumps({"prompt": "a", "max_tokens": 1, "allowed_token_ids": [*range(2**20)]}).encode())


@fault(400, 415)
async def compressed_bodies(target: Target) -> str:
    body = b"\x1f\x8b\x08\x00" + target.random.randbytes(2000)
    return await exchange(target, posted(TEXT, body, f"content-encoding: {target.random.choice(['gzip', 'br'])}"))


# Names and files ----------------------------------------------------------------------------------------------------


@fault(200, 400, 404, 413)
async def names_with_a_megabyte_of_blanks(target: Target) -> str:
    name = "demo" + " " * (2**20 + target.random.randrange(10_000))
    return await sent(target, TEXT, {"model": name, "prompt": "a", "max_tokens": 1})


@fault(400, 404)
async def paths_as_names(target: Target) -> str:
    name = target.random.choice(
        ["docs/../../../../../../etc/passwd", "a/../../../../../../../etc/nothing", "a/./../..", "tests/../etc",
         "a\\..\\b", "a/\x00b", "models--a/../..", "a" * 10_000, "\u202e/a"]
    )  # fmt: skip
    return await sent(target, TEXT, {"model": name, "prompt": "a", "max_tokens": 1})


@fault(200)
async def lists_beside_broken_files(target: Target) -> str:
    """The cache of models holds files that cannot be parsed; the lists go on."""
    return await fetched(target, target.random.choice(["/v1/models", "/api/tags", "/library", "/localllm/v1/models"]))


@fault(400, 404)
async def names_beside_broken_files(target: Target) -> str:
    return await sent(target, TEXT, {"model": "not/here", "prompt": "a", "max_tokens": 1})


@fault(200, 400, 404, 500, most=8, most_kept_mib=512)  # those that can be loaded stay loaded
async def hostile_checkpoints(target: Target) -> str:
    """Loading is refused, or the part that is hostile is not used."""
    name = target.random.choice([path.name for path in (target.files / "checkpoints").iterdir()])
    body = {"model": str(target.files / "checkpoints" / name)}
    return await sent(target, "/localllm/v1/models/load", body)


def lay_out_files(files: Path, hub: Path, copy: Callable[..., Path]) -> None:
    """`files`: checkpoints that nobody should load; `hub`: a cache of models in which some cannot be parsed. `copy`
    makes a checkpoint that is sound but for what it is given."""
    loops = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    plain = json.loads((copy(files / "sound") / "tokenizer_config.json").read_text())
    template = {
        "loops": loops,
        "doubling": "{% set x = 'a' * 2000000000 %}{{ x }}",
        "blanks": "{% if message.role==" + " " * 60_000 + "'user' %}{% endif %}",
    }
    for name, text in template.items():
        copy(files / "checkpoints" / name, tokenizer_config=json.dumps(plain | {"chat_template": text}))
    tokenizer = json.loads((files / "sound" / "tokenizer.json").read_text())
    grow = [{"type": "Replace", "pattern": {"String": "a"}, "content": "a" * count} for count in (1000, 1000, 4)]
    tokenizer["normalizer"] = {"type": "Sequence", "normalizers": grow}
    copy(files / "checkpoints" / "growing", tokenizer=json.dumps(tokenizer))
    tokenizer["normalizer"] = None
    tokenizer["pre_tokenizer"]["pretokenizers"][0]["pattern"] = {"Regex": "(x+x+)+y"}
    copy(files / "checkpoints" / "backtracking", tokenizer=json.dumps(tokenizer))
    copy(files / "checkpoints" / "deep", config="[" * 200_000)
    for name, file in (("index", "model.safetensors.index.json"), ("config", "config.json")):
        snapshot = hub / f"models--evil--{name}" / "snapshots" / "0"
        snapshot.mkdir(parents=True)
        (snapshot / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
        (snapshot / file).write_text("[" * 200_000)
        refs = hub / f"models--evil--{name}" / "refs"
        refs.mkdir()
        (refs / "main").write_text("0")
    _lay_out_bomb(hub / "models--evil--floats")


def _lay_out_bomb(repository: Path) -> None:
    """A GGUF file, 400 MB without their disk space, that is one array of metadata."""
    (repository / "snapshots" / "0").mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0")

    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value)) + value.encode()

    with (repository / "snapshots" / "0" / "floats.gguf").open("wb") as file:
        file.write(b"GGUF" + struct.pack("<IQQ", 3, 0, 2) + text("general.architecture") + struct.pack("<I", 8))
        file.write(text("llama") + text("x.y") + struct.pack("<IIQ", 9, 6, 100_000_000))
        file.truncate(file.tell() + 400_000_000)


# Pages --------------------------------------------------------------------------------------------------------------


BLOCKS = {
    "easytrieve": "\t", "autohotkey": "\n", "autoit": " ", "fan": "a", "devicetree": ";", "java": "\n", "c": "\n",
    "csharp": "a\n", "python": "(", "markdown": "*", "cpp": "/*",
}  # fmt: skip
"""What a lexer of that language needs most time for, again and again."""


@fault(200, most=128)
async def code_blocks_that_lexers_choke_on(target: Target) -> str:
    language = target.random.choice([*BLOCKS])
    code = BLOCKS[language] * (20_000 // len(BLOCKS[language]))
    return await _imported(target, f"```{language}\n{code}x\n```\n")


@fault(200, most=128)
async def markdown_that_nests(target: Target) -> str:
    part = target.random.choice(["> ", "- ", "[", "![", "*a ", "`", "$", "<a ", "| ", "\\", "&", "~~"])
    return await _imported(target, part * (60_000 // len(part)))


async def _imported(target: Target, text: str) -> str:
    """Import a chat with that answer, and open it."""
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": text}]
    file = json.dumps({"messages": messages}).encode()
    opener = b'--x\r\ncontent-disposition: form-data; name="file"; filename="a.json"\r\n\r\n'
    request = form("/chats/import", opener + file + b"\r\n--x--\r\n", "multipart/form-data; boundary=x")
    reader, writer = await asyncio.open_connection("127.0.0.1", target.port)
    try:
        writer.write(request)
        head = (await reader.read()).decode("latin-1").partition("\r\n\r\n")[0]
    finally:
        writer.transport.abort()
    places = [line[10:] for line in head.split("\r\n") if line.lower().startswith("location: ")]
    return await fetched(target, places[0]) if places else head[9:12] or CLOSED


@fault(400, 413, 431, 414, 200, 303)
async def forms_of_many_fields(target: Target) -> str:
    start = target.random.randrange(10**6)
    fields = urlencode({f"k{start + i}": "" for i in range(7000)}).encode()
    path = target.random.choice(["/login", "/look", "/settings/change", "/library/models", "/tune/run"])
    return await exchange(target, form(path, fields[:99_000]))


@cache
def _large_form() -> bytes:
    return b"&".join(b"%x=" % i for i in range(1_700_000))[: 11 * 2**20]


@fault(400, 413, most=64)
async def forms_of_megabytes(target: Target) -> str:
    return await exchange(target, form("/chat", b"a%d=&" % target.random.randrange(10**9) + _large_form()))


@fault(200, 303, 400, 413, 414, 431)
async def long_queries(target: Target) -> str:
    query = "&".join(f"{target.random.randrange(10**6):x}=" for _ in range(2000))[:15_000]
    return await fetched(target, f"{target.random.choice(['/login', '/v1/models', '/chats'])}?{query}")


@fault(200, 303, 400, 431)
async def long_cookies(target: Target) -> str:
    cookie = "; ".join(f"{target.random.randrange(10**6):x}=" for _ in range(8000))[:60_000]
    return await fetched(target, target.random.choice(["/login", "/chat"]), f"cookie: {cookie}")


@fault(200, 400, 404)
async def searches_that_are_no_words(target: Target) -> str:
    odd = target.random.choice(['"' * 99, "a*" * 500, "NEAR(", "%00", "'; drop table chats --", "\u202e", "(" * 1000])
    return await fetched(target, f"/chats?q={quote(odd)}")


@fault(403)
async def reads_from_another_site(target: Target) -> str:
    path = target.random.choice(["/library/fit?model=a/b", "/library/discover?q=a", "/localllm/v1/models/search?q=a"])
    return await fetched(target, path, "sec-fetch-site: cross-site", "sec-fetch-mode: no-cors")


@fault(400, 413, 303)
async def parts_without_end(target: Target) -> str:
    part = b'--x\r\ncontent-disposition: form-data; name="file%d"; filename="a"\r\n\r\n1\r\n'
    body = b"".join(part % i for i in range(2000)) + b"--x--\r\n"
    return await exchange(target, form("/chats/import", body, "multipart/form-data; boundary=x"))


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


@fault(200, 400)
async def forged_forwarders(target: Target) -> str:
    address = target.random.choice(["6.6.6.6 key=ops id=forged", "::", "a, b, c", "1.2.3.4," * 1000, "\xff"])
    return await fetched(target, "/v1/models", f"x-forwarded-for: {address}", "x-forwarded-proto: javascript")


@fault(200, 400, 404, 426)
async def upgrades(target: Target) -> str:
    to = target.random.choice(["websocket", "h2c", "a" * 1000])
    return await fetched(target, "/v1/models", f"upgrade: {to}", "sec-websocket-key: a", "sec-websocket-version: 13")


@fault(200, 400, 404, 431)
async def invalid_utf8_heads(target: Target) -> str:
    odd = bytes(target.random.randrange(128, 256) for _ in range(4))
    line = target.random.choice([b"GET /v1/models/%b", b"GET /v1/models?limit=%b", b"GET /%%ff%%fe%b"]) % odd
    more = target.random.choice([b"", b"authorization: Bearer %b\r\n", b"x-request-id: %b\r\n", b"accept: %b\r\n"])
    more = more % odd if b"%" in more else more
    return await exchange(target, line + b" HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n" + more + b"\r\n")


@fault(403)
async def reads_for_other_sites(target: Target) -> str:
    path = target.random.choice(
        ("/library/fit?model=a/b", "/localllm/v1/models/search?q=a", "/v1/models", "/chats", "/x")
    )
    site = target.random.choice(("cross-site", "same-site"))
    mode, dest = target.random.choice((("no-cors", "image"), ("navigate", "iframe"), ("cors", "empty")))
    head = f"GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\nsec-fetch-site: {site}\r\n"
    return await exchange(target, f"{head}sec-fetch-mode: {mode}\r\nsec-fetch-dest: {dest}\r\n\r\n".encode())


@fault(303, 413, 431)
async def what_a_cache_would_keep(target: Target) -> str:
    """Cookies, queries and forms, each of them new. Without keys the login page leads on."""
    new = f"{target.random.random()}"
    cookie = f"cookie: {new}=; " + "a=; " * target.random.choice((1_000, 6_000))
    got = f"GET /login?{new} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n{cookie}\r\n\r\n".encode()
    form = posted("/login", f"next={new}&".encode() + b"a=&" * 15_000)
    return await exchange(target, target.random.choice([got, form.replace(b"json", b"x-www-form-urlencoded")]))


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


@fault(200)
async def old_and_other_protocols(target: Target) -> str:
    body = posted(TEXT, json.dumps({"prompt": "a", "max_tokens": 2, "stream": True}).encode())
    if target.random.random() < 0.5:
        return await exchange(target, body.replace(b"HTTP/1.1", b"HTTP/1.0"))
    asks = target.random.choice((b"websocket", b"h2c", b"tls/1.2"))
    return await exchange(target, body.replace(b"connection: close", b"connection: close, upgrade\r\nupgrade: " + asks))


@fault("left")
async def vanishing(target: Target) -> str:
    body = {"prompt": "Hello", "max_tokens": 480, "stream": True}
    reader, writer = await asyncio.open_connection("127.0.0.1", target.port)
    writer.write(posted(TEXT, json.dumps(body).encode()))
    await reader.read(target.random.randrange(1, 2000))
    writer.transport.abort()
    return "left"


@fault("left", most=128)
async def many_choices_unread(target: Target) -> str:
    """A reader that never reads, and leaves."""
    body = {"prompt": "Hello", "max_tokens": 400, "n": 8, "stream": True, "logprobs": 5}
    _, writer = await asyncio.open_connection("127.0.0.1", target.port)
    writer.transport.pause_reading()  # type: ignore[attr-defined]
    writer.write(posted(TEXT, json.dumps(body).encode()))
    await asyncio.sleep(target.random.random() * 0.3)
    writer.transport.abort()
    return "left"


@fault("left", most=64)
async def idle_connections(target: Target) -> str:
    """More than a process may open files by default, where nobody raises that."""
    writers = []
    try:
        for _ in range(300):
            _, writer = await asyncio.open_connection("127.0.0.1", target.port)
            writers.append(writer)
        await asyncio.sleep(0.05)
    finally:
        for writer in writers:
            writer.transport.abort()
    return "left"


@fault("left", most=16)
async def half_sent_logins(target: Target) -> str:
    writers = []
    head = form("/login", b"").replace(b"content-length: 0", b"content-length: 2000")
    try:
        for _ in range(200):
            _, writer = await asyncio.open_connection("127.0.0.1", target.port)
            writer.write(head + b"key=")
            writers.append(writer)
        await asyncio.sleep(0.2)
    finally:
        for writer in writers:
            writer.transport.abort()
    return "left"


@fault("left", most=16)
async def live_pages(target: Target) -> str:
    """More of them than a client may have, each read for two ticks."""
    opened = []
    try:
        for _ in range(100):
            reader, writer = await asyncio.open_connection("127.0.0.1", target.port)
            writer.write(b"GET /live/dashboard HTTP/1.1\r\nhost: localhost\r\n\r\n")
            opened.append((reader, writer))
        for _ in range(10):
            await asyncio.sleep(0.1)
            for reader, _ in opened:
                reader._buffer.clear()  # type: ignore[attr-defined]
    finally:
        for _, writer in opened:
            writer.transport.abort()
    return "left"


@fault(400, 404, 422, 500, most=64)
async def metadata_bomb(target: Target) -> str:
    return await sent(target, "/api/show", {"model": "evil/floats"})


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
