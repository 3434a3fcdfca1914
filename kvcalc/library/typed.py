"""A model with known dimensions only: its cache can be computed, its weights cannot."""

from typing import Any

import msgspec

from kvcalc.errors import UserError
from kvcalc.layers.attention import Grouped, Latent
from kvcalc.model.size import size_record
from kvcalc.model.spec import Layer, Model

UNKNOWN = (
    "parameters", "active_parameters", "parameters_exact", "mtp_parameters", "weight_bytes", "dtype", "cache_share_of_weights",
    "equal_weights_context",
)  # fmt: skip


class Dimensions(msgspec.Struct, frozen=True):
    """The dimensions of layers of one kind; 0 means that the user did not give the value.

    Layers have KV heads of head_dim, or latents of kv_lora_rank and a RoPE key of qk_rope_head_dim.

    Attributes:
        hidden_size: Replaces the number of KV heads, for MHA whose keys and values together are as
            wide as the model.
        heads: Number of query heads, for the comparison with MHA.
        sliding_window: Largest number of tokens that a layer stores.
    """

    layers: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    hidden_size: int = 0
    heads: int = 0
    sliding_window: int = 0
    kv_lora_rank: int = 0
    qk_rope_head_dim: int = 0

    def given(self) -> bool:
        """Return whether any dimension is given."""
        return any(msgspec.structs.astuple(self))

    def split(self) -> "Dimensions":
        """Return these dimensions with the number of KV heads derived from the hidden size.

        The number equals the number of query heads, or is 1 if that is unknown.

        Raises:
            UserError: The heads do not divide the hidden size, or KV heads are given too.
        """
        if not self.hidden_size:
            return self
        if self.kv_heads or self.head_dim or self.kv_lora_rank:
            raise UserError("--hidden-size is of MHA as wide as the model, in place of --kv-heads, --head-dim and --kv-lora-rank")
        heads = max(1, self.heads)
        if self.hidden_size % heads:
            raise UserError(f"--hidden-size {self.hidden_size} is not a multiple of --heads {heads}")
        width = self.hidden_size // heads
        return msgspec.structs.replace(self, hidden_size=0, kv_heads=heads, head_dim=width)

    def model(self) -> Model:
        """Return a model of these layers, named by its cache contents. Raises UserError as `checked`."""
        return self.checked()._of(self._name())

    def compared(self) -> Model:
        """Return a model of these layers, named by their number, for a change of its attention.

        Raises:
            UserError: As `checked`, or the number of query heads is missing.
        """
        found = self.checked()
        missing = [_option(name) for name in ("heads", "head_dim") if not getattr(found, name)]
        if missing:
            hint = "Write --layers 32 --heads 32 --kv-heads 8 --head-dim 128"
            raise UserError(f"other attention of these layers needs {' and '.join(missing)}", hint=hint)
        return found._of(f"{self.layers} layers")

    def checked(self) -> "Dimensions":
        """Return these dimensions after `split`.

        Raises:
            UserError: A value is missing, contradicts another or is outside its range.
        """
        for name, value in msgspec.structs.asdict(self).items():
            most = 100_000 if name == "layers" else 10**8
            if not 0 <= value <= most:
                raise UserError(f"{_option(name)} {value} is outside 1 to {most:,}")
        if self.hidden_size and self.layers:
            return self.split()
        needed: tuple[str, ...] = ("layers", "kv_lora_rank") if self.kv_lora_rank else ("layers", "kv_heads", "head_dim")
        needed = ("layers",) if self.hidden_size else needed
        missing = [_option(name) for name in needed if not getattr(self, name)]
        if missing:
            hint = "Write --layers 48 --kv-heads 56 --head-dim 128, or --layers 61 --kv-lora-rank 512 --qk-rope-head-dim 64"
            if missing == ["--kv-heads"] and self.heads:
                hint = f"With --kv-heads {self.heads} it is multi-head attention"
            raise UserError(f"a cache by its dimensions needs {' and '.join(missing)}", hint=hint)
        if self.kv_lora_rank and self.kv_heads:
            raise UserError("a layer keeps --kv-heads or --kv-lora-rank, not both")
        if self.qk_rope_head_dim and not self.kv_lora_rank:
            raise UserError("--qk-rope-head-dim is of a latent, and there is no --kv-lora-rank")
        return self

    def _of(self, name: str) -> Model:
        layer = Layer(parts=(self._mixer(),))
        found = Model(name=name, hidden_size=1, vocab_size=1, layers=self.layers, kinds={"layer": layer})
        key, problem = found.problem()
        if problem:
            raise UserError(problem, key)
        return found

    def _mixer(self) -> Grouped | Latent:
        window = self.sliding_window or None
        if not self.kv_lora_rank:
            return Grouped(
                num_attention_heads=self.heads or self.kv_heads, num_key_value_heads=self.kv_heads, head_dim=self.head_dim,
                sliding_window=window,
            )  # fmt: skip
        width = self.head_dim or 1
        return Latent(
            num_attention_heads=self.heads or 1, kv_lora_rank=self.kv_lora_rank, qk_nope_head_dim=width,
            qk_rope_head_dim=self.qk_rope_head_dim, v_head_dim=width, sliding_window=window,
        )  # fmt: skip

    def _name(self) -> str:
        if self.kv_lora_rank:
            return f"{self.layers} layers of {self.kv_lora_rank} + {self.qk_rope_head_dim}"
        if self.hidden_size:
            return f"{self.layers} layers of {self.hidden_size}"
        return f"{self.layers} layers of {self.kv_heads} × {self.head_dim}"

    def record(self, model: Model, *how: Any) -> dict[str, Any]:
        """Return the `size_record` of such a model; figures that need weights are null.

        The ratio to MHA is included only if the number of query heads is given.
        """
        record = size_record(model, *how) | dict.fromkeys(UNKNOWN)
        if not self.heads or (self.kv_lora_rank and not self.head_dim):
            record["mha_ratio"] = None
        if not (self.heads or self.kv_lora_rank):
            record["attention"] = f"{self.kv_heads} KV heads" if self.kv_heads else "MHA"
        return record


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"
