"""The commands that `plan` suggests: changes that meet the targets, and command lines that `fit` reads as the same."""

import json
import random
import re
import shlex

import pytest
from conftest import Run

from kvcalc import deploy, load_model
from kvcalc.planning.search import changes_that_help, run_search
from kvcalc.planning.search_space import question_of
from kvcalc.planning.variants import narrower_formats

# Questions that nothing meets: too few GPUs, too little memory, or limits that no step keeps.
REFUSED: tuple[tuple[str, dict[str, str]], ...] = (
    ("llama-3.1-8b", {"users": "64", "context": "16k", "gpu": "h100", "max_gpus": "1"}),
    ("llama-3.1-8b", {"users": "64", "context": "16k", "gpu": "h100", "max_gpus": "1", "max_tpot": "8ms", "max_ttft": "0.3s"}),
    ("llama-3.1-70b", {"users": "8", "context": "8k", "gpu": "h100", "tp": "8", "pp": "1", "max_gpus": "8", "max_tpot": "5ms"}),
    (
        "llama-3.1-70b",
        {"users": "64", "context": "16k", "gpu": "h100", "tp": "1", "pp": "3", "max_gpus": "15", "max_tpot": "1ms"},
    ),
    ("llama-3.1-8b", {"rate": "400", "input_len": "2k", "output_len": "500", "gpu": "h100", "max_gpus": "8", "max_tpot": "20ms"}),
    ("llama-3.1-8b", {"rate": "400", "input_len": "2k", "output_len": "500", "gpu": "l4", "max_gpus": "4", "max_ttft": "10ms"}),
    ("deepseek-v3", {"users": "1", "context": "4k", "gpu": "h100", "max_gpus": "8"}),
    ("llama-3.3-70b", {"users": "1", "context": "4k", "gpu": "l40s", "max_gpus": "1", "max_tpot": "10ms"}),
    ("llama-3.1-8b", {"users": "9000", "context": "1k", "gpu": "h100", "tp": "1", "pp": "1", "max_gpus": "2"}),
    ("gpt-oss-20b", {"users": "30", "input_len": "1k", "output_len": "99", "gpu": "l40s", "min_throughput": "90000"}),
    ("qwen3-30b-a3b", {"users": "500", "context": "32k", "gpu": "h200,mi300x", "max_gpus": "2", "max_tpot": "30ms"}),
)


@pytest.mark.slow
@pytest.mark.parametrize(("model", "given"), REFUSED)
def test_every_change_that_is_advised_makes_the_answer_yes(kvcalc: Run, model: str, given: dict[str, str]) -> None:
    line = f"plan {model} " + " ".join(f"--{name.replace('_', '-')} {value}" for name, value in given.items())
    found = kvcalc(line)
    assert found.code == 1
    question = question_of([load_model(model)], given)
    (answer,) = run_search(question.needs, question.space).answers
    changes = changes_that_help(answer, question.space)
    assert changes, "each of these questions has a way out"
    for options in changes:
        assert f"`{options}`" in found.joined
        assert kvcalc(f"{line} {options} --format json").code == 0, options
        if options.startswith("--max-gpus") and options.count("--") == 1 and "," not in given["gpu"]:  # the smallest number
            assert kvcalc(f"{line} --max-gpus {int(options.split()[1]) - 1} --format json").code == 1, options


def test_fp8_is_advised_on_gpus_that_compute_in_it() -> None:
    hopper, ampere = (narrower_formats(deploy("llama-3.1-8b", gpu), is_weights_only=False) for gpu in ("h100", "a100-80gb"))
    assert (hopper, ampere) == ({"kv_cache_dtype": "fp8", "quantization": "fp8"}, {"quantization": "int4"})


@pytest.mark.parametrize(("more", "code"), [("4", 0), ("64", 1), ("64 --explain", 1), ("4,64", 0), ("64,65", 1), ("none", 2)])
def test_the_exit_status_is_the_answer(kvcalc: Run, more: str, code: int) -> None:
    assert kvcalc(f"plan llama-3.1-8b --gpu h100 --max-gpus 1 --context 16k --users {more}").code == code


