"""Generate tokens with a whole decoder, with a cache and without, and compare with the prediction.

The modes are `cached` and `uncached`. First all modes take their first step, then all modes take
their second step, and so on. All modes decode greedily and must produce the same tokens.
"""

import statistics
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from kvcalc.errors import UserError
from kvcalc.gpu.gpu import Gpu
from kvcalc.layers.batch import Batch
from kvcalc.layers.cost import Operator
from kvcalc.measure.ceilings import Machine, time_once
from kvcalc.measure.expected import (
    MachineRates,
    RateSampler,
    all_heads_per_key,
    bound_of,
    count_operations,
)
from kvcalc.measure.layers.base_layer import DTYPES, cache_tensors, storage_bytes
from kvcalc.measure.layers.decoder import Decoder
from kvcalc.model.forward_pass import forward
from kvcalc.model.memory import cache_size
from kvcalc.model.model import Model
from kvcalc.model.precision import Precision
from kvcalc.records import Record
from kvcalc.units import format_bytes

FEW_ROWS = (1, 8, 32)  # always sampled
MAX_SAMPLES = 25  # of the machine's rates in one run
Progress = Callable[[str, int], None]  # (next step, number of finished steps)


class Mode(NamedTuple):
    """One way to generate tokens: with or without a KV cache, and where the LM head runs.

    Attributes:
        name: `cached`, which processes one new token in each step after the first, or `uncached`,
            which processes all tokens in each step.
        head: Tokens for which the LM head computes logits: `last` (the last token of each sequence)
            or `all` (all tokens of the step).
    """

    name: str
    head: str = "last"


CACHED = Mode("cached")
MODES = (CACHED, Mode("uncached"), Mode("uncached", "all"))


class GenerationRequest(NamedTuple):
    """One generation to measure: new tokens after a random prompt, in three modes.

    The modes are: with a cache; without; and without, but with the LM head on all positions.

    Attributes:
        model: Model to build.
        prompt_len: Prompt tokens of each sequence.
        new_tokens: Generated tokens of each sequence.
        batch_size: Number of sequences.
        dtype: Data type of weights and cache: fp64, fp32, bf16 or fp16.
        variant: Printed name of the attention variant; '' for the model's own attention.
    """

    model: Model
    prompt_len: int
    new_tokens: int
    batch_size: int
    dtype: str
    variant: str = ""

    @property
    def tokens(self) -> int:
        """Return the number of tokens of each sequence at the end: prompt and generated tokens."""
        return self.prompt_len + self.new_tokens

    @property
    def steps(self) -> int:
        """Return the number of forward passes in the generation, over its three modes.

        The modes are: with a cache; without; and without, but with the LM head on all positions.
        Each needs one pass per new token.
        """
        return self.new_tokens * len(MODES)

    @property
    def cache_bytes(self) -> int:
        """Return the predicted bytes of the KV cache at the end, for all layers and sequences."""
        return cache_size(
            self.model, self.tokens, self.batch_size, Precision(self.dtype)
        ).stored

    def operators(self, mode: Mode, step: int) -> tuple[Operator, ...]:
        """Return the operators of one step, which is the forward pass that gives one new token.

        With a cache, the first step processes the prompt and each later step one token per
        sequence. Without a cache, every step processes all tokens so far. MLA is absorbed for one
        new token and expanded otherwise.

        Args:
            mode: Whether there is a cache, and on which positions the LM head runs.
            step: Index of the step, from 0.
        """
        length = self.prompt_len + step
        is_decode = length == 1 or bool(mode == CACHED and step)
        make_batch = Batch.decode if is_decode else Batch.prefill
        return forward(
            self.model,
            make_batch(length, self.batch_size),
            Precision(self.dtype),
            mla_form="absorbed" if is_decode else "expanded",
            all_positions=mode.head == "all",
        )

    @property
    def rows(self) -> set[int]:
        """Return the numbers of rows of x for which matrix products x · W are timed.

        A row is a token. The set covers the smallest and the largest step, and times of other steps
        are interpolated.
        """
        lengths = 1, self.prompt_len, self.tokens - 1
        return {*FEW_ROWS, *(self.batch_size * tokens for tokens in lengths)}


def check(request: GenerationRequest, machine: Machine) -> None:
    """Check that a model can generate on this machine.

    Args:
        request: The model, the lengths and the batch size.
        machine: The machine to measure on.

    Raises:
        UserError: The model has fewer position embeddings than the request has tokens, or the
            generation does not fit in memory.
    """
    model = request.model
    if model.position_embeddings and request.tokens - 1 > model.position_embeddings:
        raise UserError(
            f"{model.name} has {model.position_embeddings:,} positions, but the request needs"
            f" {request.tokens - 1:,}"
        )
    work = 2 * model.vocab_size * request.tokens + 8 * request.tokens * model.hidden_size
    elements = model.parameters + request.batch_size * work
    needed = elements * DTYPES[request.dtype].itemsize + 2 * request.cache_bytes
    free = machine.free_bytes()
    if needed > free:
        raise UserError(
            f"{model.name} needs {format_bytes(needed)}, and {format_bytes(free)} can be used"
        )


