"""Encoder-decoders of text against transformers in fp32: logits of decoders over sources in blocks, and answers of the
whole engine, to prompts of unlike lengths at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from localllm import LLM, SamplingParams
from localllm.engine.beam_search import BeamSearchParams
from localllm.engine.media import Encode, EncoderPrompt
from localllm.errors import ContextTooLong, CorruptModel, InvalidParameter, UnsupportedOption, UnsupportedParameter
from localllm.kernels.cpu import pack
from localllm.kernels.cpu.int8 import CpuInt8Weight, has_int8
from localllm.kernels.cpu.native.library import native
from localllm.kernels.layer_cache import LayerKV
from localllm.kernels.paged_attention import kv_cache_shape
from localllm.models.decoder import native_program
from localllm.models.decoder.decoder import DecoderModel
from localllm.models.decoder.native_program import DecodeRows, NativeProgram, open_native_program
from localllm.models.encoders.source import SourcePool, load_encoder, with_encoder_bytes
from localllm.models.families.encoder_decoder import source_of
from localllm.models.fit.pictures import SourceSizes
from localllm.models.layers.attention import distance_buckets
from localllm.models.loader import load_model, resident_bytes
from localllm.models.read_spec import read_spec
from localllm.models.spec.shard import even_heads, shards_of
from localllm.models.weights.parameters import held_bytes
from tests.models.encoder_decoders import FAMILIES, load_reference, save_encoder_decoder
from tests.models.harness import CPU, ModelHarness, Sequence, assert_close, prompt
from tests.models.operations import DefinedLibrary
from tests.threads import Threads

PathOf = Callable[[str], Path]
GREEDY = SamplingParams(temperature=0, max_tokens=10)


@pytest.fixture(scope="module")
def path_of(tmp_path_factory: pytest.TempPathFactory) -> PathOf:
    saved: dict[str, Path] = {}

    def path_of(family: str) -> Path:
        if family not in saved:
            saved[family] = save_encoder_decoder(tmp_path_factory.mktemp(family), family)
        return saved[family]

    return path_of


class SourcedHarness(ModelHarness):
    """A decoder whose sequences attend to sources, in a pool full of NaN."""

    def __init__(self, path: Path, num_blocks: int = 7, **share: Any) -> None:
        """share: the shard and the group of `load_model`; none: the whole model."""
        model = load_model(path, read_spec(path), CPU, torch.float32, **share)
        assert isinstance(model, DecoderModel)
        super().__init__(model)
        shape = kv_cache_shape(num_blocks, 8, self.spec.num_kv_heads, self.spec.head_dim)
        kept = [LayerKV(*(torch.full(shape, torch.nan) for _ in "kv")) for _ in range(self.spec.num_layers)]
        self.pool = SourcePool(load_encoder(path, CPU, torch.float32), self.model, kept)
        self.digests: dict[int, bytes] = {}  # by sequence

    def read(self, sources: list[list[int]], dropped: tuple[bytes, ...] = ()) -> list[bytes]:
        read = [EncoderPrompt.of(ids, 8) for ids in sources]
        self.pool.apply(SimpleNamespace(dropped=dropped, encodes=[Encode(s.digest, s.rows, s.inputs) for s in read]))
        return [source.digest for source in read]

    def _inputs(self, rows: list[tuple[Sequence, int]], all_logits: bool) -> Any:
        digests = [self.digests[id(sequence)] for sequence, count in rows for _ in range(count)]
        return replace(super()._inputs(rows, all_logits), source=self.pool.inputs(digests))


def reference_logits(reference: Any, source: list[int], answer: list[int]) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = reference(
            input_ids=torch.tensor([source]), decoder_input_ids=torch.tensor([answer])
        ).logits[0]
    return logits


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_of_answers_in_chunks_beside_each_other(family: str, path_of: PathOf) -> None:
    path = path_of(family)
    reference, harness = load_reference(path), SourcedHarness(path)
    sources, answers = [prompt(19), prompt(5, seed=1)], [prompt(40, seed=2), prompt(31, seed=3)]
    old = harness.read([prompt(30, seed=4)])
    digests = harness.read(sources, dropped=tuple(old))  # its blocks are used again
    sequences = [Sequence(list(answer)) for answer in answers]
    harness.digests = {id(each): digest for each, digest in zip(sequences, digests, strict=True)}
    found: list[list[torch.Tensor]] = [[], []]
    for counts in ((7, 1), (1, 1), (1, 20), (31, 9)):
        rows = list(zip(sequences, counts, strict=True))
        for parts, part in zip(found, harness.step(rows, all_logits=True), strict=True):
            parts.append(part)
    for source, answer, parts in zip(sources, answers, found, strict=True):
        assert_close(torch.cat(parts), reference_logits(reference, source, answer))
    harness.read([], dropped=tuple(digests))
    assert sorted(harness.pool._free) == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("defined", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_native_steps_are_torchs(family: str, defined: bool, path_of: PathOf, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows attend to sources of unlike lengths, shorter and longer than what a thread takes at a time."""
    if defined or native() is None:
        monkeypatch.setattr(native_program, "native", DefinedLibrary)
    harness, reference = (SourcedHarness(path_of(family), num_blocks=200) for _ in range(2))
    sources = [[5] * count for count in (19, 700, 3, 512)]
    for pool in (harness.pool, reference.pool):
        digests = pool_filled_at_random(pool, sources)
    program = open_native_program(harness.model, harness.kv_cache, harness.pool.layers)
    for each in (harness, reference):
        sequences = [Sequence(prompt(9 + 5 * row, seed=row)) for row in range(4)]
        each.digests = {id(row): digest for row, digest in zip(sequences, digests, strict=True)}
        each.step([(row, len(row.token_ids) - 4) for row in sequences])
        if each is harness:
            ours = [natively(harness, program, sequences[: 4 - step]) for step in range(4)]
        else:
            theirs = [each.step([(row, 1) for row in sequences[: 4 - step]]) for step in range(4)]
    for found, wanted in zip(ours, theirs, strict=True):
        assert_close(found, torch.cat(wanted))


