"""The native library is compared with torch's twins, whose place Triton's kernels take under the interpreter."""

from localllm.kernels.launch import INTERPRETED

collect_ignore_glob = ["test_*.py"] if INTERPRETED else []
