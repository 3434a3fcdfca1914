"""The smallest changes of flags that give what is asked for, each checked by running it: as logged, and by the rules alone."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import msgspec

from kvcalc.capacity import Fit, FitOptions, fit
from kvcalc.capacity.record import Typed, fit_record
from kvcalc.errors import UserError
from kvcalc.layers.ranks import Parallelism
from kvcalc.planning.diagnosis import Diagnosis
from kvcalc.storage.quality import loss_of
from kvcalc.timing.deployment import Deployment

MOST_SHARE = 0.97
LEAST_TOKENS, LEAST_SEQUENCES, MOST_TP = 512, 8, 64
ENOUGH = 5
LENGTHS = {"vllm": "--max-model-len", "sglang": "--context-length", "trtllm": "--max_seq_len"}


class Need(NamedTuple):
    """Conversations of so many tokens."""

    users: int
    tokens: int


class Change(NamedTuple):
    """flags: as they are typed, for people. cost: what it costs, in words, '' nothing that is measured in quality.

    command: the engine's own line with it; kvcalc_command: that, given to `fit`. holds: conversations of the need's length.
    """

    flags: str
    cost: str
    command: str | None
    kvcalc_command: str | None
    holds: int


Point = tuple[Deployment, FitOptions]


def changes(found: Diagnosis, need: Need) -> list[Change]:
    """Up to ENOUGH changes, one flag each before two, the least of each kind that gives the need."""
    answers: list[Change] = []
    start = (found.plain, found.options)
    for mender in MENDERS:
        for flags, cost, point in mender(found, need, start):
            if change := _checked(found, need, flags, cost, point):
                answers.append(change)
                break
    if answers:
        return answers[:ENOUGH]
    for mender in MENDERS[1:]:
        for flags, cost, point in mender(found, need, start):
            for more, _, both in _share(found, need, point):
                if change := _checked(found, need, f"{flags} {more}", cost, both):
                    answers.append(change)
                    break
            if answers and answers[-1].flags.startswith(flags):
                break
    return answers[:ENOUGH]


def gives(found: Diagnosis, need: Need, point: Point) -> Fit | None:
    """What fits at a point by the rules, where both they and what was logged hold the need; None where one does not."""
    deployment, options = point
    asked = msgspec.structs.replace(options, users=seats(options, need.users), max_model_len=need.tokens)
    logged = msgspec.structs.replace(deployment, gpu=found.deployment.gpu)
    try:
        by_rules = fit(deployment, asked)
        as_logged = fit(logged, msgspec.structs.replace(asked, from_log=found.learned))
        started = fit(logged, msgspec.structs.replace(options, from_log=found.learned, users=seats(options, 1)))
    except UserError:
        return None
    others = found.learned.others_bytes
    room = not others or as_logged.of != "total" or as_logged.budget.share <= found.learned.memory_bytes - others
    return by_rules if by_rules.fits and as_logged.fits and started.fits and room else None


def _checked(found: Diagnosis, need: Need, flags: str, cost: str, point: Point) -> Change | None:
    held = gives(found, need, point)
    if held is None:
        return None
    deployment, options = point
    longest = options.max_model_len or found.length
    users = seats(options, need.users)
    asked = msgspec.structs.replace(options, users=users, max_model_len=max(longest, need.tokens))
    shown = fit(deployment, asked)
    if not shown.fits:
        flags = f"{flags} {limited(options, need.tokens)}"
        shown = fit(deployment, msgspec.structs.replace(asked, max_model_len=need.tokens))
    record = fit_record(shown, typed=Typed(model=found.command.named))
    return Change(flags, cost, record["command"], record["kvcalc_command"], held.sequences)


def seats(options: FitOptions, users: int) -> int:
    """Conversations that have to fit where `users` come: llama.cpp allocates all of its slots at the start."""
    return max(users, options.max_num_seqs or 1) if options.engine == "llama.cpp" else users


def limited(options: FitOptions, tokens: int) -> str:
    """The flag that limits a sequence to so many tokens; llama.cpp's says the cells of all slots."""
    if options.engine == "llama.cpp":
        return f"--ctx-size {tokens * max(1, options.max_num_seqs or 1)}"
    return f"{LENGTHS[options.engine]} {tokens}"


def _with(point: Point, **fields: Any) -> Point:
    return point[0], msgspec.structs.replace(point[1], **fields)


def _share(found: Diagnosis, need: Need, point: Point) -> Iterator[tuple[str, str, Point]]:
    """The least share that holds it, in hundredths; less than what is free at the start."""
    engine = point[1].engine
    if engine not in ("vllm", "sglang", "trtllm") or point[1].kv_cache_memory_bytes:
        return
    name = {"vllm": "--gpu-memory-utilization", "sglang": "--mem-fraction-static"}.get(engine, "--free_gpu_memory_fraction")
    used = found.predicted.utilization
    free = 1 - found.learned.others_bytes / found.learned.memory_bytes if found.learned.others_bytes else MOST_SHARE
    steps = range(1, int(min(MOST_SHARE, free) * 100) + 1)
    occupied = bool(found.boot.failure and found.boot.failure.kind == "occupied")
    tried = [s / 100 for s in steps if s / 100 < used][::-1] if occupied else [s / 100 for s in steps if s / 100 > used]
    at = 0 if occupied else _first(tried, lambda share: bool(gives(found, need, _with(point, gpu_memory_utilization=share))))
    for share in tried[at : at + 1]:
        yield f"{name} {share:g}", "", _with(point, gpu_memory_utilization=share)


def _first(values: list[Any], holds: Callable[[Any], bool]) -> int:
    """The first place from which on it holds, by bisection; beyond the end where it never does."""
    low, high = 0, len(values)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(values[middle]) else (middle + 1, high)
    return low