class GenerationRun:
    """One generation in one mode, whose steps are run and timed one by one.

    Attributes:
        request: The model, the lengths and the batch size.
        mode: Whether there is a cache, and on which positions the LM head runs.
        decoder: The whole model in torch, with random weights.
        machine: The machine to measure on.
        tokens: Token ids of prompts and generated tokens, [batch_size, prompt_len + new_tokens].
        cache: One cache per layer; None without a cache.
        calls: Numbers of torch operations in a forward pass, from which the host's time is
            predicted: [in the first pass, in each later pass] with a cache, or [in every pass]
            without a cache.
        seconds: Measured seconds of every step so far.
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
        self.cache = None
        if mode == CACHED:
            self.cache = decoder.caches(request.batch_size, request.tokens)
        pasts = (0, length - 1) if self.cache else (0,)
        steps = [partial(self._next_token, past, length) for past in pasts]
        self.calls = [*map(count_operations, steps)]
        for tensor in cache_tensors(self.cache or ()):
            tensor.zero_()
        self.seconds: list[float] = []

    def _next_token(self, past: int, length: int) -> Tensor:
        tokens = self.tokens[:, past:length]
        return self.decoder(tokens, self.cache, past, self.mode.head == "all")[:, -1].argmax(-1)

    def step(self) -> None:
        """Run the pass for one more token of each sequence, and append its time to `seconds`."""
        step = len(self.seconds)
        length = self.request.prompt_len + step
        past = length - 1 if self.cache is not None and step else 0

        def write_token() -> None:
            self.tokens[:, length] = self._next_token(past, length)

        self.seconds.append(time_once(write_token, self.machine))

    def record(self, steps: int, rates: MachineRates) -> Record:
        """Return the results of the first `steps` steps as a dictionary.

        It has measured and predicted seconds of each step and of all these steps together. It also
        has the sum of the steps' minimum seconds by the roofline, and the bytes of the whole cache.

        Args:
            steps: Number of steps, at least 1.
            rates: Measured times of basic operations, from which step times are predicted.
        """
        request, mode, machine = self.request, self.mode, self.machine
        measured = self.seconds[:steps]
        predicted, bounds = [], []
        for step in range(steps):
            operators = request.operators(mode, step)
            calls = self.calls[min(step, len(self.calls) - 1)]
            predicted.append(rates.pass_seconds(operators, calls))
            bounds.append(bound_of(operators, rates.gpu).seconds)
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
            "bound_total_s": sum(bounds),
            "predicted_bytes": request.cache_bytes if self.cache else 0,
            "allocated_bytes": storage_bytes(self.cache) if self.cache else 0,
            "host_s": self.calls[-1] * rates.host_s,
            "dtype": request.dtype,
            **machine.columns,
            "token_s": measured,
            "predicted_token_s": predicted,
        }


def run_generation(
    request: GenerationRequest, machine: Machine, gpu: Gpu, progress: Progress, done: int = 0
) -> Iterator[Record]:
    """Run and time a generation in three modes, and yield one record of results for each mode.

    The modes are: with a cache; without; and without, but with the LM head on all positions. Their
    steps alternate, so that other load affects all modes equally. If Ctrl-C interrupts, yield
    records of the tokens that all modes have generated, then raise KeyboardInterrupt.

    Args:
        request: The model, the lengths and the batch size.
        machine: The machine to measure on.
        gpu: This machine as a GPU preset, with its measured bandwidth and FLOP/s.
        progress: Receives the name of the next step and the number of finished steps.
        done: Number of steps that earlier generations have finished. The progress continues from
            this number.
    """
    is_interrupted = False
    with torch.no_grad():
        decoder = Decoder(request.model).to(machine.device, DTYPES[request.dtype])
        size = (request.batch_size, request.prompt_len)
        prompt = torch.randint(request.model.vocab_size, size, device=machine.device)
        runs = [GenerationRun(request, mode, decoder, prompt, machine) for mode in MODES]
        heads = all_heads_per_key(request.operators(CACHED, 1))
        sampler = RateSampler(decoder.blocks, machine, request.dtype, request.rows, heads)
        try:
            for step in range(request.new_tokens):
                if step % max(1, request.new_tokens // MAX_SAMPLES) == 0:
                    sampler.sample()
                for number, run in enumerate(runs, done + step * len(runs)):
                    progress(f"{run.mode.name}, token {step + 1:,}", number)
                    run.step()
        except KeyboardInterrupt:
            is_interrupted = True
    steps = min(len(run.seconds) for run in runs)
    if steps:
        rates = sampler.rates(gpu)
        records = [run.record(steps, rates) for run in runs]
        cached, end = records[0], request.prompt_len + steps
        for run, record in zip(runs, records):
            yield {
                **record,
                "same_tokens": torch.equal(run.tokens[:, :end], runs[0].tokens[:, :end]),
                "speedup": record["total_s"] / cached["total_s"],
                "predicted_speedup": record["predicted_total_s"] / cached["predicted_total_s"],
            }
    if is_interrupted:
        raise KeyboardInterrupt
