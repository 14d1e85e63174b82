"""llama.cpp's samplers: DRY, top-n-sigma, top-k, typical, top-p, min-p, XTC, dynamic temperature, and mirostat.

They apply to one row of logits at a time, in llama.cpp's order, after the edits that all requests share (edits.py). A
token that is excluded gets -inf, and the temperature divides the rest, so that the row is drawn like one without
parameters. No operation makes the host wait for a GPU, and no bit depends on other rows. Candidates, lengths and
states may be those of a draft: the position of a row decides its random number and the state of mirostat.
Does not know: slots, requests, how a token is drawn.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from localllm.engine.params import GREEDY_TEMPERATURE, LogitsProcessor, SamplingParams
from localllm.engine.step import NewSlot
from localllm.kernels.sampling.noise import row_keys_of, uniform
from localllm.kernels.sampling.selection import keep_first
from localllm.runner.upload import to_device

XTC_STREAM = 1 << 41  # counter of XTC's random number, above those of token groups
GRID = 2.0**36  # probabilities are summed as multiples of 1 / GRID: such sums are exact, in any order
RUN = 32  # tokens of a repetition that are compared at once
MOST_REPEATED = 1024  # a repetition that is longer beyond dry_allowed_length counts as this long
FLOAT_MAX_LOG = 88.7228391  # llama.cpp's limit of the exponent of dry_base
MIROSTAT_CANDIDATES = 100  # llama.cpp's m: tokens from which mirostat 1 estimates the slope
KEPT_POSITIONS = 64  # states of mirostat per request: a draw may be repeated this far back
KEPT_STATES = 1024  # requests whose state of mirostat outlives their slot


@dataclass(frozen=True, slots=True)
class Chain:
    """The samplers of one request, ready for the device."""

    params: SamplingParams
    seed: int  # mixed, as int64
    prompt_len: int
    breakers: tuple[tuple[tuple[int, ...], Tensor], ...] = ()  # (tail, [V] bool: heads) of each DRY breaker
    mu: Tensor | None = None  # [KEPT_POSITIONS] float32 mirostat's state before the token at each position

    @property
    def orders(self) -> bool:
        """True if the chain replaces temperature, top_k, top_p and min_p of other requests."""
        return self.params.uses_chain

    @property
    def is_greedy(self) -> bool:
        return self.params.is_greedy


class ChainRow(NamedTuple):
    """One row of the logits whose request has a chain."""

    row: int
    slot: int
    length: int  # known tokens before the one that is drawn; an upper bound where the device knows better
    chain: Chain


class Chains:
    """The chains of all slots, and mirostat's states of requests that were preempted."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size, self._device = vocab_size, device
        self._chains: dict[int, Chain] = {}
        self._holders: dict[int, str] = {}  # request ids, of slots with mirostat
        self._left: OrderedDict[str, Tensor] = OrderedDict()

    def enter(self, new: NewSlot, mixed_seed: int) -> Chain | None:
        params = new.params
        if not params.uses_chain and not params.logits_processors:
            return None
        mu = None
        if params.mirostat:
            mu = self._left.pop(new.request_id, None) if len(new.token_ids) > new.prompt_len else None
            if mu is None:
                mu = torch.full((KEPT_POSITIONS,), 2.0 * params.mirostat_tau, device=self._device)
            self._holders[new.slot] = new.request_id
        breakers = tuple((tail, self._heads(heads)) for tail, heads in new.dry_breakers) if params.uses_dry else ()
        chain = self._chains[new.slot] = Chain(params, mixed_seed, new.prompt_len, breakers, mu)
        return chain

    def leave(self, slot: int) -> None:
        """Forget the slot's chain, but keep mirostat's state: the request may have been preempted."""
        chain, holder = self._chains.pop(slot, None), self._holders.pop(slot, None)
        if chain is not None and holder is not None and chain.mu is not None:
            self._left[holder] = chain.mu
            while len(self._left) > KEPT_STATES:
                self._left.popitem(last=False)

    def has(self, slots: Sequence[int]) -> bool:
        return bool(self._chains) and any(slot in self._chains for slot in slots)

    def rows(self, slots: Sequence[int], lengths: Sequence[int], places: Sequence[int] | None = None) -> list[ChainRow]:
        """Return the rows with a chain. slots, lengths [S]; places [S]: their rows in the logits, None: in order."""
        if not self._chains:
            return []
        return [
            ChainRow(index if places is None else places[index], slot, length, self._chains[slot])
            for index, (slot, length) in enumerate(zip(slots, lengths, strict=True))
            if slot in self._chains
        ]

    def _heads(self, token_ids: Sequence[int]) -> Tensor:
        heads = np.zeros(self._vocab_size, bool)
        heads[[token_id for token_id in token_ids if token_id < self._vocab_size]] = True
        return to_device(heads, self._device)


