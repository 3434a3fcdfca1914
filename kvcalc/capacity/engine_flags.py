"""The flags of each engine that affect its memory, by the names of kvcalc's options.

Most names are fields of `FitOptions`, `Precision` and `Parallelism`. The rules of an engine read
and write every other name. Sources, as of
autumn 2026: vLLM's `engine/arg_utils.py` (human_readable_int: k is 1000, K is 1024), SGLang's
`server_args.py`, llama.cpp's `common/arg.cpp`, and TensorRT-LLM's `commands/serve.py`.
"""

import json
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec

from kvcalc.capacity.memory_budget import GIB
from kvcalc.errors import UserError
from kvcalc.model.model import Model
from kvcalc.records import Settings
from kvcalc.storage.formats import canonical, first_words
from kvcalc.timing.deployment import TimedDeployment

# Mappings whose keys can be flags: --speculative-config.method mtp
MAPPINGS = ("limit_mm_per_prompt", "speculation")
_NUMBER = re.compile(r"(\d+)(?:\.(\d+))?([kKmMgGtT]?)(i?)B?")


def number(text: str) -> int:
    """Parse a whole number in a flag as vLLM does: 1k is 1000, 1K and 1Ki are 1024, 1.5k is 1500.

    Raises:
        UserError: The text is not a whole number.
    """
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


def json_value(text: str) -> Any:
    """Return the JSON value of a flag's text, such as 4 for "4" and True for "true" or "True".

    A text that is not JSON is returned unchanged.
    """
    try:
        return msgspec.json.decode(text.lower())
    except msgspec.MsgspecError:
        return text


def limits_as_json(text: str) -> str:
    """Return the limits of `--limit-mm-per-prompt` (images, videos) as the JSON that vLLM accepts.

    Example: `image=0,video=1` gives `{"image": 0, "video": 1}`. A text without `=` is unchanged.
    """
    limits = re.findall(r"(\w+)\s*=\s*(-?\d+)", text)
    return json.dumps({name: int(count) for name, count in limits}) if limits else text


# llama.cpp, common/arg.cpp: is_truthy, is_falsey, is_autoy. Builds before autumn 2025 take no
# value.
TOGGLES = dict.fromkeys(("", "1", "true", "enabled"), "on")
TOGGLES |= dict.fromkeys(("0", "false", "disabled"), "off") | {"-1": "auto"}
READERS: dict[str, Callable[[str], Any]] = {
    "number": number,
    "signed": lambda text: -1 if text in ("-1", "all", "auto") else number(text),
    "length": lambda text: None if text.lower() in ("-1", "auto") else number(text),
    "real": _real,
    "text": str,
    "name": str.lower,
    "toggle": lambda text: TOGGLES.get(text.lower(), text.lower()),
}
# kinds of formats, with the engine's names that are not kvcalc's
FORMAT_NAMES = {
    "format": {},
    "torch": first_words("""
        bfloat16  bf16
        float16   fp16
        float32   fp32
    """),
    "ggml": first_words("""
        f16  fp16
        f32  fp32
    """),
    "sglang": first_words("""
        fp8_e4m3  fp8 fp8_ds_mla
        fp4_e2m1  nvfp4
    """),
}


# without --parallel, 4 slots share the context (llama.cpp, tools/server/server.cpp)
AUTOMATIC_SLOTS = {"max_num_seqs": 1, "idle_slots": 3, "kv_unified": True}
# names of flags that printed commands repeat unchanged
REPEATED_FLAGS = """
    kv_cache_dtype speculation draft_name prediction drafting_steps drafted_branches verified_tokens
    host_cache
"""


