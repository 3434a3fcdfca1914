"""Attention variants of a model: changed and unchanged properties, and the printed statements."""

import re

import pytest
from conftest import Run
from specs import grouped, of_kinds, stack

from kvcalc import Batch, Layer, Precision, UserError, cache_size, forward, load_model, total
from kvcalc.layers.attention import Grouped, Latent, Sparse
from kvcalc.layers.cache import CacheEntry
from kvcalc.layers.feed_forward import Dense
from kvcalc.layers.passes import TOP_K_FLOPS
from kvcalc.layers.recurrent import Mamba2
from kvcalc.planning.comparison import usual_variants
from kvcalc.planning.variants import FORMS, QUALITY, quality_of, variant


def mixer(text: str, name: str = "llama-7b") -> object:
    return variant(load_model(name), text).model.kinds["full"].parts[0]


def test_each_variant_keeps_heads_and_widths() -> None:
    same = {"num_attention_heads": 32, "head_dim": 128, "v_head_dim": 128}
    assert mixer("mha") == Grouped(num_key_value_heads=32, **same)
    assert mixer("gqa:8") == Grouped(num_key_value_heads=8, **same)
    assert mixer("mqa") == Grouped(num_key_value_heads=1, **same)
    mla = {"num_attention_heads": 32, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
    assert mixer("mla:512+64") == Latent(**mla)
    index = {"index_topk": 2048, "index_n_heads": 64, "index_head_dim": 128}
    assert mixer("dsa:512+64+128@2048") == mixer("DSA:512+64+128@2k") == Sparse(**mla, **index)
    window, budget = mixer("window:4k"), mixer("evict:4096")
    assert isinstance(window, Grouped) and isinstance(budget, Grouped)
    assert (window.sliding_window, window.cache_budget) == (4096, None)
    assert (budget.sliding_window, budget.cache_budget) == (None, 4096)


def test_everything_but_attention_stays() -> None:
    plain, names = load_model("deepseek-v3"), ("gate_up", "experts", "router", "lm_head")
    for text in ("mha", "mqa", "gqa:16", "mla:256+32", "dsa:512+64+128@2048", "cla:2"):
        model = variant(plain, text).model
        assert (model.layers, model.hidden_size, model.vocab_size) == (61, 7168, 129_280)
        passes = (forward(m, Batch.decode(100)) for m in (plain, model))
        ffn, others = (sum(o.total.flops for o in ops if o.name.startswith(names)) for ops in passes)
        assert ffn == others
    assert variant(plain, "none").model == plain


def test_recurrent_layers_stay_and_shared_caches_end() -> None:
    state = Mamba2(num_heads=4, head_dim=16, state_size=8)
    kinds = {
        "state": Layer(parts=(state,)),
        "own": Layer(parts=(grouped(), Dense(intermediate_size=8))),
        "sharer": Layer(parts=(grouped(kv_projection=False),), shares_cache=True),
    }
    model = of_kinds(kinds, layers=3, pattern=("state", "own", "sharer"))
    swapped = variant(model, "mha").model
    assert swapped.kinds["state"] == kinds["state"]
    assert not swapped.kinds["sharer"].shares_cache
    state_bytes = cache_size(of_kinds({"s": kinds["state"]}, layers=1), 10).stored
    assert cache_size(swapped, 10).stored - state_bytes == 2 * 10 * 2 * 8 * 16 * 2


@pytest.mark.parametrize(("layers", "share", "storing"), [(32, 1, 32), (32, 2, 16), (32, 3, 11), (7, 4, 2), (5, 8, 1)])
def test_cross_layer_sharing_divides_the_layers_that_store(layers: int, share: int, storing: int) -> None:
    """⌈L/n⌉ layers store, and all read. The others have no K and V projections."""
    plain = stack(grouped(), layers=layers)
    model = variant(plain, f"cla:{share}").model
    row = 2 * 2 * 16 * 2
    assert cache_size(model, 1000).stored == storing * row * 1000
    assert cache_size(model, 1000).read == layers * row * 1000
    assert plain.parameters - model.parameters == (layers - storing) * 64 * 2 * 2 * 16
    assert total(forward(model, Batch.decode(1000))).cache_write_bytes == storing * row


def test_layers_that_share_latents_project_none() -> None:
    """MLA of rank 32 with a RoPE key of 8 and hidden size 64: only kv_down [64, 40] and the latent's norm are removed."""
    part = Latent(num_attention_heads=4, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16)
    plain = stack(part, layers=4)
    shared = variant(plain, "cla:2").model
    assert plain.parameters - shared.parameters == 2 * (64 * 40 + 32)
    assert cache_size(shared, 100).stored * 2 == cache_size(plain, 100).stored == cache_size(plain, 100).read
    assert cache_size(shared, 100).read == cache_size(plain, 100).read
    before, after = (total(forward(m, Batch.decode(100), mla_form="absorbed")) for m in (plain, shared))
    assert before.flops - after.flops == 2 * 2 * 64 * 40
    assert before.weight_bytes - after.weight_bytes == 2 * 2 * (64 * 40 + 32)


class Unlimited(Grouped, frozen=True, tag="unlimited"):
    """A mixer that stores keys and values of every token even if it has a window."""

    def cache(self) -> tuple[CacheEntry, ...]:
        return CacheEntry("k", 2, 16), CacheEntry("v", 2, 16)


@pytest.mark.parametrize("step", ["window:8", "evict:8"])
def test_a_variant_that_a_limit_does_not_reach_is_refused(step: str) -> None:
    part = Unlimited(num_attention_heads=8, num_key_value_heads=2, head_dim=16)
    with pytest.raises(UserError, match=f"^{step}: inline does not cache plain keys and values. Begin with mha or gqa:8"):
        variant(stack(part), step)
    assert cache_size(variant(stack(part), f"mha/{step}").model, 100).stored == 8 * 8 * 2 * 16 * 2


@pytest.mark.parametrize("name", ["deepseek-v3.2", "minimax-m3", "deepseek-v4-flash"])
def test_attention_without_a_form_that_shares_is_refused(name: str) -> None:
    with pytest.raises(
        UserError, match=f"^cla: no form of .* of {name} is known that reads another layer's cache. Begin with mha"
    ):
        variant(load_model(name), "cla:2")
    assert variant(load_model(name), "gqa:8/cla:2").model.parameters > 0


def test_sharing_a_model_that_shares() -> None:
    """Gemma-3n E2B: the last 10 of 30 layers read other caches and have no K and V [2048, 2·256]. With sharing, 15 store."""
    model, row = load_model("gemma-3n-e2b"), 2 * 2 * 256 * 2
    projections = 2 * 2048 * 2 * 256
    norms = 256  # of the keys, in each layer that projects them
    each, halves = variant(model, "cla:1").model, variant(model, "cla:2").model
    assert cache_size(each, 100).stored == 30 * row * 100 == 2 * cache_size(halves, 100).stored
    assert each.parameters - model.parameters == 10 * (projections + norms)
    assert each.parameters - halves.parameters == 15 * (projections + norms)
    near = variant(model, "window:50").model  # who shares whose cache stays
    assert near.parameters == model.parameters and cache_size(near, 100).stored == 20 * row * 50
    assert variant(model, "cla:2/window:50").model.counts == halves.counts


def test_layers_read_caches_of_layers_that_see_as_far() -> None:
    """5 windows of 8 and a full layer, twice: 5 window layers and 1 full layer store. Each reads the tokens that it sees."""
    kinds = {"near": Layer(parts=(grouped(sliding_window=8),)), "full": Layer(parts=(grouped(),))}
    model, row = of_kinds(kinds, layers=12, pattern=("5 near", "full")), 2 * 2 * 16 * 2
    shared = variant(model, "cla:2").model
    assert cache_size(shared, 100).stored == (5 * 8 + 100) * row
    assert cache_size(shared, 100).read == cache_size(model, 100).read == (10 * 8 + 2 * 100) * row


@pytest.mark.parametrize("kind", ["dense_local", "dense_shared"])
def test_kinds_may_be_called_as_variants_call_theirs(kind: str) -> None:
    """With 4 layers, sharing by 2 leaves one storing layer of each kind, and a hybrid of 2 limits the first of each pair."""
    kinds = {kind: Layer(parts=(grouped(sliding_window=8),)), "dense": Layer(parts=(grouped(),))}
    model, row = of_kinds(kinds, layers=4, pattern=(kind, "dense")), 2 * 2 * 16 * 2
    assert [cache_size(variant(model, step).model, 100).stored for step in ("none", "full", "mha", "cla:2", "hybrid:2/window:4")] == [
        2 * 8 * row + 2 * 100 * row, 4 * 100 * row, 4 * 4 * 100 * row, 8 * row + 100 * row, 2 * 4 * row + 2 * 100 * row,
    ]  # fmt: skip


def test_a_window_and_a_budget_hold_at_once() -> None:
    """The smaller limit applies, in either order of the steps."""
    row = 8 * 2 * 2 * 16 * 2
    for text, kept in (("window:9/evict:5", 5), ("evict:5/window:9", 5), ("window:5/evict:9", 5), ("window:9/window:5", 5)):
        model = variant(stack(grouped(), layers=8), text).model
        assert cache_size(model, 100).stored == kept * row
    (layer,) = variant(stack(grouped(sliding_window=7)), "evict:9").model.kinds.values()
    part = layer.parts[0]
    assert isinstance(part, Grouped) and (part.sliding_window, part.cache_budget) == (None, 9)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("cla:2/mha", "mha undoes cla:2. Write mha before it"), ("window:9/gqa:4", "gqa:4 undoes window:9"),
        ("hybrid:2/window:9/mla", "mla undoes"),
    ],
)  # fmt: skip
def test_steps_that_undo_earlier_ones_are_refused(text: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        variant(stack(grouped(), layers=4), text)


@pytest.mark.parametrize(
    ("line", "sentence"),
    [  # 52/62 · (1 − 1024/4096) and 52/62 · (1 − 1024/131072); half of the layers; 8 of 32 KV heads; 48 · 2 · 8 · 128 B
        ("compare gemma-3-27b", "in 52 of 62 layers, gemma-3-27b saves 62.9% or 1.22 GiB of its KV cache at 4,096 tokens."),
        ("compare hunyuan-large", "in 32 of 64 layers, hunyuan-large saves 50% or 320.00 MiB of its KV cache at 4,096 tokens."),
        ("compare llama-3.1-8b", "its own attention needs 512.00 MiB of KV cache for 4,096 tokens, 4× less than with mha"),
        ("compare --layers 48 --heads 8 --head-dim 128 --variants none,gqa:4", "48 layers with gqa:4 need 384.00 MiB"),
        ("compare falcon-mamba-7b", "falcon-mamba-7b has no attention that a variant could replace."),
        ("size falcon-mamba-7b", "needs 35.00 MiB of state for 1 sequence of any length, and"),
        ("size --layers 48 --kv-heads 8 --head-dim 128 --kv-cache-dtype fp8", "for 4,096 tokens, 96.0 KiB per token."),
        ("size mistral-7b-v0.1 --context 8k", "for 8,192 tokens, 128.0 KiB per token up to its 4,096-token limit, and"),
        ("size deepseek-v3 --tp 8", "of KV cache per GPU for 4,096 tokens, a full copy on each, and 79.29 GiB"),
        ("size llama-3.1-70b --tp 16 --pp 2", "per GPU for 4,096 tokens, each KV head on 2 GPUs, and 4.19 GiB"),  # 8 KV heads
        ("size glm-4.5-air --tp 4", "46.0 KiB per token, and 49.79 GiB for weights."),
        ("size kimi-k2 deepseek-v3 qwen3-8b", "kimi-k2 and deepseek-v3 need the smallest KV cache for 4,096 tokens,"),
    ],
)
def test_the_sentence_answers_the_question(kvcalc: Run, line: str, sentence: str) -> None:
    assert sentence in " ".join(kvcalc(line).out.split())


def test_table_of_four_variants(kvcalc: Run) -> None:
    """Llama-7B at 4096 tokens: 2 GiB, a 4th, an 8th and a 32nd of it. Intensity rises if more queries share keys."""
    found = kvcalc("compare llama-7b --variants mha,gqa:8,gqa:4,mqa --gpu h100 --context 4k --format json").records
    assert [r["variant"] for r in found] == ["mha", "gqa:8", "gqa:4", "mqa"]
    assert [r["attention"] for r in found] == ["MHA", "GQA-8", "GQA-4", "MQA"]
    assert [r["kv_cache_bytes"] for r in found] == [2 << 30, 512 << 20, 256 << 20, 64 << 20]
    assert (
        [r["kv_cache_read_bytes"] for r in found]
        == [r["kv_cache_bytes"] for r in found]
        == [r["cache_read_bytes"] for r in found]
    )
    assert [r["reduction"] for r in found] == [1, 4, 8, 32] == [r["mha_ratio"] for r in found]
    kv = {32: 0, 8: 24, 4: 28, 1: 31}  # KV heads that are missing, of 128 columns in two matrices of 32 layers
    assert [r["parameters"] for r in found] == [6_738_415_616 - 32 * 2 * 4096 * 128 * n for n in kv.values()]
    (fitted,) = kvcalc("fit llama-7b --gpu h100 --context 4k --format json").records
    assert (found[0]["max_num_seqs"], found[0]["kv_budget_bytes"]) == (fitted["max_num_seqs"], fitted["kv_budget_bytes"])
    assert all(r["max_num_seqs"] <= r["kv_budget_bytes"] // r["kv_cache_bytes"] for r in found)
    steps = [r["roofline_s"] for r in found]
    assert steps == sorted(steps, reverse=True)
    for r in found:
        assert r["intensity"] == r["flops"] / r["bytes"]
        assert r["bound"] == "memory"


def test_both_forms_of_mla_are_variants(kvcalc: Run) -> None:
    line = "compare deepseek-v3 --variants mla/absorbed,mla/expanded,mla --context 128k --json"
    absorbed, expanded, usual = kvcalc(line).records
    assert [r["mla_form"] for r in (absorbed, expanded)] == ["absorbed", "expanded"]
    assert absorbed["kv_cache_bytes"] == expanded["kv_cache_bytes"]
    assert 15 * absorbed["time_s"] < expanded["time_s"]
    assert absorbed["flops"] == usual["flops"]
    assert "mla/expanded" in kvcalc("compare llama-7b --variants gqa:8/expanded").err
    assert kvcalc("compare llama-3.1-8b -q fp8,q4_k_m").code == 0  # without dsa, whose tensors in GGUF are unknown
    plain = kvcalc("compare gpt-oss-20b --variants none,gqa:8,gqa:8/window:128")
    assert plain.err == "note: without the windows of gpt-oss-20b: gqa:8\n"
    assert "the keys of mha are as wide as its values" in kvcalc("compare deepseek-v3 --variants none,mha").err


def test_every_note_of_quality_names_its_source() -> None:
    assert set(QUALITY) == {*re.findall(r"(?:^|, )(\w+)", FORMS)} - {"none", "hybrid", "full"} | {"int4", "fp8", "fp4"}
    assert all(word in str(q) for q in QUALITY.values() for word in ("(", ")"))
    assert all(any(name in str(q) for name in ("arXiv", "DeepSeek", "LMDeploy", "SGLang")) for q in QUALITY.values())
    assert quality_of("gqa:8/window:4096", "") == {"gqa:8": QUALITY["gqa"], "window:4096": QUALITY["window"]}
    assert quality_of("mqa/fp8_per_token_head", "") == {"mqa": QUALITY["mqa"], "fp8_per_token_head": QUALITY["fp8"]}
    assert quality_of("mha/nvfp4/bf16", "") == {"mha": QUALITY["mha"], "nvfp4": QUALITY["fp4"]}
    assert quality_of("none", "GQA-8 window 4096") == {"GQA": QUALITY["gqa"], "window": QUALITY["window"]}
    assert quality_of("none/int8", "2× DSA top-2048, 3× MLA") == {
        "DSA": QUALITY["dsa"], "MLA": QUALITY["mla"], "int8": QUALITY["int8"]
    }  # fmt: skip
    assert quality_of("none", "state") == {}


def test_what_eviction_adds_to_a_step(kvcalc: Run) -> None:
    """32 layers: each of 32 heads sees 1,024 tokens, and each of 32 KV heads has a top-k over 1,024 scores."""
    (record,) = kvcalc("compare llama-7b --variants evict:1024 --context 2k --format json").records
    assert record["eviction_flops"] == 32 * (32 * 1024 + TOP_K_FLOPS * 32 * 1024)
    assert record["eviction_score_bytes"] == 32 * 32 * 1024 * 2
    (record,) = kvcalc("compare llama-7b --variants mha --format json").records
    assert record["eviction_flops"] == 0


def test_a_hybrid_of_layers_that_see_windows_already() -> None:
    """Gemma-3 alternates: every 5th layer is unchanged, with or without a window, and the others see 512 tokens."""
    model = variant(load_model("gemma-3-27b"), "hybrid:5/window:512").model
    limited = sum(n for kind, n in model.counts.items() if kind.endswith("_local"))
    assert limited == 62 - 62 // 5
    with pytest.raises(UserError, match="needs a limit for its other layers"):
        variant(load_model("gemma-3-27b"), "hybrid:5")


@pytest.mark.parametrize(("context", "reduction"), [(16_384, 64), (32_768, 128)])
def test_steps_stack(kvcalc: Run, context: int, reduction: int) -> None:
    """8 of 64 heads, 4096 tokens, one byte instead of two: 8 × 4 or 8 × 8 × 2, before scales and paging."""
    line = f"compare llama-2-70b --variants mha,gqa:8,gqa:8/window:4096,gqa:8/window:4096/int8 --context {context} --format json"
    found = kvcalc(line).records
    assert [r["reduction"] for r in found] == [1, 8, 8 * context // 4096, reduction]
    assert [r["kv_cache_dtype"] for r in found] == ["fp16", "fp16", "fp16", "int8"]
    assert found[-1]["attention"] == "GQA-8 window 4096"
    assert found[-1]["held_equal"] == "layers, width, query heads, FFN; head widths; KV heads"


def test_paging_stacks_up_too(kvcalc: Run) -> None:
    """In whole blocks of 16 tokens, one token more than 4096 needs one more block if no limit applies."""
    line = "compare llama-2-70b --variants gqa:8,gqa:8/window:4096 --context 4097 --block-size 16 --format json"
    plain, window = kvcalc(line).records
    row = 2 * 80 * 8 * 128 * 2
    assert (plain["kv_cache_bytes"], plain["kv_cache_allocated_bytes"]) == (4097 * row, 4112 * row)
    assert window["kv_cache_bytes"] == window["kv_cache_allocated_bytes"] == 4096 * row


def test_mla_and_dsa_as_variants_read_what_deepseek_reads(kvcalc: Run) -> None:
    line = "compare deepseek-v3 --variants none,mla:512+64,dsa:512+64+128@2048 --context 128k --kv-cache-dtype bf16 --format json"
    none, mla, dsa = kvcalc(line).records
    assert none["kv_cache_read_bytes"] == mla["kv_cache_read_bytes"] == 61 * 1152 * 131_072
    assert dsa["kv_cache_read_bytes"] == 61 * (1152 * 2048 + 256 * 131_072)
    assert dsa["kv_cache_bytes"] == 61 * (1152 + 256) * 131_072 > mla["kv_cache_bytes"]
    assert dsa["roofline_s"] < mla["roofline_s"]


def test_a_variant_s_dtype_is_its_own(kvcalc: Run) -> None:
    found = kvcalc("compare llama-7b --variants mha,mha/fp8 --kv-cache-dtype fp32 --format json").records
    assert [r["kv_cache_dtype"] for r in found] == ["fp32", "fp8"]
    assert variant(load_model("llama-7b"), "mha/fp8/int4").kv_cache_dtype == "int4"  # the last one counts
    assert (
        cache_size(variant(load_model("llama-7b"), "mqa").model, 10, precision=Precision(kv_cache_dtype="int8")).stored
        == 32 * 2560
    )


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("llama-7b", "gqa", "variant .gqa. needs a number. Write gqa:8"),
        ("llama-7b", "gqa:7", "7 KV heads do not divide the 32 query heads"), ("llama-7b", "gqa:0", "outside 1"),
        ("llama-7b", "mha:8", "takes no value"), ("llama-7b", "mla:512+64+3", "mla:512\\+64"),
        ("llama-7b", "dsa:512+64", "@ top-k"), ("llama-7b", "window:-1", "not a whole number"),
        ("llama-7b", "cla:0", "outside 1"), ("llama-7b", "flash", "unknown variant 'flash'.*gqa:8"),
        ("llama-7b", "", "unknown variant ''"), ("llama-7b", "mha//int8", "unknown variant ''"),
        ("llama-7b", "int8:4", "unknown variant"), ("deepseek-v3", "window:4096", "Begin with mha or gqa:8"),
    ],
)  # fmt: skip
def test_impossible_variants(name: str, text: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        variant(load_model(name), text)


def test_records_are_ordered_variant_batch_context_and_have_the_keys_of_size_and_roofline(kvcalc: Run) -> None:
    common = "gpt2 --context 128,256 --batch-size 1,2 --format json"
    found = kvcalc(f"compare {common} --variants none,mqa").records
    asked = [(v, b, s) for v in ("none", "mqa") for b in (1, 2) for s in (128, 256)]
    assert [(r["variant"], r["batch_size"], r["context"]) for r in found] == asked
    totals = [r for r in kvcalc(f"roofline {common}").records if r["operator"] == "total"]
    for record, size, total_ in zip(found, kvcalc(f"size {common}").records, totals, strict=False):  # of `none`, the first four
        assert record | total_ | size == record


def test_sizes_of_a_textbook_without_rope(kvcalc: Run) -> None:
    """Five tokens in 32 layers of bf16: latents of 4 and index keys of 2. A step reads all 5 keys and the top-3 latents."""
    found = kvcalc("compare llama-7b --variants mla:512,dsa:4+2@3 --context 5 --json").records
    assert [r["kv_cache_bytes"] for r in found] == [32 * 5 * 512 * 2, 32 * 5 * (4 + 2) * 2]
    assert found[1]["kv_cache_read_bytes"] == 32 * (3 * 4 + 5 * 2) * 2


def test_a_prompt_as_long_as_the_context(kvcalc: Run) -> None:
    """8 tokens see 1 + … + 8 = 36 keys in each of 32 heads. The LM head runs once. MQA has 31 KV heads fewer than MHA."""
    mha, mqa = kvcalc("compare llama-7b --variants mha,mqa --context 8 --json").records
    layer = 8 * (4 * 4096**2 + 3 * 4096 * 11008) + 36 * 32 * 2 * 128
    assert mha["prefill_flops"] == 2 * (32 * layer + 4096 * 32000)
    assert mha["prefill_flops"] - mqa["prefill_flops"] == 2 * 32 * 8 * 2 * 4096 * 128 * 31
    (request,) = kvcalc("latency llama-7b --input-len 8 --output-len 1 --json").records
    assert (mha["ttft_s"], mha["prefill_flops"]) == (request["ttft_s"], request["flops"])


def test_a_variant_is_below_the_roof_and_has_the_heads_that_result(kvcalc: Run) -> None:
    """On an H100, MHA with 1 FLOP/B computes almost 3.35 TFLOP/s. A variant with only a window has the heads of the model's
    attention."""
    names = "mha,gqa:8,mqa,mla,window:512,gqa:8/window:512"
    found = kvcalc(f"compare llama-7b --variants {names} --json").records
    assert [r["head_diversity"] for r in found] == ["full", "grouped", "shared", "full", "full", "grouped"]
    assert all(0.9 < r["attention_flops_per_s"] / (r["attention_intensity"] * 3.35e12) <= 1 for r in found)
    assert {r["quality_share"] for r in found} == {None}


def test_quality_is_of_the_model_that_was_measured(kvcalc: Run) -> None:
    """SGLang's AIME25 of DeepSeek-R1: 0.5067 in bf16, 0.4934 in fp8, 0.4 in fp4. Other models have no score."""
    found = kvcalc("compare deepseek-r1 --gpu h200 --tp 8 --variants none,fp8,nvfp4,int8 --json").records
    assert [r["quality_share"] for r in found] == [None, 0.4934 / 0.5067, 0.4 / 0.5067, None]
    assert kvcalc("compare deepseek-v3 --variants fp8 --json").records[0]["quality_share"] is None


def test_the_intensity_of_attention_alone(kvcalc: Run) -> None:
    """FLOP per byte of cache in bf16: MHA 1, GQA H/G, MQA H, MLA 2·H·(576 + 512)/(576·2)."""
    line = "compare deepseek-v3 --variants mha,gqa:8,mqa,mla --dtype bf16 --context 32k --format json"
    found = {r["variant"]: r["attention_intensity"] for r in kvcalc(line).records}
    assert found == {"mha": 1.0, "gqa:8": 16.0, "mqa": 128.0, "mla": 128 * (576 + 512) / 576}


def test_sparse_attention_has_less_intensity_and_a_lower_bound(kvcalc: Run) -> None:
    """Per token and layer MLA has 2·128·(576 + 512) FLOPs for 1,152 bytes: 241.8.

    DSA has these FLOPs for 2,048 tokens and 2·64·128 for each index key of 256 bytes: 2,717,908,992 FLOPs for 35,913,728 bytes.
    """
    line = "compare deepseek-v3 --variants mla,dsa --context 128k --gpu"
    mla, dsa = kvcalc(f"{line} h100 --format json").records
    assert mla["attention_intensity"] == pytest.approx(278_528 / 1152)
    assert dsa["attention_intensity"] == pytest.approx(2_717_908_992 / 35_913_728)
    assert mla["basis"] == dsa["basis"] and dsa["roofline_s"] < mla["roofline_s"]
    # 61 layers read 61 · (1,152 · 131,072 − 35,913,728) bytes less, at 3.35 TB/s
    assert 0 < mla["roofline_s"] - dsa["roofline_s"] < 61 * (1152 * 131_072 - 35_913_728) / 3.35e12  # DSA also reads weights


def test_sparse_attention_has_more_intensity_if_tp_splits_the_heads(kvcalc: Run) -> None:
    """With tp 8, 16 heads per GPU read MLA's 1,152 bytes: 30.22. Each GPU has all 64 index heads.

    DSA: 2,048 · 2·16·(576 + 512) + 131,072 · 2·64·128 FLOPs for 35,913,728 bytes, 61.78.
    """
    line = "compare deepseek-v3 --variants mla,dsa --context 128k --tp 8 --gpu h100 --format json"
    assert [r["attention_intensity"] for r in kvcalc(line).records] == pytest.approx([30.22, 61.78], rel=1e-3)


def test_reductions_are_against_the_first_variant_stored_and_read(kvcalc: Run) -> None:
    """DSA stores 128 elements per token in addition to MLA's 576. It reads all index keys, but only 2,048 latents."""
    line = "compare deepseek-v3 --variants mla,dsa,mha --dtype bf16 --context 128k --format json"
    mla, dsa, mha = kvcalc(line).records
    assert {r["reference"] for r in (mla, dsa, mha)} == {"mla"}
    assert (mla["stored_reduction"], mla["read_reduction"]) == (1.0, 1.0)
    assert dsa["stored_reduction"] == 576 / (576 + 128)
    assert dsa["read_reduction"] == 131_072 * 576 / (131_072 * 128 + 2048 * 576)
    assert round(dsa["read_reduction"], 1) == 4.2
    assert mha["stored_reduction"] == mha["read_reduction"] == 576 / (2 * 128 * 128)
    assert "56.9× more than with its own" in (out := kvcalc("compare deepseek-v3 --variants mha").joined) and "stores" not in out


def test_a_variant_keeps_what_it_does_not_name() -> None:
    """DeepSeek-V3 with MLA is unchanged, including query ranks and biases. DSA adds only an indexer."""
    v3, v32 = load_model("deepseek-v3"), load_model("deepseek-v3.2")
    assert variant(v3, "mla").model.parameters == v3.parameters == 671_026_404_352
    assert variant(v3, "mla").model.kinds == v3.kinds
    indexer = 1536 * 64 * 128 + 7168 * 128 + 2 * 128 + 7168 * 64
    assert variant(v3, "dsa").model.parameters == v3.parameters + 61 * indexer == v32.parameters
    assert variant(v32, "dsa").model.kinds == v32.kinds
    assert variant(v32, "mla").model.parameters == v3.parameters


def test_a_hybrid_keeps_every_nth_layer_whole() -> None:
    """Of 32 layers, every fifth is full: 6 layers. The other 26 store 4,096 tokens."""
    model = variant(load_model("llama-7b"), "hybrid:5/window:4096").model
    assert [i + 1 for i, kind in enumerate(model.order) if not kind.endswith("_local")] == [5, 10, 15, 20, 25, 30]
    row = 2 * 32 * 128 * 2
    assert cache_size(model, 32_768).stored == row * (6 * 32_768 + 26 * 4096)
    assert model.parameters == load_model("llama-7b").parameters
    with pytest.raises(UserError, match="hybrid needs a limit for its other layers"):
        variant(load_model("llama-7b"), "hybrid:5")
    assert variant(load_model("llama-7b"), "mqa/hybrid:2/evict:64").model.attention == "16× MQA, 16× MQA budget 64"


def test_a_grouped_variant_keeps_biases() -> None:
    """Qwen2.5-7B, 28 layers of width 3,584 with biases on q, k and v: as MHA, K and V grow from 4 to 28 heads of 128 columns."""
    plain = load_model("qwen2.5-7b")
    assert plain.parameters == 7_615_616_512
    assert variant(plain, "mha").model.parameters == plain.parameters + 28 * 2 * (3584 + 1) * 24 * 128
    assert variant(plain, "mqa").model.parameters == plain.parameters - 28 * 2 * (3584 + 1) * 3 * 128
    assert variant(plain, "mha/gqa:4").model.parameters == plain.parameters


def test_a_grouped_variant_keeps_all_but_its_groups_and_limits() -> None:
    kept = {
        "q_bias": True, "o_bias": True, "qk_norm": "full", "q_norm_only": True, "qk_norm_bias": True, "v_norm": True,
        "sinks": True, "output_gate": "head", "output_gate_bias": True, "k_is_v": True, "input_size": 32, "output_size": 48,
        "cached": False, "qo_projection": False,
    }  # fmt: skip
    limits = {"sliding_window": 64, "sink_tokens": 4, "kv_projection": False}
    model = of_kinds({"k": Layer(parts=(grouped(**kept, **limits),), shares_cache=True)}, layers=2)
    changed = variant(model, "gqa:4").model.kinds["k"]
    assert (changed.parts, changed.shares_cache) == ((grouped(groups=4, v_head_dim=16, **kept),), False)
    chunked = variant(stack(grouped(attention_chunk_size=32)), "mqa").model.kinds["k0"].parts[0]
    assert chunked == grouped(groups=1, v_head_dim=16)


def test_sequences_are_those_of_the_replica(kvcalc: Run) -> None:
    """Llama-7B in fp16 on 80 GiB: 2 GiB or 512 MiB per sequence of 4,096 tokens. Each of two ranks stores all weights."""
    line = "compare llama-7b --variants none,gqa:8 --engine none --gpu h100 --batch-size 8 --context 4k --format json --dp "
    for dp in (1, 2):
        for record, one in zip(kvcalc(f"{line}{dp}").records, (2 << 30, 512 << 20), strict=True):
            assert record["max_num_seqs"] == dp * (record["kv_budget_bytes"] // one)
            assert record["kv_needed_bytes"] == 8 // dp * one


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("llama-7b", ["mha", "gqa:8", "mqa", "mla", "dsa"]),  # MHA itself
        ("gpt2", ["mha", "gqa:4", "mqa", "mla", "dsa"]),  # 12 heads
        ("llama-3.1-8b", ["mha", "none", "mqa", "mla", "dsa"]),
        ("deepseek-v3.2", ["mha", "none", "mqa", "mla"]),  # DSA and MQA themselves
        ("falcon-7b", ["mha", "none", "mla", "dsa"]),
    ],
)
def test_what_is_compared_unless_something_is_asked_for(name: str, expected: list[str]) -> None:
    assert usual_variants(load_model(name)).split(",") == expected


def test_as_many_groups_as_heads_are_no_other_attention() -> None:
    """With 8 heads, gqa:8 would be MHA again, so the variant has four groups of two heads."""
    assert usual_variants(stack(Grouped(num_attention_heads=8, num_key_value_heads=8, head_dim=8))) == "mha,gqa:4,mqa,mla,dsa"


@pytest.mark.parametrize("engine", ["vllm", "sglang", "none"])
def test_explained_users_follow_from_the_bytes_printed(kvcalc: Run, engine: str) -> None:
    """The KV cache budget divided by the bytes of a sequence is the number of users on one GPU."""
    line = f"compare llama-3.1-8b --variants gqa:8,window:1024 --context 32k --gpu h200 --engine {engine} --explain"
    found = re.findall(r"users = ⌊([\d,]+) B / \(([\d,]+) B / 1 sequences\)⌋ = ([\d,]+)", kvcalc(line).joined)
    assert len(found) == 2
    for room, each, users in ([int(n.replace(",", "")) for n in numbers] for numbers in found):
        assert room // each == users


def test_the_quality_of_a_variant_is_the_word_of_its_source_or_a_score(kvcalc: Run) -> None:
    """DeepSeek-V2, Table 1: MHA strong, GQA moderate, MQA weak, MLA stronger. A window has no word."""
    lines = kvcalc("compare llama-7b --variants mha,gqa:8,mqa,mla:512+64,window:1024").out.splitlines()
    words = {line.split()[0]: line.split()[-1] for line in lines[3:8]}
    assert words == {"mha": "strong", "gqa:8": "moderate", "mqa": "weak", "mla:512+64": "stronger", "window:1024": "–"}
