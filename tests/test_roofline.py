"""Operators on a GPU's roofline: bounds and times by hand, intensities, decode steps, compute-bound batches, the command."""

from typing import Any

import pytest
from conftest import Run
from specs import grouped, stack

from kvcalc import Batch, Cost, Gpu, Model, Operator, Parallelism, Precision, UserError, bounds, forward, load_gpu, load_model
from kvcalc.gpu.gpu import compute_bound_batch_size, mla_form, total_bound, total_seconds
from kvcalc.layers.cost import Role
from kvcalc.library.load import with_changes
from kvcalc.planning.sweeps import sparse_reads
from kvcalc.planning.variants import variant
from kvcalc.report.charts.size_plot import sparse_reads_chart
from kvcalc.timing.deployment import TimedDeployment, pass_records

BF16 = Precision("bf16")


def gpu(**fields: Any) -> Gpu:
    """Return a GPU with 100 bytes and 1000 bf16 FLOP per second: the ridge point is 10."""
    plain = {"name": "toy", "vendor": "none", "memory_bytes": 1 << 30, "source": (), "bandwidth_bytes_per_s": 100.0}
    return Gpu(**(plain | {"flops_per_s": {"bf16": 1000.0}, "vector_flops_per_s": {"fp32": 50.0}} | fields))  # type: ignore[arg-type]


def operator(count: int = 1, kind: str = "gemm", dtype: str = "bf16", **cost: Any) -> Operator:
    return Operator("o", "full", count, kind, Cost(**cost), dtype)


@pytest.mark.parametrize(
    ("cost", "seconds", "bound"),
    [
        ({"flops": 2000, "weight_bytes": 100}, 2.0, "compute"),
        ({"flops": 2000, "weight_bytes": 100, "cache_read_bytes": 100, "activation_bytes": 100}, 3.0, "memory"),
        ({"flops": 1000, "cache_write_bytes": 100}, 1.0, "memory"),  # on the knee
        ({"flops": 1000, "weight_bytes": 100, "vector_flops": 100}, 2.0, "compute"),  # the vector units are the slowest
        ({"weight_bytes": 100, "vector_flops": 51}, 1.02, "compute"),
        ({"network_bytes": 25, "weight_bytes": 1}, 2.5, "network"),
        ({}, 0.0, "memory"),
    ],
)
def test_an_operator_takes_as_long_as_its_slowest_resource(cost: dict[str, int], seconds: float, bound: str) -> None:
    (placed,) = bounds([operator(**cost)], gpu(link_bytes_per_s=10.0))
    assert (placed.seconds, placed.bound) == (pytest.approx(seconds), bound)


def test_all_the_times_it_runs_and_the_sum_of_a_pass() -> None:
    placed = bounds([operator(5, flops=2000), operator(2, weight_bytes=300)], gpu())
    assert [p.seconds for p in placed] == [10.0, 6.0]
    assert total_seconds(placed) == 16.0
    assert total_bound(placed) == "compute"
    assert [p.intensity for p in placed] == [None, 0.0]


def test_a_gpu_without_a_vector_peak_or_a_link_does_not_time_them() -> None:
    bare = gpu(vector_flops_per_s={}, link_bytes_per_s=None)
    placed = bounds([operator(vector_flops=10**9, weight_bytes=100), operator(network_bytes=10**9)], bare)
    assert [(p.seconds, p.bound) for p in placed] == [(1.0, "memory"), (0.0, "memory")]


def test_a_dtype_without_a_unit_falls_back_and_says_so() -> None:
    """fp8 products on an A100 run in bf16, on a V100 in fp16, fp4 products on an H100 in bf16."""
    for name, dtype, stand_in in (
        ("a100-80gb", "fp8", "bf16"),
        ("v100", "bf16", "fp16"),
        ("h100", "fp8", ""),
        ("h100", "fp4", "bf16"),
    ):
        card = load_gpu(name)
        (placed,) = bounds([operator(dtype=dtype, flops=10**15)], card)
        assert placed.fallback == stand_in
        assert placed.seconds == 10**15 / card.flops_per_s[stand_in or dtype]
    vector = bounds([operator(dtype="", vector_flops=1)], load_gpu("a100-80gb"))[0]
    assert vector.fallback == ""