class Flag(NamedTuple):
    """One command-line flag of an engine, and the kvcalc option that it sets.

    Attributes:
        name: Name of the kvcalc option; "-" if the flag does not change the memory.
        kind: How to read the flag's value. "switch": a flag without a value. "number": a whole
            number. "signed": a whole number; "all" and "auto" mean -1. "length": a number of
            tokens; -1 and "auto" leave it to the engine. "real": a decimal number. "text": any
            text. "name": a text, made lower case. "toggle": "on", "off" or "auto". "format",
            "torch", "ggml" and "sglang": a data type, by kvcalc's names or by the names in torch,
            GGML or SGLang.
        spellings: All spellings that the engine accepts. kvcalc writes the first one.
        setting: Value of the kvcalc option if a switch is present.
    """

    name: str
    kind: str
    spellings: tuple[str, ...]
    setting: Any = True

    @property
    def is_switch(self) -> bool:
        return self.kind == "switch"

    def read(self, text: str) -> Any:
        """Parse the text of the flag's value in a command line into the value of its kvcalc option.

        The value is a number or a text. It is None if a "length" is left to the engine, and
        kvcalc's name of a data type, such as "bf16", if the flag is for one. `fp8_e5m2` is
        unchanged, because engines read kvcalc's name `fp8` as the other 8-bit float.

        Raises:
            UserError: The text does not suit the flag's kind.
        """
        if self.kind in FORMAT_NAMES:
            return text if text == "fp8_e5m2" else canonical(text)
        return READERS[self.kind](text)

    def can_write(self, settings: Settings) -> bool:
        """Return whether kvcalc writes this flag to express option values in a command line.

        It writes a switch if the switch's option has the value `setting`. It writes another flag if
        the flag's option is not at its default.

        Args:
            settings: Values of kvcalc options, by name. Options at their defaults are left out.
        """
        if self.is_switch:
            return bool(settings.get(self.name) == self.setting)
        return self.name in settings

    def words(self, value: Any) -> list[str]:
        """Return the flag and a value as words of a command line, such as ["--max-num-seqs", "8"].

        Args:
            value: Value of the kvcalc option. A switch ignores it.
        """
        if self.is_switch:
            return [self.spellings[0]]
        if self.kind == "real":
            value = f"{value:.8g}"
        return [self.spellings[0], str(FORMAT_NAMES.get(self.kind, {}).get(value, value))]


class Dialect(NamedTuple):
    """The command-line syntax of an engine: its start, its flags and its container image.

    Attributes:
        engine: Name of the engine, such as "vllm".
        starts: Word sequences that begin a command line, such as ("vllm", "serve"). kvcalc writes
            the first sequence.
        flags: The flags. The model's name follows `starts` unless a flag names the model.
        image: Container image of the engine.
        port: Port of the engine's container.
        formats: Weight formats to which the engine can convert weights while it loads them: the
            engine's name, by kvcalc's name. Every other format needs its own checkpoint.
        read: Function that changes flag values into kvcalc options, in place. It takes the values
            by option name, and a list to which it adds remarks for the user.
        write: Function that changes kvcalc options into flag values, in place. It takes the options
            by name, and the deployment. It gives an option that no flag expresses the prefix
            `fit_`.
        writes_model_flag: Whether kvcalc writes a flag, such as --model-path, before the model's
            name.
        max_slots: Maximum of max_num_seqs for an engine that allocates all sequences when it
            starts, as llama.cpp does. 0 if the engine starts even if fewer sequences fit.
        default_slots: Sequences of a data-parallel rank that the engine runs at least, if it finds
            the number by its memory. 0 if the number is `Defaults.sequences`.
    """

    engine: str
    starts: tuple[tuple[str, ...], ...]
    flags: tuple[Flag, ...]
    image: str
    port: int
    formats: dict[str, str] = {}
    read: Callable[[Settings, list[str]], None] = lambda settings, remarks: None
    write: Callable[[Settings, TimedDeployment], None] = lambda settings, deployment: None
    writes_model_flag: bool = False
    max_slots: int = 0
    default_slots: int = 0

    def flag(self, name: str) -> Flag | None:
        """Return the flag of a kvcalc option; None if the engine has none.

        Args:
            name: Name of the kvcalc option.
        """
        return next((flag for flag in self.flags if flag.name == name), None)

    def container(self, words: list[str], version: str) -> tuple[str, int, list[str]]:
        """Return the image, the port and the arguments of a container that runs a command line.

        Args:
            words: Words of the engine's command line, from its start on.
            version: The engine's version; "" for the latest.

        Returns:
            The image with its tag, the port of the server, and the words to write after the image's
            name in `docker run`.
        """
        image = self.image
        if ":" not in image:
            image += f":v{version}{'.0' * (version.count('.') == 1)}" if version else ":latest"
        arguments = words[len(self.starts[0]) :]
        if self.engine == "vllm":
            return image, self.port, ["--model", *arguments]
        # the images of SGLang and TensorRT-LLM start no server
        return image, self.port, arguments if self.engine == "llama.cpp" else words


