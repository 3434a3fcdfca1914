"""TensorRT-LLM: blocks of 32 tokens over all layers, from a share of what a profile run leaves.

Rules as of its PyTorch backend, 1.3 (`_torch/pyexecutor/_util.py`: _cal_max_memory; `llmapi/llm_args.py`: KvCacheConfig):
bytes for the cache = (total − the run's peak + the cache that it had) · free_gpu_memory_fraction.
"""

from collections.abc import Sequence

from kvcalc.capacity.engines.engine import Defaults, Engine, EngineSettings, nothing, stage_by_stage
from kvcalc.capacity.engines.layout import Plan, Term
from kvcalc.capacity.engines.stored import Held, counted, pages
from kvcalc.capacity.engines.vllm_weights import rope_tables, tower
from kvcalc.capacity.memory_terms import Start, Terms, stated
from kvcalc.errors import UserError
from kvcalc.gpu.spec import Gpu
from kvcalc.layers.ranks import Parallelism
from kvcalc.model.spec import Model

BLOCK, FLASH_MLA_BLOCK = 32, 64  # tokens_per_block; latents on Hopper: FlashMLA runs 64
FRACTION = 0.9  # free_gpu_memory_fraction
TOKENS, SEQUENCES = 8192, 2048  # max_num_tokens, max_batch_size


class TensorRtLlm(Plan):
    """A pool of blocks, each of `row` bytes a token over all the stage's layers; windows are kept like full attention."""

    def __init__(self, row: int, block: int, windows: bool) -> None:
        self.block_size = self.block = block
        self.bytes_per_block = self.unit = block * row
        kept = "TensorRT-LLM keeps every token of layers with a window unless max_attention_window is given"
        self.notes = (kept,) if windows else ()

    def num_blocks(self, budget: int) -> int:
        return budget // self.unit if self.unit else 0

    def request_blocks(self, length: int) -> int:
        return -(-length // self.block)

    def needed(self, sequences: int, length: int, shared: int = 0) -> int:
        common = min(shared, length) // self.block
        return self.unit * (common + sequences * (self.request_blocks(length) - common))

    def pool(self, budget: int) -> int:
        return self.num_blocks(budget) * self.unit

    def terms(self) -> list[Term]:
        return [Term(self.unit, self.block)]

    def describe(self, length: int) -> list[str]:
        return [f"blocks of {self.block} tokens over all layers: {self.unit:,} B"]


def _plan(held: Sequence[Held], ranks: Parallelism, settings: EngineSettings, stage: int) -> Plan:
    """The pool on one stage. Raises UserError for layers whose pools are not modelled here."""
    row, latent, windows = 0, False, False
    for kept, count in [(p, n) for h, n in counted(held, stage) for p in pages(TRTLLM.title, h)]:
        if kept.states or kept.index_keys:
            what = "recurrent states" if kept.states else "index keys"
            raise UserError(f"{TRTLLM.title}'s pools of {what} are not modelled", hint="Engine none counts their content")
        row += count * kept.row_bytes
        latent, windows = latent or kept.latent, windows or bool(kept.limit)
    return TensorRtLlm(row, settings.block_size or (FLASH_MLA_BLOCK if latent else BLOCK), windows)


def _terms(start: Start, end: str) -> Terms:
    """Weights with a tower and rotary tables; the pass, libraries, graphs and collectives as stated. No log has checked them."""
    extra = {"rotary tables": rope_tables(start.model), "vision tower": tower(start), **start.beside}
    margin = {"low": 0.02, "middle": 0.0, "high": -0.015}[end]
    found = stated(start, end)
    return found._replace(extra={n: s for n, s in extra.items() if s}, margin=margin)


def _defaults(gpu: Gpu, ranks: Parallelism, release: None, tokens: int, model: Model, length: int) -> Defaults:
    return Defaults(tokens or TOKENS, SEQUENCES, FRACTION)


TRTLLM = Engine(
    name="trtllm",
    title="TensorRT-LLM",
    plan=stage_by_stage(_plan),
    defaults=_defaults,
    memory=_terms,
    ranged=True,
    told=nothing,
    dtypes=("bf16", "fp16", "fp8", "nvfp4"),
    of="remaining",
)
