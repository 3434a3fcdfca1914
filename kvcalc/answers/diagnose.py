"""`kvcalc diagnose`."""

from kvcalc.answers.answer import Answer, save_text
from kvcalc.errors import UserError
from kvcalc.question.options import Question, Tokens

FLAGS = ("dtype", "kv_cache_dtype", "quantization", "tp")


class DiagnoseOptions(Question, frozen=True):
    """Options of `diagnose`, which explains the memory in an engine's start-up log.

    If model, GPU, a data type or tp is '' or 0, it is read from the log.

    Attributes:
        model: Model, if the log has only its path.
        gpu: GPU, if the log does not name it.
        dtype: Data type of weights and compute, instead of the log's.
        kv_cache_dtype: Data type of the cache, instead of the log's.
        quantization: Format of the weights, instead of the log's.
        tp: Tensor-parallel size, instead of the log's.
        users: Concurrent users that must fit on the replica; 0 for one.
        context: Tokens of each user; 0 for the `max_model_len` in the log.
        boot: Which of several engine starts in the log is explained: 1 for the first; 0 for all.
    """

    model: str = ""
    gpu: str = ""
    dtype: str = ""
    kv_cache_dtype: str = ""
    quantization: str = ""
    tp: int = 0
    users: int = 0
    context: Tokens = 0
    boot: int = 0


def run(logs: list[str], *, options: DiagnoseOptions, save: str = "") -> Answer:
    """Explain the memory of an engine from its start-up log, and suggest flags that help.

    The answer has a record per memory item, such as weights or CUDA graphs, with the logged and the
    predicted bytes of one GPU. The last record of an engine start says how many users fit, and with
    which changed flags the required users would fit.

    Args:
        logs: Log files; `-` is stdin.
        options: Values that replace values in the log, and the users that must fit.
        save: File to write with the measured overheads of the last start, so that `fit --from-log`
            can use them instead of predicted overheads; '' for none.

    Raises:
        UserError: A log cannot be read, has no engine start, or has fewer than `options.boot`.
    """
    from kvcalc.diagnosis.diagnosis import diagnose
    from kvcalc.diagnosis.log_reader import read_boots
    from kvcalc.diagnosis.log_verdict import summarize_diagnosis, summarize_log
    from kvcalc.report.text.plan_text import diagnosis_table

    flags = {name: getattr(options, name) for name in FLAGS if getattr(options, name)}
    summaries, notes = [], []
    for log in logs:
        boots, remarks = read_boots(log)
        notes += remarks
        if options.boot > len(boots):
            raise UserError(
                f"there is no boot {options.boot}: the log holds {len(boots)}", where=log
            )
        for number, boot in enumerate(boots, 1):
            if options.boot not in (0, number):
                continue
            try:
                diagnosis = diagnose(boot, options.model, options.gpu, flags)
                notes += diagnosis.remarks
                summary = summarize_diagnosis(diagnosis, options.users, options.context)
            except UserError as error:
                is_unpredicted = boot.is_v0 or boot.engine == "torch"
                has_size = boot.counts or boot.is_full or "cache" in boot.figures
                has_answer = boot.failure or (has_size and not boot.model)
                blames_model = options.model and "GPU" not in error.what
                if not (is_unpredicted or (has_answer and not blames_model)):
                    raise
                required = options.users, options.context
                summary = summarize_log(boot, options.model, options.gpu, str(error), *required)
            summaries.append((summary, log, number, len(boots)))
    if save:
        if (corrections := summaries[-1][0].corrections) is None:
            raise UserError("a start that is not predicted gives no corrections")
        save_text(save, corrections.text())

    records = [
        record
        for summary, log, number, _ in summaries
        for record in summary.records(log, number)
    ]
    return Answer(
        records, lambda: [diagnosis_table(*summary) for summary in summaries], _notes=notes
    )
