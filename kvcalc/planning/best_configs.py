"""The best configurations of a search, their records, and the command lines that start them.

Candidates are ranked by cost per hour, or without prices by the number of GPUs. Then the smaller
memory per GPU decides, then TPOT. The answer includes the best candidate of each GPU model, for up
to 5 GPU models.

A prediction is never ranked against a bound. If predictions meet the targets, only they are
ranked, and GPU models without a calibration are listed after them. If only bounds meet the
targets, the bounds are ranked. The answer names a bound first if it costs much less than the best
prediction (see `BestConfigs.lead`).
"""

import json
import shlex
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import chain
from math import ceil
from operator import itemgetter
from typing import Any, NamedTuple

from kvcalc.capacity.command_line import EngineCommand, command_of
from kvcalc.gpu.gpu import Gpu
from kvcalc.layers.batch import Batch, Parallelism
from kvcalc.planning.candidate_times import Array
from kvcalc.planning.grid import Candidate, CandidateBatch, Target
from kvcalc.planning.search_space import GPUS_PER_SERVER, SearchSpace
from kvcalc.planning.variants import precision_losses
from kvcalc.question.plan_options import Requirement
from kvcalc.records.plan import CandidateRecord, PlanRecord
from kvcalc.timing.deployment import nodes_of
from kvcalc.units import format_bytes, format_seconds


def first_of_groups(groups: Array, *keys: Array, count: int = 1) -> Array:
    """Return the indices of the `count` smallest elements of each group.

    Elements are compared by the first key, and if it is equal by the next one. Example: groups [7,
    7, 8] and the key [2, 1, 5] give the indices [1, 2]: the smallest element of group 7, then that
    of group 8.

    Args:
        groups: Number of the group to which each element belongs [elements].
        keys: Arrays [elements] of numbers by which elements are compared; the first has priority.
        count: Maximum number of elements of each group to return.
    """
    import numpy as np

    order = np.lexsort((*reversed(keys), groups))
    ordered = groups[order]
    return order[np.arange(len(order)) - np.searchsorted(ordered, ordered) < count]


class ParetoFront:
    """The points for which no other point has both a smaller x and a larger y.

    x is a cost to keep low and y a benefit to keep high.

    In a search for deployments, x is the time per output token (TPOT) in seconds. y is the output
    tokens per second per GPU, divided by the GPU's price per hour if prices are known. Of equal
    points, the first stays.

    Attributes:
        xs: The x of each point, in ascending order.
        ys: The y of each point. They ascend too, because a larger x must bring a larger y.
        items: The deployment (a `Candidate`) of each point.
    """

    def __init__(self) -> None:
        import numpy as np

        self.xs = np.empty(0)
        self.ys = np.empty(0)
        self.items: list[Any] = []

    def add(self, xs: Array, ys: Array, items: Callable[[Array], Sequence[Any]]) -> None:
        """Add points to the front, and drop points that are no longer on it.

        A new point with NaN or infinity is ignored.

        Args:
            xs: The x of each new point [new points].
            ys: The y of each new point [new points].
            items: Function of an array of indices of new points. It returns the candidate of each
                index. It is called only for the points that enter the front, because candidates are
                slow to make.
        """
        import numpy as np

        new = np.flatnonzero(np.isfinite(xs) & np.isfinite(ys))
        all_xs = np.concatenate([self.xs, xs[new]])
        all_ys = np.concatenate([self.ys, ys[new]])
        order = np.lexsort((-all_ys, all_xs))
        highest = np.maximum.accumulate(np.concatenate([[-np.inf], all_ys[order]]))
        front = order[all_ys[order] > highest[:-1]]
        num_old = len(self.items)
        new_items = iter(items(new[front[front >= num_old] - num_old]))
        self.items = [self.items[i] if i < num_old else next(new_items) for i in front.tolist()]
        self.xs, self.ys = all_xs[front], all_ys[front]

    def contains(self, x: float, y: float) -> bool:
        """Return whether the front has a point with exactly these coordinates.

        Args:
            x: Time per output token in seconds, in a search for deployments.
            y: Output tokens per second per GPU, divided by the GPU's price per hour if prices are
                known.
        """
        return bool(((self.xs == x) & (self.ys == y)).any())


