"""Small models of the classes of `transformers`: they run and agree, or are refused by name (classes.py)."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from localllm.models.read_spec import read_spec
from tests.models.class_models import make_class_model
from tests.models.classes import try_class

RUN = (
    "afmoe",  # experts; an attention gate; windows
    "bart",  # a head that calls the decoder, positions that count from the length of a cache
    "bert",  # an encoder's class as a decoder: its head reads outputs that no layer here computes
    "hunyuan_v1_moe",  # a router that reads its matrix by name
    "laguna",  # another number of heads, and a window, by layer
    "jetmoe",  # keys that the class repeats for each chosen expert
    "mimo_v2_flash",  # twice the key heads in windowed layers, and narrower values
    "minicpm3",  # values narrower than keys
    "deepseek_v4",  # compressed entries beside a window, and an indexer of them; several residual streams
    "hy_v4",  # keys that an indexer chooses, for layers that share the choice; sinks
    "inkling_text",  # four short convolutions a layer, and a bias for each distance
)
HYBRIDS = (
    "falcon_h1",  # attention and Mamba-2 side by side; a head that reads an attribute of the layers
    "jamba",  # a scan that takes no state
    "lfm2",  # a convolution alone
    "nemotron_h",  # layers of one part
    "qwen3_5_text",  # gated delta net
    "qwen4_exp_text",  # keys chosen by pools, residual streams, embeddings of n-grams, a convolution with gaps
    "zaya",  # a recurrent module that makes queries, keys and values
)
COMPOSITES = {
    "aria": "transformers",
    "exaone4_5": "own",
    "glm5_next": "transformers",  # a linear attention, and keys that an indexer chooses by pools
    "idefics2": "own",  # its text part is named text_model
    "hyperclovax_vision_v2": "own",  # the whole model says that embeddings are tied
    "lfm3_vl": "own",
    "minicpmv4_7": "own",  # recurrent layers
    "minimax_m3_vl": "transformers",  # blocks of keys that an indexer chooses; the whole model reads the stored names
    "mistral_large4": "transformers",  # latents and choices that layers share
    "muse_glimmer": "own",
    "nemotron_h_omni": "own",  # a projector that is named mlp1
    "ovis2": "own",
    "qwen4_exp": "transformers",
    "step3p7": "own",  # only the whole model has a class; more heads in windowed layers
}
REFUSED = {
    "trocr": r"TrOCRForCausalLM is not supported: its attention cannot be replaced",
    "llama4_text": r"layers of type chunked_attention",
    "mpt": r"MptForCausalLM is not supported: its attention cannot be replaced",
    "rwkv": r"type 'rwkv' are not supported.*no num_attention_heads",
}


@pytest.mark.parametrize("model_type", RUN)
def test_classes_without_a_decoder_of_ours_run(model_type: str) -> None:
    outcome = try_class(model_type, "transformers")
    assert outcome.kind == "transformers", outcome.detail


@pytest.mark.parametrize("model_type", HYBRIDS)
def test_hybrids_run_through_their_classes(model_type: str) -> None:
    """Each sequence keeps its states in mixed batches, whatever the chunks."""
    outcome = try_class(model_type, "transformers")
    assert outcome.kind == "transformers", outcome.detail


@pytest.mark.parametrize("model_type", COMPOSITES)
def test_a_model_that_no_family_lists_runs_by_its_text_part(model_type: str) -> None:
    outcome = try_class(model_type)
    assert outcome.kind == COMPOSITES[model_type], outcome.detail


def test_a_text_part_is_found_under_the_name_of_released_checkpoints(tmp_path: Path) -> None:
    make_class_model(tmp_path, "nemotron_h_omni")
    spec, file = read_spec(tmp_path), tmp_path / "config.json"
    config = json.loads(file.read_text())
    text = config.pop("text_config")
    file.write_text(json.dumps({**config, "llm_config": text}))
    assert read_spec(tmp_path).layer_kinds == spec.layer_kinds


@pytest.mark.parametrize("model_type", REFUSED)
def test_what_is_not_supported_is_named(model_type: str) -> None:
    outcome = try_class(model_type, "transformers")
    assert outcome.kind == "refused", outcome
    assert re.search(REFUSED[model_type], outcome.detail, re.DOTALL)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_class_runs_or_is_refused() -> None:
    """All of them, each in its own process."""
    root = Path(__file__).parents[2]
    table = subprocess.run(
        [sys.executable, "-m", "tests.models.classes"], cwd=root, capture_output=True, text=True, check=False
    )
    assert table.returncode == 0, table.stdout
    runs = re.search(r"(\d+) of \d+ that can be built run", table.stdout)
    assert runs is not None
    assert int(runs[1]) >= 185, table.stdout
