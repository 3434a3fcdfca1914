"""Options about data types, parallelism, GPUs and engines, and options of several commands."""

from functools import partial
from typing import Annotated, NamedTuple

from kvcalc.errors import UserError
from kvcalc.question.options import Argument, Option, Question

ENGINE_NAMES = ("vllm", "sglang", "trtllm", "llama.cpp", "none")
DATASHEET = "datasheet"  # no calibration: times are datasheet bounds
AUTO = 0  # `--tp auto`
MAX_OFFLOAD_GIB = 1 << 20
MLA_FORMS = ("auto", "absorbed", "expanded")

CONTEXT_WORDS = (
    "ctx ctx-size context context-len context-length num-ctx n-ctx seq-len seqlen max-seq-len "
    "length tokens max-model-len"
)
PROMPT_WORDS = "prompt prompt-len prompt-tokens input input-tokens random-input-len"
OUTPUT_WORDS = "output-tokens max-tokens gen-len generation-len num-predict random-output-len"
USER_WORDS = "users concurrency num-users batch max-batch-size n-seqs num-seqs parallel"
PREFIX_WORDS = "prefix prefix-cache prefix-caching enable-prefix-caching"
OFFLOAD_WORDS = "offload kv-offload cpu-offload swap-space"
DRAFT_WORDS = "speculative-model draft-model speculate spec"
RATE_WORDS = "qps request-rate rps"
TTFT_WORDS = "ttft slo goodput"
TPOT_WORDS = "tpot itl slo goodput"
DISAGGREGATE_WORDS = "disaggregated disaggregation prefill-decode pd"

MODEL_HELP = "Preset, GGUF, YAML, config.json, or Hugging Face name"
Models = Annotated[list[str], Argument(MODEL_HELP, takes="MODEL…", words="models")]
OneModel = Annotated[str, Argument(MODEL_HELP, takes="MODEL", words="models")]
GPUS = Option(
    "GPU presets or YAML files; a list, or all",
    takes="GPUS",
    is_common=True,
    words="all gpus",
    called="card device hardware accelerator",
)
DTYPE = Option(
    "Data type of weights and compute; auto is as published; a list",
    takes="DTYPE",
    panel="Data types",
    words="dtypes",
    called="bits weight-dtype precision",
    list_order=6,
)
QUANTIZATION = Option(
    "Weight format: fp8, awq, gptq, nvfp4, mxfp4; a list",
    "--quantization -q",
    takes="FORMAT",
    panel="Data types",
    is_common=True,
    words="quantizations",
    called="bits quant weights weight-dtype weight-quant precision q",
    list_order=5,
)
CACHE_DTYPE = Option(
    "KV cache: auto, bf16, fp8, int4, nvfp4, q8_0; a list",
    takes="DTYPE",
    panel="Data types",
    is_common=True,
    words="cache dtypes",
    called="kv cache-dtype kv-dtype kv-cache kv-quant kv-bits cache-type",
    list_order=4,
)
Gpus = Annotated[str, GPUS]
Settings = Annotated[
    list[str],
    Option(
        "Change a field of the model, as KEY=VALUE or KIND.KEY=VALUE",
        "--set",
        "KEY=VALUE",
        "Model",
    ),
]
Nodes = Annotated[
    int,
    Option(
        "Number of nodes; 0 uses as few as the interconnect allows",
        panel="Parallelism",
        max=4096,
    ),
]
NodeBandwidth = Annotated[
    str,
    Option(
        "Bandwidth per GPU between nodes in one direction: 50GB/s",
        "--inter-node-bandwidth",
        "RATE",
        "Parallelism",
    ),
]
Price = Annotated[
    float,
    Option(
        "Price of one GPU per hour; adds the cost per million tokens",
        takes="MONEY",
        panel="Output",
        called="price cost cost-per-hour",
        max=10**9,
    ),
]
Draft = Annotated[
    str,
    Option(
        "Draft by a model, the first N layers (layers=N) or mtp",
        takes="MODEL",
        is_common=True,
        words="models",
        called=DRAFT_WORDS,
    ),
]
_engine = partial(Option, panel="Engine")
Engine = Annotated[
    str,
    Option(
        f"Engine: {', '.join(ENGINE_NAMES)}",
        takes="NAME",
        panel="Engine",
        is_common=True,
        choices=ENGINE_NAMES,
        called="backend framework",
        read=lambda text, name: text.strip().lower(),
        list_order=3,
    ),
]
EngineVersion = Annotated[
    str, _engine("Version of the engine: 0.11, 0.11.2 or latest", takes="VERSION")
]


def gpu_count(text: str, name: str, low: int = 1) -> int:
    """Return a number of GPUs from `low` up."""
    if not (text.isascii() and text.isdigit() and low <= int(text[:10]) < 10**9):
        hint = f"Give a whole number from {low} up"
        raise UserError(f"{name} {text!r} is not a number of GPUs", hint=hint)
    return int(text)