def reason(candidate: Candidate) -> str | None:
    """Return the first target that a deployment misses as text; None if it meets all targets.

    The text states the reached and the required value. Example: "TPOT 45 ms, target 30 ms".

    Args:
        candidate: A deployment with its replicas, predicted times and targets.
    """
    need, total = candidate.need, candidate.total_tokens_per_s or 0.0
    about = {"bound": "at least ", "scaled": "about "}.get(candidate.deployment.time_basis, "")
    replica = " per replica" if candidate.replicas > 1 else ""
    memory = f"{candidate.capacity:,} of {candidate.max_num_seqs:,} requests{replica} fit"
    if candidate.remaining_bytes < 0:
        memory = f"the model exceeds memory by {format_bytes(-candidate.remaining_bytes)}"
    texts = {
        Target.MEMORY: memory,
        Target.UNKNOWN: "TTFT is unknown, because the GPU has no matrix peak",
        Target.THROUGHPUT: f"{total:,.0f} tokens/s, target {need.min_throughput:,.0f}",
        Target.GPUS: "more GPUs than --max-gpus",
    }
    target = Target(candidate.violated_target)
    time = target.name.lower()
    if limit := need.time_limits.get(time):
        seconds = format_seconds(getattr(candidate, time) or 0.0)
        return f"{target.name} {about}{seconds}, target {format_seconds(limit)}"
    return texts.get(target)


class ClosestMisses:
    """Collects, for advice to the user, the deployments that miss the targets most narrowly.

    A candidate is a deployment with a number of replicas.

    The violation factor says how far a candidate misses: it is 1.2 if its TPOT is 20% above the
    target. For each GPU model and total number of GPUs, only the candidate with the smallest factor
    is stored. No candidate is stored if one with fewer GPUs of this model has a smaller factor.

    Args:
        num_models: Number of GPU models in the search.
        max_gpus: Maximum number of GPUs of all replicas together.

    Attributes:
        factors: Smallest violation factor [GPU models, total GPUs]; infinite without a candidate.
            Candidates with more than `max_gpus` GPUs share the last column.
    """

    def __init__(self, num_models: int, max_gpus: int) -> None:
        import numpy as np

        self.factors = np.full((num_models, max_gpus + 2), np.inf)
        self._misses: dict[tuple[int, int], tuple[int, Candidate]] = {}  # with their order

    def add(self, batch: CandidateBatch, is_failing: Array, rows: Array, orders: Array) -> None:
        """Add those candidates of a batch that miss a target most narrowly.

        Args:
            batch: Candidates (deployments with replicas) and their violation factors.
            is_failing: Boolean array [candidates]. Only candidates with True are compared. The
                caller sets True if a candidate misses a target and is of interest for advice.
            rows: Index of each candidate's GPU model in the list of GPU models of the search
                [candidates].
            orders: Number by which candidates with equal violation factors are compared
                [candidates], as `split_order` returns it. The lowest number stays.
        """
        import numpy as np

        width = self.factors.shape[1]
        totals = np.minimum(batch.figures["gpus"], width - 1)
        factors = batch.figures["violation_factor"]
        smallest = np.minimum.accumulate(self.factors, axis=1)[rows, totals]
        close = np.flatnonzero(is_failing & (factors <= smallest))
        cells = (rows * width + totals)[close]
        close = close[first_of_groups(cells, factors[close], orders[close])]
        columns = (values[close].tolist() for values in (rows, totals, orders))
        for row, total, order, candidate in zip(*columns, batch.candidates(close)):
            cell, factor = (row, total), candidate.violation_factor
            if factor < self.factors[cell] or order < self._misses[cell][0]:
                self.factors[cell] = factor
                self._misses[cell] = order, candidate

    def closest(self, costs: Array, limit: float = float("inf")) -> Candidate | None:
        """Return the candidate with the smallest violation factor that costs less than `limit`.

        Among equally close candidates, return the most expensive one below the limit. If there is
        no limit, return the cheapest one. Return None if no stored candidate costs less.

        Args:
            costs: Cost of each GPU model and total number of GPUs, as an array [GPU models, total
                GPUs]. It is a price per hour, or a number of GPUs if no prices are known.
            limit: Upper limit of the cost, in the unit of `costs`; infinite for no limit.
        """
        sign = 1 if limit == float("inf") else -1
        cells = [cell for cell in sorted(self._misses) if costs[cell] < limit]
        closest = min(
            cells, key=lambda cell: (self.factors[cell], sign * costs[cell]), default=None
        )
        return self._misses[closest][1] if closest else None


