"""Options that commands share, in vLLM's and Hugging Face's words."""

from enum import StrEnum
from functools import partial
from typing import Annotated, Any

import typer

from kvcalc.library.engine_choice import ENGINE_NAMES

MODELS_HELP = "Preset names, YAML or GGUF files, config.json files or their folders, or org/name on the Hugging Face Hub."
MODEL_HELP = "A preset's name, a YAML or GGUF file, a config.json or its folder, or org/name on the Hugging Face Hub."


class OutputFormat(StrEnum):
    table = "table"
    json = "json"
    csv = "csv"
    markdown = "markdown"


class ByteUnits(StrEnum):
    gib = "gib"
    si = "si"
    bytes = "bytes"


def _sized(*names: str, help: str, panel: str = "Several GPUs") -> Any:
    return typer.Option(*names, help=help, rich_help_panel=panel)


Models = Annotated[list[str], typer.Argument(help=MODELS_HELP, show_default=False)]
OneModel = Annotated[str, typer.Argument(help=MODEL_HELP, show_default=False)]
SomeModels = Annotated[list[str], typer.Argument(help=MODELS_HELP, metavar="MODEL…", show_default=False)]
Contexts = Annotated[str, typer.Option("--context", help="Tokens cached, the step's own included: 4096, 4k, 1k,8k,128k.")]
Batches = Annotated[str, typer.Option("--batch-size", "--bs", help="Sequences at once; a list makes more rows.")]
PrintedAs = Annotated[OutputFormat, typer.Option("--format", help="How to print.")]
Dtype = Annotated[
    str, typer.Option("--dtype", help="Weights and compute: auto (as published), bf16, fp16, fp32, fp64, fp8; a list.")
]
CacheDtype = Annotated[
    str, typer.Option("--kv-cache-dtype", help="auto, bf16, fp16, fp8, int8, int4, nvfp4, fp8_ds_mla, q8_0 …; a list.")
]
Quant = Annotated[
    str, typer.Option("--quantization", "-q", help="Storage of the weight matrices: fp8, awq, gptq, nvfp4, mxfp4 …; a list.")
]
BlockSize = Annotated[int, typer.Option("--block-size", help="Tokens in a cache block.")]
Sets = Annotated[list[str], typer.Option("--set", help="KEY=VALUE or KIND.KEY=VALUE; repeatable.", show_default=False)]
Explain = Annotated[bool, typer.Option("--explain", help="Print each formula with the numbers put in.")]
Units = Annotated[ByteUnits, typer.Option("--units", help="Bytes in tables: gib (2^30), si (GB of 10^9) or exact bytes.")]
Wide = Annotated[bool, typer.Option("--wide", help="All columns of the table.")]
Tp = Annotated[str, _sized("--tensor-parallel-size", "-tp", "--tp", help="GPUs that share heads and columns; a list.")]
Pp = Annotated[int, _sized("--pipeline-parallel-size", "-pp", "--pp", help="GPUs that share the stack of layers.")]
Dp = Annotated[int, _sized("--data-parallel-size", "-dp", "--dp", help="Groups that share the sequences.")]
Ep = Annotated[int, _sized("--expert-parallel-size", "--ep", help="GPUs that share the experts.")]
ExpertParallel = Annotated[bool, _sized("--enable-expert-parallel", help="Expert parallelism over all tp·dp GPUs.")]
Dcp = Annotated[int, _sized("--decode-context-parallel-size", "-dcp", "--dcp", help="GPUs that share the cached tokens.")]
Nodes = Annotated[int, _sized("--nodes", help="Nodes they stand on; 0: the fewest that the GPU's link allows.")]
InterNode = Annotated[
    str, _sized("--inter-node-bandwidth", help="Of each GPU between nodes, one direction, as 50GB/s; the preset's unless given.")
]
Gpus = Annotated[str, typer.Option("--gpu", help="GPU presets or YAML files, comma-separated.")]
Memory = Annotated[
    str,
    typer.Option("--memory", help="Of each GPU or of the machine, where it has less than the preset: 36GiB.", show_default=False),
]
_engine = partial(typer.Option, rich_help_panel="Engine")
Engine = Annotated[str, _engine("--engine", help=f"{', '.join(ENGINE_NAMES[:-1])}, or none: content only, and bounds.")]
EngineVersion = Annotated[str, _engine("--engine-version", help="0.11, 0.11.2 or latest.", show_default=False)]
Bounds = Annotated[bool, _engine("--bounds", help="Datasheet bounds instead of predictions.")]
Calibration = Annotated[str, _engine("--calibration", help="Your own calibration, by its name or file.", show_default=False)]
CalibrationFrom = Annotated[
    str, _engine("--calibration-from", help="Scale another GPU's calibration by datasheet figures.", show_default=False)
]
Mixed = Annotated[
    bool,
    _engine("--mixed", help="No effect any more: each GPU keeps its own basis; --bounds has bounds for all.", hidden=True),
]
Stack = Annotated[str, typer.Option("--stack", hidden=True)]
MlaForm = Annotated[str, typer.Option("--mla-form", help="auto, absorbed or expanded.")]
Plot = Annotated[str, typer.Option("--plot", help="Write a picture: .png, .svg or .pdf; - draws in the terminal.")]
Style = Annotated[str, typer.Option("--style", help="Of the picture: light, dark or slides.")]
Price = Annotated[float, typer.Option("--price-per-hour", help="Of one GPU; adds cost per million tokens.")]
