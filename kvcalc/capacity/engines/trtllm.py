"""TensorRT-LLM: blocks of 32 tokens over all layers, from a share of the memory that a profile run
leaves.

Rules as of its PyTorch backend, 1.3 (`_torch/pyexecutor/_util.py`: _cal_max_memory;
`llmapi/llm_args.py`: KvCacheConfig): bytes for the cache = (total − the run's peak + the cache that
it had) · free_gpu_memory_fraction.
"""

from kvcalc.capacity.engines.engine import (
    Defaults,
    Engine,
    EngineSettings,
    rope_table_bytes,
    stage_by_stage,
    vision_tower_bytes,
)
from kvcalc.capacity.engines.layout import (
    BlockDemand,
    BlockPool,
    CacheLayout,
    LayerCaches,
    stage_pages,
)
from kvcalc.capacity.memory_budget import EngineStartup, MemoryBreakdown, nonzero, stated_memory
from kvcalc.errors import UserError
from kvcalc.layers.batch import Parallelism

BLOCK, FLASH_MLA_BLOCK = 32, 64  # tokens_per_block; latents on Hopper: FlashMLA runs 64
FRACTION = 0.9  # free_gpu_memory_fraction
TOKENS, SEQUENCES = 8192, 2048  # max_num_tokens, max_batch_size
# parts of the GPU's memory, by estimate: the margins of vLLM's starts
MARGINS = {"low": 0.02, "middle": 0.0, "high": -0.015}


class TensorRtLlm(BlockPool):
    """The cache layout of TensorRT-LLM on one pipeline stage: one pool of equal blocks.

    A block stores the tokens of all layers of the stage. Layers with a sliding window are stored
    like full attention.

    Args:
        row: Bytes of one token in all layers of the stage on one GPU.
        block: Tokens of a block.
        has_windows: Whether any layer has a sliding window. A note for the user then says that its
            tokens are not freed.
    """

    def __init__(self, row: int, block: int, has_windows: bool) -> None:
        self.block_size = block
        self.bytes_per_block = block * row
        self.demands = [BlockDemand(self.bytes_per_block, block)]
        note = (
            "TensorRT-LLM keeps every token of layers with a window unless "
            "max_attention_window is set"
        )
        self.notes = (note,) if has_windows else ()


def _plan(
    layers: LayerCaches, ranks: Parallelism, settings: EngineSettings, stage: int
) -> CacheLayout:
    """Return the pool on one stage. Raises UserError for states and index keys."""
    row, block, has_windows = 0, BLOCK, False
    for part, count in stage_pages(TRTLLM.title, layers, stage):
        if part.states or part.index_keys:
            content = "recurrent states" if part.states else "index keys"
            raise UserError(
                f"{TRTLLM.title}'s pools of {content} are not modelled",
                "Use --engine none to count their content",
            )
        row += count * part.row_bytes
        has_windows |= bool(part.limit)
        if part.is_latent:
            block = FLASH_MLA_BLOCK
    return TensorRtLlm(row, settings.block_size or block, has_windows)


def _memory(start: EngineStartup, estimate: str) -> MemoryBreakdown:
    """Return the weights with vision tower and rotary tables, and the stated pass, libraries,
    graphs and collectives.

    No log has checked these figures.
    """
    extra = {
        "rotary tables": rope_table_bytes(start.model),
        "vision tower": vision_tower_bytes(start),
        **start.extra,
    }
    return stated_memory(start, estimate)._replace(
        extra=nonzero(extra), margin=MARGINS[estimate]
    )


TRTLLM = Engine(
    name="trtllm",
    title="TensorRT-LLM",
    plan=stage_by_stage(_plan),
    defaults=lambda gpu, ranks, release, tokens, model: Defaults(
        tokens or TOKENS, SEQUENCES, FRACTION
    ),
    memory=_memory,
    has_memory_range=True,
    dtypes=("bf16", "fp16", "fp8", "nvfp4"),
    utilization_basis="remaining",
    limits_given_cache=True,  # max_gpu_total_bytes
)
