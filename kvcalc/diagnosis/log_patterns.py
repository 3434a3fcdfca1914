r"""Patterns of the lines in start-up logs, by engine.

`<name>` stands for a number, and `<device>` for a device of llama.cpp. Figures are in GiB, although
SGLang writes GB, and in MiB for llama.cpp. An empty group names a state of the start. The text of a
pattern before its first special character, or after `<device> `, identifies its lines.

Example: `Model loading took <weights> Gi?B` reads 61.03 GiB of weights from "Model loading took
61.03 GiB and 30.0 seconds".

Sources: vLLM from 0.6 on: `engine/llm_engine.py`, `worker/worker.py` and
`executor/executor_base.py` of V0; `v1/engine/core.py`, `v1/worker/gpu_worker.py`,
`v1/worker/gpu_model_runner.py` and `v1/core/kv_cache_utils.py` of V1. SGLang:
`model_executor/model_runner.py`, `mem_cache/memory_pool.py` and `managers/scheduler.py`. llama.cpp:
`src/llama-model-loader.cpp`, `src/llama-context.cpp`, `src/llama-kv-cache.cpp` and ggml-cuda.
"""

import re
from functools import cache
from typing import NamedTuple

NUMBER = r"-?\d[\d,]{0,14}(?:\.\d{1,12})?"
# texts in a line that identify the engine, the most certain first
ENGINE_MARKS = (
    ("vllm", "vLLM API server version"),
    ("vllm", "LLM engine (v"),
    ("vllm", "non-default args:"),
    ("sglang", "server_args=ServerArgs("),
    ("sglang", "Load weight begin. avail mem"),
    ("llama.cpp", "llama_"),
    ("llama.cpp", "ggml_cuda_init"),
    ("vllm", "Model loading took"),
    ("vllm", "Available KV cache memory"),
    ("vllm", "cache blocks"),
    ("vllm", "vllm/"),
    ("vllm", "GPU KV cache size"),
    ("vllm", "GPU memory utilization"),
)
# texts that begin a start of another engine than the one before
OTHER_STARTS = (
    *ENGINE_MARKS[:2],
    ENGINE_MARKS[3],
    ("llama.cpp", "llama_model_loader: loaded meta data"),
)
# texts of the first lines of a start; a second line of one kind begins another start
START_LINES = (
    "vLLM API server version",
    "LLM engine (v",
    "non-default args:",
    "args: Namespace(",
    "server_args=ServerArgs(",
)
# arguments that vLLM repeats in the line of its engine
CONFIG_ARGUMENTS = """
    model dtype tensor_parallel_size pipeline_parallel_size data_parallel_size quantization
    enforce_eager kv_cache_dtype max_model_len speculative_config
"""
_STARTUP_MEMORY = r"Free memory on device(?: \S+)? \(<free>/<memory> GiB\) on startup"
PATTERNS = {
    "vllm": (
        r"vLLM API server version v?(?P<version>\d+\.\d+[\w.+]*)",
        r"non-default args: (?P<arguments>\{.*)",
        r"args: Namespace\((?P<arguments>.*)",
        r"LLM engine \(v(?P<version>[\w.+]+)\) with config: (?P<config>.*)",
        r"V0 LLM engine(?P<is_v0>)",
        r"Starting to load model (?P<model>\S+?)\.\.\.",
        r"Using max model len <max_model_len>",
        r"max_num_batched_tokens=<max_num_batched_tokens>",
        r"Loading model weights took <weights> Gi?B",
        r"Model loading took <weights> Gi?B",
        # V0 from 0.7 on: one sentence, whose second half may be on its own line
        r"total_gpu_memory \(<memory>GiB\) x gpu_memory_utilization "
        r"\(<gpu_memory_utilization>\) = <share>GiB",
        r"model weights take <weights>GiB; non_torch_memory takes <libraries>GiB; PyTorch "
        r"activation peak memory takes <activations>GiB; the rest of the memory reserved for "
        r"KV Cache is <cache>GiB",
        # V0 to 0.6.6: the peak of torch includes the weights
        rf"total_gpu_memory=<memory>GiB initial_memory_usage={NUMBER}GiB "
        rf"peak_torch_memory=<torch_peak>GiB memory_usage_post_profile={NUMBER}G[iI][bB] "
        r"non_torch_memory=<libraries>GiB kv_cache_size=<cache>GiB "
        r"gpu_memory_utilization=<gpu_memory_utilization>",
        r"Available KV cache memory: <cache> GiB",
        r"reserved <cache> GiB memory for KV Cache as specified",
        r"Initial free memory:? <free> GiB",
        r"GPU KV cache size: <tokens> tokens",
        r"Overriding num_gpu_blocks.{0,80}num_gpu_blocks_override=<num_gpu_blocks_override>",
        rf"Maximum concurrency for <max_model_len> tokens per request: {NUMBER}x",
        r"Graph capturing finished in [\d.]+ secs?, took <graphs> GiB",
        rf"{_STARTUP_MEMORY}\. Desired GPU memory utilization is "
        r"\(<gpu_memory_utilization>, <share> GiB\)",
        r"Actual usage is <weights> GiB for weight",
        r"Actual usage is <consumed> GiB for consumed memory",
        r"Actual usage is .{0,200}?<activations> GiB for peak activation",
        r"Actual usage is .{0,200}?<libraries> GiB for non-torch memory",
        r"Actual usage is .{0,200}?<graphs> GiB for CUDAGraph memory",
        r"Application startup complete(?P<has_started>)",
        r"Starting vLLM (?:API )?server(?P<has_started>)",
        rf"{_STARTUP_MEMORY} is less than desired GPU memory utilization "
        r"\(<gpu_memory_utilization>, <desired_share> GiB\)(?P<occupied>)",
        r"No available memory for the cache blocks(?P<no_blocks>)",
        rf"max seq len \(<max_model_len>\), \(?{NUMBER} Gi?B KV cache is needed, which is "
        r"larger than the available KV cache memory \(<cache> Gi?B\)(?P<too_long>)",
        r"max seq len \(<max_model_len>\) is larger than the maximum number of tokens that can "
        r"be stored in KV cache(?P<too_long>)",
    ),
    "sglang": (
        r"server_args=ServerArgs\((?P<arguments>.*)",
        r"Load weight begin\. avail mem=<free> GB",
        r"Load weight end\..{0,300}mem usage=<weights> GB",
        r"KV Cache is allocated\.(?: dtype: \S+,)? #tokens: <tokens>, "
        r"(?:K size: <keys> GB, V size: <values> GB|KV size: <keys_and_values> GB)",
        r"SWAKVPool mem usage: <all_pools> GB, swa size: \d{1,12}, full size: <full_tokens>",
        r"Mamba Cache is allocated\..{0,120}conv_state size: <conv_states> ?GB, "
        r"ssm_state size: <ssm_states> ?GB",
        r"uda graph end\..{0,80}mem usage=<graphs> GB",
        r"CUDA graph end\..{0,80}mem usage=<graphs> GB",
        r"max_total_num_tokens=<tokens>(?P<has_started>)",
        r"max_total_num_tokens=.{1,400}chunked_prefill_size=<max_num_batched_tokens>",
        r"max_total_num_tokens=.{1,400}context_len=<max_model_len>",
        r"max_total_num_tokens=.{1,400}available_gpu_mem=<left> GB",
        r"Not enough memory\. Please try to increase --mem-fraction-static(?P<no_blocks>)",
    ),
    "llama.cpp": (
        r"build: (?P<version>\d{3,6}) \(",
        r"Device \d+: (?P<gpu>[^,]{3,80}), compute capability",
        r"using device \S+ \((?P<gpu>[^()]{3,80})\)(?: \([^()]{1,40}\))? - <free> MiB free",
        r"loaded meta data with .{0,80} from (?P<model>\S.{0,300}?)(?: \(version|$)",
        r"general\.name\s*= (?P<title>.{1,120})",
        r"model ftype\s*= (?P<file_type>.{1,60})",
        r"file type\s*= (?P<file_type>.{1,60})",
        r"offloaded (?P<offloaded>\d{1,12}/\d{1,12}) layers to GPU",
        r"<device> model buffer size =\s*<weights> MiB",
        r"<device> KV buffer size =\s*<cache> MiB",
        r"<device> RS buffer size =\s*<cache> MiB",
        r"<device> compute buffer size =\s*<activations> MiB",
        r"MiB \(\s*(?P<stream_cells>\d{1,12}) cells,\s*\d{1,12} layers"
        r"(?:,\s*\d{1,9}(?:/(?P<streams>\d{1,9}))? seqs)?\), "
        r"K \((?P<cache_type_k>\w+)\):.{0,40}V \((?P<cache_type_v>\w+)\)",
        r"n_seq_max\s*= <max_num_seqs>",
        r"n_ctx\s*= <cells>",
        r"n_ubatch\s*= <max_num_batched_tokens>",
        r"kv_unified\s*= (?P<kv_unified>true|false)",
        rf"allocating {NUMBER} MiB on device \d+: cudaMalloc failed(?P<out_of_memory>)",
        r"failed to (?:allocate|initialize).{0,60}kv cache(?P<no_blocks>)",
        r"unable to allocate \S+ buffer(?P<weights_failed>)",
        r"failed to allocate compute (?:pp )?buffers(?P<out_of_memory>)",
    ),
}
_TORCH = r"out of memory\. Tried to allocate (?P<out_of_memory>)"
_TORCH_CAPACITY = r"out of memory\. Tried to allocate .{0,80} total capacity of <capacity> GiB"
_GPU_WORDS = (
    r"PRO|Super|SUPER|Ti|[A-Z]?\d[\w.-]{0,15}|NVL|PCIe|HBM3e?|Blackwell|Server|Workstation|"
    r"Edition|Ada|Generation|Max-Q"
)
GPU_NAME = re.compile(
    r"NVIDIA[ _](?:GeForce[ _]|Tesla[ _]|TITAN[ _])?[A-Z][\w.-]{1,20}"
    rf"(?:[ _](?:{_GPU_WORDS})){{0,7}}|"
    r"Tesla[ _][A-Z]\d[\w.-]{1,20}|AMD[ _]Instinct[ _]MI\d{2,3}[A-Z]?|"
    r"Apple M\d(?: (?:Pro|Max|Ultra))?|GeForce RTX \d{4}(?: Ti| SUPER)?"
)
GPU_MAKERS = ("NVIDIA", "GeForce", "Tesla", "Instinct", "Apple M")


class LinePattern(NamedTuple):
    """A pattern, and the text that all of its lines contain."""

    text: str
    expression: re.Pattern[str]


@cache
def compile_patterns(engine: str) -> list[LinePattern]:
    """Return the patterns of an engine's log and of torch's failed allocations."""
    patterns = []
    for pattern in (*PATTERNS[engine], _TORCH, _TORCH_CAPACITY):
        start = re.match(r"(?:[^<(\[\\?*.+|](?![?*]))+", pattern.removeprefix("<device> "))
        assert start, pattern
        expression = pattern.replace("<device>", r"(?P<device>\S+)")
        expression = re.sub(
            r"(?<!P)<(\w+)>",
            lambda field: rf"(?P{field[0]}{NUMBER})(?!\d)",
            expression,
        )
        patterns.append(LinePattern(start[0], re.compile(expression)))
    return patterns
