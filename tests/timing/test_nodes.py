"""Ranks on several nodes: traffic between nodes is counted by hand and timed with its link, or refused."""

import msgspec
import pytest
from conftest import Run

from kvcalc import Batch, Parallelism, UserError, deploy, load_gpu, load_model
from kvcalc.model.forward_pass import leaves_node
from kvcalc.timing.deployment import nodes_of, spread_over

H100 = load_gpu("h100")
LLAMA = load_model("llama-3.1-70b")


def crossing(tp: int = 1, pp: int = 1, dp: int = 1, ep: int = 1, name: str = "llama-3.1-70b") -> dict[str, tuple[int, int]]:
    """Return the bytes over the link and between nodes for each kind of operator in a decode step of one sequence per rank."""
    d = deploy(name, "h100", tp=tp, pp=pp, dp=dp, ep=ep)
    found = {}
    for o in d.operators(Batch.decode(4096, dp)):
        if o.cost.network_bytes:
            found[o.name] = (int(o.cost.network_bytes), int(o.cost.inter_node_bytes))
    return found


def test_an_all_reduce_crosses_in_a_ring_for_each_gpu_of_the_node() -> None:
    """[1, 8192] in bf16 over 16 ranks, 8 per node: 2 · 15/16 of 16,384 bytes over each link, an eighth of it between nodes."""
    assert crossing(tp=16)["all_reduce"] == (30_720, 3_840)
    assert crossing(tp=8)["all_reduce"] == (28_672, 0)
    assert crossing(tp=32)["all_reduce"] == (31_744, 3_968)
    logits = 128_256 // 16 * 2
    assert crossing(tp=16)["all_gather_logits"] == (15 * logits, 8 * logits)


def test_experts_and_data_parallel_ranks_send_to_those_of_other_nodes() -> None:
    """8 experts per token of width 7,168: 15/16 of them are on other ranks, half of them on the other node."""
    rows = 7_168 * 2 * 8
    assert crossing(dp=16, ep=16, name="deepseek-v3")["all_to_all"] == (rows * 15 // 16, rows // 2)
    assert crossing(dp=8, ep=8, name="deepseek-v3")["all_to_all"] == (rows * 7 // 8, 0)
    gathered = crossing(tp=4, dp=4, name="mixtral-8x7b")["all_gather_tokens"]
    assert gathered == (3 * 4_096 * 2, 2 * 4_096 * 2)  # two of the four tp groups stand on this node


@pytest.mark.parametrize(
    ("wide", "per_node", "leaves"),
    [(8, 8, [True, True, True]), (4, 8, [False, True, False]), (2, 8, [False, False, False]), (16, 8, [True, True, True])],
)
def test_stages_send_between_nodes_where_the_next_stands_on_another(wide: int, per_node: int, leaves: list[bool]) -> None:
    ranks = Parallelism(tp=wide, pp=4, per_node=per_node)
    assert [leaves_node(ranks, stage) for stage in range(3)] == leaves
    assert not leaves_node(Parallelism(tp=wide, pp=4), 0)


def test_tensor_parallel_groups_stay_whole_where_they_fit() -> None:
    def placed(tp: int, dp: int = 1, nodes: int = 0) -> tuple[int, int]:
        ranks = spread_over(Parallelism(tp=tp, dp=dp), H100, nodes)
        return ranks.per_node, nodes_of(ranks, H100, nodes)

    assert placed(8) == (0, 1)
    assert placed(16) == (8, 2)
    assert placed(12) == (6, 2)
    assert placed(3, 4) == (6, 2)  # two groups of three on each, not eight GPUs
    assert placed(8, nodes=2) == (4, 2)
    assert placed(4, 4, nodes=4) == (4, 4)


def test_a_step_over_two_nodes_is_slower_than_in_one_domain_however_it_is_timed() -> None:
    one = msgspec.structs.replace(H100, link_domain=16)
    for stack in ("datasheet", "vllm"):
        for batch in (Batch.decode(4096, 64), Batch.prefill(4096)):
            apart, together = (deploy(LLAMA, gpu, tp=16, stack=stack).seconds(batch) for gpu in (H100, one))
            slower = deploy(LLAMA, H100, tp=16, stack=stack, inter_node_bandwidth="5GB/s").seconds(batch)
            assert slower > apart >= together
    assert deploy(LLAMA, H100, tp=16).seconds(Batch.decode(4096)) > deploy(LLAMA, one, tp=16).seconds(Batch.decode(4096))


def test_a_bridged_pair_reaches_others_over_the_host() -> None:
    gpu = load_gpu("h100-pcie")
    ranks = spread_over(Parallelism(tp=4), gpu)
    assert (ranks.per_node, nodes_of(ranks, gpu), gpu.inter_domain_rate) == (2, 1, gpu.host_link_bytes_per_s)
    with pytest.raises(UserError, match="rate between nodes"):
        spread_over(Parallelism(tp=4), gpu, nodes=2)


def test_what_cannot_be_placed_is_refused(kvcalc: Run) -> None:
    for line, said in (
        ("--gpu mi300x --tp 16", "Give --inter-node-bandwidth"),
        ("--gpu h100 --tp 16 --nodes 1", "Give --nodes 2 or more"),
        ("--gpu h100 --tp 8 --nodes 3", "do not divide over 3 nodes"),
        ("--gpu h100 --tp 16 --inter-node-bandwidth fast", "inter-node-bandwidth 'fast'"),
    ):
        for command in ("latency", "roofline", "compare", "serve --num-prompts 2"):
            found = kvcalc(f"{command} llama-3.1-70b {line}")
            assert (found.code, found.out) == (2, "") and said in found.err, (command, found.err)
    assert kvcalc("latency llama-3.1-70b --gpu mi300x --tp 16 --inter-node-bandwidth 50GB/s").code == 0


def test_what_crosses_nodes_is_counted_by_the_stage_that_hands_it_on() -> None:
    """tp 4, 8 GPUs per node: of four stages, only the second sends to another node."""
    sends = [o for o in deploy("llama-3.1-70b", "h100", tp=4, pp=4).operators(Batch.decode(4096)) if o.name == "send"]
    assert [(o.count, o.cost.network_bytes, o.cost.inter_node_bytes) for o in sends] == [(2, 16_384, 0), (1, 16_384, 16_384)]
