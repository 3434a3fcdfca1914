"""The generation experiment: a whole decoder, token by token in each of its modes, beside the prediction.

All modes take their first step, then all the second, and so on, and samples of the machine's rates are taken in between: what
else the machine does meets them alike. All are greedy and must choose the same tokens.
"""

import statistics
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from kvcalc.gpu.roof import roofline, total_seconds
from kvcalc.gpu.spec import Gpu
from kvcalc.measure.cache import DTYPES, LayerCache
from kvcalc.measure.ceilings import Ceilings
from kvcalc.measure.device import Machine
from kvcalc.measure.expected import Step, expected_seconds
from kvcalc.measure.layers.base import Mixer
from kvcalc.measure.layers.decoder import Decoder
from kvcalc.measure.modes import Mode
from kvcalc.measure.rates import Rates, Sampling
from kvcalc.measure.request import Request, check
from kvcalc.measure.scans import Scans
from kvcalc.measure.stack import storage_bytes
from kvcalc.measure.timing import once, summary
from kvcalc.measure.traffic import calls

SAMPLES = 25  # of the machine's rates in a run, where it has so many steps
Progress = Callable[[str, int], None]  # what comes next, and how many steps are done


class Run:
    """One mode on its way: its cache, its tokens [B, prompt + new], seconds of every step."""

    def __init__(self, request: Request, mode: Mode, decoder: Decoder, prompt: Tensor, machine: Machine) -> None:
        self.request, self.mode, self.decoder, self.machine = request, mode, decoder, machine
        self.tokens = prompt.new_zeros(request.batch_size, request.tokens)
        self.tokens[:, : request.prompt_len] = prompt
        self.calls = [self._calls(0), self._calls(1)] if mode.caches else [self._calls(0)]
        self.cache = request.caches(decoder, mode)
        self.scans = Scans(request.model, request.dtype)
        self.seconds: list[float] = []

    def _calls(self, step: int) -> int:
        """Of torch's operations, in the prompt's pass or in a later one; on a cache of its own, which also warms up."""
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
        """One more token."""
        self._prepare()
        number = len(self.seconds)
        length = self.request.prompt_len + number
        past = length - 1 if self.cache is not None and number else 0

        def token() -> None:
            self.tokens[:, length] = self._pass(self.cache, past, length)

        self.seconds.append(once(token, self.machine))

    def extra_bytes(self, step: int) -> int:
        """What a step moves beside its operators."""
        request = self.request
        return self.mode.extra_bytes(request.model, request.dtype, request.batch(self.mode, step), request.block_size)

    def predicted(self, step: int, rates: Rates, ceilings: Ceilings, gpu: Gpu) -> float:
        """Seconds that this machine should take for a step."""
        scans = self.scans.of(self.request.batch(self.mode, step), self.mode.caches)
        done = Step(self.calls[min(step, len(self.calls) - 1)], self.extra_bytes(step), self.mode.name != "unfused", scans)
        return expected_seconds(self.request.operators(self.mode, step), done, rates, ceilings, gpu, self.machine.cuda)


def generated(request: Request, machine: Machine, ceilings: Ceilings, gpu: Gpu, progress: Progress) -> Iterator[dict[str, Any]]:
    """One record for each mode. After Ctrl-C those of the tokens that all modes have, and KeyboardInterrupt then."""
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
    """The runs of all modes, the rates of the machine meanwhile, and whether that is all."""
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
    """How many times as long as the cached run this one takes, measured and predicted, and whether it says the same."""
    end = run.request.prompt_len + record["new_tokens"]
    return {
        "same_tokens": bool((run.tokens[:, :end] == reference.tokens[:, :end]).all()),
        "speedup": record["total_s"] / cached["total_s"],
        "predicted_speedup": record["predicted_total_s"] / cached["predicted_total_s"],
    }
