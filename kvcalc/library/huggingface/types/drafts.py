"""Draft heads: small stacks that read a target's hidden states and borrow its embedding, or its head too.

EAGLE-3 (Li et al. 2025, arXiv 2503.01840): queries, keys and values over the token's embedding and the state side by side,
a projection of three of the target's layers, a head over a vocabulary of its own. P-EAGLE: more layers, of which the first
alone is so wide, and a state that stands for what is not known yet. DFlash, DSpark and Domino: blocks of tokens at once over
the projected states, scored by the target's head, which DSpark corrects by the token before and Domino by all before it in
the block. After SpecForge's specforge/modeling/draft/ (llama3_eagle.py, peagle.py, dflash.py, dspark.py, domino.py), vLLM's
llama_eagle3.py, qwen3_eagle3.py and qwen3_dspark.py, and SGLang's llama_eagle3.py and llama_eagle.py.
"""

from typing import Any

from kvcalc.library.huggingface.config import Config, show
from kvcalc.library.huggingface.fields import Field, K
from kvcalc.library.huggingface.patterns import slides
from kvcalc.library.huggingface.shapes import both, dense, grouped, nothing, projections
from kvcalc.library.huggingface.types.decoders import QWEN3
from kvcalc.library.huggingface.types.entry import Type

BIAS = K("attention_bias")
LENT = "its own weights alone are counted; what its target lends (the embedding, or head too) is not"
INERT = (
    "max_window_layers", "num_target_layers", "block_size", "target_model_type", "norm_output", "norm_before_residual",
    "pure_draft_prefix_len", "shift_label", "projector_type", "attention_mode", "confidence_head_alpha", "markov_head_type",
    "decoder_sparse_step", "use_aux_hidden_state", "layer_types", "sliding_window", "rope_is_neox_style", "use_sliding_window",
    "emb_dim", "gru_hidden_dim", "markov_rank",
)  # fmt: skip


def target_width(c: Config) -> int:
    """The width of the target's hidden states."""
    return c.size("target_hidden_size", c.size("hidden_size"))


# --- EAGLE ---


def features(c: Config) -> int:
    """How many of the target's layers are joined."""
    if c.has("num_aux_hidden_states"):
        return c.size("num_aux_hidden_states")
    return len(c.nested("eagle_config").sizes("eagle_aux_hidden_state_layer_ids")) or 3


def joined(c: Config) -> dict[str, tuple[int, int]]:
    """The projection of the target's states."""
    return {"fc": (features(c) * target_width(c), c.size("hidden_size"))}


def joined_norms(c: Config) -> dict[str, int]:
    """Norms on those states, each by itself or all together."""
    each = c.get("fc_norm") or c.get("use_aux_norm")
    together = c.nested("eagle_config").flag("norm_before_fc", c.flag("norm_before_fc"))
    width = features(c) * target_width(c)
    return ({"fc_norm": width} if each else {}) | ({"input_norm": width} if together else {})


def eagle3(**attention: Field) -> Type:
    """EAGLE-3: attention over two widths in the first layer, whose two inputs have a norm each."""
    return Type(
        grouped(BIAS, input_size=lambda c: None if c.layer else 2 * c.size("hidden_size"), **attention),
        dense(),
        norms=lambda c: 2 if c.layer else 3,
        model={
            "vocab_size": lambda c: c.size("draft_vocab_size", c.size("vocab_size")),
            "lent": lambda c: ("embedding", "lm_head") if _no_head(c) else ("embedding",),
            "extra": projections(joined, joined_norms),
            "tie_word_embeddings": False,
        },
        inert=INERT,
    )


def _no_head(c: Config) -> bool:
    """Whether the target's head scores: where it is tied, as SGLang reads it."""
    return c.flag("tie_word_embeddings") and c.get("draft_vocab_size") in (None, c.get("vocab_size"))


EAGLE3 = eagle3()
PEAGLE = EAGLE3.variant(
    model={"extra": projections(joined, lambda c: {**joined_norms(c), "mask_hidden": features(c) * target_width(c)})}
)
EAGLE = Type(  # the first: no norm before attention, none at the end, and all else is the target's
    grouped(BIAS),
    dense(bias=K("mlp_bias")),
    norms=lambda c: 2 if c.layer else 1,
    model={
        "final_norm": False,
        "lent": ("embedding", "lm_head"),
        "extra": projections(
            lambda c: {"fc": (2 * c.size("hidden_size"), c.size("hidden_size"), c.flag("bias", True) * c.size("hidden_size"))}
        ),
        "tie_word_embeddings": False,
    },
    inert=INERT,
)

# --- DFlash and what grew from it ---


def said(c: Config, key: str, default: Any = None) -> Any:
    """A key of `dflash_config`, or of the file itself."""
    inside = c.nested("dflash_config")
    return inside.get(key, c.get(key, default))


def size(c: Config, key: str, default: int | None = None, least: int = 1) -> int:
    """The same where it is a whole number."""
    inside = c.nested("dflash_config")
    return inside.size(key, least=least) if inside.has(key) else c.size(key, default, least)


