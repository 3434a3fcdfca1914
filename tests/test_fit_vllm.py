"""vLLM's memory outside the cache: by hand, by release, and compared with published starts."""

from typing import Any

import msgspec
import pytest
from specs import grouped, of_kinds

from kvcalc import Deployment, Layer, Model, Parallelism, Precision, UserError, load_gpu, load_model
from kvcalc.capacity import Fit, FitOptions, fit
from kvcalc.capacity.engines.vllm import VLLM
from kvcalc.capacity.engines.vllm_memory import allocated, count_graphs
from kvcalc.capacity.engines.vllm_versions import RELEASES, defaults
from kvcalc.capacity.memory_budget import ESTIMATES
from kvcalc.layers.feed_forward import Dense
from kvcalc.model.model import Vision

MIB, GIB = 2**20, 2**30
H100 = "h100-sxm"


def asked(
    model: Model | str,
    gpu: str = H100,
    version: str = "0.11",
    ranks: Parallelism | None = None,
    weights: str = "",
    **options: Any,
) -> Fit:
    spec = load_model(model) if isinstance(model, str) else model
    run = Deployment(spec, load_gpu(gpu), Precision(quantization=weights), ranks or Parallelism())
    return fit(run, FitOptions(engine="vllm", engine_version=version, **options))


def small(**fields: Any) -> Model:
    return of_kinds({"k": Layer(parts=(grouped(), Dense(intermediate_size=128)))}, layers=4, max_context=4096, **fields)


# (model, weights in, GPU, version, tp, options): GiB of "Model loading took" and "Available KV cache memory" in the logs.
LOGGED = [
    ("llama-3.1-8b", "", H100, "0.11", 1, {}, 14.99, 51.38), ("qwen3-0.6b", "", H100, "0.11", 1, {}, 1.12, 64.45),
    ("qwen3-32b", "", H100, "0.11", 1, {}, 61.03, 4.45), ("gpt-oss-20b", "", H100, "0.11", 1, {}, 13.47, 50.28),
    ("llama-3.3-70b", "fp8_per_channel", H100, "0.11", 2, {}, 33.88, 32.0),
    ("llama-3.3-70b", "fp8_per_channel", H100, "0.11", 1, {}, 67.72, -1.44),  # it did not start
    ("qwen3-14b", "", "l40s", "0.28", 1, {}, 27.52, 11.57), ("gemma-3-4b", "", "b200", "0.10", 1, {}, 8.58, 141.92),
    ("qwen3-8b", "", "rtx-5090", "0.24", 1, {}, 15.27, 12.23),
]  # fmt: skip


@pytest.mark.parametrize(("model", "weights", "gpu", "version", "tp", "options", "loaded", "left"), LOGGED)
def test_published_starts(
    model: str, weights: str, gpu: str, version: str, tp: int, options: dict[str, Any], loaded: float, left: float
) -> None:
    """Predictions are within the tolerance of a log's two digits and of the constants, and inside the stated range."""
    found = asked(model, gpu, version, Parallelism(tp=tp), weights, **options)
    assert found.budget.weights / GIB == pytest.approx(loaded, abs=0.07)
    assert found.remaining["middle"] / GIB == pytest.approx(left, abs=0.18)
    assert found.remaining["low"] / GIB < left < found.remaining["high"] / GIB
    assert (found.shortage_bytes > 0) == (left < 0)


def test_the_sampler_sets_the_peak() -> None:
    """1024 requests with 128,256 entries: 38 bytes each; 8192 hidden states of 4096 in bf16, and 2 · 1024 more; 32 MiB of
    workspace.

    The log prints 4.76 GiB.
    """
    terms = asked("llama-3.1-8b").terms
    assert terms.activation == 38 * 1024 * 128_256 + 2 * 4096 * (8192 + 2 * 1024) + 32 * MIB == 5_108_137_984
    assert terms.peak == "sampler"
    few = asked("llama-3.1-8b", max_num_seqs=64).terms.activation  # 50 bytes below 128 requests; the pass needs more
    assert few == int(2 * 8192 * (3 * 14_336 + 3.8 * 4096)) + 32 * MIB
    many = asked("llama-3.1-8b", "l40s", max_num_seqs=127).terms.activation
    assert many == 50 * 127 * 128_256 + 2 * 4096 * (2048 + 2 * 127) + 8 * MIB


