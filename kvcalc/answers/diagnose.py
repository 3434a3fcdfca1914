"""`kvcalc diagnose`."""

from typing import TYPE_CHECKING, Any

from kvcalc.answers.answer import Answer
from kvcalc.errors import UnpredictedRelease, UserError
from kvcalc.question.options import Question, Tokens

if TYPE_CHECKING:
    from kvcalc.diagnosis.diagnosis import DiagnosisInputs
    from kvcalc.diagnosis.log_verdict import DiagnosisSummary

    Verdict = tuple[str, DiagnosisSummary, int, int]

FORMATS = ("dtype", "kv_cache_dtype", "quantization")


class OverrideOptions(Question, frozen=True):
    """Values that the log does not have, or that replace its values."""

    model: str = ""
    gpu: str = ""
    dtype: str = ""
    kv_cache_dtype: str = ""
    quantization: str = ""
    tp: int = 0


class TargetOptions(Question, frozen=True):
    """The users that must fit, and the start that is diagnosed."""

    users: int = 0
    context: Tokens = 0
    boot: int = 0


def run(
    logs: list[str],
    *,
    overrides: OverrideOptions,
    target: TargetOptions,
    save: str = "",
) -> Answer:
    """Explain the memory of an engine from its start-up log, and suggest changes."""
    from kvcalc.diagnosis.diagnosis import DiagnosisInputs

    formats = {name: getattr(overrides, name) for name in FORMATS if getattr(overrides, name)}
    inputs = DiagnosisInputs(overrides.model, overrides.gpu, formats, overrides.tp)
    verdicts: list[Verdict] = []
    notes: list[str] = []
    for log in logs:
        verdicts += _verdicts(log, inputs, target, notes)
    if save:
        _save_corrections(save, verdicts[-1])

    def tables() -> Any:
        from kvcalc.report.text.plan_text import diagnosis_table

        return [
            diagnosis_table(verdict, log, number, count)
            for log, verdict, number, count in verdicts
        ]

    records = [
        record
        for log, verdict, number, _ in verdicts
        for record in verdict.records(log, number)
    ]
    return Answer(records, tables, _notes=notes)


def _save_corrections(path: str, verdict: "Verdict") -> None:
    from kvcalc.answers.answer import save_text

    corrections = verdict[1].corrections
    if corrections is None:
        raise UserError("vLLM's V0 engine is not predicted, so its log gives no corrections")
    save_text(path, corrections.text())


def _verdicts(
    log: str, inputs: "DiagnosisInputs", target: TargetOptions, notes: list[str]
) -> "list[Verdict]":
    """Return log, verdict, number and count of each requested start, and add to the notes."""
    from kvcalc.diagnosis.diagnosis import diagnose
    from kvcalc.diagnosis.log_reader import read_boots
    from kvcalc.diagnosis.log_verdict import summarize_diagnosis, summarize_v0

    boots, remarks = read_boots(log)
    notes += remarks
    if target.boot > len(boots):
        raise UserError(
            f"there is no boot {target.boot}: the log holds {len(boots)}", where=log
        )
    verdicts: list[Verdict] = []
    for number, boot in enumerate(boots, 1):
        if target.boot not in (0, number):
            continue
        try:
            diagnosis = diagnose(boot, inputs)
            notes += diagnosis.remarks
            summary = summarize_diagnosis(diagnosis, target.users, target.context)
        except UnpredictedRelease as error:
            notes.append(error.what)
            summary = summarize_v0(boot, inputs.model, inputs.gpu)
        verdicts.append((log, summary, number, len(boots)))
    return verdicts
