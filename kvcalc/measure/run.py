"""Measure layers or generations on this machine, and compare each time with its prediction.

The functions at the end choose shapes, lengths and dtypes by device.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from typing import NamedTuple

import torch
from msgspec.structs import replace

from kvcalc.errors import UserError
from kvcalc.layers.attention import Sparse
from kvcalc.layers.batch import Batch
from kvcalc.layers.cost import Operator, Role
from kvcalc.library.load import load_model
from kvcalc.measure.cases import (
    NAMES,
    Case,
    LayerStack,
    allocator_bytes,
    base_of,
    build_mixers,
    stacks_of,
    standard_model,
    variant_layers,
    variant_model,
)
from kvcalc.measure.ceilings import Ceilings, Machine, as_gpu, time_calls
from kvcalc.measure.expected import (
    MachineRates,
    RateSampler,
    all_heads_per_key,
    bound_of,
    count_operations,
)
from kvcalc.measure.generation import GenerationRequest, Progress, check, run_generation
from kvcalc.measure.layers.base_layer import DTYPES, fill, storage_bytes
from kvcalc.measure.layers.decoder import Decoder
from kvcalc.measure.layers.latent_layer import MAX_SCORED
from kvcalc.model.forward_pass import forward
from kvcalc.model.memory import cache_size
from kvcalc.model.model import Model
from kvcalc.model.precision import Precision
from kvcalc.records import Record
from kvcalc.storage.formats import canonical
from kvcalc.units import format_bytes

NUM_SAMPLES = 5  # of the machine's rates before each case
Result = tuple[Case | None, Record]


class MeasureSettings(NamedTuple):
    """Settings that apply to all measured cases: the data type and the time to spend.

    Attributes:
        dtype: Data type of weights, matrix products and cache: fp64, fp32, bf16 or fp16.
        seconds: Approximate seconds to spend on each measurement of a case.
    """

    dtype: str
    seconds: float

    def cache_bytes(self, case: Case) -> int:
        """Return the predicted bytes of the KV cache of a case, for all its layers and sequences.

        Args:
            case: The layers, the phase, the batch size and the context.
        """
        return cache_size(
            case.model, case.context, case.batch_size, Precision(self.dtype)
        ).stored


def operators_of(case: Case, dtype: str) -> list[Operator]:
    """Return the operators of one forward pass through the layers of a case.

    MLA is absorbed for one new token and expanded otherwise. Embedding and LM head are left out.

    Args:
        case: The layers, the phase, the batch size and the context.
        dtype: Data type of weights, matrix products and cache.
    """
    form = "absorbed" if case.new == 1 else "expanded"
    batch = Batch.prefill(case.new, case.batch_size, case.past)
    operators = forward(case.model, batch, Precision(dtype), mla_form=form)
    return [operator for operator in operators if operator.layer]


def needed_bytes(case: Case, settings: MeasureSettings) -> int:
    """Return the bytes of memory that measuring a case needs, to check whether it fits.

    They are weights, cache, and an estimate of intermediate tensors.

    Args:
        case: The layers, the phase, the batch size and the context.
        settings: Data type and time to spend.
    """
    model, tokens = case.model, case.batch_size * case.new
    weights = [w for kind in model.order for w in model.layer_weights(kind)]
    elements = sum(w.elements + 4 * tokens * w.outputs for w in weights)
    if any(isinstance(part, Sparse) for part in model.mixers):
        elements += 2 * MAX_SCORED + (3 * tokens * case.context if case.new > 1 else 0)
    return elements * DTYPES[settings.dtype].itemsize + settings.cache_bytes(case)


def measure(
    case: Case, settings: MeasureSettings, machine: Machine, ceilings: Ceilings
) -> Record:
    """Measure one case, and return its times, predictions and bounds in seconds as a dictionary.

    Times are of one pass. Keys with the prefix `attention_` describe only the attention or scan,
    all others the complete layers. `ceilings` has this machine's measured bandwidth and FLOP/s.
    """
    dtype, gpu = settings.dtype, as_gpu(machine, ceilings)
    layer = operators_of(case, dtype)
    core = [operator for operator in layer if operator.role is Role.CORE]
    needed = needed_bytes(case, settings)
    bounds = [bound_of(part, gpu) for part in (layer, core)]
    copies = [
        1 if bound.limit == "compute" else machine.copies(bound.bytes, needed)
        for bound in bounds
    ]
    record = {
        "variant": case.variant,
        "attention": case.model.attention,
        "phase": case.phase,
        "batch_size": case.batch_size,
        "context": case.context,
        "layers": case.model.layers,
        "dtype": dtype,
        "kernel": "plain" if case.new == 1 and not machine.cuda else "sdpa",
        **machine.columns,
    }
    with torch.no_grad():
        stacks = [LayerStack(case, machine, dtype) for _ in range(copies[0])]
        mixers = [mixer for stack in stacks for mixer in stack.mixers]
        rows = {1, case.new, case.batch_size * case.new}
        sampler = RateSampler(mixers, machine, dtype, rows, all_heads_per_key(layer))
        for _ in range(NUM_SAMPLES):
            sampler.sample()
        rates = sampler.rates(gpu)
        bytes_before = allocator_bytes(machine)
        first = stacks[0].caches()
        bytes_after = allocator_bytes(machine)
        caches = [first, *(stacks[0].caches() for _ in range(max(copies) - 1))]
        for layer_caches in caches:
            fill(layer_caches)
        layer_steps = [stack.step for stack in stacks]
        core_steps = [stack.core() for stack in stacks]
        for prefix, operators, count, steps in (
            ("", layer, copies[0], layer_steps),
            ("attention_", core, copies[1], core_steps),
        ):
            calls = [partial(steps[i % len(steps)], caches[i]) for i in range(count)]
            columns = _timed_columns(calls, operators, rates, settings, machine)
            record |= {prefix + key: value for key, value in columns.items()}
        record["cache_error"] = stacks[0].cache_error()
    return record | {
        "predicted_bytes": settings.cache_bytes(case),
        "allocated_bytes": storage_bytes(first),
        "allocator_bytes": bytes_after - bytes_before or None,
        "bandwidth_bytes_per_s": ceilings.bandwidth_bytes_per_s,
        **ceilings._asdict(),
        "flops_per_s": ceilings.flops_per_s[dtype],
    }


def _timed_columns(
    calls: Sequence[Callable[[], object]],
    operators: Sequence[Operator],
    rates: MachineRates,
    settings: MeasureSettings,
    machine: Machine,
) -> Record:
    """Time the calls, and return prediction, bound, time, spread and shares of the ceilings."""
    gpu = rates.gpu
    bound = bound_of(operators, gpu)
    time = time_calls(calls, machine, settings.seconds)
    host_calls = 0 if time.graph else count_operations(calls[0])
    predicted_s = rates.pass_seconds(operators, host_calls)
    return {
        "predicted_s": predicted_s,
        "bound_s": bound.seconds,
        "measured_s": time.median,
        "ratio": time.median / predicted_s,
        "spread": time.spread,
        "graph": time.graph,
        "bound": bound.limit,
        "bytes": bound.bytes,
        "flops": bound.flops,
        "bandwidth_share": bound.bytes / time.median / gpu.bandwidth_bytes_per_s,
        "flops_share": bound.flops / time.median / gpu.flops_per_s[settings.dtype],
    }


def measure_cases(
    cases: Sequence[Case],
    settings: MeasureSettings,
    machine: Machine,
    warn: Callable[[str], None],
    ceilings: Ceilings,
    progress: Progress,
) -> Iterator[Result]:
    """Measure the cases that fit in memory, and yield each with its results as a dictionary.

    After a case of the variant `mha`, the results of other variants with the same phase, batch size
    and context also have their speed-up over `mha`.

    Args:
        cases: Cases to measure.
        settings: Data type and time to spend.
        machine: The machine to measure on.
        warn: Receives a message for each case that does not fit.
        ceilings: Measured bandwidth, FLOP/s and launch time of the machine.
        progress: Receives the name of the next case and the number of finished cases.
    """
    mha = {}
    for number, case in enumerate(cases):
        progress(str(case), number)
        needed, free = needed_bytes(case, settings), machine.free_bytes()
        if needed > free:
            sizes = f"needs {format_bytes(needed)}, and {format_bytes(free)} can be used"
            warn(f"{case}: {sizes}; left out")
            continue
        try:
            record = measure(case, settings, machine, ceilings)
        except torch.OutOfMemoryError:
            warn(f"{case}: ran out of memory")
            continue
        shape = case[2:]
        if case.variant == "mha":
            mha[shape] = record
        speedups = {
            f"{basis}_speedup": mha[shape][f"{basis}_s"] / record[f"{basis}_s"]
            if shape in mha
            else None
            for basis in ("attention_predicted", "attention_measured")
        }
        yield case, {**record, **speedups}
        if machine.cuda:
            torch.cuda.empty_cache()


def run_generations(
    requests: Sequence[GenerationRequest],
    machine: Machine,
    ceilings: Ceilings,
    progress: Progress,
) -> Iterator[Result]:
    """Run and time generations, and yield (None, results) for each of them in each of three modes.

    The modes are: with a cache; without; and without, but with the LM head on all positions. None
    is in the place of a case, so that results have the form that `measure_cases` yields.

    Args:
        requests: Generations to measure.
        machine: The machine to measure on.
        ceilings: Measured bandwidth, FLOP/s and launch time of the machine.
        progress: Receives the name of the next step and the number of finished steps.
    """
    gpu = as_gpu(machine, ceilings)
    done = 0
    for request in requests:
        for record in run_generation(request, machine, gpu, progress, done):
            yield None, record
        done += request.steps


PHASES = ("decode", "prefill")
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
    "cuda": {"decode": [1024, 8192, 32_768, 131_072], "prefill": [1024, 4096, 16_384]},
}


def measure_settings(machine: Machine, dtype: str, seconds: float) -> MeasureSettings:
    """Return the settings of a measurement, with the defaults of the device filled in.

    Args:
        machine: The machine to measure on.
        dtype: Requested data type; `auto` for bf16 on a GPU and fp32 on a CPU.
        seconds: Approximate seconds to spend on each measurement of a case; 0 for the device's
            default.

    Raises:
        UserError: The data type is not supported.
    """
    name = canonical(dtype)
    if name == "auto":
        name = "bf16" if machine.cuda else "fp32"
    if name not in DTYPES:
        hint = f"It does in {', '.join(DTYPES)}"
        raise UserError(f"`measure` does not compute in {dtype!r}", hint)
    return MeasureSettings(name, seconds or SECONDS[machine.device.type])


def stacks(model: Model | None, variants: Sequence[str], machine: Machine) -> dict[str, Model]:
    """Return the small models whose layers are measured, by printed name.

    Without variants there is one model for each kind of layer in `model`. With variants there is
    one model for each attention variant, in which it replaces the attention of the first layer.

    Args:
        model: Model whose layers are measured or replaced; None for a standard layer with
            multi-head attention (MHA). If also `variants` is empty, all standard variants are
            measured, such as mha, gqa and mla.
        variants: Names of attention variants. One text may have several, separated by commas.
        machine: The machine to measure on, which sets the size of the standard layer.
    """
    names = _names(variants)
    if model is not None and not names:
        return stacks_of(model)
    base = standard_model(HEADS[machine.device.type]) if model is None else base_of(model)
    return {name: variant_layers(base, name) for name in names or NAMES}


def plan_cases(
    models: dict[str, Model],
    phase: str,
    machine: Machine,
    contexts: Sequence[int],
    batches: Sequence[int],
) -> list[Case]:
    """Return the cases to measure: every combination of model, phase, batch size and context.

    Args:
        models: Small models by printed name of the variant or kind of layer, from `stacks`.
        phase: `decode`, `prefill` or `both`.
        machine: The machine to measure on.
        contexts: Tokens of each sequence; empty for the device's defaults.
        batches: Batch sizes; empty for the device's defaults.

    Raises:
        UserError: kvcalc cannot run one of the layers in torch.
    """
    device = machine.device.type
    cases = []
    for (name, model), case_phase in product(models.items(), PHASES):
        if phase not in (case_phase, "both"):
            continue
        batch_sizes = batches or BATCHES[device][case_phase]
        for sizes in product(batch_sizes, contexts or CONTEXTS[device][case_phase]):
            cases.append(Case(name, model, case_phase, *sizes))
    with torch.device("meta"):
        for model in models.values():
            build_mixers(model)
    return cases


def generation_requests(
    model: Model | None,
    variants: Sequence[str],
    prompt_lens: Sequence[int],
    new_tokens: int,
    batch_sizes: Sequence[int],
    dtype: str,
    machine: Machine,
) -> list[GenerationRequest]:
    """Return the generations to measure: all combinations of variant, prompt length, batch size.

    Args:
        model: Model to build; None for GPT-2 small.
        variants: Attention variants, each of which replaces the model's attention in turn. One text
            may have several, separated by commas. Empty for the model itself.
        prompt_lens: Prompt tokens of each sequence.
        new_tokens: Generated tokens of each sequence.
        batch_sizes: Numbers of sequences; empty for 1.
        dtype: Data type of weights and cache: fp64, fp32, bf16 or fp16.
        machine: The machine to measure on.

    Raises:
        UserError: A variant is unknown, kvcalc cannot run one of the layers in torch, or a
            generation does not fit in memory.
    """
    model = model or load_model("gpt2")
    model = replace(model, quantization=(), kv_cache_dtype=None)
    models = {name: variant_model(model, name) for name in _names(variants)} or {"": model}
    requests = []
    for name, decoder in models.items():
        with torch.device("meta"):
            Decoder(decoder)
        for prompt_len, batch_size in product(prompt_lens, batch_sizes or [1]):
            sizes = prompt_len, new_tokens, batch_size
            requests.append(GenerationRequest(decoder, *sizes, dtype, name))
            check(requests[-1], machine)
    return requests


def _names(variants: Sequence[str]) -> list[str]:
    return [name.strip() for text in variants for name in text.split(",")]
