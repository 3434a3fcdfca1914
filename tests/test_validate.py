"""`kvcalc validate` and `kvcalc calibrate` in scripts."""

import csv
import math
from pathlib import Path

import numpy as np
import pytest
from conftest import Run

from kvcalc.library.load import load_gpu
from kvcalc.timing.calibration import read_calibration
from kvcalc.timing.kernel_models.fused_moe import FusedMoe
from kvcalc.timing.kernel_models.kernel_model import figures_of

HEADER = "gpu,framework,version,dtype,m,n,k,time_us,row_id\n"
# Bound of 4096³ in bf16 on H100: 2 · 4096³ / 989e12 = 138.97 µs.
ROWS = HEADER + "h100_sxm,vllm,0.24.0,bfloat16,4096,4096,4096,180,a\nh100_sxm,vllm,0.24.0,bfloat16,4096,4096,4096,190,b\n"


def written(folder: Path, text: str, name: str = "gemm.csv") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def test_a_group_has_both_bases(kvcalc: Run, tmp_path: Path) -> None:
    (record,) = kvcalc("validate", str(written(tmp_path, ROWS)), "--format", "json").records
    assert [record[k] for k in ("op", "gpu", "framework", "dtype")] == ["gemm", "h100-sxm", "vllm", "bfloat16"]
    assert (record["rows"], record["predicted_rows"], record["basis"]) == (2, 2, "calibrated")
    bound = 2 * 4096**3 / 989e6
    errors = [180 / bound - 1, 190 / bound - 1]
    assert record["roofline_median_abs_error"] == pytest.approx(sum(errors) / 2)
    assert record["median_abs_error"] < 0.2


def test_predictions_repeat_every_row_as_it_stood(kvcalc: Run, tmp_path: Path) -> None:
    broken = "h100_sxm,vllm,0.24.0,bfloat16,oops,4096,4096,180,c\nnever-heard,vllm,1,bfloat16,1,1,1,5,d\n"
    out = tmp_path / "out.csv"
    result = kvcalc("validate", str(written(tmp_path, ROWS + broken)), "--predictions", str(out), "--format", "json")
    assert result.code == 0
    assert "line 4: m 'oops' is not a number" in result.err
    assert "unknown GPU 'never-heard'" in result.err
    assert "lines 5" in result.err
    with out.open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [r["row_id"] for r in rows] == ["a", "b", "c", "d"]
    assert {r["op"] for r in rows} == {"gemm"}
    assert [bool(r["roofline_us"]) for r in rows] == [True, True, False, False]
    assert rows[2]["m"] == "oops"
    assert float(rows[0]["roofline_us"]) == pytest.approx(2 * 4096**3 / 989e6, rel=1e-5)
    counted = {r["gpu"]: r["predicted_rows"] for r in result.records}
    assert counted == {"h100-sxm": 2, "never-heard": 0}


def test_a_gpu_without_calibration_gets_the_bound_alone(kvcalc: Run, tmp_path: Path) -> None:
    path, out = str(written(tmp_path, ROWS.replace("h100_sxm", "a100-40gb-sxm"))), tmp_path / "out.csv"
    (record,) = kvcalc("validate", path, "--predictions", str(out), "--format", "json").records
    assert record["basis"] == "roofline"
    with out.open(encoding="utf-8") as file:
        assert {(bool(r["roofline_us"]), r["calibrated_us"]) for r in csv.DictReader(file)} == {(True, "")}
    (borrowed,) = kvcalc("validate", path, "--calibration-from", "h100", "--format", "json").records
    assert borrowed["basis"] == "calibrated"


