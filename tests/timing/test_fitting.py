"""Fits find the kernel model that generated the times, also with outliers, and the same model every time."""

from pathlib import Path

import msgspec
import numpy as np
import pytest

from kvcalc.errors import UserError
from kvcalc.library import presets
from kvcalc.library.load import load_gpu
from kvcalc.timing.calibration import (
    Calibration,
    KernelModelEntry,
    RefusedFit,
    find_calibration,
    load_calibration,
    read_calibration,
    stacks_of,
    to_yaml,
)
from kvcalc.timing.fitting import MIN_SECOND_ROWS, calibrate, fit, make_calibration, round_parameters, select_rows, start_points
from kvcalc.timing.kernel_models.families import FAMILIES
from kvcalc.timing.kernel_models.flash_attention import DecodeAttention, FlashDecode
from kvcalc.timing.kernel_models.fused_moe import AllReduce, moe_candidates
from kvcalc.timing.kernel_models.gemm import Gemm
from kvcalc.timing.kernel_models.kernel_model import figures_of
from kvcalc.timing.rows import MeasuredRow, MeasurementFile

H100 = load_gpu("h100")
TRUE = Gemm(t0=3.4, ec=0.7, em=0.9, p=3.0, tr=4.0, r=1.2e5)


def shapes(rows: int) -> tuple[np.ndarray, ...]:
    """Return shapes of products from thin to large, always the same."""
    index = np.arange(rows)
    m = 2.0 ** (index % 13)
    n = 1024.0 * (1 + index * 7 % 16)
    k = 512.0 * (1 + index * 11 % 20)
    return m, n, k


def measured_rows(rows: int, op: str = "gemm", framework: str = "mine") -> list[MeasuredRow]:
    table = shapes(rows)
    times = TRUE.us(figures_of(H100), *table)
    return [
        MeasuredRow(i, op, "h100", framework, "bfloat16", tuple(float(c[i]) for c in table), float(times[i]), "", "1.0")
        for i in range(rows)
    ]


def decode_row(i: int, width: float = 128.0, slower: float = 1.0) -> MeasuredRow:
    shape = (2.0 ** (i % 6), 32.0, 8.0, width, 1000.0 * (1 + i % 5), 0.0)
    us = float(DecodeAttention().us(figures_of(H100), *(np.array([x]) for x in shape))[0])
    return measured_rows(1, op="decode_attention")[0]._replace(shape=shape, time_us=us * slower)


def test_a_fit_recovers_the_law_that_made_the_times() -> None:
    table = shapes(120)
    found = fit(Gemm, figures_of(H100), table, TRUE.us(figures_of(H100), *table)).kernel_model
    assert isinstance(found, Gemm)
    assert (found.t0, found.ec, found.em) == pytest.approx((TRUE.t0, TRUE.ec, TRUE.em), rel=0.03)


def test_outliers_pull_little() -> None:
    table = shapes(120)
    times = TRUE.us(figures_of(H100), *table)
    times[::10] *= 5
    found = fit(Gemm, figures_of(H100), table, times).kernel_model
    error = np.abs(np.log(found.us(figures_of(H100), *table) / TRUE.us(figures_of(H100), *table)))
    assert float(np.median(error)) < 0.02


def test_a_fit_is_the_same_every_time_and_within_its_ranges() -> None:
    ranks, size = np.array([2.0, 4, 8] * 8), 2.0 ** np.arange(10, 34)
    times = AllReduce(a1=3, e1=0.6).us(figures_of(H100), ranks, size)
    first, second = (fit(AllReduce, figures_of(H100), (ranks, size), times).kernel_model for _ in range(2))
    assert first == second
    for name, r in AllReduce.ranges().items():
        assert r.minimum <= getattr(first, name) <= r.maximum


def test_a_law_like_another_strays_only_as_far_as_rows_pull_it() -> None:
    """Six rows of a kernel that is a third slower: the model is close to them, and no parameter differs more than six rows
    can pull it."""
    table = shapes(6)
    times = TRUE.us(figures_of(H100), *table) * 1.33
    found = fit(Gemm, figures_of(H100), table, times, similar_model=TRUE).kernel_model
    error = np.abs(np.log(found.us(figures_of(H100), *table) / times))
    assert float(np.median(error)) < 0.1
    for name in TRUE.ranges():
        assert 1 / 3 < getattr(found, name) / getattr(TRUE, name) < 3, name


def test_a_search_begins_from_points_of_a_halton_sequence() -> None:
    """In base 2 and 3, minus a half: 1/2 and 1/3, then 1/4 and 2/3; times 2.5 e-folds, or the range if it is smaller."""
    typical, low, high = np.zeros(2), np.array([-5.0, -0.5]), np.array([5.0, 1.0])
    first, second, third = start_points(typical, low, high, 3)
    assert first.tolist() == [0, 0]
    assert second.tolist() == pytest.approx([0, -1.5 / 6])
    assert third.tolist() == pytest.approx([-2.5 / 4, 1.5 / 6])


