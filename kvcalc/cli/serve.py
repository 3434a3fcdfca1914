"""`kvcalc serve`."""

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from kvcalc.cli import options as o
from kvcalc.cli.common import check_number, lengths, note, remarks, save_text
from kvcalc.cli.groups import Deploying, Group, Output, grouped

if TYPE_CHECKING:
    from kvcalc.model.spec import Model
    from kvcalc.serving.load import Load
    from kvcalc.serving.run import Run
    from kvcalc.serving.settings import ServerSettings
    from kvcalc.timing.deployment import Deployment

MOST_RUNS = 1000


_load = partial(typer.Option, rich_help_panel="Load")
_server = partial(typer.Option, rich_help_panel="Server")


class LoadOptions(Group, frozen=True):
    """What comes in, by the names of `Load`; lists are of rates, of clients and of shares of cached tokens."""

    requests: Annotated[str, _load("--requests", help="A CSV of arrival_s, input_len, output_len, or an Azure trace.")] = ""
    rate: Annotated[
        str, _load("--rate", "--request-rate", help="Requests per second, or a list; inf: all at once; none: a sweep.")
    ] = ""
    burstiness: Annotated[float, _load("--burstiness", help="1: Poisson; below 1: bursts; above: more regular.")] = 1.0
    max_concurrency: Annotated[str, _load("--max-concurrency", help="Clients in a closed loop, a list makes more rows.")] = "0"
    num_prompts: Annotated[int, _load("--num-prompts", help="Requests; 0: 1000, or all of a file.")] = 0
    input_len: Annotated[str, _load("--input-len", "--isl", help="1000, uniform:100,2000 or lognormal:MEAN,P99.")] = "1000"
    output_len: Annotated[str, _load("--output-len", "--osl", help="Likewise.")] = "200"
    seed: Annotated[int, _load("--seed", help="Of arrivals and lengths.")] = 0
    client: Annotated[str, _load("--client", help="open, closed, inferencex or aiperf: who asks, and how.")] = ""
    think_time: Annotated[str, _load("--think-time", help="From an answer to a client's next request: 2s.")] = ""
    prefix_hit_rate: Annotated[
        str, _load("--prefix-hit-rate", help="Cached share of each prompt, one prefix for all; a list adds rows.")
    ] = "0"

    @property
    def is_sweep(self) -> bool:
        """Whether no load is given, so that rates up to saturation are tried."""
        return not (self.rate or self.requests) and self.max_concurrency == "0"

    def loads(self) -> "list[Load]":
        """A load for each share of cached tokens, rate and number of clients."""
        from kvcalc.library.words import from_words
        from kvcalc.serving.load import Load, parse_hit_rate, parse_rate

        rates = [parse_rate(word, "rate") for word in (self.rate or "inf").split(",")]
        clients = [0] if self.max_concurrency == "0" else lengths(self.max_concurrency, "max-concurrency")
        hit_rates = [parse_hit_rate(word, "prefix-hit-rate") for word in self.prefix_hit_rate.split(",")]
        words = msgspec.structs.asdict(self)
        names = ("prefix_hit_rate", "rate", "max_concurrency")
        points = product(hit_rates, rates, clients)
        return [from_words(Load, words | dict(zip(names, point, strict=True))) for point in points]


class ServerOptions(Group, frozen=True):
    """The server, by the names of `ServerSettings`."""

    max_num_seqs: Annotated[
        int | None, _server("--max-num-seqs", help="Concurrent sequences of the replica; the engine's default.")
    ] = None
    max_num_batched_tokens: Annotated[int, _server("--max-num-batched-tokens", help="Of one pass; the engine's default.")] = 0
    max_model_len: Annotated[str, _server("--max-model-len", help="Tokens of a request; what contiguous reserves.")] = ""
    preemption: Annotated[str, _server("--preemption", help="recompute or swap.")] = "recompute"
    batch_timeout: Annotated[float, _server("--batch-timeout", help="Seconds a static batch waits to be full.")] = 0.0
    block_size: Annotated[int, _server("--block-size", help="Tokens in a cache block; the engine's default.")] = 0
    gpu_memory_utilization: Annotated[
        float | None, _server("--gpu-memory-utilization", help="Share of the memory; the engine's default.")
    ] = None
    kv_cache_memory_bytes: Annotated[str, _server("--kv-cache-memory-bytes", help="The cache's memory itself.")] = ""
    slo_ttft: Annotated[str, typer.Option("--slo-ttft", "--max-ttft", help="Most to the first token: 500ms.")] = ""
    slo_tpot: Annotated[str, typer.Option("--slo-tpot", "--max-tpot", help="Most per further token: 50ms.")] = ""
    price_per_hour: o.Price = 0.0
    draft: Annotated[str, _server("--draft", help="Speculate with a model, layers=N of this one, or mtp.")] = ""
    num_speculative_tokens: Annotated[int, _server("--num-speculative-tokens", help="Drafted a step; 0: it chooses.")] = 0
    acceptance_rate: Annotated[
        float | None, _server("--acceptance-rate", help="Of a drafted token; 0.8 unless given.", show_default=False)
    ] = None

    scheduler_recv_interval: Annotated[
        int, _server("--scheduler-recv-interval", help="SGLang's: decode passes between looks at the queue.")
    ] = 1
    disaggregate: Annotated[bool, _server("--disaggregate", help="Prompts on replicas of their own.")] = False
    prefill_replicas: Annotated[int, _server("--prefill-replicas", help="For prompts alone, with --disaggregate.")] = 1

    def settings(self) -> "ServerSettings":
        from kvcalc.library.words import from_words
        from kvcalc.serving.settings import ServerSettings

        return from_words(ServerSettings, msgspec.structs.asdict(self))


