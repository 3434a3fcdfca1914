"""Sums equal their totals: rows of passes over random models, GPUs, batches and ranks, with predictions and bounds."""

from pathlib import Path

import pytest
import startup_logs
from conftest import Run
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from report.printed import table

from kvcalc import Batch, Parallelism, UserError, load_gpu, load_model
from kvcalc.timing.deployment import TimedDeployment, mixed_records, roofline_records

MODELS = (
    "llama-3.1-8b", "llama-3.1-70b", "gpt2", "mixtral-8x7b", "deepseek-v3", "deepseek-v3.2", "deepseek-v4-flash",
    "gemma-3-27b", "gpt-oss-120b", "nemotron-h-8b", "qwen3-next-80b-a3b", "mamba-2.8b",
)  # fmt: skip
GPUS = ("h100", "h200", "b200", "a100-80gb", "l40s", "mi300x", "rtx-4090")
RANKS = ((1, 1), (2, 1), (1, 2), (4, 2), (8, 1))
SUMMED = (
    "flops", "vector_flops", "weight_bytes", "cache_bytes", "cache_read_bytes", "cache_write_bytes", "activation_bytes",
    "bytes", "network_bytes", "inter_node_bytes", "roofline_s", "time_s", "share",
)  # fmt: skip


@settings(max_examples=30)
@given(
    st.sampled_from(MODELS), st.sampled_from(GPUS), st.sampled_from(RANKS), st.sampled_from(("decode", "prefill", "mixed")),
    st.integers(1, 512), st.integers(1, 40_000), st.sampled_from(("", "datasheet", "sglang", "trtllm")),
)  # fmt: skip
def test_rows_of_a_pass_add_up_to_its_total(
    name: str, card: str, ranks: tuple[int, int], phase: str, batch: int, context: int, stack: str
) -> None:
    """Every figure of the total is the sum of the rows. Each share refers to the time in its row."""
    tp, pp = ranks
    try:
        deployment = TimedDeployment(load_model(name), load_gpu(card), parallelism=Parallelism(tp=tp, pp=pp)).with_calibration(
            stack
        )
        mixed = f"{context}+{batch}x1@{context}"
        new = Batch.parse(mixed) if phase == "mixed" else Batch.of_phase(phase, context, batch)
        asked = (mixed,) if phase == "mixed" else (phase, batch, context)
        records = (mixed_records if phase == "mixed" else roofline_records)(deployment, *asked)
    except UserError:  # heads that these ranks do not divide, a GPU without this stack
        assume(False)
    *rows, whole = records
    assert whole["operator"] == "total" and whole["share"] == 1.0
    calibrated = deployment.calibration is not None
    assert [r["operator"] for r in rows].count("engine_overhead") == calibrated
    for key in SUMMED:
        if whole[key] is not None:
            assert sum(r[key] for r in rows) == pytest.approx(whole[key], rel=1e-9), key
    shown = "time_s" if calibrated else "roofline_s"
    for row in rows:
        assert row["share"] == pytest.approx(row[shown] / whole[shown])
        assert (row["overhead"] is None) == (not calibrated or not row["roofline_s"])
    without = sum(r["uncalibrated_share"] * r[shown] for r in rows)
    assert without == pytest.approx(whole["uncalibrated_share"] * whole[shown])
    if pp == 1:  # of several stages, `roofline` shows the slowest
        assert whole[shown] == pytest.approx(deployment.seconds(new))


def seconds_of(cell: str) -> tuple[float, float]:
    """Return a time in a table, and half of its last digit; 0 to 1 µs for `< 1 µs`."""
    text = cell.lstrip("≥~ ")
    if text in ("–", ""):
        return 0.0, 0.0
    if text.startswith("<"):
        return 5e-7, 5e-7
    number, unit = text.split()
    step = {"ns": 1e-9, "µs": 1e-6, "ms": 1e-3, "s": 1.0}[unit]
    digits = len(number.partition(".")[2])
    return float(number.replace(",", "")) * step, 0.5 * 10**-digits * step


@pytest.mark.parametrize(
    "line",
    [
        "llama-3.1-8b",
        "llama-3.1-8b --phase prefill --batch-size 3 --gpu l40s",
        "deepseek-v3 --gpu h200 --tp 8 --batch-size 64",
        "llama-3.1-70b --tp 2 --pp 2 --stack sglang",
        "gpt-oss-120b --gpu mi300x --batch-size 4",
    ],
)
def test_a_printed_column_of_times_adds_up(kvcalc: Run, line: str) -> None:
    """Shares and times in the table add up within their digits. No time with three digits is shorter than a kernel."""
    shown = table(kvcalc(f"roofline {line} --wide").out, "operator")
    for heading in {"predicted", "at least"} & {*shown.headings}:
        cells = zip(shown.column(heading), shown.column("runs"), strict=True)
        *rows, (whole, half) = [seconds_of(cell) for cell, runs in cells if runs != "–"]  # parts of an operator have none
        assert abs(sum(value for value, _ in rows) - whole) <= sum(h for _, h in rows) + half
        assert not any(cell.endswith("ns") and cell != "0 ns" for cell in shown.column(heading))
    *shares, last = (float(cell.rstrip("%")) for cell in shown.column("share") if cell != "–")
    assert last == 100.0 and abs(sum(shares) - last) <= 0.05 * len(shares) + 1e-9


OF_SHARE = ("weights", "activations", "libraries and collectives", "CUDA graphs", "other memory, not itemised", "cache")
LOGS = [name for name in dir(startup_logs) if name.startswith(("V1_", "NO_BLOCKS", "SGLANG"))]


@pytest.mark.parametrize("name", LOGS)
def test_terms_of_a_start_add_up_to_the_engine_s_share(kvcalc: Run, tmp_path: Path, name: str) -> None:
    """By the rules, the terms minus the missing memory are the share. For SGLang, activations are outside the share."""
    path = tmp_path / "start.log"
    path.write_text(getattr(startup_logs, name))
    found = kvcalc(f"diagnose {path} --gpu h100 --format json")
    records = found.records if found.code == 0 else kvcalc(f"diagnose {path} --format json").records
    last = records[-1]["boot"]
    terms = {r["term"]: r["predicted_bytes"] or 0 for r in records if r["boot"] == last}
    within = OF_SHARE if records[-1]["engine"] == "vllm" else ("weights", "cache")
    short = terms.get("missing before any cache", 0)
    assert sum(terms.get(term, 0) for term in within) - short == terms["share that the engine takes"]


@pytest.mark.parametrize(
    "line",
    [
        "llama-3.1-8b --gpu h100,l40s,mi300x --input-len 1k,3000 --output-len 2,500 --batch-size 1,16",
        "llama-3.1-70b --tp 2 --pp 2 --output-len 20",
        "deepseek-v3 --gpu h200 --tp 8 --output-len 20 --batch-size 8 --no-cache",
        "llama-3.1-70b --tp 2 --cpu-offload-gb 10 --output-len 20",
    ],
)
def test_a_request_is_its_first_token_and_the_steps_after_it(kvcalc: Run, line: str) -> None:
    for r in kvcalc(f"latency {line} --format json").records:
        assert r["e2e_s"] == pytest.approx(r["ttft_s"] + (r["output_len"] - 1) * r["tpot_s"], rel=1e-12)
        assert r["output_tokens_per_s"] == pytest.approx(r["batch_size"] * r["output_len"] / r["e2e_s"], rel=1e-12)
