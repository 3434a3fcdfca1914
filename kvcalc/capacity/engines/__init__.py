"""The engines, one file each. docs/reference/engine-*.md has the rules and their sources.

A new engine is a file that ends with its `Engine`, and one line here.
"""

from kvcalc.capacity.engines.content import NONE as NONE
from kvcalc.capacity.engines.engine import Engine as Engine
from kvcalc.capacity.engines.engine import EngineSettings as EngineSettings
from kvcalc.capacity.engines.layout import BlockDemand as BlockDemand
from kvcalc.capacity.engines.layout import CacheLayout as CacheLayout
from kvcalc.capacity.engines.llama_cpp import LLAMA_CPP as LLAMA_CPP
from kvcalc.capacity.engines.sglang import SGLANG as SGLANG
from kvcalc.capacity.engines.trtllm import TRTLLM as TRTLLM
from kvcalc.capacity.engines.vllm import VLLM as VLLM

ENGINES: dict[str, Engine] = {e.name: e for e in list(vars().values()) if isinstance(e, Engine)}
