"""Start-up logs in the wording of the engines' sources, with published figures. None is a copy.

vLLM: `engine/llm_engine.py`, `worker/worker.py`, `executor/executor_base.py` of 0.6.3, 0.6.4, 0.7.3 and 0.8.5;
`v1/engine/core.py`, `v1/worker/gpu_worker.py`, `v1/core/kv_cache_utils.py`, `entrypoints/utils.py` of 0.8.5, 0.10.1,
0.11, 0.14, 0.20 and 0.28. SGLang: `model_executor/model_runner.py`, `mem_cache/memory_pool.py`. llama.cpp:
`src/llama-model.cpp`, `src/llama-context.cpp`, `src/llama-kv-cache.cpp`, `ggml/src/ggml-cuda/ggml-cuda.cu`.
"""

INIT = "model='{model}', speculative_config=None, tokenizer='{model}', dtype=torch.{dtype}, max_seq_len={length}, "
INIT += "tensor_parallel_size={tp}, pipeline_parallel_size=1, quantization={quantization}, enforce_eager=False, "
INIT += "kv_cache_dtype=auto, device_config=cuda, seed=0, served_model_name={model}"


def config(model: str, length: int, dtype: str = "bfloat16", tp: int = 1, quantization: str = "None") -> str:
    return INIT.format(model=model, length=length, dtype=dtype, tp=tp, quantization=quantization)