def test_a_network_without_a_gate_holds_what_it_is_and_what_is_made_of_it() -> None:
    """A token has 600 elements before the activation and 600 after it, in addition to 3.8 · 64. q, k, v and o have only 256."""
    plain = of_kinds({"k": Layer(parts=(grouped(), Dense(intermediate_size=600, gated=False)))}, layers=1, max_context=4096)
    terms = asked(plain, max_num_seqs=64).terms
    assert (terms.peak, terms.activation) == ("forward pass", int(8192 * (2 * 600 + 3.8 * 64) * 2) + 32 * MIB)


def test_a_first_start_compiles() -> None:
    """From 0.11.1 on: a copy of the token table, 151,936 · 1024 in bf16, the L2 cache and the pass's input. Not in eager
    mode or with a compilation cache."""
    l2 = load_gpu("l40s").l2_bytes
    assert l2
    first = asked("qwen3-0.6b", "l40s", "0.24")
    assert first.terms.activation == 2 * 1024 * (151_936 + 2048) + l2 + 8 * MIB
    assert first.terms.peak == "compilation"
    assert asked("qwen3-0.6b", "l40s", "0.24", enforce_eager=True).terms.peak == "sampler"


def test_kernels_need_no_sort() -> None:
    """0.19, first runner: 14 bytes, and a buffer of 128 programs by 151,936 · 4 bytes remains (142 SMs; 256 requests)."""
    terms = asked("qwen3-14b", "l40s", "0.19", max_num_batched_tokens=2048, enforce_eager=True).terms
    assert terms.activation == 14 * 256 * 151_936 + 2 * 5120 * (2048 + 512) + 8 * MIB
    assert terms.overhead["sampler's buffers"] == 142 * 151_936 * 4  # 256 programs would be more than there are SMs
    few = asked("qwen3-14b", "l40s", "0.19", max_num_seqs=100).terms
    assert few.overhead["sampler's buffers"] == 128 * 151_936 * 4


def test_graphs_are_counted_from_0_20_on() -> None:
    """256 requests: sizes 1, 2, 4, 31 in steps of 8, 17 in steps of 16 up to 512. 35 of them are up to 256. Constants add
    0.07 + 0.11 · 5120/1024 GiB."""
    counted = asked("qwen3-32b", "l40s", "0.20", Parallelism(tp=4)).terms.overhead["CUDA graphs"]
    assert counted == (51 + 35) * MIB + int((0.07 + 0.11 * 5 / 4) * GIB)
    assert "CUDA graphs" not in asked("qwen3-32b", "l40s", "0.19", Parallelism(tp=4)).terms.overhead
    assert "CUDA graphs" not in asked("qwen3-32b", "l40s", "0.24", Parallelism(tp=4)).terms.overhead  # second runner
    assert "CUDA graphs" not in asked("qwen3-32b", "l40s", "0.20", Parallelism(tp=4), enforce_eager=True).terms.overhead


def test_sizes_that_graphs_are_captured_at() -> None:
    """1, 2, 4, 8 and so on to 200, and as one graph up to 96. From 256 to 512 in steps of 16, as one graph up to 256. Never
    above the tokens of a pass."""
    assert count_graphs(8192, 100) == (3 + 25) + (3 + 12)
    assert count_graphs(8192, 256) == (3 + 31 + 17) + (3 + 31 + 1)
    assert count_graphs(64, 256) == 2 * (3 + 8)


def test_the_second_runner_counts_penalties_where_all_is_counted() -> None:
    """4.125 bytes per request and entry from 0.27 on; none in 0.24."""
    assert "sampler's buffers" not in asked("qwen3-14b", "l40s", "0.24").terms.overhead
    kept = asked("qwen3-14b", "l40s", "0.28").terms.overhead["sampler's buffers"]
    assert kept == 256 * 151_936 * 33 // 8


@pytest.mark.parametrize(
    ("version", "gpu", "model", "tokens", "sequences"),
    [
        # A100s are among the small
        ("0.9.1", "a100-80gb", "llama-3.1-8b", 2048, 256),
        ("0.10.2", "t4", "llama-3.2-3b", 2048, 256), ("0.11", "h100", "falcon-h1-7b", 8192, 1024),
        ("0.32", "dgx-spark", "qwen3-8b", 8192, 1024), ("0.33", "dgx-spark", "qwen3-8b", 2048, 256),
    ],
)  # fmt: skip
def test_passes_and_sequences_of_a_release(version: str, gpu: str, model: str, tokens: int, sequences: int) -> None:
    """Source: engine/arg_utils.py of 0.9.1 to 0.10.2 and 0.33."""
    chosen = defaults(load_gpu(gpu), Parallelism(), VLLM.release(version)[0], 0, load_model(model))
    assert (chosen.tokens, chosen.sequences) == (tokens, sequences)


