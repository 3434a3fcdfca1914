"""Generate tokens with a whole decoder, with a cache and without, and compare with the prediction.

The modes are `cached` and `uncached`. All modes take their first step, then all their second step,
and so on. All modes decode greedily and must produce the same tokens.
"""

import statistics
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from kvcalc.errors import UserError, nearest
from kvcalc.gpu.gpu import Gpu
from kvcalc.layers.batch import Batch
from kvcalc.layers.cost import AttentionShape, Operator
from kvcalc.measure.cases import storage_bytes
from kvcalc.measure.ceilings import Ceilings, once, summary
from kvcalc.measure.expected import MachineRates, RateSampler, bound_of, traffic_of
from kvcalc.measure.layers.decoder import Decoder
from kvcalc.measure.machine import Machine
from kvcalc.measure.torch_cache import DTYPES, TorchLayerCache
from kvcalc.model.forward_pass import forward
from kvcalc.model.memory import cache_size
from kvcalc.model.model import Model
from kvcalc.model.precision import Precision
from kvcalc.records import Record
from kvcalc.units import format_bytes

MODES = ("cached", "uncached")
HEADS = ("last", "all", "both")
FEW_ROWS = (1, 8, 32)  # always sampled
GRID = 5  # further row counts, evenly spaced from the prompt to the last step
MAX_SAMPLES = 25  # of the machine's rates in one run
Progress = Callable[[str, int], None]  # (next step, number of finished steps)


class Mode(NamedTuple):
    """A way to generate: with or without a cache.

    Attributes:
        name: One of `MODES`.
        head: Positions of the LM head: last or all.
    """

    name: str
    head: str = "last"

    @property
    def has_cache(self) -> bool:
        """Whether a step passes only one new token."""
        return self.name == "cached"


def modes_of(names: str, head: str) -> tuple[Mode, ...]:
    """Return the modes in `names` ('' for all), with the cached mode first.

    Raises:
        UserError: A mode or the head is unknown.
    """
    if head not in HEADS:
        raise UserError(f"unknown head {head!r}", hint=f"Known: {', '.join(HEADS)}")
    requested = [name.strip() for name in names.split(",")] if names else list(MODES)
    for name in requested:
        if name not in MODES:
            raise UserError(f"unknown mode {name!r}", hint=nearest(name, MODES))
    modes = [Mode("cached")]
    if "uncached" in requested:
        positions = ("last", "all") if head == "both" else (head,)
        modes += [Mode("uncached", position) for position in positions]
    return tuple(modes)


