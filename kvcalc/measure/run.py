"""Measure layers or generations on this machine, and compare each time with its prediction.

`layers_job` and `generation_job` describe one run: the number of steps of its progress bar, and an
iterator of records. The functions at the end choose shapes, lengths and dtypes by device.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import msgspec
import torch

from kvcalc.errors import UserError, nearest
from kvcalc.gpu.roof import roofline, total_bound, total_seconds
from kvcalc.gpu.spec import Gpu
from kvcalc.layers.attention import Sparse
from kvcalc.layers.batch import Batch
from kvcalc.layers.cost import Operator, Role
from kvcalc.measure.cases import NAMES, Case, Stack, allocated, base_of, named, stacks_of, standard_model, storage_bytes, whole
from kvcalc.measure.ceilings import Ceilings, Timing, timed
from kvcalc.measure.expected import Facts, Traffic, difference, traffic_of
from kvcalc.measure.generation import Request, check, generated, modes_of
from kvcalc.measure.layers import build_mixer
from kvcalc.measure.layers.decoder import Decoder
from kvcalc.measure.layers.grouped_layer import KERNELS
from kvcalc.measure.layers.latent_layer import GATHERED
from kvcalc.measure.machine import Machine
from kvcalc.measure.torch_cache import DTYPES
from kvcalc.model.memory import cache_size
from kvcalc.model.operators import forward, total
from kvcalc.model.precision import Precision
from kvcalc.model.spec import Model
from kvcalc.storage.dtypes import FORMATS
from kvcalc.units import format_bytes

MOST_COPIES = 64
PAST_CACHE = 4  # size of all rotating inputs ÷ last-level cache


class MeasureSettings(NamedTuple):
    """Settings of a measurement.

    Attributes:
        dtype: Type of weights, products and cache.
        kernel: Attention kernel: auto, sdpa, plain or flex.
        block_size: Tokens per block of a paged cache; 0 for a contiguous cache.
        seconds: Time to spend on each of the two times of a case.
        graphs: Whether to replay CUDA graphs.
    """

    dtype: str
    kernel: str = "auto"
    block_size: int = 0
    seconds: float = 1.0
    graphs: bool = True


class Bound(NamedTuple):
    """Bound of some operators on the measured ceilings: seconds, limiting resource, bytes, FLOPs."""

    seconds: float
    bound: str
    bytes: int
    flops: int


def all_cases(
    stacks: dict[str, Model], phases: Sequence[str], batches: dict[str, list[int]], contexts: dict[str, list[int]]
) -> list[Case]:
    """Return every combination in the order variant, phase, batch size, context."""
    return [
        Case(name, model, phase, batch, context)
        for name, model in stacks.items()
        for phase in phases
        for batch in batches[phase]
        for context in contexts[phase]
    ]


def operators_of(case: Case, dtype: str) -> list[Operator]:
    """Return the operators of one pass. MLA is absorbed in decode and expanded in prefill."""
    batch = Batch.decode(case.context, case.batch_size) if case.new == 1 else Batch.prefill(case.context, case.batch_size)
    form = "absorbed" if case.new == 1 else "expanded"
    return [op for op in forward(case.model, batch, Precision(dtype), mla_form=form) if op.layer]


def bound_of(operators: Sequence[Operator], gpu: Gpu) -> Bound:
    """Return the sum of the operators' bounds."""
    placed, cost = roofline(operators, gpu), total(operators)
    return Bound(total_seconds(placed), total_bound(placed), int(cost.bytes), int(cost.flops))


def needed_bytes(case: Case, settings: MeasureSettings) -> int:
    """Return the bytes of weights, cache and an estimate of the largest intermediate tensors."""
    element = FORMATS[settings.dtype].bits // 8
    model, tokens = case.model, case.batch_size * case.new
    weights = sum(w.elements for kind in model.order for w in model.layer_weights(kind))
    widest = max(sum(w.outputs for w in model.layer_weights(kind)) for kind in model.order)
    size = cache_size(model, case.context, case.batch_size, Precision(settings.dtype), settings.block_size or 16)
    found = weights * element + max(size.stored, size.allocated) + 4 * tokens * widest * element
    specs = [spec for layer in model.kinds.values() for spec in layer.mixers]
    if any(isinstance(spec, Sparse) for spec in specs):
        found += 2 * GATHERED * element + (case.batch_size * case.new * case.context * (2 + 2 * element) if case.new > 1 else 0)
    if settings.kernel == "plain":
        heads = max(spec.as_mha()[0] for spec in specs)
        found += 3 * case.batch_size * heads * case.new * case.context * element
    return found


