"""What `size` shows."""

from collections.abc import Sequence

from kvcalc.layers.ranks import Parallelism
from kvcalc.model.precision import Precision
from kvcalc.model.reach import reach_line
from kvcalc.model.size import assumptions
from kvcalc.model.spec import Model
from kvcalc.report.export import Record
from kvcalc.report.layout import Table
from kvcalc.report.tables import SIZE_COLUMNS, percent
from kvcalc.units import MOST_TOKENS, format_bytes, shown_in

MEANT = {"gib": "1 GiB = 2^30 bytes", "si": "1 GB = 10^9 bytes", "bytes": "exact bytes"}
MOST_SHARES = 6  # models whose shares of the weights fit two lines


APART = {
    "model": "{}",
    "batch_size": "batch {:,}",
    "kv_cache_dtype": "cache {}",
    "dtype": "weights {}",
    "tensor_parallel_size": "tp {}",
}


def size_table(records: Sequence[Record], stored: Sequence[tuple[Model, Precision, Parallelism]], block_size: int) -> Table:
    """Sizes of models, each as it is stored and cut, with the assumptions that they share, or those of each."""
    weights = records[0]["weight_bytes"] is not None
    words = dict.fromkeys((m.name, assumptions(m, p, block_size, ranks, weights)) for m, p, ranks in stored)
    named = len({name for name, _ in words}) > 1 and len({text for _, text in words}) > 1
    lines = [*dict.fromkeys(f"{name}: {text}" if named else text for name, text in words)]
    models = [*{m.name: m for m, *_ in stored}.values()]
    lines = [*lines, *(f"{m.name}: {line}" if len(models) > 1 else line for m in models if (line := reach_line(m)))]
    return Table(
        records,
        SIZE_COLUMNS,
        _sentence(records) + _overtaking(records),
        ["", *lines, *_against_weights(records, models), f"{MEANT[shown_in()]}; `--explain` shows the formulas"],
    )


def _sentence(records: Sequence[Record]) -> str:
    """The answer as a person would say it: what one keeps, or the least and the most of several."""
    least, most = (choose(records, key=lambda r: r["kv_cache_bytes"]) for choose in (min, max))
    apart = _apart(records)
    where = " a GPU" if least["gpus"] > 1 or most["gpus"] > 1 else ""
    if least["kv_cache_bytes"] == most["kv_cache_bytes"]:
        about = "" if least["parameters_exact"] else "≈ "
        alone = len(records) == 1 and least["weight_bytes"] is not None
        beside = f", beside {about}{format_bytes(least['weight_bytes'])} of weights" if alone else _stored_as(records, apart)
        spans = sorted({r["context"] for r in records})
        until = f" to {spans[-1]:,}" if len(spans) > 1 and not apart else ""
        keep = "keeps" if least["parameters_exact"] is not None else "keep"  # layers whose dimensions alone are known
        return f"{least['model']} {keep} {_kept(least).replace(' tokens', f'{until} tokens')}{where}{beside}"
    if least["model"] == most["model"]:
        return f"{least['model']} keeps {_kept(least, apart)}{where}, {_kept(most, apart)}"
    less, more = _kept(least, apart), _kept(most, apart)
    return f"{least['model']} keeps the least, {less}{where}; {most['model']} the most, {more}"


def _stored_as(records: Sequence[Record], apart: Sequence[str]) -> str:
    """The weights of one model in each of several formats; '' where something else tells the records apart."""
    if [*apart] != ["dtype"] or not all(r["parameters_exact"] for r in records):
        return ""
    each = {r["dtype"]: f"{format_bytes(r['weight_bytes'])} of weights in {r['dtype']}" for r in records}
    return f", beside {', '.join(each.values())}"


def _apart(records: Sequence[Record]) -> list[str]:
    """The keys that tell the records apart beside context: the model, and what differs among those of one model."""
    models = {r["model"] for r in records}
    return [key for key in APART if len({(r["model"], r[key]) for r in records}) > (1 if key == "model" else len(models))]


def _against_weights(records: Sequence[Record], models: Sequence[Model]) -> list[str]:
    """The cache as a share of the weights at the last context and batch; of one model, from where on it is as large."""
    if records[0]["weight_bytes"] is None:
        return []
    apart = _apart(records)
    last = {tuple(r[key] for key in APART if key != "batch_size"): r for r in records}
    named = [key for key in apart if key != "batch_size"]
    shares = [
        f"{' '.join(APART[key].format(r[key]) for key in named)} {percent(r['cache_share_of_weights'])}" for r in last.values()
    ]
    r, at = records[-1], f"at {_users(records[-1])}"
    if len(last) > 1:
        shown = f"the cache against the weights {at}: {', '.join(shares)}"
        return [*([shown] if len(last) <= MOST_SHARES else []), *_beyond(records, models)]
    never = "" if r["equal_weights_context"] else ", never as large"
    return [f"the cache against the weights: {percent(r['cache_share_of_weights'])} {at}{never}", *_beyond(records, models)]


def _beyond(records: Sequence[Record], models: Sequence[Model]) -> list[str]:
    """Return a line on models whose cache is as large as the weights only beyond the longest context they are made for."""
    longest = {m.name: m.max_context for m in models if m.max_context}
    found = {
        r["model"]: f"{r['model']}'s {longest[r['model']]:,}"
        for r in records
        if (r["equal_weights_context"] or 0) > longest.get(r["model"], MOST_TOKENS)
    }
    return [f"equal at: beyond the maximum context, {', '.join(found.values())}"] if found else []


def _overtaking(records: Sequence[Record]) -> str:
    """From which context on the cache of one model, in one format and cut, is as large as its weights; '' where it never is."""
    r = records[-1]
    if _apart(records) or not r["equal_weights_context"]:
        return ""
    return f"; as large as the weights from {r['equal_weights_context']:,} tokens on"


def _kept(record: Record, apart: Sequence[str] = ()) -> str:
    form = f" in {record['kv_cache_dtype']}" if "kv_cache_dtype" in apart else ""
    cut = f" at tp {record['tensor_parallel_size']}" if "tensor_parallel_size" in apart else ""
    return f"{format_bytes(record['kv_cache_bytes'])} for {_users(record)}{form}{cut}"


def _users(record: Record) -> str:
    batch, context = record["batch_size"], record["context"]
    return f"{batch:,} × {context:,} tokens" if batch > 1 else f"{context:,} tokens"
