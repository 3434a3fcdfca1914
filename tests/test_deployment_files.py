"""`fit -f` reads deployment files, `--emit` writes them, and `--gpu auto` asks the drivers' tools, here scripts."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import Run

COMPOSE = """
x-gpus: &gpus
  deploy: {replicas: 4, resources: {reservations: {devices: [{driver: nvidia, device_ids: ['0', '1'], capabilities: [gpu]}]}}}
services:
  cache: {image: "redis:7"}
  chat:
    <<: *gpus
    image: vllm/vllm-openai:v0.11.0
    command: --model ${CHAT_MODEL:-Qwen/Qwen3-32B} --tensor-parallel-size 2 --max-model-len ${LENGTH}
  local:
    image: ghcr.io/ggml-org/llama.cpp:server-cuda
    command: [-m, /models/llama-3.1-8b-q4_k_m.gguf, -c, 8192, -np, 2]
"""
POD = """
kind: Deployment
metadata: {name: coder}
spec:
  template:
    spec:
      initContainers: [{name: load, image: vllm/vllm-openai, args: [--model, gpt2]}]
      containers:
        - name: engine
          env: [{name: MODEL, value: qwen3-8b}]
          command: [/bin/sh, -c]
          args:
            - |
              # it's a comment
              exec vllm serve $(MODEL) \\
                --max-model-len 8192
          resources: {limits: {nvidia.com/gpu: "1"}}
---
kind: InferenceService
metadata: {name: llama}
spec:
  predictor:
    model:
      modelFormat: {name: huggingface}
      storageUri: hf://meta-llama/Llama-3.1-8B:main
      args: [--model_name=llama, --model_dir=/mnt/models, --max_model_len=4096]
---
kind: LLMInferenceService
metadata: {name: r1}
spec:
  model: {uri: "pvc://models", name: deepseek-ai/DeepSeek-R1}
  parallelism: {data: 16, dataLocal: 8, expert: true, tensor: 1}
  template:
    containers:
      - name: main
        env: [{name: VLLM_ADDITIONAL_ARGS, value: "--gpu-memory-utilization 0.99 --max-model-len 4096"}]
        resources: {limits: {nvidia.com/gpu: "8"}}
  worker: {containers: [{name: main}]}
"""
VALUES = """
modelArtifacts: {name: facebook/opt-125m, uri: 'hf://{{ .Values.modelArtifacts.name }}'}
decode:
  parallelism: {tensor: 2}
  containers: [{name: vllm, modelCommand: vllmServe, args: [--enforce-eager]}]
prefill: {create: false, containers: [{name: vllm, modelCommand: vllmServe}]}
"""
NVIDIA = """case "$*" in
*compute-apps*) printf 'GPU-a, python3, 12000\\nGPU-a, ollama, 8000\\n' ;;
*) printf 'GPU-a, NVIDIA H100 80GB HBM3, 81559, 20480\\nGPU-b, NVIDIA H100 80GB HBM3, 81559, 0\\n' ;;
esac"""
AMD = """case "$1" in
static) echo '{"gpu_data": [{"gpu": 0, "asic": {"market_name": "AMD Instinct MI300X"}}]}' ;;
metric) echo '[{"gpu": 0, "mem_usage":
  {"total_vram": {"value": 196592, "unit": "MB"}, "used_vram": {"value": 20480, "unit": "MB"}}}]' ;;
*) echo '[{"gpu": 0, "process_list":
  [{"process_info": {"name": "vllm", "memory_usage": {"vram_mem": {"value": 21474836480, "unit": "B"}}}}]}]' ;;
