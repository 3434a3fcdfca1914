"""ggml types that llama.cpp's quantiser selects for each tensor of a file type.

A file type such as Q4_K_M is a mixture. The quantiser starts from one type and raises or lowers it for
each tensor, according to its role, its layer and the model. Source: src/llama-quant.cpp in llama.cpp
(`llama_tensor_get_type_impl`, `tensor_type_fallback`).
"""

from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import NamedTuple

from kvcalc.storage.gguf import BLOCKS, MIXES

_LOWEST = {"iq1_s", "iq1_m", "iq2_xxs", "iq2_xs", "iq2_s", "iq2_m"}
_TWO_BITS = {"iq2_s", "iq2_m"}
_FALLBACKS = {
    **dict.fromkeys(("iq1_s", "iq1_m", "iq2_xxs", "iq2_xs", "iq2_s", "iq3_xxs", "iq3_s", "iq4_xs"), "iq4_nl"),
    **dict.fromkeys(("q2_k", "q3_k", "tq1_0", "tq2_0"), "q4_0"),
    "q4_k": "q5_0", "q5_k": "q5_1", "q6_k": "q8_0",
}  # fmt: skip


class Use(StrEnum):
    """Role of a tensor, as far as a mixture distinguishes roles."""

    EMBEDDING = "token_embd"
    HEAD = "output"
    QKV = "attn_qkv"
    KV_UP = "attn_kv_b"
    V = "attn_v"
    K = "attn_k"
    Q = "attn_q"
    O = "attn_output"  # noqa: E741 (as the field calls it)
    UP = "ffn_up"
    GATE = "ffn_gate"
    DOWN = "ffn_down"
    OTHER = "other"


VALUES = (Use.V, Use.QKV, Use.KV_UP)


class Tensor(NamedTuple):
    """A tensor that a mixture may quantise. The order is by layer, then by name, as in llama.cpp.

    Attributes:
        row: Elements of a row, the first dimension in ggml.
        layer: Index of the layer; −1 for tensors outside the layers.
        stacked: Whether the tensor has one matrix per expert.
    """

    use: Use
    row: int
    layer: int = -1
    stacked: bool = False


class Facts(NamedTuple):
    """Properties of a model that affect a mixture.

    Attributes:
        queries_per_kv: Query heads per KV head in the first layer.
        seventy: Whether llama.cpp treats the model as a 70B model.
        tied: Whether the model has no LM head.
    """

    layers: int
    experts: int = 0
    queries_per_kv: int = 1
    seventy: bool = False
    falcon: bool = False
    tied: bool = False


def mixed_types(tensors: Sequence[Tensor], mix: str, imatrix: bool, facts: Facts) -> list[str]:
    """Return the ggml type of every tensor of a model for a file type."""
    start = MIXES[mix]
    if start in ("f32", "f16"):
        return [start] * len(tensors)
    mixture = _Mixture(mix, imatrix, facts, sum(t.use in VALUES for t in tensors))
    return [fitting(mixture.type_of(t, start), t.row) for t in tensors]


def fitting(type_: str, row: int) -> str:
    """Return the type, or its replacement if a row is not a whole number of its blocks."""
    if row % BLOCKS[type_][0] == 0:
        return type_
    other = _FALLBACKS.get(type_, type_)
    return other if row % BLOCKS[other][0] == 0 else "f16"


def more_bits(layer: int, layers: int) -> bool:
    """Return whether a layer gets more bits: the first and last eighth, and every third layer between."""
    eighth = layers // 8
    return layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2


class _Mixture:
    """One pass over the tensors of a model. Some rules count the earlier tensors of the same role."""

    def __init__(self, mix: str, imatrix: bool, facts: Facts, values: int) -> None:
        self.mix, self.imatrix, self.facts, self.values = mix, imatrix, facts, values
        self.seen: dict[str, int] = {}

    def type_of(self, t: Tensor, start: str) -> str:
        """Return the type of the next tensor, before its row length is checked."""
        if t.use is Use.HEAD or (t.use is Use.EMBEDDING and self.facts.tied):
            return self._head(t, start)
        if self.mix == "mxfp4_moe":
            return "mxfp4_ggml" if t.stacked else "q8_0"
        if t.use is Use.EMBEDDING:
            return self._embedding() or start
        use = "value" if t.use in VALUES else t.use
        ordinal = self.seen.get(use, 0)
        self.seen[use] = ordinal + 1
        rule = _LOW_RULES.get(use) if self.mix in _LOWEST else _RULES.get(use)
        layer = t.layer if self.facts.experts > 1 and use in (Use.UP, Use.GATE, Use.DOWN) else ordinal
        if use == "value" or (self.mix in _LOWEST):
            layer = ordinal
        return (rule(self, layer) if rule else None) or start

    def _head(self, t: Tensor, start: str) -> str:
        if self.mix == "mxfp4_moe" or self.facts.falcon or t.row % BLOCKS[start][0]:
            return "q8_0"
        if self.mix in _LOWEST or self.mix == "iq3_xxs":
            return "q5_k"
        return "q8_0" if start == "q8_0" else "q6_k"

    def _embedding(self) -> str | None:
        if self.mix in ("iq2_xxs", "iq2_xs", "iq1_s", "iq1_m"):
            return "q2_k"
        if self.mix in (*_TWO_BITS, "iq3_xxs"):
            return "iq3_s"
        return "q4_k" if self.mix in ("tq1_0", "tq2_0") else None

    @property
    def eight(self) -> bool:
        return self.facts.experts == 8

    @property
    def shared(self) -> bool:
        return self.facts.queries_per_kv >= 4


