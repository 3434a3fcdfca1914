"""Bytes of a row in every cache format, by hand, and the format of each role of the cache."""

import pytest
from specs import grouped, latent, sparse, stack

from kvcalc import Precision, UserError, cache_size
from kvcalc.model.memory import mha_ratio
from kvcalc.storage.formats import FORMATS, KEYS_AND_VALUES_ONLY, cache_dtypes, cache_layout, canonical

# bytes of 128 and of 80 elements
ROWS = {
    "fp64": (128 * 8, 80 * 8),
    "fp32": (128 * 4, 80 * 4),
    "bf16": (128 * 2, 80 * 2),
    "fp16": (128 * 2, 80 * 2),
    "fp8": (128, 80),  # scaled per tensor: no scale in the cache
    "int8": (128, 80),
    "int4": (64 + 4 * 2, 40 + 3 * 2),  # an fp16 scale for 32
    "nvfp4": (64 + 8, 40 + 5),  # an fp8 scale for 16: 0.5625 bytes per element
    "mxfp4": (64 + 4, 40 + 3),  # a byte for 32
    "mxfp8": (128 + 4, 80 + 3),
    "fp8_per_token_head": (128 + 4, 80 + 4),  # one fp32 per token and head
    "int8_per_token_head": (128 + 4, 80 + 4),
    "int4_per_token_head": (64 + 4, 40 + 4),
    "fp8_block128": (128 + 4, 80 + 4),
    "turboquant_key4": (64 + 2, 40 + 2),  # an fp16 norm
    "turboquant_key3": (48 + 2, 30 + 2),
    "turboquant_value4": (64 + 4, 40 + 4),  # an fp16 scale and zero point
    "turboquant_value3": (48 + 4, 30 + 4),
    "q8_0": (4 * 34, 3 * 34),  # whole blocks of 32: an fp16 scale beside them
    "q5_1": (4 * 24, 3 * 24),
    "q5_0": (4 * 22, 3 * 22),
    "q4_1": (4 * 20, 3 * 20),
    "q4_0": (4 * 18, 3 * 18),
    "iq4_nl": (4 * 18, 3 * 18),
}


def test_row_bytes() -> None:
    assert {name: (format_.row_bytes(128), format_.row_bytes(80)) for name, format_ in FORMATS.items()} == ROWS


def test_odd_widths_round_up_to_bytes() -> None:
    assert (FORMATS["int4"].row_bytes(1), FORMATS["int4"].row_bytes(33), FORMATS["fp8"].row_bytes(1)) == (1 + 2, 17 + 2 * 2, 1)


@pytest.mark.parametrize("name", ["fp16", "int8", "int4", "nvfp4", "mxfp4", "int8_per_token_head", "q8_0", "q4_0"])
def test_a_cache_of_keys_and_values(name: str) -> None:
    """2 KV heads of 128 in 3 layers, 10 tokens, 4 sequences."""
    size = cache_size(stack(grouped(width=128), layers=3), 10, 4, Precision(kv_cache_dtype=name))
    assert size.stored == 4 * 3 * 10 * 2 * 2 * ROWS[name][0]


@pytest.mark.parametrize(
    ("dtype", "mla", "index"),
    [
        ("bf16", (512 + 64) * 2, 256),
        ("fp32", (512 + 64) * 4, 512),
        ("fp8", 512 + 64, 128 + 4),  # the index key alone has a scale
        ("int8", 512 + 64, 128 + 4),
        ("fp8_ds_mla", 512 + 4 * 4 + 64 * 2, 128 + 4),  # 656: an fp32 per 128 latents, the RoPE key in bf16
        ("nvfp4", (512 + 64) * 9 // 16, 128 * 9 // 16),
    ],
)
def test_a_row_of_latent_and_index_key(dtype: str, mla: int, index: int) -> None:
    precision = Precision(kv_cache_dtype=dtype)
    plain = cache_size(stack(latent(rank=512, rope=64)), 1, precision=precision).stored
    chosen = cache_size(stack(sparse(rank=512, rope=64, index_head_dim=128)), 1, precision=precision).stored
    assert (plain, chosen - plain) == (mla, index)


@pytest.mark.parametrize("dtype", ["fp8_ds_mla", "nvfp4_ds_mla"])
def test_latent_layouts_refuse_keys_and_values(dtype: str) -> None:
    with pytest.raises(UserError, match="latent attention"):
        cache_size(stack(grouped()), 1, precision=Precision(kv_cache_dtype=dtype))


def test_spellings() -> None:
    for names in ("float16 fp16", "half fp16", "BFloat16 bf16", "fp8_e4m3 fp8", "fp8_e5m2 fp8", "torch.float32 fp32"):
        spelling, name = names.split()
        assert canonical(spelling) == name
        assert cache_layout(spelling) == cache_layout(name)


@pytest.mark.parametrize(("bad", "near"), [("fp7", "fp8"), ("int44", "int4"), ("bf161", "bf16"), ("q8_1", "q8_0")])
def test_unknown_formats_name_their_neighbours(bad: str, near: str) -> None:
    with pytest.raises(UserError, match=rf"{bad}.*{near}"):
        cache_layout(bad)


def test_auto_is_the_models_dtype_or_what_the_checkpoint_declares() -> None:
    half, eighth = stack(grouped()), stack(grouped(), kv_cache_dtype="fp8")
    assert cache_size(half, 10).stored == 2 * cache_size(eighth, 10).stored
    assert cache_size(eighth, 10, precision=Precision(kv_cache_dtype="bf16")).stored == cache_size(half, 10).stored
    assert cache_size(eighth, 10, precision=Precision(dtype="bf16")).stored == cache_size(half, 10).stored
    assert cache_size(stack(grouped(), dtype="fp32"), 10).stored == 2 * cache_size(half, 10).stored
    assert cache_size(half, 10, precision=Precision(dtype="fp8")).stored == cache_size(half, 10).stored


def test_every_cache_dtype_sizes_latent_attention() -> None:
    model = stack(latent(rank=512, rope=64))
    names = [name for name in cache_dtypes() if name not in KEYS_AND_VALUES_ONLY]
    sizes = {name: cache_size(model, 64, precision=Precision(kv_cache_dtype=name)).stored for name in names}
    assert sizes["fp64"] == 64 * 576 * 8
    assert all(0 < size <= sizes["fp64"] for size in sizes.values())
    assert "fp8_block128" not in sizes  # a format of one role, not of a cache


@pytest.mark.parametrize("name", KEYS_AND_VALUES_ONLY)
def test_turboquant_stores_keys_and_values_apart(name: str) -> None:
    """2 KV heads of 128 in 3 layers, 10 tokens: 8, 4 or 3 bits, an fp16 norm per key, an fp16 scale and zero point per value."""
    rows = {"k8v4": 128 + 68, "4bit_nc": 66 + 68, "k3v4_nc": 50 + 68, "3bit_nc": 50 + 52}
    size = cache_size(stack(grouped(width=128), layers=3), 10, precision=Precision(kv_cache_dtype=name))
    assert size.stored == 3 * 10 * 2 * rows[name.removeprefix("turboquant_")]
    assert mha_ratio(stack(grouped(8, 2)), 10, Precision(kv_cache_dtype=name)) == 8 / 2
    with pytest.raises(UserError, match="is for keys and values"):
        cache_size(stack(latent()), 10, precision=Precision(kv_cache_dtype=name))