def test_a_gpu_without_any_peak_is_refused_only_where_products_need_one(kvcalc: Run) -> None:
    with pytest.raises(UserError, match="apple-m3-max has no matrix peak for bf16"):
        bounds([operator(flops=1)], load_gpu("apple-m3-max"))
    bounds([operator(dtype="", weight_bytes=1)], load_gpu("apple-m3-max"))
    code, out, err = kvcalc("roofline llama-2-7b --gpu apple-m3-max --phase prefill")
    assert (code, out) == (2, "") and "no matrix peak" in err


GOLDEN = [  # model, context, changes, milliseconds, FLOP per byte
    ("llama-2-7b", 4096, [], 4.586, 1.00),
    ("llama-3-8b", 8192, [], 4.801, 1.20),
    ("llama-2-13b", 4096, [], 8.674, 1.00),
    ("mistral-7b-v0.1", 32_768, [], 4.405, 1.11),
    ("mistral-7b-v0.1", 32_768, ["sliding_window=null"], 5.527, 1.69),
]


@pytest.mark.parametrize(("name", "context", "changes", "milliseconds", "intensity"), GOLDEN)
def test_decode_step_on_an_h100(
    kvcalc: Run, name: str, context: int, changes: list[str], milliseconds: float, intensity: float
) -> None:
    sets = " ".join(f"--set {c}" for c in changes)
    found = kvcalc(f"roofline {name} --gpu h100 --dtype bf16 --context {context} {sets} --format json").records
    assert found[-1]["operator"] == "total"
    assert found[-1]["roofline_s"] * 1e3 == pytest.approx(milliseconds, rel=0.004)
    assert found[-1]["intensity"] == pytest.approx(intensity, abs=0.006)
    model = with_changes(load_model(name), changes)
    assert total_seconds(bounds(forward(model, Batch.decode(context), BF16), load_gpu("h100"))) == found[-1]["roofline_s"]


# ---- intensities


def core(model: Model, context: int, batch_size: int = 1, precision: Precision = BF16) -> Cost:
    (found,) = [o for o in forward(model, Batch.decode(context, batch_size), precision) if o.name == "attention"][:1]
    return found.cost


