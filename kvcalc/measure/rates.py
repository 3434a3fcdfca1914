"""What this machine reaches in a generation, beside its ceilings: products of few rows, activations, the host.

Torch runs its operations one by one from Python: `host_s` is the time of one of them in a layer so narrow that it computes
next to nothing, behind a product. The weights of that have driven the operations' own code and data from the caches, as those
of every layer of a decoder do: they take several times as long as in a row. All are taken with the threads, the dtype and the
clock of the run, between its steps.
"""

import statistics
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from kvcalc.layers.attention import Grouped
from kvcalc.layers.ffn import Dense
from kvcalc.layers.passes import ACTIVATION_FLOPS
from kvcalc.measure.cache import DTYPES
from kvcalc.measure.device import Machine
from kvcalc.measure.layers.decoder import Decoder
from kvcalc.measure.products import Products, Weights
from kvcalc.measure.timing import once
from kvcalc.measure.traffic import calls
from kvcalc.model.spec import Layer, Model

ELEMENTS = 1 << 18  # of an activation


class Rates(NamedTuple):
    """Products of few rows; seconds of a vector FLOP of an activation; seconds of the host for each of torch's operations."""

    products: Products
    vector_s: float
    host_s: float


class Sampling:
    """Samples of the rates, taken between the steps of a run, so that both meet the machine in one state.

    Products are those of one of the decoder's layers after the other, each with all of its matrices.
    """

    def __init__(self, decoder: Decoder, machine: Machine, dtype: str, rows: Sequence[int]) -> None:
        """rows: of the products that will be asked for."""
        model = decoder.model
        self.machine, self.rows = machine, tuple(sorted(set(rows)))
        self.weights = Weights(machine, [list(block.parameters()) for block in decoder.blocks])
        self.activation, self.x = _activation(model), torch.randn(ELEMENTS, device=machine.device).to(DTYPES[dtype])
        self.host, self.calls = _narrow(machine, dtype)
        self.found: list[list[float]] = []

    def sample(self) -> None:
        """One more of each."""
        with torch.no_grad():
            vector = once(lambda: self.activation(self.x), self.machine) / (ELEMENTS * ACTIVATION_FLOPS)
            products, hosts = [], []
            for rows in self.rows:
                products.append(self.weights.seconds(rows))
                hosts.append(once(self.host, self.machine) / self.calls)
            self.found.append([vector, statistics.median(hosts), *products])

    def rates(self) -> Rates:
        """The medians of the samples."""
        vector, host, *products = (statistics.median(column) for column in zip(*self.found, strict=True))
        return Rates(Products(self.rows, tuple(products)), vector, host)


def _activation(model: Model) -> Callable[[Tensor], Tensor]:
    """The activation of the model's feed-forward parts, as `FeedForwardLayer` has it."""
    dense = [part for layer in model.kinds.values() for part in layer.parts if isinstance(part, Dense)]
    if any(part.gated for part in dense):
        return lambda x: F.silu(x) * x
    return lambda x: F.gelu(x, approximate="tanh")


def _narrow(machine: Machine, dtype: str) -> tuple[Callable[[], Tensor], int]:
    """A decode step of one layer eight wide, and how many of torch's operations it takes."""
    mixer = Grouped(num_attention_heads=2, num_key_value_heads=2, head_dim=4, q_bias=True, k_bias=True, v_bias=True, o_bias=True)
    kinds = {"full": Layer(parts=(mixer, Dense(intermediate_size=8, bias=True, gated=False)))}
    model = Model(name="narrow", hidden_size=8, vocab_size=8, layers=1, kinds=kinds, norm="layer", position_embeddings=8)
    decoder = Decoder(model).to(machine.device, DTYPES[dtype])
    caches, token = decoder.caches(1, 8), torch.zeros(1, 1, dtype=torch.long, device=machine.device)

    def step() -> Tensor:
        return decoder(token, caches, 4)

    return step, calls(step)
