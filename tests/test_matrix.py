"""`fit --matrix`: each cell equals `fit`, and the remaining memory is counted by hand."""

import re

import pytest
from conftest import Run

from kvcalc.report.charts.fit_plot import matrix_charts

GIB = 2**30


def test_each_cell_is_fit(kvcalc: Run) -> None:
    line = "fit qwen3-32b --gpu h100 --tp 2 --engine vllm --format json"
    cells = kvcalc(line, "--matrix", "--max-num-seqs", "1,8,64", "--max-model-len", "4k,32k").records
    assert [(c["users"], c["context"]) for c in cells] == [(u, n) for u in (1, 8, 64) for n in (4096, 32768)]
    for cell in cells:
        (one,) = kvcalc(line, "--users", str(cell["users"]), "--max-model-len", str(cell["context"])).records
        assert {k: cell[k] for k in one} == one
        assert cell["fits"] == (cell["headroom_bytes"] >= 0)
    (chart,) = matrix_charts([cells])
    depths = [c["headroom_bytes"] / max(c["headroom_bytes"] for c in cells) if c["fits"] else -1.0 for c in cells]
    assert [depth for row in chart.series for depth in row.ys] == depths
    cells = kvcalc(line, "--matrix", "--max-num-seqs", "1", "--set", "max_context=null").records
    assert [c["context"] for c in cells] == [4096 << n for n in range(6)]  # up to 131,072


def test_what_is_left(kvcalc: Run) -> None:
    """40 GiB of llama-3.1-8b: blocks of 2 MiB. 3 × 32,768 tokens are 6,144 of 20,480 blocks, and one block is never used."""
    line = "fit llama-3.1-8b --engine vllm --kv-cache-memory-bytes 40GiB --matrix --max-num-seqs 3 --max-model-len 32k"
    (cell,) = kvcalc(line, "--format", "json").records
    assert cell["headroom_bytes"] == 40 * GIB - 6145 * 2**21
    assert kvcalc(line, "--plot", "-").out.endswith("32k\n3: 28\n")  # 28 GiB less one block


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    ["--engine vllm --tp 2", "--engine sglang --gpu h200", "--engine llama.cpp", "--engine trtllm --pp 2 --tp 2", "--dp 2 --tp 2",
     "--engine vllm --kv-cache-memory-bytes 4GiB --shared-prefix 1k", "--gpu l4"],
)  # fmt: skip
def test_table_and_picture_are_the_records(kvcalc: Run, options: str) -> None:
    """The records are made by `fit` cell by cell; a separate function computes only the verdicts."""
    line = f"fit qwen3-32b {options} --matrix --max-num-seqs 1,6,64,1000 --max-model-len 1k,32k,40960"
    wanted = [(r["fits"], r["headroom_bytes"]) for r in kvcalc(line, "--format", "json").records]
    shown = re.findall(r"(−?)([\d,]+) B", kvcalc(line, "--units", "bytes").out)
    assert [(not sign, int(f"{sign.replace('−', '-')}{size.replace(',', '')}")) for sign, size in shown] == wanted
    assert len(wanted) == 12
