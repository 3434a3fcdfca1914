"""Measured rows that are known to be no speed of their kernel, so that no law is kept of them whatever it reaches."""

# (GPU, stack, family): why. The rows' origin says so, and the rows themselves.
KNOWN = {
    ("a100-80gb", "trtllm", "decode_attention"): "rows of TensorRT-LLM 1.0.0 read caches far beyond the L2 at up to 170 % of "
    "the memory's bandwidth",
}


# Kernels that stacks fall back to where a GPU has none of its own for latent attention: what is said beside a law that fails.
FALLBACKS = {("a100-80gb", "mla_decode"), ("a100-80gb", "mla_prefill"), ("l40s", "mla_decode"), ("l40s", "mla_prefill"),
             ("rtx-pro-6000-blackwell", "mla_decode"), ("rtx-pro-6000-blackwell", "mla_prefill")}  # fmt: skip
BUSES = ("l40s", "rtx-pro-6000-blackwell")  # GPUs that all-reduce over PCIe, by way of the host's switches and memory


def cause(gpu: str, family: str) -> str:
    """What probably keeps a family's law from its rows; '' where nothing is known."""
    if (gpu, family) in FALLBACKS:
        return "presumably a fallback kernel: the GPU has none of its own for latent attention"
    return "all-reduces cross PCIe, whose rate depends on the host" if family == "allreduce" and gpu in BUSES else ""


def known_reason(gpu: str, stack: str, family: str) -> str:
    """Why rows of a family are not to be trusted; '' where nothing is known against them."""
    return KNOWN.get((gpu, stack, family), "")
