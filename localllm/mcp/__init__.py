"""Tools of other programs: the client of the Model Context Protocol (MCP). A server offers tools, the model calls them.

values.py       a tool and its name, a result and its text, the errors: plain values
schemas.py      bounds of a tool's schema, and the check of a call's arguments
stdio.py        a server as a child process: its pipes, with bounds
watcher.py      the process between, which ends the server with this one
connection.py   one running server, a child process or at a URL: its session, its tools, one call
web_search.py   a server of our own: search through a SearXNG, read a page
servers.py      all servers of this machine's user: started at first use, ended when idle

The package `mcp` is the client; it is imported when the first server is used, and optional.
Does not know: chats, consent, HTTP of ours.
"""
