"""vLLM and DeepSeek-V4: loaded bytes, bytes of a pass and blocks, by hand and compared with published starts."""

import pytest
from msgspec.structs import replace

from kvcalc import Deployment, Model, Parallelism, Precision, load_gpu, load_model
from kvcalc.capacity import Fit, FitOptions, fit
from kvcalc.capacity.memory_budget import mtp_weights
from kvcalc.model.memory import stage_weight_bytes
from kvcalc.model.pipeline import stages
from kvcalc.model.precision import formats_of

MIB, GIB = 2**20, 2**30
FLASH = load_model("deepseek-v4-flash")
FORMATS = formats_of(FLASH, Precision())


def asked(version: str, gpu: str = "gh200", tokens: int = 16_384, tp: int = 2, mtp: bool = False, model: Model = FLASH) -> Fit:
    options = FitOptions(
        engine="vllm",
        engine_version=version,
        max_num_batched_tokens=tokens,
        max_model_len=30_000,
        gpu_memory_utilization=0.95,
        mtp=mtp,
    )
    return fit(Deployment(model, load_gpu(gpu), parallelism=Parallelism(tp=tp, ep=tp)), options)


@pytest.mark.parametrize(
    ("version", "unit", "passes"), [("0.24", 1_002_240, 1), ("0.25.1", 1_002_240, 1), ("0.26", 1_002_240, 2)]
)
def test_blocks_by_version(version: str, unit: int, passes: int) -> None:
    """Windows reserve for every pass in flight from 0.26 on."""
    plan = asked(version, tokens=1024).plan
    assert plan.bytes_per_block == unit
    flying = 1024 * passes
    each = [-(-(limit - 1 + flying) // block) + 1 for limit, block in ((128, 64), (128, 64), (8, 4), (128, 8))]
    assert plan.request_blocks(30_000) == sum(each) + 118


def test_what_is_stored() -> None:
    """Compressors are in bf16, the mixers of streams in fp32. With its prediction layer, the checkpoint has 148.66 GiB."""
    found = {name.partition(".")[2] or name: FORMATS.weight_format(name, w).name for name, w, _ in FLASH.walk()}
    bf16 = ("compress_kv", "compress_gate", "index_kv", "index_gate", "index_weights", "router", "lm_head", "embedding")
    assert {found[name] for name in bf16} == {"bf16"}
    assert {found[name] for name in ("mixer_streams", "ffn_streams", "stream_head")} == {"fp32"}
    assert {found[name] for name in ("q_up", "index_q", "o_up", "shared.up")} == {"fp8_block128"}
    hashed = 3 * 129_280 * 6 * 8  # the experts of each token in the first three layers, as whole numbers
    whole = (
        stage_weight_bytes(FLASH, stages(FLASH, 1)[0], FORMATS, Parallelism())
        + mtp_weights(FLASH, FORMATS, Parallelism())
        + hashed
    )
    assert whole / GIB == pytest.approx(148.66, abs=0.02)


def test_tables_and_buffers() -> None:
    """Two tables of 1,048,576 positions in fp32, 512 selected entries per token, and four streams for prediction layers.

    From 0.27 on, the streams count only if there are prediction layers.
    """
    extra = asked("0.22").terms.extra
    assert extra["rotary tables"] == 2 * 1_048_576 * 64 * 4
    chosen, streams = 16_384 * 512 * 4, 16_384 * 4 * 4096 * 2
    assert extra["buffers of a pass"] == chosen + streams
    assert asked("0.27").terms.extra["buffers of a pass"] == chosen
    assert asked("0.27", mtp=True).terms.extra["buffers of a pass"] == chosen + streams


@pytest.mark.parametrize(
    ("version", "gpu", "tokens", "tp", "mtp", "logged"),
    [("0.31", "h100", 8192, 8, False, 19.79), ("0.22", "rtx-pro-6000", 8192, 2, True, 75.79)],
)
def test_weights_of_published_starts(version: str, gpu: str, tokens: int, tp: int, mtp: bool, logged: float) -> None:
    assert asked(version, gpu, tokens, tp, mtp).budget.weights / GIB == pytest.approx(logged, rel=0.005)


def test_what_stands_around_an_attention() -> None:
    """16,384 tokens on two ranks: 32 heads, padded to 64, and an indexer of 64 heads of 128, in bf16 and fp8, with 512 MiB
    of logits.

    Streams, input, output and queries, the outputs of the projections (compressors' in fp32), and the experts' workspace:
    six rows per token, of twice 4,096.
    """
    tokens = 16_384
    width = 4 * 4096 + 4096 + 2 * 64 * 512 + 1024 + 512 + 2 * 2 * 2 * (512 + 128)
    around = tokens * (2 * width + 3 * 64 * 128) + 512 * MIB
    terms = asked("0.22").terms
    experts = 32 * MIB + tokens * 2 * 6 * (4096 + 4096)
    assert (terms.activation, terms.peak) == (around + experts, "forward pass")
    # Without an indexer, a compressor projects to 512 elements once, and 32 heads of unpadded queries count.
    heavy = replace(FLASH, pattern=("compressed_3",) * 43)
    around = tokens * 2 * (4 * 4096 + 4096 + (2 * 64 + 1) * 512 + 1024 + 2 * 2 * 512 + 32 * 512)
    assert asked("0.22", model=heavy).terms.activation == around + experts


def test_graphs_hold_logits_where_pieces_have_no_cache() -> None:
    """51 sizes in pieces and as one graph, 0.07 + 0.11 · 4/2 GiB and the logits. With the second runner there are no logits."""
    graphs = asked("0.22").terms.overhead["CUDA graphs"]
    assert graphs == 102 * MIB + int((0.07 + 0.11 * 2) * GIB) + 512 * MIB
    assert asked("0.31").terms.overhead["CUDA graphs"] == 102 * MIB + int((0.07 + 0.11 * 2) * GIB)


def test_the_low_end_holds_what_no_source_shows() -> None:
    """A GH200 had 5.44 GiB left, 3.3 GiB less than the terms from vLLM's source."""
    left = asked("0.22").remaining
    assert left["low"] / GIB < 5.44 < left["middle"] / GIB < 8.8


def test_an_indexer_s_logits_stand_where_they_are_more() -> None:
    """DeepSeek-V3.2 on 16 ranks would project 65,536 tokens to 8 heads of 128 + 128 in bf16. 512 MiB of logits are more and
    count instead.

    An indexer's 64 queries and key of 128, and 64 weights, also widen a pass of 8192 tokens, compared with V3.
    """
    run = Deployment(load_model("deepseek-v3.2"), load_gpu("h200"), parallelism=Parallelism(tp=16, ep=16))
    options = FitOptions(engine="vllm", max_num_seqs=8, enforce_eager=True)
    dense = Deployment(load_model("deepseek-v3"), run.gpu, parallelism=run.parallelism)
    wider = 8192 * 2 * (64 * 128 + 128 + 64)
    grown = fit(run, options).terms.activation - fit(dense, options).terms.activation
    assert grown == wider + 512 * MIB - 2 * 65_536 * 8 * (128 + 128)
