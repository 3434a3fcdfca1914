"""Run the program in this process, and check rules that every run must follow, for any words and files.

An error message is one line that begins with `kvcalc: `, with no output on standard output. All other lines
on standard error begin with `note: ` or `wrote `. JSON has no NaN. Bytes, FLOPs and counts are integers, and
only differences may be negative. Terminal control characters are never printed, and no run takes long.
"""

import io
import json
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple
from unittest import mock

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from record_checks import check_records

MAX_SECONDS = 6.0  # of CPU time for one run: a loop over each token takes minutes
SIGNED = re.compile("error|headroom|shortage|free|difference")
COUNTS = re.compile(
    ".*(_bytes|_flops)|flops|bytes|num_blocks|(active_)?parameters|layers|gpus|batch_size|context|max_(num_seqs|model_len)|rows|"
    "input_len|output_len|predicted_rows|kv_tokens|block_size|count|requests|preemptions|line"
)
MANY = pytest.param(10_000, marks=pytest.mark.fuzz)


class Run(NamedTuple):
    """The output, the exit status and the duration of one run of the program."""

    words: tuple[str, ...]
    code: int
    out: str
    err: str
    seconds: float

    @property
    def records(self) -> list[dict[str, Any]]:
        """The records on standard output."""

        def refuse(word: str) -> None:
            raise AssertionError(f"{word} in JSON")

        found: list[dict[str, Any]] = json.loads(self.out, parse_constant=refuse)
        return found


def run(*words: str) -> Run:
    """Run `kvcalc` with these words."""
    from kvcalc.cli.app import main

    out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8", newline="") for _ in range(2))
    started, code = time.process_time(), -1
    with mock.patch.multiple(sys, argv=["kvcalc", *words], stdout=out, stderr=err):
        try:
            main()
        except SystemExit as ended:
            code = int(ended.code or 0)
    seconds = time.process_time() - started
    for stream in (out, err):
        stream.flush()
    printed = [stream.buffer.getvalue().decode() for stream in (out, err)]  # type: ignore[attr-defined]
    return Run(words, code, *printed, seconds)


def sound(done: Run) -> Run:
    """Check the rules for every run, and return the run."""
    said = done.err.splitlines()
    refusals = [line for line in said if line.startswith("kvcalc: ")]
    assert done.code in (0, 1, 2), done
    assert len(refusals) == (done.code == 2), done
    assert not done.out or done.code != 2, done
    assert all(line.startswith(("kvcalc: ", "note: ", "wrote ")) for line in said), done
    assert not done.err or done.err.endswith("\n"), done
    assert all(line.isprintable() for line in re.split("[\n\t]", done.out + done.err)), done
    assert done.seconds < MAX_SECONDS, done
    if "json" in done.words and done.code != 2:
        check_records(done.words[0], done.records)
        for record in done.records:
            whole(record)
    return done


def whole(record: Mapping[str, Any]) -> None:
    """Check that counts in a record are integers, and that only keys of differences are negative."""
    for key, value in _leaves(record):
        assert value is None or isinstance(value, int) or not COUNTS.fullmatch(key), (key, value)
        assert not isinstance(value, int | float) or value >= 0 or SIGNED.search(key), (key, value)


def _leaves(record: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in record.items():
        if isinstance(value, dict):
            yield from _leaves(value)
        elif isinstance(value, list):
            yield from (leaf for one in value if isinstance(one, dict) for leaf in _leaves(one))
        else:
            yield key, value


def hold(check: Callable[..., None], count: int, *drawn: st.SearchStrategy[Any]) -> None:
    """Run `check` on `count` generated cases."""
    healthy = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much, HealthCheck.large_base_example]
    settings(max_examples=count, suppress_health_check=healthy, deadline=None)(given(*drawn)(check))()
