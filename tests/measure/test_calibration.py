"""The rows that a new GPU needs: their number and sizes, and that they can be read again."""

from itertools import pairwise
from pathlib import Path

import pytest
from conftest import Run

from kvcalc.library.load import load_gpu
from kvcalc.measure.calibration_rows import MAX_BOUND_S, Shape, measure_shapes, plan_shapes
from kvcalc.measure.ceilings import Machine, find_machine
from kvcalc.report.export import to_csv
from kvcalc.timing.rows import read_rows


@pytest.fixture(scope="module")
def machine() -> Machine:
    return find_machine("cpu", 1)


def test_25_to_50_shapes_of_each_family_spread_over_its_times(machine: Machine) -> None:
    gpu = load_gpu("h100")
    shapes = plan_shapes(machine, gpu)
    for op in ("gemm", "decode_attention", "prefill_attention"):
        times = sorted(s.seconds(gpu) for s in shapes if s.op == op)
        assert 25 <= len(times) <= 50, op
        assert len({s for s in shapes if s.op == op}) == len(times)
        assert max(times) <= MAX_BOUND_S
        assert times[-1] / times[0] > 100
        gaps = [b / a for a, b in pairwise(times)]
        assert max(gaps) < 6
    assert all(s.bytes <= machine.free_bytes() for s in shapes)


def test_the_roof_of_a_shape_is_its_bytes_or_flops() -> None:
    # 1 × 4096 × 4096: 2 · 4096² bytes of weights, 2 · 2 · 4096 of input and output, at 3.35 TB/s.
    found = Shape("gemm", "bfloat16", (1, 4096, 4096)).seconds(load_gpu("h100"))
    assert found == pytest.approx((2 * 4096**2 + 4 * 4096) / 3.35e12)


def test_measured_shapes_are_rows_that_can_be_read(machine: Machine, tmp_path: Path) -> None:
    shapes = [
        Shape("gemm", "bfloat16", (4, 128, 64)), Shape("decode_attention", "bfloat16", (2, 4, 2, 64, 32, 0)),
        Shape("prefill_attention", "bfloat16", (1, 4, 2, 64, 16, 0)),
    ]  # fmt: skip
    told: list[str] = []
    rows = list(measure_shapes(shapes, machine, 0.001, told.append, lambda text, done: None))
    path = tmp_path / "rows.csv"
    path.write_text(to_csv(rows), encoding="utf-8")
    table = read_rows(path)
    assert not table.invalid and not told
    assert [(r.op, r.shape) for r in table.rows] == [(s.op, tuple(float(c) for c in s.counts)) for s in shapes]
    assert [r.dtype for r in table.rows] == ["bfloat16", "bfloat16", "bfloat16/bfloat16"]
    assert all(r.time_us > 0 for r in table.rows)


def test_what_a_machine_cannot_run_is_said_and_left_out(machine: Machine) -> None:
    told: list[str] = []
    shapes = [Shape("decode_attention", "bfloat16", (1, 3, 2, 64, 32, 0)), Shape("gemm", "bfloat16", (2, 64, 32))]
    rows = list(measure_shapes(shapes, machine, 0.001, told.append, lambda text, done: None))
    assert [row["op"] for row in rows] == ["gemm"]
    assert len(told) == 1 and "left out" in told[0]


@pytest.mark.parametrize(
    ("more", "what"),
    [
        ("llama-3.2-1b", "takes no model"),
        ("--generate 3", "takes no --generate"),
        ("", "is no preset, so its time models have no roofline"),
    ],
)
def test_what_calibration_does_not_take(kvcalc: Run, more: str, what: str) -> None:
    found = kvcalc(f"measure {more} --calibration --device cpu --threads 1")
    assert found.code == 2
    assert what in found.err


def test_its_rows_name_the_gpu_whose_laws_they_make(kvcalc: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows and preset of one run belong together, and rows are predicted. Time models of such small products may be refused."""
    shapes = [Shape("gemm", "bfloat16", (m, 64 * n, 64)) for m in (1, 2, 4, 8) for n in (1, 2, 4)]
    monkeypatch.setattr("kvcalc.measure.calibration_rows.plan_shapes", lambda machine, gpu: shapes)
    monkeypatch.setenv("KVCALC_PRESETS", str(tmp_path))
    rows = tmp_path / "rows.csv"
    made = kvcalc(f"measure --calibration --device cpu --threads 1 --seconds 0.001 --save-gpu here --output {rows} --format json")
    if "missed by" in made.err:
        pytest.skip("other work on this machine disturbs the times")
    assert [record["rows"] for record in made.records] == [12]
    assert all(line.startswith(("note: ", "wrote ")) for line in made.err.splitlines())
    (found,) = kvcalc(f"validate {rows} --stack torch --format json").records
    assert (found["gpu"], found["rows"], found["predicted_rows"]) == ("here", 12, 12)