def unfit(case: Case, settings: MeasureSettings, machine: Machine) -> str:
    """Return the reason why a case does not fit in memory, or ''."""
    needed, free = needed_bytes(case, settings), machine.free_bytes()
    if needed <= free:
        return ""
    name = f"{case.variant} {case.phase}, batch {case.batch_size:,}, context {case.context:,}"
    return f"{name}: needs {format_bytes(needed)}, and {format_bytes(free)} can be used; left out"


def measure(case: Case, settings: MeasureSettings, machine: Machine, ceilings: Ceilings, gpu: Gpu) -> dict[str, Any]:
    """Return the record of one case: times of whole layers, and of attention (or the scan) only."""
    operators = operators_of(case, settings.dtype)
    layer, core = bound_of(operators, gpu), bound_of([op for op in operators if op.role is Role.CORE], gpu)
    kernel = chosen_kernel(settings.kernel, case, machine)
    with torch.no_grad():
        copies = _copies(layer, case, settings, machine), _copies(core, case, settings, machine)
        stacks = [Stack(case, machine, settings.dtype, kernel) for _ in range(copies[0])]
        first, allocator = allocated(lambda: stacks[0].caches(settings.block_size), machine)
        caches = [first, *(stacks[0].caches(settings.block_size) for _ in range(max(copies) - 1))]
        for each in caches:
            for cache in each:
                cache.fill()
        whole = timed(lambda: _all(stacks, caches[: copies[0]]), machine, copies[0], settings.seconds, settings.graphs)
        inner = [stack.core() for stack in stacks]
        alone = timed(
            lambda: [inner[i % len(inner)](c) for i, c in enumerate(caches[: copies[1]])],
            machine, copies[1], settings.seconds, settings.graphs,
        )  # fmt: skip
    done = traffic_of(lambda: stacks[0].step(first), ceilings, settings.dtype)
    done_alone = traffic_of(lambda: inner[0](first), ceilings, settings.dtype)
    launch = 0.0 if whole.graph else ceilings.launch_s
    why = _facts(layer, whole, copies[0], launch, done, machine)
    why_alone = _facts(core, alone, copies[1], launch, done_alone, machine)
    return {
        **_identity(case, settings, kernel, machine),
        **_compared("", layer, whole, ceilings, settings.dtype),
        "difference": difference(why)[0],
        **_compared("attention_", core, alone, ceilings, settings.dtype),
        "attention_difference": difference(why_alone)[0],
        "attention_why": difference(why_alone)[1],
        "predicted_bytes": _predicted_bytes(case, settings),
        "allocated_bytes": storage_bytes(first),
        "allocator_bytes": allocator,
        "copies": copies[0],
        "attention_copies": copies[1],
        "launches": done.launches,
        "attention_unfused_s": done_alone.seconds,
        **_ceiling_columns(ceilings, settings.dtype),
    }


def measured(
    chosen: Sequence[Case],
    settings: MeasureSettings,
    machine: Machine,
    ceilings: Ceilings,
    gpu: Gpu,
    refused: Callable[[str], None],
    progress: Callable[[str, int], None],
) -> Iterator[tuple[Case, dict[str, Any]]]:
    """Yield each case that fits, with its record.

    `refused` receives a message for each case that does not fit; `progress` receives the next step.
    """
    for number, case in enumerate(chosen):
        progress(f"{case.variant} {case.phase}, batch {case.batch_size:,}, context {case.context:,}", number)
        if text := unfit(case, settings, machine):
            refused(text)
            continue
        try:
            yield case, measure(case, settings, machine, ceilings, gpu)
        except torch.OutOfMemoryError:
            refused(f"{case.variant} {case.phase}, batch {case.batch_size:,}, context {case.context:,}: ran out of memory")
        if machine.cuda:
            torch.cuda.empty_cache()


def chosen_kernel(kernel: str, case: Case, machine: Machine) -> str:
    """Return the kernel for `auto`: torch's fused kernel, or plain products for one query on a CPU.

    On a CPU, two plain products read the cache faster.
    """
    if kernel != "auto":
        return kernel
    return "plain" if case.new == 1 and not machine.cuda else "sdpa"


def _all(stacks: Sequence[Stack], caches: Sequence[Any]) -> None:
    for stack, cache in zip(stacks, caches, strict=True):
        stack.step(cache)


