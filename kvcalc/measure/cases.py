"""Cases to measure: one or two layers of a variant, as a model and as torch layers with a cache."""

import ctypes
import gc
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from msgspec.structs import replace
from torch import Tensor

from kvcalc.errors import UserError
from kvcalc.layers.attention import Grouped
from kvcalc.layers.recurrent import GatedDeltaNet
from kvcalc.measure.ceilings import Machine
from kvcalc.measure.layers import build_mixer
from kvcalc.measure.layers.base_layer import DTYPES, LayerCache, Mixer, model_caches
from kvcalc.model.model import Layer, Model
from kvcalc.planning.variants import variant

NAMES = ("mha", "gqa", "mqa", "mla", "dsa", "window", "cla", "recurrent")
FORMS = {"window": "mha/window:1024", "cla": "cla:2"}  # in the notation of `compare`
MAX_COMPARED = 256  # tokens of the comparison with and without a cache


def standard_model(heads: int) -> Model:
    """Return a model of one multi-head attention (MHA) layer without an FFN.

    `kvcalc measure` measures this layer if the user names no model.

    Args:
        heads: Number of heads of width 128. The hidden size is heads · 128.
    """
    mixer = Grouped(num_attention_heads=heads, num_key_value_heads=heads, head_dim=128)
    kinds = {"full": Layer(parts=(mixer,))}
    model = Model(name="standard", hidden_size=heads * 128, vocab_size=1, layers=1, kinds=kinds)
    return _bare(model, "full")


def variant_layers(base: Model, text: str) -> Model:
    """Return a model with the layers that are measured for an attention variant.

    It has one layer, or two layers if the variant shares one cache among layers (`cla`).

    Args:
        base: Model of one layer. The variant replaces its attention.
        text: Name of the variant, such as `mla` or `window`, or a variant as the command `kvcalc
            compare` takes it, such as `gqa:4` for 4 KV heads.

    Raises:
        UserError: The variant is unknown.
    """
    return variant_model(replace(base, layers=2 if "cla" in _form(base, text) else 1), text)


def variant_model(model: Model, text: str) -> Model:
    """Return a copy of `model` in which an attention variant replaces the attention of every layer.

    Args:
        model: Model with attention layers.
        text: Name of the variant, such as `mla` or `window`, or a variant as the command `kvcalc
            compare` takes it, such as `gqa:4` for 4 KV heads.

    Raises:
        UserError: The variant is unknown, or it changes the dtype of the cache or the form of MLA.
    """
    form = _form(model, text)
    if form == "recurrent":
        return _recurrent(model)
    changed = variant(model, form)
    if changed.kv_cache_dtype or changed.mla_form:
        message = f"variant {text!r}: `measure` keeps cache dtype and MLA form of its layers"
        raise UserError(message, "Use --dtype for a narrower cache")
    return changed.model


def _form(model: Model, text: str) -> str:
    """Return the variant in the notation of `compare`."""
    name = text.strip().lower()
    if name == "gqa":
        return f"gqa:{max(1, _widest(model)[0] // 4)}"
    return FORMS.get(name, name)


def base_of(model: Model) -> Model:
    """Return a model with only the first attention layer of `model`, without its FFN.

    Attention variants are then put in place of this layer's attention and measured.

    Args:
        model: Model with at least one attention layer.

    Raises:
        UserError: The model has no attention.
    """
    for kind in model.order:
        if any(part.attends for part in model.kinds[kind].mixers):
            return _bare(model, kind)
    raise UserError(f"{model.name} has no attention to put a variant in place of")


def stacks_of(model: Model) -> dict[str, Model]:
    """Return one small model for each kind of layer of `model`, by the name of the kind.

    A kind of layer, such as `full` or `window`, is measured once for all its layers. The small
    model has one layer of this kind, without FFN and norms. If this layer reads another layer's
    cache, the small model has also the other layer, before it.

    Args:
        model: Model whose layers are measured.
    """
    stacks = {}
    owner = ""
    for kind in model.order:
        layer = model.kinds[kind]
        if not layer.mixers:
            continue
        if kind not in stacks:
            is_shared = layer.shares_cache and owner
            stacks[kind] = _bare(model, *((owner, kind) if is_shared else (kind,)))
        owner = owner if layer.shares_cache else kind
    return stacks


def _bare(model: Model, *names: str) -> Model:
    """Return the model with one layer of each kind, without FFNs and norms."""
    kinds = {}
    for name in names:
        layer = model.kinds[name]
        mixers = tuple(part for part in layer.parts if part.label)
        kinds[name] = Layer(parts=mixers, norms=0, shares_cache=layer.shares_cache)
    return replace(model, kinds=kinds, norm="none", layers=len(names), pattern=names, mtp=None)


def _widest(model: Model) -> tuple[int, int, int]:
    """Return (heads, key width, value width) of the mixer with the most heads."""
    return max(part.as_mha() for part in model.mixers)


def _recurrent(model: Model) -> Model:
    """Return the model with gated delta nets in place of attention, with equal heads and widths."""
    heads, _, width = _widest(model)
    mixer = GatedDeltaNet(
        linear_num_key_heads=heads,
        linear_num_value_heads=heads,
        linear_key_head_dim=width,
        linear_value_head_dim=width,
    )
    kinds = {}
    for kind, layer in model.kinds.items():
        parts = [mixer if part.attends else part for part in layer.parts]
        kinds[kind] = replace(layer, parts=tuple(parts), shares_cache=False)
    return replace(model, kinds=kinds)


