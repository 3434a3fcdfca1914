"""Compare the records of a changed kvcalc with the records of an earlier commit, byte for byte.

    PYTHONPATH=BEFORE python benchmarks/records.py write OLD.jsonl        BEFORE: a worktree of the earlier commit
    PYTHONPATH=. python benchmarks/records.py write NEW.jsonl
    python benchmarks/records.py compare OLD.jsonl NEW.jsonl [--known KNOWN.json]

`write` runs many commands and writes one line per command: the printed records, the error message, or the
crash. `compare` prints every command whose line differs, and exits with 1 if KNOWN does not explain all
differences. KNOWN maps names to rules:

    {"2": {"why": "the sampler was counted twice", "commands": "^latency .* --tp", "keys": ["tpot_s", "no_cache_*"]}}

A rule explains a change if its regex matches the command and one of its globs matches the changed key. The
first such rule is used. A nested key is written with its path: `parts.flops`. In addition to the keys of
records there are `status` (an exit status other than 0), `refused` and `crashed` (the message), `(rows)`,
`(order of keys)`, `(missing run)` and `(added run)`.

A rule with "refused": true explains that a command is refused only before or only after the change. A rule
with "new_keys": true explains added keys.
"""

import argparse
import gc
import json
import re
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from fnmatch import fnmatchcase
from io import StringIO
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from kvcalc.cli import app
from kvcalc.errors import UserError

Run = dict[str, Any]

