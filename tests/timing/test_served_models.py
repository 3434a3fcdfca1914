"""The preset for the path of a served model, by its name or the longest matching beginning, and the served release."""

from pathlib import Path

import pytest

from kvcalc.timing.calibration import EngineOverheads, FormerOverheads, HostOverheads
from kvcalc.timing.rows import served_model

PRESET = (
    "name: {name}\nhidden_size: 8\nvocab_size: 8\nlayers: 1\nkinds: {{a: {{parts: [{{type: dense, intermediate_size: 8}}]}}}}\n"
)


@pytest.mark.parametrize("first", ["long", "short"])
def test_the_longer_id_prefix_wins_whichever_is_read_first(first: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVCALC_PRESETS", str(tmp_path))
    (tmp_path / "models").mkdir()
    ids = {"short": f"Zz/{first}-Novel", "long": f"Zz/{first}-Novel-Tiny"}
    for name, place in (("long", "a" if first == "long" else "b"), ("short", "b" if first == "long" else "a")):
        text = PRESET.format(name=name) + f"huggingface_id: {ids[name]}\n"
        (tmp_path / "models" / f"{place}.yaml").write_text(text)
    for path, expected in (("Novel-Tiny-Instruct", "long"), ("novel_tiny", "long"), ("Novel-Instruct", "short")):
        model = served_model(f"someone/{first}-{path}")
        assert model and model.name == expected
    assert served_model(f"someone/my-{first}-Novel") is None


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("openai-community/gpt2", "gpt2"),
        ("openai-community/gpt2-xl", "gpt2-xl"),
        ("facebook/opt-1.3b", "opt-1.3b"),
        ("facebook/opt-13b", "opt-13b"),
        ("nvidia/DeepSeek-V3.2-NVFP4", "deepseek-v3.2"),
        ("deepseek-ai/DeepSeek-V3-0324", "deepseek-v3"),
        ("meta-llama/llama_3_1_8b", "llama-3.1-8b"),
    ],
)
def test_names_within_names_and_names_that_differ_by_a_dot(path: str, name: str) -> None:
    model = served_model(path)
    assert model and model.name == name


def test_terms_are_those_of_the_release() -> None:
    now, then = HostOverheads(glue_us=1), HostOverheads(glue_us=2)
    plain = EngineOverheads(stack="plain", dense=now, mixture=now)
    engine = EngineOverheads(
        stack="changed", dense=now, mixture=now, former=FormerOverheads(versions=("0.11.0", "0.12"), dense=then, mixture=then)
    )
    for version, expected in (("0.11.0", then), ("0.12.3", then), ("0.11.2", now), ("0.24.0", now), ("", now)):
        assert engine.for_version(version).dense == engine.for_version(version).mixture == expected, version
        assert plain.for_version(version) == plain
