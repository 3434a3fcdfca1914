"""Command lines of engines: their meaning, and that a written command line gives the same answer if it is read again."""

import json
import random
import re
import shlex
from collections.abc import Iterator
from typing import Any

import pytest
from conftest import Run
from msgspec.structs import replace

from kvcalc import Deployment, Parallelism, Precision, UserError, load_gpu, load_model
from kvcalc.capacity import FitOptions, fit
from kvcalc.capacity.command_line import Command, command_of, is_command, read_command
from kvcalc.capacity.engine_flags import AUTOMATIC_SLOTS
from kvcalc.capacity.fit_records import fit_record
from kvcalc.library.checkpoints import checkpoint, published

MODELS = ("llama-3.1-8b", "deepseek-v3.2", "gpt-oss-20b", "qwen3-next-80b-a3b", "gemma-3-4b", "llama-7b", "qwen3-0.6b")
CACHES = {
    "vllm": ("auto", "fp8", "bf16"),
    "sglang": ("auto", "fp8"),
    "trtllm": ("auto", "fp8"),
    "llama.cpp": ("auto", "q8_0", "q4_0"),
}
WEIGHTS = {"llama.cpp": ("", "q4_k_m", "iq4_xs+imatrix")}


def read(line: str) -> Command:
    return read_command(shlex.split(line))


def test_what_a_vllm_line_says() -> None:
    """k is 1000 and K is 1024 (human_readable_int). max_num_seqs is per dp rank. `-` and `_` are equal in names."""
    found = read(
        "VLLM_USE_V1=1 vllm serve meta-llama/Llama-3.1-8B-Instruct -tp 2 --data-parallel-size=2 --max-model-len 32k "
        "--max_num_seqs 64 --kv-cache-dtype fp8_e4m3 --kv-cache-memory-bytes 30G --port 8000 --enforce-eager --no-such -x 3"
    )
    assert found.model == load_model("llama-3.1-8b-instruct")
    deployment = found.deployment(load_gpu("h100"))
    assert deployment.parallelism == Parallelism(2, 1, 2)
    assert deployment.precision == Precision(kv_cache_dtype="fp8")
    options = found.options
    assert (options.max_model_len, options.max_num_seqs, options.kv_cache_memory_bytes) == (32000, 128, 30 << 30)
    assert options.enforce_eager
    assert options.engine == "vllm"
    assert found.ignored == ("--port 8000", "--no-such", "-x 3")
    assert read("vllm serve gpt2 --max-model-len 4K").options.max_model_len == 4096


