"""Records of measurements, their predictions, bytes and errors. Ceilings are invented, so no result depends on the machine."""

import csv
import io
from typing import Any

import pytest
from specs import grouped, latent, sparse, stack
from twins import torch

from kvcalc import Gpu, UserError, cache_size, load_model
from kvcalc.layers.cost import causal_pairs
from kvcalc.layers.weights import matrix
from kvcalc.library.load import read
from kvcalc.measure import cases, ceilings, run
from kvcalc.measure.calibration_rows import gpu_name, measured_rows
from kvcalc.measure.cases import NAMES, Case, allocator_bytes, stacks_of, standard_model, variant_layers
from kvcalc.measure.ceilings import Ceilings, Machine, as_gpu, find_machine, load_note, measure_ceilings, preset_path, save
from kvcalc.measure.expected import bound_of, count_operations
from kvcalc.measure.layers.base_layer import CacheRows, Parameters
from kvcalc.measure.run import MeasureSettings, measure, measure_cases, needed_bytes, operators_of
from kvcalc.model.precision import Precision
from kvcalc.report.export import to_csv

MACHINE = Machine(torch.device("cpu"), "a CPU", 16 << 30, 1 << 20, 1)
CEILINGS = Ceilings(10e9, 20e9, {"fp32": 100e9, "bf16": 50e9, "fp64": 50e9}, 1e-6)
GPU = as_gpu(MACHINE, CEILINGS)
QUICK = MeasureSettings("fp32", 0.0)


def quiet(*_: Any) -> None:
    """Return a progress function that does nothing."""


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("phase", "dtype"), [("decode", "fp32"), ("prefill", "bf16")])
def test_bytes_are_equal_in_every_record(name: str, phase: str, dtype: str) -> None:
    model = variant_layers(standard_model(2), "gqa:1" if name == "gqa" else name)
    record = measure(Case(name, model, phase, 2, 37), MeasureSettings(dtype, 0.0), MACHINE, CEILINGS)
    assert record["predicted_bytes"] == record["allocated_bytes"] <= record["allocator_bytes"]
    assert record["predicted_bytes"] == cache_size(model, 37, 2, Precision(dtype)).stored
    for prefix in ("", "attention_"):
        assert record[f"{prefix}ratio"] == record[f"{prefix}measured_s"] / record[f"{prefix}predicted_s"]
    assert record["bandwidth_bytes_per_s"] == 20e9
    assert record["attention_bound_s"] < record["bound_s"]
    assert record["cache_error"] < {"fp32": 1e-4, "bf16": 0.1}[dtype]


def test_the_allocator_counts_a_tensor_that_nobody_told_it_of() -> None:
    """64 MiB in blocks of the C library: headers and ends of pages add less than a thousandth. A freed tensor does not count."""
    before = allocator_bytes(MACHINE)
    if not before:
        pytest.skip("no mallinfo2 on this system")
    tensor = torch.ones(1 << 24)
    assert 1 << 26 <= allocator_bytes(MACHINE) - before < (1 << 26) * 1.001
    del tensor
    assert abs(allocator_bytes(MACHINE) - before) < 1 << 16


