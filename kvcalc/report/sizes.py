"""What `size` shows."""

from collections.abc import Sequence

from kvcalc.layers.ranks import Parallelism
from kvcalc.model.precision import Precision
from kvcalc.model.size import assumptions
from kvcalc.model.spec import Model
from kvcalc.report.export import Record
from kvcalc.report.tables import SIZE_COLUMNS, Table


def size_table(
    records: Sequence[Record], models: Sequence[Model], precision: Precision, block_size: int, parallelism: Parallelism
) -> Table:
    """Sizes of models, with the assumptions that they share, or those of each."""
    words = {m.name: assumptions(m, precision, block_size, parallelism) for m in models}
    shared = set(words.values())
    lines = [f"{name}: {text}" for name, text in words.items()] if len(shared) > 1 else shared
    return Table(records, SIZE_COLUMNS, notes=["", *lines, "1 GiB = 2^30 bytes; `--explain` shows the formulas"])