def test_fail_above_is_an_exit_status_and_a_file_without_a_good_row_is_above_any_limit(kvcalc: Run, tmp_path: Path) -> None:
    good, bad = str(written(tmp_path, ROWS)), tmp_path / "bad"
    assert [kvcalc("validate", good, "--fail-above", most).code for most in ("1000", "0.01")] == [0, 1]
    bad.mkdir()
    for text in (HEADER, HEADER + "h100_sxm,vllm,1,bfloat16,oops,4096,4096,180,c\n"):
        path = str(written(bad, text))
        assert kvcalc("validate", path).code == 0
        for paths in ([path], [good, path]):
            result = kvcalc("validate", *paths, "--fail-above", "1000")
            assert result.code == 1
            assert f"note: {path}: no row can be read, so nothing is below 1000 %\n" in result.err
    unknown = str(written(bad, HEADER + "never-heard,vllm,1,bfloat16,1,1,1,5,d\n"))
    assert kvcalc("validate", unknown, "--fail-above", "1000").code == 1


@pytest.mark.parametrize(
    ("more", "what"),
    [
        (["--by", "colour"], "cannot group by 'colour'"),
        (["--fail-above", "nan"], "fail-above nan is not a number from 0"),
        (["--calibration-from", "h1000"], "unknown gpu"),
        (["--calibration-from", "tpu-v5e"], "has no calibration to take"),
        (["--stack", "vlm"], "no GPU has a calibration for stack 'vlm'. Did you mean vllm"),
        (["--predictions", "/nowhere/at/all.csv"], "cannot be written"),
    ],
)
def test_a_wrong_request_is_one_line(kvcalc: Run, tmp_path: Path, more: list[str], what: str) -> None:
    result = kvcalc("validate", str(written(tmp_path, ROWS)), *more)
    assert result.code == 2
    assert what in result.err


def test_serving_rows_are_whole_steps(kvcalc: Run, tmp_path: Path) -> None:
    text = (
        "backend,system,model_path,gemm_quant_mode,isl,osl,batch_size,tp_size,silicon_tpot_ms\n"
        "vllm,h200_sxm,meta-llama/Llama-3.1-8B,,1024,1024,1,1,5.0\nvllm,h200_sxm,a/unknown-model,,1024,1024,1,1,5.0\n"
    )
    (record,) = kvcalc("validate", str(written(tmp_path, text, "e2e_dense.csv")), "--format", "json").records
    assert (record["rows"], record["predicted_rows"]) == (2, 1)
    # 15.0 GB of weights without the embedding's rows at 4.8 TB/s are 3.13 ms: a step takes that and not twice that.
    assert 3.13 / 5 < record["median_ratio"] < 2 * 3.13 / 5


MOE = "gpu,framework,dtype,kernel_family,tokens,hidden,inter,topk,experts,moe_tp,moe_ep,odd,time_us\n"


