"""Read hardware counters of a decode step's and a prompt's kernels with Nsight Compute: which limit each reaches.

python -m scripts.gpu_check_lib.counters int4          the program under ncu: one layer, a few launched steps
"""

from __future__ import annotations

import csv
import io
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from scripts.gpu_check_lib.stages import Context, Found, Skip

ROOT = Path(__file__).resolve().parent.parent.parent
METRICS = {
    "dram__throughput.avg.pct_of_peak_sustained_elapsed": "memory",
    "lts__throughput.avg.pct_of_peak_sustained_elapsed": "L2",
    "sm__inst_issued.avg.pct_of_peak_sustained_elapsed": "issue",
    "gpu__time_duration.sum": "ns",
}
KERNELS = "regex:skinny|planar|decode|prefill|attention"
MOST_LAUNCHES = 60


def read_counters(context: Context, tool: str) -> Iterator[Found]:
    for weights in ("16-bit", "int4"):
        command = [tool, "--clock-control", "none", "--csv", "--metrics", ",".join(METRICS), "--kernel-name", KERNELS,
                   "--launch-count", str(MOST_LAUNCHES),
                   sys.executable, "-m", __name__, weights, context.device]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
        (context.out / f"counters-{weights}.txt").write_text(done.stdout + done.stderr)
        found = parse(done.stdout)
        if not found:
            raise Skip(f"ncu read nothing: {(done.stderr or done.stdout).strip()[-200:]}")
        for kernel, values in found.items():
            text = ", ".join(f"{name} {values[name]:,.0f}{'' if name == 'ns' else ' %'}" for name in values)
            yield f"{weights} {kernel}", "note", text, values


def parse(said: str) -> dict[str, dict[str, float]]:
    """Return kernel -> metric -> value of its longest launch, from ncu's CSV; lines before the table are ignored."""
    start = said.find('"ID"')
    rows = csv.DictReader(io.StringIO(said[start:])) if start >= 0 else ()
    launches: dict[str, tuple[str, dict[str, float]]] = {}
    for row in rows:
        if (name := METRICS.get(row.get("Metric Name") or "")) is None:
            continue
        kernel, values = launches.setdefault(row["ID"], (row["Kernel Name"].split("(")[0], {}))
        values[name] = _in_ns(float(row["Metric Value"].replace(",", "")), row.get("Metric Unit") or "")
    longest: dict[str, dict[str, float]] = {}
    for kernel, values in launches.values():
        if kernel not in longest or values.get("ns", 0.0) > longest[kernel].get("ns", 0.0):
            longest[kernel] = values
    return longest


def _in_ns(value: float, unit: str) -> float:
    """Convert a duration to ns; leave a share unchanged."""
    return value * {"us": 1e3, "usecond": 1e3, "ms": 1e6, "msecond": 1e6}.get(unit, 1.0)


def main(weights: str, device: str = "cuda") -> None:
    import torch

    from scripts.gpu_check_lib.engine import Options, RandomEngine
    from scripts.gpu_check_lib.figures import dtype_of
    from scripts.random_weights import shape_spec

    where = torch.device(device)
    spec = shape_spec("llama-3.1-8b" if device == "cuda" else "tiny", num_hidden_layers=1)
    options = Options(where, dtype_of(where), max_num_seqs=16, max_model_len=4096, num_kv_tokens=8192, graphs="none",
                      weights=weights)  # type: ignore[arg-type]  # fmt: skip
    engine = RandomEngine(spec, options)
    engine.decode(1, 1024, 2)
    engine.prefill(2048, repeats=1)
    engine.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
