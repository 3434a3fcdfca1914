"""GGUF file types: the type of every tensor by llama.cpp's rules, and the bytes of whole models, by hand."""

import pytest
from conftest import Run
from specs import grouped, of_kinds, stack

from kvcalc import Batch, Layer, Model, Parallelism, Precision, UserError, deploy, forward, load_model, weight_bytes
from kvcalc.capacity import FitOptions, fit
from kvcalc.layers.feed_forward import Dense, Moe
from kvcalc.library.huggingface import model_from
from kvcalc.model.forward_pass import total
from kvcalc.model.precision import formats_of, stored_as
from kvcalc.storage.ggml import (
    BLOCKS,
    FILE_TYPES,
    MIXES,
    TYPES,
    ModelFacts,
    Tensor,
    Use,
    has_more_bits,
    mix_of,
    mixed_types,
    tensor_bytes,
    type_for_row,
)

# Bits of 256 elements by the parts of a block in ggml-common.h: scales of 16 bits, packed scales, quants.
PARTS = {
    "q4_0": 8 * (16 + 32 * 4), "q4_1": 8 * (2 * 16 + 32 * 4), "q5_0": 8 * (16 + 32 * 5), "q5_1": 8 * (2 * 16 + 32 * 5),
    "q8_0": 8 * (16 + 32 * 8), "iq4_nl": 8 * (16 + 32 * 4), "mxfp4_ggml": 8 * (8 + 32 * 4), "nvfp4_ggml": 4 * (4 * 8 + 64 * 4),
    "q1_0": 2 * (16 + 128),
    "q2_k": 2 * 16 + 16 * 8 + 256 * 2, "q3_k": 16 + 12 * 8 + 256 * 2 + 256, "q4_k": 2 * 16 + 12 * 8 + 256 * 4,
    "q5_k": 2 * 16 + 12 * 8 + 256 * 5, "q6_k": 16 + 16 * 8 + 256 * 6, "iq1_s": 16 + 32 * 8 + 8 * 16,
    "iq1_m": 32 * 8 + 16 * 8 + 8 * 8, "iq2_xxs": 16 + 32 * 16, "iq2_xs": 16 + 32 * 16 + 8 * 8, "iq2_s": 16 + 64 * 8 + 16 * 8,
    "iq3_xxs": 16 + 96 * 8, "iq3_s": 16 + 8 * 13 * 8 + 4 * 8, "iq4_xs": 16 + 16 + 4 * 8 + 256 * 4,
    "tq1_0": 16 + 4 * 8 + 48 * 8, "tq2_0": 16 + 256 * 2,
    "f32": 256 * 32, "f16": 256 * 16, "bf16": 256 * 16, "f64": 256 * 64, "i8": 256 * 8, "i16": 256 * 16, "i32": 256 * 32,
    "i64": 256 * 64,
}  # fmt: skip


def test_blocks_are_their_parts() -> None:
    assert {name: 8 * tensor_bytes(name, 256, 1) for name in BLOCKS} == PARTS
    assert set(TYPES.values()) == set(BLOCKS)
    assert set(MIXES) - set(FILE_TYPES.values()) == set()


# In the order of `enum ggml_type` (ggml.h) and `enum llama_ftype` (llama.h); –: taken back, or not stored.
NUMBERED_TYPES = """f32 f16 q4_0 q4_1 – – q5_0 q5_1 q8_0 – q2_k q3_k q4_k q5_k q6_k – iq2_xxs iq2_xs iq3_xxs iq1_s iq4_nl iq3_s
    iq2_s iq4_xs i8 i16 i32 i64 f64 iq1_m bf16 – – – tq1_0 tq2_0 – – – mxfp4_ggml nvfp4_ggml q1_0"""
NUMBERED_FILES = """f32 f16 q4_0 q4_1 – – – q8_0 q5_0 q5_1 q2_k q3_k_s q3_k_m q3_k_l q4_k_s q4_k_m q5_k_s q5_k_m q6_k iq2_xxs
    iq2_xs q2_k_s iq3_xs iq3_xxs iq1_s iq4_nl iq3_s iq3_m iq2_s iq2_m iq4_xs iq1_m bf16 – – – tq1_0 tq2_0 mxfp4_moe"""


@pytest.mark.parametrize(("known", "order"), [(TYPES, NUMBERED_TYPES), (FILE_TYPES, NUMBERED_FILES)], ids=["types", "files"])
def test_numbers_are_those_of_the_enums(known: dict[int, str], order: str) -> None:
    assert known == {number: name for number, name in enumerate(order.split()) if name != "–"}


