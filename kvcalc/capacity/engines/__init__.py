"""What engines allocate for the cache, one file an engine. See docs/engines.md for the rules and their sources."""

from kvcalc.capacity.engines import content, llama_cpp, sglang, vllm
from kvcalc.capacity.engines.plan import EngineSettings, Held, Plan, Planner, Term

PLANNERS: dict[str, Planner] = {
    "none": content.plan,
    "vllm": vllm.plan,
    "sglang": sglang.plan,
    "llama.cpp": llama_cpp.plan,
}

__all__ = ["PLANNERS", "EngineSettings", "Held", "Plan", "Planner", "Term"]