@pytest.mark.parametrize(("text", "heads_per_kv"), [("mha", 1), ("gqa:8", 4), ("gqa:4", 8), ("mqa", 32)])
@pytest.mark.parametrize(("context", "batch_size"), [(1, 1), (4096, 1), (4096, 64), (10**6, 7)])
def test_decode_attention_has_as_many_flops_a_cached_byte_as_queries_share_a_key(
    text: str, heads_per_kv: int, context: int, batch_size: int
) -> None:
    cost = core(variant(load_model("llama-2-7b"), text).model, context, batch_size)
    assert cost.flops / cost.cache_read_bytes == heads_per_kv
    assert cost.cache_read_bytes == 2 * (32 // heads_per_kv) * 128 * context * batch_size * 2


def test_mla_tends_to_242() -> None:
    """2·128·(576 + 512)/(576·2) per byte of cache. With the new row, queries and outputs, the intensity comes close to it."""
    cost = core(load_model("deepseek-v3"), 131_072)
    limit = 2 * 128 * (576 + 512) / (576 * 2)
    assert cost.flops / cost.cache_read_bytes == limit == pytest.approx(241.8, abs=0.03)
    intensity = [
        core(load_model("deepseek-v3"), s).flops / core(load_model("deepseek-v3"), s).bytes for s in (1000, 10**5, 10**7)
    ]
    assert intensity == sorted(intensity)
    assert intensity[-1] == pytest.approx(limit, rel=1e-4) and intensity[-1] < limit


# ---- sparse attention against MLA


def per_layer(name: str, context: int, dtype: str = "bf16") -> tuple[int, int]:
    """Return the cache bytes that one layer reads for (latents, index keys) in a decode step."""
    found = forward(load_model(name), Batch.decode(context), Precision("bf16", dtype))
    costs = {o.name: o.cost.cache_read_bytes for o in found if o.layer == "moe"}
    return costs["attention"], costs.get("indexer", 0)  # type: ignore[return-value]


@pytest.mark.parametrize(("dtype", "row", "key", "crossing"), [("bf16", 1152, 256, 2634), ("fp8_ds_mla", 656, 132, 2564)])
def test_dsa_reads_less_than_mla_from_the_crossing_on(dtype: str, row: int, key: int, crossing: int) -> None:
    for context in (crossing - 1, crossing):
        sparse, mla = sum(per_layer("deepseek-v3.2", context, dtype)), sum(per_layer("deepseek-v3", context, dtype))
        assert (sparse, mla) == (2048 * row + context * key, context * row)
        assert (sparse < mla) == (context == crossing)
    models = [load_model("deepseek-v3.2"), load_model("deepseek-v3")]
    chart = sparse_reads_chart(sparse_reads(models, 131_072, Precision("bf16", dtype)))
    (point,) = [s for s in chart.series if s.kind == "points"]
    fewer = row * 131_072 / (2048 * row + 131_072 * key)
    assert chart.title == f"Sparse attention reads {fewer:.1f}× fewer bytes than MLA at 128k tokens"
    assert ([*point.xs], [*point.labels]) == ([crossing], [f"reads less from {crossing:,} tokens on"])
    far = 10**9
    most = sum(per_layer("deepseek-v3", far, dtype)) / sum(per_layer("deepseek-v3.2", far, dtype))
    assert most == pytest.approx(row / key, rel=1e-4)  # 4.5× and 4.97× at most


# ---- where things turn


def place(name: str, card: str = "h100", context: int = 4096) -> Any:
    model, found = load_model(name), load_gpu(card)
    return lambda batch: bounds(forward(model, Batch.decode(context, batch), BF16), found)


def test_the_ffn_turns_where_its_intensity_passes_the_knee() -> None:
    """gate_up has 4·T·D·F FLOPs and 4·D·F + 2·T·(D + 2·F) bytes, down is similar. The sum of computing takes longer."""
    d, f, t = 4096, 11_008, compute_bound_batch_size(place("llama-2-7b"), Role.FFN)

    def compute_bound(t: int) -> bool:
        times = {"compute": 0.0, "memory": 0.0}
        for inputs, outputs in ((d, 2 * f), (f, d)):
            compute = 2 * t * inputs * outputs / 989e12
            memory = 2 * (inputs * outputs + t * (inputs + outputs)) / 3.35e12
            times["compute" if compute > memory else "memory"] += max(compute, memory)
        return times["compute"] > times["memory"]

    assert t is not None and 295 < t < 400
    assert compute_bound(t) and not compute_bound(t - 1)


def test_plain_attention_never_turns_and_that_is_said(kvcalc: Run) -> None:
    for name in ("llama-2-7b", "llama-3-8b"):
        assert compute_bound_batch_size(place(name), Role.CORE) is None
    out = kvcalc("roofline llama-2-7b --gpu h100 -v").joined
    assert f"FFN from batch {compute_bound_batch_size(place('llama-2-7b'), Role.FFN):,} on, attention never" in out


def test_mla_turns_on_a_gpu_whose_knee_is_lower() -> None:
    """241.8 is above the ridge point of an H20 (148 TFLOP/s over 4 TB/s) at any batch size."""
    assert load_gpu("h20").knee < 100
    assert compute_bound_batch_size(place("deepseek-v3", "h20"), Role.CORE) == 1
    assert compute_bound_batch_size(place("deepseek-v3", "h100"), Role.CORE) is None


# ---- records and the command

KEYS = [
    "model", "gpu", "phase", "batch_size", "context", "operator", "layer", "count", "flops", "vector_flops", "weight_bytes",
    "cache_bytes", "activation_bytes", "bytes", "intensity", "bound", "roofline_s", "time_s",
]  # fmt: skip


def test_records_say_every_key_and_end_with_their_total(kvcalc: Run) -> None:
    found = kvcalc("roofline llama-2-7b --gpu h100,a100-40gb-sxm --mixed --batch-size 1,8 --context 1k,2k --format json").records
    passes = [(r["gpu"], r["batch_size"], r["context"]) for r in found if r["operator"] == "total"]
    assert passes == [(g, b, s) for g in ("h100-sxm", "a100-40gb-sxm") for b in (1, 8) for s in (1024, 2048)]
    sums = dict.fromkeys(("flops", "vector_flops", "weight_bytes", "cache_bytes", "activation_bytes", "bytes", "roofline_s"), 0.0)
    for record in found:
        assert set(KEYS) <= set(record)
        calibrated = record["gpu"] == "h100-sxm"  # the A100 of 40 GB has no calibration
        assert record["time_s"] > 0 if calibrated else record["time_s"] is None
        assert record["bytes"] == record["weight_bytes"] + record["cache_bytes"] + record["activation_bytes"]
        assert record["bound"] in ((None,) if record["operator"] == "engine_overhead" else ("compute", "memory", "network"))
        if record["operator"] != "total":
            sums = {k: v + record[k] for k, v in sums.items()}
            continue
        assert {k: record[k] for k in sums} == {k: pytest.approx(v, rel=1e-12) for k, v in sums.items()}
        assert record["intensity"] == record["flops"] / record["bytes"]
        sums = dict.fromkeys(sums, 0.0)


def test_with_pipeline_stages_the_slowest_is_shown() -> None:
    """Of two stages of 16 layers, the stage with the LM head takes longer."""
    model, card = load_model("llama-2-7b"), load_gpu("h100")
    split = Parallelism(pp=2)
    found = TimedDeployment(model, card, parallelism=split).operator_bounds(Batch.decode(4096))
    stages = [bounds(forward(model, Batch.decode(4096), parallelism=split, stage=n), card) for n in (0, 1)]
    assert found == stages[1]
    assert total_seconds(stages[1]) > total_seconds(stages[0])
    first = TimedDeployment(stack(grouped(), layers=8, vocab_size=1), card, parallelism=split).operator_bounds(
        Batch.decode(10**6)
    )
    assert {p.operator.count for p in first if p.operator.name == "attention"} == {4}


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("roofline llama-2-7b --phase train", "unknown phase 'train'"),
        ("roofline llama-2-7b --gpu h1000", "h100"),
        ("roofline llama-2-7b --gpu ''", "GPU's name is empty"),
        ("roofline llama-2-7 --gpu h100", "llama-2-7b"),
        ("roofline llama-2-7b --batch-size 0", "batch-size '0'"),
        ("roofline llama-2-7b --context -1", "context"),
        ("roofline llama-2-7b --context nan", "context 'nan'"),
        ("roofline llama-2-7b --dtype fp7", "unknown dtype 'fp7'"),
        ("roofline deepseek-v3 --mla-form inner", "unknown mla-form"),
        ("roofline llama-2-7b --tp 3", "Use one of"),
        ("roofline llama-2-7b --kv-cache-dtype fp8_ds_mla", "latent attention"),
    ],
)
def test_impossible_requests(kvcalc: Run, line: str, said: str) -> None:
    code, out, err = kvcalc(line)
    assert (code, out) == (2, "")
    assert said in err and err.count("\n") == 1