def split_order(batch: CandidateBatch) -> Array:
    """Return a number for each candidate that decides between otherwise equal candidates.

    A smaller number is better. Fewer GPUs per replica give a smaller number. Then a larger
    tensor-parallel size, a smaller data-parallel size and a smaller expert-parallel size decide, in
    this order.

    Args:
        batch: The candidates: deployments with numbers of replicas.

    Returns:
        Integers [candidates]. They have no unit and are only compared.
    """
    import numpy as np

    ranks = [deployment.parallelism for deployment in batch.deployments]
    orders = [(((r.gpus << 13) - r.tp << 13) + r.dp << 13) + r.ep for r in ranks]
    return np.array(orders)[batch.index]


# vLLM's "NixlConnector Usage Guide" (docs/features/nixl_connector_usage.md), read 2026-11-23
BOTH, PRODUCER, CONSUMER = "", "kv_producer", "kv_consumer"
PORTS = {BOTH: 8000, PRODUCER: 8100, CONSUMER: 8200}
PROXY_PORT, SIDE_CHANNEL_PORT = 8192, 5600
PROXY = "tests/v1/kv_connector/nixl_integration/toy_proxy_server.py"  # in vLLM's repository


def launch_lines(
    line: str, gpu: Gpu, ranks: Parallelism, prefill_replicas: int, decode_replicas: int
) -> list[str]:
    """Return a shell command for every replica, with its CUDA_VISIBLE_DEVICES and --port.

    With disaggregated prefill, a last line starts the proxy that sends requests to the replicas. A
    single replica has the line unchanged. Hosts are written as variables such as ${HOST2}, or as
    localhost while one host is enough.

    Args:
        line: The engine's command line of one replica, such as `vllm serve …`. It must be vLLM's if
            there are prefill replicas.
        gpu: GPU model. Its preset states the number of GPUs of a host, otherwise it is 8. Replicas
            fill one host after the other.
        ranks: Tensor-, pipeline- and data-parallel sizes of each replica, which give its number of
            GPUs.
        prefill_replicas: Number of replicas that process only prompts; 0 without disaggregated
            prefill.
        decode_replicas: Number of replicas that decode. If `prefill_replicas` is 0, they also
            process prompts.
    """
    if prefill_replicas + decode_replicas == 1:
        return [line]
    decode_role = CONSUMER if prefill_replicas else BOTH
    roles = [PRODUCER] * prefill_replicas + [decode_role] * decode_replicas
    gpus_per_host = 1 if gpu.per == "SoC" else gpu.host.gpus if gpu.host else GPUS_PER_SERVER
    places = []  # host, first GPU and number of data-parallel ranks before it
    host = used_gpus = used_ranks = 0
    for _ in roles:
        if used_gpus and used_gpus + ranks.gpus > gpus_per_host:
            host += -(-used_gpus // gpus_per_host)
            used_gpus = used_ranks = 0
        places.append((host, used_gpus, used_ranks))
        used_gpus += ranks.gpus
        used_ranks += ranks.dp
    lines = []
    proxy: dict[str, list[tuple[str, int]]] = {role: [] for role in PORTS}
    for role, (number, first_gpu, first_rank) in zip(roles, places):
        address = f"${{HOST{number + 1}}}" if host else "localhost"
        port = PORTS[role] + len(proxy[role])
        proxy[role].append((address, port))
        gpu_indices = range(first_gpu, first_gpu + min(ranks.gpus, gpus_per_host))
        words = [f"CUDA_VISIBLE_DEVICES={','.join(map(str, gpu_indices))}"]
        if role:
            words += [f"VLLM_NIXL_SIDE_CHANNEL_HOST={address}"] if host else []
            # one port for each data-parallel rank
            words.append(f"VLLM_NIXL_SIDE_CHANNEL_PORT={SIDE_CHANNEL_PORT + first_rank}")
        served = f"{line} --port {port}"
        lines.append(" ".join([*words, with_role(served, role) if role else served]))
    if prefill_replicas:
        words = [f"python {PROXY} --port {PROXY_PORT}"]
        for option, role in (("prefiller", PRODUCER), ("decoder", CONSUMER)):
            hosts, ports = zip(*proxy[role])
            words.append(f"--{option}-hosts {' '.join(hosts)}")
            words.append(f"--{option}-ports {' '.join(map(str, ports))}")
        lines.append(" ".join(words))
    return lines


def with_role(line: str, role: str) -> str:
    """Return a `vllm serve` line with `--kv-transfer-config`, which gives a replica its role.

    With disaggregated prefill, one replica sends KV caches and the other receives them.

    Args:
        line: The command line without the option.
        role: "kv_producer" for a replica that processes prompts, "kv_consumer" for a replica that
            decodes.
    """
    config = json.dumps(
        {"kv_connector": "NixlConnector", "kv_role": role}, separators=(",", ":")
    )
    return f"{line} --kv-transfer-config {shlex.quote(config)}"


MAX_BEST = 5
# a bound is tried before a prediction that costs more than 2 times as much
MIN_COST_RATIO = 2
Key = tuple[float, ...]  # cost, memory of a GPU, TPOT and order of the split


class BestConfigs(NamedTuple):
    """The result of a search for deployments of one model under one requirement.

    A candidate is a deployment on one GPU model with a number of replicas.

    Times are predictions if the GPU model has a calibration. Otherwise they are lower bounds from
    its datasheet. A calibration is a set of time models fitted to measured kernels. All lists
    except `unranked` contain either only predictions or only bounds.

    Attributes:
        need: The requirement: the load (users or requests per second, lengths) and the targets.
        best: At most 5 (MAX_BEST) candidates that meet the targets, the best first. They include
            the best candidate of each GPU model, for up to 5 GPU models.
        cheaper: The candidate that costs less than the best one and misses the targets most
            narrowly. Without prices, it has fewer GPUs of the same model. None if there is none.
        closest: The candidate of all that misses the targets most narrowly; None if there is none.
        unranked: The best candidate of each GPU model that has only bounds, if its bounds meet the
            targets and other GPU models have predictions. Bounds are optimistic, so they are not
            ranked with predictions.
        bounds_only: Whether the ranked candidates have bounds although some GPU models have
            predictions. This is so if only bounds meet the targets.
        fronts: Pareto fronts of TPOT and throughput: of predictions (key False) and of bounds (key
            True).
        num_tried: Number of candidates that were tried.
        num_met: Number of tried candidates that meet the targets.
        prices: Price per hour of each GPU model, by its name; empty without prices.
    """

    need: Requirement
    best: list[Candidate]
    cheaper: Candidate | None
    closest: Candidate | None
    unranked: list[Candidate]
    bounds_only: bool
    fronts: Mapping[bool, ParetoFront]
    num_tried: int
    num_met: int
    prices: Mapping[str, float]

    @property
    def answers(self) -> list[Candidate]:
        """Return the best candidates. If none meets the targets, return only the closest miss.

        A candidate is a deployment with a number of replicas. The closest miss is the one that
        misses the targets most narrowly. The list is empty if there is none.
        """
        return self.best or ([self.closest] if self.closest else [])

    @property
    def listed(self) -> list[Candidate]:
        """Return the candidates to print: the best ones, then up to 5 that have only lower bounds.

        The first are `answers`. The others are from `unranked`: their GPU models have no
        calibration, so that their times are lower bounds and are not ranked with predictions.
        """
        return [*self.answers, *self.unranked[:MAX_BEST]]

    def cost(self, candidate: Candidate) -> float:
        """Return the price per hour of all GPUs of a candidate, or their number without prices.

        Args:
            candidate: A deployment with a number of replicas.
        """
        return candidate.gpus * self.prices.get(candidate.gpu, 1.0)

    @property
    def lead(self) -> int:
        """Return the index in `listed` of the deployment to try first.

        It is 0, the best candidate, except if a bound costs less than half of the best prediction.
        A trial of the bound is then cheap, although its real times may miss the targets. Example:
        1 GPU by its bound leads before 16 GPUs by a prediction, but not before 2 GPUs.
        """
        costs = [*map(self.cost, self.listed)]
        lowest = min(costs)
        return costs.index(lowest) if lowest * MIN_COST_RATIO < costs[0] else 0

    @property
    def front(self) -> ParetoFront:
        """Return the Pareto front of TPOT and throughput to draw with the printed candidates.

        If the times of `answers` are lower bounds, this is the front of bounds. Otherwise it is the
        front of predictions.
        """
        return self.fronts[self.basis == "bound"]

    @property
    def basis(self) -> str:
        """Return where the times of the ranked candidates come from, as text.

        It is "calibrated" (a calibration of the GPU model itself), "scaled" (a calibration of
        another GPU model), "bound" (the datasheet), or several of them joined with "and".
        """
        bases = [candidate.deployment.time_basis for candidate in self.answers]
        return " and ".join(dict.fromkeys(bases))


class CandidateRanking:
    """Finds the best deployments of one model under one requirement, from batches of candidates.

    A candidate is a deployment with a number of replicas. The best candidate meets all targets at
    the lowest price per hour of all its GPUs, or without prices with the fewest GPUs. If these are
    equal, less memory per GPU is better, then the lower time per output token (TPOT).

    Args:
        need: The requirement: the load (users or requests per second, lengths) and the targets.
        space: The search space, which gives the GPU models and the maximum number of GPUs.
        prices: Price per hour of each GPU model, by its name; None without prices.

    Attributes:
        max_gpus: Maximum number of GPUs of all replicas.
        fronts: Pareto fronts of TPOT and throughput: of predictions (key False) and of bounds (key
            True).
        num_tried: Number of candidates that were added so far.
        num_met: Number of added candidates that meet the targets.
    """

    num_tried = num_met = 0

    def __init__(
        self, need: Requirement, space: SearchSpace, prices: Mapping[str, float] | None = None
    ) -> None:
        self.need = need
        self.max_gpus = space.max_gpus
        self.prices = prices or {}
        self.fronts = {False: ParetoFront(), True: ParetoFront()}
        # index, price and memory of each GPU model
        self._gpus = {
            gpu.name: (row, self.prices.get(gpu.name, 1.0), gpu.memory_bytes)
            for row, gpu in enumerate(space.gpus)
        }
        self._best: dict[str, list[tuple[Key, Candidate]]] = {}
        self._has_bounds: dict[str, bool] = {}
        self._misses = ClosestMisses(len(space.gpus), space.max_gpus)

    def add(self, batch: CandidateBatch) -> None:
        """Add a batch, and keep only those of its candidates that may be part of the result.

        Args:
            batch: Candidates of this model under this requirement, with their times and missed
                targets.
        """
        import numpy as np

        figures = batch.figures
        names = [deployment.gpu.name for deployment in batch.deployments]
        bounds = [deployment.calibration is None for deployment in batch.deployments]
        self._has_bounds |= zip(names, bounds)
        rows, prices, memory = np.array([self._gpus[name] for name in names])[batch.index].T
        rows = rows.astype(int)
        orders = split_order(batch)
        violated = figures["violated_target"]
        meets = violated == Target.NONE
        self.num_tried += len(meets)
        self.num_met += int(meets.sum())
        tpot = np.nan_to_num(figures["tpot"])
        keys = figures["gpus"] * prices, memory, tpot, orders
        self._rank(batch, np.flatnonzero(meets), rows, keys)
        fails = ~meets
        if not self.need.users:
            # more sequences than fit are only a setting, unless no setting fits
            is_setting = figures["capacity"] >= figures["max_num_seqs"].min()
            fails &= (violated != Target.MEMORY) | ~is_setting
        self._misses.add(batch, fails, rows, orders)
        for basis, front in self.fronts.items():
            tpot = np.where(np.array(bounds)[batch.index] == basis, figures["tpot"], np.nan)
            front.add(tpot, figures["tokens_per_s_per_gpu"] / prices, batch.candidates)

    def _rank(
        self, batch: CandidateBatch, meeting: Array, rows: Array, keys: tuple[Array, ...]
    ) -> None:
        """Store the best replicas of each deployment if they are among the best of their GPU
        model."""
        selected = meeting
        for groups, count in ((batch.index, 1), (rows, MAX_BEST)):
            ordered = [key[selected] for key in keys]
            selected = selected[first_of_groups(groups[selected], *ordered, count=count)]
        sort_keys = zip(*(key[selected].tolist() for key in keys))
        for entry in zip(sort_keys, batch.candidates(selected)):
            ranked = self._best.setdefault(entry[1].gpu, [])
            ranked.append(entry)
            ranked.sort(key=itemgetter(0))
            del ranked[MAX_BEST:]

    def result(self) -> BestConfigs:
        """Return the best candidates, closest misses and Pareto fronts of all added batches.

        A candidate is a deployment with a number of replicas.
        """
        met = self._best.keys()
        predicted = {name for name, has_bounds in self._has_bounds.items() if not has_bounds}
        bounded = self._has_bounds.keys() - predicted
        bounds_only = bool(predicted and met) and not predicted & met
        ranked = predicted if predicted and not bounds_only else bounded
        firsts = sorted((entries[0] for entries in self._best.values()), key=itemgetter(0))
        others = chain.from_iterable(entries[1:] for entries in self._best.values())
        entries = firsts + sorted(others, key=itemgetter(0))
        entries = [entry for entry in entries if entry[1].gpu in ranked][:MAX_BEST]
        entries.sort(key=itemgetter(0))
        best = [candidate for _, candidate in entries]
        # without times, GPUs that have only bounds count too
        near = ranked if self.need.has_targets or self.need.rate else self._gpus
        cheaper = None
        if best:
            (limit, *_), _ = entries[0]
            compared = ranked if self.prices else {best[0].gpu}
            cheaper = self._misses.closest(self._costs(compared, self.prices), limit)
        return BestConfigs(
            need=self.need,
            best=best,
            cheaper=cheaper,
            closest=self._misses.closest(self._costs(near, {})),
            unranked=[candidate for _, candidate in firsts if candidate.gpu not in ranked],
            bounds_only=bounds_only,
            fronts=self.fronts,
            num_tried=self.num_tried,
            num_met=self.num_met,
            prices=self.prices,
        )

    def _costs(self, names: Collection[str], prices: Mapping[str, float]) -> Array:
        """Return the costs of GPU models [GPU models, total GPUs]; infinite for others."""
        import numpy as np

        by_model = [prices.get(name, 1.0) if name in names else np.inf for name in self._gpus]
        return np.outer(by_model, np.maximum(np.arange(self.max_gpus + 2), 1))


def candidate_record(candidate: Candidate, price: float = 0.0) -> CandidateRecord:
    """Return the JSON record of a candidate (a deployment with a number of replicas).

    The keys are in `CandidateRecord`. Capacity and times are for one replica that runs
    `max_num_seqs` sequences. Costs and energy per token are for all GPUs under the required load.
    Energy assumes that the GPUs draw full power.

    Args:
        candidate: The candidate.
        price: Price per hour of one GPU of the candidate; if it is 0, the costs in the record are
            None.
    """
    need, deployment, draft = candidate.need, candidate.deployment, candidate.speculation
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


def answer_records(answer: BestConfigs, space: SearchSpace) -> list[PlanRecord]:
    """Return the JSON record of each candidate that `plan` lists, the best first.

    A candidate is a deployment with a number of replicas. The record also has the engine's command
    line of one replica (`command`) and those that start all replicas (`commands`).

    The key `pareto` tells whether the candidate is Pareto-optimal: every other candidate has a
    higher TPOT or fewer tokens per second per GPU. With prices, these tokens per second are divided
    by the GPU's price per hour. Predictions are not compared with bounds.

    Args:
        answer: The result of the search.
        space: The search space of this search. Its engine and engine options are in the command
            lines.
    """
    records: list[PlanRecord] = []
    for candidate in answer.listed:
        deployment = candidate.deployment
        step = Batch.decode(candidate.need.lengths.context, candidate.max_num_seqs)
        price = answer.prices.get(candidate.gpu, 0.0)
        speed = (candidate.tokens_per_s_per_gpu or 0.0) / (price or 1.0)
        front = answer.fronts[deployment.calibration is None]
        losses = precision_losses(deployment.model, deployment.precision)
        written, prefill = command(candidate, space), candidate.prefill_replicas
        line, lines = None, []
        # only vLLM's lines of replicas for prefill are known
        if written and (not prefill or space.options.engine == "vllm"):
            line = with_role(written.line, CONSUMER) if prefill else written.line
            lines = launch_lines(
                line=written.line,
                gpu=deployment.gpu,
                ranks=deployment.parallelism,
                prefill_replicas=prefill,
                decode_replicas=candidate.replicas,
            )
        records.append(
            {
                **candidate_record(candidate, price),
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


def command(candidate: Candidate, space: SearchSpace) -> EngineCommand | None:
    """Return the engine's command line of one replica; None if its flags cannot describe it.

    All data-parallel ranks get the same max_num_seqs: the sequences n of the rank with the most. If
    requests arrive at a rate, it is n + 3 · √n if so many fit. The number of running requests is
    then about a Poisson variable, whose standard deviation is √n: it exceeds this limit with a
    probability of about 0.1%. Example: 64 sequences give 88.

    Args:
        candidate: The deployment, with the number of sequences per replica.
        space: The search space, which gives the engine's options, such as its memory share.
    """
    deployment, speculation = candidate.deployment, candidate.speculation
    ranks = deployment.parallelism
    max_num_seqs = ranks.sequences(candidate.max_num_seqs)
    if candidate.need.rate:
        peak = ceil(max_num_seqs + 3 * max_num_seqs**0.5)
        max_num_seqs = max(max_num_seqs, min(peak, candidate.capacity // ranks.dp))
    options = space.fit_options(candidate.need, max_num_seqs * ranks.dp)
    if speculation:
        options = speculation.options(deployment.model, options)
    return command_of(deployment, options)
