"""The playground's handlers: a form in, the API's own road, a result out.

Does not know: the API's fields (asked.py writes them, web/api reads them), how a response is shown (shown.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec
from litestar import Request, get, post
from litestar.response import Response

from localllm.errors import InvalidParameter, LocalLLMError
from localllm.web.api.openai.chat import answer_chat, chat_prompt
from localllm.web.api.openai.completions import answer_completion
from localllm.web.api.openai.embeddings import answer_embeddings
from localllm.web.api.openai.tokenize import answer_tokenize
from localllm.web.pages.chat.shown import loading
from localllm.web.pages.errors import notice
from localllm.web.pages.forms import is_scripted
from localllm.web.pages.playground import asked, shown
from localllm.web.pages.playground.snippets import snippets
from localllm.web.pages.room import html, room_of
from localllm.web.pages.security import same_origin
from localllm.web.views.playground import Editor, PlaygroundPage, PromptTokens, Result

ANSWERS = {
    "chat": answer_chat,
    "completions": answer_completion,
    "tokenize": answer_tokenize,
    "embeddings": answer_embeddings,
}
MAX_BODY_BYTES = 2_000_000


@get("/playground", sync_to_thread=False)
def playground_page(request: Request[Any, Any, Any]) -> Response[str]:
    """An empty request."""
    return html(_page(request, request.query_params.get("tab", ""), {}, None))


@post("/playground", guards=[same_origin], status_code=200, request_max_body_size=MAX_BODY_BYTES)
async def run_request(request: Request[Any, Any, Any]) -> Response[str]:
    """Another message, one message less, what the model would read, or the answer."""
    sent = await request.form()
    form = {name: [each for each in sent.getall(name) if isinstance(each, str)] for name in sent}
    tab, do = next(iter(form.get("tab", ())), ""), next(iter(form.get("do", ())), "run")
    page = _page(request, tab, form, None)
    if page.editor is None or do not in ("run", "prompt"):
        return html(page)
    result, status = await _result(request, page.editor, only_prompt=do == "prompt")
    if is_scripted(request):
        return html(result, status)
    return html(replace(page, result=result), status)


def _page(
    request: Request[Any, Any, Any], tab: str, form: Mapping[str, Sequence[str]], result: Result | None
) -> PlaygroundPage:
    room = room_of(request)
    card = room.card
    shell = room.shell(request, "Playground", "playground", waits=card is None)
    if card is None:
        return PlaygroundPage(shell, loading=loading(room))
    tabs = (*(asked.GENERATES if card.spec.task == "generate" else ()), *asked.BOTH)
    tabs += asked.EMBEDS if card.spec.task == "embed" else ()
    tab = tab or tabs[0][0]
    if tab not in dict(tabs):
        raise InvalidParameter(f"Unknown tab {tab[:40]!r}.", f"Known: {', '.join(dict(tabs))}.", param="tab")
    params = card.default_params
    defaults = {name: f"{getattr(params, name, None) or 0:g}" for name in asked.NUMBERS if name != "seed"}
    defaults |= {"max_tokens": "16" if tab == "completions" else "up to the context", "seed": "drawn"}
    return PlaygroundPage(shell, tabs, asked.editor(tab, form, defaults), result)


async def _result(request: Request[Any, Any, Any], editor: Editor, *, only_prompt: bool) -> tuple[Result, int]:
    """The result and its status. What goes wrong is shown beside the request that caused it."""
    card = room_of(request).card
    examples: Result = Result()
    try:
        body = asked.body(editor, card.name if card is not None else "")
        base_url = f"{request.url.scheme}://{request.headers.get('host', '')}"
        locked = request.app.state.key_ring.is_locked
        examples = Result(snippets=snippets(editor.tab, body, base_url, locked=locked))
        raw = msgspec.json.encode(body)
        prompt = await _prompt(request, editor.tab, body)
        if only_prompt:
            return replace(examples, prompt=prompt), 200
        answer = await ANSWERS[editor.tab](request, raw)
        warning = answer.headers.get("x-localllm-warning", "")
        result = shown.result(editor.tab, msgspec.json.decode(answer.body), warning)
    except LocalLLMError as error:
        return replace(examples, error=notice(error)), error.status
    return replace(result, prompt=result.prompt or prompt, snippets=examples.snippets), 200


async def _prompt(request: Request[Any, Any, Any], tab: str, body: Mapping[str, Any]) -> PromptTokens | None:
    """What the model reads, token by token; a tokenisation shows it as its result."""
    if tab == "chat":
        model, token_ids = await chat_prompt(request, msgspec.json.encode(body))
        texts = ((token_id, model.tokenizer.token_text(token_id)) for token_id in token_ids)
        return shown.prompt_tokens(texts, len(token_ids))
    if tab == "completions":
        text = {"model": body["model"], "prompt": body["prompt"], "return_token_strs": True}
        found = msgspec.json.decode((await answer_tokenize(request, msgspec.json.encode(text))).body)
        return shown.prompt_tokens(zip(found["tokens"], found["token_strs"], strict=True), found["count"])
    return None


HANDLERS = (playground_page, run_request)
