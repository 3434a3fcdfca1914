"""Rules of models with latent, sparse or compressed attention.

`latent_attention.yaml` names the rules and their sources.
"""

from typing import Any

from kvcalc.library.huggingface.config import Config, Field
from kvcalc.library.huggingface.shapes import (
    LINEAR,
    SLIDING,
    check_names,
    every_nth,
    typed,
)
from kvcalc.units import MAX_TOKENS

CSA, HCA = "compressed_sparse_attention", "heavily_compressed_attention"
RATIO_TYPES = {0: SLIDING, 4: CSA, 128: HCA}


def longcat_depth(c: Config) -> int:
    """Return the number of layers. A layer has two attentions, and transformers counts each."""
    if c.in_file("num_layers"):
        return c.size("num_layers")
    return c.size("num_hidden_layers") // 2


def indexer_where(offset: int, freq: int) -> Field:
    """Return the rule of layers that have their own indexer.

    The file lists them, or gives a pattern. Else it is each `freq`-th layer from an offset on.
    """

    def rule(c: Config) -> bool:
        kinds = c.items("indexer_types") or c.raw("index_topk_pattern")
        if not isinstance(kinds, str | list):
            skipped = c.layer - c.size("index_skip_topk_offset", offset, minimum=0) + 1
            return max(skipped, 0) % max(c.size("index_topk_freq", freq, minimum=0), 1) == 0
        if len(kinds) < c.layers or kinds[c.layer] not in ("full", "shared", "F", "S"):
            text = f"does not say for each of {c.layers} layers whether it is full or shared"
            raise c.fail("indexer_types", text)
        return kinds[c.layer] in ("full", "F")

    return rule


def rotates_keys(c: Config) -> bool:
    """Return whether this layer of Mistral Large 4 rotates a part of its keys.

    Raises:
        UserError: Layers take their latents from other layers.
    """
    if c.has("kv_source_layers") and c.sizes("kv_source_layers") != list(range(c.layers)):
        text = "layers that take their latents from another layer are not read"
        raise c.fail("kv_source_layers", text)
    flags = c.items("no_rope_layers")
    if not flags:
        return (c.layer + 1) % c.size("no_rope_layer_interval", 4) != 0
    if len(flags) != c.layers:
        raise c.fail("no_rope_layers", f"has {len(flags)} entries for {c.layers} layers")
    return bool(flags[c.layer])


def glm5_order(c: Config) -> list[str]:
    """Return the listed types, else each fourth layer sparse; lists of layers must agree."""
    names = typed(every_nth(4, "indexed_attention", LINEAR))(c)
    inner = c.nested("linear_attn_config")
    for key, is_linear in (("kda_layers", True), ("full_attn_layers", False)):
        layers = [i for i, name in enumerate(names) if (name == LINEAR) is is_linear]
        if inner.has(key) and inner.sizes(key) != layers:
            raise c.fail(f"linear_attn_config.{key}", "names other layers than layer_types")
    return names


def v4_order(c: Config) -> list[str]:
    """Return the listed types, or the types of older ratios; else two HCA layers, then CSA and HCA."""
    names: list[Any] | None = c.items("layer_types")
    if names is None and c.items("compress_ratios") is not None:
        names = [RATIO_TYPES.get(ratio, str(ratio)) for ratio in c.sizes("compress_ratios")]
    if names is None:
        names = [CSA if i > 1 and i % 2 else HCA for i in range(c.layers)]
    if len(names) < c.layers:
        raise c.fail("layer_types", f"has {len(names)} entries for {c.layers} layers")
    names = names[: c.layers]
    check_names(c, "layer_types", names, RATIO_TYPES.values())
    return names


def v4_ratio(c: Config) -> int:
    """Return the number of tokens of one compressed entry; 0 if the layer does not compress."""
    older_keys = {CSA: ("compress_rate_csa", 4), HCA: ("compress_rate_hca", 128)}
    if c.layer_type not in older_keys:
        return 0
    key, default = older_keys[c.layer_type]
    return c.size(key, c.nested("compress_rates").size(c.layer_type, default))


def v4_rotated(c: Config) -> int:
    """Return the rotated elements of a head: a share of it, or a number in older files."""
    if c.has("partial_rotary_factor"):
        return int(c.size("head_dim") * c.number("partial_rotary_factor"))
    return c.size("qk_rope_head_dim", c.size("head_dim") // 8)


def v41_ratio(c: Config) -> int:
    """Return the tokens of one compressed entry. The list goes on with prediction layers."""
    ratios = c.sizes("compress_ratios")
    if len(ratios) < c.layers:
        raise c.fail("compress_ratios", f"has {len(ratios)} entries for {c.layers} layers")
    return ratios[c.layer]


def is_source(key: str) -> Field:
    """Return the rule of layers that the file lists. No layer may compress before the first."""

    def rule(c: Config) -> bool:
        sources = c.sizes(key)
        if v41_ratio(c) and not any(source <= c.layer for source in sources):
            raise c.fail(key, f"names no layer up to layer {c.layer}, which compresses")
        return c.layer in sources

    return rule


def engram_rows(c: Config) -> int:
    """Return the rows of this layer's table of n-grams; 0 if it has none."""
    layers = c.sizes("engram_layer_ids")
    rows = c.items("engram_num_embeddings") or []
    are_sizes = all(type(n) is int and 0 < n <= MAX_TOKENS for n in rows)
    if len(layers) != len(rows) or not are_sizes:
        raise c.fail("engram_num_embeddings", f"does not give the rows of {len(layers)} layers")
    return rows[layers.index(c.layer)] if c.layer in layers else 0
