"""`kvcalc serve`."""

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import product
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from kvcalc.cli import options as o
from kvcalc.cli.option_groups import Deploying, Output
from kvcalc.cli.options import (
    Option,
    OptionGroup,
    check_number,
    lengths,
    note,
    remarks,
    save_text,
)

if TYPE_CHECKING:
    from kvcalc.model.model import Model
    from kvcalc.serving.arrivals import Workload
    from kvcalc.serving.server import SimulationResult
    from kvcalc.serving.server_settings import ServerSettings
    from kvcalc.timing.deployment import TimedDeployment

MAX_RUNS = 1000
_load = partial(Option, panel="Workload")
_server = partial(Option, panel="Server")
_speculation = partial(Option, panel="Speculative decoding")


class LoadOptions(OptionGroup, frozen=True):
    """What comes in, by the names of `Load`; lists are of rates, of clients and of shares of cached
    tokens."""

    requests: Annotated[
        str,
        _load(
            "CSV file of arrival_s, input_len and output_len, or an Azure trace",
            takes="FILE",
            called="trace dataset dataset-path dataset-name requests-file file",
        ),
    ] = ""
    rate: Annotated[
        str,
        Option(
            "Requests per second, inf, or a list; default: a sweep of rates",
            "--rate --request-rate",
            "R",
            is_common=True,
            called=o.RATE_WORDS,
        ),
    ] = ""
    burstiness: Annotated[
        float, _load("Burstiness of arrivals: 1 is Poisson, below 1 is burstier")
    ] = 1.0
    max_concurrency: Annotated[
        str,
        _load("Clients in a closed loop; a list adds rows", takes="N", called=o.USER_WORDS),
    ] = "0"
    num_prompts: Annotated[int, _load("Number of requests; 0: 1000, or the whole file")] = 0
    input_len: Annotated[
        str,
        Option(
            "Prompt tokens: 1000, uniform:100,2000 or lognormal:MEAN,P99",
            "--input-len --isl",
            "TOKENS",
            is_common=True,
            called=o.PROMPT_WORDS + " " + o.CONTEXT_WORDS,
        ),
    ] = "1000"
    output_len: Annotated[
        str,
        Option(
            "Output tokens: 200, uniform:50,400 or lognormal:MEAN,P99",
            "--output-len --osl",
            "TOKENS",
            is_common=True,
            called=o.OUTPUT_WORDS,
        ),
    ] = "200"
    seed: Annotated[int, _load("Seed of random arrivals and lengths")] = 0
    client: Annotated[
        str,
        _load(
            "Load generator to imitate: open, closed, inferencex or aiperf",
            words=("open", "closed", "inferencex", "aiperf"),
        ),
    ] = ""
    think_time: Annotated[
        str,
        _load("Pause of a client between an answer and its next request: 2s", takes="TIME"),
    ] = ""
    prefix_hit_rate: Annotated[
        str,
        _load(
            "Share of each prompt that is cached, 0 to 1; a list adds rows",
            takes="X",
            called=o.PREFIX_WORDS,
        ),
    ] = "0"

    @property
    def is_sweep(self) -> bool:
        """Whether no load is given, so that rates up to saturation are tried."""
        return not (self.rate or self.requests) and self.max_concurrency == "0"

    def loads(self) -> "list[Workload]":
        """A load for each share of cached tokens, rate and number of clients."""
        from kvcalc.library.choices import from_words
        from kvcalc.serving.arrivals import Workload, parse_hit_rate, parse_rate

        rates = [parse_rate(word, "rate") for word in (self.rate or "inf").split(",")]
        clients = (
            [0]
            if self.max_concurrency == "0"
            else lengths(self.max_concurrency, "max-concurrency")
        )
        hit_rates = [
            parse_hit_rate(word, "prefix-hit-rate") for word in self.prefix_hit_rate.split(",")
        ]
        words = msgspec.structs.asdict(self)
        names = ("prefix_hit_rate", "rate", "max_concurrency")
        points = product(hit_rates, rates, clients)
        return [
            from_words(Workload, words | dict(zip(names, point, strict=True)))
            for point in points
        ]


