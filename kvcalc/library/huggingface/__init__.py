"""Hugging Face config.json files of causal language models, read exactly or refused with a reason."""

from kvcalc.library.huggingface.reader import model_from, read_config

__all__ = ["model_from", "read_config"]
