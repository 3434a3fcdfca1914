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
from kvcalc.gpu.gpu import Gpu
from kvcalc.layers.attention import Sparse
from kvcalc.layers.batch import Batch
from kvcalc.layers.cost import Operator, Role
from kvcalc.library.load import load_model
from kvcalc.measure.cases import (
    NAMES,
    Case,
    LayerStack,
    allocated,
    base_of,
    build_mixers,
    stacks_of,
    standard_model,
    storage_bytes,
    variant_layers,
    variant_model,
)
from kvcalc.measure.ceilings import Ceilings, timed
from kvcalc.measure.expected import Bound, bound_of, difference, traffic_of
from kvcalc.measure.generation import (
    GenerationRequest,
    Progress,
    check,
    generated,
    modes_of,
)
from kvcalc.measure.layers.decoder import Decoder
from kvcalc.measure.layers.grouped_layer import KERNELS
from kvcalc.measure.layers.latent_layer import MAX_SCORED
from kvcalc.measure.machine import Machine
from kvcalc.measure.torch_cache import DTYPES, TorchLayerCache
from kvcalc.model.forward_pass import forward
from kvcalc.model.memory import CacheSize, cache_size
from kvcalc.model.model import Model
from kvcalc.model.precision import Precision
from kvcalc.records import Record
from kvcalc.storage.formats import canonical
from kvcalc.units import format_bytes

MAX_COPIES = 64
PAST_CACHE = 4  # size of all rotating inputs ÷ last-level cache
CacheStep = Callable[[Sequence[TorchLayerCache]], object]
Result = tuple[Case | None, Record]


class MeasureSettings(NamedTuple):
    """Settings of a measurement.

    Attributes:
        dtype: Type of weights, products and cache.
        kernel: Attention kernel: auto, sdpa or plain.
        block_size: Tokens per block of a paged cache; 0 for a contiguous cache.
        seconds: Time to spend on each of the two times of a case.
        graphs: Whether to replay CUDA graphs.
    """

    dtype: str
    kernel: str = "auto"
    block_size: int = 0
    seconds: float = 1.0
    graphs: bool = True

    def cache_size(self, case: Case) -> CacheSize:
        """Return the predicted cache bytes of a case."""
        size = case.model, case.context, case.batch_size, Precision(self.dtype)
        return cache_size(*size, self.block_size or 16)

    def kernel_of(self, case: Case, machine: Machine) -> str:
        """Return the kernel for `auto`: torch's fused kernel, or plain products for one query on a
        CPU, which read the cache faster."""
        if self.kernel != "auto":
            return self.kernel
        return "plain" if case.new == 1 and not machine.cuda else "sdpa"


def operators_of(case: Case, dtype: str) -> list[Operator]:
    """Return the operators of one pass. MLA is absorbed in decode and expanded in prefill."""
    make_batch, form = (
        (Batch.decode, "absorbed") if case.new == 1 else (Batch.prefill, "expanded")
    )
    batch = make_batch(case.context, case.batch_size)
    operators = forward(case.model, batch, Precision(dtype), mla_form=form)
    return [operator for operator in operators if operator.layer]


def needed_bytes(case: Case, settings: MeasureSettings) -> int:
    """Return the bytes of weights, cache and an estimate of the largest intermediate tensors."""
    element = DTYPES[settings.dtype].itemsize
    model, tokens = case.model, case.batch_size * case.new
    weights = [w for kind in model.order for w in model.layer_weights(kind)]
    elements = sum(w.elements for w in weights)
    elements += 4 * tokens * sum(w.outputs for w in weights)
    mixers = [part for layer in model.kinds.values() for part in layer.mixers]
    scores = tokens * case.context
    if settings.kernel == "plain":
        elements += 3 * scores * max(part.as_mha()[0] for part in mixers)
    if any(isinstance(part, Sparse) for part in mixers):
        elements += 2 * MAX_SCORED + (3 * scores if case.new > 1 else 0)
    size = settings.cache_size(case)
    return elements * element + max(size.stored, size.allocated)


