"""How far back a token sees: through L layers of window w at most L·w tokens, since each layer hands on what it saw.

Source: Jiang et al. 2023, arXiv 2310.06825 §2 (Mistral 7B: 32 layers of window 4096 reach 131,072 tokens).
"""

from kvcalc.model.spec import Model


def windows(model: Model) -> dict[int, int]:
    """How many layers see back so many tokens, the token itself included; 0 for those that nothing limits."""
    found: dict[int, int] = {}
    for kind, count in model.counts.items():
        sights = [part.window_tokens for part in model.kinds[kind].mixers]
        if sights and count:
            sight = 0 if 0 in sights else max(sights)
            found[sight] = found.get(sight, 0) + count
    return found


def receptive_field(model: Model) -> int | None:
    """L·w, summed over the layers: tokens that can bear on an output; None where a layer sees, or its state holds, all."""
    found = windows(model)
    return None if not found or 0 in found else sum(count * window for window, count in found.items())


def reach_line(model: Model) -> str:
    """The receptive field as a sum, in a sentence; '' for a model without windows."""
    found = windows(model)
    limited = {window: count for window, count in sorted(found.items()) if window}
    if not limited:
        return ""
    product = " + ".join(f"{count:,} × {window:,}" for window, count in limited.items())
    if 0 in found:
        return f"receptive field: without limit, layers without a window: {found[0]:,}; windows: {product} tokens"
    exact = 1 + sum(count * (window - 1) for window, count in limited.items())
    total = sum(count * window for window, count in limited.items())
    return f"receptive field L·w: {product} = {total:,} tokens ({exact:,} where each window counts the token itself once)"
