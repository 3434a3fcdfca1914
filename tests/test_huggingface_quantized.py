"""Quantised checkpoints: the format in each tool's config, excluded modules, and the bytes by hand."""

import json
from pathlib import Path
from typing import Any

import pytest
from conftest import Run

from kvcalc import Model, Precision, UserError, weight_bytes
from kvcalc.library.huggingface import model_from
from kvcalc.model.precision import formats_of

LLAMA = {
    "model_type": "llama", "hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2,
    "intermediate_size": 512, "vocab_size": 1000, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "attention_bias": False, "mlp_bias": False, "max_position_embeddings": 4096,
}  # fmt: skip
MIXTRAL = LLAMA | {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}
LAYERS = 4
# [inputs, outputs]: q and o [256, 256], k and v [256, 64], gate and up [256, 512], down [512, 256]
ATTENTION = {"q": (256, 256), "k": (256, 64), "v": (256, 64), "o": (256, 256)}
NETWORK = {"gate": (256, 512), "up": (256, 512), "down": (512, 256)}
EVERY = ATTENTION | NETWORK
AROUND = 2 * (2 * 1000 * 256 + 256 + 2 * LAYERS * 256)  # embedding, head and norms in bf16


def read(quantization: Any, base: dict[str, Any] = LLAMA) -> Model:
    return model_from(base | {"quantization_config": quantization}, "f.json", "small")


def elements(matrices: dict[str, tuple[int, int]]) -> int:
    return sum(a * b for a, b in matrices.values())


def groups(matrices: dict[str, tuple[int, int]], size: int) -> int:
    """Return the number of groups of `size` inputs, for each output."""
    return sum(-(-a // size) * b for a, b in matrices.values())


def inputs(matrices: dict[str, tuple[int, int]]) -> int:
    return sum(a for a, _ in matrices.values())


def outputs(matrices: dict[str, tuple[int, int]]) -> int:
    return sum(b for _, b in matrices.values())


def blocks(matrices: dict[str, tuple[int, int]], rows: int, columns: int) -> int:
    return sum(-(-a // rows) * -(-b // columns) for a, b in matrices.values())


PACKED = elements(EVERY) // 2
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
FLOAT8 = {"num_bits": 8, "type": "float", "strategy": "tensor"}
INT4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}


def compressed(weights: dict[str, Any], **more: Any) -> dict[str, Any]:
    """Return a compressed-tensors config of one group."""
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None} | more
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}, "ignore": ["lm_head"]}


def quark(**weight: Any) -> dict[str, Any]:
    """Return a Quark config of one setting."""
    return {"quant_method": "quark", "global_quant_config": {"weight": weight}, "exclude": ["lm_head"]}


WEIGHTS, OUTPUTS, INPUTS = elements(EVERY), outputs(EVERY), inputs(EVERY)


def scales(size: int) -> int:
    """Return the number of groups of `size` inputs in all matrices of a layer."""
    return groups(EVERY, size)