esac"""


def written(folder: Path, text: str) -> str:
    (folder / "deploy.yaml").write_text(text)
    return str(folder / "deploy.yaml")


@pytest.mark.parametrize(
    ("text", "answers"),
    [
        (COMPOSE, [("chat", 2, 8192, 0.9), ("local", 1, 4096, 1.0)]),  # 0.11 has 0.9; 8192 cells for 2 slots
        (POD, [("coder", 1, 8192, 0.92), ("llama", 1, 4096, 0.92), ("r1", 16, 4096, 0.99)]),
        (VALUES, [("decode", 2, 2048, 0.92)]),
    ],
)
def test_servers_of_a_file(kvcalc: Run, tmp_path: Path, text: str, answers: list[tuple[object, ...]]) -> None:
    """Variables, anchors, shell lines, programs of images, and additions of KServe and llm-d are read. Sidecars and workers
    are not."""
    (tmp_path / ".env").write_text("LENGTH=8192\n")
    found = kvcalc(f"fit -f {written(tmp_path, text)} --gpu h200 --format json").records
    keys = ("server", "gpus", "requested_model_len", "gpu_memory_utilization")
    assert [tuple(record[key] for key in keys) for record in found] == answers


@pytest.mark.parametrize(("length", "status"), [("32k", 0), ("400k", 1)])
def test_the_documents_check_in_ci_stops_before_a_server_that_cannot_start(tmp_path: Path, length: str, status: int) -> None:
    """The printed script runs under bash in a repository with the named file. Two GPUs fit 315,600 tokens."""
    folder, page = Path(__file__).parent.parent / "docs/how-to", "check-a-deployment-file.md"
    (script,) = re.findall(r"```bash\n(.*?)```", (folder / page).read_text(encoding="utf-8"), re.DOTALL)
    (name,) = re.findall(r"-f (\S+)", script)
    (tmp_path / name).parent.mkdir(parents=True)
    (tmp_path / name).write_text((folder / "compose.yaml").read_text().replace("max-model-len 32k", f"max-model-len {length}"))
    words = ["bash", "-c", f'kvcalc() {{ "{sys.executable}" -m kvcalc "$@"; }}\n{script}']
    run = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (run.returncode, "every server starts" in run.stdout) == (status, not status), run.stderr


def test_a_server_that_cannot_start_gives_status_1(kvcalc: Run, tmp_path: Path) -> None:
    """A maximum length that does not fit, and too few GPUs. A file without servers is an invalid request."""
    for flags in ("--max-model-len 200k", "--tensor-parallel-size 4"):
        text = COMPOSE.replace("--tensor-parallel-size 2 --max-model-len ${LENGTH}", flags)
        assert (shown := kvcalc(f"fit -f {written(tmp_path, text)} --gpu l40s")).code == 1
    assert shown.out.startswith("chat does not start: it needs 4 GPUs, and the file gives it 2.")
    assert kvcalc(f"fit -f {written(tmp_path, 'services: {db: {image: redis}}')}").code == 2
    assert kvcalc(f"fit -f {written(tmp_path, 'services: {a: *b}')}").code == 2


def test_the_gpu_of_the_node_selector(kvcalc: Run, tmp_path: Path) -> None:
    """It is the GPU without `--gpu`. A part of a GPU (MIG) has no preset, so it needs `--gpu`."""
    label = "nodeSelector: {nvidia.com/gpu.product: %s}"
    pod = POD.replace("spec:\n  template:\n    spec:\n", f"spec:\n  replicas: 3\n  template:\n    spec:\n      {label}\n")
    stated = kvcalc(f"fit -f {written(tmp_path, pod % 'NVIDIA-A10G')} --format json")
    assert [record["gpu"] for record in stated.records] == ["a10g", "h100-sxm", "h100-sxm"]
    assert "coder: the figures are of one of 3 replicas" in stated.err
    part = written(tmp_path, pod % "NVIDIA-A100-SXM4-40GB-MIG-3g.20gb")
    assert "coder is left out: unknown gpu 'NVIDIA-A100-SXM4-40GB-MIG-3g.20gb'" in kvcalc(f"fit -f {part}").err
    assert kvcalc(f"fit -f {part} --gpu h200 --format json").records[0]["gpu"] == "h200"
    assert "chat: the figures are of one of 4 replicas" in kvcalc(f"fit -f {written(tmp_path, COMPOSE)} --gpu h200").err


def test_flags_that_are_not_counted_are_repeated(kvcalc: Run) -> None:
    """Users above the engine's default number of sequences are a flag of the command, so that the server runs them."""
    flags = "--cudagraph-capture-sizes 1 2 4 --port 9000"
    shown = kvcalc(f"fit --gpu h100 -- vllm serve gpt2 {flags}")
    assert shown.err == "note: not counted here: --cudagraph-capture-sizes 1 2 4\n"
    assert shown.out.startswith("2,004 users") and shown.out.endswith(f"openai-community/gpt2 --max-num-seqs 2004 {flags}\n")
    assert "runs at most 64 concurrent" in kvcalc("fit gpt2 --gpu h100 --max-num-batched-tokens 64").out
    text = kvcalc(f"fit --gpu h100 --emit docker -- vllm serve gpt2 {flags}").out
    assert "-p 9000:9000 " in text and text.endswith(f" {flags}\n")


