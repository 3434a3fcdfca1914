"""A deployment: a model on GPUs with its formats, ranks and time model, and the time of its passes.

Nodes: ranks are in order with tp innermost. A tp group stays on one node if it fits.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Self

import msgspec
from msgspec.structs import replace

from kvcalc.arithmetic import maximum
from kvcalc.errors import UserError
from kvcalc.gpu.gpu import (
    BoundedOperator,
    Gpu,
    cost_bound,
    fallback_sentence,
    mla_form,
    roofline,
    total_bound,
    total_seconds,
)
from kvcalc.layers.batch import ONE_GPU, Batch, Parallelism
from kvcalc.layers.cost import AttentionShape, Cost, GemmShape, Operator, unfused
from kvcalc.layers.weights import Formats
from kvcalc.library.load import load_gpu
from kvcalc.model.forward_pass import between_stages, forward, through_layers, total
from kvcalc.model.memory import CacheSize, cache_size, equal_context, weight_bytes
from kvcalc.model.model import Model
from kvcalc.model.precision import PUBLISHED, Precision, formats_of
from kvcalc.records import JsonObject, Record
from kvcalc.records.size import HostWeightsRecord
from kvcalc.timing.calibration import BOUND, CALIBRATED, Calibration, load_calibration
from kvcalc.timing.steps import (
    Operators,
    OperatorTime,
    operator_seconds,
    pass_time,
    step_error,
    summed_time,
)

MAX_MEMO = 4  # passes whose operators a model remembers
ALL_EXPERTS = 10**9  # tokens of a pass that reach every expert
MAX_UNMEASURED = 0.01  # share of a pass up to which the error on measured servers holds


class HostTransfer(NamedTuple):
    """Weights that one forward pass reads from CPU memory (`cpu_offload_gb`), and the time for it.

    Attributes:
        read_bytes: Bytes that cross the link from CPU memory to one GPU of each pipeline stage,
            summed over the stages. A number or an array.
        seconds: Seconds that the transfer takes, a float or an array.
        basis: Source of the link's rate: `at least` if it is documented, so that `seconds` is a
            lower bound; `predicted` if it was measured. None without weights in CPU memory.
    """

    read_bytes: Any = 0
    seconds: Any = 0.0
    basis: str | None = None

    def record(self, host_weights: int) -> HostWeightsRecord:
        """Return the fields as JSON keys such as `cpu_offload_s`, and also `cpu_offload_bytes`.

        Args:
            host_weights: Bytes of one GPU's weights in CPU memory, for the key `cpu_offload_bytes`.
        """
        return {
            "cpu_offload_bytes": host_weights,
            "cpu_offload_read_bytes": round(self.read_bytes),
            "cpu_offload_s": self.seconds,
            "cpu_offload_basis": self.basis,
        }


class TimedDeployment(msgspec.Struct, frozen=True):
    """A model on one replica of GPUs, with methods for the time of its forward passes.

    With a calibration (time models fitted to measured kernels), times are predictions and include
    the engine's overhead. Otherwise they are lower bounds from the datasheet.

    Attributes:
        model: The model.
        gpu: The GPU model of all ranks.
        precision: Requested data types of weights and KV cache.
        parallelism: Tensor-, pipeline-, data- and expert-parallel sizes of the replica.
        mla_form: Form of multi-head latent attention (MLA): `absorbed` or `expanded`; `auto` for
            the form with fewer FLOPs.
        calibration: Fitted time models; None for datasheet bounds.
        calibrated_on: Name of the GPU model whose calibration is scaled to this GPU model; '' if
            the calibration is this GPU model's own.
        host_weights: Bytes of one GPU's weights that are in CPU memory. A pass reads the weights
            that it needs over the link to the CPU. In a bound, it reads them in parallel with other
            work; in a prediction, after the other work.
        nodes: Number of nodes of the replica; 0 for as few as the GPU's link allows.
        engine: Name of the engine whose memory rules and times are used.
        engine_version: Version of the engine, such as `0.11.0`; '' for the latest.
        is_server: Whether a server runs the passes. In bounds, prompts are then divided into
            chunks, so that all pipeline stages work at the same time.
    """

    model: Model
    gpu: Gpu
    precision: Precision = PUBLISHED
    parallelism: Parallelism = ONE_GPU
    mla_form: str = "auto"
    calibration: Calibration | None = None
    calibrated_on: str = ""
    host_weights: int = 0
    nodes: int = 0
    engine: str = "vllm"
    engine_version: str = ""
    is_server: bool = False

    def with_calibration(self, calibration: str = "", calibrated_on: str = "") -> Self:
        """Return the deployment with another calibration, with which its times are predicted.

        Args:
            calibration: Name or YAML file of the calibration; '' for the engine's own calibration,
                `datasheet` for no calibration, which gives lower bounds.
            calibrated_on: Name of another GPU model, whose calibration is scaled by the two GPU
                models' datasheet rates. '' uses the calibration of the deployment's own GPU model.

        Raises:
            UserError: There is no such calibration, or its file is invalid.
        """
        source = load_gpu(calibrated_on) if calibrated_on else None
        loaded = load_calibration(self.gpu, calibration, source, self.engine)
        if loaded and not calibrated_on and loaded.gpu != self.gpu.name:
            calibrated_on = loaded.gpu
        return replace(self, calibration=loaded, calibrated_on=calibrated_on)

    def as_server(self) -> Self:
        """Return this deployment with `is_server` set, for the passes of a simulated server.

        With pipeline stages, bounds then divide prompts into chunks. Predictions take the batch as
        one micro-batch, because the timer of the server has divided the pass already.
        """
        return replace(self, is_server=True)

    @property
    def formats(self) -> Formats:
        """Return the data types of weights and KV cache, with all defaults resolved.

        Raises:
            UserError: The model cannot be stored in a requested format.
        """
        return formats_of(self.model, self.precision)

    @property
    def ranks(self) -> Parallelism:
        """Return the parallelism with `per_node` set: the number of ranks that one link connects.

        It stays 0 if one link connects all ranks of the replica. It is set only if the replica
        spans several link domains or nodes.

        Raises:
            UserError: The replica spans several nodes, and the GPU preset gives no rate between
                nodes.
        """
        return spread_over(self.parallelism, self.gpu, self.nodes)

    @property
    def basis(self) -> str:
        """Return what times are based on, such as `vllm 0.24.0 calibration` or `datasheet`."""
        if not self.calibration:
            return f"datasheet{f' at {self.gpu.mfu:.0%} MFU' * (self.gpu.mfu < 1)}"
        source = f" of {self.calibration.gpu}" if self.calibrated_on else ""
        label = f"{self.calibration.stack} {self.calibration.version}".strip()
        return f"{label} calibration{source}"

    @property
    def time_basis(self) -> str:
        """Return the kind of times: `calibrated`, `scaled` or `bound`.

        Calibrated times are predictions of this GPU model's own calibration. Scaled times use
        another GPU model's calibration. Bounds are lower bounds from the datasheet.
        """
        return self.calibration.basis_on(self.gpu) if self.calibration else "bound"

    @property
    def identifying_keys(self) -> Record:
        """Return the JSON keys and values that distinguish this deployment in a list of records.

        They include `model`, `gpu`, `gpus`, `nodes`, `tensor_parallel_size`, `dtype`, `engine` and
        `basis`.
        """
        ranks, formats = self.parallelism, self.formats
        source = self.calibration.gpu if self.calibration and self.calibrated_on else None
        nodes = nodes_of(self.ranks, self.gpu, self.nodes)
        return {
            "model": self.model.name,
            "gpu": self.gpu.name,
            "gpus": ranks.gpus,
            "nodes": nodes,
            "inter_node_bytes_per_s": self.gpu.inter_domain_rate if nodes > 1 else None,
            "tensor_parallel_size": ranks.tp,
            "dtype": formats.weights_label,
            "kv_cache_dtype": formats.kv_cache_dtype,
            "engine": self.engine,
            "basis": self.basis,
            "calibration_from": source,
        }

    def operators(self, batch: Batch, all_positions: bool = False) -> list[Operator]:
        """Return the operators of one forward pass through all pipeline stages, with their costs.

        The cost of an operator, such as a GEMM, is that of one run on one GPU. Its `count` is the
        number of its runs in all stages. Equal calls are fast, because results are remembered.

        Args:
            batch: Sequences that run through the pass.
            all_positions: Whether the LM head runs on all new tokens of a sequence instead of the
                last one.
        """
        ranks = self.ranks
        key = batch, self.precision, ranks, self.mla_form, all_positions
        memo = self.model.memo.setdefault("operators", {})
        if batch.exact and key in memo:
            return [*memo[key]]
        operators = through_layers(self.model, *key)
        operators += between_stages(self.model, batch, self.precision, ranks)
        if batch.exact:
            if len(memo) == MAX_MEMO:
                del memo[next(iter(memo))]
            memo[key] = [*operators]
        return operators

    def operator_bounds(
        self, batch: Batch, all_positions: bool = False
    ) -> list[BoundedOperator]:
        """Return the operators of the slowest pipeline stage with their minimum times.

        Times are datasheet bounds of one GPU for the whole batch, not for a micro-batch.

        Args:
            batch: Sequences that run through the forward pass.
            all_positions: Whether the LM head runs on all new tokens of a sequence instead of the
                last one.
        """
        run = self.model, batch, self.precision, self.ranks, self.mla_form, all_positions
        stages = [forward(*run, stage=n) for n in range(self.parallelism.pp)]
        bounds = [roofline(operators, self.gpu, batch.decodes) for operators in stages]
        return max(bounds, key=total_seconds)

    def has_time(self, batch: Batch) -> bool:
        """Return whether the time of a forward pass over `batch` can be computed by `seconds`.

        A decode step always has a time, because the time of its memory traffic is a lower bound.
        Other passes need a GPU with matrix peaks for the dtypes of all their matrix products.

        Args:
            batch: Sequences that run through the pass.
        """
        return batch.decodes or all(
            self.gpu.computes(o.dtype) for o in self.operators(batch) if o.dtype
        )

    def seconds(self, batch: Batch, all_positions: bool = False) -> Any:
        """Return the seconds of one forward pass through all pipeline stages, a float or an array.

        Several stages work at the same time, each on a micro-batch. The result is then the time of
        one micro-batch through all stages; `timed_batch` returns this micro-batch. It is an array
        if the numbers in `batch` are arrays.

        Args:
            batch: Sequences that run through the pass.
            all_positions: Whether the LM head runs on all new tokens of a sequence instead of the
                last one.
        """
        timed = self.timed_batch(batch)
        operators = self.operators(timed, all_positions)
        host_s = self.host_transfer(operators).seconds
        if self.calibration:
            return pass_time(operators, self.gpu, self.calibration).seconds + host_s
        bound = total_seconds(roofline(operators, self.gpu, timed.decodes))
        return maximum(bound, host_s) if self.host_weights else bound

    def timed_batch(self, batch: Batch) -> Batch:
        """Return the micro-batch whose way through all pipeline stages takes the time of the pass.

        With one pipeline stage, this is the whole batch. With several stages, the stages work on
        different micro-batches at the same time, so it is one micro-batch. Datasheet bounds take
        the smallest micro-batch, predictions the largest. For predictions of a server it is the
        whole batch, because the server's timers have divided it already.

        Args:
            batch: Sequences that run through the pass.
        """
        is_predicted = self.calibration is not None
        if self.parallelism.pp == 1 or (self.is_server and is_predicted):
            return batch
        return batch.micro_batch(self.parallelism, self.is_server, rounds_up=is_predicted)

    def host_transfer(self, operators: Operators, measured: bool | None = None) -> HostTransfer:
        """Return the weight bytes that a pass reads from CPU memory, and the seconds for them.

        Only weights of layers are in CPU memory, not those of embeddings or the LM head. A pass
        reads only the experts that its tokens reach.

        Args:
            operators: Operators of the pass through all pipeline stages.
            measured: Whether to use the measured rate of the link to the CPU, not the documented
                one. None uses it for predictions only, not for bounds.

        Raises:
            UserError: Weights are in CPU memory, but the preset gives no rate of the link to the
                CPU.
        """
        if not self.host_weights:
            return HostTransfer()
        rate = self.gpu.host_rate(
            self.calibration is not None if measured is None else measured
        )
        if not rate:
            raise UserError(
                f"{self.gpu.name} has no host_link_bytes_per_s, which weights in host memory need"
            )
        all_bytes = _layer_weights(self.operators(Batch.prefill(ALL_EXPERTS)))
        host_bytes = min(self.host_weights * self.parallelism.pp, all_bytes)
        read_bytes = host_bytes * _layer_weights(operators) / all_bytes
        basis = "at least" if rate == self.gpu.host_link_bytes_per_s else "predicted"
        return HostTransfer(read_bytes, read_bytes / rate, basis)

    def uncalibrated_share(self, batch: Batch) -> Any:
        """Return the share of a forward pass's time that does not come from a fitted time model.

        It is from 0 to 1, a float or an array. 0 means that each operator has a time model fitted
        to measured kernels with its data types. 1 means that no operator has one, as in datasheet
        bounds.

        Args:
            batch: Sequences that run through the pass.
        """
        if not self.calibration:
            return 1.0
        return pass_time(self.operators(batch), self.gpu, self.calibration).uncalibrated_share

    def p90_error(self, batch: Batch) -> float | None:
        """Return how far predicted decode steps were off on measured servers: 0.05 is 5%.

        The result is the 90th percentile of the relative errors over measured servers, so 90% of
        them have a smaller error. The servers ran the same engine on the same GPU model, with
        models of the same type: dense or mixture of experts. The result is None if the error is
        unknown, for example because part of the time is a bound or weights are in CPU memory.

        Args:
            batch: Sequences of the decode step.
        """
        share = self.uncalibrated_share(batch)
        if not self.calibration or self.host_weights or share > MAX_UNMEASURED:
            return None
        return step_error(self.operators(batch), self.gpu, self.calibration)

    def fallback(self, *batches: Batch) -> str | None:
        """Return a note on the dtypes for which the GPU has no matrix unit; None if there are none.

        Example: "computed in bf16: rtx-3090 has no fp8 unit".

        Args:
            batches: Forward passes whose matrix products are checked, each given by its sequences.
        """
        by_dtype = {o.dtype: o for batch in batches for o in self.operators(batch)}
        bounds = roofline([*by_dtype.values()], self.gpu, memory_only=True)
        return fallback_sentence(bounds, self.gpu) or None

    def cache_size(self, context: int, batch_size: int = 1, block_size: int = 16) -> CacheSize:
        """Return the KV cache bytes of a batch on the GPU with the most: stored, read per step.

        Args:
            context: Tokens of each sequence.
            batch_size: Number of sequences of the replica.
            block_size: Tokens per cache block.
        """
        return cache_size(
            self.model, context, batch_size, self.precision, block_size, self.parallelism
        )

    @property
    def weight_bytes(self) -> int:
        """Return the bytes of weights on the one GPU of the replica that has the most."""
        return weight_bytes(self.model, self.precision, self.parallelism)

    def cost(self, batch: Batch, all_positions: bool = False) -> Cost:
        """Return the FLOPs and bytes of one forward pass through all pipeline stages.

        They are for one GPU of each stage, summed over the stages.

        Args:
            batch: Sequences that run through the pass.
            all_positions: Whether the LM head runs on all new tokens of a sequence instead of the
                last one.
        """
        return total(self.operators(batch, all_positions))


def _layer_weights(operators: Operators) -> Any:
    """Return the bytes of weights that operators in layers read."""
    return sum(operator.total.weight_bytes for operator in operators if operator.layer)


def spread_over(ranks: Parallelism, gpu: Gpu, nodes: int = 0) -> Parallelism:
    """Return the parallelism with `per_node` set: the number of ranks that one GPU link connects.

    Collectives over more ranks then use the rate between nodes. If one link connects all ranks, the
    parallelism is returned unchanged.

    Args:
        ranks: Tensor-, pipeline-, data- and expert-parallel sizes of one replica.
        gpu: GPU model, whose preset gives the maximum number of GPUs on one link, such as NVLink.
        nodes: Number of nodes over which the ranks are spread; 0 for as few as possible.

    Raises:
        UserError: The ranks do not divide evenly over the nodes. Or one link cannot connect all
            ranks, and the GPU preset gives no rate between nodes.
    """
    domain, per_node = gpu.link_domain, ranks.gpus
    if nodes:
        if not 0 < nodes <= ranks.gpus or ranks.gpus % nodes:
            text = f"{ranks.gpus} GPUs do not divide over {nodes} nodes"
            raise UserError(text, f"Give {nodes} GPUs or a multiple, such as --tp {8 * nodes}")
        per_node = ranks.gpus // nodes
        if domain and per_node > domain and not gpu.is_bridged:
            text = f"one link joins {domain} {gpu.name}, but a node has {per_node}"
            raise UserError(text, f"Give --nodes {-(-ranks.gpus // domain)} or more")
    limit = min(domain or per_node, per_node)
    if ranks.gpus <= limit:
        return ranks
    if not (gpu.inter_node_bytes_per_s or (gpu.is_bridged and nodes <= 1)):
        text = (
            f"one link joins {limit} {gpu.name}, and the preset has no rate between nodes "
            f"for {ranks.gpus}"
        )
        raise UserError(text, "Give --inter-node-bandwidth of a GPU, as 50GB/s")
    tp = ranks.tp
    near = limit // tp * tp if tp <= limit else -(-tp // -(-tp // limit))
    return replace(ranks, per_node=near)


def nodes_of(ranks: Parallelism, gpu: Gpu, nodes: int = 0) -> int:
    """Return the number of nodes (machines) that one replica occupies.

    GPUs that a bridge joins in pairs are on one node, unless `nodes` asks for more.

    Args:
        ranks: Parallelism that `spread_over` returned.
        gpu: The GPU model.
        nodes: Requested number of nodes; 0 for as few as possible.
    """
    if not ranks.per_node or (gpu.is_bridged and nodes <= 1):
        return 1
    return -(-ranks.gpus // ranks.per_node)


ENGINE_OVERHEAD, MODULE_OVERHEAD = "engine_overhead", "module_overhead"
_UNPREDICTED = {
    "time_s": None,
    "time_basis": BOUND,
    "uncalibrated_share": 1.0,
    "time_p90_error": None,
    "overhead": None,
}
_COST_KEYS = (
    "flops vector_flops weight_bytes cache_bytes cache_read_bytes cache_write_bytes "
    "activation_bytes bytes network_bytes inter_node_bytes"
)


def roofline_records(
    deployment: TimedDeployment,
    phase: str,
    batch_size: int,
    context: int,
    all_positions: bool = False,
) -> list[Record]:
    """Return the roofline of one decode step or one prefill: a record per operator and a total.

    A record has the FLOPs, bytes and times of one GPU in the slowest pipeline stage. The total is
    the last record.

    Args:
        deployment: Model on one replica of GPUs.
        phase: `decode` (one new token per sequence) or `prefill` (the whole sequence is new).
        batch_size: Number of sequences.
        context: Tokens of each sequence, including the new ones.
        all_positions: Whether the LM head runs on all new tokens of a sequence instead of the last
            one.

    Raises:
        UserError: The phase is neither `decode` nor `prefill`.
    """
    batch = Batch.of_phase(phase, context, batch_size)
    common = {"phase": phase, "batch_size": batch_size, "context": context}
    records = _records(deployment, batch, common, all_positions)
    if batch.decodes:
        stored = deployment.precision, deployment.parallelism
        shape = records[-1]["weight_bytes"], context, batch_size
        tokens = equal_context(deployment.model, *shape, *stored, is_read=True)
        records[-1] = {**records[-1], "equal_reads_context": tokens}
    return records


def mixed_records(
    deployment: TimedDeployment, text: str, all_positions: bool = False
) -> list[Record]:
    """Return the roofline of a pass over prompts and decodes: a record per operator and a total.

    A record has the FLOPs, bytes and times of one GPU in the slowest pipeline stage. The total is
    the last record. The key `phase` of each record is `mixed`.

    Args:
        deployment: Model on one replica of GPUs.
        text: The batch in short form. `500+4x1@4k` is a prompt of 500 tokens and four decodes at
            4,096 tokens.
        all_positions: Whether the LM head runs on all new tokens of a sequence instead of the last
            one.
    """
    batch = Batch.parse(text)
    longest = max(int(g.new + g.past) for g in batch.groups)
    common = {"phase": "mixed", "batch_size": int(batch.sequences), "context": longest}
    return _records(deployment, batch, common, all_positions)


def _records(
    deployment: TimedDeployment, batch: Batch, common: Record, all_positions: bool
) -> list[Record]:
    d = deployment
    bounds = d.operator_bounds(batch, all_positions)
    records = pass_records(bounds, d.gpu, d.calibration, d.formats.element_bytes)
    return [{**d.identifying_keys, **common, **record} for record in records]


def pass_records(
    bounds: list[BoundedOperator],
    gpu: Gpu,
    calibration: Calibration | None = None,
    element_bytes: int = 2,
) -> list[Record]:
    """Return a record per operator of a forward pass, and their total as the last record.

    An operator that runs in several layers has one record with the sum of its runs. FLOPs, bytes
    and times are for one GPU. With a calibration, two kinds of record are added:

    - `engine_overhead` is the time that the engine adds to the kernels of the pass.
    - `module_overhead` follows the operators of a sparse-attention module. It is the module's
      measured time minus the time of these operators.

    Args:
        bounds: Operators of the pass, with their minimum times from the datasheet.
        gpu: The GPU.
        calibration: Fitted time models, for predicted times; None for minimum times only.
        element_bytes: Bytes of one activation element. It sizes the operations of a fused operator,
            which its record lists as if they ran separately.
    """
    records = [_operator_record(p, gpu, element_bytes) for p in bounds]
    total_record = _total_record(bounds, gpu)
    if calibration:
        records, times = _timed_records(records, [p.operator for p in bounds], gpu, calibration)
        total_record.update(times)
    records.append(total_record)
    time_key = "time_s" if calibration else "roofline_s"
    for record in records:
        if calibration and record["roofline_s"]:
            record["overhead"] = record["time_s"] / record["roofline_s"]
        record["share"] = record[time_key] / total_record[time_key]
    return [*records]


def _total_record(bounds: list[BoundedOperator], gpu: Gpu) -> JsonObject:
    cost = total(p.operator for p in bounds)
    dtypes = dict.fromkeys(p.fallback or p.operator.dtype for p in bounds if p.operator.dtype)
    return {
        "operator": "total",
        "layer": "",
        "role": "",
        "count": 1,
        **_cost_figures(cost),
        "mla_form": mla_form(bounds),
        "intensity": cost.flops / cost.bytes if cost.bytes else None,
        "bound": total_bound(bounds),
        "computed_in": "+".join(dtypes) or None,
        "roofline_s": total_seconds(bounds),
        **_UNPREDICTED,
        "fallback": fallback_sentence(bounds, gpu) or None,
        "equal_reads_context": None,
    }


def _timed_records(
    records: Sequence[JsonObject],
    operators: Operators,
    gpu: Gpu,
    calibration: Calibration,
) -> tuple[list[JsonObject], Record]:
    """Return the records of operators with predicted times and overheads, and the record keys of
    the total's time."""
    basis = calibration.basis_on(gpu)

    def time_keys(time: OperatorTime) -> JsonObject:
        is_calibrated = time.basis == CALIBRATED
        return {
            "time_s": float(time.seconds),
            "time_basis": basis if is_calibrated else time.basis,
            "uncalibrated_share": float(not is_calibrated),
        }

    def added_record(name: str, layer: str, count: int, time: OperatorTime) -> JsonObject:
        """Return a record of time in addition to the operators. It has no FLOPs and no bytes."""
        operator = Operator(name, layer, count, "added", Cost())
        record = _operator_record(
            BoundedOperator(operator, seconds=0.0, bound="", fallback=""), gpu
        )
        return record | {"bound": None, **time_keys(time)}

    times = operator_seconds(operators, gpu, calibration)
    timed_records = []
    for record, operator, time in zip(records, operators, times):
        timed_records.append(record | time_keys(time))
        overhead = time.overhead
        if overhead and overhead.seconds > 0:
            place = operator.layer, operator.count
            timed_records.append(added_record(MODULE_OVERHEAD, *place, overhead))
    whole = summed_time(operators, times, calibration)
    engine = OperatorTime(whole.engine, CALIBRATED)
    timed_records.append(added_record(ENGINE_OVERHEAD, "", 1, engine))
    return timed_records, {
        "time_s": float(whole.seconds),
        "time_basis": basis,
        "uncalibrated_share": float(whole.uncalibrated_share),
        "time_p90_error": step_error(operators, gpu, calibration),
    }


