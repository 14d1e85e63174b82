"""One road for an answer, for API dialects, the chat page and the offline API.

conversation.py  from messages and tools to the prompt, the parameters and the reader of the answer
generation.py    from requests to events, parsed parts, counts and whole choices
tool_calls.py    calls of MCP servers' tools: who may use them, consent, limits, results that fit into the context
off_loop.py      long work in a thread, so that other streams are not delayed
Does not know: HTTP, any dialect's words, where chats are stored.
"""
