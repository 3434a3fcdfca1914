"""A cache by typed dimensions: exact bytes, and no statement about weights."""

import pytest
from conftest import Run

from kvcalc import cache_size
from kvcalc.library.load import Dimensions


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        # 48 layers, 56 · 128 = 7168 wide, 1024 tokens of 128 sequences
        ("--layers 48 --kv-heads 56 --head-dim 128 --context 1024 --batch-size 128", 180_388_626_432),
        ("--layers 61 --kv-heads 128 --head-dim 128 --context 100000", 399_769_600_000),
        ("--layers 61 --kv-heads 1 --head-dim 128 --context 100000 --heads 128", 3_123_200_000),
        ("--layers 61 --kv-lora-rank 512 --qk-rope-head-dim 64 --context 100000", 7_027_200_000),
        ("--layers 40 --kv-heads 40 --head-dim 128 --context 4k --dtype fp16", 3_355_443_200),
        ("--layers 40 --hidden-size 5120 --context 4k", 3_355_443_200),  # the same, 40 · 128 = 5120
        ("--layers 40 --hidden-size 5120 --heads 40 --context 4k --tp 8", 3_355_443_200 // 8),
        ("--layers 32 --kv-heads 8 --head-dim 128 --sliding-window 4k --context 1M", 536_870_912),
        ("--layers 32 --kv-heads 8 --head-dim 128 --context 32k --kv-cache-dtype fp8 --tp 4", 32 * 2 * 2 * 128 * 32_768),
    ],
)
def test_bytes_by_hand(kvcalc: Run, line: str, expected: int) -> None:
    (record,) = kvcalc(f"size {line} --format json").records
    assert record["kv_cache_bytes"] == record["kv_cache_read_bytes"] == expected


def test_what_is_left_out_is_not_given() -> None:
    assert cache_size(Dimensions(layers=3, kv_lora_rank=512).model(), 10).stored == 3 * 10 * 512 * 2


def test_nothing_is_said_of_weights(kvcalc: Run) -> None:
    line = "size --layers 48 --kv-heads 56 --head-dim 128"
    (record,) = kvcalc(f"{line} --format json").records
    unknown = ("parameters", "active_parameters", "weight_bytes", "cache_share_of_weights", "equal_weights_context", "mha_ratio")
    assert {record[key] for key in unknown} == {None}
    assert record["attention"] == "56 KV heads"
    assert "weights" not in kvcalc(line).out and "parameters" not in kvcalc(line).out
    explained = kvcalc(f"{line} --explain").out
    assert "48 layers × 4,096 rows" in explained and "weight" not in explained and "parameters" not in explained


def test_query_heads_tell_what_the_same_would_be_as_mha(kvcalc: Run) -> None:
    (grouped,) = kvcalc("size --layers 2 --kv-heads 8 --head-dim 128 --heads 64 --format json").records
    assert (grouped["mha_ratio"], grouped["attention"]) == (8, "GQA-8")
    (latent,) = kvcalc(
        "size --layers 2 --kv-lora-rank 512 --qk-rope-head-dim 64 --heads 128 --head-dim 128 --format json"
    ).records
    assert latent["mha_ratio"] == 2 * 128 * 128 / 576


