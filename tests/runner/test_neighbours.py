"""What a stream receives while others arrive beside it: the tokens and every bit of the logprobs that it gets alone.

The stream's own prompt is read before the neighbours arrive, since prompts that are read together share their products.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from localllm.engine.adapter import Adapter
from localllm.engine.admission import GenerationRequest
from localllm.engine.outputs import EngineOutput
from localllm.engine.params import SamplingParams
from localllm.engine.request import RequestOptions
from localllm.kernels.cpu import pack
from localllm.kernels.cpu.native.structures import FEW_ROWS
from localllm.llm import LLM
from tests.adapters import make_tiny_adapter
from tests.gguf_files import write_gguf
from tests.marks import needs_library
from tests.models.formats.quantised import save_quantised
from tests.models.formats.stores import FORMATS
from tests.tiny import make_tiny_model

pytestmark = needs_library

WIDE = {"hidden_size": 256, "intermediate_size": 512}
SIZES: dict[str, dict[str, Any]] = {"granite_hybrid": {"mamba_d_head": 64}, "lfm2": {"block_auto_adjust_ff_dim": False}}
THRESHOLD = 64  # prompt tokens of a step beside streams
ARRIVES_AFTER = 4  # steps of the stream
DICE = Random(5)
TEXT = [DICE.randrange(3, 500) for _ in range(40)]
Wanted = tuple[list[int], list[tuple[tuple[int, ...], tuple[float, ...]]]]
Neighbours = Callable[[LLM], list[GenerationRequest]]


def tokens(count: int, seed: int) -> list[int]:
    dice = Random(seed)
    return [dice.randrange(3, 500) for _ in range(count)]


def request(name: str, prompt: list[int], max_tokens: int, **given: Any) -> GenerationRequest:
    options = RequestOptions(**given.pop("options", {}))
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, **{"temperature": 0.0, **given})
    return GenerationRequest(name, prompt, params, options)


def embedded(llm: LLM, name: str, count: int) -> GenerationRequest:
    """Return a request whose prompt is `count` embeddings of no token."""
    values = torch.randn(count, llm._engine.spec.hidden_size, generator=torch.Generator().manual_seed(count)) * 0.2
    embeds = llm._engine.prompt_embeds_reader.of_tensor(values)
    params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
    return GenerationRequest(name, (0,) * count, params, prompt_embeds=embeds)


NEIGHBOURS: dict[str, Neighbours] = {
    "a prompt": lambda llm: [request("n", tokens(50, 1), 8)],
    "a prompt of one token": lambda llm: [request("n", tokens(1, 2), 8)],
    "prompt logprobs": lambda llm: [request("n", tokens(50, 3), 8, prompt_logprobs=1)],
    "a chunk of one token": lambda llm: [request("n", tokens(63, 4), 4), request("m", tokens(50, 5), 4)],
    "a last chunk of one token": lambda llm: [request("n", tokens(THRESHOLD + 1, 6), 8)],
    "several prompts": lambda llm: [request(f"n{i}", tokens(9 + i, 7 + i), 4 + i) for i in range(3)],
    "drafts": lambda llm: [
        request("n", tokens(20, 8), 24, options={"prediction_token_ids": tuple(tokens(20, 8) * 2)}, logprobs=1),
    ],
    "embeddings": lambda llm: [embedded(llm, "n", 50)],
    "a last chunk of one embedding": lambda llm: [embedded(llm, "n", THRESHOLD + 1)],
}  # fmt: skip


def adapted(llm: LLM, name: str) -> Adapter:
    """Return a loaded adapter of the server."""
    found = llm._engine.require_adapters().find(name)
    assert found is not None
    return found.adapter


BESIDE_ADAPTERS: dict[str, Neighbours] = {
    "an adapter": lambda llm: [request("n", tokens(50, 11), 8, options={"adapter": adapted(llm, "one")})],
    "two adapters and none": lambda llm: [
        request("n", tokens(20, 12), 12, options={"adapter": adapted(llm, "one")}),
        request("m", tokens(9, 13), 16, options={"adapter": adapted(llm, "two")}),
        request("o", tokens(12, 14), 8),
    ],
    "drafts of an adapter": lambda llm: [
        request("n", tokens(20, 8), 24, options={
            "adapter": adapted(llm, "two"), "prediction_token_ids": tuple(tokens(20, 8) * 2)}),
    ],
}  # fmt: skip


def stream_of(sampled: bool, adapter: Adapter | None = None) -> GenerationRequest:
    asked = {"temperature": 1.0, "seed": 11} if sampled else {}
    return request("stream", TEXT, 30, logprobs=2, options={"adapter": adapter}, **asked)


def received(llm: LLM, stream: GenerationRequest, neighbours: list[GenerationRequest]) -> Wanted:
    """Run the stream and the neighbours, which arrive together while it decodes, to their ends."""
    loop, admission = llm._engine.engine
    outputs: list[EngineOutput] = []
    loop.deliver = outputs.extend
    (choice,) = admission.admit(stream)
    loop.submit(choice)
    for _ in range(ARRIVES_AFTER):
        loop.step()
    assert 0 < sum(len(output.token_ids) for output in outputs) < 30
    loop.submit(*(each for neighbour in neighbours for each in admission.admit(neighbour)))
    while loop.scheduler.has_work or loop._inbox:
        loop.step()
    assert loop.scheduler.recorder.num_failed_steps == 0
    own = [output for output in outputs if output.request_id == choice.request_id]
    logprobs = [(tuple(each.token_ids), tuple(each.logprobs)) for output in own for each in output.logprobs]
    return [token for output in own for token in output.token_ids], logprobs


@contextmanager
def served(path: Path, **options: Any) -> Iterator[LLM]:
    given: dict[str, Any] = {
        "dtype": "float32", "enable_prefix_caching": False, "max_num_seqs": 8, "max_model_len": 256,
        "kv_cache_memory_bytes": 16 << 20, "long_prefill_token_threshold": THRESHOLD, "enable_prompt_embeds": True,
    }  # fmt: skip
    with LLM(str(path), **{**given, **options}) as llm:
        yield llm


def count_differing(
    llm: LLM, kinds: dict[str, Neighbours], *, sampled: bool = False, adapter: Adapter | None = None
) -> dict[str, int]:
    """Return at how many positions the stream receives something else, for each kind of neighbour that differs."""
    stream = stream_of(sampled, adapter)
    alone, differing = received(llm, stream, []), {}
    for kind, neighbours in kinds.items():
        beside = received(llm, stream, neighbours(llm))
        assert len(beside[1]) == len(alone[1]) == 30
        pairs = zip(zip(*alone, strict=True), zip(*beside, strict=True), strict=True)
        differing[kind] = sum(one != other for one, other in pairs)
    return {kind: count for kind, count in differing.items() if count}


def assert_no_difference(path: Path, **options: Any) -> None:
    """Weights of 8 bits have no native step on a processor without products of bytes: torch multiplies them as stored,
    and roundings differ."""
    with served(path, **options) as llm:
        steps: Any = llm._engine.engine[0].runner
        embeds = llm._engine.generator.limits.takes_prompt_embeds
        kinds = {kind: each for kind, each in NEIGHBOURS.items() if embeds or "embedding" not in kind}
        if not pack.has_int8() and not steps._steps._native.rounds:
            assert_same_tokens(llm, kinds)
            return
        assert steps._steps._native.rounds, "otherwise only last bits can differ"
        assert steps._steps._native.most_tokens >= FEW_ROWS
        for sampled in (False, True):
            assert count_differing(llm, kinds, sampled=sampled) == {}


def assert_same_tokens(llm: LLM, kinds: dict[str, Neighbours], adapter: Adapter | None = None) -> None:
    """Steps are not divided where only roundings may differ. One unit in the last place of each value of the embedding
    changes logprobs by up to 4.5e-5, and those of an adapter by up to 4.5e-4."""
    within = 1e-4 if adapter is None else 1e-3
    stream = stream_of(True, adapter)
    alone = received(llm, stream, [])
    for kind, neighbours in kinds.items():
        beside = received(llm, stream, neighbours(llm))
        assert beside[0] == alone[0], kind
        for (_, one), (_, other) in zip(alone[1], beside[1], strict=True):
            assert other == pytest.approx(one, abs=within), kind


@pytest.mark.parametrize(("family", "quantization"), [("llama", "int8"), ("gpt_oss", "int4")])
def test_neighbours_of_any_kind_change_no_bit(family: str, quantization: str, tmp_path: Path) -> None:
    """gpt-oss has narrow weights in its experts alone."""
    assert_no_difference(make_tiny_model(tmp_path / "model", family, **WIDE), quantization=quantization)


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_neighbours_where_the_processor_has_no_product_of_bytes(
    quantization: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights of 4 bits keep their native step there."""
    monkeypatch.setattr(pack, "has_int8", lambda: False)
    assert_no_difference(make_tiny_model(tmp_path / "model", "llama", **WIDE), quantization=quantization)


