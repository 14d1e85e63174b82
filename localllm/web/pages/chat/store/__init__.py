"""Chats on disk: SQLite with full-text search, a tree of messages for each chat.

records.py  plain values and errors                  opening.py  the file: schema, migrations, damaged files
tree.py     which messages of a tree are shown       chats.py    operations on chats and messages
finding.py  the list, and the search                 thread.py   the one thread that runs all of them
Does not know: HTTP, templates, the engine.
"""

from localllm.web.pages.chat.store.chats import Chats
from localllm.web.pages.chat.store.records import Branch, Chat, Found, Message
from localllm.web.pages.chat.store.thread import ChatStore

__all__ = ["Branch", "Chat", "ChatStore", "Chats", "Found", "Message"]
