"""Requests under a grammar on a device: masks reach their own rows, whatever way a step takes, at depth two."""

import numpy as np
import numpy.typing as npt
import pytest
import torch

from scripts.random_weights import random_model, shape_spec
from tests.device.conftest import DEVICE
from tests.device.serving import many_requests, options, serve


class Multiples:
    """Tokens that divide by a number, which grows with each: the mask is another at every place."""

    def __init__(self, length: int) -> None:
        self.left, self.taken = length, list[int]()

    def refuses(self, token_id: int) -> bool:
        return False

    def may_forbid(self, num_unseen: int) -> bool:
        return True

    def fill(self, bits: npt.NDArray[np.int32]) -> None:
        ids = np.arange(len(bits) * 32)
        bits[:] = np.packbits(ids % (2 + len(self.taken)) == 0, bitorder="little").view(np.int32)

    def accept(self, token_id: int) -> None:
        assert token_id % (2 + len(self.taken)) == 0, f"{token_id} may not come after {len(self.taken)} tokens"
        self.taken.append(token_id)

    @property
    def is_over(self) -> bool:
        return len(self.taken) >= self.left


@pytest.mark.parametrize("graphs", ["replayed", "padded", "none"])
def test_masks_hold_and_neighbours_hear_nothing(graphs: str) -> None:
    spec = shape_spec("tiny", num_hidden_layers=2, vocab_size=2048)
    model = random_model(spec, DEVICE, torch.float32, max_model_len=160)
    asked = options(graphs=graphs, max_num_batched_tokens=256)
    alone, engine = serve(spec, model, asked, many_requests(spec.vocab_size))
    engine.close()
    requests = many_requests(spec.vocab_size)
    for request in requests[1::2]:
        request.grammar = Multiples(12)
    answers, engine = serve(spec, model, asked, requests)
    engine.close()
    for i, request in enumerate(requests):
        tokens, _, reason = answers[request.request_id]
        if request.grammar is None:
            assert tokens == alone[request.request_id][0]
            continue
        assert tokens, i
        assert all(token % (2 + place) == 0 for place, token in enumerate(tokens))
        assert reason == "length" or len(tokens) == 12 or tokens[-1] in (2, *request.params.stop_token_ids)