ADAPTED = [("llama", "int4"), ("llama", "16-bit"), ("gemma3", "int4")]
ADAPTED_SLOW = [
    *(("llama", weights) for weights in ("int8", "awq", "fp8", "Q4_K", "Q8_0")),
    *(
        (family, weights)
        for family in ("qwen3_moe", "gpt_oss", "granite_hybrid", "lfm2")
        for weights in ("int4", "int8")
    ),
]


@pytest.mark.parametrize("own", [None, "one"])
@pytest.mark.parametrize(
    ("family", "weights"), [*ADAPTED, *(pytest.param(*each, marks=pytest.mark.slow) for each in ADAPTED_SLOW)]
)
def test_neighbours_with_adapters_change_no_bit(family: str, weights: str, own: str | None, tmp_path: Path) -> None:
    """Rows with adapters and without are one native step, and may have drafts."""
    stored = weights in FORMATS or weights.startswith("Q")
    dtype = {"16-bit": "bfloat16"}.get(weights, "float16" if stored else "float32")
    source = path = make_tiny_model(tmp_path / "model", family, dtype=dtype, **WIDE, **SIZES.get(family, {}))
    if weights in FORMATS:
        path = save_quantised(source, tmp_path / "stored", *FORMATS[weights]).path
    elif stored:
        write_gguf(source, path := tmp_path / "stored.gguf", weights)
    modules = {
        name: str(make_tiny_adapter(tmp_path / name, source, seed=seed, rank=rank))
        for seed, (name, rank) in enumerate((("one", 3), ("two", 8)))
    }
    options = {"dtype": "auto"} if weights == "16-bit" else {} if stored else {"quantization": weights}
    with served(path, enable_lora=True, max_loras=2, max_lora_rank=8, **options) as llm:
        for name, folder in modules.items():
            llm._engine.require_adapters().load(name, folder)
        runner: Any = llm._engine.engine[0].runner
        adapter = None if own is None else adapted(llm, own)
        if adapter is not None:
            assert received(llm, stream_of(False, adapter), []) != received(llm, stream_of(False), [])
        kinds = {**NEIGHBOURS, **BESIDE_ADAPTERS}
        if not pack.has_int8() and not runner._steps._native.rounds:
            assert_same_tokens(llm, kinds, adapter)
            return
        assert runner._steps._native.rounds, "adapters keep the native step"
        assert runner._steps._native.most_tokens >= FEW_ROWS
        for sampled in (False, True):
            assert count_differing(llm, kinds, sampled=sampled, adapter=adapter) == {}