class Case(NamedTuple):
    """One measurement: an attention variant or kind of layer, in one phase and at one size.

    Attributes:
        variant: Printed name of the variant or the kind of layer.
        model: Model with only the layers to measure.
        phase: `decode` or `prefill`. A decode has one new token per sequence after context − 1
            cached tokens. A prefill has `context` new tokens per sequence and an empty cache.
        batch_size: Number of sequences.
        context: Tokens of each sequence after the pass.
    """

    variant: str
    model: Model
    phase: str
    batch_size: int
    context: int

    def __str__(self) -> str:
        return (
            f"{self.variant} {self.phase}, batch {self.batch_size:,}, context {self.context:,}"
        )

    @property
    def new(self) -> int:
        """Return the number of new tokens of each sequence: 1 in decode, the context in prefill."""
        return 1 if self.phase == "decode" else self.context

    @property
    def past(self) -> int:
        """Return each sequence's cached tokens before the pass: context − 1 in decode, else 0."""
        return self.context - self.new


def build_mixers(model: Model) -> list[Mixer]:
    """Return the torch module of each layer's attention or recurrence, in the order of the layers.

    Args:
        model: Model whose layers have one attention or recurrence each.

    Raises:
        UserError: kvcalc has no torch module for a layer, or a layer has several.
    """
    mixers = []
    for kind in model.order:
        layer = model.kinds[kind]
        if len(layer.mixers) != 1:
            raise UserError(
                f"`measure` has no layer with {len(layer.mixers)} mixers, as {model.name} has"
            )
        rotates = not model.position_embeddings
        mixers.append(
            build_mixer(layer.mixers[0], model.hidden_size, rotates, layer.shares_cache)
        )
    return mixers


class LayerStack:
    """The attention or recurrence of a case's layers in torch, with random weights and inputs.

    Its methods run the layers in order, so that they can be timed.

    Args:
        case: The layers, the phase, the batch size and the context.
        machine: The machine to measure on.
        dtype: Data type of weights and inputs: fp64, fp32, bf16 or fp16.
    """

    def __init__(self, case: Case, machine: Machine, dtype: str) -> None:
        self.case = case
        self.mixers = [
            mixer.to(machine.device, DTYPES[dtype]) for mixer in build_mixers(case.model)
        ]
        shape = case.batch_size, case.new, case.model.hidden_size
        self.x = torch.randn(shape, device=machine.device).to(DTYPES[dtype])

    def caches(self) -> list[LayerCache]:
        """Return one new, empty cache per layer. Layers that share a cache get the same object."""
        case = self.case
        return model_caches(case.model, case.batch_size, case.context, self.x)

    def step(self, caches: Sequence[LayerCache]) -> Tensor:
        """Run all layers once on the random inputs, and return the output of the last layer.

        Each layer runs its projections, cache write, attention or scan, and output projection. The
        output is [batch, new tokens, hidden size].

        Args:
            caches: Caches that the method `caches` returned. Their rows of the new tokens are
                overwritten.
        """
        return self._outputs(self.x, caches, self.case.past)

    def _outputs(self, x: Tensor, caches: Sequence[LayerCache | None], past: int) -> Tensor:
        for mixer, cache in zip(self.mixers, caches):
            x = mixer(x, cache, past)
        return x

    def cache_error(self) -> float:
        """Return how much the last token's output differs with and without a cache, as a fraction.

        This checks the torch layers: with a correct cache the difference is only rounding. One pass
        has all tokens and no cache. Another pass has one new token after cached tokens. The result
        is the largest absolute difference of their outputs ÷ the largest absolute output. At most
        256 tokens of one sequence are used.
        """
        model, tokens = self.case.model, min(self.case.context, MAX_COMPARED)
        x = self.x.new_empty(1, tokens, model.hidden_size).normal_()
        caches = model_caches(model, 1, tokens, x)
        if tokens > 1:
            self._outputs(x[:, :-1], caches, 0)
        cached = self._outputs(x[:, -1:], caches, tokens - 1)
        empty: list[LayerCache | None] = [None] * len(caches)
        if any(layer.shares_cache for layer in model.kinds.values()):
            empty = [*model_caches(model, 1, tokens, x)]
        whole = self._outputs(x, empty, 0)[:, -1:]
        return float((cached - whole).abs().max() / whole.abs().max())

    def core(self) -> Callable[[Sequence[LayerCache]], None]:
        """Return a function that runs only the attention or scan of each layer, to time it.

        Its argument is the caches that the method `caches` returned. The projections are computed
        once, before the function is returned, so that the function can be timed without them.
        """
        past = self.case.past
        prepared = [mixer.prepare(self.x, past) for mixer in self.mixers]

        def step(caches: Sequence[LayerCache]) -> None:
            for mixer, inputs, cache in zip(self.mixers, prepared, caches):
                mixer.core(inputs, cache, past)

        return step


class AllocatorState(ctypes.Structure):
    """Result of mallinfo2(3) of the GNU C library, which counts the memory that malloc has in use.

    It has ten numbers, in the order of the manual page.
    """

    _fields_ = (("values", ctypes.c_size_t * 10),)


def allocator_bytes(machine: Machine) -> int:
    """Return the bytes that torch tensors of this process use, by the memory allocator's count.

    On a GPU this is torch's allocator, otherwise the allocator of the GNU C library. The growth
    between two calls is compared with the predicted cache size. The result is 0 if torch uses
    another allocator on the CPU, because its bytes are unknown.

    Args:
        machine: The machine to measure on.
    """
    if machine.cuda:
        return torch.cuda.memory_allocated(machine.device)
    if "mimalloc" in torch.__config__.show().lower():
        return 0
    gc.collect()  # so that no garbage is freed between two calls
    try:
        mallinfo = ctypes.CDLL(None).mallinfo2
    except (OSError, AttributeError, TypeError):
        return 0
    mallinfo.restype = AllocatorState
    values = mallinfo().values
    mapped_bytes, heap_bytes = values[4], values[7]
    return int(mapped_bytes + heap_bytes)
