"""Lists are equal in all commands: each item is a row that equals a separate request. Times of one table have one basis."""

from itertools import product

import pytest
from conftest import Run

# An option that takes a list, its items, the commands that have it, and the key that tells its rows apart.
LISTS = [
    ("--kv-cache-dtype", ("bf16", "fp8"), "size compare roofline latency fit", "kv_cache_dtype"),
    ("--dtype", ("bf16", "fp8"), "size compare roofline latency fit", "dtype"),
    ("--tp", ("2", "4"), "size compare roofline latency fit", "tensor_parallel_size"),
    ("--gpu", ("h100-sxm", "h200"), "compare roofline latency fit", "gpu"),
    ("--stack", ("vllm", "sglang", "datasheet"), "compare roofline latency", "basis"),
    ("--engine", ("vllm", "sglang", "llama.cpp"), "fit", "engine"),
    ("--max-num-seqs", ("1", "8", "64"), "fit", "requested_num_seqs"),
    ("--max-model-len", ("2048", "4096"), "fit", "requested_model_len"),
]
ALONE = {"compare": " --variants mqa"}
CASES = [(name, items, command, key) for name, items, commands, key in LISTS for command in commands.split()]


@pytest.mark.parametrize(("name", "items", "command", "key"), CASES, ids=[f"{c[2]} {c[0]}" for c in CASES])
def test_a_list_is_its_items_one_after_the_other(kvcalc: Run, name: str, items: tuple[str, ...], command: str, key: str) -> None:
    line = f"{command} llama-3.1-8b{ALONE.get(command, '')} --format json {name}"
    alone = [r for item in items for r in kvcalc(f"{line} {item}").records]
    together = kvcalc(f"{line} {','.join(items)}").records
    assert len({r[key] for r in together}) == len(items)
    if command == "fit":  # the smallest that holds what is asked stands first
        alone, together = (sorted(found, key=lambda r: str(r[key])) for found in (alone, together))
    assert together == alone


@pytest.mark.parametrize("command", ["size", "roofline", "latency", "fit", "serve --num-prompts 3 --osl 3"])
def test_several_models_in_words_or_in_a_list(kvcalc: Run, command: str) -> None:
    name, _, more = command.partition(" ")
    told = [r["model"] for r in kvcalc(f"{name} gpt2 opt-125m {more} --format json").records]
    assert set(told) == {"gpt2", "opt-125m"}
    assert [r["model"] for r in kvcalc(f"{name} gpt2,opt-125m {more} --format json").records] == told
    assert "opt-125m" in kvcalc(f"{name} gpt2 opt-125m {more}").out


TIMED = ["latency llama-3.1-8b", "roofline llama-3.1-8b", "compare llama-3.1-8b", "serve llama-3.1-8b --num-prompts 3 --osl 3"]


@pytest.mark.parametrize("line", TIMED)
def test_each_gpu_keeps_the_basis_of_its_times_beside_others(kvcalc: Run, line: str) -> None:
    """There is a calibration of the H100, but none of the A100 with 40 GB."""

    def bases(more: str) -> set[tuple[str, str]]:
        return {
            (r["gpu"], r["time_basis"])
            for r in kvcalc(f"{line} {more} --format json").records
            if r.get("operator", "total") == "total"
        }

    both = "--gpu h100,a100-40gb-sxm"
    assert bases("--gpu h100") == {("h100-sxm", "calibrated")}
    assert bases("--gpu h100,h200") == {("h100-sxm", "calibrated"), ("h200", "calibrated")}
    assert bases(both) == bases(f"{both} --mixed") == {("h100-sxm", "calibrated"), ("a100-40gb-sxm", "bound")}
    assert bases(f"{both} --calibration-from h100") == {("h100-sxm", "calibrated"), ("a100-40gb-sxm", "scaled")}


def test_every_record_with_times_says_what_they_rest_on(kvcalc: Run) -> None:
    for line, source in product(TIMED, ("", "h200")):
        for r in kvcalc(f"{line} --format json" + (f" --calibration-from {source}" if source else "")).records:
            assert r["calibration_from"] == (source or None)
            assert r["basis"].startswith("vllm ") and r["basis"].endswith(f" of {source}" if source else " calibration")
