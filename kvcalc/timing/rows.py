"""Measured rows: the one CSV format that `validate` and `calibrate` read and `measure` writes.

A file holds rows of one operation, named by its stem, or of several, named by a column `op`; columns of other operations
stay empty, and columns that nobody knows pass through. `system, backend, backend_version` mean `gpu, framework, version`.
Whole numbers may read `128.0`. Times are microseconds of one call on one GPU; serving rows give milliseconds.
"""

import csv
import math
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from kvcalc.errors import UserError, nearest, printable
from kvcalc.library.files import read_lines
from kvcalc.timing.routing import TILE_ROWS
from kvcalc.timing.served import layer_kind, sparse_module

MOST_BYTES = 1 << 30
BLOCK, BLOCK_TEXT = 10_000, 8 << 20  # rows and characters of a file that are read at a time
MOST_ROWS, MOST_TEXT, MOST_COLUMNS = 100_000, 64 << 20, 1000  # that are held at once
INDEX_HEADS = 6  # their place in what `sparse_module` says
MOST_COUNT = 10**15
LEAST_US, MOST_US = 1e-3, 1e12
ALIASES = {"system": "gpu", "backend": "framework", "backend_version": "version"}
STACKS = {"tensorrt_llm": "trtllm", "tensorrt-llm": "trtllm", "trt-llm": "trtllm", "trt_llm": "trtllm"}
DTYPES = {
    "bf16": "bfloat16", "fp16": "bfloat16", "float16": "bfloat16", "half": "bfloat16",
    "fp8_e4m3": "fp8", "float8": "fp8", "float8_e4m3fn": "fp8", "e4m3": "fp8",
}  # fmt: skip


class Operation(NamedTuple):
    """What the rows of an operation hold: counts, data types, counts that may be 0 or absent, and means that may be too."""

    counts: tuple[str, ...]
    dtypes: tuple[str, ...]
    optional: tuple[str, ...] = ()
    means: tuple[str, ...] = ()


_LOAD = ("rank_rows", "experts_touched", *(f"tiles_{m}" for m in TILE_ROWS))
OPERATIONS = {
    "gemm": Operation(("m", "n", "k"), ("dtype",)),
    "decode_attention": Operation(("batch", "q_heads", "kv_heads", "head_dim", "kv_len"), ("kv_dtype",), ("window",)),
    "prefill_attention": Operation(
        ("batch", "q_heads", "kv_heads", "head_dim", "seq_len"), ("attn_dtype", "kv_dtype"), ("window",)
    ),
    "mla_decode": Operation(("batch", "q_heads", "kv_len"), ("kv_dtype",)),
    "mla_decode_module": Operation(("batch", "q_heads", "kv_len"), ("kv_dtype", "gemm_dtype")),
    "mla_prefill": Operation(("batch", "q_heads", "seq_len"), ("kv_dtype",)),
    "allreduce": Operation(("num_gpus", "bytes"), ("dtype",)),
    "moe": Operation(("tokens", "hidden", "inter", "topk", "experts", "moe_tp", "moe_ep"), ("dtype",), means=_LOAD),
    "dsa_decode_module": Operation(("batch", "q_heads", "kv_len"), ("kv_dtype", "gemm_dtype")),
    "layer": Operation(("batch", "query_len", "kv_len"), ("dtype",), ("tp_size", "ep_size")),
    "e2e_dense": Operation(("isl", "osl", "batch_size", "tp_size"), ("gemm_quant_mode",)),
    "e2e_moe": Operation(("isl", "osl", "batch_size", "tp_size"), ("gemm_quant_mode",), ("ep_size",)),
}
SERVING = ("e2e_dense", "e2e_moe")


