"""Invented samples of the chat page's views, for `/dev/patterns` and the template tests."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from localllm.web.pages.chat.composer import model_picker as picker
from localllm.web.pages.chat.composer import views as w
from localllm.web.pages.chat.markdown.render import code_block, render_markdown
from localllm.web.pages.chat.offer import views as o
from localllm.web.pages.chat.projects import views as j
from localllm.web.pages.chat.prompts import memory as y
from localllm.web.pages.chat.prompts import views as p
from localllm.web.pages.chat.sidebar import views as c
from localllm.web.pages.chat.store.records import ChatTotals
from localllm.web.pages.chat.thread import messages as m
from localllm.web.pages.chat.thread import views as v
from localllm.web.pages.chat.tools import views as t
from localllm.web.pages.chat.transfer import export as sh
from localllm.web.pages.frame import views

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


PIXEL = "data:image/gif;base64,R0lGODlhAQABAAAAACwAAAAAAQABAAACAkQBADs="
"""A picture of one pixel."""


EMPTY_CHATS: tuple[dict[str, Any], ...] = (
    {"toy_size": "4 M"}, {"rests": True, "size": "8.5 MiB"}, {"servers": "workstation"},
)  # fmt: skip


def samples(shell: views.Shell) -> list[views.View]:
    actions = m.MessageActions("/c/sample/m/1", "user")
    versions = m.MessageActions("/c/sample/m/2", "assistant", True, 2, 3, "/c/s/m/1/select", "/c/s/m/3/select")
    more = (("Read", "1,204 tokens, 85% of it from the prefix cache"),)
    figures = m.ReplyFigures(("0.21 s to first word", "62.1 tok/s", "318 tokens"), details=more)
    user = m.ChatMessage("sample-1", "user", "What is paged attention?\nIn short, please.", actions=actions)
    reply = m.ChatMessage(
        "sample-2", "assistant", html=render_markdown(MARKDOWN), model="demo", figures=figures, actions=versions
    )
    writing = m.ChatMessage("sample-3", "assistant", model="a", server="b", open=m.OpenBlock("sample-3", "text", "It"))
    failed = m.ChatMessage(
        "sample-4", "assistant", model="demo", error=views.ErrorNotice("The step failed.", "", "Retry.")
    )
    searched = m.ChatMessage("sample-20", "assistant", html="<p>412 degrees.</p>", model="demo", sources=sources())
    called = m.ChatMessage(
        "sample-9", "assistant", model="demo", thinking=thought(), calls=(call(),), result_form=form(), figures=figures
    )
    answered = m.ChatMessage("sample-10", "user", "get_weather: 21 °C", results=(result(),))
    thinks = m.ChatMessage(
        "sample-11", "assistant", model="demo", thinking=thought("sample-11", thinks=True),
        open=m.OpenBlock("sample-11"),
    )  # fmt: skip
    with_file = m.ChatMessage(
        "sample-12", "user", "What does it do?", files=(w.AttachmentChip("notes.py", 412, None, "", "x = 1\n"),)
    )
    edit = m.EditForm("sample-6", "/c/sample/m/6", "/c/sample/m/6", "What is it?")
    stop = w.ComposerAction("/c/sample/m/sample/stop")
    full = m.MessageList((user, reply, writing), "/c/sample?before=1", 460, "/c/sample")
    return [
        user,
        *(called, answered, thinks, with_file, searched),
        *not_read(user),
        *inside(),
        writing,
        reply,
        failed,
        actions,
        versions,
        *ways(reply, writing),
        edit,
        m.ChatMessage("sample-6", "user", edit=edit),
        m.OpenBlock("sample-5", "code", "def f():\n    return", "python"),
        m.OpenBlock("sample-7", "note", "Loading Qwen3-8B-AWQ …"),
        figures,
        w.ComposerAction(),
        stop,
        sampling(),
        w.Composer("", sampling(), w.ComposerAction(), "Hello", views.ErrorNotice("The message is empty.")),
        w.Composer(
            "",
            w.Sampling(),
            stop,
            models=picker.ModelChoices(choices()),
            speech="whisper-base",
        ),
        picker.ModelChoices(),
        *beside_the_text(),
        v.EmptyChat("demo", 4096, v.Examples(("What is paged attention?", "How do I start localllm?"))),
        *(v.EmptyChat("demo", 2048, v.Examples(("Hi",)), **more) for more in EMPTY_CHATS),
        v.Examples(("What is paged attention?",)),
        *offers(),
        o.Announcement("Qwen3.5 2B is ready."),
        m.MessageList((m.ChatMessage("sample-8", "user", "Hi"),), "/c/sample?before=8", 460, "/c/sample"),
        v.ChatTurn(user, reply, stop, "sample", head(), chat_list()),
        v.ChatUpdate(full, w.ComposerAction(), head(), "Version 2 of 3", undo()),
        v.ChatUpdate(full, stop, head(), "Generating", clears_composer=True, chats=chat_list()),
        *progress(),
        m.ReplyFinished(reply, w.ComposerAction(), head(), "Reply finished, 318 tokens"),
        *around(),
        *library(),
        *pages(shell, full),
    ]


def choices() -> tuple[picker.ModelChoice, ...]:
    return picker.ModelChoice("demo", True), picker.ModelChoice("org/big", False, "not loaded")


def not_read(user: m.ChatMessage) -> list[views.View]:
    """Return samples of messages that the model does not read, or reads in another place."""
    left_out = m.ChatMessage("sample-14", "user", "Long ago", is_left_out=True)
    unsent = m.ChatMessage(
        "sample-15", "assistant", model="demo", error=views.ErrorNotice("This chat is full."), has_failed=True
    )
    summary = m.ChatMessage(
        "sample-16", "assistant", html="<p>A summary.</p>", model="demo", origin=w.SummaryOrigin("Blocks", "/c/sample")
    )
    return [
        *(unsent, summary),
        m.MessageList((left_out, user), last_left_out="sample-14", bring_back_url="/c/sample/bring-back"),
    ]


def progress() -> list[views.View]:
    """Return samples of the live updates of a reply."""
    return [
        m.ReplyProgress("sample-3", "<p>A block.</p>", True, m.OpenBlock("sample-3", "text", "The next")),
        m.ReplyProgress("sample-3", appended=" words"),
        m.ReplyProgress("sample-11", thinking=thought("sample-11", thinks=True)),
        m.ReplyProgress("sample-11", thinking_html="<p>Then.</p>", thinking_open=m.OpenBlock("sample-11-thinking")),
        m.ReplyProgress("sample-11", thinking_appended=" and"),
    ]


def offers() -> list[o.OfferCard | o.OfferRoom]:
    """Return the card of the offered model in each of its states."""
    facts = ("1.9 GiB to download", "up to 32,384 tokens of context", "about 8 to 12 tokens/s", "apache-2.0")
    name, title, says = "unsloth/Qwen3.5-2B-GGUF:Q8_0", "Qwen3.5 2B", "Everyday questions; quick on a CPU."
    start, stop = o.OfferButton("start", "Download and use (1.9 GiB)", True), o.OfferButton("stop", "Cancel")
    line, why = "0.6 GiB of 1.9 GiB · 11.2 MiB/s · 1 min 58 s left", views.ErrorNotice("The hub cannot be reached.")
    phases = (views.LoadPhase("weights", False, 0.4, "0.8 of 1.9 GiB"),)
    return [
        o.OfferCard(name, title, "absent", says, facts, buttons=(start,)),
        o.OfferCard(name, title, "downloading", says, facts, line, 0.31, buttons=(stop,)),
        o.OfferCard(name, title, "loading", says, facts, phases=phases, buttons=(stop,)),
        o.OfferCard(name, title, "failed", says, facts, error=why, buttons=(start,), takes_path=True),
        o.OfferCard(name, title, "absent", says, facts, refusal="Your key can use models but not download them."),
        o.OfferCard(name, title, "ready"),
        o.OfferRoom(),
        o.OfferRoom(is_empty=True),
    ]


def thought(message_id: str = "sample-9", *, thinks: bool = False) -> m.ReasoningView:
    rest = m.OpenBlock(f"{message_id}-thinking", "text", "So $21$") if thinks else None
    return m.ReasoningView(message_id, render_markdown("The user wants the *weather*. $E = mc^2$"), 4.2, 312, rest)


def call() -> t.ToolCallCard:
    return t.ToolCallCard("get_weather", code_block('{\n  "city": "Paris"\n}', "json"))


def form() -> t.ResultForm:
    return t.ResultForm("/c/sample/m/sample-9", "sample-9", ((0, "get_weather"),))


def result() -> t.ToolResult:
    return t.ToolResult("get_weather", "21 °C, clear")


def ways(reply: m.ChatMessage, writing: m.ChatMessage) -> list[views.View]:
    """Return samples of what a message's menu opens, and of two replies to compare."""
    names = choices()
    compared = m.ComparedReplies((reply, writing), ("/c/sample/m/2", "/c/sample/m/3"))
    refused = views.ErrorNotice("Choose two different models.", "Both are demo.")
    return [
        compared,
        m.ReplyFigures(("256 tokens",), "cut off: token limit", is_broken=True, details=(("Read", "12 tokens"),)),
        m.ReplyFigures((), "interrupted: the server stopped", is_broken=True),
        m.ChatMessage("sample-21", "assistant", html="<p>Mine.</p>", model="demo", is_edited=True),
        m.EditForm("sample-15", "/c/sample/m/15", "/c/sample/m/15", "It is a table.", "assistant"),
        m.OtherModel("/c/sample/m/2", names, "org/big"),
        m.OtherModel("/c/sample/m/2", names, "demo", "org/big", refused),
        m.OtherModel("/c/sample/m/2", names, "demo", compares=True),
        m.OtherModel("/c/sample/m/2", names[:1], ""),
        m.RatingForm("/c/sample/m/2", "bad", "It forgot the unit."),
        m.Outline((("What is paged attention?", "/c/sample#m-1"), ("And a block table?", "/c/sample?before=9#m-5"))),
        m.Outline(()),
    ]