def test_records_say_the_form_of_mla_and_the_experts_read() -> None:
    """DeepSeek-V3 reads 8 of 256 experts for one token. A prompt uses the expanded form, a step at 4096 the absorbed form."""
    v3, h100, precision = load_model("deepseek-v3"), load_gpu("h100"), Precision("bf16")
    deployed = TimedDeployment(v3, h100, precision)
    step = pass_records(deployed.operator_bounds(Batch.decode(4096)), h100)
    assert step[-1]["mla_form"] == "absorbed"
    assert {r["operator"]: r["expected_experts"] for r in step if "expected_experts" in r} == {"experts": 8.0}
    prompt = Batch.prefill(4096)
    assert mla_form(deployed.operator_bounds(prompt)) == "expanded"
    assert mla_form(deployed.operator_bounds(Batch((*prompt.groups, *Batch.decode(4096).groups)))) == "mixed"
    assert mla_form(TimedDeployment(load_model("gpt2"), h100, precision).operator_bounds(prompt)) is None


def test_records_give_shapes_and_the_roof_s_own_bound(kvcalc: Run) -> None:
    """Llama-3.1-8B, 8 sequences at 4096: qkv is [8, 4096] · [4096, 6144]; attention 32 heads, 8 queries of 4096 keys."""
    line = "roofline llama-3.1-8b --batch-size 8 --context 4k --format json"
    found = {r["operator"]: r for r in kvcalc(line).records}
    assert [found["qkv"][key] for key in ("heads", "m", "k", "n")] == [None, 8, 4096, 6144]
    assert [found["attention"][key] for key in ("heads", "m", "k", "n")] == [32, 8, 128, 4096]
    assert found["norm"]["m"] is None
    assert {r["bound"] for r in found.values() if r["operator"] != "engine_overhead"} <= {"compute", "memory", "network"}
    assert found["total"]["overhead"] == found["total"]["time_s"] / found["total"]["roofline_s"] > 1
    softmax = next(p for p in found["attention"]["parts"] if p["operator"] == "softmax")
    scores = 32 * 8 * 32 * 4096 * 2  # bytes of bf16 scores in all layers
    assert (softmax["vector_flops"], softmax["bytes"], softmax["bound"]) == (5 * 32 * 8 * 4096 * 32, 2 * scores, "memory")
    assert softmax["intensity"] == 5 / (2 * 2)
    assert softmax["roofline_s"] == pytest.approx(2 * scores / 3.35e12)
    prefill = {r["operator"]: r for r in kvcalc("roofline llama-3.1-8b --phase prefill --context 8k --format json").records}
    assert prefill["attention"]["intensity"] > 295 and prefill["attention"]["bound"] == "compute"


