"""Measure the rows that a GPU without a calibration needs, with torch's own kernels.

One family of kernels needs 25 to 50 shapes. They are chosen among the shapes of real models by their
time under the measured roofline, evenly in its logarithm, so that launches, memory and products each
show. Kernels that torch does not have (experts, latent attention, several GPUs) keep their bound.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import msgspec
import torch
from torch.nn import functional as F

from kvcalc.gpu.roof import least_time
from kvcalc.gpu.spec import Gpu
from kvcalc.layers.attention import Grouped, Latent, Sparse
from kvcalc.measure.cases import Case
from kvcalc.measure.ceilings import timed
from kvcalc.measure.layers.grouped_layer import attend
from kvcalc.measure.machine import Machine
from kvcalc.timing.costs import cost_of

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}
_GPUS = (("H100 80GB HBM3", "h100_sxm"), ("H100 PCIe", "h100_pcie"), ("H200", "h200_sxm"), ("A100-SXM4-80GB", "a100-80gb"),
         ("GB300", "gb300"), ("B300", "b300"), ("GB200", "gb200"), ("B200", "b200"), ("L40S", "l40s"),
         ("RTX PRO 6000 Blackwell Server", "rtx-pro-6000-blackwell"))  # fmt: skip
MLA = (512, 64, 128)  # kv_lora_rank, qk_rope_head_dim and v_head_dim that the format means by MLA


def measured_rows(found: Iterable[tuple[Case | None, dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return the CSV rows of measured cases."""
    return [row for case, record in found if case and (row := _row(case, record))]


def gpu_name(device: str) -> str:
    """Return the preset name of a device, or the vendor's name if there is no preset."""
    return next((name for mark, name in _GPUS if mark in device), device)


def _row(case: Case, record: dict[str, Any]) -> dict[str, Any] | None:
    spec, decode = next(iter(case.model.kinds.values())).mixers[0], case.phase == "decode"
    if case.model.layers > 1 or not isinstance(spec, Grouped | Latent):
        return None
    dtype, length = DTYPES[record["dtype"]], "kv_len" if decode else "seq_len"
    whole = isinstance(spec, Sparse)
    if whole and not decode:
        return None
    op = "dsa_decode_module" if whole else f"mla_{case.phase}" if isinstance(spec, Latent) else f"{case.phase}_attention"
    row = {
        "op": op,
        "gpu": gpu_name(record["device"]),
        "framework": "torch",
        "version": torch.__version__,
        "table": "kvcalc_measure",
        "kernel": record["kernel"],
        "kv_dtype": dtype,
        "batch": case.batch_size,
        "q_heads": spec.num_attention_heads,
        length: case.context,
        "time_us": record["measured_s" if whole else "attention_measured_s"] * 1e6,
        "bound_us": record["predicted_s" if whole else "attention_predicted_s"] * 1e6,
    }
    if isinstance(spec, Grouped):
        return row | _grouped(spec, dtype, decode)
    if (spec.kv_lora_rank, spec.qk_rope_head_dim, spec.v_head_dim) != MLA:
        return None
    return row | ({"gemm_dtype": dtype, "model": case.model.name} if whole else {"attn_dtype": dtype})


def _grouped(spec: Grouped, dtype: str, decode: bool) -> dict[str, Any]:
    shape = {"kv_heads": spec.num_key_value_heads, "head_dim": spec.head_dim, "window": spec.sliding_window or 0}
    return shape if decode else shape | {"attn_dtype": dtype}


