"""Simulations of measured servers: the effect of the columns of their rows, and the reported errors."""

import csv
from pathlib import Path

import numpy as np
import pytest
from conftest import Run

from kvcalc.library.load import load_gpu
from kvcalc.serving.measured_servers import precision_of, published_run, ranks_of, served_times, steps_validated
from kvcalc.timing.calibration import find_calibration, find_engine_overheads
from kvcalc.timing.rows import MeasuredRow, read_rows, served_model

HEADER = "backend,backend_version,system,model_path,gemm_quant_mode,kv_cache_dtype,isl,osl,batch_size,tp_size,ep_size,client,"
HEADER += "prefix_cached,silicon_ttft_ms,silicon_tpot_ms\n"
LLAMA = "meta-llama/Llama-3.1-8B-Instruct"


def rows(folder: Path, *lines: str, op: str = "e2e_dense") -> list[MeasuredRow]:
    path = folder / f"{op}.csv"
    path.write_text(HEADER + "\n".join(lines) + "\n", encoding="utf-8")
    return read_rows(path).rows


def line(
    stack: str = "vllm", model: str = LLAMA, isl: int = 1024, osl: int = 128, clients: int = 8, tp: int = 1, kv: str = "",
    client: str = "nvidia", cached: int = 0, quant: str = "", version: str = "",
) -> str:  # fmt: skip
    return f"{stack},{version},h200_sxm,{model},{quant},{kv},{isl},{osl},{clients}.0,{tp}.0,1.0,{client},{cached},100,10"


def figures(folder: Path, *lines: str) -> list[tuple[float, float, float]]:
    found = rows(folder, *lines)
    gpu = load_gpu("h200")
    return [tuple(served_times([row], gpu, find_calibration(gpu, row.framework))[0]) for row in found]  # type: ignore[misc, arg-type]


def test_more_clients_wait_longer_and_make_more(tmp_path: Path) -> None:
    few, many = figures(tmp_path, line(clients=4), line(clients=64))
    assert few[0] < many[0] and few[1] < many[1] and few[2] < many[2]


def test_the_columns_of_a_run_count(tmp_path: Path) -> None:
    """A narrower cache is faster to read, a prefix cache saves prompt work, and tensor parallelism divides work."""
    base = {"isl": 2000, "osl": 200, "clients": 32}
    plain, narrow, cached, two = figures(
        tmp_path, *(line(**(base | more)) for more in ({}, {"kv": "fp8"}, {"cached": 1}, {"tp": 2}))  # type: ignore[arg-type]
    )  # fmt: skip
    assert narrow[0] < plain[0]
    assert cached[1] < 0.5 * plain[1] and cached[0] < plain[0]
    assert two[2] > plain[2]


def test_clients_drive_as_theirs_do(tmp_path: Path) -> None:
    """InferenceX's lengths are 0.9 of the nominal length on average, with ten rounds. NVIDIA's are exact, with TensorRT-LLM.

    InferenceX's scripts for H200 (benchmarks/single_node): `glm5_fp8_h200.sh` sends 5 prompts per client,
    `gptoss_fp4_h200_trt.sh` has 20,000 tokens per pass.
    """
    (theirs, own) = rows(tmp_path, line(client="inferencex"), line(stack="trtllm", model="Qwen/Qwen3-32B", isl=2000))
    found = published_run(theirs, find_engine_overheads("vllm"))
    assert (found.min_share, found.rounds, found.max_tokens, found.max_num_seqs) == (0.8, 10, 8192, 8)
    glm = published_run(
        *rows(tmp_path, line(stack="sglang", model="zai-org/GLM-5", client="inferencex"), op="e2e_moe"),
        find_engine_overheads("sglang"),
    )
    assert (glm.rounds, glm.max_tokens) == (5, 8192)
    (oss,) = rows(tmp_path, line(stack="trtllm", model="openai/gpt-oss-120b", client="inferencex"), op="e2e_moe")
    assert published_run(oss, find_engine_overheads("trtllm")).max_tokens == 20000
    found = published_run(own, find_engine_overheads("trtllm"))
    assert (found.min_share, found.max_tokens, found.scheduling.whole_prompts) == (1.0, 2000 + 1500 + 8, True)


