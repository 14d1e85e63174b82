"""The chat page: conversations, and replies as they are generated."""
