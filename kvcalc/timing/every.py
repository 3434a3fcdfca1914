"""Calibrations of all that measured rows name: each GPU under each stack, on all cores.

Every one depends on its own rows alone, so that the files are the same bytes whatever the number of cores.
"""

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import Any, NamedTuple

from kvcalc.gpu.spec import Gpu
from kvcalc.timing.calibration import to_yaml
from kvcalc.timing.calibrator import Validator, calibrate, fit_records, summed
from kvcalc.timing.choosing import chosen_rows, stacks_among
from kvcalc.timing.rows import MeasuredRow, Table


class Made(NamedTuple):
    """The file of a GPU under a stack, and a record of each family and kind."""

    gpu: Gpu
    stack: str
    text: str
    fits: list[dict[str, Any]]


def calibrated_stacks(tables: Sequence[Table], about: dict[str, str], validated: Validator | None = None) -> Iterator[Made]:
    """Every GPU and stack among the rows for which a family could be fitted, in order of their names; as `summed`."""
    each = [(gpu, stack, chosen_rows(tables, gpu, stack, lambda text: None)) for gpu, stack in stacks_among(tables)]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if cores == 1 or len(each) <= 1:
        yield from (made for job in each if (made := _made(job, about, validated)).text)
        return
    with ProcessPoolExecutor(min(cores, len(each))) as pool:
        yield from (made for made in pool.map(partial(_made, about=about, validated=validated), each) if made.text)


def _made(job: tuple[Gpu, str, list[MeasuredRow]], about: dict[str, str], validated: Validator | None) -> Made:
    gpu, stack, rows = job
    fits = calibrate(rows, gpu, stack)
    some = any(fit.entry or fit.refused for fit in fits)
    text = to_yaml(summed(fits, gpu, stack, rows, about, validated)) if some else ""
    return Made(gpu, stack, text, fit_records(fits))