class ServerOptions(OptionGroup, frozen=True):
    """The server, by the names of `ServerSettings`."""

    max_num_seqs: Annotated[
        int | None,
        Option(
            "Concurrent sequences of the replica; default: the engine's",
            is_common=True,
            called=o.USER_WORDS,
        ),
    ] = None
    max_num_batched_tokens: Annotated[
        int,
        _server("Tokens of one forward pass; 0: the engine's default", takes="TOKENS"),
    ] = 0
    max_model_len: Annotated[
        str,
        _server("Tokens per request; contiguous caches reserve as many", takes="TOKENS"),
    ] = ""
    preemption: Annotated[
        str,
        _server(
            "What happens to preempted requests: recompute or swap",
            words=("recompute", "swap"),
        ),
    ] = "recompute"
    batch_timeout: Annotated[
        float, _server("Seconds that a static batch waits for more requests")
    ] = 0.0
    block_size: Annotated[
        int, _server("Tokens per KV cache block; 0: the engine's default")
    ] = 0
    gpu_memory_utilization: Annotated[
        float | None,
        _server("Share of GPU memory for the engine; default: the engine's"),
    ] = None
    kv_cache_memory_bytes: Annotated[
        str,
        _server("KV cache memory per GPU instead of the computed budget", takes="SIZE"),
    ] = ""
    slo_ttft: Annotated[
        str,
        Option(
            "Longest time to first token: 500ms",
            "--slo-ttft --max-ttft",
            "TIME",
            "Targets",
            called=o.TTFT_WORDS,
        ),
    ] = ""
    slo_tpot: Annotated[
        str,
        Option(
            "Longest time per output token: 50ms",
            "--slo-tpot --max-tpot",
            "TIME",
            "Targets",
            called=o.TPOT_WORDS,
        ),
    ] = ""
    price_per_hour: o.Price = 0.0
    draft: o.Draft = ""
    num_speculative_tokens: Annotated[
        int, _speculation("Draft tokens per step; 0 selects the fastest number")
    ] = 0
    acceptance_rate: Annotated[
        float | None,
        _speculation("Share of draft tokens that is accepted; default: 0.8"),
    ] = None
    scheduler_recv_interval: Annotated[
        int, _server("SGLang: decode steps between checks for new requests")
    ] = 1
    disaggregate: Annotated[
        bool,
        _server(
            "Prefill on separate replicas",
            called="disaggregated disaggregation prefill-decode pd",
        ),
    ] = False
    prefill_replicas: Annotated[
        int, _server("Number of prefill replicas with --disaggregate")
    ] = 1

    def settings(self) -> "ServerSettings":
        from kvcalc.library.choices import from_words
        from kvcalc.serving.server_settings import ServerSettings

        return from_words(ServerSettings, msgspec.structs.asdict(self))


def run(
    models: o.Models,
    *,
    gpu: o.Gpus = "h100",
    load: LoadOptions,
    policy: Annotated[
        str,
        _server("Batching: continuous or static; a list", words=("continuous", "static")),
    ] = "continuous",
    cache: Annotated[
        str,
        _server(
            "KV cache memory: paged or contiguous; a list",
            words=("paged", "contiguous"),
        ),
    ] = "paged",
    server: ServerOptions,
    find_rate: Annotated[
        bool, _load("Find the highest rate that meets --max-ttft and --max-tpot")
    ] = False,
    timeline: Annotated[
        str,
        Option(
            "Write every forward pass to a CSV file",
            takes="FILE",
            panel="Output",
            is_output=True,
        ),
    ] = "",
    deploying: Deploying,
    output: Output,
) -> int:
    """Simulate a server under load, pass by pass."""
    loads, settings = load.loads(), server.settings()
    policies, caches = ([word.strip() for word in text.split(",")] for text in (policy, cache))
    deployments = deploying.deployments(models, gpu)
    check_number("runs", MAX_RUNS, deployments, policies, caches, loads)
    points = list(product(deployments, policies, caches, loads))
    _check_files(timeline, output.plot, len(points))
    swept = load.is_sweep and not find_rate
    runs, whole = _runs(points, settings, find_rate, swept)
    records = [r.record for r in runs]
    given = [r for r in runs if not swept or r.record["found_rate"] is not None]
    _remarks({d.model.name: d.model for d in deployments}.values(), given)
    if timeline:
        _write_timeline(timeline, runs[0])
    if output.plot:
        from kvcalc.report.charts.load_plot import load_chart, occupancy_chart

        tried = [r for r in records if not swept or r["found_rate"] is None]
        output.picture(occupancy_chart(runs[0]) if len(runs) == 1 else load_chart(tried))
    if timeline != "-" and not output.printed(records):
        from kvcalc.report.text.serving_text import serve_table

        output.show(serve_table(records))
    if not whole:
        _stopped(given, len(points), find_rate or swept)
    return 0 if whole else 130


