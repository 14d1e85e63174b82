"""kernels/prepare_step.py as served: one set of settings for every model."""

from __future__ import annotations

from localllm.kernels import prepare_step as module
from tests.kernels.ahead_of_time import MEMORY, Variant

_POINTERS = {
    "staged_ptr": "*i32", "tokens_ptr": "*i32", "known_ptr": "*i64",
    "valid_ptr": "*i32", "tables_ptr": "*i32", "token_ids_ptr": "*i64", "positions_ptr": "*i64",
    "slot_mapping_ptr": "*i64", "block_tables_ptr": "*i32", "context_ptr": "*i32", "cu_seqlens_ptr": "*i32",
    "last_ptr": "*i64", "slots_ptr": "*i64", "lengths_ptr": "*i64", "adapters_ptr": "*i32",
}  # fmt: skip
_SIZES = {
    "rows": "i32", "tokens": "i32", "draws": "i32", "tokens_stride": "i32", "tables_group_stride": "i32",
    "tables_stride": "i32",
    "block_tables_group_stride": "i32", "block_tables_stride": "i32", "slot_mapping_stride": "i32",
}  # fmt: skip

VARIANTS = [
    *(
        Variant(
            f"blocks of 64, {groups} KV groups", module._prepare_rows_kernel, {**_POINTERS, **_SIZES},
            {"GROUPS": groups, "BLOCK_SIZE": 64, "CHUNK": module.CHUNK, "UPDATES": module.UPDATES,
             "HEADER": module.HEADER, "ROW_FIELDS": module.ROW_FIELDS, "UPDATE_FIELDS": module.UPDATE_FIELDS},
            max_registers=64, not_early=MEMORY, archs=(75, 80, 89, 90, 120),
        )
        for groups in (1, 2)
    ),
]  # fmt: skip