def test_experts_are_fitted_by_kernel_without_odd_rows_and_predicted_all(
    kvcalc: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Times are the kernel model's at a uniform router's load, except for odd rows, a fifth, which are ten times as long."""
    monkeypatch.setenv("KVCALC_PRESETS", str(tmp_path / "presets"))
    law, figures, lines = FusedMoe(tiles="marlin", bytes=0.5625), figures_of(load_gpu("h100")), []
    for i in range(60):
        shape = (2 ** (i % 13), 1024 * (2 + i % 5), 512 * (1 + i % 4), 8, 128, 1 + i % 2, 1)
        us = float(law.us(figures, *(np.array([float(x)]) for x in shape))[0])
        odd = i % 5 == 4
        lines.append(
            f"h100,house,int4_wo,house int4_wo marlin,{','.join(map(str, shape))},{int(odd)},{us * (10 if odd else 1):.4f}\n"
        )
    path = str(written(tmp_path, MOE + "".join(lines), "moe.csv"))
    (record,) = kvcalc("calibrate", path, "--gpu", "h100", "--stack", "house", "--format", "json").records
    assert (record["family"], record["kind"], record["rows"]) == ("moe", "int4_wo/marlin", 48)
    assert record["fitted_median_abs_error"] < 0.03
    (found,) = kvcalc("validate", path, "--format", "json").records
    assert (found["rows"], found["predicted_rows"], found["basis"]) == (60, 60, "calibrated")
    assert found["median_abs_error"] < 0.04 < 5 < found["p90_abs_error"]


def test_a_calibration_keeps_the_error_of_whole_steps(kvcalc: Run, tmp_path: Path) -> None:
    """Nine runs of a server, of which one hits a prefix cache: the error is of eight runs."""
    header = "backend,system,model_path,gemm_quant_mode,isl,osl,batch_size,tp_size,prefix_cached,silicon_tpot_ms\n"
    runs = "".join(f"house,h100,meta-llama/Llama-3.1-8B,,1024,512,{b},1,{int(b == 9)},{6 + b / 10}\n" for b in range(1, 10))
    lines = [f"h100,house,1.0,bfloat16,{2 ** (i % 12)},{1024 * (1 + i % 7)},4096,{20 + i},{i}\n" for i in range(24)]
    out = tmp_path / "house.yaml"
    rows = [str(written(tmp_path, HEADER + "".join(lines))), str(written(tmp_path, header + runs, "e2e_dense.csv"))]
    kvcalc("calibrate", *rows, "--gpu", "h100", "--stack", "house", "-o", str(out), "--date", "2026-01-01")
    made = read_calibration(out)
    assert (made.version, made.validation["dense"].rows) == ("1.0", 8)
    assert made.validation["dense"].p90_abs_error >= made.validation["dense"].median_abs_error > 0
    again = tmp_path / "again.yaml"
    kvcalc("calibrate", *rows, "--gpu", "h100", "--stack", "house", "-o", str(again), "--date", "2026-01-01")
    assert again.read_bytes() == out.read_bytes()


@pytest.mark.slow
def test_calibrate_all_writes_a_file_for_each_gpu_and_stack_the_same_every_time(kvcalc: Run, tmp_path: Path) -> None:
    lines = []
    for gpu, stack in (("h100_sxm", "house"), ("h200_sxm", "house"), ("h100_sxm", "other"), ("nobody", "house")):
        for i in range(24):
            us = (4 if stack == "house" else 6) + 2 ** (i % 12) / 50 + 4 * (1 + i % 7)
            lines.append(f"{gpu},{stack},1.0,bfloat16,{2 ** (i % 12)},{1024 * (1 + i % 7)},4096,{us},{i}\n")
    path = str(written(tmp_path, HEADER + "".join(lines)))
    folders = tmp_path / "one", tmp_path / "two"
    for folder in folders:
        found = kvcalc("calibrate", path, "--all", "-o", str(folder), "--date", "2026-01-01", "--format", "json").records
    assert [(r["gpu"], r["stack"]) for r in found] == [("h100-sxm", "house"), ("h100-sxm", "other"), ("h200", "house")]
    files = [sorted(p.relative_to(folder) for p in folder.rglob("*.yaml")) for folder in folders]
    assert [str(f) for f in files[0]] == ["h100-sxm/house.yaml", "h100-sxm/other.yaml", "h200/house.yaml"]
    assert all((folders[0] / f).read_bytes() == (folders[1] / f).read_bytes() for f in files[1])
    alone = tmp_path / "alone.yaml"
    kvcalc("calibrate", path, "--gpu", "h200", "--stack", "house", "-o", str(alone), "--date", "2026-01-01")
    assert alone.read_bytes() == (folders[0] / "h200" / "house.yaml").read_bytes()


def test_calibrate_writes_a_preset_that_validate_finds(kvcalc: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVCALC_PRESETS", str(tmp_path / "presets"))
    lines = []
    for i in range(24):
        m, n, k = 2 ** (i % 12), 1024 * (1 + i % 7), 1024 * (1 + i % 5)
        time = 4 + math.hypot(2 * m * n * k / 800e6, ((m + n) * k * 2 + 2 * m * n) / 2.8e6)
        lines.append(f"h100_sxm,house,1.0,bfloat16,{m},{n},{k},{time:.4f},{i}\n")
    path = str(written(tmp_path, HEADER + "".join(lines)))
    plot = tmp_path / "fit.svg"
    result = kvcalc("calibrate", path, "--gpu", "h100", "--stack", "house", "--plot", str(plot), "--format", "json")
    (record,) = result.records
    assert (record["family"], record["kind"], record["rows"]) == ("gemm", "bfloat16", 24)
    assert record["fitted_median_abs_error"] < 0.05
    assert set(record["parameters"]) >= {"t0", "ec", "em"}
    assert plot.read_text(encoding="utf-8").startswith("<?xml")
    (found,) = kvcalc("validate", path, "--format", "json").records
    assert found["basis"] == "calibrated"
    assert found["median_abs_error"] == pytest.approx(record["fitted_median_abs_error"], abs=1e-3)


@pytest.mark.parametrize(
    ("more", "what"),
    [
        (["--stack", "x"], "--gpu is missing"),
        (["--all", "--stack", "x"], "--all takes every GPU and stack"),
        (["--gpu", "h100"], "--stack is missing"),
        (["--gpu", "h100", "--stack", "../x"], "not a usable file name"),
        (["--gpu", "h100", "--stack", "x"], "fewer than 12 rows"),
        (["--gpu", "a100", "--stack", "x"], "no row of a100"),
        (["--gpu", "tpu-v5e", "--stack", "x", "-o", "x.yaml"], ""),
    ],
)
def test_a_calibration_that_cannot_be_made_is_one_line(kvcalc: Run, tmp_path: Path, more: list[str], what: str) -> None:
    result = kvcalc("calibrate", str(written(tmp_path, ROWS)), *more)
    assert result.code == 2
    assert what in result.err.splitlines()[-1]
    assert not (tmp_path / "x.yaml").exists()


def test_many_rows_have_the_errors_of_each(kvcalc: Run, tmp_path: Path) -> None:
    """Two rows repeated many times, two rows of another GPU, and a broken row at the end: all figures equal the two rows'."""
    many = 5003
    unknown = "never-heard,vllm,1,bfloat16,1,1,1,5,d\n"
    text = ROWS + unknown + ROWS.removeprefix(HEADER) * many + unknown + "h100,vllm,1,bfloat16,x,1,1,5,e\n"
    path, out = str(written(tmp_path, text)), tmp_path / "out.csv"
    result = kvcalc("validate", path, "--predictions", str(out), "--format", "json")
    (few,) = kvcalc(
        "validate", str(written(tmp_path, "op," + ROWS.replace("h100", "gemm,h100"), "few.csv")), "--format", "json"
    ).records
    first, other = result.records
    assert (first["rows"], other["rows"], other["predicted_rows"]) == (2 * many + 2, 2, 0)
    assert {k: first[k] for k in few if k.endswith("median_abs_error")} == {
        k: few[k] for k in few if k.endswith("median_abs_error")
    }
    assert f"unknown GPU 'never-heard': 2 rows of gemm (lines 4, {2 * many + 5} …)" in result.err
    assert f"1 row cannot be read (line {2 * many + 6}: m 'x' is not a number)" in result.err
    lines = out.read_text(encoding="utf-8").splitlines()
    assert len(lines) == len(text.splitlines())
    assert lines[1:3] * many == lines[4 : 4 + 2 * many]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (HEADER + "x" * 2_000_000, "is not CSV: field larger than field limit"),
        (HEADER + '"' + "x\n" * 70_000, "is not CSV: field larger than field limit"),
    ],
    ids=["line", "quote"],
)
def test_lines_and_fields_have_limits(kvcalc: Run, tmp_path: Path, text: str, said: str) -> None:
    code, out, err = kvcalc("validate", str(written(tmp_path, text)))
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert said in err


