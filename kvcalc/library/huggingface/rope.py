"""How many numbers a file's scaling of rotary positions adds, which an engine stores and no one counts as parameters."""

from kvcalc.library.huggingface.config import Config
from kvcalc.library.huggingface.shapes import head_dim


def rope_factors(c: Config) -> int:
    """Of llama3's scaling one for each pair of a head's channels, of longrope's two lists as many as they have; else 0.

    Source: llama.cpp's conversion/llama.py and conversion/phi.py (`generate_extra_tensors`).
    """
    scaling = next((found for key in ("rope_scaling", "rope_parameters") if isinstance(found := c.file.get(key), dict)), {})
    kind = scaling.get("rope_type", scaling.get("type"))
    if kind == "llama3":
        return head_dim(c) // 2
    lists = [scaling.get(key) for key in ("long_factor", "short_factor")] if kind in ("longrope", "su") else []
    return sum(len(found) for found in lists if isinstance(found, list))