# name → (quantization_config, bytes of a layer's matrices)
CHECKPOINTS: dict[str, tuple[dict[str, Any], int]] = {
    "fp8 per tensor": (FP8, WEIGHTS + 7 * 4),
    "fp8 in blocks": (FP8 | {"weight_block_size": [128, 128]}, WEIGHTS + 4 * blocks(EVERY, 128, 128)),
    # the config gives outputs × inputs
    "fp8 in other blocks": (FP8 | {"weight_block_size": [64, 128]}, WEIGHTS + 4 * blocks(EVERY, 128, 64)),
    "fp8 per channel": ({"quant_method": "fbgemm_fp8"}, WEIGHTS + 4 * OUTPUTS),
    # an fp16 scale and a packed 4-bit zero for a group of inputs
    "gptq": ({"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True}, PACKED + 2 * scales(128) + scales(128) // 2),
    "gptq 3 bits": (
        {"quant_method": "gptq", "bits": 3, "group_size": 64},
        WEIGHTS * 3 // 8 + 2 * scales(64) + scales(64) * 3 // 8,
    ),
    "gptq 8 bits, a group per output": ({"quant_method": "gptq", "bits": 8, "group_size": -1}, WEIGHTS + 3 * OUTPUTS),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True}, PACKED + scales(64) * 5 // 2),
    "awq without zeros": ({"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": False}, PACKED + 2 * scales(64)),
    # the order of activations is an int32 for each input
    "gptq in activation order": (
        {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": True},
        PACKED + 2 * scales(128) + scales(128) // 2 + 4 * INPUTS,
    ),
    "auto-round": (
        {"quant_method": "auto-round", "bits": 4, "group_size": 128, "packing_format": "auto_round:auto_gptq"},
        PACKED + 2 * scales(128) + scales(128) // 2,
    ),
    # blocks of 64 with an int8 each, and an fp32 for 256 blocks
    "bitsandbytes 4 bits, quantised twice": (
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
        PACKED + scales(64) + 4 * sum(-(-a * b // (64 * 256)) for a, b in EVERY.values()),
    ),
    "bitsandbytes fp4": (
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "fp4"},
        PACKED + 4 * scales(64),
    ),
    # blocks of 64 with an fp32 each; LLM.int8: an fp32 for each output
    "bitsandbytes 4 bits": ({"quant_method": "bitsandbytes", "load_in_4bit": True}, PACKED + 4 * scales(64)),
    "bitsandbytes 8 bits": ({"quant_method": "bitsandbytes", "load_in_8bit": True}, WEIGHTS + 4 * OUTPUTS),
    "bitsandbytes of old": ({"load_in_4bit": True, "load_in_8bit": False}, PACKED + 4 * scales(64)),
    "modelopt fp8": ({"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]}, WEIGHTS + 7 * 4),
    # e4m3 for 16, and an fp32 for each matrix
    "modelopt nvfp4": ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, PACKED + scales(16) + 7 * 4),
    "hf_quant_config": (
        {
            "producer": {"name": "modelopt"},
            "quantization": {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ["lm_head"]},
        },
        PACKED + scales(16) + 7 * 4,
    ),
    "compressed int4": (compressed(INT4), PACKED + 2 * scales(32)),
    "compressed int4 with zeros": (compressed(INT4 | {"symmetric": False}), PACKED + 2 * scales(32) + scales(32) // 2),
    # the order of activations is an int32 for each input
    "compressed int4 in activation order": (compressed(INT4 | {"actorder": "group"}), PACKED + 2 * scales(32) + 4 * INPUTS),
    "compressed int4 that was ordered before": (compressed(INT4 | {"actorder": "static"}), PACKED + 2 * scales(32)),
    "compressed int4, a byte each": (compressed(INT4) | {"format": "int-quantized"}, WEIGHTS + 2 * scales(32)),
    "compressed w8a8": (
        compressed({"num_bits": 8, "type": "int", "strategy": "channel"}, input_activations={"num_bits": 8}),
        WEIGHTS + 2 * OUTPUTS,
    ),
    # a byte of a zero point for each output
    "compressed w8a8 with zeros": (
        compressed({"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": False}, input_activations={"num_bits": 8}),
        WEIGHTS + 3 * OUTPUTS,
    ),
    "compressed w8a16": (compressed({"num_bits": 8, "strategy": "channel"}), WEIGHTS + 2 * OUTPUTS),
    "compressed fp8": (compressed(FLOAT8), WEIGHTS + 7 * 2),
    "compressed fp8 per channel": (compressed(FLOAT8 | {"strategy": "channel"}), WEIGHTS + 2 * OUTPUTS),
    "compressed fp8 blocks": (
        compressed(FLOAT8 | {"strategy": "block", "block_structure": [128, 128]}),
        WEIGHTS + 2 * blocks(EVERY, 128, 128),
    ),
    "compressed fp8 in groups": (compressed(FLOAT8 | {"strategy": "group", "group_size": 128}), WEIGHTS + 2 * scales(128)),
    "compressed mxfp8": (
        compressed(FLOAT8 | {"strategy": "group", "group_size": 32}) | {"format": "mxfp8-quantized"},
        WEIGHTS + scales(32),
    ),
    "eetq": ({"quant_method": "eetq", "weights": "int8"}, WEIGHTS + 2 * OUTPUTS),
    "quark fp8": (quark(dtype="fp8_e4m3", qscheme="per_tensor"), WEIGHTS + 7 * 4),
    "quark mxfp4": (quark(dtype="fp4", qscheme="per_group", group_size=32, scale_format="e8m0"), PACKED + scales(32)),
    "mxfp8": ({"quant_method": "mxfp8"}, WEIGHTS + scales(32)),
    "modelopt w4a8 mxfp4": ({"quant_algo": "W4A8_MXFP4_FP8"}, PACKED + scales(32)),
    "compressed nvfp4": (compressed({"num_bits": 4, "type": "float", "group_size": 16}), PACKED + scales(16) + 7 * 4),
    "compressed mxfp4": (compressed({"num_bits": 4, "type": "float", "group_size": 32}), PACKED + scales(32)),
}


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_bytes_of_every_kind_of_checkpoint(name: str) -> None:
    quantization, layer = CHECKPOINTS[name]
    model = read(quantization)
    assert weight_bytes(model) == LAYERS * layer + AROUND
    assert weight_bytes(model, Precision(dtype="bf16")) == 2 * LAYERS * elements(EVERY) + AROUND


def test_blocks_of_qwen3_have_scales_of_16_bits() -> None:
    qwen = LLAMA | {"model_type": "qwen3", "head_dim": 32}
    model = read(FP8 | {"weight_block_size": [128, 128]}, qwen)
    norms = 2 * LAYERS * 2 * 32  # of queries and keys
    assert weight_bytes(model) == LAYERS * (elements(EVERY) + 2 * blocks(EVERY, 128, 128)) + AROUND + norms


def test_asking_for_the_format_of_a_file_keeps_what_it_leaves_out() -> None:
    """The request names the format, with any scale width."""
    model = read(compressed(FLOAT8 | {"strategy": "channel"}) | {"ignore": ["lm_head", "re:.*down_proj"]})
    held = weight_bytes(model)
    assert held == LAYERS * (elements(EVERY) + 512 * 256 + 2 * outputs(EVERY) - 2 * 256) + AROUND
    assert weight_bytes(model, Precision(quantization="fp8_per_channel")) == held


def test_mxfp4_covers_the_experts_alone() -> None:
    listed = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    model = read({"quant_method": "mxfp4", "modules_to_not_convert": listed}, MIXTRAL)
    experts = 4 * (elements(NETWORK) // 2 + groups(NETWORK, 32))
    assert weight_bytes(model) == LAYERS * (experts + 2 * elements(ATTENTION) + 2 * 4 * 256) + AROUND


def test_mxfp4_on_a_dense_model_stores_nothing_so(kvcalc: Run, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"quantization_config": {"quant_method": "mxfp4"}}))
    shown = kvcalc("size --format json", str(tmp_path))
    assert shown.records[0]["weight_bytes"] == 2 * LAYERS * elements(EVERY) + AROUND
    assert shown.records[0]["dtype"] == "bf16"
    assert "nothing in this model is stored as mxfp4" in shown.err


# --- Modules with settings of their own ---


def test_modules_with_bits_of_their_own() -> None:
    """GPTQModel's dynamic rules and AutoRound's extra_config: o with 8 bits, and the first layer's down not quantised."""
    gptq = {"quant_method": "gptq", "bits": 4, "group_size": 128, "dynamic": {r"+:.*\.o_proj": {"bits": 8}}}
    o = 256 * 256
    four = PACKED + groups(EVERY, 128) * 5 // 2
    assert weight_bytes(read(gptq)) == LAYERS * (four + o // 2 + 256 * 2 * 4 // 8) + AROUND
    round_ = {"quant_method": "auto-round", "bits": 4, "group_size": 128}
    own = {"model.layers.0.mlp.down_proj": {"bits": 16, "data_type": "float"}}
    down = 512 * 256 // 2 + 4 * 256 * 5 // 2
    assert weight_bytes(read(round_ | {"extra_config": own})) == LAYERS * four - down + 2 * 512 * 256 + AROUND


# --- What is left out ---

KEPT = {
    "a block by name": (["self_attn"], {*ATTENTION}),
    "a wildcard": (["*self_attn*"], {*ATTENTION}),
    "a wildcard over layers": (["model.layers.*.mlp"], {*NETWORK}),
    "a pattern": (["re:.*self_attn.*"], {*ATTENTION}),
    "a pattern of leaves": ([r"re:.*mlp\.(gate|up|gate_up|down)_proj.*"], {*NETWORK}),
    "a pattern of one": ([r"re:.*\.q_proj$", "lm_head"], {"q"}),
    "a fused module": (["qkv_proj"], {"q", "k", "v"}),
    "leaves": (["down_proj", "o_proj"], {"down", "o"}),
    "others' parts": (["re:vision_tower.*", "model.visual", "lm_head", "mtp.*", "gate"], set[str]()),
}


@pytest.mark.parametrize("name", KEPT)
@pytest.mark.parametrize(
    "key", ["modules_to_not_convert", "ignore", "ignored_layers", "exclude_modules", "llm_int8_skip_modules"]
)
def test_modules_left_out_everywhere(name: str, key: str) -> None:
    listed, kept = KEPT[name]
    assert {n for layer in read(FP8 | {key: listed}).kinds.values() for n in layer.unquantized} == kept


BY_LAYER = {
    "whole layers": (["model.layers.0*", "model.layers.3."], {0: {*EVERY}, 3: {*EVERY}}),
    "a block of a layer": (["model.layers.1.self_attn", "model.layers.2.mlp*"], {1: {*ATTENTION}, 2: {*NETWORK}}),
    "one matrix": (["model.layers.2.mlp.down_proj.weight"], {2: {"down"}}),
    "a text part": (["language_model.model.layers.2.self_attn.k_proj"], {2: {"k"}}),
    "a pattern of layers": ([r"re:.*layers\.(0|3)\.self_attn.*"], {0: {*ATTENTION}, 3: {*ATTENTION}}),
    "beyond the stack": (["model.layers.4.eh_proj", "model.layers.61*"], {}),
}


@pytest.mark.parametrize("name", BY_LAYER)
def test_modules_left_out_by_layer(name: str) -> None:
    listed, kept = BY_LAYER[name]
    model = read(FP8 | {"ignore": listed})
    assert [set(model.kinds[kind].unquantized) for kind in model.order] == [kept.get(i, set()) for i in range(LAYERS)]
    left = sum(elements({n: EVERY[n] for n in names}) for names in kept.values())
    count = sum(map(len, kept.values()))
    assert weight_bytes(model) == LAYERS * (elements(EVERY) + 7 * 4) + AROUND + left - 4 * count


def test_a_wildcard_after_a_number_means_longer_numbers_too() -> None:
    model = model_from(LLAMA | {"num_hidden_layers": 12, "quantization_config": FP8 | {"ignore": ["model.layers.1*"]}}, "f", "x")
    assert [i for i, kind in enumerate(model.order) if model.kinds[kind].unquantized] == [1, 10, 11]


def test_experts_listed_one_by_one_are_left_out() -> None:
    listed = [f"model.layers.0.block_sparse_moe.experts.{i}.w{n}" for i in range(4) for n in (1, 2, 3)]
    model = read(FP8 | {"ignore": listed}, MIXTRAL)
    assert [model.kinds[k].unquantized for k in model.order] == [("experts.gate", "experts.up", "experts.down"), (), (), ()]


def test_gptq_model_leaves_out_what_its_dynamic_rules_say() -> None:
    model = read({"quant_method": "gptq", "bits": 4, "group_size": 128, "dynamic": {r"-:.*\.o_proj": {}}})
    assert {layer.unquantized for layer in model.kinds.values()} == {("o",)}


# --- Several formats in one checkpoint ---


def test_groups_with_targets_of_their_own() -> None:
    eight = {"targets": ["re:.*self_attn.*"], "weights": {"num_bits": 8, "type": "float", "strategy": "tensor"}}
    four = {"targets": ["re:.*mlp.*"], "weights": {"num_bits": 4, "type": "float", "group_size": 16}}
    model = read({"quant_method": "compressed-tensors", "config_groups": {"a": eight, "b": four}, "ignore": ["lm_head"]})
    layer = elements(ATTENTION) + 4 * 2 + elements(NETWORK) // 2 + groups(NETWORK, 16) + 3 * 4
    assert weight_bytes(model) == LAYERS * layer + AROUND
    alone = read({"quant_method": "compressed-tensors", "config_groups": {"a": eight}, "ignore": ["lm_head"]})
    assert weight_bytes(alone) == LAYERS * (elements(ATTENTION) + 4 * 2 + 2 * elements(NETWORK)) + AROUND


def test_modelopt_module_by_module() -> None:
    listed = {f"model.layers.{i}.mlp.{n}_proj": {"quant_algo": "NVFP4", "group_size": 16} for i in (0, 1) for n in NETWORK}
    listed |= {f"model.layers.{i}.self_attn.q_proj": {"quant_algo": "FP8"} for i in range(LAYERS)}
    model = read({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": listed})
    network = elements(NETWORK) // 2 + groups(NETWORK, 16) + 3 * 4
    rest = 2 * (elements(ATTENTION) - 256 * 256)
    assert weight_bytes(model) == 2 * network + 2 * 2 * elements(NETWORK) + LAYERS * (256 * 256 + 4 + rest) + AROUND


def test_experts_in_one_format_and_the_rest_in_another() -> None:
    quantization = FP8 | {"weight_block_size": [128, 128], "quant_algo": "MIXED_PRECISION", "moe_quant_algo": "NVFP4"}
    model = read(quantization | {"ignore": ["*.attn.*"]}, MIXTRAL)  # that list belongs to the experts' format
    experts = 4 * (elements(NETWORK) // 2 + groups(NETWORK, 16) + 3 * 4)
    attention = elements(ATTENTION) + 4 * blocks(ATTENTION, 128, 128)
    assert weight_bytes(model) == LAYERS * (experts + attention + 2 * 4 * 256) + AROUND


# --- The cache's dtype ---

SCHEMES = [
    ({"kv_cache_scheme": {"num_bits": 8, "type": "float", "strategy": "tensor"}}, "fp8"),
    ({"kv_cache_scheme": {"num_bits": 8, "type": "int"}}, "int8"),
    ({"kv_cache_scheme": "FP8"}, "fp8"),
    ({"kv_cache_quant_algo": "FP8"}, "fp8"),
    ({"kv_cache_quant_algo": "NVFP4"}, "nvfp4"),
    ({"quantization": {"kv_cache_quant_algo": "FP8"}}, "fp8"),
    ({"kv_cache_scheme": None, "kv_cache_quant_algo": None}, None),
]


@pytest.mark.parametrize(("scheme", "chosen"), SCHEMES)
def test_auto_takes_the_cache_dtype_that_the_checkpoint_declares(scheme: dict[str, Any], chosen: str | None) -> None:
    model = read(FP8 | scheme)
    formats = formats_of(model, Precision())
    assert formats.kv_cache_dtype == (chosen or "bf16")
    assert formats.reason == ("the checkpoint declares it for its cache" if chosen else "the model's dtype")
    said = f"the checkpoint declares {chosen} for its cache: `auto` selects it"
    assert (said in model.notes) == bool(chosen)


def test_a_cache_scheme_that_is_not_known_is_said() -> None:
    model = read(FP8 | {"kv_cache_scheme": {"num_bits": 3, "type": "float"}})
    assert model.kv_cache_dtype is None
    assert any("KV cache scheme a mapping of 2 is not known" in note for note in model.notes)


def test_the_command_says_what_auto_chose_and_why(kvcalc: Run, tmp_path: Path) -> None:
    config = LLAMA | {"quantization_config": {"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    path = str(tmp_path / "config.json")
    assert "the checkpoint declares fp8 for its cache" in kvcalc("size", path).err
    record = kvcalc("size --context 17 --format json", path).records[0]
    assert (record["kv_cache_dtype"], record["kv_cache_bytes"]) == ("fp8", 17 * 4 * 2 * 2 * 32)
    assert kvcalc("size --context 17 --dtype bf16 --format json", path).records[0]["kv_cache_bytes"] == 2 * 17 * 4 * 2 * 2 * 32


def test_hf_quant_config_beside_the_config_is_read(tmp_path: Path, kvcalc: Run) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    beside = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(beside))
    record = kvcalc("size --format json", str(tmp_path)).records[0]
    assert record["weight_bytes"] == LAYERS * (elements(EVERY) + 7 * 4) + AROUND
    assert record["kv_cache_dtype"] == "fp8"


# --- What does not fit ---


def test_a_tool_that_is_not_known_leaves_everything_but_the_weights(kvcalc: Run, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"quantization_config": {"quant_method": "exl2", "bits": 4.0}}))
    refused = kvcalc("size", str(tmp_path))
    said = "the checkpoint stores its weights as 'exl2', whose bytes do not follow from its config"
    assert refused.code == 2
    assert f"kvcalc: {said}. --dtype bf16 counts them unquantised" in refused.err
    record = kvcalc("size --dtype bf16 --format json", str(tmp_path)).records[0]
    assert record["weight_bytes"] == 2 * LAYERS * elements(EVERY) + AROUND


UNKNOWN = [
    {"quant_method": "exl2", "bits": 4.0},
    {"quant_method": "higgs", "bits": 4},
    {"quant_method": "auto-round", "bits": 4, "data_type": "mx_fp"},
    {"quant_method": "quanto", "weights": "int8"},
    {"quant_method": "bitnet", "linear_class": "bitlinear"},
    {"quant_method": "torchao", "quant_type": "int8_weight_only"},
    {"quant_method": "quark", "global_quant_config": {"weight": {"dtype": "int4", "qscheme": "per_group"}}},
    {"quant_method": "quark", "layer_quant_config": {"*q_proj": {}}, "global_quant_config": {"weight": {"dtype": "fp8_e4m3"}}},
    {"quant_method": "vptq", "config_for_layers": {"model.layers.0.mlp.down_proj": {"in_features": 512}}},
    {"quant_method": "spqr", "bits": 3},
    {"quant_method": "metal", "bits": 8, "group_size": 32},
    {"quant_method": "hqq", "quant_config": {"weight_quant_params": {"nbits": 4, "group_size": 64}}},
    {"bits": 4, "group_size": 64},  # as MLX writes it
    {"quant_method": "modelopt", "quant_algo": "W4A16_AWQ", "group_size": 128},
    compressed(INT4) | {"format": "marlin-24"},
    compressed(INT4) | {"format": "dense"},
    compressed({"num_bits": 4, "type": "float", "strategy": "group", "group_size": 64}),
    compressed({"num_bits": 4, "type": "int"}),  # a scale for the whole matrix
    compressed({"num_bits": 3, "group_size": 128}) | {"version": "0.16.0"},
    compressed(FLOAT8) | {"format": "float-quantized", "sparsity_config": {"format": "sparse-24-bitmask"}},
]


@pytest.mark.parametrize("quantization", UNKNOWN)
def test_what_does_not_follow_from_the_config_is_refused_with_the_way_round(quantization: dict[str, Any]) -> None:
    model = read(quantization)
    assert any("--dtype bf16" in note for note in model.notes)
    with pytest.raises(UserError, match=r"the checkpoint stores its weights as '.*--dtype bf16 counts them unquantised"):
        weight_bytes(model)
    assert weight_bytes(model, Precision(dtype="bf16")) == 2 * LAYERS * elements(EVERY) + AROUND


BAD = [
    ({"quant_method": 4}, "quant_method: should be a text"),
    (FP8 | {"weight_block_size": 128}, "weight_block_size: should be a list"),
    (FP8 | {"weight_block_size": [128, 0]}, "weight_block_size: should be two whole numbers"),
    (FP8 | {"ignore": "lm_head"}, "ignore: should be a list"),
    (FP8 | {"ignore": [3]}, "lists 3, which is no module's name"),
    (FP8 | {"ignore": ["re:(("]}, "is no regular expression"),
    (FP8 | {"ignore": ["re:(a+)+$"]}, "contains too long a pattern"),
    (FP8 | {"ignore": ["re:" + ".*a" * 30]}, "contains too long a pattern"),
    (FP8 | {"ignore": ["*a" * 30]}, "contains too long a pattern"),
    ({"quant_method": "gptq", "bits": "4"}, "bits: should be a whole number"),
    ({"quant_method": "gptq", "bits": 99}, "bits: 99 is outside 2 to 8"),
    ({"quant_method": "awq", "bits": 4, "group_size": []}, "group_size: should be a whole number"),
    ({"quant_method": "bitsandbytes", "load_in_4bit": "yes"}, "load_in_4bit: should be true or false"),
    ({"quant_method": "compressed-tensors", "config_groups": {"a": 1}}, "a: should be a mapping"),
    (compressed({"num_bits": 4, "type": "complex"}), "num_bits: 4 of type 'complex' is no known format"),
    (compressed({}), "weights: is missing"),
    ({"quant_algo": "MIXED_PRECISION", "quantized_layers": {"a": 1}}, "names no quant_algo"),
    ({"quant_method": "gptq", "bits": 4, "dynamic": {"+:a": 1}}, "should be a mapping"),
]


@pytest.mark.parametrize(("quantization", "said"), BAD)
def test_what_does_not_fit_is_named(quantization: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError) as refused:
        read(quantization)
    assert str(refused.value).startswith("f.json: quantization_config: ")
    assert said in str(refused.value)
