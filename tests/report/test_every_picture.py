"""In every picture of 1, 2, 6 and 12 series with names of 40 characters, no texts overlap.

The complete test takes long and runs with `-m fuzz`. A few of the fullest pictures always run.
"""

import re
from pathlib import Path
from typing import Any

import pytest
from conftest import Run
from report.test_pictures import COUNTS, LONG, check_apart

from kvcalc.report.charts import drawing

PRESETS = Path(__file__).parent.parent.parent / "presets"
MODELS = ("llama-7b", "llama-3.1-8b", "mistral-7b-v0.1", "gemma-3-27b", "gpt-oss-20b", "qwen3-8b", "llama-2-13b", "qwen3-32b",
          "qwen3-4b", "gpt2-xl", "gpt-oss-120b", "qwen3-14b")  # fmt: skip
GPUS = ("h100-sxm", "h200", "b200", "a100-80gb", "l40s", "l4", "mi300x", "gb200", "h100-pcie", "gb300", "l40", "b300")
VARIANTS = ("mha", "gqa:8", "mqa", "mla:512+64", "window:4096", "dsa:512+64+128@2048", "gqa:4", "gqa:16", "cla:2",
            "hybrid:5/window:4096", "evict:4096", "window:1024")  # fmt: skip
LOAD = "--num-prompts 40 --input-len 512 --output-len 64"
LINES = {
    "cache-vs-context": "plot cache-vs-context {models} --gpu {gpu}",
    "cache-vs-parameters": "plot cache-vs-parameters {models} qwen3-8b",
    "memory": "plot memory {models} --context 8k --batch-size 16",
    "memory of GPUs": "plot memory {model} --gpu {gpus} --batch-size 16",
    "plot roofline": "plot roofline {models} --batch-size 8",
    "roofline of GPUs": "roofline {model} --gpu {gpus} --batch-size 8",
    "prefill": "roofline {models} --phase prefill --context 4k",
    "batches": "roofline {model} --batch-size {powers}",
    "attention": "roofline --gpu {gpus} --context 32k",
    "compare": "compare {model} --gpu {gpu} --variants {variants}",
    "compare on GPUs": "compare {model} --gpu {gpus} --variants mha,mqa",
    "latency": "latency {models} --gpu h200",
    "speculation": "latency llama-3.1-70b --gpu h200 --tp 4 --draft llama-3.2-1b --acceptance-rate 0.7 "
    "--num-speculative-tokens {counts}",
    "fit": "fit {model} --gpu {gpus} --max-model-len 8k",
    "matrix": "fit {model} --gpu {gpus} --matrix",
    "size": "size {models} --context 4k,32k",
    "rates": "serve llama-3.1-8b --gpu {gpu} --rate 1,{powers} " + LOAD,
    "servers": "serve {model} --gpu {gpus} --rate 1,4,16 " + LOAD,
}
FULLEST = ("plot roofline 6", "attention 12", "matrix 6", "compare 6", "memory of GPUs 2")
EVERY = [
    pytest.param(f"{name} {count}", style, marks=() if f"{name} {count}" in FULLEST and style == "slides" else pytest.mark.fuzz)
    for name in LINES
    for count in COUNTS
    for style in ("light", "slides")
]


def named(folder: Path, kind: str, names: tuple[str, ...]) -> list[str]:
    """Write presets under other names, of 40 characters."""
    found = []
    for number, name in enumerate(names):
        text = (PRESETS / kind / f"{name}.yaml").read_text(encoding="utf-8")
        text = re.sub(r"^aliases:.*\n", "", text, flags=re.MULTILINE)
        long = LONG if kind == "models" else LONG.replace("/", "-")  # a GPU's name is a folder's too
        target = folder / f"{kind}-{number}.yaml"
        text = re.sub(r"^name: .*$", "name: " + repr(f"{number}-{long}"[:40]), text, flags=re.MULTILINE)
        target.write_text(text, encoding="utf-8")
        found.append(str(target))
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("case", "style"), EVERY)
def test_texts_of_every_picture_keep_apart(
    kvcalc: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str, style: str
) -> None:
    name, _, many = case.rpartition(" ")
    count, drawn = int(many), list[Any]()
    monkeypatch.setattr(drawing, "save", lambda charts, *_: drawn.append(charts))
    models, gpus = named(tmp_path, "models", MODELS[:count]), named(tmp_path, "gpus", GPUS[:count])
    words = {"models": " ".join(models), "model": models[0], "gpus": ",".join(gpus), "gpu": gpus[0]}
    words |= {"variants": ",".join(VARIANTS[:count]), "powers": ",".join(str(2 << n) for n in range(count))}
    words["counts"] = ",".join(str(n + 1) for n in range(count))
    found = kvcalc(LINES[name].format(**words), "--plot", "picture.png")
    assert found.code == 0 and len(drawn) == 1, found.err
    check_apart(drawn[0], style)