def measure(
    case: Case,
    settings: MeasureSettings,
    machine: Machine,
    ceilings: Ceilings,
    gpu: Gpu,
) -> Record:
    """Return the record of one case: times of whole layers, and of attention (or the scan) only."""
    dtype, kernel = settings.dtype, settings.kernel_of(case, machine)
    operators = operators_of(case, dtype)
    core = [operator for operator in operators if operator.role is Role.CORE]
    bounds = [bound_of(operators, gpu), bound_of(core, gpu)]
    copies = [_copies(bound, case, settings, machine) for bound in bounds]
    record: dict[str, Any] = {
        "variant": case.variant,
        "attention": case.model.attention,
        "phase": case.phase,
        "batch_size": case.batch_size,
        "context": case.context,
        "layers": case.model.layers,
        "dtype": dtype,
        "kernel": kernel,
        "cache": f"paged:{settings.block_size}" if settings.block_size else "contiguous",
        **machine.columns,
    }
    with torch.no_grad():
        stacks = [LayerStack(case, machine, dtype, kernel) for _ in range(copies[0])]
        caches, allocator_bytes = _filled_caches(stacks[0], max(copies), settings, machine)
        layer_steps: list[CacheStep] = [stack.step for stack in stacks]
        core_steps: list[CacheStep] = [stack.core() for stack in stacks]
        for prefix, bound, count, steps in zip(
            ("", "attention_"), bounds, copies, (layer_steps, core_steps), strict=True
        ):
            calls = [partial(steps[i % len(steps)], caches[i]) for i in range(count)]
            record |= _timed_record(prefix, calls, bound, settings, machine, ceilings)
    why, unfused_s = record.pop("why"), record.pop("unfused_s")
    size = settings.cache_size(case)
    return record | {
        "attention_why": why,
        "predicted_bytes": size.allocated if settings.block_size else size.stored,
        "allocated_bytes": storage_bytes(caches[0]),
        "allocator_bytes": allocator_bytes,
        "copies": copies[0],
        "attention_copies": copies[1],
        "attention_unfused_s": unfused_s,
        "bandwidth_bytes_per_s": ceilings.bandwidth_bytes_per_s,
        "copy_bytes_per_s": ceilings.copy_bytes_per_s,
        "read_bytes_per_s": ceilings.read_bytes_per_s,
        "flops_per_s": ceilings.flops_per_s[dtype],
        "launch_s": ceilings.launch_s,
    }


def _filled_caches(
    stack: LayerStack, count: int, settings: MeasureSettings, machine: Machine
) -> tuple[list[list[TorchLayerCache]], int]:
    """Return `count` sets of caches with random rows, and the bytes that the allocator reserved
    for one set."""
    first, allocator_bytes = allocated(lambda: stack.caches(settings.block_size), machine)
    caches = [first, *(stack.caches(settings.block_size) for _ in range(count - 1))]
    for layer_cache in {cache for layer_caches in caches for cache in layer_caches}:
        layer_cache.fill()
    return caches, allocator_bytes


