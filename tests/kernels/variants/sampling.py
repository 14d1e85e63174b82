"""The sampler's kernels at the vocabularies of Llama 3 and Qwen 2.5. Memory bound: few registers, no tensor core."""

from dataclasses import replace
from typing import Any

from localllm.kernels.launch import next_power_of_2
from localllm.kernels.sampling import draw, edit, logprobs, nucleus, tables
from tests.kernels.ahead_of_time import MEMORY, Variant

LLAMA, QWEN = 128_256, 151_936
SLOTS = {"slots_ptr": "*i64", "lengths_ptr": "*i64", "seed_ptr": "*i64", "temperature_ptr": "*fp64"}
LESS = {"top_k_ptr": "*i64", "top_p_ptr": "*fp64", "min_p_ptr": "*fp64"}
KEPT = {"value_ptr": "*fp32", "last_id_ptr": "*i64"}
FOUND = {"best_ptr": "*fp32", "scores_ptr": "*fp32", "groups_ptr": "*i32", "heads_ptr": "*fp32", "masses_ptr": "*fp32"}
ROW = {"row_stride": "i32", "V": "i32"}


def _gumbel_max(name: str, logits: str, **constants: Any) -> Variant:
    return Variant(
        name, draw._gumbel_max_kernel, {"logits_ptr": f"*{logits}", **SLOTS, **LESS, **KEPT, **FOUND, **ROW},
        {"BLOCK": draw.BLOCK, **constants}, aligned=("row_stride", "V"), not_early=MEMORY, max_registers=128,
    )  # fmt: skip


