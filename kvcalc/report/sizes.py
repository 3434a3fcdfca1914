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
MOST_SHARES = 6  # models whose shares of the weights fit two lines


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
        ["", *lines, *_against_weights(records, models), f"{MEANT[shown_in()]}; `--explain` shows the formulas"],
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


def _against_weights(records: Sequence[Record], models: Sequence[Model]) -> list[str]:
    """The cache as a share of the weights at the last context and batch; of one model, from where on it is as large."""
    if records[0]["weight_bytes"] is None:
        return []
    last = {r["model"]: r for r in records}
    shares = ", ".join(f"{name} {percent(r['cache_share_of_weights'])}" for name, r in last.items())
    r, at = records[-1], f"at {_users(records[-1])}"
    if len(last) > 1:
        return [f"the cache against the weights {at}: {shares}"] if len(last) <= MOST_SHARES else []
    return [f"the cache against the weights: {percent(r['cache_share_of_weights'])} {at}, {_equal(r, models[0])}"]


def _equal(record: Record, model: Model) -> str:
    """From which context on the cache is as large as the weights, if that is within what was asked or the model is made for."""
    turns, most = record["equal_weights_context"], model.max_context and max(record["context"], model.max_context)
    if turns and most and turns > most:
        return f"never as large within its {most:,}"
    return f"as large from {turns:,} tokens on" if turns else "never as large"


def _kept(record: Record) -> str:
    return f"{format_bytes(record['kv_cache_bytes'])} for {_users(record)}"


def _users(record: Record) -> str:
    batch, context = record["batch_size"], record["context"]
    return f"{batch:,} × {context:,} tokens" if batch > 1 else f"{context:,} tokens"
