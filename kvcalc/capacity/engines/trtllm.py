"""TensorRT-LLM: blocks of 32 tokens over all layers, from a share of what a profile run leaves.

Rules as of its PyTorch backend, 1.3 (`_torch/pyexecutor/_util.py`: _cal_max_memory;
`llmapi/llm_args.py`: KvCacheConfig): bytes for the cache = (total − the run's peak + the cache that
it had) · free_gpu_memory_fraction.
"""

from collections.abc import Sequence

from kvcalc.capacity.engines.engine import (
    Defaults,
    Engine,
    EngineSettings,
    stage_by_stage,
)
from kvcalc.capacity.engines.layout import (
    BlockDemand,
    BlockPool,
    CacheLayout,
    LayerCache,
    counted,
    pages,
)
from kvcalc.capacity.engines.vllm_weights import rope_tables, tower
from kvcalc.capacity.memory_budget import (
    EngineStartup,
    MemoryBreakdown,
    nonzero,
    stated,
)
from kvcalc.errors import UserError
from kvcalc.gpu.gpu import Gpu
from kvcalc.layers.batch import Parallelism
from kvcalc.model.model import Model

BLOCK, FLASH_MLA_BLOCK = 32, 64  # tokens_per_block; latents on Hopper: FlashMLA runs 64
FRACTION = 0.9  # free_gpu_memory_fraction
TOKENS, SEQUENCES = 8192, 2048  # max_num_tokens, max_batch_size


class TensorRtLlm(BlockPool):
    """A pool of blocks, each of `row` bytes a token over all layers of the stage. Windows are
    stored like full attention."""

    def __init__(self, row: int, block: int, has_windows: bool) -> None:
        self.block_size = block
        self.bytes_per_block = self.unit = block * row
        self.demands = [BlockDemand(self.unit, block)]
        note = (
            "TensorRT-LLM keeps every token of layers with a window unless "
            "max_attention_window is given"
        )
        self.notes = (note,) if has_windows else ()

    def describe(self, length: int) -> list[str]:
        return [f"blocks of {self.block_size} tokens over all layers: {self.unit:,} B"]


def _plan(
    held: Sequence[LayerCache], ranks: Parallelism, settings: EngineSettings, stage: int
) -> CacheLayout:
    """The pool on one stage. Raises UserError for layers whose pools are not modelled here."""
    row, latent, windows = 0, False, False
    for kept, count in [
        (p, n) for h, n in counted(held, stage) for p in pages(TRTLLM.title, h)
    ]:
        if kept.states or kept.index_keys:
            what = "recurrent states" if kept.states else "index keys"
            raise UserError(
                f"{TRTLLM.title}'s pools of {what} are not modelled",
                hint="Engine none counts their content",
            )
        row += count * kept.row_bytes
        latent, windows = latent or kept.latent, windows or bool(kept.limit)
    return TensorRtLlm(
        row, settings.block_size or (FLASH_MLA_BLOCK if latent else BLOCK), windows
    )


def _terms(start: EngineStartup, end: str) -> MemoryBreakdown:
    """Weights with a tower and rotary tables; the pass, libraries, graphs and collectives as
    stated. No log has checked them."""
    extra = {
        "rotary tables": rope_tables(start.model),
        "vision tower": tower(start),
        **start.extra,
    }
    margin = {"low": 0.02, "middle": 0.0, "high": -0.015}[end]
    terms = stated(start, end)
    return terms._replace(extra=nonzero(extra), margin=margin)


def _defaults(
    gpu: Gpu, ranks: Parallelism, release: None, tokens: int, model: Model
) -> Defaults:
    return Defaults(tokens or TOKENS, SEQUENCES, FRACTION)


TRTLLM = Engine(
    name="trtllm",
    title="TensorRT-LLM",
    plan=stage_by_stage(_plan),
    defaults=_defaults,
    memory=_terms,
    ranged=True,
    dtypes=("bf16", "fp16", "fp8", "nvfp4"),
    of="remaining",
)