def _dialect(engine: str, starts: str, flags: str, **settings: Any) -> Dialect:
    """Build a dialect from texts. Each line has one start, or the name, kind and spellings of one
    flag. A switch can state the value of its option."""
    parsed = []
    for line in flags.strip().splitlines():
        name, kind, *spellings = line.split()
        option, _, setting = name.partition("=")
        parsed.append(Flag(option, kind, tuple(spellings), json_value(setting or "true")))
    return Dialect(
        engine=engine,
        starts=tuple(tuple(line.split()) for line in starts.strip().splitlines()),
        flags=tuple(parsed),
        **settings,
    )


def hub_name(model: Model) -> str:
    """Return the name of a model on the Hugging Face Hub, or kvcalc's own name if it has none."""
    return model.huggingface_id or model.name


def _read_vllm(settings: Settings, remarks: list[str]) -> None:
    tp, pp, dp = (settings.get(name, 1) for name in ("tp", "pp", "dp"))
    if "ep" in settings:
        settings["ep"] = tp * dp
    if pp > 1 and settings.pop("max_in_flight_batches", 0) == 1:
        settings["max_in_flight_batches"] = pp
    if size := settings.pop("kv_offloading_size", 0):
        settings["kv_offloading_bytes"] = int(size * GIB) // (tp * pp)


def _write_vllm(settings: Settings, deployment: TimedDeployment) -> None:
    ranks = deployment.parallelism
    if "ep" in settings and ranks.ep == ranks.stage_gpus:
        settings["ep"] = "all"
    if ranks.pp > 1 and "max_in_flight_batches" in settings:
        settings["fit_max_in_flight_batches"] = settings.pop("max_in_flight_batches")
    if limits := settings.get("limit_mm_per_prompt"):
        settings["limit_mm_per_prompt"] = limits_as_json(limits)
    if size := settings.pop("kv_offloading_bytes", 0):
        settings["kv_offloading_size"] = round(size * ranks.tp * ranks.pp / GIB, 4)
    tokens = settings.pop("num_speculative_tokens", 0)
    drafter = {"method": "ngram"} if tokens else {}
    if settings.pop("mtp", False):
        drafter = {"method": "mtp"}
    elif "draft" in settings:
        drafter = {"model": hub_name(settings.pop("draft"))}
    if drafter:
        settings["speculation"] = json.dumps({**drafter, "num_speculative_tokens": tokens or 1})


def _read_sglang(settings: Settings, remarks: list[str]) -> None:
    tp, dp = settings.get("tp", 1), settings.get("dp", 1)
    if "shared_attention" in settings:
        if tp % dp:
            raise UserError(
                f"SGLang's --dp-size {dp} with --enable-dp-attention does not divide --tp-size {tp}"
            )
        settings["tp"] = tp // dp
    if settings.get("max_num_batched_tokens", 0) < 0:
        settings.pop("max_num_batched_tokens")
        remarks.append("prefill is not chunked: the engine's own chunk is counted")
    algorithm = settings.pop("prediction", "").lower()
    if "draft_name" not in settings and algorithm in ("nextn", "eagle", "mtp"):
        settings["mtp"] = True
    branches, steps, verified = (
        settings.pop(name, 0)
        for name in ("drafted_branches", "drafting_steps", "verified_tokens")
    )
    if verified and (branches > 1 or not steps):
        steps = verified - 1
    if algorithm and (steps or verified):
        settings["num_speculative_tokens"] = steps


