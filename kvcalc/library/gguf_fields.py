"""Look up typed metadata of a GGUF file under the name of its architecture."""

from collections.abc import Iterable
from typing import Any

from kvcalc.errors import UserError, printable
from kvcalc.library.gguf import TensorInfo

MOST, MOST_LAYERS = 10**8, 2_000
# Period of full-attention layers. With 6, layers 0-4 use a sliding window and layer 5 does not.
# With 0, no layer uses a window, even if the file has the key. Source: llama.cpp's
# src/models/*.cpp (`load_swa_pattern`). exaone4 uses windows only with 64 layers
# (`load_arch_hparams` there).
_PERIODS = {
    "gemma2": 2, "gemma3": 6, "gemma3n": 5, "gpt-oss": 2, "cohere2": 4, "exaone4": 4, "exaone-moe": 4, "olmo2": 4, "llama4": 4,
    "afmoe": 4, "mellum": 4, "plamo3": 8, "phi3": 0, "phimoe": 0,
}  # fmt: skip
_CHUNK = 8192  # tokens, for llama4; no key contains it


class Fields:
    """The metadata of one file.

    Attributes:
        layers: Number of layers, without layers that predict further tokens.
        width: Width of the residual stream.
    """

    def __init__(self, metadata: dict[str, Any], where: str) -> None:
        self.metadata, self.where = metadata, where
        family = metadata.get("general.architecture")
        if not isinstance(family, str) or not family.isprintable() or not 0 < len(family) <= 60:
            raise self.fail("its metadata do not say what general.architecture it has")
        self.family = family
        self.layers = self.size("block_count", most=MOST_LAYERS) - self.size("nextn_predict_layers", 0)
        self.width = self.size("embedding_length")
        if self.layers < 1 or self.width < 1:
            raise self.fail("it has no layers, or none of any width")

    def fail(self, text: str, hint: str = "") -> UserError:
        """Return an error about this file."""
        return UserError(text, self.where, hint)

    def has(self, key: str) -> bool:
        """Return whether the metadata contain this key."""
        return f"{self.family}.{key}" in self.metadata

    def size(self, key: str, default: int | None = None, layer: int = -1, most: int = MOST) -> int:
        """Return a whole number from 0 up; from a list, the entry of this layer.

        Raises:
            UserError: The key is missing or its value is not a whole number.
        """
        full = f"{self.family}.{key}"
        value = self.metadata.get(full, default)
        if value is None:
            raise self.fail(f"its metadata have no {full}")
        if isinstance(value, list) and 0 <= layer < len(value):
            value = value[layer]
        if type(value) is not int or not 0 <= value <= most:
            raise self.fail(f"{full}: {printable(str(value), 40)} is no whole number from 0 to {most:,}")
        return value

    def window(self, layer: int) -> int:
        """Return the window or chunk of a layer in tokens, or 0 for full attention.

        Raises:
            UserError: The layers that have the window are not known.
        """
        if self.family == "exaone4" and self.layers != 64:
            return 0
        default = {"gemma2": 4096, "exaone4": 4096}.get(self.family, 0)
        tokens = _CHUNK if self.family == "llama4" else self.size("attention.sliding_window", default)
        if not tokens:
            return 0
        pattern = self.metadata.get(f"{self.family}.attention.sliding_window_pattern", _PERIODS.get(self.family))
        if isinstance(pattern, list) and layer < len(pattern):
            return tokens if pattern[layer] else 0
        if type(pattern) is not int or pattern < 0:
            raise self.fail(f"it is not known which layers of {self.family!r} have the window of {tokens:,} tokens")
        return tokens if pattern and layer % pattern < pattern - 1 else 0

    def refuse(self, left: Iterable[TensorInfo]) -> None:
        """Raise UserError if any tensors were not understood."""
        names = [printable(tensor.name, 60) for tensor in left]
        if names:
            more = f" and {len(names) - 3:,} more" if len(names) > 3 else ""
            hint = "Its config.json, or a preset of the same model, may be read instead"
            raise self.fail(f"tensors of {self.family!r} are not understood: {', '.join(names[:3])}{more}", hint)
