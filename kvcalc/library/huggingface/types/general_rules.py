"""General rules for a decoder whose model type is not known, and the questions that remain open.

A missing key gets the value of most decoders: as in Llama, with RMS norms, a gated FFN and no
biases. A file with LayerNorm's epsilon and an ungated activation is read as in GPT-2. The result is
marked as ≈. `general.yaml` names the rules.
"""

import re

from kvcalc.errors import UserError, printable
from kvcalc.library.huggingface.config import Config, show
from kvcalc.library.presets import lookup
from kvcalc.records import JsonObject

MAX_KEYS_SHOWN = 12
OTHER_MODALITIES = re.compile(r"""(?x)
    vision|visual|image|audio|video|patch|pixel|mm_|speech|slice_|spatial|frame|projector|
    media|resampler|query_num
""")
OTHER_PARTS = re.compile(r"""(?x)
    ^(quantization|compression|text|vision|visual|audio|vit|projector|mm_projector|rope\w*|
    auto_map|speculators|draft)
    (_config|_cfg|_parameters|_tower|$)|^rope_scaling$|_token_id$
""")
# Keys that say nothing about sizes. The model's notes list other unread keys.
_SILENT = re.compile(r"""(?x)
    _ids?$|_tokens?(_|$)|dropout|eps$|epsilon|activation|hidden_act|^act_|init(?!ial)|
    initializer|rope|rotary|theta|scal[ei]
    |multiplier|temperature|pdrop|jitter|softcap|^output_|^return_|use_cache|^torch|dtype|
    version|architectures|auto_map
    |model_type|_name|gradient|aux|loss|coef|^is_|generation|top_[pk]$|penalty|beam|length$|
    ^max_length|min_length|label|task_
    |problem|norm_topk|scoring|topk_method|n_group|topk_group|pretraining|ep_size|seq_aux|
    prefix|transformers|_std|pruned
    |cross_attention|chunk_size_feed|^do_|early|^finetuning|_impl(ementation)?(_|$)|summary|
    ^use_mem|kernels|alibi|partial
    |qkv_fused|tokenizer|^bf16|^fp16|^fp32|flash|softmax|^mup_|_path$|
    residual_connection_post|fp32_residual|_autoset$
    |router_(dtype|scaling|z_)|routed_scaling|score_func|num_return_sequences|typical_p|
    no_repeat|_commit|scale_attn|onnx
    |_clip|clip_|template|select_|backbone_lora|llm_lora|^_|use_bfloat16|diversity|
    exponential_decay|remove_invalid|bias_dropout
    |mtp|nextn|time_step_(?:min|max|floor|limit)|^swiglu_|num_logits|logn|dynamic_ntk|pos_emb$
""")
# Words of keys that say how much a layer stores, or how often it runs.
_CACHE_WORDS = re.compile(r"""(?x)
    window|latent|lora|index|state|conv|ssm|share|sharing|chunk|compress|kv|linear|recurr|
    mamba|cross|sparse|cache|evict|pool
    |(^|_)cla(_|$)|yoco|left_context|heads(_|$)|head_(dim|size|width)|(dim|size)_head|d_head|
    key_value|loop|recursi|repeat|^ut_|_ut_|expand_[kv]|hidden_ratio
""")
_HARMLESS = re.compile(r"""(?x)
    ^use_cache(_|$)|^chunk_size_feed_forward$|^output_hidden_states$|token_index$|^auto_map$|
    shared_expert|sparse_step
    |_kv_bias$|^kv_channels$|linear_bias$|bias_linear$|_linear_bias|^layer_norm|
    llm_compressor|repeat_ngram|penalty
""")
# Words of keys that say which layers attend, slide or recur.
_ORDER_WORDS = re.compile(r"""(?x)
    layer|attn|attention|swa|slid|interval|every|period|pattern|freq|stride|alternat|
    interleav|hybrid|global|local|full_|mixer
    |order|schedul|span|skip|reuse|radius|band|types$|kinds?$|block_(type|kind)|_per_|first_k
""")
_NO_ORDER = re.compile(r"""(?x)
    drop|eps(ilon)?$|norm|bias|impl(ementation)?$|scal[ei]|scalar|softcap|multiplier|init|
    rope|rotary|theta|mask|fp(16|32)
    |bf16|upcast|dtype|alibi|temperature|logit|clip|position|token|embed|^tie_|activation|
    loss|aux|gate|gating|sink|parallel
    |flash|sdpa|fused|quant|penalty|save|log_|logging|eval|train|rank$|batch|files|step$|
    checkpoint|mtp|nextn|label|^output_
    |^return_|torch|version|resid|precision|expert_(bias|scale)|max_attn_val
""")
_LAYERS = re.compile(r"layers(_|$)|interval|every|pattern")
_FFN_WORDS = re.compile(r"moe|expert|dense|mlp|ffn|feed_forward|first_k")
_PLAIN_ATTENTION = """
    causal softmax full full_attention mha gqa mqa multi_head grouped_query default
"""