def _write_sglang(settings: Settings, deployment: TimedDeployment) -> None:
    ranks = deployment.parallelism
    if ranks.dp > 1 and deployment.model.has_experts:
        settings |= {"tp": ranks.stage_gpus, "shared_attention": True}
    if "draft" in settings:
        settings["prediction"] = "STANDALONE"
        settings["draft_name"] = hub_name(settings.pop("draft"))
    elif settings.pop("mtp", False):
        settings["prediction"] = "EAGLE"
    tokens = settings.pop("num_speculative_tokens", 0)
    if tokens and "prediction" in settings:
        settings |= {
            "drafting_steps": tokens,
            "drafted_branches": 1,
            "verified_tokens": tokens + 1,
        }


def _read_llama_cpp(settings: Settings, remarks: list[str]) -> None:
    slots = settings.pop("max_num_seqs", 0)
    if slots < 1:
        slots = 1
        settings |= AUTOMATIC_SLOTS
    settings["max_num_seqs"] = slots
    if cells := settings.pop("cells", 0):
        settings["max_model_len"] = max(1, cells // slots)
    if settings.pop("host_cache", False):
        remarks.append("--no-kv-offload is not modelled: the KV cache is counted on the GPU")
    key_type, value_type = (
        settings.get(name, "fp16") for name in ("cache_type_k", "cache_type_v")
    )
    if key_type == value_type:
        settings["kv_cache_dtype"] = key_type
        settings.pop("cache_type_k", None)
        settings.pop("cache_type_v", None)
    mode, shares = settings.pop("split_mode", "layer"), settings.pop("tensor_split", "")
    gpus = sum(share.strip() not in ("", "0") for share in re.split("[/,]", shares))
    if gpus > 1 and mode != "none":
        settings["pp" if mode == "layer" else "tp"] = gpus
        if len(set(shares.split(","))) > 1:
            remarks.append(f"--tensor-split {shares} is counted as equal parts")


def _write_llama_cpp(settings: Settings, deployment: TimedDeployment) -> None:
    """Set the context as cells of all sequences, and the types of keys and
    values."""
    ranks = deployment.parallelism
    if ranks.gpus in (ranks.tp, ranks.pp):  # split in one way
        tensors, layers = settings.pop("tp", 1), settings.pop("pp", 1)
        if tensors * layers > 1:
            settings["split_mode"] = "layer" if layers > 1 else "tensor"
            settings["tensor_split"] = ",".join("1" * ranks.gpus)
    slots = settings.setdefault("max_num_seqs", 1)
    length = settings.pop("max_model_len", 0) or deployment.model.max_context or 4096
    settings["cells"] = slots * length
    if settings.items() >= AUTOMATIC_SLOTS.items():
        for name in AUTOMATIC_SLOTS:
            del settings[name]
    cache_dtype = settings.pop("kv_cache_dtype", "auto")
    for name in ("cache_type_k", "cache_type_v"):
        dtype = canonical(settings.pop(name, "") or cache_dtype)
        if dtype not in ("auto", "fp16"):
            settings[name] = dtype
    if "draft" in settings:
        settings["draft_name"] = f"./{settings.pop('draft').name}.gguf"


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
        ep=all                   switch  --enable-expert-parallel -ep
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
        limit_mm_per_prompt      text    --limit-mm-per-prompt
        limit_mm_per_prompt=image=0,video=0  switch  --language-model-only
        mamba_cache_mode         format  --mamba-cache-mode
        mamba_ssm_cache_dtype    torch   --mamba-ssm-cache-dtype
        hybrid=False             switch  --disable-hybrid-kv-cache-manager
        max_in_flight_batches=1  switch  --no-async-scheduling
        max_in_flight_batches=2  switch  --async-scheduling
        cpu_offload_gb           real    --cpu-offload-gb
        kv_offloading_size       real    --kv-offloading-size
        speculation              text    --speculative-config -sc
        draft_name               text    --speculative-model
        -                        switch  --trust-remote-code --enable-prefix-caching
        -                        switch  --no-enable-prefix-caching --enable-chunked-prefill
        -                        switch  --no-enable-chunked-prefill --enable-auto-tool-choice
        -                        switch  --disable-log-requests --disable-log-stats
        -                        switch  --disable-custom-all-reduce --enable-log-requests
        -                        switch  --disable-sliding-window --calculate-kv-scales
        -                        switch  --fully-sharded-loras --disable-frontend-multiprocessing
        -                        switch  --enable-reasoning --enable-sleep-mode --skip-mm-profiling
        -                        switch  --enable-eplb --headless --enable-prompt-tokens-details
        -                        switch  --use-v2-block-manager
    """,
    image="vllm/vllm-openai",
    port=8000,
    read=_read_vllm,
    write=_write_vllm,
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
        prediction               text    --speculative-algorithm --speculative-algo
        draft_name               text    --speculative-draft-model-path --speculative-draft-model
        drafting_steps           number  --speculative-num-steps
        drafted_branches         number  --speculative-eagle-topk
        verified_tokens          number  --speculative-num-draft-tokens
        hybrid=False             switch  --disable-hybrid-swa-memory
        -                        switch  --trust-remote-code --enable-metrics --disable-radix-cache
        -                        switch  --enable-torch-compile --enable-dp-lm-head
        -                        switch  --enable-mixed-chunk --enable-cache-report
        -                        switch  --enable-multimodal --log-requests
        -                        switch  --disable-overlap-schedule --disable-custom-all-reduce
        -                        switch  --enable-deepep-moe --enable-eplb
        -                        switch  --enable-hierarchical-cache --skip-tokenizer-init
        -                        switch  --enable-p2p-check
    """,
    image="lmsysorg/sglang",
    port=30000,
    read=_read_sglang,
    write=_write_sglang,
    formats={"fp8": "fp8"},
    writes_model_flag=True,
    default_slots=2048,  # mem_cache/kv_cache_configurator.py: resolve_max_num_reqs, 0.5.23
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
        cache_type_k             ggml    --cache-type-k -ctk
        cache_type_v             ggml    --cache-type-v -ctv
        kv_unified               switch  --kv-unified -kvu
        kv_unified=False         switch  --no-kv-unified -no-kvu
        swa_full                 switch  --swa-full
        flash_attn               toggle  --flash-attn -fa
        host_cache               switch  --no-kv-offload -nkvo
        n_gpu_layers             signed  --n-gpu-layers --gpu-layers -ngl
        n_cpu_moe                number  --n-cpu-moe -ncmoe
        cpu_moe                  switch  --cpu-moe -cmoe
        split_mode               name    --split-mode -sm
        tensor_split             text    --tensor-split -ts
        draft_name               text    --model-draft -md
        -                        switch  --jinja --no-mmap --mlock --metrics --slots --no-slots
        -                        switch  --embedding --no-webui --verbose -v --no-warmup
        -                        switch  --cont-batching -cb --context-shift --no-context-shift
        -                        switch  --check-tensors --no-mmproj --reranking --offline
    """,
    image="ghcr.io/ggml-org/llama.cpp:server-cuda",
    port=8080,
    read=_read_llama_cpp,
    write=_write_llama_cpp,
    writes_model_flag=True,
    max_slots=256,  # LLAMA_MAX_SEQ in src/llama-cparams.h
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
        -                        switch  --trust_remote_code --enable_chunked_prefill
        -                        switch  --fail_fast_on_attention_window_too_large
    """,
    image="nvcr.io/nvidia/tensorrt-llm/release",
    port=8000,
)
DIALECTS = {d.engine: d for d in (_VLLM, _SGLANG, _LLAMA_CPP, _TRTLLM)}
