"""Generate tokens with a whole decoder in each mode, and compare each step with its prediction.

Modes: cached; cat (the cache grows by `torch.cat`); repeat (K and V are copied to all query heads);
uncached; unfused (plain attention). All modes take their first step, then all their second step, and
so on. Samples of the machine's rates are taken between the steps, so other load affects all modes
equally. All modes decode greedily and must produce the same tokens.
"""

import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor

from kvcalc.errors import UserError, nearest
from kvcalc.gpu.roof import roofline, total_seconds
from kvcalc.gpu.spec import Gpu
from kvcalc.layers.attention import Grouped
from kvcalc.layers.batch import Batch
from kvcalc.layers.cache import CacheEntry
from kvcalc.layers.cost import Operator
from kvcalc.measure.cases import storage_bytes
from kvcalc.measure.ceilings import Ceilings, once, summary
from kvcalc.measure.expected import Rates, Sampling, Scans, Step, calls, expected_seconds
from kvcalc.measure.layers.base_layer import Mixer
from kvcalc.measure.layers.decoder import Decoder
from kvcalc.measure.machine import Machine
from kvcalc.measure.torch_cache import DTYPES, LayerCache
from kvcalc.model.memory import cache_size
from kvcalc.model.operators import forward
from kvcalc.model.precision import Precision
from kvcalc.model.spec import Layer, Model
from kvcalc.units import format_bytes

MODES = ("cached", "cat", "repeat", "uncached", "unfused")
HEADS = ("last", "all", "both")
SCORE_PASSES = 6  # over the scores of plain attention: written, masked in place, through the softmax, read for the values


class Mode(NamedTuple):
    """One way to generate. `name` is one of `MODES`; `head` is last or all, the positions of the LM head."""

    name: str
    head: str = "last"

    @property
    def caches(self) -> bool:
        """Whether a step passes only one new token."""
        return self.name in ("cached", "cat", "repeat")

    @property
    def kernel(self) -> str:
        return "plain" if self.name == "unfused" else "sdpa"

    def extra_bytes(self, model: Model, dtype: str, batch: Batch, block_size: int = 0) -> int:
        """Return the bytes that a pass moves in addition to its operators.

        - cat: reads and writes every cached row.
        - repeat: writes and reads K and V of all query heads.
        - unfused: moves the scores of every head six times, without masks.
        - a paged cache (`block_size` above 0): copies all blocks that it reads.
        """
        count, new, past = (int(value) for value in msgspec.structs.astuple(batch.groups[0]))
        layers = [model.kinds[kind] for kind in model.order]
        elements = 0
        if self.caches and self.name != "cat" and block_size:
            elements = 2 * sum(_gathered(layer, owner, new, past, block_size) for layer, owner in _owned(layers))
        if self.name == "cat":
            elements = 2 * sum(_grown(e, new, past) for layer in layers if not layer.shares_cache for e in layer.entries)
        if self.name == "repeat":
            elements += 2 * sum(_repeated(layer, new, past) for layer in layers)
        if self.name == "unfused":
            heads = sum(part.as_mha()[0] for layer in layers for part in layer.mixers)
            elements = SCORE_PASSES * heads * new * (new + past)
        return count * elements * DTYPES[dtype].itemsize


def modes_of(model: Model, names: str, head: str) -> tuple[Mode, ...]:
    """Return the modes in `names` ('' for all), with the cached mode first.

    `repeat` is left out if query heads do not share K and V. Raises UserError for an unknown name.
    """
    if head not in HEADS:
        raise UserError(f"unknown head {head!r}", hint=f"Known: {', '.join(HEADS)}")
    asked = [name.strip() for name in names.split(",")] if names else list(MODES)
    for name in asked:
        if name not in MODES:
            raise UserError(f"unknown mode {name!r}", hint=nearest(name, MODES))
    if not any(_repeated(layer, 1, 0) for layer in model.kinds.values()):
        asked = [name for name in asked if name != "repeat"]
    positions = {"uncached": ("last", "all") if head == "both" else (head,)}
    chosen = [name for name in MODES if name in ("cached", *asked)]
    return tuple(Mode(name, rows) for name in chosen for rows in positions.get(name, ("last",)))


def _grown(entry: CacheEntry, new: int, past: int) -> int:
    """Return the elements per sequence that a grown entry copies from its old rows."""
    if not entry.grows:
        return 0
    kept = int(entry.stored_rows(past))
    return (min(kept, max(0, entry.limit - new)) if entry.limit else kept) * entry.heads * entry.width


def _owned(layers: Sequence[Layer]) -> list[tuple[Layer, Layer]]:
    """Return each layer with the layer whose cache it reads."""
    found: list[tuple[Layer, Layer]] = []
    for layer in layers:
        found.append((layer, found[-1][1] if layer.shares_cache and found else layer))
    return found


