"""Kernels that make and verify drafts as served: one set of settings for every model."""

from localllm.kernels import accept_drafts, prepare_drafts, propose_lookup
from tests.kernels.ahead_of_time import MEMORY, Variant

_SLOTS = {"slots_ptr": "*i64", "known_ptr": "*i64", "tokens_ptr": "*i32", "tokens_stride": "i32"}
_LOOKUP = {**_SLOTS, "most_ptr": "*i32", "matches_ptr": "*i64", "slots_stride": "i32"}
_ARCHS = (75, 80, 89, 90, 120)
_PASS = {
    "table_ptr": "*i32",
    "tokens_ptr": "*i32",
    "known_ptr": "*i64",
    "valid_ptr": "*i32",
    "most_ptr": "*i32",
    "token_ids_ptr": "*i64",
    "positions_ptr": "*i64",
    "slot_mapping_ptr": "*i64",
    "context_ptr": "*i32",
    "last_ptr": "*i64",
    "draft_slots_ptr": "*i64",
    "lengths_ptr": "*i64",
    "rows": "i32",
    "width": "i32",
    "table_stride": "i32",
}
_RULES = {"BLOCK_SIZE": 64, "FIRST_KEY": 1, "MOST_TOKENS": 8192}

VARIANTS = [
    Variant(
        "accepted draws", accept_drafts._accept_drafts_kernel,
        {**_SLOTS, "lengths_ptr": "*i64", "drawn_ptr": "*i64", "best_ptr": "*fp32", "valid_ptr": "*i32",
         "counts_ptr": "*i64", "rows": "i32", "draws": "i32"},
        {"BLOCK": accept_drafts.ROWS}, max_registers=64, not_early=MEMORY, archs=_ARCHS, hip=True,
    ),
    Variant(
        "longest match", propose_lookup._match_kernel, _LOOKUP,
        {"LEAST": propose_lookup.LEAST_MATCH, "LONGEST": propose_lookup.LONGEST_MATCH, "BLOCK": propose_lookup.PLACES},
        max_registers=64, not_early=MEMORY, archs=_ARCHS, hip=True,
    ),
    Variant(
        "drafts behind the known tokens", propose_lookup._copy_drafts_kernel,
        {**_LOOKUP, "valid_ptr": "*i32", "out_ptr": "*i32", "max_len": "i32"}, {"MOST": propose_lookup.MOST_DRAFTS},
        num_warps=1, max_registers=64, not_early=MEMORY, archs=_ARCHS, hip=True,
    ),
    Variant(
        "a drafter's tokens", prepare_drafts._prepare_pairs_kernel,
        {**_PASS, "staged_slots_ptr": "*i32", "step_positions_ptr": "*i64", "cu_seqlens_ptr": "*i32",
         "step_context_ptr": "*i32", "drawing_ptr": "*i64", "tokens": "i32", "draws": "i32"},
        {**_RULES, "CHUNK": prepare_drafts.CHUNK}, max_registers=64, not_early=MEMORY, archs=_ARCHS, hip=True,
    ),
    Variant(
        "a draft of a drafter", prepare_drafts._record_draft_kernel,
        {**_PASS, "drawn_ptr": "*i64", "best_ptr": "*fp32", "proposed_ptr": "*i32", "place": "i32",
         "proposed_stride": "i32"},
        {**_RULES, "NUM_DRAFTS": 4, "ROWS": prepare_drafts.ROWS}, num_warps=1, max_registers=64, not_early=MEMORY,
        archs=_ARCHS, hip=True,
    ),
]  # fmt: skip
