"""Latent-attention modules: shared operators take equal time in each variant, and a module's overhead is a separate row."""

from itertools import pairwise

import numpy as np
import pytest
from conftest import Run
from hypothesis import given
from hypothesis import strategies as st

from kvcalc.gpu.gpu import Gpu
from kvcalc.layers.batch import Batch, Parallelism, Sequences
from kvcalc.library.load import load_gpu, load_model
from kvcalc.model.forward_pass import forward
from kvcalc.timing.calibration import Calibration, KernelModelEntry, find_calibration
from kvcalc.timing.fitting import calibrate, select_rows
from kvcalc.timing.kernel_models.families import AnyKernelModel
from kvcalc.timing.kernel_models.gemm import Gemm, QuantizedGemm
from kvcalc.timing.kernel_models.kernel_model import figures_of
from kvcalc.timing.kernel_models.mla import MlaDecode, MlaModule, SparseDecode
from kvcalc.timing.kernel_times import mla_kernels_us
from kvcalc.timing.rows import MeasuredRow, MeasurementFile
from kvcalc.timing.steps import operator_seconds, pass_time

H100 = load_gpu("h100")
TP8 = Parallelism(tp=8)
MEASURED = [(gpu, stack) for gpu in ("h100", "h200", "b200", "gb300") for stack in ("vllm", "sglang", "trtllm")]


def entry(law: AnyKernelModel) -> KernelModelEntry:
    return KernelModelEntry(law=law, rows=100, median_abs_error=0.05, p90_abs_error=0.1)


def with_modules(sparse: SparseDecode, dense: MlaModule | None) -> Calibration:
    """Return a calibration with kernel models of GEMMs and attention, and with modules of these times."""
    laws = {
        "gemm": {"bfloat16": entry(Gemm()), "fp8_block": entry(QuantizedGemm())},
        "mla_decode": {"bfloat16": entry(MlaDecode())},
        "dsa_decode_module": {"bfloat16/fp8_block": entry(sparse)},
    }
    if dense:
        laws["mla_decode_module"] = {"bfloat16/fp8_block": entry(dense)}
    return Calibration(gpu="h100-sxm", stack="mine", laws=laws)


def times_of(name: str, batch: Batch, gpu: Gpu, laws: Calibration) -> dict[tuple[str, str], tuple[object, float]]:
    """Return the shape and the seconds of each operator of a model, by its layer and name."""
    operators = forward(load_model(name), batch, parallelism=TP8)
    timed = operator_seconds(operators, gpu, laws)
    return {(o.layer, o.name): (o.shape or o.cost, t.seconds) for o, t in zip(operators, timed, strict=True)}


sparse_laws = st.builds(
    SparseDecode, bytes=st.just(1.0), t0=st.floats(1, 400), ti=st.floats(1, 150), em=st.floats(0.1, 1.2), ei=st.floats(0.1, 1.2),
    ta=st.floats(1, 100), ts=st.floats(1e-4, 0.1),
)  # fmt: skip
dense_laws = st.builds(MlaModule, t0=st.floats(0.1, 150), th=st.floats(0.001, 2), tb=st.floats(1e-4, 1))


@given(
    st.one_of(st.sampled_from(MEASURED), st.tuples(sparse_laws, st.none() | dense_laws)),
    st.integers(1, 512), st.integers(1, 150_000), st.sampled_from(("decode", "prefill")),
)  # fmt: skip
def test_an_operator_that_two_variants_share_takes_the_same_time_in_both(
    source: tuple[object, object], sequences: int, context: int, phase: str
) -> None:
    """DeepSeek-V3 with MLA and with DSA: operators with equal name, layer and shape, under any calibration."""
    if isinstance(source[0], str):
        gpu = load_gpu(source[0])
        laws = find_calibration(gpu, str(source[1]))
        assert laws
    else:
        gpu, laws = H100, with_modules(*source)  # type: ignore[arg-type]
    batch = Batch.of_phase(phase, min(context, 20_000) if phase == "prefill" else context, sequences)
    dense, sparse = (times_of(name, batch, gpu, laws) for name in ("deepseek-v3", "deepseek-v3.2"))
    shared = [key for key in dense.keys() & sparse.keys() if dense[key][0] == sparse[key][0]]
    assert {name for _, name in shared} >= {"qkv_down", "q_up", "o", "experts", "all_reduce"}
    assert all(dense[key][1] == sparse[key][1] for key in shared)


