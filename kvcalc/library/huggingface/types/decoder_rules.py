"""Rules of decoders that a formula cannot express. `decoders.yaml` and other tables name them.

A rule gives a size, a condition or an order of layers from one config. The comments in the tables
name the sources.
"""

from kvcalc.library.huggingface.config import Config, Field, facts
from kvcalc.library.huggingface.shapes import (
    FULL,
    SLIDING,
    cycle,
    full_where,
    typed,
)

Matrices = dict[str, tuple[int, ...]]
MINICPMV_STACKS = {
    "2": "minicpm",
    "2.0": "minicpm",
    "2.5": "llama",
    "2.6": "qwen2",
    "4": "llama",
    "4.0": "llama",
    "4.5": "qwen3",
}


def outer_tie(default: bool) -> Field:
    """Return a rule that gives whether a multimodal model's LM head is tied to its embedding.

    The text part of a multimodal file has no LM head, so `tie_word_embeddings` is outside the text
    part. In some classes, the text part may have the key too.

    Args:
        default: Result of the rule if the file does not state it.
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
    """Return the type of each layer of EXAONE 4, from `sliding_window_pattern`.

    The key has a number n, and each n-th layer has full attention. Or it has letters such as LLLG,
    in which G is full attention. Without a window, all layers have full attention.
    """
    key = "sliding_window_pattern"
    if not c.has("sliding_window"):
        return [FULL] * c.layers
    if isinstance(c.get(key), str):
        return cycle(key, {"L": SLIDING, "G": FULL})(c)
    return full_where(f"(layer_index + 1) % {key} == 0")(c)


def gemma4_order(c: Config) -> list[str]:
    """Return the type of each layer of Gemma 4, from the file's list of layer types.

    Without a list, each sixth layer has full attention. The last layer always has full attention.
    """
    return [*typed(full_where("(layer_index + 1) % 6 == 0"))(c)[:-1], FULL]


def altup_projections(c: Config) -> Matrices:
    """Return AltUp's matrices, by name: the projections into each further stream and back.

    The sizes of each matrix are [hidden_size, hidden_size].
    """
    sides = (c.size("hidden_size"), c.size("hidden_size"))
    numbers = range(1, c.size("altup_num_inputs"))
    return {f"stream_{way}_{i}": sides for way in ("in", "out") for i in numbers}


def minicpmv_stack(c: Config) -> str:
    """Return the model type of the language model in a MiniCPM-V or MiniCPM-o, by its version.

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
