"""Every number in an answer's sentence is in its table or in the request. Pictures show the records' numbers."""

import re
from typing import Any

import pytest
from conftest import Run
from hypothesis import given
from hypothesis import strategies as st

from kvcalc import Parallelism, load_model
from kvcalc.layers.batch import Batch
from kvcalc.library.presets import preset_files
from kvcalc.model.forward_pass import through_layers, total
from kvcalc.model.memory import cache_size, size_record
from kvcalc.model.precision import Precision
from kvcalc.planning.sweeps import cache_curve, contexts_up_to, generation_work
from kvcalc.report.charts import drawing
from kvcalc.report.charts.chart import Chart
from kvcalc.report.charts.size_plot import cache_vs_context
from kvcalc.report.explain import explain_size

HEADING = re.compile(r"\S {2,}\S")
NUMBER = re.compile(r"(?<![\w.\-≈])\d[\d,]*(?:\.\d+)?(?:e[+-]\d+)?")
NAMES = re.compile(r"[a-z][\w.]*-[\w.\-]+|(?:tp|pp|dp|ep) \d+|\b\w+:[\d+@/\w]+|[a-z]+\d+\w*")  # of models, GPUs, variants
SI = {"k": 1024, "M": 1024**2}


def numbers(text: str) -> set[str]:
    """Return the numbers in a text without separators, except numbers in names."""
    return {found.replace(",", "").rstrip(".") for found in NUMBER.findall(NAMES.sub(" ", text))}


def typed(line: str) -> set[str]:
    """Return the numbers in a command line, as typed and in full."""
    found = set()
    for value, suffix in re.findall(r"(\d+(?:\.\d+)?)([kM]?)", line):
        found |= {value, str(int(float(value) * SI.get(suffix, 1)))}
    return found


LINES = [
    "size llama-3.1-8b", "size llama-7b --context 4k,16k", "size llama-3.1-8b gpt2 deepseek-v3 --context 8k --batch-size 4",
    "size llama-3.1-70b --tp 1,8 --batch-size 1,64", "size llama-3.1-70b --pp 2 --dp 2 --batch-size 4",
    "size --layers 48 --hidden-size 7168", "compare llama-3.1-8b", "compare gpt2 --variants mha,cla:2 --batch-size 4",
    "compare gemma-3-27b --gpu h100,l40s --variants none,mqa,evict:2048,cla:3",
    "compare llama-3.1-70b --tp 4 --context 8k,32k", "roofline llama-3.1-8b",
    "roofline llama-3.1-8b --bounds --batch-size 1,8", "roofline llama-3.1-70b --tp 2 --pp 2 --phase prefill",
    "roofline deepseek-v3 --gpu h200 --tp 8 --batch-size 1,64", "latency llama-3.1-8b",
    "latency llama-3.1-70b --tp 2 --pp 2 --input-len 1k,4k --output-len 100 --batch-size 1,16",
    "latency llama-3.1-8b --no-cache",
    "latency llama-3.1-70b --tp 4 --draft llama-3.2-1b --num-speculative-tokens 4 --acceptance-rate 0.7",
    "latency llama-3.1-8b --prefix-len 1000 --input-len 4000 --price-per-hour 2", "latency llama-3.1-8b --gpu mi300x",
    "fit llama-3.1-8b", "fit llama-3.1-70b --gpu h100,h200 --tp 4", "fit llama-3.1-8b --max-model-len 32k --max-num-seqs 8",
    "fit llama-3.1-8b --shared-prefix 1k --max-model-len 4k", "serve llama-3.1-8b --rate 4 --num-prompts 20 --osl 40",
    "serve llama-3.1-8b --rate 4,16 --num-prompts 20 --osl 40",
    "serve llama-3.1-8b --rate 4 --num-prompts 20 --osl 40 --policy static,continuous",
    "serve llama-3.1-8b --rate 4 --num-prompts 20 --osl 40 --cache paged,contiguous --price-per-hour 2",
    "serve llama-3.1-8b --max-concurrency 1,8 --num-prompts 20 --osl 40", "plan llama-3.1-8b --users 64 --context 8k",
    "plan llama-3.1-70b --users 64 --context 8k --max-tpot 50ms --price-per-hour h100=2.5,h200=4 --gpu h100,h200",
]  # fmt: skip


