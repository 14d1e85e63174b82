"""Tools of MCP servers that a request offers: entries of `tools` with the type `mcp`, in OpenAI's interface.

A client names servers that the owner of this machine has added; it cannot add any. A tool is offered if its calls can
run: if an admin always allows it, if the server's table leaves approval to the client and the client asks for it, or if
the table lets every call run.
Does not know: how calls are run (mcp_rounds.py), items, the model.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from localllm.config.mcp_servers import McpServer
from localllm.errors import InvalidParameter, RequestError
from localllm.mcp.values import Listing, ServerTool, function_names
from localllm.serving.answers.tool_calls import ConsentPolicy, Decisions, may_use
from localllm.web.access.caller import mcp_of, owner_of, require
from localllm.web.api.exchange import ApiRequest
from localllm.web.api.fields import FieldRules, ListOf, Refused
from localllm.web.api.hints import hints_of
from localllm.web.api.reading import read_object
from localllm.web.api.tools import function_tool

_ADDED = "Only servers that the owner of this machine has added are used: server_label names one of them."
RULES = FieldRules(
    hints=hints_of("responses", "mcp."),
    refused={
        "server_url": Refused(_ADDED),
        "connector_id": Refused(_ADDED),
        "tunnel_id": Refused(_ADDED),
        "headers": Refused("The owner of this machine sets the headers of a server."),
        "authorization": Refused("The owner of this machine sets the headers of a server."),
        "allowed_callers": Refused("Only the model calls tools.", ListOf(frozenset({"direct"}))),
    },
)
"""Rules of an entry with the type `mcp`."""


class ToolNotAllowed(RequestError):
    """A tool that requests to the API may not call."""

    status, code, type = 403, "tool_not_allowed", "permission_error"


class ToolFilter(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    tool_names: list[str] | None = None
    read_only: bool | None = None


class ApprovalFilter(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    always: ToolFilter | None = None
    never: ToolFilter | None = None


class McpEntry(msgspec.Struct, kw_only=True):
    """One entry of `tools` with the type `mcp`."""

    type: str
    server_label: str
    allowed_tools: list[str] | ToolFilter | None = None
    require_approval: str | ApprovalFilter | None = None


@dataclass(frozen=True, slots=True)
class OfferedTool:
    """A tool that is offered. `asks`: the client approves each call."""

    tool: ServerTool
    asks: bool


@dataclass(frozen=True, slots=True)
class McpOffer:
    """The offered tools of all servers of a request, by the name that the model uses."""

    by_name: Mapping[str, OfferedTool] = field(default_factory=dict)
    labels: Sequence[str] = ()
    warnings: Sequence[str] = ()

    def functions(self) -> list[dict[str, Any]]:
        """Return the tools in the format that templates expect."""
        return [
            function_tool(name, each.tool.description, dict(each.tool.schema), name)
            for name, each in self.by_name.items()
        ]

    def listed(self) -> dict[str, list[dict[str, Any]]]:
        """Return the tools of each server as clients see them."""
        found: dict[str, list[dict[str, Any]]] = {label: [] for label in self.labels}
        for each in self.by_name.values():
            found[each.tool.server].append({
                "name": each.tool.name,
                "description": each.tool.description,
                "input_schema": each.tool.schema,
                "annotations": None,
            })  # fmt: skip
        return found

    def find(self, label: str, name: str) -> OfferedTool | None:
        found = self.names_of(label, name)
        return self.by_name[found[0]] if found else None

    def names_of(self, label: object, name: object = None) -> list[str]:
        """Return the names that the model uses for the tools of a server, or for one of them."""
        return [
            function
            for function, each in self.by_name.items()
            if each.tool.server == label and name in (None, each.tool.name)
        ]


NO_MCP = McpOffer()


@dataclass(frozen=True, slots=True)
class _Terms:
    """The wishes of an entry. `named`: the tools that it names, which must not be left out silently."""

    server: McpServer
    where: str
    wanted: Collection[str] | None
    never: Collection[str]
    asks_others: bool
    named: Collection[str]

    def asks(self, tool: str) -> bool:
        return self.asks_others and tool not in self.never


async def mcp_offer(request: ApiRequest, tools: Sequence[Mapping[str, Any]], taken: Collection[str]) -> McpOffer:
    """Return the tools of the servers that a request names, which are started if they do not run. `taken`: names of the
    request's own functions.

    Raises the `RequestError` that names the wrong field, `MissingScope`, `ToolNotAllowed`, `ToolServerFailed`.
    """
    terms, warnings = _read(request, tools)
    if not terms:
        return NO_MCP
    servers = mcp_of(request.app)
    listings = await asyncio.gather(*(servers.tools(each.server.name) for each in terms))
    decisions: Decisions = request.app.state["tool_decisions"]
    of_admin, own = ConsentPolicy(await decisions("")), ConsentPolicy(await decisions(owner_of(request)))
    found: list[OfferedTool] = []
    for each, listing in zip(terms, listings, strict=True):
        offered, left_out = _offered(each, listing, of_admin, own)
        found += offered
        if left_out:
            warnings.append(f"{each.where}: tools that are not allowed here are left out: {', '.join(left_out)}")
    asking = {id(each.tool): each for each in found}
    by_name = function_names([each.tool for each in found], taken)
    labels = [each.server.name for each in terms]
    return McpOffer({name: asking[id(tool)] for name, tool in by_name.items()}, labels, warnings)


def _read(request: ApiRequest, tools: Sequence[Mapping[str, Any]]) -> tuple[list[_Terms], list[str]]:
    terms: list[_Terms] = []
    warnings: list[str] = []
    for number, tool in enumerate(tools):
        if tool.get("type") != "mcp":
            continue
        where = f"tools[{number}]"
        entry, more = read_object(tool, McpEntry, RULES, f"{where}.")
        terms.append(_terms(_server(request, entry.server_label, where), entry, where))
        warnings += more
        if sum(each.server.name == entry.server_label for each in terms) > 1:
            what = f"Two entries have the server_label {entry.server_label!r}."
            raise InvalidParameter(what, hint="Send one entry for each server.", param=f"{where}.server_label")
    return terms, warnings


def _server(request: ApiRequest, label: str, where: str) -> McpServer:
    """Return the server with this name. Raises if it is not there, or not for this request."""
    owner, param = owner_of(request), f"{where}.server_label"
    servers = mcp_of(request.app)
    server = servers.find(label)
    if server is None or not server.enabled:
        names = [each.name for each in servers.servers if each.enabled and each.api != "off" and may_use(owner, each)]
        raise InvalidParameter(
            f"There is no MCP server {label[:64]!r} here.",
            f"Configured: {', '.join(names) or 'none that this request may use'}.",
            "The owner of this machine adds servers in Settings, Tools, or in config.toml.",
            param=param,
        )
    require(request, server.scope)
    if server.api == "off":
        hint = f'Set api = "consent" in [mcp.servers.{label}] of config.toml.'
        raise ToolNotAllowed(f"Requests to the API may not use the server {label}.", hint=hint, param=param)
    return server


def _terms(server: McpServer, entry: McpEntry, where: str) -> _Terms:
    wanted, approval = entry.allowed_tools, entry.require_approval
    if isinstance(wanted, ToolFilter):
        wanted = _names(wanted, f"{where}.allowed_tools")
    param = f"{where}.require_approval"
    if isinstance(approval, ApprovalFilter):
        always, never = (set(_names(each, param) or ()) for each in (approval.always, approval.never))
        if both := sorted(always & never):
            raise InvalidParameter(f"{param} has {both[0]!r} in always and in never.", param=param)
        return _Terms(server, where, wanted, never, asks_others=True, named={*(wanted or ()), *always, *never})
    if approval not in (None, "always", "never"):
        known = "Known: always, never, or an object with lists of tools for both."
        raise InvalidParameter(f"Unknown require_approval {approval!r}.", known, param=param)
    return _Terms(server, where, wanted, (), asks_others=approval != "never", named=wanted or ())


def _names(given: ToolFilter | None, param: str) -> list[str] | None:
    if given is not None and given.read_only is not None:
        what = f"'{param}.read_only' is not supported."
        raise InvalidParameter(
            what, "What servers say about their tools is not trusted.", "Use tool_names.", param=param
        )
    return given.tool_names if given is not None else None


def _offered(
    terms: _Terms, listing: Listing, of_admin: ConsentPolicy, own: ConsentPolicy
) -> tuple[list[OfferedTool], list[str]]:
    """Return the offered tools, and the names of the tools that are left out."""
    server = terms.server
    if missing := [name for name in terms.named if listing.find(name) is None]:
        raise InvalidParameter(
            f"{server.name} has no tool {missing[0][:64]!r}.",
            f"Its tools: {', '.join(tool.name for tool in listing.tools) or 'none'}.",
            param=terms.where,
        )
    offered, left_out = list[OfferedTool](), list[str]()
    for tool in listing.tools:
        if terms.wanted is not None and tool.name not in terms.wanted:
            continue
        asks, key = terms.asks(tool.name), (tool.server, tool.name, tool.digest)
        choice = of_admin.choice(*key)
        runs = server.api == "run" or choice == "always"
        if "never" not in (choice, own.choice(*key)) and (runs or (asks and server.api == "ask")):
            offered.append(OfferedTool(tool, asks))
        else:
            left_out.append(tool.name)
    refused = [name for name in left_out if name in terms.named] or ([] if offered else left_out)
    if refused:
        raise _not_allowed(terms, refused[0])
    return offered, left_out


def _not_allowed(terms: _Terms, tool: str) -> ToolNotAllowed:
    server = terms.server.name
    if terms.server.api == "ask" and not terms.asks(tool):
        why = f"Without approval only tools run that an admin always allows, and {tool} is not one of them."
        hint = 'Send require_approval "always", or always allow the tool in a chat.'
    else:
        why = "An admin has not always allowed it as it is now, or never allows it."
        hint = f'Always allow it in a chat, or set api = "ask" in [mcp.servers.{server}] of config.toml.'
    return ToolNotAllowed(f"Requests to the API may not call {tool} of {server}.", why, hint, param=terms.where)
