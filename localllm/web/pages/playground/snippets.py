"""A request of the playground as curl, Python and JavaScript code, ready to run.

Does not know: where the request came from.
"""

from __future__ import annotations

import json
import pprint
import shlex
from collections.abc import Mapping
from typing import Any

from localllm.web.pages.playground.forms import PATHS
from localllm.web.pages.playground.views import Snippet

KEY = "YOUR-KEY"
METHODS = {"chat": "chat.completions", "completions": "completions", "embeddings": "embeddings"}
OPENAI = frozenset({
    "model", "messages", "prompt", "input", "temperature", "top_p", "max_tokens", "seed", "presence_penalty",
    "frequency_penalty", "stop", "response_format", "tools", "logprobs", "top_logprobs", "stream",
})  # fmt: skip
"""Fields with arguments in the openai package; the others go into its extra_body."""


def snippets(tab: str, body: Mapping[str, Any], base_url: str, *, locked: bool) -> tuple[Snippet, ...]:
    """Return the snippets. `base_url`: of this server, without a path. `locked`: the server needs a key, so the code
    has a placeholder for one.
    """
    url = f"{base_url}/v1{PATHS[tab]}"
    return (
        Snippet("curl", "curl", _curl(url, body, locked)),
        Snippet("python", "Python", _python(tab, f"{base_url}/v1", body, locked)),
        Snippet("javascript", "JavaScript", _javascript(url, body, locked)),
    )


def _curl(url: str, body: Mapping[str, Any], locked: bool) -> str:
    key = f"  -H 'authorization: Bearer {KEY}' \\\n" if locked else ""
    data = shlex.quote(json.dumps(body, ensure_ascii=False, indent=1))
    silent = "-sN" if body.get("stream") else "-s"
    return f"curl {silent} {shlex.quote(url)} \\\n{key}  -H 'content-type: application/json' \\\n  -d {data}"


def _python(tab: str, base_url: str, body: Mapping[str, Any], locked: bool) -> str:
    client = f'OpenAI(base_url="{base_url}", api_key="{KEY if locked else "none"}")'
    head = f"from openai import OpenAI\n\nclient = {client}\n"
    if tab not in METHODS:
        sent = pprint.pformat(dict(body), sort_dicts=False)
        return f'{head}answer = client.post("{PATHS[tab]}", body={sent}, cast_to=object)\nprint(answer)'
    own = {name: value for name, value in body.items() if name in OPENAI}
    extra = {name: value for name, value in body.items() if name not in OPENAI}
    arguments = own | ({"extra_body": extra} if extra else {})
    lines = "".join(f"    {name}={_indented(value)},\n" for name, value in arguments.items())
    create = f"client.{METHODS[tab]}.create(\n{lines})"
    if body.get("stream"):
        piece = "chunk.choices[0].delta.content or ''" if tab == "chat" else "chunk.choices[0].text"
        return f'{head}for chunk in {create}:\n    print({piece}, end="", flush=True)\nprint()'
    says = {"chat": "answer.choices[0].message.content", "completions": "answer.choices[0].text"}
    print_it = says.get(tab, "answer.data[0].embedding")
    return f"{head}answer = {create}\nprint({print_it})"


def _indented(value: Any) -> str:
    return pprint.pformat(value, width=90, sort_dicts=False).replace("\n", "\n    ")


def _javascript(url: str, body: Mapping[str, Any], locked: bool) -> str:
    key = f', authorization: "Bearer {KEY}"' if locked else ""
    data = json.dumps(body, ensure_ascii=False, indent=2).replace("\n", "\n  ")
    show = "console.log(await response.json());"
    if body.get("stream"):
        show = "for await (const piece of response.body.pipeThrough(new TextDecoderStream())) console.log(piece);"
    return (
        f'const response = await fetch("{url}", {{\n  method: "POST",\n'
        f'  headers: {{ "content-type": "application/json"{key} }},\n'
        f"  body: JSON.stringify({data}),\n}});\n{show}"
    )
