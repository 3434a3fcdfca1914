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
from kvcalc.units import format_bytes, shown_in

MEANT = {"gib": "1 GiB = 2^30 bytes", "si": "1 GB = 10^9 bytes", "bytes": "exact bytes"}


def size_table(
    records: Sequence[Record], models: Sequence[Model], precision: Precision, block_size: int, parallelism: Parallelism
) -> Table:
    """Sizes of models, with the assumptions that they share, or those of each."""
    weights = records[0]["weight_bytes"] is not None
    words = {m.name: assumptions(m, precision, block_size, parallelism, weights) for m in models}
    shared = set(words.values())
    lines = [f"{name}: {text}" for name, text in words.items()] if len(shared) > 1 else shared
    lines = [*lines, *(f"{m.name}: {line}" if len(models) > 1 else line for m in models if (line := reach_line(m)))]
    return Table(
        records,
        SIZE_COLUMNS,
        _sentence(records),
        ["", *lines, *_against_weights(records), f"{MEANT[shown_in()]}; `--explain` shows the formulas"],
    )


def _sentence(records: Sequence[Record]) -> str:
    """The answer as a person would say it: what one keeps, or the least and the most of several."""
    least, most = (choose(records, key=lambda r: r["kv_cache_bytes"]) for choose in (min, max))
    where = " a GPU" if least["gpus"] > 1 else ""
    if least["kv_cache_bytes"] == most["kv_cache_bytes"]:
        about = "" if least["parameters_exact"] else "≈ "
        alone = len(records) == 1 and least["weight_bytes"] is not None
        beside = f", beside {about}{format_bytes(least['weight_bytes'])} of weights" if alone else ""
        return f"{least['model']} keeps {_kept(least)}{where}{beside}"
    if least["model"] == most["model"]:
        return f"{least['model']} keeps {_kept(least)}{where}, {_kept(most)}"
    return f"{least['model']} keeps the least, {_kept(least)}{where}; {most['model']} the most, {_kept(most)}"


def _against_weights(records: Sequence[Record]) -> list[str]:
    """The cache as a share of the weights, at the last context of each model and batch, and from where on it is as large."""
    if records[0]["weight_bytes"] is None:
        return []
    last = {(r["model"], r["batch_size"]): r for r in records}
    models, batches = ({key[n] for key in last} for n in (0, 1))
    found = []
    for (model, batch), r in last.items():
        name = " ".join([model] * (len(models) > 1) + [f"batch {batch:,}"] * (len(batches) > 1))
        turns = f"as large from {r['equal_weights_context']:,} tokens on" if r["equal_weights_context"] else "never as large"
        at = f"{percent(r['cache_share_of_weights'])} at {r['context']:,} tokens"
        found.append(f"{name} {at}, {turns}".strip())
    return [f"the cache against the weights: {'; '.join(found)}"]


def _kept(record: Record) -> str:
    batch, context = record["batch_size"], record["context"]
    users = f"{batch:,} × {context:,} tokens" if batch > 1 else f"{context:,} tokens"
    return f"{format_bytes(record['kv_cache_bytes'])} for {users}"