def test_a_parameter_that_no_row_tells_of_keeps_its_typical_value() -> None:
    """With rows of head width 128 only, the parameters for widths 64 and 256 and for MHA keep their typical values."""
    lengths = np.repeat([256.0, 4096.0, 65536.0], 5)
    table = tuple(np.full(15, value) for value in (32.0, 8.0, 128.0))
    batch, window = np.tile([1.0, 4.0, 16.0, 64.0, 256.0], 3), np.zeros(15)
    times = FlashDecode(t0=5, r=9e4).us(figures_of(H100), batch, *table, lengths, window)
    found = fit(FlashDecode, figures_of(H100), (batch, *table, lengths, window), times).kernel_model
    assert [getattr(found, name) for name in ("r64", "r256", "rx", "tx")] == [0.8, 0.8, 1, 1]


def test_rows_of_a_kernel_beside_the_usual_one_have_a_cell_of_their_own() -> None:
    kind = FAMILIES["decode_attention"].kind
    assert kind("fp8", "trtllm_mha") == kind("fp8", "vllm_flashinfer_trtllmdecode") == kind("fp8", "") == "fp8"
    assert (kind("fp8", "triton"), kind("fp8", "vllm_triton_attn")) == ("fp8/triton", "fp8/triton")
    assert kind("fp8", "torch_flow_flashinfer") == "fp8/flashinfer"


def test_sparse_attention_reads_its_cache_in_the_bytes_of_its_format() -> None:
    """NVFP4: four bits, and a one-byte scale per 16 elements: 0.5 + 0.0625 bytes."""
    laws, formats = FAMILIES["dsa_decode_module"].candidates, ("bfloat16", "fp8", "fp8_block", "nvfp4")
    assert [laws(f"fp8/{stored}", "vllm", H100)[0][1]["bytes"] for stored in formats] == [2, 1, 1, 0.5625]
    assert laws("fp8/int3", "vllm", H100) == ()


def test_a_kernel_without_a_law_takes_the_usual_one_and_a_refused_one_none(tmp_path: Path) -> None:
    usual, other = (
        KernelModelEntry(law=DecodeAttention(t0=t), rows=r, median_abs_error=0, p90_abs_error=0) for t, r in ((5, 90), (6, 30))
    )
    refused = RefusedFit(rows=20, median_abs_error=0.5, p90_abs_error=1.5, why="made up")
    cells = {"bfloat16": usual, "fp8/triton": other, "fp8/flashinfer": usual}
    made = Calibration(
        gpu="h100-sxm", stack="mine", laws={"decode_attention": cells}, refused={"decode_attention": {"bfloat16/triton": refused}}
    )
    assert made.find_entry("decode_attention", "bfloat16/flashinfer") is usual
    assert made.find_entry("decode_attention", "bfloat16/triton") is None
    assert made.find_entry("decode_attention", "fp8") is usual  # of its kernels the one with the most rows
    path = tmp_path / "mine.yaml"
    path.write_text(to_yaml(made), encoding="utf-8")
    assert read_calibration(path) == made


def test_rows_that_no_law_meets_leave_the_bound_and_say_why() -> None:
    rows = [row._replace(time_us=row.time_us * (30 if i % 3 else 1)) for i, row in enumerate(measured_rows(40))]
    (found,) = calibrate(rows, H100, "mine")
    made = make_calibration([found], H100, "mine", rows, {"date": "2026-01-02"})
    assert found.entry is None
    assert "are missed by" in found.why
    assert made.refused["gemm"]["bfloat16"].p90_abs_error > 1
    assert made.kernel_model("gemm", "bfloat16") is None


def test_a_calibration_is_written_and_read_back(tmp_path: Path) -> None:
    rows = measured_rows(40)
    fits = calibrate(rows, H100, "mine")
    made = make_calibration(fits, H100, "mine", rows, {"origin": "made up", "date": "2026-01-02"})
    path = tmp_path / "mine.yaml"
    path.write_text(to_yaml(made), encoding="utf-8")
    assert read_calibration(path) == made
    assert (made.version, made.rows, made.date) == ("1.0", 40, "2026-01-02")
    entry = made.laws["gemm"]["bfloat16"]
    assert entry.rows == 40
    assert entry.fitted_median_abs_error < 0.02
    assert entry.median_abs_error < 0.1


def test_too_few_rows_make_no_law() -> None:
    (found,) = calibrate(measured_rows(11), H100, "mine")
    assert found.entry is None
    assert "fewer" in found.why
    (found,) = calibrate(measured_rows(12), H100, "mine")
    assert found.entry and found.entry.rows == 12


