"""Samples of the chat page's views, made up: for `/dev/patterns` and the template tests."""

from __future__ import annotations

from localllm.web.pages.chat.markdown import render_markdown
from localllm.web.views import chat as v
from localllm.web.views import shared

MARKDOWN = """Paged attention keeps the KV cache in **blocks** of `block_size` tokens.

- blocks are found through a block table
- nothing is copied when a request grows

```python
def slot(block_table: list[int], position: int, block_size: int = 16) -> int:
    # where K and V of this position live
    return block_table[position // block_size] * block_size + position % block_size
```

| word | meaning |
|:-----|--------:|
| block | 16 tokens |
| slot | 1 token |

> Kwon et al. 2023. ![figure 1](https://example.com/figure.png) and [a link](https://example.com).
"""


def samples(shell: shared.Shell) -> list[shared.View]:
    figures = v.Figures(1204, 1024, 318, "stop", 0.21, 62.1, 4096)
    user = v.ChatMessage("sample-1", "user", "What is paged attention?\nIn short, please.")
    reply = v.ChatMessage("sample-2", "assistant", html=render_markdown(MARKDOWN), model="demo", figures=figures)
    writing = v.ChatMessage("sample-3", "assistant", model="demo", open=v.OpenBlock("sample-3", "text", "It keeps the"))
    failed = v.ChatMessage(
        "sample-4", "assistant", model="demo", error=shared.ErrorNotice("The step failed.", "", "Retry.")
    )
    sampling = v.Sampling("Be brief.", "0.2", "", "0.7", "what is left of 4,096", "the model's own setting")
    recent = (v.RecentChat("/", "What is a block table?"), v.RecentChat("/", "A very long title " * 6))
    return [
        user,
        writing,
        reply,
        failed,
        v.OpenBlock("sample-5", "code", "def f():\n    return"),
        figures,
        v.Figures(12, 0, 256, "length"),
        v.ComposerAction(),
        v.ComposerAction("/c/sample/m/sample/stop"),
        sampling,
        v.Composer("", sampling, v.ComposerAction(), "Hello", shared.ErrorNotice("The message is empty.")),
        v.EmptyChat("demo", 4096, ("What is paged attention?", "How do I start localllm?"), recent),
        v.ChatTurn(user, reply, v.ComposerAction("/c/sample/m/sample/stop"), "sample"),
        v.ReplyProgress("sample-3", "<p>A block.</p>", True, v.OpenBlock("sample-3", "text", "The next")),
        v.ReplyProgress("sample-3", appended=" words"),
        v.ReplyFinished(reply, v.ComposerAction(), "Reply finished, 318 tokens"),
        v.ChatPage(shell, (), v.Composer("", v.Sampling(), v.ComposerAction()), v.EmptyChat("demo", 512, ("Hi",))),
        v.ChatPage(shell, loading=shared.Loading("demo")),
    ]
