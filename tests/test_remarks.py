"""Notes on stderr: each occurs once, for all models and GPUs to which it applies. Lists in options that once took one value."""

from conftest import Run

NOTE = "every layer is counted as dense attention; the paper alternates dense and locally banded sparse layers"


def test_one_note_of_all_models_not_one_each(kvcalc: Run) -> None:
    err = kvcalc("size gpt-3-small gpt-3-medium gpt-3-xl --context 2k").err.splitlines()
    assert err[0] == f"note: gpt-3-small, gpt-3-medium, gpt-3-xl: {NOTE}"
    assert len(err) == 2 and err[1].startswith("note: gpt-3-xl: Table 2.1 misprints the heads")
    err = kvcalc("size llama-7b llama-13b mistral-7b-v0.1 --context 4k").err
    assert err == "note: llama-7b, llama-13b: context 4,096 is beyond the model's own maximum of 2,048\n"


def test_gpus_and_models_take_lists(kvcalc: Run) -> None:
    assert [r["gpu"] for r in kvcalc("gpus h200,h100 --format json").records] == ["h200", "h100-sxm"]
    assert [r["model"] for r in kvcalc("models gpt2,llama-7b --format json").records] == ["gpt2", "llama-7b"]
    assert "295.2" in kvcalc("gpus h200,h100").out
    assert kvcalc("gpus h200,h1000").code == 2
