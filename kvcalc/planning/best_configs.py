"""The best configurations of a search, their records, and the command lines that start them.

With prices, candidates are ranked by cost, then by TPOT. Without prices, GPU models are not
compared: the answer has the candidate with the fewest GPUs of each, then the lower TPOT.

A prediction is never ranked against a bound. If predictions meet the targets, only they are
ranked, and GPU models without a calibration are listed after them. If only bounds meet the
targets, the bounds are ranked.
"""

import json
import shlex
from collections.abc import Collection, Iterator, Mapping
from itertools import chain
from operator import itemgetter
from typing import Any, NamedTuple

from kvcalc.capacity.command_line import WrittenCommand, command_of
from kvcalc.gpu.gpu import Gpu
from kvcalc.layers.batch import Batch, Parallelism
from kvcalc.planning.candidate_times import Array
from kvcalc.planning.grid import Candidate, CandidateBatch, Target
from kvcalc.planning.pareto_front import (
    ClosestMisses,
    ParetoFront,
    first_of_groups,
    reason,
    split_order,
)
from kvcalc.planning.quality import precision_losses
from kvcalc.planning.search_space import GPUS_PER_SERVER, Requirement, SearchSpace
from kvcalc.records import Record
from kvcalc.timing.steps import nodes_of

# vLLM's "NixlConnector Usage Guide" (docs/features/nixl_connector_usage.md), read 2026-11-23
BOTH, PRODUCER, CONSUMER = "", "kv_producer", "kv_consumer"
PORTS = {BOTH: 8000, PRODUCER: 8100, CONSUMER: 8200}
PROXY_PORT, SIDE_CHANNEL_PORT = 8192, 5600
PROXY = "tests/v1/kv_connector/nixl_integration/toy_proxy_server.py"  # in vLLM's repository


class ReplicaServer(NamedTuple):
    """One replica: its role, the number of its host, its port, its GPUs there, and the port of its
    KV transfers."""

    role: str
    host: int
    port: int
    gpu_indices: range
    side_channel_port: int


def with_role(line: str, role: str) -> str:
    """Return a `vllm serve` line with the role that a replica has in KV transfers."""
    config = json.dumps(
        {"kv_connector": "NixlConnector", "kv_role": role}, separators=(",", ":")
    )
    return f"{line} --kv-transfer-config {shlex.quote(config)}"


def launch_lines(
    line: str, gpu: Gpu, ranks: Parallelism, prefill_replicas: int, decode_replicas: int
) -> list[str]:
    """Return a line for every replica, and a last one for the proxy if some replicas process
    prompts alone.

    Several hosts have the addresses ${HOST1}, ${HOST2} … Example: 1 replica for prompts and 2 that
    decode on 1 GPU each are four lines: GPU 0 on port 8100, GPUs 1 and 2 on ports 8200 and 8201,
    and the proxy on port 8192.

    Args:
        line: The engine's line of one replica.
        prefill_replicas: Replicas for prompts alone. If there are any, the line is vLLM's.
    """
    roles = [PRODUCER] * prefill_replicas + [
        CONSUMER if prefill_replicas else BOTH
    ] * decode_replicas
    if len(roles) == 1:
        return [line]
    servers = list(_placed(roles, gpu, ranks))
    hosts = [
        f"${{HOST{server.host + 1}}}" if servers[-1].host else "localhost" for server in servers
    ]
    lines = [
        _server_line(line, server, host) for server, host in zip(servers, hosts, strict=True)
    ]
    if not prefill_replicas:
        return lines
    words = [f"python {PROXY} --port {PROXY_PORT}"]
    for option, chosen in (
        ("prefiller", slice(prefill_replicas)),
        ("decoder", slice(prefill_replicas, None)),
    ):
        ports = " ".join(str(server.port) for server in servers[chosen])
        words.append(f"--{option}-hosts {' '.join(hosts[chosen])} --{option}-ports {ports}")
    return [*lines, " ".join(words)]


def _server_line(line: str, server: ReplicaServer, host: str) -> str:
    words = [f"CUDA_VISIBLE_DEVICES={','.join(map(str, server.gpu_indices))}"]
    if server.role:
        words += [f"VLLM_NIXL_SIDE_CHANNEL_HOST={host}"] if host != "localhost" else []
        words.append(f"VLLM_NIXL_SIDE_CHANNEL_PORT={server.side_channel_port}")
    line = f"{line} --port {server.port}"
    return " ".join([*words, with_role(line, server.role) if server.role else line])