@pytest.mark.parametrize("line", LINES)
def test_every_number_of_a_sentence_is_in_its_table(kvcalc: Run, line: str) -> None:
    """A number is a cell, a value that is equal in all rows, or part of the request. A factor may be a quotient of cells."""
    out = kvcalc(line).out.splitlines()
    wide = kvcalc(f"{line} --wide -v").out.splitlines()
    first = next(n for n, text in enumerate(out) if HEADING.search(text))
    sentence = " ".join(out[:first])
    known = numbers("\n".join(out[first:])) | numbers("\n".join(wide[first:])) | typed(line)
    missing = numbers(sentence) - known
    factors = {found for found in missing if f"{found}×" in sentence}
    cells = [float(cell) for cell in known]
    quotients = {f"{a / b:.3g}" for a in cells for b in cells if b}
    signs = [sign for word, sign in (("difference", -1), ("together", 1)) if word in sentence]
    assert missing - factors <= {f"{a + sign * b:.2f}" for a in cells for b in cells for sign in signs}, sentence
    assert {f"{float(found):.3g}" for found in factors} <= quotients, sentence


PLAN = "plan qwen3-30b-a3b -q int4 --users 1 --max-tpot 3.3ms --isl 500 --osl 500 --gpu rtx-5090,h100"
PHRASES = [
    ("compare gemma-3-27b --context 128k", "In 90% of measured"),
    ("compare deepseek-v3 --variants mla,mha", "In 90% of measured"),
    ("serve llama-3.1-8b --rate 80 --num-prompts 40", "Errors in 90% of measured"),
    ("serve llama-3.1-8b --rate 4 --num-prompts 20 --slo-ttft 1s --slo-tpot 1ms", ", and 0.0% of requests meet the targets"),
    ("serve gpt2 --rate 4,16 --num-prompts 20 --osl 4 --slo-ttft 1us", "keeps 0.0% of requests within the targets at a rate of 4, "),
    ("fit deepseek-r1 --gpu h20 --tp 8 --engine sglang", "It fits with `--gpu-memory-utilization 0.97 --max-model-len 107168` or"),
    ("serve gpt2 --rate 4000 --num-prompts 200 --osl 64", "does not keep up with 4000 requests/s, serves "),
    ("fit qwen2.5-7b --gpu l4 --context 8000", "users of 8,000 tokens, at least "),  # one of the longest contexts
    ("latency llama-3.1-70b", "on 1× h100-sxm, exceeding its memory, takes "),
    ("roofline llama-3.1-8b --gpu l4 --batch-size 64", "on l4, where 6 fit, takes "),
    ("latency llama-3.1-8b -q auto,awq --batch-size 1,64", " weights takes 1.75 s for batch 1, 1.91× as fast as bf16 weights, "),
    ("roofline deepseek-v3 --gpu h200 --tp 8 --batch-size 1", "takes 8.4 ms, memory-bound at 3.27 FLOP/B, attention at 30"),
    ("plan llama-3.1-8b --users 8,9 --context 8k -q fp8,awq --gpu l4", "The smallest deployment with awq weights is 1× l4 for"),
    ("plan llama-3.1-8b --gpu rtx-4090 --max-tpot 30ms --users 8 --context 8k", " that may serve 8 users "),
    (PLAN, "1× rtx-5090 with int4 weights is the smallest deployment that may meet the targets, 16× h100-sxm the smallest with"),
    ("plan llama-3.1-8b --users 8 --context 8k", "1× l40s is the smallest deployment"),  # all others have more memory
    (PLAN, "vllm serve ./qwen3-30b-a3b-int4 --max-model-len 1000 --max-num-seqs 1"),
    ("plan llama-3.2-1b --rate 1653 --isl 100k --osl 20k --gpu t4", " GPUs serves this load, the closest is 400,185× t4 in 44,465 "),
    ("fit gpt-oss-20b --engine llama.cpp --gpu rtx-5060-ti --context 131072", "1 user of 131,072 tokens fits on 1× rtx-5060-ti-16gb"),
    ("plan llama-3.1-70b --users 512 --context 32k --gpu h100 --max-gpus 8", "In 90% of measured"),
    ("fit qwen3-vl-32b --gpu h200 --max-model-len 32k --limit-mm-per-prompt image=2", "with vllm 0.33.0, in 90% of starts."),
    ("fit bge-m3 --gpu l4", "Free memory/GPU: 16.97 GiB to 18.19 GiB with vllm 0.33.0, in 90% of"),
    ("fit dbrx --gpu h200 --tp 2", "1 user of 32,768 tokens, the model's maximum, may fit on 2× h200"),  # no token fits at the low end
    ("fit gpt2,qwen3-32b --gpu l4 --context 1k", "1 of 2 models fit on 1× l4, all but qwen3-32b."),
    ("fit qwen2.5-14b -q q5_k_m --gpu rtx-3080 --engine llama.cpp --context 32k", "on 1× rtx-3080: only 27 of 49 layers fit; use `--n-gpu-layers 27`."),
    ("fit llama-3.1-70b -q q4_k_m --gpu rtx-4090 --engine llama.cpp", "One request of 4,096 tokens does not fit on 1× rtx-4090: only 44"),
    ("fit --gpu a10g -- vllm serve meta-llama/Llama-3.1-8B", "vLLM does not start: one request of 131,072 tokens does not fit"),
    ("fit qwen2.5-72b -q q4_k_m --gpu rtx-3090 --pp 3 --engine llama.cpp --n-gpu-layers 99 --context 16k", "fit on 3× rtx-3090 with pp 3"),
    ("fit gpt-oss-120b --gpu rtx-4090 --engine llama.cpp --context 8k", "the experts of 24 of 36 layers need CPU memory; use `--n-cpu-moe 24`."),
    ("fit llama-3.1-70b --gpu rtx-4090 --tp 4 --context 8k", "with tp 4: weights exceed the engine's share by 11.25 GiB per GPU; use `--quantization fp8`."),
    ("fit deepseek-v3 --gpu h200 --dp 8 --enable-expert-parallel", "16 users of 163,840 tokens, the model's maximum, fit on 8× h200 with dp 8, in 8 caches of about 376,512 tokens."),
    ("fit qwen3-1.7b --gpu rtx-4090 --require 1 --budget middle --max-model-len 1k", ", and 1 needs 113.75 MiB of KV cache or gpu_memory_utilization "),
    ("fit llama-3.1-8b --gpu h100 --gpu-memory-utilization 0.9,0.95 --context 8k", "with utilization 0.95, 53 with utilization 0.9."),
    ("fit --gpu h100 -- llama-server -m phi-4.gguf -c 32768 -np 4", "KV cache/GPU of 4 slots: 6.25 GiB."),
    ("fit llama-3.1-8b --gpu rtx-4090 --max-num-seqs 256 --context 8k", "Only 4 of 256 users of 8,192 tokens fit on"),
    ("fit --gpu h100 -- vllm serve qwen3-32b --max-num-seqs 1 --max-model-len 8192", "1 user of 8,192 tokens fits on 1× h100-sxm, with memory for 4, at least 3."),
]  # fmt: skip


