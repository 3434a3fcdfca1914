"""What an entry of the type table says."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from kvcalc.library.huggingface.config import Config
from kvcalc.library.huggingface.fields import Field, Reader, value_of
from kvcalc.library.huggingface.patterns import Order, typed
from kvcalc.library.huggingface.shapes import nothing
from kvcalc.library.huggingface.source import facts


class Type(NamedTuple):
    """One model type: the readers of a layer's parts, the order of layer types, and what stands around the layers.

    mixer, ffn: the parts of a layer, in order. norms: of the layer itself. norm: which kind. layer: further fields of
    `Layer`, looked up for each layer. model: fields of `Model` that differ from the standard ones. depth: how many
    layers there are where no key says so. layers_key: the key that says so (a decoder's own, beside an encoder's), ''
    where `depth` alone does. mtp: whether layers of multi-token prediction are like the last one; else they are left out.
    """

    mixer: Reader
    ffn: Reader = nothing
    order: Order = typed()
    norms: Field = 2
    norm: Field = "rms"
    layer: dict[str, Field] = {}
    model: dict[str, Field] = {}
    depth: Field = None
    layers_key: str = "num_hidden_layers"
    defaults: Mapping[str, Any] = {}
    spellings: Mapping[str, tuple[str, ...]] = {}
    inert: tuple[str, ...] = ()
    mtp: bool = True

    def variant(self, layer: dict[str, Field] | None = None, model: dict[str, Field] | None = None, **changes: Field) -> "Type":
        """This entry with fields replaced, and `layer` and `model` extended."""
        changed = self._replace(**changes)
        return changed._replace(layer=changed.layer | (layer or {}), model=changed.model | (model or {}))

    def layer_fields(self, c: Config) -> dict[str, Field]:
        """The fields of the current layer beside its parts."""
        found = {name: value_of(field, c) for name, field in self.layer.items()}
        return {"norms": value_of(self.norms, c)} | {name: value for name, value in found.items() if value is not None}


def outer_tie(default: bool = False) -> dict[str, Field]:
    """Text parts without an LM head of their own: the file says whether the head is tied; or either, as some classes ask."""

    def tied(c: Config) -> bool:
        whole = c.outer_flag("tie_word_embeddings", default)
        return whole or (facts().get(str(c.outer.get("model_type")), {}).get("either", False) and c.flag("tie_word_embeddings"))

    return {"tie_word_embeddings": tied}
