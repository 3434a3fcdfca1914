"""What fewer bits cost in quality: a published measurement for each, or that none is noted here."""

_TRADE_OFFS = "Kurtic et al., arXiv 2411.02355, abstract: Llama-3.1 of all sizes"
_CACHE = "vLLM's report on fp8 caches, vllm.ai/blog/fp8-kvcache, 2026"
# By what is stored and its format. The first was read as its abstract, the second as a copy of the page, on 2026-11-22.
LOSSES = {
    ("weights", "fp8"): f"effectively lossless ({_TRADE_OFFS})",
    ("weights", "int8"): f"1–3 % lower accuracy ({_TRADE_OFFS})",
    ("weights", "int4"): f"int4 weights rival 8-bit ones ({_TRADE_OFFS})",
    ("cache", "fp8"): f"near the bf16 cache's accuracy on the models tried there ({_CACHE})",
}
UNKNOWN = "no published measurement of its cost is noted here"
_ALIKE = {"awq": "int4", "gptq": "int4", "int4_group32": "int4", "fp8_block128": "fp8", "fp8_per_channel": "fp8"}


def loss_of(stored: str, format_: str) -> str:
    """What is known of storing the `weights` or the `cache` in a format, with its source."""
    return LOSSES.get((stored, _ALIKE.get(format_, format_)), UNKNOWN)