@pytest.mark.parametrize(("version", "gpu", "model"), [("0.10.1", "t4", "llama-3.2-3b"), ("0.10.1", "h100", "falcon-h1-7b")])
def test_v0_is_refused(version: str, gpu: str, model: str) -> None:
    """Up to 0.10.2, V0 runs on Turing and Volta, and models with states. Before 0.8, it runs everywhere."""
    with pytest.raises(UserError, match=r"V0 engine.*0\.10\.2"):
        asked(model, gpu, version)
    for text in ("0.7.3", "0.5", "0.6.3.post1"):
        with pytest.raises(UserError, match=rf"vLLM {text} is not predicted: the oldest supported release is 0\.8$"):
            FitOptions(engine="vllm", engine_version=text)


def test_the_nearest_older_version_is_taken_and_named() -> None:
    known = [r.since for r in RELEASES]
    assert known == sorted(known)
    for text, since, said in (
        ("0.11", (0, 11, 0), ""), ("0.11.2", (0, 11, 2), ""), ("latest", known[-1], ""), ("", known[-1], ""),
        ("v0.12.4", (0, 12, 0), "vLLM 0.12.4: by the rules of 0.12.0, the nearest older version known"),
        ("0.99.1", known[-1], f"vLLM 0.99.1: by the rules of {'.'.join(map(str, known[-1]))}, the nearest older version known"),
        ("0.8.0", (0, 9, 1), "vLLM 0.8.0: by the rules of 0.9.1, the oldest version known"),
        ("0.10.1.1", (0, 10, 1), ""), ("0.28.0rc1", (0, 28, 0), ""),
    ):  # fmt: skip
        assert (VLLM.release(text)[0].since, VLLM.release(text)[1]) == (since, said)
    assert "by the rules of 0.12.0" in "".join(asked("qwen3-0.6b", version="0.12.4").notes)


def test_what_the_allocator_rounds() -> None:
    """Sizes are rounded to 512 bytes. From 10 MiB on, segments have steps of 2 MiB, and a rest of at most 1 MiB counts."""
    assert [allocated(n) for n in (1, 512, 10 * MIB - 1, 10 * MIB, 10 * MIB + 1)] == [
        512,
        512,
        10 * MIB,
        10 * MIB,
        10 * MIB + 512,
    ]
    assert allocated(11 * MIB) == 12 * MIB
    assert allocated(11 * MIB - 512) == 11 * MIB - 512
    assert allocated(10 * MIB - 512) == 10 * MIB - 512  # of a smaller tensor's segment the rest is used


