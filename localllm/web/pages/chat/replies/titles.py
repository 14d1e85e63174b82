"""Titles that the model writes: one short request after the first reply of a new chat.

The request waits for nothing and nothing waits for it: it is sent only to a model that is loaded, with the lowest
priority, it has few tokens and little time, and if it fails the first words of the chat stay its title. A chat that was
renamed meanwhile keeps its name.
Does not know: HTTP, templates, replies in a page (active.py).
"""

from __future__ import annotations

import asyncio
import logging
import secrets

from localllm.engine.request import RequestOptions
from localllm.errors import LocalLLMError
from localllm.models.fit import MemoryPlan
from localllm.serving.answers.conversation import reasons
from localllm.serving.answers.generation import collect
from localllm.serving.served import ServedModel
from localllm.web.pages.chat.replies.prompt import prompt_of
from localllm.web.pages.chat.replies.reply import Reply
from localllm.web.pages.chat.store import Chat, Chats, ChatStore
from localllm.web.pages.frame.state import PagesState

log = logging.getLogger(__name__)

TITLE_TOKENS = 24
TITLE_S = 20.0
"""How long a title may take; then the request is cancelled."""

READ_CHARS = 1000
"""Characters of the question, and of the reply, that the model reads for a title."""

MAX_TITLE_CHARS = 60
ORNAMENT = str.maketrans("", "", '#*`"“”«»')
PRIORITY = 1_000_000
"""Larger than that of any reply: under the policy `priority` a title runs when nothing else wants to."""

ASK = """Write a title of at most six words for the chat that begins below. Answer with the title alone.

Question: {question}

Answer: {answer}"""


class Titles:
    """The titles that are being written. `setting`: on, off, or auto, which is on for a model on a GPU."""

    def __init__(self, pages: PagesState, store: ChatStore, setting: str) -> None:
        self._pages, self._store, self._setting = pages, store, setting
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def write_after(self, owner: str, chat: Chat, question: str, reply: Reply) -> None:
        """Write the title of a new chat once its first reply is complete."""
        if self._setting == "off":
            return
        task = asyncio.create_task(self._write(owner, chat, question, reply), name=f"title {chat.id}")
        self._tasks[chat.id] = task
        task.add_done_callback(lambda _: self._tasks.pop(chat.id, None))

    def is_pending(self, chat_id: str, model: str) -> bool:
        """Return whether the model of a chat's first reply is about to write the title."""
        entry = self._pages.manager.register.find(model)
        return chat_id in self._tasks and entry is not None and entry.card is not None and self._is_on(entry.card.plan)

    def _is_on(self, plan: MemoryPlan) -> bool:
        return self._setting == "on" or (self._setting == "auto" and plan.device != "cpu")

    async def wait(self, chat_id: str, stop: asyncio.Event) -> None:
        """Wait until the title of a chat is written, until it is known that there will be none, or until `stop`."""
        task = self._tasks.get(chat_id)
        if task is None:
            return
        stopped = asyncio.create_task(stop.wait())
        await asyncio.wait({task, stopped}, timeout=TITLE_S, return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()

    async def close(self) -> None:
        """Stop writing titles, at shutdown."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _write(self, owner: str, chat: Chat, question: str, reply: Reply) -> None:
        await reply.ended.wait()
        entry = self._pages.manager.register.find(reply.model)
        if reply.finish_reason not in ("stop", "length") or not reply.text or entry is None or entry.state != "ready":
            return
        try:
            with await self._pages.manager.acquire(entry.name) as served:
                if not self._is_on(served.plan):
                    return
                async with asyncio.timeout(TITLE_S):
                    title = cleaned(await self._generate(served, owner, question, reply.text))
            if title:
                await self._store.call(Chats.retitle, owner, chat.id, chat.title, title)
        except (LocalLLMError, TimeoutError) as error:
            log.info("no title was written chat=%s error=%s", chat.id, error)
        except Exception:
            log.exception("no title was written chat=%s", chat.id)

    async def _generate(self, served: ServedModel, owner: str, question: str, answer: str) -> str:
        asked = ASK.format(question=question[:READ_CHARS], answer=answer[:READ_CHARS])
        settings = {
            "max_tokens": str(TITLE_TOKENS),
            "temperature": "0",
            **({"thinking": "off"} if reasons(served) else {}),
        }
        prompt = await prompt_of(served, [{"role": "user", "content": asked}], settings)
        salt = self._pages.cache_salt(owner)
        options = RequestOptions(priority=PRIORITY, cache_salt=salt, owner=owner, source="chat title")
        async with prompt.generation(served, f"title-{secrets.token_hex(8)}", options) as generation:
            [choice] = await collect(generation)
        return choice.text


def cleaned(text: str) -> str:
    """Return the first line of a model's answer as a title, without quotes and Markdown; empty if nothing is left."""
    line = next((line for line in text.strip().splitlines() if line.strip()), "")
    line = line.translate(ORNAMENT).strip(" \t_'").removeprefix("Title:").strip(" \t_'.")
    if len(line) > MAX_TITLE_CHARS:
        line = f"{line[:MAX_TITLE_CHARS].rpartition(' ')[0] or line[: MAX_TITLE_CHARS - 1]}…"
    return "".join(each for each in line if each.isprintable())