def context(c: Config) -> dict[str, tuple[int, int]]:
    """The projection of the chosen layers of the target; as many as the draft has unless they are named."""
    chosen = len(c.nested("dflash_config").sizes("target_layer_ids") or c.sizes("target_layer_ids")) or c.layers
    return {"fc": (chosen * target_width(c), c.size("hidden_size"))}


def attends(c: Config) -> Field:
    """Whether a layer has norms on the heads of queries and keys, as all of them do that attend.

    Raises UserError where the file gives layers another mixer (DSpark's kda and mla).
    """
    modes = c.nested("dflash_config").items("attention_modes") or [said(c, "attention_mode", "gqa")]
    if other := next((mode for mode in modes if mode not in ("gqa", "mha")), None):
        raise c.fail("attention_modes", f"{show(other)} is not known here", "Known: gqa, mha")
    return "head"


def markov(c: Config) -> dict[str, tuple[int, ...]]:
    """DSpark's logits from the token before, through a low rank, and its guess of what will be accepted."""
    width, rank = c.size("hidden_size"), size(c, "markov_rank", 0, 0)
    found: dict[str, tuple[int, ...]] = {"markov_out": (rank, c.size("vocab_size"))} if rank else {}
    kind = said(c, "markov_head_type", "vanilla")
    if rank and kind == "gated":
        found["markov_gate"] = (width + rank, rank, rank)
    elif rank and kind == "rnn":
        found["markov_step"] = (2 * rank + width, 3 * rank, 3 * rank)
    elif kind != "vanilla":
        raise c.fail("markov_head_type", f"{kind!r} is not known here", "Known: vanilla, gated, rnn")
    if said(c, "enable_confidence_head", bool(said(c, "confidence_head_alpha"))):
        found["confidence"] = (width + (rank if said(c, "confidence_head_with_markov") else 0), 1, 1)
    return found


def recurrent(c: Config) -> dict[str, tuple[int, ...]]:
    """Domino's GRU over the tokens of the block, and its way to the vocabulary."""
    width, state, narrow = c.size("hidden_size"), size(c, "gru_hidden_dim"), size(c, "emb_dim")
    return {
        "gru_in": (width, 3 * state),
        "gru_state": (state, 3 * state),
        "correction_down": (width + state, narrow),
        "correction_up": (narrow, c.size("vocab_size")),
    }


def sinks(c: Config) -> bool:
    """Whether a layer's softmax has a learned sink: said of all layers, or of those that slide and of the others."""
    return c.flag("add_swa_attention_sink_bias" if slides(c) else "add_full_attention_sink_bias") or bool(
        said(c, "attention_sink_bias")
    )


def block(head: Field = lambda c: {}, tables: Field = lambda c: {}) -> Type:
    """A block draft: Qwen3's layers over its own tokens and the projected states."""
    return QWEN3.variant(
        mixer=grouped(BIAS, qk_norm=attends, v_head_dim=K("v_head_dim"), sinks=sinks),
        model={
            "lent": ("embedding", "lm_head"),
            "extra": both(projections(context, lambda c: {"hidden_norm": c.size("hidden_size")}), _extra(head)),
            "tables": tables,
            "tie_word_embeddings": False,
        },
        defaults={"head_dim": 128},
        inert=INERT,
    )


def _extra(head: Field) -> Any:
    return lambda c: projections(head)(c) if head(c) else nothing(c)


DFLASH = block()
DSPARK = block(
    markov,
    lambda c: {"markov_in": (c.size("vocab_size"), size(c, "markov_rank"))} if size(c, "markov_rank", 0, 0) else {},
)
DOMINO = block(recurrent)

TYPES = {
    "eagle": EAGLE,
    "eagle3": EAGLE3,
    "eagle3_qwen3": eagle3(qk_norm="head"),
    "peagle": PEAGLE,
    "peagle_qwen3": eagle3(qk_norm="head").variant(model={"extra": PEAGLE.model["extra"]}),
    "dflash": DFLASH,
    "dspark": DSPARK,
    "domino": DOMINO,
}
DRAFTS = {
    "LlamaForCausalLMEagle": "eagle",
    "EagleLlamaForCausalLM": "eagle",
    "LlamaForCausalLMEagle3": "eagle3",
    "Eagle3LlamaForCausalLM": "eagle3",
    "Eagle3MiniMaxM2ForCausalLM": "eagle3",
    "Eagle3Qwen2_5vlForCausalLM": "eagle3",
    "Eagle3Qwen3vlForCausalLM": "eagle3",
    "Eagle3Qwen3ForCausalLM": "eagle3_qwen3",
    "PEagleDraftModel": "peagle",
    "PeagleLlamaForCausalLM": "peagle",
    "PeagleQwen3ForCausalLM": "peagle_qwen3",
    "DFlashDraftModel": "dflash",
    "DSparkDraftModel": "dspark",
    "Qwen3DSparkModel": "dspark",
    "DominoDraftModel": "domino",
}