def test_predictions_that_are_refused_half_way_leave_no_file(kvcalc: Run, tmp_path: Path) -> None:
    """The second file is not a CSV file, which is found after the rows of the first are written."""
    bad, out = written(tmp_path, HEADER + "a\0\n", "more.gemm.csv").rename(tmp_path / "bad.csv"), tmp_path / "out.csv"
    bad.write_text("op," + HEADER + "gemm,h100,vllm,1,bfloat16,1,1,1,5,d\n\0", encoding="utf-8")
    for target in (str(out), "-"):
        code, printed, err = kvcalc("validate", str(written(tmp_path, ROWS)), str(bad), "--predictions", target)
        assert (code, printed) == (2, "")
        assert "NUL" in err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["bad.csv", "gemm.csv"]


LAYERS = "gpu,framework,model,layer,dtype,kv_cache_dtype,batch,query_len,kv_len,tp_size,ep_size,time_us\n"


@pytest.mark.parametrize(
    ("model", "layer", "kind", "asked", "shape"),
    [
        ("meta-llama/Llama-3.1-8B", "", "full", "--batch-size 64 --context 4k", "bfloat16,,64,1,4096,,"),
        ("Qwen/Qwen3-8B", "full", "full", "--phase prefill --context 8k --tp 2 --quantization fp8", "fp8,,1,8192,8192,2,"),
        ("deepseek-ai/DeepSeek-V3", "", "moe", "--batch-size 16 --context 4k --tp 8 --ep 8", "fp8_block,,16,1,4096,8,8"),
        (
            "deepseek-ai/DeepSeek-V3",
            "dense",
            "dense",
            "--batch 2x500@1500 --tp 8 --kv-cache-dtype fp8 --dtype bf16",
            "bfloat16,fp8,2,500,1500,8,1",
        ),
    ],
)
@pytest.mark.parametrize("stack", ["sglang", "datasheet"])
def test_a_layer_is_the_sum_of_its_operators(
    kvcalc: Run, tmp_path: Path, model: str, layer: str, kind: str, asked: str, shape: str, stack: str
) -> None:
    """It is the total of `roofline` for operators of this kind of layer, divided by the number of these layers."""
    name = model.rsplit("/", 1)[-1].lower()
    operators = kvcalc(f"roofline {name} --gpu h200 --stack {stack} {asked} --format json").records
    mine = [r for r in operators if r["layer"] == kind]
    times = {"full": {"llama-3.1-8b": 32, "qwen3-8b": 36}.get(name), "moe": 58, "dense": 3}[kind]
    path = written(tmp_path, LAYERS + f"h200_sxm,{stack},{model},{layer},{shape},100\n", "layer.csv")
    (record,) = kvcalc("validate", str(path), "--format", "json").records
    column = "time_s" if stack == "sglang" else "roofline_s"
    assert record["median_ratio"] == pytest.approx(sum(r[column] for r in mine) / times * 1e4, rel=1e-12)
    assert (record["op"], record["basis"]) == ("layer", "calibrated" if stack == "sglang" else "roofline")


