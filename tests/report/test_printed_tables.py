"""Tables show the numbers of the records: each command's cells are read again and compared with its JSON."""

import re
from functools import partial
from typing import Any

import pytest
from conftest import Run
from printed import Table, holds, piped, table

from kvcalc import load_model
from kvcalc.report.text import compare_text, fit_text, roofline_text, serving_text, tables
from kvcalc.report.text.table_layout import Column
from kvcalc.report.text.tables import per_token, ratio, seconds
from kvcalc.units import format_bytes, format_count, format_si

Contract = dict[str, tuple[str, str]]
# how `printed.holds` reads the formats of columns
KINDS = {
    format_bytes: "bytes", per_token: "bytes", format_count: "count", seconds: "seconds", tables.kernel_seconds: "seconds",
    tables.digits: "digits", ratio: "times", tables.reduction_words: "times", tables.percent: "percent", format_si: "si",
    str: "text", tables.variant_name: "text",
}  # fmt: skip


def kind_of(column: Column) -> str:
    """Return the kind of `printed.holds` in which the column writes a figure."""
    show: Any = column.show
    if isinstance(show, partial):
        return f"si:{show.keywords['unit']}" if show.func is format_si else KINDS[show.func]
    template = getattr(show, "__self__", None)
    if isinstance(template, str):
        endings = {",}": "whole", "%}": "percent", "×": "decimal_times"}
        return next((kind for ending, kind in endings.items() if template.endswith(ending)), "fixed")
    return KINDS.get(show, "")


def contract(*columns: Column) -> Contract:
    """Return the headings of a table with the record's key and the kind of each."""
    return {c.title: (c.key, kind) for c in columns if (kind := kind_of(c))}


SIZE, COMPARE, MODELS, GPUS, ATTENTION, LATENCY, SPECULATION, SERVE, FIT = (
    contract(*columns)
    for columns in (
        compare_text.SIZE_COLUMNS, compare_text.COMPARE_COLUMNS, tables.MODEL_COLUMNS, tables.GPU_COLUMNS,
        roofline_text.ATTENTION_COLUMNS, serving_text.LATENCY, serving_text.SPECULATION, serving_text.SERVE, fit_text.COLUMNS,
    )
)  # fmt: skip
# headings of what rests on a record's time_basis, and how they say so
RATES = {"tokens/s", "req/s", "within SLO"}
MARKS = {"bound": ("≥ ", "≤ "), "scaled": ("~ ", "~ "), "calibrated": ("", "")}


def check(shown: Table, records: list[dict[str, Any]], contract: Contract, needed: str = "") -> None:
    """Check that every row is a record and every cell its number. All headings must be known, and required headings present."""
    known = {*contract, "queue", "fits", "missing/GPU", "required users", "max context"}
    assert len(shown.rows) == len(records) and {h.partition(",")[0] for h in shown.headings} <= known
    assert {*filter(None, needed.split(","))} <= {*shown.headings}
    for heading, (key, kind) in contract.items():
        if heading in shown.headings and any(key in record for record in records):
            for cell, record in zip(shown.column(heading), records, strict=True):
                text = unmarked(cell, heading, key, record)
                assert holds(text, record.get(key), kind), (heading, cell, record.get(key))


def unmarked(cell: str, heading: str, key: str, record: dict[str, Any]) -> str:
    """Return a cell without its mark. Times and rates must have the mark of the record's basis, other cells must have none."""
    timed = key.endswith(("_s", "_j", "per_million_tokens")) and not key.endswith("_per_s") and key != "roofline_s"
    rests = (timed or heading in RATES) and record.get(key) is not None
    mark = MARKS[record["time_basis"]][heading in RATES] if rests else ""
    mark = "" if cell.startswith("<") else mark  # a time shorter than a kernel
    assert cell.startswith(mark) and (mark or cell[:1] not in ("≥", "≤", "~")), (heading, cell)
    return cell.removeprefix(mark)


def assert_read_back(kvcalc: Run, line: str, first: str, contract: Contract, needed: str) -> str:
    """Compare a command's table with its records: complete, in 100 characters and as Markdown. Return the narrower output."""
    records = with_steps(kvcalc(f"{line} --format json").records)
    wide, narrow, marked = (kvcalc(f"{line} {more}").out for more in ("--wide", "", "--wide --format markdown"))
    check(table(wide, first), records, contract, needed)
    check(piped(marked, first), records, contract, needed)
    assert max(map(len, narrow.splitlines())) <= 100
    return narrow


