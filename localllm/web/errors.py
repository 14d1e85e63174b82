"""The only place where an error becomes HTTP. Programs get the error body of the dialect whose URL they called,
OpenAI's by default; browsers get a small page.

Also the errors that only HTTP has (wrong route, wrong host, body too large), and what each error says about retries:
the OpenAI SDK retries every 5xx twice unless `x-should-retry: false` is sent, and a model that does not fit will not
fit the second time.
"""

from __future__ import annotations

import html
import logging
from collections.abc import Callable, Mapping
from typing import Any, Literal, Self, cast

import msgspec
from litestar import Request
from litestar.exceptions import HTTPException, InternalServerException
from litestar.handlers import HTTPRouteHandler
from litestar.response.base import ASGIResponse, Response
from litestar.types import Scope

from localllm.errors import (
    DoesNotFit,
    EngineError,
    InvalidParameter,
    KVCacheExhausted,
    LocalLLMError,
    ModelError,
    QueueFull,
    RequestError,
)
from localllm.logs.fault_log import FaultLog
from localllm.units import format_bytes
from localllm.web.shape import Shape

log = logging.getLogger(__name__)
to_json = msgspec.json.encode

MAX_MESSAGE_CHARS = 2000

API_PREFIXES = (
    "/v1/",
    "/api/",
    "/localllm/",
    "/chat/completions",
    "/completion",
    "/completions",
    "/props",
    "/tokenize",
    "/detokenize",
    "/apply-template",
    "/infill",
    "/models",
    "/slots",
    "/sleep",
    "/wake_up",
    "/is_sleeping",
    "/start_profile",
    "/stop_profile",
    "/tokenizer_info",
    "/audio/",
    "/embeddings",
    "/rerank",
    "/v2/",
    "/score",
    "/pooling",
    "/classify",
    "/openapi.json",
    "/metrics",
    "/version",
    "/health",
    "/ping",
)

ErrorPages = Callable[[Scope, LocalLLMError], tuple[str, Mapping[str, str]] | None]
"""`app.state.error_page`, which the web pages set: returns the page of an error with its headers, or None."""

Dialect = Literal["openai", "anthropic", "ollama"]
ANTHROPIC_PATH, OLLAMA_PATH = "/v1/messages", "/api/"
ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    529: "overloaded_error",
}
"""Other statuses below 500 are invalid_request_error, those from 500 on api_error."""


class HTTPRequestError(RequestError):
    """The request is wrong before any dialect reads it."""


class MalformedBody(RequestError):
    """The body is not JSON, or not a JSON object."""

    code = "invalid_json"


class InvalidType(InvalidParameter):
    """A field has the wrong JSON type."""

    code = "invalid_type"


class MissingParameter(InvalidParameter):
    """A required field is absent."""

    code = "missing_required_parameter"


class Unauthorized(HTTPRequestError):
    """The key is missing or wrong."""

    status, code, type = 401, "invalid_api_key", "authentication_error"


class Forbidden(HTTPRequestError):
    """The host or the origin is not on the allow-list."""

    status, code = 403, "forbidden"


class MissingScope(HTTPRequestError):
    """The key is valid but does not have the required scope."""

    status, code, type = 403, "missing_scope", "permission_error"


class RateLimited(HTTPRequestError):
    """The key or address sent more requests than it may."""

    status, code, type = 429, "rate_limit_exceeded", "rate_limit_error"
    retry_after_s = 1

    def after(self, seconds: int) -> Self:
        self.retry_after_s = seconds
        return self


class WrongKeys(RateLimited):
    """The address sent more wrong keys than it may."""

    code = "too_many_wrong_keys"


class BodiesTooLarge(HTTPRequestError):
    """The bodies of all current requests together exceed the server's limit."""

    status, code, type = 503, "too_many_bytes", "overloaded_error"


class UnknownRoute(HTTPRequestError):
    """There is no route at this URL."""

    status, code = 404, "unknown_url"


class MethodNotAllowed(HTTPRequestError):
    """The URL does not support this method."""

    status, code = 405, "method_not_allowed"


class BodyTooLarge(HTTPRequestError):
    """The body is larger than the server's limit."""

    status, code = 413, "request_too_large"


class UrlTooLong(HTTPRequestError):
    """The URL is longer than the server's limit."""

    status, code = 414, "url_too_long"


class HeadTooLarge(HTTPRequestError):
    """The headers are larger, or more in number, than the server's limit."""

    status, code = 431, "headers_too_large"


