"""List the presets and build the records of `models` and `gpus`, one flat record each."""

from collections.abc import Sequence
from typing import Any

from kvcalc.errors import UserError, visible
from kvcalc.gpu.spec import PEAKS, Gpu
from kvcalc.library.catalog import key, preset_files
from kvcalc.library.files import MOST_YAML, read_text
from kvcalc.library.load import locate, read
from kvcalc.model.memory import cache_size
from kvcalc.model.precision import Precision
from kvcalc.model.spec import Model

LISTED_CONTEXT = 8192  # tokens at which a listed model's bytes per token are taken, in bf16


def beginning(name: str, kind: str) -> list[str]:
    """Return the presets of `kind` (models, gpus) whose names contain `name`.

    The list is empty if a preset has exactly this name.
    """
    try:
        locate(name, kind)
    except UserError:
        return [stem for stem in preset_files(kind) if key(name) in key(stem)]
    return []


def all_models(family: str = "", attention: str = "", names: Sequence[str] = ()) -> list[Model]:
    """Return the models, sorted by family and parameters, that match these words and attention.

    Words match the family or the name.

    Args:
        names: Return only these models.
    """
    paths = (path for name, path in preset_files("models").items() if not names or name in names)
    found = sorted((read(path, Model) for path in paths), key=lambda m: (m.family, m.parameters))
    family, attention = family.lower(), attention.lower()
    return [m for m in found if (family in m.family.lower() or family in m.name) and attention in m.attention.lower()]


def all_gpus(vendor: str = "", names: Sequence[str] = ()) -> list[Gpu]:
    """Return the GPUs, sorted by vendor and falling memory bandwidth, that match this word.

    The word matches the vendor, the architecture or the name.

    Args:
        names: Return only these GPUs.
    """
    paths = (path for name, path in preset_files("gpus").items() if not names or name in names)
    found = sorted((read(path, Gpu) for path in paths), key=lambda g: (g.vendor, -g.bandwidth_bytes_per_s))
    return [g for g in found if vendor.lower() in f"{g.vendor} {g.architecture} {g.name}".lower()]


def preset_text(name: str, kind: str) -> str:
    """Return the text of the preset file called `name`, with its sources; kind: models or gpus."""
    return visible(read_text(locate(name, kind).path, MOST_YAML).replace("\r\n", "\n"))


def model_record(model: Model) -> dict[str, Any]:
    """Return one model as a flat record.

    bytes_per_token covers all layers of one sequence at 8,192 tokens in bf16.
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
        "bytes_per_token": cache_size(model, LISTED_CONTEXT, precision=Precision("bf16", "bf16")).slope,
        "max_context": model.max_context,
        "huggingface_id": model.huggingface_id,
        "source": "; ".join(s.url for s in model.source),
    }


def gpu_record(gpu: Gpu) -> dict[str, Any]:
    """Return one GPU as a flat record; null if its vendor does not publish a figure."""
    return {
        "gpu": gpu.name,
        "vendor": gpu.vendor,
        "architecture": gpu.architecture,
        "memory_bytes": gpu.memory_bytes,
        "usable_bytes": gpu.usable_bytes,
        "memory_type": gpu.memory_type or None,
        "bandwidth_bytes_per_s": gpu.bandwidth_bytes_per_s,
        **{f"{dtype}_flops_per_s": gpu.flops_per_s.get(dtype) for dtype in PEAKS},
        "vector_fp32_flops_per_s": gpu.vector_flops_per_s.get("fp32"),
        "knee": gpu.knee,
        "sms": gpu.sms,
        "register_bytes_per_sm": gpu.register_bytes_per_sm,
        "shared_memory_bytes_per_sm": gpu.shared_memory_bytes_per_sm,
        "shared_memory_bytes_per_s": gpu.shared_memory_bytes_per_s,
        "l2_bytes": gpu.l2_bytes,
        "l2_bytes_per_s": gpu.l2_bytes_per_s,
        "link_bytes_per_s": gpu.link_bytes_per_s,
        "host_link_bytes_per_s": gpu.host_link_bytes_per_s,
        "host": gpu.host.name if gpu.host else None,
        "host_gpus": gpu.host.gpus if gpu.host else None,
        "host_memory_bytes": gpu.host.memory_bytes if gpu.host else None,
        "disk_bytes": gpu.host.disk_bytes if gpu.host else None,
        "disk_bytes_per_s": gpu.host.disk_bytes_per_s if gpu.host else None,
        "power_w": gpu.power_w,
        "per": gpu.per,
        "source": "; ".join(s.url for s in gpu.source),
    }
