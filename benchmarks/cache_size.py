"""How long one cache size and one preset take: `cache_size` of a 61-layer model under 50 µs, a preset load under 2 ms.

The least of several repeats is taken: on a shared machine everything else only adds. Exit status 1 above a target.

    python benchmarks/cache_size.py
"""

import sys
import timeit
from collections.abc import Callable

from kvcalc import cache_size, load_gpu, load_model

PRESETS = ("llama-3.1-8b", "deepseek-v3", "glm-5.2")


def least_seconds(call: Callable[[], object], number: int) -> float:
    """Seconds of one call, the best of nine repeats."""
    return min(timeit.repeat(call, number=number, repeat=9)) / number


def main() -> int:
    late = False
    for name in ("deepseek-v3", "deepseek-v3.2"):
        model = load_model(name)
        spent = least_seconds(lambda model=model: cache_size(model, 131_072, 8), 2000) * 1e6
        late |= spent > 50
        print(f"cache_size({name}, {model.layers} layers): {spent:.1f} µs, target 50")
    for label, load, names in (("load_model", load_model, PRESETS), ("load_gpu", load_gpu, ("h100-sxm",))):
        for name in names:
            spent = least_seconds(lambda load=load, name=name: load(name), 50) * 1e3
            late |= spent > 2
            print(f"{label}({name}): {spent:.2f} ms, target 2")
    return int(late)


if __name__ == "__main__":
    sys.exit(main())
