"""Names, schemas and results of tools, as plain values; and what is said where the package is missing."""

import asyncio
from typing import Any

import pytest

from localllm.mcp import servers
from localllm.mcp.schemas import refusal, wrong_argument
from localllm.mcp.values import McpMissing, ServerTool, bounded, function_names, limit_for
from tests.mcp.programs import friendly


def tool(server: str, name: str, description: str = "", origin: str = "x", **schema: Any) -> ServerTool:
    return ServerTool(server, name, description, {"type": "object", **schema}, origin)


def test_names_that_collide_get_the_servers_name_and_all_are_allowed() -> None:
    tools = [tool("a", "read"), tool("b", "read"), tool("b", "write"), tool("b", "typed"), tool("c", "x.y/ö" * 30)]
    names = function_names(tools, taken={"typed"})
    assert list(names)[:4] == ["a_read", "b_read", "write", "b_typed"]
    assert len(list(names)[4]) == 64
    assert list(names)[4].replace("_", "").isalnum()
    odd = [tool("a", "b_c"), tool("a_b", "c"), tool("x", "c"), tool("y", "b_c")]
    assert len(function_names(odd)) == len(odd), "each tool has a name of its own"


def test_the_digest_is_of_all_that_was_consented_to() -> None:
    first = tool("a", "read", "Reads.")
    others = [
        tool("a", "write", "Reads."),
        tool("a", "read", "Reads everything."),
        tool("a", "read", "Reads.", origin="y"),
        tool("a", "read", "Reads.", properties={"path": {}}),
    ]
    assert len({first.digest, *(other.digest for other in others)}) == 5
    assert tool("a", "read", "Reads.").digest == first.digest


DOUBLING = {
    "properties": {"a": {"$ref": "#/$defs/d0"}},
    "$defs": {f"d{n}": {"allOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 2} for n in range(60)} | {"d60": {}},
}
"""Each level doubles the work of a check."""


@pytest.mark.parametrize(
    ("schema", "arguments", "says"),
    [
        ({"properties": {"a": {"$ref": "#/$defs/n"}}, "$defs": {"n": {"type": "integer"}}}, {"a": "x"}, "a: 'x'"),
        ({"properties": {"pattern": {"type": "integer"}}}, {"pattern": "x"}, "pattern: 'x'"),
        ({"properties": {"a": {"const": {"format": "x"}}}}, {"a": {"format": "x"}}, ""),
        ({"properties": {"a": {"pattern": "^(a+)+$"}}}, {"a": "a" * 64 + "!"}, ""),
        ({"additionalProperties": False}, {"a": 1}, "Additional properties"),
        ({"required": ["a"]}, {}, "'a' is a required property"),
        ({"properties": {"a": {"$ref": "#/$defs/gone"}}}, {"a": 1}, "cannot be applied"),
        (DOUBLING, {"a": 1}, "TooManyReferences"),
    ],
)
def test_arguments_are_checked_without_patterns(schema: Any, arguments: Any, says: str) -> None:
    assert refusal({"type": "object", **schema}) == ""
    found = wrong_argument(arguments, {"type": "object", **schema})
    assert says in found
    assert bool(says) == bool(found)


def test_results_are_cut_to_half_the_context() -> None:
    assert [limit_for(tokens) for tokens in (0, 512, 8192, 10**6)] == [2_000, 2_000, 16_384, 64_000]
    cut = bounded("x" * 5000, 2000)
    assert cut.startswith("x" * 2000 + "\n[cut: the result has 5,000 characters")
    assert "5,000 characters, 1,000 are given" in bounded(cut, 1000)
    assert bounded("short", 2000) == "short"


def test_without_the_package_the_command_that_installs_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "find_spec", lambda name: None)
    each = servers.McpServers({"friendly": friendly()})
    with pytest.raises(McpMissing) as caught:
        asyncio.run(each.tools("friendly"))
    assert "localllm[mcp]" in caught.value.hint or "[mcp]" in caught.value.hint