@pytest.mark.parametrize(
    ("cells", "why"),
    [
        ("Qwen/Qwen3-8B,local,bfloat16,,1,1,8", "qwen3-8b has no layer 'local' but full"),
        ("Qwen/Qwen3-8B,,bfloat16,,1,9,8", "query_len 9 is more than kv_len 8"),
        ("nobody/none,,bfloat16,,1,1,8", "model 'nobody/none' is not a preset"),
        (",,bfloat16,,1,1,8", "model is empty"),
    ],
)
def test_a_layer_that_no_model_has_is_a_broken_row(kvcalc: Run, tmp_path: Path, cells: str, why: str) -> None:
    good = "h100,vllm,Qwen/Qwen3-8B,,bfloat16,,1,1,8,,,100\n"
    path = written(tmp_path, LAYERS + good + f"h100,vllm,{cells},,,100\n", "layer.csv")
    result = kvcalc("validate", str(path), "--format", "json")
    assert [r["rows"] for r in result.records] == [1]
    assert f"1 row cannot be read (line 3: {why}" in result.err


@pytest.mark.parametrize(
    "shape", ["bfloat16,,1,1,8,7,", "odd4,,1,1,8,,", "bfloat16,odd4,1,1,8,,", "bfloat16,,1,1,8,8,1000000000"]
)
def test_a_layer_of_unknown_formats_or_impossible_ranks_is_not_predicted(kvcalc: Run, tmp_path: Path, shape: str) -> None:
    path = written(tmp_path, LAYERS + f"h100,vllm,Qwen/Qwen3-8B,,{shape},100\n", "layer.csv")
    (record,) = kvcalc("validate", str(path), "--format", "json").records
    assert (record["rows"], record["predicted_rows"], record["median_abs_error"]) == (1, 0, None)
