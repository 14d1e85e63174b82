"""The scope that each route requires, and the pages that other sites may link to.

`infer` is for users of models: generate, embed, tokenize, list, watch. `admin` is for the owner of the machine: load,
unload, download, delete. A route in no rule needs `infer` for API requests (GET and POST under /v1 and /api), else
`admin`, so that a forgotten route is locked. The rules of the API are here; each page has its own in its
`__init__.py`.
Does not know: keys, pages.
"""

from __future__ import annotations

from dataclasses import dataclass

from litestar.utils import normalize_path

from localllm.web.access.keys import Scope

PROBES = frozenset({"/health", "/v1/health", "/ping", "/version", "/api/version"})
OPEN_PATHS = PROBES | {"/login", "/logout", "/favicon.ico"}
"""Paths that need no key; neither do the files under /static/."""


class Paths:
    """A set of URL paths. One that ends in `*` stands for every path that begins with the rest of it."""

    def __init__(self, *patterns: str) -> None:
        self.exact = frozenset(each for each in patterns if not each.endswith("*"))
        self.prefixes = tuple(each[:-1] for each in patterns if each.endswith("*"))

    def __contains__(self, path: str) -> bool:
        return path in self.exact or path.startswith(self.prefixes)

    def __or__(self, other: Paths) -> Paths:
        return Paths(*self.exact, *other.exact, *(f"{each}*" for each in self.prefixes + other.prefixes))


NO_PATHS = Paths()


@dataclass(frozen=True, slots=True)
class RouteRules:
    """Rules of who may use which routes. A path is looked up in `admin` first."""

    admin: Paths = NO_PATHS
    infer: Paths = NO_PATHS  # for GET and POST
    read: Paths = NO_PATHS  # reading needs infer, changing needs admin
    delete: Paths = NO_PATHS  # DELETE needs infer: clients that can create these may delete them
    linked: Paths = NO_PATHS  # pages that other sites may link to, because opening them starts nothing

    def __add__(self, other: RouteRules) -> RouteRules:
        return RouteRules(
            self.admin | other.admin,
            self.infer | other.infer,
            self.read | other.read,
            self.delete | other.delete,
            self.linked | other.linked,
        )

    def scope_of(self, method: str, path: str) -> Scope:
        """Return the scope that a request needs. The path is normalised as the router does it."""
        path = normalize_path(path)
        reads = method in ("GET", "HEAD", "OPTIONS")
        deletes_own = method == "DELETE" and path in self.delete
        if path in self.admin or not (reads or method == "POST" or deletes_own):
            return "admin"
        if path in self.infer or deletes_own:
            return "infer"
        return "infer" if reads and path in self.read else "admin"


API_RULES = RouteRules(
    admin=Paths(
        "/v1/load_lora_adapter",
        "/v1/unload_lora_adapter",
        "/localllm/v1/server",
        *("/start_profile", "/stop_profile"),
        *("/api/pull", "/api/push", "/api/create", "/api/copy"),  # Ollama's routes
    ),
    infer=Paths(
        *("/", "/models", "/metrics", "/openapi.json"),
        *("/chat/completions", "/chat/completions/input_tokens", "/completions", "/completion", "/props"),
        *("/tokenize", "/detokenize", "/tokenizer_info", "/apply-template", "/infill"),
        *("/embeddings", "/rerank", "/v2/rerank", "/score", "/pooling", "/classify"),
        *("/audio/transcriptions", "/audio/translations"),
        *("/v1/*", "/api/*", "/localllm/v1/media/tokens"),
    ),
    read=Paths("/localllm/*"),
    delete=Paths("/v1/responses/*", "/v1/files/*"),
    linked=Paths("/"),
)


def is_open(path: str) -> bool:
    return path in OPEN_PATHS or path.startswith("/static/")


def needs_no_key(path: str) -> bool:
    """Return whether a path is open, or holds its own secret: a link to read one chat. Limits apply to such a link."""
    return is_open(path) or path.startswith("/shared/")


def scope_of(method: str, path: str) -> Scope:
    """Return the scope that a request of the API needs."""
    return API_RULES.scope_of(method, path)
