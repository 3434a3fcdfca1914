"""What the mixers that torch has no fused kernel for run in a pass: counted from shapes alone, on torch's device `meta`."""

from collections import Counter

import torch

from kvcalc.layers.batch import Batch
from kvcalc.measure.cache import DTYPES, LayerCache
from kvcalc.measure.layers import build_mixer, is_fused
from kvcalc.measure.layers.base import Mixer
from kvcalc.measure.traffic import Plain, plain_of
from kvcalc.model.spec import Model


class Scans:
    """The plain mixers of a model, without weights. Their states are of one size, so a pass is told by its new tokens."""

    def __init__(self, model: Model, dtype: str) -> None:
        self.width, self.dtype = model.hidden_size, DTYPES[dtype]
        self.mixers: list[tuple[int, Mixer]] = []
        self.found: dict[tuple[int, int], tuple[tuple[int, Plain], ...]] = {}
        for kind, layers in Counter(model.order).items():
            for part in model.kinds[kind].mixers:
                if not is_fused(part):
                    with torch.device("meta"):
                        self.mixers.append((layers, build_mixer(part, model.hidden_size).to(self.dtype)))

    def of(self, batch: Batch, cached: bool) -> tuple[tuple[int, Plain], ...]:
        """(layers, what each of them runs in a pass of one group) of every kind, with the states of a cache or without."""
        sequences, new = int(batch.groups[0].count), int(batch.groups[0].new)
        if (new, cached) not in self.found:
            self.found[new, cached] = tuple((layers, self._run(mixer, sequences, new, cached)) for layers, mixer in self.mixers)
        return self.found[new, cached]

    def _run(self, mixer: Mixer, sequences: int, new: int, cached: bool) -> Plain:
        x = torch.empty(sequences, new, self.width, dtype=self.dtype, device="meta")
        cache = LayerCache(mixer.entries, sequences, new, self.dtype, "meta") if cached else None
        return plain_of(lambda: mixer(x, cache, 0))
