"""Load models and GPUs from names and files, change their fields, and list them as records.

A model can also consist of dimensions only. Its cache can be computed, but not its weights.
"""

import os
import re
from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

import msgspec
from msgspec.structs import replace

from kvcalc.errors import UserError, join_words, nearest, visible
from kvcalc.gpu.gpu import PEAKS, Gpu
from kvcalc.layers.attention import Grouped, Latent
from kvcalc.library import presets
from kvcalc.library.files import MAX_YAML_BYTES, parse_yaml, read_text, scalar
from kvcalc.library.machine import MachineGpu, read_machine
from kvcalc.library.presets import key, preset_files
from kvcalc.model.memory import cache_size, size_record
from kvcalc.model.model import Layer, Model
from kvcalc.model.precision import Precision
from kvcalc.question.size_options import DimensionOptions
from kvcalc.records import JsonObject
from kvcalc.records.size import SizeRecord, WeightsRecord
from kvcalc.units import parse_bytes, parse_rate, parse_tokens

if TYPE_CHECKING:
    from kvcalc.records.presets import GpuPresetRecord, ModelPresetRecord

_SETTABLE = """\
layers
hidden_size
vocab_size
max_context
tie_word_embeddings
dtype
kv_cache_dtype
position_embeddings
""".splitlines()
_OF_A_LAYER = set(Layer.__struct_fields__) - {"parts", "shared"}


def with_changes(model: Model, changes: list[str]) -> Model:
    """Return `model` with the changes of `--set` applied, after new checks.

    Args:
        model: The model.
        changes: `KEY=VALUE` or `KIND.KEY=VALUE`. KEY is a field of the model, of a kind of layer,
            or of a part (a mixer or FFN) in it. KIND is a key of the model's `kinds`. Without KIND,
            the change applies to every kind of layer with this field. The value `null` removes the
            field's value.

    Raises:
        UserError: A key is unknown or a value is invalid. The message names the nearest keys.
    """
    if not changes:
        return model
    data = msgspec.json.decode(msgspec.json.encode(model))  # lists for tuples, as from a file
    for change in changes:
        target, sign, value = change.partition("=")
        if not sign or not target.strip():
            raise UserError(f"change {change!r} should read KEY=VALUE or KIND.KEY=VALUE")
        _apply(data, target.strip(), _parsed(value.strip()))
    file_name = f"{model.name} with {', '.join(changes)}"
    return presets.build(data, Model, file_name).checked(file_name)


def _parsed(text: str) -> Any:
    try:
        value = scalar(text)
    except (ValueError, OverflowError):
        raise UserError(f"value {text!r} is not a usable number") from None
    if isinstance(value, str) and value[:1].isdigit() and value[-1:].lower() in "kmg":
        return parse_tokens(value, "value")
    return value


def _apply(data: JsonObject, target: str, value: Any) -> None:
    """Set a field of the model, or of every layer kind and part that has it."""
    kind, _, key = target.rpartition(".")
    if kind and kind not in data["kinds"]:
        raise UserError(f"{target}: unknown layer kind {kind!r}", nearest(kind, data["kinds"]))
    if not kind and key in _SETTABLE:
        data[key] = value
        return
    layers = [data["kinds"][kind]] if kind else list(data["kinds"].values())
    parts = [part for layer in layers for part in (*layer["parts"], *layer["shared"])]
    holders = [part for part in parts if key in part and key != "type"]
    if key in _OF_A_LAYER:
        holders = layers
    if not holders:
        keys = {name for part in parts for name in part} - {"type"}
        raise UserError(
            f"{target}: no layer of {data['name']} has {key!r}",
            nearest(key, [*keys, *_SETTABLE]),
        )
    for holder in holders:
        holder[key] = value


_ADDRESS = re.compile(
    r"(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co)/([^/?#]+/[^/?#]+)"
    r"(?:/tree/(?!main\b)([^/?#]+))?(?!/(?:blob|resolve)/.*\.gguf).*"
)
_REMOTE = ("hf:", "ms:", "ollama:", "http://", "https://")
_ID = re.compile(r"^huggingface_id:\s*['\"]?([^\s'\"#]+)", re.MULTILINE)
_HUB_NAME = re.compile(r"(?!.*\.(?:ya?ml|json|gguf)$)[^/.~][^/]*/[^/.~][^/]*", re.IGNORECASE)
AUTO = "auto"  # the GPUs of this machine
NAMED_TOLERANCE = 0.12  # relative difference allowed for a GPU with a driver's name
_GENERIC_WORDS = re.compile(
    r"\b(nvidia|amd|geforce|tesla|instinct|graphics|edition|generation|gpu)\b"
)
_OTHER_GPUS = ("mig", "laptop", "super", "ti")  # words that make a name another GPU's
MIN_MEMORY_BYTES = 1 << 20  # bytes; a smaller number is probably GiB without the unit
Checked = TypeVar("Checked", Model, Gpu)


