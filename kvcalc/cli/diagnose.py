"""`kvcalc diagnose`."""

from functools import partial
from typing import TYPE_CHECKING, Annotated

from kvcalc.cli import options as o
from kvcalc.cli.option_groups import Printing
from kvcalc.cli.options import Argument, Option, note, save_text

if TYPE_CHECKING:
    from kvcalc.diagnosis.diagnosis import DiagnosisInputs
    from kvcalc.diagnosis.log_verdict import DiagnosisSummary


_override = partial(Option, panel="Overrides")


def run(
    logs: Annotated[
        list[str],
        Argument("Start-up logs of vLLM, SGLang or llama.cpp; - is stdin", takes="LOG…"),
    ] = [],  # noqa: B006 (typer copies it)
    *,
    metrics: Annotated[
        str,
        Option(
            "The /metrics of a running server, as a file or an address",
            takes="FILE",
            is_common=True,
        ),
    ] = "",
    model: Annotated[
        str,
        Option(
            "Model, if the log has only its path",
            takes="MODEL",
            is_common=True,
            words=o.model_names,
        ),
    ] = "",
    gpu: Annotated[
        str,
        Option(
            "GPU, if the log does not name it",
            takes="GPU",
            is_common=True,
            words=o.gpu_names,
        ),
    ] = "",
    users: Annotated[
        int,
        Option("Concurrent users that must fit", is_common=True, called=o.USER_WORDS),
    ] = 0,
    context: Annotated[
        str,
        Option(
            "Tokens per user; default: the engine's maximum",
            takes="TOKENS",
            is_common=True,
            called=o.CONTEXT_WORDS,
        ),
    ] = "",
    dtype: Annotated[
        str,
        _override("Data type of weights and compute, instead of the log's", takes="DTYPE"),
    ] = "",
    kv_cache_dtype: Annotated[
        str, _override("Data type of the KV cache, instead of the log's", takes="DTYPE")
    ] = "",
    quantization: Annotated[
        str,
        _override(
            "Storage format of the weights, instead of the log's",
            "--quantization -q",
            "FORMAT",
        ),
    ] = "",
    tp: Annotated[
        int,
        _override(
            "GPUs for tensor parallelism, instead of the log's",
            "--tensor-parallel-size --tp -tp",
        ),
    ] = 0,
    boot: Annotated[int, Option("Number of the start in a log with several; default: all")] = 0,
    save: Annotated[
        str,
        Option(
            "Write measured overheads for `fit --from-log` to a file",
            takes="FILE",
            is_common=True,
            is_output=True,
        ),
    ] = "",
    printing: Printing,
) -> None:
    """Explain the memory of an engine from its start-up log, and what to change."""
    from kvcalc.diagnosis.diagnosis import DiagnosisInputs
    from kvcalc.errors import UserError
    from kvcalc.units import parse_tokens

    if users < 0 or boot < 0 or tp < 0:
        raise UserError("--users, --boot and --tp are numbers from 1 up")
    if bool(metrics) == bool(logs):
        raise UserError(
            "diagnose takes start-up logs or --metrics",
            hint="kvcalc diagnose server.log",
        )
    stored = {
        "dtype": dtype,
        "kv_cache_dtype": kv_cache_dtype,
        "quantization": quantization,
    }
    given = DiagnosisInputs(model, gpu, {n: v for n, v in stored.items() if v}, tp)
    length = parse_tokens(context, "context") if context else 0
    if metrics:
        _running(metrics, given, users, printing)
        return
    verdicts = [result for log in logs for result in _verdicts(log, given, boot, users, length)]
    if save:
        corrections = verdicts[-1][1].corrections
        if corrections is None:
            raise UserError(
                "vLLM's V0 engine is not predicted, so its log gives no corrections"
            )
        save_text(save, corrections.text())
    if printing.printed(
        [record for log, v, number, _ in verdicts for record in v.records(log, number)]
    ):
        return
    from kvcalc.report.text.plan_text import diagnosis_table

    printing.show(
        *(diagnosis_table(v, log, number, boots) for log, v, number, boots in verdicts)
    )


def _running(where: str, given: "DiagnosisInputs", users: int, printing: Printing) -> None:
    """A server's metrics beside the prediction."""
    from kvcalc.diagnosis.diagnosis import served_by
    from kvcalc.diagnosis.prometheus import (
        compare_with_prediction,
        read_metrics,
        running_records,
    )

    metrics = read_metrics(where)
    deployment, remarks = served_by(metrics.model, given)
    for text in remarks:
        note(text)
    result = compare_with_prediction(metrics, deployment, users)
    if not printing.printed(running_records(result)):
        from kvcalc.report.text.plan_text import running_table

        printing.show(running_table(result))


def _verdicts(
    log: str, given: "DiagnosisInputs", chosen: int, users: int, context: int
) -> "list[tuple[str, DiagnosisSummary, int, int]]":
    """(log, verdict, its number, how many there are) of each boot that is asked for."""
    from kvcalc.diagnosis.diagnosis import diagnose
    from kvcalc.diagnosis.log_reader import read_boots
    from kvcalc.diagnosis.log_verdict import summarize_diagnosis, summarize_v0
    from kvcalc.errors import UnpredictedRelease, UserError

    boots, remarks = read_boots(log)
    if chosen > len(boots):
        raise UserError(f"there is no boot {chosen}: the log holds {len(boots)}", log)
    results = []
    for number, boot in enumerate(boots, 1):
        if chosen in (0, number):
            try:
                one = diagnose(boot, given)
                remarks += one.remarks
                summary = summarize_diagnosis(one, users, context)
            except UnpredictedRelease as error:
                remarks += (error.what,)
                summary = summarize_v0(boot, given.model, given.gpu)
            results.append((log, summary, number, len(boots)))
    for text in dict.fromkeys(remarks):
        note(text)
    return results