def test_a_mixed_pass_is_one_matrix_of_all_its_rows(kvcalc: Run) -> None:
    found = {r["operator"]: r for r in kvcalc("roofline llama-2-7b --batch 500+4x1@4k --format json").records}
    assert (found["gate_up"]["m"], found["lm_head"]["m"]) == (504, 5)
    assert found["total"]["phase"] == "mixed" and found["total"]["context"] == 4096
    pairs = 500 * 501 // 2 + 4 * 4096
    assert found["attention"]["flops"] == 2 * 32 * 32 * 2 * 128 * pairs


def test_each_pass_names_what_differs(kvcalc: Run) -> None:
    """With -v, each table has the sentence of its own context, batch size and weights."""
    shown = kvcalc("roofline gpt2 --context 64,900 --batch-size 1,8 -v").joined
    assert shown.endswith(kvcalc("roofline gpt2 --context 900 --batch-size 8 -v").joined)
    assert "4,096 tokens on h100-sxm with fp8 + bf16 weights takes" in kvcalc("roofline llama-3-8b -q bf16,fp8 -v").joined
    line = "roofline llama-3-8b --batch-size 64 --context 8k --gpu h200"
    assert "memory-bound at 14.6 FLOP/B, attention at 4, KV cache ≥ 14.3 ms" in kvcalc(line).joined
    assert "attention compute-bound at 1,366, FFNs" in kvcalc("roofline llama-3-8b --phase prefill").joined


def test_the_lm_head_runs_on_the_last_position_or_on_all(kvcalc: Run) -> None:
    """Two prompts of 128 tokens: 2 or 256 rows. The engine samples one token of each prompt in both cases."""
    last, every = (
        {
            r["operator"]: r
            for r in kvcalc(f"roofline llama-7b --phase prefill --context 128 --batch-size 2 --head {head} --json").records
        }
        for head in ("last", "all")
    )
    assert (last["lm_head"]["m"], every["lm_head"]["m"]) == (2, 256)
    assert every["total"]["flops"] - last["total"]["flops"] == 2 * 254 * 4096 * 32000
    later = [
        r["total"]["time_s"] - r["lm_head"]["time_s"] - r["sampling"]["time_s"] - r["final_norm"]["time_s"] for r in (last, every)
    ]
    assert later[0] == pytest.approx(later[1], rel=0.02)
    (mixed,) = (r for r in kvcalc("roofline llama-7b --batch 100+4x1@4k --head all --json").records if r["operator"] == "lm_head")
    assert mixed["m"] == 104


def test_from_where_on_a_step_reads_more_cache_than_weights(kvcalc: Run) -> None:
    """6,738,415,616 parameters minus 32,000 − B rows of the embedding, in bf16, divided by B · 524,288 bytes per token."""
    line = "--batch-size 1,8 --phase decode --json"
    found = [r["equal_reads_context"] for r in kvcalc(f"roofline llama-7b {line}").records if r["operator"] == "total"]
    read = [2 * (6_738_415_616 - (32_000 - batch) * 4096) for batch in (1, 8)]
    assert found == [25_206, 3_151] == [-(-read[0] // 524_288), -(-read[1] // (8 * 524_288))]
    (windowed,) = kvcalc("compare mistral-7b-v0.1 --variants none --json").records
    assert windowed["equal_reads_context"] is None  # 4,096 rows are 512 MiB
