"""Name the layer kinds of a config, and group their order into runs."""

from kvcalc.layers.attention import Grouped, Sparse
from kvcalc.layers.ffn import Dense, Moe
from kvcalc.model.spec import Layer


def kind_names(kinds: list[Layer]) -> list[str]:
    """Return a name for each kind from its distinguishing parts: mixer, FFN, both, or a number."""
    mixers = [_mixer_word(layer) for layer in kinds]
    networks = ["_".join(str(p.__struct_config__.tag) for p in layer.parts if isinstance(p, Dense | Moe)) for layer in kinds]
    names: list[str] = []
    used: dict[str, int] = {}
    for layer, mixer, network in zip(kinds, mixers, networks, strict=True):
        words = [mixer] if len(set(mixers)) > 1 or len(set(networks)) == 1 else []
        words += [network] if len(set(networks)) > 1 else []
        base = "_".join(filter(None, [*words, "shared" if layer.shares_cache else ""])) or "layer"
        used[base] = used.get(base, 0) + 1
        names.append(base if used[base] == 1 else f"{base}_{used[base]}")
    return names


def _mixer_word(layer: Layer) -> str:
    words = []
    for part in layer.mixers:
        word = str(part.__struct_config__.tag)
        if isinstance(part, Grouped):
            word = "local" if part.sliding_window else "chunked" if part.attention_chunk_size else "full"
        words.append("sparse_reuse" if isinstance(part, Sparse) and not part.indexer else word)
    return "_".join(dict.fromkeys(words))


def runs(order: list[str]) -> tuple[str, ...]:
    """Return the order as runs: `5 local` for five in a row, as the shortest period if it repeats.

    The last repetition may be incomplete.
    """
    found: list[tuple[int, str]] = []
    for kind in order[: _period(order)]:
        if found and found[-1][1] == kind:
            found[-1] = (found[-1][0] + 1, kind)
        else:
            found.append((1, kind))
    return tuple(f"{count} {kind}" if count > 1 else kind for count, kind in found)


def _period(order: list[str]) -> int:
    """Return the smallest p with order[i] = order[i − p] for all i ≥ p.

    This is the length minus the length of the longest border.
    """
    border = [0] * len(order)
    for i in range(1, len(order)):
        n = border[i - 1]
        while n and order[i] != order[n]:
            n = border[n - 1]
        border[i] = n + (order[i] == order[n])
    return len(order) - border[-1]
