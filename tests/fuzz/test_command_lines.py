"""Commands, presets and options in any combination give consistent figures or one line with an error."""

import pytest
from hypothesis import strategies as st
from program import MANY, hold, run, sound

from kvcalc.library.presets import shipped_folder

MODELS, GPUS = (sorted(p.stem for p in (shipped_folder() / kind).glob("*.yaml")) for kind in ("models", "gpus"))
CONTEXTS = ("1", "17", "4096", "128k", "1M", "1000000000000")
RANKS = {"--tp": "1 2 3 8", "--pp": "2 61", "--dp": "1 8", "--ep": "2 8", "--dcp": "2"}
FORMATS = {
    "--dtype": "auto bf16 fp16 fp32 fp64 fp8",
    "--kv-cache-dtype": "auto bf16 fp8 int8 int4 nvfp4 fp8_ds_mla q8_0",
    "-q": "fp8 awq gptq nvfp4 mxfp4 int8",
}
TIMES = {"--stack": "vllm sglang trtllm datasheet", "--mla-form": "auto absorbed expanded", "--calibration-from": "h100"}
ENGINES = {
    "--engine": "none vllm sglang trtllm llama.cpp",
    "--max-model-len": " ".join(CONTEXTS),
    "--max-num-seqs": "1 256 100000",
    "--gpu-memory-utilization": "0.1 0.5 1",
    "--kv-cache-memory-bytes": "0 1 1GiB",
    "--num-gpu-blocks-override": "1 100",
    "--block-size": "1 7 64",
    "--shared-prefix": "5 4k",
    "--mamba-cache-mode": "none align",
    "--mamba-ssm-cache-dtype": "auto fp32 bf16",
    "--weight-bytes": "1",
    "--activation-bytes": "1GiB",
    "--cpu-offload-gb": "10",
    "--require": "3",
    "--max-num-batched-tokens": "1 512",
    "--draft": "gpt2 mtp layers=2",
    "--lengths": "lognormal:100,200",
}
SPECULATED = {"--draft": "gpt2 mtp layers=2", "--max-num-batched-tokens": "512", "--prefix-len": "7", "--price-per-hour": "2.5"}
VARIANTS = "mha,gqa:4,mqa mla:512+64,mla dsa:512+64+128@2048,window:4096 hybrid:5/window:4096,cla:3 evict:4096,gqa:8"
COMMANDS: dict[str, dict[str, str]] = {
    "size": {"--context": " ".join(CONTEXTS), "--bs": "1 1000"} | RANKS | FORMATS,
    "fit": ENGINES | RANKS | FORMATS,
    "roofline": {"--phase": "decode prefill", "--context": " ".join(CONTEXTS[:-1]), "--bs": "8 1000"} | RANKS | FORMATS | TIMES,
    "latency": {"--isl": "1 100 64k", "--osl": "1 2 500"} | SPECULATED | RANKS | FORMATS | TIMES,
    "compare": {"--variants": VARIANTS, "--context": " ".join(CONTEXTS)} | RANKS | FORMATS,
    "serve": {"--policy": "static continuous", "--cache": "paged contiguous"} | RANKS | FORMATS,
}
FLAGS = {"fit": "--enforce-eager --mtp --swa-full --kv-unified", "latency": "--no-cache"}
FEW_REQUESTS = ("--num-prompts", "5", "--isl", "50", "--osl", "5")


@st.composite
def lines(draw: st.DrawFn, command: str) -> list[str]:
    """Draw the words of one run."""
    options = COMMANDS[command]
    words = [command, draw(st.sampled_from(MODELS))]
    words += ["--gpu", draw(st.sampled_from(GPUS))] if command != "size" else []
    for option in draw(st.lists(st.sampled_from(sorted(options)), max_size=4, unique=True)):
        words += [option, draw(st.sampled_from(options[option].split()))]
    for flag in draw(st.lists(st.sampled_from(FLAGS.get(command, "--wide").split()), max_size=1)):
        words.append(flag)
    words += FEW_REQUESTS if command == "serve" else ()
    return [*words, "--format", draw(st.sampled_from(["json", "json", "json", "table", "csv", "markdown"]))]


@pytest.mark.parametrize("count", [20, MANY])
@pytest.mark.parametrize("command", COMMANDS)
def test_an_answer_that_holds_together_or_one_line(command: str, count: int) -> None:
    def check(words: list[str]) -> None:
        sound(run(*words))

    hold(check, count, lines(command))
