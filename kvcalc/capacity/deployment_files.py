"""Read the servers of deployment files, and write such files.

It reads Docker Compose, Kubernetes pods, KServe's InferenceService and LLMInferenceService, values
of llm-d's charts, and shell scripts. It writes `docker run`, Docker Compose and a Kubernetes
Deployment. It runs nothing.

Sources, as of autumn 2026: docs.vllm.ai (deployment/docker), the Compose specification, KServe's
`config/llmisvcconfig`, and `_helpers.tpl` of llm-d-modelservice.
"""

import os
import re
import shlex
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from kvcalc.capacity.command_line import find_engine, image_version, is_command, split
from kvcalc.capacity.engine_flags import DIALECTS
from kvcalc.errors import UserError
from kvcalc.gpu.gpu import Gpu
from kvcalc.library.files import MAX_YAML_BYTES, YamlReader, read_text
from kvcalc.library.presets import lookup, mapping
from kvcalc.records import JsonObject, Record

# parts of a file that start no server, or another node of one
SKIPPED_KEYS = "initContainers router worker workerTemplate"
# kinds of containers whose command line KServe or llm-d completes
COMPLETED_CONTAINERS = "huggingface vLLM vllm vllmServe imageDefault"
PARALLELISM_FLAGS = {
    "tensor": "--tensor-parallel-size",
    "pipeline": "--pipeline-parallel-size",
    "data": "--data-parallel-size",
    "expert": "--enable-expert-parallel",
}
# labels of Kubernetes nodes that name the GPU model
GPU_LABELS = ("nvidia.com/gpu.product", "cloud.google.com/gke-accelerator")
COMPOSE_REPLICAS = "deploy", "replicas"
MODEL_MOUNT = "/mnt/models"  # where KServe puts the model
# $(NAME) of Kubernetes; $NAME, ${NAME} and ${NAME:-default} of shells and Compose
_VARIABLE = re.compile(r"\$(?:\((\w+)\)|\{(\w+)(?::?-([^{}]*))?[^{}]*\}|(\w+))")
_SETTING = re.compile(r"^\s*(?:export )?(\w+)=[\"']?(.*?)[\"']?\s*$", re.MULTILINE)
CACHE_MOUNT = "~/.cache/huggingface:/root/.cache/huggingface"
# a Deployment of one pod, whose container mounts the volume `shm`
KUBERNETES = """
apiVersion: apps/v1
kind: Deployment
metadata: {{name: "{0}", labels: {{app: "{0}"}}}}
spec:
  selector: {{matchLabels: {{app: "{0}"}}}}
  template:
    metadata: {{labels: {{app: "{0}"}}}}
    spec:
      containers:
      - {{name: server, volumeMounts: [{{name: shm, mountPath: /dev/shm}}]}}
      volumes: [{{name: shm, emptyDir: {{medium: Memory}}}}]
"""


class Scope(NamedTuple):
    """The settings that a deployment file states around a container, for all containers inside.

    A new scope begins at each YAML mapping, and inherits from the scope around it.

    Attributes:
        name: Name of the server in the file. If the file states a role, decode or prefill, the name
            ends with it.
        key: Key of the innermost YAML mapping, such as a Compose service. It names a server without
            a name.
        model: Model that KServe or llm-d adds to the containers' command lines; "" for none.
        flags: Flags that KServe or llm-d adds to the containers' command lines.
        has_workers: Whether one server runs on several nodes. Its number of GPUs is then unknown.
        gpu: GPU model in the node selector, such as "NVIDIA-A10G"; "" for none.
        replicas: Number of copies of each server.
    """

    name: str = ""
    key: str = ""
    model: str = ""
    flags: tuple[str, ...] = ()
    has_workers: bool = False
    gpu: str = ""
    replicas: int = 1


class DeclaredServer(NamedTuple):
    """An inference server that a deployment file (Compose, Kubernetes, KServe, llm-d) starts.

    Attributes:
        name: Name of the server in the file; "" if the file states none.
        words: Words of the engine's command line.
        num_gpus: Number of GPUs that the file gives to the server; 0 if unknown.
        version: The engine's version in the tag of the container image; "" if unknown.
        scope: Settings around the server in the file, such as its GPU model.
    """

    name: str
    words: list[str]
    num_gpus: int = 0
    version: str = ""
    scope: Scope = Scope()


