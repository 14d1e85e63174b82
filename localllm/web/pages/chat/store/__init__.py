"""Chats on disk: SQLite with full-text search, a tree of messages for each chat.

records.py  plain values and errors                  database.py    the file: schema, migrations, damaged files
tree.py     which messages of a tree are shown       chats.py       operations on chats and messages
search.py   the list, and the search                 chat_store.py  the one thread that runs all of them
Does not know: HTTP, templates, the engine.
"""

from localllm.web.pages.chat.store.chat_store import ChatStore
from localllm.web.pages.chat.store.chats import Chats
from localllm.web.pages.chat.store.records import Branch, Chat, Consent, FoundChat, StoredMessage

__all__ = ["Branch", "Chat", "ChatStore", "Chats", "Consent", "FoundChat", "StoredMessage"]
