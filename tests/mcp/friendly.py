"""A server of tools written with the official package, over stdio or HTTP.

python friendly.py                  over stdio
python friendly.py http PORT        over streamable HTTP at http://127.0.0.1:PORT/mcp
"""

import base64
import os
import sys

from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp_types import ImageContent, TextContent

server = MCPServer("friendly", log_level="ERROR")


@server.tool()
def add(a: int, b: int) -> int:
    """Add two whole numbers."""
    return a + b


@server.tool()
def markup() -> str:
    """Return HTML."""
    return "<img src=x onerror=alert(1)><b>bold</b>"


@server.tool()
def picture() -> list[TextContent | ImageContent]:
    """Return a text and a picture of 12,288 bytes."""
    data = base64.b64encode(bytes(12_288)).decode()
    return [TextContent(type="text", text="See:"), ImageContent(type="image", data=data, mime_type="image/png")]


@server.tool()
def fail() -> str:
    """Fail in a way that the model can read."""
    raise ToolError("the disk is full")


@server.tool()
def environment(name: str) -> str:
    """Return a variable of this process."""
    return os.environ.get(name, "not set")


if __name__ == "__main__":
    if sys.argv[1:2] == ["http"]:
        server.run("streamable-http", host="127.0.0.1", port=int(sys.argv[2]))
    else:
        print("friendly is listening", file=sys.stderr)
        server.run("stdio")