# Each line is run once for each name in place of {}; a|b gives a run with a and a run with b. Lists in an option give more
# rows, which is faster than more runs, but one error then fails all rows.
OF_MODEL = """
size {} --context 1,100,4k,16k,300k --batch-size 1,7
size {} --context 5000 --kv-cache-dtype bf16|fp8|int4|fp8_ds_mla|turboquant_4bit_nc --dtype fp32|bf16 -q awq --block-size 64
size {} --context 4097 --batch-size 16 --tp 2|8 --pp 2 -q fp8|mxfp4
size {} --context 64k --batch-size 16 --tp 2 --dp 2 --enable-expert-parallel -q nvfp4 --kv-cache-dtype nvfp4
size {} --context 64k --tp 8|16 --dcp 2 --kv-cache-dtype bf16
size {} --context 2k --dp 4 --ep 2 --set layers=6
fit {} --gpu h100,a100-80gb,mi300x --tp 1,2,8 --max-num-seqs 4
fit {} --gpu h100,b200 --engine vllm|sglang|llama.cpp --tp 1,8 --max-model-len 5000 --max-num-seqs 16
fit {} --gpu h200 --engine vllm|sglang --tp 4 --kv-cache-dtype auto|bf16|fp8|fp8_ds_mla -q fp8 --shared-prefix 1k --max-num-seqs 3
fit {} --gpu h200 --engine none|vllm|sglang|llama.cpp --tp 4 --mtp --max-model-len 3000
fit {} --gpu h200 --engine vllm --tp 4 --pp 2 --mamba-cache-mode align --mamba-checkpoint-blocks 2
fit {} --gpu h200 --engine vllm|sglang|llama.cpp --tp 4 --mamba-ssm-cache-dtype bf16 --max-model-len 9000 --max-num-seqs 20
fit {} --gpu h200 --engine vllm --tp 8|16 --dp 2 --enable-expert-parallel --dcp 2 --max-model-len 8k --block-size 32
fit {} --engine vllm|sglang --kv-cache-memory-bytes 10GiB --max-model-len 4k --max-num-seqs 64 --disable-hybrid-kv-cache-manager
fit {} --engine vllm --num-gpu-blocks-override 5000 --draft llama-3.2-1b --max-model-len 2k --tp 2
fit {} --gpu l40s,apple-m3-max --engine llama.cpp --max-model-len 999 --kv-cache-dtype q8_0 --kv-unified|--no-kv-unified
fit {} --tp 2 --kv-offloading-bytes 100GB --weight-bytes 20GB --activation-bytes 2GB --overhead-bytes 1GB --require 200
fit {} --gpu mi300x --engine vllm --tp 2 --gpu-memory-utilization 0.7 --utilization-of total|free --dtype fp16,fp32
roofline {} --phase decode|prefill --context 1,5000,40k --batch-size 1,64
roofline {} --gpu h100 --stack vllm|sglang|trtllm --tp 2 --context 8k --batch-size 32 --kv-cache-dtype fp8 -q fp8
roofline {} --gpu h200 --stack trtllm --tp 4 --phase decode|prefill --context 4k --mla-form absorbed|expanded
roofline {} --stack datasheet --context 16k --batch-size 8 --dtype bf16 --kv-cache-dtype int4
roofline {} --gpu a100-80gb,mi300x --phase decode|prefill --context 2k --dtype bf16 -q awq
roofline {} --gpu b200 --calibration-from h100 --tp 4 --pp 2 --context 3k --batch-size 16 --kv-cache-dtype auto|fp8_ds_mla
roofline {} --gpu h200 --tp 8|16 --dp 2 --enable-expert-parallel --dcp 2 --context 20k --batch-size 128
roofline {} --dtype fp32|fp8 --context 1k --dp 4 --ep 2 --batch-size 6
compare {} --context 2k,100k --batch-size 8
compare {} --variants mha,gqa:4,gqa:2/window:4096/int8,cla:2 --gpu h200 --tp 2 --context 16k
compare {} --variants none,mha/evict:4096,mqa/window:1024 --stack datasheet --kv-cache-dtype fp8 --context 9000
compare {} --variants none,dsa:512+64+128@2048/fp8_ds_mla,mqa/cla:3 --gpu b200 --calibration-from h200 --tp 4 --batch-size 32
latency {} --input-len 100,3000 --output-len 64 --batch-size 1,32 --price-per-hour 2.5
latency {} --gpu h200 --tp 8 --isl 2000 --osl 50 --prefix-len 512 --max-num-batched-tokens 700 --kv-cache-dtype fp8 -q fp8
latency {} --gpu a100-80gb --input-len 300 --output-len 20 --no-cache --mla-form absorbed
latency {} --stack sglang --tp 4 --isl 1000 --osl 30 --draft mtp|llama-3.2-1b --num-speculative-tokens 2 --acceptance-rate 0.6
latency {} --gpu b200 --calibration-from h100 --tp 2 --pp 2 --dp 2 --enable-expert-parallel --isl 500 --osl 40 --batch-size 4
"""
SAMPLE = (
    "deepseek-v3 deepseek-v3.2 deepseek-v4-flash falcon-h1-7b gemma-3-27b gemma-4-e2b glm-5.2 gpt-oss-20b gpt2 "
    "hunyuan-large jamba-v0.1 lfm2-8b-a1b llama-3.1-8b llama-4-scout minimax-m1 minimax-m3 mistral-7b-v0.1 mixtral-8x7b "
    "qwen3.5-35b-a3b recurrentgemma-2b zamba2-7b"
)
OF_SAMPLE = """
size {} --kv-cache-dtype fp16|fp32|int8|mxfp4|mxfp8|q8_0|q4_0|int8_per_token_head|nvfp4_ds_mla|turboquant_k8v4 --context 777
size {} -q fp8|fp8_per_channel|fp8_block128|fp8_64x128|int8|int8_weight_only|gptq|int4_g32_zp|nf4|mxfp4|mxfp8 --dtype fp64|auto
size {} --tp 4|32 --pp 3 --dcp 2|4 --context 8k
size {} --set num_attention_heads=8|head_dim=64|num_key_value_heads=4|sliding_window=100|vocab_size=1000|num_experts=16
fit {} --engine none|vllm|sglang --kv-cache-memory-bytes 3GiB --max-model-len 4k --lengths lognormal:600,3000 --max-num-seqs 9
fit {} --gpu h100,t4 --engine vllm|sglang|llama.cpp --tp 2 --max-num-seqs 99 --max-num-batched-tokens 2k --max-in-flight-batches 3
roofline {} --gpu h100|h200 --stack vllm|sglang|trtllm|datasheet --tp 2 --context 6k --batch-size 20 --mla-form auto|expanded
roofline {} --phase prefill --kv-cache-dtype fp8|int8|nvfp4 -q mxfp4|nvfp4|gptq --context 3k
compare {} --variants mla:256+32|mqa/fp8|cla:4/window:512|none/nvfp4 --context 1k,1m --dtype fp16
latency {} --gpu h100 --tp 2 --isl 200 --osl 10 --draft layers=2 --num-speculative-tokens 0|3 --batch-size 4 --no-cache
serve {} --kv-cache-memory-bytes 9GB --num-prompts 20 --isl uniform:5,900 --osl lognormal:9,99 --rate 4 --policy static,continuous
serve {} --gpu h200 --tp 2|8 --dp 2 --enable-expert-parallel --num-prompts 20 --max-concurrency 6 --cache paged|contiguous
serve {} --num-prompts 9 --kv-cache-memory-bytes 200MB --isl 500 --osl 90 --max-num-batched-tokens 300
serve {} --gpu b200 --calibration-from h100 --num-prompts 20 --max-num-seqs 4 --price-per-hour 3 --slo-tpot 0.02 -q int4 --tp 8
"""
OF_GPU = """
roofline --gpu {}
roofline llama-3.1-8b|gpt-oss-20b --gpu {} --context 4k --batch-size 16 --dtype auto|fp32
roofline deepseek-v3.2 --gpu {} --phase prefill --tp 4 --calibration-from h100|h200
fit qwen3-8b|gemma-3-27b --gpu {} --engine vllm|sglang|llama.cpp --tp 2 --max-model-len 4k
latency llama-3.1-8b --gpu {} --tp 2 --input-len 500 --output-len 30 --stack vllm|sglang|datasheet
serve llama-3.2-1b --gpu {} --num-prompts 5 --input-len 300 --output-len 10
"""
ONCE = """
models|gpus
size gpt2|gpt --context=0|--context=8x|--batch-size=-1|--kv-cache-dtype=int9|--dtype=bf17|--quantization=foo|--block-size=-1
size gpt2 --tp=0|--tp=5|--tp=x|--pp=13|--dcp=2|--ep=2|--set=head_dim|--set=no_such=1|--set=none.head_dim=32|--set=layers=0|--no=1
fit gpt2 --engine=nonsense|--max-model-len=0|--max-num-seqs=0|--gpu-memory-utilization=0|--gpu-memory-utilization=1.5|--require=-1
fit gpt2 --lengths=lognormal:1|--lengths=no.csv|--utilization-of=half|--num-gpu-blocks-override=9|--draft=gpt3|--weight-bytes=1XB
roofline gpt2 --gpu=h1000|--phase=nonsense|--stack=nonsense|--calibration-from=a100-80gb|--mla-form=nonsense
compare gpt2 --variants mla:512|gqa:5|gqa:x|int9|mha:2|dsa:1+2|window:4k/cla:0|evict:0|cla:5/mqa|mqa/fp8_ds_mla
latency gpt2 --isl=0|--osl=0|--osl=1|--prefix-len=-1|--prefix-len=2000|--draft=layers=0|--draft=mtp|--num-speculative-tokens=-1
serve gpt2 --rate=0|--rate=x|--policy=nonsense|--cache=nonsense|--isl=fixed:3|--burstiness=0|--num-prompts=-1
nonsense
"""