def test_keys_of_mappings_that_are_not_read() -> None:
    """Keys of unrelated mappings and nested keys are ignored. A key without a value is refused."""
    for word in ("--compilation-config.mode 3", "--limit-mm-per-prompt.image.count.a 1"):
        assert read(f"vllm serve gpt2 {word}").ignored == (word,)
    with pytest.raises(UserError, match="has no value"):
        read("vllm serve gpt2 --limit-mm-per-prompt.image")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("vllm serve Qwen/Qwen3-14B-AWQ --quantization awq_marlin", {"quantization": "awq"}),
        ("vllm serve Qwen/Qwen3-8B --quantization fp8", {"quantization": "fp8"}),
        ("vllm serve deepseek-ai/DeepSeek-V3 --quantization fp8 --dtype bfloat16 -tp 8 -ep", {"tp": 8, "ep": 8}),
        ("vllm serve gemma-3-4b --limit-mm-per-prompt image=0", {"limit_mm_per_prompt": "image=0"}),
        ("vllm serve gemma-3-4b --limit-mm-per-prompt.image 0", {"limit_mm_per_prompt": '{"image": 0}'}),
        ("vllm serve gemma-3-4b --limit-mm-per-prompt.image.count=0", {"limit_mm_per_prompt": '{"image": {"count": 0}}'}),
        (
            "vllm serve deepseek-ai/DeepSeek-V3 --speculative-config.method mtp --speculative_config.num_speculative_tokens 3",
            {"mtp": True, "num_speculative_tokens": 3},
        ),
        ("vllm serve gpt2 --enable-lora", {"max_loras": 1}),
        ("vllm serve gpt2 --max-loras 4", {}),
        ("vllm serve gpt2 -tp 2 --kv-offloading-size 16", {"tp": 2, "kv_offloading_bytes": 8 << 30}),
        ("vllm serve gpt2 --max-model-len auto", {}),
        ("vllm serve gpt2 --speculative-config.method ngram -sc.num_speculative_tokens 3", {"num_speculative_tokens": 3}),
        ('vllm serve deepseek-ai/DeepSeek-V3 --speculative-config \'{"method": "deepseek_mtp"}\'', {"mtp": True}),
        ("docker run --gpus all vllm/vllm-openai:v0.11.2 --model gpt2", {"engine_version": "0.11.2"}),
        ("python3 -m vllm.entrypoints.openai.api_server --model gpt2 --block-size 32", {"block_size": 32}),
        ("python -m sglang.launch_server --model-path gpt2 --context-length 512", {"max_model_len": 512}),
        ("sglang serve --model-path openai/gpt-oss-20b --disable-hybrid-swa-memory", {"hybrid": False}),
        (
            "sglang serve --model-path deepseek-ai/DeepSeek-V3 --tp 8 --dp 4 --enable-dp-attention --max-running-requests 64",
            {"tp": 2, "dp": 4, "max_num_seqs": 64},  # the experts' products are cut over all eight
        ),
        (
            "sglang serve --model-path deepseek-ai/DeepSeek-V3 --tp 8 --speculative-algorithm EAGLE --speculative-num-steps 3 "
            "--speculative-eagle-topk 1 --speculative-num-draft-tokens 4",
            {"tp": 8, "mtp": True, "num_speculative_tokens": 3},
        ),
        (
            "./llama-server -m x/Meta-Llama-3.1-8B-Instruct-Q4_K_M.gguf -c 32768 -np 4 -ctk q8_0 -ctv q8_0 -ngl all -fa on",
            {"quantization": "q4_k_m", "max_model_len": 8192, "max_num_seqs": 4, "kv_cache_dtype": "q8_0", "n_gpu_layers": -1}
            | {"flash_attn": "on"},
        ),
        (
            "llama-cli -m llama-3.1-8b.gguf -c 4096 -sm layer -ts 1,1",
            {"max_model_len": 4096, "pp": 2, "kv_cache_dtype": "fp16"} | AUTOMATIC_SLOTS,
        ),
        ("gpt2 llama-server -c 1k -np 2", {"max_model_len": 500, "max_num_seqs": 2, "kv_cache_dtype": "fp16"}),
        ("trtllm-serve serve gpt2 --tp_size 2 --max_seq_len=512", {"tp": 2, "max_model_len": 512}),
        # argparse accepts the start of one flag's name; --max-num starts two
        ("vllm serve gpt2 --tensor_parallel 2 --gpu-mem=0.8 --max-num 8", {"tp": 2, "gpu_memory_utilization": 0.8}),
    ],
)
def test_what_lines_say(line: str, said: dict[str, Any]) -> None:
    assert {name: value for name, value in read(line).settings.items() if name != "typed_flags"} == said


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("vllm serve --max-model-len 4", "names no model"),
        ("vllm serve gpt2 --max-model-len", "--max-model-len has no value"),
        ("vllm serve gpt2 --max-model-len many", "--max-model-len: 'many' is not a whole number"),
        ("vllm serve lama-3.1-8b", "unknown model 'lama-3.1-8b'"),
        ("vllm serve gpt2 --quantization awk", "unknown quantization 'awk'"),
        ("vllm serve gpt2 --speculative-config [", "is not a mapping in JSON"),
        ("ollama run gpt2", "starts no engine"),
        ("sglang serve --model gpt2 --tp 4 --dp 3 --enable-dp-attention", "does not divide"),
    ],
)
def test_lines_that_say_nothing(line: str, message: str) -> None:
    with pytest.raises(UserError, match=r"(?s)" + message.replace("[", r"\[")):
        read(line)


