"""EAGLE-1 and EAGLE-3 drafters: what they compute, over a paged cache in any pieces, and which files they refuse."""

import json
import os
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from localllm.errors import CorruptModel, DrafterMismatch, UnsupportedModel
from localllm.models.decoder.decoder import DecoderModel
from localllm.models.drafters.eagle import EagleDrafter, load_eagle, plan_eagle
from localllm.models.drafters.eagle_config import EagleMethod, eagle_method, read_eagle
from localllm.models.loader import load_model
from localllm.models.read_spec import read_spec
from localllm.models.spec.shard import local_spec, whole_shard
from localllm.models.weights.parameters import held_bytes
from tests.eagle_files import Form, eagle_tensors, write_eagle
from tests.models.harness import HEAD_DIM, HEADS, KV_HEADS, TAPS, WIDTH, Crank
from tests.tiny import make_tiny_model

CPU, F32 = torch.device("cpu"), torch.float32
METHODS: list[EagleMethod] = ["eagle", "eagle3"]


@pytest.fixture(scope="module")
def target_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("target") / "tiny", num_hidden_layers=4)


@pytest.fixture(scope="module")
def target(target_path: Path) -> DecoderModel:
    model = load_model(target_path, read_spec(target_path), CPU, F32)
    assert isinstance(model, DecoderModel)
    return model


@pytest.fixture(scope="module")
def config(target_path: Path) -> dict[str, Any]:
    return dict(json.loads((target_path / "config.json").read_text("utf-8")))


# The definition, in plain torch: a whole sequence at once, no cache.


