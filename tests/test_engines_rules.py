"""Rules of engines at their boundaries, to the byte."""

from specs import fitted, grouped, of_kinds, one_kind

from kvcalc import Layer, Parallelism, load_gpu
from kvcalc.capacity.engines.engine import EngineSettings
from kvcalc.capacity.engines.llama_cpp import LlamaCpp
from kvcalc.capacity.engines.sglang import SGLANG, SGLang, static_fraction
from kvcalc.layers.recurrent import Mamba2

MIB, GIB = 2**20, 2**30
H100 = load_gpu("h100")


# Sharing.


def test_context_parallel_ranks_leave_windows_and_states_whole() -> None:
    """101 tokens with dcp 2: ⌈101/2⌉ = 51 rows of 1 KV head · 16 · 2 · 2 B, 10 rows of the window, and the whole state.

    With tp 2, a rank has 2 of 4 heads: 3 columns of (2 · 8 + 2 · 16) channels in bf16, and 2 · 8 · 16 states in fp32.
    """
    kinds = {
        "full": Layer(parts=(grouped(groups=1),)),
        "near": Layer(parts=(grouped(groups=1, sliding_window=10),)),
        "state": Layer(parts=(Mamba2(num_heads=4, head_dim=8, state_size=16),)),
    }
    model = of_kinds(kinds, layers=3, pattern=("full", "near", "state"), max_context=4096)
    ranks = Parallelism(tp=2, dcp=2)
    assert fitted(model, "none", ranks=ranks).plan.needed(1, 101) == (51 + 10) * 64 + 3 * 48 * 2 + 2 * 8 * 16 * 4
    hybrid = of_kinds({k: kinds[k] for k in ("full", "state")}, layers=2, pattern=("full", "state"), max_context=4096)
    plan = fitted(hybrid, "vllm", ranks=ranks).plan  # m = 288 + 512 B in bf16, a = 64 B: blocks of 16 · ⌈800 / 1024⌉
    assert plan.block_size == 16
    assert [plan.request_blocks(n) for n in (32, 33, 64)] == [1 + 1, 2 + 1, 2 + 1]  # 32 tokens a block, 1 page of state


