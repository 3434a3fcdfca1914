"""`kvcalc latency`."""

from itertools import product
from typing import Annotated

import msgspec
import typer

from kvcalc.cli import options as o
from kvcalc.cli.common import lengths, note, remarks
from kvcalc.cli.groups import Deploying, Group, Output, grouped


class RequestOptions(Group, frozen=True):
    """What is asked of a request; lists are of `input_len`, `output_len` and `batch_size`."""

    input_len: Annotated[str, typer.Option("--input-len", "--isl", help="Prompt tokens; a list makes more rows.")] = "2000"
    output_len: Annotated[str, typer.Option("--output-len", "--osl", help="Generated tokens; a list makes more rows.")] = "500"
    batch_size: o.Batches = "1"
    no_cache: Annotated[bool, typer.Option("--no-cache", help="Also the same generation without a KV cache.")] = False
    prefix_len: Annotated[int, typer.Option("--prefix-len", help="Leading prompt tokens that are cached already.")] = 0
    max_num_batched_tokens: Annotated[int, typer.Option("--max-num-batched-tokens", help="Chunk of the prefill; 0: whole.")] = 0
    draft: Annotated[str, typer.Option("--draft", help="Speculate with a model, layers=N of this one, or mtp.")] = ""
    num_speculative_tokens: Annotated[int, typer.Option("--num-speculative-tokens", help="Drafted per step; 0: the best.")] = 0
    acceptance_rate: Annotated[
        float | None, typer.Option("--acceptance-rate", help="Of a drafted token, 0 to 1; 0.8 unless given.", show_default=False)
    ] = None
    price_per_hour: o.Price = 0.0


@grouped
def run(model: o.OneModel, *, gpu: o.Gpus = "h100", asked: RequestOptions, deploying: Deploying, output: Output) -> None:
    """One request: time to first token, time per token, end to end."""
    from kvcalc.library.words import from_words
    from kvcalc.serving.request_record import LatencyOptions, latency_record, shortage

    options = from_words(LatencyOptions, msgspec.structs.asdict(asked) | dict.fromkeys(("input_len", "output_len", "batch_size")))
    deployments = deploying.deployments(model, gpu)
    batches = lengths(asked.batch_size, "batch size")
    prompts, answers = lengths(asked.input_len, "input length"), lengths(asked.output_len, "output length")
    records = []
    for deployment, batch, prompt, answer in product(deployments, batches, prompts, answers):
        one = msgspec.structs.replace(options, batch_size=batch, input_len=prompt, output_len=answer)
        records.append(latency_record(deployment, one))
        if text := shortage(deployment, one):
            note(text)
    chosen = deployments[0].model
    remarks(chosen, max(prompts) + max(answers))
    if output.plot:
        from kvcalc.report.figures import no_cache

        output.picture(no_cache(chosen, max(prompts[-1] + answers[-1], 64), deployments[0].precision))
    if not output.printed(records):
        from kvcalc.report.serving import latency_tables

        output.show(*latency_tables(records))
