"""kernels/prepare_step.py as served: one set of settings for every model."""

from localllm.kernels import prepare_step as module
from localllm.kernels.fused_epilogue import COUNTERS
from tests.kernels.ahead_of_time import MEMORY, Variant

_POINTERS = {
    "staged_ptr": "*i32", "tokens_ptr": "*i32", "known_ptr": "*i64",
    "valid_ptr": "*i32", "tables_ptr": "*i32", "token_ids_ptr": "*i64", "positions_ptr": "*i64",
    "slot_mapping_ptr": "*i64", "block_tables_ptr": "*i32", "context_ptr": "*i32", "cu_seqlens_ptr": "*i32",
    "last_ptr": "*i64", "slots_ptr": "*i64", "lengths_ptr": "*i64", "adapters_ptr": "*i32", "rotary_ptr": "*i64",
}  # fmt: skip
_SIZES = {
    "rows": "i32", "tokens": "i32", "draws": "i32", "tokens_stride": "i32", "tables_group_stride": "i32",
    "tables_stride": "i32",
    "block_tables_group_stride": "i32", "block_tables_stride": "i32", "slot_mapping_stride": "i32",
}  # fmt: skip

_WORK = {
    "work_ptr": "*i32", "rules_ptr": "*i32", "num_decodes": "i32", "work_stride": "i32", "counters_ptr": "*i32",
    "ahead": "i32",
}  # fmt: skip


def _prepare(name: str, groups: int, hip: bool = False) -> Variant:
    constants = {
        "GROUPS": groups, "BLOCK_SIZE": 64, "CHUNK": module.CHUNK, "UPDATES": module.UPDATES,
        "HEADER": module.HEADER, "ROW_FIELDS": module.ROW_FIELDS, "SHIFT_FIELD": module.SHIFT_FIELD,
        "UPDATE_FIELDS": module.UPDATE_FIELDS,
        "SPLIT_ROWS": module.SPLIT_ROWS, "COUNTERS": COUNTERS,
    }  # fmt: skip
    types = {**_POINTERS, **_SIZES, **_WORK}
    return Variant(
        f"blocks of 64, {name}", module._prepare_rows_kernel,
        {argument: kind for argument, kind in types.items() if argument not in constants}, constants,
        max_registers=64, not_early=MEMORY, archs=(75, 80, 89, 90, 120), hip=hip,
    )  # fmt: skip


VARIANTS = [_prepare("1 KV group", 1, hip=True), _prepare("2 KV groups", 2)]
