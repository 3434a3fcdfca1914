"""Cases to measure: one or two layers of a variant, as a model and as torch layers with a cache."""

from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor

from kvcalc.errors import UserError, nearest
from kvcalc.layers.attention import Grouped
from kvcalc.layers.recurrent import GatedDeltaNet
from kvcalc.measure.layers import build_mixer
from kvcalc.measure.layers.base_layer import Mixer
from kvcalc.measure.machine import Machine
from kvcalc.measure.torch_cache import DTYPES, LayerCache
from kvcalc.model.spec import Layer, Model
from kvcalc.planning.variants import variant

NAMES = ("mha", "gqa", "mqa", "mla", "dsa", "window", "cla", "recurrent")
_MEANS = {"window": "mha/window:1024", "cla": "cla:2"}


def standard_model(heads: int) -> Model:
    """Return one MHA layer with `heads` heads of width 128; the hidden size is heads · 128."""
    mixer = Grouped(num_attention_heads=heads, num_key_value_heads=heads, head_dim=128)
    return _bare(Model(name="standard", hidden_size=heads * 128, vocab_size=1, layers=1, kinds={"full": Layer(parts=(mixer,))}))


def named(base: Model, text: str) -> Model:
    """Return the layers of a variant: one of `NAMES`, or a form of `compare` such as gqa:4.

    There are two layers if they share a cache, otherwise one. Raises UserError for an unknown form.
    """
    return whole(msgspec.structs.replace(base, layers=2 if "cla" in _steps(base, text) else 1), text)


def whole(model: Model, text: str) -> Model:
    """Return `model` with the variant in every attention layer. Raises UserError for an unknown form."""
    steps = _steps(model, text)
    if steps == "recurrent":
        return _recurrent(model)
    found = variant(model, steps)
    if found.kv_cache_dtype:
        raise UserError(f"variant {text!r}: `measure` keeps the cache in the dtype of its products", hint="Use --dtype")
    return found.model


def _steps(model: Model, text: str) -> str:
    """Return the variant in the notation of `compare`. Raises UserError if there is no torch layer."""
    name = text.strip().lower()
    steps = f"gqa:{max(1, _heads(model) // 4)}" if name == "gqa" else _MEANS.get(name, name)
    known = [*NAMES, "none", "hybrid"]
    if steps.partition(":")[0].partition("/")[0] not in [*known, "evict"]:
        raise UserError(f"unknown variant {text!r}", hint=nearest(name, known))
    return steps


def base_of(model: Model) -> Model:
    """Return a model of one layer, the first attention layer, which variants replace."""
    for kind in model.order:
        layer = model.kinds[kind]
        if any(part.attends for part in layer.mixers):
            return _bare(msgspec.structs.replace(model, layers=1, kinds={kind: layer}, pattern=(), mtp=None))
    raise UserError(f"{model.name} has no attention to put a variant in place of")


def stacks_of(model: Model) -> dict[str, Model]:
    """Return one stack for each kind of layer in the model.

    A layer that reads another layer's cache is preceded by that layer.
    """
    found = {}
    for index, kind in enumerate(model.order):
        layer = model.kinds[kind]
        if kind in found or not layer.mixers:
            continue
        owners = [k for k in model.order[:index] if not model.kinds[k].shares_cache and model.kinds[k].mixers]
        names = (owners[-1], kind) if layer.shares_cache and owners else (kind,)
        kinds = {name: model.kinds[name] for name in names}
        found[kind] = _bare(msgspec.structs.replace(model, layers=len(names), kinds=kinds, pattern=names, mtp=None))
    return found


def _bare(model: Model) -> Model:
    """Return the model without FFNs and norms."""
    kinds = {
        name: Layer(parts=tuple(p for p in layer.parts if p.label), norms=0, shares_cache=layer.shares_cache)
        for name, layer in model.kinds.items()
    }
    return msgspec.structs.replace(model, kinds=kinds, norm="none")


def _heads(base: Model) -> int:
    return max(part.as_mha()[0] for layer in base.kinds.values() for part in layer.mixers)


def _recurrent(model: Model) -> Model:
    """Return the model with gated delta nets in place of attention, with equal heads and widths."""
    heads, _, width = max(part.as_mha() for layer in model.kinds.values() for part in layer.mixers)
    mixer = GatedDeltaNet(
        linear_num_key_heads=heads, linear_num_value_heads=heads, linear_key_head_dim=width, linear_value_head_dim=width
    )
    kinds = {
        kind: msgspec.structs.replace(layer, parts=tuple(mixer if p.attends else p for p in layer.parts), shares_cache=False)
        for kind, layer in model.kinds.items()
    }
    return msgspec.structs.replace(model, kinds=kinds)


ALIGNED = 64  # bytes that torch aligns a CPU tensor to


class Case(NamedTuple):
    """One measurement.

    Decode writes token `context` after context − 1 cached tokens. Prefill passes `context` tokens into
    an empty cache. `variant` is the printed name.
    """

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
    """The mixers of a case in order, with random weights and inputs."""

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
        """Return one cache per layer. A layer that shares a cache gets the cache of its owner."""
        found: list[LayerCache] = []
        for layer, mixer in zip(self.layers, self.mixers, strict=True):
            if layer.shares_cache:
                found.append(found[-1])
            else:
                size = (self.case.batch_size, self.case.context, self.dtype, self.machine.device, block_size)
                found.append(LayerCache(mixer.entries, *size))
        return found

    def step(self, caches: list[LayerCache]) -> Tensor:
        """Run whole layers: projections, cache write, attention or scan, output projection."""
        x = self.x
        for mixer, cache in zip(self.mixers, caches, strict=True):
            x = mixer(x, cache, self.case.past)
        return x

    def core(self) -> Callable[[list[LayerCache]], Tensor]:
        """Return a function that runs only attention (or the scan) of each layer, on fixed projections."""
        prepared = [mixer.prepare(self.x, self.case.past) for mixer in self.mixers]

        def step(caches: list[LayerCache]) -> Tensor:
            for mixer, inputs, cache in zip(self.mixers, prepared, caches, strict=True):
                mixed = mixer.core(inputs, cache, self.case.past)
            return mixed

        return step


def storage_bytes(caches: list[LayerCache]) -> int:
    """Return the bytes of all tensors; a shared cache counts once."""
    return sum(cache.storage_bytes for cache in {id(c): c for c in caches}.values())


def allocated(make: Callable[[], list[LayerCache]], machine: Machine) -> tuple[list[LayerCache], int]:
    """Return caches and the bytes that the allocator reserved for them.

    On a GPU, torch's allocator counts them. On Linux, the C library does.
    """
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
    """Return a function that gives the bytes that the C library reserved for a tensor.

    Without such a C library, it rounds the storage up to the alignment.
    """
    import ctypes
    import platform

    if platform.system() == "Linux" and platform.machine() == "x86_64" and "mimalloc" not in torch.__config__.show().lower():
        with suppress(OSError, AttributeError):
            ask = ctypes.CDLL(None).malloc_usable_size
            ask.argtypes, ask.restype = [ctypes.c_void_p], ctypes.c_size_t
            return lambda tensor: int(ask(tensor.untyped_storage().data_ptr()))
    return lambda tensor: _rounded(tensor.untyped_storage().nbytes(), ALIGNED)