def pool_filled_at_random(pool: SourcePool, sources: list[list[int]]) -> list[bytes]:
    """Read sources of any lengths, whose states are random."""
    pool._encoder.encode = lambda ids: torch.from_numpy(  # type: ignore[method-assign]
        np.random.default_rng(len(ids)).standard_normal((len(ids), pool._model.spec.hidden_size), np.float32)
    )
    read = [EncoderPrompt.of(ids, 8) for ids in sources]
    pool.apply(SimpleNamespace(dropped=(), encodes=[Encode(s.digest, s.rows, s.inputs) for s in read]))
    return [source.digest for source in read]


def natively(harness: SourcedHarness, program: NativeProgram, sequences: list[Sequence]) -> torch.Tensor:
    """Run the next token of each sequence in one native step; logits [R, vocab]."""
    inputs = harness._inputs([(each, 1) for each in sequences], all_logits=False)
    group, each = inputs.groups[0], np.arange(len(sequences))
    tables = group.block_table.data_ptr() + each[None] * group.block_table.stride(0) * 4
    logits = program.forward(DecodeRows(
        inputs.token_ids.numpy(), inputs.positions.numpy(), group.slot_mapping.numpy()[None], tables,
        source=inputs.source,
    )).clone()  # fmt: skip
    for sequence in sequences:
        sequence.computed += 1
    return logits


@pytest.mark.parametrize("family", FAMILIES)
def test_the_engine_answers_as_transformers(family: str, path_of: PathOf) -> None:
    reference = load_reference(path_of(family))
    prompts = [prompt(length, seed=length) for length in (3, 21, 40, 21)]
    with LLM(str(path_of(family)), max_num_seqs=3) as llm:
        answers = llm.generate([{"prompt_token_ids": ids} for ids in prompts], GREEDY, use_tqdm=False)
        start = llm._engine.spec.source.start_ids  # type: ignore[union-attr]
    for ids, answer in zip(prompts, answers, strict=True):
        wanted = reference.generate(torch.tensor([ids]), max_new_tokens=10 + len(start) - 1, num_beams=1)[0].tolist()
        got = [*start, *answer.outputs[0].token_ids]
        assert got == wanted[: len(got)]
        assert (answer.outputs[0].finish_reason == "stop") == (wanted[-1] == 2 and len(wanted) <= len(got))


