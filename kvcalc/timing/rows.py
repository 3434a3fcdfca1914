"""Read measured rows: the CSV format that `validate` and `calibrate` read and `measure` writes.

A file has rows of one operation, which the file name gives, or of several, which a column `op`
names. Columns of other operations are empty. Unknown columns are copied to the output. `system`,
`backend` and `backend_version` mean `gpu`, `framework` and `version`. Whole numbers may be written
`128.0`. Times are microseconds of one call on one GPU. Serving rows have milliseconds.

`cost_of` gives the minimum FLOPs and bytes of a measured operation, for the bound of each row.
"""

import csv
from collections.abc import Callable, Sequence
from functools import cache
from io import StringIO
from math import isfinite, isnan, nan
from pathlib import Path
from typing import NamedTuple

from kvcalc.arithmetic import minimum, where
from kvcalc.errors import UserError, list_few, nearest, printable
from kvcalc.layers.attention.sparse import Sparse
from kvcalc.layers.cost import Cost, product_flops, triangle
from kvcalc.library import presets
from kvcalc.library.files import read_text
from kvcalc.library.load import read
from kvcalc.model.model import Model
from kvcalc.storage.formats import first_words
from kvcalc.timing.kernel_models.fused_moe import TILE_ROWS
from kvcalc.timing.kernel_models.kernel_model import Array, Arrays, attended_tokens
from kvcalc.timing.kernel_models.mla import SCALE, WIDTHS, weights_of

BoundedCost = tuple[Cost, str]  # a minimum cost, and the dtype of its products


def cost_of(op: str, kind: str, shape: Arrays) -> BoundedCost:
    """Return (minimum FLOPs and bytes of measured kernels, dtype of their matrix products).

    They give the datasheet bound of each row, which is one measured call.

    Args:
        op: Name of the operation, such as `gemm`; not a layer or a server.
        kind: Data types of the rows, such as `bfloat16` or `bfloat16/fp8`.
        shape: One array [rows] for each size of the operation, such as m, n and k of a GEMM.
    """
    cost = OPERATIONS[op].cost
    assert cost, "layers and servers have no rule"
    return cost(kind, *shape)


def _element_bytes(kind: str) -> float:
    """Return the bytes of one element in the narrowest dtype of a kind, without scales."""
    if kind.startswith(("int4", "w4", "nvfp4", "mxfp4")):
        return 0.5
    return 1 if "fp8" in kind else 2


def _product(kind: str, flops: Array, moved: Array) -> BoundedCost:
    """Return the cost of matrix products in the fastest dtype in which a kernel may multiply."""
    dtype = "fp8" if "fp8" in kind else "bf16"
    if kind.startswith(("nvfp4", "mxfp4")):
        dtype = "fp4"
    return Cost(flops=flops, activation_bytes=moved), dtype


def _attention(
    kind: str, heads: Array, width: Array, pairs: Array, queries: Array, cache_bytes: Array
) -> BoundedCost:
    """Return the cost of attention with 16-bit queries and outputs.

    Args:
        kind: Data type of the products. A kernel may multiply an fp8 cache in fp8.
        width: Width of a key and a value together.
        pairs: (query, key) pairs of all sequences.
        queries: Query tokens of all sequences.
        cache_bytes: Bytes of keys and values that are read and written.
    """
    moved = 2 * queries * heads * width + cache_bytes
    cost = Cost(flops=product_flops(pairs, heads, width), activation_bytes=moved)
    return cost, "fp8" if kind.endswith("fp8") else "bf16"


def _gemm(kind: str, m: Array, n: Array, k: Array) -> BoundedCost:
    return _product(
        kind, product_flops(m, k, n), (m + n) * k * _element_bytes(kind) + 2 * m * n
    )


def _decode(kind: str, *shape: Array) -> BoundedCost:
    batch, q_heads, kv_heads, head_dim, kv_len, window = shape
    pairs = batch * attended_tokens(kv_len, window)
    read = 2 * pairs * kv_heads * head_dim * _element_bytes(kind)
    return _attention(kind, q_heads, 2 * head_dim, pairs, batch, read)