class MeasuredRow(NamedTuple):
    """One row that could be read.

    shape: its counts, then the optional ones, its means, and of a module what its model says of it (`sparse_module`, with no
    index heads where the kernel skips the indexer). time_us: measured. at: its place in its table. kernel: the family that one
    law can meet, else the kernel as recorded; of a layer its kind. cache: the dtype of a served model's cache, where it is said.
    odd: an artefact of how it was measured, or a run that hits a prefix cache: not for fitting. Of a served run: who drove it
    (client), its mean time to the first token, and whether it hits a prefix cache. bound_us: the least time on the ceilings of
    the machine that measured it, NaN where the file gives none.
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
        """Of a served run: clients · output / (TTFT + (output − 1) · TPOT)."""
        output, clients = self.shape[1:3]
        return 1e6 * clients * output / (self.ttft_us + (output - 1) * self.time_us)


class ServedTimes(NamedTuple):
    """Of a server: µs per output token and to the first one, means over requests, and output tokens per second of all GPUs."""

    tpot_us: float = float("nan")
    ttft_us: float = float("nan")
    tokens_per_s: float = float("nan")


class Broken(NamedTuple):
    """A row that could not be read, and why."""

    line: int
    why: str


class Table(NamedTuple):
    """Rows of a file as they stand, of which some could be read and some could not; `at` is a row's place among them."""

    path: str
    header: tuple[str, ...]
    cells: list[list[str]]
    lines: list[int]
    rows: list[MeasuredRow]
    broken: list[Broken]


def read_rows(path: Path) -> Table:
    """The measured rows of a CSV file. Raises UserError where it cannot be read, names no operation or has too many rows."""
    tables = read_blocks(path, MOST_ROWS + 1, MOST_TEXT)
    table = next(tables)
    if len(table.cells) > MOST_ROWS or next(tables, None):
        hint = "`kvcalc validate` takes any number"
        raise UserError(f"has more than {MOST_ROWS:,} rows, or {MOST_TEXT:,} characters of them", str(path), hint)
    return table


def read_blocks(path: Path, most: int = BLOCK, most_text: int = BLOCK_TEXT) -> Iterator[Table]:
    """The same in tables of at most so many rows and some so many characters, one table at least."""
    text = _Text(path)
    reader = csv.reader(text)
    try:
        header = tuple(name.strip() for name in next(reader, []))
        if len(header) > MOST_COLUMNS:
            raise UserError(f"has {len(header):,} columns; more than {MOST_COLUMNS:,} are not read", str(path))
        columns = {ALIASES.get(name.lower(), name.lower()): i for i, name in reversed(list(enumerate(header)))}
        known = _known_operation(path, columns)
        table = Table(str(path), header, [], [], [], [])
        for cells in reader:
            if len(table.cells) == most or (text.taken > most_text and table.cells):
                yield table
                table, text.taken = Table(str(path), header, [], [], [], []), 0
            if cells:
                _take(table, cells, reader.line_num, columns, known)
    except csv.Error as error:
        raise UserError(f"is not CSV: {error}", f"{path}, line {reader.line_num}") from None
    yield table


class _Text:
    """The lines of a file; `taken` counts their characters. Raises UserError on a NUL among them."""

    def __init__(self, path: Path) -> None:
        self.taken, self._path = 0, path
        self._lines = read_lines(path, MOST_BYTES)

    def __iter__(self) -> Iterator[str]:
        for line in self._lines:
            self.taken += len(line)
            if "\0" in line:
                raise UserError("holds a NUL character, so it is no CSV text", str(self._path))
            yield line


def header_of(path: Path) -> tuple[str, ...]:
    """The names of the columns. Raises UserError as `read_rows`."""
    return next(read_blocks(path, 1)).header


def _known_operation(path: Path, columns: dict[str, int]) -> str:
    """The operation that the file's name gives; '' where each row names its own. Raises UserError where nothing does."""
    if not columns or columns.keys() == {""}:
        raise UserError("is empty: a header of column names is missing", str(path))
    if "op" in columns:
        return ""
    name = path.stem.lower()
    if name not in OPERATIONS:
        hint = f"Name the file {{op}}.csv or add a column op. {nearest(name, OPERATIONS)}"
        raise UserError("has no column op, and its name is no operation", str(path), hint)
    missing = [c for c in OPERATIONS[name].counts if c not in columns]
    if missing:
        raise UserError(f"has no column {', '.join(missing)}, which rows of {name} need", str(path))
    return name