def load_model(name: str, changes: list[str] | None = None) -> Model:
    """Return the model that a name means, read from a preset, a file or a server.

    Args:
        name: A preset or its `huggingface_id`, a YAML or GGUF file, a config.json or its folder, or
            a name that `load_remote` accepts, such as `org/name`.
        changes: The `KEY=VALUE` changes of `--set`; None for none. Only changes that settle unclear
            keys in a config.json of an unknown type are applied here, and removed from this list.

    Raises:
        UserError: Nothing has this name (the message names near matches), or a file is invalid (the
            message names file, line and key).
    """
    if not name.strip():
        raise UserError("the model's name is empty")
    name = hub_name(name.strip())
    if name.startswith(_REMOTE) or is_hub_name(name):
        preset = published().get(name.removeprefix("hf:").lower())
        if preset:
            return read(preset_files("models")[preset], Model)
        from kvcalc.library.huggingface.hub import load_remote

        return load_remote(name, changes)
    place = locate(name, "models")
    suffix = place.path.suffix.lower()
    if suffix in (".yaml", ".yml"):
        model = read_preset(place.path, name)
    elif suffix == ".gguf":
        from kvcalc.library.gguf_model import read_gguf

        model = read_gguf(place.path)
    else:
        from kvcalc.library.huggingface import read_config
        from kvcalc.library.safetensors_header import read_from, with_file_bytes

        model = read_config(place.path, changes)
        folder = place.path.parent if place.path.name == "config.json" else place.path
        model = with_file_bytes(model, read_from(folder), str(folder))
    is_alias = model.name in model.checkpoints
    notes = (*model.notes, place.remark) if place.remark and not is_alias else model.notes
    return replace(model, notes=notes, file="" if place.preset else name)


def load_gpu(name: str) -> Gpu:
    """Return the GPU that a name means.

    Args:
        name: A GPU preset or one of its aliases, a driver's name such as `NVIDIA-A10G`, a YAML
            file, or `auto` for the first GPU of this machine.

    Raises:
        UserError: The name is unknown. The message names near matches.
    """
    if not name.strip():
        raise UserError("the GPU's name is empty")
    if name.lower() == AUTO:
        return machine_gpu(read_machine()[0])
    gpu = driver_gpu(name, 0) if _GENERIC_WORDS.search(name.lower()) else None
    return gpu or read(locate(name, "gpus").path, Gpu)


def machine_gpu(found: MachineGpu) -> Gpu:
    """Return the preset of a GPU in this machine, with at most the memory that the driver states.

    A preset has the datasheet values of a GPU. nvidia-smi states up to 2 % more memory than CUDA
    can use, so the driver's figure never enlarges a preset.

    Args:
        found: The GPU as the driver describes it.

    Raises:
        UserError: No preset has this name and memory.
    """
    gpu = driver_gpu(found.name, found.memory_bytes)
    if not gpu:
        raise UserError(
            f"this machine has GPU {found.name!r} with {found.memory_bytes / 2**30:.2f} GiB, "
            "which is not a preset",
            "Give a similar one with --gpu and --memory, or a YAML file",
        )
    return replace(
        gpu, memory_bytes=min(gpu.memory_bytes, found.memory_bytes or gpu.memory_bytes)
    )


