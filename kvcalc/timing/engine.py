"""What an engine adds to the kernels of a pass, how it fills its passes, and what its front end adds: presets/engines/*.yaml.

Host work hardly depends on the GPU, so that the terms are the engine's, not a calibration's: fitted once to measured servers,
they hold for every GPU whose kernels are known.
"""

import math
from functools import cache
from pathlib import Path
from typing import Annotated

import msgspec

from kvcalc.library import catalog
from kvcalc.library.files import read_text
from kvcalc.library.yaml_text import parse_yaml

MOST_BYTES = 1 << 16
Us = Annotated[float, msgspec.Meta(ge=0, le=1e6)]


class Terms(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Of a pass beside its kernels, µs. glue_us: each layer (launches, small kernels, gaps). skew_us: each layer and doubling of
    the ranks that it reduces over, which wait for the slowest. step_us: each pass. sequence_us: each sequence in it
    (scheduling, sampling, detokenising, sending). prompts: times that kernels take in passes with prompts, at sustained power.
    launch_us: each layer of a pass with prompts, at the least: the host launches its kernels one by one, without a graph.
    """

    glue_us: Us = 0.0
    skew_us: Us = 0.0
    step_us: Us = 0.0
    sequence_us: Us = 0.0
    prompts: Annotated[float, msgspec.Meta(ge=1, le=10)] = 1.0
    launch_us: Us = 0.0

    def fixed_s(self, layers: int, ranks: int) -> float:
        """Seconds of a pass whatever its batch."""
        return (layers * (self.glue_us + self.skew_us * math.log2(ranks)) + self.step_us) / 1e6


class Former(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The terms of releases before a change of the engine's host loop; versions: how theirs begin."""

    versions: tuple[str, ...]
    dense: Terms
    mixture: Terms


class Engine(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """An engine beside its kernels: terms of dense models and of mixtures of experts, and how passes are filled.

    decodes_wait, whole, reserve: as `serving.scheduling.Scheduling` says. max_num_batched_tokens: of a pass, 0 by GPU.
    path_us, path_token_us: what a front end and the network add to a first token, and to it for each token of the prompt.
    runs: measured servers that the terms were fitted to.
    """

    stack: str
    dense: Terms
    mixture: Terms
    origin: str = ""
    runs: int = 0
    decodes_wait: bool = False
    whole: bool = False
    reserve: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.0
    path_us: Us = 0.0
    path_token_us: Us = 0.0
    former: Former | None = None

    def terms(self, mixture: bool) -> Terms:
        """Those of such a model."""
        return self.mixture if mixture else self.dense

    def of_version(self, version: str) -> "Engine":
        """The engine as it was in this release; as it is now where the release is not known to be older."""
        if self.former and version and version.startswith(self.former.versions):
            return msgspec.structs.replace(self, dense=self.former.dense, mixture=self.former.mixture)
        return self


def engine_of(stack: str) -> Engine | None:
    """The engine behind a stack; None where none is known. Raises UserError on a broken file."""
    path = catalog.preset_file(stack, "engines")
    return _read(path, path.stat().st_mtime_ns) if path else None


@cache
def _read(path: Path, changed: int) -> Engine:
    data, lines = parse_yaml(read_text(path, MOST_BYTES), str(path))
    return catalog.build(data, Engine, str(path), lines)
