"""The flags of each engine that affect its memory, by the names of kvcalc's options.

Most names are fields of `FitOptions`, `Precision` and `Parallelism`. `command_line` has a rule for
every other name. Sources, as of autumn 2026: vLLM's `engine/arg_utils.py` (human_readable_int: k is
1000, K is 1024), SGLang's `server_args.py`, llama.cpp's `common/arg.cpp`, and TensorRT-LLM's
`commands/serve.py`.
"""

import json
import re
from collections.abc import Callable
from typing import Any, NamedTuple

from kvcalc.errors import UserError
from kvcalc.storage.formats import canonical

# Mappings whose keys can be flags: --speculative-config.method mtp
MAPPINGS = ("limit_mm_per_prompt", "speculation")
_NUMBER = re.compile(r"(\d+)(?:\.(\d+))?([kKmMgGtT]?)(i?)B?")


def number(text: str) -> int:
    """Parse a whole number as vLLM does: 1k is 1000, 1K is 1024. Raises UserError for another
    text."""
    match = _NUMBER.fullmatch(text.strip().replace("_", ""))
    if match and len(text) <= 40:
        whole, decimals, suffix, binary = match.groups()
        scale = (1024 if suffix.isupper() or binary else 1000) ** " kmgt".index(
            suffix.lower() or " "
        )
        value = float(f"{whole}.{decimals}") * scale if decimals else int(whole) * scale
        if value == int(value):
            return int(value)
    raise UserError(f"{text!r} is not a whole number")