@pytest.mark.parametrize(("beside", "why"), [(4, "fewer than 5 rows"), (5, "")])
def test_five_rows_of_a_kernel_beside_make_a_law_like_the_usual_one(
    beside: int, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twelve rows of the usual kernel, and five rows that take a third longer. One starting point makes the test fast."""
    for name in ("STARTS", "FOLD_STARTS"):
        monkeypatch.setattr(f"kvcalc.timing.fitting.{name}", 1)
    rows = [decode_row(i) for i in range(12)]
    rows += [decode_row(i, slower=4 / 3)._replace(kernel="triton") for i in range(12, 12 + beside)]
    usual, other = calibrate(rows, H100, "mine")
    assert (usual.kind, usual.rows, other.kind, other.rows) == ("bfloat16", 12, "bfloat16/triton", beside)
    assert usual.entry and (other.entry is None) == bool(why) and other.why == why


def test_heads_of_64_count_as_much_as_heads_of_128_when_a_law_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 20 rows, 4 of head width 64 take 30 times as long. The 12 rows of head width 128 fit the law."""
    for name in ("STARTS", "FOLD_STARTS"):
        monkeypatch.setattr(f"kvcalc.timing.fitting.{name}", 1)
    rows = [decode_row(i, 128 if i < 12 else 64, slower=30 if i >= 16 else 1) for i in range(20)]
    (refused,), (accepted,) = (calibrate(rows[:count], H100, "mine") for count in (20, 16))
    assert (refused.entry is None, accepted.entry is None) == (True, False)


def test_rows_of_other_frameworks_are_left_out_and_counted() -> None:
    for others, said in (([], []), (measured_rows(3, framework="sglang"), ["3 rows of other frameworks are left out"])):
        notes: list[str] = []
        assert select_rows(
            [MeasurementFile("rows.csv", (), [], [], [*measured_rows(4), *others], [])], H100, "mine", notes.append
        ) == measured_rows(4)
        assert notes == said


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ("t0: 3.4", "law.t0: is not from 0.2 to 40"),
        ("form: gemm,", "form"),
        ("ec: 0.7", "unknown key"),
        ("t0: 3.4,", "law.cap: unknown key 'cap'. Did you mean p"),  # a key of other laws
    ],
)
def test_a_broken_calibration_is_named_by_key(tmp_path: Path, change: str, what: str) -> None:
    text = (
        "gpu: h100-sxm\nstack: mine\nlaws:\n  gemm:\n    bfloat16:\n"
        "      law: {form: gemm, t0: 3.4, ec: 0.7}\n      rows: 1\n      median_abs_error: 0.1\n      p90_abs_error: 0.2\n"
    )
    worse = {"t0: 3.4": "t0: -1", "form: gemm,": "form: nonsense,", "ec: 0.7": "efficiency: 0.7", "t0: 3.4,": "cap: 1,"}[change]
    path = tmp_path / "mine.yaml"
    path.write_text(text.replace(change, worse), encoding="utf-8")
    with pytest.raises(UserError, match=what):
        read_calibration(path)


@pytest.mark.parametrize("gpu", sorted(p.name for p in (presets.shipped_folder() / "calibrations").iterdir()))
def test_the_shipped_calibrations_say_where_they_come_from(gpu: str) -> None:
    machine_ = load_gpu(gpu)
    assert stacks_of(machine_) == ["nccl", "sglang", "trtllm", "vllm"]
    for stack in stacks_of(machine_):
        found = find_calibration(machine_, stack)
        assert isinstance(found, Calibration)
        assert (found.gpu, found.stack, found.license) == (machine_.name, stack, "Apache-2.0")
        assert "aiconfigurator" in found.origin
        assert len(found.commit) == 40
        assert found.version
        assert found.date
        for kinds in found.laws.values():
            for entry in kinds.values():
                assert entry.rows >= MIN_SECOND_ROWS
                assert 0 < entry.median_abs_error <= entry.p90_abs_error
                for name, r in entry.law.ranges().items():
                    assert r.minimum <= getattr(entry.law, name) <= r.maximum
        for kind, entry in found.laws.get("moe", {}).items():  # a fit chooses the tiles of trtllm's Triton
            ((_, fields),) = moe_candidates(kind, stack, machine_.name)
            assert fields["tiles"] == entry.law.tiles if stack != "trtllm" or "triton" not in kind else "tiles" not in fields
        assert msgspec.to_builtins(found)


def test_without_a_calibration_there_is_none_and_an_unknown_stack_is_named() -> None:
    assert load_calibration(load_gpu("a100-40gb-sxm")) is None
    assert load_calibration(H100, "datasheet") is None
    found = load_calibration(H100)
    assert found is not None
    assert found.stack == "vllm"
    borrowed = load_calibration(load_gpu("a100-40gb-sxm"), "vllm", H100)
    assert borrowed is not None
    assert borrowed.gpu == "h100-sxm"
    with pytest.raises(UserError, match="no calibration of h100-sxm called 'vlm'"):
        load_calibration(H100, "vlm")


def test_fitted_parameters_have_four_digits_and_stay_within_their_ranges() -> None:
    law = round_parameters(Gemm(t0=3.45678, ec=0.812349, em=1.09996, p=2.0, tr=29.9999, r=123_456.7))
    assert (law.t0, law.ec, law.em, law.p, law.tr, law.r) == (3.457, 0.8123, 1.1, 2.0, 30.0, 123_500.0)  # type: ignore[attr-defined]
    assert round_parameters(Gemm(ec=0.2, r=3e4)) == Gemm(ec=0.2, r=3e4)
