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


def markov_kind(c: Config) -> str:
    """Return the kind of DSpark's head that corrects the scores by the token before."""
    kind = c.word("markov_head_type", "vanilla")
    if kind not in ("vanilla", "gated", "rnn"):
        text = f"{show(kind)} is not known here"
        raise c.fail("markov_head_type", text, "Known: vanilla, gated, rnn")
    return kind


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
