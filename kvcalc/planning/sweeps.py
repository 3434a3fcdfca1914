"""Records over contexts, batch sizes and KV heads, beyond the records that commands print.

Pictures take these records. Nothing here draws.
"""

from bisect import bisect_left
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from msgspec import structs

from kvcalc.arithmetic import grouped
from kvcalc.capacity.fit_records import pass_with_memory
from kvcalc.errors import UserError, list_few, printable
from kvcalc.layers.attention import Latent, Sparse
from kvcalc.layers.batch import ONE_GPU, Batch, Parallelism
from kvcalc.layers.cost import Role
from kvcalc.model.forward_pass import through_layers, total
from kvcalc.model.memory import cache_size, weight_bytes
from kvcalc.model.model import Model
from kvcalc.model.precision import Precision, formats_of
from kvcalc.planning.variants import Variant
from kvcalc.question.serving_options import LatencyOptions
from kvcalc.records import Record
from kvcalc.serving.request_latency import drafting, latency_records, request_memory
from kvcalc.serving.speculation import step_times
from kvcalc.serving.validation import remarks, validate
from kvcalc.timing.deployment import TimedDeployment, roofline_records
from kvcalc.timing.rows import read_rows

BATCHES = tuple(1 << n for n in range(9))
ACCEPTANCE_RATES = tuple(n / 50 for n in range(51))
USUAL_DRAFTED = (1, 2, 4, 8)
MAX_NAME = 60  # letters of a measured GPU's name


def geometric_steps(first: int, last: int) -> list[int]:
    """Return whole numbers from `first` to `last`, four in each doubling.

    Example: geometric_steps(8, 16) is [8, 10, 11, 13, 16]. Equal rounded numbers occur once.

    Args:
        first: Smallest number, which is the first of the list.
        last: Largest number, which is the last of the list. If it is not above `first`, it is the
            only number.
    """
    steps, value = [], float(first)
    while value < last:
        steps.append(round(value))
        value *= 2**0.25
    return [*dict.fromkeys([*steps, last])]


class CacheCurve(NamedTuple):
    """KV cache bytes of one model at several contexts, for a plot, with the bytes of its weights.

    A context is the number of tokens of each sequence. All bytes are for one GPU: the GPU that
    stores the most weights and KV cache.

    Attributes:
        label: Name of the curve in a picture.
        parameters: Number of parameters of the model.
        layers: Number of layers of the model.
        gpus: Number of GPUs over which the model is split.
        kv_cache_dtype: Dtype of the KV cache.
        weight_bytes: Bytes of the weights on this GPU.
        contexts: Numbers of tokens of each sequence, one for each point of the curve.
        stored_bytes: Bytes of the KV cache of all sequences of the batch on this GPU, at each
            context.
        read_bytes: Bytes of the KV cache that one decode step of the batch reads on this GPU, at
            each context.
    """

    label: str
    parameters: int
    layers: int
    gpus: int
    kv_cache_dtype: str
    weight_bytes: int
    contexts: Sequence[int]
    stored_bytes: Sequence[int]
    read_bytes: Sequence[int]


def cache_curve(
    model: Model,
    precision: Precision,
    contexts: Sequence[int],
    batch_size: int = 1,
    parallelism: Parallelism = ONE_GPU,
    label: str = "",
) -> CacheCurve:
    """Return the KV cache bytes of a model at several contexts.

    They are the bytes that one GPU stores and that it reads in a decode step. It is the GPU that
    stores the most weights and KV cache.

    Args:
        model: The model.
        precision: Data types of weights and KV cache.
        contexts: Numbers of tokens of each sequence, one for each point of the curve.
        batch_size: Number of concurrent sequences of the whole replica.
        parallelism: Tensor-, pipeline-, data- and expert-parallel sizes.
        label: Name of the curve; "" for the model's name.
    """
    sizes = [
        cache_size(model, context, batch_size, precision, parallelism=parallelism)
        for context in contexts
    ]
    return CacheCurve(
        label=label or model.name,
        parameters=model.parameters,
        layers=model.layers,
        gpus=parallelism.gpus,
        kv_cache_dtype=formats_of(model, precision).kv_cache_dtype,
        weight_bytes=weight_bytes(model, precision, parallelism),
        contexts=contexts,
        stored_bytes=[size.stored for size in sizes],
        read_bytes=[size.read for size in sizes],
    )


