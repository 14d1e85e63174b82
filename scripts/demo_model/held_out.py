"""Questions that are excluded from the training text, word for word, so that a test can ask them.

Each is (question, word that a right answer contains). corpus.py never writes any of them, also not with a polite
prefix; tests/models/test_demo_model.py asks them greedily.
"""

import re

HELD_OUT: list[tuple[str, str]] = [
    ("What is paged attention in simple words?", "block"),
    ("Could you explain the KV cache to me please?", "keys and values"),
    ("Why do we need continuous batching?", "step"),
    ("How does prefix caching work exactly?", "hash|prefix|reuse"),
    ("I don't understand chunked prefill.", "prompt"),
    ("What does top_p do?", "likely"),
    ("How can I launch the localllm server?", "localllm up"),
    ("How can I see the live dashboard?", "/dashboard"),
    ("Which base url should I use?", "http://127.0.0.1:8000/v1"),
    ("Does localllm collect my chats?", "machine"),
    ("How can I test the speed of a model?", "localllm bench"),
    ("What model am I talking to?", "demo model"),
    ("Hi, how are you today?", "well"),
    ("Tell me the capital city of Japan.", "Tokyo"),
    ("What is 6 + 7?", "13"),
    ("Please write a haiku about the moon.", "moon"),
    ("Write a function that reverses a string.", "[::-1]"),
    ("Who is the king of Norway?", "do not know"),
    ("What is a good way to see how busy the engine is?", "/dashboard"),
    ("My laptop has no graphics card, can I still use localllm?", "not required"),
]

JSON_HELD_OUT = "Give me a JSON object with name Clara, age 27 and city Rome."


def normal_form(text: str) -> str:
    """Return the words of a question without case and punctuation, for comparing questions."""
    return " ".join(re.findall(r"[a-z0-9+_/]+", text.lower()))


HELD_OUT_FORMS = frozenset(normal_form(question) for question, _ in [*HELD_OUT, (JSON_HELD_OUT, "")])