class GenerationRequest(NamedTuple):
    """One generation: `new_tokens` after a random prompt, for `batch_size` sequences, in each mode.

    Attributes:
        model: Model to build.
        prompt_len: Prompt tokens.
        new_tokens: Generated tokens.
        batch_size: Sequences.
        dtype: Type of weights and cache.
        modes: Modes to run.
        variant: Printed name of the model.
        block_size: Tokens per block of a paged cache; 0 for a contiguous cache.
    """

    model: Model
    prompt_len: int
    new_tokens: int
    batch_size: int
    dtype: str
    modes: tuple[Mode, ...] = (Mode("cached"), Mode("uncached"))
    variant: str = ""
    block_size: int = 0

    @property
    def tokens(self) -> int:
        return self.prompt_len + self.new_tokens

    @property
    def steps(self) -> int:
        """Number of passes of all modes."""
        return self.new_tokens * len(self.modes)

    def operators(self, mode: Mode, step: int) -> tuple[Operator, ...]:
        """Return the operators of a step: the prompt, then one token, or all tokens without a
        cache.

        MLA is absorbed for one new token and expanded otherwise.
        """
        length = self.prompt_len + step
        is_decode = length == 1 or bool(mode.has_cache and step)
        make_batch = Batch.decode if is_decode else Batch.prefill
        return forward(
            self.model,
            make_batch(length, self.batch_size),
            Precision(self.dtype),
            mla_form="absorbed" if is_decode else "expanded",
            all_positions=mode.head == "all",
        )

    def predicted_bytes(self, mode: Mode) -> int:
        """Return the cache bytes at the end."""
        if not mode.has_cache:
            return 0
        size = cache_size(
            self.model,
            self.tokens,
            self.batch_size,
            Precision(self.dtype),
            self.block_size or 16,
        )
        return size.allocated if self.block_size else size.stored

    def extra_bytes(self, mode: Mode, step: int) -> int:
        """Return the bytes that a step moves in addition to its operators.

        A paged cache copies the rows that it reads.
        """
        if not (mode.has_cache and self.block_size):
            return 0
        attention = (
            o for o in self.operators(mode, step) if isinstance(o.shape, AttentionShape)
        )
        return sum(2 * o.count * int(o.cost.cache_read_bytes) for o in attention)

    def caches(self, decoder: Decoder, mode: Mode) -> list[TorchLayerCache] | None:
        """Return one empty cache per layer, or None for a mode without a cache."""
        if not mode.has_cache:
            return None
        return decoder.caches(self.batch_size, self.tokens, block_size=self.block_size)

    @property
    def rows(self) -> set[int]:
        """Numbers of rows at which products are sampled."""
        first, last = self.prompt_len, self.tokens - 1
        grid = [first + (last - first) * i // (GRID - 1) for i in range(GRID)]
        return {*FEW_ROWS, *(self.batch_size * tokens for tokens in (1, *grid))}


def check(request: GenerationRequest, machine: Machine) -> None:
    """Raise UserError if the decoder has too few positions or does not fit in memory."""
    model = request.model
    if model.position_embeddings and request.tokens - 1 > model.position_embeddings:
        raise UserError(
            f"{model.name} has {model.position_embeddings:,} positions, but the request needs"
            f" {request.tokens - 1:,}"
        )
    has_all_logits = any(mode.head == "all" for mode in request.modes)
    logits = model.vocab_size * (request.tokens if has_all_logits else 1)
    work = request.batch_size * (2 * logits + 8 * request.tokens * model.hidden_size)
    needed = (model.parameters + work) * DTYPES[request.dtype].itemsize
    needed += sum(2 * request.predicted_bytes(mode) for mode in request.modes)
    free = machine.free_bytes()
    if needed > free:
        raise UserError(
            f"{model.name} needs {format_bytes(needed)}, and {format_bytes(free)} can be used"
        )


class GenerationRun:
    """One mode in progress.

    Attributes:
        tokens: Prompt and generated tokens, [B, prompt + new].
        calls: Torch operations of the first pass, and of each later pass of a cached mode.
        seconds: Measured seconds of every step.
    """

    def __init__(
        self,
        request: GenerationRequest,
        mode: Mode,
        decoder: Decoder,
        prompt: Tensor,
        machine: Machine,
    ) -> None:
        self.request, self.mode = request, mode
        self.decoder, self.machine = decoder, machine
        length = request.prompt_len
        self.tokens = prompt.new_zeros(request.batch_size, request.tokens)
        self.tokens[:, :length] = prompt
        self.cache = request.caches(decoder, mode)
        self.calls = []
        for past in (0, length - 1) if mode.has_cache else (0,):
            traffic = traffic_of(partial(self._next_token, past, length))
            self.calls.append(traffic.calls)
        self.cache = request.caches(decoder, mode)
        self.seconds: list[float] = []

    def _next_token(self, past: int, length: int) -> Tensor:
        tokens = self.tokens[:, past:length]
        logits = self.decoder(tokens, self.cache, past, self.mode.head == "all")
        return logits[:, -1].argmax(-1)

    def step(self) -> None:
        """Generate one more token."""
        step = len(self.seconds)
        length = self.request.prompt_len + step
        past = length - 1 if self.cache is not None and step else 0

        def write_token() -> None:
            self.tokens[:, length] = self._next_token(past, length)

        self.seconds.append(once(write_token, self.machine))

    def predicted(self, step: int, rates: MachineRates) -> float:
        """Return the predicted seconds of a step on this machine."""
        return rates.pass_seconds(
            self.request.operators(self.mode, step),
            self.calls[min(step, len(self.calls) - 1)],
            self.request.extra_bytes(self.mode, step),
        )

    def record(self, steps: int, rates: MachineRates) -> Record:
        """Return the record of the first `steps` tokens."""
        request, mode, machine = self.request, self.mode, self.machine
        measured = self.seconds[:steps]
        predicted = [self.predicted(step, rates) for step in range(steps)]
        bounds = [bound_of(request.operators(mode, step), rates.gpu) for step in range(steps)]
        ratios = summary([m / p for m, p in zip(measured, predicted, strict=True)])
        return {
            "model": request.model.name,
            "variant": request.variant,
            "attention": request.model.attention,
            "mode": mode.name,
            "head": mode.head,
            "prompt_len": request.prompt_len,
            "new_tokens": steps,
            "batch_size": request.batch_size,
            "total_s": sum(measured),
            "tokens_per_s": request.batch_size * steps / sum(measured),
            "first_token_s": measured[0],
            "last_token_s": statistics.median(measured[-5:]),
            "predicted_total_s": sum(predicted),
            "ratio": sum(measured) / sum(predicted),
            "ratio_p10": ratios.low,
            "ratio_p90": ratios.high,
            "bound_total_s": sum(bound.seconds for bound in bounds),
            "predicted_extra_bytes": sum(
                request.extra_bytes(mode, step) for step in range(steps)
            ),
            "predicted_bytes": request.predicted_bytes(mode),
            "allocated_bytes": storage_bytes(self.cache) if self.cache else 0,
            "cache": f"paged:{request.block_size}" if request.block_size else "contiguous",
            "host_s": self.calls[-1] * rates.host_s,
            "dtype": request.dtype,
            **machine.columns,
            "token_s": measured,
            "predicted_token_s": predicted,
        }


def generated(
    request: GenerationRequest,
    machine: Machine,
    ceilings: Ceilings,
    gpu: Gpu,
    progress: Progress,
) -> Iterator[Record]:
    """Yield one record per mode.

    After Ctrl-C, the records cover the tokens that all modes have generated; then KeyboardInterrupt
    is raised.
    """
    is_interrupted = False
    with torch.no_grad():
        decoder = Decoder(request.model).to(machine.device, DTYPES[request.dtype])
        size = (request.batch_size, request.prompt_len)
        prompt = torch.randint(request.model.vocab_size, size, device=machine.device)
        runs = [
            GenerationRun(request, mode, decoder, prompt, machine) for mode in request.modes
        ]
        sampler = RateSampler(decoder, machine, request.dtype, sorted(request.rows))
        try:
            for step in range(request.new_tokens):
                if step % max(1, request.new_tokens // MAX_SAMPLES) == 0:
                    sampler.sample()
                for number, run in enumerate(runs):
                    progress(
                        f"{run.mode.name}, token {step + 1:,}",
                        step * len(runs) + number,
                    )
                    run.step()
        except KeyboardInterrupt:
            is_interrupted = True
    steps = min(len(run.seconds) for run in runs)
    if steps:
        rates = sampler.rates(ceilings, gpu)
        records = [run.record(steps, rates) for run in runs]
        cached, end = records[0], request.prompt_len + steps
        for run, record in zip(runs, records, strict=True):
            yield {
                **record,
                "same_tokens": torch.equal(run.tokens[:, :end], runs[0].tokens[:, :end]),
                "speedup": record["total_s"] / cached["total_s"],
                "predicted_speedup": record["predicted_total_s"] / cached["predicted_total_s"],
            }
    if is_interrupted:
        raise KeyboardInterrupt
