"""Small models, defined in code so that a test shows every number that it uses."""

from typing import Any

from kvcalc import Deployment, Layer, Model, Parallelism, Precision, load_gpu
from kvcalc.capacity import Fit, FitOptions, fit
from kvcalc.layers.attention import Compressed, Grouped, Latent, Sparse
from kvcalc.layers.feed_forward import Dense
from kvcalc.layers.part import Sublayer


def stack(*mixers: Sublayer, layers: int | None = None, hidden_size: int = 64, ffn: int = 128, **fields: Any) -> Model:
    """Return a model with these mixers in turn, one kind each, and a gated FFN after each mixer."""
    parts = [(m, Dense(intermediate_size=ffn)) for m in mixers]
    kinds = {f"k{i}": Layer(parts=pair) for i, pair in enumerate(parts)}  # type: ignore[arg-type]
    return of_kinds(kinds, layers=layers or len(mixers), hidden_size=hidden_size, pattern=tuple(kinds), **fields)


def of_kinds(kinds: dict[str, Layer], **fields: Any) -> Model:
    """Return a model with these kinds of layer, checked like a model from a file."""
    model = Model(**({"name": "inline", "vocab_size": 1000, "hidden_size": 64, "kinds": kinds} | fields))
    assert model.problem() == ("", "")
    return model


def hybrid(heads: int, groups: int, width: int, window: int, local: int, full: int) -> Model:
    """Return grouped attention: first `local` layers with a window, then `full` layers without."""
    part = Grouped(num_attention_heads=heads, num_key_value_heads=groups, head_dim=width)
    near = Grouped(num_attention_heads=heads, num_key_value_heads=groups, head_dim=width, sliding_window=window)
    kinds = {"local": Layer(parts=(near,)), "full": Layer(parts=(part,))}
    return of_kinds(kinds, layers=local + full, pattern=(f"{local} local", f"{full} full"), max_context=131072)


def grouped(heads: int = 8, groups: int = 2, width: int = 16, **fields: Any) -> Grouped:
    return Grouped(num_attention_heads=heads, num_key_value_heads=groups, head_dim=width, **fields)


def latent(heads: int = 8, rank: int = 32, rope: int = 8, **fields: Any) -> Latent:
    return Latent(
        num_attention_heads=heads, kv_lora_rank=rank, qk_nope_head_dim=16, qk_rope_head_dim=rope, v_head_dim=16, **fields
    )


def sparse(heads: int = 8, rank: int = 32, rope: int = 8, top: int = 64, **fields: Any) -> Sparse:
    return Sparse(
        num_attention_heads=heads, kv_lora_rank=rank, qk_nope_head_dim=16, qk_rope_head_dim=rope, v_head_dim=16,
        index_topk=top, **({"index_n_heads": 4, "index_head_dim": 16} | fields),
    )  # fmt: skip


def compressed(**fields: Any) -> Compressed:
    """Return an attention layer with DeepSeek-V4-Flash's sizes: head_dim 512 with 64 rotated elements, a window of 128."""
    given = {"num_attention_heads": 64, "head_dim": 512, "qk_rope_head_dim": 64, "q_lora_rank": 1024}
    return Compressed(**(given | {"o_lora_rank": 1024, "o_groups": 8, "sliding_window": 128} | fields))


def csa() -> Compressed:
    """Return an overlapping layer with 1 entry per 4 tokens. An indexer of width 128 selects 512 entries."""
    return compressed(compress_ratio=4, overlap=True, index_topk=512, index_n_heads=64, index_head_dim=128)


def hca() -> Compressed:
    """Return a layer with 1 entry per 128 tokens."""
    return compressed(compress_ratio=128)


def v4_flash() -> Model:
    """Return DeepSeek-V4-Flash's layers: two layers with only a window, then 21 CSA and 20 HCA layers in turn."""
    kinds = {"window": compressed(), "csa": csa(), "hca": hca()}
    layers = {name: Layer(parts=(part, Dense(intermediate_size=128))) for name, part in kinds.items()}
    pattern = ("2 window", *(["csa", "hca"] * 20), "csa")
    return of_kinds(layers, layers=43, hidden_size=4096, pattern=pattern)


def one_kind(*parts: Sublayer, layers: int = 2, **fields: Any) -> Model:
    """Return a model with equal layers of these parts."""
    return of_kinds({"k": Layer(parts=parts)}, layers=layers, max_context=4096, **fields)  # type: ignore[arg-type]


def fitted(
    model: Model, engine: str, precision: Precision | None = None, ranks: Parallelism | None = None, **options: Any
) -> Fit:
    """Return the `Fit` of a model on one H100, or on several for its ranks."""
    deployment = Deployment(model, load_gpu("h100"), precision or Precision(), ranks or Parallelism())
    return fit(deployment, FitOptions(engine=engine, **options))
