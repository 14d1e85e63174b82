"""What the random walks over an engine share: steps, requests that end early, invariants after each rule, and the
tokens of all requests at the end."""

from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.engine.harness import check_invariants
from tests.fake_runner import expected_output


class EngineMachine(RuleBasedStateMachine):
    """A walk whose `initialize` rule sets `engine`. `asked` and `aborted`: requests by name, each with its prompt and
    max_tokens first."""

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

    @rule(count=st.integers(1, 6))
    def step(self, count):
        for _ in range(count):
            self.engine.loop.step()

    def expected(self, prompt, max_tokens):
        """Return the tokens of a request that was asked for so."""
        return expected_output(prompt, max_tokens, vocab_size=4)

    def teardown(self):
        if not hasattr(self, "engine"):
            return
        self.engine.run()
        for name, asked in self.asked.items():
            assert name in self.engine.endings  # I20: exactly one ending
            expected, got = self.expected(*asked), self.engine.tokens.get(name, [])
            if name in self.aborted and self.engine.endings[name][0].finish_reason == "abort":
                assert got == expected[: len(got)]
            else:
                assert got == expected  # I21, I22
        for pool in self.engine.scheduler.ledger.pools:
            assert pool.num_free == pool.capacity  # I6

    @invariant()
    def the_ledger_holds(self):
        if hasattr(self, "engine"):
            check_invariants(self.engine)