def contexts_up_to(last: int) -> list[int]:
    """Return contexts in tokens from 128 to `last`, with four in each doubling, for a plot.

    If `last` is at most 128, it is the only context.
    """
    return geometric_steps(128, last)


class SparseReads(NamedTuple):
    """KV cache of a model with MLA and a model with sparse attention (DSA) at several contexts.

    The curves are for one sequence and the whole model on one GPU. A context is the sequence's
    number of tokens.

    Attributes:
        dense: KV cache bytes of the model with MLA, which reads all cached tokens.
        sparse: KV cache bytes of the model with DSA, which reads index keys and selected tokens.
        crossing: Smallest context in tokens at which the model with DSA reads fewer bytes per layer
            in a decode step than the model with MLA; None if there is none.
    """

    dense: CacheCurve
    sparse: CacheCurve
    crossing: int | None


def sparse_reads(models: Sequence[Model], last: int, precision: Precision) -> SparseReads:
    """Return the KV cache of a model with MLA and a model with sparse attention (DSA), by context.

    The bytes are those that are stored and that a decode step reads. They are for one sequence and
    the whole model on one GPU.

    Args:
        models: The two models, in any order.
        last: Largest context in tokens.
        precision: Data types of weights and KV cache.

    Raises:
        UserError: The models are not one with DSA and one with MLA.
    """
    sparse = [model for model in models if _has_part(model, Sparse)]
    dense = [m for m in models if m not in sparse and _has_part(m, Latent)]
    if (len(models), len(sparse), len(dense)) != (2, 1, 1):
        kinds = [f"{m.name} has {m.attention}" for m in models]
        raise UserError(
            "the figure 'dsa-vs-mla' compares two models, one with DSA and one with MLA, such as "
            f"deepseek-v3.2 and deepseek-v3; {', '.join(kinds)}"
        )

    def layer_bytes(model: Model, context: int) -> float:
        return cache_size(model, context, precision=precision).read / model.layers

    crossing = bisect_left(
        range(last + 1),
        True,
        lo=1,
        key=lambda context: layer_bytes(sparse[0], context) < layer_bytes(dense[0], context),
    )
    contexts = sorted({*geometric_steps(256, last), min(crossing, last)})
    return SparseReads(
        dense=cache_curve(dense[0], precision, contexts),
        sparse=cache_curve(sparse[0], precision, contexts),
        crossing=crossing if crossing <= last else None,
    )


def _has_part(model: Model, kind: type) -> bool:
    return any(isinstance(part, kind) for part in model.parts)


class GenerationWork(NamedTuple):
    """Matrix FLOPs of each new token of one sequence, with and without a KV cache, for a plot.

    FLOPs are for one GPU of each pipeline stage, summed over the stages. All lists have one
    number per length.

    Attributes:
        model: Name of the model.
        gpus: Number of GPUs over which the model is split.
        lengths: Numbers of tokens in the sequence including the new one, evenly spaced.
        uncached_flops: FLOPs of the new token if all tokens of the sequence are computed again.
        uncached_attention_flops: The part of `uncached_flops` for attention scores and values,
            without projections.
        cached_flops: FLOPs of the new token if only this token is computed.
        cached_attention_flops: The part of `cached_flops` for attention scores and values, without
            projections.
    """

    model: str
    gpus: int
    lengths: list[int]
    uncached_flops: list[float]
    uncached_attention_flops: list[float]
    cached_flops: list[float]
    cached_attention_flops: list[float]


NUM_LENGTHS = 64  # points of a curve that look smooth on a linear axis


