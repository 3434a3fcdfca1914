"""`--gpu all` and `--tp auto`: all presets, and all sizes that divide the model."""

from conftest import Run

from kvcalc.library.load import all_gpus


def test_all_is_every_preset(kvcalc: Run) -> None:
    records = kvcalc("fit llama-3.2-1b --gpu all --format json").records
    assert sorted(r["gpu"] for r in records) == sorted(g.name for g in all_gpus())
    for timed in ("latency llama-3.2-1b", "roofline llama-3.2-1b", "roofline"):
        records = kvcalc(f"{timed} --gpu all --format json").records
        assert {r["gpu"] for r in records} == {g.name for g in all_gpus() if g.knee}
    _, out, _ = kvcalc("latency qwen3-30b-a3b -q int4 --gpu h100,h200,a100-80gb")
    assert "Times are predicted by the calibration of vllm.\n" in out


def test_auto_is_every_size_that_divides_the_model(kvcalc: Run) -> None:
    """28 query heads are divisible by 4, but not by 8. 32 are divisible by all sizes."""
    for model, sizes in (("qwen2.5-7b", [1, 2, 4]), ("llama-3.1-8b", [1, 2, 4, 8]), ("qwen2.5-7b llama-3.1-8b", [1, 2, 4])):
        for command in ("size", "fit", "latency"):
            records = kvcalc(f"{command} {model} --tp auto --format json").records
            assert sorted({r["gpus"] for r in records}) == sizes, command
