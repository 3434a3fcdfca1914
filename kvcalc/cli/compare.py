"""`kvcalc compare`."""

from typing import Annotated

import typer

from kvcalc.batch import Precision
from kvcalc.cli import options as o
from kvcalc.cli.common import MOST_ROWS, emit, lengths, note, parallelism

VARIANTS = (
    "Attention to swap in: none, mha, mqa, gqa:8, mla:512+64, dsa:512+64+128@2048, window:4096, cla:2, evict:4096; / stacks them."
)


def run(
    model: o.OneModel,
    variants: Annotated[str, typer.Option("--variants", help=VARIANTS)] = "none,mha,gqa:8,mqa,mla:512+64",
    context: o.Contexts = "4096",
    batch_size: o.Batches = "1",
    dtype: o.Dtype = "auto",
    kv_cache_dtype: o.CacheDtype = "auto",
    quantization: o.Quant = "",
    block_size: o.BlockSize = 16,
    set_: o.Sets = [],  # noqa: B006 (typer copies it)
    tp: o.Tp = 1,
    pp: o.Pp = 1,
    dp: o.Dp = 1,
    ep: o.Ep = 1,
    enable_expert_parallel: o.ExpertParallel = False,
    dcp: o.Dcp = 1,
    output: o.Output = o.Format.table,
) -> None:
    """The same model with other attention."""
    from kvcalc.compare import variant
    from kvcalc.edit import edited
    from kvcalc.errors import UserError
    from kvcalc.load import load_model
    from kvcalc.size import assumptions, size_record

    ranks = parallelism(tp, pp, dp, ep, enable_expert_parallel, dcp)
    contexts, batches, names = lengths(context, "context"), lengths(batch_size, "batch size"), variants.split(",")
    if len(names) * len(contexts) * len(batches) > MOST_ROWS:
        raise UserError(f"more than {MOST_ROWS:,} rows asked for")
    original = edited(load_model(model), set_)
    precision = Precision(dtype, kv_cache_dtype, quantization)
    chosen = [(name.strip(), variant(original, name)) for name in names]
    records = []
    for b in batches:
        for s in contexts:
            base = 0
            for name, found in chosen:
                used = Precision(dtype, found.kv_cache_dtype or kv_cache_dtype, quantization)
                record = size_record(found.model, s, b, used, block_size, ranks)
                base = base or record["kv_cache_bytes"]
                reduction = base / record["kv_cache_bytes"] if record["kv_cache_bytes"] else None
                records.append({"variant": name, **record, "reduction": reduction, "held_equal": found.held})
    for text in original.notes:
        note(f"{original.name}: {text}")
    if not emit(records, output):
        from kvcalc.report.tables import SIZE_COLUMNS, show

        columns = [c for c in SIZE_COLUMNS if c.key not in ("model", "active_parameters", "fixed_bytes")]
        held = dict.fromkeys(f"{name}: equal are {found.held}" for name, found in chosen if name != "none")
        lines = [assumptions(original, precision, block_size, ranks), "reduction: against the first variant", *held]
        show(records, columns, title=original.name, notes=["", *lines])