def inside() -> list[views.View]:
    """Return samples of the parts of a message and its composer."""
    chip = w.AttachmentChip("notes.py", 412, 131, "a1")
    long = w.AttachmentChip("paper.pdf", 1_412_000, 353_000, "a2", is_estimate=True, searched=True)
    return [
        *(thought("sample-13"), call(), form(), result(), chip),
        t.ToolCallCard("get_weather", code_block('{"city": "Pa', ""), broken=True),
        replace(call(), is_offered=False),
        w.Attachments((chip,), 131, 4096),
        w.Attachments((chip, long), 131, 4096),
        w.AttachmentChip("paper.pdf", 1_412_000, searched=True),
        w.AttachmentChip("paper.pdf", 1_412_000, searched=True, is_missing=True),
        *(sources(), m.Sources("No passage was found", (), "The chat is full.")),
        w.Attachments((chip,), 131, 64, views.ErrorNotice("cat.png is a picture, and demo does not see pictures.")),
        w.Attachments(
            (
                w.AttachmentChip(
                    "cat.png",
                    9_000,
                    4015,
                    "a3",
                    thumb=PIXEL,
                    size="4032 x 3024",
                    shown="2336 x 1760",
                    seconds=41.2,
                    detail="auto",
                ),
                w.AttachmentChip("scan.pdf", 9_000, 4015, "a4", note="2 pages without text not read"),
                w.AttachmentChip("talk.wav", 900, 212, "a5", note="12:30 of speech by base", speech=("turbo",)),
            ),
            4015,
            8192,
        ),
        w.AttachmentChip("cat.png", 9_000, thumb=PIXEL, size="4032 x 3024", url="/chats/pictures/0"),
        w.AttachmentChip("talk.wav", 192_044, size="6.0 s", url="/chats/pictures/1", is_sound=True),
    ]