def with_steps(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the records with the step time that `compare` shows: the prediction, or else the bound."""
    return [
        r | {"step_s": r["roofline_s"] if r.get("time_s") is None else r["time_s"]} if "roofline_s" in r else r
        for r in map(named, records)
    ]


def named(record: dict[str, Any]) -> dict[str, Any]:
    """Return a record with the name that tables give to the unchanged variant."""
    return record | {"variant": "original"} if record.get("variant") == "none" else record


SIZES = [
    "size llama-3.1-8b",
    "size qwen3-next-80b-a3b deepseek-v3.2 gemma-3-27b --context 1k,100k --batch-size 1,7 --kv-cache-dtype auto",
    "size deepseek-v4-flash gpt2 mixtral-8x7b --context 17,4k --block-size 100",
    "size llama-3.1-70b --tp 8 --quantization awq --kv-cache-dtype fp8 --context 1M",
    "size smollm-135m --context 1",
]


@pytest.mark.parametrize("line", SIZES)
def test_size(kvcalc: Run, line: str) -> None:
    narrow = assert_read_back(kvcalc, line, "model", SIZE, "model,attention,KV cache,per token,parameters,weights")
    records = kvcalc(f"{line} --format json").records
    last = records[-1]
    alike = [r for r in records if (r["context"], r["batch_size"]) == (last["context"], last["batch_size"])]
    title = " ".join(narrow.split()).partition(" model ")[0]
    for record in (choose(alike, key=lambda r: r["kv_cache_bytes"]) for choose in (min, max)):
        assert record["model"] in title and format_bytes(record["kv_cache_bytes"]) in title
    assert f"{last['context']:,} token" in title
    assert ("per GPU" in title) == (last["gpus"] > 1)
    assert (f"{format_bytes(last['weight_bytes'])} for " in title) == (len(records) == 1)


@pytest.mark.parametrize(
    "line",
    [
        "compare llama-3.1-8b --batch-size 1,8 --variants mha,none,mqa",
        "compare gemma-3-27b --gpu l40s --context 1k,64k --variants none,mqa/int8,mha,cla:2",
    ],
)
def test_compare(kvcalc: Run, line: str) -> None:
    assert_read_back(kvcalc, line, "variant", COMPARE, "variant,KV cache,stores,reads,FLOP/B,step,users")
    records = kvcalc(f"{line} --format json").records
    text = " ".join(kvcalc(f"{line} -v").out.split())
    for r in records:
        assert f"equal in all variants: {r['held_equal']}" in text
        assert not r["quality"] or f"published: {r['quality']}" in text
    alike = [r for r in records if (r["context"], r["batch_size"]) == (records[0]["context"], records[0]["batch_size"])]
    best = min(alike, key=lambda r: r["kv_cache_bytes"])
    size = f"{format_bytes(best['kv_cache_bytes'])} of KV cache for"
    assert f"with {best['variant']} needs {size} {best['context']:,} tokens" in text
    reference = "its own attention" if records[0]["variant"] == "none" else records[0]["variant"]
    assert f"{ratio(best['stored_reduction'])} less than with {reference}" in text


ROOFLINE = {
    "operator": ("operator", "text"), "predicted": ("time_s", "seconds"), "share": ("share", "percent"),
    "at least": ("roofline_s", "seconds"), "bound": ("bound", "text"), "FLOP/B": ("intensity", "digits"),
    "FLOP": ("flops", "si"), "bytes": ("bytes", "si:B"), "runs": ("count", "whole"), "overhead": ("overhead", "times"),
    "vector FLOP": ("vector_flops", "si"), "weights": ("weight_bytes", "si:B"), "cache": ("cache_bytes", "si:B"),
    "activations": ("activation_bytes", "si:B"),
}  # fmt: skip


@pytest.mark.parametrize(
    "line",
    [
        "roofline llama-3.1-8b --batch-size 8",
        "roofline deepseek-v3.2 --gpu h200 --tp 8 --batch-size 4",
        "roofline nemotron-h-8b --phase prefill --context 2k --gpu l40s",
    ],
)
def test_roofline(kvcalc: Run, line: str) -> None:
    """Rows are operators, followed by the operations of attention and FFN. Shares refer to the printed time."""
    records = kvcalc(f"{line} --format json").records
    out = kvcalc(f"{line} --wide").out
    shown, whole = table(out, "operator"), records[-1]
    rows: list[dict[str, Any]] = []
    for r in records:
        shown_time = "roofline_s" if whole["time_s"] is None else "time_s"
        name = r["operator"].replace("_overhead", " overhead")
        rows.append(r | {"share": r[shown_time] / whole[shown_time], "operator": name})
        for part in r.get("parts", []):
            rows.append(part | {"layer": "in it", "flops": part["flops"] or part["vector_flops"]})  # softmax has no products
    assert any(r["operator"] == "qk" for r in rows)
    columns = [*ROOFLINE]
    if whole["time_s"] is None:  # the share stands behind the bound, which is then the time shown
        columns[2:4] = columns[3:1:-1]
    assert [h for h in shown.headings if h not in ("layer", "shape")] == [
        h for h in columns if whole["time_s"] is not None or h not in ("predicted", "overhead")
    ]
    for heading, (key, kind) in ROOFLINE.items():
        if heading in shown.headings:
            for cell, row in zip(shown.column(heading), rows, strict=True):
                text = unmarked(cell, heading, key, row) if heading == "predicted" else cell
                assert holds(text, row.get(key), kind), (heading, cell, row)
    kinds = {r["layer"] for r in records} - {""}
    assert ("layer" in shown.headings) == (len(kinds) > 1)
    assert len(kinds) == 1 or shown.column("layer") == [row.get("layer", "") for row in rows]
    for cell, row in zip(shown.column("shape"), rows, strict=True):
        sizes = [row.get(key) for key in ("heads", "m", "n", "k") if row.get("heads")] or [row.get(k) for k in ("m", "k", "n")]
        assert cell == "–" if sizes[0] is None else [float(n.replace(",", "")) for n in cell.split(" × ")] == pytest.approx(sizes)
    moved = next(text for text in kvcalc(f"{line} -v").out.splitlines() if text.startswith("Bytes: "))
    words = moved.removeprefix("Bytes: ").removesuffix(".").split(", ")
    for word, key in zip(words, ("weight_bytes", "cache_bytes", "activation_bytes"), strict=True):
        assert holds(word.split()[-1], whole[key] / whole["bytes"], "percent")
    least, predicted = seconds(whole["roofline_s"]), whole["time_s"]
    title = re.sub(r", KV cache ≥ \S+ \S+(?=, )", "", " ".join(out.split()))
    what = "prefill" if "prefill" in line else "decode step"
    assert title.startswith(f"A {what} of ")
    assert f" {seconds(predicted) if predicted else f'at least {least}'}, {whole['bound']}-bound" in title


DRAFT = "--draft llama-3.2-1b --num-speculative-tokens 4 --acceptance-rate 0.7"


@pytest.mark.parametrize(
    "line",
    [
        "latency llama-3.1-8b --input-len 1000 --output-len 100,2k --batch-size 1,16",
        f"latency llama-3.1-8b --gpu h100,l40s --input-len 64 --output-len 1,8 --no-cache {DRAFT} --price-per-hour 2.5",
    ],
)
def test_latency(kvcalc: Run, line: str) -> None:
    records = kvcalc(f"{line} --format json").records
    out = kvcalc(f"{line} --wide").out
    check(table(out, "model"), records, LATENCY, "TTFT,TPOT,end to end,tokens/s,FLOP,bytes")
    if "--draft" in line:
        below = table(out[out.index("With the draft, at mid") :], "GPU")
        asked = {heading: LATENCY[heading] for heading in ("GPU", "batch", "in", "out")}
        check(below, records, SPECULATION | asked, "draft,drafted,accepted,TPOT,TPOT speed-up,draft cache")
    first, title = records[0], " ".join(out.split())
    least = "at least " if first["time_basis"] == "bound" else ""
    tokens = f"{first['input_len']:,} input + {first['output_len']:,} output token"
    start = f"llama-3.1-8b on 1× h100-sxm takes {least}{seconds(first['e2e_s'])} for {tokens}"
    assert title.startswith("With 4 draft tokens of llama-3.2-1b, llama-3.1-8b " if "--draft" in line else start)


def test_serve(kvcalc: Run) -> None:
    line = (
        "serve llama-3.1-8b --rate 5,inf --num-prompts 50 --slo-ttft 0.2 --price-per-hour 2 --policy static,continuous "
        "--output-len uniform:10,100 --input-len 200"
    )
    records = kvcalc(f"{line} --format json").records
    out = kvcalc(f"{line} --wide").out
    shown = table(out, "model")
    check(shown, records, SERVE, "offered req/s,done,tokens/s,TTFT p50,batch,padding,KV waste,KV peak,within SLO,per 1M tokens")
    words = {True: "diverges", False: "stable", None: "–"}
    assert shown.column("queue") == [words[r["diverges"]] for r in records]
    first, text = records[0], " ".join(out.split())
    plain = kvcalc(line).out
    assert "rejected" not in plain and "preempted" not in plain  # none were
    title = text.partition(" model ")[0]
    assert first["diverges"] is False and "5 requests/s, costing 2.35 per million output tokens, 1.86× as fast as" in title
    details = kvcalc(f"{line} -v").joined
    assert f"max_num_seqs {first['max_num_seqs']:,}" in details
    assert f"KV cache {format_bytes(first['kv_budget_bytes'])} per GPU" in details


def test_serve_shows_what_went_wrong(kvcalc: Run) -> None:
    line = "serve llama-3.1-8b --num-prompts 60 --max-concurrency 40 --kv-cache-memory-bytes 300MiB --tp 2 --isl uniform:10,5k"
    records = kvcalc(f"{line} --format json").records
    assert records[0]["preemptions"] and records[0]["rejected"]
    shown = kvcalc(f"{line} --wide -v")
    check(table(shown.out, "model"), records, SERVE, "clients,rejected,preempted")


@pytest.mark.parametrize(
    "line",
    [
        "fit gemma-3-27b --gpu h100,h200,l4 --engine vllm --max-model-len 32k",
        "fit llama-3.1-70b --gpu h100 --tp 1,2,4 --kv-cache-dtype auto,fp8 --max-num-seqs 4",
        "fit mistral-7b-v0.1 --engine llama.cpp --gpu l40s",
    ],
)
def test_fit(kvcalc: Run, line: str) -> None:
    records = kvcalc(f"{line} --format json").records
    shown = table(kvcalc(f"{line} --wide").out, "GPU")
    check(shown, records, FIT, "GPU,weights/GPU,activations/GPU,overhead/GPU,KV cache/GPU,concurrency,users")
    assert ("fits" in shown.headings) == (not all(r["fits"] for r in records))
    for verdict, r in zip(shown.column("fits") if "fits" in shown.headings else (), records, strict=False):
        assert verdict == ("yes" if r["fits"] else "no")
    for cell, r in zip(shown.column("max context"), records, strict=True):
        held = [n for n in (r["max_model_len"], load_model(r["model"]).max_context) if n is not None]
        assert int(cell.replace(",", "").lstrip("≥ ")) <= min(held) if held else cell == "no limit"  # low end of the range
    has_range = any(r["kv_budget_low_bytes"] is not None for r in records)
    assert {end in shown.headings for end in ("KV cache/GPU low", "KV cache/GPU high")} == {has_range}


def test_models(kvcalc: Run) -> None:
    narrow = assert_read_back(kvcalc, "models", "model", MODELS, ",".join(MODELS))
    assert narrow.count("\n") > 150


def test_gpus(kvcalc: Run) -> None:
    assert_read_back(kvcalc, "gpus", "GPU", GPUS, ",".join(GPUS))
    assert_read_back(kvcalc, "roofline --gpu h100,mi300x", "GPU", ATTENTION, "attention,FLOP/B,bound,at least,bytes,FLOP")


def test_figures_by_hand() -> None:
    times = {0.0: "0 ns", 4.587e-3: "4.59 ms", 1.0: "1 s", 61.0: "61 s", 999.4e-6: "999 µs", 9.996e-4: "1 ms", 1841: "1,840 s"}
    assert [seconds(value) for value in times] == [*times.values()]
    assert [ratio(r) for r in (0.25, 4.0, 56.89, 99.94, 100.0, 1234.5)] == ["0.25×", "4×", "56.9×", "99.9×", "100×", "1,234×"]
    assert [per_token(b) for b in (6880, 10_239, 10_240, 2.5, 131_072)] == ["6,880 B", "10,239 B", "10.0 KiB", "2 B", "128.0 KiB"]
    assert [format_si(v, "B") for v in (999, 999.6, 1000, 999.6e9)] == ["999 B", "1 kB", "1 kB", "1 TB"]
