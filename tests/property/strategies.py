"""Random models: every mixer there is, small sizes, any order of layers."""

import msgspec
from hypothesis import strategies as st
from specs import of_kinds

from kvcalc import Layer, Model
from kvcalc.layers.attention import (
    BlockSparse,
    Compressed,
    GatedDeltaNet,
    Grouped,
    HiddenStates,
    KimiDeltaAttention,
    Latent,
    Lightning,
    Mamba,
    Mamba2,
    MatrixLstm,
    RgLru,
    Rwkv,
    ShortConv,
    Sparse,
)
from kvcalc.layers.ffn import Dense, Moe
from kvcalc.layers.part import Part

contexts = st.integers(1, 300_000)
batches = st.integers(1, 10**6)
blocks = st.sampled_from([1, 8, 16, 64, 100, 256])
widths = st.sampled_from([8, 16, 64, 80, 128])
cache_dtypes = st.sampled_from(["bf16", "fp32", "fp8", "int8", "int4", "nvfp4", "mxfp4", "int8_per_token_head", "q8_0", "q4_0"])
heads_and_groups = st.integers(1, 16).flatmap(lambda g: st.tuples(st.integers(1, 8).map(lambda n: n * g), st.just(g)))
optional_tokens = st.none() | st.integers(1, 5000)


@st.composite
def grouped(draw: st.DrawFn, limits: bool = True) -> Grouped:
    heads, groups = draw(heads_and_groups)
    plain = Grouped(
        num_attention_heads=heads, num_key_value_heads=groups, head_dim=draw(widths), v_head_dim=draw(st.none() | widths),
        q_bias=draw(st.booleans()), qk_norm=draw(st.sampled_from([None, "head", "full"])), sinks=draw(st.booleans()),
    )  # fmt: skip
    if not limits:
        return plain
    field = draw(st.sampled_from(["sliding_window", "attention_chunk_size", "cache_budget", None]))
    fields = {field: draw(st.integers(1, 5000))} if field else {}
    sink_tokens = draw(st.integers(0, 8)) if field == "sliding_window" else 0
    return msgspec.structs.replace(plain, sink_tokens=sink_tokens, **fields)


latent_fields = {
    "num_attention_heads": st.integers(1, 64), "kv_lora_rank": st.integers(1, 512), "qk_nope_head_dim": widths,
    "qk_rope_head_dim": st.integers(0, 64), "v_head_dim": widths, "q_lora_rank": st.none() | widths,
}  # fmt: skip
latent = st.builds(Latent, **latent_fields, sliding_window=optional_tokens)
sparse = st.builds(
    Sparse, **latent_fields, index_topk=st.integers(1, 5000), index_n_heads=st.integers(1, 8), index_head_dim=widths,
    indexer=st.booleans(),
)  # fmt: skip
block_sparse = st.builds(
    lambda pair, width, size, top: BlockSparse(
        num_attention_heads=pair[0], num_key_value_heads=pair[1], head_dim=width,
        index_block_size=size, index_topk_blocks=top, index_n_heads=2, index_head_dim=width,
    ),
    heads_and_groups, widths, st.integers(1, 128), st.integers(1, 32),
)  # fmt: skip
hidden = st.builds(
    HiddenStates, num_attention_heads=st.integers(1, 8), head_dim=widths, hidden_size=st.just(64), memory=st.integers(0, 5000),
)  # fmt: skip
growing = st.one_of(grouped(), latent, sparse, block_sparse, hidden)
recurrent: st.SearchStrategy[Part] = st.one_of(
    st.builds(Mamba, intermediate_size=widths, state_size=widths, time_step_rank=widths),
    st.builds(Mamba2, num_heads=st.integers(1, 8), head_dim=widths, state_size=widths, n_groups=st.integers(1, 4)),
    st.builds(
        lambda keys, times, dk, dv: GatedDeltaNet(
            linear_num_key_heads=keys, linear_num_value_heads=keys * times, linear_key_head_dim=dk, linear_value_head_dim=dv
        ),
        st.integers(1, 8), st.integers(1, 4), widths, widths,
    ),
    st.builds(KimiDeltaAttention, num_heads=st.integers(1, 8), head_dim=widths),
    st.builds(Lightning, num_attention_heads=st.integers(1, 8), head_dim=widths),
    st.builds(MatrixLstm, num_heads=st.just(4), qk_size=widths, v_size=widths, qk_head_dim=widths, v_head_dim=widths),
    st.builds(RgLru, lru_width=widths, num_heads=st.sampled_from([1, 2, 4, 8])),
    st.builds(Rwkv, attention_hidden_size=widths, shift_size=st.just(64)),
    st.builds(ShortConv, width=widths, conv_kernel=st.integers(1, 5)),
)  # fmt: skip
compressed = st.builds(
    lambda ratio, overlap, top, window: Compressed(
        num_attention_heads=4, head_dim=64, qk_rope_head_dim=16, q_lora_rank=32, o_lora_rank=32, o_groups=2,
        sliding_window=window, compress_ratio=ratio, overlap=overlap,
        index_topk=top, index_n_heads=4 if top else 0, index_head_dim=16 if top else 0,
    ),
    st.sampled_from([2, 4, 128]), st.booleans(), st.integers(0, 600), st.integers(1, 300),
)  # fmt: skip
feed_forward = st.one_of(
    st.builds(Dense, intermediate_size=st.integers(1, 500), gated=st.booleans(), bias=st.booleans()),
    st.builds(
        Moe, num_experts=st.integers(4, 8), num_experts_per_tok=st.integers(1, 4), moe_intermediate_size=st.integers(1, 64)
    ),
)


@st.composite
def models(draw: st.DrawFn, mixers: st.SearchStrategy[Part] = growing | recurrent) -> Model:
    """One to three kinds of layer in any order, over any depth."""
    parts = draw(st.lists(st.tuples(mixers, feed_forward), min_size=1, max_size=3))
    kinds = {f"k{i}": Layer(parts=pair, norms=draw(st.none() | st.integers(0, 4))) for i, pair in enumerate(parts)}
    runs = draw(st.lists(st.tuples(st.integers(1, 4), st.sampled_from(sorted(kinds))), min_size=1, max_size=5))
    return of_kinds(
        kinds,
        layers=draw(st.integers(1, 40)),
        pattern=tuple(f"{n} {kind}" if n > 1 else kind for n, kind in runs),
        tie_word_embeddings=draw(st.booleans()),
        norm=draw(st.sampled_from(["rms", "layer", "layer_no_bias", "none"])),
        dtype=draw(st.sampled_from(["bf16", "fp16", "fp32"])),
        position_embeddings=draw(st.integers(0, 100)),
    )
