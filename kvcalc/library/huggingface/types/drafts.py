"""Draft heads: small stacks that read a target's hidden states and borrow its embedding or head.

EAGLE-3 (Li et al. 2025, arXiv 2503.01840) has queries, keys and values over the token's embedding
and the state side by side. It projects three of the target's layers and has its
own vocabulary. P-EAGLE has more layers, only the first so wide, and a state for unknown states.

DFlash, DSpark and Domino draft blocks of tokens over the projected states, which the target's head
scores. DSpark corrects the scores by the token before, Domino by all tokens before in the block.

Sources: SpecForge's specforge/modeling/draft/ (llama3_eagle.py, peagle.py, dflash.py, dspark.py,
domino.py), vLLM's llama_eagle3.py, qwen3_eagle3.py and qwen3_dspark.py, and SGLang's
llama_eagle3.py and llama_eagle.py.
"""

from typing import Any

from kvcalc.library.huggingface.config import Config, Field, show, when
from kvcalc.library.huggingface.shapes import dense, grouped, projections
from kvcalc.library.huggingface.types.entry import Type
from kvcalc.library.huggingface.types.llama import QWEN3

LENT = "only its own weights are counted, without the embedding or head that its target shares"
INERT = (
    "max_window_layers num_target_layers block_size target_model_type norm_output"
    " norm_before_residual pure_draft_prefix_len shift_label projector_type attention_mode"
    " confidence_head_alpha markov_head_type decoder_sparse_step use_aux_hidden_state layer_types"
    " sliding_window rope_is_neox_style use_sliding_window emb_dim gru_hidden_dim markov_rank"
)
ALL_LENT = ("embedding", "lm_head")


# --- EAGLE ---


def states_width(c: Config) -> int:
    """Return the width of the joined states of the target's layers."""
    key = "num_aux_hidden_states"
    layers = c.nested("eagle_config").sizes("eagle_aux_hidden_state_layer_ids")
    count = c.size(key) if c.has(key) else len(layers) or 3
    return count * c.size("target_hidden_size", c.size("hidden_size"))


def has_input_norm(c: Config) -> bool:
    """Return whether one norm is on all states together."""
    return c.nested("eagle_config").flag("norm_before_fc", c.flag("norm_before_fc"))


def joined_states(**vectors: Field) -> dict[str, Field]:
    """Return the projection of the target's states, with norms and further vectors."""
    norms = {
        "fc_norm": lambda c: (
            states_width(c) if c.get("fc_norm") or c.get("use_aux_norm") else None
        ),
        "input_norm": when(has_input_norm, states_width),
    }
    matrices = {"fc": lambda c: (states_width(c), c.size("hidden_size"))}
    return {"extra": projections(matrices, norms | vectors)}


def lent(c: Config) -> tuple[str, ...]:
    """Return the target's parts. Its head scores if the head is tied, as SGLang reads it."""
    has_own_vocab = c.get("draft_vocab_size") not in (None, c.get("vocab_size"))
    return ALL_LENT if c.flag("tie_word_embeddings") and not has_own_vocab else ALL_LENT[:1]


def eagle3(**attention: Field) -> Type:
    """Return EAGLE-3: its first layer attends over two inputs, which have a norm each."""
    return Type(
        grouped(input_size=when("layer_index == 0", "2 * hidden_size"), **attention),
        norms=when("layer_index == 0", 3, 2),
        model={
            "vocab_size": "draft_vocab_size | vocab_size",
            "lent": lent,
            "tie_word_embeddings": False,
        }
        | joined_states(),
        inert=INERT,
    )


# --- DFlash and similar drafts ---


def said(c: Config, key: str, default: Any = None) -> Any:
    """Return a key of `dflash_config`, or of the file itself."""
    inside = c.nested("dflash_config")
    return inside.get(key, c.get(key, default))


def size(c: Config, key: str, default: int | None = None, minimum: int = 1) -> int:
    """Return a size of `dflash_config`, or of the file itself."""
    inside = c.nested("dflash_config")
    return (
        inside.size(key, minimum=minimum) if inside.has(key) else c.size(key, default, minimum)
    )


def context(c: Config) -> tuple[int, int]:
    """Return the projection of chosen layers of the target, by default as many as the draft has."""
    key = "target_layer_ids"
    count = len(c.nested("dflash_config").sizes(key) or c.sizes(key)) or c.layers
    return count * c.size("target_hidden_size", c.size("hidden_size")), c.size("hidden_size")


