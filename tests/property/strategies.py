"""Draw random models from all mixers and feed-forward parts in the code, in any order of layers.

No part is listed here. The strategy of a part follows from the types and bounds of its fields and from its
`problem()`. So a new variant in `Mixer` is drawn and tested by every property of `mixers`.
"""

import importlib
import pkgutil
from functools import cache
from typing import Any

import msgspec
from hypothesis import reject
from hypothesis import strategies as st
from specs import of_kinds

from kvcalc import Batch, Layer, Model, Precision, Sequences, layers
from kvcalc.layers.attention import Grouped, Latent, Sparse
from kvcalc.layers.batch import ONE_GPU
from kvcalc.layers.part import Sublayer
from kvcalc.layers.parts import FFNS, MIXERS
from kvcalc.layers.passes import Pass
from kvcalc.layers.recurrent.delta_rule import RecurrentMixer
from kvcalc.model.precision import formats_of

HIDDEN = 64  # width of the residual stream of every model drawn
MOST_TRIES = 8  # to meet a part whose fields agree with each other
REPEATED = ("hidden_size", "shift_size")  # fields of parts that repeat it

contexts = st.integers(1, 300_000)
batches = st.integers(1, 10**6)
blocks = st.sampled_from([1, 8, 16, 64, 100, 256])
widths = st.sampled_from([8, 16, 64, 80, 128])
cache_dtypes = st.sampled_from(["bf16", "fp32", "fp8", "int8", "int4", "nvfp4", "mxfp4", "int8_per_token_head", "q8_0", "q4_0"])
SIZES = [1, 2, 3, 4, 8, 16, 64, 80, 128]
tokens = st.integers(1, 5000)
groups = st.builds(Sequences, st.integers(1, 50), st.integers(1, 300), st.integers(0, 20_000))


def all_parts() -> tuple[type[Sublayer], ...]:
    """Return every part that a module of `kvcalc.layers` defines, listed or not."""
    for module in pkgutil.walk_packages(layers.__path__, "kvcalc.layers."):
        importlib.import_module(module.name)
    found, waiting = [], [Sublayer]
    while waiting:
        here = waiting.pop()
        waiting += here.__subclasses__()
        found += [c for c in here.__subclasses__() if c is not RecurrentMixer and c.__module__.startswith("kvcalc.layers.")]
    return tuple(sorted(found, key=lambda c: c.__name__))


MIXERS: tuple[type[Sublayer], ...] = MIXERS
FEED_FORWARD: tuple[type[Sublayer], ...] = FFNS


def _values(of: msgspec.inspect.Type) -> st.SearchStrategy[Any]:
    """Return a strategy for small values of a field's type, within its bounds."""
    match of:
        case msgspec.inspect.IntType(ge=least, le=most):
            low, high = least or 0, most or 10**8
            few = [n for n in (0, *SIZES) if low <= n <= high]
            return st.sampled_from(few) if few and high <= 10**8 else st.integers(low, min(high, low + 5000))
        case msgspec.inspect.BoolType():
            return st.booleans()
        case msgspec.inspect.NoneType():
            return st.none()
        case msgspec.inspect.LiteralType(values=known):
            return st.sampled_from(known)
        case msgspec.inspect.UnionType(types=several):
            return st.one_of(*map(_values, several))
        case msgspec.inspect.DictType(value_type=inner):
            return st.dictionaries(st.sampled_from("abcdef"), _values(inner), min_size=1, max_size=3)
        case msgspec.inspect.VarTupleType(item_type=inner, min_length=least, max_length=most):
            return st.lists(_values(inner), min_size=least or 0, max_size=most or 3).map(tuple)
    raise TypeError(f"no strategy for a field of {of}")


@cache
def _fields(part: type[Sublayer]) -> tuple[dict[str, st.SearchStrategy[Any]], dict[str, st.SearchStrategy[Any]]]:
    """Return a strategy for each required field of a part, and for each field with a default."""
    described = msgspec.inspect.type_info(part)
    assert isinstance(described, msgspec.inspect.StructType)
    drawn = {f.encode_name: st.just(HIDDEN) if f.encode_name in REPEATED else _values(f.type) for f in described.fields}
    needed = {f.encode_name: drawn[f.encode_name] for f in described.fields if f.required}
    return needed, {name: values for name, values in drawn.items() if name not in needed}


