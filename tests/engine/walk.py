"""What the random walks over an engine share: requests that end early, and the invariants after each step."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.engine.harness import check_invariants


class EngineMachine(RuleBasedStateMachine):
    """A walk whose `initialize` rule sets `engine`. `asked` and `aborted`: requests by name."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: dict[str, Any] = {}
        self.aborted: set[str] = set()

    @precondition(lambda self: self.asked)
    @rule(which=st.integers(0, 30))
    def abort(self, which):
        name = sorted(self.asked)[which % len(self.asked)]
        self.aborted.add(name)
        self.engine.loop.cancel(name)

    @invariant()
    def the_ledger_holds(self):
        if hasattr(self, "engine"):
            check_invariants(self.engine)
