"""The playground's form as an API body with exactly the fields that were filled in, and that body as curl, Python and
JavaScript code, ready to run.

Does not know: how a request is answered.
"""

from __future__ import annotations

import json
import pprint
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from localllm.engine.params import SAMPLING_PARAMS, ParamInfo
from localllm.errors import InvalidParameter
from localllm.web.pages.playground.views import Editor, MessageRow, NumberField, Snippet

ROLES = ("system", "user", "assistant")
MOST_MESSAGES = 100
HEARS = (("transcribe", "Transcribe"),)
GENERATES, EMBEDS = (("chat", "Chat"), ("completions", "Completions")), (("embeddings", "Embeddings"),)
BOTH = (("tokenize", "Tokenize"),)
STREAMED = frozenset(name for name, _ in GENERATES)

PATHS = {
    "chat": "/chat/completions",
    "completions": "/completions",
    "tokenize": "/tokenize",
    "embeddings": "/embeddings",
}
"""Path of each tab's route, below /v1."""

NUMBERS: Mapping[str, ParamInfo] = {
    name: info
    for name, info in SAMPLING_PARAMS.items()
    if info.label and info.kind in ("whole", "real") and name != "thinking_token_budget"
}
"""The sampling parameters of the form. A reasoning budget applies to chats only."""


def editor(
    tab: str,
    form: Mapping[str, Sequence[str]],
    defaults: Mapping[str, str],
    model: str = "",
    models: Sequence[str] = (),
) -> Editor:
    """Return the form as it was posted; an empty one has a message to fill in. models: to choose `model` from."""
    told = _messages(form) or (MessageRow("user", ""),)
    return Editor(
        tab=tab,
        roles=ROLES,
        messages=_changed(told, _first_value(form, "do")),
        text=_first_value(form, "text"),
        numbers=tuple(
            NumberField(name, info.label, _first_value(form, name), defaults.get(name, ""))
            for name, info in NUMBERS.items()
        ),
        stop=_first_value(form, "stop"),
        schema=_first_value(form, "schema"),
        tools=_first_value(form, "tools"),
        alternatives=_first_value(form, "alternatives") if form else defaults.get("alternatives", ""),
        special=not form or bool(_first_value(form, "special")),
        streams=tab in STREAMED and (not form or bool(_first_value(form, "stream"))),
        model=model,
        models=tuple(models),
    )


def body(asked: Editor) -> dict[str, Any]:
    """Return the API body. Raises `InvalidParameter` for a value that cannot be put into a body."""
    if asked.tab == "tokenize":
        return {
            "model": asked.model, "prompt": asked.text, "add_special_tokens": asked.special, "return_token_strs": True,
        }  # fmt: skip
    if asked.tab == "embeddings":
        lines = [line for line in asked.text.splitlines() if line.strip()]
        if not lines:
            raise InvalidParameter("There is no text to embed.", hint="Write one text per line.", param="text")
        return {"model": asked.model, "input": lines}
    sent: dict[str, Any] = {"model": asked.model}
    if asked.tab == "chat":
        sent["messages"] = [{"role": each.role, "content": each.text} for each in asked.messages if each.text.strip()]
        if not sent["messages"]:
            raise InvalidParameter("There is no message.", hint="Write a message.", param="messages")
    else:
        sent["prompt"] = asked.text
    sent |= {each.name: _number(each) for each in asked.numbers if each.value.strip()}
    if stop := [line for line in asked.stop.splitlines() if line]:
        sent["stop"] = stop
    if asked.schema.strip():
        schema = {"name": "answer", "schema": _json(asked.schema, "JSON schema", dict)}
        sent["response_format"] = {"type": "json_schema", "json_schema": schema}
    if asked.tab == "chat" and asked.tools.strip():
        sent["tools"] = _json(asked.tools, "Tools", list)
    if asked.streams:
        sent["stream"] = True
    return sent | _probabilities(asked)


def _probabilities(asked: Editor) -> dict[str, Any]:
    if not asked.alternatives.strip():
        return {}
    number = _number(NumberField("top_logprobs", "Alternatives", asked.alternatives, ""))
    return {"logprobs": True, "top_logprobs": number} if asked.tab == "chat" else {"logprobs": number}


def _messages(form: Mapping[str, Sequence[str]]) -> tuple[MessageRow, ...]:
    roles, texts = form.get("role", ()), form.get("content", ())
    if len(roles) != len(texts) or len(roles) > MOST_MESSAGES:
        why = f"There are {len(roles)} roles and {len(texts)} texts; at most {MOST_MESSAGES} messages are allowed here."
        raise InvalidParameter("The messages are not valid.", why, param="messages")
    for role in roles:
        if role not in ROLES:
            raise InvalidParameter(f"Unknown role {role[:40]!r}.", f"Known: {', '.join(ROLES)}.", param="role")
    pairs = zip(roles, texts, strict=True)
    return tuple(MessageRow(role, text.replace("\r\n", "\n")) for role, text in pairs)


def _changed(told: tuple[MessageRow, ...], do: str) -> tuple[MessageRow, ...]:
    """Return the messages with one more, or without the named one; at least one always remains."""
    if do == "add" and len(told) < MOST_MESSAGES:
        return (*told, MessageRow("assistant" if told[-1].role == "user" else "user", ""))
    named = do.removeprefix("remove-")
    if named != do and named.isascii() and named.isdigit():
        told = tuple(each for at, each in enumerate(told) if str(at) != named)
    return told or (MessageRow("user", ""),)


def _first_value(form: Mapping[str, Sequence[str]], name: str) -> str:
    return next(iter(form.get(name, ())), "").replace("\r\n", "\n")


def _number(field: NumberField) -> int | float:
    kind = float if field.name in NUMBERS and NUMBERS[field.name].kind == "real" else int
    try:
        return kind(field.value.strip())
    except ValueError:
        example = "a whole number" if kind is int else "a number such as 0.7"
        why = f"Got {field.value.strip()[:40]!r}."
        raise InvalidParameter(f"{field.label} must be {example}.", why, param=field.name) from None


def _json(text: str, label: str, kind: type[dict[str, Any]] | type[list[Any]]) -> Any:
    try:
        parsed = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidParameter(f"{label} is not valid JSON.", f"{error}.") from None
    if not isinstance(parsed, kind):
        raise InvalidParameter(f"{label} must be {'an object' if kind is dict else 'a list'} in JSON.")
    return parsed


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


def sound_snippets(fields: Mapping[str, str], base_url: str, *, locked: bool) -> tuple[Snippet, ...]:
    """Return a transcription as code. fields: of the form, without the file."""
    kind = "translations" if fields.get("translate") else "transcriptions"
    sent = {name: fields[name] for name in ("model", "language", "prompt") if fields.get(name)}
    key = f"  -H 'authorization: Bearer {KEY}' \\\n" if locked else ""
    parts = "".join(f" \\\n  -F {shlex.quote(f'{name}={value}')}" for name, value in sent.items())
    client = f'OpenAI(base_url="{base_url}/v1", api_key="{KEY if locked else "none"}")'
    arguments = "".join(f"{name}={value!r}, " for name, value in sent.items())
    python = f'from openai import OpenAI\n\nclient = {client}\nwith open("talk.mp3", "rb") as file:\n'
    python += f"    answer = client.audio.{kind}.create({arguments}file=file)\nprint(answer.text)"
    curl = f"curl -s {shlex.quote(f'{base_url}/v1/audio/{kind}')} \\\n{key}  -F file=@talk.mp3{parts}"
    return Snippet("curl", "curl", curl), Snippet("python", "Python", python)


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