def driver_gpu(name: str, memory_bytes: int) -> Gpu | None:
    """Return the GPU preset that fits the driver's name for a GPU.

    Words are removed from the end of the driver's name until a preset has the rest as its name or
    alias. Example: "NVIDIA H100 80GB HBM3" is h100-80gb.

    Args:
        name: The driver's name.
        memory_bytes: Memory that the driver states; 0 if unknown, so any memory fits.

    Returns:
        The preset. None if no preset has such a name, if its memory differs by more than 12% from
        `memory_bytes`, or if the name is of a part of a GPU (MIG) or of a laptop's.
    """
    words = re.split(r"[\s-]+", _GENERIC_WORDS.sub(" ", name.lower().replace("_", " ")).strip())
    while words:
        try:
            gpu = read(presets.find("-".join(words), "gpus"), Gpu)
        except UserError:
            if words.pop() in _OTHER_GPUS:
                return None
            continue
        is_fixed = memory_bytes and not gpu.usable_share  # machines of one SoC differ
        if is_fixed and abs(gpu.memory_bytes / memory_bytes - 1) > NAMED_TOLERANCE:
            return None
        return gpu
    return None


def with_memory(gpu: Gpu, memory: str) -> Gpu:
    """Return `gpu` with other memory than its preset has, as in some machines and modified cards.

    Args:
        gpu: The GPU of a preset.
        memory: Memory such as `36GiB`; '' for the preset's memory. GB means GiB for machines with
            one memory, because they are sold so: a Mac of 64 GB has 64 GiB.

    Raises:
        UserError: The memory is below 1 MiB, such as a plain `36`.
    """
    if not memory:
        return gpu
    size = parse_bytes(
        memory.lower().replace("gb", "gib" if gpu.usable_share else "gb"), "memory"
    )
    if size < MIN_MEMORY_BYTES:
        number = memory.strip()
        raise UserError(
            f"memory {memory!r} is {size:,} bytes",
            f"Write {number if number.isdigit() else 24}GiB",
        )
    return replace(gpu, memory_bytes=size)


def with_rate_between(gpu: Gpu, rate: str) -> Gpu:
    """Return `gpu` with another bandwidth from one GPU to GPUs on other nodes.

    Args:
        gpu: The GPU of a preset.
        rate: Bandwidth of one GPU in one direction, such as `50GB/s`; '' for the preset's value.
    """
    if not rate:
        return gpu
    return replace(gpu, inter_node_bytes_per_s=float(parse_rate(rate, "inter-node-bandwidth")))


class Place(NamedTuple):
    """The file to which the name of a model or GPU refers.

    Attributes:
        path: The file.
        preset: Whether the file is a preset of the user or of kvcalc.
        remark: Sentence for the user if the name could also mean another file; '' otherwise.
    """

    path: Path
    preset: bool = False
    remark: str = ""


def locate(name: str, kind: str) -> Place:
    """Return the file that the name of a model or GPU means.

    A name that looks like a file name means a file. For other names, a folder with a config.json
    comes first, then a preset, then any file with this name.

    Args:
        name: The name.
        kind: `models` or `gpus`.

    Raises:
        UserError: The name is unknown. The message names near matches.
    """
    path = Path(name)
    if re.search(r"[/\\]|^[.~]|\.(ya?ml|json|gguf)$", name, re.IGNORECASE):
        return Place(path)
    exists_here = os.path.exists(path)  # noqa: PTH110 (Path.exists raises without permission)
    try:
        preset = presets.find(name, kind)
    except UserError:
        if exists_here:
            return Place(path)
        raise
    if kind == "models" and os.path.isfile(path / "config.json"):  # noqa: PTH113 (as above)
        return Place(
            path, remark="read from the folder of that name, which comes before the preset"
        )
    remark = f"the preset; write ./{name} for the file here" if exists_here else ""
    if key(preset.stem)[:3] != key(name)[:3]:
        remark = remark or f"the preset with the layers of {name}"
    return Place(preset, True, remark)


def read(path: Path, spec: type[Checked]) -> Checked:
    """Return the model or GPU in a YAML file, after checks of its values.

    Args:
        path: The file, such as a preset.
        spec: The class of the result: `Model` or `Gpu`.

    Raises:
        UserError: The file is invalid. The message names file, line, key and problem.
    """
    data, lines = parse_yaml(read_text(path, MAX_YAML_BYTES), str(path))
    result = presets.build(data, spec, str(path), lines)
    key, problem = result.problem()
    if problem:
        raise presets.located(problem, presets.split_path(key), str(path), lines)
    return result


def read_preset(path: Path, name: str) -> Model:
    """Return the model of a preset, with the names of the checkpoint that an alias means.

    Example: `llama-2-13b-chat` is the preset llama-2-13b with the name of the chat model and its
    name on the Hugging Face Hub.

    Args:
        path: The YAML file of the preset.
        name: The name by which the preset was found.

    Raises:
        UserError: The file is invalid.
    """
    model = read(path, Model)
    for alias, hub_id in model.checkpoints.items():
        if key(alias) == key(name):
            return replace(model, name=alias, huggingface_id=hub_id)
    return model


