"""Plans: grids that are looked through whole, every point with its capacity, times and reason; writing apart.

The yardstick is a loop which asks `fit` and `latency` for one point after the other, of which a few are timed: both times are of
one point.
"""

import random
from collections.abc import Iterator
from time import process_time

from bench import Line, cpu_seconds

from kvcalc import FitOptions, Gpu, Precision, fit, load_gpu, load_model
from kvcalc.layers.batch import Batch
from kvcalc.library.listing import all_gpus
from kvcalc.planning.block import Block
from kvcalc.planning.grid import Grid
from kvcalc.planning.need import Need
from kvcalc.planning.search import searched
from kvcalc.planning.space import Space
from kvcalc.serving.latency import request

ASKED = 60  # points that the loop is timed on
YARDSTICK = "a point by `fit` and `latency`"


def space(gpus: tuple[Gpu, ...], stack: str, pp: tuple[int, ...], caches: tuple[str, ...]) -> Space:
    precisions = tuple(Precision(kv_cache_dtype=cache) for cache in caches)
    sizes = {"tp": (1, 2, 4, 8), "dp": (1,), "pp": pp}
    return Space(
        models=(load_model("llama-3.1-70b"),), gpus=gpus, max_gpus=4096, precisions=precisions, calibration=stack, **sizes
    )


def one_by_one(blocks: list[Block]) -> float:
    """CPU seconds of a point in a loop over what the commands ask."""
    chance = random.Random(0)
    points = [(block, int(chance.choice(block.counts))) for block in chance.choices(blocks, k=ASKED)]
    began = process_time()
    for block, count in points:
        deployment, lengths = block.deployment, block.need.lengths
        fit(deployment, FitOptions(engine="vllm", max_model_len=lengths.context, max_num_seqs=count, budget="low"))
        request(deployment, lengths.prompt, 1)
        if lengths.output:
            request(deployment, lengths.prompt, lengths.output, count)
        else:
            deployment.seconds(Batch.decode(lengths.context, count))
    return (process_time() - began) / ASKED


def looked_through(what: str, needs: list[Need], where: Space) -> Line:
    """A point of a grid, all of which is looked through, against the loop."""
    seconds = cpu_seconds(lambda: searched(needs, where), repeat=3)
    looked = sum(answer.looked for answer in searched(needs, where).answers)
    kept = [block for number, block in enumerate(Grid(needs, where).blocks()) if number % 7 == 0 and block.ttft[0] > 0]
    return Line(f"`plan`, {looked:,} points {what}", seconds / looked, YARDSTICK, one_by_one(kept), 0.1)


def fleet(what: str, name: str, contexts: tuple[int, ...], gpus: tuple[Gpu, ...], max_gpus: int, stack: str, users: int) -> Line:
    """Every split of a model over GPUs, as the command has it where no sizes are given."""
    needs = [Need(users=users, context=context, max_tpot=0.05) for context in contexts]
    where = Space(models=(load_model(name),), gpus=gpus, max_gpus=max_gpus, calibration=stack)
    return looked_through(f"of {name} {what}", needs, where)


def lines() -> Iterator[Line]:
    every, calibrated = tuple(all_gpus()), (load_gpu("h100"), load_gpu("h200"))
    bound = space(every, "datasheet", (1, 2, 4), ("auto",))
    yield looked_through("under datasheet bounds", [Need(users=4096, context=16_384, max_tpot=0.05)], bound)
    needs = [Need(users=8192, context=context, max_tpot=0.05) for context in (2048, 4096, 8192, 16_384)]
    yield looked_through("under laws", needs, space(calibrated, "vllm", (1, 2, 4), ("auto", "fp8")))
    contexts = 4096, 8192, 16_384, 32_768
    yield fleet("in every split, to 4,096 GPUs", "llama-3.1-70b", (16_384,), every, 4096, "datasheet", 4096)
    needs = [Need(users=users, context=context, max_tpot=0.05) for users in (16, 64, 256, 1024) for context in contexts]
    for name in ("llama-3.1-70b", "deepseek-v3"):
        for stack, basis in (("datasheet", "under bounds"), ("vllm", "under laws")):
            sparse = Space(models=(load_model(name),), gpus=every, max_gpus=64, calibration=stack)
            yield looked_through(f"of {name}, 16 needs to 64 GPUs, {basis}", needs, sparse)
    yield fleet("in every split, four contexts to 64 GPUs", "deepseek-v3", contexts, every, 64, "datasheet", 64)
    for name in ("llama-3.1-70b", "deepseek-v3"):
        yield fleet("in every split, one context to 64 GPUs, under laws", name, (16_384,), every, 64, "vllm", 64)
    for name in ("llama-3.1-70b", "deepseek-v3"):
        yield fleet(f"over {len(every)} GPUs", name, (16_384,), every, 16, "", 64)
        question = Space(models=(load_model(name),), gpus=every)
        answers = [Need(rate=4, input_len=2048, output_len=500, max_tpot=0.05)]
        yield looked_through(f"of {name} over {len(every)} GPUs, every step of 500 tokens", answers, question)
