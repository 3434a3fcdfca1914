"""Bytes of weight matrices in every storage format, by hand; the matrices that a scheme covers; whole models."""

import pytest
from conftest import Run
from specs import grouped, of_kinds, stack

from kvcalc import Layer, Precision, UserError, load_model, weight_bytes
from kvcalc.layers.feed_forward import Moe
from kvcalc.storage.quantization import WEIGHT_FORMATS, Quantization, family, load_weight_format

N = 256 * 512
# bytes of a matrix of 256 inputs × 512 outputs
MATRIX = {
    "fp64": 8 * N,
    "fp32": 4 * N,
    "bf16": 2 * N,
    "fp16": 2 * N,
    "fp8": N + 4,  # one fp32 scale
    "fp8_per_channel": N + 512 * 4,
    "fp8_block128": N + 2 * 4 * 4,  # 2 × 4 blocks of 128 × 128, an fp32 each
    "fp8_block32": N + 8 * 16,  # 8 × 16 blocks of 32 × 32, a byte each
    "int8": N + 512 * 4,
    "int8_weight_only": N + 512 * 2,
    "awq": N // 2 + 2 * 512 * 2 + 2 * 512 // 2,  # groups of 128 inputs: an fp16 scale and a packed 4-bit zero
    "gptq": N // 2 + 2 * 512 * 2 + 2 * 512 // 2,
    "int4": N // 2 + 2 * 512 * 2,
    "int4_group32": N // 2 + 8 * 512 * 2,
    "fp8_weight_only": N + 512 * 2,
    "nf4": N // 2 + 4 * 512 * 4,  # blocks of 64, an fp32 each
    "fp4": N // 2 + 4 * 512 * 4,
    "nf4_double": N // 2 + 4 * 512 + 4 * 4 * 512 // 256,  # an int8 each, and an fp32 for 256 of them
    "fp4_double": N // 2 + 4 * 512 + 4 * 4 * 512 // 256,
    "mxfp4": N // 2 + 8 * 512,  # a byte for 32
    "mxfp8": N + 8 * 512,
    "nvfp4": N // 2 + 16 * 512 + 4,  # a byte for 16, and an fp32
    "mxfp4_weight_only": N // 2 + 8 * 512,
    "nvfp4_weight_only": N // 2 + 16 * 512 + 4,
}


def test_every_format_is_worked_out_here() -> None:
    assert set(MATRIX) == set(WEIGHT_FORMATS)


@pytest.mark.parametrize("name", MATRIX)
def test_matrix_bytes(name: str) -> None:
    assert WEIGHT_FORMATS[name].matrix_bytes(256, 512) == MATRIX[name]


def test_ragged_edges_have_scales_of_their_own() -> None:
    assert load_weight_format("fp8_block128").matrix_bytes(129, 257) == 129 * 257 + 2 * 3 * 4
    assert load_weight_format("mxfp4").matrix_bytes(33, 3) == 50 + 2 * 3  # 99 nibbles, 2 groups in each of 3 columns
    assert load_weight_format("nf4").matrix_bytes(33, 3) == 50 + 2 * 4  # 2 blocks of the flattened 99


