"""Write the errors of simulated servers, compared with measured servers, into `validation` of each calibration
file.

    python benchmarks/serving_errors.py e2e_dense.csv e2e_moe.csv

A new fit of the calibrations from files that include these rows gives the same errors. This script leaves the
kernel models unchanged.
"""

import sys
from pathlib import Path

import msgspec

from kvcalc.library.load import load_gpu
from kvcalc.library.presets import shipped_folder
from kvcalc.serving.measured_servers import steps_validated
from kvcalc.timing.calibration import find_calibration, read_calibration, to_yaml
from kvcalc.timing.rows import read_rows


def main() -> None:
    rows = [row for path in sys.argv[1:] for row in read_rows(Path(path)).rows]
    for name, stack in sorted({(load_gpu(row.gpu).name, row.framework) for row in rows}):
        gpu = load_gpu(name)
        if find_calibration(gpu, stack) is None:
            continue
        here = [row for row in rows if load_gpu(row.gpu).name == name and row.framework == stack]
        path = shipped_folder() / "calibrations" / name / f"{stack}.yaml"
        laws = read_calibration(path)
        found = steps_validated(laws, gpu, here)
        path.write_text(to_yaml(msgspec.structs.replace(laws, validation=found)), encoding="utf-8")
        print(f"{name} {stack}: {', '.join(f'{key} {100 * v.p90_abs_error:.0f} %' for key, v in found.items())}")


if __name__ == "__main__":
    main()
