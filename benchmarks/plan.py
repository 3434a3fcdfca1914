"""How long a plan takes: a million points in 5 s under datasheet bounds, in 30 s under laws; a question over all GPUs in 3 s.

Each grid is looked through whole, every point with its capacity, times and reason; writing apart. The ratio is that to a loop
which asks `fit` and `latency` for one point after the other, of which a few are timed. CPU time of all threads is taken
(elementwise NumPy has one), the least of several repeats: on a shared machine everything else only adds. Exit status 1 when a
target is missed.

    python benchmarks/plan.py
"""

import random
import sys
import timeit
from time import process_time

from kvcalc import FitOptions, Gpu, Precision, fit, load_gpu, load_model
from kvcalc.layers.batch import Batch
from kvcalc.library.listing import all_gpus
from kvcalc.planning.grid import Block, Grid
from kvcalc.planning.need import Need
from kvcalc.planning.search import searched
from kvcalc.planning.space import Space
from kvcalc.serving.latency import request

MILLION, MOST_BOUND, MOST_CALIBRATED, MOST_QUESTION = 1_000_000, 5.0, 30.0, 3.0
ASKED = 60  # points that the loop is timed on


def space(gpus: tuple[Gpu, ...], stack: str, pp: tuple[int, ...], caches: tuple[str, ...]) -> Space:
    precisions = tuple(Precision(kv_cache_dtype=cache) for cache in caches)
    sizes = {"tp": (1, 2, 4, 8), "dp": (1,), "pp": pp}
    return Space(models=(load_model("llama-3.1-70b"),), gpus=gpus, max_gpus=4096, precisions=precisions, stack=stack, **sizes)


def one_by_one(blocks: list[Block]) -> float:
    """CPU seconds of a point in a loop over what the commands ask."""
    chance = random.Random(0)
    points = [(block, int(chance.choice(block.counts))) for block in chance.choices(blocks, k=ASKED)]
    began = process_time()
    for block, count in points:
        deployment, context = block.deployment, block.need.lengths.context
        fit(deployment, FitOptions(engine="vllm", max_model_len=context, max_num_seqs=count, budget="low"))
        request(deployment, context, 1)
        deployment.seconds(Batch.decode(context, count))
    return (process_time() - began) / ASKED


def measured(what: str, needs: list[Need], where: Space, most: float) -> bool:
    """Whether a million points of a grid take less; printed with the ratio to the loop."""
    seconds = min(timeit.repeat(lambda: searched(needs, where), number=1, repeat=3, timer=process_time))
    looked = sum(answer.looked for answer in searched(needs, where).answers)
    kept = [block for number, block in enumerate(Grid(needs, where).blocks()) if number % 7 == 0 and block.ttft == block.ttft]
    ratio, million = one_by_one(kept) / (seconds / looked), MILLION * seconds / looked
    print(
        f"{what}: {looked:,} points in {seconds:.2f} s, a million in {million:.2f} s, {million / most:.2f} of its target; ",
        end="",
    )
    print(f"{ratio:,.0f} times as fast as one by one")
    return million <= most


def main() -> int:
    every, calibrated = tuple(all_gpus()), (load_gpu("h100"), load_gpu("h200"))
    bound = space(every, "datasheet", (1, 2, 4), ("auto",))
    good = measured("datasheet", [Need(users=4096, context=16_384, max_tpot=0.05)], bound, MOST_BOUND)
    needs = [Need(users=8192, context=context, max_tpot=0.05) for context in (2048, 4096, 8192, 16_384)]
    good &= measured("calibrated", needs, space(calibrated, "vllm", (1, 2, 4), ("auto", "fp8")), MOST_CALIBRATED)
    for name in ("llama-3.1-70b", "deepseek-v3"):
        question = Space(models=(load_model(name),), gpus=every)
        asked = [Need(users=64, context=16_384, max_tpot=0.05)]
        spent = min(timeit.repeat(lambda q=question, n=asked: searched(n, q), number=1, repeat=3, timer=process_time))
        good &= spent <= MOST_QUESTION
        print(f"{name} over {len(every)} GPUs: {spent:.2f} s, {spent / MOST_QUESTION:.2f} of its target")
    return int(not good)


if __name__ == "__main__":
    sys.exit(main())
