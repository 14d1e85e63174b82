"""The fields of llama.cpp's samplers, with its names, for every dialect whose clients send them.

Does not know: what a sampler does (runner/sampler_chain.py), bounds of values (engine/params.py).
"""

from __future__ import annotations

import msgspec


class SamplerFields(msgspec.Struct, kw_only=True):
    dry_multiplier: float | None = None
    dry_base: float | None = None
    dry_allowed_length: int | None = None
    dry_penalty_last_n: int | None = None
    dry_sequence_breakers: list[str] | None = None
    top_n_sigma: float | None = None
    typical_p: float | None = None
    xtc_probability: float | None = None
    xtc_threshold: float | None = None
    dynatemp_range: float | None = None
    dynatemp_exponent: float | None = None
    mirostat: int | None = None
    mirostat_tau: float | None = None
    mirostat_eta: float | None = None
