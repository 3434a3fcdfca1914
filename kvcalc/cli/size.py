"""`kvcalc size`."""

from itertools import product

from kvcalc.cli import options as o
from kvcalc.cli.common import MOST_ROWS, emit, lengths, parallelism, remarks
from kvcalc.model.precision import Precision


def run(
    models: o.Models,
    context: o.Contexts = "4096",
    batch_size: o.Batches = "1",
    dtype: o.Dtype = "auto",
    kv_cache_dtype: o.CacheDtype = "auto",
    quantization: o.Quant = "",
    block_size: o.BlockSize = 16,
    set_: o.Sets = [],  # noqa: B006 (typer copies it)
    explain: o.Explain = False,
    tp: o.Tp = 1,
    pp: o.Pp = 1,
    dp: o.Dp = 1,
    ep: o.Ep = 1,
    enable_expert_parallel: o.ExpertParallel = False,
    dcp: o.Dcp = 1,
    plot: o.Plot = "",
    style: o.Style = "light",
    output: o.Output = o.OutputFormat.table,
) -> None:
    """How big is the cache, beside the weights."""
    from kvcalc.errors import UserError
    from kvcalc.library.edit import edited
    from kvcalc.library.load import load_model
    from kvcalc.model.size import assumptions, size_record

    precision = Precision(dtype, kv_cache_dtype, quantization)
    ranks = parallelism(tp, pp, dp, ep, enable_expert_parallel, dcp)
    contexts, batches = lengths(context, "context"), lengths(batch_size, "batch size")
    if len(models) * len(contexts) * len(batches) > MOST_ROWS:
        raise UserError(f"more than {MOST_ROWS:,} rows asked for")
    chosen = [edited(load_model(name), set_) for name in models]
    records = [size_record(m, s, b, precision, block_size, ranks) for m in chosen for b in batches for s in contexts]
    for model in chosen:
        remarks(model, max(contexts))
    if plot:
        from kvcalc.report.figures import cache_vs_context
        from kvcalc.report.plots import save

        last = max(*contexts, 1024)
        save(cache_vs_context([(m.name, m, precision) for m in chosen], None, batches[0], last), plot, style)
        if plot == "-":
            return
    if explain:
        from kvcalc.report.explain import explain_size

        for model, b, s in product(chosen, batches, contexts):
            print(explain_size(model, s, b, precision, block_size, ranks))
        return
    if not emit(records, output):
        from kvcalc.report.tables import SIZE_COLUMNS, show

        shared = {assumptions(m, precision, block_size, ranks) for m in chosen}
        lines = [f"{m.name}: {assumptions(m, precision, block_size, ranks)}" for m in chosen] if len(shared) > 1 else shared
        show(records, SIZE_COLUMNS, notes=["", *lines, "1 GiB = 2^30 bytes; `--explain` shows the formulas"])