def expanded(lines: str, names: Iterable[str] = ("",)) -> Iterator[str]:
    """Yield the commands of every line for every name. `a|b` in a line gives one command for a and one for b."""
    for name, line in product(names, lines.strip().splitlines()):
        yield from map(" ".join, product(*(word.split("|") for word in line.format(name).split())))


def run(command: str) -> Run:
    """Run a command and return its records, its error message, or the exception with which it crashed."""
    words = [*command.split(), "--format", "json"]
    found: Run = {"command": command}
    with redirect_stdout(StringIO()) as out, redirect_stderr(StringIO()):
        try:
            status = app.build(words)(words, standalone_mode=False)
            status = getattr(status, "status", status)  # newer commands return a value with the status
            found |= {"records": json.loads(out.getvalue())} | ({"status": status} if status else {})
        except UserError as error:
            found["refused"] = str(error)
        except Exception as error:
            refusal = getattr(error, "format_message", None)
            found |= {"refused": refusal()} if refusal else {"crashed": f"{type(error).__name__}: {error}"}
    return found


def write(path: Path) -> None:
    """Run all commands and write one line for each."""
    gc.set_threshold(100_000)
    start, count = time.perf_counter(), Counter[str]()
    models, gpus = [r["model"] for r in run("models")["records"]], [r["gpu"] for r in run("gpus")["records"]]
    commands = [*expanded(OF_MODEL, models), *expanded(OF_SAMPLE, SAMPLE.split()), *expanded(OF_GPU, gpus), *expanded(ONCE)]
    with path.open("w", encoding="utf-8") as file:
        for command in commands:
            found = run(command)
            count[outcome(found)] += 1
            file.write(json.dumps(found, ensure_ascii=False) + "\n")
    shares = ", ".join(f"{n:,} {kind}" for kind, n in sorted(count.items()))
    print(f"{app.__file__}: {count.total():,} runs in {time.perf_counter() - start:.0f} s: {shares}")


class Change(NamedTuple):
    """One difference between two runs of a command.

    Attributes:
        kind: changed, new_keys (the key is new) or refused (only one of the runs was refused).
    """

    key: str
    old: Any
    new: Any
    kind: str = "changed"


def outcome(found: Run) -> str:
    """Return the outcome of a run: records, refused or crashed."""
    return next(k for k in ("records", "refused", "crashed") if k in found)


