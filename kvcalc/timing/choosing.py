"""Which measured rows a calibration is fitted on: those of one GPU under one stack; and which GPUs and stacks rows are of."""

from collections.abc import Callable, Sequence

from kvcalc.errors import UserError
from kvcalc.gpu.spec import Gpu
from kvcalc.timing.calibration import gpu_named
from kvcalc.timing.rows import MeasuredRow, Table

# Latent-attention kernels that vLLM 0.24 shares with other stacks, as their rows name them: (stack, kernel, cache). On
# Hopper FlashAttention-3 and FlashMLA, on Blackwell the kernels of TensorRT-LLM that FlashInfer ships.
SHARED_LATENT_KERNELS = {
    "Hopper": (("sglang", "flash_attention", "bfloat16"), ("trtllm", "default", "fp8")),
    "Blackwell": (("sglang", "trtllm_mla", "bfloat16"), ("sglang", "trtllm_mla", "fp8")),
}


def stacks_among(tables: Sequence[Table]) -> list[tuple[Gpu, str]]:
    """Every known GPU with each framework that rows of it name, in order of their names."""
    named = {(row.gpu, row.framework) for table in tables for row in table.rows if row.gpu and row.framework}
    found = {(gpu.name, stack): gpu for name, stack in named if (gpu := _named(name))}
    return [(gpu, stack) for (_, stack), gpu in sorted(found.items(), key=lambda item: item[0])]


def chosen_rows(tables: Sequence[Table], gpu: Gpu, stack: str, note: Callable[[str], None]) -> list[MeasuredRow]:
    """The rows of `gpu` and `stack` among the tables; what is left out is noted. Rows that name no GPU or framework count.

    All-reduces depend on the links alone, so those of GPUs with the same links count too. So do rows of latent attention
    of another stack that runs the same kernel, where the stack has none of its own.

    Where no row names the stack but all name one framework, that framework's rows are meant. Raises UserError where the
    framework is in doubt, or no row is left.
    """
    rows = [row for table in tables for row in table.rows]
    for table in tables:
        if table.broken:
            named = "; ".join(f"line {b.line}: {b.why}" for b in table.broken[:3])
            note(f"{table.path}: {len(table.broken):,} rows cannot be read ({named}{' …' if len(table.broken) > 3 else ''})")
    meant = {name: _named(name) if name else gpu for name in {row.gpu for row in rows}}
    same = {name: found is not None and found.name == gpu.name for name, found in meant.items()}
    linked = {name for name, found in meant.items() if not same[name] and found and _same_links(found, gpu)}
    here = [row for row in rows if same[row.gpu] or (row.op == "allreduce" and row.gpu in linked)]
    if any(not same[row.gpu] for row in here):
        note(f"all-reduces of {', '.join(sorted(linked))} count too: the links are the same")
    others = len(rows) - len(here)
    if others:
        note(f"{others:,} rows of other GPUs are left out: {', '.join(sorted(n for n, is_it in same.items() if not is_it))}")
    frameworks = {row.framework for row in here} - {""}
    wanted = stack if stack in frameworks or len(frameworks) != 1 else next(iter(frameworks))
    if frameworks and wanted not in frameworks:
        hint = f"Name one of them: {', '.join(sorted(frameworks))}"
        raise UserError(f"the rows are of several frameworks, none of them {stack!r}", hint=hint)
    used = [row for row in here if row.framework in ("", wanted)]
    if not used:
        raise UserError(f"no row of {gpu.name} can be used", ", ".join(table.path for table in tables))
    lent = [] if any(row.op == "mla_decode" for row in used) else _latent_rows(here, gpu, wanted)
    if lent:
        note(f"{len(lent):,} rows of latent attention under {', '.join(sorted({row.framework for row in lent}))} count too: "
             "the kernels are the same")  # fmt: skip
    if len(used) + len(lent) < len(here):
        note(f"{len(here) - len(used) - len(lent):,} rows of other frameworks are left out")
    return [*used, *(row._replace(version="") for row in lent)]


def _latent_rows(rows: Sequence[MeasuredRow], gpu: Gpu, stack: str) -> list[MeasuredRow]:
    """Return the rows of latent attention in decode that other stacks measured with this stack's kernels."""
    architecture = next((name for name in SHARED_LATENT_KERNELS if gpu.architecture.startswith(name)), "")
    shared = SHARED_LATENT_KERNELS.get(architecture, ()) if stack == "vllm" else ()
    return [row for row in rows if row.op == "mla_decode" and (row.framework, row.kernel, row.dtype) in shared]


def _named(name: str) -> Gpu | None:
    try:
        return gpu_named(name)
    except UserError:
        return None


def _same_links(a: Gpu, b: Gpu) -> bool:
    return bool(a.link_bytes_per_s) and (a.link_bytes_per_s, a.link_domain) == (b.link_bytes_per_s, b.link_domain)
