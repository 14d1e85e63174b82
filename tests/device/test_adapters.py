"""Several adapters in one batch, through graphs and without: each request gets what merging its adapter would give."""

from pathlib import Path

import pytest
import torch

from localllm.engine.adapter import Adapter
from localllm.engine.params import SamplingParams
from localllm.engine.request import Request, RequestOptions
from localllm.models.layers.lora import LoraLimits
from localllm.models.loader import load_model
from localllm.models.read_spec import read_spec
from localllm.models.weights.lora import open_lora, put_lora
from tests.adapters import make_tiny_adapter, merged
from tests.device.conftest import DEVICE
from tests.device.serving import options, serve
from tests.models.harness import prompt, reference_greedy
from tests.tiny import load_reference

LENGTHS = (50, 3, 21, 1, 34, 17)


@pytest.mark.parametrize("graphs", ["replayed", "padded", "none"])
def test_adapters(graphs: str, tiny_llama_path: Path, tmp_path: Path) -> None:
    folders = [make_tiny_adapter(tmp_path / name, tiny_llama_path, seed=seed) for seed, name in enumerate("ab")]
    bases = [load_reference(tiny_llama_path), *(merged(tiny_llama_path, folder) for folder in folders)]
    spec = read_spec(tiny_llama_path)
    model = load_model(tiny_llama_path, spec, DEVICE, torch.float32, max_model_len=160, lora=LoraLimits(2, 4))
    adapters: list[Adapter | None] = [None]
    for slot, folder in enumerate(folders):
        put_lora(open_lora(folder), model.lora, slot)  # type: ignore[union-attr, arg-type]
        adapters.append(Adapter(folder.name, slot, folder.name))
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    asked = [
        Request(f"r{i}", prompt(length, seed=i), params, RequestOptions(adapter=adapters[i % 3]), max_output_tokens=8)
        for i, length in enumerate(LENGTHS)
    ]
    answers, _ = serve(spec, model, options(graphs=graphs), asked)
    for i, length in enumerate(LENGTHS):
        assert answers[f"r{i}"][0] == reference_greedy(bases[i % 3], prompt(length, seed=i), 8), i
