"""A server under load, simulated pass by pass, with one log for each data-parallel rank.

Requests go to the ranks in turn. Each rank has its own queue and memory; a pass of one is timed as
if the others ran an equal batch. Pipeline stages work on different micro-batches of a pass.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from kvcalc.errors import UserError, nearest
from kvcalc.library.presets import key
from kvcalc.serving.batching import Continuous, ServerSetup, Static
from kvcalc.serving.cache_accounting import Log
from kvcalc.serving.decoding import Scheduling
from kvcalc.serving.kv_transfer import DisaggregatedServer, KVTransfer
from kvcalc.serving.requests import ArrivalQueue, Clients, Requests
from kvcalc.timing.calibration import EngineOverheads
from kvcalc.timing.rows import MeasuredRow
from kvcalc.timing.validation import INFERENCEX

# batch_wait_timeout_iters 20 of 70B at 1k/1k
WAITS = Scheduling(whole_prompts=True, reserve=1.0, wait_passes=20, wait_share=0.9)
# Maximum tokens of a pass in InferenceX's scripts (benchmarks/single_node/*_h200*.sh), by engine
# and by the beginning of the model's name.
BUDGETS = {
    ("sglang", "deepseek"): 32768,
    ("sglang", "qwen35"): 16384,
    ("trtllm", "gptoss"): 20000,
    ("trtllm", ""): 16384,
}


class PublishedRun(NamedTuple):
    """The load and the settings of a measured run.

    Attributes:
        input_len: Nominal tokens of a prompt.
        output_len: Nominal tokens of an answer.
        clients: Number of clients.
        max_tokens: Maximum tokens of a pass.
        max_num_seqs: Maximum number of concurrent sequences.
        scheduling: How the engine fills its passes.
        rounds: Prompts per client.
        min_share: Minimum length as a share of the nominal length.
        prefix_hit_rate: Share of each prompt that a prefix cache stores.
    """

    input_len: int
    output_len: int
    clients: int
    max_tokens: int
    max_num_seqs: int
    scheduling: Scheduling
    rounds: int = 10
    min_share: float = 0.8
    prefix_hit_rate: float = 0.0


def published_run(row: MeasuredRow, engine: EngineOverheads | None) -> PublishedRun:
    """Return the load and the settings of a measured run, from its scripts or its own figures."""
    isl, osl, clients = (int(x) for x in row.shape[:3])
    name = key(row.model.rsplit("/", 1)[-1])
    is_small_llama = name.startswith("llama318b")
    run = PublishedRun(isl, osl, clients, 8192, clients, scheduling_of(engine))
    if row.client == INFERENCEX:
        for (stack, begins), tokens in BUDGETS.items():
            if stack == row.framework and name.startswith(begins):
                run = run._replace(max_tokens=tokens)
                break
        if row.version.startswith("0.11.2"):
            # runs labelled with 512 clients have the throughput of 64
            run = run._replace(max_num_seqs=min(clients, 64))
        if name.startswith("glm5"):
            run = run._replace(rounds=5)
        is_equal = isl == osl == 1024
        if (
            row.framework == "trtllm"
            and row.op == "e2e_dense"
            and is_equal
            and row.shape[3] < 8
        ):
            run = run._replace(scheduling=WAITS)
    elif row.framework == "vllm":
        run = run._replace(rounds=5, max_tokens=isl + 1500 + clients)
    elif row.framework == "trtllm":
        # one request of each wave waits for a whole answer
        waiting = is_small_llama and clients > 1
        run = run._replace(
            min_share=1.0,
            max_tokens=isl + 1500 + clients,
            max_num_seqs=clients - waiting,
        )
    elif not is_small_llama:  # otherwise its requests do not stay in waves
        run = run._replace(min_share=1.0)
    if row.prefix_cached:
        run = run._replace(prefix_hit_rate=1.0)
    return run._replace(max_tokens=max(run.max_tokens, clients))


def scheduling_of(engine: EngineOverheads | None) -> Scheduling:
    """Return how an engine fills its passes."""
    return (
        Scheduling(engine.decodes_wait, engine.whole, engine.reserve)
        if engine
        else Scheduling()
    )


POLICIES = ("continuous", "static")
PROGRESS_STEP = 100  # requests between two reports of progress


class Served(NamedTuple):
    """Simulated requests.

    Attributes:
        times: Log with the times of all requests.
        logs: Log of each rank. Rank r of n processes every n-th request from request r on.
        is_complete: False if Ctrl-C ended the simulation before all requests were done.
        prefill: Logs of the prefill ranks of a disaggregated server. `logs` are then from the
            decode ranks.
    """

    requests: Requests
    times: Log
    logs: tuple[Log, ...]
    is_complete: bool = True
    prefill: tuple[Log, ...] = ()


def simulate(
    requests: Requests,
    setup: ServerSetup,
    policy: str = "continuous",
    clients: Clients = Clients(),  # noqa: B008
    transfer: KVTransfer | None = None,
    progress: Callable[[int], None] | None = None,
) -> Served:
    """Serve all requests. Ctrl-C keeps the requests that are done.

    Args:
        transfer: Prefill replicas of a disaggregated server.
        progress: Called from time to time with the number of further requests that are done.

    Raises:
        UserError: The policy is unknown or contradicts other settings, or a pass could not hold a
            token of every sequence.
    """
    _check(setup, policy, transfer)
    times = Log(len(requests))
    servers: Sequence[Continuous | Static | DisaggregatedServer]
    prefill: tuple[Log, ...] = ()
    if transfer:
        pair = DisaggregatedServer(requests, setup, clients, transfer, times)
        logs = tuple(server.log for server in pair.decodes)
        prefill = tuple(server.log for server in pair.prompts)
        servers = (pair,)
    else:
        num_ranks = setup.steps.ranks
        batching = Static if policy == "static" else Continuous
        servers = ranks = [
            batching(ArrivalQueue(requests, setup.pool, times, clients, rank, num_ranks), setup)
            for rank in range(min(num_ranks, len(requests)))
        ]
        logs = tuple(server.log for server in ranks)
    is_complete = True
    try:
        for server in servers:
            reported = 0
            while server.run():
                if progress and server.done - reported >= PROGRESS_STEP:
                    progress(server.done - reported)
                    reported = server.done
            if progress:
                progress(server.done - reported)
    except KeyboardInterrupt:
        if np.isnan(times.finished).all():
            raise
        is_complete = False
    return Served(requests, times, logs, is_complete, prefill)


def _check(setup: ServerSetup, policy: str, transfer: KVTransfer | None) -> None:
    """Check that the settings of a server agree. Raises UserError otherwise."""
    if policy not in POLICIES:
        raise UserError(f"unknown policy {policy!r}", hint=nearest(policy, POLICIES))
    tokens, num_seqs = setup.limits.max_num_batched_tokens, setup.limits.max_num_seqs
    queries = setup.steps.queries
    if policy == "continuous" and tokens < num_seqs * queries:
        message = f"{tokens:,} tokens of a pass are fewer than {num_seqs:,} sequences"
        message += f" of {queries} queries" if queries > 1 else ""
        raise UserError(message, hint="Raise max-num-batched-tokens, or lower max-num-seqs")
    if transfer and policy != "continuous":
        raise UserError(
            "prompts apart from decodes are simulated under continuous batching",
            hint="Leave --policy out",
        )
