"""The load and the settings of published serving runs, for measured rows. Nothing is fitted here.

`inferencex` runs are from SemiAnalysis' public benchmark (github.com/SemiAnalysisAI/InferenceX,
scripts of 2025-09 to 2026-04). Each client sends 10 prompts: the first at the start, the next when
an answer comes. Lengths are uniform from 0.8 of the nominal length up to the nominal length.

`nvidia` runs come with AIConfigurator. Lengths are the nominal lengths. The token budget of a pass
is one prompt plus 1500 plus the number of clients. For runs that hit a prefix cache, all but the
last token of each prompt is assumed to be cached, because their prompts are not published.
Read 2026-11-22.
"""

from typing import NamedTuple

from kvcalc.library.presets import key
from kvcalc.serving.decoding import Scheduling
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