def changed(model: Model, **fields: object) -> Model:
    """Return `model` with some fields replaced, after new checks of all fields.

    Args:
        model: The model.
        **fields: Field of `Model` → new value.

    Raises:
        UserError: The fields contradict each other, or a value is invalid.
    """
    return replace(model, **fields).checked(model.name)


def hub_name(name: str) -> str:
    """Return the `hf:org/name` that the address of a model's page on the Hugging Face Hub means.

    An address with a revision gives `hf:org/name@revision`. Any other text is returned unchanged.

    Args:
        name: Address such as `https://huggingface.co/org/name`, or another name of a model.
    """
    page = _ADDRESS.fullmatch(name.strip())
    return "@".join(filter(None, (f"hf:{page[1]}", page[2]))) if page else name


@lru_cache(1)
def published() -> dict[str, str]:
    """Return a dictionary: name on the Hugging Face Hub, in lower case → name of the model preset.

    Presets without a `huggingface_id` are left out. Example:
    `published()["qwen/qwen3-14b"]` is "qwen3-14b".
    """
    results: dict[str, str] = {}
    for stem, path in preset_files("models").items():
        with suppress(OSError):
            match = _ID.search(path.read_text(encoding="utf-8", errors="replace"))
            if match:
                results.setdefault(match[1].lower(), stem)
    return results


def is_hub_name(name: str) -> bool:
    """Return whether a name has the form `org/name`, and no file or folder has this path."""
    return bool(_HUB_NAME.fullmatch(name)) and not os.path.lexists(name)


LISTED_CONTEXT = 8192  # tokens at which a listed model's bytes per token are taken, in bf16


def beginning(name: str, kind: str) -> list[str]:
    """Return the presets whose names contain a word anywhere, as choices for the user.

    Case, dots, dashes and blanks do not matter. The list is empty if the word itself is the name of
    a preset or file, because there is no choice then.

    Args:
        name: The word that the user typed.
        kind: `models` or `gpus`.
    """
    try:
        locate(name, kind)
    except UserError:
        stems = preset_files(kind)
        # r1 is in deepseek-r1, and not in solar-10.7b
        verbatim = [stem for stem in stems if name.lower() in stem]
        return verbatim or [stem for stem in stems if key(name) in key(stem)]
    return []


def _presets(kind: str, spec: type[Checked], names: Sequence[str]) -> list[Checked]:
    files = preset_files(kind)
    return [read(path, spec) for name, path in files.items() if not names or name in names]


def all_models(family: str, attention: str, names: Sequence[str]) -> list[Model]:
    """Return the models of all matching presets, by family and then by rising parameter count.

    Args:
        family: Only presets with this text in the name of the family or of the model; '' for all.
        attention: Only presets with this text in the printed name of the attention, such as MLA; ''
            for all.
        names: Only presets with these names; empty for all.
    """
    family, attention = family.lower(), attention.lower()
    matches = [
        model
        for model in _presets("models", Model, names)
        if family in f"{model.family.lower()} {model.name}"
        and attention in model.attention.lower()
    ]
    return sorted(matches, key=lambda model: (model.family, model.parameters))


def all_gpus(vendor: str = "", names: Sequence[str] = ()) -> list[Gpu]:
    """Return the GPUs of all matching presets, by vendor and then by falling memory bandwidth.

    Args:
        vendor: Only presets with this text in the name of vendor, architecture or GPU; '' for all.
        names: Only presets with these names; empty for all.
    """
    matches = [
        gpu
        for gpu in _presets("gpus", Gpu, names)
        if vendor.lower() in f"{gpu.vendor} {gpu.architecture} {gpu.name}".lower()
    ]
    return sorted(matches, key=lambda gpu: (gpu.vendor, -gpu.bandwidth_bytes_per_s))


def preset_text(name: str, kind: str) -> str:
    """Return the text of a preset's YAML file, including its sources.

    Args:
        name: Name of the preset.
        kind: `models` or `gpus`.
    """
    return visible(read_text(locate(name, kind).path, MAX_YAML_BYTES).replace("\r\n", "\n"))


