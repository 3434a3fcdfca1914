"""Torch layers of the specs, with the same fields, weights and cache entries."""

from kvcalc.errors import UserError
from kvcalc.layers.attention import Grouped, Latent, Sparse
from kvcalc.layers.ffn import Dense
from kvcalc.layers.part import Part
from kvcalc.layers.recurrent import GatedDeltaNet
from kvcalc.measure.layers.base_layer import FeedForwardLayer, Mixer
from kvcalc.measure.layers.delta_layer import GatedDeltaNetLayer
from kvcalc.measure.layers.grouped_layer import GroupedLayer, SharedLayer
from kvcalc.measure.layers.latent_layer import LatentLayer, SparseLayer

MIXERS: dict[type[Part], type[Mixer]] = {
    Grouped: GroupedLayer,
    Latent: LatentLayer,
    Sparse: SparseLayer,
    GatedDeltaNet: GatedDeltaNetLayer,
}


def build_mixer(spec: Part, hidden_size: int, rotates: bool = True, shares_cache: bool = False) -> Mixer:
    """Return the torch layer of a mixer. Raises UserError if there is none for its fields."""
    found = MIXERS.get(type(spec))
    projects = spec.storing(own=True) == spec
    if found is None or (shares_cache and not isinstance(spec, Grouped)) or shares_cache == projects:
        name = spec.label or type(spec).__name__
        sharing = " that shares a cache in this way" if shares_cache or not projects else ""
        raise UserError(f"`measure` has no {name} layer{sharing}", hint="It has grouped, latent, sparse and gated_delta_net")
    chosen = SharedLayer if shares_cache else found
    return chosen(spec, hidden_size, rotates)


def is_fused(spec: Part) -> bool:
    """Return whether torch has a fused kernel for the core of this mixer."""
    return MIXERS.get(type(spec), Mixer).fused


def build_feed_forward(spec: Part, hidden_size: int) -> FeedForwardLayer:
    """Return the torch layer of an FFN. Raises UserError if there is none."""
    if not isinstance(spec, Dense) or spec.input_size:
        raise UserError(f"`measure` has no {type(spec).__name__} layer", hint="It has dense feed-forward networks")
    return FeedForwardLayer(spec, hidden_size)