# ---- a step ----------------------------------------------------------------------------------------------------------


def apply_chains(logits: Tensor, rows: Sequence[ChainRow], token_ids: Tensor, lengths: Tensor | None = None) -> None:
    """Change the rows of logits [S, V] float32 in place. token_ids [slots, max_model_len + 1]: known tokens.
    lengths [S] int64: the rows' lengths on the device; None: as in `rows`."""
    for at in rows:
        length = torch.tensor(at.length, device=logits.device) if lengths is None else lengths[at.row]
        x = _processed(logits[at.row], at, token_ids[at.slot], length)
        if at.chain.orders:
            x = chained(x, at.chain, token_ids[at.slot], length, at.length)
        logits[at.row] = x


def observe(
    logits: Tensor, rows: Sequence[ChainRow], chosen: Tensor, lengths: Tensor | None = None
) -> None:  # fmt: skip
    """Update mirostat's states from the tokens chosen [S] in the changed logits [S, V]."""
    for at in rows:
        mu, params = at.chain.mu, at.chain.params
        if mu is None:
            continue
        length = torch.tensor(at.length, device=logits.device) if lengths is None else lengths[at.row]
        surprise = -torch.log_softmax(logits[at.row], -1)[chosen[at.row]] / math.log(2)
        now = mu[length % KEPT_POSITIONS]
        mu[(length + 1) % KEPT_POSITIONS] = now - params.mirostat_eta * (surprise - params.mirostat_tau)


def _processed(x: Tensor, at: ChainRow, tokens: Tensor, length: Tensor) -> Tensor:
    """Return the logits [V] that the request's own functions make of them. The host waits for the tokens."""
    if not at.chain.params.logits_processors:
        return x
    known = tokens[: int(length)].tolist()
    prompt, output = known[: at.chain.prompt_len], known[at.chain.prompt_len :]
    for function in at.chain.params.logits_processors:
        changed = _call(function, prompt, output, x.clone())
        if not isinstance(changed, Tensor) or changed.shape != x.shape:
            raise ValueError(f"a logits processor returned {type(changed).__name__} instead of {len(x)} logits")
        x = changed.to(x)
    return x


def _call(function: LogitsProcessor, prompt: list[int], output: list[int], x: Tensor) -> Any:
    """Call a processor with the arguments that it takes, as vLLM does."""
    import inspect

    takes = len(inspect.signature(function).parameters)
    return function(prompt, output, x) if takes == 3 else function(output, x)


# ---- one row ---------------------------------------------------------------------------------------------------------


def chained(x: Tensor, chain: Chain, tokens: Tensor, length: Tensor, most_length: int) -> Tensor:
    """Return the logits [V] from which the token is drawn. tokens: of the slot, `length` of them known and at most
    `most_length`."""
    params, vocab_size = chain.params, len(x)
    if params.uses_dry:
        x = _dry(x, chain, tokens, length, most_length)
    if chain.mu is not None:
        x = x / params.temperature if not chain.is_greedy else x
        return _mirostat(x, chain.mu[length % KEPT_POSITIONS], params.mirostat)
    size = torch.tensor(vocab_size, device=x.device)  # candidates, as dynamic temperature counts them
    if params.top_n_sigma > 0:
        x = _top_n_sigma(x, params.top_n_sigma)
    if 0 < params.top_k < vocab_size:
        x = _keep(x, _first(x, torch.ones_like(x), params.top_k))
        size = size.clamp(max=params.top_k)
    if params.typical_p < 1:
        x = _typical(x, params.typical_p)
    if params.top_p < 1:
        x = _keep(x, _first(x, _on_grid(x), math.ceil(params.top_p * GRID)))
    if params.min_p > 0:
        x = _keep(x, x >= x.max() + math.log(params.min_p))
    if params.typical_p < 1 or params.top_p < 1 or params.min_p > 0:
        size = x.isfinite().sum()
    if params.xtc_probability > 0 and params.xtc_threshold <= 0.5:
        kept = _without_top(x, params, chain.seed, length)
        size = size - (x.isfinite() & ~kept).sum()
        x = _keep(x, kept)
    return _tempered(x, params, size)


