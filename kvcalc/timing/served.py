"""Models as measured rows name them: the preset behind a Hugging Face path, and what rows of its modules leave unsaid."""

from functools import cache
from pathlib import Path

from kvcalc.errors import UserError, few
from kvcalc.layers.attention.sparse import Sparse
from kvcalc.library import catalog
from kvcalc.library.load import read
from kvcalc.model.spec import Model


@cache
def served_model(path: str) -> Model | None:
    """The preset whose huggingface_id a served model's path has, or begins with (an instruction-tuned or fp8 copy of it).

    The longest such name wins, and of names that differ by dots alone (OPT-1.3B, OPT-13B) the one with the path's dots.
    """
    name = path.rsplit("/", 1)[-1]
    wanted, exact = catalog.key(name), catalog.key(name, dots=True)
    best, rank = None, (0, False)
    for found in catalog.preset_files("models").values():
        model = _model_of(found)
        if model and model.huggingface_id:
            own = model.huggingface_id.rsplit("/", 1)[-1]
            known = len(catalog.key(own)), exact.startswith(catalog.key(own, dots=True))
            if wanted.startswith(catalog.key(own)) and known > rank:
                best, rank = model, known
    return best


@cache
def layer_kind(path: str, name: str) -> str:
    """The kind of layer of that name of a served model, the commonest for ''. Raises ValueError where there is none."""
    model = served_model(path)
    if model is None:
        raise ValueError(f"model {path!r} is no preset" if path else "model is empty")
    if name and name not in model.kinds:
        raise ValueError(f"{model.name} has no layer {name!r} but {few([*model.kinds])}")
    return name or max(model.counts, key=model.counts.__getitem__)


@cache
def sparse_module(path: str) -> tuple[float, ...] | None:
    """Of a served model's sparse attention: hidden size, q_lora_rank, kv_lora_rank, rope, nope and value widths, index heads
    and their width, top-k. None where no preset has such attention.
    """
    model = served_model(path)
    parts = [part for layer in model.kinds.values() for part in layer.parts] if model else []
    module = next((part for part in parts if isinstance(part, Sparse) and part.indexer), None)
    if model is None or module is None or not module.q_lora_rank:
        return None
    widths = (module.qk_rope_head_dim, module.qk_nope_head_dim, module.v_head_dim)
    index = (module.index_n_heads, module.index_head_dim, module.index_topk)
    return tuple(float(x) for x in (model.hidden_size, module.q_lora_rank, module.kv_lora_rank, *widths, *index))


def _model_of(path: Path) -> Model | None:
    try:
        return read(path, Model)
    except UserError:
        return None
