"""Tools of other programs: the client of the Model Context Protocol (MCP). A server offers tools, the model calls them.

values.py       a tool, a result, the errors: plain values
schemas.py      bounds of a tool's schema, and the check of a call's arguments
results.py      the content of a result as text
naming.py       the names by which the model calls tools of several servers
stdio.py        a server as a child process: its pipes, with bounds
watcher.py      the process between, which ends the server with this one
http.py         a server at a URL, with bounds
connection.py   one running server: its session, its tools, one call
servers.py      all servers of this machine's user: started at first use, ended when idle

The package `mcp` is the client; it is imported when the first server is used, and optional.
Does not know: chats, consent, HTTP of ours.
"""
