"""Litestar without its caches of what requests bring.

Litestar keeps the last 1,024 forms, cookie headers, queries, paths and their parameters in `lru_cache`s of the process:
a message, a key that was typed at /login and a chat that was wiped would stay in memory until as many others came, and
1,024 large ones take gigabytes. Nothing of a request may outlive it, so the plain functions take the places of the
cached ones, wherever in Litestar they have been imported.
Does not know: what is in a request.
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
"""Of `URL`."""


def keep_nothing_of_requests(app: Litestar) -> None:
    """Take the caches out of Litestar's modules, once for the process, and out of this application's router."""
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
