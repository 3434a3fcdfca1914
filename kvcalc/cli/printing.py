"""Print an answer as a table, records, formulas or a picture."""

import sys

from msgspec.structs import replace

from kvcalc.answers.answer import MAX_TABLE_ROWS, MAX_TABLES, Answer, note, say
from kvcalc.errors import UserError, visible
from kvcalc.question.options import check_number
from kvcalc.question.size_options import Output, Printing


def print_answer(answer: Answer, output: Printing) -> int:
    """Print a command's answer, draw its chart if requested, and return the answer's exit status.

    Args:
        answer: The answer: records, sentence, notes and chart.
        output: Format of the output, and file of the chart.
    """
    for text in dict.fromkeys(answer._notes):
        note(text)
    picture = ""
    if isinstance(output, Output) and output.plot:
        from kvcalc.report.charts.drawing import save

        picture = output.plot
        if answer._charts is list:
            raise UserError("there is no picture of this answer", "Leave out --plot")
        if charts := answer._charts():
            save(charts, picture, output.style)
    if answer._is_silent:
        return answer._status
    if output.explain:
        say(answer._explanation())
    elif output.format not in ("table", "markdown"):
        from kvcalc.report import export

        sys.stdout.writelines(export.FORMATS[output.format](answer._records))
    elif picture != "-" and answer._yaml:
        sys.stdout.write(visible(answer._yaml))
    elif picture != "-":
        from kvcalc.report.text.tables import show

        check_number("rows of a table", MAX_TABLE_ROWS, answer._records)
        tables = answer._tables() if output.verbose else answer._main_tables()
        check_number("tables", MAX_TABLES, tables)
        show(
            [replace(table, wide=output.wide, verbose=output.verbose) for table in tables],
            output.format == "markdown",
        )
    return answer._status
