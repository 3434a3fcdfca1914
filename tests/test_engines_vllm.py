"""vLLM's planner: integers from vLLM itself, through the command line, and its rules one by one."""

from typing import Any

import pytest
from conftest import Run
from specs import of_kinds, stack

from kvcalc import Deployment, Layer, Model, Parallelism, Precision, UserError, load_gpu, load_model
from kvcalc.capacity import Fit, FitOptions, fit
from kvcalc.capacity.engines.kv_cache_groups import Spec, SpecKind, choose_group_size, group_layers
from kvcalc.capacity.engines.vllm import Vllm
from kvcalc.layers.attention import Grouped, Latent, Sparse
from kvcalc.layers.part import Sublayer
from kvcalc.layers.recurrent import Mamba2

GIB40 = 40 * 2**30
H100 = load_gpu("h100")


# (model, more options, block, page, bytes per block, blocks, blocks per request, tokens, concurrency): printed by vLLM 0.33
# with 40 GiB for the cache, 8192 batched tokens and 2 batches in flight.
RUN = [
    ("llama-3.1-8b", "", 16, 65_536, 2_097_152, 20_480, 8192, 327_680, 2.5),
    ("deepseek-v3", "", 64, 73_728, 4_497_408, 9_549, 2560, 611_136, 3.7301),
    ("deepseek-v3", "--kv-cache-dtype fp8", 64, 36_864, 2_248_704, 19_099, 2560, 1_222_336, 7.4605),
    ("deepseek-v3.2", "--kv-cache-dtype fp8", 64, 41_984 + 8_448, 3_076_352, 13_961, 2560, 893_504, 5.4535),
    ("deepseek-v3.2", "--kv-cache-dtype fp8_ds_mla", 64, 50_432, 3_076_352, 13_961, 2560, 893_504, 5.4535),
    ("gpt-oss-120b", "", 16, 32_768, 589_824, 72_817, 9225, 1_034_609, 7.8934),
    ("qwen3-next-80b-a3b", "", 544, 1_114_112, 13_369_344, 3_212, 485, 1_736_095, 6.6227),
]


@pytest.mark.parametrize(("name", "more", "block", "page", "per_block", "blocks", "request_", "tokens", "concurrency"), RUN)
def test_integers_of_vllm_itself(
    kvcalc: Run, name: str, more: str, block: int, page: int, per_block: int, blocks: int, request_: int, tokens: int,
    concurrency: float,
) -> None:  # fmt: skip
    line = f"fit {name} --engine vllm --kv-cache-memory-bytes {GIB40} --max-num-batched-tokens 8192 --format json {more}"
    (record,) = kvcalc(line).records
    assert (record["block_size"], record["page_bytes"], record["bytes_per_block"]) == (block, page, per_block)
    assert (record["num_blocks"], record["blocks_per_request"], record["kv_tokens"]) == (blocks, request_, tokens)
    assert round(record["max_concurrency"], 4) == concurrency
    assert record["kv_cache_allocated_bytes"] == blocks * per_block <= GIB40


def test_index_keys_are_in_fp8_in_engines_only(kvcalc: Run) -> None:
    """Of 61 layers, (576 + 128) · 2 B per token in `size`, and (576 · 2 + 132) B in vLLM. Both say so."""
    found = planned(load_model("deepseek-v3.2"))
    assert pool(found)[0] == 61 * 64 * (1152 + 132) and "vllm stores the index keys of sparse attention in fp8" in found.notes
    assert "83.9 KiB per token" in (size := kvcalc("size deepseek-v3.2").joined) and "SGLang store index keys in fp8." in size


def test_starcoder2_with_one_batch_in_flight(kvcalc: Run) -> None:
    """A published run: 137,407 blocks, 178.68 requests of 16,384 tokens; ⌈(4095 + 8192)/16⌉ + 1 = 769 blocks each."""
    line = "fit starcoder2-3b --engine vllm --num-gpu-blocks-override 137407 --max-in-flight-batches 1 --format json"
    (record,) = kvcalc(line + " --max-num-batched-tokens 8192").records
    assert record["blocks_per_request"] == 769
    assert round(record["max_concurrency"], 2) == 178.68
    assert record["max_model_len"] is None  # every layer has a window: no length is too long