def _low_value(m: _Mixture, layer: int) -> str:
    if m.shared or m.facts.experts >= 4:
        return "q4_k"
    return "iq3_s" if m.mix in _TWO_BITS else "q2_k"


def _low_key(m: _Mixture, layer: int) -> str | None:
    return "q4_k" if m.eight else None


def _low_down(m: _Mixture, layer: int) -> str | None:
    if layer >= m.facts.layers // 8:
        return None
    return "iq3_s" if m.mix in _TWO_BITS else "q2_k"


def _low_output(m: _Mixture, layer: int) -> str | None:
    if m.eight:
        return "q5_k"
    if m.mix in ("iq1_s", "iq1_m"):
        return "iq2_xxs"
    return "iq3_s" if m.mix in _TWO_BITS else None


def _value(m: _Mixture, ordinal: int) -> str:
    found = _plain_value(m, ordinal) or MIXES[m.mix]
    if m.facts.seventy and found in ("q3_k", "q4_k"):
        found = "q5_k"
    return "q8_0" if m.eight else found


def _plain_value(m: _Mixture, ordinal: int) -> str | None:
    if m.mix in ("q4_k_m", "q5_k_m"):
        return "q6_k" if more_bits(ordinal, m.values) else None
    by_mix = {
        "q2_k": "q4_k" if m.shared else "q3_k",
        "q2_k_s": "q4_k" if m.shared else None,
        "iq3_xxs": "q4_k" if m.shared else "iq3_xxs" if m.imatrix else "iq3_s",
        "iq3_xs": "q4_k" if m.shared else None,
        "iq3_s": "q4_k" if m.shared else None,
        "iq3_m": "q4_k",
        "q3_k_m": "q5_k" if ordinal < 2 else "q4_k",
        "q3_k_l": "q5_k",
        "iq4_nl": "q5_k" if m.shared else None,
        "iq4_xs": "q5_k" if m.shared else None,
        "q4_k_s": "q5_k" if ordinal < 4 else None,
    }
    return by_mix.get(m.mix)


def _key(m: _Mixture, layer: int) -> str | None:
    return "q8_0" if m.eight else _query(m, layer)


def _query(m: _Mixture, layer: int) -> str | None:
    return {"iq3_xs": "iq3_xxs", "iq3_xxs": "iq2_s"}.get(m.mix)


def _down(m: _Mixture, layer: int) -> str | None:
    layers, falcon = m.facts.layers, m.facts.falcon
    first, more = layer < layers // 8, more_bits(layer, layers)
    if m.mix == "q4_k_m" and falcon:
        return "q6_k" if layer < layers // 16 else "q5_k" if more else None
    if m.mix == "q3_k_m":
        return "q5_k" if layer < layers // 16 else "q4_k" if more or not falcon else None
    by_mix = {
        "q2_k": "q3_k",
        "q2_k_s": "q4_k" if first else None,
        "iq3_xxs": None if m.imatrix else "q4_k" if first else "q3_k",
        "iq3_m": "q4_k" if first or (m.eight and more) else None,
        "q3_k_l": "q4_k" if falcon else "q5_k",
        "q4_k_m": "q6_k" if more else None,
        "q5_k_m": "q6_k" if more else None,
        "iq4_nl": "q5_k" if first and not m.imatrix else None,
        "iq4_xs": "q5_k" if first and not m.imatrix else None,
        "q4_k_s": "q5_k" if first and not falcon else None,
        "q4_0": "q4_1" if first and m.imatrix else None,
        "q5_0": "q5_1" if first and m.imatrix else None,
    }
    return by_mix.get(m.mix)


_EIGHT_OUTPUT = ("q2_k", "iq3_xs", "iq3_xxs", "q3_k_s", "q3_k_m", "iq4_nl", "q4_k_s", "q4_k_m", "iq3_s", "iq3_m", "iq4_xs")
_OUTPUT = {"q2_k": "q3_k", "iq3_xxs": "iq3_s", "q3_k_m": "q4_k", "q3_k_l": "q5_k", "iq3_m": "q4_k"}


def _output(m: _Mixture, layer: int) -> str | None:
    if m.facts.falcon:
        return "q4_k" if m.mix == "q3_k_l" else None
    if m.eight:
        return "q5_k" if m.mix in _EIGHT_OUTPUT else None
    return _OUTPUT.get(m.mix)


def _up(m: _Mixture, layer: int) -> str | None:
    inner = m.facts.layers // 8 <= layer < 7 * m.facts.layers // 8
    return "iq3_xxs" if m.mix == "iq3_xs" and inner else None


_LOW_RULES = {"value": _low_value, Use.K: _low_key, Use.DOWN: _low_down, Use.O: _low_output}
_RULES = {"value": _value, Use.K: _key, Use.Q: _query, Use.DOWN: _down, Use.O: _output, Use.UP: _up, Use.GATE: _up}


def ordered(tensors: Iterable[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
    """Return (name, tensor) in llama.cpp's order: tensors outside the layers, then by layer, then by name."""
    return sorted(tensors, key=lambda named: (named[1].layer, named[0]))
