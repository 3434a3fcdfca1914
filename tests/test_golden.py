"""Published cache sizes, to the byte, in the API and in the command line's JSON. Every figure is computed here.

A full attention layer stores 2 · KV heads · head width · bytes per element for each token. So a 16-bit cache has 2 ·
layers · KV heads · width · 2 bytes · tokens.
"""

import pytest
from conftest import Run
from specs import grouped, stack

from kvcalc import Precision, cache_size, load_model, mha_ratio
from kvcalc.planning.variants import variant

MIB, GIB = 2**20, 2**30

# model, variant, context, batch, bytes
GOLDEN = [
    ("gpt2", "none", 1024, 1, 2 * 12 * 12 * 64 * 2 * 1024, 37_748_736),  # 36 MiB
    ("gpt-3-175b", "none", 1024, 1, 2 * 96 * 96 * 128 * 2 * 1024, 4_831_838_208),  # 4.5 GiB
    ("gpt-3-175b", "mqa", 1024, 1, 2 * 96 * 1 * 128 * 2 * 1024, 48 * MIB),
    ("gpt-3-175b", "none", 2048, 1, 2 * 96 * 96 * 128 * 2 * 2048, 9 * GIB),
    ("deepseek-v3", "mha", 100_000, 1, 2 * 61 * 128 * 128 * 2 * 100_000, 399_769_600_000),
    ("deepseek-v3", "mqa", 100_000, 1, 2 * 61 * 1 * 128 * 2 * 100_000, 3_123_200_000),
    ("deepseek-v3", "none", 100_000, 1, 61 * (512 + 64) * 2 * 100_000, 7_027_200_000),
    ("deepseek-v3", "mla:512+64", 100_000, 1, 61 * (512 + 64) * 2 * 100_000, 7_027_200_000),
    ("llama-7b", "none", 4096, 1, 2 * 32 * 32 * 128 * 2 * 4096, 2_147_483_648),
    ("llama-7b", "none", 32_768, 1, 2 * 32 * 32 * 128 * 2 * 32_768, 17_179_869_184),
    ("llama-7b", "none", 32_768, 64, 64 * 17_179_869_184, 1_099_511_627_776),  # over 1 TB: it is 1 TiB
    ("llama-7b", "mqa", 4096, 1, 2 * 32 * 1 * 128 * 2 * 4096, 64 * MIB),
    ("llama-2-70b", "mha", 32_768, 1, 2 * 80 * 64 * 128 * 2 * 32_768, 85_899_345_920),  # 80 GiB
    ("llama-2-70b", "mha", 32_768, 8, 8 * 85_899_345_920, 640 * GIB),
    ("llama-2-70b", "none", 32_768, 1, 2 * 80 * 8 * 128 * 2 * 32_768, 10 * GIB),
    ("llama-2-13b", "none", 4096, 1, 2 * 40 * 40 * 128 * 2 * 4096, 3_355_443_200),
    ("mistral-7b-v0.1", "none", 4096, 1, 2 * 32 * 8 * 128 * 2 * 4096, 536_870_912),
    ("mistral-7b-v0.1", "none", 4097, 1, 2 * 32 * 8 * 128 * 2 * 4096, 512 * MIB),
    ("mistral-7b-v0.1", "none", 1 << 20, 1, 2 * 32 * 8 * 128 * 2 * 4096, 512 * MIB),
    ("llama-3-8b", "none", 4096, 1, 2 * 32 * 8 * 128 * 2 * 4096, 512 * MIB),
    ("hunyuan-large", "none", 1000, 1, 2 * (64 // 2) * 8 * 80 * 2 * 1000, 81_920_000),  # two layers share one cache
]  # fmt: skip


@pytest.mark.parametrize(("name", "swap", "context", "batch", "worked", "published"), GOLDEN)
def test_published_cache_size(kvcalc: Run, name: str, swap: str, context: int, batch: int, worked: int, published: int) -> None:
    assert worked == published  # the arithmetic of this table itself
    model = variant(load_model(name), swap).model
    assert cache_size(model, context, batch).stored == worked
    (record,) = kvcalc(f"compare {name} --variants {swap} --context {context} --batch-size {batch} --format json").records
    assert record["kv_cache_bytes"] == worked
    assert isinstance(record["kv_cache_bytes"], int)


GPT3 = {  # layers, heads, head width: Table 2.1 of the paper (XL has 16 heads and 13B is 5120 wide, where it misprints)
    "gpt-3-small": (12, 12, 64),
    "gpt-3-medium": (24, 16, 64),
    "gpt-3-large": (24, 16, 96),
    "gpt-3-xl": (24, 16, 128),
    "gpt-3-2.7b": (32, 32, 80),
    "gpt-3-6.7b": (32, 32, 128),
    "gpt-3-13b": (40, 40, 128),
    "gpt-3-175b": (96, 96, 128),
}


def test_all_gpt3_sizes_in_one_command(kvcalc: Run) -> None:
    records = kvcalc(f"size {' '.join(GPT3)} --context 2k --format json").records
    assert [r["model"] for r in records] == list(GPT3)
    for record, (layers, heads, width) in zip(records, GPT3.values(), strict=True):
        assert record["kv_cache_bytes"] == 2 * layers * heads * width * 2 * 2048
        hidden = heads * width  # attention 4·(D² + D), FFN 8·D² + 5·D, two norms of 2·D; tables and a last norm
        layer = 4 * (hidden**2 + hidden) + 8 * hidden**2 + 5 * hidden + 4 * hidden
        assert record["parameters"] == layers * layer + (50_257 + 2048) * hidden + 2 * hidden


def test_thirty_billion_model_in_line(kvcalc: Run) -> None:
    """48 layers, H·d = 7168, 1024 tokens, batch 128: 180 GB."""
    worked = 2 * 48 * 7168 * 2 * 1024 * 128
    assert worked == 180_388_626_432
    model = stack(grouped(56, 56, 128), layers=48, hidden_size=7168)
    assert cache_size(model, 1024, 128).stored == worked
    line = "size gpt-3-175b --set layers=48 --set num_attention_heads=56 --set num_key_value_heads=56 --set hidden_size=7168"
    assert kvcalc(line + " --context 1k --batch-size 128 --format json").records[0]["kv_cache_bytes"] == worked


@pytest.mark.parametrize(
    ("name", "worked"),
    [
        ("llama-3-8b", 32 / 8),
        ("llama-7b", 1.0),
        ("llama-2-70b", 64 / 8),
        ("deepseek-v3", 2 * 16_384 / 576),  # 56.9 with the RoPE key: 16384 is H·d, not the width of 7168
        ("gpt-3-175b", 1.0),
    ],
)
def test_mha_ratio(kvcalc: Run, name: str, worked: float) -> None:
    assert mha_ratio(load_model(name), 4096) == worked
    assert kvcalc(f"size {name} --format json").records[0]["mha_ratio"] == worked


def test_as_mha_a_hybrid_keeps_its_states(kvcalc: Run) -> None:
    """12 of qwen3-next's 48 layers attend: 16 heads of 256 instead of 2. 36 store a state, and 3 columns of 8,192 channels."""
    state = 36 * (32 * 128 * 128 * 4 + 3 * 8192 * 2)
    own, plain = (12 * 2 * heads * 256 * 2 * 4096 + state for heads in (2, 16))
    assert mha_ratio(load_model("qwen3-next-80b-a3b"), 4096) == plain / own
    none, mha = kvcalc("compare qwen3-next-80b-a3b --variants none,mha --format json").records
    assert (none["kv_cache_bytes"], mha["kv_cache_bytes"]) == (own, plain)
    assert (none["mha_ratio"], mha["mha_ratio"]) == (plain / own, 1)
    assert mha_ratio(load_model("zamba2-1.2b"), 4096) == 1  # whose attention is MHA


def test_as_mha_keys_are_as_wide_as_values(kvcalc: Run) -> None:
    """MiMo-V2-Flash: 48 layers of 64 heads, keys of 192 and values of 128."""
    none, mha, grouped = kvcalc("compare mimo-v2-flash --variants none,mha,gqa:4 --format json").records
    assert mha["kv_cache_bytes"] == 48 * 64 * (128 + 128) * 2 * 4096 == round(none["kv_cache_bytes"] * none["mha_ratio"])
    assert grouped["kv_cache_bytes"] == 48 * 4 * (192 + 128) * 2 * 4096
    assert mha["held_equal"] == "layers, width, query heads, FFN; value width, which keys get too"


def test_very_long_and_very_wide_is_exact(kvcalc: Run) -> None:
    """A million tokens, 100 layers, a million sequences: above 2^53, where floats are not exact."""
    worked = 2 * 100 * 8 * 128 * 2 * 1_048_576 * 1_000_000
    assert worked > 2**53
    model = stack(grouped(64, 8, 128), layers=100, hidden_size=8192)
    assert cache_size(model, 1_048_576, 1_000_000).stored == worked
    line = "size llama-3.1-8b --set layers=100 --context 1M --batch-size 1000000 --format json"
    assert kvcalc(line).records[0]["kv_cache_bytes"] == worked
    odd = cache_size(model, 999_999_999_989, 999_983).stored
    assert odd == 2 * 100 * 8 * 128 * 2 * 999_999_999_989 * 999_983


def test_float_contexts_are_not_silently_rounded() -> None:
    from kvcalc import UserError

    for bad in (0, -1, 10**12 + 1, 4096.5, True, float("nan"), float("inf")):
        with pytest.raises(UserError, match="whole number"):
            cache_size(load_model("gpt2"), bad)  # type: ignore[arg-type]
    assert cache_size(load_model("gpt2"), 512.0) == cache_size(load_model("gpt2"), 512)  # type: ignore[arg-type]


def test_precision_is_that_of_the_cache_not_of_the_weights() -> None:
    model = load_model("llama-7b")
    half = cache_size(model, 4096).stored
    assert cache_size(model, 4096, precision=Precision(kv_cache_dtype="fp32")).stored == 2 * half
    assert cache_size(model, 4096, precision=Precision(kv_cache_dtype="fp64")).stored == 4 * half
    assert cache_size(model, 4096, precision=Precision(quantization="awq")).stored == half
    assert cache_size(model, 4096, precision=Precision(dtype="fp32")).stored == 2 * half
