"""Models run without torch's compiler (80 MiB that no unload gives back) and, on a CPU, without Triton (74 MiB)."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.gguf_files import write_gguf
from tests.models.formats.quantised import SHAPE, save_quantised
from tests.models.formats.stores import AWQ, GPTQ, awq, gptq
from tests.tiny import make_tiny_model

# In a process of its own, because other tests import what this one must not find.
PROGRAM = """
import sys
from localllm.llm import LLM
for path in sys.argv[1:]:
    quantization = "int4" if path.endswith("plain") else None
    with LLM(path, device="cpu", max_model_len=64, quantization=quantization) as llm:
        llm.generate({"prompt_token_ids": [1, 2, 3]}, use_tqdm=False)
    found = sorted({"sympy", "torch._dynamo", "triton"} & sys.modules.keys())
    assert not found, f"{path}: {found}"
"""
TYPES = ("Q4_0", "Q5_1", "Q8_0", "IQ4_NL")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("quantised")
    plain = make_tiny_model(folder / "plain", "llama", **SHAPE)
    found = [plain]
    found.append(save_quantised(plain, folder / "awq", AWQ, awq(32)).path)
    found.append(save_quantised(plain, folder / "gptq", {**GPTQ, "desc_act": True}, gptq(4, 32, order="layer")).path)
    for block_type in TYPES:
        found.append(folder / f"{block_type}.gguf")
        write_gguf(plain, found[-1], block_type)
    return found


def test_no_compiler_is_imported(checkpoints: list[Path]) -> None:
    command = [sys.executable, "-c", PROGRAM, *map(str, checkpoints)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert ran.returncode == 0, ran.stderr[-2000:]
