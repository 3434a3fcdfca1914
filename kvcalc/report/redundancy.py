"""What a request takes without a cache as a table, and in words why the cache saves little where it does."""

from collections.abc import Sequence

from kvcalc.report.export import Record
from kvcalc.report.layout import Column, Table
from kvcalc.report.tables import integer, ratio, seconds
from kvcalc.units import format_si

LITTLE = 1.5  # times as long without the cache: below that a sentence says why
NO_CACHE = (
    Column("gpu", "GPU", right=False, given=True),
    Column("batch_size", "batch", integer, given=True),
    Column("input_len", "in", integer, given=True),
    Column("output_len", "out", integer, given=True),
    Column("no_cache_head", "head on", right=False),
    Column("no_cache_ttft_s", "first token", seconds, rests="time"),
    Column("no_cache_tpot_last_s", "last token", seconds, rests="time"),
    Column("no_cache_e2e_s", "end to end", seconds, rests="time"),
    Column("speedup", "cache saves", ratio),
    Column("no_cache_flops", "FLOP", lambda v: format_si(v)),
    Column("no_cache_redundant_flops_share", "redundant", lambda v: f"{v:.1%}"),
    Column("no_cache_token_projections", "token projections", integer, wide=True),
    Column("no_cache_redundant_projections", "redundant", integer, wide=True),
)


def no_cache_table(records: Sequence[Record]) -> Table:
    """The same requests without a cache."""
    notes = ["", "head: the LM head, on the last position or on all; redundant: of the FLOPs, what the cache saves"]
    alike = {key for key in ("gpu", "batch_size") if len({record[key] for record in records}) == 1}
    return Table(
        records,
        [column for column in NO_CACHE if column.key not in alike],
        "\nWithout a cache",
        [*notes, *dict.fromkeys(filter(None, map(why_little, records)))],
    )


def why_little(record: Record) -> str:
    """Why the cache saves little of a request; '' where it saves more, or there is one token alone."""
    cached, again, least = record["tpot_last_s"], record["no_cache_tpot_last_s"], record["tpot_last_bound_s"]
    if record["speedup"] >= LITTLE or cached is None:
        return ""
    tokens, rest = record["input_len"] + record["output_len"] - 1, cached - least
    steps = f"the last step takes {seconds(cached)} with the cache, {seconds(again)} over all {tokens:,} tokens"
    if rest > least:
        why = f"{seconds(rest)} of either are launches and what runs between them, whatever the tokens"
    else:
        why = f"either reads all weights once, most of the {seconds(least)} that it takes at the least"
    doubles = record["no_cache_doubles_from"]
    pays = (
        f"twice as long without it from {doubles:,} tokens on"
        if doubles
        else f"never twice as long at a length that {record['model']} takes"
    )
    return f"the cache saves {ratio(record['speedup'])}: {steps}; {why}; {pays}"
