"""Rules of models with latent, sparse, compressed or recurrent layers, or layers that differ.

`latent_attention.yaml`, `linear_attention.yaml`, `recurrent.yaml` and `mixed_layers.yaml` name the
rules and their sources.
"""

from kvcalc.layers.recurrent.convolution import ngram_rows
from kvcalc.library.huggingface.config import Config, Field
from kvcalc.library.huggingface.shapes import FULL, LINEAR, SLIDING, check_names

LETTERS = {"M": LINEAR, "E": "moe", "*": FULL, "-": "mlp"}


def lfm2_width(c: Config) -> int:
    """Return the intermediate size of LFM2's FFN.

    It is ⌊2·s/3⌋ · f, rounded up to a multiple of `block_multiple_of`. Here s is `block_ff_dim` or
    `intermediate_size` in config.json, and f is `block_ffn_dim_multiplier`. If the file has `false`
    for `block_auto_adjust_ff_dim`, the result is s.
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
    """Return the position of the current layer (`c.layer`) among the layers with an n-gram memory.

    An n-gram memory is a lookup table that a token reads by hashes of its last tokens. Positions
    count from 0, and a layer without a memory gives −1. `ple_layer_ids` in config.json lists these
    layers, counted from 1.
    """
    layers = sorted(set(c.sizes("ple_layer_ids")))
    return layers.index(c.layer + 1) if c.layer + 1 in layers else -1


def ngram_hashes(c: Config) -> int:
    """Return the number of table rows that a token reads from one n-gram memory.

    An n-gram memory is a lookup table that a token reads by hashes of its last tokens. Each row has
    its own hash. There are (ngram_size − 1) · heads_per_ngram hashes.

    Raises:
        UserError: The number of hashes does not divide the embedding's width, or is too large.
    """
    count = (c.size("ngram_size", minimum=2) - 1) * c.size("heads_per_ngram")
    width = c.size("ple_embed_dim", c.size("hidden_size"))
    if count * (memory_index(c) + 1) > 1000 or width % count:
        text = f"does not divide among {count} hashes (ngram_size, heads_per_ngram)"
        raise c.fail("ple_embed_dim", text)
    return count


def memory_rows(c: Config) -> int:
    """Return the number of rows in the n-gram memory of the current layer (`c.layer`).

    An n-gram memory is a lookup table that a token reads by hashes of its last tokens. `ngram_rows`
    computes the rows from values of config.json: its base vocabulary size, the hashes of a memory,
    the position of the memory, and the divisor. The table of model types calls this function only
    for layers with a memory.
    """
    return ngram_rows(
        c.size("ngram_vocab_size_base"),
        ngram_hashes(c),
        memory_index(c),
        c.size("make_ngram_vocab_size_divisible_by"),
    )


def nemotron_order(c: Config) -> list[str]:
    """Return the layer types of Nemotron-H, from `hybrid_override_pattern` in config.json.

    Each letter of the text is one layer. M is `linear_attention` (Mamba-2), E is `moe`, `*` is
    `full_attention`, and `-` is `mlp`. A file without the key has transformers' default, `ME*-`.
    """
    return [LETTERS.get(letter, letter) for letter in c.word("hybrid_override_pattern", "ME*-")]


def nemotron_layers(c: Config) -> int:
    """Return the number of Nemotron-H's layers: the length of its list of layer types.

    The list is `layer_types` or `hybrid_override_pattern` in config.json. A file with only
    `num_hidden_layers` gives 4, the length of transformers' default list, whatever the number is.
    A file without all three keys gives 0.
    """
    keys = ("layer_types", "hybrid_override_pattern", "num_hidden_layers")
    if not any(map(c.in_file, keys)):
        return 0
    return len(c.items("layer_types") or nemotron_order(c))


CSA = "compressed_sparse_attention"
HCA = "heavily_compressed_attention"
RATIO_TYPES = {0: SLIDING, 4: CSA, 128: HCA}


def indexer_where(offset: int, freq: int) -> Field:
    """Return a rule that gives whether the current layer has its own sparse-attention indexer.

    A rule is a function of the `Config`, the read config.json. A layer without an indexer reuses
    the token selection of an earlier layer. If the file lists `full` or `shared` for each layer,
    the list decides. Otherwise `offset` and `freq` decide: with 3 and 4, layers 0, 1, 2, 6, 10 …
    have an indexer.

    Args:
        offset: Number of first layers, all with an indexer, unless the file states it.
        freq: Distance in layers between later indexers, unless the file states it.
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
    """Return the attention type of each layer of DeepSeek-V4.

    The types are `sliding_attention`, `compressed_sparse_attention` (CSA, one compressed cache row
    per 4 tokens), and `heavily_compressed_attention` (HCA, one compressed cache row per 128
    tokens). `layer_types` in config.json lists them. Older files have `compress_ratios` instead: 0,
    4 or 128. By default layers 3, 5, 7 … are CSA and all others are HCA.

    Raises:
        UserError: The list is too short or has an unknown type.
    """
    names = c.items("layer_types")
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
    """Return how many elements of a DeepSeek-V4 attention head have rotary positions.

    It is head_dim · `partial_rotary_factor`. Older files have the number as `qk_rope_head_dim`;
    without both keys it is head_dim ÷ 8.
    """
    if c.has("partial_rotary_factor"):
        return int(c.size("head_dim") * c.number("partial_rotary_factor"))
    return c.size("qk_rope_head_dim", c.size("head_dim") // 8)


def engram_rows(c: Config) -> int:
    """Return the number of rows in the Engram lookup table of the current layer; 0 if it has none.

    The current layer is `c.layer`. `engram_num_embeddings` in config.json has the rows of each
    layer in `engram_layer_ids`.

    Raises:
        UserError: The two lists differ in length.
    """
    layers = c.sizes("engram_layer_ids")
    rows = c.items("engram_num_embeddings") or []
    if len(layers) != len(rows):
        raise c.fail("engram_num_embeddings", f"does not give the rows of {len(layers)} layers")
    return rows[layers.index(c.layer)] if c.layer in layers else 0


def nas_width(c: Config) -> int:
    """Return the intermediate size of the FFN of the current layer (`c.layer`) in Nemotron-NAS.

    It is 2/3 · `ffn_mult` · hidden_size, rounded up to a multiple of 256. `ffn_mult` is the factor
    of this layer in `block_configs` of config.json.
    """
    factor = c.nested("block_configs").nested("ffn").number("ffn_mult")
    return -(-int(2 * factor * c.size("hidden_size") / 3) // 256) * 256