def test_a_model_is_no_command_line() -> None:
    assert not is_command(["llama-3.1-8b"]) and not is_command(["a", "b"])
    assert is_command(["vllm serve gpt2"])


@pytest.mark.parametrize(
    ("name", "preset", "storage"),
    [
        ("meta-llama/Llama-3.1-8B-Instruct", "llama-3.1-8b-instruct", ""),
        ("RedHatAI/Llama-3.3-70B-Instruct-FP8-dynamic", "llama-3.3-70b", "fp8_per_channel_scale16"),
        ("Qwen/Qwen3-30B-A3B-Instruct-2507-FP8", "qwen3-30b-a3b-instruct-2507", "fp8_block128_scale16"),
        ("bartowski/Qwen2.5-Coder-7B-Instruct-GGUF:Q4_K_M", "qwen2.5-coder-7b-instruct", "q4_k_m"),
        ("unsloth/Meta-Llama-3.1-8B-Instruct-unsloth-bnb-4bit", "meta-llama-3.1-8b-instruct", "nf4"),
        ("nvidia/Qwen3.6-35B-A3B-NVFP4", "qwen3.6-35b-a3b", "nvfp4"),
        ("bartowski/Meta-Llama-3-8B-Instruct.Q5_K_M.gguf", "meta-llama-3-8b-instruct", "q5_k_m"),
        ("./models/llama-3.1-8b-iq4_xs+imatrix.gguf", "llama-3.1-8b", "iq4_xs+imatrix"),
        ("deepseek-r1:32b-qwen-distill-q4_K_M", "deepseek-r1-distill-qwen-32b", "q4_k_m"),
        ("./deepseek-v3-bf16", "deepseek-v3", "bf16"),
        ("llama3.2:3b-instruct-q4_K_M", "llama-3.2-3b-instruct", "q4_k_m"),
        ("nobody/knows-this", "nobody/knows-this", ""),
    ],
)
def test_names_of_checkpoints(name: str, preset: str, storage: str) -> None:
    assert checkpoint(name)[:3] in [(preset, "", storage), (preset, storage, "")]


def test_the_note_on_a_checkpoint_states_its_maximum() -> None:
    (remark,) = read("vllm serve Qwen/Qwen2.5-7B-Instruct-AWQ").remarks
    assert remark.endswith("read as qwen2.5-7b-instruct in awq, with a maximum of 32,768 tokens")


def test_every_preset_is_found_by_its_name_on_the_hub() -> None:
    for name, preset in published().items():
        assert checkpoint(name)[:3] == (preset, "", "")


def _menu(engine: str) -> dict[str, tuple[Any, ...]]:
    """Return values for the options of `fit` that an engine supports, by name."""
    menu: dict[str, tuple[Any, ...]] = {
        "max_model_len": (4096, 32768, 5000),
        "max_num_seqs": (8, 64, 5),
        "require": (3, 200),
        "max_num_batched_tokens": (512, 4096),
        "budget": ("low", "high"),
        "shared_prefix": (1000,),
        "overhead_bytes": (1 << 30,),
        "weight_bytes": (20 << 30,),
    }
    if engine != "llama.cpp":
        menu |= {"gpu_memory_utilization": (0.85, 0.5), "enforce_eager": (True,)}
        menu |= {"cpu_offload_gb": (1.5,), "kv_cache_memory_bytes": (10**10,), "kv_offloading_bytes": (3 << 30, 10**9 + 1)}
    if engine in ("vllm", "sglang"):
        menu |= {"max_loras": (2,), "max_lora_rank": (64,)}
    if engine == "vllm":
        menu |= {"engine_version": ("0.11", "0.20"), "block_size": (32,), "hybrid": (False,), "max_in_flight_batches": (1, 2, 3)}
        menu |= {"mamba_cache_mode": ("align",), "mamba_ssm_cache_dtype": ("fp32",), "num_gpu_blocks_override": (500,)}
        menu |= {"limit_mm_per_prompt": ("image=0", '{"video": 1}'), "utilization_of": ("free",)}
    if engine == "sglang":
        menu |= {"hybrid": (False,)}
    if engine == "llama.cpp":
        menu |= {"kv_unified": (True,), "swa_full": (True,), "n_gpu_layers": (10, 99), "n_cpu_moe": (3,), "cpu_moe": (True,)}
        menu |= {"cache_type_k": ("q8_0", "bf16"), "cache_type_v": ("q8_0",), "flash_attn": ("on", "off"), "idle_slots": (3,)}
    return menu


