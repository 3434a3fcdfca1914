"""Qwen4-Exp: delta rules and block-sparse attention over several residual streams, and memories of n-grams."""

from collections.abc import Callable

from kvcalc.layers.attention import BlockSparse
from kvcalc.layers.recurrent import NgramMemory
from kvcalc.layers.recurrent.ngram import ngram_rows
from kvcalc.library.huggingface.config import Config
from kvcalc.library.huggingface.fields import Field, K
from kvcalc.library.huggingface.patterns import by_type, pick
from kvcalc.library.huggingface.shapes import both, grouped, mixer, nothing, projections
from kvcalc.library.huggingface.types.linear import DELTA_NET, GATED, QWEN3_5_MOE


def _mix(block: str, inject: bool = True) -> Callable[[Config], dict[str, tuple[int, int]]]:
    """How a block's input is mixed from the streams, and with `inject`, how its output goes back."""

    def rule(c: Config) -> dict[str, tuple[int, int]]:
        count, rank = c.size("hc_count"), c.size("hc_lowrank")
        wide = count * c.size("hidden_size")
        back = {f"{block}_inject": (wide, count)} if inject else {}
        return {f"{block}_mix_down": (wide, rank), f"{block}_mix_up": (rank, wide)} | back

    return rule


def _mixed_streams(c: Config) -> dict[str, tuple[int, int]]:
    return {**_mix("mixer")(c), **_mix("ffn")(c)}


def _stream_norms(name: str, count: int) -> Field:
    return lambda c: {f"{name}_stream_norms": count * c.size("hc_count") * c.size("hidden_size")}


def _hashes(c: Config) -> int:
    count = (c.size("ngram_size", least=2) - 1) * c.size("heads_per_ngram")
    if count * (_memory_index(c) + 1) > 1000 or c.size("ple_embed_dim", c.size("hidden_size")) % count:
        raise c.fail("ple_embed_dim", f"does not divide among {count} hashes (ngram_size, heads_per_ngram)")
    return count


def _memory_index(c: Config) -> int:
    """Which of the model's memories the current layer has; −1 for none."""
    ids = sorted(set(c.sizes("ple_layer_ids")))
    return ids.index(c.layer + 1) if c.layer + 1 in ids else -1


MEMORY = mixer(
    NgramMemory,
    table_rows=lambda c: ngram_rows(
        c.size("ngram_vocab_size_base"), _hashes(c), _memory_index(c), c.size("make_ngram_vocab_size_divisible_by")
    ),
    table_width=lambda c: c.size("ple_embed_dim", c.size("hidden_size")) // _hashes(c),
    hashes=_hashes,
    streams=K("hc_count"),
    hidden_size=K("hidden_size"),
    conv_kernel=K("ple_conv_kernel_size"),
    dilation=K("ngram_size"),
)
INDEXED = grouped(
    **GATED,
    spec=BlockSparse,
    index_block_size=K("indexer_compress_ratio"),
    index_topk_blocks=lambda c: c.size("indexer_budget") // c.size("indexer_compress_ratio"),
    index_n_heads=K("indexer_n_heads"),
    index_head_dim=K("indexer_head_dim"),
    index_pooled=True,
)
QWEN4_EXP = QWEN3_5_MOE.variant(
    mixer=both(
        by_type(indexed_attention=INDEXED, full_attention=INDEXED, linear_attention=DELTA_NET),
        pick(lambda c: _memory_index(c) >= 0, MEMORY, nothing),
        projections(_mixed_streams, _stream_norms("block", 2)),
    ),
    norms=0,
    model={
        "final_norm": False,
        "extra": projections(_mix("last", inject=False), _stream_norms("last", 1)),
    },
)

TYPES = {"qwen4_exp": QWEN4_EXP, "qwen4_exp_text": QWEN4_EXP}
