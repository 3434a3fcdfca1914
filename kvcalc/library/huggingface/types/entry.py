"""What an entry of the type table says."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from kvcalc.library.huggingface.config import Config, Field, Reader, filled
from kvcalc.library.huggingface.layer_types import Order, typed
from kvcalc.library.huggingface.shapes import DENSE, GROUPED
from kvcalc.library.huggingface.source import facts


class Type(NamedTuple):
    """One model type: readers of a layer's parts, the order of layer types, and the other parts.

    Attributes:
        mixer: Reader of a layer's first parts.
        ffn: Reader of its last parts.
        order: Type of each layer.
        norms: Norms of a layer outside its parts.
        norm: Kind of the norms.
        layer: Further fields of each `Layer`.
        model: Fields of `Model` that differ from the standard ones.
        depth: Number of layers if no key gives it.
        layers_key: Key of the number of layers; '' if only `depth` gives it.
        defaults: Values of keys that the file does not have.
        spellings: Other names of a key.
        inert: Keys that change no size, separated by spaces.
        mtp: Whether layers of multi-token prediction are like the last one. Else they are left out.
    """

    mixer: Reader = GROUPED
    ffn: Reader = DENSE
    order: Order = typed()
    norms: Field = 2
    norm: Field = "rms"
    layer: dict[str, Field] = {}
    model: dict[str, Field] = {}
    depth: Field = None
    layers_key: str = "num_hidden_layers"
    defaults: Mapping[str, Any] = {}
    spellings: Mapping[str, tuple[str, ...]] = {}
    inert: str = ""
    mtp: bool = True

    def variant(
        self,
        layer: dict[str, Field] | None = None,
        model: dict[str, Field] | None = None,
        **changes: Field,
    ) -> "Type":
        """Return this entry with fields replaced, and `layer` and `model` extended."""
        return self._replace(
            layer=self.layer | (layer or {}),
            model=self.model | (model or {}),
            **changes,
        )

    def layer_fields(self, c: Config) -> dict[str, Field]:
        """Return the fields of the current layer except its parts."""
        return filled({"norms": self.norms} | self.layer, c)


def outer_tie(default: bool = False) -> dict[str, Field]:
    """Return the rule of text parts without an LM head: the whole file says whether it is tied.

    Some classes tie the head if either says so.
    """

    def tied(c: Config) -> bool:
        whole = c.outer_flag("tie_word_embeddings", default)
        return whole or (
            facts().get(str(c.outer.get("model_type")), {}).get("either", False)
            and c.flag("tie_word_embeddings")
        )

    return {"tie_word_embeddings": tied}