FAMILIES: dict[str, dict[str, Any]] = {
    **{name: {} for name in ("llama", "gemma3", "olmo2", "gpt_neox", "phi", "qwen3_moe", "gpt_oss", "glm4_moe")},
    "gemma4": {"enable_prompt_embeds": False},
    "qwen3_5": {},
    "granite_hybrid": {},
    "lfm2": {},
}
WIDENED = ("gpt_neox", "phi")  # their 16-bit matrices are so small that they become float32


@pytest.mark.slow
@pytest.mark.parametrize("quantization", ["int4", "int8", "16-bit"])
@pytest.mark.parametrize("family", FAMILIES)
def test_neighbours_change_no_bit_of_any_kind_of_model(family: str, quantization: str, tmp_path: Path) -> None:
    half = quantization == "16-bit"
    if half and family in WIDENED:
        pytest.skip("its matrices are float32")
    dtype = "bfloat16" if half else "float32"
    path = make_tiny_model(tmp_path / "model", family, dtype=dtype, **WIDE, **SIZES.get(family, {}))
    options = {"dtype": "auto"} if half else {"quantization": quantization}
    assert_no_difference(path, **options, **FAMILIES[family])


@pytest.mark.slow
@pytest.mark.parametrize("stored", [*FORMATS, "Q4_0", "Q8_0", "Q4_K", "Q5_K", "Q6_K"])
def test_neighbours_change_no_bit_of_any_stored_format(stored: str, tmp_path: Path) -> None:
    source = make_tiny_model(tmp_path / "source", "llama", **WIDE, dtype="float16")
    if stored in FORMATS:
        assert_no_difference(save_quantised(source, tmp_path / "model", *FORMATS[stored]).path)
    else:
        write_gguf(source, tmp_path / "model.gguf", stored)
        assert_no_difference(tmp_path / "model.gguf")


def test_neighbours_change_no_token_of_float32_weights(tiny_llama_path: Path) -> None:
    with served(tiny_llama_path) as llm:
        assert_same_tokens(llm, NEIGHBOURS)


def test_deterministic_mode_holds_beside_embeddings(tmp_path: Path) -> None:
    path = make_tiny_model(tmp_path / "model", "llama", **WIDE)
    kinds = {kind: NEIGHBOURS[kind] for kind in ("embeddings", "a last chunk of one embedding")}
    with served(path, quantization="int8", deterministic=True) as llm:
        assert count_differing(llm, kinds) == {}
