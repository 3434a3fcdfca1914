"""Models with compressed attention: DeepSeek-V4 after transformers' code, V4.1 after the tensors of its release."""

from typing import Any

from kvcalc.layers.attention import LentCompressed
from kvcalc.layers.recurrent import Engram
from kvcalc.library.huggingface.config import Config, show
from kvcalc.library.huggingface.fields import Field, K
from kvcalc.library.huggingface.patterns import pick
from kvcalc.library.huggingface.shapes import both, compressed, mixer, moe, nothing, shared_experts
from kvcalc.library.huggingface.types.entry import Type
from kvcalc.library.huggingface.types.latents import MIXED, STREAM_HEAD
from kvcalc.units import MOST_TOKENS

# --- DeepSeek-V4: compressed attention ---

CSA, HCA = "compressed_sparse_attention", "heavily_compressed_attention"
RATIO_TYPES = {0: "sliding_attention", 4: CSA, 128: HCA}


def v4_order(c: Config) -> list[str]:
    """Types, or older ratios, of at least so many layers; else two heavily compressed ones, then both kinds in turn."""
    found: list[Any] | None = c.items("layer_types")
    if found is None and c.items("compress_ratios") is not None:
        found = [RATIO_TYPES.get(ratio, str(ratio)) for ratio in c.sizes("compress_ratios")]
    if found is None:
        found = [CSA if i > 1 and i % 2 else HCA for i in range(c.layers)]
    if len(found) < c.layers:
        raise c.fail("layer_types", f"has {len(found)} entries for {c.layers} layers")
    for name in found[: c.layers]:
        if name not in RATIO_TYPES.values():
            raise c.fail("layer_types", f"holds {show(name)}, which is no layer type")
    return found[: c.layers]


def v4_ratio(c: Config) -> int:
    """Tokens that one compressed entry stands for."""
    older = {CSA: "compress_rate_csa", HCA: "compress_rate_hca"}.get(c.layer_type)
    if older is None:
        return 0
    default = 4 if c.layer_type == CSA else 128
    return c.size(older, c.nested("compress_rates").size(c.layer_type, default))


def v4_rotated(c: Config) -> int:
    """Rotated elements of a head: a share of it, which older files give as a number."""
    if c.has("partial_rotary_factor"):
        return int(c.size("head_dim") * c.number("partial_rotary_factor"))
    return c.size("qk_rope_head_dim", c.size("head_dim") // 8)


def sparse_only(key: str) -> Field:
    """A field that only compressed sparse layers have."""
    return lambda c: c.get(key) if c.layer_type == CSA else 0


DEEPSEEK_V4 = Type(
    both(
        compressed(
            qk_rope_head_dim=v4_rotated,
            compress_ratio=v4_ratio,
            overlap=lambda c: c.layer_type == CSA,
            index_topk=sparse_only("index_topk"),
            index_n_heads=sparse_only("index_n_heads"),
            index_head_dim=sparse_only("index_head_dim"),
        ),
        MIXED,
    ),
    moe(shared=K("moe_intermediate_size"), shared_bias=K("mlp_bias")),
    v4_order,
    model=STREAM_HEAD,
    inert=("num_hash_layers",),  # their experts stand in a table of whole numbers, by token
)

# --- DeepSeek-V4.1: few layers store compressed rows for all, memories of n-grams ---


def v41_ratio(c: Config) -> int:
    """Tokens that one compressed entry stands for; the list goes on with the layers that predict further tokens."""
    ratios = c.sizes("compress_ratios")
    if len(ratios) < c.layers:
        raise c.fail("compress_ratios", f"has {len(ratios)} entries for {c.layers} layers")
    return ratios[c.layer]


def v41_source(key: str) -> Field:
    """Whether this layer is one of those that the file lists; a compressed layer before the first of them has no rows."""

    def read(c: Config) -> bool:
        named = c.sizes(key)
        if v41_ratio(c) and not any(i <= c.layer for i in named):
            raise c.fail(key, f"names no layer up to layer {c.layer}, which compresses")
        return c.layer in named

    return read


def v41_candidates(c: Config) -> int:
    """Entries that a query scores at most where a layer chooses: those of the blocks that an earlier one has marked."""
    first, most = c.get("candidate_source_layer_id"), c.size("candidate_topk_blocks", 0) * c.size("candidate_block_size", 0)
    return most if first is not None and c.layer > first and c.layer in c.sizes("index_source_layer_ids") else 0


def v41_index(key: str) -> Field:
    """A field of the layers that compress."""
    return lambda c: c.size(key) if v41_ratio(c) else 0


def engram_rows(c: Config) -> int:
    """Rows of this layer's table of n-grams; 0 where it has none."""
    layers, rows = c.sizes("engram_layer_ids"), c.items("engram_num_embeddings") or []
    if len(layers) != len(rows) or any(type(n) is not int or not 0 < n <= MOST_TOKENS for n in rows):
        raise c.fail("engram_num_embeddings", f"does not give the rows of {len(layers)} layers")
    return rows[layers.index(c.layer)] if c.layer in layers else 0


ENGRAM = mixer(
    Engram,
    table_rows=engram_rows,
    table_width=K("engram_head_dim"),
    hashes=lambda c: (c.size("engram_max_ngram_size", least=2) - 1) * c.size("engram_n_heads"),
    streams=K("hc_mult"),
)
DEEPSEEK_V41 = DEEPSEEK_V4.variant(
    mixer=both(
        compressed(
            spec=LentCompressed,
            qk_rope_head_dim=v4_rotated,
            compress_ratio=v41_ratio,
            lends=v41_source("kv_source_layer_ids"),
            chooses=v41_source("index_source_layer_ids"),
            index_candidates=v41_candidates,
            index_topk=v41_index("index_topk"),
            index_n_heads=v41_index("index_n_heads"),
            index_head_dim=v41_index("index_head_dim"),
        ),
        pick(lambda c: bool(engram_rows(c)), ENGRAM, nothing),
        MIXED,
    ),
    ffn=moe(shared=shared_experts()),
    order=lambda c: ["compressed"] * c.layers,
    model={"extra": nothing},
    mtp=False,  # DSpark's: windows, fewer experts, and heads of their own
    inert=(
        "engram_vocab_size",
        "engram_compressed_vocab_size",
        "engram_pad_token_id",
        "hc_sinkhorn_iters",
        "dspark_block_size",
        "dspark_markov_rank",
        "dspark_n_routed_experts",
        "dspark_num_experts_per_tok",
    ),
)

TYPES = {"deepseek_v4": DEEPSEEK_V4, "deepseek_v41_text": DEEPSEEK_V41}
