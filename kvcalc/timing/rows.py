"""Read measured rows: the CSV format that `validate` and `calibrate` read and `measure` writes.

A file has rows of one operation, which its name gives, or of several, which a column `op` names.
Columns of other operations are empty. Unknown columns are copied to the output. `system`, `backend`
and `backend_version` mean `gpu`, `framework` and `version`. Whole numbers may be written `128.0`.
Times are microseconds of one call on one GPU; serving rows have milliseconds.

`cost_of` gives the minimum FLOPs and bytes of a measured operation, for the bound of each row.
"""

import csv
import math
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

from kvcalc.errors import UserError, few, nearest, printable
from kvcalc.layers.attention.sparse import Sparse
from kvcalc.layers.cost import Cost
from kvcalc.library import presets
from kvcalc.library.files import read_lines
from kvcalc.library.load import read
from kvcalc.model.model import Model
from kvcalc.timing.kernel_models.fused_moe import TILE_ROWS
from kvcalc.timing.kernel_models.kernel_model import Array, attended
from kvcalc.timing.kernel_models.mla import SCALE, WIDTHS, weights_of


def cost_of(op: str, kind: str, shape: tuple[Array, ...]) -> tuple[Cost, str] | None:
    """Return the minimum cost of measured operations and the dtype of their products; None for an
    unknown operation."""
    cost = _COSTS.get(op)
    return cost(kind, *shape) if cost else None


def _cost(flops: Array, moved: Array) -> Cost:
    return Cost(flops=flops, activation_bytes=moved)


def _element(kind: str) -> float:
    """Return the minimum bytes of a value, without scales."""
    if kind.startswith(("int4", "w4", "nvfp4", "mxfp4")):
        return 0.5
    return 1 if "fp8" in kind else 2


def _products(kind: str) -> str:
    """Return the dtype of the products, the fastest that a kernel may use."""
    if kind.startswith(("nvfp4", "mxfp4")):
        return "fp4"
    return "fp8" if "fp8" in kind else "bf16"


def _attends(kind: str) -> str:
    """Return the dtype of attention. A kernel may multiply an fp8 cache in fp8."""
    return "fp8" if kind.endswith("fp8") else "bf16"


def _gemm_cost(kind: str, m: Array, n: Array, k: Array) -> tuple[Cost, str]:
    return _cost(2 * m * n * k, (m + n) * k * _element(kind) + 2 * m * n), _products(kind)


def _decode_cost(
    kind: str,
    batch: Array,
    q_heads: Array,
    kv_heads: Array,
    head_dim: Array,
    length: Array,
    window: Array,
) -> tuple[Cost, str]:
    seen = attended(length, window)
    moved = (
        2 * batch * kv_heads * seen * head_dim * _element(kind) + 4 * batch * q_heads * head_dim
    )
    return _cost(4 * batch * q_heads * seen * head_dim, moved), _attends(kind)


def _prefill_cost(
    kind: str,
    batch: Array,
    q_heads: Array,
    kv_heads: Array,
    head_dim: Array,
    length: Array,
    window: Array,
) -> tuple[Cost, str]:
    limit = attended(length, window)
    pairs = batch * (limit * (limit + 1) / 2 + (length - limit) * limit)
    moved = (
        batch
        * length
        * head_dim
        * (4 * q_heads + 2 * kv_heads * (2 + _element(kind.partition("/")[2])))
    )
    return _cost(4 * pairs * q_heads * head_dim, moved), _products(kind.partition("/")[0])


def _mla_decode_cost(kind: str, batch: Array, heads: Array, length: Array) -> tuple[Cost, str]:
    moved = batch * length * 576 * _element(kind) + 2 * batch * heads * 1088
    return _cost(2 * batch * heads * length * 1088, moved), _attends(kind)


def _mla_prefill_cost(kind: str, batch: Array, heads: Array, length: Array) -> tuple[Cost, str]:
    pairs = batch * length * (length + 1) / 2
    return _cost(2 * pairs * heads * 320, 2 * batch * length * heads * 640), _attends(kind)


def _allreduce_cost(kind: str, ranks: Array, size: Array) -> tuple[Cost, str]:
    return Cost(network_bytes=2 * (ranks - 1) / ranks * size), ""