def model_record(model: Model) -> "ModelPresetRecord":
    """Return the flat record of a model preset that `kvcalc models --format` prints.

    `bytes_per_token` is the number of bytes that one more token adds to a bf16 KV cache, over all
    layers. It applies to a sequence of 8,192 tokens, in which short windows are full.

    Args:
        model: The model of the preset.
    """
    return {
        "model": model.name,
        "family": model.family,
        "parameters": model.parameters,
        "active_parameters": model.active_parameters,
        "parameters_exact": model.parameters_exact,
        "layers": model.layers,
        "hidden_size": model.hidden_size,
        "attention": model.attention,
        "bytes_per_token": cache_size(
            model, LISTED_CONTEXT, precision=Precision("bf16", "bf16")
        ).slope,
        "max_context": model.max_context,
        "huggingface_id": model.huggingface_id,
        "source": "; ".join(s.url for s in model.source),
    }


# Keys of a GPU's record, in the order of the columns.
_GPU_KEYS = """
    gpu vendor architecture memory_bytes usable_bytes memory_type bandwidth_bytes_per_s
    fp64_flops_per_s fp32_flops_per_s tf32_flops_per_s bf16_flops_per_s fp16_flops_per_s
    fp8_flops_per_s int8_flops_per_s fp6_flops_per_s fp4_flops_per_s vector_fp32_flops_per_s
    knee sms register_bytes_per_sm shared_memory_bytes_per_sm shared_memory_bytes_per_s
    l2_bytes l2_bytes_per_s link_bytes_per_s host_link_bytes_per_s host host_gpus
    host_memory_bytes disk_bytes disk_bytes_per_s power_w per source
"""


def gpu_record(gpu: Gpu) -> "GpuPresetRecord":
    """Return the flat record of a GPU preset that `kvcalc gpus --format` prints.

    Values that the vendor does not publish are null.

    Args:
        gpu: The GPU of the preset.
    """
    values = {
        "gpu": gpu.name,
        "memory_type": gpu.memory_type or None,
        "vector_fp32_flops_per_s": gpu.vector_peak,
        "source": "; ".join(s.url for s in gpu.source),
    }
    values |= {f"{dtype}_flops_per_s": gpu.flops_per_s.get(dtype) for dtype in PEAKS}
    if host := gpu.host:
        values |= {
            "host": host.name,
            "host_gpus": host.gpus,
            "host_memory_bytes": host.memory_bytes,
            "disk_bytes": host.disk_bytes,
            "disk_bytes_per_s": host.disk_bytes_per_s,
        }

    fields = {key: getattr(gpu, key, None) for key in _GPU_KEYS.split()}
    return cast("GpuPresetRecord", fields | values)


UNKNOWN = cast("WeightsRecord", dict.fromkeys(WeightsRecord.__annotations__))


