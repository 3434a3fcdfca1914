"""Time to the first token of measured serving runs against `serve`'s simulation of the same closed loop.

    python benchmarks/ttft.py ROWS.csv [CLIENT_PROMPTS]

ROWS.csv has the columns system, backend, model_path, gemm_quant_mode, isl, osl, batch_size (concurrent clients), tp_size and
silicon_ttft_ms, silicon_tpot_ms. Every client sends CLIENT_PROMPTS (4) prompts of isl tokens, the next when one is answered.
The error is exp(|ln(simulated/measured)|) − 1, of the mean TTFT and the median TPOT.
"""

import csv
import math
import sys
from collections.abc import Iterator
from pathlib import Path

from kvcalc import Parallelism, Precision
from kvcalc.serving.run import Load, ServerSettings, serve
from kvcalc.timing.calibration import find_calibration, gpu_named
from kvcalc.timing.deployment import Deployment
from kvcalc.timing.served import served_model


def simulated(path: Path, prompts: int) -> Iterator[tuple[float, float, float, float]]:
    """(TTFT simulated, measured, TPOT simulated, measured) in seconds of each row whose model and stack are known."""
    with path.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            isl, osl, clients, tp = (int(float(row[k])) for k in ("isl", "osl", "batch_size", "tp_size"))
            model, gpu = served_model(row["model_path"]), gpu_named(row["system"])
            calibration = find_calibration(gpu, row["backend"])
            if model is None or calibration is None:
                print(f"left out: {row['model_path']} on {row['system']} under {row['backend']}", file=sys.stderr)
                continue
            precision = Precision(quantization="fp8") if row["gemm_quant_mode"].startswith("fp8") else Precision()
            deployment = Deployment(model, gpu, precision, Parallelism(tp=tp), calibration=calibration)
            load = Load(max_concurrency=clients, num_prompts=clients * prompts, input_len=str(isl), output_len=str(osl))
            found = serve(deployment, load.drawn(), load, ServerSettings(max_num_seqs=clients), "continuous", "paged").record
            measured = (float(row["silicon_ttft_ms"]) / 1e3, float(row["silicon_tpot_ms"]) / 1e3)
            yield found["ttft_mean_s"], measured[0], found["tpot_p50_s"], measured[1]


def figures(pairs: list[tuple[float, float]]) -> str:
    """Median and 90th percentile of the error, and the median ratio."""
    errors = sorted(math.exp(abs(math.log(mine / theirs))) - 1 for mine, theirs in pairs)
    ratios = sorted(mine / theirs for mine, theirs in pairs)
    half, most = len(pairs) // 2, int(0.9 * len(pairs))
    return f"{errors[half]:.1%} / {errors[most]:.1%}, median ratio {ratios[half]:.3f}, {len(pairs)} runs"


def main() -> None:
    rows = list(simulated(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 4))
    print(f"TTFT (mean): {figures([(a, b) for a, b, _, _ in rows])}")
    print(f"TPOT (median): {figures([(c, d) for _, _, c, d in rows])}")


if __name__ == "__main__":
    main()