ROWS = {"gemm": 48, "decode_attention": 50, "prefill_attention": 40}  # rows per family and dtype
LONGEST = {"cpu": 0.02, "cuda": 0.02}  # seconds under the roof
COLUMNS = {
    "gemm": ("m", "n", "k"),
    "decode_attention": ("batch", "q_heads", "kv_heads", "head_dim", "kv_len", "window"),
    "prefill_attention": ("batch", "q_heads", "kv_heads", "head_dim", "seq_len", "window"),
}
HEADS = ((32, 8, 128), (8, 1, 128), (64, 8, 128), (16, 2, 128), (32, 8, 64), (8, 4, 256))
MATRICES = ((4096, 4096), (6144, 4096), (28672, 4096), (4096, 14336), (1024, 8192), (10240, 8192), (57344, 8192), (1024, 2048))
PAST_CACHE, MOST_COPIES = 4, 64
_FP8_MAX = 448.0  # maximum of torch.float8_e4m3fn


class Shape(NamedTuple):
    """One kernel call to time. `counts` are the columns in COLUMNS."""

    op: str
    dtype: str
    counts: tuple[int, ...]

    def seconds(self, gpu: Gpu) -> float:
        """Return the roofline bound of the call on `gpu`, in seconds."""
        kind = f"{self.dtype}/{self.dtype}" if self.op == "prefill_attention" else self.dtype
        found = cost_of(self.op, kind, tuple(torch.tensor([float(c)]).numpy() for c in self.counts))
        assert found is not None
        return float(least_time(*found, gpu).seconds[0])

    @property
    def bytes(self) -> int:
        """Bytes of all tensors of the call, including intermediate results."""
        if self.op == "gemm":
            m, n, k = self.counts
            return 2 * (2 * m * k + n * k + m * n)
        batch, q, kv, width, length, _ = self.counts
        tokens = length if self.op == "prefill_attention" else 1
        return 2 * batch * width * (4 * kv * length + 4 * q * tokens)


def planned(machine: Machine, gpu: Gpu) -> list[Shape]:
    """Return the shapes to measure: ROWS states their number per family and dtype.

    Args:
        machine: The machine to measure on.
        gpu: The machine's measured ceilings as a preset.
    """
    fp8 = machine.cuda and torch.cuda.get_device_capability(machine.device) >= (8, 9)
    lengths = [2**e for e in range(4, 18)]
    candidates = [Shape("gemm", "bfloat16", (2**e, n, k)) for e in range(14) for n, k in MATRICES]
    candidates += [Shape("gemm", "fp8", s.counts) for s in candidates] if fp8 else []
    candidates += [
        Shape("decode_attention", "bfloat16", (b, *h, s, 0)) for b, h, s in product((1, 4, 16, 64, 256), HEADS, lengths)
    ]
    candidates += [Shape("prefill_attention", "bfloat16", (b, *h, s, 0)) for b, h, s in product((1, 2, 8), HEADS, lengths)]
    found: list[Shape] = []
    free = machine.free_bytes()
    for op, dtype in sorted({(c.op, c.dtype) for c in candidates}):
        fit = [(s.seconds(gpu), s) for s in candidates if (s.op, s.dtype) == (op, dtype) and s.bytes <= free]
        found += _spread([pair for pair in fit if pair[0] <= LONGEST[machine.device.type]], ROWS[op])
    return found


def _spread(timed_shapes: list[tuple[float, Shape]], count: int) -> list[Shape]:
    """Return `count` shapes, spaced evenly in the logarithm of their times."""
    ordered = sorted(timed_shapes)
    if len(ordered) <= count:
        return [shape for _, shape in ordered]
    low, high = math.log(ordered[0][0]), math.log(ordered[-1][0])
    chosen: dict[int, Shape] = {}
    for i in range(count):
        wanted = low + (high - low) * i / (count - 1)
        at = min((j for j in range(len(ordered)) if j not in chosen), key=lambda j: abs(math.log(ordered[j][0]) - wanted))
        chosen[at] = ordered[at][1]
    return [chosen[at] for at in sorted(chosen)]


