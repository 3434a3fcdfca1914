"""vLLM's planner for layers with different caches: integers from vLLM 0.33's planning functions for the same specs.

`v1/core/kv_cache_planning.py` ran on the specs that vLLM's layers declare (models/deepseek_v4, layers/mamba, attention),
with 40 GiB for the cache, 8192 batched tokens, and stages + 1 passes in flight, as in the second runner.
"""

import msgspec
import pytest
from conftest import Run
from specs import stack

from kvcalc import Deployment, Parallelism, Precision, UserError, load_gpu, load_model
from kvcalc.capacity import FitOptions, fit
from kvcalc.capacity.engines.kv_cache_groups import Spec, SpecKind, packed_groups

GIB40 = 40 * 2**30
# (model and options, block, bytes per block, blocks, blocks per request)
PLANNED = [
    ("deepseek-v4-flash", 256, 1_002_240, 42_853, 10_778),
    ("deepseek-v4-flash --pp 2", 256, 524_160, 81_940, 14_106),
    ("deepseek-v4-flash --mtp", 256, 1_002_240, 42_853, 10_778),
    ("deepseek-v4-flash --kv-cache-dtype bf16 --max-model-len 131072", 256, 1_600_000, 26_843, 7_194),
    ("deepseek-v4-pro", 256, 1_435_968, 29_909, 10_778),
    ("qwen3.5-27b", 784, 51_380_224, 835, 338),
    ("qwen3.5-27b --mtp", 800, 55_705_600, 771, 334),
    ("qwen3.5-27b --mtp --num-speculative-tokens 2 --tp 2", 800, 27_852_800, 1_542, 337),
    ("qwen3.5-27b --mtp --num-speculative-tokens 3 --mamba-cache-mode align", 800, 55_705_600, 771, 343),
    ("qwen3.5-27b --pp 2", 784, 25_690_112, 1_671, 338),
    ("qwen3.5-27b --pp 4", 784, 12_845_056, 3_343, 338),
    ("gpt-oss-20b --pp 2", 16, 196_608, 218_453, 9_737),
    ("gpt-oss-20b --pp 4", 16, 98_304, 436_906, 10_761),
    ("gemma-3-27b", 16, 1_310_720, 32_768, 14_726),
    ("gemma-3-27b --pp 2", 16, 655_360, 65_536, 17_798),
    ("llama-3.1-8b --draft llama-3.2-1b", 16, 2_621_440, 16_384, 8_192),
    ("llama-3.1-70b --tp 16 --dcp 2", 16, 655_360, 65_536, 4_096),
    ("deepseek-v3.2 --kv-cache-dtype fp8 --tp 8 --dcp 8", 64, 3_076_352, 13_961, 320),
    ("deepseek-v3.2 --kv-cache-dtype fp8 --mtp", 64, 3_126_784, 13_736, 2_560),
]


@pytest.mark.parametrize(("line", "block", "per_block", "blocks", "request_"), PLANNED, ids=[p[0] for p in PLANNED])
def test_integers_of_the_planner(kvcalc: Run, line: str, block: int, per_block: int, blocks: int, request_: int) -> None:
    asked = f"fit {line} --gpu h200 --engine vllm --kv-cache-memory-bytes {GIB40} --max-num-batched-tokens 8192 --format json"
    (record,) = kvcalc(asked).records
    assert (record["block_size"], record["bytes_per_block"]) == (block, per_block)
    assert (record["num_blocks"], record["blocks_per_request"]) == (blocks, request_)


def test_an_eagle_head_of_full_attention_widens_the_groups() -> None:
    """gpt-oss-20b has 12 window and 12 full layers. One more full layer gives groups of 13, and the window group is padded."""
    target = load_model("gpt-oss-20b")
    head = msgspec.structs.replace(stack(target.kinds["full"].parts[0], layers=1), lent=("embedding", "lm_head"))
    options = FitOptions(engine="vllm", kv_cache_memory_bytes=GIB40, max_num_batched_tokens=8192, draft=head)
    found = fit(Deployment(target, load_gpu("h200"), Precision(), Parallelism()), options)
    plan = found.plan
    assert (plan.bytes_per_block, plan.num_blocks(GIB40), plan.request_blocks(131_072)) == (425_984, 100_824, 9_225)


