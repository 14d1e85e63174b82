"""The plain values of this room: a tool, the list of a server's tools, the result of a call, and the errors.

Does not know: the protocol.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from localllm.errors import LocalLLMError, RequestError


class ToolServerFailed(LocalLLMError):
    """A server of tools did not start, did not answer, or broke a bound."""

    status, code, type = 502, "tool_server_failed", "server_error"


class ToolRefused(RequestError):
    """A call that was not run: the tool is gone or has changed, or the arguments do not fit its schema."""

    status, code = 409, "tool_refused"


class McpMissing(LocalLLMError):
    """The package `mcp` is not installed."""

    status, code, type = 501, "mcp_missing", "unavailable_error"


@dataclass(frozen=True)
class ServerTool:
    """One tool of a server."""

    server: str
    name: str
    description: str
    schema: Mapping[str, Any]  # JSON schema of the arguments
    origin: str  # the command or URL of the server

    @cached_property
    def digest(self) -> str:
        """A hash of what the user consented to: the server, the tool, its description and its schema."""
        text = json.dumps([self.origin, self.name, self.description, self.schema], sort_keys=True)
        return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]


@dataclass(frozen=True, slots=True)
class Listing:
    """The tools of a server that can be offered, and why others cannot."""

    tools: tuple[ServerTool, ...] = ()
    refused: tuple[str, ...] = ()

    def find(self, name: str) -> ServerTool | None:
        return next((tool for tool in self.tools if tool.name == name), None)


@dataclass(frozen=True, slots=True)
class CallResult:
    """The result of a call, as text."""

    text: str
    is_error: bool = False  # the tool reports an error; the model reads its text


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of a call that worked or failed, as text for the model."""

    text: str
    fails: Literal["", "tool", "call"] = ""  # "tool": the tool reports an error; "call": the call itself failed
