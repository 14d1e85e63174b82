"""Reads a kernel's disassembly: its instructions, and the loops they form.

A loop is a natural loop of the control flow: a branch back to a block that every way to it passes, and all blocks from
which that branch is reached without passing there again. Addresses alone mislead: ptxas moves the slow side of a
barrier wait behind the end of the kernel, and its branch back into the loop spans everything in between.
Does not know: Triton, budgets.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

_INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,6})\*/\s+(@!?\w+\s+)?([A-Z][A-Z0-9_]*)([^;]*);")
_PREDICATE = re.compile(r"^[.\w]*\s+!?U?P\d")
_STORES_ZERO = re.compile(r"\[R1\b[^\]]*\], RZ\b")
_WAITING = {"SYNCS", "BRA", "NANOSLEEP", "YIELD", "NOP"}


@dataclass(frozen=True, slots=True)
class Instruction:
    address: int
    opcode: str  # without modifiers: HGMMA, LDG, BRA
    target: int | None  # of a branch
    may_pass: bool  # whether the next instruction can follow

    @property
    def ends_block(self) -> bool:
        return self.target is not None or not self.may_pass


def instructions(sass: str) -> list[Instruction]:
    """All instructions of a kernel, in the order of their addresses."""
    found = []
    for at, guard, opcode, rest in _INSTRUCTION.findall(sass):
        jump = re.search(r"0x([0-9a-f]+)", rest) if opcode == "BRA" else None
        leaves = opcode in ("BRA", "EXIT", "RET", "BRX", "JMX")
        conditional = bool(guard) or (opcode == "BRA" and bool(_PREDICATE.match(rest)))
        found.append(Instruction(int(at, 16), opcode, int(jump[1], 16) if jump else None, conditional or not leaves))
    return found


def num_spills(sass: str) -> int:
    """How often a register goes to local memory or comes back.

    Not counted are stores of zero, which save nothing: ptxas 12.9 puts one beside every TMA load for sm_120, an
    argument of the call that would write another program's shared memory, and that no tile of ours reaches.
    """
    return sum(
        name == "LDL" or (name == "STL" and not _STORES_ZERO.search(rest))
        for _, _, name, rest in _INSTRUCTION.findall(sass)
    )


def hottest_loop(code: list[Instruction]) -> list[Instruction]:
    """The innermost loop with tensor-core instructions that has most of them; without any, the longest innermost one.

    Of several with as many, the shortest: the others are the same with masks, for the edges.

    Loops that only wait do not count as loops. Empty where there is none.
    """
    loops = [loop for loop in _loops(code) if not {code[i].opcode for i in loop} <= _WAITING]
    with_mma = [loop for loop in loops if _mmas(code, loop)]
    candidates = with_mma or loops
    innermost = [loop for loop in candidates if not any(other < loop for other in candidates)]
    sign = -1 if with_mma else 1
    hottest = max(innermost, key=lambda loop: (_mmas(code, loop), sign * len(loop)), default=frozenset())
    return [code[i] for i in sorted(hottest)]


def before_wait(code: list[Instruction]) -> list[Instruction]:
    """The instructions before the first wait for the previous kernel (griddepcontrol.wait); none where none waits."""
    places = [place for place, instruction in enumerate(code) if instruction.opcode == "ACQBULK"]
    return code[: places[0]] if places else []


def is_handed_over(sass: str) -> bool:
    """Return whether what all threads store before an atomic addition is seen by all threads of the program that adds
    after it: a barrier and a fence of the whole GPU before the addition; an invalidated L1 and a barrier after it."""
    steps = [
        f"{name}{rest.split()[0] if rest.startswith('.') else ''}" for _, _, name, rest in _INSTRUCTION.findall(sass)
    ]
    add = next((place for place, step in enumerate(steps) if step.startswith("ATOMG")), None)
    if add is None:
        return False
    stores = [place for place, step in enumerate(steps[:add]) if step.startswith("STG")]
    loads = [place for place, step in enumerate(steps) if place > add and step.startswith("LDG")]
    if not stores or not loads:
        return False
    before, after = steps[stores[-1] : add], steps[add : loads[0]]
    fence = next((place for place, step in enumerate(before) if re.match(r"MEMBAR\.\w+\.GPU", step)), 0)
    invalidation = after.index("CCTL.IVALL") if "CCTL.IVALL" in after else len(after)
    return any(step.startswith("BAR.SYNC") for step in before[:fence]) and any(
        step.startswith("BAR.SYNC") for step in after[invalidation:]
    )


def count(code: Iterable[Instruction]) -> Mapping[str, int]:
    names = [instruction.opcode for instruction in code]
    return {name: names.count(name) for name in sorted(set(names))}


def _mmas(code: list[Instruction], loop: frozenset[int]) -> int:
    return sum("MMA" in code[i].opcode for i in loop)


def _loops(code: list[Instruction]) -> list[frozenset[int]]:
    """Each loop as the places of its instructions in `code`; loops with one head are one."""
    blocks = _blocks(code)
    head_of = {start: number for number, (start, _) in enumerate(blocks)}
    by_address = {instruction.address: place for place, instruction in enumerate(code)}
    successors: list[list[int]] = []
    for _, end in blocks:
        last, after = code[end - 1], []
        if last.target in by_address:
            after.append(head_of[by_address[last.target]])
        if last.may_pass and end < len(code):
            after.append(head_of[end])
        successors.append(after)
    predecessors: list[list[int]] = [[] for _ in blocks]
    for block, after in enumerate(successors):
        for next_block in after:
            predecessors[next_block].append(block)

    bodies: dict[int, set[int]] = {}
    dominators = _dominators(predecessors)
    for block, after in enumerate(successors):
        for head in after:
            if head in dominators[block]:
                body = bodies.setdefault(head, {head})
                _collect(block, predecessors, body)
    return [frozenset(i for block in body for i in range(*blocks[block])) for body in bodies.values()]


def _blocks(code: list[Instruction]) -> list[tuple[int, int]]:
    """(first, behind the last) place of every straight run of instructions"""
    targets = {instruction.target for instruction in code}
    starts = [
        place
        for place, instruction in enumerate(code)
        if place == 0 or instruction.address in targets or code[place - 1].ends_block
    ]
    return list(zip(starts, [*starts[1:], len(code)], strict=True))


def _dominators(predecessors: list[list[int]]) -> list[set[int]]:
    """For each block the blocks that every way from the entry to it passes; nothing for one that no way reaches."""
    reached, todo = {0}, [0]
    while todo:
        block = todo.pop()
        for next_block, before in enumerate(predecessors):
            if block in before and next_block not in reached:
                reached.add(next_block)
                todo.append(next_block)
    everything = set(reached)
    dominators = [
        {0} if block == 0 else set(everything) if block in reached else set() for block in range(len(predecessors))
    ]
    changed = True
    while changed:
        changed = False
        for block in sorted(reached - {0}):
            ways = [dominators[before] for before in predecessors[block] if before in reached]
            found = set.intersection(*ways) | {block}
            changed |= found != dominators[block]
            dominators[block] = found
    return dominators


def _collect(block: int, predecessors: list[list[int]], body: set[int]) -> None:
    """Adds to a loop's body all blocks from which `block` is reached; the head, already in it, ends the search."""
    todo = [block]
    while todo:
        block = todo.pop()
        if block not in body:
            body.add(block)
            todo += predecessors[block]
