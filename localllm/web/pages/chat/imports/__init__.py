"""Chats from files: our own exports, OpenAI's messages, and the exports of ChatGPT, Open WebUI and LM Studio.

files.py       a file as chats: JSON, or a zip with JSON files, and the format of each
records.py     what every format becomes
own.py, chatgpt.py, open_webui.py, lm_studio.py                       one format each
Does not know: HTTP, where chats are stored.
"""
