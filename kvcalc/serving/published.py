"""The load and the settings of published serving runs, for measured rows. Nothing is fitted here.

`inferencex` runs are from SemiAnalysis' public benchmark (github.com/SemiAnalysisAI/InferenceX,
scripts of 2025-09 to 2026-04). Each client sends 10 prompts: the first at the start, the next when
an answer comes. Lengths are uniform from 0.8 of the nominal length up to the nominal length.

`nvidia` runs come with AIConfigurator. Lengths are the nominal lengths. The token budget of a pass
is one prompt plus 1500 plus the number of clients. For runs that hit a prefix cache, two figures
are assumptions:
- The prompts are the hundred that genai-perf draws by default (--num-dataset-entries), sent in
  turn. The default of aiperf, its successor, was not found.
- Each client sends 50 prompts, as in AIConfigurator's own script
  (generator/…/benchmark/bench_run.sh.j2, 2025-12).
Each prompt is then computed once if the cache stores them all, mostly in the burst at the start.
Read 2026-11-22.
"""

from typing import NamedTuple

from kvcalc.library.catalog import key
from kvcalc.serving.scheduling import Scheduling
from kvcalc.timing.engine import Engine
from kvcalc.timing.rows import MeasuredRow
from kvcalc.timing.serving import INFERENCEX
from kvcalc.timing.serving import precision_of as precision_of
from kvcalc.timing.serving import ranks_of as ranks_of

POOL, POOLED_ROUNDS = 100, 50  # for runs with prefix hits: distinct prompts, prompts per client
WAITS = Scheduling(whole=True, reserve=1.0, wait_passes=20, wait_share=0.9)  # batch_wait_timeout_iters 20 of 70B at 1k/1k


# Maximum tokens of a pass in InferenceX's scripts (benchmarks/single_node/*_h200*.sh), by engine
# and by the beginning of the model's name.
BUDGETS = {
    ("sglang", "deepseek"): 32768,
    ("sglang", "qwen35"): 16384,
    ("trtllm", "gptoss"): 20000,
    ("trtllm", ""): 16384,
}


class Driven(NamedTuple):
    """The load and the settings of a measured run.

    Attributes:
        input_len: Nominal tokens of a prompt.
        output_len: Nominal tokens of an answer.
        clients: Number of clients.
        rounds: Prompts per client.
        shortest: Minimum length as a share of the nominal length.
        tokens: Maximum tokens of a pass.
        seats: Maximum number of concurrent sequences.
        scheduling: How the engine fills its passes.
        pool: Number of distinct prompts, sent in turn and stored in a prefix cache; 0 without hits.
    """

    input_len: int
    output_len: int
    clients: int
    rounds: int
    shortest: float
    tokens: int
    seats: int
    scheduling: Scheduling
    pool: int


def driven(row: MeasuredRow, engine: Engine | None) -> Driven:
    """Return the load and the settings of a measured run, from its scripts or its own figures."""
    isl, osl, clients = (int(x) for x in row.shape[:3])
    how = scheduling_of(engine)
    name = key(row.model.rsplit("/", 1)[-1])
    rounds, shortest, tokens, seats = 10, 0.8, 8192, clients
    if row.client == INFERENCEX:
        if row.version.startswith("0.11.2"):
            seats = min(seats, 64)  # runs labelled with 512 clients have the throughput of 64
        tokens = next((n for (stack, begins), n in BUDGETS.items() if stack == row.framework and name.startswith(begins)), tokens)
        rounds = 5 if name.startswith("glm5") else rounds
        if row.framework == "trtllm":
            how = WAITS if row.op == "e2e_dense" and isl == osl == 1024 and row.shape[3] < 8 else how
    elif row.framework == "vllm":
        rounds, tokens = 5, isl + 1500 + clients
    elif row.framework == "trtllm":
        shortest, tokens = 1.0, isl + 1500 + clients
        seats -= name.startswith("llama318b") and clients > 1  # one request of each wave waits for a whole answer
    else:
        shortest = 0.8 if name.startswith("llama318b") else 1.0  # the waves of its requests drift apart
    pool, rounds = (POOL, POOLED_ROUNDS) if row.prefix_cached else (0, rounds)
    return Driven(isl, osl, clients, rounds, shortest, max(tokens, clients), seats, how, pool)


def scheduling_of(engine: Engine | None) -> Scheduling:
    """Return how an engine fills its passes."""
    return Scheduling(engine.decodes_wait, engine.whole, engine.reserve) if engine else Scheduling()
