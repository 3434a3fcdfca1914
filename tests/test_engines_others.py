"""SGLang's slots, compared with its output, and the content that `none` counts."""

from specs import fitted, hybrid, of_kinds, v4_flash

from kvcalc import Deployment, Layer, Parallelism, Precision, cache_size, load_gpu, load_model
from kvcalc.capacity import FitOptions, fit
from kvcalc.capacity.engines.sglang import SGLang, count_prefill_graphs, static_fraction
from kvcalc.layers.recurrent import Mamba2

MIB, GIB = 2**20, 2**30
H100 = load_gpu("h100")
GEMMA_3_4B = {"heads": 8, "groups": 4, "width": 256, "window": 1024, "local": 29, "full": 5}


def test_sglang_slots_of_sparse_latents() -> None:
    """DeepSeek-V3.2: 656 bytes per token and layer, 788 with the indexer; pages of 64."""
    model = load_model("deepseek-v3.2")
    ranks = Parallelism(dp=8, ep=8)
    run = Deployment(model, load_gpu("h200"), Precision(kv_cache_dtype="fp8"), ranks)
    found = fit(run, FitOptions(engine="sglang"))
    assert isinstance(found.plan, SGLang)
    assert (found.plan.full, found.plan.block_size) == (61 * 788, 64)
    assert found.budget.cache == found.budget.share - found.budget.weights  # activations lie outside its share


def test_sglang_splits_between_windows_and_full_layers() -> None:
    """0.8 window slots per slot: budget ÷ (full + 0.8 · window). 1000 bytes give ⌊1000 / (6 + 0.8 · 5)⌋ = 100 slots."""
    plan = SGLang(full=6, window=5, limit=8, state=0, page=1)
    assert (plan.slots(1000), plan.allocated(1000, 1, 1)) == (100, 600 + 400)
    assert plan.concurrency(1000, 50) == 2.0  # 100 slots; of 80 window slots each takes 8
    assert plan.needed(10, 8) == 1000  # windows decide: 80 window slots need 100 slots
    assert plan.needed(2, 50) == 1000


def test_sglang_splits_between_states_and_tokens() -> None:
    """Nine bytes of states for ten bytes of tokens: of 1900, 1000 are for tokens and 900 for states, with one padding slot."""
    plan = SGLang(full=10, window=0, limit=0, state=100, page=1)
    assert (plan.slots(1900), plan.allocated(1900, 1, 1)) == (100, 1000 + 900)
    assert plan.concurrency(1900, 1) == 8
    assert (plan.needed(8, 1), plan.needed(1, 100)) == (1900, 1900)
    assert plan.max_sequences(1900, 11) == 8
    assert plan.max_sequences(1899, 11) == 7
    assert (plan.slots(2000), plan.allocated(2000, 1, 1)) == (110, 1100 + 900)  # tokens get what makes no whole state


def test_sglang_reserves_for_prefill_graphs() -> None:
    """From 0.5.23 on, 8 MiB for each of 8 + 14 + 8 + 8 + 12 + 8 sizes up to 8192 tokens. Latents reserve 1.5 GiB, pipeline
    stages nothing."""
    assert [count_prefill_graphs(n) for n in (2048, 4096, 8192, 16384)] == [42, 50, 58, 74]
    memory, one = 81_079 * MIB, Parallelism()
    assert static_fraction(memory, 8192, one) == round((81_079 - 13_440 - 8 * 58) / 81_079, 3)
    assert static_fraction(memory, 8192, one, model=load_model("deepseek-v3")) == round((81_079 - 13_440 - 1536) / 81_079, 3)
    assert static_fraction(memory, 8192, Parallelism(pp=2)) == round((81_079 - 13_440 - 128) / 81_079, 3)


def test_sglang_leaves_more_beside_a_vision_tower() -> None:
    """27 layers of 1152 are 1.4238 of 24 layers of 1024: the fraction is multiplied by 0.95 · (1 − 0.04238)."""
    memory, tower = 81_079 * MIB, load_model("gemma-3-27b")
    size = 27 * 1152**2 / (24 * 1024**2)
    assert static_fraction(memory, 8192, Parallelism(), model=tower) == 0.829 * (0.95 * (1 - 0.1 * (size - 1)))


def test_content_is_what_size_counts() -> None:
    model = hybrid(**GEMMA_3_4B)
    found = fitted(model, "none", max_model_len=5000)
    stored = cache_size(model, 5000).stored
    assert found.plan.needed(1, 5000) == stored
    assert found.plan.needed(7, 5000) == 7 * stored
    assert fitted(model, "vllm").content.needed(1, 5000) == stored


def test_content_that_shrinks_counts_its_peak() -> None:
    """Finished compressed blocks drop their buffers: with fewer than 128 tokens, a sequence stored more than with 128."""
    model = v4_flash()
    plan = fitted(model, "none").plan
    for length in (1, 127, 128, 129, 1000):
        peak = max(cache_size(model, s).stored for s in range(max(1, length - 300), length + 1))
        assert plan.needed(1, length) == peak


def test_a_common_prefix_is_stored_once() -> None:
    """3 sequences of 1000 tokens with 600 in common: 600 + 3 · 400 rows in 5 full layers, 3 · 1000 in 29 windows."""
    found = fitted(hybrid(**GEMMA_3_4B), "none")
    row = 4 * 256 * 2 * 2
    assert found.plan.needed(3, 1000, shared=600) == row * (5 * (600 + 1200) + 29 * 3000)
    vllm = fitted(hybrid(**GEMMA_3_4B), "vllm").plan
    blocks = vllm.request_blocks(1000)
    assert blocks == 63 * 7 + 6  # ⌈1000/16⌉ in 7 groups of 5 layers, and one more in 6 of windows
    assert vllm.needed(3, 1000, shared=600) == (vllm.bytes_per_block or 0) * (1 + 3 * blocks - 2 * 37)


def test_states_without_attention_in_every_engine() -> None:
    part = Mamba2(num_heads=8, head_dim=16, state_size=16)
    model = of_kinds({"k": Layer(parts=(part,))}, layers=4)
    for engine in ("none", "vllm", "sglang", "llama.cpp"):
        found = fitted(model, engine)
        assert found.longest_length is None
        assert found.sequences > 0