def apply_settling_changes(c: Config, changes: list[str]) -> None:
    """Apply the `--set` changes that answer open questions about a config.json of an unknown type.

    An open question is a key that may change sizes and that no reader understands. The applied
    changes are removed from `changes`; all others stay in it. Applied are:

    - `layer_types=5 sliding_attention, full_attention` gives the type of each layer. This list of
    six is repeated until all layers have a type.
    - `sliding_window=512` is the window of these layers, in tokens.
    - `KEY=null` removes a key from the file.

    Args:
        c: The config.json. Its `file` and `outer` are replaced.
        changes: The changes of `--set`, as `KEY=VALUE`.
    """
    keys = dict(c.file)
    for change in list(changes):
        key, _, value = (part.strip() for part in change.partition("="))
        if key == "layer_types":
            keys[key] = _layer_types(value, c)
        elif key == "sliding_window" and value.isdecimal():
            keys[key] = int(value[:9])
        elif value != "null" or not _remove(keys, key):
            continue
        changes.remove(change)
    if c.outer is c.file:
        c.outer = keys
    c.file = keys


def _layer_types(text: str, c: Config) -> list[str]:
    """Return the type of each layer: `2 a, b` makes a, a, b, a, a, b in a stack of six."""
    period = []
    for item in text.split(","):
        match = re.fullmatch(r"\s*(?:(\d{1,4})\s+)?(\w+)\s*", item)
        if not match:
            raise c.fail("layer_types", f"{show(item)} should read like '5 sliding_attention'")
        period += [match[2]] * int(match[1] or 1)
    if not 1 <= len(period) <= c.layers:
        raise c.fail("layer_types", f"names {len(period)} layers of {c.layers}")
    return [period[layer % len(period)] for layer in range(c.layers)]


def _remove(keys: JsonObject, path: str) -> bool:
    """Remove a key, or `KEY.INNER`, from nested mappings. Return whether the key existed."""
    first, _, inner_path = path.partition(".")
    if path in keys:
        del keys[path]
        return True
    if not isinstance(keys.get(first), dict):
        return False
    keys[first] = dict(keys[first])
    return _remove(keys[first], inner_path)


def check_settled(c: Config, model_type: str, unread: list[str]) -> None:
    """Check that no unread key can change the sizes of a model of an unknown type.

    Sizes are those of weights and KV cache. A sliding window is also an open question if no key
    states which layers have it.

    Args:
        c: The config.json, after its layers were read.
        model_type: The `model_type` in the file, for the error message.
        unread: Keys that no reader used. A key inside a mapping is `KEY.INNER`.

    Raises:
        UserError: An unread key may change a size, or no key states which layers have the sliding
            window. The hint names the `--set` changes that answer the question.
    """
    others = [
        key for key in unread if not OTHER_PARTS.search(key) and not key.startswith("mm_")
    ]
    names_layers = c.file.get("layer_types") is not None
    settled = {"sliding_window", "use_sliding_window"} if names_layers else set()
    if c.has("kv_lora_rank"):
        settled |= {"num_key_value_heads", "head_dim", "qk_head_dim"}
    others = [key for key in others if key not in settled]
    storing = [key for key in others if _may_store(c, key)]
    ordering = [key for key in others if key not in storing and _may_order(c, key)]
    window = c.get("sliding_window")
    is_per_layer = isinstance(c.file.get("sliding_window"), list)
    is_on = c.get("use_sliding_window", True) and type(window) is int and window > 0
    if names_layers or is_per_layer or not is_on:
        window = None
    if names_layers:
        ordering = []
    if not storing and not ordering and not window:
        return
    doubtful_keys = [*ordering, *storing] or [
        k for k in others if not is_silent(k) or _LAYERS.search(k)
    ]
    keys = ", ".join(printable(key, 60) for key in doubtful_keys[:MAX_KEYS_SHOWN])
    why = f"keys that may change its cache or weights are not understood: {keys}"
    if window:
        why = (
            f"no key that is understood says which layers have its sliding_window of {window:,}"
        )
        why += f". Not understood: {keys}" if keys else ""
    nulls = "".join(f" --set {key}=null" for key in storing)
    hint = f"Add{nulls} if it changes nothing"
    if window and doubtful_keys:
        order = "--set 'layer_types=5 sliding_attention, full_attention'"
        hint = f"Add {order}{nulls} with the types of its layers"
    elif window:
        hint = "Add --set layer_types=sliding_attention if every layer has it"
    elif len(doubtful_keys) > len(storing):
        hint = f"Add --set layer_types=full_attention{nulls} if every layer attends in full"
    raise UserError(f"model_type {model_type!r} is not known, and {why}", hint, c.file_name)


