"""Consume the tensors of one block of a GGUF file: each tensor once, with its expected shape."""

from kvcalc.library.gguf import TensorInfo
from kvcalc.library.gguf_fields import Fields
from kvcalc.storage.gguf import tensor_bytes


class Block:
    """The remaining tensors of a block, and the format of each weight built from the others.

    Raises:
        UserError: A tensor is missing, or its shape differs from the metadata.
    """

    def __init__(self, fields: Fields, number: int, tensors: dict[str, TensorInfo]) -> None:
        self.fields, self.number, self.left = fields, number, dict(tensors)
        self.stored: list[tuple[str, str]] = []

    def size(self, key: str, default: int | None = None) -> int:
        """Return a number from the metadata for this block, at least 1."""
        found = self.fields.size(key, default, self.number)
        if not found:
            raise self.fields.fail(f"block {self.number}: {key} is 0")
        return found

    def take(self, name: str, *shape: int) -> TensorInfo:
        """Consume a required tensor of this shape; 0 accepts any length."""
        found = self.left.pop(f"{name}.weight", None)
        if found is None:
            raise self.fields.fail(f"tensor blk.{self.number}.{name}.weight is missing")
        if shape and (len(shape) != len(found.shape) or any(n and n != m for n, m in zip(shape, found.shape, strict=True))):
            wanted = ", ".join(str(n or "any") for n in shape)
            raise self.fields.fail(f"tensor {found.name} has the shape {list(found.shape)}, not [{wanted}]")
        return found

    def matrix(self, weight: str, name: str, *shape: int) -> TensorInfo:
        """Consume a tensor that is one weight."""
        found = self.take(name, *shape)
        self.stored.append((weight, found.type))
        return found

    def pieces(self, weight: str, *pieces: tuple[TensorInfo, int]) -> None:
        """Record a weight that consists of rows of several tensors, as (tensor, number of rows)."""
        types = list(dict.fromkeys(tensor.type for tensor, _ in pieces))
        held = sum(tensor_bytes(tensor.type, tensor.shape[0], rows) for tensor, rows in pieces)
        elements = sum(tensor.shape[0] * rows for tensor, rows in pieces)
        self.stored.append((weight, types[0] if len(types) == 1 else f"{'_'.join(types)}@{held}/{elements}"))

    def has(self, name: str) -> bool:
        """Return whether a tensor has not been consumed."""
        return f"{name}.weight" in self.left

    def bias(self, name: str) -> bool:
        """Return whether a tensor has a bias, and consume the bias."""
        return self.left.pop(f"{name}.bias", None) is not None

    def alike(self, *names: str) -> bool:
        """Return whether these tensors have biases, and consume the biases.

        Raises:
            UserError: Only some of the tensors have a bias.
        """
        found = {self.bias(name) for name in names}
        if len(found) > 1:
            raise self.fields.fail(f"block {self.number} has a bias on some of {', '.join(names)} alone")
        return found.pop()

    def vector(self, name: str) -> int:
        """Consume a vector and return its number of elements; 0 if it is absent."""
        found = self.left.pop(f"{name}.weight", None) or self.left.pop(name, None)
        return found.elements if found else 0