def _prefill(kind: str, *shape: Array) -> BoundedCost:
    """Return the cost of prompts: 16-bit keys and values are read, and written to the cache."""
    batch, q_heads, kv_heads, head_dim, length, window = shape
    computed, _, cached = kind.partition("/")
    limit = attended_tokens(length, window)
    pairs = batch * (limit * (limit + 1) / 2 + (length - limit) * limit)
    tokens = batch * length
    moved = tokens * 2 * kv_heads * head_dim * (2 + _element_bytes(cached))
    return _attention(computed, q_heads, 2 * head_dim, pairs, tokens, moved)


def _mla_decode(kind: str, batch: Array, heads: Array, length: Array) -> BoundedCost:
    """Return the cost of the absorbed form: keys of 576 and values of 512 elements."""
    pairs = batch * length
    return _attention(kind, heads, 576 + 512, pairs, batch, pairs * 576 * _element_bytes(kind))


def _mla_prefill(kind: str, batch: Array, heads: Array, length: Array) -> BoundedCost:
    """Return the cost of the expanded form: keys of 192 and values of 128 elements per head."""
    tokens, width = batch * length, 192 + 128
    return _attention(
        kind, heads, width, batch * triangle(length), tokens, 2 * tokens * heads * width
    )


def _allreduce(kind: str, ranks: Array, size: Array) -> BoundedCost:
    return Cost(network_bytes=2 * (ranks - 1) / ranks * size), ""


def _moe(kind: str, *shape: Array) -> BoundedCost:
    """Return the cost of the products of all experts of a rank. Without given loads, routing is
    uniform."""
    tokens, hidden, inter, top, experts, tp, ep, *loads = shape
    rows = tokens * top / ep
    touched = experts / ep * (1 - (1 - minimum(top / experts, 1)) ** tokens)
    if loads:
        rows = where(loads[0] > 0, loads[0], rows)
        touched = where(loads[1] > 0, loads[1], touched)
    elements = (2 if kind.endswith("ungated") else 3) * hidden * inter / tp
    moved = touched * elements * _element_bytes(kind) + 4 * minimum(rows, tokens) * hidden
    return _product(kind, 2 * rows * elements, moved)


def _sparse_module(kind: str, *shape: Array) -> BoundedCost:
    """Return the cost of projections, absorbed matrices, all index keys and the selected
    latents."""
    batch, heads, length, _, _, latent, rope, *_, index_heads, index_width, top = shape
    cached, _, stored = kind.partition("/")
    weights, absorbed = weights_of(heads, *shape[3:11])
    pairs = batch * minimum(length, top)
    scanned = where(index_heads > 0, batch * length, 0.0)
    flops = (
        product_flops(batch, 1, weights + absorbed)
        + product_flops(pairs, heads, 2 * latent + rope)
        + product_flops(scanned, index_heads, index_width)
    )
    moved = (
        weights * _element_bytes(stored)
        + 2 * absorbed
        + pairs * (latent + rope) * _element_bytes(cached)
        + scanned * (index_width + SCALE)
    )
    return _product(stored, flops, moved)


def _mla_module(kind: str, batch: Array, heads: Array, length: Array) -> BoundedCost:
    """Return the cost of DeepSeek-V3's MLA module: a sparse module that has no indexer and reads
    all tokens.
    """
    widths = (batch * 0 + width for width in (*WIDTHS, 0, 0))
    return _sparse_module(kind, batch, heads, length, *widths, length)