def test_names_of_file_types() -> None:
    assert (mix_of("q4_k_m"), mix_of("Q4_K")) == (("q4_k_m", False), ("q4_k_m", False))
    assert (mix_of("IQ4_XS+imatrix"), mix_of("iq2_m")) == (("iq4_xs", True), ("iq2_m", True))  # some types of iq2_m need one
    assert (mix_of("fp8"), mix_of("q4_k_x")) == (None, None)


# --- Types of single tensors ---


def types(mix: str, use: Use, layers: int = 32, row: int = 4096, imatrix: bool = False, **facts: int) -> list[str]:
    """Return the types of one tensor per layer."""
    tensors = [Tensor(use, row, n) for n in range(layers)]
    return mixed_types(tensors, mix, imatrix, ModelFacts(layers, **facts))


def layers_with(found: list[str], type_: str) -> list[int]:
    return [n for n, t in enumerate(found) if t == type_]


def test_more_bits_go_to_both_ends_and_every_third_layer_between() -> None:
    assert [n for n in range(32) if has_more_bits(n, 32)] == [0, 1, 2, 3, 6, 9, 12, 15, 18, 21, 24, 27, 28, 29, 30, 31]
    assert [n for n in range(10) if has_more_bits(n, 10)] == [0, 3, 6, 8, 9]


SOME = [0, 1, 2, 3, 6, 9, 12, 15, 18, 21, 24, 27, 28, 29, 30, 31]
RULES = [
    # (mixture, tensor, facts, {type: its layers}); of tests/snapshots of llama.cpp, and src/llama-quant.cpp
    ("q4_k_m", Use.V, {}, {"q6_k": SOME}),
    ("q4_k_m", Use.DOWN, {}, {"q6_k": SOME}),
    ("q4_k_m", Use.DOWN, {"falcon": 1}, {"q6_k": [0, 1], "q5_k": SOME[2:]}),
    ("q4_k_m", Use.V, {"experts": 8}, {"q8_0": [*range(32)]}),
    ("q4_k_m", Use.K, {"experts": 8}, {"q8_0": [*range(32)]}),
    ("q4_k_m", Use.O, {"experts": 8}, {"q5_k": [*range(32)]}),
    ("q4_k_m", Use.V, {"seventy": 1}, {"q6_k": SOME, "q5_k": [n for n in range(32) if n not in SOME]}),
    ("q5_k_m", Use.QKV, {}, {"q6_k": SOME}),
    ("q4_k_s", Use.V, {}, {"q5_k": [0, 1, 2, 3]}),
    ("q4_k_s", Use.DOWN, {}, {"q5_k": [0, 1, 2, 3]}),
    ("q3_k_m", Use.V, {}, {"q5_k": [0, 1], "q4_k": [*range(2, 32)]}),
    ("q3_k_m", Use.DOWN, {}, {"q5_k": [0, 1], "q4_k": [*range(2, 32)]}),
    ("q3_k_l", Use.O, {"falcon": 1}, {"q4_k": [*range(32)]}),
    ("q2_k", Use.V, {"queries_per_kv": 4}, {"q4_k": [*range(32)]}),
    ("q2_k", Use.V, {"queries_per_kv": 1}, {"q3_k": [*range(32)]}),
    ("iq4_xs", Use.V, {"queries_per_kv": 4}, {"q5_k": [*range(32)]}),
    ("iq4_xs", Use.DOWN, {}, {"q5_k": [0, 1, 2, 3]}),
    ("iq3_m", Use.DOWN, {}, {"q4_k": [0, 1, 2, 3]}),
    ("iq3_xs", Use.GATE, {}, {"iq3_xxs": [*range(4, 28)]}),
    ("iq3_xs", Use.Q, {}, {"iq3_xxs": [*range(32)]}),
    ("iq2_m", Use.DOWN, {}, {"iq3_s": [0, 1, 2, 3]}),
    ("iq2_xs", Use.DOWN, {}, {"q2_k": [0, 1, 2, 3]}),
    ("iq1_s", Use.O, {}, {"iq2_xxs": [*range(32)]}),
]


@pytest.mark.parametrize(("mix", "use", "facts", "layers"), RULES)
def test_types_by_layer(mix: str, use: Use, facts: dict[str, int], layers: dict[str, list[int]]) -> None:
    found = types(mix, use, **facts)
    assert {type_: layers_with(found, type_) for type_ in layers} == layers
    others = set(range(32)) - {n for listed in layers.values() for n in listed}
    assert {found[n] for n in others} <= {MIXES[mix]}


