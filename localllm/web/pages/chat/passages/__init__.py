"""Passages of long files: plain functions on texts, numbers and vectors.

cut.py       a text as passages               question.py  a question as a full-text query
ranking.py   rankings joined, and what fits   vectors.py   embeddings as bytes, and their similarity
Does not know: HTTP, SQL, models, chats.
"""
