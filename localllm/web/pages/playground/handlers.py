"""The playground's handlers: a form is sent through the API's own code, and the result is shown.

Does not know: the API's fields (forms.py writes them, web/api reads them), how a response is shown (views.py).
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import msgspec
from litestar import Request, get, post
from litestar.datastructures import UploadFile
from litestar.response import Response
from litestar.response.base import ASGIResponse

from localllm.config.settings import MAX_UPLOAD_BYTES
from localllm.errors import InvalidParameter, LocalLLMError, UnsupportedOption
from localllm.serving.transcription import Heard, SpeechOptions, transcript_of
from localllm.web.access.caller import set_source
from localllm.web.api.disconnect import EventStream
from localllm.web.api.documents import plain_name
from localllm.web.api.openai.audio import hear, nothing_to_close
from localllm.web.api.openai.chat import answer_chat, chat_prompt
from localllm.web.api.openai.completions import answer_completion
from localllm.web.api.openai.embeddings import answer_embeddings
from localllm.web.api.openai.tokenize import answer_tokenize
from localllm.web.api.remote import PIN
from localllm.web.errors import as_local_error
from localllm.web.pages.frame.errors import notice
from localllm.web.pages.frame.forms import fields_of, is_scripted
from localllm.web.pages.frame.live import sse
from localllm.web.pages.frame.render import render
from localllm.web.pages.frame.state import html, pages_state
from localllm.web.pages.playground import forms, views
from localllm.web.pages.playground.forms import snippets
from localllm.web.pages.playground.views import PlaygroundPage, PromptTokens, Result, StreamedAnswer

ANSWERS = {
    "chat": answer_chat,
    "completions": answer_completion,
    "tokenize": answer_tokenize,
    "embeddings": answer_embeddings,
}
MAX_BODY_BYTES = 2_000_000
AS_STREAM = {"stream": True, "stream_options": {"include_usage": True}}
EVERY_S = 0.1
"""Least time between two updates of a growing answer."""


class EventStreamResponse(Response[Any]):
    """A stream as a handler's return value, to which the router can add headers."""

    def __init__(self, stream: EventStream) -> None:
        super().__init__(None)
        self.stream = stream

    def to_asgi_response(self, *args: Any, headers: Mapping[str, str] | None = None, **others: Any) -> ASGIResponse:
        self.stream.headers.update(headers or {})
        return self.stream


@get("/playground", sync_to_thread=False)
def playground_page(request: Request[Any, Any, Any]) -> Response[str]:
    """Show an empty request."""
    return html(_page(request, request.query_params.get("tab", ""), {}, None))


@post("/playground", status_code=200, request_max_body_size=MAX_BODY_BYTES)
async def run_request(request: Request[Any, Any, Any]) -> Response[Any]:
    """Add or remove a message, render the prompt, or run the request; the answer is streamed if the browser can show
    it.
    """
    sent = await request.form()
    form = {name: [each for each in sent.getall(name) if isinstance(each, str)] for name in sent}
    tab, do = next(iter(form.get("tab", ())), ""), next(iter(form.get("do", ())), "run")
    set_source(request, "playground")
    page = _page(request, tab, form, None)
    if page.editor is None or do not in ("run", "prompt"):
        return html(page)
    known, status = Result(), 200
    try:
        tab, body = page.editor.tab, forms.body(page.editor)
        base_url, locked = _address(request)
        known = replace(known, snippets=snippets(tab, body, base_url, locked=locked))
        prompt = None if page.servers else await _prompt(request, tab, body)
        if do == "prompt":
            _require_own(page)
            result = replace(known, prompt=prompt)
        elif is_scripted(request) and page.editor.streams:
            return EventStreamResponse(await _stream(request, tab, body, replace(known, prompt=prompt)))
        else:
            asked = msgspec.json.encode({name: value for name, value in body.items() if name != "stream"})
            answer = await ANSWERS[tab](request, asked)
            server = str(answer.headers.get(PIN, ""))
            whole = views.result(tab, msgspec.json.decode(answer.body), _warning(answer), server)
            result = replace(whole, prompt=whole.prompt or prompt, snippets=known.snippets)
    except LocalLLMError as error:
        result, status = replace(known, error=notice(error)), error.status
    return html(result if is_scripted(request) else replace(page, result=result), status)


@post("/playground/transcribe", status_code=200, request_max_body_size=MAX_UPLOAD_BYTES)
async def transcribe_file(request: Request[Any, Any, Any]) -> Response[Any]:
    """Transcribe a file with the speech model; the text is streamed if the browser can show it."""
    form = await request.form()
    fields, file = await fields_of(request), form.get("file")
    set_source(request, "playground")
    known, status = Result(), 200
    try:
        if not isinstance(file, UploadFile) or not file.filename:
            raise InvalidParameter("No file is chosen.", hint="Choose a sound file.", param="file")
        name, translate = plain_name(file.filename), bool(fields.get("translate"))
        options = SpeechOptions(fields.get("language") or None, fields.get("prompt", ""), translate=translate)
        model, samples, heard, warnings = await hear(request, file, name, options)
        base_url, locked = _address(request)
        code = forms.sound_snippets({**fields, "model": model}, base_url, locked=locked)

        async def results() -> AsyncGenerator[Result, None]:
            told = list[Heard]()
            async for each in heard:
                told.append(each)
                yield Result(text=transcript_of(samples, told, translate=translate).text, finish_reason="writing")
            whole = transcript_of(samples, told, translate=translate, warnings=warnings)
            yield replace(views.transcript_result(whole, name), snippets=code)

        if is_scripted(request):
            return EventStreamResponse(EventStream(_drawn(request, results()), nothing_to_close))
        *_, result = [each async for each in results()]
    except LocalLLMError as error:
        result, status = replace(known, error=notice(error)), error.status
    return html(result if is_scripted(request) else _page(request, "transcribe", {}, result), status)


