"""Chats on disk: SQLite with full-text search, a tree of messages for each chat.

records.py  plain values and what can go wrong       opening.py  the file: its schema, its migrations, its accidents
tree.py     which messages are shown of a tree       chats.py    what can be done with chats and messages
finding.py  the list, and the search                 thread.py   the one thread in which all of it happens
Does not know: HTTP, templates, the engine.
"""

from localllm.web.store.chats import Chats
from localllm.web.store.records import Branch, Chat, Found, Message
from localllm.web.store.thread import ChatStore

__all__ = ["Branch", "Chat", "ChatStore", "Chats", "Found", "Message"]
