"""Every operator of DeepSeek-V3 by hand, in both forms of MLA, the choice of the form, and DSA's indexer.

D = 7168, 128 heads, queries through rank 1536, latents of 512 with a RoPE key of 64, keys of 128 and values of 128.
"""

import pytest
from conftest import unfused
from specs import sparse, stack

from kvcalc import Batch, Cost, Operator, Precision, Sequences, UserError, forward, load_gpu, load_model, total
from kvcalc.gpu.gpu import roofline
from kvcalc.layers.attention import Latent, SharedCompressed

D, H, RQ, R, DN, DR, DV, V = 7168, 128, 1536, 512, 128, 64, 128, 129_280
F, EXPERTS, TOP, FE = 18_432, 256, 8, 2048
E = 2
BF16 = Precision("bf16")


def operators(
    batch: Batch, layer: str, precision: Precision = BF16, form: str = "auto", name: str = "deepseek-v3"
) -> dict[str, Operator]:
    found = forward(load_model(name), batch, precision, mla_form=form)
    return {o.name: o for o in unfused(found) if o.layer == layer}


def gemm(rows: int, inputs: int, outputs: int, copies: int = 1) -> Cost:
    """Return the cost of a GEMM. Block-diagonal copies have separate inputs."""
    size = copies * inputs * outputs
    return Cost(2 * rows * size, weight_bytes=size * E, activation_bytes=rows * copies * (inputs + outputs) * E)


def around(t: int) -> dict[str, Cost]:
    """Return the operators of both forms, for t tokens."""
    turned, normed = (H + 1) * DR, RQ + R
    return {
        "norm": Cost(0, 4 * t * D, D * E, activation_bytes=2 * t * D * E),
        "qkv_down": gemm(t, D, RQ + R + DR),
        "q_up": gemm(t, RQ, H * (DN + DR)),
        "rope": Cost(0, t * (3 * turned + 4 * normed), normed * E, activation_bytes=2 * t * (turned + normed) * E),
        "o": gemm(t, H * DV, D),
    }


def absorbed(t: int, pairs: int, rows: int) -> dict[str, Cost]:
    """Return attention of 128 heads on one latent: keys of 576, values of 512, for `rows` cached rows of 1152 bytes."""
    return around(t) | {
        "absorb_q": gemm(t, DN, R, H),
        "attention": Cost(
            flops=2 * pairs * H * (576 + 512),
            vector_flops=5 * pairs * H,
            cache_read_bytes=rows * 1152,
            cache_write_bytes=t * 1152,
            activation_bytes=t * H * (576 + 512) * E,
        ),
        "absorb_v": gemm(t, R, DV, H),
    }


def expanded(t: int, pairs: int, rows: int) -> dict[str, Cost]:
    """Return keys and values of all `rows` tokens from their latents (1024 bytes), then MHA with widths 192 and 128."""
    width = H * (DN + DV)
    return around(t) | {
        "kv_up": Cost(
            flops=2 * rows * R * width,
            weight_bytes=R * width * E,
            cache_read_bytes=rows * 1024,
            cache_write_bytes=t * 1024,
            activation_bytes=rows * width * E,
        ),
        "attention": Cost(
            flops=2 * pairs * H * (192 + 128),
            vector_flops=5 * pairs * H,
            cache_read_bytes=rows * 128,
            cache_write_bytes=t * 128,
            activation_bytes=(t * H * (192 + 128) + rows * width) * E,
        ),
    }


def dense(t: int) -> dict[str, Cost]:
    return {"gate_up": gemm(t, D, 2 * F), "activation": Cost(0, 8 * t * F, activation_bytes=3 * t * F * E), "down": gemm(t, F, D)}


def experts(t: int, reached: float) -> dict[str, Cost]:
    """Return the experts: `reached` experts are read, and each of t tokens runs through 8 and through the shared expert."""
    found = {"router": gemm(t, D, EXPERTS)}
    for name, rows, copies in (("experts", t * TOP, reached), ("shared", t, 1)):
        gate_up, down = gemm(rows, D, 2 * FE), gemm(rows, FE, D)
        found[f"{name}_gate_up"] = gate_up._replace(weight_bytes=int(copies * 2 * D * FE * E + 0.5))
        found[f"{name}_activation"] = Cost(0, 8 * rows * FE, activation_bytes=3 * rows * FE * E)
        found[f"{name}_down"] = down._replace(weight_bytes=int(copies * D * FE * E + 0.5))
    # The routed experts are one operator: it reads and writes each token once, and keeps the rest on the chip.
    for name in ("experts_gate_up", "experts_down"):
        found[name] = found[name]._replace(activation_bytes=t * D * E)
    found["experts_activation"] = found["experts_activation"]._replace(activation_bytes=0)
    return found