def sources() -> m.Sources:
    passage = m.SourcePassage("paper.pdf, p. 3", "The melting point of zorbium is 412 degrees.\n\nIt is grey.")
    return m.Sources("From paper.pdf, p. 3", (passage,))


def pages(shell: views.Shell, messages: m.MessageList) -> list[views.View]:
    composer = w.Composer("", sampling(), w.ComposerAction(), begins="abcdefgh12345678")
    aside = views.ErrorNotice("The chats in chats.db were damaged. They were set aside as chats.db.broken-1.")
    return [
        v.ChatPage(
            shell,
            c.ChatHead("New chat"),
            chat_list(),
            None,
            composer,
            v.EmptyChat("demo", 512, v.Examples(("Hi",))),
            offer=offers()[0],
        ),
        v.ChatPage(shell, head(), chat_list(), messages, composer, undo=undo(), notice=aside),
        v.ChatPage(shell, head(), chat_list(), loading=views.Loading("demo")),
        v.ChatPage(shell, c.ChatHead("Chats"), c.ChatList(), panel=c.ManageChats()),
    ]


def around() -> list[views.View]:
    """Return samples of the views beside the messages."""
    locked = views.ErrorNotice("The chats are locked by another program.", "chats.db: database is locked.", "Close it.")
    return [
        *of_tools(),
        head(),
        *(w.ContextMeter(1522, 4096), w.ContextMeter(2173, 2048), w.ContextMeter()),
        chat_list(),
        c.ChatList((c.ChatGroup("Found", chat_list().groups[0].rows),), "paged"),
        c.ChatList((), "nothing"),
        c.ChatList(error=locked),
        c.ChatListPage(
            (chat_row(note="Kernels"), chat_row(snippet=("a ", "paged", " b"))),
            projects=project_choices(),
            ages=(c.SelectOption("30", "30 days (2 chats)"),),
            newer_url="/chats",
            older_url="/chats?page=3",
        ),
        c.ChatListPage(archived=True, error=locked),
        c.ManageChat(
            "/c/sample",
            "What is a block table?",
            True,
            time="23 Nov 2026, 08:14",
            projects=project_choices(),
            sums=ChatTotals(24, 12_345, 8_000, 3_210, 72.0),
        ),
        c.ManageChat("/c/sample", "", False, True, error=views.ErrorNotice("The title is empty.")),
        c.ManageChats(refused()),
        c.ManageChats(links=(("Which grid?", "/c/sample"),)),
        c.ChatLinkForm("/c/sample", is_empty=True),
        c.ChatLinkForm("/c/sample", "/shared/secret", is_behind=True, is_local=True),
        *(refused(), c.WipeChats(), c.ManageChats(wipe=c.WipeChats()), *shared()),
        c.ChatsChanged(chat_list(), head(), "Chat renamed"),
        c.ChatTitled(chat_list(), head()),
        c.ChatHead("New chat", title_url="/prompts/choose"),
        c.ChatsChanged(chat_list(), None, "Chat deleted", undo()),
        undo(),
    ]