def _keep(x: Tensor, kept: Tensor) -> Tensor:
    return torch.where(kept, x, -torch.inf)


def _on_grid(x: Tensor) -> Tensor:
    """Return the probabilities [V] as whole multiples of 1 / GRID."""
    return (torch.softmax(x.double(), -1) * GRID).round()


def _first(values: Tensor, weights: Tensor, enough: float) -> Tensor:
    """Return [V] bool: the first tokens by value, then by id, whose weights together reach `enough`."""
    limit = torch.full((1, 1), enough, dtype=torch.float64, device=values.device)
    return keep_first(values[None], weights[None], limit)[0]


def _top_n_sigma(x: Tensor, n: float) -> Tensor:
    finite = x.isfinite()
    values = torch.where(finite, x, 0).double()
    count = finite.sum()
    mean = values.sum() / count
    deviation = (torch.where(finite, values - mean, 0).square().sum() / count).sqrt()
    return _keep(x, x >= x.max() - n * deviation)


def _typical(x: Tensor, mass: float) -> Tensor:
    """Keep the tokens whose surprise is nearest to the entropy, until their probabilities exceed `mass`."""
    logs = torch.log_softmax(x.double(), -1)
    chances = logs.exp()
    entropy = -torch.where(chances > 0, chances * logs, 0).sum()
    away = torch.where(x.isfinite(), (-logs - entropy).abs(), torch.inf).float()
    return _keep(x, _first(-away, (chances * GRID).round(), math.floor(mass * GRID) + 1) & x.isfinite())


def _without_top(x: Tensor, params: SamplingParams, seed: int, length: Tensor) -> Tensor:
    """Return [V] bool: all tokens, or with XTC's probability those without all but the last likely one."""
    key = row_keys_of(torch.tensor(seed, device=x.device), length).view(1, 1)
    chance = uniform(key, torch.tensor(XTC_STREAM, device=x.device)).view(())
    likely = torch.softmax(x, -1) >= params.xtc_threshold
    ids = torch.arange(len(x), device=x.device)
    lowest = torch.where(likely, x, torch.inf).min()
    last = torch.where(likely & (x == lowest), ids, -1).max()
    return ~likely | (ids == last) | (chance > params.xtc_probability)


def _tempered(x: Tensor, params: SamplingParams, size: Tensor) -> Tensor:
    """Divide by the temperature. A dynamic one depends on the entropy, as a share of that of `size` equal tokens."""
    if params.dynatemp_range <= 0:
        return x if params.temperature <= GREEDY_TEMPERATURE else x / params.temperature
    low = max(0.0, params.temperature - params.dynatemp_range)
    high = params.temperature + params.dynatemp_range
    logs = torch.log_softmax(x.double(), -1)
    entropy = -torch.where(x.isfinite(), logs.exp() * logs, 0).sum()
    share = (entropy / size.clamp(min=2).double().log()).clamp(0, 1)
    temperature = low + (high - low) * share**params.dynatemp_exponent
    cold = _keep(x, x >= x.max())  # a temperature of 0 leaves the likeliest token
    divided = torch.where(temperature > 0, x / temperature.clamp(min=1e-30).float(), cold)
    return torch.where(size > 1, divided, x)


