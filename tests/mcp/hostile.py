"""A small server of tools that speaks the protocol by hand, and misbehaves in the way that its first argument names.

python hostile.py MODE [FILE]
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

MODE = sys.argv[1]
TOOL: dict[str, Any] = {
    "name": "tool",
    "description": "Does things",
    "inputSchema": {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]},
}


def say(message: Any) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


def result(request: dict[str, Any], value: dict[str, Any]) -> None:
    say({"jsonrpc": "2.0", "id": request["id"], "result": value})


def text(request: dict[str, Any], said: str) -> None:
    result(request, {"content": [{"type": "text", "text": said}]})


def deep(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "object"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


def tools() -> list[dict[str, Any]]:
    if MODE == "many":
        return [{**TOOL, "name": f"tool{n}"} for n in range(300)]
    if MODE == "schemas":
        schemas: dict[str, Any] = {
            "deep": deep(40),
            "huge": {"type": "object", "description": "x" * 100_000},
            "outside": {"type": "object", "properties": {"a": {"$ref": "http://127.0.0.1:9/schema"}}},
            "wrong": {"type": "object", "properties": {"a": {"type": "text"}}},
            "regex": {"type": "object", "properties": {"n": {"type": "string", "pattern": "^(a+)+$"}}},
            "loop": {"type": "object", "properties": {"n": {"$ref": "#/properties/n"}}},
        }
        return [{**TOOL, "name": name, "inputSchema": schema} for name, schema in schemas.items()]
    if MODE == "list":
        return [TOOL, {**TOOL, "name": "list", "inputSchema": {"type": "array"}}]
    if MODE == "deep":
        return [{**TOOL, "inputSchema": deep(400)}]
    if MODE == "changing":
        counted = Path(sys.argv[2])
        n = int(counted.read_text()) if counted.exists() else 0
        return [{**TOOL, "description": f"Version {n}"}]
    return [TOOL]


def call(request: dict[str, Any]) -> None:
    if MODE == "hangs":
        time.sleep(600)
    elif MODE == "dies":
        print("out of cheese", file=sys.stderr, flush=True)
        os._exit(3)
    elif MODE == "huge":
        text(request, "x" * 10 * 2**20)
    elif MODE == "long":
        text(request, "y" * 200_000)
    elif MODE == "endless":
        while True:
            sys.stdout.write("z" * 65_536)
    elif MODE == "flood":
        while True:
            say({"jsonrpc": "2.0", "method": "notifications/message", "params": {"level": "info", "data": "again"}})
    elif MODE == "garbage":
        sys.stdout.write("this is not JSON\n\n{}\n[1]\n")
        say({"jsonrpc": "2.0", "id": 10**6, "result": {}})
        result(request, {"content": "no list"})
    elif MODE == "asks":
        say({"jsonrpc": "2.0", "id": "q", "method": "sampling/createMessage", "params": {"messages": []}})
        text(request, f"the answer to my question: {sys.stdin.readline()}")
    elif MODE in ("spawns", "stays"):
        child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"], stdin=subprocess.DEVNULL)
        text(request, f"{os.getpid()} {child.pid}")
    elif MODE == "noisy":
        for n in range(2_000):
            print(f"line {n} \x1b[31m" + "e" * 2000, file=sys.stderr)
        text(request, "done")
    else:
        text(request, f"called with {json.dumps(request['params'].get('arguments'))}")


def main() -> None:
    if MODE == "stays":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if MODE == "exits":
        print("missing configuration", file=sys.stderr)
        sys.exit(7)
    for line in sys.stdin:
        request = json.loads(line)
        method = request.get("method")
        if MODE == "silent":
            continue
        if method == "initialize":
            version = request["params"]["protocolVersion"]
            info = {"name": "hostile", "version": "1"}
            result(request, {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": info})
        elif method == "tools/list":
            listed: dict[str, Any] = {"tools": tools()}
            if MODE == "pages":
                listed = {"tools": [], "nextCursor": "again"}
            result(request, listed)
        elif method == "tools/call":
            call(request)
        elif "id" in request:
            say({"jsonrpc": "2.0", "id": request["id"], "error": {"code": -32601, "message": "Method not found"}})
    if MODE == "stays":  # although nobody speaks to it any more
        time.sleep(600)


main()
