"""For which experts engines ship tuned tiles: (experts of a rank, columns of one on the rank), by stack, GPU and format.

Read off the file names `E=…,N=…,device_name=…` in the engines' wheels: vllm 0.24.0, model_executor/layers/fused_moe/configs,
and sglang 0.5.14, srt/layers/moe/moe_runner/triton_utils/configs (all Triton versions: it falls back from one to another).
"""

_TUNED = {
    ("vllm", "h100-sxm", "bfloat16"): (
        "1: 3072; 8: 1792 2048 3584 4096 7168; 16: 1344 1792 2688; 32: 1792; 62: 256 512; 64: 320 640 1280 1536; 72: "
        "384 768; 128: 192 384 512 928 1856 2880; 256: 512; 512: 128 256 512 "
    ),
    ("vllm", "h100-sxm", "fp8_block"): "256: 128 384; 512: 128 256",
    ("vllm", "h200", "bfloat16"): (
        "8: 1792 2048 3584 4096 7168 14336; 16: 1024 2048; 64: 320 640 1280 2560; 128: 96 192 384 512 768 1024; 512: 64 "
        "128 256 512 "
    ),
    ("vllm", "h200", "fp8_block"): "8: 2048; 16: 4096; 32: 2048; 128: 384 512 768; 256: 256 512; 384: 128",
    ("sglang", "h100-sxm", "bfloat16"): (
        "1: 3072; 8: 1792 2048 3584 4096 7168; 16: 1024 1344 1856 2048 2688; 20: 2048; 24: 1024; 32: 224 448 896 928 "
        "1792 1856; 64: 192 320 384 464 640 768 928 1280 1536 1856 2688; 65: 1536; 128: 192 232 352 384 464 512 704 768 "
        "928 1344 1856 2688; 144: 512; 256: 672 1344 2688; 512: 64 128 336 672 1344 2688 "
    ),
    ("sglang", "h100-sxm", "fp8_block"): "64: 1024; 128: 384; 256: 128 384; 257: 128; 272: 128; 512: 128 256",
    ("sglang", "h200", "bfloat16"): (
        "8: 1792 2048 3584 4096 7168 14336; 16: 1024; 20: 1536; 64: 320 640 1280 2560; 128: 192 384 704 768; 129: 384; "
        "161: 192; 512: 64 128 256 "
    ),
    ("sglang", "h200", "fp8_block"): (
        "64: 512; 80: 640; 128: 384 768; 160: 640; 256: 256; 257: 128 256 512; 264: 256; 384: 128; 385: 128; 513: 512 "
    ),
}


def tuned_sizes(stack: str, gpu: str, kind: str) -> tuple[tuple[int, int], ...]:
    """(experts, columns) that have a tuned file; none for a stack, GPU or format that is not listed."""
    found = []
    for group in _TUNED.get((stack, gpu, kind), "").split(";"):
        experts, _, columns = group.partition(":")
        found += [(int(experts), int(width)) for width in columns.split()]
    return tuple(found)