def qk_norm(c: Config) -> str:
    """Return the norm of queries and keys, which all layers with attention have.

    Raises:
        UserError: The file gives layers another mixer (DSpark's kda and mla).
    """
    modes = c.nested("dflash_config").items("attention_modes") or [
        said(c, "attention_mode", "gqa")
    ]
    if other := next((mode for mode in modes if mode not in ("gqa", "mha")), None):
        raise c.fail("attention_modes", f"{show(other)} is not known here", "Known: gqa, mha")
    return "head"


def has_sinks(c: Config) -> bool:
    """Return whether the softmax has a learned sink, in all layers or in those of this type."""
    kind = "swa" if c.layer_type == "sliding_attention" else "full"
    return c.flag(f"add_{kind}_attention_sink_bias") or bool(said(c, "attention_sink_bias"))


def markov(c: Config) -> dict[str, tuple[int, ...]]:
    """Return DSpark's low-rank logits from the token before, and its guess of the acceptance."""
    width, rank = c.size("hidden_size"), size(c, "markov_rank", 0, 0)
    matrices: dict[str, tuple[int, ...]] = {}
    kind = said(c, "markov_head_type", "vanilla")
    if kind not in ("vanilla", "gated", "rnn"):
        raise c.fail(
            "markov_head_type",
            f"{kind!r} is not known here",
            "Known: vanilla, gated, rnn",
        )
    if rank:
        matrices["markov_out"] = (rank, c.size("vocab_size"))
        if kind == "gated":
            matrices["markov_gate"] = (width + rank, rank, rank)
        elif kind == "rnn":
            matrices["markov_step"] = (2 * rank + width, 3 * rank, 3 * rank)
    if said(c, "enable_confidence_head", bool(said(c, "confidence_head_alpha"))):
        inputs = width + (rank if said(c, "confidence_head_with_markov") else 0)
        matrices["confidence"] = (inputs, 1, 1)
    return matrices


def markov_tables(c: Config) -> dict[str, tuple[int, int]]:
    """Return the rows of the tokens before."""
    rank = size(c, "markov_rank", 0, 0)
    return {"markov_in": (c.size("vocab_size"), rank)} if rank else {}


def recurrent(c: Config) -> dict[str, tuple[int, ...]]:
    """Return Domino's GRU over the tokens of the block, and its way to the vocabulary."""
    width, state, narrow = (
        c.size("hidden_size"),
        size(c, "gru_hidden_dim"),
        size(c, "emb_dim"),
    )
    return {
        "gru_in": (width, 3 * state),
        "gru_state": (state, 3 * state),
        "correction_down": (width + state, narrow),
        "correction_up": (narrow, c.size("vocab_size")),
    }


def block(head: Field = None, tables: Field = None) -> Type:
    """Return a block draft: Qwen3's layers over its own tokens and the projected states."""
    states = projections({"fc": context}, {"hidden_norm": "hidden_size"})
    return QWEN3.variant(
        mixer=grouped(qk_norm=qk_norm, v_head_dim="v_head_dim", sinks=has_sinks),
        model={
            "lent": ALL_LENT,
            "extra": lambda c: (*states(c), *projections(head)(c)),
            "tables": tables,
            "tie_word_embeddings": False,
        },
        defaults={"head_dim": 128},
        inert=INERT,
    )


EAGLE3 = eagle3()
EAGLE3_QWEN3 = eagle3(qk_norm="head")
PEAGLE = joined_states(mask_hidden=states_width)

TYPES = {
    # no norm before attention, no norm at the end, and all else is the target's
    "eagle": Type(
        ffn=dense(bias="mlp_bias"),
        norms=when("layer_index == 0", 1, 2),
        model={
            "final_norm": False,
            "lent": ALL_LENT,
            "extra": projections(
                {
                    "fc": when(
                        "bias | True",
                        "2 * hidden_size, hidden_size, hidden_size",
                        "2 * hidden_size, hidden_size, 0",
                    )
                }
            ),
            "tie_word_embeddings": False,
        },
        inert=INERT,
    ),
    "eagle3": EAGLE3,
    "eagle3_qwen3": EAGLE3_QWEN3,
    "peagle": EAGLE3.variant(model=PEAGLE),
    "peagle_qwen3": EAGLE3_QWEN3.variant(model=PEAGLE),
    "dflash": block(),
    "dspark": block(markov, markov_tables),
    "domino": block(recurrent),
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
