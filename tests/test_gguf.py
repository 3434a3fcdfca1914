"""GGUF files as models, from headers written by hand. Hostile or unknown contents are refused."""

import struct
from pathlib import Path
from typing import Any

import pytest
from conftest import Run
from gguf_files import BF16, F16, F32, Q4_0, Q4_K, Q6_K, Q8_0, Tensors, header, llama, llama_tensors, text, write
from hypothesis import given
from hypothesis import strategies as st

from kvcalc import Batch, Model, Precision, UserError, cache_size, forward, load_model, weight_bytes
from kvcalc.library.gguf_header import Fields, read_header
from kvcalc.library.safetensors_header import read_from
from kvcalc.model.forward_pass import total

# of a layer: q and o 256 × 256, k and v 256 × 128, gate, up and down 256 × 512
LAYER = 2 * 256 * 256 + 2 * 256 * 128 + 3 * 256 * 512
NORMS = 4 * (256 + 3 * 2 * 256)


def load(tmp_path: Path, metadata: dict[str, Any], tensors: Tensors) -> Model:
    return load_model(str(write(tmp_path / "m.gguf", metadata, tensors)))


@pytest.mark.parametrize("version", [2, 3])
def test_a_file_is_a_model_stored_as_it_is(tmp_path: Path, version: int) -> None:
    path = write(tmp_path / "small.gguf", llama(), llama_tensors(down=Q6_K), version)
    model = load_model(str(path))
    assert (model.name, model.family, model.layers, model.hidden_size, model.vocab_size) == ("small", "llama", 3, 256, 1000)
    assert (model.max_context, model.norm, model.tie_word_embeddings) == (4096, "rms", False)
    assert model.parameters == 3 * (LAYER + 512) + 2 * 256 * 1000 + 256
    # 144 bytes for 256 elements, 210 in the head and in the first layer's down; rope factors are bytes and no parameters
    four = (3 * LAYER - 256 * 512 + 256 * 1000) // 256 * 144
    six = (256 * 512 + 256 * 1000) // 256 * 210
    assert weight_bytes(model) == four + six + NORMS + 4 * 32
    assert cache_size(model, 100).stored == 3 * 100 * 2 * 2 * 64 * 2  # K and V of 2 heads of 64 in fp16
    assert sorted(model.counts.values()) == [1, 2]  # layers that are stored otherwise are kinds of their own


def test_a_pass_reads_the_bytes_of_the_file(tmp_path: Path) -> None:
    """It reads all bytes except the embedding, of which a step reads one row of 144 bytes, and the RoPE factors."""
    model = load(tmp_path, llama(), llama_tensors())
    read = total(forward(model, Batch.decode(10))).weight_bytes
    assert read == weight_bytes(model) - 1000 * 144 + 144 - 4 * 32


def test_another_dtype_counts_the_parameters(tmp_path: Path) -> None:
    model = load(tmp_path, llama(), llama_tensors())
    assert weight_bytes(model, Precision(dtype="bf16")) == 2 * model.parameters


def test_the_command_line_takes_a_file(kvcalc: Run, tmp_path: Path) -> None:
    path = write(tmp_path / "small.gguf", llama(), llama_tensors())
    shown = kvcalc(f"size --format json {path}")
    assert shown.records[0]["weight_bytes"] == (3 * LAYER + 256 * 1000) // 256 * 144 + 1000 * 210 + NORMS + 4 * 32
    assert (shown.records[0]["dtype"], shown.records[0]["kv_cache_dtype"]) == ("q4_k_m", "fp16")
    assert "read from the header of a GGUF file (q4_k_m)" in shown.err


def test_a_file_type_that_is_none_leaves_the_files_own_name(tmp_path: Path) -> None:
    """If a list replaces the number of the file type, the formats still follow from the tensors."""
    model = load(tmp_path, llama() | {"general.file_type": [1] * 9}, llama_tensors())
    assert model.quantization[0].label == "gguf"
    assert weight_bytes(model) == weight_bytes(load(tmp_path, llama(), llama_tensors()))


def test_a_tied_head_is_stored_once(tmp_path: Path) -> None:
    tensors = {k: v for k, v in llama_tensors().items() if k != "output.weight"}
    model = load(tmp_path, llama(), tensors)
    assert model.tie_word_embeddings
    assert model.parameters == 3 * (LAYER + 512) + 256 * 1000 + 256
    head = next(o for o in forward(model, Batch.decode(10)) if o.name == "lm_head")
    assert head.cost.weight_bytes == 1000 * 144