ENGINES = ("vllm", "sglang", "llama.cpp", "trtllm")


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_a_command_line_is_read_as_the_deployment_that_it_starts(kvcalc: Run, seed: int) -> None:
    """For every line, `fit` gives the capacity in the plan, or at a rate slightly less, and every replica has its own line."""
    draw = random.Random(seed)
    model = draw.choice(("llama-3.1-8b", "gpt-oss-20b", "qwen3-30b-a3b", "deepseek-v3"))
    load = draw.choice(("--users 20 --isl 3k --osl 200", "--rate 30 --isl 2k --osl 300", "--rate 3 --isl 8k --osl 50"))
    engine = draw.choice(ENGINES) if model == "llama-3.1-8b" else "vllm"
    gpu = draw.choice(("h100", "h200", "l40s", "rtx-4090"))
    more = draw.choice(("", "--kv-cache-dtype fp8", "--enforce-eager")) if engine == "vllm" else ""
    asked = f"plan {model} {load} --gpu {gpu} --max-gpus 24 --engine {engine} --disaggregate {more} --format json"
    for record in kvcalc(asked).records:
        if not record["meets"] or not record["commands"]:
            continue
        servers = [line for line in record["commands"] if "toy_proxy_server" not in line]
        assert len(servers) == record["replicas"] + record["prefill_replicas"]
        assert len({re.findall(r"--port (\d+)", line)[0] for line in servers} if len(servers) > 1 else servers) == len(servers)
        for line in {servers[0], servers[-1], record["command"]}:
            words = f"fit --gpu {record['gpu']} --budget low --format json --"
            (held,) = kvcalc(words, *shlex.split(line)).records
            assert held["fits"] and held["capacity_sequences"] == pytest.approx(record["capacity_sequences"], rel=0.01), line
            assert held["gpus"] == record["gpus"]


def test_replicas_for_prompts_have_roles_and_a_proxy(kvcalc: Run) -> None:
    """One replica on GPUs 0 to 3 processes prompts, one on GPUs 4 to 7 decodes. vLLM's documentation has such lines."""
    words = "plan llama-3.1-8b --rate 10 --isl 8k --osl 500 --max-tpot 12ms --gpu h100 --tp 4 --pp 1 --disaggregate"
    found = next(r for r in kvcalc(f"{words} --format json").records if r["prefill_replicas"])
    assert (found["prefill_replicas"], found["replicas"]) == (1, 1)
    prefill, decode, proxy = (shlex.split(line) for line in found["commands"])
    for line, devices, port, channel, role in (
        (prefill, "0,1,2,3", "8100", "5600", "kv_producer"),
        (decode, "4,5,6,7", "8200", "5601", "kv_consumer"),
    ):
        assert line[:2] == [f"CUDA_VISIBLE_DEVICES={devices}", f"VLLM_NIXL_SIDE_CHANNEL_PORT={channel}"]
        assert line[line.index("--port") + 1] == port
        config = json.loads(line[line.index("--kv-transfer-config") + 1])
        assert config == {"kv_connector": "NixlConnector", "kv_role": role}
    ports = {name: proxy[proxy.index(f"--{name}-ports") + 1] for name in ("prefiller", "decoder")}
    assert ports == {"prefiller": "8100", "decoder": "8200"}
    assert "kv_consumer" in found["command"]


def test_replicas_on_several_hosts_do_not_share_gpus(kvcalc: Run) -> None:
    """On hosts of 8 H100s, five replicas of 4 GPUs need three hosts, each with GPUs 0 to 3 or 4 to 7 of a host."""
    shown = kvcalc("plan llama-3.1-8b --users 4 --context 8k --gpu m3-ultra --max-tpot 9ms --engine llama.cpp -q q4_k_m").out
    assert shown.count("llama-server") == 1 and "# for each of the 2 replicas, on separate servers\n" in shown
    words = "plan llama-3.1-8b --rate 30 --isl 8k --osl 500 --max-tpot 9ms --gpu h100 --tp 4 --pp 1 --max-gpus 64 --disaggregate"
    for record in kvcalc(f"{words} --format json").records:
        servers = [line for line in record["commands"] if "toy_proxy_server" not in line]
        devices = [line.split()[0].partition("=")[2] for line in servers]
        assert devices == [("0,1,2,3", "4,5,6,7")[n % 2] for n in range(len(servers))]
        if record["prefill_replicas"] and len(servers) > 2:
            hosts = [re.findall(r"SIDE_CHANNEL_HOST=(\S+)", line)[0] for line in servers]
            assert hosts == [f"${{HOST{n // 2 + 1}}}" for n in range(len(servers))]