def _pick(name: str, logits: str, vocab_size: int, recorded: bool = True) -> Variant:
    tokens = {"tokens_ptr": "*i32", "known_ptr": "*i64", "valid_ptr": "*i32", "counts_ptr": "*i64"}
    found = {"best_ptr": "*fp32", "scores_ptr": "*fp32", "groups_ptr": "*i32"}
    numbers = ("num_blocks", "is_cut", "tokens_stride")
    out = {"token_ids_ptr": "*i64", "out_best_ptr": "*fp32", **ROW, **dict.fromkeys(numbers, "i32")}
    return Variant(
        name, draw._pick_kernel,
        {"logits_ptr": f"*{logits}", **SLOTS, **KEPT, **found, **(tokens if recorded else {}), **out},
        {"RECORDED": recorded, "BLOCKS": next_power_of_2(-(-vocab_size // draw.BLOCK)),
         **({} if recorded else dict.fromkeys(tokens))}, num_warps=1,
        aligned=("row_stride", "V"), not_early=MEMORY, max_registers=64,
    )  # fmt: skip


def _nucleus(name: str, logits: str, vocab_size: int, tries: int = nucleus.TRIES) -> Variant:
    ends = {"heads_ptr": "*fp32", "masses_ptr": "*fp32", "near_ptr": "*i32", "between_ptr": "*fp32", **KEPT, **ROW}
    return Variant(
        name, nucleus._nucleus_kernel,
        {"logits_ptr": f"*{logits}", "slots_ptr": "*i64", "temperature_ptr": "*fp64", **LESS, **ends},
        {"GROUPS": next_power_of_2(-(-vocab_size // 64)), "TRIES": tries}, num_warps=16,
        aligned=("row_stride", "V"), not_early=MEMORY, max_registers=128,
    )  # fmt: skip


def _edit(name: str, logits: str, **constants: Any) -> Variant:
    numbers = {
        **dict.fromkeys(("edits_ptr", "prompt_len_ptr", "min_tokens_ptr", "penalty_window_ptr"), "*i64"),
        **dict.fromkeys(("repetition_ptr", "presence_ptr", "frequency_ptr"), "*fp64"),
        **dict.fromkeys(("bias_ids_ptr", "stop_ids_ptr", "words_ptr", "allowed_ptr", "token_ids_ptr"), "*i32"),
    }
    sizes = {name: getattr(tables, name) for name in ("MAX_BIAS", "MAX_STOPS", "MAX_WORDS", "WORD_LEN")}
    flags = {name: getattr(tables, f"HAS_{name}") for name in ("BIAS", "ALLOWED", "STOPS", "PENALTIES", "WORDS")}
    return Variant(
        name, edit._edit_kernel,
        {"logits_ptr": f"*{logits}", "slots_ptr": "*i64", "lengths_ptr": "*i64", **numbers, "bias_values_ptr": "*fp32",
         "bitmask_ptr": "*i32", **ROW, "token_stride": "i32", "mask_words": "i32"},
        {"BLOCK": edit.BLOCK, "PART": edit.PART, "CHUNK": edit.CHUNK, **sizes, **flags, **constants},
        num_warps=8, aligned=("row_stride", "V"), not_early=MEMORY, max_registers=128,
    )  # fmt: skip


def _sums(name: str, logits: str, by_slot: bool) -> Variant:
    parts = {"best_ptr": "*fp32", "sums_ptr": "*fp32", "above_ptr": "*i32", "heads_ptr": "*fp32", **ROW}
    return Variant(
        name, logprobs._sum_kernel,
        {"logits_ptr": f"*{logits}", "token_ids_ptr": "*i64", "slots_ptr": "*i64", "counts_ptr": "*i64", **parts},
        {"BY_SLOT": by_slot, "BLOCK": logprobs.BLOCK}, aligned=("row_stride", "V"), not_early=MEMORY, max_registers=96,
    )  # fmt: skip


def _tell(name: str, logits: str, vocab_size: int, k: int) -> Variant:
    parts = {"best_ptr": "*fp32", "sums_ptr": "*fp32", "above_ptr": "*i32", "heads_ptr": "*fp32", **ROW}
    parts |= {"ids_ptr": "*i64", "logprobs_ptr": "*fp32", "ranks_ptr": "*i64", "num_blocks": "i32"}
    return Variant(
        name, logprobs._logprobs_kernel,
        {"logits_ptr": f"*{logits}", "token_ids_ptr": "*i64", "slots_ptr": "*i64", "counts_ptr": "*i64", **parts},
        {"BY_SLOT": True, "K": k, "NEAR": next_power_of_2(k),
         "BLOCKS": next_power_of_2(-(-vocab_size // logprobs.BLOCK)),
         "GROUPS": next_power_of_2(-(-vocab_size // 64))}, num_warps=8, aligned=("row_stride", "V"),
        not_early=MEMORY, max_registers=96,
    )  # fmt: skip


def _on(variant: Variant, *archs: int, **changes: Any) -> Variant:
    return replace(variant, archs=archs, **changes)


VARIANTS = [
    _on(_gumbel_max("any V, fp32, plain rows", "fp32", FILTERS=False, KEPT=False), 75, 80, 89, 90, 120, hip=True),
    _on(_gumbel_max("any V, bf16, first pass", "bf16", FILTERS=True, KEPT=False), 80, 89, 90, 120),
    _on(_gumbel_max("any V, fp32, second pass", "fp32", FILTERS=True, KEPT=True), 80, 89, 90, 120),
    _on(_pick("V 128256, fp32", "fp32", LLAMA), 80, 89, 90, 120, hip=True),
    _on(_pick("V 151936, fp32", "fp32", QWEN), 80, 89, 90, 120),
    _on(_pick("V 128256, fp32, beside drafts", "fp32", LLAMA, recorded=False), 80, 89, 90, 120),
    _on(_nucleus("V 128256, fp32", "fp32", LLAMA), 80, 90, 120, hip=True),
    _on(_nucleus("V 151936, fp32", "fp32", QWEN), 80, 90, 120),
    _on(_nucleus("V 128256, fp32, RTX 40", "fp32", LLAMA), 89, max_spills=4, often=False),
    _on(_nucleus("V 151936, fp32, RTX 40", "fp32", QWEN), 89, max_spills=4, often=False),
    _on(_nucleus("V 151936, fp32, Turing", "fp32", QWEN, nucleus.TURING_TRIES), 75),
    _on(_edit("any V, fp32", "fp32", HAS_MASK=False), 80, 89, 90, 120),
    _on(_edit("blocks of 512, which AMD's compiler does sooner", "fp32", HAS_MASK=True, BLOCK=512, PART=512), hip=True),
    _on(_edit("any V, fp32, grammar mask", "fp32", HAS_MASK=True), 75, 80, 89, 90, 120),
    _on(_sums("any V, fp32, by slot", "fp32", True), 80, 89, 90, 120, hip=True),
    _on(_tell("V 151936, 20 likeliest", "fp32", QWEN, 20), 75, 80, 89, 90, 120, hip=True),
]