def test_a_common_prefix_of_a_hybrid() -> None:
    """Sequences do not share states and windows: of 3 sequences of 100 tokens with 50 in common, only full layers share.

    The content is 128 B per row (2 heads · 16 · 2 · 2) in 1 full layer, a window of 20, and a state of 3 · 48 · 2 + 4 · 8
    · 16 · 4 B.
    """
    kinds = {
        "full": Layer(parts=(grouped(),)),
        "near": Layer(parts=(grouped(sliding_window=20),)),
        "state": Layer(parts=(Mamba2(num_heads=4, head_dim=8, state_size=16),)),
    }
    model = of_kinds(kinds, layers=3, pattern=("full", "near", "state"), max_context=4096)
    state = 3 * (4 * 8 + 2 * 16) * 2 + 4 * 8 * 16 * 4
    plan = fitted(model, "none").plan
    assert plan.needed(3, 100, shared=50) == 128 * (50 + 3 * 50) + 3 * (20 * 128 + state)
    assert plan.needed(3, 40, shared=50) == 128 * 40 + 3 * (20 * 128 + state)  # the whole of shorter ones
    vllm = fitted(model, "vllm", max_num_batched_tokens=100, max_in_flight_batches=1).plan
    assert vllm.block_size == 16  # m = 384 + 1024 B: ⌈1408 / (16 · 128)⌉ = 1
    blocks = 7 + (-(-min(19 + 100, 100) // 16) + 1) + 1
    assert vllm.request_blocks(100) == blocks == 16
    assert vllm.needed(3, 100, shared=50) == 2048 * (1 + 3 + 3 * (blocks - 3))  # ⌊50/16⌋ = 3 blocks once


# llama.cpp and SGLang, one past a boundary.


def test_cells_one_past_the_padding() -> None:
    """256 cells and 257, in one cache for all. Windows need 2 · 64 + 128 = 256 cells; with 65 tokens 258, padded to 512."""
    unified = EngineSettings(max_num_batched_tokens=128, kv_unified=True)
    plan = LlamaCpp(full=8, window=2, limit=64, state=0, settings=unified)
    assert [plan.cells(1, n) for n in (1, 256, 257, 512, 513)] == [256, 256, 512, 512, 768]
    assert [plan.cells(2, n) for n in (128, 129)] == [256, 512]
    assert [plan.cells(3, 200, shared=n) for n in (172, 171, 200, 201)] == [256, 512, 256, 256]  # 172 + 3 · 28 = 256
    assert plan.window_cells(2, 4096) == 256
    assert plan.cache_bytes(2, 4096) == 8192 * 8 + 256 * 2
    wider = LlamaCpp(full=8, window=2, limit=65, state=0, settings=unified)
    assert (wider.window_cells(2, 4096), wider.window_cells(2, 100)) == (512, 256)


def test_pages_of_sglang_at_their_boundary() -> None:
    """Pages of 64: 64 tokens need one page, 65 two. 128 slots cost 1280 bytes, and 1279 bytes give one page."""
    plan = SGLang(full=10, window=0, limit=0, state=0, page=64)
    assert [plan.needed(1, n) for n in (1, 64, 65)] == [640, 640, 1280]
    assert [plan.slots(n) for n in (639, 640, 1279, 1280)] == [0, 64, 64, 128]
    assert [plan.num_blocks(n) for n in (639, 640, 1279, 1280)] == [0, 1, 1, 2]
    assert [plan.request_blocks(n) for n in (64, 65)] == [1, 2]
    assert [plan.needed(2, 100, shared=n) for n in (63, 64, 127)] == [2560, 640 * 3, 640 * 3]  # whole pages alone are common
    assert (plan.max_sequences(1280, 64), plan.max_sequences(1279, 64)) == (2, 1)
    assert (plan.max_length(1280, 1), plan.max_length(1279, 1)) == (128, 64)


def test_pools_of_sglang_at_their_boundary() -> None:
    """A window of 8 for 10 slots: 8 sequences need 64 window slots, which 80 full slots include. 9 need 90."""
    plan = SGLang(full=6, window=5, limit=8, state=0, page=1)
    assert [plan.needed(n, 10) for n in (8, 9)] == [80 * 6 + 64 * 5, 90 * 6 + 72 * 5]
    assert [plan.needed(1, n) for n in (7, 8, 9)] == [9 * 6 + 7 * 5, 10 * 6 + 8 * 5, 10 * 6 + 8 * 5]
    assert [plan.max_sequences(n, 10) for n in (799, 800)] == [7, 8]
    states = SGLang(full=10, window=0, limit=0, state=45, page=1)
    assert [states.needed(1, n) for n in (10, 11)] == [190, 209]  # two slots of 45 B beside 100; 11 tokens ask for 110 · 1.9
    assert [states.concurrency(n, 10) for n in (189, 190)] == [0, 1]


def test_states_alone_under_sglang() -> None:
    """Token slots do not limit: 9 of 19 bytes are for states, 900 of 1900, so 8 states of 100 bytes at any length, and one
    for padding."""
    plan = SGLang(full=0, window=0, limit=0, state=100, page=1)
    assert (plan.slots(1900), plan.concurrency(1900, 50), plan.tokens(1900, 50)) == (0, 8, 400)
    assert (plan.max_sequences(1900, 50), plan.max_length(1900, 8), plan.max_length(1900, 9)) == (8, None, 0)
    assert plan.request_bytes(1900, 50) == 1900 // 8  # not a part for each token, because there are no token slots
    assert plan.breakpoints() == [{"from_tokens": 0, "fixed_bytes": 100, "bytes_per_token": 0, "block_tokens": 1, "cause": ""}]


def test_defaults_of_sglang_at_their_boundary() -> None:
    """Graphs of 8 sequences below 20 GiB, 24 from 20 GiB on, 80 from tp 4 on. A minimum of 10 GiB applies only above 60 GiB."""
    tokens, tp4, (older, _) = 2048, Parallelism(tp=4), SGLANG.release("0.5.6")
    for memory, graphs, ranks in ((20 * GIB - MIB, 8, Parallelism()), (20 * GIB, 24, Parallelism()), (20 * GIB, 80, tp4)):
        reserve = 512 + 1.5 * 2048 + 2 * graphs + 128 * ranks.tp
        assert static_fraction(memory, tokens, ranks, older) == round(1 - reserve * MIB / memory, 3)
    reserve = 512 + 1.5 * 2048 + 2 * 256 + 128  # 4224 MiB
    assert static_fraction(60 * GIB, tokens, Parallelism(), older) == round(1 - reserve * MIB / (60 * GIB), 3)
    assert static_fraction(60 * GIB + MIB, tokens, Parallelism(), older) == round(1 - 10 * GIB / (60 * GIB + MIB), 3)
    assert static_fraction(2 * GIB, tokens, Parallelism()) == 0.001  # less than its reserve
    assert [older.batch_defaults(n * GIB + more)[0] for n in (35, 160) for more in (-1, 0)] == [2048, 4096, 8192, 16384]


def test_state_dtypes_under_sglang() -> None:
    """2 layers: 3 columns of 64 channels in bf16, and 4 · 8 · 16 states in fp32 unless two bytes are requested."""
    model = one_kind(Mamba2(num_heads=4, head_dim=8, state_size=16))
    for dtype, size in (("", 4), ("auto", 4), ("float32", 4), ("fp32", 4), ("bf16", 2), ("half", 2)):
        answer = fitted(model, "sglang", mamba_ssm_cache_dtype=dtype)
        assert isinstance(answer.plan, SGLang)
        assert answer.plan.state == 2 * (3 * 64 * 2 + 512 * size)
        assert answer.content.needed(1, 5) == answer.plan.state
