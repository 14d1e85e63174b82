"""A small server that speaks OpenAI's API over a real socket, and misbehaves as a test asks."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self

WORDS = ("The", " sky", " is", " blue", ".")


def chunk(content: str = "", finish: str | None = None, **more: Any) -> bytes:
    """One event of a chat completion."""
    delta = {"content": content} if content else {}
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    body = {"id": "x", "object": "chat.completion.chunk", "model": "theirs", "choices": [choice], **more}
    return b"data: " + json.dumps(body).encode() + b"\n\n"


USAGE = {"prompt_tokens": 7, "completion_tokens": 5, "total_tokens": 12}
ROLE = b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":null}]}\n\n'


def good() -> Iterator[bytes]:
    yield ROLE
    for word in WORDS:
        yield chunk(word)
    yield chunk(finish="stop")
    yield b"data: " + json.dumps({"choices": [], "usage": USAGE}).encode() + b"\n\n"
    yield b"data: [DONE]\n\n"


class HostileServer:
    """Runs until the `with` block ends. `stream` makes the bytes of a streamed answer, `status` and `refusal` an answer
    that is not 200; `seen` are the bodies and headers that arrived."""

    def __init__(self, *models: str) -> None:
        self.models: Any = [{"id": name, "object": "model", "max_model_len": 4096} for name in models]
        self.stream: Callable[[], Iterator[bytes]] = good
        self.status, self.refusal = 200, "no"
        self.refuses: Callable[[dict[str, Any]], str] = lambda body: ""  # why a body is refused
        self.list_delay_s = 0.0
        self.seen: list[tuple[str, dict[str, Any], dict[str, str]]] = []
        self.stopped = threading.Event()
        self.closed = threading.Event()  # a client left before the end
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *args: Any) -> None:
                pass

            def handle_one_request(self) -> None:
                if outer.stopped.is_set():
                    self.close_connection = True
                else:
                    super().handle_one_request()

            def do_GET(self) -> None:
                time.sleep(outer.list_delay_s)
                raw = outer.models if isinstance(outer.models, bytes) else json.dumps({"data": outer.models}).encode()
                self._send(200, raw)

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                outer.seen.append((self.path, body, {k.lower(): v for k, v in self.headers.items()}))
                refusal = outer.refuses(body)
                if refusal or outer.status != 200:
                    problem = {"message": refusal or outer.refusal, "code": "theirs"}
                    self._send(400 if refusal else outer.status, json.dumps({"error": problem}).encode())
                elif body.get("stream"):
                    self._stream()
                else:
                    said = {"role": "assistant", "content": "".join(WORDS)}
                    choice = {"index": 0, "message": said, "text": "".join(WORDS), "finish_reason": "stop"}
                    self._send(
                        200, json.dumps({"id": "x", "model": "theirs", "choices": [choice], "usage": USAGE}).encode()
                    )

            def _send(self, status: int, raw: bytes) -> None:
                self.send_response(status)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(raw)))
                self.end_headers()
                self.wfile.write(raw)

            def _stream(self) -> None:
                self.send_response(200)
                self.send_header("content-type", "text/event-stream")
                self.send_header("connection", "close")
                self.end_headers()
                self.close_connection = True
                try:
                    for piece in outer.stream():
                        self.wfile.write(piece)
                except OSError:
                    outer.closed.set()

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.stop()

    def stop(self) -> None:
        """Stop listening. An open connection answers one more request at most."""
        self.stopped.set()
        self._server.shutdown()
        self._server.server_close()