def changes(old: Run | None, new: Run | None) -> Iterator[Change]:
    """Yield every difference between two runs of one command."""
    if old is None or new is None:
        yield Change("(added run)", None, outcome(new)) if new else Change("(missing run)", old and outcome(old), None)
    elif (kind := outcome(old)) == outcome(new):
        yield from differences(old[kind], new[kind], *([] if kind == "records" else [kind]))
        yield from differences(old.get("status", 0), new.get("status", 0), "status")
    else:
        a, b = ("records" if "records" in r else f"{outcome(r)}: {r[outcome(r)]}" for r in (old, new))
        yield Change("crashed", a, b) if "crashed" in {**old, **new} else Change("refused", a, b, "refused")


def differences(old: Any, new: Any, *way: str) -> Iterator[Change]:
    """Yield every difference between two JSON values with the path of keys. 1, 1.0 and true are different
    values."""
    if isinstance(old, dict) and isinstance(new, dict):
        for k in {**old, **new}:
            if k in old and k in new:
                yield from differences(old[k], new[k], *way, k)
            else:
                kind = "new_keys" if k in new else "changed"
                yield Change(".".join((*way, k)), old.get(k, "absent"), new.get(k, "absent"), kind)
        if [k for k in old if k in new] != [k for k in new if k in old]:
            yield Change(".".join((*way, "(order of keys)")), ", ".join(old), ", ".join(new))
    elif isinstance(old, list) and isinstance(new, list):
        if len(old) != len(new):
            yield Change(".".join((*way, "(rows)")), len(old), len(new))
        else:
            for a, b in zip(old, new, strict=True):
                yield from differences(a, b, *way)
    elif type(old) is not type(new) or old != new:
        yield Change(".".join(way), old, new)


def explanation(command: str, change: Change, rules: dict[str, Run]) -> str:
    """Return the name of the first rule that explains a change; '' if there is none."""
    for name, rule in rules.items():
        fits = rule.get(change.kind) or any(fnmatchcase(change.key, glob) for glob in rule.get("keys", ()))
        if fits and re.search(rule.get("commands", ""), command):
            return name
    return ""


def show(command: str, found: list[tuple[str, Change]], most: int = 3) -> None:
    """Print a command that differs: its first changed keys, with the first values of each. Unexplained keys come
    first."""
    print(command)
    times = Counter((why, change.key) for why, change in found)
    first = {(why, change.key): change for why, change in reversed(found)}
    for why, key in sorted(times, key=lambda pair: pair[0] != "")[:most]:
        old, new = (json.dumps(v, ensure_ascii=False)[:300] for v in (first[why, key].old, first[why, key].new))
        print(f"    [{why or 'unexplained'}] {key}: {old} → {new}" + (f" ({times[why, key]}×)" if times[why, key] > 1 else ""))
    if len(times) > most:
        print(f"    … {len(times) - most} keys more")


def compare(before: Path, after: Path, rules: dict[str, Run]) -> int:
    """Print every command that differs, and the number of differences that each rule explains.

    Returns:
        The exit status: 1 if a difference is unexplained, else 0.
    """
    texts = [path.read_text(encoding="utf-8").split("\n")[:-1] for path in (before, after)]
    old, new = ({json.loads(line)["command"]: line for line in text} for text in texts)
    equal, changed, values = 0, Counter[str](), Counter[str]()
    commands = dict.fromkeys([*old, *new])
    for command in commands:
        a, b = (json.loads(runs[command]) if command in runs else None for runs in (old, new))
        found = [(explanation(command, change, rules), change) for change in changes(a, b)]
        if found:
            show(command, found)
        equal += not found
        values.update(why for why, _ in found)
        changed.update({why for why, _ in found})
    for why, count in values.items():
        print(f"{why or 'unexplained'}: {count:,} values in {changed[why]:,} runs. {rules.get(why, {}).get('why', '')}")
    parts = [f"{changed[why]:,} changed by {why}" for why in rules]
    print(", ".join([f"{len(commands):,} runs", f"{equal:,} equal", *parts, f"{changed['']:,} unexplained"]))
    return int(changed[""] > 0)


def main() -> int:
    """Parse the command line and run `write` or `compare`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    modes = parser.add_subparsers(dest="mode", required=True)
    modes.add_parser("write").add_argument("out", type=Path)
    held = modes.add_parser("compare")
    for name in ("old", "new", "--known"):
        held.add_argument(name, type=Path)
    given = parser.parse_args()
    if given.mode == "compare":
        return compare(given.old, given.new, json.loads(given.known.read_text(encoding="utf-8")) if given.known else {})
    write(given.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