def _real(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise UserError(f"{text!r} is not a number") from None


def limits_as_json(text: str) -> str:
    """Return `image=0` as the JSON that vLLM accepts."""
    limits = re.findall(r"(\w+)\s*=\s*(-?\d+)", text)
    return json.dumps({name: int(count) for name, count in limits}) if limits else text


def _named(**names: str) -> tuple[Callable[[str], str], Callable[[str], str]]:
    """Return a reader and a writer of formats for which the engine has other names."""
    return canonical, lambda name: names.get(name, name)


# A reader and a writer of each kind of value. A switch has no value.
_CONVERTERS: dict[str, tuple[Callable[[str], Any], Callable[[Any], str]]] = {
    "number": (number, str),
    "signed": (lambda text: -1 if text == "-1" else number(text), str),
    "length": (lambda text: None if text.lower() in ("-1", "auto") else number(text), str),
    "layers": (lambda text: -1 if text in ("-1", "all", "auto") else number(text), str),
    "real": (_real, str),
    "text": (str, str),
    "name": (str.lower, str),
    "limits": (str, limits_as_json),
    "format": _named(),
    "torch": _named(bf16="bfloat16", fp16="float16", fp32="float32"),
    "ggml": _named(fp16="f16", fp32="f32"),
    "sglang": (
        lambda text: "nvfp4" if text.lower() == "fp4_e2m1" else canonical(text),
        _named(fp8="fp8_e4m3", fp8_ds_mla="fp8_e4m3", nvfp4="fp4_e2m1")[1],
    ),
}


class Flag(NamedTuple):
    """One option of an engine.

    Attributes:
        name: Option of kvcalc.
        kind: Kind of value, or "switch". A switch named `not_…` turns the option off.
        spellings: All accepted spellings. kvcalc writes the first spelling.
    """

    name: str
    kind: str
    spellings: tuple[str, ...]

    @property
    def is_switch(self) -> bool:
        return self.kind == "switch"

    def read(self, text: str) -> Any:
        """Parse a value of this flag. Raises UserError if the text is not of the flag's kind."""
        return _CONVERTERS[self.kind][0](text)

    def words(self, value: Any) -> list[str]:
        """Return the flag with a value, as words of a command line."""
        spelling = self.spellings[0]
        return [spelling] if self.is_switch else [spelling, _CONVERTERS[self.kind][1](value)]


class Dialect(NamedTuple):
    """The command line of an engine.

    Attributes:
        starts: Word sequences that begin a command line. kvcalc writes the first sequence.
        flags: Flags that affect the memory. The model's name follows `starts` unless a flag names
            the model.
        switches: Further flags without a value, which do not change the memory.
        formats: Weight formats to which the engine can convert when it loads weights, with its
            names for them. Every other format needs its own checkpoint.
        writes_model_flag: Whether a flag must precede the model's name.
        max_num_seqs_is_cap: Whether the engine starts even if fewer full-length sequences fit than
            its limit allows. llama.cpp allocates the cells of all slots at start, so its number of
            slots is not a cap.
    """

    engine: str
    starts: tuple[tuple[str, ...], ...]
    flags: tuple[Flag, ...]
    switches: frozenset[str]
    formats: dict[str, str] = {}
    writes_model_flag: bool = False
    max_num_seqs_is_cap: bool = True

    def flag(self, name: str) -> Flag | None:
        """Return the flag of an option; None if the engine has none."""
        return next((flag for flag in self.flags if flag.name == name), None)


def _dialect(engine: str, starts: str, flags: str, switches: str, **settings: Any) -> Dialect:
    """Build a dialect from texts. Each line has one start, or the name, kind and spellings of one
    flag."""
    start_words = tuple(tuple(line.split()) for line in starts.strip().splitlines())
    parsed = []
    for line in flags.strip().splitlines():
        name, kind, *spellings = line.split()
        parsed.append(Flag(name, kind, tuple(spellings)))
    return Dialect(engine, start_words, tuple(parsed), frozenset(switches.split()), **settings)


_VLLM = _dialect(
    engine="vllm",
    starts="""
        vllm serve
        -m vllm.entrypoints.openai.api_server
        -m vllm.entrypoints.cli.main serve
        -m vllm.entrypoints.api_server
        vllm/vllm-openai
    """,
    flags="""
        model                    text    --model --model-tag
        dtype                    torch   --dtype
        quantization             name    --quantization -q
        kv_cache_dtype           torch   --kv-cache-dtype
        tp                       number  --tensor-parallel-size -tp
        pp                       number  --pipeline-parallel-size -pp
        dp                       number  --data-parallel-size -dp
        dcp                      number  --decode-context-parallel-size -dcp
        all_experts              switch  --enable-expert-parallel -ep
        max_model_len            length  --max-model-len
        max_num_seqs             signed  --max-num-seqs
        max_num_batched_tokens   signed  --max-num-batched-tokens
        gpu_memory_utilization   real    --gpu-memory-utilization
        kv_cache_memory_bytes    number  --kv-cache-memory-bytes --kv-cache-memory
        num_gpu_blocks_override  number  --num-gpu-blocks-override
        block_size               number  --block-size
        enforce_eager            switch  --enforce-eager
        lora                     switch  --enable-lora
        max_loras                number  --max-loras
        max_lora_rank            number  --max-lora-rank
        limit_mm_per_prompt      limits  --limit-mm-per-prompt
        text_only                switch  --language-model-only
        mamba_cache_mode         format  --mamba-cache-mode
        mamba_ssm_cache_dtype    torch   --mamba-ssm-cache-dtype
        not_hybrid               switch  --disable-hybrid-kv-cache-manager
        one_in_flight            switch  --no-async-scheduling
        two_in_flight            switch  --async-scheduling
        cpu_offload_gb           real    --cpu-offload-gb
        kv_offloading_size       real    --kv-offloading-size
        speculation              text    --speculative-config -sc
        draft_name               text    --speculative-model
    """,
    switches="""
        --trust-remote-code --enable-prefix-caching --no-enable-prefix-caching
        --enable-chunked-prefill --no-enable-chunked-prefill --enable-auto-tool-choice
        --disable-log-requests --disable-log-stats --disable-custom-all-reduce
        --enable-log-requests --disable-sliding-window --calculate-kv-scales --fully-sharded-loras
        --disable-frontend-multiprocessing --enable-reasoning --enable-sleep-mode
        --skip-mm-profiling --enable-eplb --headless --enable-prompt-tokens-details
        --use-v2-block-manager
    """,
    formats={"fp8": "fp8", "nf4": "bitsandbytes"},
)
_SGLANG = _dialect(
    engine="sglang",
    starts="""
        python -m sglang.launch_server
        -m sglang.launch_server
        sglang serve
    """,
    flags="""
        model                    text    --model-path --model
        dtype                    torch   --dtype
        quantization             name    --quantization
        kv_cache_dtype           sglang  --kv-cache-dtype
        tp                       number  --tensor-parallel-size --tp-size --tp
        pp                       number  --pipeline-parallel-size --pp-size --pp
        dp                       number  --data-parallel-size --dp-size --dp
        ep                       number  --expert-parallel-size --ep-size --ep
        shared_attention         switch  --enable-dp-attention
        max_model_len            length  --context-length
        max_num_seqs             signed  --max-running-requests
        max_num_batched_tokens   signed  --chunked-prefill-size
        gpu_memory_utilization   real    --mem-fraction-static
        block_size               number  --page-size
        enforce_eager            switch  --disable-cuda-graph
        lora                     switch  --enable-lora
        max_loras                number  --max-loras-per-batch
        max_lora_rank            number  --max-lora-rank
        mamba_ssm_cache_dtype    torch   --mamba-ssm-dtype
        cpu_offload_gb           real    --cpu-offload-gb
        prediction               name    --speculative-algorithm --speculative-algo
        draft_name               text    --speculative-draft-model-path --speculative-draft-model
        drafting_steps           number  --speculative-num-steps
        drafted_branches         number  --speculative-eagle-topk
        verified_tokens          number  --speculative-num-draft-tokens
        not_hybrid               switch  --disable-hybrid-swa-memory
    """,
    switches="""
        --trust-remote-code --enable-metrics --disable-radix-cache --enable-torch-compile
        --enable-dp-lm-head --enable-mixed-chunk --enable-cache-report --enable-multimodal
        --log-requests --disable-overlap-schedule --disable-custom-all-reduce --enable-deepep-moe
        --enable-eplb --enable-hierarchical-cache --skip-tokenizer-init --enable-p2p-check
    """,
    formats={"fp8": "fp8"},
    writes_model_flag=True,
)
_LLAMA_CPP = _dialect(
    engine="llama.cpp",
    starts="""
        llama-server
        llama-cli
        llama-bench
        llama-run
        llama-batched-bench
    """,
    flags="""
        model                    text    -m --model -hf -hfr --hf-repo
        cells                    number  --ctx-size -c
        max_num_seqs             signed  --parallel -np
        max_num_batched_tokens   signed  --ubatch-size -ub
        batch                    number  --batch-size -b
        cache_type_k             ggml    --cache-type-k -ctk
        cache_type_v             ggml    --cache-type-v -ctv
        kv_unified               switch  --kv-unified -kvu
        not_kv_unified           switch  --no-kv-unified -no-kvu
        swa_full                 switch  --swa-full
        n_gpu_layers             layers  --n-gpu-layers --gpu-layers -ngl
        n_cpu_moe                number  --n-cpu-moe -ncmoe
        cpu_moe                  switch  --cpu-moe -cmoe
        split_mode               name    --split-mode -sm
        tensor_split             text    --tensor-split -ts
        draft_name               text    --model-draft -md
    """,
    switches="""
        --jinja --no-mmap --mlock --metrics --slots --no-slots --embedding --no-webui --verbose -v
        --no-warmup --cont-batching -cb --context-shift --no-context-shift --no-kv-offload -nkvo
        --check-tensors --no-mmproj --reranking --offline
    """,
    writes_model_flag=True,
    max_num_seqs_is_cap=False,
)
_TRTLLM = _dialect(
    engine="trtllm",
    starts="""
        trtllm-serve
        trtllm-serve serve
    """,
    flags="""
        tp                       number  --tp_size --tensor_parallel_size
        pp                       number  --pp_size --pipeline_parallel_size
        ep                       number  --ep_size --moe_expert_parallel_size
        max_model_len            length  --max_seq_len
        max_num_seqs             signed  --max_batch_size
        max_num_batched_tokens   signed  --max_num_tokens
        gpu_memory_utilization real --kv_cache_free_gpu_memory_fraction --free_gpu_memory_fraction
        kv_cache_dtype           format  --kv_cache_dtype
    """,
    switches="""
        --trust_remote_code --enable_chunked_prefill --fail_fast_on_attention_window_too_large
    """,
)
DIALECTS: dict[str, Dialect] = {d.engine: d for d in (_VLLM, _SGLANG, _LLAMA_CPP, _TRTLLM)}