def _tp(text: str, name: str) -> int:
    return AUTO if text.lower() == "auto" else gpu_count(text, name)


_ranks = partial(Option, panel="Parallelism")


class ShardingOptions(Question, frozen=True):
    """How a model is stored and split. Data types and tensor parallelism are lists."""

    dtype: Annotated[str, DTYPE] = "auto"
    kv_cache_dtype: Annotated[str, CACHE_DTYPE] = "auto"
    quantization: Annotated[str, QUANTIZATION] = ""
    set_: Settings = []
    tp: Annotated[
        int,
        Option(
            "GPUs for tensor parallelism; a list, or auto",
            "--tensor-parallel-size --tp -tp",
            takes="N",
            is_common=True,
            called="gpus num-gpus n-gpus ngpus devices num-devices tensor-parallel",
            read=_tp,
            list_order=3,
        ),
    ] = 1
    pp: Annotated[
        int,
        _ranks("GPUs for pipeline parallelism", "--pipeline-parallel-size --pp -pp"),
    ] = 1
    dp: Annotated[
        int, _ranks("Groups for data parallelism", "--data-parallel-size --dp -dp")
    ] = 1
    ep: Annotated[int, _ranks("GPUs for expert parallelism", "--expert-parallel-size --ep")] = 1
    enable_expert_parallel: Annotated[
        bool, _ranks("Spread the experts over all tensor and data parallel GPUs")
    ] = False
    dcp: Annotated[
        int,
        _ranks(
            "GPUs for decode context parallelism",
            "--decode-context-parallel-size --dcp -dcp",
        ),
    ] = 1


class PlacementOptions(ShardingOptions, frozen=True):
    """How a model is placed on GPUs."""

    gpu: Gpus = "h100"
    memory: Annotated[
        str,
        Option(
            "Usable memory of the GPU or machine, if less than its preset: 36GiB",
            takes="SIZE",
            panel="Memory",
            called="vram gpu-memory ram",
        ),
    ] = ""
    nodes: Nodes = 0
    inter_node_bandwidth: NodeBandwidth = ""


class EngineChoice(NamedTuple):
    """An engine, and the calibration of its times.

    Attributes:
        engine: One of ENGINE_NAMES. `none` counts content only and answers with bounds.
        calibration: A name or a file. '' is the engine's own, `datasheet` is none.
    """

    engine: str
    calibration: str


Bounds = Annotated[bool, _engine("Answer with datasheet bounds instead of predictions")]
Calibration = Annotated[
    str,
    _engine(
        "Your own calibration of times", takes="NAME|FILE", words="calibrations", list_order=2
    ),
]
CalibrationGpu = Annotated[
    str, _engine("Scale another GPU's calibration by datasheets", takes="GPU", words="gpus")
]
Mixed = Annotated[bool, Option(is_hidden=True)]  # without effect
Stack = Annotated[str, Option(is_hidden=True, list_order=1)]


class DeploymentOptions(PlacementOptions, frozen=True):
    """How a model is deployed, and how its times are predicted."""

    engine: Engine = "vllm"
    engine_version: EngineVersion = ""
    bounds: Bounds = False
    calibration: Calibration = ""
    calibration_from: CalibrationGpu = ""
    mixed: Mixed = False
    stack: Stack = ""
    mla_form: Annotated[
        str, _engine("Form of latent attention: auto, absorbed or expanded", choices=MLA_FORMS)
    ] = "auto"

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.choice

    @property
    def choice(self) -> EngineChoice:
        """The engine, and the calibration of its times."""
        return engine_choice(self.engine, self.calibration, self.bounds, self.stack)


def engine_choice(
    engine: str = "vllm", calibration: str = "", bounds: bool = False, stack: str = ""
) -> EngineChoice:
    """Return the engine and the calibration that options name.

    Args:
        stack: The former `--stack`. `datasheet` means `--bounds`, an engine's name means
            `--engine`, anything else means `--calibration`.

    Raises:
        UserError: The engine is unknown, or the options exclude each other.
    """
    if bounds and calibration:
        raise UserError(
            "--bounds and --calibration cannot be combined", hint="Remove one of them"
        )
    calibration = DATASHEET if bounds else calibration
    if stack in ENGINE_NAMES:
        return EngineChoice(stack, calibration)
    return EngineChoice(engine, stack or calibration)


def check_utilization(share: float) -> None:
    """Raise UserError unless `--gpu-memory-utilization` is at most 1; 0 is the default."""
    if not 0 <= share <= 1:
        raise UserError(
            f"gpu-memory-utilization {share} is not above 0 and at most 1",
            hint="Write 0.9 for 90 %",
        )