def test_pages_of_v4_by_hand() -> None:
    """A packed latent has 584 B in pages of 64, padded to 576 B. Rings have 4 · 8,192 and 8 · 4,096 B, index rows 132 B."""
    page, ring, index, far = 37_440, 32_832, 8_640, 1_728
    assert [-(-n // 576) * 576 for n in (64 * 584, 4 * 2 * 2 * 512 * 4, 64 * 132, 2 * 584)] == [page, ring, index, far]
    assert index == -(-4 * 2 * 2 * 128 * 4 // 576) * 576
    assert 21 * page + 21 * index + 20 * far == 1_002_240  # the group of compressed rows and index keys, the widest of five


def test_uneven_buckets_stay_whole() -> None:
    """A group with one page size is split by the repeats of the mixed group. A group with unequal counts is not split."""
    spec = [Spec(SpecKind.FULL, 1, 0, 256, size, latent=True) for size in (300, 300, 200)] + [
        Spec(SpecKind.WINDOW, 1, 8, 4, size, latent=True) for size in (100, 50)
    ] * 2
    windows = [Spec(SpecKind.WINDOW, 1, 128, 64, 100, latent=True)] * 4
    groups = packed_groups([(0, s) for s in (*spec, *windows)])
    assert [len(g.specs) for g in groups] == [3, 4, 2, 2]
    assert [sum(g.pages(0)) for g in groups] == [800, 300, 200, 200]
    with pytest.raises(UserError):
        FitOptions(num_speculative_tokens=-1)


@pytest.mark.parametrize(
    ("options", "gib", "tokens", "concurrency"),
    [
        ("--gpu h100 --max-model-len 262144 --engine-version 0.31.1", "28.73GiB", 2_618_281, 9.99),
        ("--gpu h200 --max-model-len 131072 --engine-version 0.28.1 --mamba-cache-mode align", "81.794GiB", 7_228_559, 55.15),
    ],
)
def test_pooled_index_keys_of_published_starts(kvcalc: Run, options: str, gib: str, tokens: int, concurrency: float) -> None:
    """GLM-5.3-Flash on 8 GPUs: starts that printed 28.73 GiB, 2,618,281 tokens, and 81.79 GiB, 7,228,559 and 55.15.

    A state of 8 · 128 · (3 · 3 · 2 + 128 · 4) = 542,720 B is in a page of 640 · 512 · 2 B. Index keys have 160 rows of
    132 B. A sequence has ⌈L/640⌉ blocks, a ring, and a state (aligned: two) in each of four groups: 34 state layers for
    11 row layers.
    """
    line = f"fit glm-5.3-flash --engine vllm --tp 8 {options} --kv-cache-memory-bytes {gib} --format json"
    (record,) = kvcalc(line).records
    assert 8 * 128 * (3 * 3 * 2 + 128 * 4) < 640 * 512 * 2
    assert (record["block_size"], record["bytes_per_block"]) == (640, 11 * (640 * 1024 + 160 * 132))
    assert (record["kv_tokens"], round(record["max_concurrency"], 2)) == (tokens, concurrency)


def test_larger_blocks_of_pooled_index_keys_hold_a_state_in_whole_ones(kvcalc: Run) -> None:
    """200 requested tokens become 256, a multiple of 128. Two such blocks of 1,024 B per token have 524,288 B, the state
    needs 542,720."""
    line = "fit glm-5.3-flash --engine vllm --tp 8 --gpu h200 --max-model-len 1000 --block-size 200 --format json"
    assert kvcalc(line).records[0]["block_size"] == 3 * 256


def test_pooled_index_keys_beside_keys_and_values(kvcalc: Run) -> None:
    """Qwen3.8-Flash-Next on 8 GPUs printed 37.37 GiB and 3,046,184 tokens: 7,681 blocks, 661 per sequence.

    Each GPU has one of two KV heads of 256: 1,024 B per token and layer. A state of 6 heads of 128 × 128 in fp32 and 3 ·
    1,280 columns needs 392 tokens, 400 in blocks of 16. Index keys have 256 B for 4 tokens. 262,144 tokens are 656
    blocks, a ring, and states in four groups: 36 layers and the n-grams' convolution for 12 row layers. The content of
    0.03 % of a block, beyond 5,222,400 B, is unknown.
    """
    line = "fit qwen3.8-flash-next --engine vllm --tp 8 --gpu h100 --max-model-len 262144 --kv-cache-memory-bytes 37.37GiB"
    (record,) = kvcalc(f"{line} --engine-version 0.31.1 --format json").records
    assert 384 * 1024 < 6 * 128 * 128 * 4 + 3 * 1280 * 2 <= 400 * 1024
    assert (record["block_size"], record["bytes_per_block"]) == (400, 12 * 400 * (1024 + 256 // 4))
    assert record["blocks_per_request"] == 661 == 656 + 1 + -(-37 // 12)
    assert record["kv_tokens"] == pytest.approx(3_046_184, rel=3e-4)


def test_tokens_of_a_published_start_of_mimo(kvcalc: Run) -> None:
    """MiMo-V2.6-Flash on 8 GPUs printed 49.18 GiB and 6,969,972 tokens. 49.18 is exact to 0.01 %."""
    line = "fit mimo-v2.6-flash --engine vllm --tp 8 --gpu h100 --enable-expert-parallel --max-model-len 262144"
    more = "--max-num-seqs 64 --max-num-batched-tokens 8192 --kv-cache-memory-bytes 49.18GiB --engine-version 0.31.1"
    (record,) = kvcalc(f"{line} {more} --format json").records
    assert record["kv_tokens"] == pytest.approx(6_969_972, rel=1e-4)


def test_pooled_index_keys_beside_other_layers(kvcalc: Run) -> None:
    """In five stages of nine layers, two layers of latents and seven states also make four groups."""
    line = "fit glm-5.3-flash --engine vllm --tp 8 --gpu h200 --max-model-len 1000 --format json"
    (record,) = kvcalc(f"{line} --pp 5").records
    assert record["blocks_per_request"] == 2 + 1 + 4
    assert "a pipeline stage has no latents" in kvcalc(f"{line} --pp 15").err
    draft = msgspec.structs.replace(load_model("llama-3.2-1b"), vocab_size=154_880)
    with pytest.raises(UserError, match="next to other attention"):
        fit(Deployment(load_model("glm-5.3-flash"), load_gpu("h200")), FitOptions(engine="vllm", draft=draft))


def test_groups_hold_as_many_repeats_as_pad_the_least() -> None:
    """Two repeats of a mixed group and five windows: groups of two pad one page, groups of three, four or five pad more."""
    mixed = [Spec(SpecKind.FULL, 1, 0, 256, size, latent=True) for size in (300, 200)] * 2
    windows = [Spec(SpecKind.WINDOW, 1, 128, 64, 100, latent=True)] * 5
    groups = packed_groups([(0, s) for s in (*mixed, *windows)])
    assert [len(g.specs) for g in groups] == [4, 2, 2, 1]
