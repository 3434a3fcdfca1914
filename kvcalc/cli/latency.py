"""`kvcalc latency`."""

from itertools import product
from typing import Annotated

import msgspec

from kvcalc.cli import options as o
from kvcalc.cli.option_groups import Deploying, Output
from kvcalc.cli.options import (
    MAX_PASSES,
    Option,
    OptionGroup,
    check_number,
    lengths,
    remarks,
)
from kvcalc.records import Settings

LISTS = (
    "input_len",
    "output_len",
    "batch_size",
    "num_speculative_tokens",
    "acceptance_rate",
)


class RequestOptions(OptionGroup, frozen=True):
    """What is asked of a request, by the names of `LatencyOptions`; those of LISTS are lists."""

    input_len: Annotated[
        str,
        Option(
            "Prompt tokens; a list adds rows",
            "--input-len --isl",
            "TOKENS",
            is_common=True,
            called=o.PROMPT_WORDS + " " + o.CONTEXT_WORDS,
        ),
    ] = "2000"
    output_len: Annotated[
        str,
        Option(
            "Output tokens; a list adds rows",
            "--output-len --osl",
            "TOKENS",
            is_common=True,
            called=o.OUTPUT_WORDS,
        ),
    ] = "500"
    batch_size: o.BatchSizes = "1"
    no_cache: Annotated[
        bool, Option("Add the same generation without a KV cache", panel="Workload")
    ] = False
    head: Annotated[
        str,
        Option(
            "Positions of the LM head with --no-cache: last or all",
            panel="Workload",
            words=("last", "all"),
        ),
    ] = "last"
    prefix_len: Annotated[
        int,
        Option(
            "Leading prompt tokens that are cached already",
            takes="TOKENS",
            panel="Workload",
            called=o.PREFIX_WORDS,
        ),
    ] = 0
    max_num_batched_tokens: Annotated[
        int,
        Option(
            "Tokens per prefill chunk; 0: the whole prompt",
            takes="TOKENS",
            panel="Engine",
        ),
    ] = 0
    draft: o.Draft = ""
    num_speculative_tokens: Annotated[
        str,
        Option(
            "Draft tokens per step; default: the fastest; a list",
            takes="N",
            panel="Speculative decoding",
        ),
    ] = ""
    acceptance_rate: Annotated[
        str,
        Option(
            "Share of draft tokens that is accepted; default: 0.8; a list",
            takes="X",
            panel="Speculative decoding",
        ),
    ] = ""
    cpu_offload_gb: Annotated[
        float,
        Option(
            "GiB of weights per GPU in CPU memory",
            panel="Memory",
            called=o.OFFLOAD_WORDS,
        ),
    ] = 0.0
    price_per_hour: o.Price = 0.0

    def points(self) -> "list[Settings]":
        """Every combination of the lists, by the names of `LatencyOptions`, the first slowest."""
        from kvcalc.serving.speculation import acceptance_rates, speculative_tokens

        batches, drafted = (
            lengths(self.batch_size, "batch size"),
            speculative_tokens(self.num_speculative_tokens),
        )
        prompts, answers = (
            lengths(self.input_len, "input length"),
            lengths(self.output_len, "output length"),
        )
        names = (
            "batch_size",
            "input_len",
            "output_len",
            "num_speculative_tokens",
            "acceptance_rate",
        )
        lists = (
            batches,
            prompts,
            answers,
            drafted,
            acceptance_rates(self.acceptance_rate),
        )
        check_number("rows", MAX_PASSES, *lists)
        return [dict(zip(names, values, strict=True)) for values in product(*lists)]


def run(
    models: o.Models,
    *,
    gpu: o.Gpus = "h100",
    asked: RequestOptions,
    deploying: Deploying,
    output: Output,
) -> None:
    """Predict TTFT, TPOT and end-to-end time of one request."""
    from kvcalc.library.choices import from_words
    from kvcalc.serving.request_record import LatencyOptions, latency_records

    options, points = (
        from_words(LatencyOptions, msgspec.structs.asdict(asked) | dict.fromkeys(LISTS)),
        asked.points(),
    )
    deployments = deploying.deployments(models, gpu)
    check_number("rows", MAX_PASSES, deployments, points)
    asked_for = [
        (deployment, msgspec.structs.replace(options, **point))
        for deployment in deployments
        for point in points
    ]
    records = latency_records(asked_for)
    chosen, longest = (
        {d.model.name: d.model for d in deployments},
        max(one.context for _, one in asked_for),
    )
    remarks(chosen.values(), longest)
    if output.plot:
        from kvcalc.planning.sweeps import latency_sweep
        from kvcalc.report.charts.latency_plot import latency_chart

        requests = [request for _, request in asked_for]
        output.picture(latency_chart(latency_sweep(deployments, requests), requests[0]))
    if not output.printed(records):
        from kvcalc.report.text.serving_text import latency_tables

        output.show(*latency_tables(records))