def test_a_cache_that_loses_a_row_changes_the_output(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case("mha", standard_model(2), "decode", 1, 8)
    layers = cases.LayerStack(case, MACHINE, "fp32")
    assert layers.cache_error() < 1e-5
    monkeypatch.setattr(CacheRows, "read", lambda self, tokens: self.tensor[:, :, 1:tokens])
    assert layers.cache_error() > 1e-2


def test_mha_s_time_over_another_s_with_equal_sizes() -> None:
    """mqa reads 1/16 of the cache. Without mha of equal sizes there is no comparison."""
    base = standard_model(16)
    mha, mqa = (Case(name, variant_layers(base, name), "decode", 1, 64) for name in ("mha", "mqa"))
    records = [r for _, r in measure_cases([mha, mqa, mqa._replace(context=32)], QUICK, MACHINE, quiet, CEILINGS, quiet)]
    for basis in ("attention_predicted", "attention_measured"):
        times = [record[f"{basis}_s"] for record in records]
        assert [record[f"{basis}_speedup"] for record in records] == [1, times[0] / times[1], None]
    assert records[0]["attention_bytes"] > 10 * records[1]["attention_bytes"]


def test_the_bound_of_a_decode_step_by_hand() -> None:
    """MHA of 2 heads of 128 in fp32, D = 256, 1000 tokens, one sequence, at 20 GB/s: every operator is bound by memory.

    qkv: 3·256² weights, 256 in, 768 out. rope: queries and keys, 512 in and out. attention: 1000 rows of K and V read, one
    written, queries in, outputs out. o: 256² weights, 256 in and out.
    """
    case = Case("mha", standard_model(2), "decode", 1, 1000)
    qkv, rope, o = 3 * 256**2 + 4 * 256, 2 * 512, 256**2 + 2 * 256
    attention = 2 * 256 * (1000 + 1) + 2 * 256
    found = bound_of(operators_of(case, "fp32"), GPU)
    assert found.bytes == 4 * (qkv + rope + attention + o)
    assert found.seconds == pytest.approx(found.bytes / 20e9)
    assert found.limit == "memory"


def test_the_bound_of_a_prefill_by_hand() -> None:
    """512 tokens of the same layer: projections take 2·512·4·256² FLOPs at 100 GFLOP/s, attention 4·256 for each pair."""
    case = Case("mha", standard_model(2), "prefill", 1, 512)
    found = bound_of([op for op in operators_of(case, "fp32") if op.name == "attention"], GPU)
    assert found.flops == 4 * 256 * causal_pairs(512, 0)
    assert found.limit == "compute"
    assert found.seconds == pytest.approx(found.flops / 100e9)
    assert bound_of(operators_of(case, "fp32"), GPU).flops == found.flops + 2 * 512 * 4 * 256**2


def test_what_does_not_fit_is_said_before_it_is_tried() -> None:
    """An MHA cache of 2^30 tokens of 2 KiB is 2 TiB."""
    case, small = Case("mha", standard_model(2), "decode", 1, 1 << 30), Case("mha", standard_model(2), "decode", 1, 8)
    assert needed_bytes(case, QUICK) > 2**30 * 2 * 2 * 128 * 4
    refused: list[str] = []
    found = [c for c, _ in measure_cases([case, small], QUICK, MACHINE, refused.append, CEILINGS, quiet)]
    assert found == [small]
    assert len(refused) == 1 and "needs 2.00 TiB" in refused[0]


def test_standard_layers_are_what_their_names_say() -> None:
    base = standard_model(16)
    labels = [variant_layers(base, name).attention for name in NAMES]
    assert labels == [
        "MHA", "GQA-4", "MQA", "MLA", "DSA top-2048", "MHA window 1024", "1× MHA, 1× MHA (shared cache)", "GatedDeltaNet",
    ]  # fmt: skip
    assert variant_layers(base, "gqa:8/window:64").attention == "GQA-8 window 64"
    two_layers, one_layer = (cache_size(variant_layers(base, name), 100) for name in ("cla", "mha"))
    assert two_layers.stored == one_layer.stored, "two layers share one cache"


@pytest.mark.parametrize("text", ["", "mha2", "int8", "gqa:3", "mla", "window:0", "gqa:"])
def test_unknown_variants_are_refused(text: str) -> None:
    if text == "mla":
        assert variant_layers(standard_model(16), text).attention == "MLA"
        return
    with pytest.raises(UserError):
        variant_layers(standard_model(16), text)


def test_a_model_s_own_kinds_of_layer() -> None:
    model = stack(grouped(), latent(), sparse(), layers=6)
    assert [m.attention for m in stacks_of(model).values()] == ["GQA-2", "MLA", "DSA top-64"]
    shared = stacks_of(load_model("hunyuan-large"))
    assert [m.layers for m in shared.values()] == [1, 2]  # a layer that borrows stands behind its lender


def test_layers_that_there_are_not_are_refused_at_once() -> None:
    with pytest.raises(UserError, match="no Mamba-2 layer"):
        run.plan_cases(stacks_of(load_model("nemotron-h-8b")), "both", MACHINE, [], [])


@pytest.mark.parametrize("dtype", ["fp8", "bf17"])
def test_dtypes_that_torch_does_not_compute_in(dtype: str) -> None:
    with pytest.raises(UserError, match="does not compute"):
        run.measure_settings(MACHINE, dtype, 0.1)


def test_devices_that_are_not_there() -> None:
    if not torch.cuda.is_available():
        with pytest.raises(UserError, match="no CUDA GPU"):
            find_machine("cuda")
    machine = find_machine("cpu", 1)
    assert (machine.clock, machine.sms) == ("cpu", 1)


@pytest.mark.parametrize(
    ("worked", "share", "threads", "note"), [(0.6, 1.0, 2, ""), (0.3, 0.5, 1, "other work takes 50% of this machine's cores")]
)
def test_threads_are_chosen_once_and_its_own_work_is_nobody_else_s(
    monkeypatch: pytest.MonkeyPatch, worked: float, share: float, threads: int, note: str
) -> None:
    """Products run for 0.3 s on two cores. The CPU time that this process did not get belongs to other processes."""
    wall, own, before = iter([0.0, 0.1, 0.3, 0.3]), iter([1.0, 1.0 + worked]), torch.get_num_threads()
    ceilings.core_share.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(ceilings.time, "perf_counter", lambda: next(wall))
        patch.setattr(ceilings.time, "process_time", lambda: next(own))
        patch.setattr(ceilings.os, "sched_getaffinity", lambda _: {0, 1}, raising=False)
        machines = [find_machine("cpu") for _ in range(2)]  # the second time no clock is asked
    assert [(m.threads, m.share) for m in machines] == [(threads, pytest.approx(share))] * 2
    assert load_note(machines[0]).partition(";")[0] == note
    ceilings.core_share.cache_clear()
    torch.set_num_threads(before)


def test_a_view_is_an_operation_of_the_host() -> None:
    a, b = torch.randn(8, 16), torch.randn(4, 16)
    assert count_operations(lambda: a @ b.T) == 2


def test_measured_ceilings_are_a_gpu(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured ceilings of this machine, written as a preset and read again, are unchanged."""
    machine = find_machine("cpu", 1)
    ceilings = measure_ceilings(machine, ["fp32"], quiet, 0.01)
    assert ceilings.bandwidth_bytes_per_s == max(ceilings.copy_bytes_per_s, ceilings.read_bytes_per_s) > 1e8
    gpu = as_gpu(machine, ceilings, "mine")
    monkeypatch.setenv("KVCALC_PRESETS", str(tmp_path))
    path = preset_path("mine")
    save(gpu, path)
    assert read(path, Gpu) == gpu
    with pytest.raises(UserError, match="already"):
        preset_path("mine")
    with pytest.raises(UserError, match="already"):
        preset_path("h100")
    with pytest.raises(UserError, match="not a usable file name"):
        preset_path("../x")


def test_rows_for_the_calibration() -> None:
    base = standard_model(2)
    cases = [Case(n, variant_layers(base, f"{n}:1" if n == "gqa" else n), p, 3, 40) for n in NAMES for p in ("decode", "prefill")]
    record = {
        "dtype": "bf16",
        "device": "NVIDIA H100 80GB HBM3",
        "kernel": "sdpa",
        "measured_s": 2e-3,
        "attention_measured_s": 1e-3,
        "bound_s": 5e-4,
        "attention_bound_s": 2.5e-4,
    }
    rows = list(csv.DictReader(io.StringIO(to_csv(measured_rows((c, record) for c in cases)))))
    ops = [row["op"] for row in rows]
    assert ops == ["decode_attention", "prefill_attention"] * 3 + [
        "mla_decode", "mla_prefill", "dsa_decode_module", "decode_attention", "prefill_attention",
    ]  # fmt: skip
    window = rows[-2]
    expected = {"gpu": "h100-sxm", "kv_dtype": "bfloat16", "batch": "3", "q_heads": "2", "kv_heads": "2", "head_dim": "128"}
    assert expected.items() <= window.items()
    assert (window["window"], window["kv_len"], window["seq_len"], window["time_us"]) == ("1024", "40", "", "1000.0")
    module = rows[ops.index("dsa_decode_module")]
    assert (module["time_us"], module["bound_us"], window["bound_us"]) == ("2000.0", "500.0", "250.0")  # the whole module
    assert gpu_name("a CPU") == "a CPU"


def test_few_rows_and_many_give_the_same_product() -> None:
    torch.manual_seed(6)
    weights = Parameters([matrix("w", 8, 5, True)])
    x = torch.randn(2, 3, 8)
    assert torch.allclose(weights.linear("w", x), x @ weights["w"].T + weights["w_bias"], atol=1e-6)
