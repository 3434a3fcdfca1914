"""Names change nothing: a model under other names of its file, folder or preset gives equal records."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from conftest import Run
from gguf_files import llama, llama_tensors, write

from kvcalc import load_model
from kvcalc.library.huggingface.types.model_type import type_names
from kvcalc.library.presets import shipped_folder

SIZES = {
    "hidden_size": 1024, "intermediate_size": 2048, "num_attention_heads": 16, "num_key_value_heads": 4, "vocab_size": 32000,
    "num_hidden_layers": 8, "max_position_embeddings": 8192, "torch_dtype": "bfloat16",
}  # fmt: skip
LLAMA = SIZES | {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
# Names that an engine's rules, llama.cpp's tensors or a preset once depended on.
NAMES = ("gemma4-like", "lfm2", "llama-3.1-8b")
LINES = (
    "size {}",
    "fit {} --gpu h100 --engine vllm --engine-version 0.22",
    "fit {} --gpu h100 --engine vllm --engine-version 0.24",
    "fit {} --gpu h100 --engine sglang",
    "fit {} --gpu h100 --engine llama.cpp",
    "plan {} --gpu h100 --users 16 --context 4k --max-gpus 1 --engine sglang",
)


def answers(kvcalc: Run, model: Path) -> list[Any]:
    """Return the records of all LINES without the model's name and its path."""
    found = []
    for line in LINES:
        result = kvcalc(line.format(model) + " --format json")
        assert result.code in (0, 1), result.err
        for record in json.loads(result.out):
            record["model"] = "its name"
            found.append({k: str(v).replace(str(model), "its path") for k, v in record.items()})
    return found


@pytest.mark.parametrize("name", ["qwen3-0.6b", "lfm2-350m"])
def test_the_name_of_a_preset_changes_nothing(kvcalc: Run, tmp_path: Path, name: str) -> None:
    """Neither the name of the file nor the key `name` matters."""
    text = (shipped_folder() / "models" / f"{name}.yaml").read_text(encoding="utf-8")
    text = re.sub(r"^huggingface_id: .*\n", "", text, flags=re.MULTILINE)
    (tmp_path / "a.yaml").write_text(text, encoding="utf-8")
    expected = answers(kvcalc, tmp_path / "a.yaml")
    for other in NAMES[:2]:
        renamed = text.replace(f"name: {name}\n", f"name: {other}\n", 1)
        (tmp_path / f"{other}.yaml").write_text(renamed, encoding="utf-8")
        assert answers(kvcalc, tmp_path / f"{other}.yaml") == expected, other


def test_the_name_of_a_gguf_file_changes_nothing(kvcalc: Run, tmp_path: Path) -> None:
    first, *others = [write(tmp_path / f"{n}.gguf", llama(), llama_tensors()) for n in ("mine", *NAMES[:2])]
    expected = answers(kvcalc, first)
    for other in others:
        assert answers(kvcalc, other) == expected, other


def test_a_command_line_names_the_file_that_was_read(kvcalc: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A Llama saved as gpt2.json is not the preset gpt2."""
    monkeypatch.chdir(tmp_path)
    Path("gpt2.json").write_text(json.dumps(LLAMA))
    (record,) = kvcalc("fit gpt2.json --gpu h100 --engine vllm --format json").records
    assert record["command"].split()[:3] == ["vllm", "serve", "gpt2.json"]


def test_models_of_one_name_stay_apart(kvcalc: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`plan a/m.json b/m.json` gives the answers for files with different names."""
    monkeypatch.chdir(tmp_path)
    files = []
    for folder, layers in (("a", 8), ("b", 16)):
        Path(folder).mkdir()
        files.append(Path(folder) / "m.json")
        files[-1].write_text(json.dumps(LLAMA | {"num_hidden_layers": layers}))
    line = "plan {} --gpu h100 --users 16 --context 4k --format json"
    apart = [kvcalc(line.format(file)).records for file in files]
    together = kvcalc(line.format(f"{files[0]} {files[1]}")).records
    for file, alone in zip(files, apart, strict=True):
        assert [r["tpot_s"] for r in together if r["model"] == str(file)] == [r["tpot_s"] for r in alone]


def test_what_a_log_taught_holds_for_the_same_model_under_any_name(kvcalc: Run, tmp_path: Path) -> None:
    text = (shipped_folder() / "models" / "qwen3-0.6b.yaml").read_text(encoding="utf-8")
    (tmp_path / "mine.yaml").write_text(text.replace("name: qwen3-0.6b", "name: mine"), encoding="utf-8")
    (tmp_path / "log.yaml").write_text(
        "engine: vllm\ngpu: h100-sxm\nmemory_bytes: 85017755648\nmodel: qwen3-0.6b\n"
        f"parameters: {load_model('qwen3-0.6b').parameters}\nweights_in: bf16\nweights_beyond_bytes: 1000000000\n"
    )
    figures = [
        kvcalc(f"fit {model} --gpu h100 --from-log {tmp_path / 'log.yaml'} --format json").records[0]["kv_budget_bytes"]
        for model in ("qwen3-0.6b", tmp_path / "mine.yaml")
    ]
    plain = kvcalc("fit qwen3-0.6b --gpu h100 --engine vllm --format json").records[0]["kv_budget_bytes"]
    assert figures[0] == figures[1] < plain


def test_presets_record_their_model_type() -> None:
    """This covers presets with a checkpoint. GPT-3 and PaLM were never published."""
    for path in sorted((shipped_folder() / "models").glob("*.yaml")):
        model = load_model(path.stem)
        assert model.model_type in type_names() or not model.huggingface_id, path.stem