def measured(
    shapes: list[Shape], machine: Machine, seconds: float, graphs: bool, refused: Callable[[str], None],
    progress: Callable[[str, int], None],
) -> Iterator[dict[str, Any]]:  # fmt: skip
    """Yield measured rows in the CSV format.

    Args:
        shapes: Kernel calls to time.
        machine: The machine to measure on.
        seconds: Time to spend on each call.
        graphs: Whether to replay CUDA graphs.
        refused: Receives a message for each shape that this machine cannot run.
        progress: Receives the next step and the number of finished steps.
    """
    for done, shape in enumerate(shapes):
        progress(f"{shape.op} {shape.dtype}", done)
        try:
            with torch.no_grad():
                steps = _STEPS[shape.op](shape, machine)
                time = timed(lambda steps=steps: [step() for step in steps], machine, len(steps), seconds, graphs)  # type: ignore[misc]
        except (RuntimeError, NotImplementedError) as error:
            refused(f"{shape.op} {shape.dtype} {shape.counts}: {str(error).splitlines()[0][:120]}; left out")
            continue
        yield _calibration_row(shape, machine, time.median * 1e6)


def _calibration_row(shape: Shape, machine: Machine, us: float) -> dict[str, Any]:
    named = {"op": shape.op, "gpu": gpu_name(machine.name), "framework": "torch", "version": torch.__version__}
    kinds = {"dtype": shape.dtype} if shape.op == "gemm" else {"kv_dtype": shape.dtype, "attn_dtype": shape.dtype}
    return named | kinds | dict(zip(COLUMNS[shape.op], shape.counts, strict=True)) | {"time_us": us}


def _gemm(shape: Shape, machine: Machine) -> list[Callable[[], object]]:
    """Return matrix products whose weights rotate, so that each read misses the last-level cache."""
    m, n, k = shape.counts
    size = n * k * (1 if shape.dtype == "fp8" else 2)
    copies = max(1, min(MOST_COPIES, math.ceil(PAST_CACHE * machine.cache_bytes / size), machine.free_bytes() // (2 * size)))
    x = torch.randn(m, k, device=machine.device).to(torch.bfloat16)
    weights = [torch.randn(n, k, device=machine.device).to(torch.bfloat16) for _ in range(copies)]
    if shape.dtype != "fp8":
        return [partial(F.linear, x, w) for w in weights]
    stored = [w.to(torch.float8_e4m3fn) for w in weights]
    return [partial(_fp8_linear, x, w, torch.ones((), device=machine.device)) for w in stored]


def _fp8_linear(x: torch.Tensor, weight: torch.Tensor, one: torch.Tensor) -> torch.Tensor:
    """Return an fp8 product with one dynamic scale for the whole input."""
    scale = x.abs().amax().float() / _FP8_MAX
    packed = (x / scale).to(torch.float8_e4m3fn)
    return torch._scaled_mm(packed, weight.t(), scale_a=scale, scale_b=one, out_dtype=torch.bfloat16)


def _attention(shape: Shape, machine: Machine) -> list[Callable[[], object]]:
    """Return attention of one new token or of whole prompts, including the write to the cache."""
    batch, q_heads, kv_heads, width, length, _ = shape.counts
    new = length if shape.op == "prefill_attention" else 1
    make = partial(torch.randn, device=machine.device, dtype=torch.bfloat16)
    q, k, v = (make(batch, h, s, width) for h, s in ((q_heads, new), (kv_heads, length), (kv_heads, length)))
    keys, values = make(batch, kv_heads, new, width), make(batch, kv_heads, new, width)

    def step() -> torch.Tensor:
        k[:, :, -new:] = keys
        v[:, :, -new:] = values
        return attend(q, k, v)

    return [step]


_STEPS: dict[str, Callable[[Shape, Machine], list[Callable[[], object]]]] = {
    "gemm": _gemm, "decode_attention": _attention, "prefill_attention": _attention,
}  # fmt: skip


def fitted_gpu(machine: Machine, gpu: Gpu) -> Gpu:
    """Return the roofline for the fit. CPU threads take the place of multiprocessors."""
    return gpu if gpu.sms else msgspec.structs.replace(gpu, sms=max(1, machine.threads))
