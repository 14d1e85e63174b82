"""Chats on disk: SQLite with full-text search, a tree of messages for each chat; prompts and projects beside them.

records.py  plain values, errors, trees of messages  database.py    the file: schema, migrations, damaged files
search.py   the lists, and the search                chats.py       operations on chats, messages, consents
tables.py   transactions and deletions               selections.py  operations on several chats
saved_prompts.py  operations on prompts              projects.py    operations on projects
file_passages.py  operations on long files           chat_store.py  the one thread that runs all of them
file_versions.py  several processes and versions at one file: lock, copies before migrations
Does not know: HTTP, templates, the engine.
"""

from localllm.web.pages.chat.store.chat_store import ChatStore
from localllm.web.pages.chat.store.chats import Chats
from localllm.web.pages.chat.store.records import Branch, Chat, Consent, FoundChat, Project, SavedPrompt, StoredMessage

__all__ = ["Branch", "Chat", "ChatStore", "Chats", "Consent", "FoundChat", "Project", "SavedPrompt", "StoredMessage"]
