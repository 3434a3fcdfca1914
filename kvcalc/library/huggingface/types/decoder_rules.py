"""Rules of decoders that a formula cannot express. `decoders.yaml` and other tables name them.

A rule gives a size, a condition or an order of layers from one config. The comments in the tables
name the sources.
"""

from kvcalc.library.huggingface.config import Config, Field, facts
from kvcalc.library.huggingface.shapes import FULL, SLIDING, cycle, full_where, typed
from kvcalc.storage.formats import first_words

# A model type, and the versions of MiniCPM-V with its layers.
MINICPMV_STACKS = first_words("""
    minicpm  2 2.0
    llama    2.5
    qwen2    2.6
    llama    4 4.0
    qwen3    4.5
""")


def outer_tie(default: bool) -> Field:
    """Return a rule that gives whether a multimodal model's LM head is tied to its embedding.

    A rule is a function of the `Config`, the read config.json. The result of this rule is a bool. A
    multimodal file has `tie_word_embeddings` outside its text part, so the rule reads the key
    there. For some model types, true for the key inside the text part is also enough. In a file
    without a text part, the rule reads the key of the file.

    Args:
        default: Result if a multimodal file does not state `tie_word_embeddings`.
    """

    def is_tied(c: Config) -> bool:
        key = "tie_word_embeddings"
        if c.outer is c.file:
            return c.flag(key)
        outer_facts = facts().get(str(c.outer.get("model_type")), {})
        is_outer_tied = Config(c.outer, c.file_name).flag(key, default)
        return is_outer_tied or bool(outer_facts.get("either") and c.flag(key))

    return is_tied


def exaone_order(c: Config) -> list[str]:
    """Return the layer types of EXAONE 4: `full_attention` or `sliding_attention` for each layer.

    The key `sliding_window_pattern` in config.json decides. If it is a number n, each n-th layer
    has full attention. If it is letters such as LLLG, the letters repeat: G is full attention, L a
    sliding window. A file without `sliding_window` has full attention in all layers.
    """
    key = "sliding_window_pattern"
    if not c.has("sliding_window"):
        return [FULL] * c.layers
    if isinstance(c.get(key), str):
        return cycle(key, {"L": SLIDING, "G": FULL})(c)
    return full_where(f"(layer_index + 1) % {key} == 0")(c)


def gemma4_order(c: Config) -> list[str]:
    """Return the layer types of Gemma 4: `full_attention` or `sliding_attention` for each layer.

    The list `layer_types` in config.json decides. Without this list, each sixth layer has full
    attention. The last layer always has full attention.
    """
    return [*typed(full_where("(layer_index + 1) % 6 == 0"))(c)[:-1], FULL]


def altup_projections(c: Config) -> dict[str, tuple[int, ...]]:
    """Return the (inputs, outputs) of AltUp's projection matrices, by matrix name.

    AltUp keeps `altup_num_inputs` copies (streams) of the residual stream. Each stream except the
    first has one matrix into it and one out of it. Both are square, with hidden_size inputs. With 4
    streams the names are `stream_in_1` to `stream_in_3` and `stream_out_1` to `stream_out_3`.
    """
    sides = (c.size("hidden_size"), c.size("hidden_size"))
    numbers = range(1, c.size("altup_num_inputs"))
    return {f"stream_{way}_{i}": sides for way in ("in", "out") for i in numbers}


def minicpmv_stack(c: Config) -> str:
    """Return the model type of the language model inside a MiniCPM-V or MiniCPM-o.

    The `version` in config.json decides. Examples: version 2.5 gives `llama`, and 2.6 gives
    `qwen2`. A file without a version is 2.0 or 2.5, by its hidden size and number of image queries.

    Raises:
        UserError: The version is unknown.
    """
    is_first = (c.size("hidden_size"), c.get("query_num")) == (2304, 64)
    version = str(c.get("version", 2.0 if is_first else 2.5))
    if version not in MINICPMV_STACKS:
        raise c.fail(
            "version",
            f"{version[:20]!r} is no MiniCPM-V that is read",
            f"Known: {', '.join(MINICPMV_STACKS)}",
        )
    return MINICPMV_STACKS[version]
