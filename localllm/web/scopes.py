"""What a key must be for, by route: the one place that decides it, for every dialect.

`infer` is for whoever uses models: generate, embed, tokenize, list, watch. `admin` is for whoever has the machine:
load, unload, fetch, delete. A route that stands in no table is `infer` where clients of APIs look (GET and POST under
/v1 and /api), else `admin`: forgotten is locked. Add here what should be otherwise.
Does not know: keys.
"""

from __future__ import annotations

from litestar.utils import normalize_path

from localllm.keys import Scope

PROBES = frozenset({"/health", "/v1/health", "/ping", "/version", "/api/version"})
OPEN_PATHS = PROBES | {"/login", "/logout"}
"""Nobody is asked for a key here, nor for the files under /static/."""

ADMIN_PATHS = frozenset(
    {
        "/v1/load_lora_adapter",
        "/v1/unload_lora_adapter",
        "/localllm/v1/server",
        *("/api/pull", "/api/push", "/api/create", "/api/copy"),  # Ollama's
        "/live/tune",  # what the page /tune shows, which is for admins
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
"""Whoever may make one may delete it."""
READ_BELOW = ("/localllm/", "/dashboard/", "/library")
"""Looking is for everybody there."""


def is_open(path: str) -> bool:
    return path in OPEN_PATHS or path.startswith("/static/")


def scope_of(method: str, path: str) -> Scope:
    """The scope that a request needs. Paths are compared as the router will read them."""
    path = normalize_path(path)
    reads = method in ("GET", "HEAD", "OPTIONS")
    deletes_own = method == "DELETE" and path.startswith(DELETE_BELOW)
    if path in ADMIN_PATHS or not (reads or method == "POST" or deletes_own):
        return "admin"
    if path in INFER_PATHS or path.startswith(INFER_BELOW):
        return "infer"
    return "infer" if reads and path.startswith(READ_BELOW) else "admin"
