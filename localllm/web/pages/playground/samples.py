"""Invented samples of the playground's views, for `/dev/patterns` and the template tests."""

from __future__ import annotations

from dataclasses import replace

from localllm.web.pages.frame import views
from localllm.web.pages.playground import views as v
from localllm.web.pages.playground.views import heat_token


def samples(shell: views.Shell) -> list[views.View]:
    messages = (v.MessageRow("system", "Be brief."), v.MessageRow("user", "What is a block table?"))
    numbers = (v.NumberField("temperature", "Temperature", "", "0.7"), v.NumberField("seed", "Seed", "7", "random"))
    editor = v.Editor("chat", ("system", "user", "assistant"), messages, "", numbers, "", "{}", "", "5", True)
    tabs = (("chat", "Chat"), ("completions", "Completions"), ("tokenize", "Tokenize"))
    heat = tuple(
        heat_token(text, logprob, [(text, logprob), (" map", -2.0)])
        for text, logprob in ((" A", -0.01), (" list", -0.3), (" of", -0.9), (" blocks", -1.6), (".\n", -4.0))
    )
    tokens = v.PromptTokens(
        (v.Token("151644", "<|im_start|>"), v.Token("872", "user"), v.Token("198", "↵", True)), 12, 9
    )
    call = v.PlaygroundCall("weather", '{"city": "Oslo"}')
    snippet = v.Snippet("curl", "curl", "curl -s http://127.0.0.1:8000/v1/chat/completions")
    facts = (views.Fact("Prompt", "12 tokens"), views.Fact("Generation speed", "61.8 tok/s"))
    refused = v.Result(error=views.ErrorNotice("temperature must be between 0 and 2."), snippets=(snippet,))
    answer = v.Result(
        None, "A list of blocks.", "What do they ask?", (call,), "stop", heat, tokens, facts, "a warning", "{}",
        (snippet, v.Snippet("python", "Python", "from openai import OpenAI")),
    )  # fmt: skip
    return [
        editor,
        replace(editor, tab="completions", text="Once"),
        replace(editor, tab="tokenize", special=False),
        replace(editor, tab="embeddings"),
        replace(editor, tab="transcribe", model="whisper-base"),
        v.Result(text="[0:00] Hello.", finish_reason="stop", downloads=(("talk.srt", "data:text/plain;base64,MQ=="),)),
        answer,
        refused,
        v.Result(prompt=tokens),
        v.PlaygroundPage(shell, tabs, editor, answer),
        v.PlaygroundPage(shell, tabs, replace(editor, numbers=()), empty="The answer appears here."),
        v.PlaygroundPage(shell, tabs, replace(editor, model="a", models=("a", "b")), answer, servers="workstation"),
        v.PlaygroundPage(shell, loading=views.Loading("demo")),
    ]