def shared() -> list[views.View]:
    """Return a chat that is saved as a file, and its messages."""
    chip, answer = w.AttachmentChip("notes.py", 412, None, "", "x = 1\n"), render_markdown(MARKDOWN)
    messages = (
        sh.SharedMessage("user", "You", "What is it?", files=(chip,)),
        sh.SharedMessage("assistant", "demo", answer, "<p>Hm.</p>", (result(),), sources=sources(), error="It failed."),
        sh.SharedMessage("user", "You", "", results=(result(),)),
    )
    return [sh.SharedChat("What is paged attention?", "2026-11-23", messages, "Be brief."), *messages]


def refused() -> c.ImportRefused:
    broken = views.ErrorNotice("chats.json: This file holds no messages.", "", "Choose a chat export.")
    return c.ImportRefused((broken, views.ErrorNotice("3 chats are imported.")), chat_list())


def head() -> c.ChatHead:
    return c.ChatHead(
        "What is paged attention?", "/c/sample/manage", w.ContextMeter(1522, 4096), "Kernels", "/projects/p", "23 Nov",
        "", "/c/sample/outline",
    )  # fmt: skip


def undo() -> c.Undo:
    return c.Undo("The chat is deleted.", "/chats/undo/sample")


def chat_row(
    title: str = "What is a block table?",
    *,
    note: str = "",
    current: bool = False,
    snippet: tuple[str, str, str] = ("", "", ""),
    shows_time: bool = False,
) -> c.ChatRow:
    return c.ChatRow("2", title, "/c/2", "/c/2/manage", "23 Nov 2026, 08:14", current, snippet, shows_time, note)


