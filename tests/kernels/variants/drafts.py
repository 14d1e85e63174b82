"""kernels/accept_drafts.py and kernels/propose_lookup.py as served: one set of settings for every model."""

from localllm.kernels import accept_drafts, propose_lookup
from tests.kernels.ahead_of_time import MEMORY, Variant

_SLOTS = {"slots_ptr": "*i64", "known_ptr": "*i64", "tokens_ptr": "*i32", "tokens_stride": "i32"}
_LOOKUP = {**_SLOTS, "most_ptr": "*i32", "matches_ptr": "*i64", "slots_stride": "i32"}
_ARCHS = (75, 80, 89, 90, 120)

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
]  # fmt: skip