@pytest.mark.parametrize(
    ("name", "worked"),
    [
        ("int4_g64", N // 2 + 4 * 512 * 2),
        ("int3_g128_zp", N * 3 // 8 + 2 * 512 * 2 + 2 * 512 * 3 // 8),
        ("int8_g0", N + 512 * 2),  # a scale per output
        ("int4_g-1_zp", N // 2 + 512 * 2 + 512 // 2),
        ("int4_g128_zp_index", N // 2 + 2 * 512 * 2 + 512 + 4 * 256),  # and an int32 per input
        # a 16-bit code for 8 inputs, 2^16 vectors of 8 of 2 bytes, a 16-bit scale per output
        ("q4_k@3/16", N * 3 // 16),
        ("q4_k", N // 256 * 144),
        ("q8_0", N // 32 * 34),
        ("bnb-nf4", N // 2 + 4 * 512 + 4 * 4 * 512 // 256),
    ],
)
def test_formats_by_name(name: str, worked: int) -> None:
    assert load_weight_format(name).matrix_bytes(256, 512) == worked


@pytest.mark.parametrize(
    ("name", "same"), [("bitsandbytes", "nf4"), ("w4a16", "int4"), ("FP8_E4M3", "fp8"), ("awq_marlin", "awq")]
)
def test_other_tools_names(name: str, same: str) -> None:
    assert load_weight_format(name) is WEIGHT_FORMATS[same]


def test_unknown_format_names_its_neighbours() -> None:
    with pytest.raises(UserError, match=r"'nvfp5'.*nvfp4"):
        load_weight_format("nvfp5")


@pytest.mark.parametrize("name", ["fp8", "fp8_per_channel", "fp8_block128", "fp8_64x32", "int8"])
def test_scales_of_16_bits_are_half_of_those_of_32(name: str) -> None:
    """1024 × 512, in which every block is complete. GEMMs, kernel models and scores use the plain format."""
    plain, narrow = load_weight_format(name), load_weight_format(f"{name}_scale16")
    scales = plain.matrix_bytes(1024, 512) - 1024 * 512
    assert narrow.matrix_bytes(1024, 512) == 1024 * 512 + scales // 2
    assert (family(narrow.name), narrow.computes) == (name, plain.computes)


@pytest.mark.parametrize("name", ["awq_scale16", "fp8_scale16_scale16", "fp8_0x1_scale16"])
def test_only_formats_with_scales_of_fp32_have_a_narrower_form(name: str) -> None:
    with pytest.raises(UserError, match="unknown quantization"):
        load_weight_format(name)


def test_only_schemes_with_quantised_activations_name_their_products() -> None:
    computes = {name: f.computes for name, f in WEIGHT_FORMATS.items() if f.computes}
    fp8 = ("fp8", "fp8_per_channel", "fp8_block128", "fp8_block32", "mxfp8")
    assert computes == {**dict.fromkeys(fp8, "fp8"), "int8": "int8", "nvfp4": "fp4", "mxfp4": "fp4"}


# grouped(): q [64, 128], k, v [64, 32], o [128, 64]; FFN gate, up [64, 128], down [128, 64]; embedding and head of 1000
MATRICES = 64 * 128 + 2 * 64 * 32 + 128 * 64 + 3 * 64 * 128
AROUND = 2 * 1000 * 64 + 3 * 64  # embedding and head; the two norms and the last


def test_embeddings_norms_and_head_keep_the_dtype() -> None:
    model = stack(grouped())
    assert weight_bytes(model) == 2 * (MATRICES + AROUND)
    quarter = weight_bytes(model, Precision(quantization="int8_weight_only"))
    outputs = 128 + 32 + 32 + 64 + 128 + 128 + 64
    assert quarter == MATRICES + 2 * outputs + 2 * AROUND


def test_dtype_overrides_what_was_published() -> None:
    model = stack(grouped(), quantization=(Quantization("fp8"),))
    assert weight_bytes(model) == MATRICES + 7 * 4 + 2 * AROUND
    assert weight_bytes(model, Precision(dtype="bf16")) == 2 * (MATRICES + AROUND)
    assert weight_bytes(model, Precision(dtype="fp32")) == 4 * (MATRICES + AROUND)
    assert weight_bytes(stack(grouped()), Precision(dtype="fp8")) == MATRICES + 7 * 4 + 2 * AROUND
    assert weight_bytes(model, Precision(quantization="bf16")) == 2 * (MATRICES + AROUND)


def test_the_published_format_asked_for_is_the_model_as_published() -> None:
    """This holds for all its names. Another format stores every matrix. gpt-oss has experts in mxfp4, Kimi-K2.5 in int4 by 32."""
    for name, own, other in (("gpt-oss-20b", "mxfp4", "nvfp4"), ("kimi-k2.5", "int4_group32", "int4")):
        model = load_model(name)
        assert weight_bytes(model, Precision(quantization=own)) == weight_bytes(model, Precision())
        assert weight_bytes(model, Precision(quantization=other)) < weight_bytes(model, Precision())


def test_biases_keep_the_dtype() -> None:
    plain, biased = stack(grouped()), stack(grouped(q_bias=True))
    for quantization in ("", "fp8", "awq"):
        precision = Precision(quantization=quantization)
        assert weight_bytes(biased, precision) - weight_bytes(plain, precision) == 128 * 2


def test_first_scheme_that_covers_a_matrix_counts_and_listed_ones_are_left_out() -> None:
    moe = Moe(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
    schemes = (
        Quantization("mxfp4", covers=("*.experts.*",)),
        Quantization("fp8", except_for=("embedding", "lm_head", "*.router")),
    )
    model = of_kinds({"moe": Layer(parts=(grouped(), moe), unquantized=("o",))}, layers=1, quantization=schemes)
    expert = 4 * (2 * (64 * 32 // 2 + 2 * 32) + 32 * 64 // 2 + 1 * 64)  # a byte for 32 inputs
    fp8 = 64 * 128 + 2 * 64 * 32 + 3 * 4  # q, k, v
    kept = 128 * 64 + 64 * 4 + AROUND  # o and the router, what surrounds the layer
    assert weight_bytes(model) == expert + fp8 + 2 * kept
    assert weight_bytes(model, Precision(quantization="fp8")) - 2 * AROUND - 2 * 64 * 4 == (
        4 * 3 * 64 * 32 + 4 * 3 * 4 + 64 * 128 + 2 * 64 * 32 + 128 * 64 + 4 * 4
    )


def test_deepseek_v3_as_published_is_fp8_in_blocks(kvcalc: Run) -> None:
    """All matrices except embedding, head and router are fp8 with an fp32 per 128 × 128. The others and the norms are bf16."""

    def fp8(inputs: int, outputs: int) -> int:
        return inputs * outputs + 4 * -(-inputs // 128) * -(-outputs // 128)

    q, kv = fp8(7168, 1536) + fp8(1536, 128 * 192), fp8(7168, 576) + fp8(512, 128 * 256)
    attention = q + kv + fp8(128 * 128, 7168) + 2 * (1536 + 512 + 2 * 7168)
    dense, expert = (2 * fp8(7168, f) + fp8(f, 7168) for f in (18_432, 2048))
    moe = 257 * expert + 2 * 7168 * 256
    worked = 61 * attention + 3 * dense + 58 * moe + 2 * (2 * 129_280 * 7168 + 7168)
    assert kvcalc("size deepseek-v3 --format json").records[0]["weight_bytes"] == worked
    assert kvcalc("size deepseek-v3 --dtype bf16 --format json").records[0]["weight_bytes"] == 2 * 671_026_404_352


def test_gpt_oss_has_experts_in_mxfp4(kvcalc: Run) -> None:
    """128 experts [2880 → 2880] of gate, up and down, a byte for 32 inputs, biases in bf16; 36 layers."""
    matrices, biases = 36 * 128 * 3 * 2880 * 2880, 36 * 128 * 3 * 2880
    rest = 116_829_156_672 - matrices - biases
    worked = matrices // 2 + matrices // 32 + 2 * (biases + rest)
    assert weight_bytes(load_model("gpt-oss-120b")) == worked
    assert kvcalc("size gpt-oss-120b --format json").records[0]["weight_bytes"] == worked


@pytest.mark.parametrize(("form", "names"), [("expanded", ("kv_up",)), ("absorbed", ("absorb_q", "absorb_v"))])
def test_both_forms_of_mla_read_the_matrix_that_is_stored(kvcalc: Run, form: str, names: tuple[str, ...]) -> None:
    """kv_up of DeepSeek-V3 is [512, 128 · 256], with an fp32 for each output: no head of its two halves has scales of its own."""
    found = kvcalc(f"roofline deepseek-v3 -q int8 --mla-form {form} --stack datasheet --format json").records
    assert sum(r["weight_bytes"] for r in found if r["operator"] in names) == 61 * (512 + 4) * 128 * 256
