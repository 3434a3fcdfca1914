"""`--explain` of every command: formulas with the numbers of the record, whose result is the figure."""

import re
from pathlib import Path

import pytest
from conftest import Run

from kvcalc.cli.commands import COMMANDS, parameters_of

LINES = {
    "size": "size gpt2", "compare": "compare llama-7b --variants mha,mqa --context 1k", "roofline": "roofline gpt2",
    "latency": "latency llama-3.1-8b --draft llama-3.2-1b --no-cache --price-per-hour 2",
    "serve": "serve gpt2 --num-prompts 5 --rate 3 --isl 100 --osl 20 --price-per-hour 2", "fit": "fit gpt2",
    "plot": "plot cache-vs-context gpt2", "models": "models gpt2", "gpus": "gpus h100",
}  # fmt: skip
UNITS = {"ms": 1e-3, "µs": 1e-6, "ns": 1e-9, "s": 1.0}


def test_every_command_that_answers_has_it() -> None:
    for command in COMMANDS:
        if command not in ("report", "schema", "mcp"):  # which print no records
            assert "explain" in {p.name for p in parameters_of(command)}, command


@pytest.mark.parametrize("command", LINES)
def test_it_shows_formulas_instead_of_a_table(kvcalc: Run, command: str) -> None:
    shown = kvcalc(f"{LINES[command]} --explain")
    assert shown.code == 0 and " = " in shown.out
    assert shown.out == kvcalc(f"{LINES[command]} --explain --format json").out or command == "plot"


def evaluated(text: str) -> float:
    """Return the result of a printed formula, computed with its rounded numbers."""
    text = re.sub(r"([\d.,]+) (ms|µs|ns|s)\b", lambda m: repr(float(m[1].replace(",", "")) * UNITS[m[2]]), text)
    text = re.sub(r" (B|GPUs|tokens|requests|an hour)\b(?: of \w+)?", "", text)
    text = text.replace("price", "2").replace(",", "").replace("·", "*").replace("−", "-").replace("^", "**")
    return float(eval(text, {"__builtins__": {}}))


# A figure, the key of its value, and how near the rounded numbers of the formula come to it.
WORKED = [
    ("latency", "end to end", "e2e_s", 2e-3), ("latency", "tokens/s", "decode_tokens_per_s", 5e-3),
    ("latency", "per 1M tokens", "cost_per_million_tokens", 5e-3), ("latency", "cache saves", "speedup", 1e-2),
    ("size", "cache_share_of_weights", "cache_share_of_weights", 1e-6),
    ("serve", "tokens/s", "throughput_tokens_per_s", 5e-3), ("serve", "KV peak", "kv_peak", 1e-9),
]  # fmt: skip


@pytest.mark.parametrize(("command", "title", "key", "near"), WORKED, ids=[f"{w[0]} {w[1]}" for w in WORKED])
def test_a_formula_comes_to_its_figure(kvcalc: Run, command: str, title: str, key: str, near: float) -> None:
    record = kvcalc(f"{LINES[command]} --format json").records[-1]
    lines = [line.strip() for line in kvcalc(f"{LINES[command]} --explain").out.splitlines()]
    formula = [line.split(" = ")[1] for line in lines if line.startswith(f"{title} = ")][0 if command == "latency" else -1]
    assert evaluated(formula) == pytest.approx(record[key], rel=near)


def test_attention_says_what_its_heads_share(kvcalc: Run) -> None:
    assert "; 8 KV heads\n" in kvcalc("roofline llama-3.1-8b --explain").out
    assert "; latents of all heads\n" in kvcalc("roofline deepseek-v3 --tp 8 --gpu h200 --explain").out
    rows = re.findall(r"× (\S+) rows \((.*?)\) ×", kvcalc("size gpt-oss-20b --context 4k --explain").out)
    assert [(count, "128" in about) for count, about in rows] == [("128", True)] * 2 + [("4,096", False)] * 2  # keys and values


def test_a_picture_s_curves_are_told_by_their_ends(kvcalc: Run) -> None:
    """2 · 12 · 768 · 2 B = 36 KiB per token: 4.5 MiB at 128 tokens, 4.5 GiB at 128 Ki."""
    assert "\ngpt2: 4.5 MiB at 128, 4.5 GiB at 128k\n" in kvcalc("plot cache-vs-context gpt2 --explain").out