def generation_work(
    model: Model, last: int, precision: Precision, parallelism: Parallelism = ONE_GPU
) -> GenerationWork:
    """Return the matrix FLOPs of each new token of one sequence, with and without a KV cache.

    They are for at most 64 lengths, which are evenly spaced up to `last`. With several GPUs they
    are the FLOPs of one GPU of each pipeline stage, summed over the stages.

    Args:
        model: The model.
        last: Largest number of tokens in the sequence.
        precision: Data types of weights and KV cache.
        parallelism: Tensor-, pipeline-, data- and expert-parallel sizes.
    """
    steps = (max(1, last * step // NUM_LENGTHS) for step in range(1, NUM_LENGTHS + 1))
    lengths = [*dict.fromkeys(steps)]
    flops: list[list[float]] = [[], [], [], []]
    for length in lengths:
        passes = Batch.prefill(length), Batch.decode(length)
        for batch, columns in zip(passes, (flops[:2], flops[2:])):
            operators = through_layers(model, batch, precision, parallelism)
            attention = [operator for operator in operators if operator.role is Role.CORE]
            columns[0].append(float(total(operators).flops))
            columns[1].append(float(total(attention).flops))
    return GenerationWork(model.name, parallelism.gpus, lengths, *flops)


def roofline_passes(
    deployment: TimedDeployment, context: int, batch_sizes: Sequence[int], phase: str = "decode"
) -> list[list[Record]]:
    """Return the roofline of a forward pass for each batch size, as lists of records.

    Each list has one record per operator, with FLOPs, bytes and seconds of one GPU in the slowest
    pipeline stage, and then a record of the total. The total also tells whether the batch fits into
    GPU memory.

    Args:
        deployment: Model on one replica of GPUs.
        context: Tokens of each sequence, including the new ones.
        batch_sizes: Numbers of concurrent sequences of the replica, one for each list.
        phase: `decode` for one new token of each sequence, or `prefill` for only new tokens.
    """
    return [
        pass_with_memory(
            deployment,
            roofline_records(deployment, phase, size, context),
            Batch.of_phase(phase, context, size),
        )
        for size in batch_sizes
    ]


def latency_sweep(
    deployments: Sequence[TimedDeployment], requests: Sequence[LatencyOptions]
) -> "Sequence[LatencyCurve | SpeculationCurve | GenerationWork]":
    """Return the curves that the command `latency --plot` draws.

    If the options name a draft model, they are speed-ups of speculative decoding. With the option
    `no_cache`, they are FLOPs with and without a KV cache. Otherwise they are times by batch size.

    Args:
        deployments: Models on replicas of GPUs. Each gives its own curves, but with `no_cache` only
            the first deployment of each model does.
        requests: Options of `latency`, one for each combination of input length, output length and
            batch size. Draft and `no_cache` are equal in all.
    """
    first, last = requests[0], requests[-1]
    if first.draft:
        return speculation_curves(deployments, requests)
    if not first.no_cache:
        return latency_curves(deployments, requests)
    by_model: dict[str, TimedDeployment] = {}
    for deployment in deployments:
        by_model.setdefault(deployment.model.name, deployment)
    length = max(last.context - 1, 64)  # the last token goes through no pass
    return [
        generation_work(d.model, length, d.precision, d.parallelism) for d in by_model.values()
    ]


class LatencyCurve(NamedTuple):
    """Prefill and decode times of one deployment at several batch sizes, for a plot.

    Attributes:
        deployment: Model on one replica of GPUs.
        request: Options of `latency`, such as input and output length. Their batch size is ignored.
        records: JSON records of `latency`, one for each batch size, with times such as `ttft_s`.
        max_num_seqs: Largest batch size in sequences that fits into the replica's GPU memory; None
            if unknown.
    """

    deployment: TimedDeployment
    request: LatencyOptions
    records: list[Record]
    max_num_seqs: int | None


def latency_curves(
    deployments: Sequence[TimedDeployment], requests: Sequence[LatencyOptions]
) -> list[LatencyCurve]:
    """Return times by batch size: a curve for each deployment and pair of input and output length.

    The batch sizes are the powers of 2 from 1 to 256, the requested ones, and the largest that
    fits.

    Args:
        deployments: Models on replicas of GPUs.
        requests: Options of `latency`, one for each combination of input length, output length and
            batch size.
    """
    by_length: dict[tuple[int, int], LatencyOptions] = {}
    for request in requests:
        by_length.setdefault((request.input_len, request.output_len), request)
    requested = {request.batch_size for request in requests}
    curves = []
    for deployment, request in product(deployments, by_length.values()):
        single = structs.replace(request, batch_size=1)
        max_num_seqs = request_memory(deployment, single)["max_num_seqs"]
        sizes = {*BATCHES, *requested}
        if max_num_seqs and max_num_seqs < max(sizes):
            sizes.add(max_num_seqs)
        batches = [structs.replace(request, batch_size=size) for size in sorted(sizes)]
        records = latency_records([(deployment, batch) for batch in batches])
        curves.append(LatencyCurve(deployment, request, records, max_num_seqs))
    return curves


class SpeculationCurve(NamedTuple):
    """Speed-up of decoding by a draft model at several acceptance rates, for a plot.

    It is for the batch size of the request. The times are those of the step at which half of the
    output is generated.

    Attributes:
        deployment: The target model on one replica of GPUs.
        draft: Name of the draft model.
        num_draft_tokens: Draft tokens per sequence and step.
        can_fit: Whether target, draft and batch fit into GPU memory; None if unknown.
        speedups: TPOT (time per output token) without the draft ÷ TPOT with it, for the acceptance
            rates 0, 0.02 … 1.
    """

    deployment: TimedDeployment
    draft: str
    num_draft_tokens: int
    can_fit: bool | None
    speedups: list[float]


def speculation_curves(
    deployments: Sequence[TimedDeployment], requests: Sequence[LatencyOptions]
) -> list[SpeculationCurve]:
    """Return a curve of speed-ups for each deployment and number of draft tokens per step.

    The numbers come from `requests`. If they give none, a single deployment has curves for 1, 2, 4
    and 8 tokens. Several deployments have one curve each, for 4 tokens.

    Args:
        deployments: Target models on replicas of GPUs.
        requests: Options of `latency`. The draft, the lengths and the batch size are those of the
            first.
    """
    requested = dict.fromkeys(r.num_speculative_tokens for r in requests)
    usual = USUAL_DRAFTED if len(deployments) == 1 else (4,)
    counts = [count for count in requested if count] or usual
    curves = []
    for deployment, count in product(deployments, counts):
        request = structs.replace(requests[0], num_speculative_tokens=count)
        draft = drafting(deployment, request)
        assert draft is not None
        times = step_times(deployment, draft, request.mid_length, request.batch_size, count)
        curve = SpeculationCurve(
            deployment=deployment,
            draft=draft.model.name,
            num_draft_tokens=count,
            can_fit=request_memory(deployment, request)["fits"],
            speedups=[float(times.speedup(rate)) for rate in ACCEPTANCE_RATES],
        )
        curves.append(curve)
    return curves


def comparison_sweep(
    deployments: Sequence[TimedDeployment],
    variants: Sequence[tuple[str, Variant]],
    batch_size: int,
    last: int,
) -> list[list[CacheCurve]]:
    """Return, for each deployment, a list of KV cache curves: one for each attention variant.

    A curve has the KV cache bytes at several contexts (tokens per sequence) from 128 to `last`.
    They are of the GPU that stores the most.

    Args:
        deployments: Deployments of one model. Each gives the parallelism, and the data types if a
            variant states none.
        variants: Pairs (name, changed model) of the attention variants. The name labels the curve.
        batch_size: Number of concurrent sequences of the replica.
        last: Largest context in tokens.
    """
    sweep = []
    for deployment in deployments:
        curves = []
        for name, variant in variants:
            curve = cache_curve(
                variant.model,
                variant.precision(deployment.precision),
                contexts_up_to(last),
                batch_size,
                deployment.parallelism,
                f"original {variant.model.attention}" if name == "none" else name,
            )
            curves.append(curve)
        sweep.append(curves)
    return sweep


def measured_times(path: Path) -> tuple[list[tuple[str, Any, Any]], str]:
    """Return measured and predicted times of the rows of a measurement file, for a plot.

    A row's prediction comes from a time model that was fitted to measured kernels. If there is
    none, it is the datasheet bound. If this is unknown too, it is the row's `bound_us` in the file.
    Rows without any of them are left out.

    Args:
        path: Path of a CSV file of measured rows.

    Returns:
        A pair (times, sentence). `times` has an item for each operation, such as `gemm`: its name,
        the measured microseconds of its rows, and their predicted microseconds. The sentence states
        file, number of rows and GPUs.

    Raises:
        UserError: No row has a prediction.
    """
    import numpy as np

    (validation,) = validate([read_rows(path)])
    rows = validation.table.rows
    bounds = np.where(validation.bound > 0, validation.bound, [row.bound_us for row in rows])
    predicted = np.where(validation.calibrated > 0, validation.calibrated, bounds)
    indices = np.flatnonzero(predicted > 0)
    if not len(indices):
        raise UserError(
            "no row has a prediction to compare with", "; ".join(remarks(validation)), str(path)
        )
    operations = grouped((rows[i].op.replace("_", " "), i) for i in indices.tolist())
    times = [
        (name, [rows[index].time_us for index in members], predicted[members])
        for name, members in operations.items()
    ]
    gpus = [*dict.fromkeys(printable(rows[index].gpu, MAX_NAME) for index in indices)]
    about = (
        f"{path.name}: {len(indices):,} of {len(rows):,} rows, of {list_few(gpus)}, predicted by a "
        "calibration, else by the bound"
    )
    return times, about
