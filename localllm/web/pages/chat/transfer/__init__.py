"""Chats as files: export, import, saved pages, previews."""