def test_a_page_is_explained_as_its_commands_are(kvcalc: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each section names its command and has the command's explanation. No page is written."""
    monkeypatch.chdir(tmp_path)
    out = kvcalc("report gpt2 --gpu h100 --context 1k --users 4 --kv-cache-dtype fp8 --explain").out
    lines = [line.removeprefix("kvcalc ") for line in out.splitlines() if line.startswith("kvcalc ")]
    assert [line.split()[0] for line in lines] == ["fit", "size", "roofline", "compare", "latency"]
    for line in lines:
        assert kvcalc(line).out.strip() in out, line
    assert not [*tmp_path.iterdir()]


PASSES = {
    "roofline deepseek-v3 --gpu h200 --tp 8 --phase prefill --mla-form expanded --context 1k --batch-size 3": (3, 1024),
    "roofline deepseek-v3 --gpu h200 --tp 8 --phase decode --context 1k --batch-size 4 --dp 2": (2, 1024),
    "roofline recurrentgemma-2b --batch-size 3 --context 500": (3, 500),
}


@pytest.mark.parametrize("line", PASSES, ids=[" ".join(line.split()[1:4:2]) for line in PASSES])
def test_products_of_a_pass_come_to_their_figures(kvcalc: Run, line: str) -> None:
    """B and B·S have their values on one rank, and 2·m·k·n and bytes·m·(k + n) give the figures."""
    batch, context = PASSES[line]
    names = {"B": batch, "B·S": batch * context}
    seen = 0
    lines = kvcalc(line + " --explain").out.splitlines()
    for at, text in enumerate(lines):
        if sizes := re.search(r"m = (\S+) = ([\d,.]+), k = .* = ([\d,]+), n = .* = ([\d,.]+)$", text):
            m, k, n = (float(size.replace(",", "")) for size in sizes.groups()[1:])
            assert names.get(sizes[1], m) == m
            flops = re.search(r"= ([\d,]+)$", lines[at + 1])
            assert flops and int(flops[1].replace(",", "")) == 2 * m * k * n
            for element, form, moved in re.findall(r"activations (\d) bytes·m·(\(k \+ n\)|n) = ([\d,]+)", lines[at + 3]):
                assert int(moved.replace(",", "")) == int(element) * m * (n if form == "n" else k + n)
                seen += 1
    assert seen > 3


# Of an H100's 85,017,755,648 B, 0.7 GiB of context and, with two GPUs, 2 GiB of collectives' buffers stand before the weights.
FREE = 85_017_755_648 - 7 * 2**30 // 10 - 2 * 2**30


@pytest.mark.parametrize(("engine", "share"), [("sglang", "0.827"), ("trtllm", "0.9")])
def test_a_share_of_free_memory_is_worked_out(kvcalc: Run, engine: str, share: str) -> None:
    line = f"fit llama-3.1-8b --gpu h100 --tp 2 --max-model-len 8k --engine {engine}"
    record = kvcalc(f"{line} --format json").records[0]
    first, second, *_ = kvcalc(f"{line} --explain").out.partition("may use\n")[2].splitlines()
    assert first.strip().startswith("of 85,017,755,648 B (79.18 GiB) free before the weights: 85,017,755,648 − ")
    assert first.split(" = ")[1].startswith(f"{FREE:,} B")
    if engine == "sglang":
        assert second.startswith(f"   {share} of the free memory = {int(FREE * float(share)):,} B")
    else:
        terms = record["weight_bytes"] + record["activation_bytes"] + record["overhead_bytes"]
        whole = terms + int((FREE - terms) * 0.9)
        assert second.startswith(f"   the terms below, {terms:,}, and 0.9 of the remaining {FREE - terms:,} = {whole:,} B")
        assert record["share_bytes"] == whole


def test_nothing_remains_beside_weights_that_are_too_large(kvcalc: Run) -> None:
    line = "fit llama-3.1-405b --gpu h100 --engine trtllm"
    record = kvcalc(f"{line} --format json").records[0]
    terms = record["weight_bytes"] + record["activation_bytes"] + record["overhead_bytes"]
    assert f"\n   nothing remains after the terms below, {terms:,} B" in kvcalc(f"{line} --explain").out


def test_softmax_as_a_kernel_has_five_vector_flops_for_two_values_of_two_bytes(kvcalc: Run) -> None:
    shown = kvcalc("roofline gpt2 --phase prefill --context 1000 --explain").out
    softmax = next(line for line in shown.splitlines() if "softmax as a kernel" in line)
    assert f" = {5 / (2 * 2)}, memory bound" in softmax


def test_a_picture_of_a_family_names_each_size(kvcalc: Run) -> None:
    """24 layers of 1,024 wide at 1,024 tokens in fp16: 2 · 24 · 1,024 · 1,024 · 2 bytes, 96 MiB."""
    assert "gpt-3-medium: 96 MiB at 356M" in kvcalc("plot cache-vs-parameters --explain").out


def test_a_block_has_one_unit(kvcalc: Run) -> None:
    """16 tokens of 128 KiB are 2,097,152 bytes."""
    assert " / 2,097,152 B = " in kvcalc("fit llama-3.1-8b --gpu h100 --explain").out
