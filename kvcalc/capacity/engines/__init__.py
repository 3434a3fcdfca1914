"""The engines, one file each. docs/reference/engine-*.md has the rules and their sources.

A new engine is a file that ends with its `Engine`, and one line here.
"""

from functools import partial

from kvcalc.capacity.engines.engine import Engine
from kvcalc.capacity.engines.layout import content_of
from kvcalc.capacity.engines.llama_cpp import LLAMA_CPP
from kvcalc.capacity.engines.sglang import SGLANG
from kvcalc.capacity.engines.trtllm import TRTLLM
from kvcalc.capacity.engines.vllm import VLLM
from kvcalc.capacity.engines.vllm_versions import LATEST, defaults

NONE = Engine(  # only the bytes of the content, the minimum of every engine
    name="none",
    title="engine none",
    plan=lambda layers, ranks, settings: partial(content_of, layers, ranks),
    defaults=lambda gpu, ranks, release, tokens, model: defaults(
        gpu, ranks, LATEST, tokens, model
    )._replace(sequences=1),
    spreads_context=True,
    smaller_weights=("fp8", "int4"),
)
ENGINES = {e.name: e for e in (NONE, LLAMA_CPP, SGLANG, TRTLLM, VLLM)}