def test_experts_in_mxfp4_are_padded() -> None:
    """gpt-oss-120b with tp 4 on A100s: Marlin pads 2880 to 3072 inputs and 720 to 768. The log prints 17.2217 GiB per GPU.

    128 experts in 36 layers: gate and up 3072 · 1536 and down 768 · 3072, in 17 bytes per 32 values, with biases in bf16.
    """
    found = asked("gpt-oss-120b", "a100-80gb", "0.10.1", Parallelism(tp=4))
    padded = 36 * 128 * (3072 * 3 * 768 * 17 // 32 + 2 * (2 * 768 + 3072))
    stored = 36 * 128 * (2880 * 3 * 720 * 17 // 32 + 2 * (2 * 720 + 2880))
    assert padded - stored < found.terms.extra["padding and rounding"] < padded - stored + 40 * MIB
    assert found.budget.weights / GIB == pytest.approx(17.2217, abs=0.02)


def test_a_vision_tower_is_loaded_unless_no_image_may_come() -> None:
    """1000 parameters in bf16 on the first stage, split over tp if the tower is. A table has 2 bytes per position and width."""
    tower = Vision(parameters=1000, width=8, mlp=32, layers=1, patches=16, tokens=4, values=12)
    model = small(vision=tower, rope_tables=((10, 4), (20, 8)))
    assert asked(model).terms.extra == {"rotary tables": 2 * (10 * 4 + 20 * 8), "vision tower": 2000}
    whole = msgspec.structs.replace(model, vision=msgspec.structs.replace(tower, sharded=False))
    two = Parallelism(tp=2)
    assert [asked(m, ranks=two).terms.extra["vision tower"] for m in (model, whole)] == [1000, 2000]
    for limit in ("image=0", '{"image": 0, "video": 0}'):
        assert "vision tower" not in asked(model, limit_mm_per_prompt=limit).terms.extra
    assert asked(model, limit_mm_per_prompt="image=0,video=1").terms.extra["vision tower"] == 2000


@pytest.mark.parametrize("model", ["llama-3.1-8b", "gemma-3-27b", "qwen3.5-35b-a3b", "gpt-oss-20b"])
@pytest.mark.parametrize("version", ["0.10.2", "0.14.1", "0.20", "0.28", "0.33"])
def test_the_range_holds_its_middle(model: str, version: str) -> None:
    left = asked(model, version=version).remaining
    low, middle, high = (left[end] for end in ESTIMATES)
    assert low < middle < high


def test_scales_of_bitsandbytes_are_plain_once_loaded() -> None:
    """A file stores an int8 scale per 64 weights, and four bytes per 256 scales. Loaded scales have four bytes each, as
    without nesting."""
    extra, made = (asked("llama-3.1-8b", version="0.10", weights=name).terms.extra for name in ("bnb-nf4", "nf4"))
    matrices = 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14_336)
    nested, plain = matrices // 64 + 4 * (matrices // 64 // 256), 4 * (matrices // 64)
    assert 0 <= extra["padding and rounding"] - (plain - nested) < 2 * 32 * 4 * MIB  # segments
    assert made == extra  # made as it loads: nested too


def test_quantised_latents_are_kept_in_16_bits_too() -> None:
    """DeepSeek-V3 with tp 8: 61 layers of 16 heads · 256 by 512, in bf16 in addition to fp8. A plain kv_up needs no copy."""
    eight = Parallelism(tp=8)
    assert asked("deepseek-v3", "h200", ranks=eight).terms.extra["absorbed projections"] == 2 * 61 * 16 * 256 * 512
    assert "absorbed projections" not in asked("deepseek-v3", "h200", ranks=eight, weights="bf16").terms.extra
    assert "absorbed projections" not in asked("kimi-k2.5", "h200", ranks=eight).terms.extra


def test_tables_of_ngrams_stay_with_the_host() -> None:
    """320,001,536 rows of 160 in bf16, an eighth of them per GPU with tp 8."""
    assert asked("qwen3.8-flash-next", ranks=Parallelism(tp=8, ep=8)).terms.host == 320_001_536 // 8 * 160 * 2


@pytest.mark.parametrize(
    ("version", "model", "flights"),
    [
        ("0.25.1", "gemma-3-27b", 1), ("0.26", "gpt-oss-20b", 2), ("0.28", "gemma-3-27b", 3), ("0.28", "gpt-oss-20b", 2),
        ("0.29", "gpt-oss-20b", 3),
    ],
)  # fmt: skip
def test_passes_in_flight_on_two_stages(version: str, model: str, flights: int) -> None:
    """Windows reserve for one pass before 0.26, then for one per stage, and with the second runner (dense models up to 0.28)
    one more."""
    rules, _ = VLLM.release(version)
    assert defaults(load_gpu("h100"), Parallelism(pp=2), rules, 0, load_model(model)).in_flight_batches == flights


def test_images_of_the_profile() -> None:
    """gemma-3: 256 tokens for an image of 4096 patches, so 32 images in a pass of 8192, and 3 images in 3 requests with one
    each.

    A patch needs 588 values, 4 · 1152 and 2 · 4304 in two bytes. With one request and no limit, the pass is full again.
    After the encoder, each image keeps 256 outputs of 2560, and its pixels.
    """

    def peak(limit: str, requests: int) -> tuple[str, int]:
        terms = asked("gemma-3-4b", version="0.28", max_num_seqs=requests, limit_mm_per_prompt=limit, enforce_eager=True).terms
        return terms.peak, terms.activation

    full = "vision encoder", 32 * 2 * 4096 * (588 + 4 * 1152 + 2 * 4304) + 32 * MIB
    assert peak("image=1", 64) == peak("", 1) == full
    (step, three), (_, four) = peak("image=1", 3), peak("image=1", 4)
    assert (step, four - three) == ("forward pass", 2 * 256 * 2560 + 2 * 4096 * 588)


def test_workspaces_of_experts_stay_beside_the_sample() -> None:
    """qwen3-30b-a3b at 2048 tokens: 8 rows of 2048 and of 2048 (2 · 768 and 768 are less), in bf16.

    In earlier releases the workspace counts as a layer's widest part. Marlin's workspace for int4 never remains. The
    sample has 256 requests of 151,936 entries, sorted up to 0.16.
    """
    kept = 2 * 2048 * 8 * (2048 + 2048)
    sample = 38 * 256 * 151_936 + 2 * 2048 * (2048 + 512) + 8 * MIB

    def activation(version: str, weights: str = "") -> int:
        return asked("qwen3-30b-a3b", "l40s", version, weights=weights, max_model_len=4096, enforce_eager=True).terms.activation

    assert activation("0.14.1", "awq") == sample
    assert activation("0.14.1") == activation("0.14.1", "fp8") == sample + kept