@grouped
def run(
    models: o.SomeModels,
    *,
    gpu: o.Gpus = "h100",
    load: LoadOptions,
    policy: Annotated[str, _server("--policy", help="continuous or static; a list makes more rows.")] = "continuous",
    cache: Annotated[str, _server("--cache", help="paged or contiguous; a list makes more rows.")] = "paged",
    server: ServerOptions,
    find_rate: Annotated[bool, _load("--find-rate", help="Find the highest rate that keeps --slo-ttft, --slo-tpot.")] = False,
    timeline: Annotated[str, typer.Option("--timeline", help="Write the passes to a CSV file.")] = "",
    deploying: Deploying,
    output: Output,
) -> None:
    """A server under load, simulated pass by pass."""
    loads, settings = load.loads(), server.settings()
    policies, caches = ([word.strip() for word in text.split(",")] for text in (policy, cache))
    deployments = deploying.deployments(models, gpu)
    check_number("runs", MOST_RUNS, deployments, policies, caches, loads)
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
        from kvcalc.report.figures_load import load_chart
        from kvcalc.report.figures_serving import occupancy

        tried = [r for r in records if not swept or r["found_rate"] is None]
        output.picture(occupancy(runs[0]) if len(runs) == 1 else load_chart(tried))
    if timeline != "-" and not output.printed(records):
        from kvcalc.report.served import serve_table

        output.show(serve_table(records))
    if not whole:
        _stopped(given, len(points), find_rate or swept)
        raise typer.Exit(130)


def _runs(
    points: "list[tuple[Deployment, str, str, Load]]", settings: "ServerSettings", find: bool, swept: bool
) -> "tuple[list[Run], bool]":
    """Each point simulated, and whether all are: Ctrl-C keeps what is done of them. Raises it where nothing is.

    swept: a point is the run at the sustained rate, followed by those at all rates that were tried.
    """
    from kvcalc.errors import UserError
    from kvcalc.serving.finding import sweep_rates
    from kvcalc.serving.run import serve

    runs: list[Run] = []
    refused: dict[str, UserError] = {}
    drawn = {one: one.drawn() for *_, one in points}
    with _progress(0 if find or swept else sum(len(drawn[one]) for *_, one in points)) as told:
        try:
            for deployment, policy, cache, one in points:
                try:
                    if find or swept:
                        sweep = sweep_rates(deployment, one, settings, policy, cache, told)
                        runs += [sweep.sustained, *(sweep.tried if swept else ())]
                        whole = sweep.whole
                    else:
                        before = runs[-1].ready if runs else None
                        runs.append(serve(deployment, drawn[one], one, settings, policy, cache, told, before))
                        whole = runs[-1].served.whole
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


def _stopped(runs: "list[Run]", points: int, find: bool) -> None:
    """Says what Ctrl-C left undone."""
    last = runs[-1]
    if last.served.whole:
        note(f"stopped after {len(runs)} of {points} runs")
    elif find:
        note(f"stopped: the search for the highest rate of run {len(runs)} of {points} had come so far")
    else:
        done = f"{last.record['completed'] + last.record['rejected']:,} of {len(last.served.requests):,} requests"
        note(f"stopped after {done}, whose figures these are" + (f"; run {len(runs)} of {points}" if points > 1 else ""))


def _write_timeline(path: str, run: "Run") -> None:
    """The passes of a run as CSV."""
    from kvcalc.report.export import to_csv
    from kvcalc.serving.log import PassRow

    rows = [row._asdict() for log in run.served.logs for row in log.rows]
    ranks = len(run.served.logs)  # those for prompts alone are numbered behind those that decode
    rows += [row._replace(rank=ranks + row.rank)._asdict() for log in run.served.prefill for row in log.rows]
    save_text(path, to_csv(rows) if rows else ",".join(PassRow._fields) + "\n")


def _check_files(timeline: str, plot: str, runs: int) -> None:
    """Refuse what could not be written before the simulation rather than after it."""
    from kvcalc.errors import UserError
    from kvcalc.library.writing import destination
    from kvcalc.report.plots import SUFFIXES

    if timeline and runs > 1:
        raise UserError("--timeline is of one run", hint="Give one --gpu, --policy, --cache, --rate and --max-concurrency")
    for target in (name for name in (timeline, plot) if name not in ("", "-")):
        destination(target)
    if plot and plot != "-" and Path(plot).suffix.lower() not in SUFFIXES:
        raise UserError(f"--plot {plot!r} should end in one of {', '.join(SUFFIXES)}, or be - for the terminal")


@contextmanager
def _progress(total: int) -> Iterator[Any]:
    """A bar on stderr where that is a terminal; yields what is told of each request that is done."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("requests", total=total or None)
        yield lambda count: bar.advance(task, count)


def _remarks(models: "Iterable[Model]", runs: "list[Run]") -> None:
    longest = max(int((r.served.requests.input_len + r.served.requests.output_len).max()) for r in runs)
    models = list(models)
    remarks(models, 0)
    for model in models:
        if model.max_context and longest > model.max_context:
            note(f"requests of {longest:,} tokens are beyond the {model.max_context:,} that {model.name} is made for")
    for r in (run.record for run in runs):
        where = f"{r['gpu']}, {r['policy']}, {r['cache']}" + (f", rate {r['rate']:g}" if r["rate"] else "")
        if r["rejected"]:
            note(f"{where}: {r['rejected']:,} requests can never fit and are rejected")
        if r["diverges"]:
            note(f"{where}: the queue diverges: the load is beyond capacity, and waiting grows as long as requests come")
