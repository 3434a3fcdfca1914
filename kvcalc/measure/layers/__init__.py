"""Torch layers with the fields, weights and cache entries of `kvcalc.layers`."""

from kvcalc.errors import UserError
from kvcalc.layers.attention import Grouped, Latent, Sparse
from kvcalc.layers.part import Sublayer
from kvcalc.layers.recurrent import GatedDeltaNet
from kvcalc.measure.layers.base_layer import Mixer
from kvcalc.measure.layers.grouped_layer import GatedDeltaNetLayer, GroupedLayer
from kvcalc.measure.layers.latent_layer import LatentLayer, SparseLayer

MIXERS = {
    Grouped: GroupedLayer,
    Latent: LatentLayer,
    Sparse: SparseLayer,
    GatedDeltaNet: GatedDeltaNetLayer,
}


def build_mixer(
    spec: Sublayer, hidden_size: int, rotates: bool = True, shares_cache: bool = False
) -> Mixer:
    """Return a torch module with random weights for the attention or recurrence of a layer.

    Args:
        spec: Specification of the attention or recurrence, from `kvcalc.layers`.
        hidden_size: Width of the layer's input and output.
        rotates: Whether the layer applies rotary positions (RoPE).
        shares_cache: Whether the layer reads the cache of the layer before it, and so has no keys
            and values of its own. Only grouped attention without a window supports this.

    Raises:
        UserError: No torch module supports this type of layer or one of its fields.
    """
    layer_class = MIXERS.get(type(spec))
    stores_cache = spec.storing(own=True) == spec
    if shares_cache and (not isinstance(spec, Grouped) or spec.sliding_window):
        layer_class = None
    if layer_class is None or shares_cache == stores_cache:
        name = spec.label or type(spec).__name__
        sharing = " that shares a cache in this way" if shares_cache or not stores_cache else ""
        raise UserError(
            f"`measure` has no {name} layer{sharing}",
            "It has grouped, latent, sparse and gated_delta_net",
        )
    return layer_class(spec, hidden_size, rotates, shares_cache)
