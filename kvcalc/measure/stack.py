"""A stack of one or two layers, with a cache, ready to take a step: what one measurement runs."""

from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

import torch
from torch import Tensor

from kvcalc.measure.cache import DTYPES, LayerCache
from kvcalc.measure.device import Machine
from kvcalc.measure.layers import build_mixer
from kvcalc.measure.layers.base import Mixer
from kvcalc.model.spec import Model

ALIGNED = 64  # bytes that torch aligns a CPU tensor to


class Case(NamedTuple):
    """One measurement. variant: what it is called. Decode writes token `context` behind context − 1 cached ones; prefill
    passes `context` tokens into an empty cache."""

    variant: str
    model: Model
    phase: str
    batch_size: int
    context: int

    @property
    def new(self) -> int:
        return 1 if self.phase == "decode" else self.context

    @property
    def past(self) -> int:
        return self.context - self.new


class Stack:
    """The mixers of a case, one after the other. Weights and inputs are random."""

    def __init__(self, case: Case, machine: Machine, dtype: str, kernel: str) -> None:
        self.case, self.machine, self.dtype = case, machine, DTYPES[dtype]
        model = case.model
        self.layers = [model.kinds[kind] for kind in model.order]
        self.mixers: list[Mixer] = []
        for layer in self.layers:
            mixer = build_mixer(layer.mixers[0], model.hidden_size, not model.position_embeddings, layer.shares_cache)
            mixer.kernel = kernel
            self.mixers.append(mixer.to(machine.device, self.dtype))
        self.x = torch.randn(case.batch_size, case.new, model.hidden_size, device=machine.device).to(self.dtype)

    def caches(self, block_size: int = 0) -> list[LayerCache]:
        """A cache for every layer that stores one, and again for the layer that reads it."""
        found: list[LayerCache] = []
        for layer, mixer in zip(self.layers, self.mixers, strict=True):
            if layer.shares_cache:
                found.append(found[-1])
            else:
                size = (self.case.batch_size, self.case.context, self.dtype, self.machine.device, block_size)
                found.append(LayerCache(mixer.entries, *size))
        return found

    def step(self, caches: list[LayerCache]) -> Tensor:
        """The whole layers: projections, cache, attention or scan, and the projection back."""
        x = self.x
        for mixer, cache in zip(self.mixers, caches, strict=True):
            x = mixer(x, cache, self.case.past)
        return x

    def core(self) -> Callable[[list[LayerCache]], Tensor]:
        """The middle step of each layer alone, on what the projections gave once."""
        prepared = [mixer.prepare(self.x, self.case.past) for mixer in self.mixers]

        def step(caches: list[LayerCache]) -> Tensor:
            for mixer, inputs, cache in zip(self.mixers, prepared, caches, strict=True):
                mixed = mixer.core(inputs, cache, self.case.past)
            return mixed

        return step


def storage_bytes(caches: list[LayerCache]) -> int:
    """Bytes of the tensors' storage, each cache once."""
    return sum(cache.storage_bytes for cache in {id(c): c for c in caches}.values())


def allocated(make: Callable[[], list[LayerCache]], machine: Machine) -> tuple[list[LayerCache], int]:
    """(caches, bytes that the allocator holds for them): its own count on a GPU, the C library's on Linux."""
    if machine.cuda:
        before = torch.cuda.memory_allocated(machine.device)
        caches = make()
        tables = sum(
            getattr(r, "table", r.tensor[:0]).untyped_storage().nbytes() for c in caches for r in c.rows if hasattr(r, "table")
        )
        return caches, torch.cuda.memory_allocated(machine.device) - before - _rounded(tables, 512)
    caches = make()
    usable = _usable_size()
    distinct = {id(c): c for c in caches}.values()
    return caches, sum(usable(tensor) for cache in distinct for tensor in cache.tensors)


def _rounded(size: int, unit: int) -> int:
    return -(-size // unit) * unit


def _usable_size() -> Callable[[Tensor], int]:
    """What the C library set aside for a tensor; where it cannot be asked, the storage in whole alignment units."""
    import ctypes
    import platform

    if platform.system() == "Linux" and platform.machine() == "x86_64" and "mimalloc" not in torch.__config__.show().lower():
        with suppress(OSError, AttributeError):
            ask = ctypes.CDLL(None).malloc_usable_size
            ask.argtypes, ask.restype = [ctypes.c_void_p], ctypes.c_size_t
            return lambda tensor: int(ask(tensor.untyped_storage().data_ptr()))
    return lambda tensor: _rounded(tensor.untyped_storage().nbytes(), ALIGNED)