def library() -> list[views.View]:
    """Return samples of prompts, projects and the list behind Ctrl K."""
    models = (c.SelectOption("", "The one that is chosen in the chat", True), c.SelectOption("demo", "demo"))
    form = p.SettingsForm("Be brief.", sampling().fields, models, True)
    wrong = views.ErrorNotice("The prompt has no name.", "", "Type one first.")
    translate = p.PromptRow("Translate", "/prompts/1", "Translate into {{language}}: …", asks=True)
    rows = (translate, p.PromptRow("Exact", "/prompts/2", notes=("the system prompt", "temperature")))
    file = j.PinnedFile("1", "notes.md", 412, "# Notes\n")
    commands = (c.PaletteEntry(0, "New chat", "/"), c.PaletteEntry(1, "Keyboard shortcuts", "", "?"))
    chats = (c.PaletteEntry(2, "What is a block table?", "/c/2", "23 Nov 2026, 08:14"),)
    return [
        form,
        p.SettingsForm(),
        *(
            y.MemoryPage(),
            y.MemoryPage(True, "I work on Linux.", error=wrong),
            y.RememberForm("/c/sample/m/2", "A note"),
        ),
        p.PromptLibrary(rows),
        p.PromptLibrary(error=views.ErrorNotice("This file does not hold prompts.")),
        p.PromptForm("/prompts", "Translate", "Translate into {{language}}:\n{{text}}", form, True, wrong),
        p.PromptForm("/prompts/1", "Exact"),
        p.PromptQuestions("/prompts/1/use", "Translate", "Translate into {{language}}", ("language", "text")),
        p.PromptList(rows),
        p.PromptList(is_empty=True),
        p.PromptList(),
        p.PromptUsed("Exact", "Hello", sampling(), picker.ModelChoices((picker.ModelChoice("demo", True),))),
        p.PromptUsed("Translate", "Translate into French: tree"),
        j.ProjectList((j.ProjectRow("Kernels", "/projects/p", 12),)),
        j.ProjectList((), "x" * 61, wrong),
        j.ProjectPage(
            "/projects/p",
            "Kernels",
            "/?project=p",
            12,
            (chat_row(),),
            (file,),
            131,
            64,
            "Kernels",
            form,
            error=wrong,
        ),
        j.ProjectPage("/projects/p", "Empty", "/?project=p", typed_name="Empty", folder=j.FolderPart("/projects/p")),
        j.FolderPart("/projects/p", "/home/me/notes", 43, 12, True),
        j.FolderPart("/projects/p", "/home/me/notes", 2_000, 2_000, unread=("a.bin",), num_unread=1, num_left_out=7),
        j.FolderPart("/projects/p", "/home/me/notes", problem="/home/me/notes: No such file.", may_change=False),
        c.Palette((c.PaletteGroup("Go to", commands), c.PaletteGroup("Chats", chats))),
        c.Palette(error=views.ErrorNotice("The chats are locked by another program.")),
    ]


def project_choices() -> tuple[c.SelectOption, ...]:
    return c.SelectOption("", "No project"), c.SelectOption("p", "Kernels", True)


def chat_list() -> c.ChatList:
    found = chat_row("Block tables", current=True, snippet=("keeps the cache in ", "paged", " blocks"))
    rows = (chat_row(shows_time=True), chat_row(shows_time=True), chat_row("A very long title " * 6))
    project = c.ChatGroup("Kernels", (chat_row("Which grid?"),), "/projects/p", "/?project=p")
    return c.ChatList((c.ChatGroup("Pinned", (found,)), project, c.ChatGroup("Today", rows)), has_more=True)