@pytest.mark.parametrize(("line", "phrase"), PHRASES)
def test_answers_state_accuracy_and_limits(kvcalc: Run, line: str, phrase: str) -> None:
    """Other notes leave room for it: rows that do not fit, a growing queue, a missed target or images."""
    assert phrase in kvcalc(line).joined


@pytest.mark.parametrize("gpu", sorted(preset_files("gpus")))
def test_no_warning_is_lost(kvcalc: Run, monkeypatch: pytest.MonkeyPatch, gpu: str) -> None:
    """A step in formats that many GPUs cannot compute has a time. Each warning is one of at most three lines below it."""
    monkeypatch.setenv("COLUMNS", "80")
    line = f"roofline llama-3.1-405b --gpu {gpu} --dtype fp32 --quantization nvfp4"
    total = kvcalc(f"{line} --format json").records[-1]
    answer, _, below = kvcalc(line).out.partition("\n\n")
    notes = below.splitlines()
    assert re.search(" takes | moves ", " ".join(answer.split())) and len(notes) <= 3
    assert total["fallback"] in (None, *notes)
    assert any(note.startswith("Does not fit: ") for note in notes) == (total["fits"] is False)


@given(
    st.sampled_from(("llama-3.1-70b", "deepseek-v3", "gemma-3-27b", "gpt-oss-120b")),
    st.sampled_from(((1, 1, 1), (2, 1, 1), (4, 2, 1), (8, 1, 1), (2, 1, 2))),
    st.integers(1, 64),
    st.integers(200, 100_000),
)
def test_pictures_and_formulas_show_the_bytes_of_the_record(
    name: str, ranks: tuple[int, int, int], batch: int, context: int
) -> None:
    """All show the bytes of one GPU: the end of the curve, its label, and the sum of --explain."""
    tp, pp, dp = ranks
    cut = Parallelism(tp=tp, pp=pp, dp=dp)
    asked = load_model(name), context, batch, Precision(), 16, cut
    record = size_record(*asked)
    chart = cache_vs_context([cache_curve(asked[0], Precision(), contexts_up_to(context), batch, cut)], [batch])
    assert chart.series[0].ys[-1] == record["kv_cache_bytes"]
    assert f"kv_cache_bytes = Σ × {cut.sequences(batch):,} = {record['kv_cache_bytes']:,} " in explain_size(record, *asked)
    work = generation_work(asked[0], context, Precision(), cut)
    passes = Batch.prefill(context), Batch.decode(context)
    flops = [total(through_layers(asked[0], one, Precision(), cut)).flops for one in passes]
    assert [work.uncached_flops[-1], work.cached_flops[-1]] == flops


