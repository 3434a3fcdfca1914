"""What llama.cpp keeps of a layer where that is not what the model's own code does.

Rules as of autumn 2026: `src/llama-kv-cache.cpp` (is_mla), `src/models/minicpm3.cpp`, `plm.cpp`, `llama4.cpp`, `exaone4.cpp`, and
`load_swa_pattern` of the types whose conversion (`conversion/*.py`) writes no pattern of windows into the file.
"""

from collections.abc import Sequence

import msgspec

from kvcalc.capacity.engines.engine import of_part
from kvcalc.errors import UserError
from kvcalc.layers.attention import Latent
from kvcalc.layers.cache import CacheEntry, Span
from kvcalc.layers.part import Part
from kvcalc.model.spec import Model

CHUNK = 8192  # tokens: no key of a file says another
# Of how many layers the last has no window.
_PERIODS = {"gemma2": 2, "gemma3_text": 6, "gpt_oss": 2, "cohere2": 4, "afmoe": 4, "llama4_text": 4, "llama4": 4}
PATTERNED = (*_PERIODS, "gemma3", "gpt-oss")  # also as GGUF files call them, whose own patterns are read
_WINDOWED_DEPTH = {"exaone4": 64}  # types that have windows at this depth alone


def entries(model: Model, part: Part) -> Sequence[CacheEntry]:
    """What is kept of one part: of latents whose kv_up is one tensor keys and values of every head; chunks of CHUNK tokens.

    Raises UserError where llama.cpp has windows in other layers than the model.
    """
    _check_order(model)
    if isinstance(part, Latent) and _by_head(model, part):
        if model.model_type == "minicpm3" and part.v_head_dim != (usual := model.hidden_size // part.num_attention_heads):
            raise UserError(
                f"llama.cpp loads no minicpm3 with values of {part.v_head_dim}: its files say no width, which is then "
                f"hidden_size / heads, {usual}",
                hint="Engine none counts its content",
            )
        return part.expanded(part.v_head_dim)
    found = of_part(model, part)
    return [msgspec.structs.replace(e, limit=CHUNK) if e.span is Span.CHUNK else e for e in found]


def remarks(model: Model) -> tuple[str, ...]:
    """What is said where that is not what the model's own code keeps."""
    said = []
    if any(_by_head(model, part) for layer in model.kinds.values() for part in layer.parts):
        said.append("llama.cpp keeps keys and values of every head of this model, not its latents")
    if any(e.span is Span.CHUNK and e.limit != CHUNK for layer in model.kinds.values() for e in layer.entries):
        said.append(f"llama.cpp's chunks are of {CHUNK:,} tokens, whatever a file says")
    return tuple(said)


def _by_head(model: Model, part: Part) -> bool:
    return isinstance(part, Latent) and (part.heads_cached or model.model_type in ("minicpm3", "plm"))


def unwindowed(model: Model) -> bool:
    """Whether llama.cpp reads no window of this model, although it knows its type's."""
    return model.layers != _WINDOWED_DEPTH.get(model.model_type, model.layers)


def _check_order(model: Model) -> None:
    """Raises UserError where the model's windows are not in the layers where llama.cpp has its type's."""
    period = _PERIODS.get(model.model_type, 0)
    limited = {kind: any(e.limit for e in layer.entries if e.grows) for kind, layer in model.kinds.items()}
    if (
        period
        and any(limited.values())
        and [limited[kind] for kind in model.order] != [n % period < period - 1 for n in range(model.layers)]
    ):
        raise UserError(
            f"llama.cpp takes every {period}th layer of {model.model_type} for one without a window, not so {model.name}",
            hint="Engine none counts its content",
        )
