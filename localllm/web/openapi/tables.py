"""The tables of all dialects: what each handler reads and answers.

Does not know: the contents of the tables.
"""

from __future__ import annotations

from collections.abc import Mapping

from localllm.web.openapi import anthropic, ollama, openai, own, responses, router, vectors
from localllm.web.openapi.document import Table

TABLES: Mapping[str, Table] = {
    "openai": {**openai.TABLE, **vectors.TABLE},
    "responses": responses.TABLE,
    "anthropic": anthropic.TABLE,
    "ollama": ollama.TABLE,
    "localllm": {**own.TABLE, **router.TABLE},
}
"""Keys are the prefixes of component names."""
