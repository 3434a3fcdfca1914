"""Receptive field of windows: L layers of window w reach at most L·w tokens.

Source: Jiang et al. 2023, arXiv 2310.06825, section 2 (Mistral 7B: 32 layers of window 4096 reach 131,072
tokens).
"""

from kvcalc.model.spec import Model


def windows(model: Model) -> dict[int, int]:
    """Return the number of layers by window size; 0 means no window."""
    found: dict[int, int] = {}
    for kind, count in model.counts.items():
        sights = [part.window_tokens for part in model.kinds[kind].mixers]
        if sights and count:
            sight = 0 if 0 in sights else max(sights)
            found[sight] = found.get(sight, 0) + count
    return found


def receptive_field(model: Model) -> int | None:
    """Return the sum of windows over all layers in tokens, or None if a layer sees all tokens."""
    found = windows(model)
    return None if not found or 0 in found else sum(count * window for window, count in found.items())


def reach_line(model: Model) -> str:
    """Return a sentence with the receptive field as a sum, or '' for a model without windows."""
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
