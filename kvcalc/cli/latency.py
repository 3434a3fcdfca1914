"""`kvcalc latency`."""

from itertools import product
from typing import Annotated, Any

import msgspec
import typer

from kvcalc.cli import options as o
from kvcalc.cli.common import MOST_PASSES, check_number, lengths, remarks
from kvcalc.cli.groups import Deploying, Group, Output, grouped

LISTS = ("input_len", "output_len", "batch_size", "num_speculative_tokens", "acceptance_rate")


class RequestOptions(Group, frozen=True):
    """What is asked of a request, by the names of `LatencyOptions`; those of LISTS are lists."""

    input_len: Annotated[str, typer.Option("--input-len", "--isl", help="Prompt tokens; a list makes more rows.")] = "2000"
    output_len: Annotated[str, typer.Option("--output-len", "--osl", help="Generated tokens; a list makes more rows.")] = "500"
    batch_size: o.Batches = "1"
    no_cache: Annotated[bool, typer.Option("--no-cache", help="Also the same generation without a KV cache.")] = False
    head: Annotated[str, typer.Option("--head", help="Positions that the LM head sees without a cache: last or all.")] = "last"
    prefix_len: Annotated[int, typer.Option("--prefix-len", help="Leading prompt tokens that are cached already.")] = 0
    max_num_batched_tokens: Annotated[int, typer.Option("--max-num-batched-tokens", help="Chunk of the prefill; 0: whole.")] = 0
    draft: Annotated[str, typer.Option("--draft", help="Speculate with a model, layers=N of this one, or mtp.")] = ""
    num_speculative_tokens: Annotated[
        str, typer.Option("--num-speculative-tokens", help="Drafted per step, a list; the best unless given.", show_default=False)
    ] = ""
    acceptance_rate: Annotated[
        str, typer.Option("--acceptance-rate", help="Of a drafted token, 0 to 1, a list; 0.8 unless given.", show_default=False)
    ] = ""
    cpu_offload_gb: Annotated[float, typer.Option("--cpu-offload-gb", help="GiB of each GPU's weights in the host's memory.")] = (
        0.0
    )
    price_per_hour: o.Price = 0.0

    def points(self) -> "list[dict[str, Any]]":
        """Every combination of the lists, by the names of `LatencyOptions`, the first slowest."""
        from kvcalc.serving.speculation import acceptance_rates, speculative_tokens

        batches, drafted = lengths(self.batch_size, "batch size"), speculative_tokens(self.num_speculative_tokens)
        prompts, answers = lengths(self.input_len, "input length"), lengths(self.output_len, "output length")
        names = ("batch_size", "input_len", "output_len", "num_speculative_tokens", "acceptance_rate")
        lists = batches, prompts, answers, drafted, acceptance_rates(self.acceptance_rate)
        check_number("rows", MOST_PASSES, *lists)
        return [dict(zip(names, values, strict=True)) for values in product(*lists)]


@grouped
def run(models: o.SomeModels, *, gpu: o.Gpus = "h100", asked: RequestOptions, deploying: Deploying, output: Output) -> None:
    """One request: time to first token, per token, end to end; energy with --wide."""
    from kvcalc.library.words import from_words
    from kvcalc.serving.request_record import LatencyOptions, latency_records

    options, points = from_words(LatencyOptions, msgspec.structs.asdict(asked) | dict.fromkeys(LISTS)), asked.points()
    deployments = deploying.deployments(models, gpu)
    check_number("rows", MOST_PASSES, deployments, points)
    asked_for = [(deployment, msgspec.structs.replace(options, **point)) for deployment in deployments for point in points]
    records = latency_records(asked_for)
    chosen, longest = {d.model.name: d.model for d in deployments}, max(one.context for _, one in asked_for)
    remarks(chosen.values(), longest)
    if output.plot:
        from kvcalc.report.figures_latency import latency_chart

        output.picture(latency_chart(deployments, [one for _, one in asked_for]))
    if not output.printed(records):
        from kvcalc.report.serving import latency_tables

        output.show(*latency_tables(records))
