"""What to measure when little is said: shapes, lengths and dtype by device, and the checks of what is said."""

from collections.abc import Sequence

import msgspec
import torch

from kvcalc.errors import UserError, nearest
from kvcalc.measure.cache import DTYPES
from kvcalc.measure.device import Machine
from kvcalc.measure.layers import build_mixer
from kvcalc.measure.layers.decoder import Decoder
from kvcalc.measure.layers.kernels import KERNELS
from kvcalc.measure.run import MeasureSettings, all_cases
from kvcalc.measure.stack import Case
from kvcalc.measure.variants import NAMES, base_of, named, stacks_of, standard_model, whole
from kvcalc.model.spec import Model

PHASES = ("decode", "prefill")
MOST_CASES, MOST_SECONDS = 2000, 600
# Heads of the standard layer, batch sizes, contexts and seconds by device: on a CPU all variants in a minute or two.
HEADS = {"cpu": 16, "cuda": 32}
BATCHES = {"cpu": {"decode": [4], "prefill": [1]}, "cuda": {"decode": [1, 16, 64, 256], "prefill": [1]}}
CONTEXTS = {
    "cpu": {"decode": [8192], "prefill": [256]},
    "cuda": {"decode": [1 << 10, 8 << 10, 32 << 10, 128 << 10], "prefill": [1 << 10, 4 << 10, 16 << 10]},
}
SECONDS = {"cpu": 0.4, "cuda": 0.2}


def settings(
    machine: Machine, dtype: str, kernel: str, cache: str, block_size: int, seconds: float, graphs: bool
) -> MeasureSettings:
    """How to measure. Raises UserError on a dtype, kernel or cache that there is not, or not on this device."""
    from kvcalc.storage.dtypes import canonical

    chosen = canonical(dtype)
    if chosen == "auto":
        chosen = "bf16" if machine.cuda else "fp32"
    if chosen not in DTYPES:
        raise UserError(f"`measure` does not compute in {dtype!r}", hint=f"It does in {', '.join(DTYPES)}")
    if kernel not in KERNELS:
        raise UserError(f"unknown kernel {kernel!r}", hint=nearest(kernel, KERNELS))
    if kernel == "flex" and not machine.cuda:
        raise UserError("kernel flex compiles for CUDA, and this is a CPU", hint="Use sdpa or plain")
    if cache not in ("contiguous", "paged"):
        raise UserError(f"unknown cache {cache!r}", hint="Known: contiguous, paged")
    if not 0 <= seconds <= MOST_SECONDS:
        raise UserError(f"seconds {seconds} is outside 0 to {MOST_SECONDS}")
    if cache == "paged" and not 1 <= block_size <= 1 << 20:
        raise UserError(f"block-size {block_size} is outside 1 to 2^20")
    block = block_size if cache == "paged" else 0
    return MeasureSettings(chosen, kernel, block, seconds or SECONDS[machine.device.type], graphs)


def stacks(model: Model | None, variants: Sequence[str], machine: Machine) -> dict[str, Model]:
    """Variant → the stack of layers to measure: of a model's own kinds, or of it (or a standard layer) with others put in."""
    names = _names(variants)
    if model is not None and not names:
        return stacks_of(model)
    base = base_of(model) if model is not None else standard_model(HEADS[machine.device.type])
    return {name: named(base, name) for name in names or NAMES}


def planned(
    chosen: dict[str, Model], phase: str, machine: Machine, contexts: list[int], prefill_contexts: list[int], batches: list[int]
) -> list[Case]:
    """The cases; empty lists take the device's defaults. Raises UserError on an unknown phase or far too many cases."""
    if phase not in (*PHASES, "both"):
        raise UserError(f"unknown phase {phase!r}", hint="Known: decode, prefill, both")
    kind = machine.device.type
    lengths = {p: contexts or CONTEXTS[kind][p] for p in PHASES}
    lengths["prefill"] = prefill_contexts or lengths["prefill"]
    sizes = {p: batches or BATCHES[kind][p] for p in PHASES}
    found = all_cases(chosen, PHASES if phase == "both" else (phase,), sizes, lengths)
    if len(found) > MOST_CASES:
        raise UserError(f"{len(found):,} cases are more than the {MOST_CASES:,} that are measured at once")
    _check_layers(chosen)
    return found


def _check_layers(chosen: dict[str, Model]) -> None:
    """Raises UserError where a layer has no torch twin, before anything is measured; weights are made one wide for it."""
    with torch.device("meta"):
        for model in chosen.values():
            for layer in model.kinds.values():
                if len(layer.mixers) != 1:
                    raise UserError(f"`measure` has no layer with {len(layer.mixers)} mixers, as {model.name} has")
                build_mixer(layer.mixers[0], model.hidden_size, not model.position_embeddings, layer.shares_cache)


def ceiling_dtypes(dtype: str, every: bool) -> list[str]:
    """The dtypes whose products are measured: the one in use first, fp32 for vector work, and all for a preset."""
    return list(dict.fromkeys((dtype, "fp32", *(DTYPES if every else ()))))


def decoders(model: Model | None, variants: Sequence[str]) -> dict[str, Model]:
    """Variant → the decoder to generate with: the model named, else GPT-2 small, as it is or with other attention.

    Raises UserError for an unknown form, and for layers that have no torch twin.
    """
    from kvcalc.library.load import load_model

    base = msgspec.structs.replace(model or load_model("gpt2"), quantization=(), kv_cache_dtype=None)
    chosen = {name: whole(base, name) for name in _names(variants)} or {"": base}
    with torch.device("meta"):
        for decoder in chosen.values():
            Decoder(decoder)
    return chosen


def _names(variants: Sequence[str]) -> list[str]:
    return [name.strip() for text in variants for name in text.split(",")]
