"""Gemma 3n and Gemma 4: per-layer embeddings, layers that read another's cache, and wider heads in full attention."""

from typing import Any

from kvcalc.library.huggingface.config import Config
from kvcalc.library.huggingface.fields import K
from kvcalc.library.huggingface.patterns import FULL, Order, every, pick, typed
from kvcalc.library.huggingface.shapes import both, dense, grouped, half_window, moe, nothing, projections
from kvcalc.library.huggingface.types.entry import Type

BIAS = K("attention_bias")


def shares(c: Config) -> bool:
    """Whether this layer reads the cache of the last layer of its type that has one of its own."""
    count = c.size("num_kv_shared_layers", 0, least=0)
    if count >= c.layers:
        raise c.fail("num_kv_shared_layers", f"{count} of {c.layers} layers leave none that has a cache")
    return c.layer >= c.layers - count


def _last_full(order: Order) -> Order:
    return lambda c: [*order(c)[:-1], FULL]


def _input_width(c: Config) -> int:
    return c.size("hidden_size_per_layer_input", 0, least=0)


def _gate(c: Config) -> dict[str, tuple[int, ...]]:
    """A layer's gate on its own embedding of the token, and the way back."""
    hidden, width = c.size("hidden_size"), _input_width(c)
    return {"input_gate": (hidden, width), "input_up": (width, hidden)}


INPUT_GATE = pick(_input_width, projections(_gate, lambda c: {"input_norm": c.size("hidden_size")}), nothing)


def _tables(c: Config) -> dict[str, tuple[int, int]]:
    """One row of all layers' own embeddings for each token."""
    width = _input_width(c)
    return {"input_embedding": (c.size("vocab_size_per_layer_input"), c.layers * width)} if width else {}


def _projection(c: Config) -> tuple[Any, ...]:
    width = _input_width(c)
    matrices: dict[str, Any] = {"input_projection": (c.size("hidden_size"), c.layers * width)}
    return projections(matrices, {"input_projection_norm": width})(c) if width else ()


def _streams(c: Config) -> tuple[Any, ...]:
    """The projections into AltUp's further streams and back."""
    hidden, further = c.size("hidden_size"), c.size("altup_num_inputs") - 1
    names = [f"stream_{way}_{i}" for way in ("in", "out") for i in range(1, further + 1)]
    return projections(dict.fromkeys(names, (hidden, hidden)))(c)


def _altup(c: Config) -> dict[str, tuple[int, ...]]:
    """AltUp's mixing of the streams, and Laurel's low-rank residual."""
    hidden, streams, rank = c.size("hidden_size"), c.size("altup_num_inputs"), c.size("laurel_rank")
    return {
        "altup.router": (hidden, streams),
        "altup.predict": (streams, streams**2),
        "altup.correct": (streams, streams),
        "laurel.down": (hidden, rank),
        "laurel.up": (rank, hidden),
    }


def _altup_norms(c: Config) -> dict[str, int]:
    return dict.fromkeys(("altup.norm", "altup.scale", "laurel.norm"), c.size("hidden_size"))


def _wide(key: str, default: int | None, otherwise: str, condition: str = "") -> Any:
    """In full layers the key of their own, unless per_layer_config already says what differs there."""

    def read(c: Config) -> int:
        own = c.layer_type == FULL and not c.has("per_layer_config") and (not condition or c.flag(condition))
        return c.size(key, default or c.size(otherwise)) if own else c.size(otherwise)

    return read


ATTENTION = grouped(
    BIAS,
    window=half_window("all"),
    head=_wide("global_head_dim", 512, "head_dim"),
    kv_heads=_wide("num_global_key_value_heads", None, "num_key_value_heads", "attention_k_eq_v"),
    qk_norm="head",
    k_is_v=lambda c: c.layer_type == FULL and c.flag("attention_k_eq_v"),
    kv_projection=lambda c: not shares(c),
)
FFN = dense(lambda c: c.size("intermediate_size") * (2 if shares(c) and c.flag("use_double_wide_mlp") else 1))
EXPERTS = moe(size=K("moe_intermediate_size"), router_input_norm=True, expert_scales=True)
GEMMA4_UNIFIED = Type(ATTENTION, FFN, _last_full(typed(every(6))), norms=4, layer={"shares_cache": shares})

TYPES = {
    "gemma3n_text": Type(
        grouped(BIAS, qk_norm="head", kv_projection=lambda c: not shares(c)),
        both(
            dense(),
            projections(_altup, _altup_norms),
            INPUT_GATE,
        ),
        typed(every(5)),
        norms=4,
        layer={"shares_cache": shares},
        model={"tables": _tables, "extra": lambda c: (*_projection(c), *_streams(c))},
    ),
    "gemma4_text": GEMMA4_UNIFIED.variant(
        ffn=both(FFN, pick(lambda c: c.flag("enable_moe_block"), EXPERTS, nothing), INPUT_GATE),
        norms=lambda c: 7 if c.flag("enable_moe_block") else 4,
        model={"tables": _tables, "extra": _projection},
    ),
    "gemma4_unified_text": GEMMA4_UNIFIED,
}