def oracle(
    method: str, w: dict[str, Tensor], embeds: Tensor, hidden: Tensor, *, before: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what the next guess reads [n, h], and k and v [n, kv_heads, d], of the pairs 1 .. n.

    embeds: [n, h] of tokens 1 .. n; hidden: [n, h] of tokens 0 .. n - 1, after fc for EAGLE-3. before: the norm comes
    before the residual.
    """

    def norm(x: Tensor, name: str) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * w[f"layers.0.{name}.weight"]

    def project(x: Tensor, name: str, heads: int) -> Tensor:
        return (x @ w[f"layers.0.self_attn.{name}_proj.weight"].T).view(len(x), heads, HEAD_DIM)

    def rotate(x: Tensor) -> Tensor:
        angles = torch.arange(len(x))[:, None] / 10_000 ** (torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
        cos, sin = (angles.repeat(1, 2).cos()[:, None], angles.repeat(1, 2).sin()[:, None])
        a, b = x.chunk(2, dim=-1)
        return x * cos + torch.cat((-b, a), dim=-1) * sin

    if method == "eagle3":
        normed = norm(hidden, "hidden_norm")
        x, residual = torch.cat((norm(embeds, "input_layernorm"), normed), -1), normed if before else hidden
    else:
        x = residual = torch.cat((embeds, hidden), -1) @ w["fc.weight"].T
    q, k, v = (project(x, name, heads) for name, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)))
    q, k = rotate(q), rotate(k)
    group = HEADS // KV_HEADS
    scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(group, 1)) * HEAD_DIM**-0.5
    scores += torch.full((len(x), len(x)), float("-inf")).triu(1)
    attended = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v.repeat_interleave(group, 1)).flatten(1)
    residual = residual + attended @ w["layers.0.self_attn.o_proj.weight"].T
    y = norm(residual, "post_attention_layernorm")
    gate, up = (y @ w[f"layers.0.mlp.{name}_proj.weight"].T for name in ("gate", "up"))
    return residual + (F.silu(gate) * up) @ w["layers.0.mlp.down_proj.weight"].T, k, v


def oracle_logits(method: str, w: dict[str, Tensor], hidden: Tensor, target: DecoderModel) -> Tensor:
    if method == "eagle":
        logits = target.compute_logits(hidden)
        assert logits is not None
        return logits
    normed = hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + 1e-5) * w["norm.weight"]
    logits = torch.full((len(hidden), target.spec.vocab_size), float("-inf"))
    for row, offset in enumerate(w["d2t"].tolist()):
        logits[:, row + offset] = normed @ w["lm_head.weight"][row]
    return logits


def embedded(target: DecoderModel, tokens: Tensor) -> Tensor:
    assert target.embedding is not None
    return target.embedding(tokens, tokens)


def loaded(path: Path, method: EagleMethod, target: DecoderModel, **plan: Any) -> EagleDrafter:
    plan_of_it = replace(plan_eagle(path, method, target.spec), **plan)
    return load_eagle(plan_of_it, target, CPU, F32, max_model_len=256)


def a_drafter(
    path: Path, config: dict[str, Any], target: DecoderModel, method: EagleMethod, **fields: Any
) -> tuple[EagleDrafter, dict[str, Tensor]]:
    """Write a drafter, load it, and return it with its tensors."""
    taps = TAPS if method == "eagle3" else None
    write_eagle(path, config, method, taps=taps, **fields)
    drafter = loaded(path, method, target)
    return drafter, eagle_tensors(config, method, draft_vocab=96)


def a_text(seed: int, count: int, num_taps: int) -> tuple[Tensor, Tensor]:
    """Return tokens [n] and features [n, taps * hidden]: no two alike."""
    made = torch.Generator().manual_seed(seed)
    return torch.randint(0, 512, (count,), generator=made), torch.randn(count, num_taps * WIDTH, generator=made)


@pytest.mark.parametrize("chunk", [100, 3, 1])
@pytest.mark.parametrize(
    ("method", "form", "fields"),
    [
        ("eagle", "authors", {}),
        ("eagle3", "authors", {}),
        ("eagle3", "authors", {"as_bin": True}),
        ("eagle3", "speculators", {}),
        ("eagle3", "speculators", {"norm_before_residual": False}),
    ],
)
def test_a_drafter_computes_what_its_definition_says(
    tmp_path: Path, config: dict[str, Any], target: DecoderModel, method: EagleMethod, form: Form,
    fields: dict[str, Any], chunk: int,
) -> None:  # fmt: skip
    """Two rows of 21 and 10 tokens in chunks, then three guesses each."""
    drafter, w = a_drafter(tmp_path / "eagle", config, target, method, form=form, **fields)
    before = form == "speculators" and fields.get("norm_before_residual", True)
    assert drafter.taps == (tuple(TAPS) if method == "eagle3" else (-1,))
    crank, texts = Crank(drafter), [a_text(1, 21, len(drafter.taps)), a_text(2, 10, len(drafter.taps))]
    rows = [crank.row(40), crank.row(40)]
    last = []
    for row, (tokens, features) in zip(rows, texts, strict=True):
        for first in range(1, len(tokens), chunk):
            end = min(first + chunk, len(tokens))
            out = crank.extend([(row, first, tokens[first:end])], features[first - 1 : end - 1])
        last.append(out)
    hidden, known = torch.cat(last), [tokens for tokens, _ in texts]
    read = [f[:-1] @ w["fc.weight"].T if method == "eagle3" else f[:-1] for _, f in texts]
    for guess in range(4):
        wanted = []
        for row in rows:
            embeds = embedded(target, known[row][1:])
            out, k, v = oracle(method, w, embeds, read[row], before=before)
            wanted.append(out[-1:])
            got_k, got_v = crank.stored(row, 1, len(known[row]) - 1)
            torch.testing.assert_close(got_k, k, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(got_v, v, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(hidden, torch.cat(wanted), rtol=1e-5, atol=1e-5)
        logits = drafter.logits(hidden)
        torch.testing.assert_close(logits, oracle_logits(method, w, torch.cat(wanted), target), rtol=1e-5, atol=1e-5)
        assert logits.dtype == F32
        if guess == 3:
            break
        drawn = logits.argmax(-1)
        step = [(row, len(known[row]), drawn[row : row + 1]) for row in rows]
        read = [torch.cat((r, h[None])) for r, h in zip(read, hidden, strict=True)]
        known = [torch.cat((t, d[None])) for t, d in zip(known, drawn, strict=True)]
        hidden = crank.step(step, hidden)
    assert all(crank.kv.k.flatten(1, 2)[:, crank.slots(row, 0, 1)].isnan().all() for row in rows)  # no pair at slot 0


@pytest.mark.parametrize("method", METHODS)
def test_rows_of_one_step_do_not_touch_each_other(
    tmp_path: Path, config: dict[str, Any], target: DecoderModel, method: EagleMethod
) -> None:
    """Rows of 1, 5 and 12 tokens in one call give what each gives alone."""
    drafter, _ = a_drafter(tmp_path / "eagle", config, target, method)
    texts = [a_text(seed, count, len(drafter.taps)) for seed, count in ((1, 2), (2, 6), (3, 13))]
    together, alone = Crank(drafter, 1), Crank(drafter, 2)
    rows = [(together.row(len(tokens)), 1, tokens[1:]) for tokens, _ in texts]
    got = together.extend(rows, torch.cat([features[:-1] for _, features in texts]))
    for place, (tokens, features) in enumerate(texts):
        row = alone.row(len(tokens))
        torch.testing.assert_close(
            got[place], alone.extend([(row, 1, tokens[1:])], features[:-1])[0], rtol=1e-5, atol=1e-5
        )


def test_a_drafter_hands_on_its_normed_output_where_its_config_says_so(
    tmp_path: Path, config: dict[str, Any], target: DecoderModel
) -> None:
    plain, w = a_drafter(tmp_path / "plain", config, target, "eagle3")
    normed, _ = a_drafter(tmp_path / "normed", config, target, "eagle3", norm_output=True)
    tokens, features = a_text(1, 9, 3)
    cranks = Crank(plain), Crank(normed)
    a, b = (crank.extend([(crank.row(9), 1, tokens[1:])], features[:-1]) for crank in cranks)
    torch.testing.assert_close(b, a * torch.rsqrt(a.pow(2).mean(-1, keepdim=True) + 1e-5) * w["norm.weight"])
    torch.testing.assert_close(plain.logits(a), normed.logits(b))


def test_a_drafter_may_read_the_final_hidden_state_as_it_is(
    tmp_path: Path, config: dict[str, Any], target: DecoderModel
) -> None:
    w = eagle_tensors(config, "eagle3", draft_vocab=96)
    del w["fc.weight"]
    path = write_eagle(tmp_path / "e", config, tensors=w, eagle_config={"use_aux_hidden_state": False})
    drafter = loaded(path, "eagle3", target)
    assert drafter.taps == (-1,)
    tokens, features = a_text(1, 9, 1)
    crank = Crank(drafter)
    wanted, _, _ = oracle("eagle3", w, embedded(target, tokens[1:]), features[:-1])
    given = features.clone()
    got = crank.extend([(crank.row(9), 1, tokens[1:])], given[:-1])
    torch.testing.assert_close(got, wanted[-1:], rtol=1e-5, atol=1e-5)
    assert torch.equal(given, features)  # the runner may keep them for the next step


def test_features_are_normed_before_fc_where_the_config_says_so(
    tmp_path: Path, config: dict[str, Any], target: DecoderModel
) -> None:
    w = eagle_tensors(config, "eagle3", draft_vocab=96) | {"input_norm.weight": torch.rand(3 * WIDTH) + 0.5}
    path = write_eagle(tmp_path / "e", config, taps=TAPS, tensors=w, norm_before_fc=True)
    drafter = loaded(path, "eagle3", target)
    tokens, features = a_text(1, 9, 3)
    crank = Crank(drafter)
    normed = features * torch.rsqrt(features.pow(2).mean(-1, keepdim=True) + 1e-5) * w["input_norm.weight"]
    wanted, _, _ = oracle("eagle3", w, embedded(target, tokens[1:]), normed[:-1] @ w["fc.weight"].T)
    got = crank.extend([(crank.row(9), 1, tokens[1:])], features[:-1])
    torch.testing.assert_close(got, wanted[-1:], rtol=1e-5, atol=1e-5)


def test_a_drafter_may_be_quantised_at_load(tmp_path: Path, config: dict[str, Any], target: DecoderModel) -> None:
    plain, _ = a_drafter(tmp_path / "e", config, target, "eagle3")
    narrow = loaded(tmp_path / "e", "eagle3", target, quantization="int8")
    assert held_bytes(narrow) < held_bytes(plain)
    tokens, features = a_text(1, 9, 3)
    cranks = Crank(plain), Crank(narrow)
    a, b = (crank.extend([(crank.row(9), 1, tokens[1:])], features[:-1]) for crank in cranks)
    torch.testing.assert_close(a, b, rtol=0.05, atol=0.05 * float(a.std()))


# Files


@pytest.mark.parametrize("as_bin", [False, True])
@pytest.mark.parametrize("method", METHODS)
def test_the_plan_counts_the_bytes_of_the_loaded_drafter(
    tmp_path: Path, config: dict[str, Any], target: DecoderModel, method: EagleMethod, as_bin: bool
) -> None:
    drafter, _ = a_drafter(tmp_path / "e", config, target, method, as_bin=as_bin)
    plan = plan_eagle(tmp_path / "e", method, target.spec)
    shared, table = held_bytes(target), 256 * HEAD_DIM * 4
    assert plan.stored_bytes == held_bytes(drafter) - shared - table
    assert (plan.taps, plan.first_key) == (drafter.taps, 1)
    assert local_spec(plan.spec, whole_shard(plan.spec)) == drafter.spec


def test_tensors_are_found_by_every_published_name(
    tmp_path: Path, config: dict[str, Any], target: DecoderModel
) -> None:
    w = eagle_tensors(config, "eagle", draft_vocab=96)
    w["fc.bias"] = torch.linspace(-1, 1, WIDTH)
    names: list[tuple[str, Callable[[str], str]]] = [
        ("authors", lambda name: name),
        ("model", lambda name: f"model.{name}"),
        ("speculators", lambda name: name.replace("layers.0.", "transformer.").replace("fc.", "fusion_fc.")),
    ]
    tokens, features = a_text(1, 9, 1)
    results = []
    for form, rename in names:
        path = write_eagle(tmp_path / form, config, "eagle", tensors={rename(name): t for name, t in w.items()})
        crank = Crank(loaded(path, "eagle", target))
        results.append(crank.extend([(crank.row(9), 1, tokens[1:])], features[:-1]))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])
    plain, _ = a_drafter(tmp_path / "plain", config, target, "eagle")
    crank = Crank(plain)
    assert not torch.allclose(results[0], crank.extend([(crank.row(9), 1, tokens[1:])], features[:-1]))  # has a bias


@pytest.mark.parametrize(
    ("method", "fields"),
    [("eagle3", {}), ("eagle3", {"form": "speculators"}), ("eagle", {}), ("eagle", {"as_bin": True})],
)
def test_the_kind_of_a_folder_is_found(
    tmp_path: Path, config: dict[str, Any], target_path: Path, method: EagleMethod, fields: dict[str, Any]
) -> None:
    assert eagle_method(write_eagle(tmp_path / "e", config, method, **fields)) == method
    assert eagle_method(target_path) is None
    assert eagle_method(tmp_path) is None


def test_the_usual_taps_are_near_the_start_the_middle_and_the_end(tmp_path: Path, config: dict[str, Any]) -> None:
    path = write_eagle(tmp_path / "e", config)
    deep = read_spec(make_tiny_model(tmp_path / "deep", num_hidden_layers=12))
    assert read_eagle(path, "eagle3", deep).taps == (2, 6, 9)


@pytest.mark.parametrize(
    ("method", "fields", "error", "told"),
    [
        ("eagle3", {"taps": TAPS, "vocab_size": 700}, DrafterMismatch, "vocabulary of 700"),
        ("eagle3", {"taps": TAPS, "target_hidden_size": 128}, DrafterMismatch, "128 numbers"),
        ("eagle", {"hidden_size": 128}, DrafterMismatch, "128 numbers"),
        ("eagle3", {"taps": [1, 2, 30]}, DrafterMismatch, "has 4 layers"),
        ("eagle3", {"taps": [1, 1, 3]}, DrafterMismatch, "read once"),
        ("eagle3", {"form": "speculators"}, DrafterMismatch, "at least 7 layers"),
        ("eagle3", {"taps": TAPS, "fc_norm": True}, UnsupportedModel, "fc_norm"),
        ("eagle3", {"taps": TAPS, "num_hidden_layers": 2}, UnsupportedModel, "2 layers"),
        ("eagle3", {"taps": TAPS, "num_attention_heads": 7}, CorruptModel, "7 attention heads"),
        ("eagle3", {"taps": TAPS, "draft_vocab_size": 97}, CorruptModel, "lm_head has shape"),
        ("eagle3", {"taps": [1, 2]}, None, ""),
    ],
)
def test_another_models_drafter_is_refused_with_what_differs(
    tmp_path: Path, config: dict[str, Any], target: DecoderModel, method: EagleMethod, fields: dict[str, Any],
    error: type[Exception] | None, told: str,
) -> None:  # fmt: skip
    path = write_eagle(tmp_path / "e", config, method, **fields)
    if error is None:
        assert loaded(path, method, target).taps == (1, 2)
        return
    with pytest.raises(error, match=told):
        plan_eagle(path, method, target.spec)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda w: w.pop("norm.weight"), "lacks norm.weight"),
        (lambda w: w.update({"layers.1.mlp.up_proj.weight": torch.zeros(2, 2)}), "layers.1.mlp.up_proj.weight"),
        (lambda w: w.update({"fc.weight": torch.zeros(64, 64)}), r"fc.weight|fc has shape \[64, 64\]"),
        (lambda w: w.pop("d2t"), "lacks d2t"),
        (lambda w: w.update(d2t=w["d2t"] + 500), "tokens of their own"),
        (lambda w: w.update(d2t=-torch.arange(96)), "tokens of their own"),
        (lambda w: w.update(d2t=torch.zeros(95, dtype=torch.int64)), "96 whole numbers"),
    ],
)
def test_tensors_that_contradict_the_config_are_named(
    tmp_path: Path, config: dict[str, Any], target: DecoderModel, change: Any, told: str
) -> None:
    w = eagle_tensors(config, "eagle3", draft_vocab=96)
    change(w)
    path = write_eagle(tmp_path / "e", config, taps=TAPS, tensors=w)
    with pytest.raises(CorruptModel, match=told):
        loaded(path, "eagle3", target)


class Touch:
    """Makes a folder when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def test_a_file_that_would_run_code_is_not_opened(tmp_path: Path, config: dict[str, Any], target: DecoderModel) -> None:
    path = write_eagle(tmp_path / "e", config, taps=TAPS, as_bin=True)
    torch.save({"fc.weight": Touch(tmp_path / "ran")}, path / "pytorch_model.bin")
    with pytest.raises(UnsupportedModel, match="does more than hold tensors") as caught:
        plan_eagle(path, "eagle3", target.spec)
    assert "safetensors" in str(caught.value.hint)
    assert "it calls" in str(caught.value.why)
    assert "mkdir" in str(caught.value.why)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("content", [b"", b"junk", pickle.dumps({"fc.weight": 3}), [1, 2], {"fc.weight": 3}])
def test_a_file_without_tensors_is_refused(
    tmp_path: Path, config: dict[str, Any], target: DecoderModel, content: Any
) -> None:
    path = write_eagle(tmp_path / "e", config, taps=TAPS, as_bin=True)
    file = path / "pytorch_model.bin"
    if isinstance(content, bytes):
        file.write_bytes(content)
    else:
        torch.save(content, file)
    with pytest.raises(UnsupportedModel, match=r"pytorch_model\.bin"):
        plan_eagle(path, "eagle3", target.spec)


def test_a_truncated_file_is_refused(tmp_path: Path, config: dict[str, Any], target: DecoderModel) -> None:
    path = write_eagle(tmp_path / "e", config, taps=TAPS, as_bin=True)
    file = path / "pytorch_model.bin"
    file.write_bytes(file.read_bytes()[:9000])
    with pytest.raises(UnsupportedModel, match=r"pytorch_model\.bin is not an archive"):
        plan_eagle(path, "eagle3", target.spec)


def test_a_target_of_several_streams_is_refused(tmp_path: Path, tiny_model_path: Callable[[str], Path]) -> None:
    config = json.loads((tiny_model_path("llama") / "config.json").read_text())
    target, drafter = read_spec(tiny_model_path("gemma3n")), write_eagle(tmp_path / "eagle", config, "eagle")
    with pytest.raises(DrafterMismatch, match=r"Gemma3nForCausalLM runs without EAGLE drafters.*several streams"):
        read_eagle(drafter, "eagle", target)
