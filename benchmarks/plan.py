"""Time searches of `plan`: grids in which every configuration is evaluated.

The yardstick is a loop that calls `fit` and `latency` for one configuration after the other. A few
configurations are timed. Both times are per configuration.
"""

import random
from collections.abc import Iterator
from time import process_time

from bench import Line, cpu_seconds

from kvcalc import FitOptions, Gpu, Precision, load_gpu, load_model
from kvcalc.capacity import fit
from kvcalc.layers.batch import Batch
from kvcalc.library.load import all_gpus
from kvcalc.planning.grid import Candidate, SearchGrid
from kvcalc.planning.search import run_search
from kvcalc.planning.search_space import SearchSpace
from kvcalc.question.plan_options import Requirement
from kvcalc.serving.request_latency import request

ASKED = 60  # configurations that the loop is timed on
YARDSTICK = "one configuration by `fit` and `latency`"


def space(gpus: tuple[Gpu, ...], stack: str, pp: tuple[int, ...], caches: tuple[str, ...]) -> SearchSpace:
    precisions = tuple(Precision(kv_cache_dtype=cache) for cache in caches)
    sizes = {"tp": (1, 2, 4, 8), "dp": (1,), "pp": pp}
    return SearchSpace(
        models=(load_model("llama-3.1-70b"),), gpus=gpus, max_gpus=4096, precisions=precisions, calibration=stack, **sizes
    )


def one_by_one(candidates: list[Candidate]) -> float:
    """Return the CPU seconds per configuration of a loop over `fit` and `latency`."""
    points = random.Random(0).choices(candidates, k=ASKED)
    began = process_time()
    for point in points:
        deployment, lengths, count = point.deployment, point.need.lengths, point.max_num_seqs
        fit(deployment, FitOptions(engine="vllm", max_model_len=lengths.context, max_num_seqs=count, budget="low"))
        request(deployment, lengths.prompt, 1)
        if lengths.output:
            request(deployment, lengths.prompt, lengths.output, count)
        else:
            deployment.seconds(Batch.decode(lengths.context, count))
    return (process_time() - began) / ASKED


def looked_through(what: str, needs: list[Requirement], where: SearchSpace) -> Line:
    """Return the line that compares the time per configuration of a search with the loop."""
    seconds = cpu_seconds(lambda: run_search(needs, where), repeat=3)
    looked = sum(answer.num_tried for answer in run_search(needs, where).answers)
    batches = SearchGrid(needs, where).batches()
    kept = [one for batch in batches for one in batch.candidates(slice(0, None, 97)) if one.ttft]
    return Line(f"`plan`, {looked:,} configurations {what}", seconds / looked, YARDSTICK, one_by_one(kept), 0.1)


def fleet(what: str, name: str, contexts: tuple[int, ...], gpus: tuple[Gpu, ...], max_gpus: int, stack: str, users: int) -> Line:
    """Return the line for a search over all ways to split a model over GPUs, as in `plan` without sizes."""
    needs = [Requirement(users=users, context=context, max_tpot=0.05) for context in contexts]
    where = SearchSpace(models=(load_model(name),), gpus=gpus, max_gpus=max_gpus, calibration=stack)
    return looked_through(f"of {name} {what}", needs, where)


def lines() -> Iterator[Line]:
    every, calibrated = tuple(all_gpus()), (load_gpu("h100"), load_gpu("h200"))
    bound = space(every, "datasheet", (1, 2, 4), ("auto",))
    yield looked_through("with datasheet bounds", [Requirement(users=4096, context=16_384, max_tpot=0.05)], bound)
    needs = [Requirement(users=8192, context=context, max_tpot=0.05) for context in (2048, 4096, 8192, 16_384)]
    yield looked_through("with time models", needs, space(calibrated, "vllm", (1, 2, 4), ("auto", "fp8")))
    contexts = 4096, 8192, 16_384, 32_768
    yield fleet("in every split, to 4,096 GPUs", "llama-3.1-70b", (16_384,), every, 4096, "datasheet", 4096)
    needs = [Requirement(users=users, context=context, max_tpot=0.05) for users in (16, 64, 256, 1024) for context in contexts]
    for name in ("llama-3.1-70b", "deepseek-v3"):
        for stack, basis in (("datasheet", "with bounds"), ("vllm", "with time models")):
            sparse = SearchSpace(models=(load_model(name),), gpus=every, max_gpus=64, calibration=stack)
            yield looked_through(f"of {name}, 16 requirements to 64 GPUs, {basis}", needs, sparse)
    yield fleet("in every split, four contexts to 64 GPUs", "deepseek-v3", contexts, every, 64, "datasheet", 64)
    for name in ("llama-3.1-70b", "deepseek-v3"):
        yield fleet("in every split, one context to 64 GPUs, with time models", name, (16_384,), every, 64, "vllm", 64)
    for name in ("llama-3.1-70b", "deepseek-v3"):
        yield fleet(f"over {len(every)} GPUs", name, (16_384,), every, 16, "", 64)
        question = SearchSpace(models=(load_model(name),), gpus=every)
        answers = [Requirement(rate=4, input_len=2048, output_len=500, max_tpot=0.05)]
        yield looked_through(f"of {name} over {len(every)} GPUs, every step of 500 tokens", answers, question)