@cache
def served_model(path: str) -> Model | None:
    """Return the model preset for the path of a measured model; None if no preset matches.

    A preset matches if the path's last component begins with the name in the preset's
    huggingface_id. So the path of an instruction-tuned or fp8 copy gives the preset of its base
    model. If several presets match, the longest name wins. If their names differ only in dots
    (OPT-1.3B, OPT-13B), the name with the path's dots wins.

    Args:
        path: Model ID or path in a measurement file, such as `meta-llama/Llama-3.1-8B-Instruct`.
    """
    name = path.rsplit("/", 1)[-1]
    best = None
    best_rank = (0, False)
    for file in presets.preset_files("models").values():
        try:
            model = read(file, Model)
        except UserError:
            continue
        own_name = (model.huggingface_id or "").rsplit("/", 1)[-1]
        prefix = presets.key(own_name)
        has_dots = presets.key(name, dots=True).startswith(presets.key(own_name, dots=True))
        rank = len(prefix), has_dots
        if presets.key(name).startswith(prefix) and rank > best_rank and prefix:
            best = model
            best_rank = rank
    return best


@cache
def layer_kind(path: str, name: str) -> str:
    """Return the name of the kind of layer that was measured, such as `full`, after checking it.

    A model has one or more kinds of layers. Layers of one kind are equal. The result is `name`, or
    for '' the kind with the most layers.

    Args:
        path: Model ID or path in a measurement file, such as `meta-llama/Llama-3.1-8B-Instruct`.
        name: Name of the kind in the measurement file; '' if the file names none.

    Raises:
        ValueError: No preset matches the path, or the model has no such kind of layer.
    """
    model = served_model(path)
    if model is None:
        raise ValueError(f"model {path!r} is not a preset" if path else "model is empty")
    if name and name not in model.kinds:
        raise ValueError(f"{model.name} has no layer {name!r} but {list_few(model.kinds)}")
    return name or max(model.counts, key=model.counts.__getitem__)


@cache
def _module_sizes(path: str) -> list[float]:
    """Return the sizes of a model's sparse attention. They are hidden size, q_lora_rank,
    kv_lora_rank, RoPE, NoPE and value widths, index heads and their width, and top-k. Raises
    ValueError if no preset is of that model.
    """
    if model := served_model(path):
        for part in model.parts:
            if isinstance(part, Sparse) and part.indexer and part.q_lora_rank:
                sizes = (getattr(part, field) for field in MODULE_FIELDS.split())
                return [float(size) for size in (model.hidden_size, *sizes)]
    raise ValueError(
        f"model {path!r} is no preset with sparse attention" if path else "model is empty"
    )


MODULE_FIELDS = (
    "q_lora_rank kv_lora_rank qk_rope_head_dim qk_nope_head_dim v_head_dim index_n_heads "
    "index_head_dim index_topk"
)
INDEX_HEADS = -3  # index in the shape of a sparse module
MAX_BYTES = 1 << 30
MAX_ROWS = 500_000
MAX_LINES = 5  # lines in a remark
MAX_COUNT = 10**15
NUMBER = "a number from 0 to 10^15"
MIN_US, MAX_US = 1e-3, 1e12
# A name of a column, stack or dtype, and other spellings of it.
ALIASES = first_words("""
    gpu        system
    framework  backend
    version    backend_version
""")
STACKS = first_words("trtllm tensorrt_llm tensorrt-llm trt-llm trt_llm")
DTYPES = first_words("""
    bfloat16  bf16 fp16 float16 half
    fp8       fp8_e4m3 float8 float8_e4m3fn e4m3
""")


class Operation(NamedTuple):
    """A measured operation, such as `gemm`: the CSV columns of its rows, and its minimum cost.

    `counts`, `dtypes`, `optional` and `means` are strings of CSV column names, separated by spaces.

    Attributes:
        counts: Required columns of whole numbers of at least 1, such as `m n k`.
        dtypes: Columns of data types, such as `kv_dtype`.
        cost: Function of the data types (text) and one array [rows] per column. It returns the
            minimum FLOPs and bytes of a kernel, and the dtype of its matrix products. None for
            layers and servers, which have no such function.
        optional: Columns of whole numbers that may be 0 or missing.
        means: Columns of numbers that may be 0 or missing and need not be whole.
    """

    counts: str
    dtypes: str
    cost: Callable[..., BoundedCost] | None = None
    optional: str = ""
    means: str = ""


