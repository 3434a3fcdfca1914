"""Rules of models with latent, sparse, compressed or recurrent layers, or layers that differ.

`latent_attention.yaml`, `linear_attention.yaml`, `recurrent.yaml` and `mixed_layers.yaml` name the
rules and their sources.
"""

from typing import Any

from kvcalc.layers.recurrent.convolution import ngram_rows
from kvcalc.library.huggingface.config import Config, Field
from kvcalc.library.huggingface.shapes import (
    FULL,
    LINEAR,
    SLIDING,
    check_names,
)

HYBRID = "hybrid"  # a layer with a recurrence and with attention
LETTERS = {"M": LINEAR, "E": "moe", "*": FULL, "-": "mlp"}


def lfm2_width(c: Config) -> int:
    """Return the intermediate size of LFM2's FFN.

    It is two thirds of the file's size times a factor, rounded up to a multiple. Without
    `block_auto_adjust_ff_dim` it is the file's size.
    """
    key = "block_ffn_dim_multiplier"
    size = c.size("block_ff_dim", c.size("intermediate_size"))
    if not c.flag("block_auto_adjust_ff_dim", True):
        return size
    size = int(2 * size / 3)
    if key in c.file and c.get(key) is None:
        return size
    multiple = c.size("block_multiple_of")
    return -(-int(c.number(key, 1.0) * size) // multiple) * multiple


def memory_index(c: Config) -> int:
    """Return the index of the current layer's n-gram memory in the model; −1 if it has none."""
    layers = sorted(set(c.sizes("ple_layer_ids")))
    return layers.index(c.layer + 1) if c.layer + 1 in layers else -1


def ngram_hashes(c: Config) -> int:
    """Return the number of hashes of an n-gram memory. Each hash selects one table row
    for a token.
    """
    count = (c.size("ngram_size", minimum=2) - 1) * c.size("heads_per_ngram")
    width = c.size("ple_embed_dim", c.size("hidden_size"))
    if count * (memory_index(c) + 1) > 1000 or width % count:
        text = f"does not divide among {count} hashes (ngram_size, heads_per_ngram)"
        raise c.fail("ple_embed_dim", text)
    return count


def memory_rows(c: Config) -> int:
    """Return the number of table rows in the n-gram memory of the current layer."""
    return ngram_rows(
        c.size("ngram_vocab_size_base"),
        ngram_hashes(c),
        memory_index(c),
        c.size("make_ngram_vocab_size_divisible_by"),
    )


def nemotron_order(c: Config) -> list[str]:
    """Return the type of each layer of Nemotron-H, from a text with one letter per layer.

    transformers' default has one layer of each type.
    """
    return [LETTERS.get(letter, letter) for letter in c.word("hybrid_override_pattern", "ME*-")]


def nemotron_layers(c: Config) -> int:
    """Return the number of layers in Nemotron's list of layer types; 0 if the file has no list."""
    keys = ("layer_types", "hybrid_override_pattern", "num_hidden_layers")
    if not any(map(c.in_file, keys)):
        return 0
    return len(c.items("layer_types") or nemotron_order(c))


CSA, HCA = "compressed_sparse_attention", "heavily_compressed_attention"
RATIO_TYPES = {0: SLIDING, 4: CSA, 128: HCA}


def indexer_where(offset: int, freq: int) -> Field:
    """Return a rule that gives whether the current layer has its own sparse-attention indexer.

    The file lists these layers, or gives a pattern. Otherwise the first `offset` layers have an
    indexer, and each `freq`-th layer after them.

    Args:
        offset: Number of first layers with an indexer, if the file does not state it.
        freq: Distance between later layers with an indexer, if the file does not state it.
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


def v4_order(c: Config) -> list[str]:
    """Return the type of each layer of DeepSeek-V4: window only, CSA or HCA.

    The file lists the types, or older files list the compression ratios. By default the layers with
    the indices 3, 5, 7 … are CSA, and all others are HCA.
    """
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


def v4_rotated(c: Config) -> int:
    """Return the number of elements of a DeepSeek-V4 head that have rotary positions.

    Files give it as a share of the head, and older files as a number.
    """
    if c.has("partial_rotary_factor"):
        return int(c.size("head_dim") * c.number("partial_rotary_factor"))
    return c.size("qk_rope_head_dim", c.size("head_dim") // 8)


def engram_rows(c: Config) -> int:
    """Return the number of rows in the Engram table of the current layer; 0 if it has none."""
    layers, rows = c.sizes("engram_layer_ids"), c.items("engram_num_embeddings") or []
    if len(layers) != len(rows):
        raise c.fail("engram_num_embeddings", f"does not give the rows of {len(layers)} layers")
    return rows[layers.index(c.layer)] if c.layer in layers else 0


def nas_width(c: Config) -> int:
    """Return the intermediate size of the current layer's FFN in Nemotron-NAS.

    It is 2/3 · `ffn_mult` · hidden size, rounded up to a multiple of 256.
    """
    factor = c.nested("block_configs").nested("ffn").number("ffn_mult")
    return -(-int(2 * factor * c.size("hidden_size") / 3) // 256) * 256