def _options(draw: random.Random, engine: str) -> Iterator[tuple[str, Any]]:
    menu = _menu(engine)
    for name in draw.sample(sorted(menu), 4):
        yield name, draw.choice(menu[name])


def _random(seed: int) -> tuple[Deployment, FitOptions]:
    draw = random.Random(seed)
    engine = draw.choice(("vllm", "vllm", "sglang", "llama.cpp", "trtllm"))
    tp, pp, dp = draw.choice((1, 2, 4)), draw.choice((1, 1, 2)), draw.choice((1, 1, 2))
    ranks = Parallelism(tp, pp, dp, draw.choice((1, tp * dp, 2)))
    weights = draw.choice(WEIGHTS.get(engine, ("", "", "fp8", "awq", "int4_g32", "nf4")))
    dtype = draw.choice(("auto", "auto", "auto", "fp16", "bf16", "fp8" if not weights else "auto"))
    precision = Precision(dtype if engine != "llama.cpp" else "auto", draw.choice(CACHES.get(engine, ("auto", "fp8"))), weights)
    deployment = Deployment(load_model(draw.choice(MODELS)), load_gpu("h200"), precision, ranks)
    return deployment, FitOptions(engine=engine, **dict(_options(draw, engine)))


def _record(deployment: Deployment, options: FitOptions) -> dict[str, Any]:
    """Return the record of `fit`. A command line that states the users is set up for them, so its record is of so many."""
    record = fit_record(fit(deployment, options))
    flag = re.search(r" --(parallel|max-num-seqs|max-running-requests|max_batch_size) (\d+)", record["command"] or "")
    if options.max_num_seqs or not (flag and record["fits"]):
        return record
    ranks = 1 if "--enable-dp-attention" in record["command"] else deployment.parallelism.dp
    slots = int(flag[2]) * ranks
    assert slots == min(record["max_num_seqs"], 256 if flag[1] == "parallel" else record["max_num_batched_tokens"] * ranks)
    users = 0 if flag[1] == "parallel" else options.users or 1
    served = fit_record(fit(deployment, replace(options, max_num_seqs=slots, users=users)))
    assert all(served[key] == record[key] for key in ("command", "max_num_seqs", "requested_model_len"))
    return served