def test_what_lies_behind_the_header_is_not_read(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", llama(), llama_tensors())
    before = weight_bytes(load_model(str(path)))
    with path.open("ab") as file:
        file.truncate(1 << 40)  # a hole of a terabyte
    assert weight_bytes(load_model(str(path))) == before


# --- Kinds of block ---


def changed(**blocks: tuple[tuple[int, ...], int] | None) -> Tensors:
    """Return the tensors of one layer with some replaced, added, or left out (None). `_bias` ends the name of a bias."""
    found = llama_tensors(layers=1)
    for name, tensor in blocks.items():
        suffix = "" if name in ("ssm_a", "ssm_d") else ".bias" if name.endswith("_bias") else ".weight"
        key = f"blk.0.{name.removesuffix('_bias')}{suffix}"
        if tensor is None:
            del found[key]
        else:
            found[key] = tensor
    return found


NO_ATTENTION = {"attn_q": None, "attn_k": None, "attn_v": None, "attn_output": None}
SSM = {"llama.ssm.conv_kernel": 4, "llama.ssm.group_count": 2}
REST = 3 * 256 * 512 + 512 + 2 * 256 * 1000 + 256  # of one layer without its attention
ONE = LAYER + 512 + 2 * 256 * 1000 + 256
BLOCKS: dict[str, tuple[dict[str, Any], Tensors, int]] = {
    "biases": ({}, changed(attn_q_bias=((256,), F32), attn_k_bias=((128,), F32), attn_v_bias=((128,), F32)), ONE + 512),
    "norms of queries and keys": ({}, changed(attn_q_norm=((64,), F32), attn_k_norm=((64,), F32)), ONE + 128),
    "norms of all heads": ({}, changed(attn_q_norm=((256,), F32), attn_k_norm=((128,), F32)), ONE + 384),
    "sinks": ({}, changed(attn_sinks=((4,), F32)), ONE + 4),
    "joined queries, keys and values": (
        {},
        changed(attn_q=None, attn_k=None, attn_v=None, attn_qkv=((256, 512), Q4_K), attn_qkv_bias=((512,), F32)),
        ONE + 512,
    ),
    "joined gate and up": ({}, changed(ffn_gate=None, ffn_up=((256, 1024), Q4_K)), ONE),
    "no gate": ({}, changed(ffn_gate=None), ONE - 256 * 512),
    "wide heads": (
        {"llama.attention.key_length": 128, "llama.attention.value_length": 64},
        changed(attn_q=((256, 512), Q4_K), attn_k=((256, 256), Q4_K)),
        ONE + 256 * 256 + 256 * 128,
    ),
    "heads by layer": (
        {"llama.attention.head_count_kv": [1]},
        changed(attn_k=((256, 64), Q4_K), attn_v=((256, 64), Q4_K)),
        ONE - 2 * 256 * 64,
    ),
    "four norms": ({}, changed(post_attention_norm=((256,), F32), post_ffw_norm=((256,), F32)), ONE + 512),
    "a routing bias is no parameter": (
        {"llama.expert_used_count": 2},
        changed(
            ffn_gate=None, ffn_up=None, ffn_down=None, ffn_gate_inp=((256, 8), F32), ffn_gate_exps=((256, 256, 8), Q4_K),
            ffn_up_exps=((256, 256, 8), Q4_K), ffn_down_exps=((256, 256, 8), Q6_K), exp_probs_b_bias=((8,), F32),
        ),
        ONE - 3 * 256 * 512 + 256 * 8 + 8 * 3 * 256 * 256,
    ),
    "shared experts": (
        {"llama.expert_used_count": 2},
        changed(
            ffn_gate=None, ffn_up=None, ffn_down=None, ffn_gate_inp=((256, 8), F32), ffn_gate_up_exps=((256, 512, 8), Q4_K),
            ffn_down_exps=((256, 256, 8), Q4_K), ffn_gate_shexp=((256, 512), Q4_K), ffn_up_shexp=((256, 512), Q4_K),
            ffn_down_shexp=((512, 256), Q4_K), ffn_gate_inp_shexp=((256,), F32),
        ),
        ONE + 256 * 8 + 8 * 3 * 256 * 256 + 256,
    ),
    "gates of their own": ({}, changed(attn_gate=((256, 256), Q4_K)), ONE + 256 * 256),
    "a gate for each head": ({}, changed(attn_gate=((256, 4), Q4_K)), ONE + 256 * 4),
    "queries with their gates": ({}, changed(attn_q=((256, 512), Q4_K)), ONE + 256 * 256),
    # 2 heads of 32 keys, 4 of 32 values: q, k and v, a gate, step and decay; a convolution over 256 of 4; A, dt, a norm
    "a gated delta net": (
        SSM | {"llama.ssm.state_size": 32, "llama.ssm.inner_size": 128, "llama.ssm.time_step_rank": 4},
        changed(
            **NO_ATTENTION, attn_qkv=((256, 256), Q4_K), attn_gate=((256, 128), Q6_K), ssm_alpha=((256, 4), Q4_K),
            ssm_beta=((256, 4), Q8_0), ssm_conv1d=((4, 256), F32), ssm_a=((4,), F32), ssm_dt_bias=((4,), F32),
            ssm_norm=((32,), F32), ssm_out=((128, 256), Q8_0),
        ),
        REST + 256 * 256 + 256 * 128 + 8 * 256 + 4 * 256 + 8 + 32 + 128 * 256,
    ),
    # 8 heads of 64 channels, 2 groups of 16 states: 512 · 2 + 64 + 8 inputs, 576 columns of 4 with a bias, A, D, dt, a norm
    "Mamba-2": (
        SSM | {"llama.ssm.state_size": 16, "llama.ssm.inner_size": 512, "llama.ssm.time_step_rank": 8},
        changed(
            **NO_ATTENTION, ssm_in=((256, 1096), Q4_K), ssm_conv1d=((4, 576), F32), ssm_conv1d_bias=((576,), F32),
            ssm_a=((1, 8), F32), ssm_d=((1, 8), F32), ssm_dt_bias=((8,), F32), ssm_norm=((512, 1), F32),
            ssm_out=((512, 256), Q4_K),
        ),
        REST + 256 * 1096 + 5 * 576 + 3 * 8 + 512 + 512 * 256,
    ),
    "a short convolution": (
        {"llama.shortconv.l_cache": 3},
        changed(**NO_ATTENTION) | {
            "blk.0.shortconv.in_proj.weight": ((256, 768), Q4_K), "blk.0.shortconv.conv.weight": ((3, 256), F32),
            "blk.0.shortconv.out_proj.weight": ((256, 256), Q4_K),
        },
        REST + 256 * 768 + 3 * 256 + 256 * 256,
    ),
    "a network alone": ({}, changed(**NO_ATTENTION, attn_norm=None), REST - 256),
    "layers that predict further tokens": ({"llama.block_count": 2, "llama.nextn_predict_layers": 1}, llama_tensors(2), ONE),
}  # fmt: skip


@pytest.mark.parametrize("name", BLOCKS)
def test_parameters_are_those_of_the_tensors(tmp_path: Path, name: str) -> None:
    more, tensors, parameters = BLOCKS[name]
    model = load(tmp_path, llama(1) | more, tensors)
    assert model.parameters == parameters
    path = tmp_path / "m.gguf"
    assert weight_bytes(model) == sum(t.bytes for t in read_header(path.name, read_from(path.parent), str(path)).tensors.values())


LATENT = {
    "general.architecture": "deepseek2", "deepseek2.block_count": 1, "deepseek2.embedding_length": 256,
    "deepseek2.attention.head_count": 4, "deepseek2.attention.head_count_kv": 1, "deepseek2.attention.kv_lora_rank": 256,
    "deepseek2.attention.layer_norm_rms_epsilon": 1e-6,
}  # fmt: skip


@pytest.mark.parametrize("split", [False, True])
def test_latent_attention_with_kv_up_in_one_or_in_two(tmp_path: Path, split: bool) -> None:
    """4 heads of 32 + 16 and 64 with latents of 256: keys of 32 can only be Q8_0, values can have other types."""
    q_down, kv_down, up = 256 * 512, 256 * (256 + 16), 256 * 4 * (32 + 64)
    tensors = changed(
        attn_q=None, attn_k=None, attn_v=None, attn_output=((256, 256), Q4_K), attn_q_a=((256, 512), Q4_K),
        attn_q_b=((512, 192), Q4_K), attn_kv_a_mqa=((256, 272), Q4_K), attn_q_a_norm=((512,), F32),
        attn_kv_a_norm=((256,), F32),
    )  # fmt: skip
    if split:
        tensors |= {"blk.0.attn_k_b.weight": ((32, 256, 4), Q8_0), "blk.0.attn_v_b.weight": ((256, 64, 4), Q4_K)}
        stored = 256 * 4 * 34 + 64 * 4 * 144
    else:
        tensors |= {"blk.0.attn_kv_b.weight": ((256, 384), Q4_K)}
        stored = 384 * 144
    model = load(tmp_path, LATENT, tensors)
    others = q_down + 512 * 192 + kv_down + 256 * 256 + 3 * 256 * 512
    assert model.parameters == others + up + 512 + 256 + 512 + 2 * 256_000 + 256
    rest = (others + 256_000) // 256 * 144 + 1000 * 210 + 4 * (512 + 256 + 512 + 256 + 32)
    assert weight_bytes(model) == rest + stored
    assert cache_size(model, 10).stored == 10 * (256 + 16) * 2


def test_windows_of_every_other_layer(tmp_path: Path) -> None:
    own = {k.replace("llama.", "gemma2."): v for k, v in llama(4).items()} | {"general.architecture": "gemma2"}
    model = load(tmp_path, own | {"gemma2.attention.sliding_window": 50}, llama_tensors(4))
    assert cache_size(model, 1000).stored == 2 * (50 + 1000) * 2 * 2 * 64 * 2
    said = llama(4) | {"llama.attention.sliding_window": 50, "llama.attention.sliding_window_pattern": [1, 1, 1, 0]}
    assert cache_size(load(tmp_path, said, llama_tensors(4)), 1000).stored == (3 * 50 + 1000) * 2 * 2 * 64 * 2


@pytest.mark.parametrize(
    ("family", "period"),
    [
        ("gemma2", 2),
        ("gpt-oss", 2),
        ("gemma3", 6),
        ("cohere2", 4),
        ("olmo2", 4),
        ("llama4", 4),
        ("phi3", 0),
        ("phimoe", 0),
        ("afmoe", 4),
        ("exaone-moe", 4),
        ("gemma3n", 5),
        ("mellum", 4),
        ("plamo3", 8),
    ],
)
def test_which_layers_have_a_window(family: str, period: int) -> None:
    """The last layer of each period is full, with a period of six in Gemma 3. Phi-3 has no windows, but its files state one."""
    keys = {"general.architecture": family, f"{family}.block_count": 14, f"{family}.embedding_length": 256}
    fields = Fields(keys | {f"{family}.attention.sliding_window": 50}, "m.gguf")
    wide = 8192 if family == "llama4" else 50
    assert [fields.window(i) for i in range(14)] == [wide if period and (i + 1) % period else 0 for i in range(14)]


@pytest.mark.parametrize(("layers", "entries"), [(64, 48 * 50 + 16 * 1000), (4, 4 * 1000)])
def test_exaone4_has_windows_with_64_layers_alone(tmp_path: Path, layers: int, entries: int) -> None:
    """llama.cpp's src/models/exaone4.cpp uses windows depending on the number of layers, not on the key."""
    own = {k.replace("llama.", "exaone4."): v for k, v in llama(layers).items()} | {"general.architecture": "exaone4"}
    model = load(tmp_path, own | {"exaone4.attention.sliding_window": 50}, llama_tensors(layers))
    assert cache_size(model, 1000).stored == entries * 2 * 2 * 64 * 2
    usual = load(tmp_path, own, llama_tensors(layers))  # without the key, a window has 4,096 tokens
    assert {entry.limit for entry in usual.entries} == ({0, 4096} if layers == 64 else {0})


def test_splits_are_read_together(tmp_path: Path) -> None:
    tensors = list(llama_tensors().items())
    whole = load(tmp_path, llama(), dict(tensors))
    for n, part in enumerate((tensors[:9], tensors[9:20], tensors[20:])):
        metadata = {"split.no": n, "split.count": 3} | (llama() if n == 0 else {})
        write(tmp_path / f"big-0000{n + 1}-of-00003.gguf", metadata, dict(part))
    for n in (1, 3):
        model = load_model(str(tmp_path / f"big-0000{n}-of-00003.gguf"))
        assert (model.parameters, weight_bytes(model)) == (whole.parameters, weight_bytes(whole))
    (tmp_path / "big-00002-of-00003.gguf").unlink()
    with pytest.raises(UserError, match=r"big-00002-of-00003\.gguf: cannot be read"):
        load_model(str(tmp_path / "big-00001-of-00003.gguf"))


# --- What is refused ---


REFUSED: list[tuple[dict[str, Any], Tensors, str]] = [
    (llama(1), changed(odd=((256,), F32)), "tensors of 'llama' are not understood: blk.0.odd.weight"),
    (llama(1), changed(attn_q=None, attn_k=None, attn_v=None), "are not understood: blk.0.attn_output.weight"),
    (llama(1), changed(attn_output=None), "tensor blk.0.attn_output.weight is missing"),
    (llama(1), changed(attn_k=((256, 64), Q4_K)), r"blk.0.attn_k.weight has the shape \[256, 64\], not \[256, 128\]"),
    (llama(1), changed(attn_norm_bias=((256,), F32)), "some of its norms have biases and some have none"),
    (llama(1), changed(attn_q_norm=((33,), F32), attn_k_norm=((33,), F32)), "norms queries and keys of 33 and 33 elements"),
    (llama(1), changed(ffn_gate_bias=((512,), F32)), "has a bias on only some of ffn_gate, ffn_up"),
    (llama(1), changed(attn_norm=((256,), F16)), "its norms and biases are stored as f16, f32"),
    (llama(1), changed(attn_q_bias=((7,), F32)), "bytes, but [0-9,]+ are understood"),
    (llama(2), changed(), "block 1 holds no matrices"),
    (llama(1) | {"llama.attention.head_count": 0}, changed(), "block 0: attention.head_count is 0"),
    (llama(1) | {"llama.attention.head_count": 3}, changed(), "block 0: 3 heads do not divide 256"),
    (llama(1), changed(attn_q=((256, 128), Q4_K)), r"blk.0.attn_q.weight has the shape \[256, 128\], not \[256, 256\]"),
    (llama(1) | {"llama.attention.head_count": "four"}, changed(), "head_count: four is no whole number"),
    (llama(1) | {"llama.block_count": 5000}, changed(), "block_count: 5000 is no whole number from 0 to 2,000"),
    (llama(1) | {"llama.attention.sliding_window": 9}, changed(), "not known which layers of 'llama' have the window of 9"),
    ({"general.architecture": 4}, changed(), "no usable general.architecture"),
    ({"general.architecture": "llama"}, changed(), "its metadata have no llama.block_count"),
    (llama(1), {k: v for k, v in changed().items() if k != "token_embd.weight"}, "tensor token_embd.weight is missing"),
    (llama(1), changed() | {"output.weight": ((256, 999), Q4_K)}, r"output.weight has the shape \[256, 999\], not \[256, 1000\]"),
    (llama(1), changed() | {"v.patch_embd.weight": ((256,), F32)}, "are not understood: v.patch_embd.weight"),
    (llama(1), changed(attn_q=((256, 257), 99)), "has the unknown type 99"),
    (llama(1), changed(attn_q=((255, 256), Q4_K)), r"cannot have the shape \[255, 256\] in q4_k"),
    (llama(1), changed(attn_q=((0, 256), F32)), r"cannot have the shape \[0, 256\]"),
    (llama(1), changed(attn_q=((1 << 60, 1 << 60), F32)), "cannot have the shape"),
    (llama(1), changed(attn_q=((2, 2, 2, 2, 2), F32)), "has 5 dimensions"),
    (llama(1), changed(attn_q=((2, 2, 2, 2), F32)), r"attn_q.weight has the shape \[2, 2, 2, 2\], not"),
    (llama(1) | {"split.count": 3}, changed(), "is one of 3 splits, but is not called so"),
]


@pytest.mark.parametrize(("metadata", "tensors", "said"), REFUSED)
def test_what_is_not_understood_is_named(tmp_path: Path, metadata: dict[str, Any], tensors: Tensors, said: str) -> None:
    with pytest.raises(UserError, match=said):
        load(tmp_path, metadata, tensors)


HEADERS: list[tuple[bytes, str]] = [
    (b"GGUF", "it ends in the middle of its header"),
    (b"PK\x03\x04" + bytes(100), "it does not begin with GGUF"),
    (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "version 1, but 2 and 3"),
    (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "version 50331648"),
    (b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 0), "1,152,921,504,606,846,976 tensors; more than"),
    (b"", "it does not begin with GGUF"),
    (b"GGUF" + struct.pack("<IQQ", 3, 200_001, 0), "200,001 tensors; more than 200,000 are not read"),
    (b"GGUF" + struct.pack("<IQQ", 3, 200_000, 0), "it ends in the middle of its header"),
    (b"GGUF" + struct.pack("<IQQ", 3, 0, 100_001), "100,001 metadata entries; more than 100,000 are not read"),
    (b"GGUF" + struct.pack("<IQQ", 3, 0, 100_000), "it ends in the middle of its header"),
    (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1 << 50), "bytes of a key; more than"),
    (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text("a") + struct.pack("<IQ", 8, 1 << 50), "bytes of a value; more than"),
    (
        b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text("a") + struct.pack("<IQ", 8, (16 << 20) + 1),
        "16,777,217 bytes of a value; more than 16,777,216 are not read",
    ),
    (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text("a") + struct.pack("<I", 77), "a value of unknown type 77"),
    (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text("a") + struct.pack("<IIQ", 9, 4, 1 << 60), "ends in the middle"),
    (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text("a") + struct.pack("<IIQ", 9, 8, 1 << 60), "lists have more than"),
    (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text("a") + struct.pack("<IIQ", 9, 8, 9) + bytes(16), "ends in the middle"),
    (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text("a") + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 9, "unknown type 9"),
    (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 2) + b"\xff\xfe" + bytes(8), "a key is not UTF-8"),
]