class MalformedRequest(HTTPRequestError):
    """The request is not valid HTTP."""

    code = "invalid_http"


class RequestTimeout(HTTPRequestError):
    """The request did not arrive in time."""

    status, code = 408, "request_timeout"


class UnsupportedMediaType(HTTPRequestError):
    """The body is not declared as JSON. A cross-site form cannot declare JSON."""

    status, code = 415, "unsupported_media_type"


class ClientGone(HTTPRequestError):
    """The client closed the connection before the answer."""

    status, code = 499, "client_closed_request"


class InternalError(LocalLLMError):
    """A bug in localllm. The traceback is in the log, under the request id."""


class OpenAIProblem(Shape):
    message: str  # includes the hint
    type: str
    param: str | None
    code: str | None


class OpenAIError(Shape):
    error: OpenAIProblem


class AnthropicProblem(Shape):
    type: str
    message: str


class AnthropicError(Shape):
    type: Literal["error"]
    error: AnthropicProblem
    request_id: str


class OllamaError(Shape):
    error: str


def openai_error(error: LocalLLMError) -> OpenAIError:
    """Return OpenAI's error body."""
    return OpenAIError(OpenAIProblem(_message(error), error.type, error.param, error.code))


def anthropic_error(error: LocalLLMError, scope: Scope) -> AnthropicError:
    """Return Anthropic's error body."""
    status = _anthropic_status(error)
    kind = ANTHROPIC_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    return AnthropicError("error", AnthropicProblem(kind, _message(error)), request_id_of(scope))


def ollama_error(error: LocalLLMError) -> OllamaError:
    """Return Ollama's error body."""
    return OllamaError(_message(error))


def _message(error: LocalLLMError) -> str:
    message = " ".join(part for part in (error.what, error.why, error.hint) if part)
    # The message repeats what the client sent, which may be anything.
    return message if len(message) <= MAX_MESSAGE_CHARS else f"{message[:MAX_MESSAGE_CHARS]}…"


def _anthropic_status(error: LocalLLMError) -> int:
    return 529 if error.type == "overloaded_error" else error.status


def dialect_of(path: str) -> Dialect:
    """Return the dialect of the errors at this path."""
    if path == ANTHROPIC_PATH or path.startswith(f"{ANTHROPIC_PATH}/"):
        return "anthropic"
    return "ollama" if path.startswith(OLLAMA_PATH) else "openai"


def speaks_anthropic(scope: Scope) -> bool:
    return dialect_of(scope["path"]) == "anthropic"


def retry_headers(error: LocalLLMError) -> dict[str, str]:
    """Return the headers that tell a client whether and when to retry."""
    if isinstance(error, DoesNotFit | ModelError | KVCacheExhausted | InternalError):
        return {"x-should-retry": "false"}
    if isinstance(error, RateLimited):
        return {"retry-after": str(error.retry_after_s), "x-should-retry": "true"}
    if isinstance(error, QueueFull | BodiesTooLarge):
        return {"retry-after": "1"}
    if isinstance(error, EngineError) and error.status == 503:
        return {"retry-after": str(error.retry_after_s)}
    return {}


def as_local_error(error: BaseException, scope: Scope) -> LocalLLMError:
    """Return any exception as a `LocalLLMError`. Unexpected ones are logged and become a 500 without details."""
    if isinstance(error, LocalLLMError):
        return error
    if isinstance(error, HTTPException) and error.status_code < 500:
        return _translate_http(error, scope)
    # This is how Litestar reports a client that left.
    if isinstance(error, InternalServerException) and error.detail == "client disconnected prematurely":
        return ClientGone("The client closed the connection before its request had arrived.")
    request_id = request_id_of(scope)
    faults: FaultLog = scope["litestar_app"].state.watchdog.faults
    faults.record(f"request id={request_id} path={scope['path']!r}", error)
    return InternalError("Internal server error.", f"The log has the details under request id {request_id}.")


def _translate_http(error: HTTPException, scope: Scope) -> LocalLLMError:
    """Translate one of Litestar's own errors."""
    where = f"{scope.get('method', 'GET')} {scope['path']}"
    if error.status_code == 404:
        return UnknownRoute(f"Unknown URL: {where}.", hint="GET /v1/models lists what is served.")
    if error.status_code == 405:
        return MethodNotAllowed(f"{where} is not supported.", f"Allowed: {_allowed_methods(error)}.")
    if error.status_code == 413:
        limit_bytes = cast("HTTPRouteHandler", scope["route_handler"]).resolve_request_max_body_size()
        why = f"The limit is {format_bytes(limit_bytes or 0)}."
        config = scope["litestar_app"].state.settings.server
        settings = {
            config.max_body_bytes: "--max-body-bytes",
            config.largest_media_body_bytes: "--max-media-body-bytes",
        }
        flag = settings.get(limit_bytes)
        hint = f"Send less, or start the server with a higher {flag}." if flag else ""
        return BodyTooLarge("The request body is too large.", why, hint)
    refusal = HTTPRequestError(error.detail or "The request is invalid.")
    refusal.status = error.status_code
    return refusal