_SEQUENCES = "batch q_heads kv_len"
_SERVER = "isl osl batch_size tp_size"
OPERATIONS = {
    "gemm": Operation("m n k", "dtype", _gemm),
    "decode_attention": Operation(
        "batch q_heads kv_heads head_dim kv_len", "kv_dtype", _decode, "window"
    ),
    "prefill_attention": Operation(
        "batch q_heads kv_heads head_dim seq_len", "attn_dtype kv_dtype", _prefill, "window"
    ),
    "mla_decode": Operation(_SEQUENCES, "kv_dtype", _mla_decode),
    "mla_decode_module": Operation(_SEQUENCES, "kv_dtype gemm_dtype", _mla_module),
    "mla_prefill": Operation("batch q_heads seq_len", "kv_dtype", _mla_prefill),
    "allreduce": Operation("num_gpus bytes", "dtype", _allreduce),
    "moe": Operation(
        "tokens hidden inter topk experts moe_tp moe_ep",
        "dtype",
        _moe,
        means="rank_rows experts_touched " + " ".join(f"tiles_{m}" for m in TILE_ROWS),
    ),
    "dsa_decode_module": Operation(_SEQUENCES, "kv_dtype gemm_dtype", _sparse_module),
    "layer": Operation("batch query_len kv_len", "dtype", None, "tp_size ep_size"),
    "e2e_dense": Operation(_SERVER, "gemm_quant_mode"),
    "e2e_moe": Operation(_SERVER, "gemm_quant_mode", None, "ep_size"),
}
SERVING = ("e2e_dense", "e2e_moe")


class ServedTimes(NamedTuple):
    """Measured or simulated mean times and throughput of a server; NaN if unknown.

    Attributes:
        tpot_us: Microseconds per output token after the first (TPOT), as a mean over requests.
        ttft_us: Microseconds to the first token (TTFT), as a mean over requests.
        tokens_per_s: Output tokens per second of the whole server.
    """

    tpot_us: float = nan
    ttft_us: float = nan
    tokens_per_s: float = nan


class MeasuredRow(NamedTuple):
    """One valid row of a CSV file of measurements: a kernel, a layer or a server.

    Attributes:
        row_index: Index of the row among all rows of its file, valid or not, from 0.
        op: Name of the operation, such as `gemm`.
        gpu: Name of the GPU in the row; '' if missing.
        framework: Name of the software stack, such as `vllm`; '' if missing.
        dtype: Data types in the row, such as `bfloat16` or `bfloat16/fp8`.
        shape: Sizes of the call, in the order of the operation's columns, such as m, n and k:
            required counts, then optional counts, then means. Rows of a sparse-attention module
            also have the sizes from its model. If the kernel skips the indexer, the number of index
            heads is 0.
        time_us: Measured microseconds: of one call of a kernel or layer, or per output token of a
            server.
        model: Model ID or path; '' if missing.
        version: Version of the framework; '' if missing.
        kernel: Kernel family or name. For a measured layer, the kind of the layer, such as `full`.
        cache: Data type of the KV cache of a measured layer or server; '' if unknown.
        is_excluded: Whether the row is an artefact of the measurement or hits a prefix cache. Such
            rows are not used in fits.
        client: Name of the benchmark that sent requests to a server; '' for others.
        ttft_us: Mean microseconds to the first token of a server; NaN for others.
        prefix_cached: Whether the requests to a server hit its prefix cache.
        bound_us: Lower bound of the time in microseconds that the file states, from measured peak
            rates of the machine; NaN if the file states none.
    """

    row_index: int
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
    is_excluded: bool = False
    client: str = ""
    ttft_us: float = nan
    prefix_cached: bool = False
    bound_us: float = nan

    @property
    def served(self) -> ServedTimes:
        """Return the measured mean times [µs] and tokens/s of a server, if the row is of a server.

        Do not use it for rows of kernels or layers: it then gives meaningless values or an error.

        Tokens/s are derived from the others: clients · output tokens / (TTFT + (output tokens − 1)
        · TPOT). TTFT is the time to the first token, TPOT the time per further token. TTFT and
        tokens/s are NaN if TTFT was not measured.
        """
        output, clients = self.shape[1:3]
        total_us = self.ttft_us + (output - 1) * self.time_us
        return ServedTimes(self.time_us, self.ttft_us, 1e6 * clients * output / total_us)


