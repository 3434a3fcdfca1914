"""What `diagnose` shows: the terms beside each other, under a sentence; below, what to change."""

from kvcalc.planning.verdict import Verdict
from kvcalc.report.layout import Column, Table
from kvcalc.report.shell import CommandLine
from kvcalc.units import format_bytes


def _bytes(size: int) -> str:
    return f"−{format_bytes(-size)}" if size < 0 else format_bytes(size)


COLUMNS = (
    Column("term", "of one GPU", right=False),
    Column("logged_bytes", "logged", _bytes),
    Column("predicted_bytes", "by the rules", _bytes),
    Column("difference_bytes", "logged − rules", _bytes),
)


def diagnosis_table(verdict: Verdict, log: str = "", number: int = 1, boots: int = 1) -> Table:
    """One boot; of several in a log its number."""
    records = verdict.records(log, number)
    lines = ["", verdict.holding()]
    if change := verdict.mending():
        lines.append(change)
    for one in verdict.changes[:1]:
        lines += [CommandLine(one.command)] if one.command else []
    if verdict.changes and verdict.changes[0].kvcalc_command:
        lines.append("each change was run: as logged, and by the rules of `kvcalc fit -- …` alone")
    which = (
        f"boot {number} of {boots}, lines {verdict.found.boot.lines[0]:,} to {verdict.found.boot.lines[1]:,}: "
        if boots > 1
        else ""
    )
    return Table(records[:-1], COLUMNS, which + verdict.taken(), lines)
