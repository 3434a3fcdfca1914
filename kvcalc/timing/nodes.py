"""Ranks over nodes: which GPUs one fast link joins, and what crosses the slower one between them.

Ranks stand in order, tp innermost: a tp group stays on one node where it fits, pipeline stages follow each other. All-reduces
cross in rings, one a GPU of the node, each over that GPU's own link: 2(n − 1)/n of its share of the message.
"""

import msgspec

from kvcalc.errors import UserError
from kvcalc.gpu.spec import Gpu
from kvcalc.layers.cost import CollectiveShape, Operator
from kvcalc.layers.ranks import Parallelism
from kvcalc.units import doublings

# µs of a message between nodes, of which a tree of n nodes sends 2·log2(n): NCCL's own model of its choice, src/graph/tuning.cc,
# hwLat of the network under the tree with the low-latency protocol (github.com/NVIDIA/nccl, read 2026-11-22).
MESSAGE_US = 5.0


def spread_over(ranks: Parallelism, gpu: Gpu, nodes: int = 0) -> Parallelism:
    """The ranks with `per_node`, the GPUs that one link joins; as they are where it joins all. nodes: 0 for the fewest.

    Raises UserError where they do not divide over so many, or go beyond the link, and no rate between nodes is known.
    """
    domain, each = gpu.link_domain, ranks.gpus
    if nodes:
        if not 0 < nodes <= ranks.gpus or ranks.gpus % nodes:
            raise UserError(f"{ranks.gpus} GPUs do not divide over {nodes} nodes")
        each = ranks.gpus // nodes
        if domain and each > domain and not gpu.bridged:
            text = f"{each} {gpu.name} on a node are more than the {domain} that its link joins"
            raise UserError(text, hint=f"Give --nodes {-(-ranks.gpus // domain)} or more")
    limit = min(domain or each, each)
    if ranks.gpus <= limit:
        return ranks
    if not (gpu.inter_node_bytes_per_s or (gpu.bridged and nodes <= 1)):
        text = f"{ranks.gpus} {gpu.name} are more than one link joins ({limit}), and its preset gives no rate between nodes"
        raise UserError(text, hint="Give --inter-node-bandwidth of a GPU, as 50GB/s")
    tp = ranks.tp
    return msgspec.structs.replace(ranks, per_node=limit // tp * tp if tp <= limit else -(-tp // -(-tp // limit)))


def nodes_of(ranks: Parallelism, gpu: Gpu, nodes: int = 0) -> int:
    """Nodes that spread ranks stand on; pairs that a bridge joins share one."""
    if not ranks.per_node or (gpu.bridged and nodes <= 1):
        return 1
    return -(-ranks.gpus // ranks.per_node)


def latency_us(operator: Operator) -> float:
    """µs that messages between nodes take whatever their size; 0 where nothing leaves the node."""
    shape, sent = operator.shape, operator.cost.inter_node_bytes
    if not (sent if isinstance(sent, int | float) else sent.any()):
        return 0.0
    if isinstance(shape, CollectiveShape):
        return 2 * doublings(-(-shape.ranks // shape.near)) * MESSAGE_US
    return MESSAGE_US
