"""Remove the caches in which Litestar keeps parts of requests.

Litestar keeps the last 1,024 forms, cookie headers, queries, paths and path parameters in process-wide `lru_cache`s. A
message, a key typed at /login and a deleted chat would stay in memory until as many others arrived, and 1,024 large
forms take gigabytes. Nothing of a request may outlive it, so this module replaces the cached functions by plain ones,
wherever Litestar has imported them.
Does not know: the contents of requests.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import _lru_cache_wrapper
from typing import Any

from litestar import Litestar, _parsers
from litestar._asgi.routing_trie import traversal
from litestar._kwargs import extractors
from litestar.datastructures.url import URL

FUNCTIONS = (
    (_parsers, "parse_url_encoded_form_data"),
    (_parsers, "parse_query_string"),
    (_parsers, "parse_cookie_string"),
    (extractors, "create_query_default_dict"),
    (traversal, "parse_path_params"),
)
CLASS_METHODS = ("_new", "from_components")
"""Cached class methods of `URL`."""


def keep_nothing_of_requests(app: Litestar) -> None:
    """Replace the caches in Litestar's modules, once per process, and in this application's router."""
    for module, name in FUNCTIONS:
        if isinstance(cached := getattr(module, name), _lru_cache_wrapper):
            _put_in_place_of(cached, cached.__wrapped__)
    for name in CLASS_METHODS:
        if isinstance(cached := URL.__dict__[name].__func__, _lru_cache_wrapper):
            setattr(URL, name, classmethod(cached.__wrapped__))
    app.asgi_router.handle_routing = app.asgi_router._handle_routing  # type: ignore[assignment]


def _put_in_place_of(cached: Any, plain: Callable[..., Any]) -> None:
    for module in [module for name, module in sys.modules.items() if name.startswith("litestar.")]:
        for name, value in list(vars(module).items()):
            if value is cached:
                setattr(module, name, plain)
