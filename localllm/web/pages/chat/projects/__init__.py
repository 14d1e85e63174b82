"""Projects: chats with shared files and settings."""
