"""The real runner under the real scheduler, for tests that compare whole generations."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from localllm.engine.loop import EngineLoop
from localllm.engine.memory.block_names import BlockHasher
from localllm.engine.memory.cache_manager import CacheManager
from localllm.engine.memory.state_pool import StatePool
from localllm.engine.params import SamplingParams
from localllm.engine.request import Request, RequestOptions
from localllm.engine.scheduler import Scheduler
from localllm.engine.scheduler_config import SchedulerConfig
from localllm.engine.step import TokenLogprobs
from localllm.models.layers.lora import LoraLimits
from localllm.models.loader import DiskExperts, load_model
from localllm.models.read_spec import read_spec
from localllm.models.vision.tower import load_towers
from localllm.runner.kv_cache import KVCache, StateCache
from localllm.runner.pictures import PictureEncoder
from localllm.runner.runner import TorchRunner
from tests.kv import ledger_of, of_each

CPU = torch.device("cpu")
BLOCK_SIZE = 8
NUM_TOKENS = 64
NUM_MEDIA_TOKENS = 4
"""Tokens of an answer about pictures or sounds."""


class Engine:
    """The real runner under the real scheduler, stepped by hand."""

    def __init__(
        self, path: Path, *, num_blocks: int = 400, depth: int = 1, caching: bool = True, cap: int = 0,
        staged: bool | None = None, encoder_rows: int = 0, lora: LoraLimits | None = None,
        far_layers: Sequence[int] = (), far_tables: Sequence[str] = (), disk: DiskExperts | None = None,
        half_weights: bool = False,
        **config: int,
    ):  # fmt: skip
        spec = read_spec(path)
        sizes = {"max_num_seqs": 8, "max_num_batched_tokens": 512, "max_model_len": 512, **config}
        limits = SchedulerConfig(
            block_size=BLOCK_SIZE,
            enable_prefix_caching=caching,
            long_prefill_token_threshold=cap,
            output_reserve=0.0,
            encoder_rows=encoder_rows,
            encoder_budget=encoder_rows,
            **sizes,
        )
        hasher = BlockHasher(str(path).encode(), BLOCK_SIZE)
        pool = StatePool(24) if spec.recurrent is not None else None
        self.scheduler = Scheduler(limits, CacheManager(limits, ledger_of(spec, num_blocks, BLOCK_SIZE), hasher, pool))
        self.model = model = load_model(
            path, spec, CPU, torch.float32, lora=lora, far_layers=far_layers, far_tables=far_tables, disk=disk,
            half_weights=half_weights,
        )  # fmt: skip
        kv = KVCache(spec, of_each(spec, num_blocks), BLOCK_SIZE, CPU, "float32")
        states = StateCache(spec, 24, CPU, torch.float32) if spec.recurrent is not None else None
        for layer in filter(None, kv.layers):
            for tensor in layer.tensors():
                tensor.fill_(float("nan"))  # what nobody wrote must never be read
        self.runner = runner = TorchRunner(
            model,
            spec,
            kv,
            block_size=BLOCK_SIZE,
            device=CPU,
            staged=staged,
            states=states,
            **sizes,
        )
        if spec.vision is not None or spec.hearing is not None:
            tower = load_towers(path, spec.vision, spec.hearing, CPU, torch.float32)
            runner.see_with(PictureEncoder(tower, spec.hidden_size, torch.float32))
        self.loop = EngineLoop(self.scheduler, runner, depth=depth)
        self.loop._recover = _raise

    def generate(self, prompts, count=NUM_TOKENS, media=None, adapters=None, **params):
        """media, adapters: the pictures and the adapter of each prompt; None: there are none."""
        media, adapters = media or [()] * len(prompts), adapters or [None] * len(prompts)
        tokens = {index: [] for index in range(len(prompts))}
        self.logprobs: dict[int, list[TokenLogprobs]] = {index: [] for index in tokens}
        self.prompt_logprobs: dict[int, tuple[TokenLogprobs, ...]] = {}
        self.endings = {}

        def deliver(outputs):
            for output in outputs:
                index = int(output.request_id)
                tokens[index] += output.token_ids
                self.logprobs[index] += output.logprobs
                if output.prompt_logprobs is not None:
                    self.prompt_logprobs[index] = output.prompt_logprobs
                if output.finish_reason:
                    self.endings[index] = output

        self.loop.deliver = deliver
        asked = SamplingParams(**{"temperature": 0.0, "max_tokens": count, **params})
        self.loop.submit(
            *(
                Request(str(i), p, asked, RequestOptions(adapter=adapter), max_output_tokens=count, media=of)
                for i, (p, of, adapter) in enumerate(zip(prompts, media, adapters, strict=True))
            )
        )
        while self.scheduler.has_work or self.loop._inbox:
            self.loop.step()
        assert not any(ending.error for ending in self.endings.values())
        return [tokens[index] for index in range(len(prompts))]


class MediaCase:
    """A tiny model with some pictures or sounds, and what transformers computes of prompts with them."""

    def __init__(
        self, path: Path, model: Any, processed: Sequence[Any], *, prompt_of: Callable[..., Any],
        spans: Callable[..., Any], reference: Callable[..., Any],
    ):  # fmt: skip
        """prompt_of: returns a prompt with some media, spans their places in it, and reference transformers' logits."""
        self.path, self.model, self.processed = path, model, list(processed)
        self.spec, self.rows = read_spec(path), max(each.rows for each in processed)
        self._prompt_of, self._spans, self._reference = prompt_of, spans, reference
        self._prompts: dict[Any, tuple[list[int], list[int]]] = {}

    def engine(self, **sizes: Any) -> Engine:
        return Engine(self.path, encoder_rows=self.rows, **sizes)

    def media(self, which: Sequence[int]) -> list[Any]:
        return [self.processed[place] for place in which]

    def prompt(self, which: tuple[int, ...], **ends: bool) -> tuple[list[int], list[int]]:
        """Return a prompt with these media, and the greedy tokens of transformers, none of them a near tie."""
        key = which, *ends.items()
        if key not in self._prompts:
            self._prompts[key] = self._without_ties(self.media(which), ends)
        return self._prompts[key]

    def _without_ties(self, processed: list[Any], ends: dict[str, bool]) -> tuple[list[int], list[int]]:
        for seed in range(9):
            ids, tokens = self._prompt_of(processed, seed, **ends), list[int]()
            for _ in range(NUM_MEDIA_TOKENS):
                logits = self._reference(self.model, [*ids, *tokens], processed)[-1]
                best = torch.topk(logits, 2).values
                if best[0] - best[1] < 1e-3 * logits.abs().max():
                    break
                tokens.append(int(logits.argmax()))
            else:
                return ids, tokens
        raise AssertionError("near ties with every seed")

    def check(self, engine: Engine, which: tuple[int, ...], **ends: bool) -> None:
        """Compare an engine's answer with transformers'."""
        ids, expected = self.prompt(which, **ends)
        media = self._spans(ids, self.media(which))
        assert engine.generate([ids], NUM_MEDIA_TOKENS, media=[media])[0] == expected
        engine.scheduler.table.encoded.check_invariants([])


def _raise(error):
    raise error
