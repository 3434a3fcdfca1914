"""Every preset file: its schema, its source, and its published counts compared with the computed counts."""

import re
from pathlib import Path

import pytest
from conftest import Run

from kvcalc import Gpu, Model, load_gpu, load_model
from kvcalc.layers.parts import FFNS, MIXERS
from kvcalc.library.huggingface import model_from
from kvcalc.library.load import all_gpus, read
from kvcalc.library.presets import key, preset_files, shipped_folder

MODELS = sorted((shipped_folder() / "models").glob("*.yaml"))
GPUS = sorted((shipped_folder() / "gpus").glob("*.yaml"))
stem = pytest.mark.parametrize("path", [*MODELS, *GPUS], ids=lambda p: p.stem)
each_model = pytest.mark.parametrize("path", MODELS, ids=lambda p: p.stem)
each_gpu = pytest.mark.parametrize("path", GPUS, ids=lambda p: p.stem)

REQUIRED = """
    gpt2 gpt2-medium gpt2-large gpt2-xl gpt-3-small gpt-3-medium gpt-3-large gpt-3-xl gpt-3-2.7b gpt-3-6.7b gpt-3-13b
    gpt-3-175b llama-7b llama-13b llama-33b llama-65b llama-2-7b llama-2-13b llama-2-70b llama-3-8b llama-3.1-8b
    llama-3.1-70b llama-3.1-405b llama-3.2-1b llama-3.2-3b mistral-7b-v0.1 mixtral-8x7b deepseek-v3 deepseek-v3.2 kimi-k2
    qwen2.5-72b qwen3-8b qwen3-235b-a22b qwen3-next-80b-a3b gemma-3-27b gpt-oss-20b gpt-oss-120b glm-5.2 llama-4-scout
    falcon-7b hunyuan-large starcoder2-3b
"""
REQUIRED_GPUS = ("h100-sxm", "h100-pcie", "h200", "a100-80gb", "l40s", "l4", "rtx-4090", "b200", "mi300x")


def spec(path: Path) -> Model | Gpu:
    return read(path, Model if path.parent.name == "models" else Gpu)


def test_required_presets_are_there() -> None:
    assert {*REQUIRED.split()} <= {path.stem for path in MODELS}
    assert {*REQUIRED_GPUS} <= {path.stem for path in GPUS}


def test_the_preset_format_lists_every_type_of_a_part() -> None:
    page = Path(__file__).parent.parent / "docs" / "reference" / "preset-format.md"
    text = page.read_text(encoding="utf-8")
    for part in (*MIXERS, *FFNS):
        tag = part.__struct_config__.tag
        assert f"`{tag}`" in text, f"add `{tag}` to the types of a part in {page}"


@stem
def test_a_file_has_its_name_and_a_source_with_address_and_day(path: Path) -> None:
    preset = spec(path)
    assert preset.name == path.stem
    assert re.fullmatch(r"[a-z0-9][a-z0-9.\-]*", path.stem)
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 75
    assert preset.source
    for source in preset.source:
        assert source.document
        assert re.fullmatch(r"https?://[^\s'\"]+\.[^\s'\"]+", source.url), source.url
        assert re.fullmatch(r"20\d\d-(0[1-9]|1[0-2])-(0[1-9]|[12]\d|3[01])", source.read), source.read


@pytest.mark.parametrize("paths", [MODELS, GPUS], ids=["models", "gpus"])
def test_names_and_aliases_are_unique(paths: list[Path]) -> None:
    """Names are compared without case and separators. opt-1.3b and opt-13b differ only in a dot, which then counts."""
    owners: dict[str, str] = {}
    for path in paths:
        for name in (path.stem, *spec(path).aliases):
            folded = key(name, dots=True)
            assert owners.setdefault(folded, path.stem) == path.stem, f"{name}: {owners[folded]} and {path.stem}"


def test_a_name_that_fits_two_is_refused(kvcalc: Run) -> None:
    assert kvcalc("size OPT_13B opt1.3b --format json").records[0]["model"] == "opt-13b"
    refused = kvcalc("size opt13.b")
    assert refused.code == 2 and "'opt13.b' may be more than one model. Write opt-1.3b or opt-13b" in refused.err


@stem
def test_every_alias_finds_its_preset(path: Path) -> None:
    load, hub_ids = (load_model, read(path, Model).checkpoints) if path.parent.name == "models" else (load_gpu, {})
    for alias in (path.stem, *hub_ids, *spec(path).aliases):
        for one in map(load, (alias.upper().replace("-", "_"), alias.replace("-", ":", 1))):
            assert one.name == (alias if alias in hub_ids else path.stem)
            assert alias not in hub_ids or one.huggingface_id == hub_ids[alias]