def _gathered(layer: Layer, owner: Layer, new: int, past: int, block_size: int) -> int:
    """Return the elements per sequence in the blocks that a layer reads.

    Windows read no blocks in a pass of several tokens.
    """
    entries = [entry for entry in owner.entries if entry.grows and not (entry.limit and new > 1)]
    return sum(int(entry.allocated_rows(new + past, block_size)) * entry.heads * entry.width for entry in entries)


def _repeated(layer: Layer, new: int, past: int) -> int:
    """Return the elements of K and V of all query heads, in layers whose query heads share K and V."""
    found = 0
    for part in layer.mixers:
        if isinstance(part, Grouped) and part.num_key_value_heads < part.num_attention_heads:
            heads, key, value = part.as_mha()
            window = part.sliding_window
            rows = min(new + past, window - 1 + new) if window else new + past
            found += heads * (key + value) * rows
    return found


FEW_ROWS = (1, 8, 32)  # always sampled; torch's fused attention has blocks of 32 queries
GRID = 5  # further row counts, evenly spaced from the prompt to the last step


class Request(NamedTuple):
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

    def batch(self, mode: Mode, step: int) -> Batch:
        """Return the batch of a step: the prompt, then one token, or all tokens without a cache."""
        length = self.prompt_len + step
        return Batch.decode(length, self.batch_size) if mode.caches and step else Batch.prefill(length, self.batch_size)

    def operators(self, mode: Mode, step: int) -> tuple[Operator, ...]:
        """Return the operators of a step. MLA is absorbed for one new token and expanded otherwise."""
        batch = self.batch(mode, step)
        form = "absorbed" if batch.groups[0].new == 1 else "expanded"
        return forward(self.model, batch, Precision(self.dtype), mla_form=form, all_positions=mode.head == "all")

    def predicted_bytes(self, mode: Mode) -> int:
        """Return the cache bytes at the end.

        A grown cache does not store the last token, because no pass reads it.
        """
        if not mode.caches:
            return 0
        grown = mode.name == "cat"
        size = cache_size(self.model, self.tokens - grown, self.batch_size, Precision(self.dtype), self.block_size or 16)
        return size.allocated if self.block_size and not grown else size.stored

    def caches(self, decoder: Decoder, mode: Mode) -> list[LayerCache] | None:
        if not mode.caches:
            return None
        grown = mode.name == "cat"
        return decoder.caches(self.batch_size, self.tokens, 0 if grown else self.block_size, is_grown=grown)

    @property
    def rows(self) -> list[int]:
        """Numbers of rows at which products are sampled."""
        first, last = self.prompt_len, self.tokens - 1
        between = [first + (last - first) * i // (GRID - 1) for i in range(GRID)]
        return sorted({*FEW_ROWS, self.batch_size, *(self.batch_size * tokens for tokens in between)})


def check(request: Request, machine: Machine) -> None:
    """Raise UserError if the decoder has too few positions or does not fit in memory."""
    model, element = request.model, DTYPES[request.dtype].itemsize
    if model.position_embeddings and request.tokens - 1 > model.position_embeddings:
        raise UserError(f"{model.name} has {model.position_embeddings:,} positions, but the request needs {request.tokens - 1:,}")
    logits = request.batch_size * model.vocab_size * (request.tokens if any(m.head == "all" for m in request.modes) else 1)
    work = 2 * logits + 8 * request.batch_size * request.tokens * model.hidden_size
    caches = sum(2 * request.predicted_bytes(mode) for mode in request.modes)
    needed = (model.parameters + work) * element + caches
    if needed > machine.free_bytes():
        raise UserError(f"{model.name} needs {format_bytes(needed)}, and {format_bytes(machine.free_bytes())} can be used")


SAMPLES = 25  # maximum number of samples of the machine's rates in one run
Progress = Callable[[str, int], None]  # (next step, number of finished steps)


class Run:
    """One mode in progress: its cache, tokens [B, prompt + new], and the seconds of every step."""

    def __init__(self, request: Request, mode: Mode, decoder: Decoder, prompt: Tensor, machine: Machine) -> None:
        self.request, self.mode, self.decoder, self.machine = request, mode, decoder, machine
        self.tokens = prompt.new_zeros(request.batch_size, request.tokens)
        self.tokens[:, : request.prompt_len] = prompt
        self.calls = [self._calls(0), self._calls(1)] if mode.caches else [self._calls(0)]
        self.cache = request.caches(decoder, mode)
        self.scans = Scans(request.model, request.dtype)
        self.seconds: list[float] = []

    def _calls(self, step: int) -> int:
        """Return the number of torch operations in the first pass (step 0) or a later pass (step 1)."""
        cache, length = self.request.caches(self.decoder, self.mode), self.request.prompt_len
        self._prepare()
        if step:
            self._pass(cache, 0, length)
        return calls(lambda: self._pass(cache, length - 1 if step else 0, length))

    def _prepare(self) -> None:
        for part in self.decoder.modules():
            if isinstance(part, Mixer):
                part.kernel, part.repeats = self.mode.kernel, self.mode.name == "repeat"

    def _pass(self, cache: list[LayerCache] | None, past: int, length: int) -> Tensor:
        logits = self.decoder(self.tokens[:, past:length], cache, past, self.mode.head == "all")
        return logits[:, -1].argmax(-1)

    def step(self) -> None:
        """Generate one more token."""
        self._prepare()
        number = len(self.seconds)
        length = self.request.prompt_len + number
        past = length - 1 if self.cache is not None and number else 0

        def token() -> None:
            self.tokens[:, length] = self._pass(self.cache, past, length)

        self.seconds.append(once(token, self.machine))

    def extra_bytes(self, step: int) -> int:
        """Return the bytes that a step moves in addition to its operators."""
        request = self.request
        return self.mode.extra_bytes(request.model, request.dtype, request.batch(self.mode, step), request.block_size)

    def predicted(self, step: int, rates: Rates, ceilings: Ceilings, gpu: Gpu) -> float:
        """Return the predicted seconds of a step on this machine."""
        scans = self.scans.of(self.request.batch(self.mode, step), self.mode.caches)
        done = Step(self.calls[min(step, len(self.calls) - 1)], self.extra_bytes(step), self.mode.name != "unfused", scans)
        return expected_seconds(self.request.operators(self.mode, step), done, rates, ceilings, gpu, self.machine.cuda)


def generated(request: Request, machine: Machine, ceilings: Ceilings, gpu: Gpu, progress: Progress) -> Iterator[dict[str, Any]]:
    """Yield one record per mode.

    After Ctrl-C, the records cover the tokens that all modes have generated; then KeyboardInterrupt is
    raised.
    """
    check(request, machine)
    runs, rates, whole = _measured(request, machine, progress)
    steps = min(len(run.seconds) for run in runs)
    if steps:
        records = [_record(run, steps, rates, ceilings, gpu) for run in runs]
        for run, record in zip(runs, records, strict=True):
            yield record | _compared(record, records[0], run, runs[0])
    if not whole:
        raise KeyboardInterrupt


def _measured(request: Request, machine: Machine, progress: Progress) -> tuple[list[Run], Sampling, bool]:
    """Return the runs of all modes, the sampled rates, and whether all steps finished."""
    with torch.no_grad():
        decoder = Decoder(request.model).to(machine.device, DTYPES[request.dtype]).eval()
        prompt = torch.randint(request.model.vocab_size, (request.batch_size, request.prompt_len), device=machine.device)
        runs = [Run(request, mode, decoder, prompt, machine) for mode in request.modes]
        sampling = Sampling(decoder, machine, request.dtype, request.rows)
        try:
            for step in range(request.new_tokens):
                if step % max(1, request.new_tokens // SAMPLES) == 0:
                    sampling.sample()
                for number, run in enumerate(runs):
                    progress(f"{run.mode.name}, token {step + 1:,}", step * len(runs) + number)
                    run.step()
        except KeyboardInterrupt:
            return runs, sampling, False
    return runs, sampling, True


def _record(run: Run, steps: int, sampling: Sampling, ceilings: Ceilings, gpu: Gpu) -> dict[str, Any]:
    request, mode, rates = run.request, run.mode, sampling.rates()
    measured, predicted = run.seconds[:steps], [run.predicted(step, rates, ceilings, gpu) for step in range(steps)]
    bound = sum(float(total_seconds(roofline(request.operators(mode, step), gpu))) for step in range(steps))
    off = summary([m / p for m, p in zip(measured, predicted, strict=True)])
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
        "ratio_p10": off.low,
        "ratio_p90": off.high,
        "bound_total_s": bound,
        "predicted_extra_bytes": sum(run.extra_bytes(step) for step in range(steps)),
        "predicted_bytes": request.predicted_bytes(mode),
        "allocated_bytes": storage_bytes(run.cache) if run.cache else 0,
        "cache": f"paged:{request.block_size}" if request.block_size else "contiguous",
        "host_s": run.calls[-1] * rates.host_s,
        "dtype": request.dtype,
        "device": run.machine.name,
        "threads": run.machine.threads or None,
        "clock": run.machine.clock,
        "core_share": None if run.machine.cuda else run.machine.share,
        "token_s": measured,
        "predicted_token_s": predicted,
    }


def _compared(record: dict[str, Any], cached: dict[str, Any], run: Run, reference: Run) -> dict[str, Any]:
    """Return measured and predicted time relative to the cached run, and whether the tokens are equal."""
    end = run.request.prompt_len + record["new_tokens"]
    return {
        "same_tokens": bool((run.tokens[:, :end] == reference.tokens[:, :end]).all()),
        "speedup": record["total_s"] / cached["total_s"],
        "predicted_speedup": record["predicted_total_s"] / cached["predicted_total_s"],
    }
