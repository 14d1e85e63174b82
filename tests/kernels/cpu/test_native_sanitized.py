"""The native sources under the thread, address and undefined-behaviour sanitizers."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from localllm.kernels.cpu.native import choice, library

DRIVER = Path(__file__).with_name("sanitized.c")
FLAGS = ["-O1", "-g", "-std=gnu11", "-fno-math-errno", "-ffp-contract=fast", "-Wno-psabi", "-march=x86-64-v3"]


@pytest.mark.slow
@pytest.mark.skipif("avx2" not in choice.usable_sets(), reason="needs a processor with AVX2")
@pytest.mark.skipif(not sys.platform.startswith("linux") or shutil.which("cc") is None, reason="needs cc on Linux")
@pytest.mark.parametrize("sanitizer", ["thread", "address,undefined"])
def test_sanitizers_find_nothing(sanitizer: str, tmp_path: Path) -> None:
    program = tmp_path / "sanitized"
    sources = [str(path) for path in [DRIVER, *sorted(library.FOLDER.glob("*.c"))]]
    options = [f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all"]
    command = ["cc", *FLAGS, *options, f"-I{library.FOLDER}", *sources, "-o", str(program), "-lpthread", "-lm"]
    compiled = subprocess.run(command, capture_output=True, text=True, check=False)
    if compiled.returncode:
        assert "cannot find" in compiled.stderr, compiled.stderr
        pytest.skip(f"the compiler lacks the sanitizer {sanitizer}")
    done = subprocess.run([str(program)], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
