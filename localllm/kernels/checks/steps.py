"""Checks of the kernels of whole numbers: the inputs of a step, drafts, and the choice of tokens. They must be exact.

The tables have SLOTS slots: one is empty, one is in the middle, and one is at the last position. The twins compute the
expected values from copies on the CPU, so that they need nothing of the GPU.
Does not know: the requests that slots are for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from localllm.kernels.accept_drafts import accept_drafts
from localllm.kernels.checks.case import TWINS, Case, Subject, equal_to
from localllm.kernels.launch import launching_with
from localllm.kernels.prepare_step import ROW_FIELDS, SlotTokens, StepInputs, prepare_step
from localllm.kernels.propose_lookup import propose_lookup
from localllm.kernels.sampling.draw import draw, summarize_logits
from localllm.kernels.sampling.edit import edit_logits
from localllm.kernels.sampling.noise import mix_seeds
from localllm.kernels.sampling.nucleus import nucleus
from localllm.kernels.sampling.tables import HAS_BIAS, HAS_PENALTIES, SlotTables

SLOTS = 3
MOST_LEN = 512  # of a slot's table here: the kernels read longer ones in the same way
DRAFTS = 3
CPU = torch.device("cpu")


def step_cases(subject: Subject) -> Iterator[Case]:
    """Yield steps of one token a row, of a prompt beside it, and with drafts that are in flight."""
    last = _width(subject) - 1
    rows = {
        "one token a row": (1, [(1, 40, 1, -1), (-1, 0, 1, -1), (2, last, 1, -1)]),
        "a prompt": (1, [(2, last, 1, -1), (1, 3, 130, -1)]),
        "drafts": (1 + DRAFTS, [(1, 40, 1 + DRAFTS, DRAFTS), (-1, 0, 1 + DRAFTS, -1), (2, 99, 1 + DRAFTS, -1)]),
    }
    for name, (draws, asked) in rows.items():

        def fill(
            device: torch.device, draws: int = draws, asked: Sequence[tuple[int, int, int, int]] = asked
        ) -> list[Tensor]:
            slots, tables = _slots(subject, device), _block_tables(subject, device)
            used = sum(scheduled for _, _, scheduled, _ in asked)
            tokens, longest = used + 2 * (draws == 1), max(row[2] for row in asked)
            inputs = StepInputs.empty(len(asked), tokens, tables.shape[2], device, 1, len(asked) * draws)
            prepare_step(_staged(asked).to(device), slots, tables, inputs, subject.block_size, longest)
            held = _blocks_of(inputs, subject.block_size)
            return [
                inputs.token_ids, inputs.positions, inputs.slot_mapping, inputs.context_lens, inputs.cu_seqlens_q,
                inputs.slots, inputs.lengths, torch.where(held, inputs.block_tables[0], 0), tables, slots.valid,
            ]  # fmt: skip

        yield Case(name, lambda fill=fill: fill(subject.device), equal_to(lambda fill=fill: _twin(fill)))  # type: ignore[misc]


def draft_cases(subject: Subject) -> Iterator[Case]:
    """Yield drafts that are accepted in part, and drafts that are looked up in a text that repeats itself."""

    def accept(device: torch.device) -> list[Tensor]:
        slots, at = _slots(subject, device), torch.tensor([[1], [-1], [2]], device=device)
        rows = torch.cat([at] * (1 + DRAFTS), 1)
        lengths = torch.tensor([[41], [0], [100]], device=device) + torch.arange(1 + DRAFTS, device=device)
        drawn = slots.token_ids[rows.clamp(min=0), lengths].long()
        drawn[0, 2] += 1  # the third draft of slot 1 is wrong, and all of slot 2 are right
        best = torch.ones(drawn.shape, device=device)
        counts = accept_drafts(rows, lengths, slots.token_ids, drawn, best, slots.known, slots.valid)
        return [counts[:, [0, 2]], slots.token_ids, slots.known[1:], slots.valid]

    def propose(device: torch.device) -> list[Tensor]:
        slots = _slots(subject, device)
        slots.token_ids[1, :40] = torch.arange(40, device=device, dtype=torch.int32) % 7
        at, most = torch.tensor([1, -1, 2], device=device), torch.full((SLOTS,), 5, dtype=torch.int32, device=device)
        matches = torch.zeros(SLOTS, dtype=torch.int64, device=device)
        found = propose_lookup(at, most, slots.known, slots.valid, slots.token_ids, matches)
        there = torch.arange(found.shape[1], device=device) <= found[:, :1]
        return [torch.where(there, found, 0)[[0, 2]], slots.valid[1:], slots.token_ids[1]]

    for name, make in (("accepted drafts", accept), ("proposed drafts", propose)):
        yield Case(name, lambda make=make: make(subject.device), equal_to(lambda make=make: _twin(make)))  # type: ignore[misc]


def sampling_cases(subject: Subject) -> Iterator[Case]:
    """Yield the argmax and draws, draws from a nucleus, and edited logits."""
    logits = 3 * torch.randn(SLOTS, subject.vocab_size, generator=torch.Generator().manual_seed(5))

    def choose(device: torch.device, *, filters: bool) -> list[Tensor]:
        tables, at = _tables(subject, device), torch.tensor([1, -1, 2], device=device)
        given, lengths = logits.to(device), torch.tensor([40, 0, 99], device=device)
        summary = summarize_logits(given, at, lengths, tables, filters=filters)
        cutoff = nucleus(given, at, tables, summary) if filters else None
        ids, best = draw(given, at, lengths, tables, cutoff, summary)
        return [ids, best]

    def edit(device: torch.device) -> list[Tensor]:
        tables, at = _tables(subject, device), torch.tensor([1, -1, 2], device=device)
        given, lengths = logits.to(device, copy=True), torch.tensor([40, 0, 99], device=device)
        edit_logits(given, at, lengths, tables, _slots(subject, device).token_ids)
        return [given[0].argmax()[None], given[[0, 2]].isneginf(), (given[0, :8] * 1024).round()]

    cases = {
        "argmax and draws": lambda device: choose(device, filters=False),
        "draws from a nucleus": lambda device: choose(device, filters=True),
        "edited logits": edit,
    }
    for name, make in cases.items():
        yield Case(name, lambda make=make: make(subject.device), equal_to(lambda make=make: _twin(make)))  # type: ignore[misc]


def _twin(make: object) -> Sequence[Tensor]:
    with launching_with(TWINS):
        made: Sequence[Tensor] = make(CPU)  # type: ignore[operator]
    return made


def _width(subject: Subject) -> int:
    """Return the positions of a slot's table; one more is for a draft at the end."""
    return min(MOST_LEN, subject.max_model_len // subject.block_size * subject.block_size or subject.max_model_len)


def _slots(subject: Subject, device: torch.device) -> SlotTokens:
    width = _width(subject)
    ids = torch.randint(subject.vocab_size, (SLOTS, width + 1), generator=torch.Generator().manual_seed(3))
    return SlotTokens(
        ids.int().to(device), torch.tensor([0, 41, 100], device=device),
        torch.tensor([0, DRAFTS - 1, DRAFTS], dtype=torch.int32, device=device),
    )  # fmt: skip


def _block_tables(subject: Subject, device: torch.device) -> Tensor:
    blocks = -(-_width(subject) // subject.block_size)
    table = torch.arange(1, 1 + SLOTS * blocks, dtype=torch.int32).flip(0).view(1, SLOTS, blocks)
    return table.contiguous().to(device)


def _staged(rows: Sequence[Sequence[int]]) -> Tensor:
    """Return the buffer of a step. rows: slot, computed tokens, tokens of this step, drafts in flight (-1: none)."""
    fields = torch.zeros(ROW_FIELDS, len(rows), dtype=torch.int32)
    start = 0
    for place, (slot, computed, scheduled, drafts) in enumerate(rows):
        column = (slot, computed, scheduled, start, int(slot >= 0), -1, drafts)
        fields[: len(column), place] = torch.tensor(column, dtype=torch.int32)
        start += scheduled
    update = [0, 1, 0, 7]  # block 7 is the first of slot 1
    return torch.cat([torch.tensor([1, start], dtype=torch.int32), fields.flatten(), torch.tensor(update).int()])


def _blocks_of(inputs: StepInputs, block_size: int) -> Tensor:
    """Return which entries of the rows' block tables are read: only these are written."""
    blocks = torch.arange(inputs.block_tables.shape[2], device=inputs.context_lens.device)
    return blocks < -(-inputs.context_lens[:, None] // block_size)


def _tables(subject: Subject, device: torch.device) -> SlotTables:
    """Return parameters: of a greedy slot with penalties and a bias, and of one that draws from a nucleus."""
    tables = SlotTables.empty(SLOTS, subject.vocab_size, CPU)
    tables.top_k.fill_(subject.vocab_size)
    for name, value in (("top_p", 1.0), ("repetition", 1.0), ("num_logprobs", -1), ("penalty_window", 2**31 - 1)):
        getattr(tables, name).fill_(value)
    tables.seed[2] = int(mix_seeds(np.array([11], np.uint64)).view(np.int64)[0])
    tables.temperature[2], tables.top_p[2], tables.top_k[2] = 0.8, 0.9, 40
    tables.edits[1], tables.prompt_len[1] = HAS_BIAS | HAS_PENALTIES, 20
    tables.repetition[1], tables.frequency[1] = 1.5, 0.5
    tables.bias_ids[1, 0], tables.bias_values[1, 0] = 5, 40.0
    return SlotTables(*(getattr(tables, name).to(device) for name in SlotTables.__dataclass_fields__))