@pytest.fixture(scope="module")
def llm(path_of: PathOf) -> Any:
    with LLM(str(path_of("m2m_100")), max_num_seqs=4, max_model_len=48) as llm:
        yield llm


def test_choices_seeds_and_stops(llm: LLM) -> None:
    drawn = SamplingParams(temperature=1.5, seed=7, n=3, max_tokens=8, logprobs=2)
    first, second = (llm.generate(["Hello!", "How are you"], drawn, use_tqdm=False) for _ in range(2))
    assert [[c.token_ids for c in each.outputs] for each in first] == [[c.token_ids for c in e.outputs] for e in second]
    assert len({tuple(choice.token_ids) for choice in first[0].outputs}) > 1
    (whole,) = llm.generate("Hello!", GREEDY, use_tqdm=False)
    ids = whole.outputs[0].token_ids
    stopped = SamplingParams(temperature=0, max_tokens=10, stop_token_ids=[ids[3]])
    (short,) = llm.generate("Hello!", stopped, use_tqdm=False)
    assert list(short.outputs[0].token_ids) == list(ids[: ids.index(ids[3]) + 1])
    assert "".join(event.text for event in llm.stream("Hello!", GREEDY)) == whole.outputs[0].text


def test_an_answer_begins_as_asked(llm: LLM, path_of: PathOf) -> None:
    reference, tokenizer = load_reference(path_of("m2m_100")), llm.get_tokenizer()
    ids, german = tokenizer.encode("Hello!"), tokenizer.token_id("__de__")
    wanted = reference.generate(torch.tensor([ids]), max_new_tokens=11, num_beams=1, forced_bos_token_id=german)
    (answer,) = llm.generate({"encoder_prompt": "Hello!", "tgt_lang": "de"}, GREEDY, use_tqdm=False)
    assert [1, german, *answer.outputs[0].token_ids] == wanted[0].tolist()
    begun = {"encoder_prompt": "Hello!", "decoder_prompt": list(wanted[0, 1:5])}
    (later,) = llm.generate(begun, GREEDY, use_tqdm=False)
    assert list(later.outputs[0].token_ids[:7]) == wanted[0, 5:].tolist()
    english = {"encoder_prompt": "Hello!", "src_lang": "__en__", "tgt_lang": "de"}
    marked = [tokenizer.token_id("__en__"), *ids]
    wanted = reference.generate(torch.tensor([marked]), max_new_tokens=11, num_beams=1, forced_bos_token_id=german)
    (answer,) = llm.generate(english, GREEDY, use_tqdm=False)
    assert [1, german, *answer.outputs[0].token_ids] == wanted[0].tolist()


def test_beams_are_those_of_transformers(llm: LLM, path_of: PathOf) -> None:
    """Without an end, all beams have one length, and the scores differ by a factor alone."""
    reference, ids = load_reference(path_of("m2m_100")), llm.get_tokenizer().encode("How are you")
    wanted = reference.generate(
        torch.tensor([ids]), max_new_tokens=6, min_new_tokens=6, num_beams=4, num_return_sequences=4
    )
    (found,) = llm.beam_search(["How are you"], BeamSearchParams(beam_width=4, max_tokens=6, ignore_eos=True))
    assert [[1, *beam.tokens[-6:]] for beam in found.sequences] == wanted.tolist()


def test_a_forced_end_is_the_last_token_of_an_answer_at_its_limit(tmp_path: Path) -> None:
    path = save_encoder_decoder(tmp_path, "mbart", forced_eos_token_id=2)
    reference, ids = load_reference(path), prompt(21, seed=21)
    with LLM(str(path), max_num_seqs=4) as llm:
        for limit in (4, 9):
            wanted = reference.generate(torch.tensor([ids]), max_new_tokens=limit, num_beams=1)[0].tolist()
            params = SamplingParams(temperature=0, max_tokens=limit, logprobs=1)
            (answer,) = llm.generate({"prompt_token_ids": ids}, params, use_tqdm=False)
            (found,) = answer.outputs
            assert [1, *found.token_ids] == wanted
            assert (found.token_ids[-1], found.finish_reason) == (2, "length")
            assert found.logprobs is not None
            assert found.logprobs[-1][2].logprob == 0.0
        free = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        (other,) = llm.generate({"prompt_token_ids": ids}, free, use_tqdm=False)
        assert other.outputs[0].token_ids[-1] != 2
        wanted = reference.generate(torch.tensor([ids]), max_new_tokens=6, num_beams=3, num_return_sequences=3,
                                    length_penalty=0.0)  # fmt: skip
        beams = BeamSearchParams(beam_width=3, max_tokens=6, length_penalty=0.0, include_stop_str_in_output=True)
        (searched,) = llm.beam_search([{"prompt_token_ids": ids}], beams)
        assert [[1, *beam.tokens[-6:]] for beam in searched.sequences] == wanted.tolist()


