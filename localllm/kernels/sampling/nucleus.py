"""Finds the last token kept by top_k, top_p and min_p in each row, without a sort.

All three keep a prefix of one order (larger value first, equal values by lower id), so their combination is described
by its last token: `Cutoff`. min_p is a bound on the value. top_k and top_p are the shortest prefix whose measure is
large enough, where the measure of a token is 1 or its probability. Both are found by halving an interval of values
(pivot search, as in Qrita, arXiv:2602.01518), without ordering, until one token is left in it.

The kernel, one program per row, starts from the result of `draw.summarize_logits`: the largest logit of each group of
64 ids. Tokens above the 129th largest head can only be in 128 groups. Of these, the groups above some value with at
least 112 of them are loaded once, at most 8,192 tokens, and searched in registers, which suffices for top_k up to 112
and most nuclei. Wider ones read the row again a few times, until at most 8,192 tokens are left between two pivots, and
continue with these.
Probabilities are summed as integer multiples of 2^-40 of the likeliest token's probability. The sums are exact, so they
do not depend on order, and two sums over the same tokens agree to the bit. Rows without any of the three return at
once.
The result equals the twin's, except where the rounding of exp or of the row's total decides (about 1e-8 of the mass).
"""

from __future__ import annotations

import torch
from torch import Tensor

from localllm.kernels.launch import cdiv, early_launch, next_power_of_2, runs_triton, tl, triton, wait_for_inputs
from localllm.kernels.sampling import selection
from localllm.kernels.sampling.draw import Cutoff, LogitSummary, is_filtered
from localllm.kernels.sampling.selection import GROUP
from localllm.kernels.sampling.tables import SlotTables

TRIES = 128  # groups examined first
TURING_TRIES = 64  # 128 would spill registers on Turing


def nucleus(logits: Tensor, slots: Tensor, tables: SlotTables, summary: LogitSummary | None = None) -> Cutoff:
    """Return the kept tokens. logits [S, V]; slots [S] int64, -1: padding;
    summary: `summarize_logits` of these logits, for the kernel."""
    if not runs_triton(logits, "sampling"):
        return nucleus_reference(logits, slots, tables)
    assert summary is not None, "the kernel starts from a summary"
    num_rows, vocab_size = logits.shape
    tries = TURING_TRIES if logits.is_cuda and torch.cuda.get_device_capability(logits.device) < (8, 0) else TRIES
    cutoff = Cutoff(torch.empty(num_rows, device=logits.device), torch.empty_like(slots))
    near = torch.empty(num_rows, tries, dtype=torch.int32, device=logits.device)
    between = torch.empty(num_rows, tries * GROUP, device=logits.device)
    _nucleus_kernel[(num_rows,)](
        logits, slots, tables.temperature, tables.top_k, tables.top_p, tables.min_p, summary.heads, summary.masses,
        near, between, cutoff.value, cutoff.last_id, logits.stride(0), vocab_size,
        GROUPS=next_power_of_2(max(tries, cdiv(vocab_size, GROUP))), TRIES=tries, num_warps=16,
        **early_launch(logits.device),
    )  # fmt: skip
    return cutoff


def nucleus_reference(logits: Tensor, slots: Tensor, tables: SlotTables) -> Cutoff:
    logits, at, vocab_size = logits.float(), slots.clamp(min=0), logits.shape[-1]
    temperature, top_k, top_p, min_p = (
        column[at].unsqueeze(-1) for column in (tables.temperature, tables.top_k, tables.top_p, tables.min_p)
    )
    asks = (temperature > 0) & ((top_k < vocab_size) | (top_p < 1) | (min_p > 0)) & (slots >= 0).unsqueeze(-1)
    probabilities = torch.softmax(logits / torch.where(temperature > 0, temperature, 1).float(), -1)
    floor = min_p.float() * probabilities.amax(-1, keepdim=True)
    probabilities = torch.where(probabilities >= floor, probabilities, 0)
    weights = keep_nucleus(logits, probabilities, top_k, top_p)
    inside = (weights > 0) | ~asks
    value = torch.where(inside, logits, torch.inf).amin(-1, keepdim=True)
    ids = torch.arange(vocab_size, device=logits.device)
    last_id = torch.where(inside & (logits == value), ids, -1).amax(-1)
    return Cutoff(torch.where(asks, value, -torch.inf).squeeze(-1), torch.where(asks.squeeze(-1), last_id, vocab_size))


