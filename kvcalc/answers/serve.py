"""`kvcalc serve`."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from math import inf
from typing import TYPE_CHECKING, Annotated, Any

from kvcalc.answers.answer import Answer
from kvcalc.answers.deployments import deployments_of, remarks
from kvcalc.errors import UserError
from kvcalc.question.deployment_options import DeploymentOptions
from kvcalc.question.options import check_number, read_questions
from kvcalc.question.serving_options import SchedulingOptions, ServerSettings, Workload
from kvcalc.records import Records, Settings

if TYPE_CHECKING:
    from kvcalc.report.charts.chart import Chart
    from kvcalc.serving.server import SimulationResult
    from kvcalc.timing.deployment import TimedDeployment

MAX_RUNS = 1000
STATUS_INTERRUPTED = 130


def run(
    models: list[str],
    *,
    load: Annotated[Settings, Workload],
    scheduling: list[SchedulingOptions],
    settings: list[ServerSettings],
    find_rate: bool = False,
    timeline: str = "",
    deploying: list[DeploymentOptions],
) -> Answer:
    """Simulate servers under load, one forward pass after another.

    The answer has a record per simulation, with latencies, throughput and cache use of the replica.
    There is a simulation for each combination of deployment, scheduling, settings and load. If the
    load has no rate, trace or clients, several rates are tried: the first record of each server is
    then of the highest rate that it sustains within the latency targets, and a record for each
    tried rate follows.

    Args:
        models: Models, each word a name or a comma-separated list.
        load: Option name → value, for the options in `Workload`: request rate or clients, and
            lengths.
        scheduling: How batches are formed and the cache is allocated, one item per variant.
        settings: Limits and latency targets of the server, one item per variant.
        find_rate: Whether to return only the record of the highest rate for each server. The load
            must then have no rate, trace or clients.
        timeline: CSV file to write with every forward pass, if there is only one combination; ''
            for none. `-` prints it on stdout instead of the records.
        deploying: GPU, data types, parallelism and engine of each deployment.
    """
    return serve_answer(
        deployments_of(models, deploying), load, scheduling, settings, find_rate, timeline
    )


def serve_answer(
    deployments: "Sequence[TimedDeployment]",
    load: Settings,
    scheduling: Sequence[SchedulingOptions],
    settings: Sequence[ServerSettings],
    find_rate: bool = False,
    timeline: str = "",
) -> Answer:
    """Return latencies, throughput and cache use of each simulated server under each load.

    Args:
        deployments: The deployments, each a model on one replica of GPUs.
        load: Option name → value, for the options in `Workload`. Without a rate, a trace or
            clients, several rates are tried: the first record of each server is of the highest rate
            that it sustains within the latency targets, and a record for each tried rate follows.
        scheduling: How batches are formed and the cache is allocated. Each item is simulated with
            each deployment and load.
        settings: Limits and latency targets of the server. Each item is simulated with all others.
        find_rate: Whether to return only the record of the highest rate for each server. The load
            must then have no rate, trace or clients.
        timeline: CSV file to write with every forward pass, if there is only one deployment,
            scheduling, setting and load; '' for none. `-` prints it on stdout instead of the
            records.

    Raises:
        UserError: No server can be simulated, or `timeline` is given for several.
    """
    from kvcalc.report.text.measure_text import progress_bar
    from kvcalc.report.text.serving_text import serve_table
    from kvcalc.serving.requests import sample_workload

    for deployment in deployments:
        deployment.model.check_generates()
    loads = read_questions(Workload, load)
    check_number("runs", MAX_RUNS, deployments, scheduling, settings, loads)
    points = [*product(deployments, scheduling, settings, loads)]
    if timeline and len(points) > 1:
        raise UserError("--timeline is of one run", "Give one value to each option")
    is_run = load.get("rate") or any(w.requests or w.max_concurrency for w in loads)
    kind = "search" if find_rate else "run" if is_run else "sweep"
    requests = {workload: sample_workload(workload) for workload in loads}
    total = sum(len(requests[workload]) for *_, workload in points) if kind == "run" else None
    with progress_bar("requests", total) as move:
        results, notes, is_complete = _simulate(
            points, requests, kind, lambda count: move(advance=count)
        )
    records = [result.record for result in results]
    # in a sweep, the runs at all rates follow the run at the sustained rate
    main = [result for result in results if result.record["found_rate"] is not None] or results
    notes += _notes([deployment.model for deployment in deployments], main)
    if not is_complete:
        done = sum(run.served.is_complete for run in main)
        notes.append(
            f"stopped after {done} of {len(points)} runs; the last record is of the requests "
            "that were done"
        )
    if timeline:
        _write_timeline(timeline, results[0])
    lengths = _describe_lengths(requests.values(), load, records)

    def draw() -> "list[Chart]":
        from kvcalc.report.charts.load_plot import load_chart, occupancy_chart

        if len(results) == 1:
            return occupancy_chart(results[0])
        return load_chart([r for r in records if r["found_rate"] is None] or records)

    return Answer(
        records,
        lambda: [serve_table(records, lengths)],
        draw,
        _notes=notes,
        _status=0 if is_complete else STATUS_INTERRUPTED,
        _is_silent=timeline == "-",
    )


def _describe_lengths(requests: Iterable[Any], load: Settings, records: Records) -> str:
    """Return a note on the padding of static batching for unequal lengths, and whether the lengths
    are the default."""
    padding = [r["padding_waste"] or 0.0 for r in records if r["policy"] == "static"]
    lengths = [column for drawn in requests for column in (drawn.input_len, drawn.output_len)]
    if all(column.min() == column.max() for column in lengths):
        return "Equal lengths: static loses nothing to padding, but requests wait." * bool(
            padding
        )
    notes = [f"Padding takes up to {max(padding):.0%} of static batches."] if padding else []
    defaults = [name for name in ("input", "output") if not load.get(f"{name}_len")]
    if defaults and not load.get("requests"):
        notes.append(f"Default {' and '.join(defaults)} lengths follow Azure's 2023 trace.")
    return " ".join(notes)


def _simulate(
    points: Sequence[Any],
    requests: Mapping[Workload, Any],
    kind: str,
    progress: Any,
) -> "tuple[list[SimulationResult], list[str], bool]":
    """Return the runs, notes about servers that are left out, and whether the runs are complete.

    Ctrl-C keeps the runs that are done.

    Args:
        kind: `run`, `search` for the sustained rate, or `sweep`. In a sweep, the run at the
            sustained rate is followed by the runs at all rates that were tried.

    Raises:
        UserError: No server can be simulated.
    """
    from msgspec.structs import replace

    from kvcalc.serving.server import Server, Sweep

    results = []
    refusals = {}
    servers = {}  # the last server; it serves any rate
    is_complete = True
    for deployment, scheduling, limits, load in points:
        options = limits, scheduling.policy, scheduling.cache
        try:
            if kind == "run":
                key = id(deployment), options, replace(load, rate=inf)
                if key not in servers:
                    servers = {key: Server(deployment, requests[load], load, *options)}
                results.append(servers[key].run(requests[load], load, progress))
                is_complete = results[-1].served.is_complete
            else:
                sweep = Sweep(deployment, load, *options, progress)
                results += [sweep.sustained, *(sweep.tried if kind == "sweep" else ())]
                is_complete = sweep.is_complete
        except UserError as error:
            refusals[str(error)] = error
        except KeyboardInterrupt:
            if not results:
                raise
            is_complete = False
        if not is_complete:
            return results, [], False
    if not results:
        raise next(iter(refusals.values()))
    return results, [f"left out: {text}" for text in refusals], True


def _write_timeline(path: str, run: "SimulationResult") -> None:
    """Write the passes of a run as CSV. Ranks of prefill replicas are numbered after the decode
    ranks."""
    from kvcalc.answers.answer import save_text
    from kvcalc.report.export import to_csv
    from kvcalc.serving.cache_accounting import PassRow

    logs = run.served.logs
    rows = [row._asdict() for log in logs for row in log.rows]
    for log in run.served.prefill:
        rows += [row._replace(rank=len(logs) + row.rank)._asdict() for row in log.rows]
    save_text(path, to_csv(rows) if rows else ",".join(PassRow._fields) + "\n")


def _notes(models: Sequence[Any], runs: "list[SimulationResult]") -> list[str]:
    requests = [run.served.requests for run in runs]
    notes = remarks(models, max(int((r.input_len + r.output_len).max()) for r in requests))
    for record in [run.record for run in runs]:
        place = f"{record['gpu']}, {record['policy']}, {record['cache']}"
        place += f", rate {record['rate']:g}" if record["rate"] else ""
        if record["rejected"]:
            notes.append(
                f"{place}: {record['rejected']:,} requests can never fit and are rejected"
            )
    if diverging := sum(run.record["diverges"] is True for run in runs):
        place = f" in {diverging:,} of {len(runs):,} loads" * (len(runs) > 1)
        notes.append("the queue keeps growing" + place)
    return notes