@each_model
def test_model_says_what_it_is(path: Path) -> None:
    model = read(path, Model)
    assert model.family
    assert model.max_context or path.stem.startswith("recurrentgemma")  # no positions, and no limit stated
    assert "parameters" in model.published
    assert set(model.published) <= {"parameters", "active_parameters", "exact", "note"}
    assert model.huggingface_id is None or re.fullmatch(r"[\w.\-]+/[\w.\-]+", model.huggingface_id)


# Published figures that are neither rounded nor cut from the recount: the recount, and why. Presets may say so in a note.
MISPRINTS = {
    ("gpt-3-medium", "parameters"): (355_871_744, "350M where the paper rounds other sizes to three digits"),
    ("gpt-3-13b", "parameters"): (12_853_386_240, "the sizes in the paper's table make 12.9B, not its 13.0B"),
    ("gpt-3-175b", "parameters"): (174_604_259_328, "the sizes in the paper's table make 174.6B, not its 175.0B"),
    ("mistral-7b-v0.1", "parameters"): (7_241_732_096, "the announcement rounds up"),
    ("glm-5.2", "parameters"): (743_377_000_704, "744B is GLM-5; 57 of GLM-5.2's layers have no indexer of their own"),
    ("glm-5.3", "parameters"): (743_377_000_704, "as GLM-5.2"),
    ("deepseek-v4.1-flash", "parameters"): (748_494_654_064, "stated without its tables of n-grams, 196.6B"),
    ("deepseek-v4.1-flash", "active_parameters"): (213_406_321_264, "the same; and without embeddings"),
    ("glm-5.3-flash", "parameters"): (313_326_799_870, "stated with its layer of multi-token prediction"),
    ("glm-5.3-flash", "active_parameters"): (17_376_709_630, "stated with its layer of multi-token prediction"),
    ("hunyuan-large", "active_parameters"): (51_322_077_440, "the paper's 52B"),
    ("gemma-4-e4b", "parameters"): (7_463_013_376, "stated with the vision and audio towers"),
    ("nemotron-3-ultra", "parameters"): (549_308_968_960, "a nominal size"),
    ("qwen3.5-397b-a17b", "parameters"): (396_346_350_336, "stated with the vision tower"),
}
SCALE = {"T": 10**12, "B": 10**9, "M": 10**6}


def as_published(count: int, published: str) -> set[str]:
    """Return `count` with the digits and the unit of a published figure, rounded and truncated: 8030261248 as '8.03B'."""
    unit, decimals = SCALE[published[-1]], len(published[:-1].partition(".")[2])
    cut = count * 10**decimals // unit
    return {f"{value:.{decimals}f}{published[-1]}" for value in (count / unit, cut / 10**decimals)}


@each_model
def test_published_counts_equal_the_recount(path: Path) -> None:
    """Active parameters are published with the embedding table (as counted here) or without it."""
    model = read(path, Model)
    for name in {"parameters", "active_parameters"} & set(model.published):
        published, count = model.published[name], getattr(model, name)
        ways = as_published(count, published)
        if name == "active_parameters":
            ways |= as_published(count - model.vocab_size * model.hidden_size, published)
        if (path.stem, name) in MISPRINTS:
            assert count == MISPRINTS[path.stem, name][0]
            assert published not in ways, "no misprint after all"
        elif name == "parameters" and "note" in model.published:
            assert published not in ways, "needs no note"
            assert abs(float(published[:-1]) * SCALE[published[-1]] - count) < 0.25 * count
        else:
            assert published in ways, count


def test_exact_counts_equal_the_recount() -> None:
    stated = {p.stem: m.published["exact"] for p in MODELS if "exact" in (m := read(p, Model)).published}
    assert stated
    assert stated == {name: str(load_model(name).parameters) for name in stated}


ORDER = [("fp64", "fp32"), ("fp32", "tf32"), ("tf32", "bf16"), ("bf16", "fp8"), ("bf16", "int8"), ("fp8", "fp6"), ("fp8", "fp4")]
# Blackwell Ultra gave up its int8 units; Gaudi 3 runs fp16 at a quarter of bf16; Apple publishes no peak.
UNEVEN = {("b300", "int8"), ("gb300", "int8"), ("gaudi-3", "fp16")}


