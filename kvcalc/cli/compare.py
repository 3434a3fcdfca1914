"""`kvcalc compare`."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvcalc.cli import options as o
from kvcalc.cli.common import MOST_ROWS, basis, calibration, emit, lengths, parallelism, remarks
from kvcalc.model.precision import Precision
from kvcalc.model.size import assumptions

if TYPE_CHECKING:
    from kvcalc.gpu.spec import Gpu
    from kvcalc.model.spec import Model
    from kvcalc.planning.variants import Variant

DEFAULT = "mha,none,mqa,mla,dsa"
VARIANTS = (
    "Attention to swap in, the first being the reference: none, mha, mqa, gqa:8, mla:512+64, dsa:512+64+128@2048, "
    "window:4096, hybrid:5/window:4096, cla:2, evict:4096; / stacks them."
)


def run(
    model: o.OneModel,
    variants: Annotated[str, typer.Option("--variants", help=VARIANTS)] = "",
    gpu: o.Gpus = "h100",
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
    mla_form: o.MlaForm = "auto",
    stack: o.Stack = "",
    calibration_from: o.CalibrationFrom = "",
    plot: o.Plot = "",
    style: o.Style = "light",
    output: o.Output = o.OutputFormat.table,
) -> None:
    """The same model with other attention."""
    from kvcalc.errors import UserError
    from kvcalc.library.edit import edited
    from kvcalc.library.load import load_gpu, load_model
    from kvcalc.planning.comparison import compare_records
    from kvcalc.planning.variants import variant
    from kvcalc.timing.deployment import Deployment

    ranks = parallelism(tp, pp, dp, ep, enable_expert_parallel, dcp)
    contexts, batches, names = lengths(context, "context"), lengths(batch_size, "batch size"), (variants or DEFAULT).split(",")
    if len(names) * len(contexts) * len(batches) > MOST_ROWS // 50:
        raise UserError(f"more than {MOST_ROWS // 50:,} rows asked for")
    original, card = edited(load_model(model), set_), load_gpu(gpu)
    precision = Precision(dtype, kv_cache_dtype, quantization)
    laws = calibration(card, stack, calibration_from)
    chosen = [(name.strip(), variant(original, name)) for name in names]
    deployment = Deployment(original, card, precision, ranks, mla_form, laws, calibration_from)
    records = compare_records(chosen, deployment, contexts, batches, block_size)
    remarks(original, max(contexts))
    if plot:
        from kvcalc.report.figures import cache_vs_context
        from kvcalc.report.plots import save

        named = [(n, v.model, Precision(dtype, v.kv_cache_dtype or kv_cache_dtype, quantization)) for n, v in chosen]
        save(cache_vs_context(named, card, batches[0], max(contexts[-1], 131072)), plot, style)
    if not emit(records, output) and plot != "-":
        _tables(
            original,
            card,
            chosen,
            records,
            f"{assumptions(original, precision, block_size, ranks)}; {basis(card, laws, calibration_from)}",
        )


def _tables(
    original: "Model", card: "Gpu", chosen: "list[tuple[str, Variant]]", records: list[dict[str, Any]], words: str
) -> None:
    from kvcalc.report.tables import COMPARE_COLUMNS, QUALITY_COLUMNS, error_bar, show

    lines = [
        words + error_bar(records),
        f"less: against {records[0]['reference']}; attention FLOP/B: of the cache it reads; step: least time on {card.name}; fits: beside the weights alone",
    ]
    show(records, COMPARE_COLUMNS, title=f"{original.name} on {card.name}, decode", notes=["", *lines, ""])
    once = {record["variant"]: record for record in records}
    show(list(once.values()), QUALITY_COLUMNS, title="What was held equal, and what is known of quality")