def _moe_cost(kind: str, *shape: Array) -> tuple[Cost, str]:
    """Return the cost of the products of all experts of a rank. Without given loads, routing is
    uniform."""
    import numpy as np

    tokens, hidden, inter, top, experts, tp, ep, *given = shape
    rows, touched = (
        tokens * top / ep,
        experts / ep * (1 - (1 - np.minimum(top / experts, 1)) ** tokens),
    )
    if given:
        rows, touched = (
            np.where(g > 0, g, u) for g, u in zip(given[:2], (rows, touched), strict=True)
        )
    elements = (2 if kind.endswith("ungated") else 3) * hidden * inter / tp
    moved = touched * elements * _element(kind) + 4 * np.minimum(rows, tokens) * hidden
    return _cost(2 * rows * elements, moved), _products(kind)


def _dsa_cost(kind: str, *shape: Array) -> tuple[Cost, str]:
    """Return the cost of projections, absorbed matrices, all index keys and the selected
    latents."""
    import numpy as np

    batch, heads, length, _, _, latent, rope, *_, index, width, top = shape
    weights, absorbed = weights_of(heads, *shape[3:11])
    seen = np.minimum(length, top)
    scanned = np.where(index > 0, batch * length, 0.0)
    flops = (
        2 * batch * (weights + absorbed)
        + 2 * batch * heads * seen * (2 * latent + rope)
        + 2 * scanned * index * width
    )
    cached, _, stored = kind.partition("/")
    moved = (
        weights * _element(stored)
        + 2 * absorbed
        + batch * seen * (latent + rope) * _element(cached)
    )
    return _cost(flops, moved + scanned * (width + SCALE)), _products(stored)


def _mla_module_cost(kind: str, batch: Array, heads: Array, length: Array) -> tuple[Cost, str]:
    """Return the cost of DeepSeek-V3's module: a sparse module without indexer that reads all
    tokens."""
    widths = (batch * 0 + width for width in (*WIDTHS, 0, 0))
    return _dsa_cost(kind, batch, heads, length, *widths, length)


_COSTS: dict[str, Callable[..., tuple[Cost, str]]] = {
    "gemm": _gemm_cost,
    "decode_attention": _decode_cost,
    "prefill_attention": _prefill_cost,
    "mla_decode": _mla_decode_cost,
    "mla_prefill": _mla_prefill_cost,
    "allreduce": _allreduce_cost,
    "moe": _moe_cost,
    "dsa_decode_module": _dsa_cost,
    "mla_decode_module": _mla_module_cost,
}


@cache
def served_model(path: str) -> Model | None:
    """Return the preset whose huggingface_id the path has or begins with, or None.

    So an instruction-tuned or fp8 copy finds its model. The longest name wins. Of names that differ
    only in dots (OPT-1.3B, OPT-13B), the one with the path's dots wins.
    """
    name = path.rsplit("/", 1)[-1]
    wanted, exact = presets.key(name), presets.key(name, dots=True)
    best, rank = None, (0, False)
    for result in presets.preset_files("models").values():
        model = _model_of(result)
        if model and model.huggingface_id:
            own = model.huggingface_id.rsplit("/", 1)[-1]
            known = len(presets.key(own)), exact.startswith(presets.key(own, dots=True))
            if wanted.startswith(presets.key(own)) and known > rank:
                best, rank = model, known
    return best


@cache
def layer_kind(path: str, name: str) -> str:
    """Return the kind of layer with this name; '' gives the most frequent kind. Raises ValueError
    if there is none."""
    model = served_model(path)
    if model is None:
        raise ValueError(f"model {path!r} is not a preset" if path else "model is empty")
    if name and name not in model.kinds:
        raise ValueError(f"{model.name} has no layer {name!r} but {few([*model.kinds])}")
    return name or max(model.counts, key=model.counts.__getitem__)


@cache
def sparse_module(path: str) -> tuple[float, ...] | None:
    """Return the sizes of a model's sparse attention, or None.

    They are hidden size, q_lora_rank, kv_lora_rank, RoPE, NoPE and value widths, index heads and
    their width, and top-k.
    """
    model = served_model(path)
    parts = [part for layer in model.kinds.values() for part in layer.parts] if model else []
    module = next((part for part in parts if isinstance(part, Sparse) and part.indexer), None)
    if model is None or module is None or not module.q_lora_rank:
        return None
    widths = (module.qk_rope_head_dim, module.qk_nope_head_dim, module.v_head_dim)
    index = (module.index_n_heads, module.index_head_dim, module.index_topk)
    return tuple(
        float(x)
        for x in (
            model.hidden_size,
            module.q_lora_rank,
            module.kv_lora_rank,
            *widths,
            *index,
        )
    )


