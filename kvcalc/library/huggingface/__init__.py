"""Read Hugging Face config.json files of causal language models exactly, or refuse them."""

from kvcalc.library.huggingface.reader import model_from, read_config

__all__ = ["model_from", "read_config"]