@given(sparse_laws, st.none() | dense_laws, st.integers(1, 512), st.integers(1, 150_000))
def test_a_sparse_module_takes_as_much_longer_than_mla_as_it_was_measured(
    sparse: SparseDecode, dense: MlaModule | None, sequences: int, context: int
) -> None:
    """Its operators and overhead: the module minus MLA's overhead for one token, and at least its operators."""
    operators = forward(load_model("deepseek-v3.2"), Batch.decode(context, sequences), parallelism=TP8)
    laws = with_modules(sparse, dense)
    timed = operator_seconds(operators, H100, laws)
    sizes = (sequences, 16, context, 7168, 1536, 512, 64, 128, 128, 64, 128, 2048)
    whole = float(sparse.us(figures_of(H100), *(np.array([float(x)]) for x in sizes))[0])
    beside = float(dense.overhead_us(np.array([1.0]), np.array([16.0]))[0]) if dense else 0.0
    for layer, count in (("dense", 3), ("moe", 58)):
        members = [t for o, t in zip(operators, timed, strict=True) if o.module and o.layer == layer]
        kernels = sum(t.seconds for t in members) * 1e6 / count
        (overhead,) = [t.overhead for t in members if t.overhead]
        assert overhead.seconds * 1e6 / count == pytest.approx(max(0.0, whole - beside - kernels), abs=1e-6)
    summed = sum(one.seconds for t in timed for one in t.parts)
    assert pass_time(operators, H100, laws).seconds == pytest.approx(summed + 61 * 8e-6)
    assert not any(o.module for o in operators if o.kind == "network")


def test_in_a_measured_decode_step_indexer_and_choice_rest_on_the_module_s_rows() -> None:
    """For prompts there are no rows, so the indexer takes 80% of the bf16 peak: 2 · 64 · 128 FLOPs a pair and layer."""
    laws = with_modules(SparseDecode(bytes=1.0), None)
    found = {}
    for batch in (Batch.decode(8192, 4), Batch.prefill(8192)):
        operators = forward(load_model("deepseek-v3.2"), batch, parallelism=TP8)
        timed = operator_seconds(operators, H100, laws)
        found[batch.decodes] = [t.basis for o, t in zip(operators, timed, strict=True) if o.name in ("indexer", "top_k")]
    assert found == {True: ["calibrated"] * 4, False: ["scaled"] * 4}
    index = next(t for o, t in zip(operators, timed, strict=True) if o.name == "indexer")
    assert index.seconds == pytest.approx(3 * (8192 * 8193 / 2) * 2 * 64 * 128 / (0.8 * 989e12))


@pytest.mark.parametrize(("gpu", "stack"), MEASURED)
def test_more_new_tokens_never_take_a_sparse_module_less_time(gpu: str, stack: str) -> None:
    """Tokens of one sequence across the boundary between decode and prefill kernels, as arrays and one by one."""
    laws, machine = find_calibration(load_gpu(gpu), stack), load_gpu(gpu)
    assert laws
    new = np.array([1.0, 2, 4, 8, 12, 15, 16])
    operators = forward(load_model("deepseek-v3.2"), Batch((Sequences(2, new, 4000),)), parallelism=TP8)
    each = [t for o, t in zip(operators, operator_seconds(operators, machine, laws), strict=True) if o.module]
    whole = sum(np.asarray(one.seconds) * np.ones(len(new)) for t in each for one in t.parts)
    assert all(a <= b * (1 + 1e-12) for a, b in pairwise(whole.tolist()))
    steps = [forward(load_model("deepseek-v3.2"), Batch((Sequences(2, n, 4000),)), parallelism=TP8) for n in (1, 16, 17, 500)]
    many = forward(load_model("deepseek-v3.2"), Batch((Sequences(2, np.array([1.0, 16, 17, 500]), 4000),)), parallelism=TP8)
    assert pass_time(many, machine, laws).seconds.tolist() == pytest.approx(
        [pass_time(one, machine, laws).seconds for one in steps]
    )


def test_the_overhead_of_an_mla_module_by_hand() -> None:
    """16 heads: 10 + 2·log2(8) + 0.5·16 + 8·(0.25 + 0.0625·16) = 34 µs for 8 tokens. Above 1,024 tokens it is constant."""
    law = MlaModule(t0=10, t1=2, th=0.5, tb=0.25, tbh=0.0625)
    tokens, heads = np.array([8.0, 1024, 4096]), np.array([16.0, 16, 16])
    assert law.overhead_us(tokens, heads).tolist() == [34.0, 1318.0, 1318.0]
    assert law.us(figures_of(H100), tokens, heads, tokens, np.array([40.0, 0, 0])).tolist() == [74.0, 1318.0, 1318.0]