def _model_of(path: Path) -> Model | None:
    try:
        return read(path, Model)
    except UserError:
        return None


MOST_BYTES = 1 << 30
BLOCK, BLOCK_TEXT = (
    10_000,
    8 << 20,
)  # rows and characters of a file that are read at a time
MOST_ROWS, MOST_TEXT, MOST_COLUMNS = 100_000, 64 << 20, 1000  # in memory at a time
INDEX_HEADS = 6  # index in the result of `sparse_module`
MOST_COUNT = 10**15
LEAST_US, MOST_US = 1e-3, 1e12
ALIASES = {"system": "gpu", "backend": "framework", "backend_version": "version"}
STACKS = {
    "tensorrt_llm": "trtllm",
    "tensorrt-llm": "trtllm",
    "trt-llm": "trtllm",
    "trt_llm": "trtllm",
}
DTYPES = {
    "bf16": "bfloat16",
    "fp16": "bfloat16",
    "float16": "bfloat16",
    "half": "bfloat16",
    "fp8_e4m3": "fp8",
    "float8": "fp8",
    "float8_e4m3fn": "fp8",
    "e4m3": "fp8",
}


class Operation(NamedTuple):
    """The columns of an operation: counts, data types, optional counts, and optional means. An
    optional value may be 0."""

    counts: tuple[str, ...]
    dtypes: tuple[str, ...]
    optional: tuple[str, ...] = ()
    means: tuple[str, ...] = ()


_LOAD = ("rank_rows", "experts_touched", *(f"tiles_{m}" for m in TILE_ROWS))
OPERATIONS = {
    "gemm": Operation(("m", "n", "k"), ("dtype",)),
    "decode_attention": Operation(
        ("batch", "q_heads", "kv_heads", "head_dim", "kv_len"),
        ("kv_dtype",),
        ("window",),
    ),
    "prefill_attention": Operation(
        ("batch", "q_heads", "kv_heads", "head_dim", "seq_len"),
        ("attn_dtype", "kv_dtype"),
        ("window",),
    ),
    "mla_decode": Operation(("batch", "q_heads", "kv_len"), ("kv_dtype",)),
    "mla_decode_module": Operation(("batch", "q_heads", "kv_len"), ("kv_dtype", "gemm_dtype")),
    "mla_prefill": Operation(("batch", "q_heads", "seq_len"), ("kv_dtype",)),
    "allreduce": Operation(("num_gpus", "bytes"), ("dtype",)),
    "moe": Operation(
        ("tokens", "hidden", "inter", "topk", "experts", "moe_tp", "moe_ep"),
        ("dtype",),
        means=_LOAD,
    ),
    "dsa_decode_module": Operation(("batch", "q_heads", "kv_len"), ("kv_dtype", "gemm_dtype")),
    "layer": Operation(("batch", "query_len", "kv_len"), ("dtype",), ("tp_size", "ep_size")),
    "e2e_dense": Operation(("isl", "osl", "batch_size", "tp_size"), ("gemm_quant_mode",)),
    "e2e_moe": Operation(
        ("isl", "osl", "batch_size", "tp_size"), ("gemm_quant_mode",), ("ep_size",)
    ),
}
SERVING = ("e2e_dense", "e2e_moe")


class MeasuredRow(NamedTuple):
    """One valid row.

    Attributes:
        at: Index of the row in its file.
        shape: Counts, optional counts, means, and the sizes of a sparse module from its model. If
            the kernel skips the indexer, the number of index heads is 0.
        time_us: Measured microseconds.
        kernel: Kernel family or name; the kind of a layer.
        cache: Dtype of a served model's cache, if given.
        odd: Whether the row is an artefact of the measurement or hits a prefix cache. Such rows are
            not used in fits.
        client: Load generator of a served run.
        ttft_us: Mean time to first token of a served run.
        prefix_cached: Whether a served run hits a prefix cache.
        bound_us: Bound on the ceilings of the machine that measured the row; NaN if not given.
    """

    at: int
    op: str
    gpu: str
    framework: str
    dtype: str
    shape: tuple[float, ...]
    time_us: float
    model: str
    version: str
    kernel: str = ""
    cache: str = ""
    odd: bool = False
    client: str = ""
    ttft_us: float = float("nan")
    prefix_cached: bool = False
    bound_us: float = float("nan")

    @property
    def tokens_per_s(self) -> float:
        """Output tokens/s of a served run: clients · output / (TTFT + (output − 1) · TPOT)."""
        output, clients = self.shape[1:3]
        return 1e6 * clients * output / (self.ttft_us + (output - 1) * self.time_us)


