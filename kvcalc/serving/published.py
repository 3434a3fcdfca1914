"""Published serving runs, as they were driven: who asked how, of what server. Knows measured rows, fits nothing.

`inferencex` runs are those of SemiAnalysis' public benchmark (github.com/SemiAnalysisAI/InferenceX, scripts of 2025-09 to
2026-04): 10 prompts a client, all at once and then as answers come, lengths uniform from 0.8 of the nominal up to it.
`nvidia` runs come with AIConfigurator: lengths as given, a token budget of one prompt and 1500 beside the clients. Where they hit
a prefix cache, their prompts are taken to be the hundred that genai-perf draws unless told otherwise (--num-dataset-entries; the
default of aiperf, its successor, was not found), sent in turn, and 50 a client as AIConfigurator's own script asks for
(generator/…/benchmark/bench_run.sh.j2, 2025-12): each is computed once where the cache holds them all, most of them in the burst
at the start. Read 2026-11-22.
"""

from typing import NamedTuple

from kvcalc.library.catalog import key
from kvcalc.serving.scheduling import Scheduling
from kvcalc.timing.engine import Engine
from kvcalc.timing.rows import MeasuredRow
from kvcalc.timing.serving import INFERENCEX
from kvcalc.timing.serving import precision_of as precision_of
from kvcalc.timing.serving import ranks_of as ranks_of

POOL, POOLED_ROUNDS = 100, 50  # distinct prompts, and prompts of each client, of runs that hit a prefix cache
WAITS = Scheduling(whole=True, reserve=1.0, wait_passes=20, wait_share=0.9)  # batch_wait_timeout_iters 20 of 70B at 1k/1k


# Tokens of a pass in InferenceX's scripts (benchmarks/single_node/*_h200*.sh), by engine and how a model's name begins.
BUDGETS = {
    ("sglang", "deepseek"): 32768,
    ("sglang", "qwen35"): 16384,
    ("trtllm", "gptoss"): 20000,
    ("trtllm", ""): 16384,
}


class Driven(NamedTuple):
    """A measured run: its lengths, clients, prompts of each, and the least share of the nominal lengths; its server's passes.

    seats: sequences at once. pool: distinct prompts, sent in turn and kept in a prefix cache; 0 where none is hit.
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
    """How a measured run was driven, as far as its scripts or its own figures tell."""
    isl, osl, clients = (int(x) for x in row.shape[:3])
    how = scheduling_of(engine)
    name = key(row.model.rsplit("/", 1)[-1])
    rounds, shortest, tokens, seats = 10, 0.8, 8192, clients
    if row.client == INFERENCEX:
        if row.version.startswith("0.11.2"):
            seats = min(seats, 64)  # runs labelled with 512 clients make tokens as 64 do
        tokens = next((n for (stack, begins), n in BUDGETS.items() if stack == row.framework and name.startswith(begins)), tokens)
        rounds = 5 if name.startswith("glm5") else rounds
        if row.framework == "trtllm":
            how = WAITS if row.op == "e2e_dense" and isl == osl == 1024 and row.shape[3] < 8 else how
    elif row.framework == "vllm":
        rounds, tokens = 5, isl + 1500 + clients
    elif row.framework == "trtllm":
        shortest, tokens = 1.0, isl + 1500 + clients
        seats -= name.startswith("llama318b") and clients > 1  # one of each wave waits for a whole answer
    else:
        shortest = 0.8 if name.startswith("llama318b") else 1.0  # its waves come apart
    pool, rounds = (POOL, POOLED_ROUNDS) if row.prefix_cached else (0, rounds)
    return Driven(isl, osl, clients, rounds, shortest, max(tokens, clients), seats, how, pool)


def scheduling_of(engine: Engine | None) -> Scheduling:
    """How an engine fills its passes."""
    return Scheduling(engine.decodes_wait, engine.whole, engine.reserve) if engine else Scheduling()