@st.composite
def _built(draw: st.DrawFn, part: type[Any], given: dict[str, st.SearchStrategy[Any]]) -> Any:
    needed, optional = _fields(part)
    free = [name for name in optional if name not in given]
    for _ in range(MOST_TRIES):
        many = draw(st.sampled_from([0, 1, 2, 4, len(free)]))
        names = free if many >= len(free) else draw(st.lists(st.sampled_from(free), max_size=many, unique=True))
        fields = needed | {name: optional[name] for name in names} | given
        drawn = part(**{name: draw(values) for name, values in fields.items()})
        if not drawn.problem():
            return drawn
    return reject()


def of(part: type[Any], **given: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Draw parts of one class without a problem: with none, a few or all optional fields changed, and some fields given."""
    return _built(part, given)


def _products_after(part: Sublayer, past: int) -> Any:
    """Return the FLOPs of the matrix products of one token after `past` tokens."""
    model = of_kinds({"k": Layer(parts=(part,))}, layers=1)  # type: ignore[arg-type]
    p = Pass(HIDDEN, Batch((Sequences(1, 1, past),)), formats_of(model, Precision()), ONE_GPU, "absorbed")
    return sum(o.cost.flops for o in part.operators(p) if o.kind == "gemm")


def projects_each_token_once(part: Sublayer) -> bool:
    """Return whether cached keys and values are used as stored. Otherwise each step projects all tokens again,
    or nothing is cached."""
    return (not part.attends or bool(part.cache())) and _products_after(part, 0) == _products_after(part, 500)


def rows_are_tokens(part: Sublayer) -> bool:
    """Return whether each growing row belongs to one token, so that no block has to be complete."""
    return all(e.ratio == 1 for e in part.cache())


mixers: st.SearchStrategy[Sublayer] = st.one_of(*map(of, MIXERS))
attention = st.one_of(*(of(c).filter(lambda p: p.attends) for c in MIXERS if c.as_mha is not Sublayer.as_mha))
feed_forward: st.SearchStrategy[Sublayer] = st.one_of(*map(of, FEED_FORWARD))
PLAIN: dict[str, Any] = {"cached": True, "k_is_v": False, "kv_projection": True, "qo_projection": True}
LIMITS = dict.fromkeys(("sliding_window", "attention_chunk_size", "cache_budget", "input_size"))
grouped = of(Grouped, **{name: st.just(value) for name, value in PLAIN.items()})
unlimited = of(Grouped, **{name: st.just(value) for name, value in {**PLAIN, **LIMITS}.items()})
latent, sparse = of(Latent), of(Sparse)


@st.composite
def models(draw: st.DrawFn, mixers: st.SearchStrategy[Sublayer] = mixers) -> Model:
    """Draw a model with one to three kinds of layer, in any order and depth."""
    parts = draw(st.lists(st.tuples(mixers, feed_forward), min_size=1, max_size=3))
    kinds = {f"k{i}": Layer(parts=pair, norms=draw(st.none() | st.integers(0, 4))) for i, pair in enumerate(parts)}  # type: ignore[arg-type]
    runs = draw(st.lists(st.tuples(st.integers(1, 4), st.sampled_from(sorted(kinds))), min_size=1, max_size=5))
    return of_kinds(
        kinds,
        hidden_size=HIDDEN,
        layers=draw(st.integers(1, 40)),
        pattern=tuple(f"{n} {kind}" if n > 1 else kind for n, kind in runs),
        tie_word_embeddings=draw(st.booleans()),
        norm=draw(st.sampled_from(["rms", "layer", "layer_no_bias", "none"])),
        dtype=draw(st.sampled_from(["bf16", "fp16", "fp32"])),
        position_embeddings=draw(st.integers(0, 100)),
    )
