"""What `fit` is asked of an engine, as options of the command line."""

from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from kvcalc.cli.chosen import listed
from kvcalc.cli.groups import EngineOption

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvcalc.capacity import FitOptions

LISTS = ("engine", "max_num_seqs", "max_model_len")


def _bytes(name: str, help: str) -> Any:
    return typer.Option(name, help=help + " Digits, 40GiB or 40GB.", rich_help_panel="Instead of what is computed")


_engine = partial(typer.Option, rich_help_panel="Engine")


class EngineOptions(EngineOption, frozen=True):
    """What `fit` is asked, by the names of `FitOptions`, those of LISTS as lists; and how many sequences are required."""

    max_model_len: Annotated[
        str, typer.Option("--max-model-len", "--context", help="Tokens of each sequence, a list; the model's own by default.")
    ] = ""
    max_num_seqs: Annotated[
        str,
        typer.Option("--max-num-seqs", help="Sequences at once, of the whole replica, a list.", metavar="N", show_default=False),
    ] = ""
    require: Annotated[
        int, typer.Option("--require", help="Sequences that have to fit, at the low end of the range.", show_default=False)
    ] = 0
    users: Annotated[
        int, typer.Option("--users", help="Conversations that have to fit, whatever --max-num-seqs is.", show_default=False)
    ] = 0
    from_log: Annotated[
        str, typer.Option("--from-log", help="What `diagnose --save` learned of this machine.", show_default=False)
    ] = ""
    budget: Annotated[
        str, typer.Option("--budget", help="End of the range that answers: low, middle or high; low with --require.")
    ] = ""
    enforce_eager: Annotated[bool, _engine("--enforce-eager", help="No CUDA graphs, nothing compiled.")] = False
    max_loras: Annotated[int, _engine("--max-loras", help="Slots for adapters.")] = 0
    max_lora_rank: Annotated[int, _engine("--max-lora-rank", help="Rank that each slot holds.")] = 16
    limit_mm_per_prompt: Annotated[
        str, _engine("--limit-mm-per-prompt", help="image=0 leaves a vision tower out.", show_default=False)
    ] = ""
    engram_config: Annotated[
        str, _engine("--engram-config", help='{"cpu_offload": false}: tables of n-grams on the GPU.', show_default=False)
    ] = ""
    gpu_memory_utilization: Annotated[
        float | None, typer.Option("--gpu-memory-utilization", help="Share of the memory; the engine's own by default.")
    ] = None
    utilization_of: Annotated[
        str, typer.Option("--utilization-of", help="total or free; the engine's own by default.", show_default=False)
    ] = ""
    max_num_batched_tokens: Annotated[
        str, _engine("--max-num-batched-tokens", help="Tokens of one pass; the engine's default by GPU.")
    ] = ""
    max_in_flight_batches: Annotated[
        int, _engine("--max-in-flight-batches", help="Passes scheduled at once; 0: the engine's own.")
    ] = 0
    num_speculative_tokens: Annotated[
        int, _engine("--num-speculative-tokens", help="Drafted per step; 0: none, or 1 beside a draft.")
    ] = 0
    block_size: Annotated[int, _engine("--block-size", help="Tokens in a cache block; 0: the engine's own.")] = 0
    mamba_cache_mode: Annotated[str, _engine("--mamba-cache-mode", help="none or align: one state page a sequence, or two.")] = (
        "none"
    )
    mamba_checkpoint_blocks: Annotated[
        int, _engine("--mamba-checkpoint-blocks", help="State pages more under align, for checkpoints that layers export.")
    ] = 0
    mamba_ssm_cache_dtype: Annotated[
        str, _engine("--mamba-ssm-cache-dtype", help="Recurrent states: auto, fp32, bf16 or fp16.")
    ] = "auto"
    disable_hybrid: Annotated[
        bool, _engine("--disable-hybrid-kv-cache-manager", help="Windows and chunks allocated like full attention.")
    ] = False
    kv_unified: Annotated[
        bool, _engine("--kv-unified/--no-kv-unified", "-kvu/-no-kvu", help="llama.cpp: one cache for all sequences, or one each.")
    ] = False
    swa_full: Annotated[bool, _engine("--swa-full", help="llama.cpp: windows hold the whole context.")] = False
    cache_type_k: Annotated[
        str, _engine("--cache-type-k", "-ctk", help="llama.cpp: keys in f16, bf16, f32, q8_0 … iq4_nl.", show_default=False)
    ] = ""
    cache_type_v: Annotated[str, _engine("--cache-type-v", "-ctv", help="llama.cpp: values.", show_default=False)] = ""
    n_gpu_layers: Annotated[
        int, _engine("--n-gpu-layers", "-ngl", help="llama.cpp: layers on the GPU, the head among them; -1: all.")
    ] = -1
    n_cpu_moe: Annotated[int, _engine("--n-cpu-moe", "-ncmoe", help="llama.cpp: first layers with experts on the CPU.")] = 0
    cpu_moe: Annotated[bool, _engine("--cpu-moe", "-cmoe", help="llama.cpp: all experts on the CPU.")] = False
    kv_cache_memory_bytes: Annotated[str, _bytes("--kv-cache-memory-bytes", "The budget; weights are not checked.")] = ""
    num_gpu_blocks_override: Annotated[
        int, typer.Option("--num-gpu-blocks-override", help="vLLM's blocks.", rich_help_panel="Instead of what is computed")
    ] = 0
    weight_bytes: Annotated[str, _bytes("--weight-bytes", "Weights of one GPU.")] = ""
    activation_bytes: Annotated[str, _bytes("--activation-bytes", "Activation peak of one GPU.")] = ""
    overhead_bytes: Annotated[str, _bytes("--overhead-bytes", "Libraries, graphs and collectives of one GPU.")] = ""
    shared_prefix: Annotated[str, typer.Option("--shared-prefix", help="First tokens that all sequences have in common.")] = "0"
    mtp: Annotated[bool, typer.Option("--mtp", help="With the multi-token-prediction layers.")] = False
    draft: Annotated[str, typer.Option("--draft", help="A draft model beside this one.", show_default=False)] = ""
    cpu_offload_gb: Annotated[float, typer.Option("--cpu-offload-gb", help="GiB of each GPU's weights in the host's memory.")] = (
        0.0
    )
    disk_bandwidth: Annotated[
        str, typer.Option("--disk-bandwidth", help="That weights are loaded at, as 7GB/s.", show_default=False)
    ] = ""
    kv_offloading_bytes: Annotated[
        str, typer.Option("--kv-offloading-bytes", help="Host memory for the cache, per GPU.", show_default=False)
    ] = ""

    def options(self, told: "Mapping[str, Any]") -> "list[FitOptions]":
        """Every combination of the lists, for at least as many sequences as are required.

        told: by a command line, where nothing else is said here.
        """
        from kvcalc.capacity import FitOptions
        from kvcalc.capacity.learned import read_learned
        from kvcalc.errors import UserError
        from kvcalc.library.words import from_words, spelled

        if self.require < 0:
            raise UserError(f"--require {self.require} is not a number of sequences")
        default = EngineOptions()
        own = {name: value for name, value in msgspec.structs.asdict(self).items() if value != getattr(default, name)}
        if self.from_log and "engine" not in own:
            told = {"engine": read_learned(self.from_log).engine} | dict(told)
        if "max_num_seqs" in own:
            told = {name: value for name, value in told.items() if name != "users"}
        given = dict(told) | own | ({"hybrid": False} if self.disable_hybrid else {})
        points = product(*(listed(str(given.get(name, getattr(default, name))), spelled(name)) for name in LISTS))
        return [from_words(FitOptions, given | dict(zip(LISTS, point, strict=True))) for point in points]
