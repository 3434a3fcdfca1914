"""Stacks that run several times, each turn with a cache of its own: Nanbeige, and IQuest-Coder's loop.

After mlx-lm's nanbeige.py and iquestloopcoder.py (`mlx_lm/models/`).
"""

from kvcalc.library.huggingface.config import Config
from kvcalc.library.huggingface.fields import K
from kvcalc.library.huggingface.patterns import FULL, SLIDING, pick, slides
from kvcalc.library.huggingface.shapes import both, grouped, nothing, projections
from kvcalc.library.huggingface.types.decoders import LLAMA
from kvcalc.library.huggingface.types.entry import Type

MOST_LAYERS = 10_000


def loops(c: Config) -> int:
    found = c.size("num_loops", 1)
    if found * c.size("num_hidden_layers") > MOST_LAYERS:
        raise c.fail("num_loops", f"gives {found * c.size('num_hidden_layers'):,} layers")
    return found


def depth(c: Config) -> int:
    return c.size("num_hidden_layers")


NORMED = both(LLAMA.mixer, LLAMA.ffn, projections(vectors=lambda c: {"norms": 2 * c.size("hidden_size")}))
NANBEIGE = Type(
    both(),
    order=lambda c: [FULL] * (loops(c) * depth(c)),
    norms=0,
    layer={"shared": NORMED, "weight_sets": depth},
    model={"layers": lambda c: loops(c) * depth(c)},
    inert=("skip_loop_final_norm", "loop_loss_weights"),
)


def loop_gate(c: Config) -> dict[str, tuple[int, ...]]:
    """IQuest-Coder's gate per head between its two turns, from the query."""
    heads = c.size("num_attention_heads")
    return {"loop_gate": (c.size("head_dim"), heads, heads)}


def two_turns(c: Config) -> list[str]:
    """The stack, and once more within a window, with the weights of the first turn."""
    if c.size("loop_num", 2) != 2:
        raise c.fail("loop_num", f"{c.size('loop_num')} turns are not read, only 2")
    return [FULL] * c.layers + [SLIDING] * c.layers


SECOND = both(grouped(K("attention_bias"), window=K("loop_window_size", default=64)), LLAMA.ffn)
IQUEST_LOOP = Type(
    pick(slides, nothing, both(LLAMA.mixer, LLAMA.ffn, projections(loop_gate))),
    order=two_turns,
    norms=lambda c: 0 if slides(c) else 2,
    layer={"shared": lambda c: SECOND(c) if slides(c) else None, "weight_sets": lambda c: 0 if slides(c) else None},
    model={"layers": lambda c: 2 * c.layers},
)

TYPES = {"nanbeige": NANBEIGE, "iquestloopcoder": IQUEST_LOOP}