@pytest.mark.parametrize("name", ["llama-7b", "llama-2-13b", "gpt2", "deepseek-v3", "mistral-7b-v0.1", "llama-3.1-70b"])
@pytest.mark.parametrize("batch", [1, 9])
def test_the_context_at_which_the_cache_equals_the_weights_is_said(kvcalc: Run, name: str, batch: int) -> None:
    """A context beyond the model's maximum is marked as such. A cache that stops growing has no such context."""
    (record,) = kvcalc(f"size {name} --batch-size {batch} --format json").records
    shown, turns, model = kvcalc(f"size {name} --batch-size {batch} -v").joined, record["equal_weights_context"], load_model(name)
    if turns is None:
        assert "stays smaller than the weights" in shown and name == "mistral-7b-v0.1"
        return
    least, most = (batch * cache_size(model, context).stored for context in (turns - 1, turns))
    assert least < record["weight_bytes"] <= most
    assert shown.count(f" {turns:,} ") >= 2  # in a footnote and in the table
    assert (f", above the maximum {model.max_context:,}" in shown) == (turns > model.max_context)


def test_pictures_show_the_figures_of_the_records(kvcalc: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The picture has the requested load, with the model on several GPUs."""
    drawn: list[list[Chart]] = []
    monkeypatch.setattr(drawing, "save", lambda charts, *_: drawn.append(charts))

    def chart_and_record(line: str) -> tuple[list[Chart], dict[str, Any]]:
        (record, *_) = kvcalc(f"{line} --format json").records
        assert kvcalc(f"{line} --plot picture.png").code == 0
        return drawn[-1], record

    charts, record = chart_and_record("latency llama-3.1-70b --tp 2 --pp 2 --batch-size 16 --output-len 100")
    for chart, key in zip(charts, ("tpot_s", "output_tokens_per_s"), strict=True):
        assert dict(zip(chart.series[0].xs, chart.series[0].ys, strict=True))[16.0] == pytest.approx(record[key])
    drafting = "--draft llama-3.2-1b --num-speculative-tokens 4 --acceptance-rate 0.7"
    charts, record = chart_and_record(f"latency llama-3.1-70b --tp 4 {drafting}")
    gains = dict(zip(charts[0].series[0].xs, charts[0].series[0].ys, strict=True))
    assert gains[0.7] == pytest.approx(record["speculative_speedup"])
    charts, record = chart_and_record("compare llama-3.1-70b --tp 4 --variants none,mqa --batch-size 4 --context 8k")
    shown = [record[key] for key in ("kv_cache_bytes", "kv_cache_read_bytes", "attention_flops_per_s", "time_s")]
    charts[2] = charts[2]._replace(series=charts[2].series[-1:])  # the points under the roof
    assert charts[2].series[0].xs[0] == record["attention_intensity"] == 8
    assert [chart.series[0].ys[0] for chart in charts[:4]] == shown
    curve = charts[4].series[0]
    assert curve.ys[-1] / curve.xs[-1] * 8192 == pytest.approx(record["kv_cache_bytes"])
    charts, record = chart_and_record("fit llama-3.1-70b --tp 4 --pp 2")
    shown = [record[f"{key}_bytes"] for key in ("weight", "activation", "overhead", "kv_budget")]
    assert [series.ys[0] for series in charts[0].series[:4]] == shown
