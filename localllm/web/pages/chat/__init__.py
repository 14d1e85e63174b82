"""The chat page: conversations, replies as they are written, and what is shown of them."""
