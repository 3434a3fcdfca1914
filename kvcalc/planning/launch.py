"""The command lines that start every replica of a deployment.

Source of the lines for prefill and decode on separate replicas: vLLM's "NixlConnector Usage Guide"
(docs/features/nixl_connector_usage.md in its repository), read 2026-11-23.
"""

import json
import shlex
from collections.abc import Iterator
from typing import NamedTuple

from kvcalc.gpu.spec import Gpu
from kvcalc.layers.ranks import Parallelism
from kvcalc.planning.space import NODE

BOTH, PRODUCER, CONSUMER = "", "kv_producer", "kv_consumer"
PORTS = {BOTH: 8000, PRODUCER: 8100, CONSUMER: 8200}
PROXY_PORT, SIDE_CHANNEL_PORT = 8192, 5600
PROXY = "tests/v1/kv_connector/nixl_integration/toy_proxy_server.py"  # in vLLM's repository


class ReplicaServer(NamedTuple):
    """One replica: its role, the number of its host, its port, its GPUs there, and the port of its KV transfers."""

    role: str
    host: int
    port: int
    gpu_indices: range
    side_channel_port: int


def with_role(line: str, role: str) -> str:
    """Return a `vllm serve` line with the role that a replica has in KV transfers."""
    config = json.dumps({"kv_connector": "NixlConnector", "kv_role": role}, separators=(",", ":"))
    return f"{line} --kv-transfer-config {shlex.quote(config)}"


def launch_lines(line: str, gpu: Gpu, ranks: Parallelism, prefill_replicas: int, decode_replicas: int) -> list[str]:
    """Return a line for every replica, and a last one for the proxy if some replicas process prompts alone.

    Several hosts have the addresses ${HOST1}, ${HOST2} … Example: 1 replica for prompts and 2 that decode on 1 GPU each are
    four lines: GPU 0 on port 8100, GPUs 1 and 2 on ports 8200 and 8201, and the proxy on port 8192.

    Args:
        line: The engine's line of one replica.
        prefill_replicas: Replicas for prompts alone. If there are any, the line is vLLM's.
    """
    roles = [PRODUCER] * prefill_replicas + [CONSUMER if prefill_replicas else BOTH] * decode_replicas
    if len(roles) == 1:
        return [line]
    servers = list(_placed(roles, gpu, ranks))
    hosts = [f"${{HOST{server.host + 1}}}" if servers[-1].host else "localhost" for server in servers]
    lines = [_server_line(line, server, host) for server, host in zip(servers, hosts, strict=True)]
    if not prefill_replicas:
        return lines
    words = [f"python {PROXY} --port {PROXY_PORT}"]
    for option, chosen in (("prefiller", slice(prefill_replicas)), ("decoder", slice(prefill_replicas, None))):
        ports = " ".join(str(server.port) for server in servers[chosen])
        words.append(f"--{option}-hosts {' '.join(hosts[chosen])} --{option}-ports {ports}")
    return [*lines, " ".join(words)]


def _server_line(line: str, server: ReplicaServer, host: str) -> str:
    words = [f"CUDA_VISIBLE_DEVICES={','.join(map(str, server.gpu_indices))}"]
    if server.role:
        words += [f"VLLM_NIXL_SIDE_CHANNEL_HOST={host}"] if host != "localhost" else []
        words.append(f"VLLM_NIXL_SIDE_CHANNEL_PORT={server.side_channel_port}")
    line = f"{line} --port {server.port}"
    return " ".join([*words, with_role(line, server.role) if server.role else line])


def _placed(roles: list[str], gpu: Gpu, ranks: Parallelism) -> Iterator[ReplicaServer]:
    """Yield the replicas on hosts, which they fill one after the other. A replica that spans hosts begins on a new one."""
    gpus_per_host = 1 if gpu.per == "SoC" else gpu.host.gpus if gpu.host else NODE
    numbers = dict.fromkeys(PORTS, 0)
    host = used_gpus = used_ports = 0
    for role in roles:
        if used_gpus and used_gpus + ranks.gpus > gpus_per_host:
            host, used_gpus, used_ports = host + -(-used_gpus // gpus_per_host), 0, 0
        yield ReplicaServer(
            role=role,
            host=host,
            port=PORTS[role] + numbers[role],
            gpu_indices=range(used_gpus, used_gpus + min(ranks.gpus, gpus_per_host)),
            side_channel_port=SIDE_CHANNEL_PORT + used_ports,
        )
        numbers[role] += 1
        used_gpus += ranks.gpus
        used_ports += ranks.dp  # one for each data-parallel rank