@pytest.mark.parametrize("kind", ["vllm", "docker", "compose", "kubernetes"])
@pytest.mark.parametrize("engine", ["vllm", "sglang", "sglang --engine-version 0.5.3", "llama.cpp"])
def test_what_emit_writes_is_the_same_deployment(kvcalc: Run, tmp_path: Path, kind: str, engine: str) -> None:
    if "version" in engine and kind in ("vllm", "docker"):
        pytest.skip("no word of SGLang's command line states its version")
    split = "--pp 2" if engine == "llama.cpp" else "--tp 2"
    line = f"fit llama-3.1-8b {split} --max-model-len 8k --engine {engine}"
    record = kvcalc(f"{line} --format json").records[0]
    text = kvcalc(f"{line} --emit {kind}").out
    again = kvcalc(f"fit -f {written(tmp_path, text)} --format json").records[0]
    if engine == "llama.cpp":  # the written command has a slot for each user
        (record,) = kvcalc(f"{line} --max-num-seqs {record['max_num_seqs']} --format json").records
    same = {key for key in record if key.startswith(("kv_", "num_", "max_", "tensor", "weight"))}
    assert {key: again[key] for key in same} == {key: record[key] for key in same}


@pytest.mark.parametrize(("tool", "script", "gpu"), [("nvidia-smi", NVIDIA, "h100-sxm"), ("amd-smi", AMD, "mi300x")])
def test_gpus_of_this_machine(
    kvcalc: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tool: str, script: str, gpu: str
) -> None:
    """A deployment on two GPUs uses a GPU with 20 GiB in use. vLLM does not start above the free share."""
    (tmp_path / tool).write_text(f"#!/bin/sh\n{script}\n")
    (tmp_path / tool).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    split = "--tp 2" if tool == "nvidia-smi" else ""
    refused = kvcalc(f"fit llama-3.1-8b --gpu auto {split}")
    assert refused.code == 1
    assert "vllm 20.00 GiB" in refused.err or "python3 11.72 GiB, ollama 7.81 GiB" in refused.err
    found = kvcalc(f"fit llama-3.1-8b --gpu auto {split} --gpu-memory-utilization 0.7 --format json").records[0]
    assert (found["fits"], found["gpu"], found["startup_bytes"]) == (True, gpu, 20 << 30)
    assert kvcalc("fit llama-3.1-8b --gpu auto --tp 4").code == 2


def test_memory_of_other_processes(kvcalc: Run) -> None:
    """SGLang's cache is free · mem_fraction_static minus the weights, so it loses this share of 20 GiB."""
    line = "fit llama-3.1-8b --engine sglang"
    before, after = (kvcalc(f"{line} {more} --format json").records[0] for more in ("", "--memory-in-use 20GiB"))
    lost = before["kv_budget_bytes"] - after["kv_budget_bytes"]
    assert lost == pytest.approx(before["gpu_memory_utilization"] * (20 << 30), rel=1e-6)