def read_servers(path: str) -> list[DeclaredServer]:
    """Return the servers that a deployment file or shell script starts, in order.

    A deployment file is a file of Docker Compose, Kubernetes, KServe or llm-d. Its variables get
    values from the environment, else from a file `.env` in the same folder.

    Args:
        path: Path of the file; "-" for standard input.

    Raises:
        UserError: The file cannot be read, or starts no server of a known engine.
    """
    text = (
        sys.stdin.read(MAX_YAML_BYTES) if path == "-" else read_text(Path(path), MAX_YAML_BYTES)
    )
    # Compose inserts variables of the shell, else of a file of NAME=value
    file = Path(path).with_name(".env")
    lines = read_text(file, MAX_YAML_BYTES) if file.is_file() else ""
    variables = dict(_SETTING.findall(lines)) | os.environ
    try:
        reader = YamlReader(path, is_stream=True)
        servers = [*_find_servers(reader.documents(text), Scope(), variables, set())]
    except UserError:
        if not is_command([text]):
            raise
        servers = []
    if not servers and is_command([text]):  # a shell script
        return [DeclaredServer("", split([text]))]
    if not servers:
        raise UserError(
            "starts no server of vLLM, SGLang, llama.cpp or TensorRT-LLM", where=path
        )
    return servers


def _find_servers(
    node: Any, scope: Scope, variables: Mapping[str, str], seen: set[object]
) -> Iterator[DeclaredServer]:
    """Yield the servers of a part of a file, in order.

    Args:
        seen: Parts that were already read, because a YAML alias may form an endless loop.
    """
    if (id(node), scope) in seen:
        return
    seen.add((id(node), scope))
    for item in node if isinstance(node, list) else ():
        yield from _find_servers(item, scope, variables, seen)
    if not isinstance(node, dict) or node.get("create") is False:
        return
    bases = node.get("<<")
    for base in bases if isinstance(bases, list) else [bases]:
        node = mapping(base) | node
    scope = _inner_scope(scope, node)
    if server := _server(node, scope, variables):
        yield server
    for key, value in node.items():
        if key not in SKIPPED_KEYS.split() and not key.startswith("x-"):
            name = f"{scope.name} {key}" if key in ("decode", "prefill") else scope.name
            inner = scope._replace(name=name.strip(), key=key)
            yield from _find_servers(value, inner, variables, seen)


def _inner_scope(scope: Scope, node: JsonObject) -> Scope:
    """Return the scope inside a mapping. The mapping may state a name, a model and its
    parallelism."""
    sizes = mapping(node.get("parallelism"))
    flags = (f"{flag}={sizes[key]}" for key, flag in PARALLELISM_FLAGS.items() if key in sizes)
    source = mapping(node.get("model") or node.get("modelArtifacts"))
    model = str(source.get("name") or "")
    uri = str(source.get("uri") or source.get("storageUri") or "")
    if uri and "{{" not in uri and (uri.startswith("hf://") or not model):
        # hf://org/name:revision
        model = "/".join(uri.partition("://")[2].partition(":")[0].split("/")[-2:])
    labels = mapping(node.get("nodeSelector"))
    return scope._replace(
        name=str(lookup(node, ("metadata", "name")) or scope.name),
        model=model if uri else scope.model,
        flags=tuple(flags) or scope.flags,
        has_workers=scope.has_workers or not {"worker", "workerTemplate"}.isdisjoint(node),
        gpu=str(next(filter(None, map(labels.get, GPU_LABELS)), scope.gpu)),
        replicas=node.get("replicas") or lookup(node, COMPOSE_REPLICAS) or scope.replicas,
    )


def _server(
    node: JsonObject, scope: Scope, variables: Mapping[str, str]
) -> DeclaredServer | None:
    """Return the server of a container; None if it starts no known engine."""
    variables = {**variables, **_environment(node)}
    words = []
    for key in ("entrypoint", "command", "args"):
        value = node.get(key)
        items = value if isinstance(value, list) else filter(None, [value])
        texts = [_insert_variables(str(item), variables) for item in items]
        words += split(texts) if isinstance(value, str) else texts
    words = _engine_line(words)
    kind = node.get("modelCommand") or lookup(node, ("modelFormat", "name"))
    is_main = bool(scope.model) and node.get("name") == "main"
    if (is_main or kind in COMPLETED_CONTAINERS.split()) and not find_engine(words):
        words = [re.sub("^--model[_-](id|dir)", "--model", word) for word in words]
        words = ["vllm", "serve", scope.model, *scope.flags, *words]
        words += split([variables.get("VLLM_ADDITIONAL_ARGS", "")])
    image = _insert_variables(str(node.get("image")), variables)
    engine = find_engine(words) or find_engine([image, *words])
    if not engine:
        return None
    dialect, words = engine
    return DeclaredServer(
        name=scope.name or scope.key,
        words=[
            word.replace(MODEL_MOUNT, scope.model or MODEL_MOUNT)
            for word in [*dialect.starts[0], *words]
        ],
        num_gpus=0 if scope.has_workers else _num_gpus(node),
        version=image_version(image),
        scope=scope,
    )