def _operator_record(p: BoundedOperator, gpu: Gpu, element: int = 2) -> JsonObject:
    operator = p.operator
    parts = unfused(operator, element)
    record = {
        "operator": operator.name,
        "layer": operator.layer,
        "role": str(operator.role),
        "count": operator.count,
        **_cost_figures(operator.total),
        **_shape_figures(operator.shape),
        "intensity": p.intensity,
        "bound": p.bound,
        "computed_in": p.fallback or operator.dtype or None,
        "roofline_s": p.seconds,
        **_UNPREDICTED,
        "fallback": fallback_sentence([p], gpu) or None,
    }
    if parts:
        record["parts"] = [
            _part(name, cost * operator.count, operator.dtype, gpu) for name, cost in parts
        ]
    if operator.experts:
        record["expected_experts"] = operator.experts
    return record


def _shape_figures(shape: Any) -> Record:
    """Return the sizes of a GEMM or of attention; null for other operators."""
    if isinstance(shape, GemmShape):
        return {"heads": None, "m": shape.m, "k": shape.k, "n": shape.n}
    if isinstance(shape, AttentionShape):
        queries = shape.num_queries
        keys = shape.num_pairs / queries if queries else 0
        mean_keys = int(keys) if keys == int(keys) else keys
        return {"heads": shape.heads, "m": queries, "k": shape.key, "n": mean_keys}
    return dict.fromkeys(("heads", "m", "k", "n"))


def _part(name: str, cost: Cost, dtype: str, gpu: Gpu) -> Record:
    """Return the record of an operation as if it ran in a separate kernel, with its bound.

    The intensity of an operation without matrix products, such as softmax, is its vector FLOPs per
    byte.
    """
    roof = cost_bound(cost, dtype if cost.flops else "", gpu, memory_only=True)
    return {
        "operator": name,
        **_cost_figures(cost),
        "intensity": (cost.flops or cost.vector_flops) / cost.bytes if cost.bytes else None,
        "bound": roof.bound,
        "roofline_s": roof.seconds,
    }


def _cost_figures(cost: Cost) -> Record:
    return {key: getattr(cost, key) for key in _COST_KEYS.split()}
