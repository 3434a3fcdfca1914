"""Rules of draft heads, which `drafts.yaml` names, and the classes that are drafts."""

from kvcalc.library.huggingface.config import Config, show

NOTE = "only its own weights are counted, without the embedding or head that its target shares"
CLASSES = {
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
Matrices = dict[str, tuple[int, ...]]


def states_width(c: Config) -> int:
    """Return the width of the joined states of the target's layers."""
    key = "num_aux_hidden_states"
    layers = c.nested("eagle_config").sizes("eagle_aux_hidden_state_layer_ids")
    count = c.size(key) if c.has(key) else len(layers) or 3
    return count * c.size("target_hidden_size", c.size("hidden_size"))


def has_input_norm(c: Config) -> bool:
    """Return whether one norm covers all joined states of the target."""
    return c.nested("eagle_config").flag("norm_before_fc", c.flag("norm_before_fc"))


def state_norms(c: Config) -> int | None:
    """Return the elements of the norms on the states of each target layer."""
    return states_width(c) if c.get("fc_norm") or c.get("use_aux_norm") else None


def target_parts(c: Config) -> tuple[str, ...]:
    """Return the parts of the target (`embedding`, `lm_head`) that the draft uses.

    If the draft's head is tied, the target's LM head is used, as in SGLang.
    """
    has_own_vocab = c.get("draft_vocab_size") not in (None, c.get("vocab_size"))
    has_own_head = has_own_vocab or not c.flag("tie_word_embeddings")
    return ("embedding",) if has_own_head else ("embedding", "lm_head")


def dflash_states(c: Config) -> tuple[int, int]:
    """Return the projection of the states of some target layers, by default one target layer per
    draft layer."""
    key = "target_layer_ids"
    count = len(c.sizes(key)) or c.layers
    return count * c.size("target_hidden_size", c.size("hidden_size")), c.size("hidden_size")


def dflash_qk_norm(c: Config) -> str:
    """Return the form of the norms of queries and keys in DFlash drafts.

    Raises:
        UserError: The file gives layers another mixer (DSpark's kda and mla).
    """
    modes = c.items("attention_modes")
    for mode in modes or [c.get("attention_mode", "gqa")]:
        if mode not in ("gqa", "mha"):
            text = f"{show(mode)} is not known here"
            raise c.fail("attention_modes", text, "Known: gqa, mha")
    return "head"


def has_sinks(c: Config) -> bool:
    """Return whether the softmax has a learned sink, in all layers or in layers of this type."""
    kind = "swa" if c.layer_type == "sliding_attention" else "full"
    has_own = c.flag(f"add_{kind}_attention_sink_bias")
    return has_own or bool(c.get("attention_sink_bias"))


def markov_matrices(c: Config) -> Matrices:
    """Return the matrices of DSpark's low-rank logits from the previous token, and of its
    acceptance estimate."""
    width = c.size("hidden_size")
    rank = c.size("markov_rank", 0, 0)
    kind = c.get("markov_head_type", "vanilla")
    if kind not in ("vanilla", "gated", "rnn"):
        text = f"{kind!r} is not known here"
        raise c.fail("markov_head_type", text, "Known: vanilla, gated, rnn")
    matrices: Matrices = {}
    if rank:
        matrices["markov_out"] = (rank, c.size("vocab_size"))
        if kind == "gated":
            matrices["markov_gate"] = (width + rank, rank, rank)
        elif kind == "rnn":
            matrices["markov_step"] = (2 * rank + width, 3 * rank, 3 * rank)
    if c.get("enable_confidence_head", bool(c.get("confidence_head_alpha"))):
        inputs = width + (rank if c.get("confidence_head_with_markov") else 0)
        matrices["confidence"] = (inputs, 1, 1)
    return matrices


def markov_tables(c: Config) -> Matrices:
    """Return DSpark's table, which has one row for each possible previous token."""
    rank = c.size("markov_rank", 0, 0)
    return {"markov_in": (c.size("vocab_size"), rank)} if rank else {}


def domino_matrices(c: Config) -> Matrices:
    """Return the matrices of Domino's GRU over the tokens of a block, and its projections to the
    vocabulary."""
    width = c.size("hidden_size")
    state = c.size("gru_hidden_dim")
    narrow = c.size("emb_dim")
    return {
        "gru_in": (width, 3 * state),
        "gru_state": (state, 3 * state),
        "correction_down": (width + state, narrow),
        "correction_up": (narrow, c.size("vocab_size")),
    }
