"""Tables of what was measured."""

from kvcalc.records import Record
from kvcalc.report.text.table_layout import Table
from kvcalc.report.text.tables import columns, seconds
from kvcalc.units import format_bytes, format_si

times = "{:.2f}×".format
MEASURE_COLUMNS = columns(
    """
    variant                   | variant          | text
    phase                     | phase            | text
    batch_size                | batch            | int     | given
    context                   | context          | int     | given
    attention_predicted_s     | attention: bound | seconds
    attention_measured_s      | measured         | seconds
    attention_ratio           | ratio            | {:.2f}×
    attention_difference      | because          | text
    ratio                     | layer: ratio     | {:.2f}×
    predicted_s               | bound            | seconds
    measured_s                | measured         | seconds
    spread                    | spread           | {:.0%}
    predicted_bytes           | cache predicted  | int
    allocated_bytes           | in tensors       | int
    allocator_bytes           | allocator        | int
    attention_bandwidth_share | of bandwidth     | {:.0%}
    attention_flops_share     | of FLOP/s        | {:.0%}
    attention                 | attention        | text
    """
)
WAYS = {
    "cached": "with",
    "uncached": "without",
}
GENERATE_COLUMNS = columns(
    """
    variant               | variant     | variant     | left given
    prompt_len            | prompt      | int         | given
    batch_size            | batch       | int         | given
    mode                  | cache       | mode        | left
    head                  | head on     | text
    total_s               | measured    | seconds
    predicted_total_s     | predicted   | seconds
    ratio                 | ratio       | {:.2f}×
    speedup               | cache saves | {:.2f}×
    predicted_speedup     | predicted   | {:.2f}×
    predicted_extra_bytes | extra bytes | extra bytes
    same_tokens           | same tokens | yes/no      | left
    first_token_s         | first token | seconds
    last_token_s          | last token  | seconds
    tokens_per_s          | tokens/s    | {:.1f}
    bound_total_s         | bound       | seconds
    """,
    variant=lambda name: name or "its own",
    mode=WAYS.__getitem__,
    **{"extra bytes": lambda size: format_bytes(size) if size else "none"},
)
LARGE = 64 << 20  # bytes of a cache that no CPU's last level holds


def measured_table(rows: list[Record], version: str) -> Table:
    """Layers: their attention first, then the whole of them and their bytes."""
    medians = [
        f"{phase} attention takes {times(_middle(ratios))} its bound"
        for phase in dict.fromkeys(r["phase"] for r in rows)
        if (ratios := sorted(r["attention_ratio"] for r in rows if r["phase"] == phase))
    ]
    median = ", the median of each" if len(rows) > len(medians) else ""
    title = f"{', '.join(medians)}{median}.".capitalize()
    details = [note for note in measure_notes(rows, version) if note]
    return Table(rows, MEASURE_COLUMNS, title, _basis(rows, version), details=details)


def _basis(rows: list[Record], version: str) -> list[str]:
    """Return the footnote on the machine."""
    first = rows[0]
    return ["", f"{first['device']}, {first['dtype']}, torch {version}, medians"]


def generated_table(rows: list[Record], version: str) -> Table:
    """Every way of generating, measured beside predicted."""
    first, without = rows[0], next((r for r in rows if r["mode"] == "uncached"), None)
    title = (
        f"{first['model']} makes {first['new_tokens']:,} tokens in "
        f"{seconds(first['total_s'])} with the cache"
    )
    if without:
        saves = (
            f"{times(without['speedup'])} faster, predicted "
            f"{times(without['predicted_speedup'])}"
        )
        title = f"{title} and {seconds(without['total_s'])} without, {saves}"
    details = [note for note in generate_notes(rows, version) if note]
    return Table(rows, GENERATE_COLUMNS, f"{title}.", _basis(rows, version), details=details)


def _middle(ordered: list[float]) -> float:
    return (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2


def measure_notes(rows: list[Record], version: str) -> list[str]:
    """Ceilings, what decode attention reaches over large caches, and why each row differs from its
    bound."""
    first = rows[0]
    ceilings = (
        f"ceilings of this machine ({first['device']}): "
        f"{format_si(first['bandwidth_bytes_per_s'], 'B/s')} (copy "
        f"{format_si(first['copy_bytes_per_s'], 'B/s')}, read "
        f"{format_si(first['read_bytes_per_s'], 'B/s')}), "
        f"{format_si(first['flops_per_s'], 'FLOP/s')} in {first['dtype']}, "
        f"{seconds(first['launch_s'])} to launch an operation"
    )
    clock = {
        "cpu": "one thread, timed by its own CPU time",
        "wall": f"{first['threads']} threads, wall clock",
    }
    graphs = "CUDA graphs" if any(r["graph"] for r in rows) else "no graphs"
    how = clock.get(first["clock"], f"CUDA events, {graphs}")
    even = all(
        r["predicted_bytes"] == r["allocated_bytes"] <= r["allocator_bytes"] for r in rows
    )
    notes = [
        "",
        ceilings,
        f"torch {version}, {how}; medians; inputs rotate past the last-level cache where memory "
        "bounds the time",
    ]
    notes.append(
        "cache bytes: predicted = in the tensors' storage in every row"
        if even
        else "cache bytes DIFFER from the prediction"
    )
    if large := sorted(
        r["attention_ratio"]
        for r in rows
        if r["phase"] == "decode" and r["predicted_bytes"] > LARGE
    ):
        notes.append(
            f"decode attention over caches above {format_bytes(LARGE, 0)}: median "
            f"{times(_middle(large))} its bound"
        )
    return [
        *notes,
        "",
        *(f"{r['variant']} {r['phase']}: {r['attention_why']}" for r in rows),
    ]


def generate_notes(rows: list[Record], version: str) -> list[str]:
    """What the figures of a generation mean."""
    first = rows[0]
    how = {
        "cpu": "one thread, its CPU time",
        "wall": f"{first['threads']} threads",
    }.get(first["clock"], "CUDA, host included")
    worst = max(abs(r["ratio"] - 1) for r in rows)
    least, most = min(r["ratio_p10"] for r in rows), max(r["ratio_p90"] for r in rows)
    bounds = "bound: the same operators at the measured ceilings, fully overlapped, no launches"
    return [
        "",
        f"{first['model']} with random weights in {first['dtype']} on {first['device']}; torch "
        f"{version}, {how}; "
        f"{first['new_tokens']:,} tokens, greedy, {first['cache']} cache; head: the LM head, on "
        "the last position or on all",
        f"in the cache {format_bytes(first['allocated_bytes'])}, predicted "
        f"{format_bytes(first['predicted_bytes'])}; 'cache "
        "saves': a run's time over that with the cache; extra bytes: predicted, of all steps, "
        "beside those of the operators",
        "predicted: each operator at this machine's rates for products of so few rows and for "
        "activations, the extra bytes, and "
        f"the host, {seconds(first['host_s'])} a step; rates sampled between the steps; {bounds}",
        f"measured is within {worst:.0%} of predicted in each run; of single steps 80 % lie "
        f"within {least:.2f} to {most:.2f}×",
    ]
