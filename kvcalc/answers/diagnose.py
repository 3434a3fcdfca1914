"""`kvcalc diagnose`."""

from kvcalc.answers.answer import Answer, save_text
from kvcalc.errors import UserError
from kvcalc.question.options import Question, Tokens

FLAGS = ("dtype", "kv_cache_dtype", "quantization", "tp")


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
    from kvcalc.diagnosis.diagnosis import DiagnosisInputs, diagnose
    from kvcalc.diagnosis.log_reader import read_boots
    from kvcalc.diagnosis.log_verdict import summarize_diagnosis, summarize_v0
    from kvcalc.report.text.plan_text import diagnosis_table

    flags = {name: getattr(overrides, name) for name in FLAGS if getattr(overrides, name)}
    inputs = DiagnosisInputs(overrides.model, overrides.gpu, flags)
    summaries, notes = [], []
    for log in logs:
        boots, remarks = read_boots(log)
        notes += remarks
        if target.boot > len(boots):
            raise UserError(
                f"there is no boot {target.boot}: the log holds {len(boots)}", where=log
            )
        for number, boot in enumerate(boots, 1):
            if target.boot not in (0, number):
                continue
            if boot.is_v0:
                summary = summarize_v0(boot, inputs.model, inputs.gpu)
            else:
                diagnosis = diagnose(boot, inputs)
                notes += diagnosis.remarks
                summary = summarize_diagnosis(diagnosis, target.users, target.context)
            summaries.append((summary, log, number, len(boots)))
    if save:
        if (corrections := summaries[-1][0].corrections) is None:
            raise UserError("vLLM's V0 engine is not predicted: its log gives no corrections")
        save_text(save, corrections.text())

    records = [
        record
        for summary, log, number, _ in summaries
        for record in summary.records(log, number)
    ]
    return Answer(
        records, lambda: [diagnosis_table(*summary) for summary in summaries], _notes=notes
    )