def test_an_importance_matrix_changes_the_first_layers() -> None:
    assert layers_with(types("q4_0", Use.DOWN, imatrix=True), "q4_1") == [0, 1, 2, 3]
    assert layers_with(types("q5_0", Use.DOWN, imatrix=True), "q5_1") == [0, 1, 2, 3]
    assert set(types("iq4_xs", Use.DOWN, imatrix=True)) == {"iq4_xs"}


def test_experts_go_by_their_layer_and_others_by_how_many_came_before() -> None:
    """Two down tensors in each of 16 layers: of the 32, the rule by layer gives the first two layers' four, the rule by
    count the first two."""
    tensors = [Tensor(Use.DOWN, 4096, n // 2, stacked=n % 2 == 0) for n in range(32)]
    by_layer = mixed_types(tensors, "q4_k_s", False, ModelFacts(16, experts=4))
    by_count = mixed_types(tensors, "q4_k_s", False, ModelFacts(16))
    assert (layers_with(by_layer, "q5_k"), layers_with(by_count, "q5_k")) == ([0, 1, 2, 3], [0, 1])


HEADS = [
    # (mixture, facts, row, type of the head, type of an embedding that is not tied)
    ("q4_k_m", {}, 4096, "q6_k", "q4_k"),
    ("q8_0", {}, 4096, "q8_0", "q8_0"),
    ("q4_0", {}, 4096, "q6_k", "q4_0"),
    ("q4_k_m", {}, 2880, "q8_0", "q5_0"),  # no whole blocks of 256
    ("q4_k_m", {"falcon": 1}, 4096, "q8_0", "q4_k"),
    ("iq2_m", {}, 4096, "q5_k", "iq3_s"),
    ("iq2_xxs", {}, 4096, "q5_k", "q2_k"),
    ("iq3_xxs", {}, 4096, "q5_k", "iq3_s"),
    ("tq2_0", {}, 4096, "q6_k", "q4_k"),
    ("f16", {}, 4096, "f16", "f16"),
]


@pytest.mark.parametrize(("mix", "facts", "row", "head", "embedding"), HEADS)
def test_heads_and_embeddings(mix: str, facts: dict[str, bool], row: int, head: str, embedding: str) -> None:
    tensors = [Tensor(Use.HEAD, row), Tensor(Use.EMBEDDING, row)]
    assert mixed_types(tensors, mix, False, ModelFacts(32, **facts)) == [head, embedding]
    assert mixed_types(tensors[1:], mix, False, ModelFacts(32, tied=True, **facts)) == [head]  # a tied table is the head


def test_rows_without_whole_blocks_take_another_type() -> None:
    types = ("q4_k", "q5_k", "q6_k", "q3_k", "iq3_s", "q8_0")
    assert [type_for_row(type_, 2880) for type_ in types] == ["q5_0", "q5_1", "q8_0", "q4_0", "iq4_nl", "q8_0"]
    assert [type_for_row(type_, 4096) for type_ in types] == list(types)
    assert [type_for_row(type_, 100) for type_ in ("q4_k", "q4_0")] == ["f16", "f16"]


# --- Whole models ---

# GiB of Llama-3-8B's file under each file type, as llama-quantize --help prints them (tools/quantize/quantize.cpp)
LLAMA_3_8B = {
    "q4_0": 4.34, "q4_1": 4.78, "q5_0": 5.21, "q5_1": 5.65, "q2_k": 2.96, "q3_k_s": 3.41, "q3_k_m": 3.74, "q3_k_l": 4.03,
    "q4_k_s": 4.37, "q4_k_m": 4.58, "q5_k_s": 5.21, "q5_k_m": 5.33, "q6_k": 6.14, "q8_0": 7.96,
}  # fmt: skip
TOKENIZER = 7_800_000  # the header, nearly all of it 128,256 tokens and 280,147 merges


def test_llama_3_1_8b_in_q4_k_m() -> None:
    """Half the layers have v and down in Q6_K. The head is Q6_K. Norms and 64 RoPE factors are float32."""
    d, f, kv, vocabulary = 4096, 14_336, 1024, 128_256
    four = 32 * (2 * d * d + d * kv + 2 * d * f) + 16 * (d * kv + d * f) + vocabulary * d
    six = 16 * (d * kv + d * f) + vocabulary * d
    worked = four // 256 * 144 + six // 256 * 210 + 4 * (65 * d + 64)
    assert weight_bytes(load_model("llama-3.1-8b"), Precision(quantization="Q4_K_M")) == worked == 4_912_898_304


def test_mixtral_8x7b_in_q4_k_m() -> None:
    """8 experts: k and v in Q8_0, o in Q5_K, half of the down matrices in Q6_K, routers in float32."""
    d, f, kv = 4096, 14_336, 1024
    four = 32 * d * d + 32 * 8 * 2 * d * f + 16 * 8 * d * f + 32_000 * d
    six = 16 * 8 * d * f + 32_000 * d
    five, eight = 32 * d * d, 32 * 2 * d * kv
    plain = 32 * 8 * d + 65 * d
    worked = four // 256 * 144 + six // 256 * 210 + five // 256 * 176 + eight // 32 * 34 + 4 * plain
    assert weight_bytes(load_model("mixtral-8x7b"), Precision(quantization="q4_k_m")) == worked


# Published bytes, and how exact they are. llama-bench prints model_size of lmstudio-community's Qwen3.6-35B-A3B, and GiB of
# Qwen3.6-27B, Kimi Linear and Nemotron Nano. Other sizes are of the publishers' files, of Qwen3-Coder-Next by steampunque,
# with a tokenizer of up to 7 MB. Of Llama-3-8B, the last digit is rounded up in some, down in others.
PUBLISHED = [
    *(("llama-3-8b", mix, gib * 2**30 - TOKENIZER, 0.01 * 2**30) for mix, gib in LLAMA_3_8B.items()),
    ("qwen3.6-35b-a3b", "q4_k_m", 21_155_768_832, 0),
    ("qwen3.6-27b", "q4_k_m", 15.401 * 2**30, 0.0005 * 2**30),
    ("qwen3-vl-8b", "q4_k_m", 5_027_784_800, 7e6),
    ("qwen3-coder-next", "q4_k_m", 48.5e9, 5e7),
    ("kimi-linear", "mxfp4_moe", 25.33 * 2**30, 0.005 * 2**30),
    ("nemotron-nano-9b-v2", "q4_k_m", 6.07 * 2**30, 0.005 * 2**30),
    ("granite-4-h-tiny", "q4_k_m", 4_230_976_352, 7e6),
    ("lfm2-8b-a1b", "q4_k_m", 5_044_779_712, 7e6),
    ("falcon-h1-7b", "q4_k_m", 4_598_344_960, 7e6),
]


@pytest.mark.parametrize(("name", "mix", "published", "error"), PUBLISHED)
def test_models_are_as_large_as_published(name: str, mix: str, published: float, error: float) -> None:
    assert abs(weight_bytes(load_model(name), Precision(quantization=mix)) - published) <= error


def test_gpt_oss_20b_has_no_whole_blocks_of_256() -> None:
    """Rows of 2880 use Q5_0 instead of Q4_K and Q8_0 instead of Q6_K. o has rows of 4096. Biases, sinks, routers are fp32."""
    d, layers, experts = 2880, 24, 32
    more = 3 + 3 + 6  # layers 0-2, 21-23 and 5, 8, …, 20
    q, kv, o, expert = d * 4096, d * 512, 4096 * d, d * d
    five = layers * (q + kv + 2 * experts * expert) + (layers - more) * (kv + experts * expert) + 201_088 * d
    eight = more * (kv + experts * expert) + 201_088 * d
    vectors = layers * (4096 + 2 * 512 + d + 64 + d * experts + experts + 3 * d * experts + 2 * d) + d
    worked = five // 32 * 22 + eight // 32 * 34 + layers * o // 256 * 144 + 4 * vectors
    assert weight_bytes(load_model("gpt-oss-20b"), Precision(quantization="q4_k_m")) == worked


def test_deepseek_v3_has_kv_up_in_two() -> None:
    """[128, 512] for each head, where 128 is not a whole block of 256, and [512, 128]. There is a routing bias per expert."""
    deepseek = {
        "model_type": "deepseek_v3", "hidden_size": 512, "num_hidden_layers": 8, "num_attention_heads": 4, "q_lora_rank": 256,
        "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "first_k_dense_replace": 8,
        "intermediate_size": 512, "vocab_size": 1024, "num_key_value_heads": 4,
    }  # fmt: skip
    model = model_from(deepseek, "f", "x")
    keys, values = 4 * 512 * 128 // 32 * 22, 4 * 512 * 128 // 256 * 144
    plain = 512 * 256 + 256 * 4 * 192 + 512 * 576 + 512 * 512 + 2 * 512 * 512
    assert [n for n in range(8) if has_more_bits(n, 8)] == [0, 3, 6, 7]
    down = 512 * 512 // 256 * (4 * 210 + 4 * 144)
    vectors = 8 * (256 + 512 + 2 * 512) + 512
    around = 1024 * 512 // 256 * (144 + 210)
    worked = 8 * (keys + values + plain // 256 * 144) + down + around + 4 * vectors
    assert weight_bytes(model, Precision(quantization="q4_k_m")) == worked


def test_gpt2_in_q8_0() -> None:
    """Q, K and V are one tensor. Vectors and positions are float32."""
    worked = (12 * 12 * 768 + 50_257) * 768 // 32 * 34 + 4 * 768 * (12 * 13 + 2 + 1024)
    assert weight_bytes(load_model("gpt2"), Precision(quantization="q8_0")) == worked


def test_a_model_is_stored_in_kinds_that_are_alike() -> None:
    model = load_model("llama-3.1-8b")
    stored = stored_as(model, Precision(quantization="q4_k_m"))
    assert [n for n, kind in enumerate(stored.order) if kind == stored.order[0]] == SOME
    assert stored.parameters == model.parameters
    assert stored_as(model, Precision(quantization="fp8")) is model


@pytest.mark.parametrize(
    "name", ["llama-3.2-1b", "gemma-2-9b", "gpt-oss-20b", "mixtral-8x7b", "deepseek-v2-lite", "qwen3.5-35b-a3b", "kimi-linear"]
)
@pytest.mark.parametrize("mix", ["q4_k_m", "q8_0", "iq3_xs"])
def test_a_pass_reads_what_is_stored(name: str, mix: str) -> None:
    """Every weight is read once, except tables, of which one row is read. On several GPUs, the shares add up to at least the
    whole."""
    model, precision = load_model(name), Precision(quantization=mix)
    stored = stored_as(model, precision)
    everything = Batch.prefill(4096)  # reaches every expert
    read = total(forward(model, everything, precision)).weight_bytes
    tables = [w for w in stored.outer_weights if w.kind == "table"]
    formats = formats_of(model, precision)
    held = weight_bytes(model, precision) - stored.buffers - sum(formats.weight_bytes(w.name, w) for w in tables)
    head = formats.weight_bytes("embedding", tables[0]) if model.tie_word_embeddings else 0
    assert read == held + head + 4096 * sum(formats.row_bytes(w) for w in tables)
    assert 2 * weight_bytes(model, precision, Parallelism(tp=2)) >= weight_bytes(model, precision)


def test_what_fits_goes_by_the_mixture() -> None:
    """128,256 × 4,096 token embeddings in q4_k, 144 bytes per 256 elements, are in host memory."""
    deployment = deploy("llama-3.1-8b", "rtx-4090", quantization="q4_k_m")
    on_host = 128_256 * 4_096 // 256 * 144
    assert fit(deployment, FitOptions(engine="llama.cpp")).budget.weights == 4_912_898_304 - on_host


IDLE = Moe(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, zero_experts=2)
UNKNOWN: list[tuple[Model, str]] = [
    (load_model("zamba2-1.2b"), "layers"),
    (load_model("deepseek-v3.2"), "DSA"),
    (stack(grouped()), "its model_type ''"),
    (of_kinds({"all": Layer(parts=(grouped(), IDLE))}, layers=1, model_type="llama"), "moe"),
    (of_kinds({"all": Layer(parts=(grouped(),), shared=(Dense(intermediate_size=8),))}, layers=1, model_type="llama"), "shared"),
]


@pytest.mark.parametrize(("model", "said"), UNKNOWN)
def test_tensors_that_are_not_known_are_refused_with_the_way_round(model: Model, said: str) -> None:
    with pytest.raises(UserError, match=f"the tensors of .* in llama.cpp are not known: .*{said}.*--dtype bf16"):
        weight_bytes(model, Precision(quantization="q4_k_m"))


def test_the_command_line_takes_any_spelling(kvcalc: Run) -> None:
    shown = kvcalc("size llama-3.1-8b -q Q4_K_M --format json").records[0]
    assert (shown["weight_bytes"], shown["dtype"]) == (4_912_898_304, "q4_k_m")
    assert kvcalc("size llama-3.1-8b -q iq4_xs+imatrix --format json").records[0]["dtype"] == "iq4_xs+imatrix"
    refused = kvcalc("size llama-3.1-8b -q q4_k_mm")
    assert refused.code == 2
    assert "unknown quantization 'q4_k_mm'. Did you mean q4_k_m" in refused.err