def _placed(roles: list[str], gpu: Gpu, ranks: Parallelism) -> Iterator[ReplicaServer]:
    """Yield the replicas on hosts, which they fill one after the other. A replica that spans hosts
    begins on a new one."""
    gpus_per_host = 1 if gpu.per == "SoC" else gpu.host.gpus if gpu.host else GPUS_PER_SERVER
    numbers = dict.fromkeys(PORTS, 0)
    host = used_gpus = used_ports = 0
    for role in roles:
        if used_gpus and used_gpus + ranks.gpus > gpus_per_host:
            host, used_gpus, used_ports = host + -(-used_gpus // gpus_per_host), 0, 0
        yield ReplicaServer(
            role=role,
            host=host,
            port=PORTS[role] + numbers[role],
            gpu_indices=range(used_gpus, used_gpus + min(ranks.gpus, gpus_per_host)),
            side_channel_port=SIDE_CHANNEL_PORT + used_ports,
        )
        numbers[role] += 1
        used_gpus += ranks.gpus
        used_ports += ranks.dp  # one for each data-parallel rank


MAX_BEST = 5
Key = tuple[float, ...]  # cost, TPOT and order of the split


class BestConfigs(NamedTuple):
    """The result of a search for one model and requirement.

    All lists but `unranked` hold times of one kind, predictions or bounds.

    Attributes:
        best: At most MAX_BEST candidates that meet the targets.
        best_by_gpu: The best candidate of each GPU model that meets the targets.
        cheaper: The closest miss among cheaper candidates, or without prices, among fewer of the
            same GPUs.
        closest: The closest miss of all.
        unranked: The best of each other GPU model, whose bounds meet the targets.
        missed_by_bounds: GPU models whose bounds miss the targets, if others have predictions.
        bounds_only: Whether bounds are ranked although some GPU models have predictions.
        fronts: Pareto fronts of predictions (False) and of bounds (True).
        num_tried: Number of candidates.
        num_met: Number of candidates that meet the targets.
        prices: Price per hour of each GPU model.
    """

    need: Requirement
    best: list[Candidate]
    best_by_gpu: list[Candidate]
    cheaper: Candidate | None
    closest: Candidate | None
    unranked: list[Candidate]
    missed_by_bounds: list[str]
    bounds_only: bool
    fronts: Mapping[bool, ParetoFront]
    num_tried: int
    num_met: int
    prices: Mapping[str, float]

    @property
    def named(self) -> list[Candidate]:
        """The best candidates, or the closest if there are none."""
        return self.best or ([self.closest] if self.closest else [])

    @property
    def listed(self) -> list[Candidate]:
        """The candidates of the records."""
        return [*self.named, *self.unranked[:MAX_BEST]]

    @property
    def front(self) -> ParetoFront:
        return self.fronts[bool(self.listed) and is_bound(self.listed[0])]

    @property
    def basis(self) -> str:
        """The basis of the ranked times: calibrated, scaled, bound, or the first two."""
        candidates = [*self.best, *([self.closest] if self.closest else [])]
        return " and ".join(dict.fromkeys(one.deployment.time_basis for one in candidates))


def is_bound(candidate: Candidate) -> bool:
    """Return whether the times are datasheet bounds."""
    return candidate.deployment.calibration is None


class CandidateRanking:
    """Ranks the candidates of one model under one requirement, batch by batch."""

    def __init__(
        self,
        need: Requirement,
        space: SearchSpace,
        prices: Mapping[str, float] | None = None,
    ) -> None:
        self.need = need
        self.max_gpus = space.max_gpus
        self.prices = prices or {}
        self.fronts = {False: ParetoFront(), True: ParetoFront()}
        self.num_tried = 0
        self.num_met = 0
        self._rows = {gpu.name: row for row, gpu in enumerate(space.gpus)}
        self._best: dict[str, list[tuple[Key, Candidate]]] = {}
        self._has_bounds: dict[str, bool] = {}
        self._misses = ClosestMisses(len(space.gpus), space.max_gpus)

    def add(self, batch: CandidateBatch) -> None:
        """Keep what may be part of the result."""
        import numpy as np

        names = [deployment.gpu.name for deployment in batch.deployments]
        bounds = [deployment.calibration is None for deployment in batch.deployments]
        self._has_bounds |= zip(names, bounds, strict=True)
        rows = np.array([self._rows[name] for name in names])[batch.index]
        prices = np.array([self._price(name) for name in names])[batch.index]
        meets = batch.violated_target == Target.NONE
        self.num_tried += len(meets)
        self.num_met += int(meets.sum())
        self._rank(batch, np.flatnonzero(meets), rows, batch.gpus * prices)
        fails = ~meets
        if not self.need.users:
            # more sequences than fit are only a setting, unless no setting fits
            is_setting = batch.capacity >= batch.max_num_seqs.min()
            fails &= (batch.violated_target != Target.MEMORY) | ~is_setting
        self._misses.add(batch, fails, rows)
        for basis, front in self.fronts.items():
            tpot = np.where(np.array(bounds)[batch.index] == basis, batch.tpot, np.nan)
            front.add(tpot, batch.tokens_per_s_per_gpu / prices, batch.candidates)

    def _price(self, name: str) -> float:
        return self.prices[name] if self.prices else 1.0

    def _rank(self, batch: CandidateBatch, meeting: Array, rows: Array, costs: Array) -> None:
        """Keep the best replicas of each deployment if they are among the best of their GPU
        model."""
        import numpy as np

        keys = costs, np.nan_to_num(batch.tpot), split_order(batch)

        def best(groups: Array, indices: Array, count: int) -> Array:
            ordered = [key[indices] for key in keys]
            return indices[first_of_groups(groups[indices], *ordered, count=count)]

        selected = best(rows, best(batch.index, meeting, 1), MAX_BEST)
        sort_keys = zip(*(key[selected].tolist() for key in keys), strict=True)
        for entry in zip(sort_keys, batch.candidates(selected), strict=True):
            ranked = self._best.setdefault(entry[1].gpu, [])
            ranked.append(entry)
            ranked.sort(key=itemgetter(0))
            del ranked[MAX_BEST:]

    def result(self) -> BestConfigs:
        """Return the result of all batches."""
        predicted = {name for name, has_bounds in self._has_bounds.items() if not has_bounds}
        met = self._best.keys()
        bounds_only = bool(predicted and met) and not predicted & met
        ranked = (
            predicted if predicted and not bounds_only else self._has_bounds.keys() - predicted
        )
        firsts = sorted((entries[0] for entries in self._best.values()), key=itemgetter(0))
        heads = [one for _, one in firsts if one.gpu in ranked]
        entries = sorted(chain.from_iterable(self._best.values()), key=itemgetter(0))
        best = [one for _, one in entries if one.gpu in ranked]
        if not self.prices:
            shown = set(map(id, heads))
            best = [*heads, *(one for one in best if id(one) not in shown)]
        return BestConfigs(
            need=self.need,
            best=best[:MAX_BEST],
            best_by_gpu=heads,
            cheaper=self._cheaper_miss(best[0], ranked) if best else None,
            closest=self._misses.closest([self._rows[name] for name in ranked]),
            unranked=[one for _, one in firsts if one.gpu not in ranked],
            missed_by_bounds=[
                name
                for name, has_bounds in self._has_bounds.items()
                if has_bounds and predicted and name not in met
            ],
            bounds_only=bounds_only,
            fronts=self.fronts,
            num_tried=self.num_tried,
            num_met=self.num_met,
            prices=self.prices,
        )

    def _cheaper_miss(self, first: Candidate, ranked: Collection[str]) -> Candidate | None:
        import numpy as np

        compared = ranked if self.prices else {first.gpu}
        prices: Any = [self._price(name) if name in compared else np.inf for name in self._rows]
        totals = np.maximum(np.arange(self.max_gpus + 2), 1)
        limit = first.gpus * self._price(first.gpu)
        return self._misses.closest_below(np.outer(prices, totals), limit)


def candidate_record(candidate: Candidate, price: float = 0.0) -> Record:
    """Return a candidate as a record.

    Capacity and times are those of one replica that is set up for max_num_seqs. Costs and energy
    are those of all GPUs under the required load, the energy at full power.

    Args:
        price: Price per hour of one GPU; 0 for no cost.
    """
    need, deployment, draft = (
        candidate.need,
        candidate.deployment,
        candidate.speculation,
    )
    ranks, formats = deployment.parallelism, deployment.formats
    total = candidate.total_tokens_per_s
    power = deployment.gpu.power_w
    cost_per_hour = price * candidate.gpus if price else None
    cost_per_token = cost_per_hour / 3600 / total if cost_per_hour and total else None
    return {
        "users": need.users or None,
        "rate": need.rate or None,
        "context": need.lengths.context,
        "input_len": need.input_len or None,
        "output_len": need.output_len or None,
        "model": deployment.model.name,
        "gpu": deployment.gpu.name,
        "gpus": ranks.gpus,
        "nodes": nodes_of(deployment.ranks, deployment.gpu, deployment.nodes),
        "tensor_parallel_size": ranks.tp,
        "pipeline_parallel_size": ranks.pp,
        "data_parallel_size": ranks.dp,
        "expert_parallel_size": ranks.ep,
        "dtype": formats.weights_label,
        "quantization": deployment.precision.quantization or None,
        "kv_cache_dtype": formats.kv_cache_dtype,
        "draft": draft.draft if draft else None,
        "num_speculative_tokens": draft.num_tokens if draft else None,
        "acceptance_rate": draft.acceptance if draft else None,
        "replicas": candidate.replicas,
        "prefill_replicas": candidate.prefill_replicas,
        "total_gpus": candidate.gpus,
        "max_num_seqs": candidate.max_num_seqs,
        "capacity_sequences": candidate.capacity,
        "kv_budget_low_bytes": max(0, candidate.remaining_bytes),
        "ttft_s": candidate.ttft,
        "tpot_s": candidate.tpot,
        "e2e_s": candidate.e2e,
        "tokens_per_s": candidate.tokens_per_s,
        "tokens_per_s_per_gpu": candidate.tokens_per_s_per_gpu,
        "total_tokens_per_s": total,
        "cost_per_hour": cost_per_hour,
        "cost_per_million_tokens": cost_per_token and cost_per_token * 1e6,
        "energy_per_token_j": power * candidate.gpus / total if power and total else None,
        "time_basis": deployment.time_basis,
        "meets": candidate.meets,
        "reason": reason(candidate),
    }


def answer_records(answer: BestConfigs, space: SearchSpace) -> list[Record]:
    """Return a record for each listed candidate.

    `pareto` compares TPOT and tokens per second of a GPU, or per price. The candidates compared
    have times of the same kind, predictions or bounds.
    """
    records = []
    for candidate in answer.listed:
        deployment = candidate.deployment
        step = Batch.decode(candidate.need.lengths.context, candidate.max_num_seqs)
        price = answer.prices.get(candidate.gpu, 0.0)
        speed = (candidate.tokens_per_s_per_gpu or 0.0) / (price or 1.0)
        front = answer.fronts[is_bound(candidate)]
        losses = precision_losses(deployment.model, deployment.precision)
        line, lines = launched(candidate, space)
        records.append(
            candidate_record(candidate, price)
            | {
                "pareto": front.contains(candidate.tpot or 0.0, speed),
                "basis": deployment.basis,
                "uncalibrated_share": float(deployment.uncalibrated_share(step)),
                "time_p90_error": deployment.p90_error(step),
                "quality": "; ".join(losses) or None,
                "engine": space.options.engine,
                "command": line,
                "commands": lines,
            }
        )
    return records


def launched(candidate: Candidate, space: SearchSpace) -> tuple[str | None, list[str]]:
    """Return the command line of one replica, and the lines that start all replicas.

    Only vLLM's lines of replicas for prefill are known.
    """
    written, prefill = command(candidate, space), candidate.prefill_replicas
    if written is None or (prefill and space.options.engine != "vllm"):
        return None, []
    lines = launch_lines(
        line=written.line,
        gpu=candidate.deployment.gpu,
        ranks=candidate.deployment.parallelism,
        prefill_replicas=prefill,
        decode_replicas=candidate.replicas,
    )
    return with_role(written.line, CONSUMER) if prefill else written.line, lines


def command(candidate: Candidate, space: SearchSpace) -> WrittenCommand | None:
    """Return the engine's command line of one replica; None if its flags cannot describe it.

    All data-parallel ranks have the fullest rank's max_num_seqs.
    """
    deployment, speculation = candidate.deployment, candidate.speculation
    ranks = deployment.parallelism
    options = space.fit_options(
        candidate.need, ranks.sequences(candidate.max_num_seqs) * ranks.dp
    )
    if speculation:
        options = speculation.options(deployment.model, options)
    return command_of(deployment, options)
