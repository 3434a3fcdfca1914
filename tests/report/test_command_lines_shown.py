"""Command lines in tables: at any width, a shell reads the folded lines as the original command."""

import json
import subprocess

import pytest

from kvcalc.report.text.table_layout import Column, CommandLine, Table, lay_out

COMMAND = (
    "vllm serve deepseek-ai/DeepSeek-V3 --tensor-parallel-size 8 --enable-expert-parallel --max-model-len 8192 --max-num-seqs 8 "
    """--speculative-config '{"method": "mtp", "num_speculative_tokens": 2}' -cc 'it'"'"'s whole'"""
)
WORDS = [
    "vllm", "serve", "deepseek-ai/DeepSeek-V3", "--tensor-parallel-size", "8", "--enable-expert-parallel", "--max-model-len",
    "8192", "--max-num-seqs", "8", "--speculative-config", {"method": "mtp", "num_speculative_tokens": 2}, "-cc", "it's whole",
]  # fmt: skip


@pytest.mark.parametrize("width", [40, 60, 80, 100, 200])
def test_a_shell_takes_the_lines_as_one_command(width: int) -> None:
    laid = lay_out(Table([{"a": 1}], [Column("a", "a")], "", ["", CommandLine(COMMAND)]), width)
    lines = laid.below[1:]
    typed = subprocess.run(
        ["bash", "-c", "printf '%s\\0' " + "\n".join(lines)], capture_output=True, text=True, check=True
    ).stdout.split("\0")[:-1]
    assert [json.loads(word) if word.startswith("{") else word for word in typed] == WORDS
    assert all(len(line) <= width or "{" in line for line in lines) and (len(lines) > 1) == (width < len(COMMAND))
