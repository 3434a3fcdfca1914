"""Rules of models with recurrent layers, linear attention, convolutions or memories of n-grams.

`recurrent.yaml` and `linear_attention.yaml` name the rules and their sources.
"""

from kvcalc.layers.recurrent.convolution import ngram_rows
from kvcalc.library.huggingface.config import Config
from kvcalc.library.huggingface.shapes import FULL, LINEAR, SLIDING, state_dtype, typed, uniform

HYBRID = "hybrid"  # a layer with a recurrence and with attention
LETTERS = {"M": LINEAR, "E": "moe", "*": FULL, "-": "mlp"}


def olmo_key_width(c: Config) -> int:
    """Return the width of a key of OLMo's delta net: three quarters of a head without a key."""
    heads = c.size("linear_num_key_heads", c.size("num_attention_heads"))
    return c.size("linear_key_head_dim", int(0.75 * c.size("hidden_size") / heads))


def minimax_state_dtype(c: Config) -> str:
    """Return the format of MiniMax's states, which is the model's own."""
    return state_dtype("dtype", "torch_dtype")(c) or "bf16"


def kimi_order(c: Config) -> list[str]:
    """Return the order of lists that count from 1, else every fourth layer but the first full."""
    inner = c.nested("linear_attn_config")
    if not (inner.has("full_attn_layers") and inner.has("kda_layers")):
        return [FULL if i and i % 4 == 0 else LINEAR for i in range(c.layers)]
    full_layers = inner.sizes("full_attn_layers")
    if sorted([*full_layers, *inner.sizes("kda_layers")]) != list(range(1, c.layers + 1)):
        text = f"does not name each of the layers 1 to {c.layers} once"
        raise c.fail("linear_attn_config", text)
    return [FULL if i + 1 in full_layers else LINEAR for i in range(c.layers)]


def lfm2_width(c: Config) -> int:
    """Return LFM2's FFN width: two thirds of a size, times a factor, up to the next multiple."""
    key = "block_ffn_dim_multiplier"
    size = c.size("block_ff_dim", c.size("intermediate_size"))
    if not c.flag("block_auto_adjust_ff_dim", True):
        return size
    size = int(2 * size / 3)
    if key in c.file and c.get(key) is None:
        return size
    multiple = c.size("block_multiple_of")
    return -(-int(c.number(key, 1.0) * size) // multiple) * multiple


def lfm3_order(c: Config) -> list[str]:
    """Return LFM3's order: conv, conv, full, conv, window, conv, full, conv, window …"""
    names = ["conv" if layer % 2 else SLIDING for layer in range(c.layers)]
    for layer in range(2, c.layers, 4):
        names[layer] = FULL
    return ["conv", *names[1:]]


def memory_index(c: Config) -> int:
    """Return the index of the current layer's memory of n-grams; −1 if it has none."""
    layers = sorted(set(c.sizes("ple_layer_ids")))
    return layers.index(c.layer + 1) if c.layer + 1 in layers else -1


def ngram_hashes(c: Config) -> int:
    """Return the number of hashes that look up rows of a memory."""
    count = (c.size("ngram_size", minimum=2) - 1) * c.size("heads_per_ngram")
    width = c.size("ple_embed_dim", c.size("hidden_size"))
    if count * (memory_index(c) + 1) > 1000 or width % count:
        text = f"does not divide among {count} hashes (ngram_size, heads_per_ngram)"
        raise c.fail("ple_embed_dim", text)
    return count


def memory_rows(c: Config) -> int:
    """Return the rows of the table of n-grams of this layer's memory."""
    return ngram_rows(
        c.size("ngram_vocab_size_base"),
        ngram_hashes(c),
        memory_index(c),
        c.size("make_ngram_vocab_size_divisible_by"),
    )


def granite_order(c: Config) -> list[str]:
    """Return the order under its older key; all layers recur without it."""
    key = "layers_block_type"
    return (typed(key=key) if c.in_file(key) else uniform(LINEAR))(c)


def nemotron_order(c: Config) -> list[str]:
    """Return the order of one letter a layer. transformers' default has one layer of each."""
    return [LETTERS.get(letter, letter) for letter in c.word("hybrid_override_pattern", "ME*-")]


def nemotron_layers(c: Config) -> int:
    """Return the number of layers that the file lists, if it says anything about them."""
    keys = ("layer_types", "hybrid_override_pattern", "num_hidden_layers")
    if not any(map(c.in_file, keys)):
        return 0
    return len(c.items("layer_types") or nemotron_order(c))


def zamba_adapters(c: Config) -> dict[str, tuple[int, int]]:
    """Return the unshared weights of each hybrid layer: the output, and Zamba2's adapters."""
    hidden = c.size("hidden_size")
    width = c.size("attention_hidden_size", 2 * hidden)
    matrices = {"shared_out": (hidden, hidden)}
    if c.has("adapter_rank"):
        rank = c.size("adapter_rank")
        sides = {"gate_up": (hidden, 2 * c.size("intermediate_size", 4 * hidden))}
        if c.flag("use_shared_attention_adapter"):
            sides |= dict.fromkeys("qkv", (width, width))
        for name, (inputs, outputs) in sides.items():
            matrices[f"{name}_adapter_down"] = (inputs, rank)
            matrices[f"{name}_adapter_up"] = (rank, outputs)
    return matrices


def zamba2_order(c: Config) -> list[str]:
    """Return Zamba2's own order, which transformers gives to any file without one."""
    hybrids = (6, 12, 18, 24, 30, 36, 42, 47, 51)
    if c.layers != 54:
        text = f"is missing, and there are {c.layers} layers rather than 54"
        raise c.fail("layers_block_type", text)
    return [HYBRID if i in hybrids else LINEAR for i in range(c.layers)]


def zamba2_heads(c: Config) -> int:
    """Return the heads of a Mamba-2 layer; older files give only their width."""
    channels = c.size("mamba_expand") * c.size("hidden_size")
    key = "n_mamba_heads"
    heads = c.size(key) if c.in_file(key) or not c.has("mamba_headdim") else 0
    if not heads:
        key = "mamba_headdim"
        heads = channels // c.size(key)
    if not 1 <= heads <= channels:
        raise c.fail(key, f"leaves {heads} heads in {channels} channels")
    return heads