def test_a_hidden_size_is_mha(kvcalc: Run) -> None:
    (record,) = kvcalc("size --layers 40 --hidden-size 5120 --heads 40 --format json").records
    assert (record["model"], record["attention"], record["mha_ratio"]) == ("40 layers of 5120", "MHA", 1)
    (alone,) = kvcalc("size --layers 40 --hidden-size 5120 --format json").records
    assert (alone["attention"], alone["mha_ratio"]) == ("MHA", None)
    line = "compare --layers 40 --hidden-size 5120 --heads 40 --variants mha,gqa:8 --format json"
    assert [r["stored_reduction"] for r in kvcalc(line).records] == [1, 5]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("size", "or give --layers, --kv-heads and --head-dim"),
        ("size --layers 3", "needs --kv-heads and --head-dim"),
        ("size --kv-heads 3 --head-dim 8", "needs --layers"),
        ("size gpt2 --layers 3", "dimensions cannot be combined with a model or --set"),
        ("size --layers 3 --kv-heads 2 --head-dim 8 --set layers=2", "dimensions cannot be combined with a model or --set"),
        ("size --layers 3 --kv-heads 2 --kv-lora-rank 512", "not both"),
        ("size --layers 3 --kv-heads 2 --head-dim 8 --qk-rope-head-dim 64", "there is no --kv-lora-rank"),
        ("size --layers 3 --kv-heads 3 --head-dim 8 --heads 4", "is not a multiple of num_key_value_heads 3"),
        ("size --layers -1 --kv-heads 2 --head-dim 8", "--layers -1 is outside"),
        ("size --layers 3 --hidden-size 64 --kv-heads 2", "in place of --kv-heads"),
        ("size --layers 3 --hidden-size 64 --heads 3", "--hidden-size 64 is not a multiple of --heads 3"),
        ("size --hidden-size 64", "a cache by its dimensions needs --layers. Write"),
        ("size --layers 3 --kv-heads 2 --head-dim 8 --sliding-window x", "sliding-window 'x' is not a whole number"),
        ("size --layers 999999 --kv-heads 2 --head-dim 8", "--layers 999999 is outside 1 to 100,000"),
    ],
)
def test_what_is_missing_or_contradicts_itself_is_refused(kvcalc: Run, line: str, said: str) -> None:
    result = kvcalc(line)
    assert result.code == 2 and said in result.err and len(result.err.splitlines()) == 1


def test_other_attention_of_the_same_dimensions(kvcalc: Run) -> None:
    """A token in a layer: 2 · 8 · 128 values, a latent of 512 + 64, and one of 256 + 32. 32 query heads, 4 per KV head,
    multiply each byte of GQA 4 times. Absorbed MLA: 32 · (2 · 576 + 2 · 512) FLOPs per 1152 bytes of a latent."""
    line = (
        "compare --layers 32 --heads 32 --kv-heads 8 --head-dim 128 --variants gqa:8,mla:512+64,mla:256+32 --context 32k --bs 2"
    )
    records = kvcalc(f"{line} --format json").records
    assert [r["kv_cache_bytes"] for r in records] == [2 * 32_768 * 32 * 2 * width for width in (2048, 576, 288)]
    assert [r["stored_reduction"] for r in records] == [1, 2048 / 576, 2048 / 288]
    assert [r["attention_intensity"] for r in records[:2]] == [4, 32 * (2 * 576 + 2 * 512) / 1152]
    assert {r[key] for r in records for key in ("parameters", "weight_bytes", "dtype", "equal_weights_context")} == {None}
    untold = {"gpu", "basis", "max_num_seqs", "roofline_s", "time_s", "flops", "bytes", "bound", "mha_parameters"}
    assert not untold & set().union(*records)
    out = kvcalc(f"{line} -v").out
    assert out.startswith("32 layers with mla:256+32 need 1.12 GiB of KV cache for 2 × 32,768 tokens, 7.11× less than")
    assert "weights" not in out and "h100" not in out
    assert "Decode step" not in kvcalc(f"{line} --plot -").out


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("--layers 32 --kv-heads 8 --head-dim 128", "needs --heads"),
        ("--layers 32 --kv-lora-rank 512 --heads 8", "needs --head-dim"),
        ("gpt2 --layers 3", "dimensions cannot be combined with a model or --set"),
        ("--layers 32 --kv-heads 8 --head-dim 128 --heads 32 --variants gqa:5", "do not divide the 32 query heads of 32 layers"),
        ("", "no model is named. Name one (`kvcalc models` lists them), or give --layers, --kv-heads"),
    ],
)
def test_what_a_comparison_of_dimensions_lacks(kvcalc: Run, line: str, said: str) -> None:
    found = kvcalc(f"compare {line}")
    assert (found.code, found.out) == (2, "") and said in found.err