def sampling() -> w.Sampling:
    fields = (
        w.SettingField(
            "temperature", "Temperature", "real", "0.2", "0.7", "the model's generation_config", "0 is dull."
        ),
        w.SettingField(
            "max_tokens",
            "Longest reply, tokens",
            "whole",
            "",
            "what is left of 4,096",
            "this server's default",
            "",
            1,
            None,
            True,
            True,
        ),
        w.SettingField("stop", "Stop at", "strings", "END", "nothing", "OpenAI's default", "Texts, one a line."),
    )
    wrong = views.ErrorNotice("The preset has no name.", "", "Type one first.")
    return w.Sampling("Be brief.", fields, ("Precise", "Wild"), "Wild", True, wrong, num_set=2, wrong="max_tokens")


def beside_the_text() -> list[views.View]:
    """Return samples of what the composer shows when its message does not fit, and while a model loads."""
    full = w.Refusal(
        "This chat is full: 2,173 of 2,048 tokens.", "Its messages need 1,917, and 256 are kept free for the reply.",
        "/chat", "/c/sample", True,
    )  # fmt: skip
    long = w.Refusal("Too long by 12,965 tokens.", "This message needs 15,013 tokens.", "/chat", file_tokens=1900)
    progress = w.LoadProgress("org/big", 0.4, "weights 0.4 of 0.6 GiB")
    load = w.ComposerAction(load=progress, load_url="/live/chat/model?model=org%2Fbig")
    return [
        *(full, long, progress, load, w.ComposerAction(over_tokens=12965)),
        w.FitUpdate(w.ComposerAction(over_tokens=125), full, w.ContextMeter(2173, 2048), True),
        w.FitUpdate(w.ComposerAction()),
        *(w.BehaviourChip("Speak like a pirate.", "/c/sample?behaviour=1#system"), w.BehaviourChip()),
        w.SummaryOrigin("What is paged attention?", "/c/sample"),
        w.ModelPicked(load),
        w.ModelPicked(
            w.ComposerAction(),
            w.Sampling(),
            w.ThinkingChoice(True),
            picker.ModelChoices(),
            views.ErrorNotice("Too large."),
        ),
        *(w.ThinkingChoice(True, "off"), w.ThinkingChoice()),
        w.SettingRefused(views.ErrorNotice("Temperature must be a number such as 0.7."), w.Sampling(is_open=True)),
    ]


def of_tools() -> list[views.View]:
    html = code_block('{\n  "path": "notes/todo.md"\n}', "json")
    card = t.ToolCallCard("read_file", html, server="files", url="/c/sample/m/sample-24/calls/0")
    reply = m.ChatMessage("sample-24", "assistant", model="demo", calls=(card,))
    form = t.ResultForm("/c/sample/m/sample-25", "sample-25", ((0, "read_file"),), is_folded=True)
    failed = views.ErrorNotice("time did not start.", "The program 'uvx' is not on this machine.", "Install it.")
    consents = t.ConsentList(
        (
            t.ConsentRow("files", "read_file", "always", "2026-01-02"),
            t.ConsentRow("files", "delete_file", "never", "2026-01-02"),
        ),
        "/chats/tools",
    )
    rows = (t.ToolRow("read_file", "Read a text file."), t.ToolRow("delete_file", "Delete a file."))
    servers = (t.UsableServer("files", "running", rows), t.UsableServer("time", "failed", error=failed))
    return [
        card,
        replace(card, note="The tool has changed since you allowed it."),
        replace(card, state="running"),
        replace(card, state="done", text="<b>milk</b>"),
        t.ToolNotes(("The tools of time are left out. time did not start.",)),
        replace(form, message_id="sample-26"),
        replace(form, message_id="sample-27", calls=(), is_folded=False, goes_on=True, error=failed),
        m.CallsProgress(reply, "The call waits for your answer"),
        t.ToolServers((t.ServerChoice("files", True), t.ServerChoice("time", False, "time did not start."))),
        t.ToolServers((t.ServerChoice("notes", True),), "demo cannot call tools."),
        *(
            t.ToolServers(()),
            t.WebSwitch("web", True),
            t.WebSwitch("web", note="demo cannot call tools."),
            t.WebSwitch(),
        ),
        consents,
        t.ConsentList(()),
        t.ToolsPanel(servers, consents),
        t.ToolsPanel((), t.ConsentList(())),
    ]
