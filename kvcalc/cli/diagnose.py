"""`kvcalc diagnose`."""

from typing import TYPE_CHECKING, Annotated

import typer

from kvcalc.cli.common import note, save_text
from kvcalc.cli.groups import Printing, grouped

if TYPE_CHECKING:
    from kvcalc.planning.diagnosis import Given
    from kvcalc.planning.verdict import Verdict


@grouped
def run(
    logs: Annotated[
        list[str], typer.Argument(help="Start-up logs; - is standard input.", metavar="[LOG…]", show_default=False)
    ] = [],  # noqa: B006 (typer copies it)
    *,
    metrics: Annotated[
        str, typer.Option("--metrics", help="A running server's /metrics, a file or an address.", show_default=False)
    ] = "",
    model: Annotated[
        str, typer.Option("--model", help="The model, where the log's path tells nothing.", show_default=False)
    ] = "",
    gpu: Annotated[str, typer.Option("--gpu", help="The GPU, where the log does not name it.", show_default=False)] = "",
    users: Annotated[int, typer.Option("--users", help="Conversations that have to fit.", show_default=False)] = 0,
    context: Annotated[str, typer.Option("--context", help="Tokens of each; the engine's longest.", show_default=False)] = "",
    dtype: Annotated[str, typer.Option("--dtype", help="In place of what the log says.", show_default=False)] = "",
    kv_cache_dtype: Annotated[
        str, typer.Option("--kv-cache-dtype", help="In place of what the log says.", show_default=False)
    ] = "",
    quantization: Annotated[
        str, typer.Option("--quantization", "-q", help="In place of what the log says.", show_default=False)
    ] = "",
    tp: Annotated[
        int, typer.Option("--tensor-parallel-size", "-tp", "--tp", help="In place of what the log says.", show_default=False)
    ] = 0,
    boot: Annotated[int, typer.Option("--boot", help="One of several boots in a log; all.", show_default=False)] = 0,
    save: Annotated[
        str, typer.Option("--save", help="Keep what the last boot taught, for `fit --from-log`.", show_default=False)
    ] = "",
    printing: Printing,
) -> None:
    """A start-up log of vLLM, SGLang or llama.cpp beside the prediction: where each GiB went, and what to change."""
    from kvcalc.errors import UserError
    from kvcalc.planning.diagnosis import Given
    from kvcalc.units import parse_tokens

    if users < 0 or boot < 0 or tp < 0:
        raise UserError("--users, --boot and --tp are numbers from 1 up")
    if bool(metrics) == bool(logs):
        raise UserError("diagnose takes start-up logs or --metrics", hint="kvcalc diagnose server.log")
    stored = {"dtype": dtype, "kv_cache_dtype": kv_cache_dtype, "quantization": quantization}
    given = Given(model, gpu, {n: v for n, v in stored.items() if v}, tp)
    length = parse_tokens(context, "context") if context else 0
    if metrics:
        _running(metrics, given, users, printing)
        return
    verdicts = [found for log in logs for found in _verdicts(log, given, boot, users, length)]
    if save:
        save_text(save, verdicts[-1][1].found.learned.text())
    if printing.printed([record for log, v, number, _ in verdicts for record in v.records(log, number)]):
        return
    from kvcalc.report.diagnosis import diagnosis_table

    printing.show(*(diagnosis_table(v, log, number, boots) for log, v, number, boots in verdicts))


def _running(where: str, given: "Given", users: int, printing: Printing) -> None:
    """A server's metrics beside the prediction."""
    from kvcalc.planning.diagnosis import served_by
    from kvcalc.planning.metrics_text import read_metrics
    from kvcalc.planning.running import beside_served, running_records

    metrics = read_metrics(where)
    deployment, remarks = served_by(metrics.model, given)
    for text in remarks:
        note(text)
    found = beside_served(metrics, deployment, users)
    if not printing.printed(running_records(found)):
        from kvcalc.report.running import running_table

        printing.show(running_table(found))


def _verdicts(log: str, given: "Given", chosen: int, users: int, context: int) -> "list[tuple[str, Verdict, int, int]]":
    """(log, verdict, its number, how many there are) of each boot that is asked for."""
    from kvcalc.errors import UserError
    from kvcalc.planning.diagnosis import diagnose
    from kvcalc.planning.startup import read_boots
    from kvcalc.planning.verdict import Verdict

    boots, remarks = read_boots(log)
    if chosen > len(boots):
        raise UserError(f"there is no boot {chosen}: the log holds {len(boots)}", log)
    found = []
    for number, boot in enumerate(boots, 1):
        if chosen in (0, number):
            one = diagnose(boot, given)
            remarks += one.remarks
            found.append((log, Verdict(one, users, context), number, len(boots)))
    for text in dict.fromkeys(remarks):
        note(text)
    return found