def _mirostat(x: Tensor, mu: Tensor, version: int) -> Tensor:
    """Truncate the tokens to the surprise `mu` in bits: version 2 directly, version 1 by estimating how many they
    are from the slope of the likeliest (Zipf's law)."""
    if version == 2:
        bits = -torch.log_softmax(x, -1) / math.log(2)
        return _keep(x, (bits <= mu) | _first(x, torch.ones_like(x), 1))
    logs = torch.log_softmax(x.double(), -1).topk(min(MIROSTAT_CANDIDATES, len(x))).values
    ranks = torch.arange(1, len(logs), device=x.device, dtype=torch.float64)
    steps = ((ranks + 1) / ranks).log()
    falls, there = logs[:-1] - logs[1:], logs[1:].isfinite()
    slope = torch.where(there, steps * falls, 0).sum() / torch.where(there, steps.square(), 0).sum()
    excess = slope - 1
    most = (excess * 2 ** mu.double() / (1 - len(x) ** -excess)) ** (1 / slope)
    count = most.nan_to_num(1.0, posinf=len(x)).clamp(1, len(x)).floor()
    return _keep(x, keep_first(x[None], torch.ones_like(x)[None], count.view(1, 1))[0])


# ---- DRY -------------------------------------------------------------------------------------------------------------


def _dry(x: Tensor, chain: Chain, tokens: Tensor, length: Tensor, most_length: int) -> Tensor:
    """Subtract multiplier * base ^ (repeated tokens - allowed) from the tokens that would continue a repetition."""
    params = chain.params
    allowed = params.dry_allowed_length
    window = most_length if params.dry_penalty_last_n < 0 else min(most_length, params.dry_penalty_last_n)
    if window <= allowed:
        return x
    places = length - 1 - torch.arange(window, device=x.device)
    recent = torch.where(places >= 0, tokens[places.clamp(min=0)].long(), -1)  # the newest first
    limit = _distance_to_breaker(recent, chain.breakers)
    exponents = int(FLOAT_MAX_LOG / math.log(params.dry_base)) if params.dry_base > 1.000001 else MOST_REPEATED
    repeated = _repeated(recent, min(window, allowed + min(exponents, MOST_REPEATED))).minimum(limit)
    continues = (repeated >= allowed) & (limit >= allowed) & (recent >= 0)
    longest = torch.full((len(x),), -1, device=x.device)
    # the token after a repetition that ends k tokens ago was seen k - 1 tokens ago
    longest.scatter_reduce_(0, recent[:-1].clamp(min=0), torch.where(continues[1:], repeated[1:], -1), "amax")
    penalised = longest >= 0
    for tail, heads in chain.breakers:
        if not tail:
            penalised = penalised & ~heads
    penalty = params.dry_multiplier * params.dry_base ** (longest - allowed).clamp(max=exponents).double()
    return torch.where(penalised, x - penalty.float(), x)


def _distance_to_breaker(recent: Tensor, breakers: Sequence[tuple[tuple[int, ...], Tensor]]) -> Tensor:
    """Return how many of the newest tokens come after the last breaker. recent [W]: newest first, -1: none."""
    window = len(recent)
    found = torch.full_like(recent, -1)  # tokens of the longest tail behind a head
    for tail, heads in breakers:
        matches = heads[recent.clamp(min=0)] & (recent >= 0)
        for offset, token in enumerate(tail, 1):
            behind = torch.full_like(recent, -1)
            behind[offset:] = recent[: max(0, window - offset)]
            matches = matches & (behind == token)
        found = torch.where(matches, found.clamp(min=len(tail)), found)
    places = torch.arange(window, device=recent.device)
    return torch.where(found >= 0, places - found, (recent >= 0).sum()).gather(0, _first_true(found >= 0)[None])[0]


def _first_true(values: Tensor) -> Tensor:
    """Return the index of the first True, or 0 if there is none."""
    return values.to(torch.int8).cummax(0).values.eq(0).sum() % len(values)


def _repeated(recent: Tensor, most: int) -> Tensor:
    """Return [W] how many tokens that end k tokens ago equal the newest ones, at most `most`. recent: newest first."""
    window, device = len(recent), recent.device
    padded = torch.cat((recent, torch.full((most + RUN,), -1, device=device)))
    newest = torch.where(padded < 0, -2, padded)  # differs from a place without a token
    count, alive = torch.zeros_like(recent), torch.ones_like(recent, dtype=torch.bool)
    for start in range(0, most, RUN):
        runs = padded[start : start + window + RUN - 1].unfold(0, RUN, 1)
        equal = (runs == newest[start : start + RUN]).long().cumprod(1).sum(1)
        count = torch.where(alive, count + equal, count)
        alive = alive & (equal == RUN)
        if device.type == "cpu" and not alive[1:].any():
            break
    return count.clamp(max=most)
