"""Marks that several modules of tests have in common."""

import pytest

from localllm.kernels.cpu.native.library import native

needs_library = pytest.mark.skipif(native() is None, reason="this machine has no native library")