@pytest.mark.parametrize("form", ["auto", "absorbed"])
@pytest.mark.parametrize(("context", "batch_size"), [(4096, 1), (4096, 3), (131_072, 1)])
def test_decode(context: int, batch_size: int, form: str) -> None:
    batch, seen = Batch.decode(context, batch_size), context * batch_size
    by_hand = absorbed(batch_size, seen, seen)
    assert {n: o.cost for n, o in operators(batch, "dense", form=form).items()} == by_hand | dense(batch_size)
    reached = TOP if batch_size == 1 else 256 * (1 - (1 - 1 / 32) ** 3)
    assert {n: o.cost for n, o in operators(batch, "moe", form=form).items()} == by_hand | experts(batch_size, reached)


@pytest.mark.parametrize("form", ["auto", "expanded"])
@pytest.mark.parametrize(("context", "batch_size"), [(4096, 1), (1000, 2)])
def test_prefill(context: int, batch_size: int, form: str) -> None:
    batch, t = Batch.prefill(context, batch_size), context * batch_size
    by_hand = expanded(t, batch_size * context * (context + 1) // 2, t)
    assert {n: o.cost for n, o in operators(batch, "dense", form=form).items()} == by_hand | dense(t)
    reached = 256 * (1 - (1 - 1 / 32) ** t)
    assert {n: o.cost for n, o in operators(batch, "moe", form=form).items()} == by_hand | experts(t, reached)


def test_the_other_form_in_each_phase() -> None:
    found = operators(Batch.decode(4096), "dense", form="expanded")
    assert {n: o.cost for n, o in found.items()} == expanded(1, 4096, 4096) | dense(1)
    found = operators(Batch.prefill(512), "dense", form="absorbed")
    assert {n: o.cost for n, o in found.items()} == absorbed(512, 512 * 513 // 2, 512) | dense(512)


def test_as_published_in_fp8_with_scales_of_128_by_128() -> None:
    """FLOPs are equal, a weight has one byte and a block one fp32. Router, norms, embedding and head are in bf16."""
    batch = Batch.decode(4096)
    bf16, fp8 = operators(batch, "moe"), operators(batch, "moe", Precision())
    blocks = {
        "qkv_down": 56 * (12 + 5),  # 576 columns are 4.5 blocks: each of the two matrices has its own edge
        "q_up": 12 * 192,
        "absorb_q": 128 * 1 * 4,
        "absorb_v": 128 * 4 * 1,
        "o": 128 * 56,
        "experts_gate_up": 8 * 2 * 56 * 16,
        "experts_down": 8 * 16 * 56,
        "shared_gate_up": 2 * 56 * 16,
        "shared_down": 16 * 56,
    }
    for name, o in fp8.items():
        assert o.cost._replace(weight_bytes=0) == bf16[name].cost._replace(weight_bytes=0)
        half = bf16[name].cost.weight_bytes // 2
        assert o.cost.weight_bytes == (half + 4 * blocks[name] if name in blocks else 2 * half)
        assert o.dtype == ("fp8" if name in blocks else "bf16" if o.cost.flops else "")


# past·512·256 multiply-adds are saved against 768 more a pair: with much behind them, up to 170 queries absorb.
@pytest.mark.parametrize(
    ("new", "past", "form"),
    [
        (1, 0, "expanded"),
        (1, 1, "absorbed"),
        (4096, 0, "expanded"),
        (169, 10_000, "absorbed"),  # 1,310,720,000 against 1,704,365 · 768 = 1,308,952,320
        (170, 10_000, "expanded"),  # against 1,714,535 · 768 = 1,316,762,880
        (170, 10**9, "absorbed"),
        (171, 10**9, "expanded"),
        (512, 131_072, "expanded"),
    ],
)
def test_the_form_with_fewer_flops_is_chosen(new: int, past: int, form: str) -> None:
    batch = Batch((Sequences(1, new, past),))
    auto, chosen, other = (
        forward(load_model("deepseek-v3"), batch, mla_form=f)
        for f in ("auto", form, "absorbed" if form == "expanded" else "expanded")
    )
    assert auto == chosen
    assert total(chosen).flops < total(other).flops
    assert ("absorb_q" in {o.name for o in auto}) == (form == "absorbed")


def test_each_group_has_its_own_form_and_the_weights_are_read_once() -> None:
    """A prefill of 1000 tokens and four decodes: W_UK and W_UV are the matrix that the expanded form reads."""
    batch = Batch((Sequences(1, 1000, 0), Sequences(4, 1, 4095)))
    found = [o for o in forward(load_model("deepseek-v3"), batch, BF16) if o.layer == "dense"]
    names = [o.name for o in found]
    assert names.count("attention") == 2
    assert {"absorb_q", "absorb_v", "kv_up"} <= set(names)
    held = sum(o.cost.weight_bytes for o in found if o.name in ("absorb_q", "absorb_v", "kv_up"))
    assert held == R * H * (DN + DV) * E
    parts = (absorbed(4, 4 * 4096, 4 * 4096)["attention"], expanded(1000, 500_500, 1000)["attention"])
    assert [o.cost for o in found if o.name == "attention"] == list(parts)


def test_a_tie_of_flops_goes_to_fewer_bytes() -> None:
    """One head, rank 6, key 1, value 2, no RoPE: a token after one other token needs 42 multiply-adds in both forms.

    Expanded 2·6·3 + 2·3, absorbed 6·3 + 2·12. Moved elements: expanded 6 out of kv_up, 3 + 6 around attention; absorbed 7
    + 12 + 8.
    """
    part = Latent(num_attention_heads=1, kv_lora_rank=6, qk_nope_head_dim=1, qk_rope_head_dim=0, v_head_dim=2)
    batch = Batch((Sequences(1, 1, 1),))
    auto, plain, inner = (forward(stack(part), batch, mla_form=f) for f in ("auto", "expanded", "absorbed"))
    assert total(plain).flops == total(inner).flops
    assert total(inner).bytes - total(plain).bytes == (27 - 15) * 2
    assert auto == plain


def test_unknown_form() -> None:
    with pytest.raises(UserError, match=r"unknown MLA form 'naive'.*absorbed, expanded"):
        forward(load_model("deepseek-v3"), Batch.decode(10), mla_form="naive")


DSA_CONTEXT = 131_072


def test_dsa_decode() -> None:
    """Scores over all index keys by 64 heads of 128; attention over 2048 latents. The rest is V3's."""
    found = operators(Batch.decode(DSA_CONTEXT), "dense", name="deepseek-v3.2")
    mla = absorbed(1, 2048, 2048)
    index = {
        "index_q": gemm(1, RQ, 64 * 128),
        "index_k": gemm(1, D, 128 + 64),
        "indexer": Cost(
            flops=2 * DSA_CONTEXT * 64 * 128,
            vector_flops=3 * DSA_CONTEXT * 64,
            cache_read_bytes=DSA_CONTEXT * 256,
            cache_write_bytes=256,
            activation_bytes=(64 * 128 + DSA_CONTEXT) * E,
        ),
        "top_k": Cost(0, 2 * DSA_CONTEXT, activation_bytes=(DSA_CONTEXT + 2048) * E),
    }
    rope = mla["rope"]._replace(weight_bytes=mla["rope"].weight_bytes + 2 * 128 * E)  # the LayerNorm of the index key
    assert {n: o.cost for n, o in found.items()} == mla | index | dense(1) | {"rope": rope}


def test_dsa_prefill_caps_each_query_at_top_k() -> None:
    """Tokens 1 … 2048 see all earlier tokens, the other 2048 see 2048. The indexer scores every pair."""
    found = operators(Batch.prefill(4096), "dense", name="deepseek-v3.2", form="absorbed")
    assert found["attention"].cost.flops == 2 * (2048 * 2049 // 2 + 2048 * 2048) * H * (576 + 512)
    assert found["indexer"].cost.flops == 2 * (4096 * 4097 // 2) * 64 * 128
    (index,) = roofline([found["indexer"]], load_gpu("h200"))  # in fp8 over a cache in bf16, 1,979 TFLOP/s
    assert index.seconds == pytest.approx(3 * 4096 * 4097 * 64 * 128 / 1979e12)
    assert found["attention"].cost.cache_read_bytes == 4096 * 1152  # together they may want every latent


def test_a_layer_that_reuses_an_index_has_no_indexer() -> None:
    own, reused = ({o.name for o in forward(stack(sparse(indexer=i)), Batch.decode(100))} for i in (True, False))
    assert own - reused == {"index_q", "index_k", "indexer", "top_k"}


@pytest.mark.parametrize(("past", "new", "rows"), [(0, 3, 0), (0, 4, 1), (3, 6, 2), (8, 1, 0), (11, 1, 1)])
def test_index_keys_are_made_of_finished_rows_alone(past: int, new: int, rows: int) -> None:
    """A row is complete after every 4 tokens: 3 + 6 tokens have 9 // 4 = 2 rows, none of which was complete before."""
    part = SharedCompressed(
        num_attention_heads=8, head_dim=32, qk_rope_head_dim=8, q_lora_rank=16, o_lora_rank=16, o_groups=2, sliding_window=64,
        compress_ratio=4, index_topk=16, index_n_heads=4, index_head_dim=24, lends=True,
    )  # fmt: skip
    made = [o.cost for o in forward(stack(part), Batch((Sequences(1, new, past),))) if o.name == "row_index_k"]
    assert [cost.flops for cost in made] == [2 * rows * 32 * 24]
    assert [cost.activation_bytes for cost in made] == [2 * rows * (32 + 24)]
