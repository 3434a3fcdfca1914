"""Measure the rows that a GPU without a calibration needs, with torch's own kernels.

One family of kernels needs 25 to 50 shapes. They are selected from the shapes of real models,
evenly in the logarithm of their time under the measured roofline. So launches, memory and products
each dominate some rows. Kernels that torch does not have (experts, latent attention, several GPUs)
are not measured, and their times stay bounds.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from kvcalc.gpu.gpu import Gpu, cost_bound
from kvcalc.layers.attention import Grouped, Latent, Sparse
from kvcalc.library.load import driver_gpu
from kvcalc.measure.cases import Case
from kvcalc.measure.ceilings import Machine, Step, time_calls
from kvcalc.measure.generation import Progress
from kvcalc.measure.layers.base_layer import DTYPES
from kvcalc.measure.layers.grouped_layer import attend
from kvcalc.records import Record
from kvcalc.storage.formats import read_shapes
from kvcalc.timing.rows import cost_of

# kv_lora_rank, qk_rope_head_dim and v_head_dim that the format means by MLA
MLA = (512, 64, 128)


def gpu_name(device: str) -> str:
    """Return the name of a GPU's preset, such as `h100-sxm`, for the name that its driver reports.

    The result is `device` unchanged if there is no preset.

    Args:
        device: The vendor's name of the device, such as `NVIDIA H100 80GB HBM3`.
    """
    gpu = driver_gpu(device, memory_bytes=0)
    return gpu.name if gpu else device


def _common_columns(op: str, device: str) -> Record:
    return {
        "op": op,
        "gpu": gpu_name(device),
        "framework": "torch",
        "version": torch.__version__,
    }


def measured_rows(results: Iterable[tuple[Case | None, Record]]) -> list[Record]:
    """Return the measured cases as rows of the CSV file that `kvcalc calibrate` reads.

    Each row is a dictionary of one kernel's sizes and its measured time in microseconds. A case
    gives no row if the CSV file has no columns for its operation, such as recurrence.

    Args:
        results: Each measured case with its record of times. Generations have None in place of the
            case, and give no row either.
    """
    return [*filter(None, (_row(case, record) for case, record in results if case))]


def _row(case: Case, record: Record) -> Record:
    """Return the CSV row of a measured case, or an empty row."""
    spec = next(iter(case.model.kinds.values())).mixers[0]
    is_decode = case.phase == "decode"
    dtype = str(DTYPES[record["dtype"]]).removeprefix("torch.")
    if case.model.layers > 1 or not isinstance(spec, Grouped | Latent):
        return {}
    prefix = "attention_"
    if isinstance(spec, Grouped):
        op = f"{case.phase}_attention"
        columns: dict[str, Any] = {
            "kv_heads": spec.num_key_value_heads,
            "head_dim": spec.head_dim,
            "window": spec.sliding_window or 0,
        }
        if not is_decode:
            columns["attn_dtype"] = dtype
    elif (spec.kv_lora_rank, spec.qk_rope_head_dim, spec.v_head_dim) != MLA:
        return {}
    elif not isinstance(spec, Sparse):
        op, columns = f"mla_{case.phase}", {"attn_dtype": dtype}
    elif is_decode:  # the format has only the whole module
        op, columns = "dsa_decode_module", {"gemm_dtype": dtype, "model": case.model.name}
        prefix = ""
    else:
        return {}
    return {
        **_common_columns(op, record["device"]),
        "table": "kvcalc_measure",
        "kernel": record["kernel"],
        "kv_dtype": dtype,
        "batch": case.batch_size,
        "q_heads": spec.num_attention_heads,
        "kv_len" if is_decode else "seq_len": case.context,
        "time_us": record[f"{prefix}measured_s"] * 1e6,
        "bound_us": record[f"{prefix}bound_s"] * 1e6,
        **columns,
    }


class RowFamily(NamedTuple):
    """Candidate calls of one type of kernel, such as GEMM, from which `plan_shapes` selects.

    Attributes:
        columns: Names of the sizes of a call, such as m, n and k. They are also CSV columns.
        shapes: Candidate calls, each with its sizes in the order of `columns`.
        rows: Maximum number of calls that are selected and measured.
    """

    columns: tuple[str, ...]
    shapes: list[tuple[int, ...]]
    rows: int


# (n, k) of weights, and (query heads, KV heads, width) of attention, in real models
MATRICES = read_shapes(
    "4096x4096 6144x4096 28672x4096 4096x14336 1024x8192 10240x8192 57344x8192 1024x2048"
)
HEADS = read_shapes("32x8x128 8x1x128 64x8x128 16x2x128 32x8x64 8x4x256")
LENGTHS = [2**e for e in range(4, 18)]
DECODE_BATCHES, PREFILL_BATCHES = (1, 4, 16, 64, 256), (1, 2, 8)


def _attention_shapes(batches: tuple[int, ...]) -> list[tuple[int, ...]]:
    return [(b, *heads, n, 0) for b, heads, n in product(batches, HEADS, LENGTHS)]


ATTENTION_COLUMNS = ("batch", "q_heads", "kv_heads", "head_dim")
FAMILIES = {
    "gemm": RowFamily(
        ("m", "n", "k"),
        [(2**e, *matrix) for e, matrix in product(range(14), MATRICES)],
        rows=48,
    ),
    "decode_attention": RowFamily(
        (*ATTENTION_COLUMNS, "kv_len", "window"), _attention_shapes(DECODE_BATCHES), rows=50
    ),
    "prefill_attention": RowFamily(
        (*ATTENTION_COLUMNS, "seq_len", "window"), _attention_shapes(PREFILL_BATCHES), rows=40
    ),
}
MAX_BOUND_S = 0.02  # seconds of a shape under the roofline
FP8_MAX = 448.0  # maximum of torch.float8_e4m3fn


class Shape(NamedTuple):
    """One kernel call to time: an operation, its data type and its sizes.

    Attributes:
        op: Operation: gemm, decode_attention or prefill_attention.
        dtype: Data type of the operands, such as `bfloat16`.
        counts: Sizes of the call: (m, n, k) of a GEMM x[m, k] · W[k, n], or (sequences, query
            heads, KV heads, head width, tokens per sequence, window) of attention. The window is 0
            for none.
    """

    op: str
    dtype: str
    counts: tuple[int, ...]

    def seconds(self, gpu: Gpu) -> float:
        """Return the minimum time of one call in seconds, by the roofline of `gpu`.

        Args:
            gpu: This machine as a GPU preset, with its measured bandwidth and FLOP/s.
        """
        dtype = f"{self.dtype}/{self.dtype}" if self.op == "prefill_attention" else self.dtype
        cost = cost_of(self.op, dtype, tuple(np.array([float(count)]) for count in self.counts))
        return float(cost_bound(*cost, gpu).seconds[0])

    @property
    def bytes(self) -> int:
        """Return the estimated bytes of all tensors of one call, including intermediate results."""
        if self.op == "gemm":
            m, n, k = self.counts
            return 2 * (2 * m * k + n * k + m * n)
        batch, q_heads, kv_heads, width, length, _ = self.counts
        tokens = length if self.op == "prefill_attention" else 1
        return 2 * batch * width * (4 * kv_heads * length + 4 * q_heads * tokens)


def plan_shapes(machine: Machine, gpu: Gpu) -> list[Shape]:
    """Return the kernel calls to measure, so that a time model can be fitted to this machine.

    Candidates are GEMM, decode attention and prefill attention with sizes of real models. Calls
    that do not fit in free memory are left out, as are calls of more than 20 ms by the roofline.
    From the rest, calls are selected evenly in the logarithm of this time.

    Args:
        machine: The machine to measure on.
        gpu: This machine as a GPU preset, with its measured bandwidth and FLOP/s.
    """
    kinds = [(op, "bfloat16") for op in FAMILIES]
    if machine.cuda and torch.cuda.get_device_capability(machine.device) >= (8, 9):
        kinds.insert(1, ("gemm", "fp8"))
    shapes = []
    free_bytes = machine.free_bytes()
    for op, dtype in kinds:
        candidates = [Shape(op, dtype, counts) for counts in FAMILIES[op].shapes]
        bounds = [(s.seconds(gpu), s) for s in candidates if s.bytes <= free_bytes]
        short = [(seconds, s) for seconds, s in bounds if seconds <= MAX_BOUND_S]
        shapes += _spread(sorted(short), FAMILIES[op].rows)
    return shapes


def _spread(bounds: list[tuple[float, Shape]], count: int) -> list[Shape]:
    """Return at most `count` of the shapes sorted by time, spaced evenly in the logarithm of the
    times."""
    logs = np.log([seconds for seconds, _ in bounds])
    targets = np.linspace(logs[0], logs[-1], count)
    return [bounds[index][1] for index in np.unique(np.searchsorted(logs, targets))]


def measure_shapes(
    shapes: list[Shape],
    machine: Machine,
    seconds: float,
    warn: Callable[[str], None],
    progress: Progress,
) -> Iterator[Record]:
    """Time kernel calls, and yield each as a row of the CSV file that `kvcalc calibrate` reads.

    A row is a dictionary of the operation, its sizes and its measured time in microseconds.

    Args:
        shapes: Kernel calls to time.
        machine: The machine to measure on.
        seconds: Approximate time to spend on each call.
        warn: Receives a message for each call that this machine cannot run. Such a call gives no
            row.
        progress: Receives the name of the next call and the number of finished calls.
    """
    for done, shape in enumerate(shapes):
        progress(f"{shape.op} {shape.dtype}", done)
        make_calls = _gemm if shape.op == "gemm" else _attention
        try:
            with torch.no_grad():
                time = time_calls(make_calls(shape, machine), machine, seconds)
        except (RuntimeError, NotImplementedError) as error:
            reason = str(error).splitlines()[0][:120]
            warn(f"{shape.op} {shape.dtype} {shape.counts}: {reason}; left out")
            continue
        dtypes = ("dtype",) if shape.op == "gemm" else ("kv_dtype", "attn_dtype")
        yield {
            **_common_columns(shape.op, machine.name),
            **dict.fromkeys(dtypes, shape.dtype),
            **dict(zip(FAMILIES[shape.op].columns, shape.counts)),
            "time_us": time.median * 1e6,
        }


def _gemm(shape: Shape, machine: Machine) -> list[Step]:
    """Return functions that run matrix products with different weights in turn, so that each read
    misses the last-level cache."""
    m, n, k = shape.counts
    is_fp8 = shape.dtype == "fp8"
    weight_bytes = n * k * (1 if is_fp8 else 2)
    copies = machine.copies(weight_bytes, weight_bytes)
    make = partial(torch.randn, device=machine.device, dtype=torch.bfloat16)
    x = make(m, k)
    if not is_fp8:
        return [partial(F.linear, x, make(n, k)) for _ in range(copies)]
    unit_scale = torch.ones((), device=machine.device)
    weights = [make(n, k).to(torch.float8_e4m3fn) for _ in range(copies)]
    return [partial(_fp8_linear, x, weight, unit_scale) for weight in weights]


def _fp8_linear(x: Tensor, weight: Tensor, unit_scale: Tensor) -> Tensor:
    """Return the result of an fp8 product with one dynamic scale for the whole input."""
    scale = x.abs().amax().float() / FP8_MAX
    packed = (x / scale).to(torch.float8_e4m3fn)
    return torch._scaled_mm(
        packed, weight.t(), scale_a=scale, scale_b=unit_scale, out_dtype=torch.bfloat16
    )


def _attention(shape: Shape, machine: Machine) -> list[Step]:
    """Return functions that run attention of one new token or of whole prompts, including the write
    to the cache."""
    batch, q_heads, kv_heads, width, length, _ = shape.counts
    new = length if shape.op == "prefill_attention" else 1
    make = partial(torch.randn, device=machine.device, dtype=torch.bfloat16)
    q = make(batch, q_heads, new, width)
    k, v = (make(batch, kv_heads, length, width) for _ in range(2))
    keys, values = (make(batch, kv_heads, new, width) for _ in range(2))

    def step() -> Tensor:
        k[:, :, -new:] = keys
        v[:, :, -new:] = values
        return attend(q, k, v)

    return [step]
