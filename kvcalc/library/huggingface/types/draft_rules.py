"""Rules of draft heads, which `drafts.yaml` names, and the classes that are drafts."""


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
