"""Count the parameters of a causal language model and the contents of its cache with transformers. No formula is
involved.

The model is built on torch's `meta` device, where tensors have no data and size does not matter. Its
parameters are counted. A forward pass with `use_cache=True` then leaves a cache, whose tensors are counted.
"""

import contextlib
import copy
import re
import types
import warnings
from collections.abc import Iterator
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
import torch.fx.experimental._config
import transformers
from torch import nn
from transformers import AutoConfig, PreTrainedConfig
from transformers.cache_utils import DynamicCache
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL

# Parts of other modalities that a causal LM carries inside.
OTHER = re.compile(r"^(git|model)\.(image_encoder|visual_projection|embed_tokens_extend)\.")
# Types whose causal-LM class is the whole multimodal model.
COMPOSITE = {"gemma3", "gemma3n", "gemma4", "gemma4_unified", "got_ocr2", "fuyu", "llama4", "emu3"}
COMPOSITE |= {"qwen3_5", "qwen3_5_moe", "qwen4_exp", "dots3_note", "mllama", "moss_transcribe_diarize"}
AUTO = ("AutoModelForImageTextToText", "AutoModelForMultimodalLM", "AutoModelForSpeechSeq2Seq", "AutoModelForSeq2SeqLM")
CACHES = ("past_key_values", "cache_params", "state")


class Tensor(NamedTuple):
    """A tensor of one layer's cache, without the batch."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


class Layer(NamedTuple):
    tensors: tuple[Tensor, ...]
    window: int | None


class Measured(NamedTuple):
    """Parameters, tensors of the cache by prompt length, and in `kernels` the columns of the model's convolutions."""

    parameters: int
    caches: dict[int, list[Layer]]
    kernels: set[int]
    repeated: bool  # one tensor is stored as keys and as values


def measure(config: dict[str, Any], lengths: tuple[int, ...]) -> Measured:
    """Return the parameters of the language model in a config.json, and its cache after prompts of these lengths."""
    text, whole = load(config)
    model, parts = build(text, whole)
    found = {id(p): p for part in parts for name, p in part.named_parameters() if not OTHER.search(name)}
    caches, repeated = {}, False
    for tokens in lengths:
        cache, twins = forward(model, tokens)
        repeated |= twins
        caches[tokens] = [
            Layer(tuple(tensors_of(layer)), getattr(layer, "sliding_window", None)) for layer in layers_of(cache, model)
        ]
    kernels = {m.kernel_size[0] for m in model.modules() if isinstance(m, nn.Conv1d)}
    kernels |= {n for key in ("conv_kernel", "conv_L_cache", "linear_conv_kernel_dim") if (n := getattr(text, key, None))}
    return Measured(sum(p.numel() for p in found.values()), caches, kernels, repeated)


def load(config: dict[str, Any]) -> tuple[Any, Any]:
    """Return the config of the language model, and the config of the whole file."""
    config = copy.deepcopy(config)
    inner = config.get("text_config") or {}
    for part in (config, inner):
        part.pop("quantization_config", None)
    whole = text = AutoConfig.for_model(**config)
    while causal_class(text) is None or whole.model_type in COMPOSITE:
        inside = (getattr(text, name, None) for name in ("text_config", "thinker_config"))
        text = next((part for part in inside if isinstance(part, PreTrainedConfig)), None)
        if text is None:
            raise ValueError(f"no language model in {whole.model_type}")
        if not hasattr(text, "text_config"):
            break
    if hasattr(text, "is_decoder"):
        text.is_decoder = True
    if text is not whole and "tie_word_embeddings" not in inner:
        text.tie_word_embeddings = getattr(whole, "tie_word_embeddings", getattr(text, "tie_word_embeddings", False))
    return text, whole


def causal_class(config: Any) -> Any:
    """Return the causal-LM class of this config, not the class of a multimodal model that contains it; or None."""
    own = CAUSAL.get(config.model_type)
    for name in [own, *CAUSAL.values()]:
        cls = getattr(transformers, name, None) if name and "ConditionalGeneration" not in name else None
        if cls is not None and (cls.config_class is type(config) or (name == own and not type(config).sub_configs)):
            return cls
    return None


def build(text: Any, whole: Any) -> tuple[Any, list[Any]]:
    """Return the model on the meta device, and the modules to count."""
    with no_data():
        if kind := causal_class(text):
            model = kind._from_config(text, dtype=torch.bfloat16, attn_implementation="eager").eval()
            return model, [model]
        auto = next(a for n in AUTO if (a := getattr(transformers, n, None)) and type(whole) in a._model_mapping)
        model = auto.from_config(whole, dtype=torch.bfloat16, attn_implementation="eager").eval()
        return model, [m for m in (model.get_decoder(), model.get_output_embeddings()) if m is not None]