@pytest.mark.slow
def test_each_line_given_back_is_the_same_answer(kvcalc: Run) -> None:
    """This compares every key of the record for random deployments. Deployments that no engine's command line can express
    are skipped."""
    written = 0
    for seed in range(60):
        try:
            deployment, options = _random(seed)
            record = _record(deployment, options)
        except UserError:
            continue
        if record["command"] is None:
            continue
        written += 1
        beside, line = record["kvcalc_command"].split(" -- ", 1)
        assert line == record["command"]
        command = read_command(shlex.split(line))
        if beside == "kvcalc fit --gpu h200":
            assert fit_record(fit(command.deployment(deployment.gpu), command.options)) == record, record["kvcalc_command"]
        elif seed % 3 == 0:
            found = kvcalc(beside.removeprefix("kvcalc "), "--format", "json", "--", *shlex.split(line))
            again = json.loads(found.out)[0]
            assert again == record | {"kvcalc_command": again["kvcalc_command"]}, record["kvcalc_command"]
    assert written > 20


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize("weights", ["--dtype fp8", "--quantization fp8", "--quantization awq", "--dtype fp32", ""])
def test_a_float32_checkpoint_s_line_given_back_is_the_same_answer(kvcalc: Run, engine: str, weights: str) -> None:
    (record,) = kvcalc(f"fit olmo-2-7b --gpu h200 --engine {engine} {weights} --format json").records
    beside, line = record["kvcalc_command"].removeprefix("kvcalc ").split(" -- ", 1)
    assert kvcalc(beside, "--format", "json", "--", *shlex.split(line)).records == [record]


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["vllm", "sglang", "trtllm", "llama.cpp"])
def test_each_option_alone_is_said_and_read_again(engine: str) -> None:
    """For a model with windows, the line with one option differs from the line without, and gives the same record again."""
    deployment = Deployment(load_model("gpt-oss-20b"), load_gpu("h200"))
    plain = _record(deployment, FitOptions(engine=engine))["kvcalc_command"]
    for name, value in ((name, value) for name, values in _menu(engine).items() for value in values):
        record = _record(deployment, FitOptions(engine=engine, **{name: value}))
        assert record["kvcalc_command"] != plain, name
        beside, line = record["kvcalc_command"].split(" -- ", 1)
        if beside == "kvcalc fit --gpu h200":
            command = read_command(shlex.split(line))
            assert fit_record(fit(command.deployment(deployment.gpu), command.options)) == record, line


def test_splits_that_an_engine_has_not() -> None:
    model, gpu = load_model("deepseek-v3"), load_gpu("h200")
    partly = Deployment(model, gpu, parallelism=Parallelism(8, ep=4))
    assert command_of(partly, FitOptions(engine="vllm")) is None
    assert command_of(partly, FitOptions()) is None
    assert command_of(partly, FitOptions(engine="sglang")) is not None
    apart = Deployment(model, gpu, parallelism=Parallelism(dp=8))
    drafting = FitOptions(engine="sglang", max_model_len=4096, max_num_seqs=8, mtp=True, num_speculative_tokens=2)
    written = command_of(apart, drafting)
    assert written is not None
    drafts = "--speculative-algorithm EAGLE --speculative-num-steps 2 --speculative-eagle-topk 1 --speculative-num-draft-tokens 3"
    ranks = "--tensor-parallel-size 8 --data-parallel-size 8 --enable-dp-attention"
    assert written.line.endswith(f" {ranks} --context-length 4096 --max-running-requests 8 {drafts}")
    command = read_command(shlex.split(written.line))
    assert fit_record(fit(command.deployment(gpu), command.options)) == fit_record(fit(apart, drafting))


def test_fit_reads_a_line_and_names_what_it_does_not(kvcalc: Run) -> None:
    found = kvcalc("fit --gpu h200 --format json -- vllm serve Qwen/Qwen3-8B --port 80 -tp 2")
    (record,) = found.records
    assert (record["model"], record["engine"], record["gpus"]) == ("qwen3-8b", "vllm", 2)
    assert not found.err  # a port needs no memory
    config = {"method": "eagle3", "model": "no-such", "num_speculative_tokens": 3, "prompt_lookup_max": 4}
    typed = shlex.join(["--kv-cache-dtype", "fp8_e5m2", "--speculative-config", json.dumps(config)])
    repeated = kvcalc("fit --format json --", f"vllm serve Qwen/Qwen3-8B {typed}")
    assert repeated.records[0]["command"].endswith(typed)
    assert "the memory of the draft is not counted: unknown model 'no-such'" in repeated.err
    what_if = kvcalc("fit --gpu h200 --tp 4 --format json --", "vllm serve Qwen/Qwen3-8B -tp 2")
    assert what_if.records[0]["gpus"] == 4