def test_tokens_per_second_are_those_of_all_gpus(tmp_path: Path) -> None:
    """In a closed loop, clients · output = tokens/s · (TTFT + (output − 1) · TPOT), except at the start and the end."""
    ((tpot, ttft, rate),) = figures(
        tmp_path, line(stack="trtllm", clients=16, tp=2, model="meta-llama/Llama-3.1-70B", quant="fp8")
    )
    assert rate == pytest.approx(1e6 * 16 * 128 / (ttft + 127 * tpot), rel=0.05)
    (row,) = rows(tmp_path, line(clients=16))
    assert row.served.tokens_per_s == pytest.approx(16 * 128 / (0.1 + 127 * 0.01))


def test_formats_and_ranks_are_those_of_the_run(tmp_path: Path) -> None:
    (dense, own, mixture) = (
        *rows(tmp_path, line(quant="fp8", kv="fp8", tp=2), line(stack="trtllm", model="Qwen/Qwen3-32B", quant="fp8")),
        *rows(tmp_path, line(model="Qwen/Qwen3-235B-A22B", quant="fp8", tp=4), op="e2e_moe"),
    )
    model = served_model(LLAMA)
    assert model is not None
    assert (precision_of(dense, model).quantization, precision_of(dense, model).kv_cache_dtype) == ("fp8", "fp8")
    assert precision_of(own, model).quantization == precision_of(mixture, model).quantization == "fp8_block128"
    assert (ranks_of(dense).tp, ranks_of(mixture).tp, ranks_of(mixture).ep) == (2, 4, 1)


def test_what_is_not_known_is_left_out(tmp_path: Path) -> None:
    found = figures(tmp_path, line(model="nobody/knows-this"), line(tp=3))
    assert np.isnan(found).all()


def test_errors_of_three_figures(tmp_path: Path) -> None:
    """Of nine runs, one hits a prefix cache. With too few runs there are no errors."""
    runs = rows(tmp_path, *(line(clients=c, cached=int(c == 9), osl=16) for c in range(1, 10)))
    gpu, calibration = load_gpu("h200"), find_calibration(load_gpu("h200"), "vllm")
    assert calibration is not None
    found = steps_validated(calibration, gpu, runs)
    assert list(found) == ["dense", "dense_ttft", "dense_throughput"]
    assert all(v.rows == 8 and v.p90_abs_error >= v.median_abs_error > 0 for v in found.values())
    assert steps_validated(calibration, gpu, runs[:5]) == {}


def test_validate_writes_all_figures_of_a_server(kvcalc: Run, tmp_path: Path) -> None:
    rows(tmp_path, line(), line(model="a/b"))
    out = tmp_path / "out.csv"
    result = kvcalc(
        "validate", str(tmp_path / "e2e_dense.csv"), "--predictions", str(out), "--by", "op,client", "--format", "json"
    )
    (record,) = result.records
    assert (record["op"], record["client"], record["rows"], record["predicted_rows"]) == ("e2e_dense", "nvidia", 2, 1)
    assert record["ttft_median_abs_error"] > 0 < record["throughput_median_abs_error"]
    with out.open(encoding="utf-8") as file:
        known, unknown = csv.DictReader(file)
    assert float(known["calibrated_us"]) > float(known["roofline_us"])
    assert float(known["calibrated_ttft_us"]) > float(known["calibrated_us"])
    assert float(known["calibrated_tokens_per_s"]) > 0
    assert (unknown["calibrated_us"], unknown["calibrated_ttft_us"], unknown["calibrated_tokens_per_s"]) == ("", "", "")