def _tokens(found: Diagnosis, need: Need, point: Point) -> Iterator[tuple[str, str, Point]]:
    """Smaller passes, which take fewer activations."""
    name = {"vllm": "--max-num-batched-tokens", "sglang": "--chunked-prefill-size", "trtllm": "--max_num_tokens"}.get(
        point[1].engine, "--ubatch-size"
    )
    tokens, least = found.predicted.settings.max_num_batched_tokens, 64 if point[1].engine == "llama.cpp" else LEAST_TOKENS
    while tokens // 2 >= least:
        tokens //= 2
        yield f"{name} {tokens}", "longer prompts take more passes", _with(point, max_num_batched_tokens=tokens)


def _sequences(found: Diagnosis, need: Need, point: Point) -> Iterator[tuple[str, str, Point]]:
    """A lower ceiling of sequences: smaller buffers of the sampler, fewer graphs."""
    if point[1].engine != "vllm":
        return
    count = point[1].max_num_seqs or 1024
    while count // 2 >= max(need.users, LEAST_SEQUENCES):
        count //= 2
        yield f"--max-num-seqs {count}", "no more at once", _with(point, max_num_seqs=count)


def _eager(found: Diagnosis, need: Need, point: Point) -> Iterator[tuple[str, str, Point]]:
    if point[1].engine in ("vllm", "sglang") and not point[1].enforce_eager:
        name = "--enforce-eager" if point[1].engine == "vllm" else "--disable-cuda-graph"
        yield name, "slower steps", _with(point, enforce_eager=True)


def _images(found: Diagnosis, need: Need, point: Point) -> Iterator[tuple[str, str, Point]]:
    if point[1].engine == "vllm" and point[0].model.vision and point[1].images != 0:
        text = '{"image": 0, "video": 0}'
        yield f"--limit-mm-per-prompt '{text}'", "text alone", _with(point, limit_mm_per_prompt=text)


def _cache(found: Diagnosis, need: Need, point: Point) -> Iterator[tuple[str, str, Point]]:
    """A cache of fewer bits, where the GPU computes in them; of llama.cpp's types the one of eight."""
    deployment, options = point
    if deployment.formats.kv_cache_dtype in ("fp8", "fp8_ds_mla", "q8_0", "q4_0", "nvfp4"):
        return
    ours = "q8_0" if options.engine == "llama.cpp" else "fp8"
    if ours == "fp8" and "fp8" not in deployment.gpu.flops_per_s:
        return
    name = {"sglang": "--kv-cache-dtype fp8_e4m3", "llama.cpp": "--cache-type-k q8_0 --cache-type-v q8_0"}.get(
        options.engine, "--kv-cache-dtype fp8"
    )
    precision = msgspec.structs.replace(deployment.precision, kv_cache_dtype=ours)
    yield name, loss_of("cache", ours), (msgspec.structs.replace(deployment, precision=precision), options)


def _layers(found: Diagnosis, need: Need, point: Point) -> Iterator[tuple[str, str, Point]]:
    """As many of llama.cpp's layers on the GPU as hold it; the others, and their cache, stay with the host."""
    on = point[1].n_gpu_layers
    if point[1].engine != "llama.cpp" or point[0].gpu.per == "SoC":
        return
    fewer = range((on if on >= 0 else point[0].model.layers + 1) - 1, 1, -1)
    tried = [_with(point, n_gpu_layers=count) for count in fewer]
    at = _first(tried, lambda one: bool(gives(found, need, one)))
    for count, one in [*zip(fewer, tried, strict=True)][at : at + 1]:
        yield f"--n-gpu-layers {count}", "the other layers run on the host, slower", one


def _gpus(found: Diagnosis, need: Need, point: Point) -> Iterator[tuple[str, str, Point]]:
    deployment, options = point
    ranks, tp = deployment.parallelism, deployment.parallelism.tp
    name = "--tp_size" if options.engine == "trtllm" else "--tensor-parallel-size"
    while tp < MOST_TP and options.engine != "llama.cpp":
        tp *= 2
        ep = tp * ranks.dp if ranks.ep > 1 else 1
        split = Parallelism(tp, ranks.pp, ranks.dp, ep, ranks.dcp)
        yield f"{name} {tp}", f"{split.gpus} GPUs", (msgspec.structs.replace(deployment, parallelism=split), options)


def _weights(found: Diagnosis, need: Need, point: Point) -> Iterator[tuple[str, str, Point]]:
    deployment, options = point
    precision = deployment.precision
    plain = not precision.quantization and not deployment.model.quantization and precision.dtype != "fp8"
    if plain and options.engine in ("vllm", "sglang") and "fp8" in deployment.gpu.flops_per_s:
        stored = msgspec.structs.replace(precision, dtype="auto", quantization="fp8")
        yield "--quantization fp8", loss_of("weights", "fp8"), (msgspec.structs.replace(deployment, precision=stored), options)


MENDERS: tuple[Callable[[Diagnosis, Need, Point], Iterator[tuple[str, str, Point]]], ...] = (
    _share, _tokens, _sequences, _eager, _images, _cache, _layers, _gpus, _weights,
)  # fmt: skip


def shorter(found: Diagnosis) -> int:
    """The longest max_model_len with which one sequence fits, as logged and by the rules; 0 where none does."""
    asked = msgspec.structs.replace(found.options, users=seats(found.options, 1))
    both = fit(found.plain, asked), fit(found.deployment, msgspec.structs.replace(asked, from_log=found.learned))
    longest = [f.needed.length for f in both if f.needed.length is not None]
    tokens = min(longest, default=0) // 256 * 256
    point = _with((found.plain, found.options), max_model_len=tokens)
    return tokens if 0 < tokens < found.length and gives(found, Need(1, tokens), point) else 0