@each_gpu
def test_gpu_figures_fit_together(path: Path) -> None:
    gpu = read(path, Gpu)
    peaks = gpu.flops_per_s
    assert peaks or gpu.vendor == "Apple"
    for slow, fast in ORDER:
        if slow in peaks and fast in peaks and (path.stem, fast) not in UNEVEN:
            assert peaks[slow] <= peaks[fast], (slow, fast)
    if {"bf16", "fp16"} <= set(peaks) and (path.stem, "fp16") not in UNEVEN:
        assert peaks["bf16"] == peaks["fp16"]
    assert all(rate <= max(peaks.values()) for rate in gpu.vector_flops_per_s.values())
    assert gpu.memory_bytes >= 7 * 2**30
    assert 5e10 < gpu.bandwidth_bytes_per_s < 1e14
    assert (gpu.link_bytes_per_s or 0) < gpu.bandwidth_bytes_per_s


def test_knee_of_h100(kvcalc: Run) -> None:
    """989 TFLOP/s over 3.35 TB/s."""
    for name in ("h100", "h100-sxm", "H100_SXM"):
        (record,) = kvcalc(f"gpus {name} --format json").records
        assert record["gpu"] == "h100-sxm"
        assert (record["bf16_flops_per_s"], record["bandwidth_bytes_per_s"]) == (989e12, 3.35e12)
        assert record["knee"] == 989e12 / 3.35e12
    assert all(gpu.knee == gpu.ridge_point_for("bf16") for gpu in all_gpus() if gpu.knee)  # as roofline prints


DATASHEETS = [
    ("h100-sxm", 80, 989, 3350), ("h200", 141, 989, 4800), ("a100-80gb", 80, 312, 2039), ("l4", 24, 121, 300),
    ("l40s", 48, 362, 864), ("mi300x", 192, 1307, 5300), ("rx-7900-xtx", 24, 123, 960), ("mi210", 64, 181, 1600),
    ("rtx4070", 12, 58, 504), ("3060", 12, 24, 360), ("strix-halo", 128, 59, 256),
]  # fmt: skip


@pytest.mark.parametrize(("name", "nominal", "bf16", "bandwidth"), DATASHEETS)
def test_datasheet_figures(name: str, nominal: int, bf16: int, bandwidth: int) -> None:
    """Dense, never the doubled sparse figure; memory as the driver reports it, a little below nominal GiB."""
    gpu = load_gpu(name)
    assert round(gpu.flops_per_s["bf16"] / 1e12) == bf16
    assert round(gpu.bandwidth_bytes_per_s / 1e9) == bandwidth
    assert nominal * 0.91 * 2**30 < gpu.memory_bytes <= nominal * 2**30


def test_models_and_gpus_are_listed_whole(kvcalc: Run) -> None:
    models, gpus = kvcalc("models --format json").records, kvcalc("gpus --format json").records
    assert sorted(r["model"] for r in models) == sorted(preset_files("models")) == sorted(p.stem for p in MODELS)
    assert sorted(r["gpu"] for r in gpus) == sorted(preset_files("gpus")) == sorted(p.stem for p in GPUS)
    llama = next(r for r in models if r["model"] == "llama-3.1-8b")
    assert llama["bytes_per_token"] == 2 * 32 * 8 * 128 * 2
    assert (llama["layers"], llama["hidden_size"], llama["max_context"]) == (32, 4096, 131_072)


def test_one_model_in_full_is_its_file(kvcalc: Run) -> None:
    assert kvcalc("models deepseek-v3").out == (shipped_folder() / "models" / "deepseek-v3.yaml").read_text(encoding="utf-8")
    assert kvcalc("gpus h100").out.endswith("\n\n" + (shipped_folder() / "gpus" / "h100-sxm.yaml").read_text(encoding="utf-8"))


def test_filters(kvcalc: Run) -> None:
    families = {r["family"] for r in kvcalc("models --family gpt-3 --format json").records}
    assert families == {"gpt-3"}
    assert {r["model"] for r in kvcalc("models --attention mla --format json").records} >= {"deepseek-v3", "kimi-k2"}
    assert {r["vendor"] for r in kvcalc("gpus --vendor amd --format json").records} == {"AMD"}


def test_qwen3_5_predicts_a_further_token_with_a_full_layer() -> None:
    """mtp_num_hidden_layers: a layer of full attention after a projection of two states and three norms."""
    d, f, q, kv = 5120, 17_408, 24 * 256, 4 * 256
    layer = 2 * d * q + 2 * d * kv + q * d + 2 * 256 + 3 * d * f + 2 * d
    worked = layer + 2 * d * d + 3 * d
    assert load_model("qwen3.5-27b").mtp_parameters == worked == 424_699_392
    config = {
        "model_type": "qwen3_5_text", "hidden_size": d, "intermediate_size": f, "num_hidden_layers": 64, "head_dim": 256,
        "num_attention_heads": 24, "num_key_value_heads": 4, "linear_num_value_heads": 48, "mtp_num_hidden_layers": 1,
    }  # fmt: skip
    assert model_from(config, "f", "x").mtp_parameters == worked