def test_a_module_s_overhead_is_fitted_beyond_its_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times of known kernels plus a known overhead give this overhead. Without a kernel model of attention, there is none."""
    for name in ("STARTS", "FOLD_STARTS"):
        monkeypatch.setattr(f"kvcalc.timing.fitting.{name}", 1)
    figures, true = figures_of(H100), MlaModule(t0=30, t1=3, th=0.1, tb=0.02, tbh=1e-3)
    kernels = Calibration(
        gpu="h100-sxm", stack="mine", laws={"gemm": {"bfloat16": entry(Gemm())}, "mla_decode": {"bfloat16": entry(MlaDecode())}}
    )
    at = np.arange(24)
    modules = 2.0 ** (at % 10), 2.0 ** (at % 8), 2.0 ** (4 + at * 5 % 13)
    us = mla_kernels_us("bfloat16/bfloat16", modules, figures, kernels)
    assert us is not None
    shapes = {
        "gemm": (2.0 ** (at % 11), 1024.0 * (1 + at * 7 % 16), 512.0 * (1 + at * 11 % 20)),
        "mla_decode": modules,
        "mla_decode_module": modules,
    }
    times = {
        "gemm": Gemm().us(figures, *shapes["gemm"]),
        "mla_decode": MlaDecode().us(figures, *modules),
        "mla_decode_module": us + true.overhead_us(*modules[:2]),
    }
    rows = [
        MeasuredRow(
            i, op, "h100", "mine", "bfloat16/bfloat16" if op.endswith("module") else "bfloat16",
            tuple(float(column[i]) for column in shapes[op]), float(times[op][i]), "", "1.0",
        )
        for op in shapes for i in range(len(at))
    ]  # fmt: skip
    fitted = {fit.family: fit for fit in calibrate(rows, H100, "mine")}["mla_decode_module"].entry
    assert fitted and isinstance(fitted.law, MlaModule)
    assert fitted.median_abs_error < 0.03
    assert fitted.law.overhead_us(*modules[:2]) == pytest.approx(true.overhead_us(*modules[:2]), rel=0.15)
    alone = calibrate([row for row in rows if row.op != "mla_decode"], H100, "mine")
    assert [(f.entry, f.why) for f in alone if f.family == "mla_decode_module"] == [(None, "no law of its kernels")]


@pytest.mark.parametrize(("own", "lent"), [(0, 2), (1, 0)])
def test_vllm_takes_rows_of_latent_attention_from_stacks_with_its_kernels(own: int, lent: int) -> None:
    """Without rows of vLLM, it uses SGLang's rows of FlashAttention-3, and TensorRT-LLM's rows of FlashMLA for an fp8 cache."""

    def row(stack: str, dtype: str, kernel: str, op: str = "mla_decode") -> MeasuredRow:
        return MeasuredRow(0, op, "h100", stack, dtype, (1.0, 16.0, 512.0), 20.0, "", "1.0", kernel)

    rows = [
        row("vllm", "bfloat16", "", "gemm"),
        row("sglang", "bfloat16", "flash_attention"),
        row("sglang", "fp8", "flash_attention"),
        row("trtllm", "bfloat16", "default"),
        row("trtllm", "fp8", "default"),
        *[row("vllm", "bfloat16", "triton")] * own,
    ]
    found = select_rows([MeasurementFile("rows.csv", (), [], [], rows, [])], H100, "vllm", lambda text: None)
    assert [(r.framework, r.dtype) for r in found if r.framework != "vllm"] == [("sglang", "bfloat16"), ("trtllm", "fp8")][:lent]
    assert {r.version for r in found if r.framework != "vllm"} <= {""}
    assert {r.framework for r in select_rows([MeasurementFile("", (), [], [], rows, [])], H100, "trtllm", lambda text: None)} == {
        "trtllm"
    }


@pytest.mark.parametrize("stack", ["vllm", "trtllm"])
def test_roofline_has_a_row_for_what_a_module_takes_beyond_its_operators(kvcalc: Run, stack: str) -> None:
    """Each kind of layer has one such row, without work and bound, so that rows add up. MLA has none."""
    line = "roofline {} --gpu h100 --tp 8 --context 8k --batch-size 8 --stack {} --format json"
    *rows, whole = kvcalc(line.format("deepseek-v3.2", stack)).records
    added = [r for r in rows if r["operator"] == "module_overhead"]
    assert [(r["layer"], r["count"], r["flops"], r["bytes"], r["roofline_s"], r["bound"]) for r in added] == [
        ("dense", 3, 0, 0, 0.0, None), ("moe", 58, 0, 0, 0.0, None),
    ]  # fmt: skip
    assert added[0]["time_s"] / 3 == pytest.approx(added[1]["time_s"] / 58)
    assert sum(r["time_s"] for r in rows) == pytest.approx(whole["time_s"])
    assert "module_overhead" not in {r["operator"] for r in kvcalc(line.format("deepseek-v3", stack)).records}
    printed = kvcalc(f"roofline deepseek-v3.2 --gpu h100 --tp 8 --explain --stack {stack}").out
    assert printed.count("module_overhead") == 2