def test_equal_prompts_are_encoded_once(llm: LLM) -> None:
    store = llm._engine.engine[0].scheduler.table.encoded  # type: ignore[union-attr]
    held = len(store._held)
    llm.generate(["Once upon a time"] * 4, GREEDY, use_tqdm=False)
    assert len(store._held) == held + 1
    store.check_invariants(())


@pytest.mark.parametrize("family", ["bart", "t5"])
def test_preempted_answers_are_the_same(family: str, path_of: PathOf) -> None:
    """Few blocks of the answers' own keys and values: requests are preempted, and read their sources again."""
    prompts = [{"prompt_token_ids": prompt(length, seed=length)} for length in (9, 21, 30, 21)]
    long = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    found = list[list[list[int]]]()
    spec = read_spec(path_of(family))
    for blocks in (40, 10):
        own = blocks * 8 * spec.num_layers * 2 * spec.num_kv_heads * spec.head_dim * 4
        sizes: dict[str, Any] = {"max_num_seqs": 4, "max_model_len": 48, "block_size": 8, "kv_cache_memory_bytes": own}
        with LLM(str(path_of(family)), **sizes) as llm:
            answers = llm.generate(prompts, long, use_tqdm=False)
            found.append([list(each.outputs[0].token_ids) for each in answers])
            recorder = llm._engine.engine[0].scheduler.recorder  # type: ignore[union-attr]
            assert bool(recorder.num_preemptions) == (blocks == 10)
    assert found[0] == found[1]


def test_what_an_encoder_decoder_refuses(llm: LLM, path_of: PathOf) -> None:
    with pytest.raises(ContextTooLong, match="The prompt has 65 tokens"):
        llm.generate({"prompt_token_ids": [9] * 65}, GREEDY)
    with pytest.raises(UnsupportedParameter, match="prompt_logprobs is not supported"):
        llm.generate("Hello!", SamplingParams(prompt_logprobs=1))
    with pytest.raises(InvalidParameter, match="does not know the language 'fr'"):
        llm.generate({"encoder_prompt": "Hello!", "tgt_lang": "fr"}, GREEDY)
    with pytest.raises(InvalidParameter, match="holds no 'prompt'"):
        llm.generate({"encoder_prompt": "Hello!", "prompt": "Hi"}, GREEDY)
    for options in ({"device": "cuda"}, {"pipeline_parallel_size": 2}, {"enable_lora": True}):
        with pytest.raises(UnsupportedOption, match="M2M100ForConditionalGeneration"):
            LLM(str(path_of("m2m_100")), **options)
    with pytest.raises(CorruptModel, match="which token an answer begins with"):
        source_of({}, {}, 8)
    wishes = source_of({}, {"decoder_start_token_id": 0, "num_beams": 4, "length_penalty": 1.0}, 8).not_used
    assert wishes == ("num_beams=4",)
    assert "num_beams=4, which only requests choose" in SourceSizes(8, 8, 1, 1, 1, wishes).note()


def test_sizes_are_predicted(path_of: PathOf) -> None:
    for family in ("bart", "t5"):
        spec = with_encoder_bytes(path_of(family), read_spec(path_of(family)))
        model = load_model(path_of(family), spec, CPU, torch.float32)
        assert held_bytes(model) == resident_bytes(path_of(family), spec, CPU, torch.float32)
        encoder = load_encoder(path_of(family), CPU, torch.float32)
        assert spec.source is not None
        assert spec.source.encoder_bytes == encoder.bytes_held


