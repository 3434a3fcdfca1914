"""Measured rows that are known to be no speed of their kernel, so that no law is kept of them whatever it reaches."""

# (GPU, stack, family): why. The rows' origin says so, and the rows themselves.
KNOWN = {
    ("a100-80gb", "trtllm", "decode_attention"): "rows of TensorRT-LLM 1.0.0 read caches far beyond the L2 at up to 170 % of "
    "the memory's bandwidth",
}


def known_reason(gpu: str, stack: str, family: str) -> str:
    """Why rows of a family are not to be trusted; '' where nothing is known against them."""
    return KNOWN.get((gpu, stack, family), "")