def _take(table: Table, cells: list[str], line: int, columns: dict[str, int], known: str) -> None:
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
    scale, timed = (1e3, "silicon_tpot_ms") if serving and cell("silicon_tpot_ms") else (1.0, "time_us")
    names = [DTYPES.get(d, d) for d in (cell(name).lower() for name in what.dtypes)]
    if not serving and not all(names):
        raise ValueError(f"{what.dtypes[names.index('')]} is empty")
    model = cell("model_path") or cell("model")
    kernel = (cell("kernel_family") or cell("kernel")).lower() if op != "layer" else layer_kind(model, cell("layer"))
    shape = [count(cell(name), name) for name in what.counts]
    shape += [count(cell(name) or "0", name, least=0) for name in what.optional]
    shape += [mean(cell(name) or "0", name) for name in what.means]
    shape += _module(model, kernel) if op == "dsa_decode_module" else []
    if op == "layer" and shape[1] > shape[2]:
        raise ValueError(f"query_len {shape[1]:.0f} is more than kv_len {shape[2]:.0f}, which counts the new tokens too")
    framework = cell("framework").lower()
    return MeasuredRow(
        at, op, cell("gpu"), STACKS.get(framework, framework), "/".join(names) or "bfloat16", tuple(shape),
        duration(cell(timed), timed) * scale, model, cell("version"), kernel, cell("kv_cache_dtype").lower(),
        cell("odd") == "1" or cell("prefix_cached") in ("1", "1.0"), cell("client").lower(),
        _first_us(cell("silicon_ttft_ms")) if serving else math.nan, cell("prefix_cached") in ("1", "1.0"),
        duration(cell("bound_us"), "bound_us") if cell("bound_us") else math.nan,
    )  # fmt: skip


def _first_us(text: str) -> float:
    """µs to the first token of a served run; NaN where the row gives none."""
    return duration(text, "silicon_ttft_ms") * 1e3 if text else math.nan


def _module(model: str, kernel: str) -> list[float]:
    """What a row of a sparse-attention module leaves to its model. Raises ValueError where no preset is of that model."""
    found = sparse_module(model)
    if found is None:
        raise ValueError(f"model {model!r} is no preset with sparse attention" if model else "model is empty")
    return [0.0 if at == INDEX_HEADS and "skip" in kernel else value for at, value in enumerate(found)]


def count(text: str, name: str, least: int = 1) -> float:
    """A whole number within range, as it may stand in a file: `128` or `128.0`. Raises ValueError saying what is wrong."""
    try:
        value = float(text)
    except ValueError:
        raise ValueError(f"{name} {text!r} is not a number" if text else f"{name} is empty") from None
    if not math.isfinite(value) or value != int(value) or not least <= value <= MOST_COUNT:
        raise ValueError(f"{name} {text!r} is not a whole number from {least} to 10^15")
    return value


def mean(text: str, name: str) -> float:
    """A number from 0, whole or not. Raises ValueError saying what is wrong."""
    try:
        value = float(text)
    except ValueError:
        raise ValueError(f"{name} {text!r} is not a number") from None
    if not 0 <= value <= MOST_COUNT:
        raise ValueError(f"{name} {text!r} is not a number from 0 to 10^15")
    return value


def duration(text: str, name: str) -> float:
    """A time above zero. Raises ValueError saying what is wrong."""
    try:
        value = float(text)
    except ValueError:
        raise ValueError(f"{name} {text!r} is not a number" if text else f"{name} is empty") from None
    if not LEAST_US <= value <= MOST_US:
        raise ValueError(f"{name} {text!r} is not a time above zero")
    return value
