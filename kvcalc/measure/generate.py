"""The generation experiment: a whole decoder with the cache and without, time per token beside the prediction.

With the cache a step passes one token; without it, all of them again. The LM head runs on the last position, and in a
third run without the cache on all positions, which is what a forward pass returns when nobody says otherwise. All runs are
greedy and must choose the same tokens.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvcalc.errors import UserError
from kvcalc.gpu.roof import roofline, total_seconds
from kvcalc.gpu.spec import Gpu
from kvcalc.layers.batch import Batch
from kvcalc.measure.cache import DTYPES, LayerCache
from kvcalc.measure.device import Machine
from kvcalc.measure.layers.base import Mixer
from kvcalc.measure.layers.decoder import Decoder
from kvcalc.measure.stack import storage_bytes
from kvcalc.model.memory import cache_size
from kvcalc.model.operators import forward
from kvcalc.model.precision import Precision
from kvcalc.model.spec import Model
from kvcalc.units import format_bytes

HEADS = ("last", "all", "both")


class Request(NamedTuple):
    """What to generate: `new_tokens` behind a random prompt of `prompt_len`, `batch_size` at once; `head`: last, all, both."""

    model: Model
    prompt_len: int
    new_tokens: int
    batch_size: int
    dtype: str
    head: str = "both"

    @property
    def modes(self) -> list[tuple[str, str]]:
        """(cached or uncached, head on last or all) of each run; with a cache the head makes no difference after the prompt."""
        return [("cached", "last"), *(("uncached", head) for head in ("last", "all") if self.head in (head, "both"))]

    @property
    def tokens(self) -> int:
        return self.prompt_len + self.new_tokens


def check(request: Request, machine: Machine) -> None:
    """Raises UserError where the decoder cannot take so many positions, or does not fit the machine's memory."""
    model = request.model
    if request.head not in HEADS:
        raise UserError(f"unknown head {request.head!r}", hint=f"Known: {', '.join(HEADS)}")
    if model.position_embeddings and request.tokens - 1 > model.position_embeddings:
        raise UserError(f"{model.name} has {model.position_embeddings:,} positions, and {request.tokens - 1:,} are asked for")
    element = DTYPES[request.dtype].itemsize
    cache = cache_size(model, request.tokens, request.batch_size, Precision(request.dtype)).stored
    logits = request.batch_size * model.vocab_size * (request.tokens if request.head != "last" else 1)
    needed = (model.parameters + 2 * logits + 8 * request.batch_size * request.tokens * model.hidden_size) * element + cache
    if needed > machine.free_bytes():
        raise UserError(f"{model.name} needs {format_bytes(needed)}, and {format_bytes(machine.free_bytes())} can be used")


def generate(request: Request, machine: Machine, gpu: Gpu, progress: Callable[[str, int], None]) -> Iterator[dict[str, Any]]:
    """One record for each run: with the cache, and without it with the LM head on the last and on all positions."""
    check(request, machine)
    decoder = Decoder(request.model).to(machine.device, DTYPES[request.dtype]).eval()
    for part in decoder.modules():
        if isinstance(part, Mixer):
            part.kernel = "sdpa"
    prompt = torch.randint(request.model.vocab_size, (request.batch_size, request.prompt_len), device=machine.device)
    found: list[dict[str, Any]] = []
    cached_tokens: Tensor | None = None
    for number, (mode, head) in enumerate(request.modes):
        caches = decoder.caches(request.batch_size, request.tokens) if mode == "cached" else None

        def told(step: int, done: int = number * request.new_tokens, text: str = f"{mode}, head on {head}") -> None:
            progress(text, done + step)

        seconds, tokens = _run(decoder, prompt, request, machine, caches, head == "all", told)
        cached_tokens = tokens if mode == "cached" else cached_tokens
        held = storage_bytes(caches) if caches else 0
        same = bool((tokens == cached_tokens).all()) if cached_tokens is not None else None
        found.append(_record(request, mode, head, seconds, predicted_seconds(request, mode, head, gpu), held, same, machine))
        yield _compared(found[-1], found[0])


def predicted_seconds(request: Request, mode: str, head: str, gpu: Gpu) -> list[float]:
    """The bound of every step on the measured ceilings: a prefill of the prompt, then one token each, or all of them."""
    found = []
    for step in range(request.new_tokens):
        length = request.prompt_len + step
        cached = mode == "cached" and step > 0
        batch = Batch.decode(length, request.batch_size) if cached else Batch.prefill(length, request.batch_size)
        form = "absorbed" if cached else "expanded"
        operators = forward(request.model, batch, Precision(request.dtype), mla_form=form, all_positions=head == "all")
        found.append(float(total_seconds(roofline(operators, gpu))))
    return found


def _run(
    decoder: Decoder,
    prompt: Tensor,
    request: Request,
    machine: Machine,
    caches: list[LayerCache] | None,
    all_positions: bool,
    progress: Callable[[int], None],
) -> tuple[list[float], Tensor]:
    """Seconds of every step, and all tokens [B, prompt + new]."""
    clock = time.thread_time if machine.clock == "cpu" else time.perf_counter
    tokens = prompt.new_zeros(request.batch_size, request.tokens)
    tokens[:, : request.prompt_len] = prompt
    seconds = []
    with torch.no_grad():
        decoder(prompt[:, :1])  # warm-up
        for step in range(request.new_tokens):
            length = request.prompt_len + step
            past = length - 1 if caches is not None and step else 0
            machine.synchronize()
            begun = clock()
            logits = decoder(tokens[:, past:length], caches, past, all_positions)
            tokens[:, length] = logits[:, -1].argmax(-1)
            machine.synchronize()
            seconds.append(clock() - begun)
            progress(step + 1)
    return seconds, tokens


def _record(
    request: Request,
    mode: str,
    head: str,
    seconds: list[float],
    predicted: list[float],
    held: int,
    same: bool | None,
    machine: Machine,
) -> dict[str, Any]:
    model, taken, bound = request.model, sum(seconds), sum(predicted)
    cached = mode == "cached"
    return {
        "model": model.name,
        "mode": mode,
        "head": head,
        "prompt_len": request.prompt_len,
        "new_tokens": request.new_tokens,
        "batch_size": request.batch_size,
        "total_s": taken,
        "tokens_per_s": request.batch_size * request.new_tokens / taken,
        "first_token_s": seconds[0],
        "last_token_s": statistics.median(seconds[-5:]),
        "predicted_total_s": bound,
        "ratio": taken / bound,
        "same_tokens": same,
        "predicted_bytes": cache_size(model, request.tokens, request.batch_size, Precision(request.dtype)).stored
        if cached
        else 0,
        "allocated_bytes": held,
        "dtype": request.dtype,
        "device": machine.name,
        "threads": machine.threads or None,
        "clock": machine.clock,
        "token_s": seconds,
        "predicted_token_s": predicted,
    }


def _compared(record: dict[str, Any], cached: dict[str, Any]) -> dict[str, Any]:
    """With how many times as long as the cached run this one takes, measured and predicted."""
    return {
        **record,
        "speedup": record["total_s"] / cached["total_s"],
        "predicted_speedup": record["predicted_total_s"] / cached["predicted_total_s"],
    }