async def _drawn(request: Request[Any, Any, Any], results: AsyncGenerator[Result, None]) -> AsyncGenerator[bytes, None]:
    try:
        async for each in results:
            yield sse(render(each))
    except Exception as error:
        yield sse(render(Result(error=notice(as_local_error(error, request.scope)))))


def _address(request: Request[Any, Any, Any]) -> tuple[str, bool]:
    """Return this server's URL as the browser knows it, and whether requests need a key."""
    return f"{request.url.scheme}://{request.headers.get('host', '')}", request.app.state.key_ring.is_locked


def _page(
    request: Request[Any, Any, Any], tab: str, form: Mapping[str, Sequence[str]], result: Result | None
) -> PlaygroundPage:
    state = pages_state(request)
    card = state.card
    models = [*([card.name] if card is not None else []), *filter(state.elsewhere, state.upstreams.models())]
    shell = state.shell(request, "Playground", "playground", waits=not models)
    if not models:
        return PlaygroundPage(shell, loading=state.loading())
    asked = next(iter(form.get("model", ())), "") or request.query_params.get("model", "")
    model = asked if asked in models else models[0]
    card = card if card is not None and model == card.name else None
    task = card.spec.task if card is not None else ""
    tabs = (*(forms.GENERATES if task in ("generate", "") else ()), *(forms.BOTH if task else ()))
    tabs += forms.EMBEDS if task in ("embed", "") else ()
    if (speech := state.manager.register.speech) is not None:
        tabs = (*forms.HEARS, *tabs) if task == "transcribe" else (*tabs, *forms.HEARS)
    tab = tab or tabs[0][0]
    if tab == "transcribe" and speech is not None:
        return PlaygroundPage(shell, tabs, forms.editor(tab, form, {}, speech.name), result, views.EMPTY[tab])
    if tab not in dict(tabs):
        raise InvalidParameter(
            f"Unknown tab {tab[:40]!r}.", f"Known for {model}: {', '.join(dict(tabs))}.", param="tab"
        )
    defaults = dict[str, str]()  # of a model of another server they are not known
    if card is not None:
        params = card.default_params
        defaults = {name: f"{getattr(params, name, None) or 0:g}" for name in forms.NUMBERS if name != "seed"}
        defaults |= {"max_tokens": "16" if tab == "completions" else "up to the context", "seed": "random"}
        defaults["alternatives"] = "5"
    editor = forms.editor(tab, form, defaults, model, models)
    servers = "" if card is not None else ", ".join(state.upstreams.servers_of(model))
    return PlaygroundPage(shell, tabs, editor, result, views.EMPTY[tab], servers=servers)


def _require_own(page: PlaygroundPage) -> None:
    """Raise `UnsupportedOption` if the model is another server's: its chat template and tokenizer are there."""
    if page.servers and page.editor is not None:
        raise UnsupportedOption(
            "The prompt of a model of another server is not shown.",
            f"{page.editor.model} is a model of {page.servers}, which renders the prompt.",
            "Choose a model of this server, or run the request.",
            param="model",
        )


async def _stream(request: Request[Any, Any, Any], tab: str, body: dict[str, Any], known: Result) -> EventStream:
    """Stream the whole result repeatedly as it grows, and at the end with prompt and snippets. The stream ends if the
    browser leaves.
    """
    answer = await ANSWERS[tab](request, msgspec.json.encode(body | AS_STREAM))
    assert isinstance(answer, EventStream), "a body that asks for a stream is answered with one"
    return EventStream(_result_events(tab, answer, known), answer.close)


async def _result_events(tab: str, answer: EventStream, known: Result) -> AsyncGenerator[bytes, None]:
    answer_so_far, drawn_s = StreamedAnswer(tab), time.monotonic() - EVERY_S
    async with aclosing(answer.events) as pieces:
        async for piece in pieces:
            answer_so_far.add(piece)
            if time.monotonic() - drawn_s >= EVERY_S:
                yield sse(render(views.partial_result(answer_so_far)))
                drawn_s = time.monotonic()
    result = views.stream_result(tab, answer_so_far, _warning(answer), str(answer.headers.get(PIN, "")))
    yield sse(render(replace(result, prompt=known.prompt, snippets=known.snippets)))


def _warning(answer: ASGIResponse) -> str:
    return str(answer.headers.get("x-localllm-warning", ""))


async def _prompt(request: Request[Any, Any, Any], tab: str, body: Mapping[str, Any]) -> PromptTokens | None:
    """Return the rendered prompt, token by token. A tokenisation shows it as its result."""
    if tab == "chat":
        model, token_ids = await chat_prompt(request, msgspec.json.encode(body))
        texts = ((token_id, model.tokenizer.token_text(token_id)) for token_id in token_ids)
        return views.prompt_tokens(texts, len(token_ids))
    if tab == "completions":
        text = {"model": body["model"], "prompt": body["prompt"], "return_token_strs": True}
        found = msgspec.json.decode((await answer_tokenize(request, msgspec.json.encode(text))).body)
        return views.prompt_tokens(zip(found["tokens"], found["token_strs"], strict=True), found["count"])
    return None


HANDLERS = (playground_page, run_request, transcribe_file)