@contextlib.contextmanager
def no_data(model: Any = None) -> Iterator[list[int]]:
    """Replace functions that need data, which the `meta` device does not have.

    Values that would be read are zero, and routed experts return rows of their width. Yields a list that
    collects the layers that store one tensor as both keys and values.
    """

    def experts(self: Any, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return hidden.new_empty(*hidden.shape[:-1], getattr(self, "output_size", hidden.shape[-1]))

    routed = [
        m for m in (model.modules() if model else ()) if type(m).__name__.endswith("Experts") and not isinstance(m, nn.ModuleList)
    ]
    for module in routed:
        module.forward = types.MethodType(experts, module)
    twins: list[int] = []
    cls = transformers.cache_utils.Cache
    originals = cls.update, torch.Tensor.item, torch.Tensor.tolist, torch.Tensor.__bool__

    def update(cache: Any, keys: torch.Tensor, values: torch.Tensor, layer: int, *args: Any, **kwargs: Any) -> Any:
        result = originals[0](cache, keys, values, layer, *args, **kwargs)
        if keys is values and layer < len(cache.layers) and cache.layers[layer].keys is not cache.layers[layer].values:
            twins.append(layer)
        return result

    cls.update = update
    torch.Tensor.item = lambda t: 0 if t.is_meta else originals[1](t)
    torch.Tensor.tolist = lambda t: torch.zeros(t.shape, dtype=t.dtype, device="cpu").tolist() if t.is_meta else originals[2](t)
    torch.Tensor.__bool__ = lambda t: True if t.is_meta else originals[3](t)
    torch.fx.experimental._config.meta_nonzero_assume_all_nonzero = True
    torch.distributions.Distribution.set_default_validate_args(False)
    try:
        with torch.no_grad(), torch.device("meta"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield twins
    finally:
        cls.update, torch.Tensor.item, torch.Tensor.tolist, torch.Tensor.__bool__ = originals
        for module in routed:
            del module.forward


def forward(model: Any, tokens: int) -> tuple[Any, bool]:
    """Return the cache after a prompt, and whether some layer stores one tensor as both keys and values."""
    own = DynamicCache(config=model.config) if model.config.model_type == "recurrent_gemma" else None  # hands none back
    rows = model.num_codebooks if "Musicgen" in type(model).__name__ else 1
    for bare in (False, True):  # some old decoders size their cache from the encoder's depth: those get one that grows
        extra = {"past_key_values": DynamicCache() if bare else own} if bare or own else {}
        try:
            with no_data(model) as twins:
                out = model(input_ids=torch.zeros(rows, tokens, dtype=torch.long), use_cache=True, **extra)
            break
        except (IndexError, ValueError):
            if bare:
                raise
    return next((getattr(out, n) for n in CACHES if getattr(out, n, None) is not None), own), bool(twins)


def layers_of(cache: Any, model: Any) -> list[Any]:
    """Return the cache by layer, wherever the model stores it."""
    if any(hasattr(m, "conv1d_state") for m in model.modules()):  # RecurrentGemma keeps its state in its modules
        blocks = [layer.temporal_block for layer in model.model.layers]
        states = [
            {"conv_states": b.conv1d_state, "recurrent_states": b.rg_lru.recurrent_states} if hasattr(b, "conv1d_state") else None
            for b in blocks
        ]
        return [state or layer for state, layer in zip_longest(states, cache.layers)]
    if cache is None:
        return []
    cache = getattr(cache, "self_attention_cache", cache)
    layers = getattr(cache, "layers", None)
    found = list(layers) if layers is not None else [cache]
    linear = getattr(cache, "linear_cache", ())  # MiniMax keeps its recurrent state beside the layers
    return [{"recurrent_states": e} if torch.is_tensor(e) else layer for layer, e in zip_longest(found, linear)]


def tensors_of(thing: Any, name: str = "", seen: set[int] | None = None) -> Iterator[Tensor]:
    """Yield all floating-point tensors inside a cache layer of any type, without the batch axis."""
    seen = set() if seen is None else seen
    if id(thing) in seen or isinstance(
        thing, str | int | float | PreTrainedConfig | nn.Module | torch.dtype | torch.device | type
    ):
        return
    seen.add(id(thing))
    if isinstance(thing, torch.Tensor):
        if thing.is_floating_point() and (thing.numel() or thing.dim() > 1):
            yield Tensor(name, tuple(thing.shape[1:]), thing.dtype)
        return
    inside = (
        thing
        if isinstance(thing, dict)
        else dict(enumerate(thing))
        if isinstance(thing, list | tuple)
        else getattr(thing, "__dict__", {})
    )
    for key, value in inside.items():
        yield from tensors_of(value, f"{name}.{key}" if name else str(key), seen)