def keep_nucleus(logits: Tensor, probabilities: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Return [S, V] probabilities, zero where top_k and then top_p drop them;
    top_k [S, 1] int64, top_p [S, 1] float64."""
    vocab_size = logits.shape[-1]
    if logits.is_cuda or bool((top_k < vocab_size).any()):
        first = selection.keep_first(logits, torch.ones_like(logits), top_k.double())
        probabilities = torch.where(first | (top_k >= vocab_size), probabilities, 0)
    total = probabilities.sum(-1, dtype=torch.float64, keepdim=True)
    first = selection.keep_first(logits, probabilities, top_p * total)
    return torch.where(first | (top_p >= 1), probabilities, 0)


def keep_sorted(weights: Tensor, top_p: Tensor, total: Tensor | None = None) -> Tensor:
    """Return weights, given in descending order, with zeros after the first ones that reach `top_p` of the total."""
    exact = weights.double()
    total = exact.sum(-1, keepdim=True) if total is None else total
    before = exact.cumsum(-1) - exact
    return torch.where((before < top_p * total) | (top_p >= 1), weights, 0)


# ---- kernel ----------------------------------------------------------------------------------------------------------


@triton.jit
def order_key(x):
    """Map float32 to int32 in the same order; 0.0 and -0.0 are equal."""
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def value_of(key):
    """The inverse of `order_key`."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _high_and_low(x, largest, scale):
    """Split exp((x - largest) * scale) into high * 2^-20 + low * 2^-40, both int32 up to 2^20."""
    weight = tl.exp((x - largest) * scale) * 1048576.0
    high = weight.to(tl.int32)
    return high, ((weight - high.to(tl.float32)) * 1048576.0).to(tl.int32)


@triton.jit
def _mass(x, largest, scale):
    """Return exp((x - largest) * scale) in units of 2^-40 as int64."""
    high, low = _high_and_low(x, largest, scale)
    return (high.to(tl.int64) << 20) + low


@triton.jit
def _least(key, counts, largest, scale):
    """Return what a token with at least this key measures, to within rounding; 0 where that decides."""
    mass = _mass(value_of(key.to(tl.int32)), largest, scale)
    return tl.where(counts, 1, tl.where(mass < 4, 0, mass))


@triton.jit
def _from_row(row_ptr, V, key, floor, largest, scale, TILE: tl.constexpr):
    """Count the row's tokens with at least this key and value `floor`, and sum their mass."""
    count = tl.zeros([TILE], tl.int32)
    high, low = tl.zeros([TILE], tl.int32), tl.zeros([TILE], tl.int32)
    for start in range(0, V, TILE):
        ids = start + tl.arange(0, TILE)
        x = tl.load(row_ptr + ids, mask=ids < V, other=-float("inf")).to(tl.float32)
        inside = (order_key(x) >= key) & (x >= floor) & (x > -float("inf"))
        more_high, more_low = _high_and_low(tl.where(inside, x, -float("inf")), largest, scale)
        count += inside.to(tl.int32)
        high += more_high
        low += more_low
    mass = (tl.sum(high.to(tl.int64), 0) << 20) + tl.sum(low.to(tl.int64), 0)
    return tl.sum(count, 0).to(tl.int64), mass


@triton.jit
def _collect(row_ptr, out_ptr, V, low_key, high_key, floor, TILE: tl.constexpr):
    """Write the values with low_key <= key < high_key consecutively in any order. Return how many there are."""
    count = 0
    for start in range(0, V, TILE):
        ids = start + tl.arange(0, TILE)
        x = tl.load(row_ptr + ids, mask=ids < V, other=-float("inf")).to(tl.float32)
        key = order_key(x)
        inside = ((key >= low_key) & (key < high_key) & (x >= floor) & (x > -float("inf"))).to(tl.int32)
        tl.store(out_ptr + count + tl.cumsum(inside, 0) - 1, x, mask=inside > 0)
        count += tl.sum(inside, 0)
    return count


@triton.jit
def _id_of_tie(row_ptr, V, value, place, TILE: tl.constexpr):
    """Return the id of the place-th token (from 1) with this value."""
    seen = 0
    found = 0
    for start in range(0, V, TILE):
        ids = start + tl.arange(0, TILE)
        x = tl.load(row_ptr + ids, mask=ids < V, other=float("nan")).to(tl.float32)
        same = (x == value).to(tl.int32)
        hit = (same > 0) & (seen + tl.cumsum(same, 0) == place)
        found += tl.sum(tl.where(hit, ids, 0), 0)
        seen += tl.sum(same, 0)
    return found


@triton.jit
def _near_groups(heads, near_ptr, largest, lowest, TRIES: tl.constexpr, GROUPS: tl.constexpr):
    """Find a key with at most TRIES heads above it, and nearly as many if there are: `lowest` if it is one. Write their
    groups to near_ptr. Return the key and their number."""
    keys = order_key(heads)
    low, high = lowest, order_key(largest).to(tl.int64)
    above = 0  # of heads, above `high`
    if tl.sum((keys > lowest.to(tl.int32)).to(tl.int32), 0) <= TRIES:
        high = lowest
    while (high - low > 1) & (above < TRIES - TRIES // 8):
        middle = low + (high - low) // 2
        count = tl.sum((keys > middle.to(tl.int32)).to(tl.int32), 0)
        if count <= TRIES:
            high, above = middle, count
        else:
            low = middle
    near = (keys > high.to(tl.int32)).to(tl.int32)
    tl.store(near_ptr + tl.cumsum(near, 0) - 1, tl.arange(0, GROUPS), mask=near > 0)
    tl.debug_barrier()
    return high, tl.sum(near, 0)


@triton.jit
def _load_near(row_ptr, near_ptr, num_near, V, bound, floor, TRIES: tl.constexpr):
    """Load the tokens of these groups with a key above bound and at least the value floor; -inf for the others."""
    places = tl.arange(0, TRIES * 64)
    ids = tl.load(near_ptr + places // 64, mask=places < num_near * 64, other=0) * 64 + places % 64
    near = tl.load(row_ptr + ids, mask=(places < num_near * 64) & (ids < V), other=-float("inf")).to(tl.float32)
    return tl.where((order_key(near) > bound) & (near >= floor), near, -float("inf"))


@triton.jit
def _nucleus_kernel(
    logits_ptr, slots_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, heads_ptr, masses_ptr,
    near_ptr, between_ptr, value_ptr, last_id_ptr, row_stride, V, GROUPS: tl.constexpr, TRIES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One row. Keys are int32 in the order of the values; bounds are int64 so that their distance fits."""
    wait_for_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + row)
    tl.store(value_ptr + row, -float("inf"))
    tl.store(last_id_ptr + row, V)
    if slot < 0:
        return
    if not is_filtered(slot, top_k_ptr, top_p_ptr, min_p_ptr, temperature_ptr, V):
        return
    num_groups = (V + 63) // 64
    groups = tl.arange(0, GROUPS)
    heads = tl.load(heads_ptr + row * num_groups + groups, mask=groups < num_groups, other=-float("inf"))
    largest = tl.max(heads, 0)
    if (largest == float("inf")) | (largest == -float("inf")):  # the row is invalid, which `draw` reports
        return

    TILE: tl.constexpr = 4096
    LOWEST: tl.constexpr = -2139095041  # the key of -inf
    row_ptr = logits_ptr + row * row_stride
    scale = 1.0 / tl.load(temperature_ptr + slot).to(tl.float32)
    min_p, top_p = tl.load(min_p_ptr + slot).to(tl.float32), tl.load(top_p_ptr + slot)
    top_k = tl.load(top_k_ptr + slot)
    floor = tl.where(min_p > 0, largest + tl.log(tl.where(min_p > 0, min_p, 1.0)) / scale, -float("inf"))

    # the tokens of the likeliest groups: complete above `bound`, or entirely if that is below all that is needed
    below_all = tl.maximum(order_key(floor).to(tl.int64) - 1, LOWEST)
    bound, num_near = _near_groups(heads, near_ptr + row * TRIES, largest, below_all, TRIES, GROUPS)
    near = _load_near(row_ptr, near_ptr + row * TRIES, num_near, V, bound.to(tl.int32), floor, TRIES)
    complete = bound == below_all
    near_count = tl.sum((near > -float("inf")).to(tl.int32), 0).to(tl.int64)
    near_mass = tl.sum(_mass(near, largest, scale), 0)

    total = near_mass  # of the tokens left before top_p
    if not complete:
        if floor == -float("inf"):
            masses = tl.load(masses_ptr + row * num_groups + groups, mask=groups < num_groups, other=0.0)
            masses *= tl.exp((heads - largest) * scale)
            total = (tl.sum(masses.to(tl.float64), 0) * 1099511627776.0).to(tl.int64)
        else:
            _, total = _from_row(row_ptr, V, order_key(floor), floor, largest, scale, TILE)

    pivot = tl.full([], LOWEST, tl.int64)
    ties = tl.full([], 0, tl.int64)
    kept_ties = tl.full([], 0, tl.int64)
    for stage in range(2):  # top_k, then top_p of the rest
        counts = stage == 0
        if (counts & (top_k < V)) | ((stage == 1) & (top_p < 1.0)):
            share = top_p * total.to(tl.float64)
            enough = share.to(tl.int64)
            enough = tl.maximum(enough + (enough.to(tl.float64) < share).to(tl.int64), 1)
            enough = tl.where(counts, top_k, enough)
            reached_low = tl.where(counts, near_count, near_mass)  # what tokens with keys >= low add up to
            if complete:
                enough = tl.minimum(enough, reached_low)  # min_p may leave fewer
            # loaded again: kept throughout, it would take the registers that the passes below need
            x = _load_near(row_ptr, near_ptr + row * TRIES, num_near, V, bound.to(tl.int32), floor, TRIES)
            low, high = bound + 0, order_key(largest).to(tl.int64) + 1  # the pivot is in [low, high)
            base_count, base_mass = tl.full([], 0, tl.int64), tl.full([], 0, tl.int64)  # of keys >= high
            uncounted = tl.full([], 0, tl.int64)
            if reached_low < enough:
                # wider: pivots over the whole row until the tokens between them fit
                high, base_count, base_mass = bound + 1, near_count, near_mass
                tail = (1.0 - top_p) * total.to(tl.float64) / (V * 1099511627776.0)
                # tokens below low_value weigh less than (1 - top_p) of the total even if there were V of them
                low_value = largest + (tl.log(tl.maximum(tail.to(tl.float32), 1e-30)) - 0.001) / scale - 0.001
                lowest = tl.min(tl.where(groups < num_groups, heads, float("inf")), 0)
                countable = (top_k <= num_groups) & (floor == -float("inf"))
                low_value = tl.where(counts, tl.where(countable, lowest, floor), low_value)
                low_value = tl.maximum(low_value, floor)
                low = tl.minimum(tl.maximum(order_key(low_value).to(tl.int64), LOWEST), high - 1)
                low_count, low_mass = _from_row(row_ptr, V, low.to(tl.int32), floor, largest, scale, TILE)
                enough = tl.minimum(enough, tl.where(counts, low_count, low_mass))
                passes = 0
                while (low_count - base_count > TRIES * 64) & (high - low > 1):
                    first, last = value_of(low.to(tl.int32)), value_of((high - 1).to(tl.int32))
                    middle = order_key(0.5 * first + 0.5 * last).to(tl.int64)
                    halves = (passes >= 12) | (first == -float("inf"))
                    middle = tl.where(halves, low + (high - low) // 2, middle)
                    middle = tl.minimum(tl.maximum(middle, low + 1), high - 1)
                    count, mass = _from_row(row_ptr, V, middle.to(tl.int32), floor, largest, scale, TILE)
                    if tl.where(counts, count, mass) >= enough:
                        low, low_count, low_mass = middle, count, mass
                    else:
                        high, base_count, base_mass = middle, count, mass
                    passes += 1
                reached_low = tl.where(counts, low_count, low_mass)
                x = tl.full([TRIES * 64], -float("inf"), tl.float32)
                uncounted = low_count - base_count
                if uncounted <= TRIES * 64:
                    uncounted = tl.full([], 0, tl.int64)
                    tl.debug_barrier()
                    num = _collect(
                        row_ptr, between_ptr + row * TRIES * 64, V, low.to(tl.int32), high.to(tl.int32), floor, TILE
                    )
                    tl.debug_barrier()
                    places = tl.arange(0, TRIES * 64)
                    x = tl.load(between_ptr + row * TRIES * 64 + places, mask=places < num, other=-float("inf"))
            keys = tl.where(x > -float("inf"), order_key(x), -2147483648)
            measure = tl.where(counts, (x > -float("inf")).to(tl.int64), _mass(x, largest, scale))
            base = tl.where(counts, base_count, base_mass)
            above = base
            least = _least(low, counts, largest, scale)
            # until one token is in [low, high): two would measure nearly 2 * least
            while (high - low > 1) & (2 * (reached_low - above) >= 3 * least):
                middle = low + (high - low) // 2
                reached = base + tl.sum(tl.where(keys >= middle.to(tl.int32), measure, 0), 0)
                if reached >= enough:
                    low, reached_low = middle, reached
                    least = _least(low, counts, largest, scale)
                else:
                    high, above = middle, reached
            last = tl.max(tl.where(keys < high.to(tl.int32), keys, -2147483648), 0).to(tl.int64)
            pivot = tl.where(high - low > 1, last, low)
            ties = uncounted + tl.sum((keys == pivot.to(tl.int32)).to(tl.int32), 0)
            each = _mass(value_of(pivot.to(tl.int32)), largest, scale)
            needed = (enough - above + tl.where(counts, 1, each) - 1) // tl.maximum(tl.where(counts, 1, each), 1)
            kept_ties = tl.minimum(tl.maximum(needed, 1), ties)
            kept = tl.where(keys > pivot.to(tl.int32), value_of(keys), -float("inf"))
            total = base_mass + tl.sum(_mass(kept, largest, scale), 0) + kept_ties * each

    value = value_of(pivot.to(tl.int32))
    last_id = tl.full([], 0, tl.int64) + V
    if (kept_ties < ties) & (value >= floor):
        last_id = _id_of_tie(row_ptr, V, value, kept_ties, TILE).to(tl.int64)
    tl.store(value_ptr + row, tl.maximum(value, floor))
    tl.store(last_id_ptr + row, last_id)