class ServedTimes(NamedTuple):
    """Times of a server: microseconds per output token and to the first token, means over requests,
    and tokens/s."""

    tpot_us: float = float("nan")
    ttft_us: float = float("nan")
    tokens_per_s: float = float("nan")


class Broken(NamedTuple):
    """An invalid row and its problem."""

    line: int
    why: str


class MeasurementFile(NamedTuple):
    """The rows of a file: all cells, the valid rows, and the invalid ones."""

    path: str
    header: tuple[str, ...]
    cells: list[list[str]]
    lines: list[int]
    rows: list[MeasuredRow]
    broken: list[Broken]


def read_rows(path: Path) -> MeasurementFile:
    """Return the rows of a CSV file. Raises UserError if it is unreadable, names no operation or is
    too large."""
    tables = read_blocks(path, MOST_ROWS + 1, MOST_TEXT)
    table = next(tables)
    if len(table.cells) > MOST_ROWS or next(tables, None):
        hint = "`kvcalc validate` takes any number"
        raise UserError(
            f"has more than {MOST_ROWS:,} rows, or {MOST_TEXT:,} characters of them",
            str(path),
            hint,
        )
    return table


def read_blocks(
    path: Path, most: int = BLOCK, most_text: int = BLOCK_TEXT
) -> Iterator[MeasurementFile]:
    """Yield the rows in tables of at most `most` rows and about `most_text` characters, at least
    one table."""
    text = _RowText(path)
    reader = csv.reader(text)
    try:
        header = tuple(name.strip() for name in next(reader, []))
        if len(header) > MOST_COLUMNS:
            raise UserError(
                f"has {len(header):,} columns; more than {MOST_COLUMNS:,} are not read",
                str(path),
            )
        columns = {
            ALIASES.get(name.lower(), name.lower()): i
            for i, name in reversed(list(enumerate(header)))
        }
        known = _known_operation(path, columns)
        table = MeasurementFile(str(path), header, [], [], [], [])
        for cells in reader:
            if len(table.cells) == most or (text.taken > most_text and table.cells):
                yield table
                table, text.taken = (
                    MeasurementFile(str(path), header, [], [], [], []),
                    0,
                )
            if cells:
                _take(table, cells, reader.line_num, columns, known)
    except csv.Error as error:
        raise UserError(f"is not CSV: {error}", f"{path}, line {reader.line_num}") from None
    yield table


class _RowText:
    """The lines of a file; `taken` counts their characters. Raises UserError for a NUL
    character."""

    def __init__(self, path: Path) -> None:
        self.taken, self._path = 0, path
        self._lines = read_lines(path, MOST_BYTES)

    def __iter__(self) -> Iterator[str]:
        for line in self._lines:
            self.taken += len(line)
            if "\0" in line:
                raise UserError("is not CSV text: it has a NUL character", str(self._path))
            yield line


def header_of(path: Path) -> tuple[str, ...]:
    """Return the names of the columns. Raises UserError as `read_rows`."""
    return next(read_blocks(path, 1)).header


def _known_operation(path: Path, columns: dict[str, int]) -> str:
    """Return the operation in the file's name; '' if rows name theirs. Raises UserError if neither
    does."""
    if not columns or columns.keys() == {""}:
        raise UserError("is empty: a header of column names is missing", str(path))
    if "op" in columns:
        return ""
    name = path.stem.lower()
    if name not in OPERATIONS:
        hint = f"Name the file {{op}}.csv or add a column op. {nearest(name, OPERATIONS)}"
        raise UserError("has no column op, and its name is not an operation", str(path), hint)
    missing = [c for c in OPERATIONS[name].counts if c not in columns]
    if missing:
        raise UserError(
            f"has no column {', '.join(missing)}, which rows of {name} need", str(path)
        )
    return name