def _runs(
    points: "list[tuple[TimedDeployment, str, str, Workload]]",
    settings: "ServerSettings",
    find: bool,
    swept: bool,
) -> "tuple[list[SimulationResult], bool]":
    """Each point simulated, and whether all are: Ctrl-C keeps what is done of them. Raises it where
    nothing is.

    swept: a point is the run at the sustained rate, followed by those at all rates that were tried.
    """
    from kvcalc.errors import UserError
    from kvcalc.serving.rate_search import sweep_rates
    from kvcalc.serving.server import Server

    runs: list[SimulationResult] = []
    refused: dict[str, UserError] = {}
    drawn = {one: one.sample() for *_, one in points}
    servers: dict[Any, Server] = {}  # servers of loads that differ in their rate only
    with _progress(
        0 if find or swept else sum(len(drawn[one]) for *_, one in points)
    ) as stated:
        try:
            for deployment, policy, cache, one in points:
                try:
                    if find or swept:
                        sweep = sweep_rates(deployment, one, settings, policy, cache, stated)
                        runs += [sweep.sustained, *(sweep.tried if swept else ())]
                        whole = sweep.is_complete
                    else:
                        anytime = msgspec.structs.replace(one, rate=inf)
                        key = id(deployment), policy, cache, anytime
                        if key not in servers:
                            servers = {
                                key: Server(
                                    deployment, drawn[one], one, settings, policy, cache
                                )
                            }
                        runs.append(servers[key].run(drawn[one], one, stated))
                        whole = runs[-1].served.is_complete
                except UserError as error:
                    refused[str(error)] = error
                    continue
                if not whole:
                    return runs, False
        except KeyboardInterrupt:
            if not runs:
                raise
            return runs, False
    for text, refusal in refused.items():
        if not runs:
            raise refusal
        note(f"left out: {text}")
    return runs, True


def _stopped(runs: "list[SimulationResult]", points: int, find: bool) -> None:
    """Says what Ctrl-C left undone."""
    last = runs[-1]
    if last.served.is_complete:
        note(f"stopped after {len(runs)} of {points} runs")
    elif find:
        note(
            f"stopped: the search for the highest rate of run {len(runs)} of {points} had come "
            "so far"
        )
    else:
        done = (
            f"{last.record['completed'] + last.record['rejected']:,} of "
            f"{len(last.served.requests):,} requests"
        )
        note(
            f"stopped after {done}, whose figures these are"
            + (f"; run {len(runs)} of {points}" if points > 1 else "")
        )


def _write_timeline(path: str, run: "SimulationResult") -> None:
    """The passes of a run as CSV."""
    from kvcalc.report.export import to_csv
    from kvcalc.serving.cache_accounting import PassRow

    rows = [row._asdict() for log in run.served.logs for row in log.rows]
    ranks = len(
        run.served.logs
    )  # those for prompts alone are numbered behind those that decode
    rows += [
        row._replace(rank=ranks + row.rank)._asdict()
        for log in run.served.prefill
        for row in log.rows
    ]
    save_text(path, to_csv(rows) if rows else ",".join(PassRow._fields) + "\n")


def _check_files(timeline: str, plot: str, runs: int) -> None:
    """Refuse what could not be written before the simulation rather than after it."""
    from kvcalc.errors import UserError
    from kvcalc.library.files import destination
    from kvcalc.report.charts.drawing import SUFFIXES

    if timeline and runs > 1:
        raise UserError(
            "--timeline is of one run",
            hint="Give one --gpu, --policy, --cache, --rate and --max-concurrency",
        )
    for target in (name for name in (timeline, plot) if name not in ("", "-")):
        destination(target)
    if plot and plot != "-" and Path(plot).suffix.lower() not in SUFFIXES:
        raise UserError(
            f"--plot {plot!r} should end in one of {', '.join(SUFFIXES)}, or be - for the terminal"
        )


@contextmanager
def _progress(total: int) -> Iterator[Any]:
    """A bar on stderr where that is a terminal; yields what is told of each request that is
    done."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("requests", total=total or None)
        yield lambda count: bar.advance(task, count)


def _remarks(models: "Iterable[Model]", runs: "list[SimulationResult]") -> None:
    longest = max(
        int((r.served.requests.input_len + r.served.requests.output_len).max()) for r in runs
    )
    models = list(models)
    remarks(models, 0)
    for model in models:
        if model.max_context and longest > model.max_context:
            note(
                f"requests of {longest:,} tokens are beyond the {model.max_context:,} that "
                f"{model.name} is made for"
            )
    for r in (run.record for run in runs):
        where = f"{r['gpu']}, {r['policy']}, {r['cache']}" + (
            f", rate {r['rate']:g}" if r["rate"] else ""
        )
        if r["rejected"]:
            note(f"{where}: {r['rejected']:,} requests can never fit and are rejected")
        if r["diverges"]:
            note(
                f"{where}: the queue diverges: the load is beyond capacity, and waiting grows "
                "as long as requests come"
            )
