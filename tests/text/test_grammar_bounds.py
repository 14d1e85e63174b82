"""No schema or grammar ends the process that compiles it: each case runs in a process whose exit is looked at."""

import copy
import json
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

from localllm.errors import InvalidParameter
from localllm.text import grammar_trial
from localllm.text.grammar import LARGE_LEVELS, Grammars
from localllm.text.grammar_levels import levels_of_lark, levels_of_schema
from localllm.text.grammar_trial import GrammarTrials, TrialFailed, TrialUnavailable
from localllm.text.structured import MAX_LEVELS, StructuredOutputsParams
from tests.text.harness import CHAINS, chain, inside, lark
from tests.text.vocabularies import tokenizer

COMPILE = """
import sys, threading
from tests.text.harness import CHAINS, GRAMMARS
from localllm.errors import InvalidParameter
from localllm.text.structured import StructuredOutputsParams
def start():
    asked = StructuredOutputsParams(**CHAINS[sys.argv[1]])
    try:
        print("started", type(GRAMMARS["byte_level"].start(asked)).__name__)
    except InvalidParameter as error:
        print("refused", error)
thread = threading.Thread(target=start)  # as a compiler's: 8 MiB of stack, or what ulimit says
thread.start(), thread.join()
"""


@pytest.mark.parametrize("name", CHAINS)
def test_a_long_chain_ends_no_process(name: str) -> None:
    ended = subprocess.run([sys.executable, "-c", COMPILE, name], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.split()[0] in ("started", "refused"), ended.stdout


def test_levels_follow_references() -> None:
    assert levels_of_schema({"type": "string"}) == levels_of_schema(True) == 1
    assert levels_of_schema(inside({"type": "string"})) == 3
    assert levels_of_schema(chain(500, inside)) >= 1500
    assert levels_of_schema(chain(500, lambda link: {"$ref": "http://a/b" + link["$ref"]})) >= 500
    assert levels_of_schema(chain(500, lambda link: {**inside(link), "$id": "http://a/b"})) >= 1500


def test_levels_of_a_wide_schema_are_few() -> None:
    wide = {f"d{i}": inside({"$ref": f"#/$defs/d{i // 2}"}) for i in range(1, 1000)}
    assert levels_of_schema({"$defs": {**wide, "d0": {"type": "string"}}, "properties": wide}) < 60
    assert levels_of_schema({"$ref": "#"}) == 1


def test_levels_of_rules_count_the_schemas_in_them() -> None:
    text = f"start: a | b\na: %json {json.dumps(chain(300, inside))}\nb: (a (a))\n"
    assert 900 < levels_of_lark(text) < 950
    assert levels_of_lark('a: %json {"a": [\n' * 50) >= 100  # broken: all brackets count


def test_the_bound_is_told_with_its_number() -> None:
    with pytest.raises(InvalidParameter, match=f"limit is {MAX_LEVELS:,}"):
        StructuredOutputsParams(json=chain(MAX_LEVELS // 3 + 10, inside)).to_grammar()


def api(count: int) -> dict[str, Any]:
    """A schema as generated from an OpenAPI document: many objects that refer to each other, some in circles."""
    kinds = {
        f"Kind{i}": {
            "type": "object", "description": "What the API calls a kind (of some sort): " + "words " * 12,
            "properties": {
                "name": {"type": "string", "description": "start: of a line"}, "count": {"type": "integer"},
                "labels": {"type": "array", "items": {"type": "string"}},
                "state": {"anyOf": [{"$ref": f"#/$defs/Kind{i * 7 % count}"}, {"type": "null"}]},
                "parts": {"type": "array", "items": {"$ref": f"#/$defs/Kind{i * 3 % count}"}},
            },
            "required": ["name"], "additionalProperties": False,
        }
        for i in range(count)
    }  # fmt: skip
    return {"$defs": kinds, "$ref": "#/$defs/Kind1"}


def test_the_schema_of_a_whole_api_is_taken() -> None:
    asked = StructuredOutputsParams(json=api(300))
    assert len(asked.to_grammar()) > 140_000
    assert asked.levels() < MAX_LEVELS
    made = tokenizer("byte_level")
    Grammars(made, made.vocab_size, [0]).start(asked)


def test_what_was_asked_keeps_its_grammar_until_it_is_copied() -> None:
    made = tokenizer("byte_level")
    grammars, asked = Grammars(made, made.vocab_size, [0]), StructuredOutputsParams(choice=["yes"])
    grammars.start(asked)
    grammars._compiled.clear()
    grammars._compile = None  # type: ignore[method-assign, assignment]
    grammars.start(asked)
    assert copy.deepcopy(asked).compiled is None
    assert pickle.loads(pickle.dumps(asked)) == asked


# The child ---------------------------------------------------------------------------------------------------------


class Words:
    tokens, special_token_ids, eos_token_ids, bos_token_id = (
        [b"<e>", *(bytes([i]) for i in range(256))],
        [0],
        (0,),
        None,
    )


@pytest.fixture
def trials() -> Iterator[GrammarTrials]:
    made = GrammarTrials(Words, {})
    yield made
    made.close()


def test_a_trial_says_what_the_compiler_says(trials: GrammarTrials) -> None:
    assert trials.run('start: "a"') is None
    assert "other" in str(trials.run("start: other"))


def test_a_child_that_crashes_is_replaced(trials: GrammarTrials, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_trial, "STACK_BYTES", 2**20)
    with pytest.raises(TrialFailed, match="crashes"):
        trials.run(lark(9000))
    assert trials.run('start: "a"') is None


def test_a_child_that_is_stuck_is_killed_and_replaced(trials: GrammarTrials, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_trial, "WALL_S", 0.5)
    assert trials.run('start: "a"') is None
    assert trials._child is not None
    stuck = trials._child.process.pid
    os.kill(stuck, signal.SIGSTOP)
    with pytest.raises(TrialFailed, match=r"0\.5 s"):
        trials.run('start: "b"')
    monkeypatch.undo()
    assert trials.run('start: "a"') is None
    assert trials._child.process.pid != stuck


def test_a_compile_without_end_is_ended_by_its_own_clock(
    trials: GrammarTrials, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_trial, "CPU_S", 0.02)
    with pytest.raises(TrialFailed, match=r"0\.02 s"):
        trials.run(lark(9000, '"a" ', ' "b"'))


def test_a_child_that_was_ended_by_others_is_replaced(trials: GrammarTrials) -> None:
    assert trials.run('start: "a"') is None
    assert trials._child is not None
    trials._child.process.kill()
    trials._child.process.wait()
    assert trials.run('start: "a"') is None


def test_the_child_ends_with_its_owner(trials: GrammarTrials) -> None:
    trials.run('start: "a"')
    assert trials._child is not None
    child = trials._child.process
    assert child.stdin is not None
    child.stdin.close()  # as when the process that started it is gone
    assert child.wait(10) == 0


def test_without_a_child_large_grammars_are_compiled_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(TrialUnavailable):
        GrammarTrials(Words, {}).run('start: "a"')
    made = tokenizer("byte_level")
    grammars, asked = Grammars(made, made.vocab_size, [0]), StructuredOutputsParams(grammar=lark(LARGE_LEVELS * 10))
    assert grammars.is_large(asked)
    grammars.start(asked)
    assert not grammars.is_large(asked)  # it is kept


def test_gbnf_takes_time_by_its_length_alone() -> None:
    rules = [f'r{i} ::= "a" r{i + 1}' for i in range(2400)]
    began_s = time.process_time()
    StructuredOutputsParams(grammar="\n".join(["root ::= r0", *rules, 'r2400 ::= "c"'])).to_grammar()
    assert time.process_time() - began_s < 2  # 20 s where each rule looks at all others


@pytest.mark.parametrize("text", ["root ::= ", "root ::=", "root ::= # nothing\n", "root ::= |"])
def test_a_grammar_that_says_nothing_is_refused(text: str) -> None:
    with pytest.raises(InvalidParameter, match="rule root is empty"):
        StructuredOutputsParams(grammar=text).to_grammar()
    StructuredOutputsParams(grammar='root ::= "a" | ""').to_grammar()