def _copies(bound: Bound, case: Case, settings: MeasureSettings, machine: Machine) -> int:
    """Return the number of copies to rotate over, so that each call reads its data from memory.

    One copy is enough if the bound is compute.
    """
    if bound.bound == "compute":
        return 1
    wanted = -(-PAST_CACHE * machine.cache_bytes // max(1, bound.bytes))
    fitting = machine.free_bytes() // (2 * needed_bytes(case, settings))
    return int(max(1, min(wanted, MOST_COPIES, fitting)))


def _facts(bound: Bound, time: Timing, copies: int, launch_s: float, done: Traffic, machine: Machine) -> Facts:
    resident = bound.bound == "memory" and bound.bytes * copies <= machine.cache_bytes
    return Facts(bound.seconds, time.median, bound.bound, bound.bytes, resident, launch_s, done)


def _predicted_bytes(case: Case, settings: MeasureSettings) -> int:
    size = cache_size(case.model, case.context, case.batch_size, Precision(settings.dtype), settings.block_size or 16)
    return size.allocated if settings.block_size else size.stored


def _identity(case: Case, settings: MeasureSettings, kernel: str, machine: Machine) -> dict[str, Any]:
    return {
        "variant": case.variant,
        "attention": case.model.attention,
        "phase": case.phase,
        "batch_size": case.batch_size,
        "context": case.context,
        "layers": case.model.layers,
        "dtype": settings.dtype,
        "kernel": kernel,
        "cache": f"paged:{settings.block_size}" if settings.block_size else "contiguous",
        "device": machine.name,
        "threads": machine.threads or None,
        "clock": machine.clock,
        "core_share": None if machine.cuda else machine.share,
    }


def _compared(prefix: str, bound: Bound, time: Timing, ceilings: Ceilings, dtype: str) -> dict[str, Any]:
    """Return bound, measured time, ratio, spread, and the reached share of each ceiling."""
    seconds = time.median
    return {
        f"{prefix}predicted_s": bound.seconds,
        f"{prefix}measured_s": seconds,
        f"{prefix}ratio": seconds / bound.seconds,
        f"{prefix}spread": time.spread,
        f"{prefix}repeats": time.repeats,
        f"{prefix}graph": time.graph,
        f"{prefix}bound": bound.bound,
        f"{prefix}bytes": bound.bytes,
        f"{prefix}flops": bound.flops,
        f"{prefix}bandwidth_share": bound.bytes / seconds / ceilings.bandwidth_bytes_per_s,
        f"{prefix}flops_share": bound.flops / seconds / ceilings.flops_per_s[dtype],
    }


def _ceiling_columns(ceilings: Ceilings, dtype: str) -> dict[str, Any]:
    return {
        "bandwidth_bytes_per_s": ceilings.bandwidth_bytes_per_s,
        "copy_bytes_per_s": ceilings.copy_bytes_per_s,
        "read_bytes_per_s": ceilings.read_bytes_per_s,
        "flops_per_s": ceilings.flops_per_s[dtype],
        "launch_s": ceilings.launch_s,
    }


Progress = Callable[[str, int], None]  # (next step, number of finished steps)
Result = tuple[Case | None, dict[str, Any]]


class Job(NamedTuple):
    """One run of `measure`.

    Attributes:
        steps: Number of steps of the progress bar.
        results: Measures with the given ceilings and yields records.
    """

    steps: int
    results: Callable[[Ceilings, Gpu, Progress], Iterator[Result]]


def layers_job(cases: list[Case], settings: MeasureSettings, machine: Machine, refused: Callable[[str], None]) -> Job:
    """Return a job that measures each case in turn; `refused` receives a message for cases that do not fit."""

    def results(ceilings: Ceilings, gpu: Gpu, progress: Progress) -> Iterator[Result]:
        return measured(cases, settings, machine, ceilings, gpu, refused, progress)

    return Job(len(cases), results)


def generation_job(
    decoders: dict[str, Model],
    lengths: Sequence[int],
    new_tokens: int,
    batch_sizes: Sequence[int],
    settings: MeasureSettings,
    modes: str,
    head: str,
    machine: Machine,
) -> Job:
    """Return a job that generates with each decoder, prompt length and batch size.

    Raises UserError if a generation does not fit, or for an unknown mode or head.
    """
    requests = [
        Request(model, prompt, new_tokens, batch, settings.dtype, modes_of(model, modes, head), name, settings.block_size)
        for (name, model), prompt, batch in product(decoders.items(), lengths, batch_sizes)
    ]
    for request in requests:
        check(request, machine)

    def results(ceilings: Ceilings, gpu: Gpu, progress: Progress) -> Iterator[Result]:
        for number, request in enumerate(requests):
            told = partial(_told, progress, sum(before.steps for before in requests[:number]))
            for record in generated(request, machine, ceilings, gpu, told):
                yield None, record

    return Job(sum(request.steps for request in requests), results)


def _told(progress: Progress, before: int, text: str, done: int) -> None:
    progress(text, before + done)


PHASES = ("decode", "prefill")
MOST_CASES, MOST_SECONDS = 2000, 600
# Heads of the standard layer, batch sizes, contexts and seconds by device: on a CPU all variants in a minute or two.
HEADS = {"cpu": 16, "cuda": 32}
BATCHES = {"cpu": {"decode": [4], "prefill": [1]}, "cuda": {"decode": [1, 16, 64, 256], "prefill": [1]}}
CONTEXTS = {
    "cpu": {"decode": [8192], "prefill": [256]},
    "cuda": {"decode": [1 << 10, 8 << 10, 32 << 10, 128 << 10], "prefill": [1 << 10, 4 << 10, 16 << 10]},
}
SECONDS = {"cpu": 0.4, "cuda": 0.2}


def settings(
    machine: Machine, dtype: str, kernel: str, cache: str, block_size: int, seconds: float, graphs: bool
) -> MeasureSettings:
    """Return checked settings. Raises UserError for an unknown or unsupported dtype, kernel or cache."""
    from kvcalc.storage.dtypes import canonical

    chosen = canonical(dtype)
    if chosen == "auto":
        chosen = "bf16" if machine.cuda else "fp32"
    if chosen not in DTYPES:
        raise UserError(f"`measure` does not compute in {dtype!r}", hint=f"It does in {', '.join(DTYPES)}")
    if kernel not in KERNELS:
        raise UserError(f"unknown kernel {kernel!r}", hint=nearest(kernel, KERNELS))
    if kernel == "flex" and not machine.cuda:
        raise UserError("kernel flex compiles for CUDA, and this is a CPU", hint="Use sdpa or plain")
    if cache not in ("contiguous", "paged"):
        raise UserError(f"unknown cache {cache!r}", hint="Known: contiguous, paged")
    if not 0 <= seconds <= MOST_SECONDS:
        raise UserError(f"seconds {seconds} is outside 0 to {MOST_SECONDS}")
    if cache == "paged" and not 1 <= block_size <= 1 << 20:
        raise UserError(f"block-size {block_size} is outside 1 to 2^20")
    block = block_size if cache == "paged" else 0
    return MeasureSettings(chosen, kernel, block, seconds or SECONDS[machine.device.type], graphs)


def stacks(model: Model | None, variants: Sequence[str], machine: Machine) -> dict[str, Model]:
    """Return the layers to measure, by variant: the model's own kinds, or variants of one of its layers."""
    names = _names(variants)
    if model is not None and not names:
        return stacks_of(model)
    base = base_of(model) if model is not None else standard_model(HEADS[machine.device.type])
    return {name: named(base, name) for name in names or NAMES}


def planned(
    chosen: dict[str, Model], phase: str, machine: Machine, contexts: list[int], prefill_contexts: list[int], batches: list[int]
) -> list[Case]:
    """Return the cases. Empty lists mean the defaults of the device.

    Raises UserError for an unknown phase or too many cases.
    """
    if phase not in (*PHASES, "both"):
        raise UserError(f"unknown phase {phase!r}", hint="Known: decode, prefill, both")
    kind = machine.device.type
    lengths = {p: contexts or CONTEXTS[kind][p] for p in PHASES}
    lengths["prefill"] = prefill_contexts or lengths["prefill"]
    sizes = {p: batches or BATCHES[kind][p] for p in PHASES}
    found = all_cases(chosen, PHASES if phase == "both" else (phase,), sizes, lengths)
    if len(found) > MOST_CASES:
        raise UserError(f"{len(found):,} cases are too many: one run measures at most {MOST_CASES:,}")
    _check_layers(chosen)
    return found


def _check_layers(chosen: dict[str, Model]) -> None:
    """Raise UserError if a layer has no torch twin. The layers are built on the `meta` device."""
    with torch.device("meta"):
        for model in chosen.values():
            for layer in model.kinds.values():
                if len(layer.mixers) != 1:
                    raise UserError(f"`measure` has no layer with {len(layer.mixers)} mixers, as {model.name} has")
                build_mixer(layer.mixers[0], model.hidden_size, not model.position_embeddings, layer.shares_cache)


def ceiling_dtypes(dtype: str, every: bool) -> list[str]:
    """Return the dtypes whose products are measured: `dtype`, fp32 for vector work, all for a preset."""
    return list(dict.fromkeys((dtype, "fp32", *(DTYPES if every else ()))))


def decoders(model: Model | None, variants: Sequence[str]) -> dict[str, Model]:
    """Return the decoders to generate with, by variant: the model (GPT-2 small by default) or its variants.

    Raises UserError for an unknown form or a layer without a torch twin.
    """
    from kvcalc.library.load import load_model

    base = msgspec.structs.replace(model or load_model("gpt2"), quantization=(), kv_cache_dtype=None)
    chosen = {name: whole(base, name) for name in _names(variants)} or {"": base}
    with torch.device("meta"):
        for decoder in chosen.values():
            Decoder(decoder)
    return chosen


def _names(variants: Sequence[str]) -> list[str]:
    return [name.strip() for text in variants for name in text.split(",")]