class MeasurementFile(NamedTuple):
    """The contents of a CSV file of measured kernels, layers or servers.

    Attributes:
        path: Path of the file.
        header: Names of the columns.
        cells: Cells of every row as text, also of invalid rows.
        lines: Line number in the file of every row, in the order of `cells`.
        rows: The valid rows, parsed.
        invalid: Line and problem of each invalid row, such as `line 3: m is empty`.
    """

    path: str
    header: tuple[str, ...]
    cells: list[list[str]]
    lines: list[int]
    rows: list[MeasuredRow]
    invalid: list[str]

    @property
    def remark(self) -> str:
        """Return a sentence on the invalid rows: their number, and the first few problems.

        The result is '' if all rows are valid.
        """
        count = len(self.invalid)
        if not count:
            return ""
        more = f"; and {count - MAX_LINES:,} more" if count > MAX_LINES else ""
        problems = f"{'; '.join(self.invalid[:MAX_LINES])}{more}"
        return f"{self.path}: {count:,} row{'s' * (count != 1)} cannot be read ({problems})"


def read_rows(path: Path) -> MeasurementFile:
    """Read and parse a CSV file of measured kernels, layers or servers.

    Invalid rows are listed in the result and raise no error.

    Args:
        path: Path of the CSV file. A column `op` names the operation of each row. Without it, the
            file is named after the operation, such as `gemm.csv`.

    Raises:
        UserError: The file is unreadable, too large or not CSV. Or it names no operation, or lacks
            a column that its operation needs.
    """

    text = read_text(path, MAX_BYTES)
    if "\0" in text:
        raise UserError("is not CSV text: it has a NUL character", where=str(path))
    reader = csv.reader(StringIO(text, newline=""))
    try:
        header = tuple(name.strip() for name in next(reader, []))
        columns: dict[str, int] = {}  # the first of equal names counts
        for index, name in enumerate(map(str.lower, header)):
            columns.setdefault(ALIASES.get(name, name), index)
        if columns.keys() <= {""}:
            raise UserError("is empty: a header of column names is missing", where=str(path))
        file_op = "" if "op" in columns else path.stem.lower()
        if file_op and file_op not in OPERATIONS:
            hint = (
                f"Name the file {{op}}.csv or add a column op. {nearest(file_op, OPERATIONS)}"
            )
            text = "has no column op, and its name is not an operation"
            raise UserError(text, hint, str(path))
        counts = OPERATIONS[file_op].counts.split() if file_op else ()
        missing = [column for column in counts if column not in columns]
        if missing:
            text = f"has no column {', '.join(missing)}, which rows of {file_op} need"
            raise UserError(text, where=str(path))
        table = MeasurementFile(str(path), header, [], [], [], [])
        for cells in filter(None, reader):
            if len(table.cells) == MAX_ROWS:
                raise UserError(f"has more than {MAX_ROWS:,} rows", "Split it", str(path))
            values = {name: cells[i].strip() for name, i in columns.items() if i < len(cells)}
            try:
                if any(cells[len(header) :]):
                    raise ValueError(f"has {len(cells)} fields, the header {len(header)}")
                table.rows.append(_parse_row(len(table.cells), values, file_op))
            except ValueError as error:
                table.invalid.append(f"line {reader.line_num}: {printable(error)}")
            table.cells.append(cells[: len(header)])
            table.lines.append(reader.line_num)
    except csv.Error as error:
        raise UserError(
            f"is not CSV: {error}", where=f"{path}, line {reader.line_num}"
        ) from None
    return table


def columns_of(rows: Sequence[MeasuredRow]) -> Arrays:
    """Return the sizes of measured calls as arrays [rows], one for each number in a row's `shape`.

    Example: rows of GEMMs give the arrays of m, of n and of k.

    Args:
        rows: Rows of one operation.
    """
    import numpy as np

    return tuple(np.array(column) for column in zip(*(row.shape for row in rows)))