def _copies(bound: Bound, case: Case, settings: MeasureSettings, machine: Machine) -> int:
    """Return the number of copies to rotate over, so that each call reads its data from memory.

    One copy is enough if the bound is compute.
    """
    if bound.limit == "compute":
        return 1
    copies = -(-PAST_CACHE * machine.cache_bytes // max(1, bound.bytes))
    fitting_copies = machine.free_bytes() // (2 * needed_bytes(case, settings))
    return max(1, min(copies, MAX_COPIES, fitting_copies))


def _timed_record(
    prefix: str,
    calls: Sequence[Callable[[], object]],
    bound: Bound,
    settings: MeasureSettings,
    machine: Machine,
    ceilings: Ceilings,
) -> Record:
    """Time the calls, and return bound, time, spread, shares of the ceilings and the difference.

    The keys begin with the prefix, except `launches`, which is of whole layers, and `why` and
    `unfused_s`, which are of the last timed calls.
    """
    time = timed(calls, machine, settings.seconds, settings.graphs)
    traffic = traffic_of(calls[0])
    unfused_s = max(bound.seconds, traffic.bytes / ceilings.bandwidth_bytes_per_s)
    launch_s = 0.0 if time.graph else ceilings.launch_s
    is_resident = bound.limit == "memory" and bound.bytes * len(calls) <= machine.cache_bytes
    reason, why = difference(bound, time.median, traffic, launch_s, unfused_s, is_resident)
    columns = {
        "predicted_s": bound.seconds,
        "measured_s": time.median,
        "ratio": time.median / bound.seconds,
        "spread": time.spread,
        "repeats": time.repeats,
        "graph": time.graph,
        "bound": bound.limit,
        "bytes": bound.bytes,
        "flops": bound.flops,
        "bandwidth_share": bound.bytes / time.median / ceilings.bandwidth_bytes_per_s,
        "flops_share": bound.flops / time.median / ceilings.flops_per_s[settings.dtype],
        "difference": reason,
    }
    record: dict[str, Any] = {prefix + key: value for key, value in columns.items()}
    if not prefix:
        record["launches"] = traffic.launches
    return record | {"why": why, "unfused_s": unfused_s}


def measured(
    cases: Sequence[Case],
    settings: MeasureSettings,
    machine: Machine,
    warn: Callable[[str], None],
    ceilings: Ceilings,
    gpu: Gpu,
    progress: Progress,
) -> Iterator[Result]:
    """Yield each case that fits, with its record.

    `warn` receives a message for each case that does not fit; `progress` receives the next step.
    """
    for number, case in enumerate(cases):
        progress(str(case), number)
        needed, free = needed_bytes(case, settings), machine.free_bytes()
        if needed > free:
            sizes = f"needs {format_bytes(needed)}, and {format_bytes(free)} can be used"
            warn(f"{case}: {sizes}; left out")
            continue
        try:
            yield case, measure(case, settings, machine, ceilings, gpu)
        except torch.OutOfMemoryError:
            warn(f"{case}: ran out of memory")
        if machine.cuda:
            torch.cuda.empty_cache()


class Job(NamedTuple):
    """One run of `measure`.

    Attributes:
        steps: Number of steps of the progress bar.
        results: Measures with the given ceilings and yields records.
    """

    steps: int
    results: Callable[[Ceilings, Gpu, Progress], Iterator[Result]]


def layers_job(
    cases: list[Case],
    settings: MeasureSettings,
    machine: Machine,
    warn: Callable[[str], None],
) -> Job:
    """Return a job that measures each case in turn; `warn` receives a message for cases that do
    not fit."""
    return Job(len(cases), partial(measured, cases, settings, machine, warn))


def generation_job(requests: list[GenerationRequest], machine: Machine) -> Job:
    """Return a job that runs each generation. Raises UserError if one does not fit."""
    for request in requests:
        check(request, machine)

    def results(ceilings: Ceilings, gpu: Gpu, progress: Progress) -> Iterator[Result]:
        done = 0
        for request in requests:

            def request_progress(text: str, step: int, done: int = done) -> None:
                progress(text, done + step)

            for record in generated(request, machine, ceilings, gpu, request_progress):
                yield None, record
            done += request.steps

    return Job(sum(request.steps for request in requests), results)


PHASES = ("decode", "prefill")
MAX_CASES, MAX_SECONDS = 2000, 600
# Heads of the standard layer, seconds, batch sizes and contexts by device: on a CPU all variants in
# a minute or two.
HEADS = {"cpu": 16, "cuda": 32}
SECONDS = {"cpu": 0.4, "cuda": 0.2}
BATCHES = {
    "cpu": {"decode": [4], "prefill": [1]},
    "cuda": {"decode": [1, 16, 64, 256], "prefill": [1]},
}
CONTEXTS = {
    "cpu": {"decode": [8192], "prefill": [256]},
    "cuda": {
        "decode": [1 << 10, 8 << 10, 32 << 10, 128 << 10],
        "prefill": [1 << 10, 4 << 10, 16 << 10],
    },
}


def settings(
    machine: Machine,
    dtype: str,
    kernel: str,
    cache: str,
    block_size: int,
    seconds: float,
    graphs: bool,
) -> MeasureSettings:
    """Return checked settings. Raises UserError for an unknown or unsupported dtype, kernel or
    cache."""
    name = canonical(dtype)
    if name == "auto":
        name = "bf16" if machine.cuda else "fp32"
    if name not in DTYPES:
        hint = f"It does in {', '.join(DTYPES)}"
        raise UserError(f"`measure` does not compute in {dtype!r}", hint=hint)
    if kernel not in KERNELS:
        raise UserError(f"unknown kernel {kernel!r}", hint=nearest(kernel, KERNELS))
    if cache not in ("contiguous", "paged"):
        raise UserError(f"unknown cache {cache!r}", hint="Known: contiguous, paged")
    if not 0 <= seconds <= MAX_SECONDS:
        raise UserError(f"seconds {seconds} is outside 0 to {MAX_SECONDS}")
    if cache == "paged" and not 1 <= block_size <= 1 << 20:
        raise UserError(f"block-size {block_size} is outside 1 to 2^20")
    block_size = block_size if cache == "paged" else 0
    seconds = seconds or SECONDS[machine.device.type]
    return MeasureSettings(name, kernel, block_size, seconds, graphs)


def stacks(model: Model | None, variants: Sequence[str], machine: Machine) -> dict[str, Model]:
    """Return the layers to measure, by variant: the model's own kinds, or variants of one of its
    layers."""
    names = _names(variants)
    if model is not None and not names:
        return stacks_of(model)
    base = standard_model(HEADS[machine.device.type]) if model is None else base_of(model)
    return {name: variant_layers(base, name) for name in names or NAMES}


def planned(
    models: dict[str, Model],
    phase: str,
    machine: Machine,
    contexts: list[int],
    prefill_contexts: list[int],
    batches: list[int],
) -> list[Case]:
    """Return the cases in the order variant, phase, batch size, context.

    Empty lists mean the defaults of the device. Raises UserError for an unknown phase, a layer
    without a torch twin, or too many cases.
    """
    if phase not in (*PHASES, "both"):
        raise UserError(f"unknown phase {phase!r}", hint="Known: decode, prefill, both")
    device = machine.device.type
    lengths = {"decode": contexts, "prefill": prefill_contexts or contexts}
    cases = []
    for name, model in models.items():
        for each_phase in PHASES if phase == "both" else (phase,):
            batch_sizes = batches or BATCHES[device][each_phase]
            phase_contexts = lengths[each_phase] or CONTEXTS[device][each_phase]
            for batch_size, context in product(batch_sizes, phase_contexts):
                cases.append(Case(name, model, each_phase, batch_size, context))
    if len(cases) > MAX_CASES:
        raise UserError(
            f"{len(cases):,} cases are too many: one run measures at most {MAX_CASES:,}"
        )
    with torch.device("meta"):
        for model in models.values():
            build_mixers(model)
    return cases


def ceiling_dtypes(dtype: str, has_preset: bool) -> list[str]:
    """Return the dtypes whose products are measured: `dtype`, fp32 for vector work, all for a
    preset."""
    return list(dict.fromkeys((dtype, "fp32", *(DTYPES if has_preset else ()))))


def decoders(model: Model | None, variants: Sequence[str]) -> dict[str, Model]:
    """Return the decoders to generate with, by variant: the model (GPT-2 small by default) or its
    variants.

    Raises UserError for an unknown form or a layer without a torch twin.
    """
    model = model or load_model("gpt2")
    model = msgspec.structs.replace(model, quantization=(), kv_cache_dtype=None)
    models = {name: variant_model(model, name) for name in _names(variants)} or {"": model}
    with torch.device("meta"):
        for decoder in models.values():
            Decoder(decoder)
    return models


def generation_requests(
    models: dict[str, Model],
    prompt_lens: Sequence[int],
    new_tokens: int,
    batch_sizes: Sequence[int],
    settings: MeasureSettings,
    modes: str,
    head: str,
) -> list[GenerationRequest]:
    """Return a generation for each decoder, prompt length and batch size.

    Raises UserError for an unknown mode or head.
    """
    requests = []
    for (name, model), prompt_len, batch_size in product(
        models.items(), prompt_lens, batch_sizes
    ):
        sizes = prompt_len, new_tokens, batch_size, settings.dtype
        selected_modes = modes_of(modes, head)
        request = GenerationRequest(model, *sizes, selected_modes, name, settings.block_size)
        requests.append(request)
    return requests


def _names(variants: Sequence[str]) -> list[str]:
    return [name.strip() for text in variants for name in text.split(",")]
