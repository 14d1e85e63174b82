"""The scope that each route requires: the only place that decides it, for every dialect.

`infer` is for users of models: generate, embed, tokenize, list, watch. `admin` is for the owner of the machine: load,
unload, download, delete. A route in no table needs `infer` for API requests (GET and POST under /v1 and /api), else
`admin`, so that a forgotten route is locked. Exceptions are added here.
Does not know: keys.
"""

from __future__ import annotations

from litestar.utils import normalize_path

from localllm.web.access.keys import Scope

PROBES = frozenset({"/health", "/v1/health", "/ping", "/version", "/api/version"})
OPEN_PATHS = PROBES | {"/login", "/logout"}
"""Paths that need no key; neither do the files under /static/."""

ADMIN_PATHS = frozenset(
    {
        "/v1/load_lora_adapter",
        "/v1/unload_lora_adapter",
        "/localllm/v1/server",
        *("/api/pull", "/api/push", "/api/create", "/api/copy"),  # Ollama's routes
        "/live/tune",  # the events of the page /tune, which is for admins
    }
)
INFER_PATHS = frozenset(
    {
        *("/", "/models", "/metrics", "/openapi.json"),
        *("/chat", "/chats", "/dashboard", "/playground", "/theme", "/dev/patterns"),
        *("/chat/completions", "/chat/completions/input_tokens", "/completions"),
        *("/tokenize", "/detokenize", "/tokenizer_info", "/apply-template"),
        *("/embeddings", "/rerank", "/v2/rerank", "/score"),
    }
)
INFER_BELOW = ("/v1/", "/api/", "/c/", "/chats/", "/live/", "/static/")
DELETE_BELOW = ("/v1/responses/",)
"""Clients that can create these may delete them."""
READ_BELOW = ("/localllm/", "/dashboard/", "/library")
"""Reading is allowed for every key here."""


def is_open(path: str) -> bool:
    return path in OPEN_PATHS or path.startswith("/static/")


def scope_of(method: str, path: str) -> Scope:
    """Return the scope that a request needs. The path is normalised as the router does it."""
    path = normalize_path(path)
    reads = method in ("GET", "HEAD", "OPTIONS")
    deletes_own = method == "DELETE" and path.startswith(DELETE_BELOW)
    if path in ADMIN_PATHS or not (reads or method == "POST" or deletes_own):
        return "admin"
    if path in INFER_PATHS or path.startswith(INFER_BELOW):
        return "infer"
    return "infer" if reads and path.startswith(READ_BELOW) else "admin"
