"""Loops are found by the flow of control, not by the order of addresses."""

from tests.kernels.machine_code import before_wait, count, hottest_loop, instructions, is_handed_over, num_spills


def sass(*lines: str) -> str:
    """As cuobjdump prints it: 16 bytes an instruction; the second half of each stands on a line of its own."""
    return "\n".join(
        f"        /*{16 * place:04x}*/     {line} ;     /* 0x00000000000{place:05x} */\n     /* 0x000fc800078e00ff */"
        for place, line in enumerate(lines)
    )


def hottest(*lines: str) -> list[str]:
    return [instruction.opcode for instruction in hottest_loop(instructions(sass(*lines)))]


def test_opcodes_lose_predicates_and_modifiers() -> None:
    code = instructions(sass("@!P0 LDG.E.128 R4, desc[UR4][R2.64]", "@UP0 UTMALDG.2D [UR8], [UR4]", "EXIT"))
    assert [instruction.opcode for instruction in code] == ["LDG", "UTMALDG", "EXIT"]
    assert count(code) == {"EXIT": 1, "LDG": 1, "UTMALDG": 1}


def test_a_loop_runs_from_its_head_to_the_branch_back() -> None:
    assert hottest("MOV R1, R2", "LDG.E R4, [R2]", "FADD R0, R0, R4", "@P0 BRA 0x10", "STG.E [R6], R0", "EXIT") == [
        "LDG",
        "FADD",
        "BRA",
    ]


def test_a_spill_is_what_saves_a_register_or_brings_it_back() -> None:
    assert num_spills(sass("STL.64 [R1+0x8], R4", "@P0 STL [R1], R5", "LDL R5, [R1]", "EXIT")) == 3
    assert num_spills(sass("STL.64 [R1], RZ &rd=0x1 ?trans1", "CALL.ABS.NOINC R2", "LDG.E R4, [R2]", "EXIT")) == 0


def test_what_runs_before_the_previous_kernel_has_finished() -> None:
    code = instructions(sass("MOV R1, R2", "CCTL.E.PF2 [R2.64]", "ACQBULK", "LDG.E R4, [R2]", "ACQBULK", "EXIT"))
    assert count(before_wait(code)) == {"CCTL": 1, "MOV": 1}
    assert not before_wait(instructions(sass("LDG.E R4, [R2]", "EXIT")))


def test_what_one_program_writes_is_handed_over_to_another() -> None:
    order = [
        "STG.E [R6], R0", "BAR.SYNC.DEFER_BLOCKING 0x0", "@P1 MEMBAR.ALL.CTA", "@P1 MEMBAR.ALL.GPU",
        "@P1 ATOMG.E.ADD.STRONG.GPU PT, R3, [R8], R3", "@P1 CCTL.IVALL", "BAR.SYNC.DEFER_BLOCKING 0x0",
        "@P2 LDG.E.STRONG.GPU R67, [R4]", "EXIT",
    ]  # fmt: skip
    assert is_handed_over(sass(*order))
    for needed in (1, 3, 4, 5, 6):
        assert not is_handed_over(sass(*order[:needed], *order[needed + 1 :])), order[needed]


def test_no_loop() -> None:
    assert hottest("MOV R1, R2", "@!P0 EXIT", "STG.E [R6], R0", "EXIT", "BRA 0x40") == []


def test_waiting_out_of_line_does_not_drag_the_epilogue_in() -> None:
    """As on sm_90: a failed wait goes behind the end of the kernel, spins there and comes back into the loop."""
    loop = hottest(
        "MOV R1, R2",
        "SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R3], R4",  # 0x10, the head
        "@!P0 BRA 0x80",
        "HGMMA.64x16x16.F32.BF16 R32, gdesc[UR48], R32",  # 0x30
        "BRA.U !UP0, 0x10",
        "STG.E [R6], R0",  # 0x50
        "STG.E [R6], R0",
        "EXIT",
        "SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R3], R4",  # 0x80
        "@!P0 BRA 0x80",
        "BRA 0x30",
        "BRA 0xb0",
    )
    assert loop.count("HGMMA") == 1
    assert "STG" not in loop
    assert loop.count("SYNCS") == 2


def test_the_innermost_loop_with_tensor_cores_is_the_hottest() -> None:
    loop = hottest(
        "MOV R1, R2",
        "LDG.E R4, [R2]",  # 0x10: a persistent kernel's outer loop
        "HMMA.16816.F32 R4, R8, R12, R4",  # 0x20
        "IADD3 R2, R2, R3, RZ",
        "@P0 BRA 0x20",
        "HMMA.16816.F32 R4, R8, R12, R4",
        "STG.E [R6], R4",
        "@P1 BRA 0x10",
        "LDG.E R4, [R2]",  # 0x80: longer, and without an MMA
        *["FADD R0, R0, R4"] * 9,
        "@P2 BRA 0x80",
        "EXIT",
    )
    assert loop == ["HMMA", "IADD3", "BRA"]


def test_without_tensor_cores_the_longest_loop_that_does_more_than_wait() -> None:
    loop = hottest(
        "LDG.E R4, [R2]",
        "FADD R0, R0, R4",
        "@P0 BRA 0x0",
        "LDS R4, [R2]",  # 0x30
        "FADD R0, R0, R4",
        "SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R3], R4",  # 0x50: waits within the loop
        "@!P0 BRA 0x50",
        "@P1 BRA 0x30",
        "EXIT",
    )
    assert loop == ["LDS", "FADD", "SYNCS", "BRA", "BRA"]


def test_a_branch_into_code_that_nothing_reaches_is_no_loop() -> None:
    assert hottest("EXIT", "FADD R0, R0, R4", "@P0 BRA 0x10", "EXIT") == []
