"""The sampler's definition, one row at a time in plain Python and float64: the reference for the fast one."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from localllm.engine.params import SamplingParams
from localllm.engine.step import NewSlot
from localllm.kernels.sampling.selection import GROUP
from localllm.runner.sampler import Sampled, sample
from localllm.runner.sampling import SamplingState

MASK = 2**64 - 1
GOLDEN = 0x9E3779B97F4A7C15
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Case:
    """One request in the middle of its output."""

    params: SamplingParams
    prompt: Sequence[int] = (1,)
    output: Sequence[int] = ()
    eos: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()

    @property
    def tokens(self) -> list[int]:
        return [*self.prompt, *self.output]


def random_logits(rows: int, vocab_size: int, scale: float = 3.0, seed: int = 0) -> torch.Tensor:
    """Return the same normally distributed logits [rows, vocab_size] fp32 for the same arguments."""
    return torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * scale


def run(logits: torch.Tensor, cases: Sequence[Case], slots: Sequence[int] | None = None) -> Sampled:
    """Run the real sampler on one row per case. `slots`: where their state is stored."""
    slots = range(len(cases)) if slots is None else slots
    size, vocab_size = max(slots) + 1, logits.shape[-1]
    state = SamplingState(size, vocab_size, torch.device("cpu"))
    token_ids = torch.zeros(size, 1 + max(len(case.tokens) for case in cases), dtype=torch.int32)
    for slot, case in zip(slots, cases, strict=True):
        state.enter(NewSlot(slot, f"r{slot}", case.tokens, len(case.prompt), case.params, (), 0, case.eos,
                            case.bad_words))  # fmt: skip
        token_ids[slot, : len(case.tokens)] = torch.tensor(case.tokens)
    batch = state.batch(np.array(slots), np.array([len(case.tokens) for case in cases]))
    with torch.inference_mode():
        return sample(logits.clone(), batch, token_ids)


def tokens(logits: torch.Tensor, cases: Sequence[Case]) -> list[int]:
    return list(run(logits, cases).token_ids.tolist())


# ---- the definition --------------------------------------------------------------------------------------------------


def naive_token(logits: torch.Tensor, case: Case) -> int:
    """logits [V]"""
    edited = naive_edits(logits.double().numpy(), case)
    if case.params.is_greedy:
        return int(np.argmax(edited))
    return naive_draw(naive_weights(edited, case.params), case)


def naive_edits(logits: Floats, case: Case) -> Floats:
    """Apply steps 1 to 5."""
    x, params, output = logits.copy(), case.params, list(case.output)
    for token, value in (params.logit_bias or {}).items():
        x[token] += value
    if params.allowed_token_ids is not None:
        keep = sorted(set(params.allowed_token_ids))
        x[[token for token in range(len(x)) if token not in keep]] = -np.inf
    if len(output) < params.min_tokens:
        x[list({*params.stop_token_ids, *(() if params.ignore_eos else case.eos)})] = -np.inf
    first = 0 if params.repeat_last_n < 0 else max(0, len(case.tokens) - params.repeat_last_n)
    for token in set(case.tokens[first:]):
        x[token] = x[token] / params.repetition_penalty if x[token] > 0 else x[token] * params.repetition_penalty
    for token, count in Counter(case.tokens[max(first, len(case.prompt)) :]).items():
        x[token] -= params.frequency_penalty * count + params.presence_penalty
    for word in case.bad_words:
        if len(word) == 1 or output[-len(word) + 1 :] == list(word[:-1]):
            x[word[-1]] = -np.inf
    return x


def naive_weights(x: Floats, params: SamplingParams) -> Floats:
    """Apply steps 6 to 9: return the weights of the tokens that may be drawn."""
    p = np.exp((x - x.max()) / params.temperature)
    p[p < params.min_p] = 0
    order = sorted(range(len(x)), key=lambda token: (-x[token], token))
    p[order[params.top_k or len(x) :]] = 0
    if params.top_p < 1:
        mass = np.cumsum(p[order]) - p[order]
        p[[token for token, before in zip(order, mass, strict=True) if before >= params.top_p * p.sum()]] = 0
    return p


def naive_draw(weights: Floats, case: Case) -> int:
    """Do step 10: draw the group, then the token within it."""
    key = row_key(case.params.seed or 0, len(case.tokens))
    groups = [math.fsum(weights[i : i + GROUP]) for i in range(0, len(weights), GROUP)]
    group = _race(groups, [gumbel(key, (1 << 40) + g) for g in range(len(groups))])
    members = list(weights[group * GROUP : (group + 1) * GROUP])
    return group * GROUP + _race(members, [gumbel(key, group * GROUP + i) for i in range(len(members))])


def _race(weights: Sequence[float], noise: Sequence[float]) -> int:
    scores = [math.log(w) + g if w > 0 else -math.inf for w, g in zip(weights, noise, strict=True)]
    return scores.index(max(scores))


# ---- the generator ---------------------------------------------------------------------------------------------------


def mix(x: int) -> int:
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & MASK
    return x ^ (x >> 31)


def row_key(seed: int, position: int) -> int:
    return mix(mix(seed & MASK) + position * GOLDEN & MASK)


def uniform(key: int, counter: int) -> float:
    return ((mix(key + (counter + 1) * GOLDEN & MASK) >> 12) + 0.5) / 2**52


def gumbel(key: int, counter: int) -> float:
    return -math.log(-math.log(uniform(key, counter)))
