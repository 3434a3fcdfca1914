"""What plain mixers run: counted by hand, from shapes alone as with tensors, and as part of the prediction."""

import math

import pytest
from specs import grouped, latent, stack
from twins import delta_net, torch

from kvcalc import Batch, Precision
from kvcalc.measure.ceilings import Ceilings, Products, as_gpu
from kvcalc.measure.expected import Plain, Rates, Scans, Step, expected_seconds, plain_of
from kvcalc.measure.layers import build_mixer, is_fused
from kvcalc.measure.layers.delta_layer import A_RANGE, DT_RANGE
from kvcalc.measure.machine import Machine
from kvcalc.measure.torch_cache import LayerCache
from kvcalc.model.operators import forward
from kvcalc.model.spec import Model

PRODUCTS = Products((1, 64), (1e-9, 8e-9))
CEILINGS = Ceilings(10e9, 20e9, {"fp32": 100e9}, 1e-6, PRODUCTS)


def net(dk: int = 8, dv: int = 6) -> Model:
    """Two layers of 2 key heads and 4 value heads."""
    return stack(delta_net(linear_key_head_dim=dk, linear_value_head_dim=dv), layers=2, hidden_size=48, vocab_size=60)


def test_operations_by_hand() -> None:
    """[2, 5, 3] · [2, 3, 7] has 5 rows against 42 elements; exp 70 elements; a sum of two and its view read 560 bytes and write
    280; zeros are written alone; a product with weights is an operator's."""
    a, b, w = torch.ones(2, 5, 3), torch.ones(2, 3, 7), torch.ones(4, 7)

    def step() -> object:
        c = a @ b
        return torch.nn.functional.linear((c.exp() + c).view(10, 7), w), torch.zeros_like(c)

    assert plain_of(step) == Plain(560 + 280 + 280, 70, ((5, 42),))


def test_a_step_moves_its_state_eight_times() -> None:
    """The state decays (read, written), the outer product is written, both are read and their sum written, and that is copied
    to the cache (read, written). What grows with dk · dv alone is left by the second difference. Two products read it."""

    def decode(dk: int, dv: int) -> Plain:
        ((layers, plain),) = Scans(net(dk, dv), "fp32").of(Batch.decode(30, 3), cached=True)
        assert layers == 2
        return plain

    moved = decode(16, 12).moved_bytes - decode(16, 6).moved_bytes - decode(8, 12).moved_bytes + decode(8, 6).moved_bytes
    assert moved == 8 * (3 * 4 * 8 * 6) * 4
    assert decode(8, 6).products == ((1, 3 * 4 * 8 * 6),) * 2  # kᵀS and qᵀS


def test_products_of_chunks() -> None:
    """70 tokens are chunks of 64 and of 6. Each takes k·kᵀ, k·S, the triangular system, q·S, q·kᵀ, what the scores give, and
    kᵀ·change; the side with fewer vectors counts as rows of a product with the other."""
    ((_, plain),) = Scans(net(8, 8), "fp32").of(Batch.prefill(70), cached=False)
    long = [(64, 64 * 8), (8, 64 * 8), (8, 64 * 64), (8, 64 * 8), (64, 64 * 8), (8, 64 * 64), (8, 64 * 8)]
    short = [(6, 6 * 8), (6, 8 * 8), (6, 6 * 8), (6, 8 * 8), (6, 6 * 8), (6, 6 * 8), (8, 6 * 8)]
    assert plain.products == tuple((rows, 4 * elements) for rows, elements in [*long, *short])


@pytest.mark.parametrize(("new", "cached"), [(1, True), (5, False), (70, True), (70, False)])
def test_shapes_count_as_tensors_do(new: int, cached: bool) -> None:
    mixer, x = build_mixer(delta_net(linear_value_head_dim=6), 48), torch.randn(3, new, 48)
    cache = LayerCache(mixer.entries, 3, new, torch.float32) if cached else None
    ((_, counted),) = Scans(net(), "fp32").of(Batch.prefill(new, 3), cached)
    assert counted == plain_of(lambda: mixer(x, cache, 0))


def test_only_plain_mixers_are_counted() -> None:
    assert not is_fused(delta_net()) and all(is_fused(part) for part in (grouped(), latent()))
    assert Scans(stack(grouped(), layers=2), "fp32").of(Batch.prefill(9), cached=False) == ()


def test_a_prediction_has_plain_operations_for_the_scan() -> None:
    """Two layers, each of 40 kB at 10 GB/s, 1,000 activations of 8 vector FLOPs at 2 ns, and one row by 500 elements at 1 ns."""
    machine = Machine(torch.device("cpu"), "a CPU", 16 << 30, 1 << 20, 1)
    rates, gpu = Rates(PRODUCTS, 2e-9, 0.0), as_gpu(machine, CEILINGS)
    operators = forward(net(), Batch.decode(9), Precision("fp32"))
    others = [op for op in operators if op.kind != "scan"]
    assert len(others) < len(operators)
    plain = Step(0, plain=((2, Plain(40_000, 1000, ((1, 500),))),))
    found = expected_seconds(operators, plain, rates, CEILINGS, gpu, cuda=False)
    rest = expected_seconds(others, Step(0), rates, CEILINGS, gpu, cuda=False)
    assert found - rest == pytest.approx(2 * (4e-6 + 16e-6 + 0.5e-6))


def test_decays_are_those_that_models_start_from() -> None:
    """A within 1 to 16, and steps whose softplus lies within 0.001 to 0.1; in no chunk does the mean head fade to nothing."""
    a_log, bias = build_mixer(delta_net(linear_num_key_heads=64, linear_num_value_heads=64), 48).weights["a_dt"].chunk(2)
    assert A_RANGE[0] <= a_log.exp().min() < 3 and 12 < a_log.exp().max() <= A_RANGE[1] * (1 + 1e-6)
    step = torch.nn.functional.softplus(bias)
    assert DT_RANGE[0] * (1 - 1e-3) <= step.min() < step.max() <= DT_RANGE[1] * (1 + 1e-3)
    assert float((a_log.exp() * step).mean()) * 64 < -math.log(torch.finfo(torch.float32).tiny)
