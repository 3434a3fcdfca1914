"""Unknown options: the message has the text to type instead, for this command."""

import pytest
from conftest import Run

SAID = [
    ("serve gpt2 --trace t.csv", "serve has no --trace. Did you mean --requests?"),
    ("latency gpt2 --context 4k", "latency has no --context. Did you mean --input-len?"),
    ("size gpt2 --disaggregate", "size has no --disaggregate. `kvcalc serve` and `kvcalc plan` have --disaggregate"),
    ("latency gpt2 --n-cpu-moe 3", "latency has no --n-cpu-moe. `kvcalc fit` has --n-cpu-moe"),
    ("size gpt2 --kv-cache-dtyp fp8", "size has no --kv-cache-dtyp. Did you mean --kv-cache-dtype?"),
    ("size gpt2 --gpu h100", "size has no --gpu. `kvcalc fit`, `kvcalc compare` and `kvcalc roofline` have --gpu"),
    ("version", "unknown command. Write `kvcalc --version`"),
    ("size gpt2 --zzz", "size has no --zzz. `kvcalc size --help-all` lists its options"),
    ("size gpt2 -dp 1 -dtype bf16", "size has no -dtype. Did you mean --dtype?"),
    ("size gpt2 -zzz", "size has no -zzz. `kvcalc size --help-all` lists its options"),
    ("fit -- vllm gpt2 -tp 2", "'vllm gpt2 -tp 2' starts no engine that is known. Write vllm serve MODEL …"),
    ("size gpt2 --tp", "Option '--tp' requires an argument. (see `kvcalc size --help`)"),
    ("compare gpt2 gpt2-xl", "compare takes no further word: gpt2-xl. `--variants` takes mha,mla. `kvcalc size A B`"),
    ("fit llama-server -hf gpt2 -c 9", "fit has no -c. Put -- before an engine's command line"),
    ("fit -- llama-server -hf gpt2 --gpu h100", "llama-server has no --gpu. Write it before --: `kvcalc fit --gpu h100 --"),
    ("fit gpt2 --free_gpu_memory_fraction 1", "Did you mean --gpu-memory-utilization?"),
    ("fit gpt2 --max-total-tokens 9", "Did you mean --kv-cache-memory-bytes or --num-gpu-blocks-override?"),
    ("fit", "MODEL… is missing. Write `kvcalc fit llama-3.1-70b --gpu h100 --tp 4 --max-model-len 32k`"),
    ("llama-3.1-8b", "No such command 'llama-3.1-8b'. Put a command first: `kvcalc size llama-3.1-8b`"),
    ("siz gpt2", "No such command 'siz'. Did you mean 'size'? (see `kvcalc --help`)"),
    ("models gpt2 gpt2-xl", "models takes no further word: gpt2-xl. Write a list as a,b"),
]


@pytest.mark.parametrize(("line", "said"), SAID)
def test_what_to_type_instead(kvcalc: Run, line: str, said: str) -> None:
    found = kvcalc(line)
    assert (found.code, found.out) == (2, "") and found.err.startswith("kvcalc: ") and found.err.count("\n") == 1
    assert said in found.err


def test_context_means_the_longest_that_fit_takes(kvcalc: Run) -> None:
    assert kvcalc("fit gpt2 --context 1k --format json").out == kvcalc("fit gpt2 --max-model-len 1k --format json").out
