"""Every preset file: its schema, its source, and its published counts against the recount."""

import re
from pathlib import Path

import pytest
from conftest import Run

from kvcalc import Gpu, Model, load_gpu, load_model
from kvcalc.catalog import key, preset_files, shipped_folder
from kvcalc.load import read

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


@pytest.mark.parametrize("name", REQUIRED.split())
def test_model_is_there(name: str) -> None:
    assert load_model(name).name == name


@pytest.mark.parametrize("name", REQUIRED_GPUS)
def test_gpu_is_there(name: str) -> None:
    assert load_gpu(name).name == name


@stem
def test_name_is_the_file_stem(path: Path) -> None:
    assert spec(path).name == path.stem
    assert re.fullmatch(r"[a-z0-9][a-z0-9.\-]*", path.stem)


@stem
def test_source_has_an_address_and_a_day(path: Path) -> None:
    sources = spec(path).source
    assert sources
    for source in sources:
        assert source.document
        assert re.fullmatch(r"https?://[^\s'\"]+\.[^\s'\"]+", source.url), source.url
        assert re.fullmatch(r"20\d\d-(0[1-9]|1[0-2])-(0[1-9]|[12]\d|3[01])", source.read), source.read


@stem
def test_file_is_small(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 60


@pytest.mark.parametrize("paths", [MODELS, GPUS], ids=["models", "gpus"])
def test_names_and_aliases_are_unique(paths: list[Path]) -> None:
    owners: dict[str, str] = {}
    for path in paths:
        for name in (path.stem, *spec(path).aliases):
            assert owners.setdefault(key(name), path.stem) == path.stem, f"{name}: {owners[key(name)]} and {path.stem}"


@stem
def test_every_alias_finds_its_preset(path: Path) -> None:
    load = load_model if path.parent.name == "models" else load_gpu
    for alias in spec(path).aliases:
        assert load(alias.upper().replace("-", "_")).name == path.stem


@each_model
def test_model_says_what_it_is(path: Path) -> None:
    model = read(path, Model)
    assert model.family
    assert model.max_context
    assert set(model.published) <= {"parameters", "active_parameters"}
    assert "parameters" in model.published
    assert model.huggingface_id is None or re.fullmatch(r"[\w.\-]+/[\w.\-]+", model.huggingface_id)


# Published figures that the recount does not round to: the recount, and why.
MISPRINTS = {
    ("gpt-3-medium", "parameters"): (355_871_744, "the paper cuts 355.9M down to 350M"),
    ("gpt-3-13b", "parameters"): (12_853_386_240, "the paper's 13.0B is 12.9B of the sizes in its own table"),
    ("gpt-3-175b", "parameters"): (174_604_259_328, "the paper's 175.0B is 174.6B of the sizes in its own table"),
    ("gpt2-xl", "parameters"): (1_557_611_200, "the release cuts 1.558B down to 1.5B"),
    ("llama-2-70b", "parameters"): (68_976_648_192, "a round name; the table of the paper says 70B"),
    ("llama-3.1-70b", "parameters"): (70_553_706_496, "cut"),
    ("llama-3.1-405b", "parameters"): (405_853_388_800, "cut"),
    ("llama-3.2-1b", "parameters"): (1_235_814_400, "the model card cuts 1.236B down to 1.23B"),
    ("llama-65b", "parameters"): (65_285_660_672, "the paper cuts 65.29B down to 65.2B"),
    ("mistral-7b-v0.1", "parameters"): (7_241_732_096, "the announcement rounds 7.24B up to 7.3B"),
    ("deepseek-v3.2", "parameters"): (671_877_929_216, "685B is the checkpoint, with the multi-token-prediction layer"),
    ("glm-5.2", "parameters"): (743_377_000_704, "744B is GLM-5, of which 57 layers have given up their indexers"),
}
SCALE = {"T": 10**12, "B": 10**9, "M": 10**6}


def rounded(count: int, published: str) -> str:
    """`count` with as many decimals as the published figure has, in its unit: 8030261248 as '8.03B'."""
    decimals = len(published[:-1].partition(".")[2])
    return f"{count / SCALE[published[-1]]:.{decimals}f}{published[-1]}"


@each_model
def test_published_counts_equal_the_recount(path: Path) -> None:
    """Active parameters are published with the embedding table (as counted here) or without it."""
    model = read(path, Model)
    for name, published in model.published.items():
        count: int = getattr(model, name)
        table = model.vocab_size * model.hidden_size
        ways = {rounded(count, published), rounded(count - table, published) if name == "active_parameters" else ""}
        if (path.stem, name) in MISPRINTS:
            assert count == MISPRINTS[path.stem, name][0]
            assert published not in ways, "no misprint after all"
        else:
            assert published in ways, count


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
    assert gpu.memory_bytes >= 8 * 2**30
    assert 1e11 < gpu.bandwidth_bytes_per_s < 1e14
    assert (gpu.link_bytes_per_s or 0) < gpu.bandwidth_bytes_per_s


def test_knee_of_h100(kvcalc: Run) -> None:
    """989 TFLOP/s over 3.35 TB/s."""
    for name in ("h100", "h100-sxm", "H100_SXM"):
        (record,) = kvcalc(f"gpus {name} --format json").records
        assert record["gpu"] == "h100-sxm"
        assert (record["bf16_flops_per_s"], record["bandwidth_bytes_per_s"]) == (989e12, 3.35e12)
        assert record["knee"] == 989e12 / 3.35e12
        assert round(record["knee"], 1) == 295.2


@pytest.mark.parametrize(
    ("name", "nominal", "bf16", "bandwidth"),
    [
        ("h100-sxm", 80, 989, 3350),
        ("h200", 141, 989, 4800),
        ("a100-80gb", 80, 312, 2039),
        ("l4", 24, 121, 300),
        ("l40s", 48, 362, 864),
        ("mi300x", 192, 1307, 5300),
    ],
)
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
    assert kvcalc("gpus h100").out == (shipped_folder() / "gpus" / "h100-sxm.yaml").read_text(encoding="utf-8")


def test_filters(kvcalc: Run) -> None:
    families = {r["family"] for r in kvcalc("models --family gpt-3 --format json").records}
    assert families == {"gpt-3"}
    assert {r["model"] for r in kvcalc("models --attention mla --format json").records} >= {"deepseek-v3", "kimi-k2"}
    assert {r["vendor"] for r in kvcalc("gpus --vendor amd --format json").records} == {"AMD"}