def _environment(node: JsonObject) -> dict[str, str]:
    """Return the variables of a container, from a mapping or a list of `NAME=value` (Compose), or
    from pairs of name and value (Kubernetes)."""
    environment = node.get("environment") or node.get("env")
    pairs = [*mapping(environment).items()]
    for item in environment if isinstance(environment, list) else ():
        name, _, value = str(item).partition("=")
        pairs.append((item.get("name"), item.get("value")) if mapping(item) else (name, value))
    return {str(name): str(value) for name, value in pairs if value is not None}


def _insert_variables(text: str, variables: Mapping[str, str]) -> str:
    """Return a text with variables replaced by their values. A variable without a value stays."""

    def value(match: re.Match[str]) -> str:
        text = variables.get(match[1] or match[2] or match[4]) or match[3]
        return match[0] if text is None else text

    return _VARIABLE.sub(value, text.replace("$$", "$"))


def _engine_line(words: list[str]) -> list[str]:
    """Return the words of the line that starts an engine, if the words contain a shell script.
    Otherwise return the words."""
    for word in words:
        for line in word.replace("\\\n", " ").splitlines() if " " in word else ():
            with suppress(UserError):
                if find_engine(line_words := split([line])):
                    return line_words
    return words


def _num_gpus(node: JsonObject) -> int:
    """Return the number of GPUs of a container; 0 if unknown."""
    limits = mapping(lookup(node, ("resources", "limits"))).items()
    counts = [count for name, count in limits if name.endswith("/gpu")]
    devices = lookup(node, ("deploy", "resources", "reservations", "devices"))
    for device in map(mapping, devices if isinstance(devices, list) else ()):
        ids = device.get("device_ids")
        counts.append(len(ids) if isinstance(ids, list) else device.get("count"))
    return next((int(count) for count in map(str, counts) if count.isdecimal()), 0)


def deployment_text(record: Record, gpu: Gpu, version: str, kind: str) -> str:
    """Return the text of a file or command that starts a deployment with its engine.

    Args:
        record: A record (dict) of `fit` or `plan`, with `command`, `gpus`, `model` and `engine`.
        gpu: GPU model of the deployment. Container images exist only for NVIDIA.
        version: The engine's version, which selects the container image; "" for the latest.
        kind: "vllm" (the command line of any engine), "docker" (`docker run`), "compose" or
            "kubernetes".

    Raises:
        UserError: No command line starts the deployment, or the images are for other GPUs.
    """
    line, num_gpus = record["command"], record["gpus"]
    if not line:
        raise UserError(f"--emit {kind}: no command line starts this deployment")
    if kind == "vllm":
        return f"{line}\n"
    if gpu.vendor != "NVIDIA":
        raise UserError(
            f"--emit {kind} writes images for NVIDIA GPUs, and {gpu.name} is another GPU",
            "--emit vllm writes the command line",
        )
    import yaml

    name = re.sub("[^a-z0-9]+", "-", record["model"].lower()).strip("-")
    settings = dict(re.findall(r"^(\w+)=(\S+)", line))  # VLLM_ALLOW_LONG_MAX_MODEL_LEN=1
    dialect, words = DIALECTS[record["engine"]], split([line])[len(settings) :]
    image, port, words = dialect.container(words, version)
    if typed_port := re.search(r"--port[ =](\d+)", line):
        port = int(typed_port[1])
    if kind == "docker":
        start = f"docker run --gpus {num_gpus} --ipc host -p {port}:{port} -e HF_TOKEN"
        start += "".join(f" -e {key}={value}" for key, value in settings.items())
        return f"{start} -v {CACHE_MOUNT} {image} {shlex.join(words)}\n"
    container: JsonObject = {"image": image}
    if kind == "compose":
        device = {"driver": "nvidia", "count": num_gpus, "capabilities": ["gpu"]}
        container |= {
            "command": words,
            "environment": ["HF_TOKEN", *(f"{key}={value}" for key, value in settings.items())],
            "ports": [f"{port}:{port}"],
            "volumes": [CACHE_MOUNT],
            "ipc": "host",
            "deploy": {"resources": {"reservations": {"devices": [device]}}},
        }
        file = {"services": {name: container}}
    else:
        token = {"secretKeyRef": {"name": "hf-token", "key": "HF_TOKEN", "optional": True}}
        variables = [{"name": key, "value": value} for key, value in settings.items()]
        container |= {
            "args": words,
            "env": [{"name": "HF_TOKEN", "valueFrom": token}, *variables],
            "ports": [{"containerPort": port}],
            "resources": {"limits": {"nvidia.com/gpu": num_gpus}},
        }
        file = yaml.safe_load(KUBERNETES.format(name))
        file["spec"]["template"]["spec"]["containers"][0] |= container
    return str(yaml.safe_dump(file, sort_keys=False))
