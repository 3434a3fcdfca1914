"""A whole run of `measure` as one value: how many steps it has, and what does them."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from kvcalc.gpu.spec import Gpu
from kvcalc.measure import plan
from kvcalc.measure.ceilings import Ceilings
from kvcalc.measure.device import Machine
from kvcalc.measure.generate import Request, check, generate
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
    model: Model | None, prompt_len: int, new_tokens: int, batch_size: int, settings: MeasureSettings, head: str, machine: Machine
) -> Job:
    """The generation experiment. Raises UserError where the decoder does not fit, or cannot take so many positions."""
    request = Request(plan.generation_model(model), prompt_len, new_tokens, batch_size, settings.dtype, head)
    check(request, machine)

    def results(ceilings: Ceilings, gpu: Gpu, progress: Progress) -> Iterator[Result]:
        return ((None, record) for record in generate(request, machine, gpu, progress))

    return Job(new_tokens * len(request.modes), results)