def _allowed_methods(error: HTTPException) -> str:
    return next((value for name, value in (error.headers or {}).items() if name.lower() == "allow"), "GET")


def request_id_of(scope: Scope) -> str:
    return str(scope.get("state", {}).get("request_id", "-"))


def handle_exception(request: Request[Any, Any, Any], error: Exception) -> Response[bytes]:
    """Litestar's exception handler, for every route and for requests that match no route."""
    local = as_local_error(error, request.scope)
    headers = retry_headers(local)
    if isinstance(error, HTTPException) and error.status_code == 405:
        headers["allow"] = _allowed_methods(error)
    status, body, media_type, of_page = _render(request.scope, local)
    headers |= of_page
    drop_frames(error)
    return Response(body, status_code=status, media_type=media_type, headers=headers)


def drop_frames(error: BaseException | None) -> None:
    """Remove the tracebacks of an error that has been answered, and of the errors before it.

    Their frames hold the request's body. An error from a thread is part of a reference cycle (error, traceback, frame,
    future, error), so that bodies of megabytes would stay in memory until the next full garbage collection.
    The frames are not cleared: one of them may belong to a coroutine that caught the error and still runs.
    """
    while error is not None and error.__traceback__ is not None:
        error.__traceback__ = None
        error = error.__context__


def error_response(scope: Scope, error: LocalLLMError, headers: dict[str, str] | None = None) -> ASGIResponse:
    """Return the same answer for ASGI callers that run before Litestar has a request."""
    status, body, media_type, of_page = _render(scope, error)
    is_head = scope.get("method") == "HEAD"
    return ASGIResponse(
        body=b"" if is_head else body,
        status_code=status,
        media_type=media_type,
        headers=retry_headers(error) | of_page | (headers or {}),
        is_head_response=is_head,
    )


def is_api(path: str) -> bool:
    """Return whether a path is an API route and not a page."""
    return path.startswith(API_PREFIXES)


def wants_html(scope: Scope) -> bool:
    """Return whether the request is a browser opening a page."""
    if is_api(scope["path"]):
        return False
    return any(name == b"accept" and b"text/html" in value for name, value in scope["headers"])


def _render(scope: Scope, error: LocalLLMError) -> tuple[int, bytes, str, dict[str, str]]:
    """Return status, body, media type, and the headers that belong to the body."""
    status = error.status
    if wants_html(scope):
        body, headers = _error_page(scope, error)
        return status, body.encode(), "text/html", headers
    match dialect_of(scope["path"]):
        case "anthropic":
            return _anthropic_status(error), to_json(anthropic_error(error, scope)), "application/json", {}
        case "ollama":
            return status, to_json(ollama_error(error)), "application/json", {}
        case "openai":
            return status, to_json(openai_error(error)), "application/json", {}


def _error_page(scope: Scope, error: LocalLLMError) -> tuple[str, dict[str, str]]:
    """Return a page with its headers: in the frame of the web pages if they are served and have one for this error,
    else a small page whose policy allows nothing but its own style.
    """
    app = scope.get("litestar_app")
    framed: ErrorPages | None = app.state.get("error_page") if app is not None else None
    found = framed(scope, error) if framed is not None else None
    if found is not None:
        return found[0], dict(found[1])
    policy = (
        "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
    )
    return _page(error), {"content-security-policy": policy}


def _page(error: LocalLLMError) -> str:
    parts = [html.escape(part) for part in (error.why, error.hint) if part]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>localllm</title>'
        '<meta name="viewport" content="width=device-width"><meta name="color-scheme" content="light dark">'
        "<style>body{font:1rem/1.5 system-ui,sans-serif;max-width:40rem;margin:4rem auto;padding:0 1rem}</style>"
        f"</head><body><main><h1>{html.escape(error.what)}</h1>"
        + "".join(f"<p>{part}</p>" for part in parts)
        + '<p><a href="/">Back to the chat</a></p></main></body></html>'
    )
