"""A whole run of `measure` as one value: how many steps it has, and what does them."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from typing import Any, NamedTuple

from kvcalc.gpu.spec import Gpu
from kvcalc.measure.ceilings import Ceilings
from kvcalc.measure.device import Machine
from kvcalc.measure.generate import generated
from kvcalc.measure.modes import modes_of
from kvcalc.measure.request import Request, check
from kvcalc.measure.run import MeasureSettings, measured
from kvcalc.measure.stack import Case
from kvcalc.model.spec import Model

Progress = Callable[[str, int], None]  # what comes next, and how many steps are done
Result = tuple[Case | None, dict[str, Any]]


class Job(NamedTuple):
    """steps: of the progress bar. results: measures, given the ceilings, and yields records as they come."""

    steps: int
    results: Callable[[Ceilings, Gpu, Progress], Iterator[Result]]


def layers_job(cases: list[Case], settings: MeasureSettings, machine: Machine, refused: Callable[[str], None]) -> Job:
    """Each case in turn; `refused` is told of those that do not fit."""

    def results(ceilings: Ceilings, gpu: Gpu, progress: Progress) -> Iterator[Result]:
        return measured(cases, settings, machine, ceilings, gpu, refused, progress)

    return Job(len(cases), results)


def generation_job(
    decoders: dict[str, Model],
    lengths: Sequence[int],
    new_tokens: int,
    batch_sizes: Sequence[int],
    settings: MeasureSettings,
    modes: str,
    head: str,
    machine: Machine,
) -> Job:
    """The generation experiment with each decoder, prompt length and batch size.

    Raises UserError where one does not fit or cannot take so many positions, and for an unknown mode or head.
    """
    requests = [
        Request(model, prompt, new_tokens, batch, settings.dtype, modes_of(model, modes, head), name, settings.block_size)
        for (name, model), prompt, batch in product(decoders.items(), lengths, batch_sizes)
    ]
    for request in requests:
        check(request, machine)

    def results(ceilings: Ceilings, gpu: Gpu, progress: Progress) -> Iterator[Result]:
        for number, request in enumerate(requests):
            told = partial(_told, progress, sum(before.steps for before in requests[:number]))
            for record in generated(request, machine, ceilings, gpu, told):
                yield None, record

    return Job(sum(request.steps for request in requests), results)


def _told(progress: Progress, before: int, text: str, done: int) -> None:
    progress(text, before + done)
