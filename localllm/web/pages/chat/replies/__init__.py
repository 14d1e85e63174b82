"""Replies: the prompt, the model that answers, the text while it grows, the title."""