def _take(
    table: MeasurementFile,
    cells: list[str],
    line: int,
    columns: dict[str, int],
    known: str,
) -> None:
    at = len(table.cells)
    table.cells.append(cells[: len(table.header)])
    table.lines.append(line)
    try:
        if len(cells) > len(table.header) and any(cells[len(table.header) :]):
            raise ValueError(f"has {len(cells)} fields, the header {len(table.header)}")
        table.rows.append(_row(at, cells, columns, known))
    except ValueError as error:
        table.broken.append(Broken(line, printable(error)))


def _row(at: int, cells: list[str], columns: dict[str, int], known: str) -> MeasuredRow:
    def cell(name: str) -> str:
        i = columns.get(name, -1)
        return cells[i].strip() if 0 <= i < len(cells) else ""

    op = known or cell("op").lower()
    what = OPERATIONS.get(op)
    if what is None:
        raise ValueError(f"op {op!r} is none of {', '.join(OPERATIONS)}")
    serving = op in SERVING
    scale, timed = (
        (1e3, "silicon_tpot_ms") if serving and cell("silicon_tpot_ms") else (1.0, "time_us")
    )
    names = [DTYPES.get(d, d) for d in (cell(name).lower() for name in what.dtypes)]
    if not serving and not all(names):
        raise ValueError(f"{what.dtypes[names.index('')]} is empty")
    model = cell("model_path") or cell("model")
    kernel = (
        (cell("kernel_family") or cell("kernel")).lower()
        if op != "layer"
        else layer_kind(model, cell("layer"))
    )
    shape = [count(cell(name), name) for name in what.counts]
    shape += [count(cell(name) or "0", name, least=0) for name in what.optional]
    shape += [mean(cell(name) or "0", name) for name in what.means]
    shape += _module(model, kernel) if op == "dsa_decode_module" else []
    if op == "layer" and shape[1] > shape[2]:
        raise ValueError(
            f"query_len {shape[1]:.0f} is more than kv_len {shape[2]:.0f}, which counts the new "
            "tokens too"
        )
    framework = cell("framework").lower()
    return MeasuredRow(
        at,
        op,
        cell("gpu"),
        STACKS.get(framework, framework),
        "/".join(names) or "bfloat16",
        tuple(shape),
        duration(cell(timed), timed) * scale,
        model,
        cell("version"),
        kernel,
        cell("kv_cache_dtype").lower(),
        cell("odd") == "1" or cell("prefix_cached") in ("1", "1.0"),
        cell("client").lower(),
        _first_us(cell("silicon_ttft_ms")) if serving else math.nan,
        cell("prefix_cached") in ("1", "1.0"),
        duration(cell("bound_us"), "bound_us") if cell("bound_us") else math.nan,
    )


def _first_us(text: str) -> float:
    """Return the microseconds to the first token of a served run, or NaN."""
    return duration(text, "silicon_ttft_ms") * 1e3 if text else math.nan


def _module(model: str, kernel: str) -> list[float]:
    """Return the sizes of a row's sparse module. Raises ValueError if no preset is of that
    model."""
    sizes = sparse_module(model)
    if sizes is None:
        raise ValueError(
            f"model {model!r} is no preset with sparse attention" if model else "model is empty"
        )
    return [
        0.0 if i == INDEX_HEADS and "skip" in kernel else size for i, size in enumerate(sizes)
    ]


def count(text: str, name: str, least: int = 1) -> float:
    """Return a whole number such as `128` or `128.0`. Raises ValueError with the problem."""
    value = _number(text, name)
    if value != int(value) or not least <= value <= MOST_COUNT:
        raise ValueError(f"{name} {text!r} is not a whole number from {least} to 10^15")
    return value


def mean(text: str, name: str) -> float:
    """Return a number from 0. Raises ValueError with the problem."""
    value = _number(text, name)
    if not 0 <= value <= MOST_COUNT:
        raise ValueError(f"{name} {text!r} is not a number from 0 to 10^15")
    return value


def duration(text: str, name: str) -> float:
    """Return a time above zero. Raises ValueError with the problem."""
    value = _number(text, name)
    if not LEAST_US <= value <= MOST_US:
        raise ValueError(f"{name} {text!r} is not a time above zero")
    return value


def _number(text: str, name: str) -> float:
    """Return a finite number. Raises ValueError with the problem."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ValueError(f"{name} {text!r} is not a number" if text else f"{name} is empty")
    return value