@pytest.mark.parametrize(("content", "said"), HEADERS)
def test_a_broken_header_is_refused(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    with pytest.raises(UserError, match=f"^{path}: .*{said}"):
        load_model(str(path))


def test_a_folder_and_a_missing_file_are_refused(tmp_path: Path) -> None:
    (tmp_path / "folder.gguf").mkdir()
    with pytest.raises(UserError, match="is a folder, not a file"):
        load_model(str(tmp_path / "folder.gguf"))
    with pytest.raises(UserError, match="cannot be read: no such file"):
        load_model(str(tmp_path / "none.gguf"))


SMALL = header(llama(1) | {"tokenizer.ggml.token_type": [1]}, llama_tensors(1))


@given(st.integers(0, len(SMALL) - 1))
def test_a_file_cut_short_is_refused(tmp_path_factory: pytest.TempPathFactory, length: int) -> None:
    path = tmp_path_factory.mktemp("cut") / "m.gguf"
    path.write_bytes(SMALL[:length])
    with pytest.raises(UserError):
        load_model(str(path))


@given(st.lists(st.tuples(st.integers(4, len(SMALL) - 1), st.integers(0, 255)), min_size=1, max_size=4))
def test_a_file_with_bytes_changed_is_refused_or_adds_up(
    tmp_path_factory: pytest.TempPathFactory, changes: list[tuple[int, int]]
) -> None:
    content = bytearray(SMALL)
    for at, value in changes:
        content[at] = value
    path = tmp_path_factory.mktemp("changed") / "m.gguf"
    path.write_bytes(content)
    try:
        model = load_model(str(path))
    except UserError:
        return
    assert weight_bytes(model) == sum(t.bytes for t in read_header(path.name, read_from(path.parent), str(path)).tensors.values())


@pytest.mark.parametrize(("kind", "bytes_"), [(F16, 512), (BF16, 512), (Q4_0, 8 * 18), (Q8_0, 8 * 34), (Q4_K, 144), (F32, 1024)])
def test_bytes_of_256_elements(tmp_path: Path, kind: int, bytes_: int) -> None:
    model = load(tmp_path, llama(), llama_tensors(down=kind, kind=kind))
    assert weight_bytes(model) == (3 * LAYER + 256_000) // 256 * bytes_ + 1000 * 210 + NORMS + 4 * 32
