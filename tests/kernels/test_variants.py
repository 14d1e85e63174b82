"""The lists of compiled variants are complete: they have every kernel that the package launches."""

from __future__ import annotations

import ast
import importlib
import pkgutil
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("triton")
from triton.runtime.jit import JITFunction

import localllm.kernels
from localllm.kernels.launch import INTERPRETED
from tests.kernels.ahead_of_time import all_variants
from tests.kernels.test_ahead_of_time import QUICK

pytestmark = pytest.mark.skipif(INTERPRETED, reason="the interpreter replaces the compiler")


def functions() -> Iterator[Any]:
    """Yield every @triton.jit function of the package."""
    for info in pkgutil.walk_packages(localllm.kernels.__path__, "localllm.kernels."):
        if ".cpu" not in info.name:
            values = vars(importlib.import_module(info.name)).values()
            yield from {id(each): each for each in values if isinstance(each, JITFunction)}.values()


def called_by(function: Any) -> Iterator[Any]:
    """Yield the functions that a kernel calls, by the names that its module has for them."""
    for node in ast.walk(function.parse()):
        if isinstance(node, ast.Name) and isinstance(found := function.fn.__globals__.get(node.id), JITFunction):
            yield found


def kernels() -> dict[int, Any]:
    """Return the functions that no other one calls: those that are launched."""
    found = {id(function): function for function in functions()}
    helpers = {id(called) for function in found.values() for called in called_by(function) if called is not function}
    return {key: function for key, function in found.items() if key not in helpers}


def test_every_kernel_is_compiled() -> None:
    """By the quick tests, for the GPU whose budgets are held."""
    launched = kernels()
    assert len(launched) > 30
    compiled = {id(v.kernel) for v in all_variants() if v.often and QUICK in v.archs}
    assert not [kernel.__name__ for key, kernel in launched.items() if key not in compiled]
    assert not {v.kernel.__name__ for v in all_variants() if id(v.kernel) not in launched}


def test_every_kernel_is_compiled_for_amd() -> None:
    compiled = {id(v.kernel) for v in all_variants() if v.hip}
    assert not [kernel.__name__ for key, kernel in kernels().items() if key not in compiled]