def planned(model: Model, precision: Precision | None = None, ranks: Parallelism | None = None, **options: Any) -> Fit:
    asked = {"engine": "vllm", "kv_cache_memory_bytes": GIB40, "max_num_batched_tokens": 8192, "max_model_len": 131072}
    run = Deployment(model, H100, precision or Precision(), ranks or Parallelism())
    return fit(run, FitOptions(**(asked | options)))


def pool(found: Fit) -> tuple[int, int, int]:
    """Return bytes per block, blocks, and blocks per request."""
    assert isinstance(found.plan, Vllm)
    return found.plan.bytes_per_block or 0, found.plan.num_blocks(found.kv_budget), found.plan.request_blocks(found.length)


def alternating(*mixers: tuple[int, Sublayer], **fields: Any) -> Model:
    """Return a model with these numbers of layers of each mixer, one kind after the other."""
    kinds = {f"k{i}": Layer(parts=(part,)) for i, (_, part) in enumerate(mixers)}  # type: ignore[arg-type]
    pattern = tuple(f"{n} k{i}" for i, (n, _) in enumerate(mixers))
    return of_kinds(kinds, layers=sum(n for n, _ in mixers), pattern=pattern, max_context=131072, **fields)


FULL = Grouped(num_attention_heads=16, num_key_value_heads=8, head_dim=128)  # page 16 · 8 · 256 · 2 = 65,536 B