def _parse_row(index: int, values: dict[str, str], file_op: str) -> MeasuredRow:
    """Return the row with these cells by column. Raises ValueError with the first problem."""

    def cell(name: str) -> str:
        return values.get(name, "")

    def time_us(name: str, unit_us: float = 1) -> float:
        if not cell(name):
            return nan
        return unit_us * parse_number(cell(name), name, MIN_US, MAX_US, "a time above zero")

    op = file_op or cell("op").lower()
    operation = OPERATIONS.get(op)
    if operation is None:
        raise ValueError(f"op {op!r} is none of {', '.join(OPERATIONS)}")
    is_served = op in SERVING
    names = operation.dtypes.split()
    dtypes = [DTYPES.get(d, d) for d in (cell(name).lower() for name in names)]
    if not is_served and not all(dtypes):
        raise ValueError(f"{names[dtypes.index('')]} is empty")
    model = cell("model_path") or cell("model")
    kernel = (cell("kernel_family") or cell("kernel")).lower()
    if op == "layer":
        kernel = layer_kind(model, cell("layer"))
    shape = _parse_shape(operation, values)
    if op == "dsa_decode_module":
        shape += _module_sizes(model)
        if "skip" in kernel:
            shape[INDEX_HEADS] = 0.0
    measured_us = time_us("time_us")
    if is_served and cell("silicon_tpot_ms"):
        measured_us = time_us("silicon_tpot_ms", 1e3)
    if isnan(measured_us):
        raise ValueError("time_us is empty")
    framework = cell("framework").lower()
    is_prefix_cached = cell("prefix_cached") in ("1", "1.0")
    return MeasuredRow(
        row_index=index,
        op=op,
        gpu=cell("gpu"),
        framework=STACKS.get(framework, framework),
        dtype="/".join(dtypes) or "bfloat16",
        shape=tuple(shape),
        time_us=measured_us,
        model=model,
        version=cell("version"),
        kernel=kernel,
        cache=cell("kv_cache_dtype").lower(),
        is_excluded=cell("odd") == "1" or is_prefix_cached,
        client=cell("client").lower(),
        ttft_us=time_us("silicon_ttft_ms", 1e3) if is_served else nan,
        prefix_cached=is_prefix_cached,
        bound_us=time_us("bound_us"),
    )


def _parse_shape(operation: Operation, values: dict[str, str]) -> list[float]:
    """Return the counts, optional counts and means of a row. Raises ValueError with the first
    problem."""
    shape = [parse_number(values.get(name, ""), name) for name in operation.counts.split()]
    for names, meaning in ((operation.optional, ""), (operation.means, NUMBER)):
        for name in names.split():
            shape.append(parse_number(values.get(name) or "0", name, 0, meaning=meaning))
    if "query_len" in operation.counts and shape[1] > shape[2]:
        raise ValueError(
            f"query_len {shape[1]:.0f} is more than kv_len {shape[2]:.0f}, which counts the "
            "new tokens too"
        )
    return shape


def parse_number(
    text: str, name: str, minimum: float = 1, maximum: float = MAX_COUNT, meaning: str = ""
) -> float:
    """Parse a finite number from a cell of a CSV file.

    Args:
        text: Text of the cell.
        name: Name of the column, with which the error message begins.
        minimum: Smallest valid number.
        maximum: Largest valid number.
        meaning: Description of valid numbers for the error message, such as `a time above zero`. If
            it is '', the number must be whole, such as `128` or `128.0`.

    Raises:
        ValueError: The text is not such a number. The message states the problem.
    """
    try:
        value = float(text)
    except ValueError:
        value = nan
    if not isfinite(value):
        raise ValueError(f"{name} {text!r} is not a number" if text else f"{name} is empty")
    if not (meaning or value.is_integer()) or not minimum <= value <= maximum:
        meaning = meaning or f"a whole number from {minimum} to 10^15"
        raise ValueError(f"{name} {text!r} is not {meaning}")
    return value
