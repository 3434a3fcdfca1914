"""The engines, one file each. docs/reference/engine-*.md has the rules and their sources.

A new engine is a file that ends with its `Engine`, and one line here.
"""

from collections.abc import Sequence

from kvcalc.capacity.engines.engine import Engine, EngineSettings, stage_by_stage
from kvcalc.capacity.engines.layout import CacheLayout, LayerCache, content_of
from kvcalc.capacity.engines.llama_cpp import LLAMA_CPP
from kvcalc.capacity.engines.sglang import SGLANG
from kvcalc.capacity.engines.trtllm import TRTLLM
from kvcalc.capacity.engines.vllm import VLLM
from kvcalc.capacity.engines.vllm_versions import LATEST, defaults
from kvcalc.layers.batch import Parallelism


def _plan(
    layers: Sequence[LayerCache], ranks: Parallelism, settings: EngineSettings, stage: int
) -> CacheLayout:
    return content_of(layers, ranks, stage)


NONE = Engine(  # only the bytes of the content, the minimum of every engine
    name="none",
    title="engine none",
    plan=stage_by_stage(_plan),
    defaults=lambda gpu, ranks, release, tokens, model: defaults(
        gpu, ranks, LATEST, tokens, model
    )._replace(sequences=1),
    spreads_context=True,
    smaller_weights=("fp8", "int4"),
)
ENGINES: dict[str, Engine] = {e.name: e for e in (NONE, LLAMA_CPP, SGLANG, TRTLLM, VLLM)}