# The GPU of vllm#10517: 23.58 GiB; 0.6.3 says no terms.
V0_6_3 = f"""\
INFO 11-20 10:00:00 api_server.py:528] vLLM API server version 0.6.3.post1
INFO 11-20 10:00:00 api_server.py:529] args: Namespace(host='0.0.0.0', port=8000, model='meta-llama/Llama-3.1-8B-Instruct', tokenizer=None, dtype='auto', kv_cache_dtype='auto', max_model_len=29000, pipeline_parallel_size=1, tensor_parallel_size=1, block_size=16, enable_prefix_caching=False, cpu_offload_gb=0, gpu_memory_utilization=0.9, max_num_batched_tokens=None, max_num_seqs=256, quantization=None, enforce_eager=False, enable_lora=False, max_loras=1, max_lora_rank=16)
INFO 11-20 10:00:09 llm_engine.py:237] Initializing an LLM engine (v0.6.3.post1) with config: {config("meta-llama/Llama-3.1-8B-Instruct", 29000)}
INFO 11-20 10:00:10 model_runner.py:1056] Starting to load model meta-llama/Llama-3.1-8B-Instruct...
INFO 11-20 10:00:30 model_runner.py:1067] Loading model weights took 14.9888 GB
INFO 11-20 10:00:33 gpu_executor.py:122] # GPU blocks: 1478, # CPU blocks: 2048
INFO 11-20 10:00:33 gpu_executor.py:126] Maximum concurrency for 29000 tokens per request: 0.82x
ValueError: The model's max seq len (29000) is larger than the maximum number of tokens that can be stored in KV cache (23648). Try increasing `gpu_memory_utilization` or decreasing `max_model_len` when initializing the engine.
NVIDIA GeForce RTX 3090
"""
V0_6_4 = f"""\
INFO 12-06 14:55:00 llm_engine.py:249] Initializing an LLM engine (v0.6.4.post1) with config: {config("Qwen/Qwen2.5-0.5B-Instruct", 2048)}
INFO 12-06 14:55:15 model_runner.py:1077] Loading model weights took 0.9277 GB
INFO 12-06 14:55:16 worker.py:232] Memory profiling results: total_gpu_memory=139.80GiB initial_memory_usage=0.71GiB peak_torch_memory=2.38GiB memory_usage_post_profile=1.81GiB non_torch_memory=0.73GiB kv_cache_size=122.71GiB gpu_memory_utilization=0.90
INFO 12-06 14:55:16 gpu_executor.py:113] # GPU blocks: 670160, # CPU blocks: 21845
INFO 12-06 14:55:16 gpu_executor.py:117] Maximum concurrency for 2048 tokens per request: 5235.62x
INFO 12-06 14:55:30 model_runner.py:1518] Graph capturing finished in 11 secs, took 0.13 GiB
"""
# A notebook on a T4 (unslothai's): 4-bit weights, fp16.
V0_7_3 = f"""\
INFO 05-05 15:24:00 llm_engine.py:234] Initializing a V0 LLM engine (v0.7.3) with config: {config("unsloth/meta-llama-3.1-8b-instruct-bnb-4bit", 1024, "float16", quantization="bitsandbytes")}
INFO 05-05 15:24:20 model_runner.py:1115] Loading model weights took 5.6 GB
INFO 05-05 15:24:40 worker.py:267] Memory profiling takes 8.92 seconds
INFO 05-05 15:24:40 worker.py:267] the current vLLM instance can use total_gpu_memory (14.74GiB) x gpu_memory_utilization (0.59) = 8.76GiB
INFO 05-05 15:24:40 worker.py:267] model weights take 5.60GiB; non_torch_memory takes 0.03GiB; PyTorch activation peak memory takes 0.74GiB; the rest of the memory reserved for KV Cache is 2.39GiB.
INFO 05-05 15:24:41 executor_base.py:111] # cuda blocks: 1224, # CPU blocks: 1024
INFO 05-05 15:24:41 executor_base.py:116] Maximum concurrency for 1024 tokens per request: 19.12x
"""
V1_0_8 = f"""\
INFO 05-01 12:00:00 [api_server.py:1043] vLLM API server version 0.8.5
INFO 05-01 12:00:00 [api_server.py:1044] args: Namespace(subparser='serve', model_tag='Qwen/Qwen3-32B', host=None, port=8000, model='Qwen/Qwen3-32B', max_model_len=16000, dtype='auto', tensor_parallel_size=1, gpu_memory_utilization=0.9, block_size=None, max_num_seqs=None, enforce_eager=False, enable_lora=False, max_loras=1, limit_mm_per_prompt={{}}, speculative_config=None)
INFO 05-01 12:00:20 [core.py:58] Initializing a V1 LLM engine (v0.8.5) with config: {config("Qwen/Qwen3-32B", 16000)}
INFO 05-01 12:01:00 [gpu_model_runner.py:1347] Model loading took 61.0347 GiB and 30.0 seconds
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 4.64 GiB. GPU 0 has a total capacity of 79.18 GiB of which 3.10 GiB is free. Including non-PyTorch memory, this process has 76.07 GiB memory in use.
RuntimeError: CUDA out of memory occurred when warming up sampler with 1024 dummy requests. Please try lowering `max_num_seqs` or `gpu_memory_utilization` when initializing the engine.
INFO device_name=NVIDIA_H100_80GB_HBM3
"""
V1_0_10 = f"""\
INFO 09-01 08:00:00 [api_server.py:1805] vLLM API server version 0.10.1.1
INFO 09-01 08:00:00 [utils.py:326] non-default args: {{'model_tag': 'openai/gpt-oss-120b', 'model': 'openai/gpt-oss-120b', 'max_model_len': 16384, 'tensor_parallel_size': 4, 'gpu_memory_utilization': 0.8, 'max_num_batched_tokens': 2048, 'lora_modules': [LoRAModulePath(name='a', path='b')]}}
(EngineCore_0 pid=77) INFO 09-01 08:00:20 [core.py:74] Initializing a V1 LLM engine (v0.10.1.1) with config: {config("openai/gpt-oss-120b", 16384, tp=4, quantization="mxfp4")}
(VllmWorker TP0 pid=80) INFO 09-01 08:01:00 [gpu_model_runner.py:2007] Model loading took 17.2217 GiB and 50.2 seconds
(VllmWorker TP1 pid=81) INFO 09-01 08:01:00 [gpu_model_runner.py:2007] Model loading took 17.2217 GiB and 50.9 seconds
(VllmWorker TP0 pid=80) INFO 09-01 08:01:30 [gpu_worker.py:276] Available KV cache memory: 45.32 GiB
(VllmWorker TP1 pid=81) INFO 09-01 08:01:30 [gpu_worker.py:276] Available KV cache memory: 45.35 GiB
(EngineCore_0 pid=77) INFO 09-01 08:01:31 [kv_cache_utils.py:849] GPU KV cache size: 2,640,144 tokens
(EngineCore_0 pid=77) INFO 09-01 08:01:31 [kv_cache_utils.py:853] Maximum concurrency for 16,384 tokens per request: 284.25x
(VllmWorker TP0 pid=80) INFO 09-01 08:01:50 [gpu_model_runner.py:2708] Graph capturing finished in 21 secs, took 1.88 GiB
INFO gpu: NVIDIA A100-SXM4-80GB
"""
V1_0_14 = """\
\x1b[0;36m(APIServer pid=1)\x1b[0;0m INFO 04-19 10:59:05 [utils.py:233] non-default args: {'model': '/models/Qwen3-14B-AWQ', 'max_model_len': 40960, 'gpu_memory_utilization': 0.6, 'served_model_name': ['q']}
\x1b[0;36m(EngineCore_DP0 pid=81)\x1b[0;0m INFO 04-19 10:59:08 [core.py:97] Initializing a V1 LLM engine (v0.14.1) with config: model='/models/Qwen3-14B-AWQ', dtype=torch.float16, max_seq_len=40960, tensor_parallel_size=1, quantization=awq_marlin
(EngineCore_DP0 pid=81) INFO 04-19 10:59:20 [gpu_model_runner.py:3900] Model loading took 9.44 GiB memory and 5.123 seconds
(EngineCore_DP0 pid=81) INFO 04-19 10:59:54 [gpu_worker.py:436] Available KV cache memory: 2.1 GiB
(EngineCore_DP0 pid=81) ERROR 04-19 10:59:54 [core.py:1108] ValueError: To serve at least one request with the models's max seq len (40960), (6.25 GiB KV cache is needed, which is larger than the available KV cache memory (2.1 GiB). Based on the available memory, the estimated maximum model length is 13760. Try increasing `gpu_memory_utilization` or decreasing `max_model_len`.
| 0  NVIDIA L4 | 00000000:00:03.0 Off |
"""
V1_0_20 = """\
(APIServer pid=1) INFO 06-02 07:00:00 [api_server.py:1411] vLLM API server version 0.20.0
(APIServer pid=1) INFO 06-02 07:00:00 [utils.py:299] non-default args: {'model_tag': 'Qwen/Qwen3-32B', 'model': 'Qwen/Qwen3-32B', 'gpu_memory_utilization': 0.9, 'max_model_len': 8192}
(EngineCore pid=9) ValueError: Free memory on device cuda:0 (12.4/79.18 GiB) on startup is less than desired GPU memory utilization (0.9, 71.26 GiB). Decrease GPU memory utilization or reduce GPU memory used by other processes.
(EngineCore pid=9) on NVIDIA H100 80GB HBM3
"""
V1_0_28 = """\
(APIServer pid=1) INFO 09-24 12:00:00 [api_server.py:1411] vLLM API server version 0.28.0
(APIServer pid=1) INFO 09-24 12:00:00 [utils.py:299] non-default args: {'model_tag': 'Qwen/Qwen3-14B', 'model': 'Qwen/Qwen3-14B', 'max_model_len': 40960}
(EngineCore pid=50) INFO 09-24 12:00:20 [core.py:104] Initializing a V1 LLM engine (v0.28.0) with config: model='Qwen/Qwen3-14B', speculative_config=None, dtype=torch.bfloat16, max_seq_len=40960, tensor_parallel_size=1, quantization=None, kv_cache_dtype=auto
(EngineCore pid=50) INFO 09-24 12:01:00 [model_runner.py:411] Model loading took 27.52 GiB memory and 12.0 seconds
(EngineCore pid=50) INFO 09-24 12:01:30 [gpu_worker.py:721] Available KV cache memory: 11.57 GiB
(EngineCore pid=50) INFO 09-24 12:01:30 [kv_cache_utils.py:2481] GPU KV cache size: 75,824 tokens, Maximum concurrency for 40,960 tokens per request: 1.85x
(EngineCore pid=50) INFO 09-24 12:01:40 [gpu_worker.py:804] Free memory on device (43.9/44.39 GiB) on startup. Desired GPU memory utilization is (0.92, 40.84 GiB). Actual usage is 27.72 GiB for consumed memory (weights + non-torch), 1.25 GiB for peak activation, and 0.3 GiB for CUDAGraph memory. Replace gpu_memory_utilization config with `--kv-cache-memory=1` (1.0 GiB) to fit.
(APIServer pid=1) INFO:     Application startup complete.
INFO device_name=NVIDIA_L40S
"""
NO_BLOCKS = f"""\
INFO 10-01 09:00:05 [api_server.py:1839] vLLM API server version 0.11.0
INFO 10-01 09:00:05 [utils.py:233] non-default args: {{'model': 'RedHatAI/Llama-3.3-70B-Instruct-FP8-dynamic', 'max_model_len': 16000, 'gpu_memory_utilization': 0.9}}
(EngineCore_DP0 pid=9) INFO 10-01 09:00:20 [core.py:77] Initializing a V1 LLM engine (v0.11.0) with config: {config("RedHatAI/Llama-3.3-70B-Instruct-FP8-dynamic", 16000, quantization="compressed-tensors")}
(EngineCore_DP0 pid=9) INFO 10-01 09:01:00 [gpu_model_runner.py:2653] Model loading took 67.72 GiB and 50.1 seconds
(EngineCore_DP0 pid=9) INFO 10-01 09:01:30 [gpu_worker.py:298] Available KV cache memory: -1.44 GiB
(EngineCore_DP0 pid=9) ERROR 10-01 09:01:30 [core.py:708] ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization` when initializing the engine.
GPU: NVIDIA H100 80GB HBM3
"""
SGLANG = """\
[2025-08-01 12:00:00] server_args=ServerArgs(model_path='Qwen/Qwen3-8B', tokenizer_path='Qwen/Qwen3-8B', dtype='auto', quantization=None, context_length=None, mem_fraction_static=0.874, max_running_requests=None, chunked_prefill_size=8192, tp_size=1, dp_size=1, ep_size=1, kv_cache_dtype='auto', disable_cuda_graph=False, enable_dp_attention=False, page_size=1)
[2025-08-01 12:00:09] Load weight begin. avail mem=78.48 GB
[2025-08-01 12:00:19] Load weight end. type=Qwen3ForCausalLM, dtype=torch.bfloat16, avail mem=63.15 GB, mem usage=15.33 GB.
[2025-08-01 12:00:20] KV Cache is allocated. #tokens: 387811, K size: 26.63 GB, V size: 26.63 GB
[2025-08-01 12:00:20] Memory pool end. avail mem=9.39 GB
[2025-08-01 12:00:30] Capture cuda graph end. Time elapsed: 7.47 s. mem usage=1.38 GB. avail mem=8.01 GB.
[2025-08-01 12:00:30] max_total_num_tokens=387811, chunked_prefill_size=8192, max_prefill_tokens=16384, max_running_requests=2048, context_len=40960, available_gpu_mem=8.01 GB
[2025-08-01 12:00:31] using device_name=NVIDIA_H100_80GB_HBM3
"""
SGLANG_FAILED = """\
[2025-08-01 12:00:00 TP0] server_args=ServerArgs(model_path='meta-llama/Llama-3.3-70B-Instruct', mem_fraction_static=0.7, chunked_prefill_size=8192, tp_size=2, kv_cache_dtype='auto', context_length=8192)
[2025-08-01 12:00:09 TP0] Load weight begin. avail mem=78.48 GB
[2025-08-01 12:00:19 TP0] Load weight end. elapsed=30.2 s, type=LlamaForCausalLM, avail mem=12.46 GB, mem usage=66.02 GB.
RuntimeError: Not enough memory. Please try to increase --mem-fraction-static.
GPU 0: NVIDIA H100 80GB HBM3
"""
LLAMA_CPP = """\
ggml_cuda_init: found 1 CUDA devices:
  Device 0: NVIDIA GeForce RTX 4090, compute capability 8.9, VMM: yes
build: 6123 (79e0b68c) with cc (Ubuntu 13.3.0) 13.3.0 for x86_64-linux-gnu
llama_model_load_from_file_impl: using device CUDA0 (NVIDIA GeForce RTX 4090) - 23008 MiB free
llama_model_loader: loaded meta data with 33 key-value pairs and 292 tensors from /models/Meta-Llama-3.1-8B-Instruct-Q4_K_M.gguf (version GGUF V3 (latest))
print_info: file type   = Q4_K - Medium
print_info: file size   = 4.58 GiB (4.89 BPW)
print_info: general.name     = Meta Llama 3.1 8B Instruct
load_tensors: offloaded 33/33 layers to GPU
load_tensors:   CPU_Mapped model buffer size =   281.81 MiB
load_tensors:        CUDA0 model buffer size =  4403.49 MiB
llama_context: n_seq_max     = 4
llama_context: n_ctx         = 32768
llama_context: n_ubatch      = 512
llama_context: kv_unified    = false
llama_kv_cache:      CUDA0 KV buffer size =  4096.00 MiB
llama_kv_cache: size = 4096.00 MiB (  8192 cells,  32 layers,  4/4 seqs), K (f16): 2048.00 MiB, V (f16): 2048.00 MiB
llama_context:      CUDA0 compute buffer size =   560.00 MiB
llama_context:  CUDA_Host compute buffer size =    24.01 MiB
main: server is listening on http://127.0.0.1:8080
"""
LLAMA_CPP_FAILED = """\
build: 6500 (79e0b68c) with cc
  Device 0: NVIDIA GeForce RTX 3090, compute capability 8.6, VMM: yes
llama_model_load_from_file_impl: using device CUDA0 (NVIDIA GeForce RTX 3090) - 23700 MiB free
llama_model_loader: loaded meta data with 33 key-value pairs and 292 tensors from /blobs/sha256-667b0c1932bc (version GGUF V3 (latest))
print_info: file type   = Q4_K - Medium
print_info: general.name     = Meta Llama 3.1 8B Instruct
load_tensors: offloaded 33/33 layers to GPU
load_tensors:        CUDA0 model buffer size =  4403.49 MiB
llama_context: n_seq_max     = 1
llama_context: n_ctx         = 262144
llama_context: n_ubatch      = 512
llama_context: kv_unified    = false
ggml_backend_cuda_buffer_type_alloc_buffer: allocating 32768.00 MiB on device 0: cudaMalloc failed: out of memory
llama_init_from_model: failed to initialize the context: failed to allocate buffer for kv cache
"""
# vLLM until 0.8.4 writes GB where it means GiB, and says only in its error what was left (vllm#16141).
V1_0_8_3 = f"""\
INFO 04-11 13:05:15 [api_server.py:1034] vLLM API server version 0.8.3
INFO 04-11 13:05:30 [core.py:61] Initializing a V1 LLM engine (v0.8.3) with config: {config("deepseek-ai/DeepSeek-R1-Distill-Qwen-32B", 32768, tp=4)}
(VllmWorker rank=0 pid=91) INFO 04-11 13:06:10 [gpu_model_runner.py:1273] Model loading took 15.4172 GiB and 22.101 seconds
(VllmWorker rank=1 pid=92) INFO 04-11 13:06:10 [gpu_model_runner.py:1273] Model loading took 15.4172 GiB and 22.3 seconds
ERROR 04-11 13:06:40 [core.py:390] ValueError: To serve at least one request with the models's max seq len (32768), (2.00 GB KV cache is needed, which is larger than the available KV cache memory (0.78 GB). Try increasing `gpu_memory_utilization` or decreasing `max_model_len` when initializing the engine.
GPU 0: NVIDIA GeForce RTX 4090 (UUID: GPU-x)
"""
# Prediction layers that no preset knows; ranks that differ.
V1_0_12 = """\
(APIServer pid=1) INFO 12-12 06:00:00 [api_server.py:1772] vLLM API server version 0.12.0
(APIServer pid=1) INFO 12-12 06:00:00 [utils.py:253] non-default args: {'model_tag': 'Qwen/Qwen3-Next-80B-A3B-Instruct', 'model': 'Qwen/Qwen3-Next-80B-A3B-Instruct', 'max_model_len': 65536, 'tensor_parallel_size': 4, 'speculative_config': {'method': 'qwen3_next_mtp', 'num_speculative_tokens': 2}}
(Worker_TP0 pid=301) INFO 12-12 06:02:10 [gpu_model_runner.py:3553] Model loading took 38.3117 GiB memory and 77.2 seconds
(Worker_TP0 pid=301) INFO 12-12 06:03:00 [gpu_worker.py:359] Available KV cache memory: 26.93 GiB
(Worker_TP3 pid=304) INFO 12-12 06:03:00 [gpu_worker.py:359] Available KV cache memory: 26.91 GiB
(EngineCore_DP0 pid=203) INFO 12-12 06:03:01 [kv_cache_utils.py:1286] GPU KV cache size: 1,104,864 tokens
(Worker_TP0 pid=301) INFO 12-12 06:03:30 [gpu_model_runner.py:4466] Graph capturing finished in 29 secs, took 1.37 GiB
(APIServer pid=1) INFO:     Application startup complete.
NVIDIA H100 80GB HBM3
"""
SGLANG_WINDOWS = """\
[2025-10-10 09:00:00] server_args=ServerArgs(model_path='openai/gpt-oss-20b', context_length=65536, kv_cache_dtype='auto', mem_fraction_static=0.85, max_running_requests=64, chunked_prefill_size=8192, tp_size=1, page_size=1)
[2025-10-10 09:00:12 TP0] Load weight begin. avail mem=78.68 GB
[2025-10-10 09:00:30 TP0] Load weight end. type=GptOssForCausalLM, dtype=torch.bfloat16, avail mem=65.32 GB, mem usage=13.36 GB.
[2025-10-10 09:00:31 TP0] KV Cache is allocated. #tokens: 1360000, K size: 15.56 GB, V size: 15.56 GB
[2025-10-10 09:00:31 TP0] KV Cache is allocated. #tokens: 1700000, K size: 9.73 GB, V size: 9.73 GB
[2025-10-10 09:00:31 TP0] SWAKVPool mem usage: 50.58 GB, swa size: 1360000, full size: 1700000
[2025-10-10 09:00:41 TP0] max_total_num_tokens=1700000, chunked_prefill_size=8192, max_prefill_tokens=16384, max_running_requests=64, context_len=65536, available_gpu_mem=13.15 GB
NVIDIA H100 80GB HBM3
"""
LLAMA_CPP_METAL = """\
build: 5200 (0fed5) with Apple clang version 16.0.0 for arm64-apple-darwin24.1.0
llama_model_load_from_file_impl: using device Metal (Apple M2 Max) - 49151 MiB free
llama_model_loader: loaded meta data with 33 key-value pairs and 292 tensors from /u/Meta-Llama-3.1-8B-Instruct-Q8_0.gguf (version GGUF V3 (latest))
load_tensors: offloaded 33/33 layers to GPU
load_tensors: Metal_Mapped model buffer size =  8137.64 MiB
llama_context: n_seq_max     = 1
llama_context: n_ctx         = 16384
llama_context: n_ubatch      = 512
llama_kv_cache_unified:      Metal KV buffer size =  2048.00 MiB
llama_context:      Metal compute buffer size =  1088.00 MiB
"""
LLAMA_CPP_TOO_LONG = """\
build: 7300 (abcd) with cc for x86_64-linux-gnu
  Device 0: NVIDIA GeForce RTX 4060 Ti, compute capability 8.9, VMM: yes
llama_model_load_from_file_impl: using device CUDA0 (NVIDIA GeForce RTX 4060 Ti) (0000:01:00.0) - 15100 MiB free
llama_model_loader: loaded meta data with 40 key-value pairs and 443 tensors from models/Qwen3-14B-Q8_0.gguf (version GGUF V3 (latest))
load_tensors: offloaded 41/41 layers to GPU
load_tensors:        CUDA0 model buffer size = 14176.00 MiB
llama_context: n_seq_max     = 2
llama_context: n_ctx         = 40960
llama_context: n_ubatch      = 512
llama_context: kv_unified    = false
ggml_backend_cuda_buffer_type_alloc_buffer: allocating 6400.00 MiB on device 0: cudaMalloc failed: out of memory
llama_init_from_model: failed to initialize the context: failed to allocate buffer for kv cache
"""
