"""The list of chats: search, rename, pin, archive, and the list behind Ctrl K."""