def is_silent(key: str) -> bool:
    """Return whether an unknown key of config.json changes no weight or cache size, by its name.

    The name is compared with patterns of harmless keys, such as token ids and dropout.

    Args:
        key: Name of the key; a key inside a mapping may be `KEY.INNER`.
    """
    return bool(_SILENT.search(key) or OTHER_MODALITIES.search(key) or OTHER_PARTS.search(key))


def _may_store(c: Config, key: str) -> bool:
    """Return whether a key may change the cache or the weights of layers.

    Examples: `num_kv_shared_layers: 4`, `moe_every: 2`, and a number for each layer.
    """
    if _CACHE_WORDS.search(key):
        return not _HARMLESS.search(key)
    if _FFN_WORDS.search(key) and _ORDER_WORDS.search(key):
        return not _NO_ORDER.search(key)
    value = lookup(c.file, tuple(key.split(".")))
    return (
        isinstance(value, list)
        and len(value) == c.layers > 1
        and not (_ORDER_WORDS.search(key) or is_silent(key))
    )


def _may_order(c: Config, key: str) -> bool:
    """Return whether a key may determine the types of layers, judged by its words or its value.

    Examples: `global_attn_every_n_layers: 6`, `special: [5, 11]`, `plan: "LLLG"`.
    """
    if any(OTHER_MODALITIES.search(part) for part in key.split(".")):
        return False
    value = lookup(c.file, tuple(key.split(".")))
    if _ORDER_WORDS.search(key) and not _NO_ORDER.search(key):
        return not (isinstance(value, str) and value.lower() in _PLAIN_ATTENTION.split())
    if is_silent(key):
        return False
    if isinstance(value, list):
        return any(not isinstance(item, str) for item in value) or len({*value}) < len(value)
    return isinstance(value, str) and len(value) >= 4 and 2 * len({*value}) <= len(value)


ACTIVATIONS = "hidden_act hidden_activation activation_function activation activation_type"
UNGATED = "gelu gelu_new gelu_fast quick_gelu relu relu2 relu_squared gelu_python"
EPSILONS = "layer_norm_epsilon layer_norm_eps layernorm_epsilon ln_eps"


def first_word(c: Config, *keys: str) -> str:
    """Return the first text among the values of some keys of config.json, in lower case; or ''.

    Args:
        c: The config.json.
        keys: Keys whose values are tried, in this order. Values that are no text are skipped.
    """
    return next((value.lower() for key in keys if isinstance(value := c.get(key), str)), "")


def has_layer_norms(c: Config) -> bool:
    """Return whether the model's norms are LayerNorms. If not, they are RMSNorms.

    The name of the norm in config.json decides, such as `norm_type: layernorm`, or a switch such as
    `use_rms_norm`. Without both, the name of the epsilon key decides: `layer_norm_eps` means
    LayerNorm, and `rms_norm_eps` RMSNorm. Without all of them the result is False.
    """
    kind = first_word(c, "norm_type", "layer_norm_type", "normalization_type")
    switches = [c.get(key) for key in ("rmsnorm", "use_rmsnorm", "use_rms_norm")]
    if "rms" in kind or True in switches:
        return False
    return "layer" in kind or (c.has(*EPSILONS.split()) and not c.has("rms_norm_eps"))


def is_gated(c: Config) -> bool:
    """Return whether the FFN has a gate matrix, judged by the activation function in config.json.

    The result is False for ReLU and GELU without a gate, such as `relu`, `relu2` or `gelu_new`. It
    is True for any other activation, and if the file names none.
    """
    return first_word(c, *ACTIVATIONS.split()) not in UNGATED.split()