class Dimensions(DimensionOptions, frozen=True):
    """The dimensions of a model whose layers are all equal, for a cache size without a preset.

    A layer has KV heads of head_dim elements, or latents of kv_lora_rank elements and a RoPE key of
    qk_rope_head_dim elements. In every field 0 means that the user did not give the value.

    Attributes:
        layers: Number of layers, all with their own KV cache.
        kv_heads: KV heads per layer.
        head_dim: Elements of a key or value of one head.
        hidden_size: Width of the model, given instead of `kv_heads` and `head_dim`. Keys and values
            are then as wide as the model (MHA).
        heads: Query heads per layer, only for the comparison with MHA.
        sliding_window: Maximum tokens that a layer stores.
        kv_lora_rank: Elements of MLA's latent, which replaces the KV heads.
        qk_rope_head_dim: Elements of MLA's RoPE key.
    """

    def model(self) -> Model:
        """Return a model with only these layers, to compute the size of their KV cache.

        Its name states what a layer caches, such as `48 layers of 8 × 128`.

        Raises:
            UserError: The dimensions are invalid.
        """
        return self.checked()._build(self._name())

    def compared(self) -> Model:
        """Return a model with only these layers, to compare their attention with MHA and others.

        Its name states its number of layers.

        Raises:
            UserError: The dimensions are invalid, or the number of query heads is missing.
        """
        result = self.checked()
        missing = [_option(name) for name in ("heads", "head_dim") if not getattr(result, name)]
        if missing:
            raise UserError(
                f"other attention of these layers needs {join_words(missing)}",
                "Write --layers 32 --heads 32 --kv-heads 8 --head-dim 128",
            )
        return result._build(f"{self.layers} layers")

    def checked(self) -> "Dimensions":
        """Return these dimensions with KV heads and head_dim instead of hidden_size.

        From hidden_size follow one KV head for each query head (MHA), and head_dim = hidden_size ÷
        number of heads. Without `heads` it is one head. Without hidden_size, KV heads and latents,
        there is one KV head for each query head too.

        Raises:
            UserError: A value is missing, contradicts another or is outside its range.
        """
        for name, value in msgspec.structs.asdict(self).items():
            limit = 100_000 if name == "layers" else 10**8
            if not 0 <= value <= limit:
                raise UserError(f"{_option(name)} {value} is outside 1 to {limit:,}")
        needed = ["layers", "head_dim"] if self.heads else ["layers", "kv_heads", "head_dim"]
        if self.kv_lora_rank:
            needed = ["layers", "kv_lora_rank"]
        if self.hidden_size:
            needed = ["layers"]
        missing = [_option(name) for name in needed if not getattr(self, name)]
        if missing:
            hint = (
                "Write --layers 48 --kv-heads 56 --head-dim 128, or --layers 61 "
                "--kv-lora-rank 512 --qk-rope-head-dim 64"
            )
            raise UserError(f"a cache by its dimensions needs {join_words(missing)}", hint)
        if self.kv_lora_rank and self.kv_heads:
            raise UserError("a layer keeps --kv-heads or --kv-lora-rank, not both")
        if self.qk_rope_head_dim and not self.kv_lora_rank:
            raise UserError("--qk-rope-head-dim is of a latent, and there is no --kv-lora-rank")
        if not self.hidden_size:
            is_mha = not self.kv_heads and not self.kv_lora_rank
            return replace(self, kv_heads=self.heads) if is_mha else self
        if self.kv_heads or self.head_dim or self.kv_lora_rank:
            raise UserError(
                "--hidden-size is of MHA as wide as the model, in place of --kv-heads, "
                "--head-dim and --kv-lora-rank"
            )
        heads = max(1, self.heads)
        width, rest = divmod(self.hidden_size, heads)
        if rest:
            raise UserError(
                f"--hidden-size {self.hidden_size} is not a multiple of --heads {heads}"
            )
        return replace(self, hidden_size=0, kv_heads=heads, head_dim=width)

    def _build(self, name: str) -> Model:
        return changed(
            Model(
                name=name,
                hidden_size=1,
                vocab_size=1,
                layers=self.layers,
                kinds={"layer": Layer(parts=(self._mixer(),))},
            )
        )

    def _mixer(self) -> Grouped | Latent:
        window = self.sliding_window or None
        if not self.kv_lora_rank:
            return Grouped(
                num_attention_heads=self.heads or self.kv_heads,
                num_key_value_heads=self.kv_heads,
                head_dim=self.head_dim,
                sliding_window=window,
            )
        width = self.head_dim or 1
        return Latent(
            num_attention_heads=self.heads or 1,
            kv_lora_rank=self.kv_lora_rank,
            qk_nope_head_dim=width,
            qk_rope_head_dim=self.qk_rope_head_dim,
            v_head_dim=width,
            sliding_window=window,
        )

    def _name(self) -> str:
        layers = f"{self.layers} layer{'s' * (self.layers != 1)}"
        if self.kv_lora_rank:
            return f"{layers} of {self.kv_lora_rank} + {self.qk_rope_head_dim}"
        if self.hidden_size:
            return f"{layers} of {self.hidden_size}"
        return f"{layers} of {self.kv_heads} × {self.head_dim}"

    def record(self, model: Model, *arguments: Any) -> SizeRecord:
        """Return the record that `kvcalc size` prints for a model with only dimensions.

        Values that need weights are null. The ratio to MHA is null unless `heads` is given.

        Args:
            model: The result of `model()`.
            arguments: Context, batch size, data types, block size and parallelism, as `size_record`
                takes them after the model.
        """
        record: SizeRecord = {**size_record(model, *arguments), **UNKNOWN}
        if not self.heads or (self.kv_lora_rank and not self.head_dim):
            record["mha_ratio"] = None
        if not (self.heads or self.kv_lora_rank):
            record["attention"] = f"{self.kv_heads} KV heads" if self.kv_heads else "MHA"
        return record


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"
