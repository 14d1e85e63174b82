"""A chat as a person sees it: messages with roles, texts and versions, and what can be done with each.

`ChatPage` works as a browser without scripts unless `scripted` is set: then the answer is what htmx swaps in, and the
page follows it. What the pages' markup looks like is known here, so that tests ask for roles and texts.
"""

from __future__ import annotations

import html
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser
from typing import Any, Self

import httpx

SCRIPTED = {"hx-request": "true"}
VOID = {"area", "br", "col", "hr", "img", "input", "link", "meta", "path", "wbr"}


@dataclass
class Node:
    """An element with its attributes and children; a child that is a string is text."""

    tag: str
    attrs: dict[str, str]
    children: list[Node | str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """The text with its white space folded."""
        return " ".join("".join(self._texts()).split())

    def _texts(self) -> Iterator[str]:
        for child in self.children:
            yield from [child] if isinstance(child, str) else child._texts()

    def all(self, tag: str = "", **attrs: str) -> list[Node]:
        """Return the elements below this one, in order; `attrs` are attributes or, with `class_`, one class."""
        found = []
        for child in self.children:
            if isinstance(child, Node):
                is_one = tag in ("", child.tag) and all(child.has(name, value) for name, value in attrs.items())
                found += ([child] if is_one else []) + child.all(tag, **attrs)
        return found

    def has(self, name: str, value: str) -> bool:
        return value in self.attrs.get("class", "").split() if name == "class_" else self.attrs.get(name) == value

    def first(self, tag: str = "", **attrs: str) -> Node:
        found = self.all(tag, **attrs)
        assert found, f"the page has no {tag} {attrs}"
        return found[0]


class _Tree(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.root = Node("", {})
        self.open = [self.root]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        node = Node(tag, {name: value or "" for name, value in attrs})
        self.open[-1].children.append(node)
        if tag not in VOID:
            self.open.append(node)

    def handle_endtag(self, tag: str) -> None:
        while any(node.tag == tag for node in self.open) and self.open.pop().tag != tag:
            pass

    def handle_data(self, data: str) -> None:
        self.open[-1].children.append(data)


def parse(page: str) -> Node:
    tree = _Tree()
    tree.feed(page)
    return tree.root


def stream_urls(page: str) -> list[str]:
    """Return the addresses that the page follows, in order."""
    return [html.unescape(url) for url in re.findall(r'hx-sse:connect="([^"]+)"', page)]


def stream_url(turn: str) -> str:
    """Return the first address that the page follows."""
    return stream_urls(turn)[0]


def listen(browser: httpx.Client, url: str, seconds: float = 10.0) -> str:
    """Everything a stream says until it ends, or until the time is up."""
    said, end = "", time.monotonic() + seconds
    with browser.stream("GET", url) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        for text in response.iter_text():
            said += text
            if time.monotonic() > end:
                break
    return said


def assert_refused(response: httpx.Response, status: int, *says: str) -> None:
    """The answer has this status and says why."""
    assert response.status_code == status, response.text
    for text in says:
        assert text in html.unescape(response.text), text


class Message:
    """One message that the page shows."""

    def __init__(self, chat: ChatPage, node: Node) -> None:
        self.chat, self.node = chat, node
        self.id = node.attrs["id"].removeprefix("m-")
        self.url = f"{chat.path}/m/{self.id}"

    @property
    def is_reply(self) -> bool:
        return self.node.has("class_", "message--assistant")

    @property
    def text(self) -> str:
        """What was said, as it is rendered, without its white space."""
        found = self.node.all(class_="prose" if self.is_reply else "message__text")
        return found[0].text if found else ""

    @property
    def version(self) -> str:
        """For example "2/3"; "" of a message with one version."""
        found = self.node.all(class_="versions__count")
        return found[0].text.removeprefix("Version ") if found else ""

    @property
    def offers(self) -> set[str]:
        """The last words of the addresses to which its buttons and links lead."""
        names = ("action", "formaction", "href", "hx-post")
        found = {node.attrs[name] for node in self.node.all() for name in names if name in node.attrs}
        return {url.rpartition("/")[2] for url in found if url.startswith(self.url)}

    def says(self, text: str) -> bool:
        """Whether the message, with its author, figures and notices, contains a text."""
        return text in self.node.text

    @property
    def raw(self) -> str:
        return self.chat.browser.get(f"{self.url}/raw").text

    def do(self, action: str, *, scripted: bool = False, **form: Any) -> httpx.Response:
        """Press one of its buttons. The page shows what comes of it, unless it is refused."""
        return self.chat.post(f"{self.url}/{action}", scripted=scripted, **form)


class ChatPage:
    def __init__(self, browser: httpx.Client, path: str = "/") -> None:
        self.browser, self.path, self.html = browser, path, ""

    @property
    def id(self) -> str:
        """The id of the open chat; "" where none is open."""
        return self.path[3:] if self.path.startswith("/c/") else ""

    def get(self, path: str = "", **params: str) -> Self:
        """Open the page anew, or another one."""
        return self._shown(self.browser.get(path or self.path, params=params or None))

    def post(self, path: str, *, scripted: bool = False, files: Any = None, **form: Any) -> httpx.Response:
        headers = SCRIPTED if scripted else {}
        response = self.browser.post(path, data=form, files=files, headers=headers)
        if response.is_success:
            self._shown(response)
        return response

    def try_to_send(self, message: str, *, scripted: bool = False, **form: Any) -> httpx.Response:
        """Send a message that may be refused."""
        form = {"message": message, **({"conversation": self.id} if self.id else {}), **form}
        return self.post("/chat", scripted=scripted, **form)

    def send(self, message: str, **form: Any) -> Self:
        """Send a message, and without scripts wait for the reply."""
        response = self.try_to_send(message, **form)
        assert response.is_success, response.text
        return self

    def undo(self) -> str:
        """Bring back what was deleted; return the address of the button."""
        (url,) = {node.attrs["action"] for node in self.tree.all("form") if "/undo/" in node.attrs.get("action", "")}
        response = self.post(url)
        assert response.is_success, response.text
        return url

    def listen(self, number: int = 0) -> str:
        """Return all that one of the streams says which the page follows."""
        return listen(self.browser, stream_urls(self.html)[number])

    def _shown(self, response: httpx.Response) -> Self:
        path = response.headers.get("hx-replace-url") or response.headers.get("hx-redirect") or response.url.path
        if path.startswith("/c/") and path.count("/") == 2:
            self.path = path.partition("?")[0]
        self.html = response.text
        return self

    @property
    def tree(self) -> Node:
        return parse(self.html)

    @property
    def title(self) -> str:
        return self.tree.first("h1").text

    @property
    def messages(self) -> list[Message]:
        return [Message(self, node) for node in self.tree.all("article")]

    @property
    def urls(self) -> list[str]:
        return [message.url for message in self.messages]

    @property
    def question(self) -> Message:
        """The last message of the person."""
        return [message for message in self.messages if not message.is_reply][-1]

    @property
    def reply(self) -> Message:
        """The last message of the model."""
        return [message for message in self.messages if message.is_reply][-1]

    def shows(self, text: str) -> bool:
        """Whether a text is on the page, in a field of a form too."""
        return text in self.tree.text

    def fields(self, name: str) -> list[str]:
        """The values of the fields of this name: typed, chosen or hidden; of boxes those that are checked."""
        found = []
        for node in self.tree.all(name=name):
            if node.tag == "select":
                found += [option.attrs.get("value", option.text) for option in node.all("option", selected="")][:1]
            elif node.tag == "textarea":
                found.append("".join(node._texts()).removeprefix("\n"))
            elif node.attrs.get("type") not in ("checkbox", "radio") or "checked" in node.attrs:
                found.append(node.attrs.get("value", ""))
        return found

    def field(self, name: str) -> str:
        """The value of the first field of this name."""
        return self.fields(name)[0]