def window(tokens: int = 1024, **fields: Any) -> Grouped:
    return Grouped(**({"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "sliding_window": tokens} | fields))


@pytest.mark.parametrize(
    ("blocks", "shared", "most"), [(3, 32, 10**12), (2, 32, 0), (5, 16, 3), (2, 16, 0), (7, 0, 3), (0, 0, 0)]
)
def test_sequences_in_a_pool(blocks: int, shared: int, most: int) -> None:
    """32 tokens are two blocks. The pool has the null block, the blocks of the prefix once, and the blocks of each sequence."""
    plan = planned(stack(Grouped(num_attention_heads=2, num_key_value_heads=2, head_dim=16))).plan
    assert plan.bytes_per_block == 16 * 2 * 2 * 16 * 2
    assert plan.max_sequences(blocks * 2048, 32, shared) == most


CHUNKED = Grouped(num_attention_heads=16, num_key_value_heads=8, head_dim=128, attention_chunk_size=8192)
ODD = Grouped(num_attention_heads=12, num_key_value_heads=3, head_dim=128)  # 24,576 B a page
NARROW = Grouped(num_attention_heads=16, num_key_value_heads=4, head_dim=128)  # 32,768 B a page
POOLS = [
    # Llama 4: 4 groups of 12; ⌈min(8192 + 16384, L)/16⌉ = 1536 blocks, and no +1
    (((36, CHUNKED), (12, FULL)), 12 * 65_536, 8192 + 3 * 1536),
    # Gemma-3-27b: groups of 10, of which 6 of windows (9, 9, 9, 9, 8, 8); 1089 = ⌈(1023 + 16384)/16⌉ + 1
    (((52, window()), (10, FULL)), 10 * 65_536, 8192 + 6 * 1089),
    # 13 < 1.5 · 12, so two groups of 13 rather than three of 12
    (((12, window()), (13, FULL)), 13 * 65_536, 8192 + 1089),
    # a smaller page that divides 131,072 B gets a larger block: 64 tokens
    (((8, window(num_key_value_heads=16)), (8, NARROW)), 8 * 131_072, 131_072 // 64 + 1089),
    # a page that does not divide is padded, and the block stays 16
    (((8, window()), (8, ODD)), 8 * 65_536, 8192 + 1089),
    # full layers of two widths need the same blocks: one group whose page is the sum
    (((8, FULL), (8, ODD)), 8 * 65_536 + 8 * 24_576, 8192),
]


@pytest.mark.parametrize(("mixers", "bytes_per_block", "blocks"), POOLS)
def test_groups_of_layers(mixers: tuple[tuple[int, Sublayer], ...], bytes_per_block: int, blocks: int) -> None:
    assert pool(planned(alternating(*mixers))) == (bytes_per_block, GIB40 // bytes_per_block, blocks)


def test_the_smallest_kind_is_the_group_unless_the_largest_is_near() -> None:
    assert [choose_group_size(counts) for counts in ([12, 17], [12, 18], [3, 4], [2, 3])] == [17, 12, 4, 2]


def test_windows_as_full_attention() -> None:
    """Without the hybrid manager, there is one group, and every layer stores all tokens."""
    found = planned(alternating((18, window(128)), (18, FULL)), hybrid=False)
    assert pool(found) == (36 * 65_536, GIB40 // (36 * 65_536), 8192)


STATE = Mamba2(num_heads=128, head_dim=64, state_size=128, n_groups=8)  # 10,240 channels · 3 columns, 1,048,576 states


def test_state_pages_align() -> None:
    """Nemotron-H's sizes in bf16: 30,720 + 1,048,576 elements = 2,158,592 B; a = 8·128·2·2 = 4096; ⌈m/(16·a)⌉ = 33 → 528."""
    model = alternating((24, STATE), (4, FULL))
    found = planned(model)
    assert found.plan.block_size == 528
    assert pool(found) == (4 * 528 * 4096, GIB40 // (4 * 528 * 4096), -(-131072 // 528) + 6)
    assert pool(planned(model, mamba_cache_mode="align"))[2] == -(-131072 // 528) + 12
    assert pool(planned(model, mamba_cache_mode="align", mamba_checkpoint_blocks=1))[2] == -(-131072 // 528) + 18


def test_state_dtypes() -> None:
    """fp32 states double the recurrent part: 61,440 + 4,194,304 = 4,255,744 B, blocks of 65 · 16 = 1040 tokens."""
    model = alternating((24, STATE), (4, FULL))
    assert planned(model, mamba_ssm_cache_dtype="float32").plan.block_size == 1040
    assert load_model("nemotron-h-8b").kinds["mamba2"].entries[-1].dtype == "fp32"  # Nemotron-H's own default
    said = Mamba2(num_heads=128, head_dim=64, state_size=128, n_groups=8, state_dtype="fp32")
    assert planned(alternating((24, said), (4, FULL))).plan.block_size == 1040
    with pytest.raises(UserError, match="state dtype 'int3'"):
        planned(model, mamba_ssm_cache_dtype="int3")


def test_an_fp8_cache_halves_attention_not_states() -> None:
    """a = 2048: ⌈2,158,592 / 32,768⌉ · 16 = 1056 tokens of 2048 B: the page size of bf16."""
    found = planned(alternating((24, STATE), (4, FULL)), Precision(kv_cache_dtype="fp8"))
    assert (found.plan.block_size, found.plan.page_bytes) == (1056, 1056 * 2048)


def test_states_alone() -> None:
    found = planned(alternating((4, STATE)))
    assert found.plan.block_size is None
    assert pool(found)[::2] == (4 * 2_158_592, 1)


def test_states_under_tensor_parallelism() -> None:
    """tp 16 over 8 groups of B and C: a rank has one whole group. 8 heads · 64 + 2 · 128 = 768 channels."""
    found = planned(alternating((4, STATE)), ranks=Parallelism(tp=16))
    assert pool(found)[0] == 4 * 2 * (768 * 3 + 8 * 64 * 128)


LATENT = Latent(num_attention_heads=16, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)
INDEXED = Sparse(
    num_attention_heads=16, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, index_topk=2048,
    index_n_heads=16, index_head_dim=128,
)  # fmt: skip


def test_index_keys_are_132_bytes_whatever_the_cache() -> None:
    for dtype, row in (("auto", 1152), ("bf16", 1152), ("fp8", 656), ("fp8_e4m3", 656), ("nvfp4_ds_mla", 352)):
        found = planned(alternating((4, INDEXED)), Precision(kv_cache_dtype=dtype))
        assert pool(found)[0] == 4 * 64 * (row + 132), dtype


def test_layers_that_reuse_an_index_have_no_index_keys() -> None:
    shared = Sparse(
        num_attention_heads=16, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, index_topk=2048,
        index_n_heads=16, index_head_dim=128, indexer=False,
    )  # fmt: skip
    assert pool(planned(alternating((3, shared), (1, INDEXED))))[0] == 64 * (4 * 1152 + 132)


def test_layers_that_share_a_cache_have_no_pages() -> None:
    kinds = {"own": Layer(parts=(FULL,)), "sharer": Layer(parts=(FULL,), shares_cache=True)}
    model = of_kinds(kinds, layers=8, pattern=("4 own", "4 sharer"), max_context=131072)
    assert pool(planned(model))[0] == 4 * 65_536


def test_latents_beside_states_align_to_128() -> None:
    """A model like Kimi-Linear: a = 1152 B, m = 2,158,592 B: 128 · ⌈m/(128 · 1152)⌉ = 128 · 15 = 1920 tokens."""
    assert planned(alternating((6, STATE), (2, LATENT))).plan.block_size == 1920


def test_blocks_as_asked_and_as_possible() -> None:
    assert planned(alternating((4, FULL)), block_size=32).plan.block_size == 32
    found = planned(alternating((4, LATENT)), block_size=16)
    assert found.plan.block_size == 64
    assert found.notes == ("blocks of 64 tokens: the layers cannot use 16",)
    assert planned(alternating((24, STATE), (4, FULL)), block_size=1024).plan.block_size == 1024


def test_context_parallel_ranks_spread_full_layers() -> None:
    """⌈131072/2⌉ tokens per rank, in blocks of 64."""
    found = planned(alternating((4, LATENT)), ranks=Parallelism(tp=2, dcp=2))
    assert pool(found)[2] == 1024
    with pytest.raises(UserError, match="sliding windows"):
        planned(alternating((4, window(num_key_value_heads=1))), ranks=Parallelism(tp=2, dcp=2))


def test_pipeline_stages_share_the_groups() -> None:
    """10 window layers and 5 full layers over 3 stages of 5 layers: 3 groups of 5. All stages have the blocks of the
    smallest stage."""
    kinds = {"w": Layer(parts=(window(),)), "f": Layer(parts=(FULL,))}
    model = of_kinds(kinds, layers=15, pattern=("2 w", "f"), max_context=131072)
    found = planned(model, ranks=Parallelism(pp=3), max_in_flight_batches=2)
    assert isinstance(found.plan, Vllm)
    assert [len(g.specs) for g in found.plan.groups] == [5, 5, 5]
    assert pool(found)[::2] == (2 * 65_536, 8192 + 2 * 1089)


def test_unequal_pages_of_latents_are_refused_or_fully_allocated() -> None:
    """vLLM allocates a window of keys and values next to latents like full attention, in one group."""
    found = planned(alternating((4, LATENT), (1, window())))
    assert pool(found)[::2] == (4 * 64 * 1152 + 64 * 4096, 2048)
    with pytest.raises(UserError, match="cannot make the pages"):
        group_layers([(0, Spec(SpecKind.FULL, 1152, block=64, latent=True)), (0, Spec(SpecKind.STATE, 100_000))])


def test_what_the_planner_has_no_pages_for() -> None:
    with pytest.raises(UserError, match="no memory rules"):
        planned(stack(Grouped(num_attention_heads=8, num_key_value_heads=8, head_dim=64, cache_budget=64)))
    with pytest.raises(UserError, match="vllm has no cache dtype 'q8_0'"):
        planned(stack(FULL), Precision(kv_cache_dtype="q8_0"))
    with pytest.raises(UserError, match="'turboquant_4bit_nc' is not modelled"):
        planned(stack(FULL), Precision(kv_cache_dtype="turboquant_4bit_nc"))
    with pytest.raises(UserError, match="hybrid cache manager"):
        planned(alternating((6, STATE), (2, window()), (2, FULL)), hybrid=False)


def test_float32_checkpoints_are_cast() -> None:
    found = planned(stack(FULL, dtype="fp32"))
    assert (found.formats.dtype, found.plan.page_bytes) == ("bf16", 65_536)
    assert found.notes == ("vLLM loads a float32 checkpoint as bf16 unless another dtype is requested",)
    assert planned(stack(FULL, dtype="fp32"), Precision("fp32")).plan.page_bytes == 131_072