@pytest.mark.skipif(not has_int8() or native() is None, reason="this torch on this processor has no such product")
@pytest.mark.parametrize(("family", "within"), [("bart", 0.05), ("marian", 0.05), ("t5", 0.2)])
@torch.inference_mode()
def test_eight_bits_take_the_layers_and_the_head(
    family: str, within: float, path_of: PathOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logits stay as near as those of a causal model's eight bits (test_cpu_weights.py). T5 is further off: its scores
    are not scaled, so that a random model attends to few tokens."""
    monkeypatch.setattr(pack, "PACK_MIN_ELEMENTS", 0)
    path, eight = path_of(family), {"quantization": "int8"}
    spec, harnesses = read_spec(path), [SourcedHarness(path) for _ in range(2)]
    harnesses[1].model = load_model(path, spec, CPU, torch.float32, **eight)
    layer: Any = harnesses[1].model.layers[0]
    linears = (layer.attention.qkv, layer.cross.states, layer.cross.out, layer.mlp.down, harnesses[1].model.lm_head)
    assert {type(linear.weight) for linear in linears} == {CpuInt8Weight}
    assert held_bytes(harnesses[1].model) == resident_bytes(path, spec, CPU, torch.float32, **eight)
    logits = []
    for harness in harnesses:
        harness.pool._model = harness.model
        [digest] = harness.read([prompt(19)])
        row = Sequence(prompt(12, seed=2))
        harness.digests = {id(row): digest}
        logits.append(harness.step([(row, 12)], all_logits=True)[0])
    assert 0 < float((logits[1] - logits[0]).norm() / logits[0].norm()) < within


def test_buckets_of_distances_are_those_of_t5() -> None:
    from transformers.models.t5.modeling_t5 import T5Attention

    for count, furthest in ((32, 128), (8, 20)):
        wanted = T5Attention._relative_position_bucket(-torch.arange(200), False, count, furthest)
        found = distance_buckets(count, furthest)
        assert found.tolist() == wanted[: furthest + 1].tolist()
        assert set(wanted[furthest:].tolist()) == {int(found[-1])}


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("family", FAMILIES)
def test_shards_have_the_logits_of_the_whole(family: str, size: int, path_of: PathOf) -> None:
    """Each shard keeps what its own heads read of the prompts: of four heads two, or two, one and one."""
    path, threads = path_of(family), Threads(size)
    spec = read_spec(path)
    heads = even_heads(spec, size)
    assert heads is not None
    sources, answers = [prompt(21), prompt(5, seed=1)], [prompt(14, seed=2), prompt(3, seed=3)]

    @torch.inference_mode()
    def logits(harness: SourcedHarness) -> torch.Tensor | None:
        rows = [Sequence(list(answer)) for answer in answers]
        harness.digests = {id(row): digest for row, digest in zip(rows, harness.read(sources), strict=True)}
        found = list[torch.Tensor]()
        for counts in ((13, 2), (1, 1)):
            inputs = harness._inputs(list(zip(rows, counts, strict=True)), all_logits=True)
            part = harness.model.compute_logits(harness.model.forward(inputs, harness.kv_cache))
            found += [] if part is None else [part]
            for row, count in zip(rows, counts, strict=True):
                row.computed += count
        return torch.cat(found) if found else None

    shares = zip(shards_of(spec, heads), threads.members(), strict=True)
    harnesses = [SourcedHarness(path, shard=shard, group=group) for shard, group in shares]
    for shard, harness in zip(shards_of(spec, heads), harnesses, strict=True):
        assert held_bytes(harness.model) == resident_bytes(path, spec, CPU, torch.float32, shard=shard)
    first, *others = threads.run([partial(logits, harness) for harness in harnesses])
    whole = logits(SourcedHarness(path))
    assert first is not None
    assert whole is not None
    assert_close(first, whole)
    assert others == [None] * (size - 1)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["bart", "t5", "marian"])
def test_ranks_answer_as_one_process(family: str, path_of: PathOf) -> None:
    prompts = [{"prompt_token_ids": prompt(length, seed=length)} for length in (3, 21, 40, 21)]
    answers = []
    for options in ({}, {"tensor_parallel_size": 2}):
        with LLM(str(path_of(family)), max_num_seqs=3, **options) as llm:
            answers.append([list(each.outputs[0].token_ids) for each in llm.generate(prompts, GREEDY, use_tqdm=False)])
    assert answers[0] == answers[1]
